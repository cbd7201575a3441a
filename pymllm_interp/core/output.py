"""What a caller gets: prompts and their completions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..utils.arguments import shown
from ..utils.tables import Shown, Table

if TYPE_CHECKING:
    from ..hooks.captures.activations import Activations
    from ..hooks.receipt import Receipt
    from ..speculative.request_drafts import DraftCounts


class Logprob(NamedTuple):
    """A token's log probability; under the raw logits, unless `ServerConfig.logprobs_mode` says otherwise."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    decoded_token: str | None = None


@dataclass(repr=False)
class CompletionOutput(Shown):
    """One of a prompt's `n` completions."""

    index: int
    text: str
    """Without what stopped it, unless `include_stop_str_in_output`, and, by default, special tokens."""
    token_ids: list[int]
    """With the token that stopped the generation."""
    finish_reason: str | None = None
    """stop, length, abort, timeout or error; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or token id, where that was the reason; None for the model's main end-of-sequence token."""
    logprobs: list[dict[int, Logprob]] | None = None
    error: BaseException | None = None
    activations: Any = None
    """What was captured (hooks.captures.activations.Activations): empty, so false, where nothing was asked for."""
    receipt: Any = None
    """What was applied, and how its steps ran (hooks.receipt.Receipt), or None."""
    logprobs_mode: str = "raw_logprobs"
    """What `logprobs` holds (`ServerConfig.logprobs_mode`)."""
    drafts: DraftCounts | None = None
    """Passes with drafts, their drafts, and the accepted ones; None where none are proposed (docs/engine/speculative.md)."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log probabilities of `token_ids`; None without SamplingParams(logprobs=...), or where they are logits."""
        if self.logprobs is None or self.logprobs_mode.endswith("logits"):
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))

    def __repr__(self) -> str:
        parts = [f"index={self.index}", f"text={shown(self.text)}", f"tokens={len(self.token_ids)}"]
        parts.append(f"finish_reason={self.finish_reason!r}")
        if self.activations:
            parts.append(f"activations={self.activations!r}")
        if self.error is not None:
            parts.append(f"error={shown(self.error)}")
        return f"CompletionOutput({', '.join(parts)})"

    def table(self) -> Table:
        """The text, its tokens, why it ended, and what was captured."""
        return Table(f"completion {self.index}", ("", ""), self._rows())

    def _rows(self) -> list[tuple[str, Any]]:
        ended = self.finish_reason or "running"
        rows: list[tuple[str, Any]] = [("text", self.text), ("tokens", len(self.token_ids)), ("finish_reason", ended)]
        if self.stop_reason is not None:
            rows.append(("stop_reason", repr(self.stop_reason)))
        if self.cumulative_logprob is not None:
            rows.append(("cumulative_logprob", f"{self.cumulative_logprob:.4f}"))
        if self.activations:
            rows.append(("activations", ", ".join(self.activations)))
        if self.receipt is not None and self.receipt.interventions:
            rows.append(("interventions", "; ".join(map(repr, self.receipt.interventions))))
        return rows if self.error is None else [*rows, ("error", repr(self.error))]


@dataclass(repr=False)
class RequestOutput(Shown):
    """A prompt and its completions. `text`, `token_ids`, `finish_reason`, `logprobs`, `activations` and `receipt` are the first
    one's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens of the first completion with KV in the prefix cache."""
    warnings: list[str] = field(default_factory=list)

    @property
    def perplexity(self) -> float | None:
        """Perplexity of the prompt: exp of the mean negative log probability of its tokens. The first token has no probability.

        None without SamplingParams(prompt_logprobs=...), for a prompt of one token, or where they are logits.
        SamplingParams(prompt_logprobs=0, max_tokens=0) generates nothing.
        """
        found, ids = self.prompt_logprobs, self.prompt_token_ids
        if found is None or len(found) != len(ids) or len(ids) < 2 or self.outputs[0].logprobs_mode.endswith("logits"):
            return None
        values = [entry[token].logprob for token, entry in zip(ids, found, strict=True) if entry is not None]
        return math.exp(-sum(values) / len(values))

    @property
    def cumulative_logprob(self) -> float | None:
        """The first completion's `cumulative_logprob`."""
        return self.outputs[0].cumulative_logprob

    @property
    def activations(self) -> Activations:
        """What was captured of the first completion."""
        return self.outputs[0].activations

    @property
    def receipt(self) -> Receipt | None:
        """What was applied for the first completion, and how its steps ran."""
        return self.outputs[0].receipt

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first completion's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Why the first completion ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """The first completion's log probabilities, a dict for each token; None where not asked for."""
        return self.outputs[0].logprobs

    def __repr__(self) -> str:
        prompt = "" if self.prompt is None else f"prompt={shown(self.prompt)}, "
        running = "" if self.finished else ", finished=False"
        return (
            f"RequestOutput(request_id={self.request_id!r}, {prompt}prompt_tokens={len(self.prompt_token_ids)}, "
            f"outputs={self.outputs!r}{running})"
        )

    def table(self) -> Table:
        """The prompt, and for each completion its text, tokens, why it ended, and what was captured."""
        prompt = str(self.prompt_token_ids) if self.prompt is None else self.prompt
        rows: list[tuple[str, Any]] = [("prompt", prompt), ("prompt tokens", len(self.prompt_token_ids))]
        if self.num_cached_tokens:
            rows.append(("cached tokens", self.num_cached_tokens))
        for out in self.outputs:
            number = f" {out.index}" if len(self.outputs) > 1 else ""
            rows += [(f"{name}{number}", value) for name, value in out._rows()]
        rows += [("warning", warning) for warning in self.warnings]
        return Table(f"request {self.request_id}", ("", ""), rows)
