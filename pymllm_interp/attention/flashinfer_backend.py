"""Attention through FlashInfer's paged kernels, for half precision on CUDA.

A pass is planned once for each kind of layer (heads, sliding window, soft cap), when the first layer of that kind runs. Later
layers of the kind reuse the plan. Requests with one row run the decode kernel (tensor cores), the others the prefill kernel; a
mixed pass runs both. They read `KVPool.paged` and the pages in the request table::

    seq_lens 20, 3 with pages of 16 slots  ->  kv_indptr [0, 2, 3]   kv_indices [7, 3, 9]   last_page_len [4, 3]

All lengths come from the host (`seq_lens_cpu`), so planning does not synchronise with the device. Decode passes in CUDA graphs
have separate plans for each batch size. A plan is made outside of the graph, at a fixed address that the captured kernels
read.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ..core.forward_batch import ForwardBatch, PagedKV
from .attention_backend import AttentionBackend, RadixAttention
from .flashinfer_plans import EagerPass, GraphPass, LayerKind, PagedLens, PassPart, Planned, partial_bytes
from .torch_backend import TorchAttnBackend

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
WORKSPACE_BYTES = 256 << 20
"""Memory for partial results of requests with keys split over several blocks. All plans share it, because one kernel runs at a
time. It grows for larger passes (`partial_bytes`)."""
GRAPH_PLAN_BYTES = 1 << 20


class FlashInferAttnBackend(AttentionBackend):
    """Paged attention in float16 or bfloat16 on CUDA, for head sizes 64, 128 and 256.

    Passes with gradients (`fresh_kv_only`) run on the torch backend.

    Raises:
        ImportError: FlashInfer is not installed.
        ValueError: no kernels for the dtype or, when a layer runs, for its head size.
    """

    def __init__(self, device: str | torch.device, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ValueError(
                f"attention_backend='flashinfer' has no {str(dtype).removeprefix('torch.')} kernels; use dtype='bfloat16' "
                "or 'float16', or attention_backend='torch'"
            )
        self._flashinfer = import_flashinfer()
        self.device, self.dtype = torch.device(device), dtype
        self._hopper = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] == 9
        self._torch_backend = TorchAttnBackend()
        self._fill_kv_indices = _fill_kv_indices
        if self.device.type == "cuda":
            from .triton_pages import fill_kv_indices

            self._fill_kv_indices = fill_kv_indices
        self._num_sms = 1
        if self.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._eager: dict[tuple[LayerKind, bool], Planned] = {}
        self._graphs: dict[int, GraphPass] = {}
        self._graph_indices: torch.Tensor | None = None
        self._max_graph_bs = 0

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.fresh_kv_only:
            self._torch_backend.init_forward_metadata(forward_batch)
            return
        if forward_batch.num_tokens == 0:
            forward_batch.attn_metadata = None
            return
        lens = PagedLens.of(forward_batch, _pool_of(forward_batch).page_size)
        indptr = lens.kv_indptr.to(self.device, non_blocking=True)
        indices = torch.empty(lens.total_pages, dtype=torch.int32, device=self.device)
        self._fill(indices, indptr, forward_batch)
        forward_batch.attn_metadata = EagerPass.of(lens, indices, [size for _, size in forward_batch.batch_groups])

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if forward_batch.fresh_kv_only:
            return self._torch_backend.forward(q, k, v, layer, forward_batch, save_kv_cache)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if q.shape[0]:
            pool = _pool_of(forward_batch)
            if save_kv_cache:
                pool.set_kv(layer.layer_id, forward_batch.out_cache_loc[: len(k)], k, v)
            for rows, planned in self._planned(layer, forward_batch, pool):
                planned.run(q[rows], pool.paged(layer.layer_id), out[rows])
        return out.flatten(1)

    def attend_in_place(
        self, q: torch.Tensor, out: torch.Tensor, forward_batch: ForwardBatch
    ) -> Callable[[RadixAttention], None]:
        pool, parts = _pool_of(forward_batch), dict[LayerKind, list[tuple[Planned, torch.Tensor, torch.Tensor]]]()
        metadata, context_len = forward_batch.attn_metadata, _table_of(forward_batch).shape[1]
        assert isinstance(metadata, EagerPass), "init_forward_metadata plans the pass before its first layer"

        def attend(layer: RadixAttention) -> None:
            kind, kv = LayerKind.of(layer, context_len), pool.paged(layer.layer_id)
            if kind not in parts:
                parts[kind] = [
                    (self._part_plan(kind, part, pool), q[part.rows], out[part.rows]) for part in metadata.parts
                ]
            for planned, part_q, part_out in parts[kind]:
                planned.run(part_q, kv, part_out)

        return attend

    # -- CUDA graphs ---------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int) -> None:
        self._max_graph_bs = max_bs
        self._graphs.clear()
        self._graph_indices = None

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        bs = forward_batch.batch_size
        if bs not in self._graphs:
            if bs > self._max_graph_bs:
                raise ValueError(f"batch size {bs}: init_cuda_graph_state was called for at most {self._max_graph_bs}")
            if self._graph_indices is None:
                longest = -(-_table_of(forward_batch).shape[1] // _pool_of(forward_batch).page_size)
                self._graph_indices = self._empty_ints(self._max_graph_bs * longest)
            self._graphs[bs] = GraphPass(self._empty_ints(2 * bs + 1), self._graph_indices)
        self._plan_graph(forward_batch)

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        self._plan_graph(forward_batch)

    def _plan_graph(self, forward_batch: ForwardBatch) -> None:
        """Write the pass's pages to the buffers of its captured kernels, and update their plans.

        A plan depends only on the numbers of pages. With pages of 16 slots most steps keep their plans.
        """
        graph = self._graphs[forward_batch.batch_size]
        graph.lens = lens = PagedLens.of(forward_batch, _pool_of(forward_batch).page_size)
        graph.packed.copy_(lens.packed, non_blocking=True)
        self._fill(graph.kv_indices[: lens.total_pages], graph.kv_indptr, forward_batch)
        for kind, planned in graph.plans.items():
            if planned.pages is None or not np.array_equal(planned.pages, lens.pages):
                self._plan(planned, kind, lens, graph.kv_indices[: lens.total_pages], None, _pool_of(forward_batch))
        forward_batch.attn_metadata = graph

    def _graph_plan(self, kind: LayerKind, graph: GraphPass, pool: PagedKV) -> Planned:
        assert graph.lens is not None
        if kind not in graph.plans:  # in a warm-up: a capture finds all kinds planned
            check_head_dim(kind.head_dim)
            workspace = self._workspace_for(kind, len(graph.last_page_len))
            wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=graph.kv_indptr,
                paged_kv_indices_buffer=graph.kv_indices,
                paged_kv_last_page_len_buffer=graph.last_page_len,
                backend="fa2",
            )
            plan_memory = torch.empty(GRAPH_PLAN_BYTES, dtype=torch.uint8, device=self.device)
            wrapper.reset_workspace_buffer(workspace, plan_memory)
            graph.plans[kind] = Planned(wrapper, self.device)
            lens = graph.lens
            self._plan(graph.plans[kind], kind, lens, graph.kv_indices[: lens.total_pages], None, pool)
        return graph.plans[kind]

    # -- plans ---------------------------------------------------------------------

    def _planned(
        self, layer: RadixAttention, forward_batch: ForwardBatch, pool: PagedKV
    ) -> list[tuple[slice, Planned]]:
        """The plans for this pass and this kind of layer, with the token rows of each."""
        metadata = forward_batch.attn_metadata
        kind = LayerKind.of(layer, _table_of(forward_batch).shape[1])
        if isinstance(metadata, GraphPass):
            return [(slice(None), self._graph_plan(kind, metadata, pool))]
        assert isinstance(metadata, EagerPass), "init_forward_metadata plans the pass before its first layer"
        return [(part.rows, self._part_plan(kind, part, pool)) for part in metadata.parts]

    def _part_plan(self, kind: LayerKind, part: PassPart, pool: PagedKV) -> Planned:
        check_head_dim(kind.head_dim)
        decode = part.qo_indptr is None
        if (kind, decode) not in self._eager:
            module, workspace = self._flashinfer, self._workspace_for(kind)
            wrapper = (
                module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
                if decode
                else module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=self._prefill(kind))
            )
            self._eager[kind, decode] = Planned(wrapper, self.device)
        planned = self._eager[kind, decode]
        if planned.owner is not part:
            self._plan(planned, kind, part.lens, part.kv_indices, part.qo_indptr, pool)
            planned.owner = part
        return planned

    def _workspace_for(self, kind: LayerKind, rows: int | None = None) -> torch.Tensor:
        """The workspace, enlarged if such passes need more. Captured passes keep the one they were captured with."""
        size = partial_bytes(kind, self._num_sms, rows)
        if size > len(self._workspace):
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._workspace

    def _prefill(self, kind: LayerKind) -> str:
        """ "fa3" (Hopper kernels) for common layers; else "fa2", because compiling "fa3" takes minutes."""
        common = kind.window_left < 0 and not kind.logit_cap and kind.head_dim in (64, 128)
        return "fa3" if self._hopper and common and self.dtype is torch.bfloat16 else "fa2"

    def _plan(
        self,
        planned: Planned,
        kind: LayerKind,
        lens: PagedLens,
        kv_indices: torch.Tensor,
        qo_indptr: torch.Tensor | None,
        pool: PagedKV,
    ) -> None:
        if pool.dtype != self.dtype:
            raise ValueError(
                f"kv_cache_dtype={pool.dtype}: attention_backend='flashinfer' wants the model's dtype, {self.dtype}; use "
                "kv_cache_dtype='auto', or attention_backend='torch'"
            )
        paged = (lens.kv_indptr, kv_indices, lens.last_page_len)
        heads = (kind.num_heads, kind.num_kv_heads, kind.head_dim, pool.page_size)
        options: dict[str, Any] = {
            "sm_scale": kind.scaling,
            "window_left": kind.window_left,
            "logits_soft_cap": kind.logit_cap,
            "q_data_type": self.dtype,
            "kv_data_type": pool.dtype,
        }
        never_planned, planned.pages = planned.pages is None, None  # a failed plan leaves none
        try:
            if qo_indptr is None:
                planned.plan(*paged, *heads, **options)
            else:
                planned.plan(qo_indptr, *paged, *heads, causal=True, **options)
        except (RuntimeError, OSError) as error:  # FlashInfer compiles missing kernels with nvcc and ninja
            if not never_planned or isinstance(error, torch.OutOfMemoryError):
                raise
            raise RuntimeError(
                f"FlashInfer could not prepare its kernels for {kind.num_heads} heads over {kind.num_kv_heads} of size "
                f"{kind.head_dim} in {self.dtype} ({error}): install its compiled kernels (flashinfer-jit-cache), or nvcc and "
                "ninja; or use attention_backend='torch'"
            ) from error
        planned.pages = lens.pages

    def _fill(self, kv_indices: torch.Tensor, kv_indptr: torch.Tensor, forward_batch: ForwardBatch) -> None:
        rows, table = forward_batch.req_pool_indices, _table_of(forward_batch)
        self._fill_kv_indices(kv_indices, kv_indptr, rows, table, _pool_of(forward_batch).page_size)

    def _empty_ints(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.device)


def import_flashinfer() -> Any:
    """The module `flashinfer`.

    Raises:
        ImportError: it is not installed, with the command that installs it.
    """
    try:
        return import_module("flashinfer")
    except ImportError as error:
        raise ImportError(
            f"attention_backend='flashinfer' needs the package flashinfer-python ({error}): "
            "pip install 'pymllm-interp[cuda]', or use attention_backend='torch'"
        ) from error


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError if FlashInfer has no kernels for the head size."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"head_dim={head_dim}: attention_backend='flashinfer' has kernels for {HEAD_DIMS}; use attention_backend='torch'"
        )


def _fill_kv_indices(
    out: torch.Tensor, kv_indptr: torch.Tensor, rows: torch.Tensor, req_to_token: torch.Tensor, page_size: int
) -> None:
    """`triton_pages.fill_kv_indices` in plain torch. `out` has exactly the requests' pages."""
    starts = kv_indptr.to(torch.int64)
    request = torch.repeat_interleave(starts.diff(), output_size=out.shape[0])
    page = torch.arange(out.shape[0], device=out.device) - starts[request]
    torch.div(req_to_token[rows[request], page * page_size], page_size, rounding_mode="floor", out=out)


def _pool_of(forward_batch: ForwardBatch) -> PagedKV:
    assert forward_batch.token_to_kv_pool is not None, "prepare_forward_batch_* sets the pools"
    return forward_batch.token_to_kv_pool


def _table_of(forward_batch: ForwardBatch) -> torch.Tensor:
    assert forward_batch.req_to_token_pool is not None, "prepare_forward_batch_* sets the pools"
    return forward_batch.req_to_token_pool.req_to_token
