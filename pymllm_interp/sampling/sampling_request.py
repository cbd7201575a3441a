"""The fields of a request that sampling reads."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from ..core.sampling_params import SamplingParams


class SamplingRequest(Protocol):
    """A request with a next token to sample. Attributes are read, never written."""

    @property
    def request_id(self) -> str:
        """Names the request in error messages."""
        ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def seed(self) -> int:
        """Key of the sampling noise, with `sample_index` and `num_generated`. Any integer."""
        ...

    @property
    def sample_index(self) -> int:
        """Index of the completion among the prompt's `n`."""
        ...

    @property
    def num_generated(self) -> int:
        """Generated tokens, with those that the host has not read yet."""
        ...

    @property
    def eos_token_ids(self) -> AbstractSet[int]:
        """Token ids that `min_tokens` forbids: end-of-sequence ids, under `ignore_eos` too, and the caller's stop ids."""
        ...

    @property
    def bad_words(self) -> Sequence[Sequence[int]]:
        """Sequences of token ids that are not generated. `BEGIN` stands before one that is not generated first."""
        ...

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Read only for the repetition penalty."""
        ...

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Read only for penalties and bad words of several tokens; all generated tokens then."""
        ...
