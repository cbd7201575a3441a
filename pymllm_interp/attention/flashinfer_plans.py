"""What FlashInfer's wrappers are planned with: lengths on the host, the parts of a pass, and the plans themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.forward_batch import ForwardBatch
from .attention_backend import RadixAttention


class LayerKind(NamedTuple):
    """The parameters that a plan depends on. Layers of one kind share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    window_left: int
    """Number of earlier tokens that a token attends to; -1: all."""
    logit_cap: float

    @classmethod
    def of(cls, layer: RadixAttention, context_len: int) -> LayerKind:
        window = layer.sliding_window
        left = -1 if window is None or window >= context_len else window - 1
        return cls(
            layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scaling, left, layer.logit_cap or 0.0
        )  # fmt: skip


def partial_bytes(kind: LayerKind, num_sms: int, rows: int | None = None) -> int:
    """Upper bound of FlashInfer's partial results in bytes: float32, for each tile of queries.

    FlashInfer splits keys when blocks would idle, and always in captured passes.

    Args:
        rows: batch size of a captured decode pass; None for other passes.
    """
    queries = kind.num_heads // kind.num_kv_heads  # per row of a tile: the query heads of a KV head
    tile, tiles = 64 if kind.head_dim == 256 else 128, 2 * num_sms // kind.num_kv_heads
    if rows is not None:
        tile = 16 if queries <= 16 else min(64 if queries <= 64 else 128, tile)
        tiles = max(tiles, -(-rows * queries // tile) + rows - 1)
    return kind.num_heads * tiles * tile * (kind.head_dim + 1) * 4 + 16


class Planned:
    """A FlashInfer wrapper, and the pass of its plan.

    `plan` writes to pinned memory that the device reads later. The next `plan` waits until the device has read it.
    """

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self.owner: object = None
        self.pages: np.ndarray | None = None
        self._read = torch.cuda.Event() if device.type == "cuda" else None
        self._call: KernelCall | None = None

    def plan(self, *args: Any, **kwargs: Any) -> None:
        if self._read is not None:
            self._read.synchronize()
        self._call = None
        self.wrapper.plan(*args, **kwargs)
        if self._read is not None:
            self._read.record()

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """`wrapper.run` for the first layer of a plan. Later layers repeat its kernel call without the wrapper's checks."""
        if self._call is not None and self._call.takes(q):
            self._call(q, *kv, out)
        else:
            self._call = KernelCall.noted(self.wrapper, q, kv, out)


class KernelCall(NamedTuple):
    """A call of FlashInfer's kernel, without the tensors that change from layer to layer."""

    # fmt: off
    kernel: Callable[..., None]
    args:   list[Any]
    places: tuple[int, ...]  # indices of q, k, v and out in args
    like:   tuple[torch.Size, torch.dtype, torch.device]  # of q
    # fmt: on

    @classmethod
    def noted(
        cls, wrapper: Any, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> KernelCall | None:
        """Run `wrapper` and record its kernel call. None if the wrapper differs from FlashInfer 0.7's."""
        module, calls = getattr(wrapper, "_cached_module", None), []
        if not isinstance(module, SimpleNamespace) or not hasattr(module, "paged_run"):
            wrapper.run(q, kv, out=out)
            return None

        def noting(*args: Any) -> Any:
            calls.append(args)
            return module.paged_run(*args)

        wrapper._cached_module = SimpleNamespace(**{**vars(module), "paged_run": noting})
        try:
            wrapper.run(q, kv, out=out)
        finally:
            wrapper._cached_module = module
        tensors = (q, *kv, out)
        found = [[i for i, arg in enumerate(args) if arg is tensor] for args in calls for tensor in tensors]
        if [len(places) for places in found] != [1, 1, 1, 1]:
            return None
        places = tuple(i for (i,) in found)
        # Without the layer's tensors, to release their memory.
        args = [None if i in places else arg for i, arg in enumerate(calls[0])]
        return cls(module.paged_run, args, places, (q.shape, q.dtype, q.device))

    def takes(self, q: torch.Tensor) -> bool:
        """Whether the plan is for the shape, dtype and device of `q`. If not, the wrapper raises its own error."""
        return (q.shape, q.dtype, q.device) == self.like

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Run the kernel on q, k, v and out, in the order of `places`."""
        args = self.args.copy()
        for place, tensor in zip(self.places, tensors, strict=True):
            args[place] = tensor
        self.kernel(*args)


@dataclass
class PagedLens:
    """The number of pages of each request, on the host."""

    # fmt: off
    pages:  np.ndarray    # [batch] int64
    packed: torch.Tensor  # [2 * batch + 1] int32: kv_indptr and last_page_len; pinned, for an asynchronous copy
    # fmt: on

    @classmethod
    def of(cls, forward_batch: ForwardBatch, page_size: int) -> PagedLens:
        """The lengths of a batch's requests."""
        seq_lens = forward_batch.seq_lens if forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu
        lens = seq_lens.cpu().numpy().astype(np.int64)
        pages = -(-lens // page_size)
        return cls._of(pages, lens - (pages - 1) * page_size, pinned=forward_batch.input_ids.is_cuda)

    @classmethod
    def _of(cls, pages: np.ndarray, last_page_len: np.ndarray, pinned: bool) -> PagedLens:
        packed = torch.zeros(2 * len(pages) + 1, dtype=torch.int32, pin_memory=pinned)
        values = packed.numpy()
        np.cumsum(pages, out=values[1 : len(pages) + 1])
        values[len(pages) + 1 :] = last_page_len
        return cls(pages, packed)

    def requests(self, start: int, stop: int) -> PagedLens:
        """The lengths of the requests `start` to `stop`, with pages counted from the first of them."""
        return self._of(self.pages[start:stop], self.last_page_len[start:stop].numpy(), pinned=False)

    @property
    def kv_indptr(self) -> torch.Tensor:
        """[batch + 1] int32, first page of each request in kv_indices."""
        return self.packed[: len(self.pages) + 1]

    @property
    def last_page_len(self) -> torch.Tensor:
        """[batch] int32, slots in use of each request's last page."""
        return self.packed[len(self.pages) + 1 :]

    @property
    def total_pages(self) -> int:
        return int(self.pages.sum())


@dataclass
class PassPart:
    """Consecutive requests of a pass that one kernel serves."""

    # fmt: off
    rows:       slice                # token rows of the flat batch
    lens:       PagedLens
    kv_indices: torch.Tensor         # [pages] int32 on the device
    qo_indptr:  torch.Tensor | None  # [requests + 1] int32 on the host, first row of each request; None: one row each
    # fmt: on


@dataclass
class EagerPass:
    """A pass outside of CUDA graphs. Each kind of layer is planned when it first runs."""

    parts: list[PassPart]

    @classmethod
    def of(cls, lens: PagedLens, kv_indices: torch.Tensor, sizes: list[int]) -> EagerPass:
        """Divide a pass into its leading requests with one row, for the decode kernel, and the others, for the prefill kernel.

        Over long contexts the prefill kernel is slow at single rows.

        Args:
            lens: of all requests.
            kv_indices: [pages] int32 on the device, pages of all requests.
            sizes: token rows of each request.
        """
        single = next((i for i, size in enumerate(sizes) if size != 1), len(sizes))
        parts, pages = [], int(lens.pages[:single].sum())
        if single:
            parts.append(PassPart(slice(0, single), lens.requests(0, single), kv_indices[:pages], None))
        if single < len(sizes):
            indptr = torch.tensor(np.cumsum([0, *sizes[single:]]), dtype=torch.int32)
            rows = slice(single, single + int(indptr[-1]))
            parts.append(PassPart(rows, lens.requests(single, len(sizes)), kv_indices[pages:], indptr))
        return cls(parts)


@dataclass
class GraphPass:
    """The decode pass of one batch size, with plans in memory that captured kernels read."""

    # fmt: off
    packed:     torch.Tensor  # [2 * batch + 1] int32: kv_indptr and last_page_len
    kv_indices: torch.Tensor  # [batch * pages per context] int32, shared by all batch sizes
    # fmt: on
    plans: dict[LayerKind, Planned] = field(default_factory=dict)
    lens: PagedLens | None = None

    @property
    def kv_indptr(self) -> torch.Tensor:
        return self.packed[: len(self.packed) // 2 + 1]

    @property
    def last_page_len(self) -> torch.Tensor:
        return self.packed[len(self.packed) // 2 + 1 :]
