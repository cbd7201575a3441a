"""Results of `LM.pipe`, in the format of transformers' text-generation pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...core.request import Request
from ...utils.arguments import PromptError
from ..chat import is_conversation
from ..prompt_batch import prompts_of

PIPELINE = {"max_new_tokens": 256, "do_sample": True, "temperature": 0.7}
"""Default parameters of transformers' text-generation pipeline."""


class _Prompt(NamedTuple):
    prompt: Any
    """Text, a conversation or token ids."""
    requests: list[Request]
    """One for each of its `num_return_sequences`."""


class GeneratedText:
    """Makes the pipeline's records of all requests of one call, or of one ``with`` block.
    Raises PromptError: the model has no tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is None:
            raise PromptError("lm.pipe returns text, and this model has no tokenizer: use lm.generate")
        self._tokenizer = tokenizer
        self._prompts: list[_Prompt] = []
        self._inputs, self._listed = 0, False

    def add(self, given: tuple[tuple, dict[str, Any]], requests: Sequence[Request]) -> None:
        """Add the prompts of an invoke.

        Args:
            given: ``(args, kwargs)`` that hold them.
            requests: requests of the first prompt, then of the second, and so on: the same number for each.
        """
        prompts, written = prompts_of(*given, "the prompt")[0].prompts, given[0][0] if given[0] else None
        self._inputs += 1
        self._listed |= isinstance(written, list | tuple) and isinstance(written[0], str | list | tuple)
        copies = len(requests) // len(prompts)
        for i, prompt in enumerate(prompts):
            self._prompts.append(_Prompt(prompt, list(requests[i * copies : (i + 1) * copies])))

    def __call__(self) -> list[Any]:
        """``[{"generated_text": prompt and completion}]``; for a list of prompts, or several invokes, a list of these."""
        records = [[self._record(prompt, request) for request in requests] for prompt, requests in self._prompts]
        return records if self._listed or self._inputs > 1 else [record for own in records for record in own]

    def _record(self, prompt: Any, request: Request) -> dict[str, Any]:
        whole, before = self._text(request.all_token_ids), self._text(request.prompt_token_ids)
        new = whole[len(before) :]
        if is_conversation(prompt):
            return {"generated_text": [*prompt, {"role": "assistant", "content": new}]}
        return {"generated_text": (prompt if isinstance(prompt, str) else before) + new}

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
