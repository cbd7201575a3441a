"""`Drafter`: what proposes draft tokens, and how an engine is told which one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..utils.arguments import check_names, shown

if TYPE_CHECKING:
    from ..core.request import Request

MAX_DRAFTS = 32
"""Most draft tokens of a request in a step."""
MAX_NGRAM = 64
"""Longest n-gram that is looked for."""
DEFAULT_DRAFTS, DEFAULT_NGRAM = 4, 5
"""Draft tokens of a `Drafter` that names no number; length of the n-grams where none is given, as in vLLM."""
KEYS = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
OTHER_METHODS = (
    "draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "ngram_gpu", "suffix",
)  # fmt: skip
"""vLLM's methods that are not served."""
_MODELS = "drafts of another model are not served; method='ngram' drafts from the request's own text"
ELSEWHERE = {
    **dict.fromkeys(("model", "draft_tensor_parallel_size", "quantization", "revision", "max_model_len"), _MODELS),
    "disable_by_batch_size": "drafts take only the rows and pages that a step has left",
    "rejection_sample_method": "drafts never change a token, so there is one method",
}
"""vLLM's keys -> why not."""


class Drafter(Protocol):
    """Proposes the tokens that may come next in decoding requests. The engine's thread calls it before a step.

    The model samples its own token at each drafted position. It accepts drafts while they equal these tokens. So a wrong draft
    costs time, and changes nothing. A drafter that raises is asked no more for the requests that it was asked for.

    An attribute `num_speculative_tokens` sets the `k` of the calls; without it, `k` is 4.
    """

    def propose(self, requests: Sequence[Request], k: int) -> Sequence[Sequence[int]]:
        """Draft tokens.

        Args:
            requests: decoding requests. A drafter may read `request_id`, `prompt_token_ids` and `output_token_ids`.
            k: most tokens for each.

        Returns:
            for each request the token ids that may follow; empty: no drafts. Those after the first `k` are ignored.
        """
        ...


class DrafterError(ValueError):
    """A drafter failed, or proposed what is no token. The message names its class."""


class SpeculativeConfig(NamedTuple):
    """`ServerConfig.speculative`, checked. Its keys and defaults are vLLM's."""

    method: str
    """ "ngram", or "custom"."""
    num_speculative_tokens: int
    """Draft tokens of a request in a step, at most."""
    prompt_lookup_max: int = DEFAULT_NGRAM
    """Longest n-gram at the end of the text that is looked for in the text before it."""
    prompt_lookup_min: int = DEFAULT_NGRAM
    """The shortest."""
    drafter: Drafter | None = None
    """The caller's own, with method "custom"."""

    @classmethod
    def of(cls, given: Any) -> SpeculativeConfig | None:
        """The settings of a mapping with `KEYS`, or of a `Drafter`; None for None.

        Raises:
            TypeError: neither of these, or a key that is not known.
            ValueError: a value is out of its range, or a method is not served.
        """
        if given is None:
            return None
        if isinstance(given, Mapping):
            return cls._of_keys(given)
        if not callable(getattr(given, "propose", None)) or isinstance(given, type):
            raise TypeError(
                f"speculative={shown(given)}: expected {{'method': 'ngram', 'num_speculative_tokens': k}}, or an object with "
                "propose(requests, k)"
            )
        count = getattr(given, "num_speculative_tokens", DEFAULT_DRAFTS)
        _check_whole(f"{type(given).__name__}.num_speculative_tokens", count, MAX_DRAFTS)
        return cls("custom", count, drafter=given)

    @classmethod
    def _of_keys(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        check_names("speculative", given, KEYS, ELSEWHERE)
        method = given.get("method")
        if method in OTHER_METHODS:
            raise ValueError(
                f"speculative={{'method': {method!r}}} is not supported: 'ngram' is, or an object with propose(requests, k)"
            )
        if method != "ngram":
            raise ValueError(f"speculative={{'method': {shown(method)}}}: expected 'ngram'")
        longest, shortest = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
        if longest is None:
            longest = DEFAULT_NGRAM if shortest is None else shortest
        if shortest is None:
            shortest = longest
        count = given.get("num_speculative_tokens")
        for name, value, most in (
            ("num_speculative_tokens", count, MAX_DRAFTS),
            ("prompt_lookup_max", longest, MAX_NGRAM),
            ("prompt_lookup_min", shortest, MAX_NGRAM),
        ):
            _check_whole(f"speculative['{name}']", value, most)
        if shortest > longest:
            raise ValueError(
                f"speculative: prompt_lookup_min={shortest} is above prompt_lookup_max={longest}: expected at most that"
            )
        return cls(method, count, longest, shortest)  # pyright: ignore[reportArgumentType]

    def make(self) -> Drafter:
        """The drafter: a new one, or the caller's."""
        from .ngram import NgramDrafter

        return self.drafter or NgramDrafter(self.prompt_lookup_max, self.prompt_lookup_min)


def _check_whole(name: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name}={shown(value)}: expected a whole number from 1 to {most}")
