"""A scheduler over real pools with a made-up model, checked after every step."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from typing import Any

import torch
from conftest import CONFIGS
from helpers_state import AdaptedState

from pymllm_interp import Capture, Steer
from pymllm_interp.config import ServerConfig
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.core.request import Request, RequestStatus
from pymllm_interp.core.sampling_params import SamplingParams
from pymllm_interp.core.step import ModelRunnerOutput, SchedulerOutput
from pymllm_interp.engine.kv_manager import KVManager
from pymllm_interp.engine.prefix_sharing import PrefixSharing
from pymllm_interp.engine.scheduler import Scheduler
from pymllm_interp.hooks.bind import DeclaredLimits
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.declared import Declared
from pymllm_interp.mem_cache.memory_pool import KVPool, ReqToTokenPool, TokenToKVPoolAllocator
from pymllm_interp.mem_cache.radix_cache import RadixCache

CONTEXT = 64


EOS = 0


POLICIES = ("mixed", "prefill_first")


MODEL = ModelSpec.of(CONFIGS["llama"](), torch.float32)


LAYERS = MODEL.num_hidden_layers


LIMITS = DeclaredLimits(8, 64, 1 << 24)


VECTORS = [torch.full((MODEL.hidden_size,), float(i + 1)) for i in range(2)]


BASES = [[1 + (7 * i * i + 3 * i) % 990 for i in range(base, base + CONTEXT)] for base in (0, 500)]
"""Prompts share their beginnings."""


Edit = tuple[int, int | str | list[int]]
"""(which of the vectors is added, positions)."""


def touches(edit: Edit, position: int, prompt_len: int) -> bool:
    positions = edit[1]
    if isinstance(positions, str):
        return positions == "all" or (position >= prompt_len) == (positions == "generated")
    return position in ([positions] if isinstance(positions, int) else positions)


class Simulation:
    """A scheduler with real pools, and a model that writes `kv_of` at each position and draws tokens from a seeded source."""

    def __init__(
        self, *, num_pages: int, page_size: int = 4, max_num_tokens: int = 16, max_running: int = 8,
        policy: str = "mixed", seed: int = 0, eos_rate: float = 0.1, ahead: bool = False, order: str = "fcfs",
        caching: bool = True,
    ) -> None:  # fmt: skip
        self.num_pages, self.page_size, self.max_num_tokens = num_pages, page_size, max_num_tokens
        self.rows = ReqToTokenPool(max_running, CONTEXT, "cpu")
        self.allocator = TokenToKVPoolAllocator(num_pages * page_size, page_size)
        self.kv_pool = KVPool(LAYERS, num_pages * page_size, 1, 3, torch.float32, "cpu", page_size)
        config = ServerConfig(
            max_running_requests=max_running, page_size=page_size, prefill_policy=policy, queue_order=order
        )
        self.model: Any = AdaptedState()
        self.sharing = PrefixSharing(RadixCache(page_size), self.model if caching else None)
        self.kv = KVManager(self.rows, self.allocator, self.kv_pool, self.sharing)
        self.scheduler = Scheduler(config, max_num_tokens, LAYERS, self.kv)
        self.policy, self.eos_rate = policy, eos_rate
        self.random = random.Random(seed)
        self.ids = itertools.count()
        self.requests: list[Request] = []
        self.by_id: dict[str, Request] = {}
        self.steps: list[SchedulerOutput] = []
        self.reported: set[str] = set()
        self.computed: dict[str, int] = {}
        self.computed_once: dict[str, int] = {}
        self.sat_out: dict[str, int] = {}
        self.ahead = ahead  # a step is scheduled before the tokens of the one before it are read
        self.in_flight: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
        self.drawn: dict[str, list[int]] = defaultdict(list)  # what the model sampled, read or not
        self.edits: dict[str, list[Edit]] = {}
        self.captured: dict[str, set[int]] = {}  # positions that are asked for, and were not computed yet

    # -- arrivals ------------------------------------------------------------------

    def add(self, prompt_len: int, max_tokens: int, *, n: int = 1, traced: bool = False, **kwargs) -> list[Request]:
        """Queue a prompt's `n` requests; its lengths are cut to what a `RequestFactory` lets through."""
        capacity = min(CONTEXT, self.num_pages * self.page_size)
        prompt_len = min(prompt_len, capacity, self.max_num_tokens if traced else capacity)
        requests = self.make(prompt_len, min(max_tokens, capacity - prompt_len + 1), n=n, traced=traced, **kwargs)
        self.queue(requests)
        return requests

    def make(
        self, prompt_len: int, max_tokens: int, *, n: int = 1, traced: bool = False, base: int = 0, shared: int = 0,
        edits: list[Edit] | None = None, captured: list[int] | None = None, depth: int | None = None, **kwargs,
    ) -> list[Request]:  # fmt: skip
        """Args:
        shared: tokens at the prompt's beginning that are those of `BASES[base]`.
        depth: layers that the requests need; they only read, and capture positions at the last of these. None: they generate.
        """
        number = next(self.ids)
        prompt = BASES[base][: min(shared, prompt_len)]
        prompt += [self.random.randrange(1, 1000) for _ in range(prompt_len - len(prompt))]
        edits = [
            e
            for e in edits or []
            if isinstance(e[1], str) or max([e[1]] if isinstance(e[1], int) else e[1]) < prompt_len
        ]
        captured = sorted({position for position in captured or [] if position < prompt_len})
        requests: list[Request] = []
        for index in range(n):
            request = Request(
                f"{number}-{index}", prompt, SamplingParams(max_tokens=max_tokens if depth is None else 0, n=n), max_tokens,
                seed=number, sample_index=index, eos_token_ids=frozenset([EOS]), trace=object() if traced else None, **kwargs,
            )  # fmt: skip
            if edits or captured:
                specs = [Steer("resid_post.0", VECTORS[vector], positions=positions) for vector, positions in edits]
                site = f"resid_post.{1 if depth is None else depth - 1}"
                asked = [Capture(site, positions=captured)] if captured else []
                longest = prompt_len + max_tokens - 1
                declared = Declared(BoundHooks.of(specs, MODEL, prompt_len, LIMITS, asked, longest, prompt_len - 1))
                request.declared = declared.demands()
                assert request.depth == depth
            self.edits[request.request_id] = edits
            self.captured[request.request_id] = set(captured)
            requests.append(request)
        return requests

    def queue(self, requests: list[Request]) -> None:
        self.requests += requests
        self.by_id |= {request.request_id: request for request in requests}
        self.scheduler.add(requests)
        self.scheduler.check_integrity()

    def add_gang(self, prompts: list[tuple[int, int]]) -> list[Request]:
        """Queue traced requests that move together; those past what one step and the pool hold are left out."""
        gang: list[Request] = []
        tokens = pages = 0
        for prompt_len, max_tokens in prompts:
            tokens += prompt_len
            pages += -(-(prompt_len + max_tokens - 1) // self.page_size)
            fits = tokens <= self.max_num_tokens and pages <= self.num_pages and len(gang) < self.scheduler.max_running
            if not fits or prompt_len + max_tokens > CONTEXT:
                break
            gang += self.make(prompt_len, max_tokens, traced=True)
        for request in gang:
            request.gang = gang
        self.queue(gang)
        return gang

    def abort(self, request: Request) -> None:
        self.scheduler.finish(request, "abort")
        self.scheduler.check_integrity()

    # -- a step ----------------------------------------------------------------------

    def step(self) -> SchedulerOutput:
        scheduler = self.scheduler
        decoding = [r for r in scheduler.running if r.is_decoding]
        awaiting = [r for r in scheduler.running if r.num_pending and r.num_generated >= r.max_tokens]
        awaiting += [r for r in scheduler.running if not r.generates and r.kv_len == r.prompt_len]
        step = scheduler.schedule()
        assert all(r.status is RequestStatus.RUNNING for r in awaiting), "preempted, and all of it is computed"
        scheduler.check_integrity()
        self.check_step(step)
        self.check_sat_out(decoding, step)
        parts = [(self.by_id[e.request_id], e.start, e.start + e.num_tokens) for e in step.scheduled]
        for part in parts:  # as in a layer: the KV of all rows is written before the attention of any row reads it
            self.write_kv(*part, step.depth)
        for request, start, stop in parts:
            self.check_kv(request, stop)
            self.captured[request.request_id] -= set(range(start, stop))
        tokens = [[self.draw(self.by_id[entry.request_id])] if entry.samples else [] for entry in step.scheduled]
        scheduler.launched(step)
        before, self.in_flight = self.in_flight, (step, ModelRunnerOutput(sampled_token_ids=tokens))
        waits = before is not None or scheduler.waits_for_room
        assert step.scheduled or waits or not scheduler.has_work(), "nothing runs, but there is work"
        if before is not None:
            self.collect(*before)
        if (
            not self.ahead
            or not step.scheduled
            or any(self.by_id[entry.request_id].needs_tokens for entry in step.scheduled)
        ):
            self.collect(*self.in_flight)
            self.in_flight = None
        self.steps.append(step)
        return step

    def collect(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        ended = self.scheduler.update(step, output)
        self.scheduler.check_integrity()
        assert all(request.finished and not request.pages and request.host_kv is None for request in ended)
        for request in self.scheduler.live:
            self.check_progress(request)
            assert 0 <= request.num_pending <= self.ahead, (
                f"{request.num_pending} unread tokens of {request.request_id}"
            )
            if request.status is not RequestStatus.SWAPPED:
                self.check_kv(request, request.kv_len)

    def draw(self, request: Request) -> int:
        token = EOS if self.random.random() < self.eos_rate else self.random.randrange(1, 1000)
        self.drawn[request.request_id].append(token)
        return token

    def run(self, limit: int) -> None:
        """Step until nothing is left. A step may not come back empty while there is work."""
        for _ in range(limit):
            if not self.scheduler.has_work():
                break
            self.step()
        left = [(r.request_id, r.status, r.kv_len, r.num_tokens) for r in self.scheduler.live]
        assert not left, f"after {limit} steps there are {left}"
        assert self.kv.num_available_pages == self.num_pages and self.rows.available_size() == self.rows.size
        for request in self.requests:
            missing = self.captured[request.request_id]
            assert request.finish_reason == "abort" or not missing, f"{request.request_id} never computed {missing}"

    # -- what must hold -----------------------------------------------------------------

    def check_step(self, step: SchedulerOutput) -> None:
        requests = [self.by_id[entry.request_id] for entry in step.scheduled]
        names = [request.request_id for request in requests]
        assert len(set(names)) == len(names), f"scheduled twice: {names}"
        assert step.total_num_scheduled_tokens <= self.max_num_tokens
        assert len(requests) <= len(self.scheduler.running) <= self.scheduler.max_running
        assert {new.request_id for new in step.scheduled_new_reqs} <= set(names)
        for new in step.scheduled_new_reqs:
            request = self.by_id[new.request_id]
            assert (new.row, new.token_ids) == (request.req_pool_idx, request.all_token_ids)
        phases = [request.is_decoding for request in requests]
        assert phases == sorted(phases, reverse=True), f"decode rows come first: {phases}"
        for rid, row, num_tokens, start, _, decodes, *_ in step.scheduled:
            request = self.by_id[rid]
            assert row == request.req_pool_idx
            assert request.status is RequestStatus.RUNNING and request.req_pool_idx
            assert decodes or not request.num_pending, "a prompt is laid out on the host, which must know its tokens"
            assert start == request.kv_len and 1 <= num_tokens <= request.num_tokens - start
            assert len(request.pages) * self.page_size >= start + num_tokens
            assert 0 not in self.allocator.slots_of(request.pages, 0, start + num_tokens) and 0 not in request.pages
            if request.trace is not None:
                whole = num_tokens == request.num_tokens - start
                assert whole, f"traced {request.request_id} got {num_tokens} of its tokens from {start}"
            assert request.trace is None or not request.num_shared_pages, f"traced {rid} shares pages"
            assert not request.exclusive or len(requests) == 1, f"{request.request_id} does not have its step alone"
            if request.gang:
                missing = [r.request_id for r in request.gang if not r.finished and r not in requests]
                assert not missing, f"{request.request_id} runs without {missing} of its gang"
        assert not step.finished_req_ids & self.reported, "reported as finished twice"
        self.reported |= step.finished_req_ids
        new = {request.request_id for request in step.scheduled_new_reqs}
        assert not step.preempted_req_ids & new, "a resumed request would be dropped from the runner's table"

    def check_sat_out(self, decoding: list[Request], step: SchedulerOutput) -> None:
        """A request that decodes is left out of at most one step in a row, unless it is preempted."""
        scheduled = {entry.request_id for entry in step.scheduled}
        sat_out = self.sat_out
        self.sat_out = {
            r.request_id: sat_out.get(r.request_id, 0) + 1
            for r in decoding
            if r.status is RequestStatus.RUNNING and r.request_id not in scheduled
        }
        assert max(self.sat_out.values(), default=0) <= 1, f"decode starves: {self.sat_out}"

    def check_progress(self, request: Request) -> None:
        before, now = self.computed.get(request.request_id, 0), request.kv_len
        self.computed[request.request_id] = now
        once = self.computed_once.get(request.request_id, 0)
        assert request.computed_once >= once, (
            "a preemption lost positions that results report, as of an abort while it waits"
        )
        self.computed_once[request.request_id] = request.computed_once
        captures = None if request.declared is None else request.declared.captures
        if now < before and captures is not None:
            assert captures.next_position >= before, "states that left before a preemption get room in the ring again"
        if request.trace is not None:
            assert now >= before, f"traced {request.request_id} went back from {before} to {now}"
            assert request.num_preemptions == 0 or now, "a traced prompt was given up"

    def kv_of(self, request: Request, start: int, stop: int) -> torch.Tensor:
        """[LAYERS, 2, tokens, 1, 3]: KV that names its layer, its position, and the tokens and edits up to it."""
        tokens = (request.prompt_token_ids + self.drawn[request.request_id])[:stop]
        known, rows = hash((request.cache_salt, request.adapter, self.model.version)), []
        for position, token in enumerate(tokens):
            acting = [e[0] for e in self.edits[request.request_id] if touches(e, position, request.prompt_len)]
            known = hash((known, token, tuple(acting)))
            rows.append([float(known % 10_007), float(known // 10_007 % 10_009), float(position)])
        return (
            torch.tensor(rows[start:]).view(1, 1, -1, 1, 3) + torch.arange(2 * LAYERS).view(-1, 2, 1, 1, 1) * 20_000.0
        )

    def write_kv(self, request: Request, start: int, stop: int, depth: int | None) -> None:
        """Write the KV of the layers that the pass runs. What the slots had before stays in the others."""
        slots = torch.tensor(self.allocator.slots_of(request.pages, start, stop))
        values = self.kv_of(request, start, stop)
        for layer in range(LAYERS)[:depth]:
            self.kv_pool.set_kv(layer, slots, values[layer, 0], values[layer, 1])

    def check_kv(self, request: Request, stop: int) -> None:
        """The pool holds the request's own KV at its first `stop` positions, bit for bit, of the layers that it needs."""
        if stop:
            found = self.kv_pool.swap_out(self.allocator.slots_of(request.pages, 0, stop)).kv
            wanted = self.kv_of(request, 0, stop)
            assert torch.equal(found[: request.depth], wanted[: request.depth]), f"KV of {request.request_id} changed"

    def limit(self) -> int:
        """Steps that all live requests need at most, with each computed again a few times."""
        return 40 + 6 * sum(r.prompt_len + r.max_tokens for r in self.scheduler.live)
