"""Passes over a dummy batch: they measure memory, and touch no request and no KV but the dummy page."""

from __future__ import annotations

import torch

from ..attention.attention_backend import AttentionBackend, RadixAttention
from ..core.forward_batch import ForwardBatch
from ..core.step import LogitsProcessorOutput
from .partition import Execution
from .parts import RunnerParts
from .step_inputs import dummy_attn


@torch.no_grad()
def dummy_run(
    runner: RunnerParts,
    num_tokens: int,
    *,
    skip_attn: bool = False,
    uniform_decode: bool = False,
    is_profile: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a made-up batch that touches no request and no KV but the dummy page's.

    Args:
        is_profile: run module by module with the head on all rows, as a traced pass of whole prompts does.

    Returns:
        hidden states [num_tokens, hidden], and the hidden state of each request's last token [requests, hidden].

    Raises:
        ValueError: `skip_attn` outside of profiling.
    """
    if skip_attn and not is_profile:
        raise ValueError("skip_attn is for profile runs only: a pass without attention serves no request")
    # As many requests as possible, so that none is longer than the context.
    num_reqs = (
        num_tokens
        if uniform_decode
        else max(min(num_tokens, runner.max_running_requests or 1), -(-num_tokens // runner.context_len))
    )
    sizes = [num_tokens // num_reqs + (i < num_tokens % num_reqs) for i in range(num_reqs)]
    rows, slots = dummy_attn(num_reqs, num_tokens, runner.device)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=runner.device)
    lens = torch.tensor(sizes, dtype=torch.int32, device=runner.device)
    batch = runner.batches.extend(
        ids, rows, lens, lens, torch.zeros_like(lens), slots,
        extend_seq_lens_cpu=sizes, extend_prefix_lens_cpu=[0] * num_reqs,
    )  # fmt: skip
    last_rows = batch.logits_indices
    batch.return_hidden_states = True
    batch.rope_lens = torch.ones_like(ids)
    if is_profile:
        batch.logits_indices = None
    if skip_attn:
        batch.attn_backend = _NoAttention()
    else:
        batch.fresh_kv_only = True
    runner.forward(batch, Execution.MODULES if is_profile else Execution.PLAIN)
    assert batch.hidden_states is not None and last_rows is not None
    return batch.hidden_states, batch.hidden_states[last_rows]


@torch.no_grad()
def dummy_sampler_run(runner: RunnerParts, hidden_states: torch.Tensor) -> torch.Tensor:
    """Sample from hidden states [rows, hidden] with every filter and log probabilities on, as the widest step would.
    Returns token ids [rows] int32."""
    logits = runner.get_model().logits_of(hidden_states.unsqueeze(0))[0]
    ones = torch.ones(len(logits), device=logits.device)
    rows, slots = dummy_attn(len(logits), len(logits), runner.device)
    ids, lens = torch.zeros_like(slots), ones.to(torch.int32)
    batch = runner.batches.decode(ids, rows, lens, slots, return_logprob=True)
    return runner.sample(LogitsProcessorOutput(logits), batch, ones, ones * 0.9, (ones * 50).to(torch.int64))


class _NoAttention(AttentionBackend):
    """Attention of a pass that only measures memory: zeros."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Do nothing: the pass has no attention."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        return torch.zeros_like(q).flatten(1)
