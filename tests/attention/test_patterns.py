"""Captured attention patterns: transformers' eager attentions are the oracle, and patterns times v give z."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import CONFIGS, held
from helpers_declared import lms
from helpers_runner import random_ids

from pymllm_interp import Activations, Capture, Patch, SamplingParams, Scale
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.hooks.bind import DeclaredLimits
from pymllm_interp.hooks.bound_hooks import BoundHooks
from pymllm_interp.hooks.declared import Declared
from pymllm_interp.interventions import Generated, Knockout
from pymllm_interp.wire.specs import capture_of, to_json

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gpt_neox", "gpt_oss"]
PARAMS = SamplingParams(temperature=0, max_tokens=5)
WAIT = 600


@torch.no_grad()
def attentions(model: Any, ids: list[int]) -> tuple[torch.Tensor, ...]:
    """[heads, queries, keys] by layer, of the eager attention in one pass."""
    return tuple(weights[0] for weights in model(torch.tensor([ids]), output_attentions=True).attentions)


def rows_of(positions: Any, prompt_len: int, count: int) -> list[int]:
    """The positions below `count`, written without the code under test."""
    match positions:
        case "all":
            return list(range(count))
        case "prompt":
            return list(range(prompt_len))
        case "generated":
            return list(range(prompt_len, count))
        case Generated():
            return list(range(prompt_len + positions.start, count, positions.step))
    return sorted(p % prompt_len for p in positions)


def assert_patterns(model: Any, prompt: list[int], specs: list[Capture], out: Any, tolerance: float = 1e-5) -> None:
    ids = (prompt + out.token_ids)[:-1]
    wanted, layers = attentions(model, ids), model.config.num_hidden_layers
    for spec in specs:
        named = range(layers) if "*" in str(spec.site) else [int(str(spec.site).rpartition(".")[2]) % layers]
        rows = rows_of(spec.positions, len(prompt), len(ids))
        for layer in named:
            found = out.activations[f"pattern.{layer}"]
            reference = wanted[layer].transpose(0, 1)[rows]
            if spec.heads is not None:
                reference = reference[:, list(spec.heads)]  # pyright: ignore
            assert found.shape == reference.shape == (len(rows), reference.shape[1], len(ids))
            torch.testing.assert_close(found, reference, rtol=tolerance, atol=tolerance)
            assert out.activations.positions[f"pattern.{layer}"].tolist() == rows
            assert out.activations.token_ids[f"pattern.{layer}"].tolist() == [ids[row] for row in rows]


def random_captures(rng: random.Random, model: Any, prompt_len: int) -> list[Capture]:
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    specs = []
    for layer in rng.sample(range(layers), rng.randrange(1, layers + 1)):
        some = sorted(rng.sample(range(prompt_len), min(3, prompt_len)))
        positions = rng.choice(["all", "prompt", "generated", [-1], some, Generated(1, None, 2)])
        chosen = rng.choice([None, rng.sample(range(heads), 2), [-1]])
        specs.append(Capture(f"pattern.{layer}", positions=positions, heads=chosen))
    return specs


@pytest.mark.parametrize("family", FAMILIES)
def test_patterns_equal_transformers_under_chunks_and_preemption(family: str, lm_of: Any, oracle: Any) -> None:
    """Sliding windows, soft-caps and shared keys; prompts of several chunks, decode rows, requests that give way."""
    rng, model = random.Random(family), oracle(family)
    lm = lm_of(family, kv_cache_tokens=44, page_size=4, max_num_tokens=7)
    prompts = [random_ids(rng.randrange(2, 20), seed=i) for i in range(9)]
    specs = [random_captures(rng, model, len(prompt)) for prompt in prompts]
    before = lm.engine.stats()["preempted"]
    with held(lm):
        handles = [lm.submit(p, replace(PARAMS, max_tokens=8), capture=s) for p, s in zip(prompts, specs, strict=True)]
    for prompt, captures, handle in zip(prompts, specs, handles, strict=True):
        assert_patterns(model, prompt, captures, handle.result(WAIT))
    assert lm.engine.stats()["preempted"] > before


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_reused_prefix_gives_its_keys_and_wanted_rows_are_computed(family: str, lm_of: Any, oracle: Any) -> None:
    lm, model = lm_of(family, page_size=4), oracle(family)
    base = random_ids(14, seed=5)
    plain = lm.generate([base], PARAMS)[0]
    for positions, cached in (([-1], 12), ("generated", 12), ([6, 10], 4), ("all", 0)):
        captures = [Capture("pattern.*", positions=positions)]
        (out,) = lm.generate([base], PARAMS, capture=captures)
        assert out.receipt.num_cached_tokens == cached and out.token_ids == plain.token_ids
        assert_patterns(model, base, captures, out)
    counts = {entry.site: (entry.prompt_rows, entry.generated_rows) for entry in out.receipt.captures}
    assert counts["pattern.0"] == (14, 4)


def test_patterns_times_v_are_z(lm_of: Any) -> None:
    lm, prompt = lm_of("qwen3"), random_ids(11, seed=2)
    (out,) = lm.generate([prompt], PARAMS, capture=["pattern.*", "v.*", "z.*"])
    shared = lm.hf_config.num_attention_heads // lm.hf_config.num_key_value_heads
    for layer in range(lm.hf_config.num_hidden_layers):
        values = out.activations[f"v.{layer}"].repeat_interleave(shared, 1)
        z = torch.einsum("phk,khd->phd", out.activations[f"pattern.{layer}"], values)
        torch.testing.assert_close(out.activations[f"z.{layer}"], z, rtol=1e-4, atol=1e-5)
    assert out.activations.stack("pattern").shape[:2] == (lm.hf_config.num_hidden_layers, 15)


def test_knockouts_and_ops_show_in_patterns(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), random_ids(9, seed=3)
    edits = [Knockout(1, from_=-1, to=[0, 3], heads=[2]), Scale("q.2", 0)]
    (out,) = lm.generate([prompt], PARAMS, capture=["pattern.1", "pattern.2", "z.1", "v.1"], interventions=edits)
    row = out.activations["pattern.1"][8]
    assert row[2, [0, 3]].eq(0).all() and row[1, [0, 3]].gt(0).all()
    torch.testing.assert_close(row.sum(-1), torch.ones(len(row)))
    even = out.activations["pattern.2"][8, :, :9]
    torch.testing.assert_close(even, torch.full_like(even, 1 / 9))
    shared = lm.hf_config.num_attention_heads // lm.hf_config.num_key_value_heads
    values = out.activations["v.1"].repeat_interleave(shared, 1)
    z = torch.einsum("phk,khd->phd", out.activations["pattern.1"], values)
    torch.testing.assert_close(out.activations["z.1"], z, rtol=1e-4, atol=1e-5)


def test_others_keep_their_bits_and_results_are_kept(lm_of: Any, tmp_path: Any) -> None:
    lm, prompts = lm_of("llama"), [random_ids(9, seed=3), random_ids(7, seed=4)]
    alone = lm.generate(prompts, PARAMS, capture=["final_norm"])
    beside = lm.generate(prompts, PARAMS, capture=[["final_norm", "blocks.1.attn.hook_pattern"], ["final_norm"]])
    for one, two in zip(alone, beside, strict=True):
        assert torch.equal(one.activations["final_norm"], two.activations["final_norm"])
    found = beside[0].activations
    assert torch.equal(found["blocks.1.attn.hook_pattern"], found["pattern.1"]) and found.layers("pattern") == [1]
    found.save(tmp_path / "states.safetensors")
    again = Activations.load(tmp_path / "states.safetensors")
    assert torch.equal(again["pattern.1"], found["pattern.1"])
    half = lm.generate(prompts[:1], PARAMS, capture=[Capture("pattern.1", dtype="float16")])[0].activations["pattern.1"]
    assert torch.equal(half, found["pattern.1"].half())


@pytest.mark.parametrize("how", ["trace", "eager", "gradients"])
def test_traces_capture_patterns_too(how: str, lm_of: Any, oracle: Any) -> None:
    lm, prompt = lm_of("llama"), random_ids(8, seed=6)
    kwargs: dict[str, Any] = {"trace": {}, "eager": {"output_attentions": True}, "gradients": {"grad": True}}[how]
    with lm.trace(prompt, capture=["pattern.1"], **kwargs) as tracer:
        lm.model.layers[0].output.save()
    (wanted,) = (attentions(oracle("llama"), prompt)[1].transpose(0, 1),)
    torch.testing.assert_close(tracer.activations["pattern.1"], wanted, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def in_segments(model_folder: Any) -> Iterator[Any]:
    with lms("graphs", model_folder) as load:
        yield load("llama", page_size=4, max_num_tokens=7)


def test_passes_as_on_cuda_run_their_attention_by_kernel_where_a_row_is_wanted(in_segments: Any, oracle: Any) -> None:
    prompts = [random_ids(9, seed=1), random_ids(6, seed=2)]
    captures = [Capture("pattern.1", positions=[-1]), Capture("pattern.2", positions="generated")]
    out, plain = in_segments.generate(prompts, PARAMS, capture=[captures, []])
    assert_patterns(oracle("llama"), prompts[0], captures, out)
    (alone,) = in_segments.generate(prompts[1:], PARAMS)
    assert plain.token_ids == alone.token_ids and out.receipt.steps["segments"]


@pytest.mark.parametrize(
    ("capture", "error"),
    [
        (["pattern.9"], "there is no layer 9"),
        ([Capture("pattern.1", heads=[99])], r"there is no head 99; pattern has \d+ \(num_attention_heads\)"),
        ([Capture("pattern.1", reduce="mean")], "patterns are not reduced"),
        ([Capture("pattern.1", positions=[50])], "beyond the prompt"),
        (["pattern.1", Capture("pattern.*", heads=[0])], "pattern.1 is captured twice, in two ways"),
        (["attn_scores.1"], r"Capture\('pattern.3'\) reads attention patterns"),
    ],
)  # fmt: skip
def test_what_cannot_be_captured_is_refused(capture: Any, error: str, lm_of: Any) -> None:
    lm = lm_of("llama")
    steps = lm.engine.num_steps
    with pytest.raises(ValueError, match=error):
        lm.generate([[1, 2, 3]], PARAMS, capture=capture)
    assert lm.engine.num_steps == steps


def test_memory_ops_and_harvests_are_refused(lm_of: Any, tmp_path: Any) -> None:
    lm, limits = lm_of("llama"), DeclaredLimits(4, 99, 1 << 12)
    with pytest.raises(ValueError, match="max_capture_bytes"):
        BoundHooks.of([], lm.model_spec, 40, limits, [Capture("pattern.*")], longest=44)
    last = Declared(BoundHooks.of([], lm.model_spec, 40, limits, [Capture("pattern.0", positions=[-1])], longest=44))
    assert last.patterns is not None and last.patterns.num_bytes == lm.hf_config.num_attention_heads * 44 * 4
    with pytest.raises(ValueError, match=r"to edit them, see 'Inside attention'"):
        Patch("pattern.1", torch.zeros(3))
    with pytest.raises(ValueError, match="rows of patterns have the lengths of their documents"):
        lm.harvest([[1, 2, 3]], capture=["pattern.0"], out=tmp_path)


def test_http_carries_them() -> None:
    spec = Capture("pattern.1", positions=[-1], heads=[0, 2])
    assert capture_of(to_json(spec)) == spec and capture_of("pattern.{0..2}") == Capture("pattern.{0..2}")
    assert ModelSpec.of(CONFIGS["llama"](), torch.float32).shape("pattern") == (9,)
