"""InterpModelRunner: a ModelRunner whose requests may carry traces.

One step, with what it adds to the plain one::

    execute_model   process_new_reqs      every traced request gets its rows; new blocks run to where they first wait
                    dispatch              does a block wait for a module that this pass reaches?
                    forward               plain (no module is called), or module by module with the blocks served
    sample_tokens   unflatten             from token rows to sampled rows
                    logits, samples       offered to the blocks; each sees and changes its own row
    finish_nnsight  process_finished_reqs results, blocks that still wait, saves
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..config import ModelConfig, ServerConfig
from ..core.forward_batch import ForwardBatch
from ..core.out_of_memory import within_memory
from ..core.output import LogitsProcessorOutput, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from ..core.request import Request
from ..core.upload import upload
from ..hooks.captures.ring import CaptureRing, StatesOf
from ..hooks.captures.spec import Capture
from ..hooks.declared import Declared, DeclaredLimits
from ..hooks.interventions.device_tables import DeviceTables
from ..hooks.interventions.host_ops import RequestRows, host_ops
from ..hooks.interventions.logit_ops import logit_ops
from ..hooks.interventions.op import Op
from ..hooks.site import ModelInfo
from ..hooks.traces.batch_groups import NNsightRequestHelper
from ..hooks.traces.envoy import TracedModel
from ..layers.edits.base import INNER, LOGITS, apply_inner, inner_site
from ..layers.edits.table import TableOps
from ..sampling import SamplerOutput
from .async_output import AsyncOutput
from .input_batch import ExecuteModelState, InputBatch
from .model_runner import ModelRunner
from .partition import BatchExecutionDescriptor, Execution
from .segments import Segments


class InterpModelRunner(ModelRunner):
    """A ModelRunner that lets each request's blocks read and change its own hidden states, logits and samples.

    Args:
        wrap: makes the nnsight model over the loaded weights; `LM` passes itself.

    Attributes:
        nnsight_model: the envoy tree over the served module, which it does not copy.
        nnsight_request_helper: the traces in flight, and their rows.
        device_tables: what declared ops and captures are read from on CUDA; None on a CPU, which has them as functions.
        capture_ring: the way of captured states to the host, beside the tables.
        segments: the stretches between blocks as CUDA graphs; None where passes are not captured.
    """

    def __init__(
        self,
        server_config: ServerConfig | None = None,
        model_config: ModelConfig | None = None,
        gpu_id: int = 0,
        *,
        wrap: Callable[[nn.Module], TracedModel] = TracedModel,
    ) -> None:
        super().__init__(server_config, model_config, gpu_id)
        self._wrap = wrap
        self.nnsight_model: TracedModel | None = None
        self.nnsight_request_helper = NNsightRequestHelper()
        self.device_tables: DeviceTables | None = None
        self.capture_ring: CaptureRing | None = None
        self.segments: Segments | None = None
        self._in_tables: dict[str, tuple[int, Declared]] = {}

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights, then wrap the module."""
        super().load_model(*args, **kwargs)
        self.nnsight_model = self._wrap(self.get_model())

    def init_memory_pool(self) -> None:
        """The pools, and the tables of declared interventions."""
        assert self.source is not None
        self.model_info = ModelInfo.of(self.source.hf_config, self.dtype)
        config = self.server_config
        self.declared_limits = DeclaredLimits(
            config.max_interventions_per_site, config.max_intervention_vectors, config.max_capture_bytes,
            frozenset(config.inner_sites if self._has_tables else INNER), self._has_tables,
        )  # fmt: skip
        super().init_memory_pool()

    def _init_tables(self) -> None:
        super()._init_tables()
        if self._has_tables:
            config = self.server_config
            size, when_full = config.capture_ring_bytes, config.capture_when_full
            self.capture_ring = within_memory(
                lambda: CaptureRing(size, self.dtype, self.device, when_full, config.capture_kept_bytes),
                f"the ring of captured states does not fit; what helps: a lower capture_ring_bytes (now {size})",
            )
            self.device_tables = DeviceTables(
                self.req_states.edited, self.model_info, self.declared_limits, self.capture_ring.memory
            )

    @property
    def _has_tables(self) -> bool:
        return self.device.startswith("cuda")

    def shutdown(self) -> None:
        if self.segments is not None:
            self.segments.shutdown()
            self.segments = None
        if self.capture_ring is not None:
            self.capture_ring.close()
        self.nnsight_model = self.device_tables = self.capture_ring = None
        super().shutdown()

    # -- declared interventions ------------------------------------------------------

    def declare(self, specs: Sequence[Op], captures: Sequence[Capture], request: Request) -> Declared | None:
        """What a request's interventions and captures come to; None for none. Called on any thread.

        Raises:
            ValueError: what the model does not have, or the tables, the ring and results do not hold.
        """
        if not specs and not captures:
            return None
        longest = request.prompt_len + request.max_tokens - 1
        declared = Declared.of(
            specs, self.model_info, request.prompt_len, self.declared_limits, captures, longest, request.logits_from
        )
        if declared.captures is not None:
            request.leader = None  # its prompt is captured, so it is computed
            if request.trace is None or not request.trace.grad:
                self.check_room([(request, declared)], "this request")
        return declared

    def check_room(self, together: list[tuple[Request, Declared | None]], what: str) -> None:
        """Raise ValueError where the ring cannot hold what requests that run in the same steps capture. A traced prompt is one
        step's.

        Args:
            what: names them, for the message.
        """
        if self.capture_ring is not None:
            wanted = [
                (declared.captures, 0 if request.trace is None else request.prompt_len)
                for request, declared in together
                if declared is not None and declared.captures is not None
            ]
            self.capture_ring.check(wanted, what)

    def hold(self, declared: Declared) -> None:
        """Keep a place for a request's vectors until `finish_declared`, and a way for its captures. Called on any thread.

        Raises:
            ValueError: the pool is full.
        """
        if self.device_tables is not None:
            self.device_tables.pool.acquire(declared)
        if self.capture_ring is not None and declared.captures is not None:
            self.capture_ring.open()

    def let_go(self, declared: Declared) -> None:
        """Give back what `hold` kept, of a request that is not submitted."""
        if self.device_tables is not None:
            self.device_tables.pool.release(declared)

    def finish_declared(self, request: Request, done: Callable[[], None]) -> None:
        """Take back what a finished request's interventions hold, complete its receipt, and its captures when all have arrived.

        Args:
            done: called then: at once, or on the thread of the ring.
        """
        declared: Declared = request.declared
        self._leave_tables(request.request_id)
        if self.device_tables is not None:
            self.device_tables.pool.release(declared)
        counted = request.prompt_len + len(request.output_token_ids) - 1  # whatever it has given way of since
        if not request.output_token_ids:
            counted = min(request.num_computed_tokens, request.prompt_len)
        request.receipt.interventions = declared.applied(counted)
        request.receipt.preemptions = request.num_preemptions
        token_ids = (request.prompt_token_ids + request.output_token_ids)[:counted]

        def complete() -> None:
            request.receipt.captures = declared.captured(counted)
            request.activations = declared.activations(token_ids)
            done()

        if self.capture_ring is None or declared.captures is None:
            complete()
        else:
            self.capture_ring.after(complete)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in scheduler_output.preempted_req_ids:
            self._leave_tables(request_id)
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        if self.device_tables is None:
            return
        for request in scheduler_output.scheduled_new_reqs:
            assert request.req_pool_idx is not None
            self.device_tables.set_row(request.req_pool_idx, request.declared)
            if request.declared is not None:
                self._in_tables[request.request_id] = request.req_pool_idx, request.declared
        self.device_tables.apply_staged_writes()

    def _leave_tables(self, request_id: str) -> None:
        """Read what the gates of a request counted, before its row is another's."""
        row, declared = self._in_tables.pop(request_id, (0, None))
        if self.device_tables is not None and declared is not None:
            self.device_tables.read_fires(row, declared)

    def make_forward_batch(self, input_batch: InputBatch) -> ForwardBatch:
        batch = super().make_forward_batch(input_batch)
        if self.capture_ring is not None:
            self.capture_ring.forget()  # what a pass that failed would have sent
        if any(entry.request.declared is not None for entry in input_batch.entries):
            self._set_edits(batch, input_batch)
        return batch

    def _set_edits(self, batch: ForwardBatch, input_batch: InputBatch) -> None:
        differentiable = any(e.request.trace is not None and e.request.trace.grad for e in input_batch.entries)
        if self.device_tables is not None and not differentiable:
            assert batch.positions is not None
            rows, blocks = (x[..., : batch.num_tokens] for x in (self.input_buffers.op_rows, self.input_buffers.blocks))
            declared = [entry.request.declared for entry in input_batch.entries]
            if self.capture_ring is not None and any(d is not None and d.captures is not None for d in declared):
                blocks.copy_(upload(self.device, self.capture_ring.lay_out(input_batch.entries))[0])
            logits = None
            if any(d is not None and d.edits_logits for d in declared):
                logits = logit_ops(_shares(input_batch), self.num_hidden_layers, self.device_tables)
            batch.site_ops = TableOps(self.device_tables.tables, rows, batch.positions, blocks, logits)
            return
        batch.site_ops = host_ops(_shares(input_batch), self.num_hidden_layers)

    def captured_site_ops(self, bs: int) -> TableOps | None:
        if self.device_tables is None:
            return None
        buffers = self.input_buffers
        rows, blocks = buffers.op_rows[:bs], buffers.blocks[:, :bs]
        return TableOps(self.device_tables.tables, rows, buffers.positions[:bs], blocks)

    # -- a step ----------------------------------------------------------------------

    @torch.no_grad()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: None = None
    ) -> ModelRunnerOutput | None:
        """Run a step's forward pass with the blocks of its traced requests. What a block raises stays with its request."""
        if self._traced().interleaver.interleaving:
            raise RuntimeError(
                "a pass is under way: its blocks, or sample_tokens(), come before the next execute_model()"
            )
        if not any(entry.request.trace is not None for entry in scheduler_output.scheduled):
            return super().execute_model(scheduler_output, intermediate_tensors)
        model, helper = self._traced(), self.nnsight_request_helper
        helper.process_new_reqs(scheduler_output.scheduled, model)
        model.interleaver.begin_pass(helper.traces)
        try:
            if self.partition.hook_execution == "split":
                self._put_hooked_last(scheduler_output.scheduled)
            return super().execute_model(scheduler_output, intermediate_tensors)
        except BaseException:
            model.interleaver.end_pass()
            raise

    @torch.no_grad()
    def sample_tokens_async(self) -> AsyncOutput | None:
        state = self.execute_model_state
        if state is None:
            return None
        if not self._traced().interleaver.interleaving:
            return super().sample_tokens_async()
        try:
            sampled = super().sample_tokens_async()
            self._traced().interleaver.sync_once()  # a pass counts for those that were alive
        finally:
            self._traced().interleaver.end_pass()
        assert sampled is not None
        how = sampled.output.execution
        for trace in self.nnsight_request_helper.traces:
            trace.receipt.steps[how] += 1
            if not trace.ended:
                continue
            if trace.error is not None:
                sampled.output.errors[trace.request_id] = trace.error
            elif trace.stopped:
                sampled.output.stopped.add(trace.request_id)
        return sampled

    def postprocess(self, input_batch: InputBatch, output: ModelRunnerOutput) -> None:
        super().postprocess(input_batch, output)
        for entry in input_batch.entries:
            request = entry.request
            # One that has ended was in this step only because that was not known when it was launched.
            if request.declared is not None and request.trace is None and not request.finished:
                request.receipt.steps[output.execution] += 1

    def finish_nnsight(self, finished_requests: list[Request]) -> ModelRunnerOutput:
        """Wind up the traces of finished requests: their results, their saves, and what went wrong."""
        model = self._traced()
        traced = {r.request_id: r for r in finished_requests if r.trace is not None}
        if any(request.trace.in_pass for request in traced.values()):
            self.drop_finished()
        self.nnsight_request_helper.process_finished_reqs(set(traced), traced, model)
        output = ModelRunnerOutput(req_ids=list(traced))
        for rid, request in traced.items():
            output.saves[rid] = request.trace.saved_names()
            if request.trace.error is not None:
                output.errors[rid] = request.trace.error
        return output

    def drop_finished(self) -> None:
        """Take the traces of finished requests out of the pass that is under way, which was launched before they were known to
        have finished: no block sees a step that did not happen."""
        for trace in self.nnsight_request_helper.drop_finished():
            self._traced().interleaver.leave(trace)

    def _put_hooked_last(self, scheduled: list[ScheduledRequest]) -> None:
        """In a decode step, move the requests whose blocks wait for a module behind the others: each half is then one slice."""
        if all(entry.decodes for entry in scheduled):
            hooked = self._traced().interleaver.hooked()
            scheduled.sort(key=lambda entry: entry.request.trace in hooked)
            self.nnsight_request_helper.process_new_reqs(scheduled, self._traced())

    def dispatch(self, forward_batch: ForwardBatch) -> BatchExecutionDescriptor:
        hooked = len(self._traced().interleaver.hooked())
        can_replay = (not hooked or self.segments is not None) and self._can_replay(forward_batch)
        return self._decide(forward_batch, hooked, can_replay)

    def _run(self, forward_batch: ForwardBatch, descriptor: BatchExecutionDescriptor) -> LogitsProcessorOutput:
        interleaver, execution = self._traced().interleaver, descriptor.execution
        if not interleaver.traces and not (
            isinstance(forward_batch.site_ops, TableOps) and forward_batch.site_ops.logits
        ):
            return super()._run(forward_batch, descriptor)
        if execution is Execution.SPLIT:
            return self._run_split(forward_batch, descriptor.num_hooked)
        if execution is Execution.SEGMENTS:
            return self._run_segments(forward_batch)
        if execution is Execution.MODULES:
            # Blocks may save what modules read: not the input buffers, which the next step overwrites.
            assert forward_batch.positions is not None
            forward_batch.input_ids = forward_batch.input_ids.clone()
            forward_batch.positions = forward_batch.positions.clone()
            forward_batch.hook_query = interleaver
        if any(trace.grad for trace in interleaver.traces):
            self.forward_pass_id += 1
            forward_batch.fresh_kv_only = True
            with torch.enable_grad():
                return self._plan_and_call(forward_batch, execution)
        return super().forward(forward_batch, execution)  # a replay's in fresh memory: blocks may keep the logits

    def _run_split(self, batch: ForwardBatch, hooked: int) -> LogitsProcessorOutput:
        """A decode pass as two: the requests that nobody waits in, then the last `hooked` ones module by module.

        The device is at the first while the host runs the blocks of the second.
        """
        plain, rows = batch.batch_size - hooked, batch.req_pool_indices.clone()
        halves = self._decode_rows(batch, 0, plain), self._decode_rows(batch, plain, batch.batch_size)
        output = super().forward(halves[0])
        self.nnsight_request_helper.narrow_to_last(hooked)
        halves[1].hook_query = self._traced().interleaver
        hooked_output = super().forward(halves[1], Execution.MODULES)
        batch.req_pool_indices.copy_(rows)  # the input buffers', which the replay wrote to; sampling reads them
        logits = (output.next_token_logits, hooked_output.next_token_logits)
        return LogitsProcessorOutput(torch.cat(logits))

    def _decode_rows(self, batch: ForwardBatch, start: int, stop: int) -> ForwardBatch:
        """Rows of a decode batch as a batch of their own, in fresh memory."""
        assert batch.positions is not None and batch.seq_lens_cpu is not None
        half = self.prepare_forward_batch_decode(
            batch.input_ids[start:stop].clone(),
            batch.req_pool_indices[start:stop].clone(),
            batch.seq_lens[start:stop].clone(),
            batch.out_cache_loc[start:stop].clone(),
            positions=batch.positions[start:stop].clone(),
            seq_lens_cpu=batch.seq_lens_cpu[start:stop],
        )
        half.site_ops = None if batch.site_ops is None else batch.site_ops.rows_from(start, stop)
        half.rope_lens = None if batch.rope_lens is None else batch.rope_lens[start:stop].clone()
        return half

    def _run_segments(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """A decode pass module by module, but for what lies between its blocks, which is replayed."""
        assert self.segments is not None
        self.forward_pass_id += 1
        padded = self.segments.begin(batch)
        padded.hook_query = self._traced().interleaver
        if batch.site_ops is None:
            padded.site_ops = None
        elif batch.site_ops.logits is not None:
            padded.site_ops = padded.site_ops.with_logits(batch.site_ops.logits)
        self.nnsight_request_helper.pad_to(padded.batch_size)
        try:
            logits = self._call_model(padded, Execution.MODULES)[0]
        finally:
            self.segments.end()
        return LogitsProcessorOutput(logits[: batch.batch_size])

    def capture_model(self) -> int:
        """Capture the decode graphs; the stretches between blocks are captured as they come."""
        taken = super().capture_model()
        if self.graph_runner is not None:
            self.segments = Segments(self.graph_runner, self.server_config.max_segments)
        return taken

    def _plan_and_call(self, batch: ForwardBatch, execution: Execution) -> LogitsProcessorOutput:
        output = super()._plan_and_call(batch, execution)
        if execution is Execution.REPLAY and batch.site_ops is not None:  # the graph ends before the ops at the logits
            logits = apply_inner(output.next_token_logits.unsqueeze(0), batch.site_ops, 0, LOGITS)[0]
            output = LogitsProcessorOutput(logits)
        model = self.nnsight_model
        if model is not None and model.interleaver.interleaving:
            for trace in self.nnsight_request_helper.forward_traces:
                assert trace.rows is not None
                logits = trace.rows.narrow(output.next_token_logits, of_logits=True)
                trace.result = CausalLMOutputWithPast(logits=logits.unsqueeze(0))
        return output

    def _sample(self, logits: torch.Tensor, state: ExecuteModelState) -> SamplerOutput:
        model, sampling = self._traced(), state.input_batch.sampling
        interleaver, traced = model.interleaver, model.interleaver.interleaving
        if traced:
            self.nnsight_request_helper.unflatten(model, sampling)
            logits = interleaver.handle(f"{model.path}.logits", logits)
        self._capture_logits(logits, state)
        if self.capture_ring is not None:
            self.capture_ring.send()
        sampled = super()._sample(logits, state)
        if not traced:
            return sampled
        if interleaver.awaits_token():
            interleaver.sync_once()
            self._offer_tokens(sampled, sampling)
        else:
            interleaver.pass_token()
        return sampled

    def _capture_logits(self, drawn_from: torch.Tensor, state: ExecuteModelState) -> None:
        """Capture logits for the requests that want them.

        Args:
            drawn_from: [sampling requests, vocab], what a trace may have left of the head's.
        """
        batch, site = state.input_batch, inner_site(self.num_hidden_layers, 0, LOGITS)
        if all(entry.request.declared is None for entry in batch.entries):
            return
        starts = zip(batch.entries, batch.query_start_loc.tolist(), batch.cu_num_logits.tolist(), strict=False)
        wanted = [start for start in starts if _captures_at(start[0].request, site)]
        if not wanted:
            return
        logits = state.logits_output.next_token_logits
        if len(batch.sample_rows) == len(logits):
            logits = drawn_from
        else:
            (rows,) = upload(self.device, np.array(batch.sample_rows, dtype=np.int64))
            logits = logits.index_copy(0, rows, drawn_from)
        parts: list[StatesOf] = []
        for entry, token, row in wanted:
            declared: Declared = entry.request.declared
            assert declared.captures is not None
            group, column = declared.captures.by_site[site]
            count, before = entry.logit_rows, entry.num_tokens - entry.logit_rows
            if self.device_tables is None or entry.request.alone:
                first = entry.start + before
                ordinals = torch.from_numpy(group.ordinals[first : first + count])
                group.take(column, logits[row : row + count], ordinals)
            else:
                probes = None if group.probes is None else self.device_tables.pool_view(declared, group.probes)
                parts.append(StatesOf(declared.captures, row, token + before, count, probes))
        if parts:
            assert self.capture_ring is not None
            self.capture_ring.put(site, logits, parts)

    def _offer_tokens(self, sampled: SamplerOutput, sampling: list[ScheduledRequest]) -> None:
        """Let blocks see and change the tokens that were drawn. Waits for the device."""
        model, device = self._traced(), sampled.token_ids.device
        interleaver, drawn = model.interleaver, sampled.token_ids.tolist()
        offered = torch.tensor(drawn, dtype=torch.int64, device=device).unsqueeze(1)
        chosen: list[int] = interleaver.handle(interleaver.samples, offered).squeeze(1).tolist()
        for i, (entry, token) in enumerate(zip(sampling, chosen, strict=True)):
            if not 0 <= token < self.vocab_size:
                entry.request.trace.fail(
                    ValueError(
                        f"request {entry.request.request_id}: `samples` was set to {token}, but token ids go from 0 to "
                        f"{self.vocab_size - 1}"
                    )
                )
                chosen[i] = drawn[i]
        if chosen != drawn:
            (sampled.token_ids,) = upload(device, torch.tensor(chosen, dtype=torch.int32))
        for entry, token in zip(sampling, chosen, strict=True):
            trace = entry.request.trace
            if trace is not None and trace.in_pass and not entry.request.forward_only:
                interleaver.offer(trace, interleaver.streamer, torch.tensor([token]))

    def _traced(self) -> TracedModel:
        assert self.nnsight_model is not None, "call initialize() first"
        return self.nnsight_model


def _captures_at(request: Request, site: int) -> bool:
    """Whether it captures there. One that ended since the pass began has given back what reductions are computed with."""
    captures = None if request.finished or request.declared is None else request.declared.captures
    return captures is not None and site in captures.by_site


def _shares(input_batch: InputBatch) -> list[RequestRows]:
    """What each request of the step that declared something has of it."""
    return [
        RequestRows(
            entry.request.declared, start, torch.arange(entry.start, entry.start + entry.num_tokens), logit_start,
            entry.logit_rows,
        )
        for entry, start, logit_start in zip(
            input_batch.entries, input_batch.query_start_loc.tolist(), input_batch.cu_num_logits.tolist(), strict=False
        )
        if entry.request.declared is not None
    ]  # fmt: skip
