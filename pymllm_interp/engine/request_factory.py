"""What a caller passes, turned into requests; everything that can be wrong with it is found here, before anything runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..core.arguments import PromptError, check_names
from ..core.request import Request
from ..core.sampling_params import ALIASES, ELSEWHERE, SamplingParams

_ids = itertools.count()


@dataclass(frozen=True)
class Limits:
    """What the engine can take.

    Attributes:
        max_model_len: prompt and new tokens of a request.
        max_num_tokens: tokens of a step, which a traced prompt must fit.
        kv_tokens: slots of the KV pool.
    """

    vocab_size: int
    max_model_len: int
    max_num_tokens: int
    kv_tokens: int
    max_running: int


class RequestFactory:
    """Makes requests from prompts.

    Args:
        tokenizer: or None, where prompts are token ids.
        eos_token_ids: the model's end-of-sequence ids.
        seed: of requests that bring none.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int], limits: Callable[[], Limits], seed: int) -> None:
        self.tokenizer, self.eos_token_ids, self.seed = tokenizer, eos_token_ids, seed
        self._limits = limits
        self._ordinals = itertools.count()

    @property
    def limits(self) -> Limits:
        """As they are now: `ModelRunner.update_max_model_len` may lower them."""
        return self._limits()

    def tokens(self, prompt: Any, what: str = "prompt") -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt: text, token ids (list or tensor), or a tokenizer's dict.

        Raises:
            PromptError: empty, of another type, or with ids outside the vocabulary.
        """
        text = prompt if isinstance(prompt, str) else None
        if text is not None:
            if self.tokenizer is None:
                raise PromptError(f"{what} is text, but this model has no tokenizer: pass a list of token ids")
            ids = self.tokenizer(text)["input_ids"]
        else:
            ids = _ids_of(prompt, what)
        if not ids:
            raise PromptError(f"{what} is empty: a prompt needs at least one token")
        vocab_size = self.limits.vocab_size
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocab_size:
                raise PromptError(f"{what} holds token id {token}, but the vocabulary goes from 0 to {vocab_size - 1}")
        return text, ids

    def requests(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        what: str = "prompt",
        timeout: float | None = None,
        traced: bool = False,
        forward_only: bool = False,
        reads_only: bool = False,
    ) -> list[Request]:
        """The `params.n` requests of a prompt. With `reads_only` it may fill the context: the new token is of no use.

        Raises:
            PromptError: the request can never be served; the message names the limit and its setting.
        """
        max_tokens = self._check(prompt_token_ids, params, what, traced, forward_only, reads_only)
        if timeout is not None and not timeout > 0:
            raise PromptError(f"timeout={timeout}: expected seconds above 0, or None")
        number, ordinal = next(_ids), next(self._ordinals)
        seed = params.seed if params.seed is not None else _mix(self.seed, ordinal)
        stops = frozenset() if params.ignore_eos else self.eos_token_ids
        if params.stop_token_ids:
            stops |= frozenset(params.stop_token_ids)
        requests: list[Request] = []
        for index in range(params.n):
            requests.append(
                Request(
                    request_id=f"{number}-{index}" if params.n > 1 else str(number),
                    prompt_token_ids=prompt_token_ids,
                    params=params,
                    max_tokens=max_tokens,
                    seed=seed,
                    sample_index=index,
                    deadline=None if timeout is None else time.monotonic() + timeout,
                    eos_token_ids=stops,
                    forward_only=forward_only,
                    leader=requests[0] if requests else None,
                    logprobs=None if params.logprobs is None else [],
                    prompt_logprobs=None if params.prompt_logprobs is None or index else [None],
                )
            )
            if index == 0 and params.prompt_logprobs is not None and params.n > 1:
                params = replace(params, prompt_logprobs=None)  # the first computes them for all
        return requests

    def _check(
        self, ids: list[int], params: SamplingParams, what: str, traced: bool, forward_only: bool, reads_only: bool
    ) -> int:
        limits, length = self.limits, len(ids)
        room = limits.max_model_len - length
        max_tokens = params.max_tokens if params.max_tokens is not None else max(room, 1)
        if forward_only:
            max_tokens = 1
        if room < (0 if forward_only or reads_only else max_tokens):
            raise PromptError(
                f"{what} has {length} tokens and asks for {max_tokens} new ones ({length + max_tokens} in all), but the "
                f"context holds {limits.max_model_len} (max_model_len): shorten the prompt or lower max_tokens"
            )
        if length + max_tokens - 1 > limits.kv_tokens:
            raise PromptError(
                f"{what} may come to need KV for {length + max_tokens - 1} tokens, but the pool holds "
                f"{limits.kv_tokens}: raise kv_cache_tokens, or lower max_tokens"
            )
        if (traced or forward_only) and length > limits.max_num_tokens:
            raise PromptError(
                f"{what} has {length} tokens; a traced prompt runs in one pass, and a pass holds "
                f"{limits.max_num_tokens}: raise max_num_tokens when the LM is made"
            )
        if params.stop_strings and self.tokenizer is None:
            raise PromptError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        for name, tokens in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids or ())):
            for token in tokens:
                if not 0 <= token < limits.vocab_size:
                    raise PromptError(f"{name} names token id {token}, the vocabulary ends at {limits.vocab_size - 1}")
        return max_tokens


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or a list of them, as a list. A list of whole numbers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping, torch.Tensor)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise PromptError(f"prompts is a {type(prompts).__name__}: expected text, token ids, or a list of them")
    if prompts and all(isinstance(token, int) for token in prompts):
        return [prompts]
    return list(prompts)


def sampling_from_kwargs(kwargs: dict[str, Any], prompt_len: int) -> SamplingParams:
    """SamplingParams from transformers' and vLLM's names. Greedy, and 20 tokens with the prompt's, unless asked otherwise.

    Raises:
        TypeError: a name that is neither's.
    """
    given = {name: value for name, value in kwargs.items() if value is not None and name not in IGNORED}
    check_names("lm.generate", given, [*SamplingParams.__dataclass_fields__, *ALIASES, "do_sample"], ELSEWHERE)
    do_sample = given.pop("do_sample", None)
    for alias, name in ALIASES.items():
        if alias in given:
            if name in given:
                raise TypeError(f"{alias} and {name} are the same: pass one of them")
            given[name] = given.pop(alias)
    if isinstance(given.get("stop_token_ids"), int):
        given["stop_token_ids"] = [given["stop_token_ids"]]
    if do_sample is False:
        given["temperature"] = 0.0
    given.setdefault("temperature", 1.0 if do_sample else 0.0)
    given.setdefault("max_tokens", default_max_tokens(prompt_len))
    return SamplingParams(**given)


def default_max_tokens(prompt_len: int) -> int:
    """New tokens where nobody says how many: 20 with the prompt's, as in transformers."""
    return max(1, 20 - prompt_len)


IGNORED = {"pad_token_id", "use_cache"}
"""Arguments that change nothing here: nothing is padded, and the cache is always used."""


def _ids_of(prompt: Any, what: str) -> list[int]:
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            text = ': of a row of a data set, pass row["text"]' if "text" in prompt else f": {sorted(prompt)}"
            raise PromptError(f"{what} is a dict without `input_ids`{text}")
        ids, mask = _one_row(prompt["input_ids"], what), prompt.get("attention_mask")
        if mask is None:
            return ids
        return [token for token, kept in zip(ids, _one_row(mask, what), strict=True) if kept]
    return _one_row(prompt, what)


def _one_row(value: Any, what: str) -> list[int]:
    given = value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value
    rows = list(given) if isinstance(given, Sequence) else None
    if rows and isinstance(rows[0], (list, tuple)):
        if len(rows) > 1:
            raise PromptError(
                f"{what} holds {len(rows)} prompts in one: a trace has a `with tracer.invoke(prompt):` for each, "
                "lm.generate takes a list of texts, or of lists of token ids without padding"
            )
        rows = list(rows[0])
    if rows is None or not all(issubclass(kind, int) and kind is not bool for kind in set(map(type, rows))):
        raise PromptError(f"{what} is a {type(value).__name__}: expected text, or token ids as whole numbers")
    return rows


def _mix(seed: int, ordinal: int) -> int:
    """A seed for the ordinal-th request of an engine with `seed`."""
    return (seed * 0x9E3779B97F4A7C15 + ordinal * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
