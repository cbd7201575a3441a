"""Batch-invariant mode: every output of a request has the same bits alone and in random company.

The jobs are the fuzz's own. The larger models make sums of which default kernels have several orders.

    pytest tests/fuzz/test_batch_invariance.py            # in CI
    pytest tests/fuzz/test_batch_invariance.py -m slow    # all families, ways and dtypes, and 300 requests
    pytest tests/fuzz/test_batch_invariance.py -m gpu     # on a GPU, in bfloat16
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_model, tiny_tokenizer
from helpers_adapters import write_adapter
from transformers import (
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from pymllm_interp import LM, SAE, Capture, Gate, SamplingParams, Steer
from pymllm_interp.attention.fixed_backend import FixedAttnBackend
from pymllm_interp.captures import Features, Lens, Project
from pymllm_interp.cli import make_parser
from pymllm_interp.core.unsupported import UnsupportedModelError
from pymllm_interp.interventions import Knockout, Monitor, SetFeature
from pymllm_interp.runner import model_runner
from pymllm_interp.server.command import settings_of

from . import results
from .driver import fuzz
from .engines import FAMILIES, RECURRENT

pytestmark = [pytest.mark.local, pytest.mark.filterwarnings("ignore::UserWarning")]
NATIVE = [name for name in FAMILIES if name not in ("olmo2", "deepseek_v3", *RECURRENT)] + ["qwen3_next"]
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 288, "intermediate_size": 408, "num_hidden_layers": 3, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 1024, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 72,
    "decoder_sparse_step": 1,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "shared_expert_intermediate_size": 72,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=40),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
    "gpt_oss": lambda: GptOssConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, sliding_window=40),
    "qwen3_next": lambda: Qwen3NextConfig(**SIZES, **EXPERTS, **DELTA),
}
STEMS = [random.Random(i).choices(range(90), k=300) for i in range(2)]


@pytest.fixture(autouse=True)
def equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "TOLERANCE", 0.0)


def vector(width: int, seed: int, *rows: int) -> torch.Tensor:
    return torch.randn(*rows, width, generator=torch.Generator().manual_seed(seed))


def sae(width: int) -> SAE:
    return SAE(
        W_enc=vector(200, 1, width), b_enc=vector(200, 2), W_dec=0.1 * vector(width, 3, 200), b_dec=vector(width, 4),
        architecture="topk", k=12, site="resid_post.1",
    )  # fmt: skip


def random_hooks(rng: random.Random, width: int, known: SAE, attends: bool) -> dict[str, Any]:
    """Keywords of `LM.generate`. `attends`: all layers have attention, so that there are sites inside it."""
    gate = Gate(vector(width, 5), rng.choice([0.0, 1.0]), site="resid_pre.1", scope=rng.choice(["token", "prompt"]))
    ops = [
        Steer("resid_post.0", vector(width, 6), scale=0.5), Steer("resid_post.2", vector(width, 7), when=gate),
        SetFeature(known, {3: 2.0}), Knockout([1], from_=-1, to=slice(0, 3)),
    ]  # fmt: skip
    stream = rng.choice([Project(vector(width, 8, 20)), Features(known, top_k=8), Lens(top_k=5), None])
    captures: list[Any] = [
        Capture("final_norm", "all"), Capture("resid_post.1", reduce=stream), Capture("z.1", "all"), Capture("logits", "all"),
        Capture("mlp_out.2", reduce="mean"),
    ]  # fmt: skip
    if not attends:
        captures[2], ops[-1] = Capture("attn_out.1", "all"), ops[0]
    found: dict[str, Any] = {"capture": rng.sample(captures, rng.choice([0, 1, 2, 3]))}
    if rng.random() < 0.5:
        found["interventions"] = rng.sample(ops, rng.choice([1, 1, 2]))
    if rng.random() < 0.3:
        found["monitors"] = [Monitor("resid_post.1", vector(width, 9), threshold=1e9, name="score")]
    return found


class Request:
    """A random request: a prompt of 1 to 300 tokens, which may begin as others do."""

    def __init__(self, rng: random.Random, width: int, known: SAE, longest: int, attends: bool = True) -> None:
        size = rng.choice([1, 17, rng.randint(2, longest), rng.randint(2, longest)])
        stem = rng.randint(0, size - 1)
        self.prompt = [*rng.choice(STEMS)[:stem], *(rng.randrange(90) for _ in range(size - stem))]
        logprobs: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 1} if rng.random() < 0.3 else {}
        self.params = SamplingParams(
            max_tokens=rng.randint(1, 20), temperature=rng.choice([0.0, 0.0, 0.9]), seed=rng.randrange(99), **logprobs
        )
        self.hooks = random_hooks(rng, width, known, attends)
        cutting = [op for op in self.hooks.get("interventions", ()) if isinstance(op, Knockout)]
        if cutting and size < 4:
            self.hooks["interventions"] = [Steer("resid_post.0", vector(width, 10))]

    def submit(self, lm: LM) -> Any:
        return lm.submit(self.prompt, self.params, **self.hooks)

    def result(self, handle: Any) -> dict[str, Any]:
        out = handle.result(600)
        scores = {name: (found.positions, found.scores) for name, found in out.monitors.items()}
        return results.of_output(out) | {"scores": scores}


def differences(requests: list[Request], alone: LM, company: LM, rng: random.Random) -> list[str]:
    """Requests that differ in company, which comes in random order and in bursts."""
    wanted = [request.result(request.submit(alone)) for request in requests]
    order, handles = rng.sample(range(len(requests)), len(requests)), dict[int, Any]()
    for i in order:
        handles[i] = requests[i].submit(company)
        if rng.random() < 0.2:
            handles[i].wait(60)
    found = []
    for i, request in enumerate(requests):
        try:
            results.compare(request.result(handles[i]), wanted[i])
        except results.Differs as error:
            found.append(f"request {i}, {len(request.prompt)} tokens, {request.hooks}: {error}")
    return found


@contextmanager
def pair(folder: Path, dtype: str, device: str, invariant: bool = True, **company: Any) -> Iterator[tuple[LM, LM]]:
    """(an LM for single requests without a prefix cache, an LM for all of them)."""
    given: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "batch_invariant": invariant,
        "inner_sites": ("z", "mlp_act"),
        "saes": {"known": sae(SIZES["hidden_size"])},  # on CUDA passes encode it
    }
    if device == "cuda":
        given["gpu_memory_utilization"] = 0.2
    with (
        LM(folder, **given, enable_prefix_caching=False, kv_cache_tokens=4096) as alone,
        LM(folder, **given, **company) as together,
    ):
        yield alone, together


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    parent = tmp_path_factory.mktemp("invariant")

    def folder(family: str) -> Path:
        found = parent / family
        if not found.exists():
            random_model(CONFIGS[family]()).save_pretrained(found)
            tiny_tokenizer().save_pretrained(found)
        return found

    return folder


COMPANY: dict[str, Any] = {"kv_cache_tokens": 640, "max_num_tokens": 48, "max_running_requests": 8}
"""Not all requests fit: some are preempted."""
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def check(
    folder: Path,
    family: str,
    dtype: str,
    seed: int,
    count: int,
    device: str = "cpu",
    longest: int = 150,
    **company: Any,
) -> None:
    rng, known = random.Random(seed), sae(SIZES["hidden_size"])
    requests = [Request(rng, SIZES["hidden_size"], known, longest, family != "qwen3_next") for _ in range(count)]
    with pair(folder, dtype, device, **{**COMPANY, **company}) as (alone, together):
        wrong = differences(requests, alone, together, rng)
        assert not wrong, "\n".join(wrong[:3])


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("gpt_oss", "bfloat16")])
def test_requests_have_the_same_bits_in_company(folder_of: Any, family: str, dtype: str) -> None:
    check(folder_of(family), family, dtype, seed=3, count=10)


def test_the_default_mode_differs_where_this_one_does_not(folder_of: Any) -> None:
    rng = random.Random(3)
    requests = [Request(rng, SIZES["hidden_size"], sae(SIZES["hidden_size"]), 150) for _ in range(8)]
    with pair(folder_of("llama"), "float32", "cpu", invariant=False, **COMPANY) as lms:
        assert differences(requests, *lms, rng)


def test_the_fuzz_is_exact(tmp_path: Path) -> None:
    fuzz(7, "qwen3", "fused", tmp_path, rounds=1, count=9, exact={"batch_invariant": True, "dtype": "bfloat16"})


def test_threads_and_drafts_change_no_bit(folder_of: Any, tmp_path: Path) -> None:
    rng, threads = random.Random(5), torch.get_num_threads()
    requests = [Request(rng, SIZES["hidden_size"], sae(SIZES["hidden_size"]), 60) for _ in range(4)]
    with pair(folder_of("llama"), "float32", "cpu", speculative=NGRAMS) as (alone, drafted):
        assert not differences(requests, alone, drafted, rng)
        wanted = [request.result(request.submit(alone)) for request in requests]
        try:
            torch.set_num_threads(threads + 2)
            for request, result in zip(requests, wanted, strict=True):
                results.compare(request.result(request.submit(alone)), result)
        finally:
            torch.set_num_threads(threads)


def test_adapters_have_the_same_bits_in_company(folder_of: Any, tmp_path: Path) -> None:
    folder = folder_of("llama")
    adapter = write_adapter(tmp_path / "adapter", random_model(CONFIGS["llama"]()), rank=5)
    with pair(folder, "float32", "cpu", max_num_tokens=24) as (alone, together):
        for lm in (alone, together):
            lm.adapters.load("a", adapter)
        prompts, params = [STEMS[0][:n] for n in (1, 30, 77)], SamplingParams(max_tokens=6, temperature=0, logprobs=2)
        adapters = ["a", None, "a"]
        wanted = [alone.generate([p], params, lora=a)[0] for p, a in zip(prompts, adapters, strict=True)]
        handles = [together.submit(p, params, lora=a) for p, a in zip(prompts, adapters, strict=True)]
        for handle, one in zip(handles, wanted, strict=True):
            results.compare(results.of_output(handle.result(60)), results.of_output(one))


def test_the_backend_of_cuda_plans_passes_with_decode_rows_and_cut_prompts(
    folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Triton's interpreter, so that the bits are of BLAS: equal but for roundings."""
    pytest.importorskip("triton", reason="the kernels run by Triton's interpreter")
    from pymllm_interp.kernels import fixed_attention

    monkeypatch.setattr(results, "TOLERANCE", 1e-3)
    monkeypatch.setattr(fixed_attention, "SPAN", 64)
    folder = folder_of("gemma2")
    given: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
    prompts = [STEMS[0][:70], STEMS[1][:9], STEMS[0][:33]]
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=2)
    with LM(folder, **given) as plain:
        wanted = plain.generate(prompts, params, capture=["final_norm"])
    monkeypatch.setattr(model_runner, "create_attention_backend", lambda *_: FixedAttnBackend("cpu"))
    with LM(folder, **given, max_num_tokens=24) as lm:
        found = lm.generate(prompts, params, capture=["final_norm"])
    results.compare([results.of_output(out) for out in found], [results.of_output(out) for out in wanted])


def test_the_command_has_the_mode() -> None:
    settings = settings_of(make_parser().parse_args(["serve", "demo", "--batch-invariant"]))
    assert settings.server["batch_invariant"] is True
    assert "batch_invariant" not in settings_of(make_parser().parse_args(["serve", "demo"])).server


def test_receipts_name_the_mode_and_the_kernels(folder_of: Any) -> None:
    with pair(folder_of("llama"), "float32", "cpu") as lms:
        receipts = [lm.generate([[1, 2]], SamplingParams(max_tokens=1), capture=["embed"])[0].receipt for lm in lms]
        assert all(receipt.batch_invariant and len(receipt.kernels) == 64 for receipt in receipts)
        assert receipts[0].kernels == receipts[1].kernels and receipts[0].kernels[:16] in receipts[0].engine


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"impl": "transformers"}, "LlamaForCausalLM runs by its class in transformers"),
        ({"dtype": "float16"}, "needs the compiled kernels"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is the model's"),
        ({"quantize": "fp8-w8a8"}, "use quantize='fp8'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(folder_of: Any, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"batch_invariant=True: .*{why}"):
        LM(folder_of("llama"), device="cpu", batch_invariant=True, **settings)


# -- slow, and on a GPU ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_fifty_requests_of_each_family_have_the_same_bits(folder_of: Any, family: str, dtype: str) -> None:
    check(folder_of(family), family, dtype, 11, 25, max_num_tokens=24)
    check(folder_of(family), family, dtype, 12, 25, longest=300, kv_cache_tokens=2048, max_num_tokens=2048)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fused", "ahead", "split", "eager", "segments"])
@pytest.mark.parametrize("family", NATIVE)
def test_the_fuzz_of_each_family_is_exact(tmp_path: Path, family: str, way: str) -> None:
    dtype = "bfloat16" if way in ("ahead", "eager") else "float32"
    chunk = {"fused": 24, "ahead": 256, "split": 48, "eager": 2048, "segments": 24}[way]
    exact = {"batch_invariant": True, "dtype": dtype, "pressure": {"max_num_tokens": chunk}}
    fuzz(13, family, way, tmp_path, rounds=2, count=12, exact=exact)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [64, 2048])
@pytest.mark.parametrize("family", CONFIGS)
def test_requests_have_the_same_bits_in_company_on_a_gpu(folder_of: Any, family: str, chunk: int) -> None:
    check(
        folder_of(family), family, "bfloat16", 17, 30, device="cuda", longest=300, kv_cache_tokens=1600,
        max_num_tokens=chunk, max_running_requests=24,
        speculative=NGRAMS if chunk == 64 and family != "qwen3_next" else None,
    )  # fmt: skip
