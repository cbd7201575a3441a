"""Scheduling: the requests of the next step, and their numbers of tokens.

Continuous batching over a paged KV pool. A step holds every decoding request, and chunks of prompts. A traced prompt runs in one
pass. A prompt starts after the pages that the prefix cache has. When the pool is full, the latest request is preempted. A plain
request later resumes from the cached prefix. The KV of a traced request is swapped to host memory and back. A request skips the
step only if its captures find no room in the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from operator import attrgetter

from ..config import ServerConfig
from ..core.request import Request, RequestStatus
from ..core.step import AcceptedToken, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from ..hooks.captures.egress.admission import RingAdmission
from ..utils.out_of_memory import is_out_of_memory
from .constraints import in_mask_budget
from .drafts import Drafts
from .kv_manager import KVManager
from .step_results import swap_error, take, take_scores
from .step_times import StepTimes
from .waiting_queue import DepthGroups, ExclusiveTurns, WaitingQueue

MAX_OVERTAKEN_SWAPPED = 8
"""Requests admitted while one waits in host memory, at most. Later ones wait for it."""


class Scheduler:
    """Queues of live requests, and the step that each takes part in.

    Args:
        config: `prefill_policy`, `queue_order`, `max_running_requests`, `max_itl_ms` and `max_prefill_tokens` are read.
        max_num_tokens: upper bound of a step's token rows.
        kv: pages and rows of the requests.
        ring_admission: reserves room for captured states in the ring; None if captures need none.
        times: durations of the steps so far; None: unknown.
        drafts: drafts of decoding requests; None: no drafter.

    Attributes:
        requests: live requests by id.
        lost: requests that ended because their KV could not be swapped; the engine takes them from here.
    """

    def __init__(
        self,
        config: ServerConfig,
        max_num_tokens: int,
        num_layers: int,
        kv: KVManager,
        ring_admission: RingAdmission | None = None,
        times: StepTimes | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self.config, self.max_num_tokens = config, max_num_tokens
        self.max_running = min(kv.rows.size, max_num_tokens)
        self.kv = kv
        self.ring_admission, self._times, self._drafts = ring_admission, times, drafts
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(config.queue_order, kv.num_cached_tokens)
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.lost: list[Request] = []
        self.num_preempted = self.num_swapped = self._arrivals = 0
        self._exclusive, self._groups = ExclusiveTurns(), DepthGroups(num_layers)
        self._left_out: Set[Request] = frozenset()
        self._entering: dict[str, Request] = {}
        self._accepted: list[AcceptedToken] = []
        self._settled: dict[str, int] = {}
        self._fired: dict[str, dict[int, int]] = {}
        self._finished_ids, self._preempted_ids = set[str](), set[str]()
        self._decodes_wait, self._beyond_target = False, 0

    # -- requests in and out -------------------------------------------------------

    def add(self, requests: Iterable[Request]) -> None:
        """Add requests to the waiting queue."""
        for request in requests:
            request.arrival = self._arrivals
            self._arrivals += 1
            self.waiting.add(request)
            self.requests[request.request_id] = request
            self._exclusive.add(request)
            self._groups.num_early += request.depth is not None
            if self._drafts is not None:
                self._drafts.add(request)

    @property
    def live(self) -> list[Request]:
        """All requests that have not finished."""
        return [*self.running, *self.swapped, *self.waiting]

    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self.running or self.swapped or self.waiting)

    @property
    def finished_req_ids(self) -> Set[str]:
        """Requests that have ended since the last step was scheduled."""
        return self._finished_ids

    @property
    def waits_for_room(self) -> bool:
        """Whether captures found no room in the ring for the last step, and room will be freed."""
        return self.ring_admission is not None and self.ring_admission.waits

    def finish(self, request: Request, reason: str) -> None:
        """End a request and release its resources. Finished requests are ignored."""
        if request.finished:
            return
        queue = {RequestStatus.RUNNING: self.running, RequestStatus.SWAPPED: self.swapped}.get(request.status)
        (self.waiting if queue is None else queue).remove(request)
        self._release(request, keep=reason != "error")
        request.host_kv = None
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        self._exclusive.finish(request)
        self._groups.num_early -= request.depth is not None
        self._finished_ids.add(request.request_id)
        if self.ring_admission is not None:
            self.ring_admission.forget_lost([request.request_id])

    # -- a step ----------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Pick the next step's requests. Decode rows come first, then prompts.

        The step is empty if nothing can run before tokens of launched steps are read, or captured states have left.
        """
        self.kv.begin()
        step = self._pick()
        while not step.scheduled and (self._decodes_wait or self._left_out):
            step = self._pick(apart=False)
        step.scheduled_new_reqs = [request.entering() for request in self._entering.values()]
        step.page_writes, step.free_encoder_mm_hashes = self.kv.page_writes(), self.kv.take_freed_images()
        step.accepted, step.settled, step.fired = list(self._accepted), dict(self._settled), dict(self._fired)
        step.finished_req_ids, self._finished_ids = self._finished_ids, set()
        step.preempted_req_ids, self._preempted_ids = self._preempted_ids, set()
        if self.ring_admission is not None:
            step.lost_captures = dict(self.ring_admission.lost)
        return step

    def _pick(self, apart: bool = True) -> SchedulerOutput:
        step = SchedulerOutput()
        if self.ring_admission is not None:
            self.ring_admission.begin()
        budget = self.max_num_tokens
        for request in self.kv.outgrown(self.running):
            self._preempt(request, step)  # all of its keys are computed again
        decoding = [request for request in self.running if request.is_decoding]
        prompts_run = len(decoding) < len(self.running)
        if self._exclusive.requests:
            self._schedule_exclusive(step, others=any(not request.exclusive for request in self.live))
            if step.scheduled:
                return step
            decoding = [request for request in decoding if not request.exclusive]
        if apart := apart and self._groups.num_early > 0 and not (decoding and self.config.max_itl_ms):
            begun = (request for request in self.running if request.in_prompt)
            self._groups.begin(begun, self.waiting, self._admissible_head(), budget)
        self._decodes_wait = self._prompts_have_this_step(len(decoding), apart and self._groups.early)
        decodes = bool(decoding) and not self._decodes_wait
        self._left_out = self._groups.left_out(decodes) if apart else frozenset()
        if decodes:
            budget = self._schedule_decodes(step, budget, decoding)
        if not (self.config.prefill_policy == "prefill_first" and step.scheduled):
            self._beyond_target, budget = self._beyond(step, budget)
            if prompts_run:
                budget = self._schedule_chunks(step, budget)
            budget = self._schedule_swapped(step, budget, [r for r in self.swapped if not r.exclusive])
            self._schedule_waiting(step, budget)
        if self._exclusive.requests and not step.scheduled:
            self._schedule_exclusive(step, others=False)
        elif self._drafts is not None:
            num_rows = self.max_num_tokens - step.total_num_scheduled_tokens
            self._drafts.extend(step, self.requests, self.kv, self.ring_admission, num_rows)
        step.scheduled.sort(key=attrgetter("decodes"), reverse=True)  # stable: decode first
        return step

    def _beyond(self, step: SchedulerOutput, budget: int) -> tuple[int, int]:
        """(tokens that only prompts in one pass may take, tokens for all): by `max_itl_ms`, beside decoding requests."""
        target = self.config.max_itl_ms
        if target is None or self._times is None or not step.scheduled:
            return 0, budget
        fits = self._times.prompt_tokens(len(step.scheduled), target / 1e3)
        within = budget if fits is None else min(budget, fits)
        return budget - within, within

    def _schedule_exclusive(self, step: SchedulerOutput, others: bool) -> None:
        """Give the step to one exclusive request or its gang, if its turn has come."""
        turn = self._exclusive.next(others)
        swapped = any(request.status is RequestStatus.SWAPPED for request in turn)
        (self._schedule_swapped if swapped else self._schedule_decodes)(step, len(turn), turn)

    def _prompts_have_this_step(self, decoding: int, early: bool) -> bool:
        """Whether `decoding` requests sit out this step, for prompts with a pass that ends `early`. Never two steps in a row."""
        if not decoding or self._decodes_wait:
            return False
        head = self._admissible_head()
        if self.config.prefill_policy == "prefill_first":
            back = any(self._can_admit(request.unit) for request in self.swapped)
            return back or head is not None or any(r.in_prompt for r in self.running)
        if early or head is None or head[0].trace is None or any(r.in_prompt for r in self.running):
            return early
        # A traced prompt needs one pass; beside many decoding requests the budget would never hold it.
        tokens = sum(request.num_tokens_left for request in head)
        return head[0].exclusive or tokens + decoding > self.max_num_tokens

    def _admissible_head(self) -> list[Request] | None:
        """The requests to admit next, if rows and pages suffice and none that is swapped out comes before; else None."""
        if self._swapped_come_first or not self.waiting:
            return None
        unit = self.waiting.in_order()[0].unit
        return unit if self._can_admit(unit) and self._ring_fits(unit) else None

    def _schedule_decodes(self, step: SchedulerOutput, budget: int, decoding: list[Request]) -> int:
        constrained = any(request.constraint is not None for request in decoding)
        decoding = sorted(in_mask_budget(decoding) if constrained else decoding, key=attrgetter("arrival"))
        sit_out, page_size = self._without_ring(decoding), self.kv.page_size
        for request in decoding:
            if request.status is not RequestStatus.RUNNING or request in sit_out:
                continue
            computed = request.kv_len
            if computed < len(request.pages) * page_size or self._ensure_pages(request, 1, step):
                row: int = request.req_pool_idx  # pyright: ignore[reportAssignmentType]
                step.scheduled.append(ScheduledRequest(request.request_id, row, 1, computed, True, True, 1))
                budget -= 1
        return budget

    def _schedule_chunks(self, step: SchedulerOutput, budget: int) -> int:
        """Continue prompts that earlier steps began."""
        prompts = (r for r in self.running if r.in_prompt and r not in self._left_out)
        for request in sorted(prompts, key=attrgetter("arrival")):
            tokens = self.kv.chunk(request, budget)
            if tokens:
                tokens = self._reserve_ring([(request, tokens)], whole=request.is_whole)
            if tokens and request.status is RequestStatus.RUNNING and self._ensure_pages(request, tokens, step):
                step.scheduled.append(request.scheduled(tokens))
                budget = self._left(budget, tokens)
        for entry in step.scheduled:  # now that no part of the step is taken back
            if not entry.decodes:
                self.kv.share(self.requests[entry.request_id], entry.start + entry.num_tokens)
        return budget

    def _schedule_swapped(self, step: SchedulerOutput, budget: int, swapped: list[Request]) -> int:
        """Bring requests with KV in host memory back, the earliest first."""
        for request in sorted(swapped, key=lambda r: r.arrival):
            unit = [r for r in request.unit if r.status is RequestStatus.SWAPPED]
            if request.status is not RequestStatus.SWAPPED or len(unit) > budget or not self._can_admit(unit):
                continue
            if not self._reserve_ring([(member, 1) for member in unit]):
                continue
            for member in unit:
                self.kv.admit(member)
                self._enter(member)
                if not self._try_swap(member, self.kv.swap_in):
                    step.drop({gone.request_id for gone in unit})
                    break
                step.scheduled.append(member.scheduled(1))
                budget -= 1
        return budget

    def _schedule_waiting(self, step: SchedulerOutput, budget: int) -> None:
        for request in self.waiting.in_order():
            if budget <= 0 or self._swapped_come_first:
                return
            if request.status is not RequestStatus.WAITING or request in self._left_out:
                continue
            if self.kv.comes_after(request, self.running):
                continue
            unit = request.unit
            whole = request.is_whole or len(unit) > 1
            tokens = sum(r.num_tokens_left for r in unit) if whole else 0
            encoded = 0 if self.kv.cross is None else self.kv.cross.cost(unit)
            # Longer than any step may be: it runs without others.
            beyond = self.max_num_tokens < tokens + encoded and not step.scheduled
            if (
                (tokens + encoded > budget + self._beyond_target and not beyond)
                or not self._can_admit(unit)
                or (request.exclusive and step.scheduled)
            ):
                return  # first come, first served
            budget = max(budget - encoded, 1)
            for member in unit:
                self.kv.admit(member)
            wanted = [(r, r.num_tokens_left if whole else self.kv.chunk(r, budget)) for r in unit]
            room = self._reserve_ring(wanted, whole)
            for member in unit:
                if not room:
                    self.kv.withdraw(member)
                    continue
                tokens = member.num_tokens_left if whole else room
                self.kv.sharing.admitted(member, member.kv_len)
                self._enter(member)
                step.scheduled.append(member.scheduled(tokens))
                self.kv.share(member, member.kv_len + tokens)
                budget = self._left(budget, tokens)
            if room and request.exclusive:
                return

    def _left(self, budget: int, tokens: int) -> int:
        """Tokens of the step for other prompts, after one has taken some."""
        return max(0, min(budget, self.config.max_prefill_tokens or budget) - tokens)

    def _can_admit(self, unit: list[Request]) -> bool:
        """Whether rows and pages are free for all tokens of the requests so far, and the host knows the tokens.

        A request that was preempted a step after it sampled waits until its token has been read. A preempted request waits for one
        more free page per running request, lest another is preempted at once. While any is swapped out, all wait for that.
        """
        if any(r.num_pending for r in unit):
            return False
        spare = len(self.running) if self.swapped or any(r.num_preemptions for r in unit) else 0
        return len(self.running) + len(unit) <= self.max_running and self.kv.fits(unit, spare)

    @property
    def _swapped_come_first(self) -> bool:
        """Whether one that waits in host memory was overtaken so often that no request is admitted before it."""
        return any(request.num_overtaken >= MAX_OVERTAKEN_SWAPPED for request in self.swapped)

    def _enter(self, request: Request) -> None:
        """Move an admitted request to the running ones."""
        if request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        else:
            self.waiting.admit(request)
            for other in self.swapped:
                other.num_overtaken += 1
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._entering[request.request_id] = request
        self._preempted_ids.discard(request.request_id)

    def _reserve_ring(self, wanted: list[tuple[Request, int]], whole: bool = True) -> int:
        """`RingAdmission.take`, where any of the requests captures."""
        ring = self.ring_admission
        if ring is None or not any(ring.concerns(request) for request, _ in wanted):
            return wanted[0][1]
        return ring.take(wanted) if whole else ring.take(wanted, False, self.kv.with_whole_images)

    def _without_ring(self, decoding: list[Request]) -> set[Request]:
        """Requests, with their gangs, with captures of the next rows that do not fit in the ring."""
        admission, sit_out = self.ring_admission, set[Request]()
        if admission is None or (not any(request.gang for request in decoding) and admission.take_rows(decoding)):
            return sit_out
        seen: set[Request] = set()
        for request in decoding:
            if admission.concerns(request) and request not in seen:
                together = [r for r in request.unit if r.is_decoding]
                seen.update(together)
                if not self._reserve_ring([(r, 1) for r in together]):
                    sit_out.update(together)
        return sit_out

    def _ring_fits(self, unit: list[Request]) -> bool:
        """Whether the ring holds the captures of these requests: all positions of a traced prompt, else one."""
        if self.ring_admission is None:
            return True
        return self.ring_admission.fits(unit, [r.num_tokens_left if r.is_whole else 1 for r in unit])

    # -- results of a step ------------------------------------------------------------------

    def launched(self, step: SchedulerOutput) -> None:
        """A step was launched: the next one may be scheduled, whether or not its tokens have been read."""
        for request_id, _, num_tokens, _, samples, *_ in step.scheduled:
            request = self.requests.get(request_id)
            if request is not None:
                request.kv_len += num_tokens
                request.num_pending += samples
        if self.ring_admission is not None and self.ring_admission.lost:
            self.ring_admission.forget_lost([entry.request_id for entry in step.scheduled])
        self._entering.clear()
        self.kv.sent()
        del self._accepted[: len(step.accepted)]
        self._settled, self._fired = {}, {}  # a request with ops that wait has no other step on its way

    def failed(self, step: SchedulerOutput) -> None:
        """A step's pass failed: requests of it that still run enter the runner's table anew, and prompts wait again."""
        for entry in step.scheduled:
            request = self.requests.get(entry.request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            decodes = entry.decodes and self.kv.states is None  # a pass that stopped halfway has changed some states
            if self._drafts is not None and entry.request_id in step.drafts:
                self._drafts.failed(request)
                self.kv.trim(request, request.kv_len)
                self._settled[entry.request_id], decodes = entry.start, True
            if request.trace is not None or (decodes and request.request_id not in self._entering):
                self._entering[request.request_id] = request
                self.kv.resend(request)
            else:
                self.put_back(request)
        self.kv.discard_unwritten()
        # The pass may have failed before the runner read them. It ignores ids that it does not know.
        self._finished_ids |= step.finished_req_ids
        self._preempted_ids |= step.preempted_req_ids - self._entering.keys()

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        """Append the tokens of a step that was `launched`. Returns the requests that ended with it.

        Steps are taken in the order in which they were launched. Rows of requests that ended since are dropped.
        """
        self.kv.begin()
        ended = []
        for entry, token_ids in zip(step.scheduled, output.sampled_token_ids, strict=True):
            request = self.requests.get(entry.request_id)
            if request is None:
                continue
            request.num_pending, drafts = request.num_pending - entry.samples, step.drafts.get(entry.request_id)
            if not entry.decodes and drafts is None:
                request.prompt_computed = max(request.prompt_computed, entry.start + entry.num_tokens)
            try:
                if request.monitors is not None and (fired := take_scores(request, entry, output, drafts is not None)):
                    self._fired[request.request_id] = fired
                reason = take(request, token_ids, output, self._accepted, None if drafts is None else entry)
            except BaseException as error:  # a tokenizer's, while stop strings are looked for
                request.error, reason = error, "error"
            if drafts is not None and self._drafts is not None:
                self._drafts.settle(request, entry, len(drafts), len(token_ids))
                self.kv.trim(request, request.kv_len)
                self._settled[request.request_id] = request.kv_len
            if reason is not None:
                self.finish(request, reason)
                ended.append(request)
        return ended

    # -- preemption ---------------------------------------------------------------------------

    def _ensure_pages(self, request: Request, tokens: int, step: SchedulerOutput) -> bool:
        """Pages for `tokens` more positions, if others must be preempted for them. False: the request itself was."""
        while not self.kv.grow(request, request.kv_len + tokens):
            self._preempt(self._victim(), step)
            if request.status is not RequestStatus.RUNNING:
                return False
        return True

    def _victim(self) -> Request:
        """The request to preempt: the latest of the lowest priority, of the plain ones if there are any. Never a request that
        only awaits its last token: it is about to free its pages."""
        running = [r for r in self.running if not r.awaits_last_token]
        plain = [r for r in running if r.trace is None]
        return max(plain or running, key=lambda r: (r.priority, r.arrival))

    def _preempt(self, request: Request, step: SchedulerOutput) -> None:
        """Preempt a request, with the other requests of its gang."""
        for member in request.unit:
            if member.status is not RequestStatus.RUNNING:
                continue
            step.drop({member.request_id})
            if member.trace is not None and not self._try_swap(member, self.kv.swap_out):
                return  # it has ended, with its gang
            member.num_preemptions += 1
            if member.trace is None:
                self.put_back(member)
                self.num_preempted += 1
            else:
                self.running.remove(member)
                self._release(member)
                self._preempted_ids.add(member.request_id)
                member.status, member.num_overtaken = RequestStatus.SWAPPED, 0
                self.swapped.append(member)
                self.num_swapped += 1

    def put_back(self, request: Request) -> None:
        """Move a plain request back to the waiting queue. The prefix cache keeps its computed KV."""
        self.running.remove(request)
        self._release(request)
        self._preempted_ids.add(request.request_id)
        if request.declared is not None and request.declared.captures is not None:
            request.declared.captures.was_sent(request.kv_len)
        request.kv_len = 0
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def _try_swap(self, request: Request, swap: Callable[[Request], None]) -> bool:
        """Swap the request's KV out or in. False: no memory for it, and the request ends, with its gang."""
        try:
            swap(request)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        else:
            return True
        for member in request.unit:
            member.error = swap_error(request, self.max_running, reason)
            self.finish(member, "error")
            self.lost.append(member)
        return False

    def _release(self, request: Request, keep: bool = True) -> None:
        self._entering.pop(request.request_id, None)
        self.kv.release(request, keep)

    def check_integrity(self) -> None:
        """Every page and row is free or held by one live request. Raises AssertionError otherwise."""
        self.kv.check_integrity(self.running, [*self.swapped, *self.waiting])
        assert set(self.requests) == {request.request_id for request in self.live}, "requests and queues differ"
