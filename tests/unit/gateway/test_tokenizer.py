"""Loading a tokenizer and asking it for ids: what the files say, what is refused, what goes to a thread."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engines.emulator.tokenizer_files import FOLDER, tokenizer_files
from engines.token_rule import VOCABULARY_TOKENS
from gateway import tokenizer
from gateway.config import ConfigError, TokenizerConfig
from gateway.openai_api import Api
from gateway.tokenizer import AT_ONCE_BYTES, MAX_WAITING, THREADS, Tokenizer, Untokenized

BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}
HI = [ord("h") + 3, ord("i") + 3]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def folder(path: Path, *, config: dict[str, Any] | None = None, template: str | None = None, **model: Any) -> Path:
    """A tokenizer's folder: the emulated one's, changed."""
    files = tokenizer_files()
    files["tokenizer.json"] = json.dumps({**json.loads(files["tokenizer.json"]), **model})
    files["tokenizer_config.json"] = json.dumps(config or {})
    del files["chat_template.jinja"]
    if template is not None:
        files["chat_template.jinja"] = template
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def load(path: Path | str, chat_template: Path | str | None = None) -> Tokenizer:
    config = TokenizerConfig(str(path), None if chat_template is None else str(chat_template))
    loaded = tokenizer.load(config, lambda: datetime(2026, 1, 1))
    assert loaded is not None
    return loaded


def text(ids: Any) -> str:
    return bytes(each - 3 for each in ids).decode()


# ---- files -----------------------------------------------------------------------------------------------------------


def test_no_path_is_no_tokenizer() -> None:
    assert tokenizer.load(TokenizerConfig()) is None


def test_a_folder_and_its_file_are_the_same() -> None:
    by_folder, by_file = load(FOLDER), load(FOLDER / "tokenizer.json")
    assert by_folder.fingerprint == by_file.fingerprint
    assert by_folder.ids(Api.CHAT, CHAT) == by_file.ids(Api.CHAT, CHAT)


def test_the_vocabulary_ends_after_its_highest_id(tmp_path: Path) -> None:
    assert load(FOLDER).vocabulary_tokens == VOCABULARY_TOKENS
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    config = {"added_tokens_decoder": {"2048": {"content": "<|mine|>", **added}}}
    assert load(folder(tmp_path, config=config)).vocabulary_tokens == VOCABULARY_TOKENS + 1
    model = json.loads(tokenizer_files()["tokenizer.json"])["model"]
    model["vocab"]["far"] = 5000
    assert load(folder(tmp_path, model=model)).vocabulary_tokens == 5001, "whatever ids are missing"


def test_the_template_is_the_first_that_is_found(tmp_path: Path) -> None:
    named = [{"name": "first", "template": "1"}, {"name": "default", "template": "2"}, {"name": "tool_use"}]
    at = folder(tmp_path, config={"chat_template": named})
    assert text(load(at).ids(Api.CHAT, CHAT)) == "1", "of named templates the first, as SGLang takes"
    folder(tmp_path, config={"chat_template": {"only": "d"}})
    assert text(load(at).ids(Api.CHAT, CHAT)) == "d"
    folder(tmp_path, config={"chat_template": "c"})
    assert text(load(at).ids(Api.CHAT, CHAT)) == "c"
    (at / "chat_template.json").write_text('{"chat_template": "j"}')
    assert text(load(at).ids(Api.CHAT, CHAT)) == "j"
    (at / "chat_template.jinja").write_text("f")
    assert text(load(at).ids(Api.CHAT, CHAT)) == "f"
    (at / "mine.jinja").write_text("\n\no\\n{{ 'a' }}\n\n")
    assert text(load(at, at / "mine.jinja").ids(Api.CHAT, CHAT)) == "o\na", "read as SGLang reads its own flag's file"


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<B>"}, "eos_token": "<E>", "pad_token": None, "added_tokens_decoder": {}}
    at = folder(tmp_path, config=config, template="{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}")
    loaded = load(at)
    ids = loaded.ids(Api.CHAT, CHAT)
    assert len(ids) == 2 + len("False"), "tokens that only the configuration names are tokens"
    assert text(ids[2:]) == "False"


def test_added_tokens_of_the_configuration_are_added_in_order(tmp_path: Path) -> None:
    added = {"2049": {"content": "<b>", "special": True}, "2048": {"content": "<a>"}, "1": {"content": "<|im_start|>"}}
    loaded = load(folder(tmp_path, config={"added_tokens_decoder": added}))
    assert loaded.text_ids("<a><b><|im_start|>").tolist() == [2048, 2049, 1]


def test_a_tokenizers_own_truncation_and_padding_are_off(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    loaded = load(folder(tmp_path, truncation=cut, padding={**pad, "pad_to_multiple_of": None}))
    assert len(loaded.text_ids("x" * 20)) == 20


def test_plain_prompts_get_what_the_tokenizer_adds_and_chats_do_not(tmp_path: Path) -> None:
    loaded = load(folder(tmp_path, post_processor=BOS, config={"bos_token": "<|endoftext|>"}, template="hi"))
    assert loaded.ids(Api.COMPLETIONS, {"prompt": "hi"}).tolist() == [0, *HI]
    assert loaded.ids(Api.GENERATE, {"text": "hi"}).tolist() == [0, *HI]
    assert loaded.ids(Api.CHAT, CHAT).tolist() == HI
    begun = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "i"}], "continue_final_message": True}
    assert loaded.ids(Api.CHAT, begun).tolist() == [*HI, HI[1]], "no BOS in the middle"


def test_the_fingerprint_names_tokenizer_template_and_settings(tmp_path: Path) -> None:
    names = set()
    for number, change in enumerate(
        ({}, {"template": "x"}, {"template": "y"}, {"config": {"bos_token": "<B>"}}, {"post_processor": BOS})
    ):
        (tmp_path / str(number)).mkdir()
        names.add(load(folder(tmp_path / str(number), **change)).fingerprint)
    assert len(names) == 5
    assert load(tmp_path / "0").fingerprint in names


# ---- what is wrong with them -----------------------------------------------------------------------------------------


def broken(path: Path, name: str, content: str) -> Path:
    folder(path, template="hi")
    (path / name).write_text(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer.json", "no json", "is not a tokenizer"),
        ("tokenizer_config.json", "no json", "cannot read"),
        ("tokenizer_config.json", "[]", "holds no JSON object"),
        ("special_tokens_map.json", "{", "cannot read"),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja: not a chat template: line 1"),
    ],
)
def test_a_broken_file_is_named_with_its_flag(tmp_path: Path, name: str, content: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        load(broken(tmp_path, name, content))
    assert str(raised.value).startswith(f"--tokenizer-path {tmp_path}")
    assert name in str(raised.value)


def test_a_template_of_no_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat_template of tokenizer_config.json is neither"):
        load(folder(tmp_path, config={"chat_template": 7}))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--tokenizer-path org/model: is no file or folder here"):
        load("org/model")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"^--chat-template /none: cannot read it"):
        load(FOLDER, "/none")
    (tmp_path / "bad.jinja").write_text("{{")
    with pytest.raises(ConfigError, match=r"^--chat-template .*bad.jinja: not a chat template"):
        load(FOLDER, tmp_path / "bad.jinja")


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_what_has_no_ids_says_why(tmp_path: Path) -> None:
    without = load(folder(tmp_path))
    assert without.ids(Api.COMPLETIONS, {"prompt": "hi"}).tolist() == HI
    with pytest.raises(Untokenized, match="no chat template"):
        without.ids(Api.CHAT, CHAT)
    with pytest.raises(Untokenized, match="only the engine"):
        without.ids(Api.GENERATE, {"text": "hi", "image_data": ["x"]})
    with pytest.raises(Untokenized, match="role"):
        load(FOLDER).ids(Api.CHAT, {"messages": [{"role": "wizard", "content": ""}]})
    with pytest.raises(Untokenized, match="the tokenizer refuses it"):
        without.text_ids("\ud800")


async def test_long_prompts_go_to_a_thread_and_short_ones_do_not() -> None:
    loaded, here = load(FOLDER), threading.get_ident()
    assert await loaded.run(AT_ONCE_BYTES, threading.get_ident) == here
    assert await loaded.run(AT_ONCE_BYTES + 1, threading.get_ident) != here
    loaded.close()


async def test_what_a_thread_raises_comes_back() -> None:
    loaded = load(FOLDER)
    with pytest.raises(Untokenized, match="only the engine"):
        await loaded.run(AT_ONCE_BYTES + 1, lambda: loaded.ids(Api.GENERATE, {"text": "x", "modalities": []}))
    loaded.close()


async def test_not_too_many_prompts_wait_for_a_thread() -> None:
    loaded, go_on = load(FOLDER), threading.Event()
    work: Callable[[], object] = lambda: go_on.wait(10)  # noqa: E731
    waiting = [asyncio.ensure_future(loaded.run(AT_ONCE_BYTES + 1, work)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Untokenized, match="too many"):
        await loaded.run(AT_ONCE_BYTES + 1, work)
    assert await loaded.run(1, lambda: 7) == 7, "short ones need no thread"
    go_on.set()
    await asyncio.gather(*waiting)
    assert await loaded.run(AT_ONCE_BYTES + 1, lambda: 8) == 8
    loaded.close()


# ---- prompts that take too long --------------------------------------------------------------------------------------

LONG_BYTES = AT_ONCE_BYTES + 1


async def free_again(loaded: Tokenizer) -> None:
    async with asyncio.timeout(5):
        for _ in range(THREADS):
            await loaded._free.acquire()
    for _ in range(THREADS):
        loaded._free.release()
    assert not loaded._late


async def test_a_prompt_that_takes_too_long_goes_without_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "DEADLINE_S", 0.05)
    loaded, go_on = load(FOLDER), threading.Event()
    with pytest.raises(Untokenized, match=r"^it was not tokenized within 0.05 s$"):
        await loaded.run(LONG_BYTES, go_on.wait)
    assert await loaded.run(LONG_BYTES, lambda: 7) == 7, "the other thread works on"
    go_on.set()
    await free_again(loaded)
    await asyncio.sleep(0.06)
    assert not loaded._late, "what has ended in time is never late"


async def test_when_all_threads_are_stuck_nothing_waits_for_them_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "pdgate.tokenizer")
    monkeypatch.setattr(tokenizer, "DEADLINE_S", 0.05)
    loaded, go_on, threads = load(FOLDER), threading.Event(), threading.active_count()
    stuck = [loaded.run(LONG_BYTES, go_on.wait) for _ in range(THREADS)]
    behind = [loaded.run(LONG_BYTES, lambda: 7) for _ in range(5)]
    said = [str(each) for each in await asyncio.gather(*stuck, *behind, return_exceptions=True)]
    late = "it was not tokenized within 0.05 s"
    assert said == [late] * THREADS + ["no thread was free to tokenize it within 0.05 s"] * 5
    monkeypatch.setattr(tokenizer, "DEADLINE_S", 60.0)
    for _ in range(10):
        with pytest.raises(Untokenized, match=r"^the tokenizer is stuck$"):
            await asyncio.wait_for(loaded.run(LONG_BYTES, lambda: 7), 1)
    assert await loaded.run(1, lambda: 7) == 7, "short ones need no thread"
    assert threading.active_count() == threads + THREADS
    assert [record.getMessage()[:23] for record in caplog.records] == ["the tokenizer is stuck:"]
    go_on.set()
    await free_again(loaded)
    assert await loaded.run(LONG_BYTES, lambda: 8) == 8
    assert loaded._free._value == THREADS


async def test_a_caller_that_is_gone_leaves_no_thread_taken() -> None:
    loaded, go_on, complaints = load(FOLDER), threading.Event(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    def fail() -> None:
        go_on.wait(10)
        raise Untokenized("nobody is there to take it")

    gone = [asyncio.ensure_future(loaded.run(LONG_BYTES, fail)) for _ in range(THREADS + 1)]
    await asyncio.sleep(0.01)
    for each in gone:
        each.cancel()
    await asyncio.wait(gone)
    go_on.set()
    assert await asyncio.wait_for(loaded.run(LONG_BYTES, lambda: 8), 5) == 8
    await free_again(loaded)
    assert loaded._waiting == 0
    gc.collect()
    assert not complaints, "of an error that nobody has taken"


async def test_a_closed_one_takes_no_more() -> None:
    loaded = load(FOLDER)
    loaded.close()
    with pytest.raises(Untokenized, match="stops"):
        await loaded.run(LONG_BYTES, lambda: 7)


def test_a_stuck_thread_does_not_keep_the_process_from_ending() -> None:
    program = f"""if True:
        import asyncio
        from gateway import tokenizer
        from gateway.config import TokenizerConfig
        tokenizer.DEADLINE_S = 0.05
        loaded = tokenizer.load(TokenizerConfig({str(FOLDER)!r}))
        def for_ever():
            while True: pass
        try:
            asyncio.run(loaded.run({LONG_BYTES}, for_ever))
        except tokenizer.Untokenized as error:
            print(error)
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("it was not tokenized within 0.05 s\n", "", 0)


def test_whatever_the_template_or_the_library_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(FOLDER)

    class Broken:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
            raise Exception("odd " + "x" * 10_000)  # as the library does

    monkeypatch.setattr(loaded, "_model", Broken())
    for api, body in ((Api.CHAT, CHAT), (Api.COMPLETIONS, {"prompt": "hi"}), (Api.GENERATE, {"text": "hi"})):
        with pytest.raises(Untokenized, match=r"^it cannot be tokenized here: Exception: odd") as raised:
            loaded.ids(api, body)
        assert len(str(raised.value)) < 300
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Untokenized, match=r"^it cannot be tokenized here: RecursionError"):
        load(FOLDER).ids(Api.CHAT, {**CHAT, "tools": [{"function": {"name": "f", "parameters": deep}}]})
