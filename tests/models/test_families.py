"""Families through their classes in transformers, over our KV pool: equal to transformers in float32.

Every family serves one batch of requests of different lengths, in chunks, and is compared with the same weights in
transformers, one request at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from family_configs import SETTINGS, VOCAB, tiny_config
from helpers_families import first, points_of, states_of
from helpers_runner import part_of
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.core.model_spec import FAMILIES as NATIVE_FAMILIES
from pymllm_interp.core.model_spec import SitePoint

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LENGTHS = 5, 1, 37
TOLERANCE: Any = {"rtol": 1e-4, "atol": 1e-4}


class Served(NamedTuple):
    """An LM, and the same weights in transformers."""

    lm: LM
    oracle: Any
    prompts: list[list[int]]


BY_MECHANISM = pytest.mark.few(
    "served", "gpt2", "gpt_neox", "gemma3_text", "mixtral", "cohere2", "deepseek_v3", "gpt_oss", "gptj", "bloom", "falcon",
    ("gpt2", "native"), ("gpt_oss", "native"),
)  # fmt: skip
"""Learned positions, parallel blocks, two rotations, experts, one norm for both, latent attention, sinks, rotated pairs, ALiBi,
fused heads. What each family holds at its sites is compared for all of them."""
NATIVE_HERE = [family for family in SETTINGS if family in NATIVE_FAMILIES]


def load(family: str, impl: str = "transformers", **options: Any) -> Served:
    config = tiny_config(family)
    settings = {"kv_cache_tokens": 512, "max_num_tokens": 16, "max_running_requests": 4, "page_size": 4, **options}
    lm = LM(hf_config=config, load_format="dummy", impl=impl, device="cpu", dtype="float32", **settings)
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    oracle: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    oracle.load_state_dict(lm.runner.get_model().state_dict())
    generator = torch.Generator().manual_seed(len(family))
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    return Served(lm, oracle, prompts)


@pytest.fixture(
    scope="module", params=[*SETTINGS, *((family, "native") for family in NATIVE_HERE)],
    ids=[*SETTINGS, *(f"{family}-native" for family in NATIVE_HERE)],
)  # fmt: skip
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    found = load(request.param) if isinstance(request.param, str) else load(*request.param)
    yield found
    found.lm.shutdown()


def generated(served: Served, ids: list[int]) -> list[int]:
    out = served.oracle.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=6,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


@BY_MECHANISM
def test_greedy_tokens_are_those_of_generate(served):
    outs = served.lm.generate(served.prompts, GREEDY)
    assert [out.token_ids for out in outs] == [generated(served, ids) for ids in served.prompts]


def test_captured_sites_hold_what_transformers_modules_hold(served):
    points = points_of(served.lm.model_spec)
    outs = served.lm.generate(served.prompts, GREEDY, capture=list(points))
    for ids, out in zip(served.prompts, outs, strict=True):
        expected, _ = states_of(served.oracle, points, ids + out.token_ids[:-1])
        for site in points:
            torch.testing.assert_close(
                out.activations[site].flatten(1), part_of(served.lm.model_spec, site.partition(".")[0], expected[site]),
                **TOLERANCE, msg=lambda m, s=site: f"{s}: {m}",
            )  # fmt: skip


@pytest.mark.parametrize("family", ["falcon", "falcon-alibi"])
def test_falcons_heads_are_those_that_its_attention_splits_off(family):
    """Also where fewer heads of keys are projected than the attention keeps (Falcon-40B), and where there is one (7B)."""
    served = load(family)
    ids = served.prompts[0]
    (out,) = served.lm.generate([ids], SamplingParams(max_tokens=0), capture=["q.1", "k.1", "v.1"])
    path = f"{served.lm.model_spec.family.layers}.1.self_attention"
    found, _ = states_of(served.oracle, {"qkv": SitePoint(f"{path}.query_key_value", "output")}, ids)
    parts = served.oracle.get_submodule(path)._split_heads(found["qkv"][None])
    for kind, expected in zip("qkv", parts, strict=True):
        rows = out.activations[f"{kind}.1"]
        copies = expected.shape[2] // rows.shape[1]
        torch.testing.assert_close(rows.repeat_interleave(copies, 1), expected[0], **TOLERANCE)
    served.lm.shutdown()


@BY_MECHANISM
def test_the_contributions_add_up_to_the_stream(served):
    spec = served.lm.model_spec
    (out,) = served.lm.generate(
        [served.prompts[2]], SamplingParams(max_tokens=0), capture=[*points_of(served.lm.model_spec)]
    )
    found, kinds = out.activations, spec.family.points
    for layer in range(spec.num_hidden_layers):
        before, after = found[f"resid_pre.{layer}"], found[f"resid_post.{layer}"]
        if "attn_out" in kinds and "resid_mid" in kinds:
            torch.testing.assert_close(before + found[f"attn_out.{layer}"], found[f"resid_mid.{layer}"], **TOLERANCE)
        if "mlp_out" in kinds and "resid_mid" in kinds:
            torch.testing.assert_close(found[f"resid_mid.{layer}"] + found[f"mlp_out.{layer}"], after, **TOLERANCE)
        elif "attn_out" in kinds and "mlp_out" in kinds:
            both = found[f"attn_out.{layer}"] + found[f"mlp_out.{layer}"]
            torch.testing.assert_close(before + both, after, **TOLERANCE)


def edited(served: Served, kind: str) -> Iterator[tuple[str, SitePoint, Callable[..., torch.Tensor], Steer]]:
    """(site, where transformers has it, the edit there, the same declared) in each layer."""
    spec, points = served.lm.model_spec, points_of(served.lm.model_spec)
    vector = torch.linspace(-1, 1, spec.width(kind))
    for site, point in points.items():
        if site.partition(".")[0] == kind:
            yield site, point, lambda h: h + vector, Steer(site, vector)


@BY_MECHANISM
@pytest.mark.thin(9)
@pytest.mark.parametrize("kind", ["embed", "attn_out", "mlp_out", "resid_post", "final_norm"])
def test_a_declared_steer_is_the_edit_in_transformers(served, kind):
    if kind not in served.lm.model_spec.family.points:
        pytest.skip("the family has no such site")
    for _, point, edit, steer in edited(served, kind):
        outs = served.lm.generate(served.prompts, GREEDY, interventions=[[steer], None, [steer]], capture=["logits"])
        for ids, out, acts in zip(served.prompts, outs, (True, False, True), strict=True):
            edits: Any = {point: edit} if acts else {}
            _, expected = states_of(served.oracle, {}, ids + out.token_ids[:-1], edits)
            torch.testing.assert_close(
                out.activations["logits"], expected[-len(out.activations["logits"]) :], **TOLERANCE
            )


@BY_MECHANISM
@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_a_steer_of_a_part_of_a_projection_is_the_edit_in_transformers(served, kind):
    spec = served.lm.model_spec
    if kind not in spec.family.points or not spec.family.is_slice(kind):
        pytest.skip("the site is a whole output")
    width = torch.linspace(-1, 1, spec.width(kind))
    for site, point in points_of(served.lm.model_spec).items():
        if site.partition(".")[0] != kind:
            continue

        def edit(output: torch.Tensor) -> torch.Tensor:
            whole = torch.zeros_like(output[0])
            index = part_of(spec, kind, torch.arange(output.shape[-1]).expand(1, -1))[0]
            whole[:, index] = width
            return output + whole

        ids = served.prompts[2]
        (out,) = served.lm.generate([ids], GREEDY, interventions=Steer(site, width), capture=["logits"])
        _, expected = states_of(served.oracle, {}, ids + out.token_ids[:-1], {point: edit})
        torch.testing.assert_close(out.activations["logits"], expected[-len(out.activations["logits"]) :], **TOLERANCE)


@BY_MECHANISM
def test_a_steer_between_attention_and_mlp_changes_the_stream(served):
    """At `resid_mid` it is the steer of the attention's contribution."""
    kinds = served.lm.model_spec.family.points
    if "resid_mid" not in kinds or "attn_out" not in kinds:
        pytest.skip("the family has no such site")
    vector = torch.linspace(-1, 1, served.lm.model_spec.hidden_size)
    at_mid, at_attention = (
        served.lm.generate(
            [served.prompts[0]], GREEDY, interventions=[Steer(f"{kind}.0", vector)], capture=["logits", "resid_mid.0"]
        )[0]
        for kind in ("resid_mid", "attn_out")
    )
    assert at_mid.token_ids == at_attention.token_ids
    for name in ("logits", "resid_mid.0"):
        torch.testing.assert_close(at_mid.activations[name], at_attention.activations[name], **TOLERANCE)


@BY_MECHANISM
def test_a_trace_reads_and_edits_as_transformers_does(served):
    lm, spec, ids = served.lm, served.lm.model_spec, served.prompts[0]
    vector = torch.linspace(-1, 1, spec.hidden_size)
    for layer in range(spec.num_hidden_layers):
        path = f"{spec.family.layers}.{layer}"
        with lm.trace(ids):
            block = lm.get(path)
            read = first(block.output).clone().save()  # pyright: ignore[reportAttributeAccessIssue]
            first(block.output)[:] += vector
            logits = lm.output.logits.save()
        point = SitePoint(path, "output")
        found, _ = states_of(served.oracle, {"read": point}, ids)
        _, expected = states_of(served.oracle, {}, ids, {point: lambda h: h + vector})
        torch.testing.assert_close(read[0], found["read"], **TOLERANCE)
        torch.testing.assert_close(logits[0], expected, **TOLERANCE)
