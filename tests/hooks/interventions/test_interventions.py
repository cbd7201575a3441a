"""Interventions and captures: which positions they mean, what they compute, and what they refuse."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pymllm_interp.core.model_spec import FAMILIES, Family, ModelSpec
from pymllm_interp.hooks.bind import bind
from pymllm_interp.hooks.captures.spec import Capture, Project
from pymllm_interp.hooks.interventions.op import Gate, Op, apply
from pymllm_interp.hooks.interventions.projections import MAX_RANK, Ablate, Clamp
from pymllm_interp.hooks.interventions.specs import Patch, Scale, Steer
from pymllm_interp.hooks.positions import Generated, Window, ordinals_of, windows_of
from pymllm_interp.hooks.site import Site

WIDTH = 16
SITE = "resid_post.1"
MODEL = ModelSpec(
    family=FAMILIES["llama"], num_hidden_layers=4, hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
    intermediate_size=40, vocab_size=50, context_len=128, sliding_windows=(None,) * 4, rope_depends_on_length=False,
    dtype=torch.float32,
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Relative to the largest number: one rounding to the dtype."""
checked = settings(max_examples=80, deadline=None, derandomize=True)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


BIG = torch.linspace(-1e5, 1e4, WIDTH)
"""Beyond float16."""


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 0.0) -> None:
    """To one rounding of the largest number there is, or of `scale`."""
    assert actual.dtype == dtype
    info = torch.finfo(dtype)
    tolerance = CLOSE[dtype] * max(expected.double().abs().max().item(), scale) + info.smallest_normal * info.eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance)


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(whole), b.view(whole))


# Positions

PROMPT_LEN = st.integers(1, 40)
SLICE_ENDS = st.none() | st.integers(-45, 45)


@st.composite
def positions_and_meaning(draw) -> tuple[int, Any, set[int]]:
    """(prompt_len, positions, those of them below 120 by the words of the documentation)."""
    n = draw(PROMPT_LEN)
    everything = range(120)
    kind = draw(st.sampled_from(["words", "index", "list", "range", "slice", "generated"]))
    if kind == "words":
        word = draw(st.sampled_from(["all", "prompt", "generated"]))
        return n, word, {p for p in everything if word == "all" or (p < n) == (word == "prompt")}
    if kind == "index":
        index = draw(st.integers(-n, n - 1))
        return n, index, {list(range(n))[index]}
    if kind == "list":
        chosen = draw(st.sets(st.integers(0, n - 1), min_size=1))
        written = [p - n if draw(st.booleans()) else p for p in chosen]
        return n, draw(st.permutations(written)), chosen
    if kind == "range":
        first, step = draw(st.integers(0, n - 1)), draw(st.integers(1, 5))
        last = draw(st.integers(first + 1, n))
        return n, range(first, last, step), set(range(first, last, step))
    if kind == "slice":
        part = slice(draw(SLICE_ENDS), draw(SLICE_ENDS), draw(st.none() | st.integers(1, 7)))
        selected = set(list(range(n))[part])
        return (n, part, selected) if selected else (n, "prompt", set(range(n)))
    start, length, step = draw(st.integers(0, 30)), draw(st.none() | st.integers(1, 30)), draw(st.integers(1, 5))
    stop = None if length is None else start + length
    return n, Generated(start, stop, step), {p for p in everything if p - n in range(120)[start:stop:step]}


@checked
@given(positions_and_meaning())
def test_windows_hold_the_positions_that_were_asked_for(case):
    prompt_len, positions, wanted = case
    windows = windows_of(positions, prompt_len)
    shuffled = torch.randperm(120, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    ordinals = ordinals_of(windows, shuffled)
    assert set(shuffled[ordinals >= 0].tolist()) == wanted
    assert ordinals.dtype == torch.int32
    rank = {p: i for i, p in enumerate(sorted(wanted))}
    assert [int(o) for o in ordinals] == [rank.get(int(p), -1) for p in shuffled]
    assert all(a.stop is not None and a.stop <= b.start for a, b in pairwise(windows))
    sizes = [window.size for window in windows]
    assert sizes == [None] if None in sizes else sum(size or 0 for size in sizes) == len(wanted)
    for first, stop in ((0, 120), (0, prompt_len), (prompt_len, 120), (7, 60), (60, 7)):
        assert sum(window.among(first, stop) for window in windows) == len(wanted & set(range(first, stop)))


@pytest.mark.parametrize(
    ("positions", "windows"),
    [
        ("all", [Window(0)]),
        ("prompt", [Window(0, 10)]),
        ("generated", [Window(10)]),
        (-1, [Window(9, 10)]),
        (np.int64(3), [Window(3, 4)]),
        ([0, 4, 5, 6, -1], [Window(0, 5, 4), Window(5, 7), Window(9, 10)]),
        (range(-3, 0), [Window(7, 10)]),
        (slice(None, None, 4), [Window(0, 9, 4)]),
        (slice(8, 99), [Window(8, 10)]),
        (Generated(), [Window(10)]),
        (Generated(2, 5), [Window(12, 15)]),
        (Generated(step=3), [Window(10, None, 3)]),
    ],
)
def test_windows_of_a_prompt_of_ten_tokens(positions, windows):
    assert windows_of(positions, 10) == tuple(windows)


def test_the_prompts_last_token_is_prompt_although_it_yields_the_first_new_one():
    positions = torch.arange(10 + 3 - 1)  # 3 new tokens: the last one is never an input

    def selected(where):
        return positions[ordinals_of(windows_of(where, 10), positions) >= 0].tolist()

    assert selected("all") == list(range(12))
    assert selected("generated") == [10, 11]
    assert selected("prompt") == list(range(10))


def test_many_indexes_make_few_windows():
    assert len(windows_of(list(range(0, 5000, 3)), 5000)) == 1
    assert len(windows_of([i for i in range(300) if i % 10 < 8], 300)) == 30


@pytest.mark.parametrize(
    ("positions", "error"),
    [
        (10, r"positions \[10\] are beyond the prompt, which has 10 tokens; Generated"),
        (-11, r"positions \[-11\] are beyond"),
        ([0, 12, 13], r"positions \[12, 13\] are beyond"),
        (range(8, 12), r"positions \[10, 11\] are beyond"),
        ([9, -1], r"position 9 is named twice"),
        (slice(10, None), r"selects nothing of a prompt of 10 tokens"),
    ],
)
def test_positions_that_the_prompt_does_not_have_are_refused(positions, error):
    with pytest.raises(ValueError, match=error):
        windows_of(positions, 10)
    with pytest.raises(ValueError, match=r"Capture\('resid_post.1'\): .*" + error):
        bind(Capture(SITE, positions=positions), MODEL, 10)


@pytest.mark.parametrize(
    "positions",
    ["last", "", None, 1.0, True, [1.5], [False], [1, True], [], (), range(0), {1, 2}, torch.tensor([1.0]), torch.ones(2, 2).long(),
     torch.tensor(True), torch.zeros(3, dtype=torch.bool), slice(None, None, 0),
     slice(None, None, -1), slice(1.0, 2)],
)  # fmt: skip
def test_positions_that_are_not_understood_are_refused_when_the_spec_is_made(positions):
    with pytest.raises(ValueError, match=r"Scale\('resid_post.1'\): positions="):
        Scale(SITE, 2.0, positions=positions)


@pytest.mark.parametrize("arguments", [(-2,), (3, 3), (3, 2), (0, None, 0), (0.5,), (True,), (0, "4"), (0, 4, None)])
def test_generated_is_checked(arguments):
    with pytest.raises(ValueError, match=r"Generated\("):
        Generated(*arguments)


# What the ops compute

STATES = st.builds(
    lambda rows, seed, scale, dtype: (random(rows, WIDTH, seed=seed) * scale).to(dtype),
    st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([1e-2, 1.0, 100.0]), st.sampled_from(DTYPES),
)  # fmt: skip
SEEDS = st.integers(0, 10**6)


@checked
@given(STATES, SEEDS, st.floats(-8, 8))
def test_steer_adds_the_vector(state, seed, scale):
    vector = random(WIDTH, seed=seed)
    steered = apply(Steer(SITE, vector, scale=scale), state)
    close(steered, state.double() + scale * vector.double(), state.dtype)


@checked
@given(STATES, SEEDS, st.floats(0.1, 8))
def test_preserve_keeps_the_norm_and_the_direction_of_the_sum(state, seed, scale):
    vector = random(WIDTH, seed=seed)
    steered = apply(Steer(SITE, vector, scale=scale, norm="preserve"), state)
    before, total = state.double(), state.double() + scale * vector.double()
    close(steered.double().norm(dim=1).to(state.dtype), before.norm(dim=1), state.dtype)
    close(steered, total * before.norm(dim=1, keepdim=True) / total.norm(dim=1, keepdim=True), state.dtype)


@checked
@given(STATES, SEEDS, st.floats(-8, 8), st.floats(1e-3, 1e3))
def test_match_adds_a_share_of_the_states_norm_whatever_the_vectors_length(state, seed, scale, length):
    vector = random(WIDTH, seed=seed)
    steered = apply(Steer(SITE, vector * length, scale=scale, norm="match"), state)
    x = state.double()
    close(steered, x + scale * x.norm(dim=1, keepdim=True) * vector.double() / vector.double().norm(), state.dtype)


def test_preserve_leaves_a_sum_of_zero_at_zero():
    state = random(2, WIDTH)
    assert not apply(Steer(SITE, -state[0], norm="preserve"), state)[0].any()


@checked
@given(STATES, SEEDS, st.integers(1, MAX_RANK))
def test_ablate_removes_the_subspace_and_nothing_else_and_twice_is_once(state, seed, rank):
    directions = random(rank, WIDTH, seed=seed)
    op = Ablate(SITE, directions)
    ablated = apply(op, state)
    d = directions.double()
    largest = state.double().norm(dim=1).max().item()
    close(ablated, state.double() - state.double() @ torch.linalg.pinv(d) @ d, state.dtype, scale=largest)
    close(apply(op, ablated), ablated, state.dtype, scale=largest)
    left = (ablated.double() @ (d / d.norm(dim=1, keepdim=True)).T).abs().max().item()
    assert left <= 4 * CLOSE[state.dtype] * largest


def test_ablate_depends_on_the_subspace_alone():
    state, (a, b) = random(5, WIDTH), random(2, WIDTH, seed=1)
    first = apply(Ablate(SITE, [a, b]), state)
    for directions in (torch.stack([b * 100, a * 1e-3]), [a + b, a - b]):
        torch.testing.assert_close(apply(Ablate(SITE, directions), state), first)


def test_the_basis_is_orthonormal():
    basis = Ablate(SITE, random(MAX_RANK, 64) * 50).basis
    torch.testing.assert_close(basis @ basis.T, torch.eye(MAX_RANK), rtol=0, atol=1e-6)


@checked
@given(STATES, SEEDS, st.floats(-3, 3), st.floats(0, 3))
def test_clamp_keeps_the_projection_within_its_bounds_and_the_rest_as_it_is(state, seed, low, span):
    direction, high = random(WIDTH, seed=seed), low + span
    unit = direction.double() / direction.double().norm()
    x = state.double()
    projection = x @ unit
    clamped = apply(Clamp(SITE, direction * 7, low, high), state)
    wanted = projection.clamp(low, high)
    largest = max(x.norm(dim=1).max().item(), abs(low), abs(high))
    slack = 4 * CLOSE[state.dtype] * largest
    close(clamped, x + (wanted - projection)[:, None] * unit, state.dtype, scale=largest)
    after = clamped.double() @ unit
    assert (after >= low - slack).all() and (after <= high + slack).all()
    within = (projection > low + slack) & (projection < high - slack)
    assert same_bits(clamped[within], state[within])


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamp_keeps_every_bit_of_a_state_within_its_bounds(dtype):
    state = awkward(dtype).nan_to_num(0, 1, 1)
    for direction in (random(WIDTH).abs(), -random(WIDTH).abs()):  # adding +0.0 to -0.0 would change its sign
        assert same_bits(apply(Clamp(SITE, direction, -1e30, 1e30), state), state)


@pytest.mark.parametrize(("low", "high"), [(None, -1.0), (1.0, None), (0.5, 0.5)])
def test_clamp_with_one_bound_and_with_a_fixed_value(low, high):
    state, direction = random(50, WIDTH), torch.eye(WIDTH)[3]
    after = apply(Clamp(SITE, direction, low=low, high=high), state)
    torch.testing.assert_close(after[:, 3], state[:, 3].clamp(low, high))
    assert torch.equal(after[:, :3], state[:, :3]) and torch.equal(after[:, 4:], state[:, 4:])


def test_clamp_to_zero_is_ablate():
    state, direction = random(8, WIDTH), random(WIDTH, seed=1)
    torch.testing.assert_close(apply(Clamp(SITE, direction, 0, 0), state), apply(Ablate(SITE, direction), state))


@checked
@given(STATES, st.floats(-4, 4))
def test_scale_multiplies(state, factor):
    close(apply(Scale(SITE, factor), state), state.double() * factor, state.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_patch_puts_the_values_there(dtype):
    state, values = random(3, WIDTH, dtype=dtype), random(3, WIDTH, seed=1)
    assert torch.equal(apply(Patch(SITE, values), state), values.to(dtype))
    assert torch.equal(apply(Patch(SITE, values[0]), state), values[0].to(dtype).expand(3, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_op_rounds_once_at_its_end(dtype):
    """In float32 from the state as it is: no intermediate result is rounded to the state's dtype."""
    state, v = random(64, WIDTH, dtype=dtype), random(WIDTH, seed=1)
    x, u = state.float(), Ablate(SITE, v).basis[0]
    assert same_bits(apply(Steer(SITE, v, 3.0), state), (x + 3.0 * v).to(dtype))
    preserved = x + v
    preserved = preserved * (x.norm(dim=1, keepdim=True) / preserved.norm(dim=1, keepdim=True))
    assert same_bits(apply(Steer(SITE, v, norm="preserve"), state), preserved.to(dtype))
    assert same_bits(apply(Scale(SITE, 1.1), state), (x * 1.1).to(dtype))
    assert same_bits(apply(Ablate(SITE, v), state), (x - (x * u).sum(1, keepdim=True) * u).to(dtype))


OPS = {
    "steer": lambda **kw: Steer(SITE, random(WIDTH, seed=5), scale=3.0, **kw),
    "preserve": lambda **kw: Steer(SITE, random(WIDTH, seed=5), norm="preserve", **kw),
    "match": lambda **kw: Steer(SITE, random(WIDTH, seed=5), norm="match", **kw),
    "ablate": lambda **kw: Ablate(SITE, random(4, WIDTH, seed=5), **kw),
    "clamp": lambda **kw: Clamp(SITE, random(WIDTH, seed=5), low=20.0, **kw),
    "scale": lambda **kw: Scale(SITE, 0.5, **kw),
    "patch": lambda **kw: Patch(SITE, random(WIDTH, seed=5), **kw),
}


def awkward(dtype: torch.dtype) -> Tensor:
    """Rows whose bits an arithmetic no-op would change: negative zeros, NaN, Inf, the smallest numbers."""
    state = random(6, WIDTH, dtype=dtype)
    state[0, :4] = -0.0
    state[1, 0], state[2, 1] = math.nan, math.inf
    state[3] = torch.finfo(dtype).smallest_normal / 2
    return state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "op",
    [
        Steer(SITE, random(WIDTH), scale=0),
        Steer(SITE, random(WIDTH), scale=0, norm="preserve"),
        Steer(SITE, random(WIDTH), scale=0.0, norm="match"),
        Scale(SITE, 1),
    ],
)
def test_the_identity_keeps_every_bit(op, dtype):
    assert op.identity
    assert same_bits(apply(op, awkward(dtype)), awkward(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_a_gate_that_never_fires_and_rows_left_out_keep_every_bit(name, dtype):
    state, probe = awkward(dtype), random(WIDTH, seed=9)
    assert same_bits(apply(OPS[name](when=Gate(probe, 1e30)), state.nan_to_num(0, 1, 1)), state.nan_to_num(0, 1, 1))
    op = OPS[name]()
    assert not op.identity
    ordinals = torch.tensor([-1, 0, -1, 1, -1, 2])
    changed = apply(op, state, ordinals)
    assert same_bits(changed[ordinals < 0], state[ordinals < 0])
    assert same_bits(changed[ordinals >= 0], apply(op, state)[ordinals >= 0])
    assert not torch.equal(changed[5], state[5])


@pytest.mark.parametrize("name", OPS)
def test_a_gate_looks_at_the_state_before_its_op(name):
    state, probe = random(40, WIDTH), random(WIDTH, seed=9)
    fires = state @ probe > 0.5
    assert 0 < fires.sum() < 40
    gated = apply(OPS[name](when=Gate(probe, 0.5)), state)
    assert torch.equal(gated, torch.where(fires[:, None], apply(OPS[name](), state), state))


def test_a_gate_on_a_state_that_is_not_a_number_does_not_fire():
    state = torch.full((1, WIDTH), math.nan)
    assert same_bits(apply(Patch(SITE, random(WIDTH), when=Gate(random(WIDTH), -1e30)), state), state)


def test_order_matters():
    state, v = random(4, WIDTH), random(WIDTH, seed=1)
    steer, ablate = Steer(SITE, v, 5.0), Ablate(SITE, v)
    torch.testing.assert_close(apply(ablate, apply(steer, state)), apply(ablate, state))
    assert (apply(steer, apply(ablate, state)) - apply(ablate, state)).norm(dim=1).min() > 1


@checked
@given(STATES, st.permutations(sorted(OPS)), SEEDS)
def test_ops_act_on_each_row_by_itself(state, names, seed):
    """A row's bits do not depend on the rows beside it."""

    def run(rows: Tensor) -> Tensor:
        for name in names[:3]:
            rows = apply(OPS[name](when=Gate(random(WIDTH, seed=seed), -5.0)), rows)
        return rows

    together = run(state)
    for i in range(len(state)):
        assert same_bits(run(state[i : i + 1])[0], together[i])


@pytest.mark.parametrize("width", [64, 1000, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_its_batch_at_any_width(width, dtype):
    v, probe = random(width, seed=1), random(width, seed=2)
    ops = [
        Ablate(SITE, random(5, width, seed=3), when=Gate(probe, -1.0)),
        Clamp(SITE, v, -0.1, 0.1),
        Steer(SITE, v, norm="preserve"),
        Steer(SITE, v, norm="match", when=Gate(v, 0.0)),
    ]
    state = random(37, width, dtype=dtype)
    for op in ops:
        together = apply(op, state)
        assert same_bits(torch.cat([apply(op, row[None]) for row in state]), together)
        assert same_bits(torch.cat([apply(op, part) for part in state.split(9)]), together)


# Against a model


def test_bind_makes_one_for_each_site():
    spec = Steer("resid_post.{0,-1}", random(WIDTH), positions=Generated(1))
    assert [(bound.site, bound.windows) for bound in bind(spec, MODEL, 7)] == [
        (Site("resid_post", 0), (Window(8),)),
        (Site("resid_post", 3), (Window(8),)),
    ]
    assert [str(bound.site) for bound in bind(Capture("layers_output[*]"), MODEL, 7)] == [
        f"resid_post.{i}" for i in range(4)
    ]


def test_a_patch_puts_each_row_where_it_was_written_for():
    state, values = random(10, WIDTH), random(3, WIDTH, seed=1)
    [bound] = bind(Patch(SITE, values, positions=[-1, 2, 5]), MODEL, 10)
    positions = torch.tensor([5, 9, 0, 2])  # rows of a step come in no special order
    patched = apply(bound.spec, state[positions], ordinals_of(bound.windows, positions))
    assert torch.equal(patched, torch.stack([values[2], values[0], state[0], values[1]]))


@pytest.mark.parametrize("positions", ["prompt", slice(None, None, 4), slice(-3, None), Generated(0, 3), range(4, 7)])
def test_a_patch_over_positions_that_have_an_end_takes_as_many_rows(positions):
    count = 10 if positions == "prompt" else 3
    [bound] = bind(Patch(SITE, random(count, WIDTH), positions=positions), MODEL, 10)
    assert sum(window.size or 0 for window in bound.windows) == count
    with pytest.raises(ValueError, match=rf"values has {count + 1} rows for {count} positions"):
        bind(Patch(SITE, random(count + 1, WIDTH), positions=positions), MODEL, 10)


@pytest.mark.parametrize("positions", ["all", "generated", Generated(2)])
def test_a_patch_without_end_takes_one_row(positions):
    assert bind(Patch(SITE, random(WIDTH), positions=positions), MODEL, 10)
    with pytest.raises(ValueError, match=r"4 rows for positions without end, which take one \[width\]"):
        bind(Patch(SITE, random(4, WIDTH), positions=positions), MODEL, 10)


@pytest.mark.parametrize(
    ("kind", "width", "setting"),
    [
        ("resid_post.0", WIDTH, "hidden_size"),
        ("attn_in.0", WIDTH, "hidden_size"),
        ("q.0", 24, r"num_attention_heads \* head_dim"),
        ("k.0", 12, r"num_key_value_heads \* head_dim"),
        ("z.0", 24, r"num_attention_heads \* head_dim"),
        ("mlp_act.0", 40, "intermediate_size"),
        ("logits", 50, "vocab_size"),
    ],
)
def test_a_vector_of_another_width_is_refused_with_the_setting_that_it_should_have(kind, width, setting):
    def specs(n: int):
        v = random(n)
        yield from [
            Steer(kind, v),
            Ablate(kind, v),
            Clamp(kind, v, 0),
            Patch(kind, v),
            Capture(kind, reduce=Project(v)),
        ]
        yield Scale(kind, 2, when=Gate(v))

    for spec in specs(width):
        assert len(bind(spec, MODEL, 5)) == 1
    for spec in specs(width + 1):
        with pytest.raises(ValueError, match=rf"has {width + 1} values; at \w+ the model has {width} \({setting}\)"):
            bind(spec, MODEL, 5)


def test_the_message_names_the_spec_and_the_part():
    with pytest.raises(ValueError, match=r"Scale\('q.1'\): when.probe has 3 values"):
        bind(Scale("blocks.1.attn.hook_q", 2, when=Gate(random(3))), MODEL, 5)
    with pytest.raises(ValueError, match=r"Capture\('resid_post.\*'\): reduce.directions has 3 values"):
        bind(Capture("resid_post.*", reduce=Project(random(2, 3))), MODEL, 5)


@pytest.mark.parametrize("scale", [1e30, -1e30])
def test_a_norm_that_float32_cannot_take_is_refused_and_the_longest_that_it_can_is_kept(scale: float) -> None:
    with pytest.raises(ValueError, match=r"\|scale \* vector\| of 1e\+18 at most, not 1.73e\+30"):
        Steer(SITE, torch.ones(3), scale=scale, norm="preserve")
    state = torch.tensor([[3.0, 0.0, 4.0]])
    longest = apply(
        Steer(SITE, torch.tensor([0.0, 1.0, 0.0]), scale=math.copysign(1e18, scale), norm="preserve"), state
    )
    assert torch.allclose(longest, torch.tensor([[0.0, math.copysign(5.0, scale), 0.0]]))


def test_a_layer_and_a_kind_that_the_model_does_not_have_are_refused():
    with pytest.raises(
        ValueError, match=r"Scale\('resid_post.4'\): .*no layer 4; the model has 4 \(num_hidden_layers\)"
    ):
        bind(Scale("resid_post.4", 2), MODEL, 5)
    parallel = Family(name="parallel", missing=frozenset({"resid_mid"}))
    with pytest.raises(ValueError, match=r"Capture\('resid_mid.\*'\): parallel models have no site 'resid_mid'"):
        bind(Capture("resid_mid.*"), dataclasses.replace(MODEL, family=parallel), 5)


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (Steer(SITE, BIG), r"scale \* vector reaches 1e\+05"),
        (Steer(SITE, BIG / 10, scale=-10), r"scale \* vector reaches 1e\+05"),
        (Clamp(SITE, BIG, low=-1e5), r"low reaches 1e\+05"),
        (Clamp(SITE, BIG, high=1e5), r"high reaches 1e\+05"),
        (Patch(SITE, BIG, positions=[0]), r"values reaches 1e\+05"),
    ],
)
def test_values_that_the_models_dtype_cannot_hold_are_refused(spec: Op, what: str) -> None:
    assert bind(spec, MODEL, 5)
    half = dataclasses.replace(MODEL, dtype=torch.float16)
    with pytest.raises(ValueError, match=rf"{what}, which torch.float16, the model's dtype, cannot hold.*6.55e\+04"):
        bind(spec, half, 5)


@pytest.mark.parametrize(
    "spec",
    [
        Steer(SITE, BIG, scale=0.1),
        Steer(SITE, BIG, norm="match"),
        Steer(SITE, BIG, norm="preserve"),
        Ablate(SITE, BIG),
        Clamp(SITE, BIG, low=0),
        Scale(SITE, 2, when=Gate(BIG, 0)),
        Capture(SITE, reduce=Project(BIG)),
    ],
)
def test_directions_and_probes_are_float32_whatever_the_models_dtype_is(spec: Op | Capture) -> None:
    assert bind(spec, dataclasses.replace(MODEL, dtype=torch.float16), 5)


def test_specs_fit_every_family():
    for name, config in CONFIGS.items():
        info = ModelSpec.of(config(), torch.bfloat16)
        for kind in set(info.family.points) - {"experts"}:  # which are only captured
            site = kind if kind in ("embed", "final_norm", "logits") else f"{kind}.*"
            assert bind(Steer(site, random(info.width(kind))), info, 5), name


# What is refused when it is made


BAD_VECTORS = [
    ([1.0, math.nan], "holds NaN"),
    ([1.0, math.inf], "holds Inf"),
    (torch.tensor([1e300, 0], dtype=torch.float64), "beyond float32"),
    (torch.tensor([1, 2]), r"dtype torch.int64 cannot be converted"),
    (torch.tensor([True]), r"dtype torch.bool cannot be converted"),
    (torch.tensor([1j]), r"dtype torch.complex64 cannot be converted"),
    (torch.zeros(2, 2, 2, 2), r"the shape is \[2, 2, 2, 2\]"),
    (torch.tensor(1.0), r"the shape is \[\]"),
    (torch.zeros(0), r"not empty"),
    (torch.zeros(4, device="meta"), "'meta' has no values"),
    (torch.ones(4).to_sparse(), r"the layout is torch.sparse_coo; give a dense tensor"),
    ({"happy": 1}, "dict is not a tensor of numbers"),
    (None, "NoneType is not a tensor of numbers"),
    ([[1.0], [1.0, 2.0]], "list is not a tensor of numbers"),
    ([torch.zeros(2), torch.zeros(3)], "list is not a tensor of numbers"),
]
TAKES_A_VECTOR = {
    "Steer(.*vector": lambda v: Steer(SITE, v),
    "Ablate(.*directions": lambda v: Ablate(SITE, v),
    "Clamp(.*direction": lambda v: Clamp(SITE, v, 0.0),
    "Patch(.*values": lambda v: Patch(SITE, v),
    "Gate: probe": lambda v: Gate(v),
    "Project: directions": lambda v: Project(v),
}


@pytest.mark.parametrize(("vector", "error"), BAD_VECTORS)
@pytest.mark.parametrize("who", TAKES_A_VECTOR)
def test_a_vector_that_is_none_is_refused_by_everything_that_takes_one(who, vector, error):
    with pytest.raises(ValueError, match=who.replace("(", r"\(") + ".*" + error):
        TAKES_A_VECTOR[who](vector)


@pytest.mark.parametrize(
    "vector",
    [[1, 2, 3], (1.0, 2.0, 3.0), np.array([1.0, 2.0, 3.0]), torch.tensor([1.0, 2, 3], dtype=torch.float64),
     torch.tensor([1.0, 2, 3], dtype=torch.bfloat16), torch.tensor([1.0, 2, 3], requires_grad=True)],
)  # fmt: skip
def test_a_vector_comes_in_any_form_and_is_kept_as_a_float32_copy(vector):
    kept = Steer(SITE, vector).vector
    assert kept.dtype == torch.float32 and not kept.requires_grad and kept.tolist() == [1, 2, 3]


def test_the_callers_tensor_may_change_afterwards():
    vector = random(WIDTH)
    steer = Steer(SITE, vector)
    before = steer.fingerprint, steer.vector.clone()
    vector.zero_()
    assert torch.equal(steer.vector, before[1]) and Steer(SITE, steer.vector).fingerprint == before[0]


def test_ablate_refuses_more_than_its_rank_and_dependent_directions():
    assert Ablate(SITE, random(MAX_RANK, 40)).basis.shape == (MAX_RANK, 40)
    with pytest.raises(ValueError, match=r"17 directions; at most 16 \(intervention.MAX_RANK\)"):
        Ablate(SITE, random(17, 40))
    a, b = random(2, WIDTH)
    with pytest.raises(ValueError, match=r"the 3 directions are dependent, they span 2 dimensions"):
        Ablate(SITE, [a, b, 1e-4 * (a - 2 * b)])
    with pytest.raises(ValueError, match=r"the 2 directions are dependent, they span 1 dimension;"):
        Ablate(SITE, random(2, 1))
    with pytest.raises(ValueError, match=r"direction 1 is zero"):
        Ablate(SITE, [a, b * 0])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Steer("resid_pots.1", [1.0]), r"Steer\('resid_pots.1'\): unknown site.*did you mean resid_post.1"),
        (lambda: Capture("attn_pattern.1"), r"Capture\('attn_pattern.1'\): .*reads attention patterns"),
        (lambda: Steer(SITE, [1.0], scale=math.nan), r"scale=nan; expected a finite number"),
        (lambda: Steer(SITE, [1.0], scale=-math.inf), r"scale=-inf; expected a finite number"),
        (lambda: Steer(SITE, [1.0], scale=1e39), r"scale=1e\+39; expected .*float32"),
        (lambda: Steer(SITE, [1.0], scale="2"), r"scale='2'; expected a number"),
        (lambda: Steer(SITE, [1.0], scale=True), r"scale=True; expected a number"),
        (lambda: Steer(SITE, [1.0], norm="keep"), r"norm='keep'; expected 'none', 'preserve' or 'match'"),
        (lambda: Steer(SITE, [0.0], norm="match"), r"vector is zero and has no direction"),
        (lambda: Steer(SITE, [[[1.0, 2.0]]]), r"the shape is \[1, 1, 2\]; expected 1-dimensional.*take \[0\] of it"),
        (lambda: Patch(SITE, torch.ones(1, 3, 2)), r"the shape is \[1, 3, 2\].*take \[0\] of it"),
        (lambda: Scale(SITE, 2.0, positions="last"), r"Generated\(...\); the last one of the prompt is -1"),
        (
            lambda: Scale(SITE, 2.0, positions=torch.tensor([[1]])),
            r"positions=Tensor\(shape=\[1, 1\], dtype=torch.int64\): expected",
        ),
        (lambda: Steer(SITE, [1.0], when="always"), r"when='always'; expected a Gate"),
        (lambda: Capture(SITE, dtype="int8"), r"dtype='int8'; expected one of"),
        (lambda: Capture(SITE, dtype=torch.int32), r"dtype=torch.int32; expected one of"),
        (lambda: Capture(SITE, reduce="sum"), r"reduce='sum'; expected 'mean', 'max', 'last', a Project"),
        (lambda: Project([[1.0], [2.0]], top_k=3), r"top_k=3; expected from 1 to 2"),
        (lambda: Project([1.0], top_k=0), r"top_k=0; expected from 1 to 1"),
        (lambda: Clamp(SITE, [1.0]), r"expected a bound"),
        (lambda: Clamp(SITE, [1.0], 2, 1), r"low=2.0; expected at most high \(1.0\)"),
        (lambda: Clamp(SITE, [1.0], low=math.nan), r"low=nan; expected a finite number"),
        (lambda: Clamp(SITE, [1.0], high=math.inf), r"high=inf; expected a finite number"),
        (lambda: Clamp(SITE, [0.0, 0.0], low=0), r"direction is zero"),
        (lambda: Scale(SITE, math.inf), r"factor=inf; expected a finite number"),
        (lambda: Scale(SITE, None), r"factor=None; expected a number"),
        (lambda: Gate([1.0], math.nan), r"Gate: threshold=nan; expected a finite number"),
    ],
)
def test_what_makes_no_sense_is_refused_when_it_is_made(make, error):
    with pytest.raises(ValueError, match=error):
        make()


def test_a_spec_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Steer(SITE, [1.0]).scale = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_specs_with_the_same_content_are_equal_and_hash_alike():
    v = random(WIDTH)
    first = Steer("blocks.1.hook_resid_post", v, scale=2, positions=[1, 2], when=Gate(v))
    second = Steer(Site("resid_post", 1), v.double(), scale=2.0, positions=(1, 2), when=Gate(v.clone()))
    assert first == second and len({first, second}) == 1
    others: list[Any] = [
        Steer(SITE, v, scale=2, positions=[1, 3], when=Gate(v)),
        Steer(SITE, v, scale=2, positions=[1, 2], when=Gate(-v)),
        Steer(SITE, v, scale=2, positions=[1, 2]),
        Steer("resid_post.2", v, scale=2, positions=[1, 2], when=Gate(v)),
        Steer(SITE, v + 1, scale=2, positions=[1, 2], when=Gate(v)),
        Patch(SITE, v, positions=[1, 2], when=Gate(v)),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 7
    assert "tensor" not in repr(Steer(SITE, v)) and "resid_post.1" in repr(Steer(SITE, v))
