"""The inputs of one forward pass.

`ModelRunner.prepare_forward_batch_*` builds a `ForwardBatch`, and layers receive it unchanged. It refers to the attention
backend and the memory pools, so that two runners share no state. The fields up to `image_grid_thw` are the fields of pymllm's
`ForwardBatch`, in its order.

The batch is flat: the token rows of all requests are concatenated. Request ``i`` owns the batch group
``batch_groups[i] == [start, size]``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from .norm_kind import Norm
from .pass_parts import (
    AdapterRows,
    AttentionCuts,
    CrossRows,
    DeepStates,
    EmbeddedMask,
    EmbeddedRows,
    TransformersOutputs,
)


class ForwardMode(IntEnum):
    """Kind of a forward pass."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()

    def is_extend(self) -> bool:
        """True for EXTEND and MIXED: the pass holds a request with more than its next token."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    def is_prefill(self) -> bool:
        """Alias for `is_extend`."""
        return self.is_extend()

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)


Waits = Literal["nowhere", "at output", "within"]
"""Location of hooks in a decoder layer. "at output": at its output only; "within": at its input, or inside it."""


class HookQuery(Protocol):
    """Tells a module-by-module pass where hooks wait. Everything else runs fused."""

    def first_hook(self, first: int, stop: int) -> tuple[int, Waits]:
        """The layer from `first` on that hooks wait in, and their location there; (stop, "nowhere") if none is before `stop`.

        All locations before count as visited.
        """
        ...

    def try_fuse(self, layer: int, module: str = "", but: str = "") -> bool:
        """Whether no hook waits inside the layer, or inside its `module`, except at or in the module `but`.

        If so, all locations there count as visited.
        """
        ...

    def runs_eagerly(self, layer: int, module: str, but: str) -> None:
        """Record, for the requests of the hooks that prevent `try_fuse`, that the module runs eagerly."""
        ...

    def is_own_call(self) -> bool:
        """Whether the current module call comes from a hook, or from another thread, and not from the pass."""
        ...

    def at_output(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Serve the hooks at the layer's output. Returns the hidden states that the pass continues with."""
        ...


@runtime_checkable
class PartQuery(Protocol):
    """Serves hooks inside a module that runs once for each of some requests."""

    def rows_inside(self, *paths: str) -> list[tuple[int, int]]:
        """(first row, number of rows) of each request with a hook that waits inside a module.

        Args:
            paths: module paths in the model. The ends of a module are inside only if its path ends with a dot.
        """
        ...

    def refuse_inside(self, *paths: str, why: str) -> None:
        """End the requests with a hook that waits inside a module for this pass, where it does not run."""
        ...

    def serve_part(
        self, *paths: str, span: tuple[int, int] | None, num_rows: int | None = None
    ) -> AbstractContextManager[None]:
        """Context of the module's call for the request with these rows; None: for the requests without hooks.

        Args:
            num_rows: rows of the call's values; None: as many as the request's.
        """
        ...


Registers = dict[str, torch.Tensor]
"""Tensors [1, tokens, ...] that graph segments exchange, by name. A name stands for one width and dtype."""


class GraphSegments(Protocol):
    """Runs graph segments, the parts of a pass in which no hook waits, as CUDA graphs (runner/graphs/segments.py).

    Attributes:
        by_layer: a segment has one layer at most.
    """

    by_layer: bool

    def run(self, key: Hashable, segment: Callable[..., Registers], inputs: Registers, chained: bool, /) -> Registers:
        """``segment(**inputs)``, in memory that no later segment writes to.

        Args:
            chained: the results only go into the next segment, which may write to their memory.
        """
        ...


class LayersElsewhere(Protocol):
    """Computes consecutive decoder layers in which no hook waits by other code."""

    def __call__(
        self, start: int, stop: int, h: torch.Tensor, rotations: Mapping[str, tuple[torch.Tensor, ...]], served: bool
    ) -> torch.Tensor | None:
        """The state [1, tokens, hidden] after the layers from `start` to `stop`; None: it cannot.

        Args:
            h: the state before them.
            rotations: cosines and sines of the pass, by the `rotary` of layers.
            served: a hook waits for the outcome, and the caller captures it then.
        """


class ParallelDelta(NamedTuple):
    """Attention and MLP outputs of a parallel layer, which adds ``mlp + attention`` to the residual stream."""

    # fmt: off
    attention: torch.Tensor  # [1, tokens, hidden]
    mlp:       torch.Tensor  # [1, tokens, hidden]
    # fmt: on


Delta = torch.Tensor | ParallelDelta
"""The summand of a residual add."""


class SiteOps(Protocol):
    """The declared interventions and captures of a pass, by site number (core/model_spec.py)."""

    num_layers: int
    final_site: int
    """The site of the final norm."""
    inner: frozenset[str]
    """Kinds of inner sites that may have ops or captures in this pass."""

    def at(self, site: int, value: torch.Tensor) -> torch.Tensor:
        """`value` [1, tokens, width] after the ops at `site`: fresh memory, or `value` itself without ops."""
        ...

    def capture(self, site: int, value: torch.Tensor) -> None:
        """Capture `value` [1, tokens, width] for the requests that capture `site`."""
        ...

    def add_norm(
        self, residual_add: int, h: torch.Tensor, delta: Delta, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(h + delta, its norm) with the ops and captures of the residual add's sites.

        The last residual add includes the final norm's site.
        """
        ...

    def rows_from(self, start: int, stop: int) -> SiteOps:
        """The ops of the token rows ``[start, stop)``, which belong to whole requests."""
        ...


class CachedRotation(NamedTuple):
    """A pass's cosines and sines, and the rotation that layers/rope.py made of them."""

    # fmt: off
    cos:      torch.Tensor
    sin:      torch.Tensor
    versions: tuple[int, int]  # tensor versions of cos and sin when the rotation was made
    rotation: tuple[torch.Tensor, torch.Tensor]
    # fmt: on


class PagedKV(Protocol):
    """The paged KV cache of all layers (`mem_cache.memory_pool.KVPool`)."""

    # fmt: off
    dtype:        torch.dtype
    num_kv_heads: int
    head_dim:     int
    page_size:    int
    # fmt: on

    def get_kv(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, each [slots, kv_heads, head_dim]."""
        ...

    def set_kv(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [tokens, kv_heads, head_dim] to `slots` [tokens]."""
        ...

    def scales(self, layer_id: int) -> tuple[float, float]:
        """Dequantization scales (k, v) of a layer; (1, 1) unless the cache is FP8."""
        ...

    def paged(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, each [pages, page_size, kv_heads, head_dim]."""
        ...


class LayerStatePool(Protocol):
    """The convolution and recurrent states of layers, by slot (`mem_cache.state_pool.StatePool`)."""

    def memory(self, index: int) -> torch.Tensor:
        """A state of all slots, [slots, *shape]: the pool's own memory."""
        ...

    def read(self, index: int, slots: torch.Tensor) -> torch.Tensor:
        """A copy of a state of `slots` [batch]: [batch, *shape]."""
        ...

    def write(self, index: int, slots: torch.Tensor, value: torch.Tensor) -> None:
        """Write a state [batch, *shape] to `slots` [batch]."""
        ...


class RequestTable(Protocol):
    """The KV slots of each request's positions (`mem_cache.memory_pool.ReqToTokenPool`)."""

    # fmt: off
    max_context_len: int
    req_to_token:    torch.Tensor  # [rows, max_context_len] int32
    # fmt: on


class PassAttention(Protocol):
    """The part of an attention backend that a forward pass uses (`attention.AttentionBackend`)."""

    by_row: bool
    """Whether each query is computed by itself (batch-invariant mode)."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the pass. Comes before its first layer."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of one layer, [tokens, heads * head_dim]."""
        ...


@dataclass
class ForwardBatch:
    """All tensors of a single forward pass."""

    # fmt: off
    forward_mode:     ForwardMode
    batch_size:       int
    input_ids:        torch.Tensor  # [tokens] int64
    req_pool_indices: torch.Tensor  # [batch] int64, rows of req_to_token_pool
    seq_lens:         torch.Tensor  # [batch] int32, prefix + new
    out_cache_loc:    torch.Tensor  # [tokens] int64, KV slot of each token row
    seq_lens_sum:     int
    seq_lens_cpu:     torch.Tensor | None = None  # [batch] int32 on the CPU
    positions:        torch.Tensor | None = None  # [tokens] int64, in the sequence

    # Extend and mixed passes only.
    extend_num_tokens:      int | None = None
    extend_seq_lens:        torch.Tensor | None = None  # [batch] int32, new tokens
    extend_prefix_lens:     torch.Tensor | None = None  # [batch] int32, tokens already in the cache
    extend_start_loc:       torch.Tensor | None = None  # [batch] int32, first row of each request
    extend_prefix_lens_cpu: list[int] | None = None
    extend_seq_lens_cpu:    list[int] | None = None

    return_logprob:    bool = False
    top_logprobs_nums: list[int] | None = None

    # Set by the model runner.
    req_to_token_pool: RequestTable | None = None
    token_to_kv_pool:  PagedKV | None = None
    attn_backend:      PassAttention | None = None

    # Multimodal inputs: refused for text models. Images enter the language model's pass as `input_embeds`.
    mrope_position_deltas: torch.Tensor | None = None  # [batch] int64, distance of later positions from the number of tokens
    pixel_values:          torch.Tensor | None = None  # the processor's, in the pass of hooks in a vision tower
    image_grid_thw:        torch.Tensor | None = None  # [images, 3] int64, beside them, of towers that read patches

    # Fields beyond pymllm's.
    state_pool:      LayerStatePool | None = None  # set by the runner; slots are `req_pool_indices`; None: no layer has states
    input_embeds:    EmbeddedRows | EmbeddedMask | None = None  # rows with a vector as their embedding; not in decode passes
    cross:           CrossRows | None = None  # encoders' sides of an encoder-decoder model's requests
    deepstack:       DeepStates | None = None    # states of images for the outputs of the first layers; None: none
    logits_indices:  torch.Tensor | None = None  # [logit rows] int64, the token rows that lm_head runs on; None: all
    depth:           int | None = None           # layers that the pass runs; None: all, and the head
    mrope_positions: torch.Tensor | None = None  # [3, tokens] int64, positions that RoPE turns by; None: `positions`
    rope_lens:       torch.Tensor | None = None  # [tokens] int64, the lengths that length-dependent RoPE scalings see
    fresh_kv_only:   bool = False                # attend to this pass's own K and V (a pass with gradients)
    return_hidden_states: bool = False
    hidden_states:   torch.Tensor | None = None  # [tokens, hidden] after the final norm, if requested
    padded_size:     int = 0                     # rows that are laid out in the runner's input buffers, padding included
    query_buffer:    torch.Tensor | None = None  # [tokens, heads, head_dim] memory of rotated queries; None: allocated by layer
    site_ops:        SiteOps | None = field(default=None, repr=False)  # declared interventions and captures
    hook_query:      HookQuery | None = None      # locations of hooks; None: no hooks
    adapters:        AdapterRows | None = None    # rows of requests with an adapter; None: no such request
    attention_cuts:  AttentionCuts | None = field(default=None, repr=False)  # per-request attention masks (`Knockout`), or None
    transformers_pass: TransformersOutputs | None = None  # None: as the engine's own passes run
    segments:        GraphSegments | None = None  # runs graph segments; None: kernel by kernel
    layers_elsewhere: LayersElsewhere | None = None  # computes layers in which no hook waits; None: these here
    rotations:       dict[int, CachedRotation] = field(default_factory=dict, init=False, repr=False)  # by id of the cosines
    attn_metadata:   object = field(default=None, repr=False)  # the backend's plan
    meanwhile:       Callable[[], None] | None = None  # called between layers of a long pass, while the device computes
    state_rows:      object = field(default=None, init=False, repr=False)  # row indexes of recurrent states (layers/delta.py)
    # fmt: on

    def __post_init__(self) -> None:
        tokens = self.input_ids.shape[0]
        if self.out_cache_loc.shape[0] != tokens:
            raise ValueError(f"out_cache_loc has {self.out_cache_loc.shape[0]} rows, input_ids has {tokens}")
        for name in ("req_pool_indices", "seq_lens"):
            if getattr(self, name).shape != (self.batch_size,):
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}, expected ({self.batch_size},)")
        if self.forward_mode.is_decode() and tokens != self.batch_size:
            raise ValueError(f"a decode pass has one token a request: {tokens} tokens for {self.batch_size} requests")
        for name in ("mrope_position_deltas", "pixel_values", "image_grid_thw"):
            if getattr(self, name) is not None and self.mrope_positions is None:
                raise ValueError(f"{name} is set, but multimodal inputs are not supported: the models here take text")

    @property
    def num_tokens(self) -> int:
        """Rows of the flat batch."""
        return self.input_ids.shape[0]

    @property
    def num_request_tokens(self) -> int:
        """Rows of requests. The rows after them are padding; their K and V go to the dummy slot."""
        return self.num_tokens if self.extend_num_tokens is None else self.extend_num_tokens

    @property
    def batch_groups(self) -> list[list[int]]:
        """``[start, size]`` token rows of each request, in batch order."""
        if self.extend_seq_lens_cpu is None:
            return [[row, 1] for row in range(self.batch_size)]
        groups, start = [], 0
        for size in self.extend_seq_lens_cpu:
            groups.append([start, size])
            start += size
        return groups

    def run_segment(
        self, key: Hashable, run: Callable[..., Registers], chained: bool = False, /, **inputs: torch.Tensor
    ) -> Registers:
        """``run(**inputs)``, a part of the pass in which no hook waits: from a CUDA graph, if the pass has `segments`.

        Args:
            key: names the part. Parts with equal keys launch the same kernels over the memory of the pass and of `inputs`.
            chained: see `GraphSegments.run`.
        """
        return run(**inputs) if self.segments is None else self.segments.run(key, run, inputs, chained)


def part_batch(rows: int, device: str | torch.device, site_ops: SiteOps | None, query: Any) -> ForwardBatch:
    """The pass of a part of a model (`ModelSpec.parts`) as its modules see it: one prompt without KV."""
    zeros, lens = torch.zeros(rows, dtype=torch.int64, device=device), torch.tensor([rows], dtype=torch.int32)
    return ForwardBatch(
        ForwardMode.EXTEND, 1, zeros, zeros[:1], lens.to(device), zeros, rows, lens,
        positions=torch.arange(rows, device=device), extend_num_tokens=rows, extend_seq_lens_cpu=[rows],
        extend_prefix_lens_cpu=[0], site_ops=site_ops, hook_query=query,
    )  # fmt: skip
