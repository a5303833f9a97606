"""How an answer's tokens are drawn: the sampling parameters in force. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.token_rule import sampling_key, seeded_key

MODEL_DEFAULTS: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
"""The model's own, of its `generation_config.json`: for chats where the server's sampling defaults are `model`."""
_OPENAI_DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_DEFAULT_SEED = 42
"""What SGLang's deterministic inference takes for a request without a seed."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The parameters of one request. The emulated model only looks at whether it is greedy, and at the seed."""

    parameters: Mapping[str, float]
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.parameters["temperature"] == 0 or self.parameters["top_k"] == 1

    def key(self, secret: bytes, rid: str, deterministic: bool) -> bytes:
        """The extra hash key: none for a greedy request, the seed's on a deterministic server, else its own."""
        if self.greedy:
            return b""
        if deterministic:
            return seeded_key(_DEFAULT_SEED if self.seed is None else self.seed)
        return sampling_key(secret, rid)


def drawn(given: Mapping[str, Any], seed: int | None, defaults: Mapping[str, float]) -> Draw:
    """What a request gives, else `defaults`, else OpenAI's; null is not given."""
    in_force = {**_OPENAI_DEFAULTS, **defaults}
    parameters = {name: in_force[name] if given.get(name) is None else given[name] for name in _OPENAI_DEFAULTS}
    return Draw(parameters, seed)
