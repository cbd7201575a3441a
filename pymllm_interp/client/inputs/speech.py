"""`SpeechTokens`: the tokens that Whisper's decoder begins with: language, task, and no timestamps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.sampling_params import BEGIN
from ...utils.arguments import PromptError

LANGUAGE, TASK = "en", "transcribe"
"""Language and task of a multilingual model's requests without any, as in vLLM."""


@dataclass(frozen=True)
class SpeechTokens:
    """Ids of a model's special tokens, from its generation_config.json.

    Attributes:
        start: first token of the decoder.
        languages: code, such as "de" -> its token. Empty: the model knows one language.
        tasks: "transcribe" and "translate" -> their tokens.
        no_timestamps: token after which no times are written; None: the model has none.
        previous: token before the text that came before; None: the model has none.
        language, task: defaults.
        banned: tokens that are never generated: `SamplingRequest.bad_words`.
    """

    start: int
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    no_timestamps: int | None = None
    previous: int | None = None
    language: str = LANGUAGE
    task: str = TASK
    banned: Sequence[Sequence[int]] = ()

    @classmethod
    def of(cls, start: int, generation: Mapping[str, Any]) -> SpeechTokens:
        """The tokens of a generation config's values."""
        several = generation.get("is_multilingual", True)
        languages = generation.get("lang_to_id") or {} if several else {}
        codes = {name.removeprefix("<|").removesuffix("|>"): token for name, token in languages.items()}
        return cls(
            start, codes, generation.get("task_to_id") or {} if several else {}, generation.get("no_timestamps_token_id"),
            generation.get("prev_sot_token_id"), generation.get("language") or LANGUAGE, generation.get("task") or TASK,
            [
                *((token,) for token in generation.get("suppress_tokens") or ()),
                *((BEGIN, token) for token in generation.get("begin_suppress_tokens") or ()),
            ],
        )  # fmt: skip

    def ids(self, language: str | None = None, task: str | None = None) -> list[int]:
        """First tokens of a decoder. Raises PromptError for a language or a task that the model lacks."""
        found = [self.start]
        for name, given, default, known in (
            ("language", language, self.language, self.languages), ("task", task, self.task, self.tasks),
        ):  # fmt: skip
            token = known.get(default if given is None else given)
            if token is not None:
                found.append(token)
            elif given is not None and given != default:
                some = ", ".join(sorted(known)[:12]) or f"{default} only"
                raise PromptError(f"{name}={given[:40]!r}: the model knows {some}{', ...' if len(known) > 12 else ''}")
        return found if self.no_timestamps is None else [*found, self.no_timestamps]
