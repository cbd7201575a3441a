"""TransformerLens' calls over an engine, name by name against `TransformerBridge` on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformer_lens", reason='transformer-lens is not installed: pip install -e ".[lens]"')

from helpers_lens import CLOSE, FAMILIES, TOKENS, Pair, head_results
from transformer_lens import ActivationCache
from transformer_lens.model_bridge.driver_protocol import Driver

from pymllm_interp import LM, Steer
from pymllm_interp.lens import Bridge


@pytest.mark.local
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cached_value_is_transformer_bridges_name_by_name(family: str, pair_of: Callable[[str], Pair]) -> None:
    ours, theirs = pair_of(family)
    logits, cache = ours.run_with_cache(TOKENS)
    expected_logits, expected = theirs.run_with_cache(TOKENS)
    assert isinstance(cache, ActivationCache)
    assert_close(logits, expected_logits, **CLOSE)
    more = {name for name in cache.keys() if name not in expected.keys()}
    assert all("hook_rot" in name for name in more) and (not more or family == "gpt_neox")
    for name, value in cache.items():
        if name in more:  # TransformerLens has the hook point, and no value
            continue
        assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}", **CLOSE)
    unserved = ("rotary", "cos", "sin", "q_norm", "k_norm", "normed", "hidden_states", "pos_embed.hook_in")
    shared = () if ours._driver.spec.family.qkv == "" else ("attn.q.hook_in", "attn.k.hook_in", "attn.v.hook_in")
    ordered, wanted = (
        [name for name in c.keys() if name in ours._driver.places and not name.endswith(shared) and name not in more]
        for c in (cache, expected)
    )
    assert ordered == wanted
    left = {name for name in expected.keys() if name not in cache.keys()}
    assert all(any(part in name for part in unserved) for name in left), left


@pytest.mark.local
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3"])
def test_scores_are_the_products_of_rotated_queries_and_keys(family: str, pair_of: Callable[[str], Pair]) -> None:
    bridge, _ = pair_of(family)
    _, cache = bridge.run_with_cache(TOKENS, names_filter=lambda name: "rot_" in name or name.endswith("attn_scores"))
    q, k = cache["rot_q", 1], cache["rot_k", 1]
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * bridge.cfg.d_head**-0.5
    seen = torch.ones(scores.shape[-2:]).tril().bool()
    assert_close(cache["attn_scores", 1][..., seen], scores[..., seen], **CLOSE)


@pytest.mark.local
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_sites_comes_from_a_fused_pass(
    family: str, pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair_of(family)
    monkeypatch.setattr(LM, "trace", lambda *a, **k: pytest.fail("a trace"))
    names = [name for name, place in ours._driver.places.items() if place.site is not None]
    with head_results(ours, theirs):
        logits, cache = ours.run_with_cache(TOKENS, names_filter=names)
        expected_logits, expected = theirs.run_with_cache(TOKENS, names_filter=names)
    assert set(names) <= set(cache.keys()) and len(names) > 20 * ours.cfg.n_layers - 15
    assert_close(logits, expected_logits, **CLOSE)
    for name in names:
        assert_close(cache[name], expected[name], msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


def seeded(name: str, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


@pytest.mark.local
@pytest.mark.thin(12)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["returned", "in place"])
def test_a_hook_edits_as_in_transformer_bridge_name_by_name(
    family: str, way: str, pair_of: Callable[[str], Pair]
) -> None:
    ours, theirs = pair_of(family)
    seen: list[str] = []

    def edit(value: torch.Tensor, hook: Any) -> torch.Tensor:
        seen.append(hook.name)
        noise = 0.3 * seeded(hook.name, value.shape).to(value)
        if way == "in place":
            value[:, 2:] += noise[:, 2:]
            return value
        return value + noise

    plain = theirs(TOKENS[:1])
    places = ours._driver.places.values()
    names = [p.name for p in places if not p.edit_instead and p.order[0] != 0 and not p.name.endswith("embed.hook_in")]
    if family == "gpt_neox":  # TransformerBridge calls no hooks there
        names = [name for name in names if "hook_rot" not in name]
    changed = 0
    for name in names:
        with head_results(ours, theirs) if name.endswith("hook_result") else nullcontext():
            got = ours.run_with_hooks(TOKENS[:1], fwd_hooks=[(name, edit)])
            expected = theirs.run_with_hooks(TOKENS[:1], fwd_hooks=[(name, edit)])
        assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)
        changed += not torch.equal(expected, plain)
    assert changed > 0.8 * len(names)
    assert_close(ours(TOKENS[:1]), plain, **CLOSE)  # hooks last for one call


@pytest.mark.local
def test_hooks_and_a_cache_in_one_pass_are_transformer_bridges(pair_of: Callable[[str], Pair]) -> None:
    """Values before the edit, at it and after it; and what the hook keeps is its own."""
    kept: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    found = []
    for i, bridge in enumerate(pair_of("llama")):

        def edit(value: torch.Tensor, hook: Any, i: int = i) -> torch.Tensor:
            kept[i].append(value)
            return value * 1.5

        with bridge.hooks(fwd_hooks=[("blocks.1.hook_attn_out", edit), ("blocks.1.ln2.hook_in", edit)]):
            found.append(bridge.run_with_cache(TOKENS))
    (logits, cache), (expected_logits, expected) = found
    assert_close(logits, expected_logits, **CLOSE)
    for name in ("blocks.1.hook_resid_pre", "blocks.1.hook_attn_out", "blocks.1.hook_resid_mid", "blocks.1.ln2.hook_normalized",
                 "blocks.1.hook_mlp_out", "blocks.2.hook_resid_post",
                 "blocks.2.attn.hook_pattern", "ln_final.hook_scale"):  # fmt: skip
        assert_close(cache[name], expected[name], msg=lambda text, name=name: f"{name}: {text}", **CLOSE)
    for ours, theirs in zip(kept[0], kept[1], strict=True):
        assert_close(ours, theirs, **CLOSE)


@pytest.mark.local
def test_what_the_activation_cache_computes_is_transformer_lenss(pair_of: Callable[[str], Pair]) -> None:
    ours, theirs = pair_of("llama")
    keep = lambda name: "resid" in name or "_out" in name or "scale" in name or "embed" in name  # noqa: E731
    (_, cache), (_, expected) = (bridge.run_with_cache(TOKENS, names_filter=keep) for bridge in (ours, theirs))
    layers = ours.cfg.n_layers
    for find in (
        lambda c: c.accumulated_resid(layer=layers, apply_ln=True),
        lambda c: c.decompose_resid(layer=layers, mode="all"),
        lambda c: c.apply_ln_to_stack(c.accumulated_resid(layer=layers), layer=layers, recompute_ln=True),
        lambda c: c.logit_attrs(c.accumulated_resid(layer=layers), tokens="w3"),
        lambda c: c.logit_attrs(c.decompose_resid(layer=layers), tokens=TOKENS, incorrect_tokens=TOKENS.flip(1)),
    ):
        assert_close(find(cache), find(expected), **CLOSE)
    normed = cache["ln_final.hook_out"] if "ln_final.hook_out" in cache else ours.ln_final(cache["resid_post", -1])
    assert_close(ours.unembed(normed), ours(TOKENS), **CLOSE)


OPS = [
    {"op": "suppress"}, {"op": "scale", "factor": 0.5, "pos": 2}, {"op": "add", "value": 0.25, "pos": [1, 3]},
    {"op": "set", "value": 2.0},
]  # fmt: skip


def apply(op: dict[str, Any], value: torch.Tensor) -> torch.Tensor:
    """What TransformerLens' documentation says of the ops."""
    at = op.get("pos", list(range(value.shape[1])))
    rows = [at] if isinstance(at, int) else at
    new = value.clone()
    for row in rows:
        match op["op"]:
            case "suppress":
                new[:, row] = 0
            case "scale":
                new[:, row] *= op["factor"]
            case "add":
                new[:, row] += op["value"]
            case "set":
                new[:, row] = op["value"]
    return new


@pytest.mark.local
@pytest.mark.parametrize("op", OPS, ids=lambda op: op["op"])
def test_an_op_is_the_same_function_as_a_hook(
    op: dict[str, Any], pair_of: Callable[[str], Pair], monkeypatch: Any
) -> None:
    ours, theirs = pair_of("llama")
    declared = [
        "blocks.1.hook_resid_pre",
        "blocks.0.hook_out",
        "blocks.1.attn.hook_z",
        "blocks.2.hook_mlp_out",
        "blocks.1.mlp.hook_post",
    ]
    traced = ["blocks.1.hook_resid_mid", "blocks.1.mlp.hook_in", "blocks.0.mlp.hook_pre"]
    for name in (*traced, *declared):
        if name == declared[0]:
            monkeypatch.setattr(LM, "trace", lambda *a, **k: pytest.fail("a trace"))
        got = ours(TOKENS, intervene={name: op})
        expected = theirs.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda value, hook: apply(op, value))])
        assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


@pytest.mark.local
def test_it_is_a_driver_and_takes_text_one_row_a_loss_and_declared_interventions(
    pair_of: Callable[[str], Pair],
) -> None:
    ours, theirs = pair_of("llama")
    assert isinstance(ours._driver, Driver)
    assert_close(ours("w5 w6 w7"), theirs("w5 w6 w7"), **CLOSE)
    assert_close(ours(TOKENS[0]), ours(TOKENS[:1]))
    assert_close(ours(TOKENS, return_type="loss"), theirs(TOKENS, return_type="loss"), **CLOSE)
    vector = torch.randn(72)
    steered, cache = ours.run_with_cache(
        TOKENS, names_filter="blocks.1.hook_resid_post", interventions=[Steer("resid_post.1", vector)]
    )
    expected, there = theirs.run_with_cache(TOKENS, names_filter="blocks.1.hook_resid_post")
    assert_close(cache["resid_post", 1], there["resid_post", 1] + vector, **CLOSE)
    assert not torch.allclose(steered, expected, atol=1e-2)
    assert ours.W_U.shape == (72, 97) and ours.W_E.shape == (97, 72) and not ours.b_U.any()


@pytest.mark.local
def test_what_cannot_be_served_is_refused_with_the_fix(pair_of: Callable[[str], Pair]) -> None:
    bridge, _ = pair_of("llama")
    with pytest.raises(NotImplementedError, match="hook_cos"):
        bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_cos", lambda value, hook: None)])
    with pytest.raises(NotImplementedError, match=r"can be read, not edited: edit blocks\.0\.ln1\.hook_out"):
        bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.ln1.hook_scale", lambda value, hook: value * 2)])
    with pytest.raises(ValueError, match=r"returned \[2, 7\]; expected \[2, 7, 72\]"):
        bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_out", lambda value, hook: value[..., 0])])
    with pytest.raises(ValueError, match=r"no hook point 'blocks\.9\.hook_out'"):
        bridge(TOKENS, intervene={"blocks.9.hook_out": {"op": "suppress"}})
    with pytest.raises(ValueError, match="add takes value and pos"):
        bridge(TOKENS, intervene={"blocks.0.hook_out": {"op": "add", "vector": 1.0}})
    with pytest.raises(ValueError, match="op is one of"):
        bridge(TOKENS, intervene={"blocks.0.hook_out": {"op": "double"}})
    with pytest.raises(ValueError, match="holds one prompt"):
        bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_pattern", lambda value, hook: value * 0)])
    with pytest.raises(ValueError, match="padding on its left or right, not within"):
        bridge(TOKENS, attention_mask=torch.tensor([[1] * 7, [1, 0] + [1] * 5]))
    with pytest.raises(ValueError, match=r"expected that of the token ids, \[2, 7\]"):
        bridge(TOKENS, attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"shape \[1, 2, 7\]"):
        bridge(TOKENS[None])
    with pytest.raises(TypeError, match="fast"):
        bridge(TOKENS, fast=True)
    with pytest.raises(NotImplementedError, match=r"lm\.generate"):
        bridge(TOKENS, max_new_tokens=5)


@pytest.mark.local
def test_backward_hooks_are_refused_wherever_they_are_given(pair_of: Callable[[str], Pair]) -> None:
    bridge, _ = pair_of("llama")
    keep = lambda value, hook: None  # noqa: E731
    name = "blocks.0.hook_resid_post"
    for give in (
        lambda: bridge.run_with_hooks(TOKENS, bwd_hooks=[(name, keep)]),
        lambda: bridge.add_hook(name, keep, dir="bwd"),
        lambda: bridge.add_perma_hook(name, keep, dir="bwd"),
        lambda: bridge.hooks(bwd_hooks=[(name, keep)]).__enter__(),
        lambda: bridge.hook_dict[name].add_hook(keep, dir="bwd"),
        lambda: bridge.blocks[0].hook_resid_post.add_hook(keep, "bwd"),
        lambda: bridge.run_with_cache(TOKENS, incl_bwd=True, return_type="loss"),
    ):
        with pytest.raises(NotImplementedError, match="gradients are those of a trace"):
            give()
    assert not any(point.bwd_hooks for point in bridge.hook_points())


@pytest.mark.gpu
@pytest.mark.local
@pytest.mark.parametrize("inner", [(), ("q", "k", "v", "z", "mlp_act")], ids=["traced", "inner_sites"])
def test_caches_and_hooks_on_cuda_are_those_of_transformer_bridge(
    inner: tuple[str, ...], lm_of: Callable[..., LM], pair_of: Callable[[str], Pair]
) -> None:
    ours, (_, theirs) = Bridge(lm_of("llama", device="cuda", inner_sites=inner)), pair_of("llama")
    loose = {"rtol": 1e-3, "atol": 1e-3}
    for names in (None, [name for name, place in ours._driver.places.items() if place.site is not None]):
        _, cache = ours.run_with_cache(TOKENS[:1], names_filter=names)
        _, expected = theirs.run_with_cache(TOKENS[:1], names_filter=names)
        for name, value in cache.items():
            assert value.device.type == "cpu"
            assert_close(
                value, expected[name].reshape(value.shape), msg=lambda text, name=name: f"{name}: {text}", **loose
            )
    double = lambda value, hook: value * 2  # noqa: E731
    for name in ("blocks.1.hook_attn_out", "blocks.1.attn.hook_z", "blocks.0.ln2.hook_in"):
        got, wanted = (bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, double)]) for bridge in (ours, theirs))
        assert_close(got, wanted, **loose)
    _, cache = ours.run_with_cache(TOKENS, names_filter=lambda name: "resid" in name or "scale" in name)
    assert cache.logit_attrs(cache.accumulated_resid(), tokens="w3").device.type == "cpu"
