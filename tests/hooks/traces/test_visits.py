"""Visit counts: which occurrence of a location a request stands at (hooks/traces/serving/visits.py)."""

from __future__ import annotations

from typing import Any

from pymllm_interp.hooks.traces.serving.visits import Location, PassVisits, VisitCounts


def at(name: str, layer: int | None = 0, below: str = "mlp", **changed: Any) -> Location:
    known: dict[str, Any] = {
        "in_model": True, "of_module": True, "of_logits": False, "layer": layer, "below": below, "module_output": None,
        "has_attention": False,
    }  # fmt: skip
    return Location(name, **{**known, **changed})


MLP = at("layers.0.mlp.output")
LAYER = at("layers.0.output", below="")
OP = at("layers.0.mlp.source.act.output", module_output="layers.0.mlp.output")


def run_pass(visits: PassVisits, *requests: VisitCounts, names: tuple[str, ...] = ("layers.0.mlp.output",)) -> None:
    visits.begin_pass()
    for counts in requests:
        counts.begin_pass()
    for name in names:
        visits.counts[name] += 1
    visits.end_pass()
    for counts in requests:
        counts.end_pass()


def test_a_request_counts_the_passes_that_it_takes_part_in_and_no_others() -> None:
    visits, always, sometimes = PassVisits(), VisitCounts(), VisitCounts()
    run_pass(visits, always, sometimes)
    run_pass(visits, always)
    visits.begin_pass()
    for counts in (always, sometimes):
        counts.begin_pass()
        assert counts.pass_index == counts.passes == counts.occurrence(MLP, visits)
    visits.counts[MLP.name] += 1
    assert (always.occurrence(MLP, visits), sometimes.occurrence(MLP, visits)) == (3, 2)
    sometimes.leave_pass()  # it had ended before: the pass does not count
    assert sometimes.occurrence(MLP, visits) == 1 and sometimes.passes == 1


def test_requests_with_equal_keys_stand_at_equal_occurrences() -> None:
    visits, a, b, late = PassVisits(), VisitCounts(), VisitCounts(), VisitCounts()
    run_pass(visits, a, b)
    visits.begin_pass()
    for counts in (a, b, late):
        counts.begin_pass()
    assert a.key(MLP, visits) == b.key(MLP, visits) != late.key(MLP, visits)
    before = a.key(MLP, visits)
    visits.event_count += 1
    assert a.key(MLP, visits) != before
    b.skip("layers.1")
    outside = at("result", None, "", in_model=False)
    assert b.key(MLP, visits) == a.key(outside, visits) == (-1, -2)


def test_a_skipped_module_is_missed_inside_but_not_at_its_own_output() -> None:
    visits, counts = PassVisits(), VisitCounts()
    visits.begin_pass()
    counts.begin_pass()
    counts.skip("layers.0")
    assert counts.skips(MLP.name) and not counts.skips(LAYER.name)
    visits.counts[MLP.name] += 1
    visits.counts[LAYER.name] += 1
    assert (counts.occurrence(MLP, visits), counts.occurrence(LAYER, visits)) == (0, 1)
    visits.end_pass()
    counts.end_pass()
    assert (counts.before_pass(MLP, {}), counts.before_pass(LAYER, {})) == (0, 1)
    counts.begin_pass()
    assert counts.pass_index == -1, "its counts are no measure for others any more"


def test_fused_parts_count_as_visited_once() -> None:
    visits = PassVisits()
    visits.begin_pass()
    assert visits.of(MLP) == visits.of(OP) == 0
    visits.fuse_part(0, "", "mlp")
    assert visits.of(MLP) == 0 and visits.of(at("layers.0.self_attn.output", below="self_attn")) == 1
    visits.fuse_layer(0, LAYER.name)
    assert (visits.of(MLP), visits.of(OP), visits.of(LAYER)) == (1, 1, 0), "the layer's own output is still to come"
    visits.begin_pass()
    assert visits.of(MLP) == 0
    visits.counts[MLP.name] += 1
    assert visits.of(OP) == 1, "its module ran without calling it"


def test_locations_that_a_pass_reaches_several_times_are_learned() -> None:
    visits, counts = PassVisits(), VisitCounts()
    run_pass(visits, counts, names=(MLP.name, MLP.name, LAYER.name))
    assert visits.per_pass == {MLP.name: 2}
    run_pass(visits, counts, names=(MLP.name,))  # a pass that failed half-way
    assert counts.before_pass(MLP, visits.per_pass) == 4 and counts.before_pass(LAYER, visits.per_pass) == 2


def test_locations_outside_the_model_are_counted_by_call() -> None:
    visits, counts, outside = PassVisits(), VisitCounts(), at("result", None, "", in_model=False)
    run_pass(visits, counts)
    counts.calls[outside.name] += 1
    assert counts.occurrence(outside, visits) == 1
