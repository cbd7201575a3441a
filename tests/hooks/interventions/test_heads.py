"""Attention heads: ops and captures of some heads of `q`, `k`, `v` and `z`, against hooks on transformers' model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_declared import WAYS, lms, prompt_of, vector
from helpers_heads import in_double

from pymllm_interp import LM, Ablate, Capture, Clamp, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.captures import Project
from pymllm_interp.core.model_spec import INNER_SITES, ModelSpec
from pymllm_interp.hooks.bind import DeclaredLimits, bind, fingerprint_of
from pymllm_interp.hooks.interventions.op import apply
from pymllm_interp.hooks.positions import ordinals_of
from pymllm_interp.hooks.site import Site
from pymllm_interp.interventions import Generated
from pymllm_interp.kernels.edit_codes import HEADS_WORD, MAX_HEADS, WORDS, head_words

pytest.importorskip("triton", reason="the kernels' tests need the package triton")

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if CUDA else []
MODEL = ModelSpec.of(CONFIGS["llama"](), torch.float32)  # 9 heads over 3, of 8 channels
DIM = MODEL.head_dim
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module", params=WAYS)
def lm_of(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    """(family, **arguments) -> an LM in float32, its hooks in each of the ways."""
    with lms(request.param, model_folder) as load:
        yield load


def slow(lm: LM) -> bool:
    """Whether Triton's interpreter computes the ops."""
    return lm.runner.device_tables is not None and not CUDA


def ops_on(site: str, heads: list[int]) -> list[Any]:
    width = len(heads) * DIM
    v, probe = vector(width, 1), vector(width, 2)
    return [
        Scale(site, 0, heads=heads),
        Steer(site, v, scale=2.0, heads=heads, positions="generated"),
        Steer(site, v.view(-1, DIM), heads=heads, positions=slice(0, None, 3), norm="preserve"),
        Steer(site, v, scale=0.7, norm="match", heads=heads, when=Gate(probe.view(-1, DIM), 0.0)),
        Ablate(site, vector(width, 3, 3), heads=heads),
        Clamp(site, probe, low=-0.2, high=0.2, positions=Generated(0, 3), heads=heads),
        Patch(site, vector(width, 4, 2).view(2, -1, DIM), positions=[-1, 0], heads=heads),
    ]


@contextmanager
def edited(model: Any, site: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """transformers' model with `edit` of [tokens, heads, head_dim] at a site."""
    kind, layer = site.split(".")
    attn = model.model.layers[int(layer)].self_attn

    def whole(state: torch.Tensor) -> torch.Tensor:
        return edit(state[0].unflatten(-1, (-1, DIM))).flatten(-2)[None].to(state.dtype)

    if kind == "z":
        handle = attn.o_proj.register_forward_pre_hook(lambda module, args: (whole(args[0]),))
    else:
        handle = getattr(attn, f"{kind}_proj").register_forward_hook(lambda module, args, out: whole(out))
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def states_under(model: Any, ids: list[int], op: Any, prompt_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the site's state [tokens, heads, head_dim], what attention adds [tokens, hidden]) of transformers' model with
    `op` on its heads."""
    kept = []

    def edit(state: torch.Tensor) -> torch.Tensor:
        state, heads = state.double().clone(), list(op.heads)
        state[:, heads] = in_double(op, state[:, heads].flatten(1), prompt_len).unflatten(-1, (-1, DIM))
        kept.append(state.float())
        return state

    attn = model.model.layers[int(str(op.site).split(".")[1])].self_attn
    handle = attn.register_forward_hook(lambda module, args, out: kept.append(out[0][0]))
    with edited(model, str(op.site), edit):
        model(torch.tensor([ids]))
    handle.remove()
    return kept[0], kept[1]


@pytest.mark.few("kind", "k", ways=["graphs"])
@pytest.mark.few("kind", "z", ways=["tables"])
@pytest.mark.parametrize("kind", ["q", "k", "v", "z"])
def test_an_op_on_heads_equals_a_hook_on_transformers(kind: str, lm_of: Any, oracle: Any) -> None:
    """Beside plain requests, the prompt in chunks, at query heads and at the heads that they share."""
    lm, model, prompt = lm_of("llama", max_num_tokens=16, inner_sites=INNER_SITES), oracle("llama"), prompt_of(13, 5)
    capture, params = [f"{kind}.1", "attn_out.1"], SamplingParams(temperature=0, max_tokens=3)
    ops = ops_on(f"{kind}.1", [1, -1] if kind in "kv" else [5, 2])
    (plain,) = lm.generate([prompt], params, capture=capture)
    given = [part for op in ops for part in ([op], [])]
    outs = lm.generate([prompt] * len(given), params, interventions=given, capture=capture)
    for op, out, beside in zip(ops, outs[::2], outs[1::2], strict=True):
        wanted = states_under(model, (prompt + out.token_ids)[:-1], op, len(prompt))
        for site, state in zip(capture, wanted, strict=True):
            torch.testing.assert_close(out.activations[site], state, rtol=1e-5, atol=1e-5, msg=f"{op} {site}")
            torch.testing.assert_close(beside.activations[site], plain.activations[site], rtol=1e-5, atol=1e-5)
        if op.when is None:  # the gate may fire nowhere
            assert not torch.allclose(out.activations[capture[0]], plain.activations[capture[0]], atol=1e-2), op


@pytest.mark.few("lm_of", "functions", "tables")
def test_other_heads_keep_every_bit(lm_of: Any) -> None:
    lm, prompt = lm_of("llama", max_num_tokens=16, inner_sites=INNER_SITES), prompt_of(9, 1)
    (plain,) = lm.generate([prompt], GREEDY, capture=["z.1"])
    for op in ops_on("z.1", [4])[: 3 if slow(lm) else None]:
        (out,) = lm.generate([prompt], GREEDY, interventions=[op], capture=["z.1"])
        rows, others = len(prompt), [head for head in range(9) if head != 4]
        found, before = out.activations["z.1"][:rows, others], plain.activations["z.1"][:rows, others]
        assert torch.equal(found.view(torch.int32), before.view(torch.int32)), op


@pytest.mark.few("lm_of", "functions", "graphs")
def test_two_heads_edited_by_two_ops_are_edited_by_one(lm_of: Any) -> None:
    lm, prompt, v = lm_of("llama", max_num_tokens=16, inner_sites=INNER_SITES), prompt_of(9, 1), vector(2 * DIM, 3)
    one, two = lm.generate(
        [prompt] * 2, GREEDY, capture=["resid_post.2"],
        interventions=[
            [Steer("v.0", v, heads=[2, 0])],
            [Steer("v.0", v[:DIM], heads=2), Steer("v.0", v[DIM:], heads=torch.tensor([0]))],
        ],
    )  # fmt: skip
    torch.testing.assert_close(one.activations["resid_post.2"], two.activations["resid_post.2"], rtol=1e-5, atol=1e-5)
    assert [applied.intervention for applied in two.receipt.interventions] == ["Steer", "Steer"]


def test_a_pass_by_modules_edits_the_heads_that_a_fused_one_edits(lm_of: Any) -> None:
    lm, prompt = lm_of("llama", max_num_tokens=16, inner_sites=INNER_SITES), prompt_of(9, 1)
    edits = [Scale("z.1", 0, heads=[7, 1]), Steer("k.1", vector(DIM, 1), scale=3.0, heads=1)]
    (fused,) = lm.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=1), interventions=edits, capture=["attn_out.1"]
    )
    with lm.trace(prompt, interventions=edits):
        z = lm.model.layers[1].self_attn.o_proj.input.save()
        attn = lm.model.layers[1].self_attn.output[0].save()
    assert set(z.shape) == {1, 9, 72}
    torch.testing.assert_close(attn.view(9, 72), fused.activations["attn_out.1"], rtol=1e-5, atol=1e-5)


@pytest.mark.few("lm_of", "functions", "tables")
def test_captured_heads_are_those_of_the_whole_state_in_the_order_given(lm_of: Any) -> None:
    lm, prompt = lm_of("llama", max_num_tokens=16, inner_sites=INNER_SITES), prompt_of(9, 2)
    directions = vector(2 * DIM, 7, 4)

    def captured(**kwargs: Any) -> Any:
        sites = [Capture(f"{kind}.*", **kwargs) for kind in "qkvz"]
        return lm.generate([prompt], GREEDY, capture=sites)[0].activations

    for more in ({}, {"positions": [-1, 2]}, {"reduce": "mean"}, {"dtype": "bfloat16"})[: 1 if slow(lm) else 4]:
        whole, some = captured(**more), captured(heads=[-1, 0], **more)
        for site, rows in whole.items():
            assert torch.equal(some[site], rows[:, [-1, 0]]) and some[site].is_contiguous(), (site, more)
            assert torch.equal(some.positions[site], whole.positions[site])
    whole, dots = captured(), captured(heads=[-1, 0], reduce=Project(directions.view(4, 2, DIM)))
    for site, rows in whole.items():
        torch.testing.assert_close(dots[site], rows[:, [-1, 0]].flatten(1) @ directions.T, rtol=1e-4, atol=1e-4)


@pytest.mark.few("kind", ways=["graphs"])
@pytest.mark.few("kind", "k", ways=["tables"])
@pytest.mark.parametrize("kind", ["q", "k", "v", "z"])
def test_captured_states_patched_where_they_were_change_no_bit(kind: str, lm_of: Any) -> None:
    lm, prompt, site = lm_of("llama", max_num_tokens=16, inner_sites=INNER_SITES), prompt_of(11, 4), f"{kind}.1"
    after = ["attn_out.1", "logits"]
    (plain,) = lm.generate([prompt], GREEDY, capture=[*after, Capture(site, positions="prompt")])
    (half,) = lm.generate([prompt], GREEDY, capture=[Capture(site, positions="prompt", heads=[2, 0])])
    states, positions = plain.activations[site], plain.activations.positions[site]
    assert states.ndim == 3
    patches = [
        Patch(site, states, positions=positions),
        Patch(site, states.flatten(1), positions="prompt"),
        Patch(site, states[[-1, 3]], positions=[-1, 3]),
        Patch(site, half.activations[site], positions="prompt", heads=[2, 0]),
    ]
    for patch in patches[3 * slow(lm) :]:
        (out,) = lm.generate([prompt], GREEDY, interventions=[patch], capture=after)
        assert out.token_ids == plain.token_ids
        for name in after:
            assert torch.equal(out.activations[name], plain.activations[name]), (patch, name)
    other = Patch(site, states.roll(1, 0), positions="prompt")  # they are applied
    (out,) = lm.generate([prompt], GREEDY, interventions=[other], capture=after)
    assert not torch.equal(out.activations["attn_out.1"], plain.activations["attn_out.1"])


def test_all_heads_by_name_are_the_whole_state() -> None:
    state, positions = vector(72, 1, 8), torch.arange(8)
    for op in ops_on("z.1", list(range(9))):
        (by_heads,), (whole,) = bind(op, MODEL, 5), bind(replace(op, heads=None), MODEL, 5)
        ordinals = ordinals_of(whole.windows, positions)
        assert torch.equal(apply(by_heads.spec, state, ordinals), apply(whole.spec, state, ordinals)), op


def test_heads_are_bits_of_the_last_words_of_an_op() -> None:
    assert head_words(None) == [-1] * (WORDS - HEADS_WORD)
    assert head_words([0, 31, 33]) == [1 - (1 << 31), 2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Scale("resid_post.1", 0, heads=[3]), r"Scale\('resid_post.1'\): heads=\[3\]: resid_post has no heads; q, k, v,"),
        (lambda: Capture("mlp_act.1", heads=3), r"mlp_act has no heads"),
        (lambda: Scale("z.1", 0, heads=[]), r"heads=\[\]: expected a whole number, or a list"),
        (lambda: Scale("z.1", 0, heads=[True, 1]), r"heads=\[True, 1\]: expected a whole number, or a list"),
        (lambda: Scale("z.1", 0, heads=[True]), r"heads=\[True\]: expected a whole number"),
        (lambda: Scale("z.*", 0, heads=[9]), r"Scale\('z.\*'\): there is no head 9; z has 9 \(num_attention_heads\), 0 to 8"),
        (lambda: Scale("v.1", 0, heads=[3]), r"there is no head 3; v has 3 \(num_key_value_heads\), 0 to 2, or -3 to -1"),
        (lambda: Capture("k.1", heads=[-4]), r"Capture\('k.1'\): there is no head -4; k has 3"),
        (lambda: Scale("z.1", 0, heads=[8, -1]), r"heads=\[8, -1\] names a head twice; z has 9"),
        (lambda: Steer("z.1", torch.ones(DIM), heads=[1, 2]), r"vector has 8 values; at z the model has 16 \(2 of"),
        (lambda: Steer("z.1", torch.ones(72), heads=[1]), r"vector has 72 values; at z the model has 8"),
        (lambda: Patch("z.1", torch.ones(9, DIM)), r"values has 8 values; .*; if \[9, 8\] is one state, .flatten\(\) it"),
        (lambda: Scale("z.1", 0, heads=[1], when=Gate(torch.ones(72))), r"when.probe has 72 values"),
    ],
)  # fmt: skip
def test_heads_that_cannot_be_served_are_refused(make: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        bind(make(), MODEL, 5)


def test_tables_hold_the_heads_that_there_are_bits_for() -> None:
    limits = DeclaredLimits(4, 16, 1 << 20, device_tables=True)
    limits.check_op(Scale("z.0", 0, heads=[MAX_HEADS - 1]), Site("z", 0))
    with pytest.raises(ValueError, match=r"heads=\(224,\); on CUDA, ops have the first 224 heads"):
        limits.check_op(Scale("z.0", 0, heads=[MAX_HEADS]), Site("z", 0))


def test_specs_without_heads_keep_the_fingerprint_that_harvests_have() -> None:
    assert fingerprint_of([Scale("z.1", 0.5)], [Capture("z.1")]) == FINGERPRINT
    assert Scale("z.1", 0, heads=[1]) != Scale("z.1", 0)


FINGERPRINT = "e8e268444eb739b7a746b54a512264bed80b94882698a571ae6dc43617798a3e"
