"""The CPU's products with each set of instructions that this processor has, against plain torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import COMMON
from helpers_runner import ByHand, make_runner, random_ids
from torch.testing import assert_close
from transformers import LlamaConfig

from pymllm_interp.core.forward_batch import ForwardMode
from pymllm_interp.kernels.cpu import cpu_dispatch
from pymllm_interp.kernels.cpu.cpu_build import COMPILERS, ISA_VARIABLE, ISAS
from pymllm_interp.models.native import cpu_layer
from pymllm_interp.runner.partition import Execution

pytestmark = pytest.mark.skipif(cpu_dispatch.cpu_kernels() is None, reason="the kernels' tests need a C++ compiler")

DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 24, 25, 31, 32, 33, 64, 257)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load_kernels(isa: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of the module `cpu_kernels` that may use the instructions up to `isa`."""
    monkeypatch.setenv(ISA_VARIABLE, isa)
    spec = util.find_spec("pymllm_interp.kernels.cpu.cpu_kernels")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load_kernels(request.param, monkeypatch)
    if module.BFLOAT16_ISA != request.param:
        pytest.skip(f"this processor has no {request.param}: {module.BFLOAT16_ISA} is the most")
    return module


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "n, k", [(1, 1), (5, 7), (33, 65), (48, 96), (100, 576), (64, 33), (21, 3001), (12, 1536), (70, 2048)]
)
def test_products_equal_torch_and_do_not_depend_on_the_other_rows(n, k, dtype, kernels):
    weight, bias = randn(n, k, dtype=dtype), randn(n, dtype=dtype, seed=1)
    x = randn(1, 300, k, dtype=dtype, seed=2)
    whole = kernels.gemm(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), bias.double())
    most = expected.abs().max().item()
    assert_close(whole.double(), expected, rtol=0, atol=2 * torch.finfo(dtype).eps * most + 1e-6 * k)
    assert kernels.gemm(x[:, :0], weight, bias).shape == (1, 0, n)
    for rows in ROWS:
        assert torch.equal(kernels.gemm(x[:, :rows], weight, bias), whole[:, :rows]), rows
    assert torch.equal(kernels.gemm(x[:, 40:49], weight, bias), whole[:, 40:49])
    assert_close(kernels.gemm(x, weight, None), whole - bias, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_do_not_depend_on_the_number_of_threads(dtype, kernels, threads_kept):
    weight, x = randn(200, 700, dtype=dtype), randn(1, 33, 700, dtype=dtype, seed=1)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(kernels.gemm(x, weight, None))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_row(dtype, kernels):
    weight, x = randn(40, 70, dtype=dtype), randn(1, 9, 70, dtype=dtype)
    expected = kernels.gemm(x, weight, None)
    x[0, 4, 3] = float("nan")
    out, others = kernels.gemm(x, weight, None), [0, 1, 2, 3, 5, 6, 7, 8]
    assert out[0, 4].isnan().all()
    assert torch.equal(out[0, others], expected[0, others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_around_x_and_the_weight_is_not_read(dtype, kernels):
    """Both are slices of memory that is full of NaNs."""
    for rows, n, k in ((1, 5, 33), (7, 9, 47), (33, 17, 65)):
        whole = torch.full((2, 64 * 128), float("nan"), dtype=dtype)
        x, weight = whole[0, 64 : 64 + rows * k].view(rows, k), whole[1, 64 : 64 + n * k].view(n, k)
        x.copy_(randn(rows, k, dtype=dtype))
        weight.copy_(randn(n, k, dtype=dtype, seed=1))
        assert torch.equal(kernels.gemm(x, weight, None), kernels.gemm(x.clone(), weight.clone(), None))
        assert not kernels.gemm(x, weight, None).isnan().any()


def test_a_decode_pass_has_the_bits_of_the_pass_by_modules_and_of_each_request_alone(kernels, monkeypatch):
    monkeypatch.setattr(cpu_dispatch, "cpu_kernels", lambda: kernels)
    sizes = {
        "hidden_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    config = LlamaConfig(**{**COMMON, **sizes})
    torch.manual_seed(0)
    runner = make_runner(config, dtype="bfloat16", kv_cache_tokens=2048)
    calls, original = [], cpu_layer.decode_layer

    def noted(*args: Any) -> Any:
        out = original(*args)
        calls.append(out is not None)
        return out

    monkeypatch.setattr("pymllm_interp.models.native.llama.decode_layer", noted)
    prompts = {i: random_ids(n, seed=i) for i, n in enumerate((1, 4, 9, 23))}
    found = []
    for execution, alone in ((Execution.PLAIN, False), (Execution.MODULES, False), (Execution.PLAIN, True)):
        hand = ByHand(runner)
        hand.extend(prompts)
        tokens = {i: [5 + i] for i in prompts}
        parts = [{i: ids} for i, ids in tokens.items()] if alone else [tokens]
        passes = [runner.forward(hand.batch(part, ForwardMode.DECODE), execution) for part in parts]
        found.append(torch.cat([one.next_token_logits.reshape(-1, config.vocab_size) for one in passes]))
    assert any(calls), "a decode pass runs a layer in one call"
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    runner.shutdown()


def test_the_variable_names_one_of_the_instruction_sets(monkeypatch):
    with pytest.raises(
        ValueError, match="PYMLLM_INTERP_MAX_CPU_ISA is 'sse', not one of avx2, avx512, avx512_bf16, amx"
    ):
        load_kernels("sse", monkeypatch)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 processor")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "sapphirerapids"])
def test_the_kernels_compile_for_processors_that_are_not_this_one(processor):
    source = Path(cpu_dispatch.__file__).with_name("cpu_kernels.cpp")
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS))
    command = [compiler, "-std=c++17", "-fopenmp", f"-march={processor}", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
