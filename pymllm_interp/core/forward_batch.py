"""What one forward pass needs, in one place.

A `ForwardBatch` is built by `ModelRunner.prepare_forward_batch_*` and handed down unchanged: the attention backend is
reached through it, so two runners never share state. Fields are those of pymllm's `ForwardBatch`, in its order; the ones
after `image_grid_thw` are ours.

The batch is flat: the token rows of all requests lie behind each other, and request ``i`` owns the batch group
``batch_groups[i] == [start, size]``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

if TYPE_CHECKING:
    from ..attention.attention_backend import AttentionBackend
    from ..mem_cache.memory_pool import KVPool, ReqToTokenPool


class ForwardMode(IntEnum):
    """What kind of forward pass is being performed."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()

    def is_extend(self) -> bool:
        """True for EXTEND and MIXED: the pass holds a request with more than its next token."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    def is_prefill(self) -> bool:
        """Alias of `is_extend`."""
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
"""Where in a decoder layer hooks wait. "at output": and nowhere else in it; "within": at its input, or inside of it."""


class HookQuery(Protocol):
    """Tells a pass that goes module by module where it need not: where no hook waits, it runs fused."""

    def hook_position(self, layer: int) -> Waits:
        """Where hooks wait at the layer. What comes before these counts as visited, unless they wait within."""
        ...

    def try_fuse(self, layer: int, module: str = "", but: str = "") -> bool:
        """Whether no hook waits inside of the layer, or inside of its `module`, save at the module `but` and in it.

        If so, what lies there counts as visited.
        """
        ...

    def runs_eagerly(self, layer: int, module: str, but: str) -> None:
        """Tell the requests of hooks for which `try_fuse` is False that their module goes kernel by kernel."""
        ...

    def is_own_call(self) -> bool:
        """Whether the module that is called now is called by a hook for its own ends, or on another thread: not by the pass."""
        ...

    def at_output(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Serve the hooks at the layer's output. Returns what the pass goes on with."""
        ...


Registers = dict[str, torch.Tensor]
"""Tensors [1, tokens, ...] that pass from one graph segment to the next, by name; a name stands for one width and dtype."""


class GraphSegments(Protocol):
    """Runs the segments of a pass in which no hook waits, as CUDA graphs (runner/segments.py)."""

    def run(self, key: Hashable, segment: Callable[..., Registers], inputs: Registers) -> Registers:
        """``segment(**inputs)``, in memory that no later segment writes to."""
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
    positions:        torch.Tensor | None = None  # [tokens] int64

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
    req_to_token_pool: ReqToTokenPool | None = None
    token_to_kv_pool:  KVPool | None = None
    attn_backend:      AttentionBackend | None = None

    # Multimodal inputs: refused for text models.
    mrope_position_deltas: torch.Tensor | None = None
    pixel_values:          torch.Tensor | None = None
    image_grid_thw:        torch.Tensor | None = None

    # Ours.
    logits_indices:  torch.Tensor | None = None  # [logit rows] int64, the token rows that lm_head runs on; None: all
    rope_lens:       torch.Tensor | None = None  # [tokens] int64, the length that length-dependent RoPE scalings see
    fresh_kv_only:   bool = False                # attend to this pass's own K and V (a pass with gradients)
    return_hidden_states: bool = False
    hidden_states:   torch.Tensor | None = None  # [tokens, hidden] after the final norm; set by the model when asked for
    padded_size:     int = 0                     # rows of the runner's input buffers that are laid out for it, padding included
    site_ops:        Any = field(default=None, repr=False)  # declared ops of its requests (layers/edits.py); None: none has any
    hook_query:      HookQuery | None = None  # who waits at which layer; None: nobody can
    segments:        GraphSegments | None = None  # runs what lies between those who wait; None: kernel by kernel
    rotation:        Any = field(default=None, repr=False)  # what layers/rope.py made of this pass's cos and sin
    attn_metadata:   Any = field(default=None, repr=False)  # the backend's plan for this pass
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
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is set, but multimodal inputs are not supported: the models here take text")

    @property
    def num_tokens(self) -> int:
        """Rows of the flat batch."""
        return self.input_ids.shape[0]

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

    def run_segment(self, key: Hashable, run: Callable[..., Registers], **inputs: torch.Tensor) -> Registers:
        """``run(**inputs)``: a part of the pass in which no hook waits, from a CUDA graph where the pass has them.

        Args:
            key: names the part. Parts with equal keys are the same kernels over the memory of the pass and of `inputs`.
        """
        return run(**inputs) if self.segments is None else self.segments.run(key, run, inputs)
