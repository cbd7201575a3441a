"""Parts of a `ForwardBatch` for passes that do more: embeddings, encoders, LoRA adapters, cut edges, outputs of transformers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..utils.upload import flat_bytes


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

    def opened(self, device: torch.device) -> torch.Tensor | None:
        """The edges of one request that are open in both directions: [queries, keys] bool; None without."""
        ...

    def keep_pattern(self, layer: int, weights: torch.Tensor) -> None:
        """Keep the captured part of one request's weights [1, heads, queries, keys]."""
        ...

    def of_request(self, index: int) -> AttentionCuts | None:
        """The cuts of one request."""
        ...

    def rows_from(self, start: int, stop: int) -> AttentionCuts | None:
        """The cuts of a decode batch's requests `start` to `stop`, as their own batch."""
        ...


class TransformersOutputs(Protocol):
    """A pass with transformers' outputs beyond logits (models/transformers/transformers_pass.py)."""

    eager: bool
    """transformers' own attention runs, in place of the attention backend."""

    def layer_inputs(self, layer: int, hidden: torch.Tensor) -> dict[str, Any]:
        """Further arguments of a decoder layer; `hidden` is its first one."""
        ...

    def collect_input(self, hidden: torch.Tensor) -> None:
        """Take the input of a decoder layer, where transformers' own model runs."""
        ...

    def collect_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take the outputs of the first layers, where they are not the inputs of the next."""
        ...

    def attend(self, attention: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' forward of an attention: ([1, tokens, hidden], weights [1, heads, queries, keys])."""
        ...

    def end_attention(self, weights: torch.Tensor | None) -> None:
        """Take the second entry of an attention's output."""
        ...

    def end_layers(self, hidden: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        """Take the hidden states after the final norm. Returns the `collected` outputs."""
        ...

    def collected(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """`attentions` and `hidden_states` of the model's output, if requested."""
        ...


# -- embeddings in place of tokens ------------------------------------------------------------


class EmbeddedRows(NamedTuple):
    """The token rows of a pass that have a vector in place of their token's embedding."""

    # fmt: off
    rows:    torch.Tensor  # [n] int64
    vectors: torch.Tensor  # [n, width], dtype of the embeddings
    # fmt: on

    def placed(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The embeddings [1, tokens, width] with the vectors in their rows, in fresh memory."""
        return embeddings.index_copy(1, self.rows, self.vectors.unsqueeze(0))

    def joined(self, others: EmbeddedRows | None) -> EmbeddedRows:
        """These rows and others."""
        return self if others is None else EmbeddedRows(*map(torch.cat, zip(self, others, strict=True)))


class EmbeddedMask(NamedTuple):
    """`EmbeddedRows` as captured passes read them: memory of all token rows.

    Attributes:
        rows: [tokens] bool, the rows that have a vector.
        vectors: [tokens, width], dtype of the embeddings.
    """

    rows: torch.Tensor
    vectors: torch.Tensor

    def placed(self, embeddings: torch.Tensor) -> torch.Tensor:
        """`EmbeddedRows.placed`."""
        return torch.where(self.rows[:, None], self.vectors, embeddings)

    def first_rows(self, rows: int) -> EmbeddedMask:
        """The first token rows."""
        return EmbeddedMask(self.rows[:rows], self.vectors[:rows])

    def write(self, embedded: EmbeddedRows) -> None:
        """Give the rows of a pass their vectors. `clear` follows the pass: the next one may have none."""
        self.rows.index_fill_(0, embedded.rows, True)
        self.vectors.index_copy_(0, embedded.rows, embedded.vectors)

    def clear(self) -> None:
        """Let no row have a vector."""
        self.rows.zero_()


class DeepStates(NamedTuple):
    """States that are added to token rows of images behind the first layers (DeepStack, Meng et al., 2024; Qwen3-VL)."""

    # fmt: off
    rows:   torch.Tensor  # [n] int64
    states: torch.Tensor  # [n, layers * hidden]
    # fmt: on

    def num_layers(self, hidden_size: int) -> int:
        """Number of layers."""
        return self.states.shape[1] // hidden_size

    def added(self, h: torch.Tensor, layer: int) -> torch.Tensor:
        """The output h [1, tokens, hidden] of a layer with its states, in fresh memory."""
        width = h.shape[-1]
        return h.index_add(1, self.rows, self.states[None, :, layer * width : (layer + 1) * width])


class PromptEmbeds:
    """Vectors in place of token embeddings at positions of a prompt. The requests of a prompt share one object.

    Args:
        positions: positions in ascending order.
        vectors: [positions, width] of the model's dtype, on the CPU or on the engine's device.
        keys: `vector_keys` of vectors on a device; None: computed if need be.
    """

    def __init__(
        self, positions: Sequence[int] | np.ndarray, vectors: torch.Tensor, keys: np.ndarray | None = None
    ) -> None:
        self.positions, self.vectors = np.asarray(positions, dtype=np.int64), vectors.detach().contiguous()
        self._keys = vector_keys(self.vectors) if keys is None and vectors.device.type != "cpu" else keys
        self._namespaces: dict[int, list[tuple[int, Hashable]]] = {}

    def within(self, start: int, stop: int) -> tuple[np.ndarray, torch.Tensor]:
        """(positions counted from `start`, their vectors) of the positions from `start` to `stop`."""
        first, end = np.searchsorted(self.positions, (start, stop))
        return self.positions[first:end] - start, self.vectors[first:end]

    def part(self, start: int, stop: int) -> PromptEmbeds | None:
        """Vectors at the positions from `start` to `stop`, counted from `start`; None without any."""
        positions, vectors = self.within(start, stop)
        first = np.searchsorted(self.positions, start)
        keys = None if self._keys is None else self._keys[first : first + len(positions)]
        return PromptEmbeds(positions, vectors, keys) if len(positions) else None

    def on_host(self) -> PromptEmbeds:
        """The same with vectors on the CPU, hashed by their bytes."""
        return self if self._keys is None else PromptEmbeds(self.positions, self.vectors.cpu())

    def without(self, token_ids: np.ndarray) -> np.ndarray:
        """The prompt's token ids at the other positions."""
        return np.delete(token_ids, self.positions)

    def namespaces(self, page_size: int) -> list[tuple[int, Hashable]]:
        """(page, namespace from that page on), ascending (`RadixKey`): a hash of each page's vectors. Made once."""
        if page_size not in self._namespaces:
            found = self._namespaces[page_size] = list[tuple[int, Hashable]]()
            for page in np.unique(self.positions // page_size).tolist():
                if found and found[-1][0] == page:
                    found.pop()
                found += [(page, self.digest(page * page_size, (page + 1) * page_size)), (page + 1, None)]
        return self._namespaces[page_size]

    def digest(self, start: int, stop: int) -> bytes:
        """Hash of the vectors from position `start` to `stop`, and of their offsets from `start`."""
        offsets, vectors = self.within(start, stop)
        found = hashlib.sha256(offsets.tobytes())
        if self._keys is None:
            found.update(flat_bytes(vectors).numpy().data)
        else:
            first = np.searchsorted(self.positions, start)
            found.update(b"keys" + self._keys[first : first + len(offsets)].tobytes())
        return found.digest()


KEY_LANES = 4
"""Numbers of a vector's key."""


def vector_keys(vectors: torch.Tensor) -> np.ndarray:
    """Keys of vectors [..., width], computed on their device and copied at once: [..., KEY_LANES] int64.

    Each number is a sum of the vector's 32-bit words times secret random factors, modulo 2**64. Two vectors agree in one number
    by a chance of at most 2**-33, and in all by 2**-132.
    """
    if vectors.shape[-1] * vectors.itemsize % 4:
        vectors = torch.nn.functional.pad(vectors, (0, 1))
    words = vectors.contiguous().view(torch.int32).long()
    factors = _factors(words.shape[-1], words.device)
    return torch.stack([(words * own).sum(-1) for own in factors], -1).cpu().numpy()


@cache
def _factors(words: int, device: torch.device) -> torch.Tensor:
    """[KEY_LANES, words] int64: secret, drawn once in this process."""
    drawn = bytearray(os.urandom(8 * KEY_LANES * words))
    return torch.frombuffer(drawn, dtype=torch.int64).view(KEY_LANES, words).to(device)


# -- encoders --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EncoderInput:
    """Input of an encoder, which an encoder-decoder model reads before its decoder's prompt.

    Attributes:
        values: token ids [tokens] int64, or features of audio [mel bins, frames] float32, on the CPU. To a server, samples
            [n] float32.
        length: positions of the encoder's output.
        content: digest of the values.
    """

    values: torch.Tensor
    length: int
    content: bytes

    @classmethod
    def of(cls, values: torch.Tensor, length: int) -> EncoderInput:
        """The input of these values."""
        values = values.contiguous()
        digest = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}".encode())
        digest.update(flat_bytes(values).numpy().data)
        return cls(values, length, digest.digest())

    @property
    def kind(self) -> str:
        """transformers' name of the values."""
        if not self.values.is_floating_point():
            return "input_ids"
        return "audio" if self.values.ndim == 1 else "input_features"

    @property
    def token_ids(self) -> list[int]:
        """Tokens of its positions; zeros for audio."""
        return [0] * self.length if self.values.is_floating_point() else self.values.tolist()


class EncoderRun(NamedTuple):
    """The encoder's input of a request that enters the runner's table."""

    # fmt: off
    input:    EncoderInput
    pages:    list[int]  # pages of the cross pool
    computed: bool       # they have the keys and values already
    # fmt: on


class PassEncoder(NamedTuple):
    """An encoder's pass in front of a decoder's."""

    # fmt: off
    request:  int           # index in the batch
    input:    EncoderInput
    slots:    torch.Tensor  # [positions] int64, slots of the cross pool
    site_ops: Any = None    # `SiteOps` of the encoder's sites, or None
    # fmt: on


@dataclass(eq=False)
class CrossRows:
    """Encoder outputs that the requests of a pass attend to.

    Attributes:
        pool: keys and values (`mem_cache.cross_pool.CrossPool`).
        rows: [requests] int64, rows of the pool's table.
        lens: positions of each request's encoder output.
        encoders: encoders that run before the decoder.
        known: slots and masks of the pass's requests, made by its first layer.
        fresh: request -> layer -> (keys, values) [positions, heads, head_dim], in a pass with gradients.
    """

    pool: Any
    rows: torch.Tensor
    lens: Sequence[int]
    encoders: Sequence[PassEncoder] = ()
    known: dict[tuple[int, ...], Any] = field(default_factory=dict)
    fresh: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] | None = None


# -- LoRA adapters ------------------------------------------------------------------------

TILE_ROWS = 16
"""Most rows of a tile."""


class AdapterSpan(NamedTuple):
    """The token rows ``[start, stop)`` of one request, and the slot of its adapter."""

    slot: int
    start: int
    stop: int


class RowTiles(NamedTuple):
    """Token rows in tiles of at most `TILE_ROWS`, each of one slot, as kernels read them (kernels/products/lora.py)."""

    # fmt: off
    order: torch.Tensor  # [rows] int32, token rows sorted by slot
    tiles: torch.Tensor  # [tiles, 3] int32: slot, first index in `order`, rows; tiles with 0 rows are unused
    # fmt: on


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """The token rows of requests with an adapter. Rows in no span have none.

    Attributes:
        spans: row spans in ascending order. Empty in a captured pass, which reads `tiles`.
        tiles: rows that kernels serve, on CUDA; None elsewhere.
        products: spans that matrix products serve when `tiles` exist.
        version: version of the adapter weights' memory. Passes captured with another version are stale.
    """

    spans: tuple[AdapterSpan, ...] = ()
    tiles: RowTiles | None = None
    products: tuple[AdapterSpan, ...] = ()
    version: int = 0

    @classmethod
    def of(cls, slots: np.ndarray, sizes: np.ndarray, version: int = 0) -> AdapterRows | None:
        """The rows of a batch.

        Args:
            slots: [requests], -1 for a request without an adapter.
            sizes: [requests], token rows of each.

        Returns:
            None if no request has an adapter.
        """
        stops = np.cumsum(sizes).tolist()
        spans = [
            AdapterSpan(slot, stop - size, stop)
            for slot, size, stop in zip(slots.tolist(), sizes.tolist(), stops, strict=True)
            if slot >= 0
        ]
        return cls(tuple(spans), version=version) if spans else None

    @cached_property
    def by_slot(self) -> list[tuple[int, slice | torch.Tensor]]:
        """(slot, its token rows) of each slot in the pass; the rows are a slice, or indices on the CPU."""
        rows: dict[int, list[AdapterSpan]] = {}
        for span in self.spans:
            rows.setdefault(span.slot, []).append(span)
        return [(slot, rows_of(own)) for slot, own in rows.items()]

    def rows_from(self, start: int, stop: int) -> AdapterRows | None:
        """The rows ``[start, stop)`` as their own pass, which matrix products serve."""
        cut = [
            AdapterSpan(slot, max(first, start) - start, min(last, stop) - start) for slot, first, last in self.spans
        ]
        spans = tuple(span for span in cut if span.start < span.stop)
        return replace(self, spans=spans, tiles=None, products=()) if spans else None


def rows_of(spans: Sequence[AdapterSpan]) -> slice | torch.Tensor:
    """Token rows of spans: a slice of one span, else indices [rows] int64 on the CPU."""
    if len(spans) == 1:
        return slice(spans[0].start, spans[0].stop)
    return torch.cat([torch.arange(span.start, span.stop) for span in spans])


def tiles_of(spans: Sequence[AdapterSpan]) -> tuple[np.ndarray, np.ndarray]:
    """(`RowTiles.order`, `RowTiles.tiles`) of spans, on the host."""
    by_slot: dict[int, list[int]] = {}
    for slot, start, stop in spans:
        by_slot.setdefault(slot, []).extend(range(start, stop))
    order: list[int] = []
    tiles: list[tuple[int, int, int]] = []
    for slot, rows in by_slot.items():
        for first in range(0, len(rows), TILE_ROWS):
            tiles.append((slot, len(order) + first, min(TILE_ROWS, len(rows) - first)))
        order += rows
    return np.array(order, dtype=np.int32), np.array(tiles, dtype=np.int32).reshape(-1, 3)


def max_tiles(rows: int, slots: int) -> int:
    """Most tiles that `rows` rows of at most `slots` adapters make."""
    return min(rows, -(-rows // TILE_ROWS) + slots - 1)
