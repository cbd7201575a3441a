"""Namespaces of pages against what acts at each position, one by one; and which sites change any KV, against a model's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_declared import vector

from pymllm_interp import LM, Patch, SamplingParams, Steer
from pymllm_interp.core.model_spec import ModelSpec, site_index
from pymllm_interp.hooks.bind import DeclaredLimits
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.kv_edits import changes_kv
from pymllm_interp.hooks.site import Site
from pymllm_interp.interventions import Generated, Knockout

MODEL = ModelSpec.of(CONFIGS["llama"](), torch.float32)
LIMITS = DeclaredLimits(99, 999, 1 << 24)
VECTOR = vector(MODEL.hidden_size, 0)
SITES = ["embed", "resid_post.0", "attn_out.1", "resid_post.1"]


def declared_of(specs: list[Any], prompt_len: int, longest: int) -> BoundHooks:
    return BoundHooks.of(specs, MODEL, prompt_len, LIMITS, longest=longest)


def by_page(declared: BoundHooks, page_size: int, count: int) -> list[Any]:
    """The namespace of each of `count` pages."""
    found, spans = [], declared.kv_edits.namespaces(page_size, page_size * count)
    assert [page for page, _ in spans] == sorted({page for page, _ in spans})
    for page in range(count):
        before = [namespace for start, namespace in spans if start <= page]
        found.append(before[-1] if before else None)
    return found


def acting(specs: list[Any], position: int, prompt_len: int) -> tuple:
    """What acts at a position, in order, written without the code under test."""
    found = []
    for place, spec in enumerate(specs):
        positions = spec.from_ if isinstance(spec, Knockout) else spec.positions
        if isinstance(positions, Generated):
            inside = position >= prompt_len and (position - prompt_len) in range(positions.start, 999, positions.step)
        elif isinstance(positions, slice):
            inside = position < prompt_len and position in range(prompt_len)[positions]
        elif isinstance(positions, str):
            inside = positions == "all" or (position < prompt_len) == (positions == "prompt")
        else:
            inside = position in positions
        if inside and isinstance(spec, Knockout):
            inside = position >= min(spec.to)  # pyright: ignore[reportArgumentType]
        if inside:
            row = list(positions).index(position) if isinstance(spec, Patch) and spec.values.ndim == 2 else None
            found.append((place, row))
    return tuple(found)


def random_positions(rng: random.Random, prompt_len: int) -> Any:
    first, some = rng.randrange(prompt_len), sorted(rng.sample(range(prompt_len), min(3, prompt_len)))
    stepped = slice(first, None, rng.choice([1, 2, 3])), Generated(rng.randrange(3), None, 2)
    return rng.choice(["all", "prompt", "generated", [first], some, *stepped])


def random_specs(rng: random.Random, prompt_len: int) -> list[Any]:
    specs: list[Any] = []
    for place in range(1, rng.randrange(2, 5)):  # no two alike
        site, positions = rng.choice(SITES), random_positions(rng, prompt_len)
        if rng.random() < 0.2:
            rows = sorted(rng.sample(range(prompt_len), 2))
            specs.append(Patch(site, vector(MODEL.hidden_size, place, 2), positions=rows))
        elif rng.random() < 0.2:
            specs.append(Knockout([0, 1], from_=positions, to=[1, 2], heads=[place]))
        else:
            specs.append(Steer(site, VECTOR, scale=place, positions=positions))
    return specs


@pytest.mark.parametrize("seed", range(150))
def test_a_pages_namespace_says_what_acts_within_it_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    prompt_len, page_size, count = rng.randrange(4, 40), rng.choice([1, 3, 4, 16]), 12
    specs = random_specs(rng, prompt_len)
    declared = declared_of(specs, prompt_len, 64)
    namespaces = by_page(declared, page_size, count)
    acts = [[acting(specs, p, prompt_len) for p in range(i * page_size, (i + 1) * page_size)] for i in range(count)]
    first = next((p for p in range(page_size * count) if acting(specs, p, prompt_len)), None)
    if first is not None:
        assert declared.kv_edits.first_position == first
    for namespace, act in zip(namespaces, acts, strict=True):
        assert (namespace is None) == (not any(act))
    if any(isinstance(spec, Knockout) for spec in specs):
        return  # pages at other places are not compared: their keys differ
    for one, first_act in zip(namespaces, acts, strict=True):
        for two, second_act in zip(namespaces, acts, strict=True):
            if first_act != second_act:
                assert one != two, "different edits share"
            else:
                assert one == two, "equal edits do not share"


def test_rows_of_a_patch_are_told_apart_where_they_stand_at_equal_places_of_pages() -> None:
    rows = vector(MODEL.hidden_size, 3, 2)
    one, two = (declared_of([Patch("embed", rows, positions=p)], 20, 64) for p in ([5, 9], [9, 13]))
    assert by_page(one, 4, 4)[2] != by_page(two, 4, 4)[2]
    assert by_page(one, 4, 4)[1] == by_page(two, 4, 4)[2], "the same row at the same place"
    narrow = declared_of([Patch("embed", rows[0], positions=[5, 9])], 20, 64)
    assert by_page(narrow, 4, 4)[1] == by_page(narrow, 4, 4)[2]


def test_prompts_of_other_lengths_have_equal_namespaces_where_equal_edits_act() -> None:
    short, long = (declared_of([Steer("embed", VECTOR, positions="prompt")], length, 64) for length in (20, 50))
    assert by_page(short, 4, 5) == by_page(long, 4, 5)
    assert by_page(short, 4, 12)[5:] == [None] * 7
    late, early = (declared_of([Steer("embed", VECTOR, positions=Generated(2, 6))], length, 64) for length in (20, 12))
    assert by_page(late, 4, 12)[5:] == by_page(early, 4, 10)[3:]


EVERY_SITE = [
    *("embed", "final_norm", "logits"),
    *(f"{kind}.{layer}" for kind in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "q", "k", "v", "z", "mlp_act")
      for layer in range(3)),
]  # fmt: skip


@pytest.mark.parametrize("site", EVERY_SITE)
def test_the_sites_that_change_kv_are_those_that_do(site: str, lm_of: Callable[..., LM]) -> None:
    lm, prompt = lm_of("llama"), [5, 17, 80, 33, 21, 60]
    edit = Steer(site, 5 * vector(MODEL.width(Site.parse(site).kind), 1), positions=[3])
    params = SamplingParams(temperature=0, max_tokens=1)
    plain, edited = lm.generate([prompt] * 2, params, interventions=[None, [edit]], capture=["k.*", "v.*"])
    assert list(plain.activations) == list(edited.activations)
    changed = any(
        not torch.allclose(rows, edited.activations[name], atol=1e-4) for name, rows in plain.activations.items()
    )
    assert changed == changes_kv(site_index(Site.parse(site), MODEL.num_hidden_layers), MODEL.num_hidden_layers)
