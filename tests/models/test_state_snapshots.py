"""Prefixes of models with recurrent states: reused behind snapshots, and equal to an engine that keeps none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from registry_configs import registry_config

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.mem_cache.state_pool import StateLayout, StatePool

FAMILIES = "qwen3_5_text", "nemotron_h"
"""Native, and by its class."""
SIZES: dict[str, Any] = {"kv_cache_tokens": 512, "page_size": 4, "max_num_tokens": 32, "max_running_requests": 4}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SITES = ["resid_post.0", "resid_post.2"]


def load(name: str, **options: Any) -> LM:
    given = {"load_format": "dummy", "device": "cpu", "dtype": "float32", **SIZES, **options}
    return LM(**with_tuning(hf_config=registry_config(name), **given))


def ids_of(size: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def snapshots_of(lm: LM) -> dict[str, int]:
    return lm.engine.stats()["states"]["snapshots"]


def check(lm: LM, plain: LM, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Tokens and states behind the prompt, with the cache and without."""
    outs, expected = (each.generate(prompts, GREEDY, **options) for each in (lm, plain))
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    lm.engine.call(lm.engine.scheduler.check_integrity)
    return outs


@pytest.fixture(scope="module", params=FAMILIES)
def plain(request: pytest.FixtureRequest) -> Any:
    """Without a prefix cache."""
    lm = load(request.param, enable_prefix_caching=False)
    yield lm
    assert snapshots_of(lm)["places"] == 0
    lm.shutdown()


def name_of(lm: LM) -> str:
    return lm.model_spec.family.name


def test_the_same_prompt_and_a_longer_one_start_behind_its_last_page(plain: LM) -> None:
    """Over all memory of states that is NaN elsewhere."""
    lm, prompt = load(name_of(plain)), ids_of(43, 1)
    (first,) = check(lm, plain, [prompt])
    for state in lm.runner.gdn_pool.states:
        state.fill_(float("nan"))
    (again,) = check(lm, plain, [prompt])
    (longer,) = check(lm, plain, [prompt + first.token_ids + ids_of(9, 2)])
    assert [out.num_cached_tokens for out in (first, again, longer)] == [0, 40, 40]
    assert snapshots_of(lm)["kept"] == 3 and snapshots_of(lm)["reused"] == 2  # of 40, 48 and 56 tokens
    capture: Any = {"capture": [f"{site}" for site in SITES]}
    tail = prompt[:40] + ids_of(11, 5)
    (ours,), (theirs,) = (each.generate([tail], GREEDY, **capture) for each in (lm, plain))
    for site in SITES:
        scale = float(theirs.activations[site].abs().max())
        assert float((ours.activations[site] - theirs.activations[site]).abs().max()) < 1e-4 * scale
    lm.shutdown()


def test_prompts_with_a_common_beginning_start_where_they_part(plain: LM) -> None:
    """The second finds out where; the third and fourth start there."""
    lm, common = load(name_of(plain)), ids_of(50, 3)
    cached = []
    for seed in range(4):
        (out,) = check(lm, plain, [common + ids_of(7, 10 + seed)])
        cached.append(out.num_cached_tokens)
    assert cached == [0, 0, 48, 48]
    stats = lm.engine.stats()["prefix_cache"]
    assert stats["off"] == "" and stats["not_reused"] == {"no states were kept there": 1}
    (again,) = check(lm, plain, [common + ids_of(7, 11)])
    assert again.num_cached_tokens == 56
    lm.shutdown()


def test_samples_of_one_prompt_share_its_states(plain: LM) -> None:
    lm, prompt = load(name_of(plain)), ids_of(70, 4)
    params = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True, seed=3, n=3)
    ours, theirs = (each.generate([prompt], params)[0] for each in (lm, plain))
    assert [out.token_ids for out in ours.outputs] == [out.token_ids for out in theirs.outputs]
    assert snapshots_of(lm)["reused"] == 2
    lm.shutdown()


def test_a_steered_prefix_serves_equal_steering_only(plain: LM) -> None:
    lm, prompt = load(name_of(plain)), ids_of(41, 5)
    steer, other = (Steer("resid_post.0", torch.full((32,), scale)) for scale in (3.0, -3.0))
    cached = []
    for ops in ([steer], [], [other], [steer], [], [other]):
        outs, expected = (each.generate([prompt], GREEDY, interventions=ops) for each in (lm, plain))
        assert outs[0].token_ids == expected[0].token_ids
        cached.append(outs[0].num_cached_tokens)
    assert cached == [0, 0, 0, 40, 40, 40]
    late = Steer("resid_post.0", torch.full((32,), 3.0), positions=range(30, 41))
    outs, expected = (each.generate([prompt], GREEDY, interventions=[late]) for each in (lm, plain))
    assert (
        outs[0].token_ids == expected[0].token_ids and outs[0].num_cached_tokens == 0
    )  # no snapshot at the first edit
    lm.shutdown()


def test_few_places_keep_what_was_used_last(plain: LM) -> None:
    lm = load(name_of(plain))
    a_place = lm.runner.gdn_pool.nbytes // 5
    lm.shutdown()
    lm = load(name_of(plain), state_cache_bytes=2 * a_place + 1)
    assert snapshots_of(lm)["places"] == 2
    prompts = [ids_of(30, seed) for seed in range(3)]
    cached = []
    for i in (0, 1, 0, 2, 0, 1, 2):
        (out,) = check(lm, plain, [prompts[i]])
        cached.append(out.num_cached_tokens)
    assert cached == [0, 0, 28, 0, 28, 0, 0] and snapshots_of(lm)["held"] == 2
    lm.shutdown()


def test_a_small_pool_evicts_pages_with_their_snapshots(plain: LM) -> None:
    """Preempted requests start behind their snapshots; what is evicted is computed again."""
    lm = load(name_of(plain), kv_cache_tokens=64, max_model_len=48)
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    prompts = [ids_of(21, seed) for seed in range(6)]
    for _ in range(2):
        outs, expected = (each.generate(prompts, params) for each in (lm, plain))
        assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
        lm.engine.call(lm.engine.scheduler.check_integrity)
    pool, tree = lm.runner.gdn_pool, lm.engine.scheduler.kv.sharing.tree
    assert lm.engine.scheduler.num_preempted > 0 and tree.num_evicted > 0
    assert pool.snapshots.pages <= set(tree.pages())
    lm.shutdown()


def test_a_traced_request_that_is_swapped_out_goes_on_beside_the_cache(plain: LM) -> None:
    lm = load(name_of(plain), kv_cache_tokens=48, max_model_len=40, lower_traces="off")
    prompts = [ids_of(12, seed) for seed in range(4)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    expected = [out.token_ids for out in plain.generate(prompts, params)]
    with lm.generate(max_new_tokens=16, ignore_eos=True) as tracer:
        found = dict().save()  # pyright: ignore[reportAttributeAccessIssue]
        for i in range(4):
            with tracer.invoke(prompts[i]):
                for step in tracer.iter[0:16]:
                    found[i, step] = lm.lm_head.output[0, -1].argmax(-1)
    assert lm.engine.scheduler.num_swapped > 0
    assert [[int(found[i, step]) for step in range(16)] for i in range(4)] == expected
    assert [out.token_ids for out in lm.generate(prompts, params)] == expected
    lm.shutdown()


def test_an_edit_of_the_weights_forgets_the_states(plain: LM) -> None:
    lm, prompt = load(name_of(plain)), ids_of(30, 8)
    check(lm, plain, [prompt])
    weight = lm.lm_head.weight
    weight[:] = weight.clone()
    (out,) = check(lm, plain, [prompt])
    assert out.num_cached_tokens == 0 and snapshots_of(lm)["held"] == 1
    lm.shutdown()


def test_a_snapshot_is_a_copy_bit_for_bit() -> None:
    layouts = [StateLayout("conv", (3, 4), torch.float32), StateLayout("recurrent", (2, 5), torch.float32)]
    pool = StatePool(layouts, 3, torch.bfloat16, "cpu", num_snapshots=2)
    for state in pool.states:
        state.copy_(torch.randn(state.shape))
    kept, before = pool.snapshots, [state[2].clone() for state in pool.states]
    kept.keep(7, 2)
    for state in pool.states:
        state[2] = float("nan")
    kept.restore(7, 1)
    assert all(torch.equal(state[1], old) for state, old in zip(pool.states, before, strict=True))
    kept.keep(8, 1)
    kept.restore(7, 3)
    kept.keep(9, 3)  # in the place of 8
    assert kept.pages == {7, 9} and kept.longest([1, 7, 8]) == 2 and kept.longest([8]) == 0
    kept.drop([7, 1])
    assert kept.pages == {9} and kept.nbytes == 2 * (12 * 4 + 10 * 2)
