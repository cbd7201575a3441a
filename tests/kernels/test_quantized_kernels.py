"""Triton's kernels for quantised weights against the dequantised product: compiled on CUDA, interpreted elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels' tests need the package triton")
from pymllm_interp.kernels.products.many_rows import parts_of_many
from pymllm_interp.kernels.products.quantized import dequantize, parts_of, product
from pymllm_interp.kernels.products.quantized_blocks import block_of
from pymllm_interp.kernels.products.rounded_rows import round_rows
from pymllm_interp.layers.quantization.gemm import rounded
from pymllm_interp.layers.quantization.weight import QuantizedWeight, quantized

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_DEVICE = [(rows, torch.bfloat16) for rows in (1, 2, 16, 33, 70, 256)] if DEVICE == "cuda" else []
"""The interpreter's matrix products take no bfloat16."""
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def weight_of(kind: str, rows: int, width: int, group: int | None, zeros: bool = False) -> QuantizedWeight:
    """A random weight; with `zeros`, those of each group differ."""
    draw = torch.Generator().manual_seed(rows + width)
    made = torch.randn(rows, width, generator=draw)
    if kind != "fp4":
        found = quantized(made, kind, group)
        if zeros:
            found = replace(found, zeros=torch.randint(1, 16, found.scales.shape, generator=draw).to(torch.uint8))
        return paired(found)
    codes = torch.randint(0, 256, (rows, width // 2), generator=draw).to(torch.uint8)
    scales = torch.exp2(torch.randint(-4, 2, (rows, width // 32), generator=draw).float()).bfloat16()
    return paired(QuantizedWeight("fp4", codes, scales, None, 32, torch.float32))


def paired(weight: QuantizedWeight) -> QuantizedWeight:
    """On the device, as its kernels read it."""
    if weight.kind.endswith("4"):
        block = block_of(4, weight.shape[1], weight.group_size)
        assert block is not None
        weight = weight.paired(block // 2)
    return weight.to(DEVICE)


def multiplied(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    form = weight.group_size, weight.pair, weight.scale_dtype
    return product(x, weight.kind, weight.codes, weight.scales, weight.zeros, bias, *form)


def unit_rows(width: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, in]: each row is one at an input, and zero elsewhere. Its product is a column of the weight."""
    return torch.eye(width, device=DEVICE, dtype=dtype)[torch.arange(rows) % width]


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("kind", "width", "group", "zeros"),
    [
        ("fp8", 96, None, False), ("fp8", 256, 128, False), ("fp8", 200, 128, False), ("uint8", 160, 32, True),
        ("uint4", 256, 128, False), ("uint4", 192, 64, True), ("uint4", 96, None, False), ("fp4", 96, 32, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float16), (3, torch.float16), (70, torch.float16), *ON_DEVICE])
def test_a_product_is_that_of_the_dequantised_weight(
    kind: str, width: int, group: int | None, zeros: bool, rows: int, dtype: torch.dtype
) -> None:
    weight = weight_of(kind, 75, width, group, zeros)
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(1, rows, width, generator=draw).to(DEVICE, dtype)
    bias = torch.randn(75, generator=draw).to(DEVICE, dtype) if rows != 3 else None
    expected = x.double() @ weight.dequantize(torch.float32).double().T + (0 if bias is None else bias.double())
    got = multiplied(x, weight, bias)
    assert got.dtype is dtype and got.shape == (1, rows, 75)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        got.double(), expected, rtol=eps, atol=1e-3 * float(expected.abs().max()) * (eps / 2**-10)
    )


@pytest.mark.parametrize("kind", ["fp8", "uint4"])
def test_wide_weights_are_summed_in_parts_in_one_order(kind: str) -> None:
    weight = weight_of(kind, 40, 2304, 128)
    assert parts_of(40, 2304, 128, 20) == (2, 1152)
    x = torch.randn(20, 2304, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    expected = x.double() @ weight.dequantize(torch.float32).double().T
    whole = multiplied(x, weight, None)
    assert float((whole.double() - expected).abs().max()) < 2e-3 * float(expected.abs().max())
    assert torch.equal(multiplied(x, weight, None), whole)
    some = multiplied(x[:16].contiguous(), weight, None)
    assert float((some.double() - whole[:16].double()).abs().max()) < 2e-3 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("kind", "width", "group", "zeros"),
    [("fp8", 200, None, False), ("fp8", 384, 128, False), ("uint8", 256, 128, True), ("uint4", 256, None, False),
     ("uint4", 384, 128, True)],
)  # fmt: skip
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "dtype"), [(129, torch.float16), *(pair for pair in ON_DEVICE if pair[0] == 256)])
def test_many_rows_are_multiplied_by_the_dequantised_weight(
    kind: str, width: int, group: int | None, zeros: bool, scales: torch.dtype, rows: int, dtype: torch.dtype
) -> None:
    """Also where it is rounded: an input that is one other than zero shows the weight."""
    weight = weight_of(kind, 150, width, group, zeros)
    weight = replace(weight, scales=weight.scales.to(scales))
    same, stored = multiplied(unit_rows(width, rows, dtype), weight, None), weight.scales
    weight = replace(weight, scales=stored.float(), scale_dtype=scales)
    assert torch.equal(multiplied(unit_rows(width, rows, dtype), weight, None), same)  # whichever dtype has the scales
    draw = torch.Generator().manual_seed(rows)
    x, bias = torch.randn(rows, width, generator=draw), torch.randn(150, generator=draw)
    x, bias = x.to(DEVICE, dtype), bias.to(DEVICE, dtype)
    rounded_weight = weight.dequantize(torch.float32 if group is None else dtype).double()
    expected = x.double() @ rounded_weight.T + bias.double()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(multiplied(x, weight, bias).double(), expected, rtol=eps, atol=1e-4)
    shown = same[: min(rows, width)]
    assert torch.equal(shown.T, weight.dequantize(dtype)[:, : len(shown)])


@pytest.mark.parametrize("kind", ["fp8", "uint4"])
def test_many_rows_have_parts_where_the_tiles_are_few(kind: str) -> None:
    weight = weight_of(kind, 40, 2304, 128)
    assert parts_of_many(1, 2304) == (2, 1152) and parts_of_many(66, 4096) == (2, 2048)
    assert parts_of_many(67, 4096) == (1, 4096) == parts_of_many(500, 4096)
    x = torch.randn(140, 2304, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    bias = torch.randn(40, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.float16)
    expected = x.double() @ weight.dequantize(torch.float16).double().T + bias.double()
    whole = multiplied(x, weight, bias)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(multiplied(x, weight, bias), whole)


@pytest.mark.parametrize(
    ("bits", "width", "group", "block"),
    [(8, 4096, 4096, 128), (8, 4096, 128, 128), (4, 4096, 64, 64), (4, 4096, 32, 32), (4, 64, 16, None), (8, 64, 16, 16),
     (4, 96, 96, 32), (4, 72, 72, None),
     (8, 96, 24, None), (4, 33, 33, None)],
)  # fmt: skip
def test_blocks_do_not_cross_groups(bits: int, width: int, group: int, block: int | None) -> None:
    assert block_of(bits, width, group) == block


@pytest.mark.parametrize("pair", [1, 16, 32])
@pytest.mark.parametrize("kind", ["uint4", "fp4"])
def test_a_weight_is_the_same_however_its_codes_are_paired(kind: str, pair: int) -> None:
    weight = weight_of(kind, 5, 64, 32, zeros=kind == "uint4")
    again = weight.paired(pair)
    assert again.pair == pair and torch.equal(again.dequantize(torch.float32), weight.dequantize(torch.float32))
    assert torch.equal(again.paired(weight.pair).codes, weight.codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kind", "width", "group", "zeros"),
    [
        ("fp8", 96, None, False), ("fp8", 200, 128, False), ("uint8", 160, 32, True), ("uint4", 192, 64, True),
        ("fp4", 96, 32, False),
    ],
)  # fmt: skip
def test_the_kernel_dequantises_as_torch_does(
    kind: str, width: int, group: int | None, zeros: bool, dtype: torch.dtype
) -> None:
    weight = weight_of(kind, 7, width, group, zeros)
    found = dequantize(weight.kind, weight.codes, weight.scales, weight.zeros, weight.group_size, weight.pair, dtype)
    assert torch.equal(found.cpu(), weight.to("cpu").dequantize(dtype))


def test_every_code_is_exact() -> None:
    """In the dtype of x, too, denormal codes included."""
    codes = torch.arange(256).to(torch.uint8)
    for kind in ("fp8", "uint8", "uint4", "fp4"):
        own = codes[(codes & 0x7F) != 0x7F] if kind == "fp8" else codes  # without NaN
        own = own[: len(own) // 32 * 32].view(-1, 32).to(DEVICE)
        width, pair = (64, 16) if kind.endswith("4") else (32, 1)
        stored = own.view(torch.float8_e4m3fn) if kind == "fp8" else own
        weight = QuantizedWeight(
            kind, stored, torch.ones(len(own), width // 32, device=DEVICE), None, 32, torch.float32, pair
        )
        exact = weight.to("cpu").dequantize(torch.float32)
        one = torch.eye(width, device=DEVICE, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float16)
        assert torch.equal(multiplied(one, weight, None).float().cpu().T, exact), kind


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 300), (3, 4096), (2, 5000)])
def test_rows_are_rounded_as_in_plain_torch(rows: int, width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    x = torch.randn(rows, width, generator=draw) * torch.tensor(10.0).pow(torch.arange(rows) - 2.0)[:, None]
    x = x.half()
    x[-1, 3:] = 0
    codes, scales = round_rows(x.to(DEVICE))
    expected, of_rows = rounded(x)
    assert codes.dtype is expected.dtype and scales.shape == (rows, 1)
    torch.testing.assert_close(scales.cpu(), of_rows, rtol=3e-7, atol=0)
    off = (codes.cpu().float() - expected.float()).abs()
    # A quotient's last bit decides between neighbours. Triton's interpreter loses a carry into the exponent: half of the value.
    share, far = (0.01, 1 / 7) if DEVICE == "cuda" else (0.1, 0.6)
    assert (off <= far * expected.float().abs() + 2**-9).all() and (off > 0).float().mean() < share


def test_a_row_of_zeros_has_codes_of_zero() -> None:
    codes, scales = round_rows(torch.zeros(2, 64, dtype=torch.float16, device=DEVICE))
    assert not codes.float().any() and (scales > 0).all()
