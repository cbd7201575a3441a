"""`RankStage`: the declared ops and captures of the requests in a rank's steps, around our `DeclaredStage`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ...config import ServerConfig
from ...core.model_spec import LOGITS, ModelSpec, delta_site, inner_site, residual_site
from ...core.sampling_params import SamplingParams
from ...core.step import DeclaredResult, NewRequest, RequestEnd, RequestHooks, ScheduledRequest
from ...hooks.captures.captures import Captures
from ...hooks.captures.reductions.reduction import Readout
from ...hooks.declared import Declared
from ...hooks.declared_stage import DeclaredStage, StepRows
from ...layers.edits.base import apply_and_capture
from ...layers.edits.host import HostOps
from ...layers.edits.table import TableOps
from ..settings import limits_of, uses_tables
from .row_buffers import VllmRowBuffers
from .step import VllmStep

_NEUTRAL = SamplingParams()
SMALL_RING = 1 << 16
"""Bytes of the ring of a rank that captures nothing."""


@dataclass
class HookedRequest:
    """A request with hooks, while vLLM knows it.

    Attributes:
        request_id: ours.
        row: of the tables, while it has one.
        declared: None once its results were asked for.
        met: rows that the op met of it, over all taps; on CUDA the tables' count comes on top.
        scheduled: token rows of its steps.
        steps: by execution.
    """

    request_id: str
    hooks: RequestHooks
    prompt_len: int
    row: int | None = None
    declared: Declared | None = None
    met: int = 0
    scheduled: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    forgotten: bool = False
    """vLLM has removed it."""


@dataclass
class RankResult:
    """What rank 0 says of a request that has ended.

    Attributes:
        error: why it cannot be trusted; None where it can.
    """

    declared: DeclaredResult
    steps: Counter[str]
    preemptions: int = 0
    error: str | None = None


class TappedStage(DeclaredStage):
    """The declared stage of a rank.

    Attributes:
        captures: whether states leave this rank.
    """

    captures = True

    @property
    def has_tables(self) -> bool:
        """Whether passes read declared ops from device tables."""
        return uses_tables(torch.device(self.device).type)

    def _captured_parts(self, rows: StepRows) -> list[tuple[Captures | None, int, int]]:
        if self.captures:
            return super()._captured_parts(rows)
        return [(None, entry.start, entry.num_tokens) for entry in rows.entries]


class RankStage:
    """Ops and captures of a rank. Steps come from the rank's thread, ends of requests from the one that serves the client.

    Args:
        config: of the client.
        model: what specs are bound to.
        device: of the rank.
        tokens: most token rows of a pass, padding included.
        rows: most requests of a step.
        taps: calls of the op in one pass.
        rank: among the tensor-parallel ones; only rank 0 captures.
        readout: of the model.
    """

    def __init__(
        self, config: ServerConfig, model: ModelSpec, device: torch.device, tokens: int, rows: int, taps: int, rank: int,
        readout: Readout,
    ) -> None:  # fmt: skip
        self.model, self.device, self.taps, self.rank = model, device, taps, rank
        self.in_tables, on_cuda = uses_tables(device.type), device.type == "cuda"
        if rank:
            config = replace(config, capture_ring_bytes=SMALL_RING)
        self.stage = TappedStage(config, model, str(device), readout)
        self.stage.captures = rank == 0
        self.stage.limits = limits_of(config, device.type)
        self.buffers = VllmRowBuffers(tokens, rows + 1, device)
        self.stage.init_tables(self.buffers, self.buffers)
        self.lock = threading.RLock()
        self.calls = 0
        self.num_steps = 0
        self._logits_site = inner_site(model.num_hidden_layers, 0, LOGITS)
        self._rows = list(range(rows, 0, -1))  # row 0 stays empty
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._launched: Any = None
        self._known: dict[str, HookedRequest] = {}  # by vLLM's id
        self._by_own_id: dict[str, HookedRequest] = {}
        self._ops: Any = None
        self._step: VllmStep | None = None
        self._hooked: list[tuple[HookedRequest, ScheduledRequest]] = []
        self._calls_before = 0
        self._held = False
        self.static: TableOps | None = None
        if self.in_tables:
            assert self.stage.device_tables is not None
            self.static = TableOps(
                self.stage.device_tables.tables, self.buffers.op_rows, self.buffers.positions, self.buffers.blocks,
                self.buffers.flags,
            )  # fmt: skip

    # -- requests ----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request with hooks is known, or rows of the last pass have owners."""
        return bool(self._known) or self._step is not None or self.buffers.used > 0

    def add(self, vllm_id: str, request_id: str, hooks: RequestHooks, prompt_len: int) -> None:
        """A request with hooks enters, or comes back after a preemption."""
        with self.lock:
            if vllm_id in self._known:
                return
            found = HookedRequest(request_id, hooks, prompt_len)
            found.declared = self.stage.bind(hooks, prompt_len)
            if self.rank and not self.in_tables:
                found.declared.captures = None
            self._known[vllm_id] = self._by_own_id[request_id] = found

    def remove(self, vllm_id: str) -> None:
        """vLLM forgets a request. Its row waits for the client to ask for the results."""
        if vllm_id not in self._known:
            return
        with self.lock:
            found = self._known.pop(vllm_id)
            found.forgotten = True
            if self.rank:  # nobody asks this rank for results
                self._by_own_id.pop(found.request_id, None)
                self.stage.leave_tables(found.request_id)
                self.stage.forget(found.request_id)
                found.declared = None
            if found.declared is None:
                self._free_row(found)

    def preempted(self, vllm_id: str) -> None:
        """vLLM takes a request's KV, and computes it again later."""
        if (found := self._known.get(vllm_id)) is not None:
            found.preemptions += 1

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

    def _take_row(self, found: HookedRequest, running: set[str]) -> None:
        """A row of the tables for a request of the step, if need be from a request outside of it."""
        if found.row is not None:
            return
        if not self._rows:
            self._evict(running)
        found.row = self._rows.pop()
        if self.in_tables:
            self.buffers.seen[found.row] = 0
        found.hooks.bound = found.declared
        new = NewRequest(
            request_id=found.request_id, row=found.row, prompt_len=found.prompt_len, token_ids=[], num_computed_tokens=0,
            params=_NEUTRAL, seed=0, hooks=found.hooks,
        )  # fmt: skip
        self.stage.enter([new])

    def finish(self, end: RequestEnd) -> Future[RankResult | None]:
        """The results of a request that has ended; None where this rank never met it. Called on the client's thread."""
        done: Future[RankResult | None] = Future()
        with self.lock, self.side():
            found = self._by_own_id.pop(end.request_id, None)
            if found is None or found.declared is None:
                done.set_result(None)
                return done
            seen = self._read_seen(found)
            end.hooks.interventions, end.hooks.captures = found.hooks.interventions, found.hooks.captures
            arrived = self.stage.finish(end)
            found.declared = None

        def complete(result: Future[DeclaredResult]) -> None:
            try:
                found.met += seen()
                with self.lock:
                    if found.forgotten:
                        self._free_row(found)
                done.set_result(RankResult(result.result(), found.steps, found.preemptions, self._unmet(found)))
            except BaseException as failure:
                done.set_exception(failure)

        arrived.add_done_callback(complete)
        return done

    def side(self) -> Any:
        """A stream for the client's thread, behind the last pass."""
        if self._stream is None:
            return nullcontext()
        if self._launched is not None:
            self._stream.wait_event(self._launched)
        return torch.cuda.stream(self._stream)

    def _read_seen(self, found: HookedRequest) -> Callable[[], int]:
        """Copy what the kernels counted in a request's row. The result waits for the copy."""
        if not self.in_tables or found.row is None:
            return lambda: 0
        if self._stream is None:
            counted = int(self.buffers.seen[found.row])
            return lambda: counted
        copied, event = torch.empty(1, dtype=torch.int32, pin_memory=True), torch.cuda.Event()
        copied.copy_(self.buffers.seen[found.row : found.row + 1], non_blocking=True)
        event.record()

        def read() -> int:
            event.synchronize()
            return int(copied)

        return read

    def _unmet(self, found: HookedRequest) -> str | None:
        wanted = self.taps * found.scheduled
        if found.met == wanted:
            return None
        return (
            f"the op of {found.request_id} met {found.met} of {wanted} rows: compiled code without our op ran, and the request "
            "is not steered. Delete vLLM's compile cache (VLLM_CACHE_ROOT), and report this"
        )

    # -- a step ----------------------------------------------------------------------------------

    def begin(self, req_ids: Sequence[str], starts: np.ndarray, computed: np.ndarray, mode: str) -> None:
        """Lay out the ops and captures of a step, before its pass.

        Args:
            req_ids: vLLM's, in the order of the batch.
            starts: [at least reqs + 1], first token row of each.
            computed: [at least reqs], first position of each.
            mode: how the pass runs.
        """
        self.num_steps += 1
        if not self.busy:
            return
        self._hold()
        running = set(req_ids)
        self._hooked = []
        entries: list[ScheduledRequest] = []
        for i, vllm_id in enumerate(req_ids):
            count, found = int(starts[i + 1] - starts[i]), self._known.get(vllm_id)
            live = found is not None and found.declared is not None
            if live:
                assert found is not None
                self._take_row(found, running)
            all_logits = live and found is not None and found.hooks.logits_from == 0 and bool(found.hooks.captures)
            entry = ScheduledRequest(
                found.request_id if live and found is not None else "", (found.row or 0) if found is not None else 0, count,
                int(computed[i]), True, False, count if all_logits else 1,
            )  # fmt: skip
            entries.append(entry)
            if live and found is not None:
                self._hooked.append((found, entry))
        if not self._hooked:
            self.idle()
            return
        rows = np.array([0, *np.cumsum([entry.logit_rows for entry in entries])], dtype=np.int32)
        step = self._step = VllmStep(entries, np.asarray(starts[: len(entries) + 1], dtype=np.int32), rows, mode)
        self._calls_before = self.calls
        if self.in_tables:
            self._fill(step)
        self._make_room(step)
        self._ops = self.stage.site_ops(step, step.num_tokens, False)

    def _fill(self, step: VllmStep) -> None:
        owners = np.concatenate(
            [np.full(e.num_tokens, e.row if e.request_id else -1, dtype=np.int64) for e in step.entries]
        )
        positions = np.concatenate([np.arange(e.start, e.start + e.num_tokens, dtype=np.int64) for e in step.entries])
        self.buffers.fill(owners, positions)

    def _make_room(self, step: VllmStep) -> None:
        """Wait until the ring has room for a step's captures; those that not even an empty ring holds are lost."""
        ring = self.stage.capture_ring
        if ring is None or self.rank:
            return
        wanted = [
            (found.declared.captures, entry)
            for found, entry in self._hooked
            if found.declared is not None and found.declared.captures is not None
        ]
        sizes = [captures.reserved_size(entry.start, entry.num_tokens) for captures, entry in wanted]
        needed = sum(sizes)
        if needed > ring.allocator.largest_free:
            ring.wait()
        for (captures, entry), size in sorted(zip(wanted, sizes, strict=True), key=lambda one: -one[1]):
            if needed <= ring.allocator.largest_free:
                break
            needed -= size
            captures.lose(
                f"request {entry.request_id} lost its captures: the {entry.num_tokens} positions of a step take more than the ring "
                f"that they leave the device through, which has {self.stage._config.capture_ring_bytes} bytes (raise "
                "capture_ring_bytes, or lower max_num_batched_tokens)"
            )

    def idle(self) -> None:
        """The next pass is not one of requests with hooks: a dummy one, or plain."""
        self._step, self._ops, self._hooked = None, None, []
        if self.in_tables:
            self.buffers.clear()
        self._let_go()

    def logits(self, compute: Any, hidden: torch.Tensor, sampled: torch.Tensor) -> Any:
        """The logits that tokens are sampled from, after ops and captures.

        Args:
            compute: the model's `compute_logits`.
            hidden: [tokens, hidden], of all token rows.
            sampled: [reqs, hidden], the rows that are sampled from.
        """
        step = self._step
        if step is None or not self._touches_logits():
            return compute(sampled)
        if not step.samples_only:
            sampled = hidden[torch.from_numpy(step.logit_token_rows()).to(hidden.device)]
        logits = compute(sampled)
        if logits is None:  # the head's rows are gathered on another rank
            return None
        if self._ops is not None:
            logits = self._ops.at(self._logits_site, logits[None])[0]
        rows = logits if step.samples_only else logits[torch.tensor(step.sample_rows, device=logits.device)]
        if not self.rank:
            self.stage.capture_logits(step, logits, rows)
        return rows

    def _touches_logits(self) -> bool:
        site = self._logits_site
        return any(
            found.declared is not None
            and (
                site in found.declared.ops
                or (found.declared.captures is not None and site in found.declared.captures.by_site)
            )
            for found, _ in self._hooked
        )

    def end(self) -> None:
        """A step was launched: its captured states may leave the device."""
        if self._step is None:
            self._let_go()
            return
        if self.stage.capture_ring is not None and not self.rank:
            self.stage.capture_ring.send()
        if self._stream is not None:
            self._launched = torch.cuda.Event()
            self._launched.record()
        made = self.calls - self._calls_before
        for found, entry in self._hooked:
            found.scheduled += entry.num_tokens
            found.steps[self._step.mode] += 1
            if not self.in_tables:
                found.met += made * entry.num_tokens
        self._step, self._ops, self._hooked = None, None, []
        self._let_go()

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

    # -- the op ----------------------------------------------------------------------------------

    def pair(self, delta: torch.Tensor, stream: torch.Tensor, residual_add: int) -> None:
        """See `Taps`."""
        if self.static is not None:
            from ...kernels.edit_pair import edit_pair

            edit_pair(delta, stream, residual_add, self.static.tables, self.static.token_rows, self.buffers.seen)
            return
        self.calls += 1
        ops = self._ops
        if ops is not None:
            _pair_on_host(delta, stream, residual_add, ops)

    def state(self, rows: torch.Tensor, site: int) -> None:
        """See `Taps`."""
        if self.static is not None:
            from ...kernels.edit_pair import edit_state

            edit_state(rows, site, self.static.tables, self.static.token_rows, self.buffers.seen)
            return
        self.calls += 1
        if self._ops is not None:
            _at(rows, site, self._ops)


def _at(rows: torch.Tensor, site: int, ops: HostOps) -> None:
    if site in ops.by_site or site in ops.capture_sinks:
        after = apply_and_capture(rows[None], ops, site)[0]
        if after is not rows and site in ops.by_site:
            rows.copy_(after)


def _pair_on_host(delta: torch.Tensor, stream: torch.Tensor, residual_add: int, ops: HostOps) -> None:
    """Edited rows become (0, the edited sum), which the norm adds exactly. Other rows keep all bits."""
    _at(delta, delta_site(residual_add), ops)
    site = residual_site(residual_add)
    if site not in ops.by_site and site not in ops.capture_sinks:
        return
    total = stream + delta
    after = apply_and_capture(total[None], ops, site)[0]
    if site in ops.by_site:
        changed = (after != total).any(-1, keepdim=True)
        stream.copy_(torch.where(changed, after, stream))
        delta.copy_(torch.where(changed, torch.zeros_like(delta), delta))
