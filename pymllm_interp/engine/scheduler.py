"""Which requests take part in the next step, and with how many tokens.

Continuous batching over a paged KV pool. A step holds every request that decodes and, with what is left of its token
budget, prompts: in chunks, but for requests with a trace, whose prompt runs in one pass. When the pool is full the
latest request gives way: a plain one is computed again later, one with a trace has its KV moved to host memory and back.
A request whose captured states find no room on their way to the host sits a step out; nobody else does.

Invariant (`check_integrity`): the free pages and those of live requests are all pages, disjoint, without page 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

import torch

from ..config import ServerConfig
from ..core.out_of_memory import is_out_of_memory
from ..core.output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from ..core.request import Request, RequestStatus
from ..hooks.captures.ring import CaptureRing
from ..mem_cache.memory_pool import KVPool, ReqToTokenPool, TokenToKVPoolAllocator


class Scheduler:
    """Owns every live request's rows and pages.

    Args:
        config: `schedule_policy` and `page_size` are read.
        max_num_tokens: token rows of one step at most.
        capture_ring: where the captured states of a step go; None where they need no room.

    Attributes:
        lost: requests that ended since somebody looked, because their KV could not be moved.
    """

    def __init__(
        self,
        config: ServerConfig,
        max_num_tokens: int,
        rows: ReqToTokenPool,
        allocator: TokenToKVPoolAllocator,
        kv_pool: KVPool,
        capture_ring: CaptureRing | None = None,
    ) -> None:
        self.config = config
        self.max_num_tokens = max_num_tokens
        self.max_running = min(rows.size, max_num_tokens)
        self.rows, self.allocator, self.kv_pool = rows, allocator, kv_pool
        self.capture_ring = capture_ring
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.lost: list[Request] = []
        self._leaders: list[Request] = []
        self.num_preempted = self.num_swapped = 0
        self._arrivals = 0
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()
        self._decodes_wait = False

    # -- requests in and out -------------------------------------------------------

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests, behind those that are there."""
        for request in requests:
            request.arrival = self._arrivals
            self._arrivals += 1
            self.waiting.append(request)

    @property
    def live(self) -> list[Request]:
        """All requests that have not finished."""
        return [*self.running, *self.swapped, *self.waiting]

    def has_work(self) -> bool:
        return bool(self.running or self.swapped or self.waiting)

    @property
    def waits_for_room(self) -> bool:
        """Whether a request found no room for what it captures in the step that was picked last, and some will be free."""
        return self.capture_ring is not None and self.capture_ring.refused and self.capture_ring.pieces.in_use

    def finish(self, request: Request, reason: str) -> None:
        """End a request and take back what it holds. A finished one is left as it is."""
        if request.finished:
            return
        queue = {RequestStatus.RUNNING: self.running, RequestStatus.SWAPPED: self.swapped}.get(request.status)
        (self.waiting if queue is None else queue).remove(request)
        self._release(request)
        request.host_kv = None
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._finished_ids.add(request.request_id)

    # -- a step ----------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Pick the next step's requests. Decode rows come first, then prompts.

        The step is empty where nothing can be done before tokens of launched steps have been read, or captured states have left.
        """
        while self._leaders:
            self._hand_over(self._leaders.pop(0))
        step = self._pick()
        while not step.scheduled and (self._decodes_wait or (not self.waits_for_room and self._give_back_prompts())):
            step = self._pick()
        step.finished_req_ids, self._finished_ids = self._finished_ids, set()
        step.preempted_req_ids, self._preempted_ids = self._preempted_ids, set()
        return step

    def _pick(self) -> SchedulerOutput:
        step = SchedulerOutput()
        if self.capture_ring is not None:
            self.capture_ring.begin()
        budget = self.max_num_tokens
        decoding = [request for request in self.running if request.is_decoding]
        prompts_run = len(decoding) < len(self.running)
        self._decodes_wait = self._prompts_have_this_step(len(decoding))
        if not self._decodes_wait:
            budget = self._schedule_decodes(step, budget, decoding)
        if not (self.config.schedule_policy == "prefill_first" and step.scheduled):
            if prompts_run:
                budget = self._schedule_chunks(step, budget)
            budget = self._schedule_swapped(step, budget)
            self._schedule_waiting(step, budget)
        step.scheduled.sort(key=attrgetter("decodes"), reverse=True)  # stable: decode first
        return step

    def _prompts_have_this_step(self, decoding: int) -> bool:
        """Whether the requests that decode, so many, sit this step out for prompts. Never two steps in a row."""
        if not decoding or self._decodes_wait:
            return False
        head = self._admissible_head()
        if self.config.schedule_policy == "prefill_first":
            back = any(self._can_admit(self._unit(request)) for request in self.swapped)
            return back or head is not None or any(map(_in_prompt, self.running))
        if head is None or head[0].trace is None or any(map(_in_prompt, self.running)):
            return False
        # A traced prompt needs one pass; beside many decoding requests the budget would never hold it.
        tokens = sum(request.num_tokens_left for request in head)
        return head[0].alone or tokens + decoding > self.max_num_tokens

    def _admissible_head(self) -> list[Request] | None:
        """The requests that would be admitted next, if rows and pages allow it and nobody is in host memory."""
        for request in () if self.swapped else self.waiting:
            if not self._waits_for_leader(request):
                unit = self._unit(request)
                return unit if self._can_admit(unit) and self._has_room(unit) else None
        return None

    def _schedule_decodes(self, step: SchedulerOutput, budget: int, decoding: list[Request]) -> int:
        decoding = sorted(decoding, key=attrgetter("arrival"))
        sit_out, page_size = self._without_room(decoding), self.config.page_size
        for request in decoding:
            if request.status is not RequestStatus.RUNNING or request in sit_out:
                continue
            computed = request.num_computed_tokens
            if computed < len(request.pages) * page_size or self._make_room(request, 1, step):
                step.scheduled.append(ScheduledRequest(request, 1, computed, True, True))
                budget -= 1
        return budget

    def _schedule_chunks(self, step: SchedulerOutput, budget: int) -> int:
        """Go on with prompts that earlier steps began."""
        for request in sorted((r for r in self.running if _in_prompt(r)), key=lambda r: r.arrival):
            tokens = min(request.num_tokens_left, budget)
            if tokens:
                tokens = self._take_room([(request, tokens)], whole=request.trace is not None)
            if tokens and request.status is RequestStatus.RUNNING and self._make_room(request, tokens, step):
                step.scheduled.append(ScheduledRequest.of(request, tokens))
                budget -= tokens
        return budget

    def _schedule_swapped(self, step: SchedulerOutput, budget: int) -> int:
        """Bring requests back whose KV is in host memory, the earliest first."""
        for request in sorted(self.swapped, key=lambda r: r.arrival):
            unit = [r for r in self._unit(request) if r.status is RequestStatus.SWAPPED]
            if request.status is not RequestStatus.SWAPPED or len(unit) > budget or not self._can_admit(unit):
                continue
            if not self._take_room([(member, 1) for member in unit]):
                continue
            for member in unit:
                self._admit(member, step)
                slots = self.allocator.slots_of(member.pages, 0, member.num_computed_tokens)
                if not self._moves(member, lambda m=member, s=slots: self.kv_pool.swap_in(s, m.host_kv)):
                    step.scheduled[:] = [entry for entry in step.scheduled if entry.request not in unit]
                    step.scheduled_new_reqs[:] = [r for r in step.scheduled_new_reqs if r not in unit]
                    break
                member.host_kv = None
                step.scheduled.append(ScheduledRequest.of(member, 1))
                budget -= 1
        return budget

    def _schedule_waiting(self, step: SchedulerOutput, budget: int) -> None:
        for request in list(self.waiting):
            if budget <= 0 or self.swapped:
                return
            if request.status is not RequestStatus.WAITING or self._waits_for_leader(request):
                continue
            unit = self._unit(request)
            needed = sum(r.num_tokens_left for r in unit)
            whole = request.trace is not None or len(unit) > 1
            if (whole and needed > budget) or not self._can_admit(unit) or (request.alone and step.scheduled):
                return  # first come, first served
            room = self._take_room([(r, min(r.num_tokens_left, budget)) for r in unit], whole)
            if not room:
                continue
            for member in unit:
                tokens = member.num_tokens_left if whole else room
                self._admit(member, step)
                step.scheduled.append(ScheduledRequest.of(member, tokens))
                budget -= tokens
            if request.alone:
                return

    def _can_admit(self, unit: list[Request]) -> bool:
        """Whether rows and pages are free for all tokens that the requests have so far, and the host knows the tokens.

        One that gave way a step after it sampled waits until its token has been read.
        """
        if any(r.num_pending for r in unit):
            return False
        pages = sum(self._pages_for(r.num_tokens) - len(r.pages) for r in unit)
        return len(self.running) + len(unit) <= self.max_running and pages <= self.allocator.available_pages()

    def _admit(self, request: Request, step: SchedulerOutput) -> None:
        row = self.rows.alloc()
        assert row is not None, "there are as many rows as running requests"
        request.req_pool_idx = row
        (self.swapped if request.status is RequestStatus.SWAPPED else self.waiting).remove(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._preempted_ids.discard(request.request_id)
        step.scheduled_new_reqs.append(request)
        grown = self._grow(request, request.num_tokens)
        assert grown, "_can_admit counted the pages"

    def _take_room(self, wanted: list[tuple[Request, int]], whole: bool = True) -> int:
        """`CaptureRing.take`, where any of the requests declared something."""
        if self.capture_ring is None or all(request.declared is None for request, _ in wanted):
            return wanted[0][1]
        return self.capture_ring.take(wanted, whole)

    def _without_room(self, decoding: list[Request]) -> set[Request]:
        """Those of the requests that find no room for their next position's captures, with their gangs."""
        sit_out: set[Request] = set()
        if self.capture_ring is None or all(request.declared is None for request in decoding):
            return sit_out
        seen: set[Request] = set()
        for request in decoding:
            if request not in seen:
                together = [r for r in self._unit(request) if r.is_decoding]
                seen.update(together)
                if not self._take_room([(r, 1) for r in together]):
                    sit_out.update(together)
        return sit_out

    def _has_room(self, unit: list[Request]) -> bool:
        """Whether what the requests capture finds room, if they are admitted now: of a traced prompt all, else of one position."""
        if self.capture_ring is None:
            return True
        return self.capture_ring.fits(unit, [1 if r.trace is None else r.num_tokens_left for r in unit])

    # -- what a step made ---------------------------------------------------------------

    def launched(self, step: SchedulerOutput) -> None:
        """A step is under way: the next one may be scheduled behind it, whether or not its tokens have been read."""
        for request, num_tokens, _, samples, _ in step.scheduled:
            request.num_computed_tokens += num_tokens
            request.num_pending += samples

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput, in_a_pass: bool = False) -> list[Request]:
        """Take the tokens of a step that was `launched`, and end the requests that are through. Returns those that ended.

        Steps are taken in the order in which they were launched. The rows of requests that ended since are dropped.

        Args:
            in_a_pass: the next step's pass is launched in part. It may yet write to pages that are freed here, so they are given
                to nobody before it has been launched whole.
        """
        ended = []
        for entry, token in zip(step.scheduled, output.sampled_token_ids, strict=True):
            request = entry.request
            if request.finished:
                continue
            request.num_pending -= entry.samples
            leads = token is not None and not request.output_token_ids and request.params.n > 1
            reason = self._take(request, token, output)
            if leads and in_a_pass:
                self._leaders.append(request)
            elif leads:
                self._hand_over(request)
            if reason is not None:
                self.finish(request, reason)
                ended.append(request)
        return ended

    def _take(self, request: Request, token: int | None, output: ModelRunnerOutput) -> str | None:
        """Append the token; the reason to end, or None."""
        error = output.errors.get(request.request_id)
        if error is not None:
            request.error = error
            return "error"
        if token is None:
            return None
        if request.forward_only:
            return "length"
        request.output_token_ids.append(token)
        if request.request_id in output.stopped:
            return "stop"
        if token in request.eos_token_ids and len(request.output_token_ids) >= request.params.min_tokens:
            request.stop_reason = token
            return "stop"
        return "length" if len(request.output_token_ids) >= request.max_tokens else None

    def _hand_over(self, leader: Request) -> None:
        """Give the completions that wait for this prompt its KV: they start at its last token."""
        for request in self.waiting:
            if request.leader is not leader:
                continue
            request.leader = None
            shared = leader.prompt_len - 1 if leader.pages else 0  # it may have given way since
            if shared and not request.pages and self._grow(request, shared):
                source = self.allocator.slots_of(leader.pages, 0, shared)
                self.kv_pool.copy(source, self.allocator.slots_of(request.pages, 0, shared))
                request.num_computed_tokens = shared

    @staticmethod
    def _waits_for_leader(request: Request) -> bool:
        if request.leader is not None and request.leader.finished:
            request.leader = None
        return request.leader is not None

    # -- pages ----------------------------------------------------------------------------

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def _grow(self, request: Request, tokens: int) -> bool:
        """Give the request pages for `tokens` positions in all. False: there are not as many."""
        missing = self._pages_for(tokens) - len(request.pages)
        if missing <= 0:
            return True
        pages = self.allocator.alloc_pages(missing)
        if pages is None:
            return False
        request.pages.extend(pages)
        return True

    def _make_room(self, request: Request, tokens: int, step: SchedulerOutput) -> bool:
        """Pages for `tokens` more positions, if others must give way for them. False: it was the request that did."""
        while not self._grow(request, request.num_computed_tokens + tokens):
            victim = self._victim()
            self._preempt(victim, step)
            if request.status is not RequestStatus.RUNNING:
                return False
        return True

    def _victim(self) -> Request:
        """Who gives way: prompts that only wait, then the latest plain request, then the latest with a trace."""
        holding = [r for r in self.waiting if r.pages]
        plain = [r for r in self.running if r.trace is None]
        candidates = holding or plain or self.running
        return max(candidates, key=lambda r: r.arrival)

    def _preempt(self, request: Request, step: SchedulerOutput) -> None:
        """Take a request, and those of its gang, out of the running ones."""
        for member in self._unit(request):
            if member.status is RequestStatus.WAITING:
                self._give_back(member)
            if member.status is not RequestStatus.RUNNING:
                continue
            step.scheduled[:] = [entry for entry in step.scheduled if entry.request is not member]
            if member.trace is not None and not self._move_to_host(member):
                return  # it has ended, with its gang
            self.running.remove(member)
            member.num_preemptions += 1
            self._preempted_ids.add(member.request_id)
            if member.trace is None:
                self._release(member)
                member.num_computed_tokens = 0
                member.status = RequestStatus.WAITING
                self.waiting.appendleft(member)
                self.num_preempted += 1
            else:
                self._release(member)
                member.status = RequestStatus.SWAPPED
                self.swapped.append(member)
                self.num_swapped += 1

    def _move_to_host(self, request: Request) -> bool:
        """Copy the request's KV to the host. False: there was no memory for it."""
        slots = self.allocator.slots_of(request.pages, 0, request.num_computed_tokens)
        return self._moves(request, lambda: setattr(request, "host_kv", self.kv_pool.swap_out(slots)))

    def _moves(self, request: Request, move: Callable[[], None]) -> bool:
        """Move the KV of a request that gives way, or comes back. False: there was no memory for it, and it ends, with its gang."""
        try:
            move()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        else:
            return True
        for member in self._unit(request):
            member.error = torch.OutOfMemoryError(
                f"request {request.request_id} gave way to others, and the KV of its {request.num_computed_tokens} tokens found no "
                "memory on its way to the host or back; the engine goes on. What helps: fewer requests at once "
                f"(max_running_requests, now {self.rows.size}), or a larger KV pool\n{reason}"
            )
            self.finish(member, "error")
            self.lost.append(member)
        return False

    def _give_back_prompts(self) -> bool:
        """Take pages of a prompt that only waits, unless tokens under way will change the picture. False: none has any."""
        if any(request.num_pending for request in self.live):
            return False
        return any(map(self._give_back, reversed(self.waiting)))

    def _give_back(self, request: Request) -> bool:
        """Take the pages of a prompt that only waits (it was handed another's KV). False: it has none."""
        if not request.pages:
            return False
        self._release(request)
        request.num_computed_tokens = 0
        return True

    def _release(self, request: Request) -> None:
        if request.pages:
            self.allocator.free_pages(request.pages)
            request.pages = []
        if request.req_pool_idx is not None:
            self.rows.free(request.req_pool_idx)
            request.req_pool_idx = None

    @staticmethod
    def _unit(request: Request) -> list[Request]:
        """The request, or its gang's members that have not finished."""
        return [r for r in request.gang if not r.finished] if request.gang else [request]

    def check_integrity(self) -> None:
        """Every page and row is free or one live request's. Raises AssertionError otherwise."""
        live = self.live
        self.allocator.check_integrity([page for request in live for page in request.pages])
        rows = [request.req_pool_idx for request in self.running]
        assert None not in rows and 0 not in rows and len(set(rows)) == len(rows), f"rows {rows}"
        assert self.rows.available_size() + len(rows) == self.rows.size, "rows leaked"
        for request in live:
            held = len(request.pages) * self.config.page_size
            assert request.num_computed_tokens <= held or request.status is RequestStatus.SWAPPED, request.request_id
        idle = [r for r in [*self.swapped, *self.waiting] if r.req_pool_idx is not None]
        assert not idle, f"rows held by requests that do not run: {[r.request_id for r in idle]}"


def _in_prompt(request: Request) -> bool:
    """Whether the request has tokens to compute before it decodes."""
    return request.num_tokens_left > 0 and not request.is_decoding
