"""Small fleets and requests for the routing tests, made by hand or from a seed."""

from __future__ import annotations

from random import Random
from typing import Any

from engines.timing import H100_70B, DecodeTiming, LinkTiming, PrefillTiming
from engines.types import CacheFormat, EngineFacts, EngineId, EngineLoad, EngineSpec, EngineView, Health, Role
from routing.types import DecodeState, PrefillState, RequestView, RoutingSnapshot

FORMAT = CacheFormat(page_size_tokens=1, kv_cache_dtype="bf16", allocation_policy="paged", transfer_backend="nixl")
FACTS = EngineFacts(
    model="m",
    weight_version="1",
    cache_format=FORMAT,
    max_total_tokens=600_000,
    context_tokens=131_072,
    chunk_tokens=8192,
    dp_size=1,
    boot_fingerprint="f",
)


def view(name: str, role: Role, **fields: Any) -> EngineView:
    spec = EngineSpec(EngineId(name), f"http://{name}", role)
    return EngineView(**{"spec": spec, "health": Health.READY, "epoch": 1, "facts": FACTS} | fields)


def load(used_tokens: int) -> EngineLoad:
    return EngineLoad(0.0, 1, 0, 0, used_tokens, used_tokens, 600_000)


def prefill(name: str = "p0", **fields: Any) -> PrefillState:
    return PrefillState(**{"view": view(name, Role.PREFILL), "timing": H100_70B.prefill} | fields)


def decode(name: str = "d0", **fields: Any) -> DecodeState:
    base = {"view": view(name, Role.DECODE), "timing": H100_70B.decode, "capacity_tokens": 600_000}
    return DecodeState(**base | fields)


def request(**fields: Any) -> RequestView:
    base = {
        "request_id": "r0",
        "model": "m",
        "prompt_tokens": 12_000,
        "blocks": (),
        "block_tokens": 64.0,
        "expected_output_tokens": 350,
        "max_output_tokens": 1024,
        "arrival_s": 0.0,
        "deadline_s": 10.0,
        "body_bytes": 1000,
    }
    return RequestView(**base | fields)


def snapshot(prefills: Any = (), decodes: Any = (), **fields: Any) -> RoutingSnapshot:
    base = {
        "now_s": 0.0,
        "prefills": tuple(prefills),
        "decodes": tuple(decodes),
        "default_link": H100_70B.link,
        "kv_bytes_per_token": H100_70B.kv_bytes_per_token,
    }
    return RoutingSnapshot(**base | fields)


def random_request(rng: Random, fleet: RoutingSnapshot) -> RequestView:
    pairs = [(p.view.engine_id, d.view.engine_id) for p in fleet.prefills for d in fleet.decodes]
    return request(
        prompt_tokens=rng.choice([1, 100, 8192, 8193, rng.randrange(1, 130_000)]),
        expected_output_tokens=rng.randrange(1, 4000),
        excluded_pairs=frozenset(pair for pair in pairs if rng.getrandbits(3) == 0),
    )


def random_fleet(rng: Random) -> RoutingSnapshot:
    """A fleet of up to 8 by 8: uniform (all ties), mixed, or saturated; with links and NICs alike or not."""
    kind = rng.choice(["uniform", "mixed", "mixed", "saturated"])
    prefills = tuple(_random_prefill(rng, f"p{i}", kind) for i in range(rng.randrange(1, 9)))
    decodes = tuple(_random_decode(rng, f"d{i}", kind) for i in range(rng.randrange(1, 9)))
    pairs = [(p.view.engine_id, d.view.engine_id) for p in prefills for d in decodes]
    engines = [state.view.engine_id for state in (*prefills, *decodes)]
    linked_ratio = rng.choice([0.0, 0.3, 1.0])
    busy_ratio = rng.choice([0.0, 0.3, 1.0])
    return snapshot(
        prefills,
        decodes,
        links={pair: LinkTiming(10 ** rng.uniform(8, 11), 0.005) for pair in pairs if rng.random() < linked_ratio},
        nic_free_s={engine: rng.uniform(0, 20) for engine in engines if rng.random() < busy_ratio},
        incompatible=frozenset(pair for pair in pairs if rng.getrandbits(3) == 0),
    )


def _random_prefill(rng: Random, name: str, kind: str) -> PrefillState:
    if kind == "uniform":
        return prefill(name)
    timing = PrefillTiming(0.015, 10 ** rng.uniform(-5, -4), 10 ** rng.uniform(-11, -9), rng.choice([2048, 8192]))
    return prefill(
        name,
        timing=rng.choice([H100_70B.prefill, timing]),
        booked_s=rng.choice([0.0, rng.uniform(0, 1), rng.uniform(0, 20)]),
        hit_tokens=rng.choice([0, rng.randrange(0, 130_000)]),
        pending_hit_tokens=rng.choice([0, rng.randrange(0, 130_000)]),
        load_s=rng.choice([0.0, rng.uniform(0, 1)]),
    )


def _random_decode(rng: Random, name: str, kind: str) -> DecodeState:
    if kind == "uniform":
        return decode(name)
    booked_tokens, booked_requests = rng.choice([0, rng.randrange(0, 700_000)]), rng.choice([0, rng.randrange(0, 300)])
    if kind == "saturated":
        booked_tokens, booked_requests = rng.randrange(300_000, 301_000), rng.randrange(256, 300)
    return decode(
        name,
        timing=rng.choice([H100_70B.decode, DecodeTiming(0.02, 1e-4, 6e-8)]),
        booked_tokens=booked_tokens,
        booked_requests=booked_requests,
        reuse_tokens=rng.choice([0, 0, rng.randrange(0, 130_000)]),
    )
