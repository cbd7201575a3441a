"""Results of generation: completions in progress (`StreamPiece`), and complete ones (`RequestOutput`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..core.events import DraftCounts, FinishedEvent, Logprob
from ..core.receipt import Receipt
from ..core.sampling_params import SamplingParams
from ..utils.arguments import shown
from ..utils.tables import Shown, Table
from .detokenizer import Detokenizer, token_text

if TYPE_CHECKING:  # torch, which servers' HTTP processes do without
    import torch

    from ..hooks.captures.activations import Activations
    from ..hooks.monitors.scores import MonitorScores


Scored = list[tuple[int, float]]
"""(position, score) of some positions."""


@dataclass(repr=False)
class CompletionOutput(Shown):
    """One of a prompt's `n` completions."""

    index: int
    text: str
    """Generated text without the stop string, unless `include_stop_str_in_output`, and by default without special tokens."""
    token_ids: list[int]
    """Generated tokens, including the stop token."""
    finish_reason: str | None = None
    """stop, length, monitor, abort, timeout or error; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string, token id or monitor's name, where that was the reason; None for the model's main end-of-sequence token."""
    logprobs: list[dict[int, Logprob]] | None = None
    error: BaseException | None = None
    activations: Any = None
    """Captured states (`hooks.captures.activations.Activations`); empty, and so false, without captures."""
    receipt: Any = None
    """Applied interventions and execution of its steps."""
    logprobs_mode: str = "raw_logprobs"
    """Kind of values in `logprobs` (`ServerConfig.logprobs_mode`)."""
    drafts: DraftCounts | None = None
    """Passes with drafts, their drafts, and the accepted ones; None without drafts (docs/engine/speculative.md)."""
    monitors: Mapping[str, MonitorScores] = field(default_factory=dict)
    """Name of a monitor -> its scores."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log probabilities of `token_ids`; None without SamplingParams(logprobs=...), or for raw logits."""
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
        """The text, its tokens, reason of its end, and captures."""
        return Table(f"completion {self.index}", ("", ""), self._rows())

    def _rows(self) -> list[tuple[str, Any]]:
        ended = self.finish_reason or "running"
        rows: list[tuple[str, Any]] = [("text", self.text), ("tokens", len(self.token_ids)), ("finish_reason", ended)]
        if self.stop_reason is not None:
            rows.append(("stop_reason", repr(self.stop_reason)))
        if self.cumulative_logprob is not None:
            rows.append(("cumulative_logprob", f"{self.cumulative_logprob:.4f}"))
        rows += [(f"monitor {name}", repr(scores)) for name, scores in self.monitors.items()]
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

        None without SamplingParams(prompt_logprobs=...), for a prompt of one token, or for raw logits.
        SamplingParams(prompt_logprobs=0, max_tokens=0) generates nothing.
        """
        found, ids = self.prompt_logprobs, self.prompt_token_ids
        if found is None or len(found) != len(ids) or len(ids) < 2 or self.outputs[0].logprobs_mode.endswith("logits"):
            return None
        values = [entry[token].logprob for token, entry in zip(ids, found, strict=True) if entry is not None]
        return math.exp(-sum(values) / len(values))

    @property
    def cumulative_logprob(self) -> float | None:
        """Log probability of the first completion's tokens."""
        return self.outputs[0].cumulative_logprob

    @property
    def activations(self) -> Activations:
        """Captured states of the first completion."""
        return self.outputs[0].activations

    @property
    def hidden_states(self) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """transformers' hidden states of ``generate(output_hidden_states=True)``: by step, then by layer [1, tokens, hidden].

        The first step has the prompt's tokens, each later one a token. The first completion's; None unless requested.
        """
        found = self.activations.hidden_states
        return (
            None
            if found is None
            else tuple(tuple(h[:, start:stop] for h in found) for start, stop in self._steps(found[0]))
        )

    @property
    def attentions(self) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """transformers' attention weights of ``generate(output_attentions=True)``: by step, then by layer
        [1, heads, tokens, keys]. The first completion's; None unless requested."""
        found = self.activations.attentions
        if found is None:
            return None
        steps = self._steps(found[0].transpose(1, 2))
        return tuple(tuple(weights[:, :, start:stop, :stop] for weights in found) for start, stop in steps)

    @property
    def routed_experts(self) -> torch.Tensor | None:
        """The first completion's `Activations.routed_experts`."""
        return self.activations.routed_experts

    def _steps(self, rows: torch.Tensor) -> list[tuple[int, int]]:
        """(first position, end) of each step, for rows [1, positions, ...]."""
        ends = range(len(self.prompt_token_ids), rows.shape[1] + 1)
        return list(zip((0, *ends), ends, strict=False))

    @property
    def monitors(self) -> Mapping[str, MonitorScores]:
        """Name of a monitor -> its scores in the first completion."""
        return self.outputs[0].monitors

    @property
    def receipt(self) -> Receipt | None:
        """Applied interventions and execution of the first completion's steps."""
        return self.outputs[0].receipt

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first completion's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Reason that the first completion ended."""
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """The first completion's log probabilities, a dict for each token; None unless requested."""
        return self.outputs[0].logprobs

    def __repr__(self) -> str:
        prompt = "" if self.prompt is None else f"prompt={shown(self.prompt)}, "
        running = "" if self.finished else ", finished=False"
        return (
            f"RequestOutput(request_id={self.request_id!r}, {prompt}prompt_tokens={len(self.prompt_token_ids)}, "
            f"outputs={self.outputs!r}{running})"
        )

    def table(self) -> Table:
        """The prompt, and for each completion its text, tokens, reason of its end, and captures."""
        prompt = str(self.prompt_token_ids) if self.prompt is None else self.prompt
        rows: list[tuple[str, Any]] = [("prompt", prompt), ("prompt tokens", len(self.prompt_token_ids))]
        if self.num_cached_tokens:
            rows.append(("cached tokens", self.num_cached_tokens))
        for out in self.outputs:
            number = f" {out.index}" if len(self.outputs) > 1 else ""
            rows += [(f"{name}{number}", value) for name, value in out._rows()]
        rows += [("warning", warning) for warning in self.warnings]
        return Table(f"request {self.request_id}", ("", ""), rows)


class StreamPiece(str):
    """A piece of generated text.

    Attributes:
        text: the piece itself.
        token_ids: tokens that the piece was decoded from; several for one character in several tokens.
        output_index: index of the completion among the prompt's `n`.
        finish_reason: set on the last piece of a completion. Its text may be empty.
        scores: name of a monitor -> (position, score) of the positions that were scored since the piece before. The score of a
            token is known one step after the token.
        captures: rows of the captures with ``stream=True`` that were computed since the piece before, as `Activations`; None
            without. Many rows come in several pieces, which have no text but the last.
        activations, receipt, monitors: set on the last piece, where something was captured, declared or scored; else None.
    """

    token_ids: list[int]
    output_index: int
    finish_reason: str | None
    activations: Any = None
    receipt: Any = None
    scores: Mapping[str, Scored] = MappingProxyType({})
    captures: Any = None
    monitors: Any = None

    @classmethod
    def of(cls, text: str, token_ids: list[int], index: int, finish_reason: str | None) -> StreamPiece:
        """A piece with its attributes."""
        piece = cls(text)
        piece.token_ids, piece.output_index, piece.finish_reason = token_ids, index, finish_reason
        return piece

    @property
    def text(self) -> str:
        """The piece as a plain string."""
        return str(self)


class Completion:
    """Text of one request, from its events. Used by one thread at a time: the caller's.

    Args:
        index: index among the prompt's `n` completions.
        params: sampling parameters of the request.
        tokenizer: a transformers tokenizer, or None, without which there is no text.
        prompt_token_ids: prompt tokens before the text.
        nothing: the activations of a completion without captures.
    """

    def __init__(
        self, request_id: str, index: int, params: SamplingParams, tokenizer: Any, prompt_token_ids: Sequence[int],
        nothing: Any = None,
    ) -> None:  # fmt: skip
        self.request_id, self.index, self._params, self._tokenizer = request_id, index, params, tokenizer
        self._prompt_token_ids, self._nothing = prompt_token_ids, nothing
        self._token_ids: list[int] = []
        self._streamed: Detokenizer | None = None
        self._emitted = self._emitted_chars = 0
        self._scores: dict[str, Scored] = {}
        self._num_scores: dict[str, int] = {}
        self._rows: Any = None

    def rows_piece(self, rows: Any) -> StreamPiece | None:
        """Hold captured rows for the next piece. A piece without text with the rows that were held before; None without any."""
        held, self._rows = self._rows, rows
        if held is None:
            return None
        piece = StreamPiece.of("", [], self.index, None)
        piece.captures = held
        return piece

    def token_piece(
        self, token_id: int, hold: bool = True, scores: Mapping[str, Scored] | None = None
    ) -> StreamPiece | None:
        """The text that a new token adds. Incomplete characters and possible stop strings are held back.

        Args:
            scores: new scores of monitors.
            hold: None if all text is held back, so the next piece has this token too; else an empty piece.
        """
        self._token_ids.append(token_id)
        for name, found in (scores or {}).items():
            self._scores.setdefault(name, []).extend(found)
        if self._tokenizer is None:
            return self._piece("", 0, None)
        self._streamed = self._streamed or self._detokenizer()
        self._streamed.push([token_id])
        text = self._streamed.text
        end = len(text) - self._held_back(text)
        return None if hold and end <= self._emitted_chars else self._piece(text, end, None)

    def last_piece(self, finished: FinishedEvent) -> StreamPiece:
        """The rest of the text, with the results of the whole completion."""
        self._token_ids = finished.token_ids
        for name, found in (finished.monitors or {}).items():
            known = self._num_scores.get(name, 0)
            self._scores[name] = list(
                zip(*(_listed(part[known:]) for part in (found.positions, found.scores)), strict=True)
            )
        text = self.text(finished)
        piece = self._piece(text, len(text), finished.finish_reason)
        piece.activations, piece.receipt = self._activations(finished), finished.receipt
        piece.monitors = finished.monitors
        return piece

    def _piece(self, text: str, end: int, finish_reason: str | None) -> StreamPiece:
        end = max(end, self._emitted_chars)
        ids = self._token_ids[self._emitted :]
        piece = StreamPiece.of(text[self._emitted_chars : end], ids, self.index, finish_reason)
        self._emitted, self._emitted_chars = len(self._token_ids), end
        piece.captures, self._rows = self._rows, None
        if self._scores:
            piece.scores, self._scores = {name: found for name, found in self._scores.items() if found}, {}
            for name, found in piece.scores.items():
                self._num_scores[name] = self._num_scores.get(name, 0) + len(found)
        return piece

    def _held_back(self, text: str) -> int:
        longest = 0
        for stop in self._params.stop_strings:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def text(self, end: FinishedEvent) -> str:
        """The text: without the stop string, and without the token that stopped it, unless these are asked for."""
        if self._tokenizer is None:
            return ""
        ids = end.token_ids[: len(end.token_ids) - end.num_hidden_tokens]
        detokenizer = self._detokenizer()
        text = detokenizer.push(ids) + detokenizer.end()
        return text if end.text_length is None else text[: end.text_length]

    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer, self._params.skip_special_tokens, self._prompt_token_ids)

    def output(self, end: FinishedEvent) -> CompletionOutput:
        """The completion as a value."""
        return CompletionOutput(
            index=self.index,
            text=self.text(end),
            token_ids=list(end.token_ids),
            finish_reason=end.finish_reason or None,
            stop_reason=end.stop_reason,
            logprobs=None if end.logprobs is None else [decoded(entry, self._tokenizer) for entry in end.logprobs],
            error=end.error,
            activations=self._activations(end),
            receipt=end.receipt,
            drafts=end.drafts,
            monitors=end.monitors or {},
        )

    def _activations(self, end: FinishedEvent) -> Any:
        return self._nothing if end.activations is None else end.activations


def _listed(values: Any) -> list[Any]:
    """Values of a tensor, or of a list from a server."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def decoded(entry: dict[int, Logprob], tokenizer: Any) -> dict[int, Logprob]:
    """The same log probabilities, with each token's text."""
    if tokenizer is None:
        return entry
    return {token: value._replace(decoded_token=token_text(tokenizer, token)) for token, value in entry.items()}
