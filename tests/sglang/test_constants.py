"""What the adapter and the emulator take for SGLang's constants, read from the sources of the installed wheel.

No server is started and nothing of it is imported: the sources are parsed, or run by the environment's own Python.
"""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from engines import kv_events, sglang, sglang_facts, sglang_versions, sglang_wire
from engines.emulator import app as emulator
from engines.emulator import bootstrap, contract, core, decode_node, info, parse, wire
from engines.kv_types import Medium
from engines.sglang_process import NoEnvironment, load
from engines.types import Role
from engines.upstream import Upstream

_FIND = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"

Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Wheel:
    """The sources of an installed sglang, as text and as trees."""

    def __init__(self, python: str, root: Path) -> None:
        self.python = python
        self._root = root

    @cache  # noqa: B019 (one wheel a session)
    def text(self, path: str) -> str:
        return (self._root / path).read_text()

    @cache  # noqa: B019
    def tree(self, path: str) -> ast.Module:
        return ast.parse(self.text(path))

    def find(self, path: str, name: str) -> Named:
        """The first class or function of this name, wherever it is in the file."""
        found = [node for node in ast.walk(self.tree(path)) if isinstance(node, Named) and node.name == name]
        assert found, f"{path} has no {name} any more"
        return found[0]

    def source(self, path: str, name: str) -> str:
        """Its code in one normal form, without its docstrings' layout or comments."""
        return ast.unparse(self.find(path, name))

    def fields(self, path: str, name: str) -> dict[str, str]:
        """The annotated fields of a class, each with its default as code ("" where it has none)."""
        body = self.find(path, name).body
        named = [node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        return {node.target.id: ast.unparse(node.value) if node.value else "" for node in named}  # type: ignore[union-attr]

    def assigned(self, path: str, name: str) -> str:
        """What is assigned to a plain name, or to an attribute of self, as code."""
        for node in ast.walk(self.tree(path)):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if target is not None and ast.unparse(target) in (name, f"self.{name}") and getattr(node, "value", None):
                return ast.unparse(node.value)  # type: ignore[attr-defined]
        raise AssertionError(f"{path} assigns no {name} any more")

    def environment_default(self, name: str) -> Any:
        """The default of a variable of `environ.py`: `NAME = EnvInt(5)`."""
        made = ast.parse(self.assigned("srt/environ.py", name), mode="eval").body
        assert isinstance(made, ast.Call)
        return ast.literal_eval(made.args[0])

    def argument_default(self, name: str) -> Any:
        """The default of a server argument."""
        for file in sorted((self._root / "srt/arg_groups/fields").glob("*.py")):
            for node in ast.walk(self.tree(str(file.relative_to(self._root)))):
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None:
                    return ast.literal_eval(node.value)
        raise AssertionError(f"there is no argument {name} any more")

    def arguments(self) -> set[str]:
        """The names of all server arguments."""
        files = (self._root / "srt/arg_groups/fields").glob("*.py")
        trees = [self.tree(str(file.relative_to(self._root))) for file in files]
        classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        named = [node.target for each in classes for node in each.body if isinstance(node, ast.AnnAssign)]
        return {ast.unparse(target) for target in named}

    def run(self, code: str) -> str:
        """Run by the environment's own Python, with nothing but its standard library."""
        done = subprocess.run([self.python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel() -> Wheel:
    try:
        python = load().python
    except NoEnvironment as error:
        pytest.skip(f"SGLang's own constants are not checked: {error}")
    found = subprocess.run([python, "-I", "-c", _FIND], capture_output=True, text=True, timeout=60, check=True)
    return Wheel(python, Path(found.stdout.strip()))


COMMON, DECODE, UTILS = ("srt/disaggregation/" + name for name in ("common/conn.py", "decode.py", "utils.py"))
HTTP, TOKENIZER, SCHEDULER = (
    "srt/entrypoints/http_server.py",
    "srt/managers/tokenizer_manager.py",
    "srt/managers/scheduler.py",
)
PROTOCOL, EVENTS, TYPES = "srt/entrypoints/openai/protocol.py", "srt/disaggregation/kv_events.py", "api/v1/api_types.py"


# ---- versions --------------------------------------------------------------------------------------------------------


def test_the_installed_version_is_the_newest_that_we_know(wheel: Wheel) -> None:
    version = wheel.run("import importlib.metadata as m; print(m.version('sglang'))")
    assert sglang_versions.is_known(version), f"read the sources of SGLang {version}, and add its row"
    assert info.VERSION == sglang_versions.NEWEST


def test_a_decode_reads_these_fields_of_a_prefill_and_no_other(wheel: Wheel) -> None:
    assert set(wheel.fields(COMMON, "PrefillServerInfo")) == sglang_versions.ROWS[-1].route_fields
    assert "PrefillServerInfo(**data)" in wheel.source(COMMON, "try_ensure_parallel_info")


def test_what_a_decode_compares_of_its_prefill(wheel: Wheel) -> None:
    """Whatever it dies of, or fails requests by, must have a rule in routing/compatibility.py."""
    compared = wheel.source(COMMON, "try_ensure_parallel_info")
    assert re.findall(r"raise RuntimeError\(f?['\"](\S+ \S+ \S+)", compared) == [
        "Page size mismatch:",
        "KV cache dtype",
        "MiniMax sparse PD",
        "KV layout mismatch:",
        "DeepSeek-V4.1 DSpark PD",
        "DeepSeek-V4.1 DSpark PD",
        "PD Disaggregation does",
        "PD decode DCP",
        "PD decode DCP",
        "PD decode DCP",
    ]
    ranks = wheel.source(COMMON, "_resolve_rank_mapping")
    for rule in (
        "self.attn_cp_size == 1",
        "self.pp_size == info.pp_size or self.pp_size == 1",
        "self.attn_tp_size // info.attn_tp_size",
        "info.attn_tp_size // self.attn_tp_size",
    ):
        assert rule in ranks
    assert "info.decode_allocation_policy != policy" in wheel.text(COMMON)
    assert "info.attn_tp_size != 1 or info.attn_cp_size != 1 or info.pp_size != 1" in wheel.text(COMMON)


def test_what_auto_becomes(wheel: Wheel) -> None:
    rule = wheel.source("srt/mem_cache/kv_cache_dtype.py", "configure_kv_cache_dtype")
    assert "kv_cache_quant_algo.upper() == 'FP8'" in rule
    assert "kv_cache_dtype = model_dtype" in rule
    resolved = wheel.assigned("srt/mem_cache/kv_cache_dtype.py", "TORCH_DTYPE_TO_KV_CACHE_STR")
    assert "torch.float8_e4m3fn: 'fp8_e4m3'" in resolved
    told = wheel.source("srt/disaggregation/prefill.py", "_init_kv_manager")
    assert "kv_cache_dtype_str = self.scheduler.tp_worker.model_runner.kv_cache_dtype_str" in told


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_top_logprobs_that_can_be_handed_over(wheel: Wheel) -> None:
    made = wheel.find(UTILS, "MetadataBuffers")
    init = next(node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    limits = {arg.arg: default for arg, default in zip(init.args.args[::-1], init.args.defaults[::-1], strict=False)}
    assert ast.literal_eval(limits["max_top_logprobs_num"]) == sglang_wire.MAX_TOP_LOGPROBS
    assert "raise RuntimeError" in wheel.source(UTILS, "set_buf")


def test_the_longest_prompt(wheel: Wheel) -> None:
    """`max_req_input_len` is 6 below the context or the KV pool, and a prompt must be shorter than it."""
    worker = wheel.source("srt/managers/tp_worker.py", "get_worker_info")
    less = [int(found) for found in re.findall(r"(?:context_len|kv_capacity|max_req_len) - (\d+)", worker)]
    assert less == [1, 1, 5]
    assert less[0] + less[-1] == sglang_facts.REQUEST_MARGIN_TOKENS == info._REQUEST_MARGIN_TOKENS
    assert "len(req.origin_input_ids) >= max_req_input_len" in wheel.text("srt/managers/utils.py")


def test_defaults_of_a_request(wheel: Wheel) -> None:
    sampling = wheel.fields("srt/sampling/sampling_params.py", "SamplingParams")
    assert int(sampling["max_new_tokens"]) == parse._DEFAULT_GENERATE_TOKENS
    assert int(wheel.fields(PROTOCOL, "CompletionRequest")["max_tokens"]) == parse._DEFAULT_COMPLETION_TOKENS


def test_what_a_decode_keeps_free(wheel: Wheel) -> None:
    assert wheel.argument_default("num_reserved_decode_tokens") == decode_node.RESERVED_DECODE_TOKENS


# ---- times -----------------------------------------------------------------------------------------------------------

LIMITS = core.Timeouts()


@pytest.mark.parametrize(
    ("variable", "ours"),
    [
        ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", LIMITS.bootstrap_s),
        ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", LIMITS.waiting_s),
        ("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", LIMITS.heartbeat_s),
        ("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", LIMITS.heartbeat_failures),
        ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", True),
        ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", LIMITS.deferred_release_s),
        ("SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL", bootstrap.ENTRY_LIFETIME_S),
        ("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", LIMITS.disconnect_poll_s),
        ("SGLANG_TIMEOUT_KEEP_ALIVE", emulator.KEEP_ALIVE_S),
    ],
)
def test_limits_that_a_variable_sets(wheel: Wheel, variable: str, ours: float) -> None:
    assert wheel.environment_default(variable) == ours


def test_variables_that_the_emulator_reads(wheel: Wheel) -> None:
    for variable, name in core._VARIABLES.items():
        assert wheel.environment_default(variable) == getattr(LIMITS, name)
    assert f"HEARTBEAT_INTERVAL.get(), {core._LEAST_HEARTBEAT_S}" in wheel.source(COMMON, "__init__") + wheel.text(
        COMMON
    )


def test_our_idle_connections_are_closed_before_theirs(wheel: Wheel) -> None:
    assert Upstream()._idle_s < wheel.environment_default("SGLANG_TIMEOUT_KEEP_ALIVE")


def test_limits_in_the_code(wheel: Wheel) -> None:
    assert int(wheel.assigned(DECODE, "_max_ensure_retries")) == LIMITS.lookup_attempts
    assert float(wheel.assigned(DECODE, "_ensure_retry_interval")) == LIMITS.lookup_interval_s
    assert f"requests.get(url, timeout={LIMITS.lookup_timeout_s:g})" in wheel.source(COMMON, "try_ensure_parallel_info")
    assert f"asyncio.sleep({LIMITS.second_abort_s:g})" in wheel.source(TOKENIZER, "create_abort_task")
    assert f"asyncio.sleep({LIMITS.drain_poll_s:g})" in wheel.source(TOKENIZER, "sigterm_watchdog")
    assert f"asyncio.sleep({LIMITS.health_s:g})" in wheel.source(HTTP, "health_generate")
    assert wheel.assigned(HTTP, "HEALTH_CHECK_TIMEOUT") == "int(os.getenv('SGLANG_HEALTH_CHECK_TIMEOUT', 20))"


# ---- rooms, rids, aborts ---------------------------------------------------------------------------------------------


def test_pd_fields_have_these_constants(wheel: Wheel) -> None:
    named = set(wheel.fields(PROTOCOL, "PDRoutingFields"))
    assert named == {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
    }
    ours = {*sglang_wire.Bootstrap("h", 1, 2).fields(), *sglang_wire.rank_fields(0, 1)}
    assert ours == named
    assert named <= set(wheel.fields(TYPES, "GenerateRequest"))
    assert {name for name, _ in parse._ROOM_FIELDS} < named


def test_ports_and_hosts(wheel: Wheel) -> None:
    assert wheel.argument_default("disaggregation_bootstrap_port") == sglang._DEFAULT_BOOTSTRAP_PORT
    assert ast.literal_eval(wheel.assigned(UTILS, "FAKE_BOOTSTRAP_HOST")) == "2.2.2.2"


def test_a_rid_aborts_all_that_begin_with_it(wheel: Wheel) -> None:
    """Hence rids of one width, and an empty one is never sent."""
    assert "rid.startswith(recv_req.rid)" in wheel.source(SCHEDULER, "abort_request")
    assert "not abort_all and (not rid)" in wheel.source(TOKENIZER, "abort_request")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (core.ABORTED, SCHEDULER),
        (core.ABORTED_WAITING, TOKENIZER),
        (core.ABORTED_BY_REQUEST, COMMON),
        (core.LOST_PEER_ROOM, COMMON),
        ("Missing inputs for bootstrap server.", COMMON),
    ],
)
def test_words_that_failures_are_told_by(wheel: Wheel, text: str, path: str) -> None:
    constants = {node.value for node in ast.walk(wheel.tree(path)) if isinstance(node, ast.Constant)}
    assert text in constants


def test_handlers_that_errors_quote(wheel: Wheel) -> None:
    """FastAPI's own errors name the line and the name of the handler."""
    for path, (line, name) in wire._HANDLERS.items():
        file = "srt/entrypoints/v1_loads.py" if path == "/v1/loads" else HTTP
        found = wheel.find(file, name)
        lines = {node.lineno for node in (*found.decorator_list, found)}
        assert line in lines, f"{path}: {name} is at {sorted(lines)}"


# ---- what it says of itself ------------------------------------------------------------------------------------------


def test_the_emulator_tells_the_arguments_of_a_real_server(wheel: Wheel) -> None:
    recorded = orjson.loads(resources.files("engines.emulator").joinpath("server_args.json").read_bytes())
    assert set(recorded["server_args"]) == wheel.arguments()


def test_facts_are_read_from_arguments_that_exist(wheel: Wheel) -> None:
    """What is read of `/server_info`: arguments, what the scheduler adds, and what the two builders add."""
    read = {
        "chunked_prefill_size",
        "disable_radix_cache",
        "disaggregation_decode_allocation_policy",
        "disaggregation_decode_enable_radix_cache",
        "disaggregation_mode",
        "disaggregation_transfer_backend",
        "device",
        "dp_size",
        "dsv4_attn_backend",
        "dtype",
        "enable_cache_report",
        "enable_deterministic_inference",
        "enable_page_major_kv_layout",
        "kv_cache_dtype",
        "kv_events_config",
        "max_running_requests",
        "page_size",
        "quantization",
        "random_seed",
        "sampling_defaults",
        "served_model_name",
        *("tp_size", "pp_size", "dcp_size", "attn_cp_size", "attn_dp_size"),
    }
    assert read <= wheel.arguments()
    source = (
        Path(sglang_facts.__file__).read_text()
        + Path(sglang_facts.__file__).with_name("kv_event_source.py").read_text()
    )
    asked = set(re.findall(r'server_info(?:\.get\(|, )"([a-z0-9_]+)"', source))
    added = {"max_total_num_tokens", "max_req_input_len", "startup_time", "launch_command", "internal_states"}
    assert asked - read == added | {"version", "frontend", "kv_events"}, "a new field is read: name it here"
    assert {"max_total_num_tokens", "max_req_input_len"} <= _constants(wheel.source(SCHEDULER, "get_init_info"))
    assert {"launch_command", "kv_events"} <= _constants(wheel.source("srt/utils/common.py", "build_server_info"))
    assert {"startup_time", "internal_states", "version", "frontend"} <= _constants(wheel.source(HTTP, "server_info"))
    told = {"served_model_name", "weight_version", "disaggregation_mode"}
    assert told <= _constants(wheel.source(HTTP, "model_info"))
    assert f"'frontend': '{sglang_facts._FRONTEND}'" in wheel.source(HTTP, "server_info")


def _constants(source: str) -> set[Any]:
    return {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}


def test_routes_that_are_asked(wheel: Wheel) -> None:
    routes = set(re.findall(r"@app\.\w+\(\s*\"(/[\w/]*)\"", wheel.text(HTTP)))
    asked = {"/ready", "/server_info", "/model_info", "/get_server_info", "/abort_request", "/generate"}
    assert asked | {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"} <= routes
    assert '"/v1/loads"' in wheel.text("srt/entrypoints/v1_loads.py")
    parameters = set(re.findall(r"request\.query\.get\('(\w+)'\)", wheel.source(COMMON, "_handle_route_get")))
    assert parameters == set(bootstrap._QUERY) == set(re.findall(r"(\w+)=-1", sglang_facts.ROUTE_PROBE))


def test_loads_have_these_fields(wheel: Wheel) -> None:
    told = set(wheel.fields("srt/managers/load_snapshot.py", "LoadSnapshot"))
    source = Path(sglang_facts.__file__).read_text()
    read = set(re.findall(r'total\("(\w+)"\)|rank\.get\("(\w+)"\)', source))
    names = {first or second for first, second in read}
    assert len(names) >= 8
    assert names <= told


def test_sampling_parameters_that_generate_takes(wheel: Wheel) -> None:
    assert list(contract.SAMPLING) == list(wheel.fields(TYPES, "SamplingParams"))


# ---- KV events -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("BlockStored", kv_events._StoredMap),
        ("BlockRemoved", kv_events._RemovedMap),
        ("AllBlocksCleared", kv_events._ClearedMap),
    ],
)
def test_events_have_these_fields(wheel: Wheel, name: str, ours: type[msgspec.Struct]) -> None:
    theirs = wheel.fields(EVENTS, name)
    assert set(ours.__struct_fields__) <= set(theirs)
    needed = {field for field, default in theirs.items() if not default}
    assert set(ours.__struct_fields__) >= needed
    assert ours.__struct_config__.tag == name
    keywords = {each.arg: ast.unparse(each.value) for each in _class(wheel, EVENTS, "KVCacheEvent").keywords}
    assert "array_like" not in keywords, "events are maps"
    assert keywords.get("tag") == "True"
    assert ours.__struct_config__.tag_field == ast.literal_eval(keywords.get("tag_field", "'type'"))


def _class(wheel: Wheel, path: str, name: str) -> ast.ClassDef:
    found = wheel.find(path, name)
    assert isinstance(found, ast.ClassDef)
    return found


def test_batches_are_arrays(wheel: Wheel) -> None:
    assert list(wheel.fields(EVENTS, "EventBatch")) == ["ts", "events", "attn_dp_rank"]
    assert any(each.arg == "array_like" for each in _class(wheel, EVENTS, "EventBatch").keywords)
    assert len(kv_events._Batch.__struct_fields__) == 3


def test_media(wheel: Wheel) -> None:
    body = wheel.find(EVENTS, "StorageMedium").body
    named = {ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign)}
    assert named == {medium.value for medium in Medium}


def test_the_end_of_a_replay(wheel: Wheel) -> None:
    end = wheel.run(f"print(({wheel.assigned(EVENTS, 'END_SEQ')}).hex())")
    assert bytes.fromhex(end) == kv_events.REPLAY_END


def test_page_hashes(wheel: Wheel) -> None:
    """The vector was published by a running server with pages of 16; the rule is native code, looked at in parts."""
    digests = kv_events.page_digests(list(range(5, 69)), 16)
    assert [kv_events.page_hash(digest) for digest in digests] == [
        6656831445796273067,
        8907485180548743928,
        -2453922284989812645,
        7093182188937364212,
    ]
    native = wheel.text("srt/mem_cache/cpp_utils/hash_binding.cpp")
    order = ["SHA256_Init", "SHA256_Update(&ctx, prior_digest", "tag = 0xff", "SHA256_Update(&ctx, data"]
    places = [native.index(part) for part in order]
    assert places == sorted(places)
    utils = "srt/mem_cache/utils.py"
    number = wheel.run(f"{wheel.source(utils, 'hash_str_to_int64')}\nprint(hash_str_to_int64('{digests[2].hex()}'))")
    assert int(number) == kv_events.page_hash(digests[2])
    salted = _constants(wheel.source(utils, "compute_node_event_hash_values"))
    assert kv_events._SALT_PREFIX in salted


# ---- the table of roles ----------------------------------------------------------------------------------------------


def test_roles_have_these_constants(wheel: Wheel) -> None:
    modes = wheel.find(UTILS, "DisaggregationMode").body
    named = {ast.literal_eval(node.value) for node in modes if isinstance(node, ast.Assign)}
    assert named == {"null", Role.PREFILL.value, Role.DECODE.value}


def test_poison_that_a_room_shields_from(wheel: Wheel) -> None:
    """A room that is not told is refused by the engine itself; the builder writes all three fields or none."""
    assert "Disaggregated request received without " in wheel.text(SCHEDULER)
    assert [field.name for field in fields(sglang_wire.Bootstrap)] == ["host", "port", "room"]
