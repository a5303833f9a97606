"""Good histories, made from the token rule and the emulator's own detokenizer, for the checker to judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from engines.emulator.output import Output, StopRule
from engines.emulator.tokens import decode
from engines.token_rule import (
    FIRST_BYTE_TOKEN,
    ContextHash,
    sampling_key,
)
from failover.chaos.history import (
    Attempt,
    Choice,
    Ending,
    Error,
    Event,
    History,
    Ledger,
    Limits,
    Request,
    Usage,
)

PATIENT = settings(suppress_health_check=[HealthCheck.too_slow])
"""Wall time says nothing of these on a busy machine."""
ERROR = Error("the engine has died", "server_error", "stream_broken", definite=False)


class Script:
    """A context whose next tokens are known."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = iter(tokens)

    def append(self, token: int) -> None:
        pass

    def next_token(self, allow_eos: bool) -> int:
        return next(self._tokens)


@dataclass(frozen=True)
class Plan:
    """How one request went: `shares` says how many tokens each attempt wrote before it ended."""

    prompt: tuple[int, ...]
    shares: tuple[int, ...]
    limits: Limits
    sampled: bool = True
    ending: str = "whole"
    stream: bool = True
    ids_shown: bool = False
    wants_usage: bool = False
    samples: int = 1
    name: str = "r1"

    def attempts(self, sample: int) -> tuple[Attempt, ...]:
        made = []
        for number in range(len(self.shares)):
            rid = f"{self.name}.{sample}.{number}"
            keys = [sampling_key(f"{engine}{number % 2}".encode(), rid) if self.sampled else b"" for engine in "pd"]
            room = 1 + number + 10 * sample + 1000 * sum(map(ord, self.name))
            began_s = float(number)
            made.append(Attempt(rid, room, f"p{number % 2}", f"d{number % 2}", began_s, began_s + 1, *keys))
        return tuple(made)

    def tokens(self, sample: int) -> list[int]:
        """All that the attempts wrote, one after another, without an end."""
        limits, ids = self.limits, list[int]()
        attempts = self.attempts(sample)
        for number, (attempt, share) in enumerate(zip(attempts, self.shares, strict=True)):
            last = number == len(attempts) - 1
            context = ContextHash.from_tokens([*self.prompt, *ids], attempt.prefill_key)
            for written in range(limits.max_tokens if last and self.ending == "whole" else share):
                if written == 1:
                    context = ContextHash.from_tokens([*self.prompt, *ids], attempt.decode_key)
                ids.append(context.next_token(not limits.ignore_eos and len(ids) >= limits.min_tokens))
                context.append(ids[-1])
        return ids

    def events(self, sample: int, ids: list[int] | None = None) -> tuple[list[Event], int]:
        """What the client reads of one choice that is written with `ids`, and how many of them there were."""
        limits = self.limits
        stops = (limits.stop, frozenset(limits.stop_token_ids), limits.no_stop_trim)
        output = Output(StopRule(limits.max_tokens, limits.min_tokens, limits.ignore_eos, *stops))
        output.start(b"".join(token.to_bytes(4, "little") for token in self.prompt))
        ids = self.tokens(sample) if ids is None else ids
        output._context = Script(ids)  # type: ignore[assignment]
        made, shown, ended = list[Event](), 0, False
        while not ended and len(output.ids) < len(ids):
            ended = output.step()
            if not ended and output.withheld:
                continue
            at_s, finish = 0.01 * len(output.ids), output.finish
            text, fresh = output.take_delta(), tuple(output.ids[shown:]) if self.ids_shown else ()
            shown = len(output.ids)
            told = (finish.kind, finish.matched) if finish and ended else ("", None)
            made.append(Event(at_s, sample, text, fresh, *told))
        return made, len(output.ids)

    def request(self, spoiled: list[int] | None = None) -> Request:
        """The recorded request; `spoiled` are the ids of its first choice where they are not the true ones."""
        events, counts = list[Event](), list[int]()
        for sample in range(self.samples):
            own, count = self.events(sample, spoiled if sample == 0 else None)
            events += own if self.stream else [_as_one(own)]
            counts.append(count)
        events.sort(key=lambda event: event.at_s)
        usage = Usage(len(self.prompt), sum(counts), len(self.prompt) + sum(counts), 0)
        if self.ending == "whole" and not self.stream:
            events[0] = Event(**{**_fields(events[0]), "usage": usage if self.wants_usage else None})
        elif self.ending == "whole":
            events += [Event(90.0, usage=usage)] * self.wants_usage + [Event(90.0, done=True)]
        elif self.ending == "broken":
            events.append(Event(90.0, error=ERROR))
        choices = tuple(Choice(self.prompt, self.attempts(sample)) for sample in range(self.samples))
        return Request(
            self.name,
            0.0,
            choices,
            self.limits,
            tuple(events),
            200,
            Ending.LEFT if self.ending == "left" else Ending.WHOLE,
            self.stream,
            self.ids_shown,
            self.wants_usage,
            self.samples,
            "g0",
        )

    def history(self, spoiled: list[int] | None = None) -> History:
        return History((self.request(spoiled),), (Ledger("d0", {}), Ledger("p0", {})), (), {"bookings": 0})


def _as_one(events: list[Event]) -> Event:
    if not events:
        return Event(80.0)
    last = events[-1]
    ids = tuple(token for event in events for token in event.ids)
    return Event(80.0, last.index, "".join(event.text for event in events), ids, last.finish, last.matched)


def _fields(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in Event.__slots__}


def has_end(plan: Plan, ids: list[int]) -> bool:
    """Whether the answer ends within `ids` by itself."""
    events, _ = plan.events(0, ids)
    return any(event.finish for event in events)


@st.composite
def plans(draw: st.DrawFn, endings: tuple[str, ...] = ("whole", "broken", "left"), name: str = "r1") -> Plan:
    """A request of any kind, with prompts that end inside a character and answers that need several attempts."""
    prompt = draw(st.lists(st.integers(FIRST_BYTE_TOKEN, FIRST_BYTE_TOKEN + 120), min_size=1, max_size=12))
    prompt += draw(st.sampled_from([[], [FIRST_BYTE_TOKEN + 0xC3], [FIRST_BYTE_TOKEN + 0xF0, FIRST_BYTE_TOKEN + 0x9F]]))
    shares = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    ending = draw(st.sampled_from(endings))
    sampled = draw(st.booleans())
    stream = True if ending != "whole" else draw(st.booleans())
    limits = Limits(
        max_tokens=sum(shares) + draw(st.integers(1, 12)),
        min_tokens=draw(st.integers(0, 3)),
        ignore_eos=draw(st.booleans()),
        no_stop_trim=draw(st.booleans()),
    )
    plan = Plan(
        tuple(prompt),
        shares,
        limits,
        sampled,
        ending,
        stream,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2])),
        name,
    )
    stop = draw(st.sampled_from(["", "token", "string", "never"]))
    ids = plan.tokens(0)
    if stop and ids:
        at = draw(st.integers(0, len(ids) - 1))
        string = decode(ids[at : at + 2]) if stop == "string" else "xyz"
        string = string if "�" not in string else "xyz"
        extra = {"stop_token_ids": (ids[at],)} if stop == "token" else {"stop": (string,)}
        changed = Limits(**{**{name: getattr(limits, name) for name in Limits.__slots__}, **extra})
        plan = Plan(**{**{name: getattr(plan, name) for name in Plan.__dataclass_fields__}, "limits": changed})
    return plan
