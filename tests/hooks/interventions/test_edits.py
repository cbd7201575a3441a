"""Declared ops inside the pass: the tables' kernel and the host's functions against `intervention.apply`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_declared import copy_records
from helpers_paths import ROOT

from pymllm_interp.client.prompts import for_each_prompt
from pymllm_interp.core.model_spec import ModelSpec, final_norm_site, num_sites, site_index
from pymllm_interp.hooks.bind import DeclaredLimits, bind
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.captures.egress.result_memory import FreshMemory
from pymllm_interp.hooks.captures.rows import CapturedRows
from pymllm_interp.hooks.captures.spec import Capture, Project
from pymllm_interp.hooks.declared import Declared
from pymllm_interp.hooks.interventions.device_tables import DeviceTables
from pymllm_interp.hooks.interventions.host_ops import RequestRows, host_ops
from pymllm_interp.hooks.interventions.op import Gate, Op, apply
from pymllm_interp.hooks.interventions.projections import Ablate, Clamp
from pymllm_interp.hooks.interventions.specs import Patch, Scale, Steer
from pymllm_interp.hooks.interventions.vector_pool import VectorPool
from pymllm_interp.hooks.positions import Generated, ordinals_of
from pymllm_interp.hooks.site import Site
from pymllm_interp.hooks.vectors.files import content_hash
from pymllm_interp.layers.edits.table import TableOps
from pymllm_interp.layers.norm import RMSNorm, add_rms_norm

pytest.importorskip("triton", reason="the kernels' tests need the package triton")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [pytest.mark.gpu] if CUDA else []
INFO = ModelSpec.of(CONFIGS["llama"](), torch.float32)
WIDTH, LAYERS = INFO.hidden_size, INFO.num_hidden_layers
LIMITS = DeclaredLimits(max_interventions_per_site=6, max_intervention_vectors=300, max_capture_bytes=1 << 20)
PROMPT = 7
SITES = [
    "embed",
    "resid_pre.0",
    "resid_pre.1",
    "attn_out.0",
    "resid_mid.1",
    "mlp_out.2",
    "resid_post.0",
    "resid_post.2",
    "final_norm",
]


def vector(rng: random.Random, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (WIDTH,)), generator=torch.Generator().manual_seed(rng.randrange(10**9)))


def random_op(rng: random.Random, site: str) -> Op:
    positions: Any = rng.choice(
        ["all", "prompt", "generated", [0], [-1, 2], slice(1, None, 2), Generated(1, 6, 2), range(2, 5)]
    )
    when = rng.choice([None, None, Gate(vector(rng), rng.choice([-1e9, 0.0, 1e9]))])
    kind = rng.randrange(6)
    if kind == 0:
        return Ablate(site, vector(rng, rng.choice([1, 2, 16]), WIDTH), positions=positions, when=when)
    if kind == 1:
        return Clamp(site, vector(rng), low=rng.choice([None, -0.1]), high=0.2, positions=positions, when=when)
    if kind == 2:
        return Scale(site, rng.choice([0.0, 0.5, -2.0]), positions=positions, when=when)
    if kind == 3:
        places = rng.sample(range(PROMPT), 3)
        values = vector(rng, 3, WIDTH) if rng.random() < 0.7 else vector(rng)
        return Patch(site, values, positions=places, when=when)
    norm: Any = rng.choice(["none", "preserve", "match"])
    if rng.random() < 0.5:
        places = rng.sample(range(PROMPT), 3)
        return Steer(site, vector(rng, 3, WIDTH), scale=-0.7, positions=places, norm=norm, when=when)
    return Steer(site, vector(rng), scale=rng.choice([0.3, -4.0]), positions=positions, norm=norm, when=when)


def declared_of(specs: list[Op], captures: list[Capture] | None = None) -> Declared:
    return Declared(BoundHooks.of(specs, INFO, PROMPT, LIMITS, captures or [], longest=PROMPT + 8))


def expected(declared: Declared, site: int, state: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    for op in declared.hooks.ops.get(site, ()):
        state = apply(op.spec, state, ordinals_of(op.windows, positions))
    return state


def pool_of(info: ModelSpec = INFO) -> VectorPool:
    return VectorPool(LIMITS.max_intervention_vectors, info.hidden_size)


def tables_of(
    requests: list[Declared | None], rows: list[int], positions: list[int], blocks: list[tuple[int, int]] | None = None,
    dtype: torch.dtype = torch.float32, info: ModelSpec = INFO, pool: VectorPool | None = None,
) -> tuple[DeviceTables, TableOps]:  # fmt: skip
    """Tables with each request in the row that is its place + 1, and a pass over token rows of the requests `rows`, each with
    its (start, stop) in the ring."""
    edited = torch.zeros(len(requests) + 1, dtype=torch.int32, device=DEVICE)
    ring = torch.full((4000,), torch.nan, dtype=dtype, device=DEVICE)
    tables, pool = DeviceTables(edited, info, LIMITS, ring), pool or pool_of(info)
    for row, declared in enumerate(requests, start=1):
        tables.set_row(row, declared, () if declared is None else pool.acquire(declared))
    tables.apply_staged_writes()
    marked = [declared is not None and bool(declared.hooks.ops or declared.captures) for declared in requests]
    assert edited.tolist() == [0, *map(int, marked)]
    # A row whose request has no ops may be named or not.
    owners = torch.tensor([row + 1 if row >= 0 else -1 for row in rows], device=DEVICE)
    placed = torch.tensor(blocks or [(0, 0)] * len(rows), device=DEVICE).T.contiguous()
    return tables, TableOps(tables.tables, owners, torch.tensor(positions, device=DEVICE), placed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_each_rows_ops_are_its_own_requests_at_its_own_position(seed: int, dtype: torch.dtype) -> None:
    """A mixed batch: prompts and generated rows of requests with many ops, with one, with none, and rows of padding."""
    rng = random.Random(seed)
    requests: list[Declared | None] = [
        None if i == 2 else declared_of([random_op(rng, rng.choice(SITES)) for _ in range(rng.choice([1, 6]))])
        for i in range(5)
    ]
    rows = [0] * PROMPT + [1] + [2] * 3 + [3, -1, 4, 4]
    positions = [*range(PROMPT), 9, 0, 1, 2, 7, 0, 11, 12]
    _, edits = tables_of(requests, rows, positions)
    h, delta = (vector(rng, 1, len(rows), WIDTH).to(DEVICE, dtype) for _ in range(2))
    weight = vector(rng).to(DEVICE, dtype)
    at = torch.tensor(positions)

    def reference(site: int, state: torch.Tensor) -> torch.Tensor:
        parts = []
        for i, row in enumerate(rows):
            declared = requests[row] if row >= 0 else None
            part = state[0, i : i + 1].cpu()
            parts.append(part if declared is None else expected(declared, site, part, at[i : i + 1]))
        return torch.cat(parts)[None].to(DEVICE)

    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    for site in range(num_sites(LAYERS)):
        torch.testing.assert_close(edits.at(site, h), reference(site, h), **tolerance)
    for place in range(2 * LAYERS + 1):
        summed = reference(2 * place + 1, h + reference(2 * place, delta))
        normed = add_rms_norm(summed, None, weight, 1e-5)[1]
        if place == 2 * LAYERS:
            normed = reference(final_norm_site(LAYERS), normed)
        found = edits.add_norm(place, h, delta, norm_of(weight))
        torch.testing.assert_close(found[0], summed, **tolerance)
        torch.testing.assert_close(found[1], normed, **tolerance)


@torch.no_grad()
def test_rows_without_ops_and_ops_that_change_nothing_keep_their_bits() -> None:
    rng = random.Random(5)
    h, delta, weight = vector(rng, 1, 3, WIDTH), vector(rng, 1, 3, WIDTH), vector(rng)
    h[..., ::5] = delta[..., ::5] = -0.0
    never = Steer("resid_post.0", vector(rng), when=Gate(vector(rng), 1e30))
    nothing = [Steer("resid_mid.0", vector(rng), scale=0), Scale("mlp_out.1", 1)]
    nothing += [Clamp("resid_post.1", vector(rng), low=-1e30, high=1e30)]
    elsewhere = Steer("resid_post.1", vector(rng), positions=[3])
    requests = [declared_of([never, *nothing]), declared_of([elsewhere]), None]
    _, edits = tables_of(requests, [0, 1, 2], [4, 4, 4])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, d, w = (tensor.to(DEVICE, dtype) for tensor in (h, delta, weight))
        plain, bits = plain_add_norm(x, d, w), torch.int32 if dtype == torch.float32 else torch.int16
        for place in range(2 * LAYERS + 1):
            for found, wanted in zip(edits.add_norm(place, x, d, norm_of(w)), plain, strict=True):
                assert torch.equal(found.view(bits), wanted.view(bits)), (place, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_a_row_that_captures_has_the_states_that_go_on_in_its_block_and_nobody_elses_row_is_stored(
    fused: bool, dtype: torch.dtype
) -> None:
    """After the ops, at the site's offset; as far as the block goes, and nothing where there is none."""
    rng = random.Random(3)
    everywhere = [
        Capture(site) for site in ("embed", "attn_out.*", "resid_mid.*", "mlp_out.*", "resid_post.*", "final_norm")
    ]
    some = [Capture("resid_post.0"), Capture("mlp_out.2", positions=[-1])]
    requests = [
        declared_of([random_op(rng, site) for site in SITES], everywhere),
        declared_of([Scale("resid_post.0", 2.0)]),
        declared_of([], some),
        None,
    ]
    sites = final_norm_site(LAYERS) + 1
    rows, positions = [0, 2, 1, 2, 3, -1, 0], [4, 5, 3, PROMPT - 1, 2, 0, 9]
    whole = sites * WIDTH
    blocks = [
        (16, 16 + whole),
        (1504, 1504 + WIDTH),
        (40, 96),
        (1600, 1600 + 2 * WIDTH),
        (96, 104),
        (0, 0),
        (2000, 2000),
    ]
    _, edits = tables_of(requests, rows, positions, blocks, dtype)
    tensors = {site: vector(rng, 1, len(rows), WIDTH).to(DEVICE, dtype) for site in range(sites)}
    weight = vector(rng).to(DEVICE, dtype)
    went_on: dict[int, torch.Tensor] = {}
    for place in range(2 * LAYERS + 1):
        h, delta = tensors[2 * place + 1], tensors[2 * place]
        if fused:
            went_on[2 * place] = edits.at(2 * place, delta)
            went_on[2 * place + 1], normed = edits.add_norm(place, h, delta, norm_of(weight))
        else:
            for site, value in ((2 * place, delta), (2 * place + 1, h)):
                went_on[site] = value
                edits.capture(site, value)
    if fused:
        went_on[sites - 1] = normed
    else:
        edits.capture(sites - 1, tensors[sites - 1])
        went_on[sites - 1] = tensors[sites - 1]
    expected = torch.full_like(edits.tables.ring, torch.nan)
    for row, (owner, (start, stop)) in enumerate(zip(rows, blocks, strict=True)):
        captures = None if owner < 0 or requests[owner] is None else requests[owner].captures
        for site, offset in {} if captures is None else captures.layout.offsets.items():
            if start + offset < stop:
                expected[start + offset : start + offset + WIDTH] = went_on[site][0, row]
    assert int((~expected.isnan()).sum()) == (sites - 1 + 1 + 2) * WIDTH  # nothing is added at place 0
    assert torch.equal(edits.tables.ring.nan_to_num(-7), expected.nan_to_num(-7))


PROJECTED = {
    rank: Project(torch.randn(rank, WIDTH, generator=torch.Generator().manual_seed(rank))) for rank in (1, 3, 16)
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_a_row_leaves_as_dot_products_as_its_conversion_or_whole(fused: bool, dtype: torch.dtype) -> None:
    """Each site of each row its own way, and what is made of it is what functions make of the states."""
    rng, info = random.Random(8), replace(INFO, dtype=dtype)
    specs = [
        [
            Capture("attn_out.*", reduce=PROJECTED[3]),
            Capture("resid_post.*"),
            Capture("mlp_out.{0,1}", dtype=torch.float16),
            Capture("mlp_out.2", dtype=torch.bfloat16),
            Capture("resid_mid.*", reduce=PROJECTED[16]),
            Capture("final_norm", reduce=PROJECTED[1]),
        ],
        [
            Capture("attn_out.*", dtype=torch.float16),
            Capture("mlp_out.*", reduce=PROJECTED[1]),
            Capture("resid_post.*", reduce=PROJECTED[3]),
            Capture("resid_mid.*", dtype=torch.bfloat16),
            Capture("final_norm"),
        ],
        [
            Capture("attn_out.*"),
            Capture("final_norm", dtype=torch.bfloat16),
            Capture("mlp_out.*", reduce=PROJECTED[16]),
            Capture("resid_mid.*", reduce=PROJECTED[3]),
            Capture("embed", reduce=PROJECTED[16]),
        ],
    ]
    requests = [
        Declared(
            BoundHooks.of([random_op(rng, site) for site in SITES[:3]], info, PROMPT, LIMITS, some, longest=PROMPT + 8)
        )
        for some in specs
    ]
    rows, positions = [0, 1, 2, 0, -1, 1], [0, 0, 0, 1, 0, 1]
    blocks, end = [], 8
    for owner, position in zip(rows, positions, strict=True):
        captures = requests[owner].captures
        size = int(captures.record_sizes(position, 1)[0]) if captures is not None and owner >= 0 else 0
        blocks.append((end, end + size))
        end += size + 8
    _, edits = tables_of([*requests], rows, positions, blocks, dtype, info)
    sites = final_norm_site(LAYERS) + 1
    tensors = [vector(rng, 1, len(rows), WIDTH).to(DEVICE, dtype) for _ in range(sites)]
    weight = vector(rng).to(DEVICE, dtype)
    went_on: list[torch.Tensor] = list(tensors)
    for place in range(2 * LAYERS + 1 if fused else 0):
        delta, h = tensors[2 * place : 2 * place + 2]
        went_on[2 * place] = edits.at(2 * place, delta)
        went_on[2 * place + 1], went_on[-1] = edits.add_norm(place, h, delta, norm_of(weight))
    for site in range(0 if fused else sites):
        edits.capture(site, tensors[site])
    ring = edits.tables.ring.cpu()
    assert_left(ring, requests, rows, positions, blocks, lambda site, row: went_on[site][0, row])
    outside = torch.ones(len(ring), dtype=torch.bool)
    for start, stop in blocks:
        outside[start:stop] = False
    assert ring[outside].isnan().all(), "nobody else's memory"


@pytest.mark.parametrize(("family", "kind"), [("llama", "k"), ("qwen3", "z")])
@torch.no_grad()
def test_dot_products_of_states_that_are_narrower_or_wider_than_the_streams(family: str, kind: str) -> None:
    rng, info = random.Random(4), ModelSpec.of(CONFIGS[family](), torch.float32)
    width, hidden = info.width(kind), info.hidden_size
    assert width < hidden if kind == "k" else width > hidden
    capture = Capture(f"{kind}.*", reduce=Project(vector(rng, 3, width)))
    other = Steer("resid_post.0", vector(rng, hidden))
    requests = [Declared(BoundHooks.of([other], info, PROMPT, LIMITS, [capture], longest=PROMPT))]
    blocks = [(8, 8 + 16), (32, 32 + 16)]
    pool = pool_of(info)
    _, edits = tables_of([*requests], [0, 0], [0, 1], blocks, info=info, pool=pool)
    assert pool.used == 1 + 3 * -(-width // hidden)
    assert requests[0].captures is not None
    states = {site: vector(rng, 1, 2, width).to(DEVICE) for site in requests[0].captures.layout.offsets}
    for site, value in states.items():
        edits.capture(site, value)
    assert_left(edits.tables.ring.cpu(), requests, [0, 0], [0, 1], blocks, lambda site, row: states[site][0, row])


def assert_left(
    ring: torch.Tensor, requests: list[Declared], rows: list[int], positions: list[int], blocks: list[tuple[int, int]],
    state_of: Callable[[int, int], torch.Tensor],
) -> None:  # fmt: skip
    """What is copied out of the ring is what functions take of the states."""
    for number, declared in enumerate(requests):
        assert declared.captures is not None
        captures, found = declared.captures, {}
        mine = [row for row, owner in enumerate(rows) if owner == number]
        captures.prepare(FreshMemory())
        for row in mine:
            copy_records(captures, ring[slice(*blocks[row])], positions[row], captures.record_sizes(positions[row], 1))
        captures.mark_copied(len(mine))
        found = {site: rows.clone() for site, rows in captures.result([1] * len(mine)).items()}
        by_function = CapturedRows(captures.layout)
        for site in captures.layout.by_site:
            by_function.put(0, site, torch.stack([state_of(site, row) for row in mine]))
        wanted = by_function.result([1] * len(mine))
        assert found.keys() == wanted.keys()
        for site, value in wanted.items():
            assert len(value) == len(mine) and found[site].dtype is value.dtype
            # Triton's interpreter cuts bfloat16s off where a device rounds them.
            tolerance = 8e-3 if value.dtype is torch.bfloat16 and not CUDA else 1e-5
            torch.testing.assert_close(found[site], value, rtol=tolerance, atol=1e-5, msg=site)


def norm_of(weight: torch.Tensor) -> RMSNorm:
    norm = RMSNorm(len(weight), 1e-5, weight.dtype, str(weight.device))
    norm.weight.copy_(weight)
    return norm


def plain_add_norm(h: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from pymllm_interp.kernels import triton_kernels

    return triton_kernels.add_rms_norm(h, delta, weight, 1e-5)


@torch.no_grad()
def test_gate_fires_are_counted_by_request_and_op() -> None:
    probe = torch.zeros(WIDTH)
    probe[0] = 1
    gated = Steer("resid_post.1", torch.ones(WIDTH), when=Gate(probe, 0.5))
    tables, edits = tables_of([declared_of([gated]), declared_of([gated])], [0, 0, 0, 1], [0, 1, 2, 0])
    state = torch.zeros(1, 4, WIDTH, device=DEVICE)
    state[0, 1, 0] = state[0, 2, 0] = 1
    for _ in range(2):
        edits.at(site_index(bind(gated, INFO, PROMPT)[0].site, LAYERS), state)
    fires, last, _ = tables.tables.fires.unbind(-1)
    assert last[1].max() == 2 and last[2].max() == 0
    assert fires.sum() == 4 and fires[1].sum() == 4 and fires[2].sum() == 0


@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_the_hosts_functions_are_the_same_ops(seed: int) -> None:
    rng = random.Random(seed + 50)
    requests = [declared_of([random_op(rng, site) for site in SITES]), None, declared_of([random_op(rng, SITES[seed])])]
    spans = [(0, range(PROMPT)), (PROMPT, range(3, 4)), (PROMPT + 1, range(8, 9))]
    edits = host_ops(
        [RequestRows(r, *span, 0, 0) for r, span in zip(requests, spans, strict=True) if r is not None], LAYERS
    )
    assert edits is not None
    state = vector(rng, 1, PROMPT + 2, WIDTH)
    before = state.clone()
    for site in range(num_sites(LAYERS)):
        wanted = state.clone()
        for request, (start, positions) in zip(requests, spans, strict=True):
            if request is not None:
                rows = slice(start, start + len(positions))
                wanted[0, rows] = expected(request, site, wanted[0, rows], torch.tensor(positions))
        assert torch.equal(edits.at(site, state), wanted)
        assert torch.equal(state, before), "what goes in is left as it is"
    generated = declared_of([Scale("embed", 2.0, positions="generated")])
    assert host_ops([RequestRows(generated, 0, range(3), 0, 0)], LAYERS) is None, "a step that none of its ops acts in"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_requests_side_by_side_have_each_its_own_ops_in_their_order(seed: int, dtype: torch.dtype) -> None:
    """What several add is one addition: of neighbours, where nothing else of theirs comes between, and to no row beside."""
    rng = random.Random(seed + 90)
    site = "resid_post.0"

    def op() -> Op:
        if rng.random() < 0.3:
            return random_op(rng, site)
        positions: Any = rng.choice(["all", "all", "prompt", slice(1, None, 2), [0, 3]])
        return Steer(site, vector(rng), scale=rng.choice([0.3, -4.0]), positions=positions)

    shares, first = [], 0
    for size in (1, 1, 3, 1, PROMPT, 1, 2, 1):
        request = declared_of([op() for _ in range(rng.choice([0, 1, 1, 2, 4]))])
        start = rng.randrange(3)
        shares.append(RequestRows(request, first, range(start, start + size), 0, 0))
        first += size
    edits = host_ops(shares, LAYERS)
    assert edits is not None
    state = vector(rng, 1, first, WIDTH).to(dtype)
    state[0, :, ::5] = -0.0
    place = site_index(Site.parse(site), LAYERS)
    wanted = state.clone()
    for request, start, positions, *_ in shares:
        rows = slice(start, start + len(positions))
        wanted[0, rows] = expected(request, place, wanted[0, rows], torch.tensor(positions))
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(edits.at(place, state).view(bits), wanted.view(bits))
    for start, stop in ((0, shares[3].start), (shares[3].start, first)):
        part = edits.rows_from(start, stop).at(place, state[:, start:stop])
        assert torch.equal(part.view(bits), wanted[:, start:stop].view(bits))


def test_a_row_that_is_given_to_another_request_has_that_ones_ops() -> None:
    rng = random.Random(9)
    steer = declared_of([Steer("resid_post.0", vector(rng), scale=2)])
    tables, edits = tables_of([steer], [0], [0])
    site = site_index(next(iter(steer.hooks)).site, LAYERS)
    state = vector(rng, 1, 1, WIDTH).to(DEVICE)
    assert not torch.equal(edits.at(site, state), state)
    tables.set_row(1, None)
    tables.apply_staged_writes()
    assert torch.equal(edits.at(site, state), state)


# -- the pool of vectors ---------------------------------------------------------------------------


def test_thousands_of_requests_with_vectors_of_their_own_leave_the_pool_as_it_was() -> None:
    pool, rng = VectorPool(64, WIDTH), random.Random(0)
    live: list[Declared] = []
    for _ in range(2_000):
        rank = rng.choice([1, 1, 3])
        spec = (
            Ablate("resid_post.0", torch.randn(rank, WIDTH)) if rank > 1 else Steer("resid_post.0", torch.randn(WIDTH))
        )
        live.append(declared_of([spec]))
        pool.acquire(live[-1])
        if len(live) > 12:
            pool.release(live.pop(rng.randrange(len(live))))
    assert 0 < pool.used <= 39
    for declared in live:
        pool.release(declared)
        pool.release(declared)
    assert pool.used == 0 and pool._free == [(0, 64)] and not pool._held


def test_equal_vectors_share_rows_until_the_last_request_gives_them_back() -> None:
    pool = VectorPool(4, WIDTH)
    shared = [declared_of([Steer(f"resid_post.{i % 3}", torch.full((WIDTH,), 2.0), scale=i + 1)]) for i in range(20)]
    for declared in shared:
        pool.acquire(declared)
    assert pool.used == 1
    for declared in shared[:-1]:
        pool.release(declared)
    assert pool.used == 1
    pool.release(shared[-1])
    assert pool.used == 0


@torch.no_grad()
def test_a_row_that_changed_hands_before_it_was_written_has_its_last_vector() -> None:
    tables, _ = tables_of([None] * 2, [], [])
    pool = pool_of()
    first, second, third = (
        declared_of([Ablate("resid_post.0", torch.randn(2, WIDTH)), Steer("resid_post.1", torch.randn(WIDTH))])
        for _ in range(3)
    )
    for row, declared in enumerate((first, second), start=1):
        tables.set_row(row, declared, pool.acquire(declared))
    pool.release(first)
    tables.set_row(1, third, pool.acquire(third))
    assert sorted(third.vectors.values()) == [0, 2], "rows of the first, which were not written yet"
    assert sorted(tables._staged_vectors) == [0, 1, 2, 3, 4, 5], "each once: the order of writes is not defined on CUDA"
    tables.apply_staged_writes()
    for declared in (second, third):
        for op in declared.hooks:
            for tensor in op.spec.vectors:
                assert torch.equal(tables.pool_view(declared, tensor).cpu(), tensor)


@torch.no_grad()
def test_vectors_are_written_once_and_again_where_others_were_written_meanwhile() -> None:
    """Rows change hands: as they were, and as parts of vectors that begin elsewhere."""
    tables, _ = tables_of([None] * 2, [], [])
    pool, large = pool_of(), declared_of([Ablate("resid_post.0", torch.randn(3, WIDTH))])
    rows = pool.acquire(large)
    for row in (1, 2):
        tables.set_row(row, large, rows)
        assert len(tables._staged_vectors) == (3 if row == 1 else 0), "the second request shares what the first wrote"
        tables.apply_staged_writes()
    pool.release(large)
    small = [declared_of([Steer("resid_post.0", torch.randn(WIDTH))]) for _ in range(3)]
    held = [pool.acquire(declared) for declared in small]
    tables.set_row(1, small[2], held[2])
    tables.apply_staged_writes()
    for declared in small:
        pool.release(declared)
    tables.set_row(2, large, pool.acquire(large))
    tables.apply_staged_writes()
    for op in large.hooks:
        for tensor in op.spec.vectors:
            assert torch.equal(tables.pool_view(large, tensor).cpu(), tensor), "the last row was another's meanwhile"


def test_numbers_are_hashed_whatever_holds_them() -> None:
    vector = torch.randn(WIDTH)
    before = content_hash(vector)
    assert before == content_hash(vector.clone().requires_grad_()) == content_hash(torch.stack([vector] * 2, 1)[:, 0])
    vector.numpy()[0] = 1e6
    assert content_hash(vector) != before
    assert content_hash(vector.bfloat16()) != content_hash(vector) and content_hash(torch.tensor(1.0))
    with torch.inference_mode():
        assert content_hash(torch.zeros(WIDTH)) == content_hash(torch.zeros(WIDTH))


def test_specs_are_hashed_from_several_threads_at_once() -> None:
    """One thread asks for what a spec does, another for the fingerprint of a gate, which is part of it."""
    ended: list[int] = []

    def ask(name: str) -> None:
        for i in range(300):
            probe = torch.full((WIDTH,), float(i))
            getattr(Steer("resid_post.1", probe, when=Gate(probe, 1.0)), name)
        ended.append(1)

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in ("effect", "fingerprint") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert len(ended) == 4, "they wait for each other"


@torch.no_grad()
def test_equal_numbers_in_another_shape_have_rows_of_their_own() -> None:
    """Zeros for some positions at `k` are as many numbers as one row of zeros at `resid_post`, and take more rows."""
    width = INFO.width("k")
    places = list(range(WIDTH // width))
    requests = [
        declared_of([Patch("resid_post.0", torch.zeros(WIDTH))]),
        declared_of([Steer("resid_post.0", torch.full((WIDTH,), 5.0))]),
        declared_of([Patch("k.0", torch.zeros(len(places), width), positions=places)]),
    ]
    assert len(places) > 1 and len(places) * width == WIDTH
    pool = pool_of()
    _, edits = tables_of([*requests], [2] * len(places), places, pool=pool)
    assert pool.used == 1 + 1 + len(places)
    (site,) = requests[2].hooks.ops
    state = torch.ones(1, len(places), width, device=DEVICE)
    assert not edits.at(site, state).any(), "its own zeros, and nobody else's vector"


def test_directions_of_captures_are_in_the_pool_while_their_request_is() -> None:
    pool = VectorPool(40, WIDTH)
    ranks = [3, 3, 16, 17]  # the last is worked out on the host
    live = [declared_of([], [Capture("resid_post.*", reduce=Project(torch.ones(rank, WIDTH)))]) for rank in ranks]
    for declared in live:
        pool.acquire(declared)
    assert pool.used == 3 + 16
    fourth = declared_of([], [Capture("embed", reduce=Project(torch.ones(16, WIDTH)))])
    with pytest.raises(ValueError, match="max_intervention_vectors"):
        VectorPool(15, WIDTH).acquire(fourth)
    assert not fourth.held
    for declared, left in zip(live, [19, 16, 0, 0], strict=True):
        pool.release(declared)
        assert pool.used == left


def test_a_full_pool_is_an_error_that_names_its_setting_and_takes_nothing() -> None:
    pool = VectorPool(3, WIDTH)
    held = declared_of([Ablate("resid_post.0", torch.randn(2, WIDTH))])
    pool.acquire(held)
    with pytest.raises(ValueError, match="max_intervention_vectors"):
        pool.acquire(
            declared_of([Steer("resid_post.0", torch.randn(WIDTH)), Ablate("mlp_out.0", torch.randn(2, WIDTH))])
        )
    assert pool.used == 2
    pool.release(held)
    assert pool.used == 0


def test_what_cannot_be_held_is_refused_with_its_limit() -> None:
    steer = [Steer("resid_post.0", torch.ones(WIDTH)) for _ in range(7)]
    with pytest.raises(ValueError, match=r"resid_post.0 has 7 interventions.*max_interventions_per_site"):
        declared_of(steer)
    with pytest.raises(ValueError, match="has 7 interventions"):
        declared_of([Scale("resid_post.0", 2.0, positions=[0, 1, 3, 4, 6]), *steer[:4]])
    with pytest.raises(ValueError, match=r"attn_in\.1.*interventions act at embed"):
        declared_of([Scale("attn_in.1", 0.5)])
    outside = replace(LIMITS, inner_sites=frozenset({"z"}))
    assert BoundHooks.of([Scale("z.1", 0.5)], INFO, PROMPT, outside).ops
    for specs, captures in (([Scale("q.1", 0.5)], []), ([], [Capture("q.*")])):
        with pytest.raises(ValueError, match=r"q\.\d.*no kernels for 'q'.*inner_sites=\('q', 'z'\)"):
            BoundHooks.of(specs, INFO, PROMPT, outside, captures, longest=9)
    for wrong in (["resid_post.0"], "resid_post.0", [steer, steer[0]], [steer] * 3):
        with pytest.raises(ValueError, match="interventions: "):
            for_each_prompt(wrong, 2)


@pytest.mark.slow
def test_the_norms_sum_goes_in_one_order_with_tables_and_without(tmp_path: Path) -> None:
    """Triton lays a whole kernel out for its widest access, and a sum's order follows: compiled for a GPU, without one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = ROOT / "tests" / "support" / "helpers_layouts.py"
    found = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    # Counts need no fence, which each norm would wait for. A gate's first position does.
    assert [atomic for atomic in told.pop("atomics") if "relaxed" not in atomic] == ["atom.global.gpu.acq_rel.min.s32"]
    for shape, (plain, *others) in told.items():
        assert len(plain) == 1 and all(layout == plain for layout in others), (shape, plain, others)
