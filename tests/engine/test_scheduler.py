"""The scheduler over real pools, driven by random arrivals, ends, aborts and preemptions; a made-up model writes the KV.

The oracle is `Simulation`: it keeps what each request's KV must hold, and checks after every step what must never happen. The KV of
a position names all tokens and edits up to it, so KV of another prefix, or edited otherwise, would be noticed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import pytest
from helpers_simulation import CONTEXT, POLICIES, Simulation
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from pymllm_interp.core.request import Request, RequestStatus
from pymllm_interp.engine.scheduler import MAX_OVERTAKEN_SWAPPED
from pymllm_interp.engine.waiting_queue import MAX_OVERTAKEN


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic over pools so small that requests must give way."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_pages=st.sampled_from([3, 5, 8, 11, 14, 50]), page_size=st.sampled_from([1, 2, 4]), max_num_tokens=st.integers(1, 20),
        max_running=st.integers(1, 7), policy=st.sampled_from(POLICIES), seed=st.integers(0, 99),
        eos_rate=st.sampled_from([0.0, 0.1, 0.4]), ahead=st.booleans(), order=st.sampled_from(["fcfs", "lpm"]),
    )  # fmt: skip
    def begin(self, **kwargs) -> None:
        self.sim = Simulation(**kwargs)

    @rule(prompt_len=st.integers(1, 40), max_tokens=st.integers(1, 24))
    def plain(self, prompt_len: int, max_tokens: int) -> None:
        self.sim.add(prompt_len, max_tokens)

    @rule(
        prompt_len=st.sampled_from([9, 14, 25, 37]), max_tokens=st.integers(1, 16), shared=st.sampled_from([0, 8, 24, 40, 40]),
        edits=st.sampled_from([
            [], [(0, [2, 5, 8])], [(0, "all")], [(0, "all"), (1, 9)], [(1, 9)], [(0, "prompt")], [(1, "generated")]
        ]),
        captured=st.sampled_from([[], [], [], [0], [7, 8], [20]]), cache_salt=st.sampled_from([None, None, "a"]),
        priority=st.sampled_from([0, 0, 0, 1]), n=st.sampled_from([1, 1, 2]),
    )  # fmt: skip
    def sharing(self, prompt_len: int, max_tokens: int, **kwargs) -> None:
        self.sim.add(prompt_len, max_tokens, **kwargs)

    @rule(
        prompt_len=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        n=st.integers(2, 4),
        adapter=st.sampled_from([None, "a"]),
    )
    def family(self, prompt_len: int, max_tokens: int, n: int, adapter: str | None) -> None:
        self.sim.add(prompt_len, max_tokens, n=n, base=1, shared=prompt_len - 1, adapter=adapter)

    @rule(prompt_len=st.integers(1, 20), max_tokens=st.integers(1, 16))
    def traced(self, prompt_len: int, max_tokens: int) -> None:
        self.sim.add(prompt_len, max_tokens, traced=True)

    @rule(traffic=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=3, max_size=6))
    def burst(self, traffic: list[tuple[int, bool]]) -> None:
        for prompt_len, traced in traffic:
            self.sim.add(prompt_len, 12, traced=traced)

    @rule(prompt_len=st.integers(1, 20), alone=st.booleans())
    def single_pass(self, prompt_len: int, alone: bool) -> None:
        self.sim.add(prompt_len, 1, traced=True, forward_only=True, exclusive=alone)

    @rule(prompts=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 10)), min_size=2, max_size=3))
    def gang(self, prompts: list[tuple[int, int]]) -> None:
        self.sim.add_gang(prompts)

    @precondition(lambda self: not self.sim.scheduler.live)
    @rule()
    def edit_the_weights(self) -> None:
        self.sim.model.version += 1

    @precondition(lambda self: self.sim.scheduler.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.sim.abort(data.draw(st.sampled_from(self.sim.scheduler.live)))

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.sim.step()

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.run(self.sim.limit())
            self.seen["preempted"] += self.sim.scheduler.num_preempted
            self.seen["swapped"] += self.sim.scheduler.num_swapped
            stats = self.sim.sharing.stats()
            self.seen["evicted"] += stats["evicted_tokens"]
            for kind, tokens in stats["cached_tokens"].items():
                self.seen[kind] += tokens
            assert all(request.finish_reason in ("stop", "length", "abort") for request in self.sim.requests)


@pytest.mark.parametrize("examples", [30, pytest.param(120, marks=pytest.mark.slow)])
def test_random_traffic_keeps_every_page_row_and_promise(examples: int) -> None:
    seen = SchedulerMachine.seen
    seen.clear()
    # Shrinking a failure takes minutes: add Phase.shrink by hand.
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,  # what is seen is asked for below
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
            report_multiple_bugs=False,
            database=None,
        ),
    )
    assert min(seen[kind] for kind in ("preempted", "swapped")) > examples / 6, f"the traffic was too light: {seen}"
    assert min(seen[kind] for kind in ("evicted", "plain", "edited", "salted")) > examples / 3, (
        f"little was shared: {seen}"
    )


@pytest.mark.thin(8)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_heavy_mixed_load_preempts_swaps_and_finishes(policy: str, seed: int) -> None:
    sim = Simulation(num_pages=8, page_size=2, max_num_tokens=12, max_running=6, policy=policy, seed=seed, eos_rate=0)
    for i in range(10):
        sim.add(1 + (i * 5 + seed) % 11, 6, traced=True)
        sim.add(2, 12, traced=i % 3 != 0, n=1 if i % 3 else 3)
    sim.run(sim.limit())
    assert sim.scheduler.num_preempted > 0 and sim.scheduler.num_swapped > 0
    assert all(len(r.output_token_ids) == r.max_tokens for r in sim.requests)


def test_swapped_kv_comes_back_bit_for_bit_and_nothing_is_computed_twice() -> None:
    sim = Simulation(num_pages=6, page_size=2, max_num_tokens=16, eos_rate=0)
    requests = [sim.add(3, 9, traced=True)[0] for _ in range(3)]
    sim.run(200)
    assert sim.scheduler.num_swapped > 0 and sim.scheduler.num_preempted == 0
    for request in requests:
        shares = [e.num_tokens for step in sim.steps for e in step.scheduled if e.request_id == request.request_id]
        assert sum(shares) == request.prompt_len + 9 - 1 and shares[0] == 3


def test_a_swapped_trace_blocks_only_so_many_admissions() -> None:
    """What fits is admitted beside it; after `MAX_OVERTAKEN_SWAPPED` it comes first."""
    sim = Simulation(num_pages=20, page_size=1, max_num_tokens=16, max_running=16, eos_rate=0)
    sim.add(2, 18, traced=True)
    (large,) = sim.add(10, 10, traced=True)
    while large.status is not RequestStatus.SWAPPED:
        sim.step()
    small = [sim.add(1, 2)[0] for _ in range(MAX_OVERTAKEN_SWAPPED + 4)]
    begun = 0
    while large.status is RequestStatus.SWAPPED:
        begun = sum(bool(request.prompt_computed) for request in small)
        sim.step()
    assert 2 <= begun <= MAX_OVERTAKEN_SWAPPED
    sim.run(200)
    assert large.finish_reason == "length"


def test_plain_requests_give_way_before_traced_ones_and_the_latest_first() -> None:
    sim = Simulation(num_pages=9, page_size=1, max_num_tokens=16, eos_rate=0)
    first, traced, last = sim.add(2, 6)[0], sim.add(2, 6, traced=True)[0], sim.add(2, 6)[0]
    gave_way: list[str] = []
    while sim.scheduler.has_work():
        gave_way += sorted(sim.step().preempted_req_ids)
    assert gave_way[0] == last.request_id and traced.num_preemptions == 0
    assert first.num_preemptions <= last.num_preemptions


@pytest.mark.parametrize("seed", range(4))
def test_a_request_that_awaits_its_only_token_does_not_give_way(seed: int) -> None:
    """Prompts without generation beside requests that generate, with steps launched ahead; the simulation looks at the victims."""
    sim = Simulation(num_pages=18, page_size=2, max_num_tokens=12, seed=seed, eos_rate=0, ahead=True)
    for i in range(20):
        sim.add(2, 14)
        prompts = sim.add(3 + i % 7, 1, n=2)
        sim.step()
        sim.step()
        assert all(request.computed_once <= request.prompt_len for request in prompts)
    sim.run(sim.limit())
    assert sim.scheduler.num_preempted > 0
    assert all(r.computed_once == r.prompt_len + r.accepted_len - 1 for r in sim.requests)


def test_a_familys_prompt_is_computed_once_but_for_its_last_page() -> None:
    sim = Simulation(num_pages=30, page_size=4, max_num_tokens=8, eos_rate=0)
    family = sim.add(19, 5, n=4)
    sim.run(100)
    tokens = {r.request_id: sum(s.num_scheduled_tokens.get(r.request_id, 0) for s in sim.steps) for r in family}
    assert tokens == {r.request_id: (19 if r is family[0] else 19 - 16) + 5 - 1 for r in family}


@pytest.mark.parametrize("abort_leader_at", range(5))
def test_a_familys_other_members_finish_when_the_first_is_aborted(abort_leader_at: int) -> None:
    sim = Simulation(num_pages=12, page_size=4, max_num_tokens=4, eos_rate=0)
    family = sim.add(9, 4, n=3)
    for _ in range(abort_leader_at):
        sim.step()
    sim.abort(family[0])
    sim.run(100)
    assert [r.finish_reason for r in family] == ["abort", "length", "length"]


@pytest.mark.parametrize("policy", POLICIES)
def test_early_requests_finish_while_others_keep_arriving(policy: str) -> None:
    sim = Simulation(num_pages=16, page_size=2, max_num_tokens=10, max_running=6, policy=policy, eos_rate=0)
    early = [sim.add(6, 8, traced=i % 2 == 0)[0] for i in range(4)]
    for i in range(150):
        sim.add(1 + i % 9, 6, traced=i % 3 == 0)
        if i % 5 == 0:
            sim.add(1 + i % 7, 1, traced=True, forward_only=True, exclusive=True)
        sim.step()
        if all(request.finished for request in early):
            break
    assert all(request.finished for request in early)


@pytest.mark.parametrize("policy", POLICIES)
def test_decode_goes_on_beside_a_long_prompt(policy: str) -> None:
    sim = Simulation(num_pages=40, page_size=2, max_num_tokens=4, policy=policy, eos_rate=0)
    (short,) = sim.add(2, 12)
    sim.step()
    (long,) = sim.add(40, 2)
    steps = 0
    while not short.finished:
        sim.step()
        steps += 1
    assert steps <= (11 if policy == "mixed" else 22) and long.kv_len > 0
    sim.run(100)


def test_a_traced_prompt_gets_a_pass_beside_many_that_decode() -> None:
    sim = Simulation(num_pages=60, page_size=2, max_num_tokens=8, eos_rate=0)
    for _ in range(4):
        sim.add(1, 30)
    sim.step()
    (traced,) = sim.add(8, 2, traced=True)
    sim.step()
    sim.step()
    assert traced.kv_len >= 8
    sim.run(200)


def test_a_prompt_longer_than_a_step_runs_in_chunks_and_one_longer_than_nothing_is_left_waiting() -> None:
    sim = Simulation(num_pages=16, page_size=4, max_num_tokens=5, eos_rate=0)
    (request,) = sim.add(17, 2)
    sizes = []
    while sim.scheduler.has_work():
        sizes += [entry.num_tokens for entry in sim.step().scheduled]
    assert sizes == [5, 5, 5, 2, 1] and request.finish_reason == "length"


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_that_go_alone_do_not_stop_what_was_there_before(policy: str) -> None:
    sim = Simulation(num_pages=40, page_size=2, max_num_tokens=5, policy=policy, eos_rate=0)
    (decoding,) = sim.add(2, 10)
    sim.step()
    (chunked,) = sim.add(30, 3)
    sim.step()
    for _ in range(60):
        sim.add(4, 1, traced=True, forward_only=True, exclusive=True)
        sim.step()
    assert decoding.finished and chunked.finished
    sim.run(200)


def test_rows_and_requests_in_a_step_stay_within_their_limits() -> None:
    sim = Simulation(num_pages=60, page_size=1, max_num_tokens=64, max_running=3, eos_rate=0)
    for _ in range(7):
        sim.add(3, 4)
    sim.step()
    assert len(sim.scheduler.running) == 3 and sim.rows.available_size() == 0
    sim.run(50)


def admitted(sim: Simulation) -> list[str]:
    """Requests in the order in which they were admitted first."""
    return list(dict.fromkeys(new.request_id for step in sim.steps for new in step.scheduled_new_reqs))


def test_lower_priorities_run_first_and_give_way_last() -> None:
    sim = Simulation(num_pages=60, page_size=2, max_num_tokens=64, max_running=1, eos_rate=0)
    requests = [sim.add(3, 2, priority=priority)[0] for priority in (5, 0, 7, 0, -1)]
    sim.run(100)
    assert admitted(sim) == [requests[i].request_id for i in (4, 1, 3, 0, 2)]
    sim = Simulation(num_pages=9, page_size=1, max_num_tokens=16, eos_rate=0)
    requests = [sim.add(2, 6, priority=priority)[0] for priority in (1, 0, 0)]
    sim.run(200)
    gave_way = [request_id for step in sim.steps for request_id in sorted(step.preempted_req_ids)]
    assert gave_way[0] == requests[0].request_id


def test_the_longest_known_prefix_goes_first_where_that_is_the_policy() -> None:
    orders = {}
    for order in ("fcfs", "lpm"):
        sim = Simulation(num_pages=60, page_size=4, max_num_tokens=64, max_running=1, eos_rate=0, order=order)
        sim.add(24, 1, shared=24)
        sim.step()
        lengths = [0, 8, 20, 12]
        waiting = [sim.add(24, 2, shared=shared)[0].request_id for shared in lengths]
        sim.run(100)
        orders[order] = [lengths[waiting.index(rid)] for rid in admitted(sim)[1:]]
    assert orders == {"fcfs": [0, 8, 20, 12], "lpm": [20, 12, 8, 0]}


def test_a_request_without_a_known_prefix_is_overtaken_so_many_times_and_no_more() -> None:
    sim = Simulation(num_pages=60, page_size=4, max_num_tokens=64, max_running=1, eos_rate=0, order="lpm")
    sim.add(24, 1, shared=24)
    sim.step()
    (cold,) = sim.add(20, 1)
    for _ in range(MAX_OVERTAKEN + 40):
        sim.add(24, 1, shared=20)
        sim.add(24, 1, shared=20)
        sim.step()
        if cold.finished:
            break
    assert cold.finished and cold.num_overtaken == MAX_OVERTAKEN


def test_what_was_preempted_is_computed_from_what_the_cache_kept_and_admission_does_not_thrash() -> None:
    found = {}
    for caching in (True, False):
        sim = Simulation(num_pages=24, page_size=2, max_num_tokens=32, eos_rate=0, caching=caching)
        for _ in range(4):
            sim.add(6, 14)
        sim.run(300)
        found[caching] = sum(step.total_num_scheduled_tokens for step in sim.steps)
        assert 0 < sim.scheduler.num_preempted <= 4
    assert 4 * (6 + 14 - 1) <= found[True] < found[False]


@pytest.mark.parametrize("seed", range(20))
def test_a_failed_step_leaves_no_page_that_was_not_written(seed: int) -> None:
    """Its prompts start again, or have ended; the oracle would see pages that nothing was written to."""
    sim = Simulation(num_pages=40, page_size=2, max_num_tokens=12, eos_rate=0, seed=seed)
    rng = random.Random(seed)
    for _ in range(12):
        sim.add(rng.randrange(4, 30), 6, shared=rng.choice([0, 10, 30]), n=rng.choice([1, 2]))
    for _ in range(60):
        if rng.random() < 0.6:
            sim.step()
            continue
        step = sim.scheduler.schedule()
        sim.reported |= step.finished_req_ids
        for entry in step.scheduled:
            if rng.random() < 0.3:
                sim.scheduler.finish(sim.by_id[entry.request_id], "error")
        sim.scheduler.failed(step)
        sim.reported -= step.finished_req_ids
        sim.scheduler.check_integrity()
    sim.run(sim.limit())
    assert any(request.finish_reason == "length" for request in sim.requests)


def lose_a_page(sim: Simulation, request: Request) -> None:
    request.pages.pop()


def hold_a_page_twice(sim: Simulation, request: Request) -> None:
    request.pages.append(request.pages[0])


def hold_the_dummy_page(sim: Simulation, request: Request) -> None:
    request.pages.append(0)


def lose_a_row(sim: Simulation, request: Request) -> None:
    sim.rows.alloc()


def claim_kv_that_no_page_holds(sim: Simulation, request: Request) -> None:
    request.kv_len = CONTEXT


@pytest.mark.parametrize(
    "damage", [lose_a_page, hold_a_page_twice, hold_the_dummy_page, lose_a_row, claim_kv_that_no_page_holds]
)
def test_check_integrity_sees(damage: Callable[[Simulation, Request], None]) -> None:
    sim = Simulation(num_pages=8, eos_rate=0)
    (request,) = sim.add(5, 5)
    sim.step()
    damage(sim, request)
    with pytest.raises(AssertionError):
        sim.scheduler.check_integrity()
