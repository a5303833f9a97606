"""What happens to a request whose stream breaks after its client has bytes: the table of modes, and how one is chosen.

Pure and total. What a client holds is never followed by text that was generated from another context: a mode that
cannot promise this for a request is refused for it, and the reasons are told. `docs/failure-semantics.md` shows the
table, written from `choose` itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from failover.features import GENERATE, Feature, Sampling

WANTED_HEADER = "x-pdgate-on-failure"
_MAX_NAME_CHARS = 40


class Mode(StrEnum):
    """How a broken request goes on."""

    RESUME = "resume"
    """Another pair prefills the prompt and the tokens that came, and generates the rest: exact, token by token."""
    REPLAY = "replay"
    """It runs again from the start; the client gets what comes after the text it has, which must come again."""
    RESUME_TEXT = "resume_text"
    """The text that came is sent as text with the prompt. Tokens at the seam may differ: only where it is allowed."""
    ERROR = "error"
    """One error event that says what happened ends the stream."""
    RETRY = "retry"
    """Nothing was sent: tried again whole. Not for a client to ask for, or for an operator to forbid."""


DEFAULT_MODES = (Mode.RESUME, Mode.REPLAY)


class Determinism(StrEnum):
    """Whether the same request gives the same tokens again, on any pair and in any batch."""

    NONE = "none"
    DECLARED = "declared"
    """The operator says so; a request without a seed is drawn anew all the same."""
    ENGINE = "engine"
    """`--enable-deterministic-inference`: greedy, seeded, and without a seed too, which is 42 then."""


@dataclass(frozen=True, slots=True)
class Traits:
    """All of a request that decides. `inexact`: why its output ids are not known, empty where they are."""

    path: str
    stream: bool
    sampling: Sampling
    determinism: Determinism
    features: frozenset[Feature]
    inexact: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done, and why not something better, in words for an operator."""

    mode: Mode
    reason: str


_F = Feature
RESUME_WHY_NOT: Mapping[Feature, str] = {
    _F.TOOLS: "the engine parses tool calls and tells no output ids then",
    _F.REQUIRE_REASONING: "the engine would wait for the end of the reasoning anew",
    _F.GRAMMAR: "a grammar would begin anew, in the middle of the answer",
    _F.PENALTIES: "penalties count output tokens only, and would begin anew",
    _F.PROMPT_LOGPROBS: "the prompt that logprobs are wanted of would be longer",
    _F.STOP_REGEX: "a stop_regex may match across the seam, where nobody looks",
    _F.MEDIA: "the ids of a prompt with media are not known",
    _F.EMBEDDINGS: "a prompt of embeddings cannot be followed by token ids",
    _F.SESSIONS: "a session lives on one server",
    _F.CUSTOM_LOGIT_PROCESSOR: "a custom logit processor may keep a state, which would begin anew",
    _F.WATERMARK: "the watermark would lose its context",
    _F.THINKING_BUDGET: "the thinking budget would begin anew",
    _F.HIDDEN_STATES: "hidden states would be those of the last part only",
    _F.ROUTED_EXPERTS: "routed experts would be those of the last part only",
    _F.WHOLE_OUTPUT: "the last event would hold the values of the last part only",
    _F.BEAM: "beam search keeps several answers, of which one cannot go on alone",
}
"""Features that forbid a resume. All others are carried over the seam: logprobs, stop strings, biases, least lengths,
an echo; each of several samples is an engine request of its own."""

REPLAY_WHY_NOT: Mapping[Feature, str] = {_F.SESSIONS: "the session has moved on"}
"""Little is forbidden, because what comes again is compared with what the client has."""

_INSIDE = "what came is not all of what the model wrote"
RESUME_TEXT_WHY_NOT: Mapping[Feature, str] = {
    _F.TOOLS: _INSIDE,
    _F.REASONING: _INSIDE,
    _F.REQUIRE_REASONING: RESUME_WHY_NOT[_F.REQUIRE_REASONING],
    _F.GRAMMAR: RESUME_WHY_NOT[_F.GRAMMAR],
    _F.PROMPT_LOGPROBS: RESUME_WHY_NOT[_F.PROMPT_LOGPROBS],
    _F.IDS_PROMPT: "text cannot be put behind a prompt of token ids",
    _F.EMBEDDINGS: "text cannot be put behind a prompt of embeddings",
    _F.SESSIONS: RESUME_WHY_NOT[_F.SESSIONS],
    _F.CUSTOM_LOGIT_PROCESSOR: RESUME_WHY_NOT[_F.CUSTOM_LOGIT_PROCESSOR],
    _F.THINKING_BUDGET: RESUME_WHY_NOT[_F.THINKING_BUDGET],
    _F.HIDDEN_STATES: RESUME_WHY_NOT[_F.HIDDEN_STATES],
    _F.ROUTED_EXPERTS: RESUME_WHY_NOT[_F.ROUTED_EXPERTS],
    _F.WHOLE_OUTPUT: RESUME_WHY_NOT[_F.WHOLE_OUTPUT],
    _F.BEAM: RESUME_WHY_NOT[_F.BEAM],
    _F.ECHO: "the engine would repeat the prompt and the output so far",
    _F.SUFFIX: "the end of a prompt with a suffix is its suffix",
}

_WHY_NOT = {Mode.RESUME: RESUME_WHY_NOT, Mode.REPLAY: REPLAY_WHY_NOT, Mode.RESUME_TEXT: RESUME_TEXT_WHY_NOT}


def choose(traits: Traits, allowed: Sequence[Mode]) -> Plan:
    """The first of the allowed modes, in their order, that keeps its promise for this request; else an error."""
    if not traits.stream:
        return Plan(Mode.RETRY, "nothing was sent: it is tried again whole")
    refused = []
    for mode in allowed:
        if mode is Mode.ERROR:
            break
        if mode is Mode.RETRY:
            continue
        why_not = next(_objections(mode, traits), None)
        if why_not is None:
            return Plan(mode, _promise(mode, traits))
        refused.append(f"no {mode}: {why_not}")
    return Plan(Mode.ERROR, "; ".join(refused) or "nothing else is allowed")


def _objections(mode: Mode, traits: Traits) -> Iterator[str]:
    """Why this mode is not possible, the most telling reason first."""
    table = _WHY_NOT[mode]
    yield from (table[feature] for feature in Feature if feature in traits.features and feature in table)
    if mode is Mode.RESUME and {Feature.ECHO, Feature.IDS_PROMPT} <= traits.features:
        yield "the text of a prompt of token ids, which the engine echoes, is not known"
    if mode is Mode.RESUME and traits.inexact:
        yield traits.inexact
    if mode is Mode.RESUME_TEXT and traits.path == GENERATE:
        yield "its events repeat all the output, and would begin anew"
    if mode is Mode.REPLAY:
        if traits.determinism is Determinism.NONE:
            yield "nobody says that the same request gives the same tokens again"
        if traits.determinism is Determinism.DECLARED and traits.sampling is Sampling.SAMPLED:
            yield "it is sampled without a seed"


def _promise(mode: Mode, traits: Traits) -> str:
    match mode:
        case Mode.RESUME if traits.sampling is Sampling.SEEDED and traits.determinism is Determinism.NONE:
            return "its output ids are known; engines do not obey the seed, so the rest is one more valid sample"
        case Mode.RESUME:
            return "its output ids are known"
        case Mode.REPLAY:
            return "the same request gives the same tokens again"
        case _:
            return "the text so far goes into the prompt; tokens at the seam may differ"


def parse_wanted(text: str, allowed: Sequence[Mode]) -> tuple[Mode, ...]:
    """The modes that the header `x-pdgate-on-failure` names, in the client's order; `error` is always allowed.

    Raises ValueError, in words for the client, at a mode that there is not or that the operator does not allow.
    """
    offered = (*dict.fromkeys(mode for mode in allowed if mode not in (Mode.ERROR, Mode.RETRY)), Mode.ERROR)
    wanted: dict[Mode, None] = {}
    for name in text.split(","):
        mode = next((mode for mode in offered if mode == name.strip().lower()), None)
        if mode is None:
            names = ", ".join(offered)
            raise ValueError(
                f"{WANTED_HEADER}: {name.strip()[:_MAX_NAME_CHARS]!r} is not allowed here; send one or more of {names},"
                " the best first, separated by commas"
            )
        wanted[mode] = None
    return tuple(wanted)
