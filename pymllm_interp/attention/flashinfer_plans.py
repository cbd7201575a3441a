"""FlashInfer's prefill wrapper: the lengths on the host that it is planned with, and calls of its kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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


def partial_bytes(kind: LayerKind, num_sms: int) -> int:
    """Upper bound of FlashInfer's partial results in bytes: float32, for each tile of queries.

    FlashInfer splits keys when blocks would idle.
    """
    tile = 64 if kind.head_dim == 256 else 128
    return kind.num_heads * (2 * num_sms // kind.num_kv_heads) * tile * (kind.head_dim + 1) * 4 + 16


class Planned:
    """A FlashInfer wrapper, and the pass of its plan.

    `plan` writes to pinned memory that the device reads later. The next `plan` waits until the device has read it.
    """

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self.owner: object = None
        self.ever_planned = False
        self._read = torch.cuda.Event() if device.type == "cuda" else None
        self._call: KernelCall | None = None

    def plan(self, *args: Any, **kwargs: Any) -> None:
        if self._read is not None:
            self._read.synchronize()
        self._call = None
        self.wrapper.plan(*args, **kwargs)
        self.ever_planned = True
        if self._read is not None:
            self._read.record()

    def run(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """`wrapper.run` for the first layer of a plan. Later layers repeat its kernel call without the wrapper's checks.

        Args:
            sinks: [heads], see `RadixAttention`. The kernel has none; its output is scaled by ``sigmoid(lse - sink)``.
            kv_scales: dequantization scales of K and V. They differ by layer, so such calls are not repeated.
        """
        lse = None if sinks is None else torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if kv_scales != (1.0, 1.0):
            options = {} if lse is None else {"lse": lse, "return_lse": True}
            self.wrapper.run(q, kv, out=out, k_scale=kv_scales[0], v_scale=kv_scales[1], **options)
        elif self._call is not None and self._call.takes(q, lse):
            self._call(q, *kv, out, *(() if lse is None else (lse,)))
        else:
            self._call = KernelCall.noted(self.wrapper, q, kv, out, lse)
        if sinks is not None and lse is not None:
            scale_by_sinks(out, lse, sinks)


def scale_by_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Scale attention in place, as if ``exp(sink)`` were in each softmax's sum.

    Args:
        out: [tokens, heads, head_dim].
        lse: [tokens, heads] float32, the base-2 logarithm of each sum.
        sinks: [heads].
    """
    out.mul_(torch.sigmoid(lse * math.log(2) - sinks.float()).unsqueeze(-1))


class KernelCall(NamedTuple):
    """A call of FlashInfer's kernel, without the tensors that change from layer to layer."""

    # fmt: off
    kernel: Callable[..., None]
    args:   list[Any]
    places: tuple[int, ...]  # indices of q, k, v, out and, with one, lse in args
    like:   tuple[torch.Size, torch.dtype, torch.device]  # (shape, dtype, device) of q
    # fmt: on

    @classmethod
    def noted(
        cls, wrapper: Any, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> KernelCall | None:  # fmt: skip
        """Run `wrapper` and record its kernel call. None if the wrapper differs from FlashInfer 0.7's."""
        module, calls = getattr(wrapper, "_cached_module", None), []
        options = {"out": out} if lse is None else {"out": out, "lse": lse, "return_lse": True}
        if not isinstance(module, SimpleNamespace) or not hasattr(module, "paged_run"):
            wrapper.run(q, kv, **options)
            return None

        def noting(*args: Any) -> Any:
            calls.append(args)
            return module.paged_run(*args)

        wrapper._cached_module = SimpleNamespace(**{**vars(module), "paged_run": noting})
        try:
            wrapper.run(q, kv, **options)
        finally:
            wrapper._cached_module = module
        tensors = (q, *kv, out) if lse is None else (q, *kv, out, lse)
        found = [[i for i, arg in enumerate(args) if arg is tensor] for args in calls for tensor in tensors]
        if any(len(places) != 1 for places in found) or len(found) != len(tensors):
            return None
        places = tuple(i for (i,) in found)
        # Without the layer's tensors, to release their memory.
        args = [None if i in places else arg for i, arg in enumerate(calls[0])]
        return cls(module.paged_run, args, places, (q.shape, q.dtype, q.device))

    def takes(self, q: torch.Tensor, lse: torch.Tensor | None) -> bool:
        """Whether the call is for the shape, dtype and device of `q`. If not, the wrapper raises its own error.

        A call with `lse` is another one than a call without.
        """
        return (q.shape, q.dtype, q.device) == self.like and len(self.places) == (4 if lse is None else 5)

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Run the kernel on q, k, v, out and, with one, lse, in the order of `places`."""
        args = self.args.copy()
        for place, tensor in zip(self.places, tensors, strict=True):
            args[place] = tensor
        self.kernel(*args)


@dataclass
class PrefillPart:
    """Requests that are planned for the prefill kernel: the first with more than one token row, and all behind it.

    Over long contexts that kernel is slow at single rows. Hence the leading requests with one row run another kernel.
    """

    # fmt: off
    first_row:     int
    qo_indptr:     torch.Tensor  # [requests + 1] int32 on the host, first row of each request, from 0
    kv_indptr:     torch.Tensor  # [requests + 1] int32 on the host, first page of each request in kv_indices
    last_page_len: torch.Tensor  # [requests] int32 on the host, slots in use of each request's last page
    kv_indices:    torch.Tensor  # [pages] int32 on the device
    # fmt: on

    @property
    def rows(self) -> slice:
        """Token rows of the flat batch."""
        return slice(self.first_row, self.first_row + int(self.qo_indptr[-1]))


@dataclass
class FlashInferPass:
    """A pass. The leading requests with one row each run the decode kernel, which needs no plan."""

    # fmt: off
    num_single: int
    prefill:    PrefillPart | None
    # fmt: on


def num_single_rows(forward_batch: ForwardBatch) -> int:
    """Leading requests of the batch with one token row."""
    if forward_batch.forward_mode.is_decode():
        return forward_batch.batch_size
    sizes = [size for _, size in forward_batch.batch_groups]
    return next((i for i, size in enumerate(sizes) if size != 1), len(sizes))


def prefill_lens(
    forward_batch: ForwardBatch, first: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(`qo_indptr`, `kv_indptr`, `last_page_len`) of a `PrefillPart` from the request `first` on, on the host.

    `kv_indptr` is pinned if the batch is on CUDA, for an asynchronous copy.
    """
    seq_lens = forward_batch.seq_lens if forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu
    lens = seq_lens.cpu().numpy().astype(np.int64)[first:]
    pages = -(-lens // page_size)
    sizes = [size for _, size in forward_batch.batch_groups[first:]]
    kv_indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, pin_memory=forward_batch.input_ids.is_cuda)
    np.cumsum(pages, out=kv_indptr.numpy()[1:])
    last_page_len = torch.from_numpy((lens - (pages - 1) * page_size).astype(np.int32))
    return torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32), kv_indptr, last_page_len
