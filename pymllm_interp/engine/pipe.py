"""What transformers' text-generation pipeline returns, for `LM.pipe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.step import RequestEnd
from .chat import is_conversation


class GeneratedText:
    """Makes the pipeline's records of finished requests.

    Args:
        tokenizer: of the model.
        prompts: texts or conversations, one for each request.
    """

    def __init__(self, tokenizer: Any, prompts: Sequence[Any]) -> None:
        self._tokenizer, self._prompts = tokenizer, prompts

    def __call__(self, requests: Sequence[RequestEnd]) -> list[Any]:
        """``[{"generated_text": prompt and completion}]``; for several requests, a list of these."""
        records = [[self._record(*pair)] for pair in zip(self._prompts, requests, strict=True)]
        return records if len(records) > 1 else records[0]

    def _record(self, prompt: Any, request: RequestEnd) -> dict[str, Any]:
        whole, before = self._text(request.all_token_ids), self._text(request.prompt_token_ids)
        new = whole[len(before) :]
        if is_conversation(prompt):
            return {"generated_text": [*prompt, {"role": "assistant", "content": new}]}
        return {"generated_text": (prompt if isinstance(prompt, str) else before) + new}

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
