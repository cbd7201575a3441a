"""`Drafter`: a source of draft tokens, and how an engine is configured with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..utils.arguments import check_names, shown

if TYPE_CHECKING:
    from ..core.request import Request

MAX_DRAFTS = 32
"""Most draft tokens of a request in a step."""
MAX_NGRAM = 64
"""Longest n-gram that is looked for."""
DEFAULT_DRAFTS, DEFAULT_NGRAM = 4, 5
"""Draft tokens of a `Drafter` without a number, and default length of n-grams, as in vLLM."""
METHODS: dict[str, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("model",),
    "eagle3": ("model",),
}
"""Methods, and the keys that each has beside "method" and "num_speculative_tokens"."""
OTHER_METHODS = ("eagle", "medusa", "mlp_speculator", "mtp", "ngram_gpu", "suffix")
"""vLLM's methods that are not served."""
_AS_TARGET = "the draft model has the model's dtype, device and longest sequence"
ELSEWHERE = {
    **dict.fromkeys(("draft_tensor_parallel_size", "quantization", "max_model_len"), _AS_TARGET),
    "revision": "name a folder: model='/path/to/draft'",
    "disable_by_batch_size": "drafts take only the rows and pages that a step has left",
    "rejection_sample_method": "drafts never change a token, so there is one method",
}
"""vLLM's keys -> why not."""


class Drafter(Protocol):
    """Proposes the tokens that may come next in decoding requests. The engine's thread calls it before a step.

    The model samples a token at each drafted position. It accepts drafts while they equal these tokens. So a wrong
    draft costs time, and changes nothing. A drafter that raises is not asked again for the affected requests.

    An attribute `num_speculative_tokens` sets the `k` of the calls; without it, `k` is 4. A method
    ``foresees(request)`` tells whether drafts are likely after the next token. If it returns False, the next step need
    not wait for that token.
    """

    def propose(self, requests: Sequence[Request], k: int) -> Sequence[Sequence[int]]:
        """Draft tokens.

        Args:
            requests: decoding requests. A drafter may read `request_id`, `prompt_token_ids` and `output_token_ids`.
            k: most tokens for each.

        Returns:
            token ids that may follow each request; empty: no drafts. Those after the first `k` are ignored.
        """
        ...


class DrafterError(ValueError):
    """A drafter failed, or proposed invalid tokens. The message names its class."""


class SpeculativeConfig(NamedTuple):
    """`ServerConfig.speculative`, checked. Its keys and defaults are vLLM's."""

    method: str
    """One of `METHODS`, or "custom"."""
    num_speculative_tokens: int
    """Draft tokens of a request in a step, at most."""
    prompt_lookup_max: int = DEFAULT_NGRAM
    """Longest n-gram at the end of the text that is looked for in the text before it."""
    prompt_lookup_min: int = DEFAULT_NGRAM
    """The shortest."""
    drafter: Drafter | None = None
    """The caller's own, with method "custom"."""
    model: str = ""
    """The draft model: a folder or a name, as `ModelConfig.model`."""

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
        every = ("method", "num_speculative_tokens", *chain.from_iterable(METHODS.values()))
        check_names("speculative", given, every, ELSEWHERE)
        method, known = given.get("method"), ", ".join(map(repr, METHODS))
        if method in OTHER_METHODS:
            raise ValueError(
                f"speculative={{'method': {method!r}}} is not supported: {known} are, or an object with propose(requests, k)"
            )
        if method not in METHODS:
            raise ValueError(f"speculative={{'method': {shown(method)}}}: expected one of {known}")
        own = METHODS[method]
        for name in given.keys() - {"method", "num_speculative_tokens", *own}:
            raise ValueError(f"speculative['{name}'] is not a setting of method={method!r}: it has {', '.join(own)}")
        count = given.get("num_speculative_tokens")
        _check_whole("speculative['num_speculative_tokens']", count, MAX_DRAFTS)
        assert isinstance(count, int)
        return cls._of_ngrams(given, count) if method == "ngram" else cls._of_model(given, method, count)

    @classmethod
    def _of_model(cls, given: Mapping[str, Any], method: str, count: int) -> SpeculativeConfig:
        model = given.get("model")
        if isinstance(model, PathLike):
            model = fspath(model)
        if not isinstance(model, str) or not model:
            raise ValueError(f"speculative['model']={shown(model)}: expected the draft model's folder or name")
        return cls(method, count, model=model)

    @classmethod
    def _of_ngrams(cls, given: Mapping[str, Any], count: int) -> SpeculativeConfig:
        longest, shortest = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
        if longest is None:
            longest = DEFAULT_NGRAM if shortest is None else shortest
        if shortest is None:
            shortest = longest
        for name, value in (("prompt_lookup_max", longest), ("prompt_lookup_min", shortest)):
            _check_whole(f"speculative['{name}']", value, MAX_NGRAM)
        if shortest > longest:
            raise ValueError(
                f"speculative: prompt_lookup_min={shortest} is above prompt_lookup_max={longest}: expected at most that"
            )
        return cls("ngram", count, longest, shortest)

    def make(self) -> Drafter:
        """The drafter: a new one, or the caller's. Those with a model are made by the runner (`runner.drafting`)."""
        from .ngram import NgramDrafter

        assert not self.model, "a runner loads it"
        return self.drafter or NgramDrafter(self.prompt_lookup_max, self.prompt_lookup_min)


def _check_whole(name: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name}={shown(value)}: expected a whole number from 1 to {most}")
