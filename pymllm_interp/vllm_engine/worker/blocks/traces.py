"""`RankTraces`: the blocks of traces in the passes of a rank. They run on rank 0; the others follow its calls (`Ranks`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ....attention.cut_edges import PassCuts
from ....client.calls.model import ClientModel
from ....config import ServerConfig
from ....core.forward_batch import ForwardBatch, ForwardMode, SiteOps
from ....core.sampling_params import SamplingParams
from ....core.step import (
    LogitsProcessorOutput,
    ModelRunnerOutput,
    NewRequest,
    RequestEnd,
    RequestHooks,
    ScheduledRequest,
    SchedulerOutput,
)
from ....hooks.traces.blocks.trace import RequestTrace
from ....hooks.traces.blocks.watchdog import Watchdog
from ....layers.seal import refuse_weights, seal
from ....runner.stages.stage import PassDemands
from ....runner.stages.traced_stage import TracedStage
from ....utils.upload import upload
from ....wire.failures import failure_of
from ....wire.trace_payload import Sources
from ...blocks import StepEnds, TraceOnWire, TraceResult, packed, traces_of
from ..stage import RankStage
from .kept_kv import KeptKV
from .ranks import Ranks
from .row_adapters import RowAdapters
from .tree import WEIGHTS, BlockTree

logger = logging.getLogger(__name__)
_NEUTRAL = SamplingParams()


@dataclass
class TracedRequest:
    """A request with blocks, while vLLM knows it.

    Attributes:
        computed: positions that its passes have computed.
        passes: number of its passes.
        over: no further pass is one of its blocks': they have ended, or its generation has.
    """

    request_id: str
    prompt_len: int
    token_ids: list[int]
    wire: TraceOnWire
    entered: bool = False
    computed: int = 0
    passes: int = 0
    over: bool = False


class RankTraces:
    """Blocks of a rank's requests.

    Args:
        model, config, spec, device: vLLM's model, its config, spec and device.
        ranks, tokenizer: make the tensor-parallel ranks, and the model's tokenizer, once they are needed.
        declared: declared ops of the rank.
        adapters: vLLM's `LoRAModelManager`, or None, and the most rows of a step.
        context: vLLM's forward context, for modules that are called behind a pass.

    Attributes:
        own_pass: the step's pass calls the modules of the tree: a block waits for one.
        ran: it has run.
        mode: execution mode of the pass, for receipts.
        logits: [logit rows, vocab] of such a pass, on rank 0.
        read_states: [tokens, hidden] each, the states inside of the model that a drafter reads.
        whole: vLLM's ids of requests with logits of all positions.
        adapters: adapters of the rows of products.
        tell: tells the client which requests have failed, or were stopped.
    """

    def __init__(
        self, model: Any, config: Any, spec: Any, device: torch.device, ranks: Callable[[], Any], server: ServerConfig,
        tokenizer: Callable[[], Any], declared: RankStage, adapters: tuple[Any, int] = (None, 0),
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        self._model, self._config, self._spec, self._device = model, config, spec, device
        self._make_ranks, self._server, self._tokenizer = ranks, server, tokenizer
        self._declared, self._context = declared, context
        self.own_pass = self.ran = self._unfinished = False
        self.mode = ""
        self._last_modes: dict[str, str] = {}  # by request id
        self.logits: torch.Tensor | None = None
        self.read_states: list[torch.Tensor] = []
        self.tell: Callable[[StepEnds], None] | None = None
        self.whole: set[str] = set()
        self._known: dict[str, TracedRequest] = {}  # by vLLM's id
        self._entries: list[ScheduledRequest] = []
        self._found: list[TracedRequest | None] = []
        self._told: set[str] = set()
        self._sources = Sources()
        self._stage: TracedStage | None = None
        self._tree: BlockTree | None = None
        self._root: ClientModel | None = None
        self._ranks: Ranks | None = None
        self.adapters = RowAdapters(
            *adapters, lambda: self._stage is not None and self._stage.interleaver.blocks.serving is not None
        )

    # -- requests ----------------------------------------------------------------------------

    def open(self, payload: bytes) -> None:
        """Make the traces of a payload known. One without any makes the tree for passes by modules.

        Raises:
            NotImplementedError: the tree has no counterpart in vLLM's model.
            Exception: whatever the reading of the payload raises.
        """
        if self._ranks is None:
            ranks = Ranks(self._make_ranks(), self._context)
            tree = BlockTree(self._model, self._config, self._spec, self._device, ranks, self.adapters, self._declared)
            if not ranks.rank:
                self._begin_serving(tree.module)
            self._ranks, self._tree = ranks, tree  # else the next call raises, too
        if self._root is not None and self._stage is not None:
            for trace in traces_of(payload, self._root, self._sources):
                self._stage.helper.register(trace)

    def _begin_serving(self, module: Any) -> None:
        seal(module)
        refuse_weights(module, WEIGHTS)
        stage = self._stage = TracedStage("eager")
        stage.model_spec = self._spec
        stage.has_experts = False
        facts: Any = SimpleNamespace(
            spec=self._spec, hf_config=self._config, dtype=self._spec.dtype, device=str(self._device)
        )
        backend: Any = SimpleNamespace(
            module=module, interleaver=stage.interleaver, facts=facts, tokenizer=self._tokenizer(), in_process=False,
            attach=lambda tree: None,
        )  # fmt: skip
        self._root = ClientModel(backend)
        server = self._server
        stage.interleaver.watchdog = Watchdog(server.trace_step_warning, server.trace_step_timeout)

    def add(self, vllm_id: str, request_id: str, prompt_token_ids: Sequence[int], wire: TraceOnWire) -> None:
        """A request with blocks enters, or comes back after a preemption."""
        if vllm_id not in self._known:
            ids = list(prompt_token_ids)
            self._known[vllm_id] = TracedRequest(request_id, len(ids), ids, wire)
            if wire.single:
                self.whole.add(vllm_id)

    def remove(self, vllm_id: str) -> None:
        """vLLM forgets a request."""
        if self._known.pop(vllm_id, None) is not None:
            self.whole.discard(vllm_id)

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self, end: RequestEnd) -> bytes | None:
        """The packed `TraceResult` of a request that has ended; None on other ranks than 0."""
        stage = self._stage
        if stage is None or end.hooks.trace_key is None:
            return None
        trace = stage.helper.traces_of([end]).get(end.request_id)
        if trace is None:
            return None
        if trace.in_pass:  # its step has failed on the way
            stage.interleaver.leave(trace)
        stage.helper.process_finished_reqs([end])
        self._told.discard(end.request_id)
        self._forget_passes(trace, end)
        error, trace.error = trace.error, None
        result = TraceResult(
            trace.saves.saved_names(), trace.saves.outer, trace.result, trace.receipt, trace.warnings,
            None if error is None else failure_of(error), trace.stopped,
        )  # fmt: skip
        try:
            return packed(result)
        except Exception as unsendable:
            failed = failure_of(TypeError(f"request {end.request_id}: its saved values cannot be sent: {unsendable!r}"))
            return packed(result._replace(saves={}, outer={}, result=None, error=result.error or failed))
        finally:
            trace.release_blocks()

    def _forget_passes(self, trace: RequestTrace, end: RequestEnd) -> None:
        """Take the passes behind a token that ended the generation out of the receipt.

        vLLM schedules the next step before it knows the tokens. Where all blocks have finished, `sampled` does not wait for them.
        """
        mode, steps = self._last_modes.pop(end.request_id, ""), trace.receipt.steps
        behind = 0 if trace.single else sum(steps.values()) - len(end.output_token_ids)
        if mode and behind > 0:
            steps[mode] -= behind
            if steps[mode] <= 0:
                del steps[mode]

    # -- a step ------------------------------------------------------------------------------

    @property
    def knows_any(self) -> bool:
        """Whether a request with blocks is known, or was part of the last step."""
        return bool(self._known or self._found)

    @property
    def busy(self) -> bool:
        """Whether the step has a request with blocks."""
        return any(one is not None for one in self._found)

    @property
    def decides(self) -> bool:
        """Whether rank 0 decides on the step's tokens."""
        return self.busy or self.ran

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(
        self, ids: Sequence[str], counts: Sequence[int], first: Sequence[int], logit_rows: Sequence[int], cuts: bool
    ) -> None:
        """Run new blocks until they wait, and decide how the pass runs.

        Args:
            ids: vLLM's, in the order of the batch.
            counts, first, logit_rows: token rows, first position, and positions with logits, of each.
            cuts: the pass is by modules, as requests cut edges of attention.
        """
        self.own_pass, self.ran, self.logits = cuts, False, None
        known = [self._known.get(vllm_id) for vllm_id in ids]
        self._found = [None if one is None or one.over else one for one in known]
        if not self.busy:
            self._found = []
            return
        ranks = self._ranks
        assert ranks is not None, "`open` comes before"
        begun: tuple[bool, bool, list[int]] = ranks.agreed(
            None if ranks.rank else self._begin(counts, first, logit_rows)
        )
        waits, self._unfinished, over = begun
        for i in over:
            if (one := self._found[i]) is not None:
                one.over, self._found[i] = True, None
        self.own_pass = cuts or waits

    def _begin(
        self, counts: Sequence[int], first: Sequence[int], logit_rows: Sequence[int]
    ) -> tuple[bool, bool, list[int]]:
        """Whether a block waits for a module, whether one has more to do, and places of requests that are over."""
        stage, new, entries, over = self._stage, list[NewRequest](), list[ScheduledRequest](), list[int]()
        assert stage is not None
        for i, (one, count, start, rows) in enumerate(zip(self._found, counts, first, logit_rows, strict=True)):
            name = ""
            if one is not None:
                if not one.entered:
                    one.entered = True
                    new.append(_entering(one))
                    stage.helper.enter(new[-1:])
                if self._follows(one, int(start), int(count)):
                    name = one.request_id
                else:
                    over.append(i)
            entries.append(ScheduledRequest(name, 0, int(count), int(start), True, int(count) == 1, rows))
        self._entries, demands = entries, PassDemands()
        stage.begin(SchedulerOutput(scheduled=entries), demands)
        traces = stage.interleaver.traces
        waits = demands.num_hooked > 0 or any(trace.single for trace in traces)
        return waits, any(map(_is_unfinished, traces)), over

    def _follows(self, one: TracedRequest, start: int, count: int) -> bool:
        """Whether the step is the next pass of a request. A request that was cut, or begins again, fails."""
        trace = self._trace_of(one)
        if trace is None or trace.ended or one.passes >= max(one.wire.max_tokens, 1):
            return False
        wanted = (0, one.prompt_len) if not one.passes else (one.computed, 1)
        if (start, count) != wanted:
            why = (
                f"its prompt of {one.prompt_len} tokens came in parts (positions {start} to {start + count}), and a block sees a "
                "prompt in one pass: raise max_num_tokens"
                if not one.passes
                else "vLLM had taken its KV for other requests, and computes it again without the blocks: raise kv_cache_tokens, "
                "or run fewer requests"
            )
            trace.fail(RuntimeError(f"request {one.request_id}: {why}"))
            self._report([trace])
            return False
        one.computed, one.passes = start + count, one.passes + 1
        return True

    def _trace_of(self, one: TracedRequest) -> RequestTrace | None:
        assert self._stage is not None
        found = self._stage.helper.attached.get(one.request_id)
        return None if found is None else found[1]

    @torch.inference_mode(False)
    @torch.no_grad()
    def run_pass(
        self, input_ids: torch.Tensor, positions: torch.Tensor, starts: np.ndarray, site_ops: SiteOps | None,
        logit_tokens: np.ndarray, cuts: PassCuts | None = None, kept: KeptKV | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """The pass, module by module where blocks wait: hidden states [tokens, hidden] after the final norm.

        Args:
            input_ids, positions: [tokens] of the step.
            starts: [requests + 1], first token row of each.
            logit_tokens: [logit rows], token rows that the head runs on.
            cuts, kept: cut edges and captured patterns, and K and V of their requests.

        Returns:
            None if the pass has failed: its blocks have ended, and the model is to run without them.
        """
        self.adapters.begin(len(input_ids), logit_tokens)
        try:
            return self._run_pass(input_ids, positions, starts, site_ops, logit_tokens, cuts, kept)
        finally:
            self.adapters.end()

    def _run_pass(
        self, input_ids: torch.Tensor, positions: torch.Tensor, starts: np.ndarray, site_ops: SiteOps | None,
        logit_tokens: np.ndarray, cuts: PassCuts | None, kept: KeptKV | None,
    ) -> torch.Tensor | None:  # fmt: skip
        ranks, tree = self._ranks, self._tree
        assert ranks is not None and tree is not None
        if ranks.rank:
            self.ran = ranks.follow()
            if not self.ran:
                return None
            count = 1 if tree.read is None else 1 + len(tree.read.layers)
            shape = (len(input_ids), self._spec.hidden_size)
            return self._shared([torch.empty(shape, dtype=self._spec.dtype, device=self._device) for _ in range(count)])
        # No inference tensors: torch counts edits.
        ids, positions = (own.to(torch.int64, copy=True) for own in (input_ids, positions))
        batch = _batch_of(ids, positions, np.diff(starts), tree.attention, site_ops)
        if len(logit_tokens) < len(input_ids):
            (batch.logits_indices,) = upload(self._device, logit_tokens)
        tree.attention.cuts, tree.attention.kept = cuts, kept
        ranks.followed = True
        # vLLM's attention cuts no edges. Only this rank has the flags of gates that the tree has met. Others may still have ops of
        # a request that has ended here.
        is_plain = kept is None and (ranks.size == 1 or not self._declared.links_sites)
        batch.layers_elsewhere = tree.layers if tree.layers.can_run and is_plain else None
        try:
            self.logits = self._run(batch)
        except Exception as error:
            logger.warning("a pass with blocks has failed; the blocks end, and the step runs again", exc_info=True)
            self._fail(error)
            ranks.end(failed=True)
            return None
        except BaseException:
            ranks.end(failed=True)
            raise
        finally:
            tree.layers.end_pass()
        ranks.end()
        self.ran = True
        assert batch.hidden_states is not None, "the batch asks for them"
        return self._shared([batch.hidden_states, *(() if tree.read is None else tree.read.take())])

    def agreed(self, make: Callable[[], Any]) -> Any:
        """Rank 0's value, on all ranks: anything that pickles."""
        ranks = self._ranks
        assert ranks is not None, "`open` comes before"
        return ranks.agreed(None if ranks.rank else make())

    def _shared(self, states: list[torch.Tensor]) -> torch.Tensor:
        """Rank 0's hidden states and `read_states`, each [tokens, hidden], on all ranks, which have parts of the head."""
        ranks = self._ranks
        assert ranks is not None, "`open` comes before"
        hidden, *self.read_states = map(ranks.shared, states)
        return hidden

    def _run(self, batch: ForwardBatch) -> torch.Tensor:
        stage, tree = self._stage, self._tree
        assert stage is not None and tree is not None
        if self.busy:
            stage.enter_pass(batch, 0)
        ids, positions = batch.input_ids[None], batch.positions
        assert positions is not None
        out = tree.module(input_ids=ids, position_ids=positions[None], forward_batch=batch)
        logits = out.logits[0]
        if self.busy:
            stage.ran(batch, LogitsProcessorOutput(logits))
        return logits

    def _fail(self, error: BaseException) -> None:
        """End the blocks of a failed pass. Their requests continue without them."""
        assert self._stage is not None
        traces = list(self._stage.interleaver.traces)
        for trace in traces:
            if not trace.ended:
                trace.fail(error)
        self._stage.abandon()
        self._report(traces)

    @torch.inference_mode(False)
    @torch.no_grad()
    def sample_from(self, logits: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The logits that tokens are sampled from, after the blocks. Requests with blocks have no drafts, and so one row each.

        Args:
            logits: [rows, vocab].
            counts: rows of each request: its last, and one for each draft.
        """
        if not self.busy or self._stage is None:
            return logits
        rows: Any = SimpleNamespace(sampling=self._entries)
        if len(logits) == len(counts):
            return self._stage.sample_from(rows, logits, logits.clone() if logits.is_inference() else logits)
        last = torch.from_numpy(np.cumsum(counts) - 1).to(logits.device)
        logits, own = logits.clone(), logits[last]
        logits[last] = self._stage.sample_from(rows, own, own)
        return logits

    @torch.inference_mode(False)
    @torch.no_grad()
    def sampled(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The tokens that the generations continue with, after the blocks; rank 0's on all ranks.

        Args:
            token_ids: [requests, columns], a token and accepted drafts in front of it. Other columns are agreed on, too.
        """
        if not self.decides:
            return token_ids
        if not self._needs_tokens():
            if self._stage is not None and self.busy:
                self._stage.interleaver.pass_token()
            return token_ids
        assert self._ranks is not None
        if self._stage is not None and self.busy:
            rows: Any = SimpleNamespace(sampling=self._entries)
            token_ids = torch.cat([self._stage.sampled(rows, token_ids[:, 0])[:, None], token_ids[:, 1:]], 1)
        chosen: list[list[int]] = self._ranks.agreed(token_ids.tolist())
        for one, tokens in zip(self._found or [None] * len(chosen), chosen, strict=True):
            if one is not None and tokens[0] in one.wire.stops and one.passes >= one.wire.min_tokens:
                one.over = True
        return torch.tensor(chosen, dtype=token_ids.dtype, device=token_ids.device)

    def _needs_tokens(self) -> bool:
        """Whether the host is to know the step's tokens, for which it waits."""
        assert self._ranks is not None
        if self._ranks.size > 1:
            return self.ran or self._unfinished
        if self._stage is not None and self.busy and self._stage.interleaver.awaits_token():
            return True
        return self._unfinished and any(one is not None and one.wire.stops for one in self._found)

    @torch.inference_mode(False)
    @torch.no_grad()
    def end(self) -> None:
        """The step is over for its traces."""
        self.own_pass, self.ran, self.logits = False, False, None
        stage = self._stage
        if stage is not None and stage.interleaver.busy:
            traces = list(stage.interleaver.traces)
            stage.end(ModelRunnerOutput(execution=self.mode))
            self._last_modes |= {rid: self.mode for trace in traces for rid in trace.request_ids}
            self._report(traces)

    def _report(self, traces: Sequence[RequestTrace]) -> None:
        """Tell the client which requests are to end."""
        ended = [trace for trace in traces if trace.ended and trace.request_id not in self._told]
        if ended and self.tell is not None:
            self._told.update(trace.request_id for trace in ended)
            failed = [trace.request_id for trace in ended if not trace.stopped]
            self.tell(StepEnds(failed, [trace.request_id for trace in ended if trace.stopped]))


def _is_unfinished(trace: RequestTrace) -> bool:
    """Whether a further pass is of use to the trace."""
    return trace.on_step is not None or any(block.alive or block.caches for block in trace.blocks)


def _entering(one: TracedRequest) -> NewRequest:
    hooks = RequestHooks(max_tokens=one.wire.max_tokens, trace_key=one.wire.key, single=one.wire.single)
    return NewRequest(one.request_id, 0, one.prompt_len, one.token_ids, 0, _NEUTRAL, 0, hooks=hooks)


def _batch_of(
    input_ids: torch.Tensor, positions: torch.Tensor, counts: np.ndarray, attention: Any, site_ops: SiteOps | None
) -> ForwardBatch:
    """A pass over vLLM's KV cache."""
    sizes, lens = counts.tolist(), torch.from_numpy(counts.astype(np.int32))
    zeros = torch.zeros(len(input_ids), dtype=torch.int64, device=input_ids.device)
    own = zeros[: len(sizes)]
    return ForwardBatch(
        ForwardMode.EXTEND, len(sizes), input_ids, own, own, zeros, len(input_ids), lens,
        positions=positions, extend_num_tokens=len(input_ids), extend_seq_lens_cpu=sizes, extend_prefix_lens_cpu=[0] * len(sizes),
        attn_backend=attention, return_hidden_states=True, site_ops=site_ops,
    )  # fmt: skip
