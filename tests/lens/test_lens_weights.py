"""Weights, blocks and what TransformerLens computes of them, against `TransformerBridge` on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformer_lens", reason='transformer-lens is not installed: pip install -e ".[lens]"')

from helpers_lens import CLOSE, FAMILIES, TOKENS, Pair

NAMES = "W_E W_U b_U W_pos W_E_pos W_Q W_K W_V W_O W_in W_gate W_out b_Q b_K b_V b_O b_in b_out".split()

pytestmark = pytest.mark.local


def of(bridge: Any, name: str) -> Any:
    try:
        return getattr(bridge, name)
    except AttributeError:
        return AttributeError


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_transformer_bridges(family: str, pair_of: Callable[[str], Pair]) -> None:
    ours, theirs = pair_of(family)
    for name in NAMES:
        got, expected = of(ours, name), of(theirs, name)
        if isinstance(expected, torch.Tensor):
            assert_close(got, expected, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert got is expected, name
    for name in ("OV", "QK"):
        assert_close(getattr(ours, name).AB, getattr(theirs, name).AB)
    for mode in "QKV":
        got, expected = (bridge.all_composition_scores(mode).scores for bridge in (ours, theirs))
        assert_close(got, expected, **CLOSE)
    assert len(ours.blocks) == ours.cfg.n_layers
    assert_close(ours.blocks[1].attn.W_O, theirs.blocks[1].attn.W_O, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_the_stream_are_transformer_bridges(family: str, pair_of: Callable[[str], Pair]) -> None:
    caches = [bridge.run_with_cache(TOKENS)[1] for bridge in pair_of(family)]
    layers = caches[0].model.cfg.n_layers
    served = 0
    finds = (
        lambda c: c.stack_head_results(layer=layers),
        lambda c: c.stack_neuron_results(layer=layers, apply_ln=True),
        lambda c: c.get_full_resid_decomposition(layer=layers, expand_neurons=True),
        lambda c: c.get_full_resid_decomposition(layer=1, mlp_input=True, expand_neurons=False, apply_ln=True),
    )
    for find in finds:
        try:
            expected = find(caches[1])
        except (KeyError, AttributeError) as error:  # of a norm that the architecture does not have
            with pytest.raises(type(error)):
                find(caches[0])
            continue
        assert_close(find(caches[0]), expected, **CLOSE)
        served += 1
    assert served >= (4 if family in ("llama", "gpt2", "qwen3", "mistral") else 2)


def test_the_cache_of_an_lm_has_the_methods_and_a_bridges_has_names_of_sites(pair_of: Callable[[str], Pair]) -> None:
    ours, theirs = pair_of("llama")
    expected = theirs.run_with_cache(TOKENS)[1]
    of_bridge, of_lm = ours.run_with_cache(TOKENS)[1], ours.lm.run_with_cache(TOKENS)[1]
    assert type(of_lm.transformer_lens) is type(of_bridge)
    for find in (
        lambda c: c.accumulated_resid(apply_ln=True),
        lambda c: c.stack_head_results(layer=2, apply_ln=True),
        lambda c: c.stack_neuron_results(layer=3, apply_ln=True),
        lambda c: c.get_full_resid_decomposition(layer=3),
        lambda c: c.logit_attrs(c.decompose_resid(layer=3), tokens=TOKENS),
    ):
        wanted = find(expected)
        assert_close(find(of_bridge), wanted, **CLOSE)
        assert_close(find(of_lm), wanted, **CLOSE)
    for name in ("resid_post.1", "resid_post.-2", "blocks.1.hook_resid_post", "model.layers.1", ("resid_post", 1)):
        assert_close(of_bridge[name], expected["resid_post", 1], **CLOSE)
        assert_close(of_lm[name], expected["resid_post", 1], **CLOSE)
    with pytest.raises(KeyError):
        of_bridge["resid_post.99x"]
    with pytest.raises(AttributeError, match="no attribute 'stack_heads'"):
        of_lm.stack_heads  # noqa: B018


def test_a_cache_does_not_keep_its_lm(model_folder: Callable[[str], Any]) -> None:
    import gc

    from pymllm_interp import LM

    lm = LM(model_folder("llama"), device="cpu", dtype="float32")
    _, cache = lm.run_with_cache([1, 2, 3], "resid_post.*")
    lm.shutdown()
    del lm
    gc.collect()
    assert cache["resid_post", 2].shape == (1, 3, 72)
    with pytest.raises(RuntimeError, match="LM of these states, which was deleted"):
        cache.accumulated_resid()


def test_a_hook_at_a_block_is_the_bridges(pair_of: Callable[[str], Pair]) -> None:
    found = []
    for bridge in pair_of("llama"):
        bridge.blocks[1].hook_resid_post.add_hook(lambda value, hook: value * 1.5)
        bridge.blocks[0].attn.hook_z.add_hook(lambda value, hook: value * 0.5)
        found.append(bridge(TOKENS))
        bridge.reset_hooks()
        found.append(bridge(TOKENS))
    assert_close(found[0], found[2], **CLOSE)
    assert not torch.allclose(found[0], found[1], atol=1e-2)
    assert_close(found[1], found[3], **CLOSE)


def test_weights_follow_an_edit_of_the_engines(lm_of: Callable[..., Any]) -> None:
    from pymllm_interp.lens import Bridge

    lm = lm_of("llama", max_running_requests=3)
    bridge = Bridge(lm)
    before, weight = bridge.W_out.clone(), lm.get("model.layers.1.mlp.down_proj")._module.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(2.0)
    try:
        assert_close(bridge.W_out[1], before[1] * 2)
        assert_close(bridge.W_out[0], before[0])
    finally:
        with torch.no_grad():
            weight.copy_(kept)
