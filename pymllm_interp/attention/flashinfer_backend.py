"""Attention for half precision on CUDA: FlashInfer's prefill kernels, and a native decode kernel.

The leading requests of a pass with one row each run `DecodeAttention`. It reads lengths and the request table on the device. A
decode pass has no other rows, so that it is captured as it is. The other requests run FlashInfer's paged prefill. It is planned
once for each kind of layer (heads, sliding window, soft cap), before the first such layer. Later layers of the kind reuse the plan.
It reads `KVPool.paged` and the pages in the request table::

    seq_lens 20, 3 with pages of 16 slots  ->  kv_indptr [0, 2, 3]   kv_indices [7, 3, 9]   last_page_len [4, 3]

All lengths come from the host (`seq_lens_cpu`), so planning does not synchronise with the device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from ..core.forward_batch import ForwardBatch, PagedKV
from ..mem_cache.memory_pool import FP8
from ..utils.extras import install_command
from .attention_backend import AttentionBackend, RadixAttention
from .decode_kernel import DecodeAttention
from .flashinfer_plans import (
    FlashInferPass,
    LayerKind,
    Planned,
    PrefillPart,
    num_single_rows,
    partial_bytes,
    prefill_lens,
)
from .torch_backend import TorchAttnBackend

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
WORKSPACE_BYTES = 256 << 20
"""Memory for partial results of requests with keys split over several blocks. All plans share it, because one kernel runs at a
time. It grows for layers of more heads (`partial_bytes`)."""


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
            from ..kernels.triton_pages import fill_kv_indices

            self._fill_kv_indices = fill_kv_indices
        self._num_sms = 1
        if self.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._decode = DecodeAttention(self.device)
        self._plans: dict[LayerKind, Planned] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.fresh_kv_only:
            self._torch_backend.init_forward_metadata(forward_batch)
            return
        single, prefill = num_single_rows(forward_batch), None
        if single < forward_batch.batch_size:
            table, page_size = _table_of(forward_batch), _pool_of(forward_batch).page_size
            qo_indptr, kv_indptr, last_page_len = prefill_lens(forward_batch, single, page_size)
            indices = torch.empty(int(kv_indptr[-1]), dtype=torch.int32, device=self.device)
            rows = forward_batch.req_pool_indices[single:]
            self._fill_kv_indices(indices, kv_indptr.to(self.device, non_blocking=True), rows, table, page_size)
            prefill = PrefillPart(single, qo_indptr, kv_indptr, last_page_len, indices)
        forward_batch.attn_metadata = FlashInferPass(single, prefill)

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
            self.attend_in_place(q, out, forward_batch)(layer)
        return out.flatten(1)

    def attend_in_place(
        self, q: torch.Tensor, out: torch.Tensor, forward_batch: ForwardBatch
    ) -> Callable[[RadixAttention], None]:
        metadata, pool = forward_batch.attn_metadata, _pool_of(forward_batch)
        assert isinstance(metadata, FlashInferPass), "init_forward_metadata plans the pass before its first layer"
        check_kv_dtype(pool.dtype, self.dtype)
        single, prefill = metadata.num_single, metadata.prefill
        single_q, single_out = q[:single], out[:single]
        prefill_q, prefill_out = (q, out) if prefill is None else (q[prefill.rows], out[prefill.rows])

        def attend(layer: RadixAttention) -> None:
            check_head_dim(layer.head_dim)
            if single:
                scales = pool.scales(layer.layer_id)
                self._decode(single_q, pool.get_kv(layer.layer_id), layer, forward_batch, single_out, scales)
            if prefill is not None:
                planned = self._planned(layer, prefill, forward_batch)
                scales = pool.scales(layer.layer_id)
                planned.run(prefill_q, pool.paged(layer.layer_id), prefill_out, layer.sinks, scales)

        return attend

    # -- CUDA graphs ---------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Do nothing: a decode pass has no plan."""

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        forward_batch.attn_metadata = FlashInferPass(forward_batch.batch_size, None)

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Do nothing: the captured kernels read the lengths on the device."""

    # -- plans ---------------------------------------------------------------------

    def _planned(self, layer: RadixAttention, part: PrefillPart, forward_batch: ForwardBatch) -> Planned:
        """The plan for this pass and this kind of layer."""
        kind = LayerKind.of(layer, _table_of(forward_batch).shape[1])
        if kind not in self._plans:
            wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace_for(kind), "NHD", backend=self._prefill(kind, _pool_of(forward_batch).dtype)
            )
            self._plans[kind] = Planned(wrapper, self.device)
        planned = self._plans[kind]
        if planned.owner is not part:
            self._plan(planned, kind, part, _pool_of(forward_batch))
            planned.owner = part
        return planned

    def _workspace_for(self, kind: LayerKind) -> torch.Tensor:
        """The workspace, enlarged if such layers need more."""
        size = partial_bytes(kind, self._num_sms)
        if size > len(self._workspace):
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._workspace

    def _prefill(self, kind: LayerKind, kv_dtype: torch.dtype) -> str:
        """ "fa3" (Hopper kernels) for common layers; else "fa2", because compiling "fa3" takes minutes. It has no FP8 K and V."""
        common = kind.window_left < 0 and not kind.logit_cap and kind.head_dim in (64, 128)
        return "fa3" if self._hopper and common and self.dtype is kv_dtype is torch.bfloat16 else "fa2"

    def _plan(self, planned: Planned, kind: LayerKind, part: PrefillPart, pool: PagedKV) -> None:
        options: dict[str, Any] = {
            "causal": True,
            "sm_scale": kind.scaling,
            "window_left": kind.window_left,
            "logits_soft_cap": kind.logit_cap,
            "q_data_type": self.dtype,
            "kv_data_type": pool.dtype,
        }
        paged = part.qo_indptr, part.kv_indptr, part.kv_indices, part.last_page_len
        planned.owner = None  # a failed plan has no owner
        try:
            planned.plan(*paged, kind.num_heads, kind.num_kv_heads, kind.head_dim, pool.page_size, **options)
        except (RuntimeError, OSError) as error:  # FlashInfer compiles missing kernels with nvcc and ninja
            if planned.ever_planned or isinstance(error, torch.OutOfMemoryError):
                raise
            raise RuntimeError(
                f"FlashInfer could not prepare its kernels for {kind.num_heads} heads over {kind.num_kv_heads} of size "
                f"{kind.head_dim} in {self.dtype} ({error}): install its compiled kernels (flashinfer-jit-cache), or nvcc and "
                "ninja; or use attention_backend='torch'"
            ) from error


def import_flashinfer() -> Any:
    """The module `flashinfer`. Raises ImportError: it is not installed, with the command that installs it."""
    try:
        return import_module("flashinfer")
    except ImportError as error:
        raise ImportError(
            f"attention_backend='flashinfer' needs the package flashinfer-python ({error}): "
            f"{install_command('cuda')}, or use attention_backend='torch'"
        ) from error


def check_kv_dtype(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Raise ValueError if a model of `dtype` cannot have K and V in `kv_dtype`."""
    if kv_dtype not in (dtype, FP8):
        raise ValueError(
            f"kv_cache_dtype={kv_dtype}: attention_backend='flashinfer' wants the model's dtype, {dtype}, or 'fp8'; use "
            "kv_cache_dtype='auto', or attention_backend='torch'"
        )


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
