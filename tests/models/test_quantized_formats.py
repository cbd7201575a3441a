"""Each format of quantised weights against compressed-tensors' golden files, or the format's formula; bad ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_quantized import FORMATS, awq, fp8_blocks, fp8_channel, gptq
from safetensors.torch import load_file
from transformers import PretrainedConfig

from pymllm_interp.layers.quantization.weight import QuantizedWeight, concatenated, quantized
from pymllm_interp.models.weights.formats import QuantizationFormat
from pymllm_interp.models.weights.loading import WeightsError

GOLDEN = Path(__file__).parent.parent / "golden" / "quantized"
CASES = sorted(path.stem for path in GOLDEN.glob("*.json"))
KINDS = {"fp8": "fp8", "w4a16": "uint4", "w8a16": "uint8", "mxfp4": "fp4"}


def format_of(settings: dict[str, Any]) -> QuantizationFormat:
    found = QuantizationFormat.of(PretrainedConfig(quantization_config=settings))
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_weight_is_read_as_compressed_tensors_reads_it(case: str) -> None:
    stored = format_of(json.loads((GOLDEN / f"{case}.json").read_text()))
    tensors = load_file(GOLDEN / f"{case}.safetensors")
    original, expected = tensors.pop("original"), tensors.pop("expected")
    weight = stored.read("layer", tensors, torch.bfloat16)
    assert weight.kind == stored.kind == KINDS[case.partition("-")[0]]
    assert torch.equal(weight.dequantize(), expected)
    assert torch.nn.functional.cosine_similarity(original.float().flatten(), expected.float().flatten(), 0) > 0.98
    assert stored.group_size in (None, weight.group_size)


def test_there_is_a_golden_file_of_each_kind() -> None:
    assert {case.partition("-")[0] for case in CASES} == KINDS.keys()


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_weight_is_what_the_format_s_formula_makes_of_it(form: str) -> None:
    settings, store = FORMATS[form]
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    tensors, expected = store(weight)
    read = format_of(settings).read("layer", tensors, torch.float32)
    assert torch.equal(read.dequantize(), expected)
    assert torch.equal(read.dequantize(torch.bfloat16), expected.bfloat16())
    for part, rows in zip(read.split([8, 32]), expected.split([8, 32]), strict=True):
        assert torch.equal(part.dequantize(), rows)


def test_parts_are_concatenated_only_where_their_groups_agree() -> None:
    weights = [torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)) for rows in (8, 16)]
    whole = concatenated([quantized(weight, "uint4", 16) for weight in weights])
    assert whole is not None
    assert torch.equal(
        whole.dequantize(), torch.cat([quantized(weight, "uint4", 16).dequantize() for weight in weights])
    )
    assert concatenated([quantized(weights[0], "uint4", 16), quantized(weights[1], "uint4", 8)]) is None
    assert concatenated([quantized(weights[0], "fp8"), quantized(weights[1], "uint8")]) is None


@pytest.mark.parametrize(("kind", "error"), [("fp8", 2**-4), ("uint8", 1 / 250), ("uint4", 1 / 13)])
@pytest.mark.parametrize("group", [None, 24])
def test_rounding_is_to_the_nearest_code(kind: str, error: float, group: int | None) -> None:
    weight = torch.randn(10, 52, generator=torch.Generator().manual_seed(1))  # the last group is smaller
    weight[3] = 0
    read = quantized(weight, kind, group)
    groups = torch.nn.functional.pad(weight, (0, -52 % (group or 52))).unflatten(1, (-1, group or 52))
    largest = groups.abs().amax(-1, keepdim=True).expand_as(groups).flatten(1)[:, :52]
    allowed = weight.abs() * error + largest / 448 * 2**-9 if kind == "fp8" else largest * error
    assert bool(((read.dequantize() - weight).abs() <= allowed + 1e-7).all())
    assert bool((read.dequantize()[3] == 0).all())


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors.items() if key != name}


def test_bad_tensors_are_refused_with_the_layer_and_the_fix() -> None:
    weight = torch.randn(16, 32)
    fp8, words, gptq_words = fp8_channel(weight)[0], awq(weight)[0], gptq(weight)[0]
    bad: list[tuple[str, dict[str, torch.Tensor], str]] = [
        ("fp8-channel", without(fp8, "weight_scale"), "weight_scale is missing"),
        ("fp8-channel", fp8 | {"weight_scale": torch.ones(3, 1)}, "its scales are"),
        ("fp8-channel", fp8 | {"weight_scale": torch.full((16, 1), torch.nan)}, "not finite"),
        ("fp8-channel", fp8 | {"weight": fp8["weight"].float().to(torch.float8_e5m2)}, "float8_e5m2"),
        ("fp8-channel", fp8 | {"weight": torch.full((16, 32), torch.nan).to(torch.float8_e4m3fn)}, "are NaN"),
        ("awq", without(words, "qzeros"), "qzeros is missing"),
        ("awq", words | {"scales": torch.ones(5, 16)}, "do not make 32 inputs"),
        ("gptq", without(gptq_words, "scales"), "scales is missing"),
        ("gptq", gptq_words | {"g_idx": gptq_words["g_idx"].flip(0)}, "desc_act"),
    ]  # fmt: skip
    for form, tensors, message in bad:
        with pytest.raises(WeightsError, match=f"model.layer is quantised: .*{message}.*; .*"):
            format_of(FORMATS[form][0]).read("model.layer", tensors, torch.float32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes', which is not supported"),
        ({"quant_method": "hqq"}, "'hqq', which is not supported"),
        (FORMATS["gptq"][0] | {"desc_act": True}, "desc_act=True .*desc_act=False"),
        (FORMATS["gptq"][0] | {"bits": 3}, "3 bits are not read"),
        (FORMATS["awq"][0] | {"version": "gemv"}, "'gemm' version"),
        (FORMATS["w4a16"][0] | {"format": "marlin-24"}, "'marlin-24' is not read"),
        (FORMATS["w4a16"][0] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 6, "type": "int"}}}},
            "6 bits",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8}}
                },
            },
            "W8A8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "actorder": "group"}}},
            },
            "actorder='group' reorders",
        ),
    ],
)
def test_schemes_that_are_not_read_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        QuantizationFormat.of(PretrainedConfig(quantization_config=settings), "m")


def test_all_codes_of_fp8_have_their_values() -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)[None]
    codes = codes[:, ~codes.float()[0].isnan()]
    weight = QuantizedWeight("fp8", codes, torch.ones(1, 1), None, codes.shape[1], torch.float32)
    assert torch.equal(weight.dequantize(), codes.float()) and codes.shape[1] == 254


def test_an_unquantised_config_has_no_format() -> None:
    assert QuantizationFormat.of(PretrainedConfig()) is None
    assert isinstance(quantized(torch.ones(2, 2)), QuantizedWeight)


def test_a_block_of_fp8_may_be_wider_than_the_weight() -> None:
    """As of the last projection of small experts. The scales are one column, and one for several rows."""
    tensors, value = fp8_blocks(torch.randn(50, 16, generator=torch.Generator().manual_seed(0)), group=32, rows=24)
    form = QuantizationFormat("fp8", "fp8", 32, {"weight_block_size": [24, 32]})
    assert tensors["weight_scale_inv"].shape == (3, 1)
    assert torch.allclose(form.read("x", tensors, torch.float32).dequantize(), value)
