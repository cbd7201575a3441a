"""FlashInfer's paged prefill wrapper in plain torch, as its documentation has it: what is handed to it is tested without CUDA.

It keeps the habits that matter: a plan is made from lengths on the host, and what `run` has checked, it hands to a function of
the planned module, by place.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from pymllm_interp.attention import RadixAttention


class _Paged:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        assert kv_layout == "NHD" and backend == "fa2"
        assert float_workspace_buffer.dtype is torch.uint8
        self._workspace, self.plans = float_workspace_buffer, 0

    def _plan(self, qo_indptr, indptr, indices, last, heads, kv_heads, head_dim, page_size, **options):
        for lens in (qo_indptr, indptr, last):
            assert lens.device.type == "cpu" and lens.dtype is torch.int32
        assert indices.dtype is torch.int32 and len(indices) == indptr[-1]
        assert len(last) == len(indptr) - 1 == len(qo_indptr) - 1
        assert (last >= 1).all() and (last <= page_size).all()
        self._buffers = [indptr.clone(), indices, last.clone()]
        self._dtypes = options.pop("q_data_type"), options.pop("kv_data_type")
        assert self._dtypes[1] in (self._dtypes[0], torch.float8_e4m3fn)
        window, cap = options.pop("window_left"), options.pop("logits_soft_cap")
        self._layer = RadixAttention(
            0, heads, kv_heads, head_dim, options.pop("sm_scale"), None if window < 0 else window + 1, cap or None
        )
        assert not options, options
        self._qo_indptr, self._planned, self.page_size = qo_indptr, indptr.clone(), page_size
        self._cached_module = SimpleNamespace(paged_run=self._paged_run)
        self.plans += 1

    def run(self, q, paged_kv_cache, out=None, lse=None, return_lse=False, k_scale=None, v_scale=None):
        assert out is not None and out.shape == q.shape and out.dtype == q.dtype
        k_cache, v_cache = paged_kv_cache
        assert k_cache.shape[1] == self.page_size
        if (q.dtype, k_cache.dtype) != self._dtypes or len(q) != self._qo_indptr[-1]:
            raise ValueError(f"the plan is for other queries than {len(q)} in {q.dtype}")
        scaling = self._layer.scaling * (k_scale or 1.0)
        self._cached_module.paged_run(self._qo_indptr, q, k_cache, v_cache, *self._buffers, out, lse, scaling)
        out *= v_scale or 1.0
        return (out, lse) if return_lse else out

    def _paged_run(self, qo_indptr, q, k_cache, v_cache, indptr, indices, last, out, lse, scaling=None):
        assert torch.equal(indptr, self._planned), "the plan is of a pass with other numbers of pages"
        for i in range(len(last)):
            pages = indices[indptr[i] : indptr[i + 1]].long()
            length = (len(pages) - 1) * self.page_size + int(last[i])
            k, v = (cache.double()[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            start, stop = qo_indptr[i : i + 2].tolist()
            out[start:stop], sums = self._attend(q[start:stop], k, v, scaling or self._layer.scaling)
            if lse is not None:
                lse[start:stop] = sums

    def _attend(self, q, k, v, scaling):
        layer = self._layer
        q = q.double()
        groups = layer.num_heads // layer.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        back = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
        hidden = (back < 0) | (back >= (layer.sliding_window or len(k) + 1))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
        if layer.logit_cap is not None:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        scores = scores.masked_fill(hidden, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v)
        return out.to(torch.bfloat16), scores.logsumexp(-1).T / math.log(2)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
        page_size, *, causal, **options,
    ):  # fmt: skip
        assert causal
        self._plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
            page_size, **options,
        )  # fmt: skip
