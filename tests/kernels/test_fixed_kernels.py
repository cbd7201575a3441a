"""Kernels of batch-invariant mode: right, and with the same bits for a row in any company and in any cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels' tests need the package triton")
from pymllm_interp.attention.attention_backend import RadixAttention
from pymllm_interp.attention.decode_kernel import decode_attention_torch
from pymllm_interp.kernels import fixed_attention, triton_delta
from pymllm_interp.kernels.products import fixed, library

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
# The interpreter's matrix products take no bfloat16.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
pytestmark = [pytest.mark.gpu] if ON_GPU else []
SIZES = [(4096, 4096), (6144, 2560), (151, 4096)] if ON_GPU else [(130, 72), (33, 96)]
ROWS = [1, 2, 7, 16, 17, 63, 65, 129, 300] if ON_GPU else [1, 3, 17, 33]


@pytest.fixture(autouse=True)
def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies tiles by BLAS, where a row's bits depend on its place. Here by float64, rounded once."""
    if ON_GPU:
        return
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        found = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return interpreter.TensorHandle(found.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_of_a_product_has_the_same_bits_among_any_others(size: tuple[int, int], biased: bool) -> None:
    n, k = size
    x, weight, bias = numbers(max(ROWS), k), numbers(n, k, seed=1) * k**-0.5, numbers(n, seed=2) if biased else None
    found = fixed.product(x, weight, bias)
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (found.double() - wanted).abs().max() < (0.05 if ON_GPU else 1e-4)
    for rows in ROWS:
        for first in (0, max(ROWS) - rows):
            assert torch.equal(fixed.product(x[first : first + rows], weight, bias), found[first : first + rows])
    assert torch.equal(fixed.product(x[:3], weight.t().contiguous().t(), bias), found[:3])  # of other strides
    assert fixed.product(x[:0], weight, bias).shape == (0, n)


@pytest.mark.parametrize(
    ("rows", "n", "k", "tiling"),
    [
        (1, 4096, 4096, (64, 16, 128, 4, 8)), (17, 28672, 4096, (64, 32, 128, 4, 4)), (33, 4096, 4096, (128, 64, 128, 4, 4)),
        (256, 6144, 4096, (128, 128, 64, 8, 6)),
        (256, 4096, 14336, (128, 64, 128, 4, 4)), (256, 28672, 4096, (128, 256, 64, 8, 4)), (65, 64, 64, (128, 64, 128, 4, 4)),
        (2048, 28672, 4096, (128, 256, 64, 8, 3)), (2048, 4096, 4096, (128, 256, 64, 8, 4)),
    ],
)  # fmt: skip
def test_the_tiling_follows_the_number_of_tiles(rows: int, n: int, k: int, tiling: tuple[int, ...]) -> None:
    assert fixed.tiling_of(rows, n, k, torch.bfloat16) == tiling
    assert fixed.tiling_of(rows, n, k, torch.float32) == fixed.WIDE


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="of tensor cores")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_tilings_of_products_have_the_same_bits(dtype: torch.dtype) -> None:
    x, weight = numbers(300, 4096, dtype=dtype), numbers(1024, 4096, seed=1, dtype=dtype) * 4096**-0.5
    wanted = fixed.product(x, weight, tiling=fixed.FEW[0])
    for tiling in (*fixed.FEW, *fixed.MANY):
        assert torch.equal(fixed.product(x, weight, tiling=tiling), wanted), tiling


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="of cuBLASLt")
@pytest.mark.parametrize("size", [(6144, 4096), (4096, 4096), (4096, 14336), (1000, 520)])
def test_algorithms_of_cublas_give_the_kernels_bits(size: tuple[int, int]) -> None:
    n, k = size
    x, weight = numbers(5000, k, seed=2), numbers(n, k, seed=3) * k**-0.5
    kernel = lambda x, weight: fixed.product(x, weight, tiling=fixed.MANY[1])  # noqa: E731
    wanted = kernel(x, weight)
    for rows in (33, 64, 65, 200, 256, 513, 2047, 5000):
        for algorithm in library.proposals(0, rows, n, k, DTYPE):
            out = torch.empty(rows, n, dtype=DTYPE, device=DEVICE)
            assert library.run(algorithm, x[:rows], weight, out)
            assert torch.equal(out, wanted[:rows]), rows
        assert library.algorithm_for(0, rows, n, k, DTYPE, kernel) is not None, rows
        assert torch.equal(fixed.product(x[:rows], weight), wanted[:rows])
    # An algorithm with other bits is not taken.
    wrong = lambda x, weight: kernel(x, weight) + 1  # noqa: E731
    assert library._choose(0, n, k, 256, DTYPE, wrong) is None


def test_products_in_half_precision_and_of_a_float32_result() -> None:
    x, weight = numbers(20, 48, dtype=torch.float16), numbers(70, 48, seed=1, dtype=torch.float16)
    wanted = x.float() @ weight.float().T
    assert torch.allclose(fixed.product(x, weight).float(), wanted, atol=0.05)
    found = fixed.product(x, weight, dtype=torch.float32)
    assert found.dtype is torch.float32 and torch.allclose(found, wanted, atol=1e-3)
    with pytest.raises(RuntimeError):
        fixed.product(x[:, :40], weight)


class Case:
    """A request of `length` positions over shuffled slots."""

    def __init__(self, heads: int, kv_heads: int, dim: int, length: int, seed: int = 0, **layer: Any) -> None:
        self.layer = RadixAttention(0, heads, kv_heads, dim, dim**-0.5, **layer)
        self.q, self.length = numbers(length, heads, dim, seed=seed), length
        slots = 2 * length + 5
        self.kv = numbers(slots, kv_heads, dim, seed=seed + 1), numbers(slots, kv_heads, dim, seed=seed + 2)
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:length]
        self.table = torch.zeros(3, length + 9, dtype=torch.int32)
        self.table[1, :length] = order.to(torch.int32)
        self.table = self.table.to(DEVICE)

    def run(self, first: int, stop: int, cut: int | None, sms: int = 0) -> torch.Tensor:
        """Rows `first` to `stop`: in tiles of up to `cut` rows; None: as decode rows. `sms`: parts by several programs."""
        count = stop - first
        lens = torch.arange(first + 1, stop + 1, dtype=torch.int32, device=DEVICE)
        owners = torch.ones(count, dtype=torch.int64, device=DEVICE)
        tiles, kept = None, None
        if cut is not None:
            starts = torch.arange(0, count, cut, dtype=torch.int32)
            tiles = starts.to(DEVICE), torch.clamp(count - starts, max=cut).to(torch.int32).to(DEVICE)
        if sms:
            shape = self.layer.num_heads, self.layer.num_kv_heads, self.layer.head_dim, self.table.shape[1]
            kept = fixed_attention.parts_memory(count, *shape, torch.device(DEVICE))
            kept[0].fill_(torch.nan)
        out = torch.empty_like(self.q[first:stop])
        window = self.layer.sliding_window
        parts = self.q[first:stop], self.kv, tiles, owners, lens, self.table, out
        layer = self.layer
        shared = layer.scaling, sms or 1, layer.logit_cap, layer.sinks, kept
        fixed_attention.attention(*parts, *shared, window=window)
        assert kept is None or not kept[1].any(), "counters are zeros between calls"
        return out


CASES: dict[str, dict[str, Any]] = {
    "9 heads over 3": {"heads": 9, "kv_heads": 3, "dim": 32},
    "a window": {"heads": 4, "kv_heads": 2, "dim": 16, "sliding_window": 21},
    "a cap": {"heads": 2, "kv_heads": 2, "dim": 24, "logit_cap": 5.0},
    "sinks": {"heads": 8, "kv_heads": 1, "dim": 16, "sliding_window": 70},
    "20 heads over 1": {"heads": 20, "kv_heads": 1, "dim": 16},
}
if ON_GPU:
    CASES |= {
        "llama": {"heads": 32, "kv_heads": 8, "dim": 128},
        "gpt-oss": {"heads": 64, "kv_heads": 8, "dim": 64, "sliding_window": 128},
        "gemma 2": {"heads": 8, "kv_heads": 4, "dim": 256, "logit_cap": 50.0},
        "one head each": {"heads": 3, "kv_heads": 3, "dim": 96},
    }


@pytest.mark.parametrize("name", CASES)
def test_attention_of_a_row_has_the_same_bits_decoded_prefilled_and_in_parts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_attention, "SPAN", 128)
    length = 700 if ON_GPU else 150
    options: dict[str, Any] = dict(CASES[name])
    if name == "sinks":
        options["sinks"] = numbers(options["heads"], seed=9, dtype=torch.float32)
    case = Case(length=length, **options)
    layer, most = case.layer, fixed_attention.tokens_of_tile(case.layer.num_heads, case.layer.num_kv_heads)
    found, wanted = case.run(0, length, most), torch.empty_like(case.q)
    decode_attention_torch(
        case.q, *case.kv, torch.ones(length, dtype=torch.int64), torch.arange(1, length + 1), case.table, wanted,
        layer.scaling, layer.sliding_window or 0, layer.logit_cap, layer.sinks,
    )  # fmt: skip
    assert torch.allclose(found.float(), wanted.float(), atol=0.03 if ON_GPU else 1e-4)
    assert torch.equal(case.run(length - 5, length, None), found[-5:])  # as decode rows
    if ON_GPU:
        assert torch.equal(case.run(1, length, None), found[1:])
    assert torch.equal(case.run(length - 5, length, None, sms=64), found[-5:])  # in parts
    assert torch.equal(case.run(length - 23, length, most), found[-23:])  # another cut of the prompt
    assert torch.equal(case.run(length - 23, length, min(3, most), sms=64), found[-23:])


def test_attention_without_rows_and_without_keys() -> None:
    case = Case(4, 2, 16, 20)
    assert case.run(3, 3, 4).shape == (0, 4, 16)
    lens = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = torch.zeros_like(case.q[:1])
    owners = torch.ones(1, dtype=torch.int64, device=DEVICE)
    fixed_attention.attention(case.q[:1], case.kv, None, owners, lens, case.table, out, 0.25, 1)
    assert out.isnan().all()


def test_the_delta_rule_by_token_has_the_same_bits_in_any_cut() -> None:
    heads, key_dim, dim, tokens = 4, 16, 24, 9
    qkv, b, a = (
        numbers(tokens, 2 * 2 * key_dim + heads * dim),
        numbers(tokens, heads, seed=1),
        numbers(tokens, heads, seed=2),
    )
    decay, bias = numbers(heads, seed=3), numbers(heads, seed=4)

    def run(cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        state, outs = torch.zeros(3, heads, key_dim, dim, device=DEVICE), []
        for first, stop in zip([0, *cuts], [*cuts, tokens], strict=True):
            own = (qkv[first:stop], b[first:stop], a[first:stop], decay, bias, state)
            slots = torch.tensor([2], device=DEVICE)
            if first and stop - first == 1:
                outs.append(triton_delta.delta_scan(*own, slots))
                continue
            starts = torch.tensor([0, stop - first], device=DEVICE)
            continued = torch.tensor([int(first > 0)], dtype=torch.int32, device=DEVICE)
            outs.append(triton_delta.delta_scan(*own, slots, starts, continued))
        return torch.cat(outs), state

    whole, state = run([])
    for cuts in ([1], [4, 5], list(range(1, tokens))):
        found, its_state = run(cuts)
        assert torch.equal(found, whole) and torch.equal(its_state, state)
    stepped = torch.zeros_like(state)
    slots = torch.tensor([2], device=DEVICE)
    outs = [
        triton_delta.delta_step(qkv[i : i + 1], b[i : i + 1], a[i : i + 1], decay, bias, stepped, slots)
        for i in range(tokens)
    ]
    assert torch.allclose(torch.cat(outs).float(), whole.float(), atol=1e-2 if ON_GPU else 1e-5)


def test_descriptors_of_matrices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have thousands of numbers of rows. Those that go are destroyed, but not while a product uses them."""
    made, destroyed = list[int](), list[int]()

    class Calls:
        """cuBLASLt, on a machine without it."""

        @staticmethod
        def cublasLtMatrixLayoutCreate(at: Any, *sizes: Any) -> int:
            made.append(len(made) + 1)
            at._obj.value = made[-1]
            return 0

        @staticmethod
        def cublasLtMatrixLayoutDestroy(layout: Any) -> int:
            destroyed.append(layout.value)
            return 0

    monkeypatch.setattr(library, "_library", lambda device: SimpleNamespace(calls=Calls))
    library._layout.cache_clear()
    used = library._layout(0, 1, 8, torch.float16)
    assert library._layout(0, 1, 8, torch.float16) is used
    for rows in range(2, library.LAYOUTS + 12):
        library._layout(0, rows, 8, torch.float16)
    assert len(made) == library.LAYOUTS + 11 and destroyed == list(range(2, 12))
    del used
    assert destroyed[-1] == 1
    library._layout.cache_clear()
    assert sorted(destroyed) == made
