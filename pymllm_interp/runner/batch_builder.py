"""`BatchBuilder`: the `ForwardBatch` of arrays, a step's or arrays by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..attention.attention_backend import AttentionBackend
from ..core.forward_batch import ForwardBatch, ForwardMode
from ..core.model_spec import ModelSpec
from ..mem_cache.kv_pool import KVPool
from ..mem_cache.memory_pool import ReqToTokenPool
from ..mem_cache.state_pool import StatePool
from ..utils.upload import upload


@dataclass(frozen=True)
class BatchBuilder:
    """Makes batches over some pools."""

    model_spec: ModelSpec
    req_to_token_pool: ReqToTokenPool | None
    token_to_kv_pool: KVPool | None
    attn_backend: AttentionBackend | None
    gdn_pool: StatePool | None = None

    def extend(
        self,
        input_ids: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        return_logprob: bool = False,
        top_logprobs_nums: list[int] | None = None,
        *,
        extend_seq_lens_cpu: list[int] | None = None,
        extend_prefix_lens_cpu: list[int] | None = None,
    ) -> ForwardBatch:
        """A batch that extends each request by `extend_seq_lens` tokens behind its `extend_prefix_lens` cached ones.

        Args:
            input_ids: [tokens], all new tokens, request by request.
            req_pool_indices, seq_lens, extend_seq_lens, extend_prefix_lens: [batch].
            out_cache_loc: [tokens], the KV slot of each new token.
            extend_seq_lens_cpu, extend_prefix_lens_cpu: the same on the host, so that nothing waits for the device.

        Raises:
            ValueError: lengths that do not add up, or a request without a new token.
        """
        sizes = extend_seq_lens_cpu if extend_seq_lens_cpu is not None else extend_seq_lens.tolist()
        prefixes = extend_prefix_lens_cpu if extend_prefix_lens_cpu is not None else extend_prefix_lens.tolist()
        if sum(sizes) != input_ids.shape[0]:
            raise ValueError(f"extend_seq_lens add up to {sum(sizes)}, but input_ids has {input_ids.shape[0]} tokens")
        if min(sizes, default=1) < 1:
            raise ValueError(f"request {sizes.index(min(sizes))} has no new token: extend_seq_lens={sizes}")
        ends = np.cumsum(sizes, dtype=np.int32) if sizes else np.zeros(0, dtype=np.int32)
        lens = np.array(prefixes, dtype=np.int32) + np.array(sizes, dtype=np.int32)
        positions = np.arange(sum(sizes), dtype=np.int64) - np.repeat(ends - lens, sizes)
        seq_lens_cpu = torch.from_numpy(lens)
        positions, starts, last_rows, rope_lens = upload(
            input_ids.device, positions, ends - np.array(sizes, dtype=np.int32), ends.astype(np.int64) - 1,
            np.repeat(lens, sizes).astype(np.int64),
        )  # fmt: skip
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(sizes),
            input_ids=input_ids,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            out_cache_loc=out_cache_loc,
            seq_lens_sum=int(seq_lens_cpu.sum()),
            seq_lens_cpu=seq_lens_cpu,
            positions=positions,
            extend_num_tokens=int(sum(sizes)),
            extend_seq_lens=extend_seq_lens,
            extend_prefix_lens=extend_prefix_lens,
            extend_start_loc=starts,
            extend_prefix_lens_cpu=list(prefixes),
            extend_seq_lens_cpu=list(sizes),
            return_logprob=return_logprob,
            top_logprobs_nums=top_logprobs_nums,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.token_to_kv_pool,
            attn_backend=self.attn_backend,
            state_pool=self.gdn_pool,
            logits_indices=last_rows,
            rope_lens=rope_lens if self.model_spec.rope_depends_on_length else None,
        )

    def decode(
        self,
        input_ids: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        return_logprob: bool = False,
        top_logprobs_nums: list[int] | None = None,
        mrope_position_deltas: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        seq_lens_cpu: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """A batch of one new token for each request. All arguments are [batch]; `seq_lens` counts the new token.

        Args:
            positions: int64, `seq_lens` - 1.
            seq_lens_cpu: `seq_lens` on the host, so that nothing waits for the device.
        """
        lens = seq_lens_cpu if seq_lens_cpu is not None else seq_lens.cpu()
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=input_ids.shape[0],
            input_ids=input_ids,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            out_cache_loc=out_cache_loc,
            seq_lens_sum=int(lens.sum()),
            seq_lens_cpu=lens,
            positions=seq_lens.to(torch.int64) - 1 if positions is None else positions,
            return_logprob=return_logprob,
            top_logprobs_nums=top_logprobs_nums,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.token_to_kv_pool,
            attn_backend=self.attn_backend,
            state_pool=self.gdn_pool,
            mrope_position_deltas=mrope_position_deltas,
            rope_lens=seq_lens.to(torch.int64) if self.model_spec.rope_depends_on_length else None,
        )
