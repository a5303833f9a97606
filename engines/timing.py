"""How long things take on a server: the shapes of timings and profiles, and the formulas over them.

A leaf: standard library only, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillTiming:
    """Prefill time of one forward pass: `base_s + per_token_s * sum(new) + per_token2_s * sum(N^2 - h^2)`.

    N is the context length a chunk ends at, h the length it starts from; a forward takes at most `chunk_tokens`
    new tokens, of one or several requests. The form is the usual linear-plus-attention fit of a transformer.
    """

    base_s: float
    per_token_s: float
    per_token2_s: float
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeTiming:
    """Time of one decode step: `base_s + per_request_s * running + per_kv_token_s * kv_tokens`."""

    base_s: float
    per_request_s: float
    per_kv_token_s: float


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """KV transfer time between two servers: `fixed_s + bytes / bytes_per_s`."""

    bytes_per_s: float
    fixed_s: float


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The documented shape of one kind of server: the emulator's timing and the estimators' prior."""

    name: str
    prefill: PrefillTiming
    decode: DecodeTiming
    link: LinkTiming
    kv_bytes_per_token: int
    max_total_tokens: int
    context_tokens: int
    page_size_tokens: int
    max_running_requests: int


H100_70B = EngineProfile(
    name="h100-70b",
    prefill=PrefillTiming(base_s=0.015, per_token_s=9e-5, per_token2_s=9e-10, chunk_tokens=8192),
    decode=DecodeTiming(base_s=0.014, per_request_s=6e-5, per_kv_token_s=3e-8),
    link=LinkTiming(bytes_per_s=50e9, fixed_s=0.005),
    kv_bytes_per_token=327_680,
    max_total_tokens=600_000,
    context_tokens=131_072,
    page_size_tokens=1,
    max_running_requests=256,
)
"""An estimate for a 70B model on four H100 (about 9,800 prompt tokens/s at 12 K); assumed, not measured."""

TINY = EngineProfile(
    name="tiny",
    prefill=PrefillTiming(base_s=0.002, per_token_s=1e-5, per_token2_s=1e-11, chunk_tokens=2048),
    decode=DecodeTiming(base_s=0.002, per_request_s=1e-5, per_kv_token_s=1e-9),
    link=LinkTiming(bytes_per_s=10e9, fixed_s=0.001),
    kv_bytes_per_token=4096,
    max_total_tokens=65_536,
    context_tokens=32_768,
    page_size_tokens=1,
    max_running_requests=256,
)
"""A small fast server for tests."""

PROFILES = {profile.name: profile for profile in (H100_70B, TINY)}


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Prompt tokens of one request still to compute: from `cached_tokens` (h) up to `prompt_tokens` (N)."""

    prompt_tokens: int
    cached_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.cached_tokens)


def prefill_forward_s(timing: PrefillTiming, works: Iterable[PrefillWork]) -> float:
    """Time of one forward over `works` (each already cut to this forward); 0.0 when nothing is new."""
    new_tokens = 0
    attention = 0
    for work in works:
        new_tokens += work.new_tokens
        attention += max(0, work.prompt_tokens**2 - work.cached_tokens**2)
    if new_tokens == 0:
        return 0.0
    return timing.base_s + timing.per_token_s * new_tokens + timing.per_token2_s * attention


def prefill_s(timing: PrefillTiming, prompt_tokens: int, cached_tokens: int = 0) -> float:
    """Time to prefill one request alone: as many forwards as its new tokens fill, the attention term over all."""
    new_tokens = max(0, prompt_tokens - cached_tokens)
    if new_tokens == 0:
        return 0.0
    forwards = -(-new_tokens // timing.chunk_tokens)
    attention = prompt_tokens**2 - cached_tokens**2
    return timing.base_s * forwards + timing.per_token_s * new_tokens + timing.per_token2_s * attention


def decode_step_s(timing: DecodeTiming, running: int, kv_tokens: int) -> float:
    """Time of one decode step over `running` requests that hold `kv_tokens` together."""
    return timing.base_s + timing.per_request_s * running + timing.per_kv_token_s * kv_tokens


def transfer_s(link: LinkTiming, size_bytes: float) -> float:
    """Time to move `size_bytes` of KV over one idle link."""
    return link.fixed_s + size_bytes / link.bytes_per_s
