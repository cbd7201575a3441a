"""Quantised native models: equal to the same model with dequantised weights, at every site, by every way a pass runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import tiny_config
from helpers_adapters import write_adapter
from helpers_families import points_of, states_of
from helpers_quantized import write_quantized
from helpers_runner import random_ids
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.layers.gemm import Gemm
from pymllm_interp.layers.quantization.gemm import QuantizedGemm, scaled_product
from pymllm_interp.layers.quantization.weight import quantized
from pymllm_interp.models.weights.loading import WeightsError

PROMPTS = [random_ids(9, seed=1), random_ids(4, seed=2), random_ids(17, seed=3), random_ids(1, seed=4)]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
PAIRS = [
    ("llama", "awq"), ("llama", "fp8-channel"), ("mistral", "gptq"), ("qwen2", "w4a16"), ("qwen3", "fp8-blocks"),
    ("gemma", "w8a16"), ("gemma2", "fp8-tensor"), ("gemma3_text", "gptq-8"), ("gpt2", "gptq"), ("gpt_neox", "fp8-blocks"),
]  # fmt: skip
Load = Callable[..., LM]


@pytest.fixture
def load() -> Iterator[Load]:
    """(folder, **options) -> a new LM on the CPU in float32, which the test's end shuts down."""
    made: list[LM] = []

    def lm_of(folder: Path, **options: Any) -> LM:
        made.append(LM(folder, device="cpu", **({"dtype": "float32", "kv_cache_tokens": 1024} | options)))
        return made[-1]

    yield lm_of
    for lm in made:
        lm.shutdown()


def tokens_of(lm: LM, **options: Any) -> list[Any]:
    return [out.outputs[0].token_ids for out in lm.generate(PROMPTS, GREEDY, **options)]


@pytest.mark.parametrize(("family", "form"), PAIRS)
def test_every_site_is_as_with_dequantised_weights(
    family: str, form: str, load: Load, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Bit for bit our model with the dequantised weights, and transformers' within 1e-5."""
    folder = write_quantized(model_folder(family), tmp_path / "m", form, transposed=family == "gpt2")
    lm, plain = load(folder), load(folder / "plain")
    points = points_of(lm.model_spec)
    outs, expected = (model.forward(PROMPTS, capture=list(points)) for model in (lm, plain))
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        folder / "plain", dtype=torch.float32, attn_implementation="eager"
    )
    for ids, out, own in zip(PROMPTS, outs, expected, strict=True):
        assert torch.equal(out.logits, own.logits)
        assert all(torch.equal(out.activations[site], own.activations[site]) for site in points)
        wanted = states_of(theirs, {}, ids)[1]
        assert float((out.logits - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))
    assert tokens_of(lm) == tokens_of(plain)
    assert any(isinstance(module, nn.Module) and getattr(module, "quantized", None) is not None
               for module in lm.runner.get_model().modules())  # fmt: skip


def test_traces_gradients_ops_and_adapters_are_as_with_dequantised_weights(
    load: Load, model_folder: Callable[[str], Path], oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    folder = write_quantized(model_folder("llama"), tmp_path / "m", "awq")
    adapter = write_adapter(tmp_path / "a", oracle("llama"), seed=1, rank=4)
    found = []
    for lm in (load(folder), load(folder / "plain")):
        lm.adapters.load("a", adapter)
        with lm.trace(PROMPTS[0]):
            lm.model.layers[0].self_attn.q_proj.output[:] *= 2
            inside = lm.model.layers[1].mlp.down_proj.input.save()
            logits = lm.lm_head.output.save()
        with lm.trace(PROMPTS[0]):
            h = lm.model.layers[0].output
            loss = lm.lm_head.output.float().logsumexp(-1).sum()
            with loss.backward():
                grad = h.grad.save()
        with lm.trace(PROMPTS[0]):
            alone = lm.model.layers[0].self_attn.k_proj(lm.model.layers[0].self_attn.k_proj.input + 1).save()
        steered = lm.generate(
            PROMPTS, GREEDY, lora=["a", None, "a", None],
            interventions=[Steer("resid_post.1", torch.ones(lm.model_spec.hidden_size))],
        )  # fmt: skip
        found.append([inside, logits, grad, alone, [out.outputs[0].token_ids for out in steered]])
    for ours, theirs in zip(found[0][:-1], found[1][:-1], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert found[0][-1] == found[1][-1]


def test_layers_that_the_checkpoint_leaves_unquantised_stay_so(
    load: Load, model_folder: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One whole product, and one projection of a product: that product is dequantised, and a warning says so."""
    folder = write_quantized(
        model_folder("llama"), tmp_path / "m", "fp8-channel", keep=("0.mlp.down_proj", "1.self_attn.k_proj")
    )
    with caplog.at_level("WARNING"):
        lm, plain = load(folder), load(folder / "plain")
    layers = lm.runner.get_model().get_submodule("model.layers")
    assert layers[0].mlp.down_proj.quantized is None and layers[0].mlp.up_proj.quantized is not None
    assert layers[1].self_attn.q_proj.quantized is None and isinstance(layers[1].self_attn.q_proj.weight, nn.Parameter)
    assert "layers.1.self_attn.q_proj" in caplog.text and "it is dequantised" in caplog.text
    assert tokens_of(lm) == tokens_of(plain)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_rounded_at_load(
    family: str, load: Load, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """`quantize="fp8"` is the same as a checkpoint that was rounded before; the head is left."""
    lm = load(model_folder(family), quantize="fp8")
    tensors = load_file(model_folder(family) / "model.safetensors")
    for path, module in lm.runner.get_model().named_modules():
        if getattr(module, "quantized", None) is not None:
            own = tensors[f"{path}.weight"]
            value = quantized(own.T.contiguous() if family == "gpt2" else own).dequantize()
            tensors[f"{path}.weight"] = value.T.contiguous() if family == "gpt2" else value
    head = lm.runner.get_model().lm_head
    assert head.quantized is None and isinstance(head.weight, nn.Parameter)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((model_folder(family) / "config.json").read_text())
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    assert tokens_of(lm) == tokens_of(load(plain))


def test_random_weights_are_rounded_to_the_config_s_format(
    load: Load, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = write_quantized(model_folder("llama"), tmp_path / "m", "w4a16")
    lm, plain = load(folder, load_format="dummy"), load(model_folder("llama"), load_format="dummy")
    ours, theirs = (own.runner.get_model().get_submodule("model.layers.0.mlp.up_proj") for own in (lm, plain))
    assert ours.quantized.kind == "uint4" and ours.quantized.group_size == 8
    assert torch.equal(ours.weight, quantized(theirs.weight.detach(), "uint4", 8).dequantize())


def test_weights_read_as_dequantised_and_refuse_writes(load: Load, model_folder: Callable[[str], Path]) -> None:
    lm = load(model_folder("llama"), quantize="fp8")
    attention = lm.runner.get_model().get_submodule("model.layers.0.self_attn")
    before = tokens_of(lm)
    for module in (attention.q_proj, attention.o_proj):
        weight: Any = module.weight
        assert torch.equal(weight, module.quantized.dequantize()) and weight.shape == (
            module.out_features,
            module.in_features,
        )
        product = weight * 2
        product += 1  # results are plain tensors
        assert type(product) is torch.Tensor
        zeros = torch.zeros(weight.shape)
        zeros.copy_(weight)
        assert torch.equal(zeros, weight)
        row, data = weight[0], weight.data
        writes: list[Callable[[], Any]] = [
            lambda w=weight: w.add_(1), lambda w=weight: w.__setitem__(0, 0), lambda r=row: r.zero_(),
            lambda d=data: d.mul_(2), lambda w=weight: w.t().fill_(0), lambda w=weight: w.__iadd__(1),
            lambda w=weight: torch.add(w, 1, out=w), lambda w=weight, z=zeros: setattr(w, "data", z),
            lambda m=module, z=zeros: setattr(m, "weight", nn.Parameter(z, False)),
        ]  # fmt: skip
        for write in writes:
            with pytest.raises(NotImplementedError, match=r"self_attn\.\w_proj\.weight` is quantised: .*LoRA adapter"):
                write()
    copied = copy.deepcopy(attention.q_proj)
    assert type(copied) is nn.Linear and type(copied.weight) is nn.Parameter
    copied.weight.zero_()
    assert tokens_of(lm) == before


def test_the_fingerprint_covers_codes_and_scales(
    load: Load, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    first, again = (load(model_folder("llama"), quantize="fp8").runner.model_state for _ in range(2))
    plain = load(model_folder("llama")).runner.model_state
    assert first.fingerprint() == again.fingerprint() != plain.fingerprint()
    lm = load(model_folder("llama"), quantize="fp8")
    state, was, version = lm.runner.model_state, first.fingerprint(), lm.runner.model_state.version
    lm.runner.get_model().get_submodule("model.layers.1.mlp.up_proj").weight_scales.mul_(2)
    assert state.version > version and state.fingerprint() != was
    folder = write_quantized(model_folder("llama"), tmp_path / "m", "gptq")
    assert load(folder).runner.model_state.fingerprint() not in (first.fingerprint(), plain.fingerprint())


def test_a_gradient_keeps_no_dequantised_weight() -> None:
    """The backward pass dequantises again: nothing of the weight's size is saved."""
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    gemm, x = QuantizedGemm(quantized(weight), torch.ones(24)), torch.randn(3, 16, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = gemm(x)
    dense = gemm.weight.dequantize()
    reference = x.detach().clone().requires_grad_()
    expected = Gemm([dense], dense, torch.ones(24))(reference)
    assert torch.equal(out, expected) and not saved
    out.square().sum().backward()
    expected.square().sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, reference.grad)


def test_rounded_rows_follow_the_formula_of_scaled_products() -> None:
    """`scaled_mm` has a CPU kernel with the CUDA kernel's arguments. A row does not depend on the others."""
    draw = torch.Generator().manual_seed(0)
    weight = quantized(torch.randn(48, 64, generator=draw).bfloat16())
    x = torch.randn(1, 5, 64, generator=draw).bfloat16() * torch.tensor([1, 100, 1e-3, 0, 7])[:, None].bfloat16()
    bias = torch.randn(48, generator=draw).bfloat16()
    out = scaled_product(x, weight, bias)
    scales = x.float().abs().amax(-1, keepdim=True) / 448
    codes = torch.where(scales == 0, 0, x.float() / scales).to(torch.float8_e4m3fn).float()
    expected = (codes * scales) @ weight.dequantize(torch.float32).T + bias.float()
    assert out.dtype is torch.bfloat16 and torch.allclose(out.float(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(out[0, 3], bias) and torch.equal(scaled_product(x[:, 1:2], weight, bias), out[:, 1:2])
    exact = x[0, :3].float() @ weight.dequantize(torch.float32).T
    near = torch.nn.functional.cosine_similarity(scaled_product(x, weight, None)[0, :3].float(), exact)
    assert bool((near > 0.998).all())


def test_only_products_that_take_rounded_rows_round_them(load: Load, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.hidden_size, config.intermediate_size, config.architectures = 64, 72, ["LlamaForCausalLM"]
    config.head_dim = 16
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    layers = load(tmp_path / "base", quantize="fp8-w8a8").runner.get_model().get_submodule("model.layers")
    attention, mlp = layers[1].self_attn, layers[1].mlp
    assert attention._qkv.gemm.rounds_rows and attention.o_proj.gemm.rounds_rows and mlp._gate_up.gemm.rounds_rows
    assert not mlp.down_proj.gemm.rounds_rows  # 72 inputs
    folder = write_quantized(tmp_path / "base", tmp_path / "m", "fp8-blocks")
    layers = load(folder, quantize="fp8-w8a8").runner.get_model().get_submodule("model.layers")
    assert not layers[1].self_attn.o_proj.gemm.rounds_rows


def test_bad_checkpoints_are_refused_by_name(load: Load, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write_quantized(model_folder("llama"), tmp_path / "m", "fp8-channel")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def refuses(changed: dict[str, torch.Tensor], message: str, **options: Any) -> None:
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load(folder, **options)

    refuses(
        {k: t for k, t in tensors.items() if k != f"{name}_scale"}, r"up_proj is quantised: weight_scale is missing"
    )
    refuses({k: t for k, t in tensors.items() if not k.startswith(name)}, r"up_proj.* no weight")
    refuses(tensors | {name: tensors[name].view(torch.uint8)[:8].view(torch.float8_e4m3fn)}, "up_proj")
    refuses(tensors | {"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)}, "1 unexpected")
    refuses(tensors, "runs by its class in transformers, and quantised weights", impl="transformers")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    refuses(tensors, "no quantization_config")
    with pytest.raises(ValueError, match="quantize='int3'"):
        load(folder, quantize="int3")
    with pytest.raises(WeightsError, match="runs by its class"):
        load(model_folder("llama"), quantize="fp8", impl="transformers")
