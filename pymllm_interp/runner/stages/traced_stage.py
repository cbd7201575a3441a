"""The traced stage of a runner: serves blocks of traces in its passes. `NNsightRequestHelper` knows the rows of each request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec
from ...core.pass_parts import TransformersOutputs
from ...core.step import LogitsProcessorOutput, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from ...hooks.traces.blocks.trace import RequestTrace
from ...hooks.traces.serving.batch_groups import NNsightRequestHelper
from ...hooks.traces.serving.interleaver import EngineInterleaver
from ...models.transformers.transformers_pass import TransformersPass
from ...utils.upload import upload
from ..input_batch import InputBatch
from .stage import PassDemands, Stage


class TracedStage(Stage):
    """Runs trace blocks. A step without traces skips this stage.

    Args:
        hook_execution: see `ServerConfig.hook_execution`.

    Attributes:
        interleaver: serves the blocks.
        helper: traces in flight, and their rows.
        model_spec: spec of the served model, set by `load_model`.
        has_experts: whether some of its modules compute rows in another order.
    """

    model_spec: ModelSpec
    has_experts = False

    def __init__(self, hook_execution: str) -> None:
        self.interleaver = EngineInterleaver()
        self.helper = NNsightRequestHelper(self.interleaver)
        self._splits = hook_execution == "split"

    def begin(self, step: SchedulerOutput, demands: PassDemands) -> None:
        """Give every traced request its rows, and run new blocks until they first wait."""
        helper, interleaver = self.helper, self.interleaver
        hooked = any(request.hooks is not None for request in step.scheduled_new_reqs)
        if not (hooked or helper.attached or helper.batch_groups):
            return
        helper.enter(step.scheduled_new_reqs)
        if not helper.traced(step.scheduled):
            helper.leave_step()
            return
        helper.process_new_reqs(step.scheduled)
        interleaver.begin_pass(helper.traces)
        if self._splits:
            self._put_hooked_last(step)
        options, demands.query = interleaver.pass_options, interleaver
        demands.num_hooked = helper.count_requests(interleaver.hooked())
        demands.modules_for = options.modules_for
        # Values are served whole in passes with gradients, and as transformers runs them. Inside experts, rows of padding
        # would lie among the rows of a single request.
        single = self.has_experts and len(step.scheduled) == 1
        demands.unpadded = options.exclusive or self._with_gradients or single
        demands.keeps_logits = demands.grouped = True

    def _put_hooked_last(self, step: SchedulerOutput) -> None:
        """Move requests with blocks that wait for a module to the end of a decode step. Each half is one slice."""
        if all(entry.decodes for entry in step.scheduled):
            hooked, attached = self.interleaver.hooked(), self.helper.attached
            step.scheduled.sort(key=lambda e: e.request_id in attached and attached[e.request_id][1] in hooked)
            self.helper.process_new_reqs(step.scheduled)

    @property
    def _with_gradients(self) -> bool:
        return any(trace.grad for trace in self.interleaver.traces)

    def prepare(self, batch: ForwardBatch, rows: InputBatch) -> None:
        """A pass with gradients attends to its own K and V, not the pool's."""
        if self.interleaver.traces:
            batch.fresh_kv_only = self._with_gradients

    def enter_pass(self, batch: ForwardBatch, first: int) -> None:
        """Serve the blocks at the modules of the pass, at the rows of their requests in it."""
        if not self.interleaver.traces:
            return
        options = self.interleaver.pass_options
        batch.hook_query = self.interleaver
        if first:
            self.helper.narrow_to_last(batch.batch_size)
        elif batch.forward_mode.is_decode():
            self.helper.pad_to(batch.batch_size)
        elif batch.num_tokens > batch.num_request_tokens:
            self.helper.pad_prompts_to(batch.num_tokens)
        if options.exclusive:
            batch.transformers_pass = TransformersPass(
                batch,
                self.model_spec,
                eager=options.eager_attention,
                attentions=options.output_attentions,
                states=options.output_hidden_states,
            )

    def ran(self, batch: ForwardBatch, output: LogitsProcessorOutput) -> None:
        """Note the output of single forward passes."""
        if self.interleaver.traces:
            serve_outputs(self.interleaver.traces, output.next_token_logits, batch.transformers_pass)

    def sample_from(self, rows: InputBatch, all_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Offer the logits to the blocks; each sees and changes its own row."""
        interleaver = self.interleaver
        if not interleaver.busy:
            return logits
        self.helper.unflatten(rows.sampling)
        return interleaver.handle(interleaver.logits, logits)

    def sampled(self, rows: InputBatch, token_ids: torch.Tensor) -> torch.Tensor:
        """Offer the tokens to the blocks that wait for them."""
        interleaver = self.interleaver
        if not interleaver.busy:
            return token_ids
        if not interleaver.awaits_token():
            interleaver.pass_token()
            return token_ids
        interleaver.sync_once()
        return offer_tokens(interleaver, token_ids, rows.sampling, self.model_spec.num_logits)

    def end(self, output: ModelRunnerOutput) -> None:
        """The pass is over for its traces, which counts for those that were alive."""
        if not self.interleaver.busy:
            return
        try:
            self.interleaver.sync_once()
        finally:
            self.interleaver.end_pass()
        self.helper.report(output)

    def abandon(self) -> None:
        """End the pass for its traces."""
        if self.interleaver.busy:
            self.interleaver.end_pass()


def serve_outputs(
    traces: Iterable[RequestTrace], logits: torch.Tensor, transformers_pass: TransformersOutputs | None = None
) -> None:
    """Store the model's output as the result of traces with a single forward pass.

    A trace with a block that has read the model's output has it already.

    Args:
        logits: [logit rows, vocab].
        transformers_pass: has attention weights and hidden states, of a pass of one request.
    """
    for trace in traces:
        if trace.single and trace.result is None and trace.rows is not None:
            rows, own = trace.rows, trace.rows.narrow(logits, of_logits=True)
            collected: Any = {} if transformers_pass is None else transformers_pass.collected()
            collected = {name: tuple(rows.narrow(x, of_logits=False) for x in of) for name, of in collected.items()}
            trace.result = CausalLMOutputWithPast(
                logits=own if trace.watches_several else own.unsqueeze(0), **collected
            )


def offer_tokens(
    interleaver: EngineInterleaver, token_ids: torch.Tensor, sampling: Sequence[ScheduledRequest], vocab_size: int
) -> torch.Tensor:
    """Let blocks see and change the sampled tokens. Waits for the device.

    Args:
        token_ids: [sampling requests] int32.

    Returns:
        the tokens that generation continues with, of the same shape.
    """
    device, sampled = token_ids.device, token_ids.tolist()
    offered = torch.tensor(sampled, dtype=torch.int64, device=device).unsqueeze(1)
    chosen: list[int] = interleaver.handle(interleaver.samples, offered).squeeze(1).tolist()
    for i, (entry, token) in enumerate(zip(sampling, chosen, strict=True)):
        if not 0 <= token < vocab_size:
            message = f"`samples` was set to {token}, but token ids go from 0 to {vocab_size - 1}"
            for trace in interleaver.traces:
                if entry.request_id in trace.request_ids:
                    trace.fail(ValueError(f"request {entry.request_id}: {message}"))
            chosen[i] = sampled[i]
    if chosen != sampled:
        (token_ids,) = upload(device, torch.tensor(chosen, dtype=torch.int32))
    own = {entry.request_id: token for entry, token in zip(sampling, chosen, strict=True)}
    for trace in interleaver.traces:
        if trace.in_pass and not trace.single and any(rid in own for rid in trace.request_ids):
            tokens = [own.get(rid, trace.pad_token_id) for rid in trace.request_ids]
            interleaver.offer(trace, interleaver.streamer, torch.tensor(tokens))
    return token_ids
