"""Text, lists of prompts, early stops and generation of a `Bridge`, against `TransformerBridge` on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformer_lens", reason='transformer-lens is not installed: pip install -e ".[lens]"')

from helpers_lens import CLOSE, FAMILIES, TOKENS, Pair

from pymllm_interp import LM, Steer

TEXTS = ["w5 w6 w7 w8 w9", "w3 w4"]
LISTS = [["w5 w6 w7", "w8 w9 w3"], TEXTS, [[5, 6, 7, 8], [3]], [torch.tensor([4]), torch.tensor([5, 6, 7])]]
NOT_COMPARED = ("cos", "sin", "scores", "result", "_in", "_input")
"""Hook points of no value at padding, or that need a switch."""

pytestmark = pytest.mark.local


def real(bridge: Any, texts: list[str], side: str) -> torch.Tensor:
    """Mask [batch, tokens] of the columns that hold tokens."""
    lengths = [bridge.to_tokens(text).shape[1] for text in texts]
    columns = torch.arange(max(lengths)).expand(len(texts), -1)
    counts = torch.tensor(lengths)[:, None]
    return columns < counts if side == "right" else columns >= max(lengths) - counts


def test_text_and_tokens_are_converted_as_in_transformer_bridge(pair_of: Callable[[str], Pair]) -> None:
    ours, theirs = pair_of("llama")
    for find in (
        lambda b: b.to_tokens(TEXTS).tolist(),
        lambda b: b.to_tokens(TEXTS, padding_side="right", prepend_bos=False).tolist(),
        lambda b: b.to_str_tokens("w5 w6 w7", prepend_bos=False),
        lambda b: b.to_str_tokens(TEXTS),
        lambda b: b.to_str_tokens(TOKENS[0]),
        lambda b: b.to_string(TOKENS),
        lambda b: b.to_single_str_token(7),
        lambda b: b.to_single_token("w7"),
        lambda b: b.get_token_position("w7", "w5 w6 w7 w7"),
        lambda b: b.get_token_position(7, TOKENS[0], mode="last"),
    ):
        assert find(ours) == find(theirs)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("texts", [LISTS[0], TEXTS])
def test_lists_of_texts_are_transformer_bridges_where_tokens_are(
    texts: list[str], side: str, pair_of: Callable[[str], Pair]
) -> None:
    ours, theirs = pair_of("llama")
    keep = lambda name: not name.endswith(NOT_COMPARED)  # noqa: E731
    logits, cache = ours.run_with_cache(texts, padding_side=side, names_filter=keep)
    expected_logits, expected = theirs.run_with_cache(texts, padding_side=side, names_filter=keep)
    mask = real(ours, texts, side)
    assert_close(logits[mask], expected_logits[mask], **CLOSE)
    assert not logits[~mask].any()
    for name in cache.keys():
        value, wanted = cache[name], expected[name]
        assert value.shape == wanted.shape, name
        if name.endswith("hook_pattern"):
            pairs = (mask[:, None, :, None] & mask[:, None, None, :]).expand_as(value)
            value, wanted = value[pairs], wanted[pairs]
        else:
            value, wanted = value[mask], wanted[mask]
        assert_close(value, wanted, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


@pytest.mark.parametrize("prompts", LISTS)
def test_a_list_is_each_prompt_on_its_own(prompts: list[Any], pair_of: Callable[[str], Pair]) -> None:
    bridge, _ = pair_of("gpt2")
    logits, cache = bridge.run_with_cache(prompts, padding_side="right")
    for row, prompt in enumerate(prompts):
        alone, there = bridge.run_with_cache(prompt if isinstance(prompt, str) else torch.as_tensor(prompt))
        count = alone.shape[1]
        assert_close(logits[row, :count], alone[0], **CLOSE)
        for name in ("blocks.1.hook_resid_post", "blocks.0.attn.hook_z", "blocks.1.ln2.hook_scale"):
            assert_close(cache[name][row, :count], there[name][0], **CLOSE)
        for name in ("blocks.1.attn.hook_pattern", "blocks.1.attn.hook_attn_scores"):
            assert_close(cache[name][row, :, :count, :count], there[name][0], **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("way", ["returned", "in place"])
def test_a_hook_edits_a_padded_batch_as_in_transformer_bridge(
    side: str, way: str, pair_of: Callable[[str], Pair]
) -> None:
    def edit(value: torch.Tensor, hook: Any) -> torch.Tensor:
        assert value.shape[:2] == (2, 5)
        if way == "in place":
            value[:, -2:] *= 1.5
            return value
        return torch.cat([value[:, :-2], value[:, -2:] * 1.5], dim=1)

    ours, theirs = pair_of("llama")
    mask = real(ours, TEXTS, side)
    plain = ours(TEXTS, padding_side=side)
    for name in ("blocks.1.hook_resid_pre", "blocks.1.attn.hook_q", "blocks.1.attn.hook_z", "blocks.0.mlp.hook_post",
                 "blocks.1.hook_mlp_out", "blocks.2.hook_attn_out", "blocks.0.hook_resid_post"):  # fmt: skip
        got, expected = (b.run_with_hooks(TEXTS, fwd_hooks=[(name, edit)], padding_side=side) for b in (ours, theirs))
        assert_close(got[mask], expected[mask], msg=lambda text, name=name: f"{name}: {text}", **CLOSE)
        assert not torch.allclose(got, plain, atol=1e-2), name


def test_masks_losses_and_positions_of_a_padded_batch(pair_of: Callable[[str], Pair]) -> None:
    ours, theirs = pair_of("llama")
    mask = torch.tensor([[1] * 7, [0, 0] + [1] * 5])
    assert_close(ours(TOKENS, attention_mask=mask)[1, 2:], theirs(TOKENS[1:, 2:])[0], **CLOSE)
    got, expected = (b(TOKENS, attention_mask=mask, return_type="loss") for b in (ours, theirs))
    assert_close(got, expected, **CLOSE)
    with pytest.raises(ValueError, match="has pos, and the prompts have different lengths"):
        ours(TEXTS, intervene={"blocks.0.hook_out": {"op": "suppress", "pos": 1}})
    with pytest.raises(ValueError, match="attention_mask belongs to token ids"):
        ours(TEXTS, attention_mask=mask)
    assert ours(TEXTS, interventions=[Steer("resid_post.1", torch.ones(72))]).shape == (2, 5, 97)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stop", [0, 1, -1])
def test_an_early_stop_is_transformer_bridges(family: str, stop: int, pair_of: Callable[[str], Pair]) -> None:
    ours, theirs = pair_of(family)
    assert_close(ours(TOKENS, stop_at_layer=stop), theirs(TOKENS, stop_at_layer=stop), **CLOSE)
    got, cache = ours.run_with_cache(TOKENS, stop_at_layer=stop)
    expected, there = theirs.run_with_cache(TOKENS, stop_at_layer=stop)
    assert_close(got, expected, **CLOSE)
    layers = {name.split(".")[1] for name in cache.keys() if name.startswith("blocks")}
    assert layers == {str(layer) for layer in range(stop % ours.cfg.n_layers)} and "hook_embed" in cache
    for name in cache.keys():
        if name in there.keys():
            assert_close(cache[name], there[name], msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


def test_an_early_stop_runs_hooks_before_it_and_no_later_layer(
    pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair_of("llama")
    ran: dict[int, list[str]] = {0: [], 1: []}
    found = []
    for i, bridge in enumerate((ours, theirs)):

        def edit(value: torch.Tensor, hook: Any, i: int = i) -> torch.Tensor:
            ran[i].append(hook.name)
            return value * 1.5

        hooks = [(f"blocks.{layer}.hook_resid_post", edit) for layer in range(3)]
        found.append(bridge.run_with_hooks(TOKENS, fwd_hooks=hooks, stop_at_layer=1))
    assert_close(found[0], found[1], **CLOSE)
    assert ran[0] == ran[1] == ["blocks.0.hook_out"]
    layer = ours.lm.get("model.layers.2")._module
    monkeypatch.setattr(type(layer), "forward", lambda *a, **k: pytest.fail("a layer behind the stop"), raising=False)
    with pytest.raises(ValueError, match="stop_at_layer=9: expected 0 to 3"):
        ours(TOKENS, stop_at_layer=9)
    assert_close(ours(TOKENS, stop_at_layer=3), theirs(TOKENS), **CLOSE)


@pytest.mark.parametrize("prompts", ["w5 w6 w7", TEXTS, TOKENS, TOKENS[0]], ids=["text", "texts", "ids", "row"])
@pytest.mark.parametrize("return_type", ["input", "tokens", "str"])
def test_greedy_generation_is_transformer_bridges(
    prompts: Any, return_type: str, pair_of: Callable[[str], Pair]
) -> None:
    ours, theirs = pair_of("llama")
    if isinstance(prompts, torch.Tensor) and prompts.dim() == 1:
        got = ours.generate(prompts, max_new_tokens=6, do_sample=False, return_type=return_type)
        prompts = prompts[None]
    else:
        got = ours.generate(prompts, max_new_tokens=6, do_sample=False, return_type=return_type)
    expected = theirs.generate(prompts, max_new_tokens=6, do_sample=False, return_type=return_type, verbose=False)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
    else:
        assert got == expected


def test_generation_ends_at_an_eos_and_refuses_what_it_would_ignore(pair_of: Callable[[str], Pair]) -> None:
    ours, theirs = pair_of("llama")
    plain = ours.generate(TOKENS, max_new_tokens=6, do_sample=False)
    eos = int(plain[0, 9])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": eos}
    assert torch.equal(ours.generate(TOKENS, **options), theirs.generate(TOKENS, verbose=False, **options))
    assert ours.generate(TOKENS, max_new_tokens=4, seed=1).shape == (2, 11)
    with pytest.raises(TypeError, match=r"got freq_penalty: lm\.generate"):
        ours.generate(TOKENS, freq_penalty=1.0)
    with (
        ours.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda value, hook: value * 2)]),
        pytest.raises(NotImplementedError, match="runs no hooks"),
    ):
        ours.generate(TOKENS)
    steered = ours.generate(TOKENS, 6, do_sample=False, interventions=[Steer("resid_post.1", torch.ones(72) * 9)])
    assert not torch.equal(steered, plain)
    assert isinstance(ours.lm, LM)
