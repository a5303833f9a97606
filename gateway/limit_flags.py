"""The knobs that say how much may wait, how long things may take, and how often they are tried again. Pure.

The stages and what their deadlines mean: `failover/deadlines.py`. The budget of retries: `failover/budget.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from gateway.flag_kinds import add, ratio, seconds, seconds_or_0, whole


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """What may wait in the gateway, and for how long, before it is refused with 429."""

    max_requests: int = 10_000
    max_bytes: int = 1 << 30
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class DeadlineConfig:
    """How long things may take: the whole request, from dispatch to first output, between outputs, shutting down.

    The two in the middle are bounds: what is asked of a server follows from what it is known to do, see
    `failover/deadlines.py`. The floors are what a server may always take, however fast it is known to be.
    """

    request_s: float = 1800.0
    first_output_s: float = 120.0
    """Well below the 300 s after which SGLang itself gives up a half-joined pair."""
    first_output_floor_s: float = 5.0
    """A kernel compiled for a new shape, or a pair that meets for the first time, takes seconds."""
    hold_s: float = 0.1
    """A prefill says that all is well a turn of its scheduler after its KV is there: at once, or where it computes
    others a chunk later. This is between: what first tokens may be late by."""
    stall_s: float = 60.0
    stall_floor_s: float = 3.0
    """A garbage collection, or a step over a batch full of new requests, takes up to a second."""
    shutdown_grace_s: float = 180.0


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """How often one request may be tried, and how much of that all requests of this gateway may do together."""

    max_attempts: int = 3
    """Attempts before the first output, the first included."""
    budget_ratio: float = 0.2
    """Further attempts per fresh request, beside what one lost server may always cost."""
    prefill_chunks: int = 2
    """Chunks of prompts computed again that one ready prefill may have before it: one that runs, one behind it."""


DEFAULT_QUEUE, DEFAULT_DEADLINES, DEFAULT_RETRY = QueueConfig(), DeadlineConfig(), RetryConfig()


def add_limit_arguments(limits: Any) -> None:
    """Declare the flags of this file on a group of a parser."""
    queue, deadlines, retry = DEFAULT_QUEUE, DEFAULT_DEADLINES, DEFAULT_RETRY
    add(limits, "--queue-max-requests", whole(0), queue.max_requests, "requests that may wait")
    add(limits, "--queue-max-bytes", whole(1), queue.max_bytes, "bytes of bodies that may wait")
    add(limits, "--queue-timeout-secs", seconds, queue.timeout_s, "longest wait for a pair")
    add(limits, "--request-timeout-secs", seconds, deadlines.request_s, "longest a request may take")
    add(limits, "--first-token-timeout-secs", seconds, deadlines.first_output_s, "longest from dispatch to output")
    add(
        limits,
        "--first-token-floor-secs",
        seconds,
        deadlines.first_output_floor_s,
        "what a pair may always take to its first output; beyond it, a multiple of what was predicted",
    )
    add(
        limits,
        "--first-token-hold-secs",
        seconds_or_0,
        deadlines.hold_s,
        "longest wait of a first output for the word of its prefill that its KV was whole",
    )
    add(limits, "--stall-timeout-secs", seconds, deadlines.stall_s, "longest pause within a stream")
    add(
        limits,
        "--stall-floor-secs",
        seconds,
        deadlines.stall_floor_s,
        "the pause a server may always make; beyond it, a multiple of the time of its own tokens",
    )
    grace_s = deadlines.shutdown_grace_s
    add(limits, "--shutdown-grace-period-secs", seconds_or_0, grace_s, "longest wait for what runs at shutdown")
    add(limits, "--max-attempts", whole(1), retry.max_attempts, "attempts a request may have in all")
    add(limits, "--retry-budget-ratio", ratio, retry.budget_ratio, "further attempts of all requests, per fresh one")
    add(
        limits,
        "--retry-prefill-chunks",
        whole(1),
        retry.prefill_chunks,
        "chunks of prompts to compute again that one prefill is given at a time",
    )


def queue_config(args: argparse.Namespace) -> QueueConfig:
    return QueueConfig(args.queue_max_requests, args.queue_max_bytes, args.queue_timeout_secs)


def deadline_config(args: argparse.Namespace) -> DeadlineConfig:
    return DeadlineConfig(
        request_s=args.request_timeout_secs,
        first_output_s=args.first_token_timeout_secs,
        first_output_floor_s=args.first_token_floor_secs,
        hold_s=args.first_token_hold_secs,
        stall_s=args.stall_timeout_secs,
        stall_floor_s=args.stall_floor_secs,
        shutdown_grace_s=args.shutdown_grace_period_secs,
    )


def retry_config(args: argparse.Namespace) -> RetryConfig:
    return RetryConfig(args.max_attempts, args.retry_budget_ratio, args.retry_prefill_chunks)
