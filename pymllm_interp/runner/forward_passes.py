"""Running forward passes: the part of a `ModelRunner` that knows no steps."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from ..core.forward_batch import ForwardBatch, ForwardMode
from ..core.model_spec import LOGITS
from ..core.step import LogitsProcessorOutput
from ..layers.edits.base import apply_inner
from ..models.base import CausalLM
from ..sampling import PenaltyBatch, Sampler, SamplingBatch
from . import dummy_run
from .batch_builder import BatchBuilder
from .device_memory import PoolOwner
from .executions import Executions
from .graphs.cuda_graph_runner import CudaGraphRunner
from .graphs.prefill_graphs import PrefillGraphs
from .partition import Execution
from .stages.stage import Stage
from .step_inputs import dummy_attn


class ForwardPasses(BatchBuilder):
    """Runs batches, and samples from their logits. `ModelRunner` adds life cycle and steps."""

    device: str
    dtype: torch.dtype
    vocab_size: int
    model: CausalLM | None
    kv_cache_dtype: torch.dtype
    num_hidden_layers: int
    max_num_tokens: int
    max_running_requests: int
    context_len: int
    graph_runner: CudaGraphRunner | None
    plain_graphs: CudaGraphRunner | None
    prefill_graphs: PrefillGraphs | None
    executions: Executions
    forward_pass_id: int
    sampler: Sampler
    stages: Sequence[Stage]
    rows_of_request: int = 1
    """Most rows of a request in a decode pass: with drafts, one more than these."""
    draft: PoolOwner | None = None
    """The runner of a draft model. Its memory counts with this runner's."""

    def get_model(self) -> CausalLM:
        """The loaded model."""
        assert self.model is not None, "call initialize() first"
        return self.model

    def get_kv_cache_spec(self) -> dict[int, tuple[int, int, torch.dtype]]:
        """Layer -> (kv heads, head_dim, dtype) of its KV. The last ones may hold keys of indexers."""
        model = self.get_model()
        heads = [(layer.num_kv_heads, layer.head_dim) for layer in model.attention_layers()]
        heads += [(model.spec.num_key_value_heads, model.spec.head_dim)] * model.num_index_layers
        return {layer: (*sizes, self.kv_cache_dtype) for layer, sizes in enumerate(heads)}

    # -- forward and sample ---------------------------------------------------------

    @torch.no_grad()
    def forward(self, forward_batch: ForwardBatch, execution: Execution = Execution.PLAIN) -> LogitsProcessorOutput:
        """Run one pass of the model.

        Args:
            execution: PLAIN runs the fused pass, from its CUDA graphs where there are any; MODULES goes module by module.

        Raises:
            ValueError: an unknown forward mode.
        """
        self.forward_pass_id += 1
        mode = forward_batch.forward_mode
        if mode == ForwardMode.IDLE:
            return LogitsProcessorOutput(torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device))
        if mode == ForwardMode.DECODE:
            return self.forward_decode(forward_batch, execution)
        if mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return self.forward_extend(forward_batch, execution)
        raise ValueError(f"unknown forward mode {mode!r}: expected one of {[m.name for m in ForwardMode]}")

    def forward_decode(
        self, forward_batch: ForwardBatch, execution: Execution = Execution.PLAIN
    ) -> LogitsProcessorOutput:
        """One new token for each request."""
        if execution is Execution.REPLAY or (execution is Execution.PLAIN and self.can_replay(forward_batch)):
            return self.replay(forward_batch)
        return self.plan_and_call(forward_batch, execution)

    forward_extend = forward_decode
    """New tokens behind cached ones, for each request."""

    def can_replay(self, batch: ForwardBatch) -> bool:
        """Whether a CUDA graph serves the batch."""
        return self.executions.can(Execution.REPLAY, batch)

    def decode_graphs(self, batch: ForwardBatch) -> CudaGraphRunner | None:
        """The captured decode passes for a batch; None without such passes."""
        return (self.plain_graphs if batch.site_ops is None else None) or self.graph_runner

    def is_laid_out(self, batch: ForwardBatch) -> bool:
        """Whether input buffers have all that a captured decode pass reads of the batch."""
        return True

    def replay(self, batch: ForwardBatch, in_place: bool = False) -> LogitsProcessorOutput:
        """Run a pass from its CUDA graphs.

        Args:
            in_place: return a decode graph's own output, which the next replay overwrites.
        """
        if batch.forward_mode.is_extend():
            assert self.prefill_graphs is not None
            return self.prefill_graphs.replay(batch)
        graphs = self.decode_graphs(batch)
        assert graphs is not None
        output = graphs.replay(batch, in_place)
        if batch.site_ops is not None:  # captured decode passes end before the ops at the logits
            logits = apply_inner(output.next_token_logits.unsqueeze(0), batch.site_ops, 0, LOGITS)[0]
            output = LogitsProcessorOutput(logits, output.hidden_states)
        return output

    def plan_and_call(self, batch: ForwardBatch, execution: Execution) -> LogitsProcessorOutput:
        """Plan attention for the pass, and run it: PLAIN fused, MODULES module by module."""
        assert batch.attn_backend is not None
        batch.attn_backend.init_forward_metadata(batch)
        logits = self.call_model(batch, execution)[0]
        return LogitsProcessorOutput(logits, hidden_states=batch.hidden_states)

    def call_model(self, batch: ForwardBatch, execution: Execution) -> torch.Tensor:
        """Logits [1, logit rows, vocab] of a planned pass."""
        assert batch.positions is not None
        model = self.get_model()
        input_ids, positions = batch.input_ids.unsqueeze(0), batch.positions.unsqueeze(0)
        if execution is Execution.PLAIN:
            return model.forward_fused(input_ids, positions, batch)
        return model(input_ids=input_ids, position_ids=positions, forward_batch=batch).logits  # pyright: ignore[reportReturnType]

    def sample(
        self,
        logits_output: LogitsProcessorOutput,
        forward_batch: ForwardBatch,
        temperatures: torch.Tensor | None = None,
        top_ps: torch.Tensor | None = None,
        top_ks: torch.Tensor | None = None,
        penalty_params: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Next token ids, int32 [batch], by the sampler of the engine's steps. Greedy without temperatures, or where they are 0.

        Args:
            temperatures, top_ps, top_ks: [batch]; a top_k of -1 or 0 keeps all tokens.
            penalty_params: `repetition_penalties`, `frequency_penalties`, `presence_penalties` ([batch] each) and
                `token_histories` (a list of token ids for each request).

        A batch with `return_logprob` gets `logits_output.next_token_logprobs`, under the raw logits.
        """
        logits = logits_output.next_token_logits
        batch = SamplingBatch(rows=len(logits), temperatures=temperatures, top_ps=top_ps, top_ks=top_ks)
        if temperatures is not None:
            zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
            batch.seeds = torch.randint(2**62, zeros.shape, device=logits.device)
            batch.sample_indices = batch.gen_indices = zeros
        if penalty_params is not None:
            batch.penalties = _penalties(logits, **penalty_params)
        if forward_batch.return_logprob:
            batch.num_logprobs = list(forward_batch.top_logprobs_nums or [0] * len(logits))
        output = self.sampler(logits, batch)
        if output.logprobs is not None:
            entries = output.logprobs.tolists()
            logits_output.next_token_logprobs = [entry for entry in entries if entry is not None]
        return output.token_ids

    def enter_pass(self, batch: ForwardBatch, first: int = 0) -> None:
        """Have the stages serve the modules of a pass. See `Stage.enter_pass`."""
        for stage in self.stages:
            stage.enter_pass(batch, first)

    def captured_site_ops(self, bs: int) -> Any:
        """`ForwardBatch.site_ops` of a decode pass that is captured for `bs` rows of the input buffers."""
        found = (stage.captured_site_ops(bs) for stage in self.stages)
        return next((ops for ops in found if ops is not None), None)

    # -- dummy runs ---------------------------------------------------------------------

    def prepare_dummy_attn(self, num_reqs: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for padding rows: the dummy row, and the dummy slot."""
        return dummy_attn(num_reqs, num_tokens, self.device)

    def _dummy_run(self, num_tokens: int, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See `dummy_run.dummy_run`."""
        return dummy_run.dummy_run(self, num_tokens, **options)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """See `dummy_run.dummy_sampler_run`."""
        return dummy_run.dummy_sampler_run(self, hidden_states)

    def profile_run(self) -> None:
        """Run the largest step, so that its peak of memory is known."""
        _, sampled_from = self._dummy_run(self.max_num_tokens, skip_attn=True, is_profile=True)
        self._dummy_sampler_run(sampled_from)
        gc.collect()


def _penalties(
    logits: torch.Tensor, token_histories: Sequence[Sequence[int]], **penalties: torch.Tensor | None
) -> PenaltyBatch:
    rows, vocab = logits.shape
    if len(token_histories) != rows:
        raise ValueError(f"token_histories has {len(token_histories)} lists, logits has {rows} rows: give one for each")
    strengths = torch.tensor([[1.0, 0.0, 0.0]], device=logits.device).repeat(rows, 1)
    for column, name in enumerate(("repetition_penalties", "frequency_penalties", "presence_penalties")):
        if (values := penalties.get(name)) is not None:
            if values.shape != (rows,):
                raise ValueError(f"{name} has shape {tuple(values.shape)}, expected ({rows},): one value for each row")
            strengths[:, column] = values
    every = torch.arange(rows, device=logits.device)
    return PenaltyBatch.of_tokens(every, strengths, [[]] * rows, token_histories, vocab)
