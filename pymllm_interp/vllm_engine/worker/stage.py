"""`RankStage`: the declared ops and captures of the requests in a rank's steps, around a `DeclaredStage`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ...config import ServerConfig
from ...core.forward_batch import SiteOps
from ...core.model_spec import LOGITS, ModelSpec, inner_site
from ...core.sampling_params import SamplingParams
from ...core.step import DeclaredResult, NewRequest, RequestEnd, RequestHooks
from ...hooks.bound_hooks import Bindings
from ...hooks.captures.egress.ring import CaptureRing
from ...hooks.captures.reductions.reduction import Readout
from ...hooks.captures.streamed import StreamedRows
from ...hooks.declared import Declared
from ...kernels.edit_codes import TokenRows
from ...utils.stage_times import TIMES
from ...utils.upload import upload
from ..results import AskedRows
from ..settings import limits_of, uses_tables
from .batch import KeptBatches, StepBatch, VllmStep, step_of
from .egress.rank_scores import RankScores
from .egress.result_arena import ResultArena
from .hooked_request import HookedRequest, RankResult
from .rank_taps import Decisions, RankTaps, TappedStage
from .row_buffers import VllmRowBuffers
from .split_rows import SplitRows

_NEUTRAL = SamplingParams()
SMALL_RING = 1 << 16
"""Bytes of the ring of a rank that captures nothing."""
NO_DRAFTS: Mapping[str, Sequence[int]] = MappingProxyType({})
WAIT_SECONDS = 2e-4
"""Seconds between checks for room in the ring."""


class RankStage:
    """Ops and captures of a rank. Steps come from the rank's thread, ends of requests from the one that serves the client.

    Args:
        config: config of the client.
        model: model that specs are bound to.
        device: device of the rank.
        tokens: most token rows of a pass, padding included.
        rows: most requests of a step.
        taps: calls of the op in one pass.
        split: the tensor-parallel ranks, of which only rank 0 captures.
        readout: readout of the model.
    """

    def __init__(
        self, config: ServerConfig, model: ModelSpec, device: torch.device, tokens: int, rows: int, taps: int, split: SplitRows,
        readout: Readout,
    ) -> None:  # fmt: skip
        self.model, self.device, self.num_taps, self.rank = model, device, taps, split.rank
        self.in_tables, on_cuda = uses_tables(device.type), device.type == "cuda"
        if self.rank:
            config = replace(config, capture_ring_bytes=SMALL_RING)
        self.arena = ResultArena(config.capture_kept_bytes)
        self.stage = TappedStage(config, model, str(device), readout)
        self.stage.results = self.arena
        self.stage.limits = limits_of(config, device.type)
        self.buffers = VllmRowBuffers(tokens, rows + 1, device)
        own = self.buffers
        self.stage.make_tables(own.edited, TokenRows(own.op_rows, own.positions, own.blocks, own.flags, own.scores))
        self.taps = RankTaps(self.stage.table_ops, own.seen, split)
        self.bindings, self.scores = Bindings(model, self.stage.limits, readout), RankScores(self.stage)
        self.lock = threading.RLock()
        self.num_steps = 0
        self._logits_site = inner_site(model.num_hidden_layers, 0, LOGITS)
        self._rows = list(range(rows, 0, -1))  # row 0 stays empty
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._launched: Any = None
        self._read: deque[HookedRequest] = deque()  # results were asked for: a row may be free
        self._known: dict[str, HookedRequest] = {}  # by vLLM's id
        self._by_own_id: dict[str, HookedRequest] = {}
        self.step: VllmStep | None = None
        self._batches = KeptBatches()
        self._calls_before = 0
        self._marked = (0.0, 0.0)
        self._held = False
        self._drafts = False  # some step had any
        self.links_sites = False  # an op of the step depends on the state at another site; equal on all ranks
        self.whole: Container[str] = ()  # vLLM's ids of requests with blocks that read all logits
        self.by_modules = False  # the pass under way called no tap: its modules have met all rows

    # -- requests ----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request with hooks is known, or rows of the last pass have owners."""
        return bool(self._known) or self.step is not None or self.buffers.used > 0

    def add(self, vllm_id: str, request_id: str, hooks: RequestHooks, prompt_len: int) -> None:
        """A request with hooks enters, or comes back after a preemption."""
        with self.lock:
            if vllm_id in self._known:
                return
            found = HookedRequest(request_id, hooks, prompt_len)
            found.bind(Declared(self.bindings.bound(hooks, prompt_len)))
            if found.declared is not None and self.rank and not self.in_tables:
                found.declared.captures = None
            self._known[vllm_id] = self._by_own_id[request_id] = found
            self._batches.close()

    def cuts(self, vllm_id: str) -> bool:
        """Whether a request's passes are by modules, equal on all ranks, also when the first has sent its results."""
        return vllm_id in self._known and self._known[vllm_id].cuts

    def longest(self, vllm_id: str) -> int:
        """Most positions of a request."""
        found = self._known[vllm_id]
        return found.prompt_len + found.hooks.max_tokens

    def fail_cuts(self, vllm_ids: Sequence[str], why: str) -> None:
        """Note that a pass was without the cut edges of requests."""
        for vllm_id in vllm_ids:
            self._known[vllm_id].failed = why

    def reads_all_logits(self, vllm_id: str) -> bool:
        """Whether logits of all positions of a request are computed for its captures."""
        found = self._live(vllm_id)
        return found is not None and found.reads_all_logits

    def remove(self, vllm_id: str) -> None:
        """vLLM forgets a request. Its row waits for the client to ask for the results."""
        if vllm_id not in self._known:
            return
        with self.lock:
            self._batches.close()
            found = self._known.pop(vllm_id)
            found.forgotten = True
            if self.rank:  # this rank sends no results
                self._by_own_id.pop(found.request_id, None)
                self.stage.drop(found.request_id)
                found.declared = None
            if found.declared is None:
                self._free_row(found)

    def preempted(self, vllm_id: str, num_tokens: int | None = None) -> None:
        """vLLM takes a request's KV, and computes it again later. Gates count each position once.

        Args:
            num_tokens: its tokens, without drafts that were not accepted. All but the last have states.
        """
        if (found := self._known.get(vllm_id)) is None:
            return
        found.preemptions += 1
        with self.lock:
            if found.declared is None:
                return
            self._batches.close()
            if num_tokens is not None:
                found.computed = min(found.computed, num_tokens - 1)
                found.declared.settle(found.computed)
            if not self.in_tables:
                return
            if found.row is None:
                found.declared.fires.count_from(found.computed)
            else:
                self._enter([found])

    def _free_row(self, found: HookedRequest) -> None:
        if found.row is not None:
            self._rows.append(found.row)
            found.row = None

    def _evict(self, running: set[str]) -> None:
        """Take the rows of requests that are not part of the step."""
        waiting = [other for other in self._by_own_id.values() if other.row is not None]
        kept = {id(self._known[vllm_id]) for vllm_id in running if vllm_id in self._known}
        for other in waiting:
            if id(other) not in kept:
                if self.in_tables:
                    other.met += int(self.buffers.seen[other.row])
                self.stage.leave_tables(other.request_id)
                self._free_row(other)

    def _take_rows(self, req_ids: Sequence[str]) -> None:
        """Rows of the tables for requests of a step, if need be from requests outside of it."""
        while self._read:
            found = self._read.popleft()
            if found.forgotten:
                self._free_row(found)
        live = [found for vllm_id in req_ids if (found := self._live(vllm_id)) is not None and found.row is None]
        if not live:
            return
        if len(self._rows) < len(live):
            self._batches.close()
            self._evict(set(req_ids))
        for found in live:
            found.row, found.hooks.bound = self._rows.pop(), found.declared
        if self.in_tables:
            (rows,) = upload(self.device, np.array([found.row for found in live], dtype=np.int64))
            self.buffers.seen.index_fill_(0, rows, 0)
        self._enter(live)

    def _enter(self, live: Sequence[HookedRequest]) -> None:
        """Write the rows of requests. Those that have been preempted count fires from their first new position on."""
        self.stage.enter([
            NewRequest(
                one.request_id, one.row or 0, one.prompt_len, [], 0, _NEUTRAL, 0, hooks=one.hooks,
                num_counted=one.computed if one.preemptions else 0,
            )
            for one in live
        ])  # fmt: skip

    def _live(self, vllm_id: str) -> HookedRequest | None:
        found = self._known.get(vllm_id)
        return None if found is None or found.declared is None else found

    def finish(self, ends: Sequence[RequestEnd]) -> list[Future[RankResult | None]]:
        """The results of requests that have ended; None if this rank never met one. Called on the client's thread.

        An exception of one is the result of that one.
        """
        with self.lock, self.side():
            self._batches.close()
            seen = self._read_seen()
            return [self._finish(end, seen) for end in ends]

    def rows(self, asked: AskedRows) -> Future[StreamedRows | None]:
        """Captured rows of a request that runs, when they are on the host; None if it has ended. On the client's thread."""
        done: Future[StreamedRows | None] = Future()
        with self.lock, self.side():
            found = self._by_own_id.get(asked.request_id)
            if found is None or found.declared is None:
                done.set_result(None)
            else:
                rows = found.declared.rows_since(asked.start, asked.token_ids)
                self.stage.when_arrived(partial(done.set_result, rows))
        return done

    def _finish(self, end: RequestEnd, seen: Callable[[int], int]) -> Future[RankResult | None]:
        done: Future[RankResult | None] = Future()
        found = self._by_own_id.pop(end.request_id, None)
        if found is None or found.declared is None:
            done.set_result(None)
            return done
        end.hooks.interventions, end.hooks.captures = found.hooks.interventions, found.hooks.captures
        found.forget_steps_behind(len(end.output_token_ids))
        row = found.row

        def complete(result: Future[DeclaredResult]) -> None:
            try:
                found.met += 0 if row is None else seen(row)
                self._read.append(found)  # without the lock: the rank's thread may hold it, and wait for this one
                done.set_result(RankResult(result.result(), found.steps, found.preemptions, self._unmet(found)))
            except BaseException as failure:
                done.set_exception(failure)

        try:
            arrived = self.stage.finish(end)
        except Exception as error:
            done.set_exception(error)
            return done
        finally:
            found.declared = None
        arrived.add_done_callback(complete)
        return done

    def side(self) -> Any:
        """A stream for the client's thread, behind the last pass."""
        if self._stream is None:
            return nullcontext()
        if self._launched is not None:
            self._stream.wait_event(self._launched)
        return torch.cuda.stream(self._stream)

    def _read_seen(self) -> Callable[[int], int]:
        """Copy the kernels' counts. Returns a function that waits for the copy, and gives a row's count."""
        if not self.in_tables:
            return lambda _: 0
        if self._stream is None:
            counted = self.buffers.seen.tolist()
            return lambda row: counted[row]
        copied, event = torch.empty_like(self.buffers.seen, device="cpu", pin_memory=True), torch.cuda.Event()
        copied.copy_(self.buffers.seen, non_blocking=True)
        event.record()

        def read(row: int) -> int:
            event.synchronize()
            return int(copied[row])

        return read

    def _unmet(self, found: HookedRequest) -> str | None:
        if found.failed:
            return found.failed
        wanted = self.num_taps * found.scheduled
        if found.met == wanted:
            return None
        return (
            f"the op of {found.request_id} met {found.met} of {wanted} rows: compiled code without our op ran, and the request "
            "is not steered. Delete vLLM's compile cache (VLLM_CACHE_ROOT), and report this"
        )

    # -- a step ----------------------------------------------------------------------------------

    def begin(
        self,
        req_ids: Sequence[str],
        starts: np.ndarray,
        computed: np.ndarray,
        mode: str,
        drafts: Mapping[str, Sequence[int]] = NO_DRAFTS,
    ) -> None:
        """Lay out the ops and captures of a step, before its pass.

        Args:
            req_ids: vLLM's, in the order of the batch.
            starts: [at least reqs + 1], first token row of each.
            computed: [at least reqs], first position of each.
            mode: execution mode of the pass.
            drafts: draft tokens of requests, the last ones of their rows. Those that were not accepted come again.
        """
        self.num_steps, self.by_modules = self.num_steps + 1, False
        if not self.busy:
            return
        self._mark("step: between steps")
        with TIMES.of("step: wait for the lock"):
            self._hold()
        batch = self._batches.find(req_ids)
        if batch is None:
            with TIMES.of("step: rows of new requests"):
                self._take_rows(req_ids)
            batch = self._batches.add(StepBatch(req_ids, self._live, self._logits_site, self.whole))
            known = [self._known[one] for one in req_ids if one in self._known]
            batch.asked = frozenset().union(*(one.sites for one in known))
            batch.links_sites = any(one.links_sites for one in known)
        if not batch.hooked:
            self._rest()
        self.scores.begin(filter(None, map(self._known.get, req_ids)), int(starts[len(req_ids)]))
        self.taps.asked, self.links_sites = batch.asked, batch.links_sites
        if not batch.hooked:
            return
        step = self.step = step_of(batch, starts, computed, mode, drafts)
        self._drafts |= bool(drafts)
        if self._drafts:
            self._settle(step)
        self._calls_before = self.taps.calls
        if not self.in_tables:
            with torch.inference_mode(False):  # modules write scores, too
                self.taps.ops = self.stage.site_ops(step, step.num_tokens, False)
            self._mark()
            return
        records = None
        if batch.captures and not self.rank:
            with TIMES.of("step: wait for room in the ring"):
                self._make_room(step)
            with TIMES.of("step: lay out"):
                records = self._ring.lay_out(step.parts)
        with TIMES.of("step: fill the tables"):
            self.buffers.fill(step.owners, step.positions, records)
        if batch.touches_logits:
            self.taps.ops = self.stage.logit_table_ops(step, step.num_tokens)
        self._mark()

    def ops_of_pass(self, rows: int) -> SiteOps | None:
        """Ops and captures of the step's token rows, for modules."""
        if self.step is None:
            return None
        static = self.taps.static
        return static.first_rows(rows) if self.taps.ops is None and static is not None else self.taps.ops

    def decisions(self) -> Decisions:
        """Return the decisions of rank 0's pass."""
        return Decisions({}, None) if self.step is None else self.stage.decisions(self.step)

    def _settle(self, step: VllmStep) -> None:
        """Take back rows of drafts that were not accepted, and let the step's drafts be taken back."""
        for i, one in step.batch.hooked:
            declared, first = one.declared, int(step.first[i])
            if declared is None:
                continue
            declared.settle(first)
            if step.drafts[i]:
                declared.begin_draft(first + int(step.counts[i]))

    def _mark(self, stage: str | None = None) -> None:
        """Add the time since the last mark to a stage."""
        if TIMES.on:
            now = time.perf_counter(), time.thread_time()
            if stage is not None:
                TIMES.add(stage, now[0] - self._marked[0], now[1] - self._marked[1])
            self._marked = now

    @property
    def _ring(self) -> CaptureRing:
        ring = self.stage.capture_ring
        assert ring is not None, "device tables come with a ring"
        return ring

    def _make_room(self, step: VllmStep) -> None:
        """Wait until the ring has room for a step's captures; those that not even an empty ring holds are lost."""
        ring = self._ring
        if int((step.batch.largest_records * step.counts).sum()) <= ring.allocator.largest_free:
            return
        wanted = [(captures, first, count) for captures, first, count in step.parts if captures is not None]
        sizes = [captures.reserved_size(first, count) for captures, first, count in wanted]
        needed = sum(sizes)
        while needed > ring.allocator.largest_free and ring.allocator.in_use:
            time.sleep(WAIT_SECONDS)  # the copier frees the oldest span
        for (captures, _, count), size in sorted(zip(wanted, sizes, strict=True), key=lambda one: -one[1]):
            if needed <= ring.allocator.largest_free:
                break
            needed -= size
            captures.lose(
                f"a request lost its captures: the {count} positions of a step take more than the ring that they leave the device "
                f"through, which has {self.stage._config.capture_ring_bytes} bytes (raise capture_ring_bytes, or lower "
                "max_num_batched_tokens)"
            )

    def idle(self) -> None:
        """The next pass is not one of requests with hooks: a dummy one, or plain."""
        with self.lock:
            self._batches.close()
        self._rest()

    def _rest(self) -> None:
        self.step, self.taps.ops, self.taps.asked, self.links_sites = None, None, frozenset(), False
        if self.in_tables:
            self.buffers.clear()
        self._let_go()

    def logits(self, compute: Any, hidden: torch.Tensor, sampled: torch.Tensor) -> Any:
        """The logits that tokens are sampled from, after ops and captures.

        Args:
            compute: the logits of rows, and the token rows that they are; None: those that are sampled from.
            hidden: [tokens, hidden] of all token rows.
            sampled: [reqs, hidden], the rows that are sampled from.
        """
        step = self.step
        if step is None or not step.batch.touches_logits:
            return compute(sampled, None)
        tokens = None if step.samples_only else step.logit_token_rows()
        if tokens is not None:
            sampled = hidden[torch.from_numpy(tokens).to(hidden.device)]
        logits = compute(sampled, tokens)
        if logits is None:  # the head's rows are gathered on another rank
            return None
        if self.taps.ops is not None:
            logits = self.taps.ops.at(self._logits_site, logits[None])[0]
        rows = logits if step.samples_only else logits[torch.tensor(step.sample_rows, device=logits.device)]
        if not self.rank:
            self.stage.capture_logits(step, logits, rows)
        return rows

    def end(self) -> None:
        """A step was launched: its captured states may leave the device."""
        step, self.taps.asked, self.links_sites = self.step, frozenset(), False
        if step is None:
            self._let_go()
            return
        self._mark("step: launch the pass, sample")
        if self.in_tables and step.batch.captures and not self.rank:
            with TIMES.of("step: send"):
                self._ring.send()
        if step.batch.monitored:
            self.scores.take(step)
        if self._stream is not None:
            self._launched = torch.cuda.Event()
            self._launched.record()
        calls = 0 if self.in_tables else self.taps.calls - self._calls_before
        step.batch.count(step.counts, step.first, step.mode, self.num_taps if self.by_modules else calls)
        self.step, self.taps.ops = None, None
        self._let_go()
        self._mark()

    def _hold(self) -> None:
        if not self._held:
            self.lock.acquire()
            self._held = True

    def _let_go(self) -> None:
        if self._held:
            self._held = False
            self.lock.release()

    def close(self) -> None:
        """Empty the ring."""
        self.stage.close()
