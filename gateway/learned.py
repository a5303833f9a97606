"""What this gateway has learned of its servers and its traffic: timings, bytes per token, output lengths.

Holds the states that `routing/estimator.py` computes; starts from the configured profile. A server that is not known
yet is taken for one like the others of its role: by the profile alone it would look slower than servers that are faster
than it says, get no requests, and never become known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from engines.timing import DecodeTiming, EngineProfile, PrefillTiming, decode_step_s, prefill_s
from engines.types import EngineId
from routing import estimator
from routing.estimator import Quantile, Ratio

_MAX_MODELS = 1000


class Learned:
    """All estimates; `version` grows with every observation."""

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile
        self.version = 0
        self._prefill: dict[EngineId, Ratio] = {}
        self._decode: dict[EngineId, Ratio] = {}
        self._bytes_per_token: OrderedDict[str, Ratio] = OrderedDict()
        self._output: OrderedDict[str, Quantile] = OrderedDict()

    def prefill_timing(self, engine_id: EngineId, chunk_tokens: int) -> PrefillTiming:
        """The timing of a prefill as observed; `chunk_tokens` is what the server itself says."""
        return estimator.corrected_prefill(self._prior_prefill(chunk_tokens), _known(self._prefill, engine_id))

    def decode_timing(self, engine_id: EngineId) -> DecodeTiming:
        return estimator.corrected_decode(self.profile.decode, _known(self._decode, engine_id))

    def prefill_error(self, engine_id: EngineId) -> float | None:
        """Mean relative error of its predicted prefills; None before there was enough to predict by."""
        return _known_error(self._prefill.get(engine_id))

    def decode_error(self, engine_id: EngineId) -> float | None:
        return _known_error(self._decode.get(engine_id))

    def prompt_tokens(self, model: str, prompt_bytes: int) -> int:
        """The tokens that so many bytes of text stand for under this model's tokenizer."""
        return estimator.prompt_tokens(self._bytes_per_token.get(model, estimator.BYTES_PER_TOKEN), prompt_bytes)

    def bytes_per_token(self, model: str) -> float:
        return estimator.bytes_per_token(self._bytes_per_token.get(model, estimator.BYTES_PER_TOKEN))

    def output_tokens(self, model: str, max_output_tokens: int) -> int:
        return estimator.expected_output_tokens(self._output.get(model, Quantile()), max_output_tokens)

    def saw_prefill(
        self, engine_id: EngineId, chunk_tokens: int, prompt_tokens: int, cached_tokens: int, took_s: float
    ) -> None:
        """A prefill took `took_s` for this much."""
        predicted_s = prefill_s(self._prior_prefill(chunk_tokens), prompt_tokens, cached_tokens)
        state = self._prefill.get(engine_id, Ratio())
        self._prefill[engine_id] = estimator.observe_time(state, predicted_s, took_s)
        self.version += 1

    def saw_decode(self, engine_id: EngineId, running: int, kv_tokens: int, step_s: float) -> None:
        """A decode took `step_s` a token with so much running."""
        predicted_s = decode_step_s(self.profile.decode, running, kv_tokens)
        state = self._decode.get(engine_id, Ratio())
        self._decode[engine_id] = estimator.observe_time(state, predicted_s, step_s)
        self.version += 1

    def saw_prompt(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        state = self._bytes_per_token.get(model, estimator.BYTES_PER_TOKEN)
        self._bytes_per_token[model] = estimator.observe_prompt(state, prompt_bytes, prompt_tokens)
        _bound(self._bytes_per_token)
        self.version += 1

    def saw_output(self, model: str, output_tokens: int) -> None:
        self._output[model] = estimator.observe_output(self._output.get(model, Quantile()), output_tokens)
        _bound(self._output)
        self.version += 1

    def forget_engine(self, engine_id: EngineId) -> None:
        """The server restarted, perhaps as another build: its timings are learned anew."""
        self._prefill.pop(engine_id, None)
        self._decode.pop(engine_id, None)

    def errors(self) -> dict[tuple[str, EngineId], float]:
        """Mean relative error of the predictions, by ("prefill" | "decode", engine)."""
        found = {("prefill", engine_id): state.error_ratio for engine_id, state in self._prefill.items()}
        found.update({("decode", engine_id): state.error_ratio for engine_id, state in self._decode.items()})
        return found

    def _prior_prefill(self, chunk_tokens: int) -> PrefillTiming:
        prior = self.profile.prefill
        return PrefillTiming(prior.base_s, prior.per_token_s, prior.per_token2_s, chunk_tokens)


def _known(states: Mapping[EngineId, Ratio], engine_id: EngineId) -> Ratio:
    """What is known of a server, or of the median of those that something is known of."""
    state = states.get(engine_id)
    if state is not None and _is_known(state):
        return state
    known = sorted(estimator.ratio_of(each) for each in states.values() if _is_known(each))
    return Ratio(prior=known[len(known) // 2]) if known else Ratio()


def _is_known(state: Ratio) -> bool:
    return state.observations >= estimator.DEFAULT_RATIO.min_observations


def _known_error(state: Ratio | None) -> float | None:
    return state.error_ratio if state is not None and _is_known(state) else None


def _bound(states: OrderedDict[str, Ratio] | OrderedDict[str, Quantile]) -> None:
    while len(states) > _MAX_MODELS:
        states.popitem(last=False)
