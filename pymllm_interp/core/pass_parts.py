"""Parts of a `ForwardBatch` for passes that do more than the engine's own: cut edges of attention, transformers' outputs."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class AttentionCuts(Protocol):
    """Edges of attention that requests of a pass cut, and patterns that they capture (attention/cut_edges.py)."""

    def act_at(self, layer: int) -> bool:
        """Whether a request cuts edges, or captures a pattern, at the layer."""
        ...

    def apply(
        self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, batch: Any
    ) -> torch.Tensor:
        """A layer's attention `out`, with the rows of cut edges computed again. Keeps the patterns that are captured."""
        ...

    def hidden(self, layer: int, num_heads: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """The hidden edges of rows with cuts, of one request: [1, heads, queries, keys] bool; None without cuts."""
        ...

    def keep_pattern(self, layer: int, weights: torch.Tensor) -> None:
        """Keep what is captured of one request's weights [1, heads, queries, keys]."""
        ...

    def of_request(self, index: int) -> AttentionCuts | None:
        """The cuts of one request."""
        ...

    def rows_from(self, start: int, stop: int) -> AttentionCuts | None:
        """The cuts of a decode batch's requests `start` to `stop`, as a batch of their own."""
        ...


class TransformersOutputs(Protocol):
    """A pass that gives what transformers' model gives beyond logits (models/transformers/transformers_pass.py)."""

    eager: bool
    """transformers' own attention runs, in place of the attention backend."""

    def layer_inputs(self, layer: int, hidden: torch.Tensor) -> dict[str, Any]:
        """Further arguments of a decoder layer; `hidden` is its first one."""
        ...

    def collect_input(self, hidden: torch.Tensor) -> None:
        """Take the input of a decoder layer, where transformers' own model runs."""
        ...

    def attend(self, attention: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' forward of an attention: ([1, tokens, hidden], weights [1, heads, queries, keys])."""
        ...

    def end_attention(self, weights: torch.Tensor | None) -> None:
        """Take the second entry of an attention's output."""
        ...

    def end_layers(self, hidden: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        """Take the hidden states after the final norm. Returns what is `collected`."""
        ...

    def collected(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """`attentions` and `hidden_states` of the model's output, where they are asked for."""
        ...
