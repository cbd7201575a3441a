"""`lens.patching` over a `Bridge`, against `transformer_lens.patching` over `TransformerBridge` on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformer_lens", reason='transformer-lens is not installed: pip install -e ".[lens]"')

from helpers_lens import TOKENS, Pair
from transformer_lens import patching as library

from pymllm_interp import LM
from pymllm_interp.lens import Bridge, patching
from pymllm_interp.toolkit.wavefront import Wavefront

CORRUPTED = TOKENS.clone()
CORRUPTED[:, 2] += 3
SWEPT = [
    "resid_pre", "resid_mid", "attn_out", "mlp_out", "attn_head_out_by_pos", "attn_head_q_by_pos", "attn_head_k_by_pos",
    "attn_head_v_by_pos", "attn_head_out_all_pos", "attn_head_q_all_pos", "attn_head_k_all_pos", "attn_head_v_all_pos",
]  # fmt: skip
OF_FAMILIES = ["resid_pre", "attn_out", "mlp_out", "attn_head_q_all_pos", "attn_head_v_all_pos"]
CASES = [("llama", name) for name in SWEPT] + [
    (f, name) for f in ("gpt2", "gemma2", "gpt_neox") for name in OF_FAMILIES
]

pytestmark = pytest.mark.local


def metric(logits: torch.Tensor) -> torch.Tensor:
    """Reads every position of every prompt."""
    weights = torch.linspace(0.5, 1.5, logits[..., 0].numel()).reshape(logits.shape[:2])
    return ((logits[..., 7] - logits[..., 9]) * weights).sum()


def per_prompt(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, -1, 7] - logits[:, -1, 9]


def caches(pair: Pair) -> list[Any]:
    return [bridge.run_with_cache(TOKENS)[1] for bridge in pair]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """With gradients, TransformerLens' setters edit a copy, and `resid_mid` is another value."""
    with torch.no_grad():
        yield


@pytest.mark.thin(6)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_swept_call_is_transformer_lenss(
    family: str, name: str, pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(family)
    clean, there = caches(pair)
    expected = getattr(library, f"get_act_patch_{name}")(pair[1], CORRUPTED, there, metric)
    monkeypatch.setattr(LM, "trace", lambda *a, **k: pytest.fail("a pass for each cell"))
    got = getattr(patching, f"get_act_patch_{name}")(pair[0], CORRUPTED, clean, metric)
    assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert got.std() > 1e-2


def test_all_families_without_layers_of_ours_run_as_requests(
    pair_of: Callable[[str], Pair], lm_of: Callable[..., LM], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, bridge = pair_of("llama")[1], Bridge(lm_of("llama", impl="transformers"))
    there, clean = theirs.run_with_cache(TOKENS)[1], bridge.run_with_cache(TOKENS)[1]
    for name in ("resid_pre", "attn_head_k_by_pos", "attn_head_out_all_pos"):
        expected = getattr(library, f"get_act_patch_{name}")(theirs, CORRUPTED, there, metric)
        with monkeypatch.context() as patched:
            patched.setattr(LM, "trace", lambda *a, **k: pytest.fail("a pass for each cell"))
            got = getattr(patching, f"get_act_patch_{name}")(bridge, CORRUPTED, clean, metric)
        assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["attn_head_pattern_all_pos", pytest.param("attn_head_pattern_by_pos", marks=pytest.mark.slow)]
)
def test_other_cells_run_one_by_one(name: str, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("llama")
    found = [
        getattr(module, f"get_act_patch_{name}")(bridge, CORRUPTED[:1], bridge.run_with_cache(TOKENS[:1])[1], metric)
        for module, bridge in zip((patching, library), pair, strict=True)
    ]
    assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["block_every", "attn_head_all_pos_every", pytest.param("attn_head_by_pos_every", marks=pytest.mark.slow)]
)
def test_several_kinds_in_one_call(name: str, pair_of: Callable[[str], Pair]) -> None:
    clean, corrupted = TOKENS[:1, :4], CORRUPTED[:1, :4]
    ours, theirs = (
        getattr(module, f"get_act_patch_{name}")(bridge, corrupted, bridge.run_with_cache(clean)[1], metric)
        for module, bridge in zip((patching, library), pair_of("llama"), strict=True)
    )
    assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_results_for_each_prompt_baselines_metrics_and_chosen_cells(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("llama")
    pandas = pytest.importorskip("pandas", reason="of transformer-lens")
    cells = pandas.DataFrame([(2, -1), (0, 2), (1, 3)], columns=["layer", "pos"])
    found = []
    for module, bridge, cache in zip((patching, library), pair, caches(pair), strict=True):
        given = (bridge, CORRUPTED, cache)
        by_prompt = module.get_act_patch_resid_pre(
            *given, {"a": per_prompt, "b": per_prompt}, reduce="none", baseline=True
        )
        chosen = module.generic_activation_patch(
            *given, metric, library.layer_pos_patch_setter, "resid_pre", index_df=cells
        )
        double = module.generic_activation_patch(
            *given, metric, lambda value, index, clean: value * 2, "mlp_out", index_axis_names=["layer"]
        )
        found.append((by_prompt.values, by_prompt.baseline, by_prompt.effect(), chosen, double))
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_cells_before_the_change_are_the_corrupted_run(
    pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge, _ = pair_of("llama")
    ran: list[tuple[int, int]] = []
    rows = Wavefront.row_logits

    def spied(self: Wavefront, cells: Any) -> Any:
        ran.extend((cell.site.layer or 0, cell.position) for cell in cells)
        return rows(self, cells)

    monkeypatch.setattr(Wavefront, "row_logits", spied)
    values = patching.get_act_patch_resid_pre(bridge, CORRUPTED, bridge.run_with_cache(TOKENS)[1], metric)
    assert_close(values[:, :2], metric(bridge(CORRUPTED)).expand(3, 2), rtol=1e-4, atol=1e-4)
    assert sorted(ran) == sorted(
        2 * [(layer, position) for layer in range(3) for position in range(2, 7) if layer or position == 2]
    )


def test_calls_that_would_be_wrong_are_refused(pair_of: Callable[[str], Pair]) -> None:
    bridge, _ = pair_of("llama")
    _, clean = bridge.run_with_cache(TOKENS[:, :5])
    with pytest.raises(ValueError, match=r"\[2, 5\] prompts and tokens, and the corrupted run \[2, 7\]"):
        patching.get_act_patch_resid_pre(bridge, CORRUPTED, clean, metric)
    _, clean = bridge.run_with_cache(TOKENS)
    with (
        bridge.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda value, hook: value * 2)]),
        pytest.raises(NotImplementedError, match=r"bridge\.reset_hooks"),
    ):
        patching.get_act_patch_resid_pre(bridge, CORRUPTED, clean, metric)
    with pytest.raises(ValueError, match="must return a scalar"):
        patching.get_act_patch_resid_pre(bridge, CORRUPTED, clean, per_prompt)
