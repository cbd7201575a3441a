"""ModelRunner as seed 000 documents it: rows R1 to R28."""

from __future__ import annotations

import gc
import inspect
import logging
import re
import weakref
from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from conftest import COMMON, CONFIGS
from helpers_runner import ByHand, Steps, make_runner, random_ids
from transformers import GPTJConfig, LlamaConfig, Qwen3Config

from pymllm_interp import LM, SamplingParams
from pymllm_interp.attention import AttentionBackend, TorchAttnBackend, attention_workspace_bytes
from pymllm_interp.attention.flashinfer_backend import WORKSPACE_BYTES
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.forward_batch import ForwardBatch, ForwardMode
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.core.step import LogitsProcessorOutput, ModelRunnerOutput
from pymllm_interp.mem_cache import KVPool, ReqToTokenPool, TokenToKVPoolAllocator
from pymllm_interp.models.registry import UnsupportedModelError
from pymllm_interp.models.weights.loading import WeightsError
from pymllm_interp.runner import ModelRunner, async_output, model_runner
from pymllm_interp.runner.device_memory import get_available_gpu_memory, get_total_gpu_memory
from pymllm_interp.runner.executions import Executions
from pymllm_interp.runner.graphs.captured_passes import DECLARED
from pymllm_interp.runner.interp_model_runner import InterpModelRunner
from pymllm_interp.runner.partition import Execution
from pymllm_interp.runner.request_state import RequestState
from pymllm_interp.runner.step_inputs import StepInputs
from pymllm_interp.utils.arguments import PromptError

PARTS = ("model", "req_to_token_pool", "token_to_kv_pool", "token_to_kv_pool_allocator", "attn_backend", "graph_runner")


def dummy(**fields: Any) -> ModelConfig:
    return ModelConfig(**{"model": "dummy", "load_format": "dummy", "hf_config": CONFIGS["llama"](), **fields})


@pytest.fixture(scope="module")
def runner(model_folder):
    runner = make_runner(model_folder("llama"), page_size=4, kv_cache_tokens=2048)
    yield runner
    runner.shutdown()


@pytest.mark.parametrize("function", [get_available_gpu_memory, get_total_gpu_memory])
def test_r01_r02_memory_is_zero_off_cuda_and_a_float(function):
    """R1, R2."""
    assert function("cpu") == 0.0 and isinstance(function("cpu"), float)
    assert list(inspect.signature(function).parameters) == ["device", "gpu_id"]
    assert [p.default for p in inspect.signature(function).parameters.values()] == ["cuda", 0]
    if not torch.cuda.is_available():
        assert function() == 0.0


@pytest.mark.gpu
@pytest.mark.gpu_exclusive
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_r01_r02_memory_on_cuda_is_the_drivers():
    """R1, R2."""
    free, total = torch.cuda.mem_get_info(0)
    assert abs(get_available_gpu_memory() - free / 2**30) < 64 / 1024
    assert get_total_gpu_memory() == total / 2**30 >= get_available_gpu_memory()


def test_r03_next_token_logits_are_the_last_positions_of_transformers(runner, oracle):
    """R3."""
    prompts = {0: random_ids(5), 1: random_ids(1, seed=1), 2: random_ids(9, seed=2)}
    out = ByHand(runner).extend(prompts)
    assert isinstance(out, LogitsProcessorOutput)
    assert out.next_token_logits.shape == (3, 97) and out.next_token_logits.dtype == torch.float32
    for row, ids in zip(out.next_token_logits, prompts.values(), strict=True):
        with torch.no_grad():
            expected = oracle("llama")(input_ids=torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-5 * max(1, expected.abs().max().item()))


def test_r04_hidden_states_are_none_unless_asked_for(runner):
    """R4; their values: tests/models/test_models.py."""
    hand = ByHand(runner)
    batch = hand.batch({0: [1, 2, 3]})
    assert runner.forward(batch).hidden_states is None
    batch.return_hidden_states = True
    assert runner.forward(batch).hidden_states.shape == (3, 72)


def test_r05_both_configs_default_and_explicit_ones_win():
    """R5."""
    plain = ModelRunner()
    assert plain.server_config == ServerConfig() and plain.model_config == ModelConfig() and plain.gpu_id == 0
    server, model = ServerConfig(page_size=3, device="cpu"), dummy(seed=5)
    chosen = ModelRunner(server, model, 1)
    assert chosen.server_config is server and chosen.model_config is model and chosen.gpu_id == 1
    assert list(inspect.signature(ModelRunner).parameters) == ["server_config", "model_config", "gpu_id"]


def test_r05_two_runners_share_nothing():
    """R5: F9 has them run interleaved."""
    a, b = make_runner(CONFIGS["llama"]()), make_runner(CONFIGS["llama"]())
    for name in (*PARTS[:5], "req_states", "input_buffers", "partition"):
        assert getattr(a, name) is not getattr(b, name), name
    ByHand(a).extend({0: [1, 2]})
    assert (a.forward_pass_id, b.forward_pass_id) == (1, 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", torch.float32),
        ("float32", torch.float32),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("bf16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_r06_dtype_and_device_are_resolved(name, expected):
    """R6."""
    runner = ModelRunner(ServerConfig(device="cpu"), dummy(dtype=name))
    assert runner.dtype is expected and runner.device == "cpu"
    runner.initialize()
    assert {parameter.dtype for parameter in runner.get_model().parameters()} == {expected}


def test_r06_unknown_dtypes_and_devices_are_refused_by_name():
    """R6."""
    with pytest.raises(ValueError, match="float31"):
        dummy(dtype="float31")
    with pytest.raises(ValueError, match="int8"):
        ModelRunner(ServerConfig(device="cpu"), dummy(dtype=torch.int8))
    with pytest.raises(ValueError, match="tpu"):
        ModelRunner(ServerConfig(device="tpu"))


@pytest.mark.parametrize("cls", [ModelRunner, InterpModelRunner])
def test_r07_r08_parts_are_none_before_typed_after_and_none_after_shutdown(cls):
    """R7, R8."""
    runner = cls(ServerConfig(device="cpu", kv_cache_tokens=64), dummy())
    assert all(getattr(runner, name) is None for name in (*PARTS, "gdn_pool"))
    runner.initialize()
    kinds = (torch.nn.Module, ReqToTokenPool, KVPool, TokenToKVPoolAllocator, AttentionBackend)
    for name, kind in zip(PARTS, kinds, strict=False):
        assert isinstance(getattr(runner, name), kind), name
    assert runner.graph_runner is None and runner.gdn_pool is None
    runner.shutdown()
    assert all(getattr(runner, name) is None for name in (*PARTS, "gdn_pool"))


def test_r09_capacity_defaults_and_zero_is_refused():
    """R9."""
    runner = ModelRunner(ServerConfig(device="cpu"), dummy())
    assert runner.max_total_num_tokens == runner.max_running_requests == 0
    runner.initialize()
    assert runner.max_total_num_tokens == 4096 and runner.max_running_requests == 512
    assert runner.token_to_kv_pool.size == runner.token_to_kv_pool_allocator.available_size() == 4096
    chosen = make_runner(CONFIGS["llama"](), kv_cache_tokens=100, max_running_requests=7, page_size=16)
    assert chosen.max_total_num_tokens == 96, "whole pages"
    assert chosen.max_running_requests == chosen.req_to_token_pool.size == 7
    for name in ("kv_cache_tokens", "max_running_requests"):
        with pytest.raises(ValueError, match=rf"{name}=0.*at least 1"):
            ServerConfig(**{name: 0})
    with pytest.raises(ValueError, match="kv_cache_tokens to at least page_size"):
        make_runner(CONFIGS["llama"](), kv_cache_tokens=15, page_size=16)


def test_r09_a_pool_larger_than_the_memory_is_refused_with_both_numbers():
    """R9: before anything is allocated."""
    with pytest.raises(torch.OutOfMemoryError, match=r"KV pool of 10+ tokens .*which has memory for [1-9]\d+ tokens"):
        make_runner(CONFIGS["llama"](), kv_cache_tokens=10**13)


def test_r15_the_number_of_running_requests_is_derived_where_it_is_none():
    """R15: the KV tokens over 512 a request, over the context's length where that is shorter."""
    derived = {
        (4096, None): 4096 // 128,  # the model's context
        (4096, 64): 64,
        (100, 64): 1,
        (16, 128): 1,
        (1 << 18, 64): 1024,
    }
    for (tokens, context), expected in derived.items():
        runner = make_runner(
            CONFIGS["llama"](), kv_cache_tokens=tokens, max_model_len=context, max_running_requests=None
        )
        assert runner.max_running_requests == runner.req_to_token_pool.size == expected, (tokens, context)
        runner.shutdown()
    long = LlamaConfig(
        **{**COMMON, "max_position_embeddings": 2048}, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    assert make_runner(long, kv_cache_tokens=None, max_running_requests=None).max_running_requests == 4096 // 512


def test_requests_are_as_long_as_a_derived_pool_allows(monkeypatch):
    """A machine with room for 48 tokens of KV: the longest sequence is as long, and default lengths fit."""
    per_token = 2 * 3 * 3 * 8 * 4
    monkeypatch.setattr("pymllm_interp.runner.device_memory._host_memory", lambda: 4 * 50 * per_token)
    with LM(hf_config=CONFIGS["llama"](), load_format="dummy", device="cpu", dtype="float32") as lm:
        assert lm.capabilities["limits"]["kv_tokens"] == lm.capabilities["limits"]["max_model_len"] == 48
        params = SamplingParams(temperature=0, ignore_eos=True)
        assert len(lm.generate([[3] * 40], replace(params, max_tokens=None))[0].token_ids) == 8
        with pytest.raises(PromptError, match=r"41 tokens and asks for 8 new ones .* holds 48 \(max_model_len\)"):
            lm.generate([[3] * 41], replace(params, max_tokens=8))


def test_r15_a_profile_run_makes_the_logits_of_every_row(runner, monkeypatch):
    """R15: a traced pass of whole prompts makes them, so the KV pool has to leave room for them."""
    rows, call = [], Executions.call_model
    monkeypatch.setattr(
        Executions, "call_model", lambda self, *args: rows.append(call(self, *args).shape) or call(self, *args)
    )
    runner._dummy_run(50, skip_attn=True, is_profile=True)
    assert rows == [(1, 50, 97)]


def test_r15_the_attention_workspace_is_known_before_it_is_made(monkeypatch):
    """R15."""
    for name, device, dtype, size in (
        ("auto", "cpu", torch.float32, 0), ("torch", "cuda", torch.bfloat16, 0), ("auto", "cuda", torch.float32, 0),
        ("flashinfer", "cuda", torch.bfloat16, WORKSPACE_BYTES),
    ):  # fmt: skip
        assert attention_workspace_bytes(name, device, dtype, 64) == size
    monkeypatch.setattr("pymllm_interp.attention._why_no_flashinfer", lambda head_dim: None)
    assert attention_workspace_bytes("auto", "cuda", torch.bfloat16, 64) == WORKSPACE_BYTES


WIDE_KV = LlamaConfig(
    **COMMON, hidden_size=64, num_hidden_layers=32, num_attention_heads=8, num_key_value_heads=8, head_dim=128
)


@pytest.mark.gpu
@pytest.mark.gpu_exclusive
def test_r15_gpu_the_default_fills_the_memory_that_it_may_take():
    """R15: 90 % of the budget at least, and no more than the budget."""
    gc.collect()
    torch.cuda.empty_cache()
    runner = make_runner(WIDE_KV, dtype="bfloat16", device="cuda", kv_cache_tokens=None, max_running_requests=None)
    free, total = torch.cuda.mem_get_info()
    budget = total * runner.server_config.gpu_memory_utilization
    assert 0.9 * budget <= total - free <= budget + (1 << 29), (
        f"{(total - free) / 2**30:.1f} GiB of {budget / 2**30:.1f}"
    )
    assert runner.max_running_requests == 1024
    runner.shutdown()


@pytest.mark.gpu
def test_r09_gpu_a_pool_beyond_the_budget_is_made_with_a_warning_that_names_both_numbers(caplog):
    """R9."""
    with caplog.at_level(logging.WARNING):
        make_runner(
            WIDE_KV, dtype="bfloat16", device="cuda", kv_cache_tokens=4096, gpu_memory_utilization=1e-4
        ).shutdown()
    assert re.search(r"kv_cache_tokens=4096, but gpu_memory_utilization=0.0001 leaves room for \d+ tokens", caplog.text)


METADATA = {
    # (config, layers, heads, kv heads, head_dim, hidden, vocab, context)
    "llama-no-head-dim": (
        LlamaConfig(**COMMON, hidden_size=72, num_hidden_layers=1, num_attention_heads=9, num_key_value_heads=3),
        (1, 9, 3, 8, 72, 97, 128),
    ),
    "qwen3-explicit-head-dim": (
        Qwen3Config(**COMMON, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=24),
        (2, 4, 2, 24, 64, 97, 128),
    ),
    "mha": (
        LlamaConfig(**COMMON, hidden_size=64, num_hidden_layers=1, num_attention_heads=4),
        (1, 4, 4, 16, 64, 97, 128),
    ),
}  # fmt: skip
NAMES = (
    "num_hidden_layers", "num_attention_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size", "context_len",
)  # fmt: skip


@pytest.mark.parametrize("case", METADATA)
def test_r10_metadata(case):
    """R10."""
    config, expected = METADATA[case]
    runner = ModelRunner(ServerConfig(device="cpu", kv_cache_tokens=64), dummy(hf_config=config))
    assert [getattr(runner, name) for name in NAMES] == [0] * 7
    runner.initialize()
    assert tuple(getattr(runner, name) for name in NAMES) == expected
    pool = runner.token_to_kv_pool
    assert (pool.num_layers, pool.num_kv_heads, pool.head_dim) == (expected[0], expected[2], expected[3])


def test_r10_metadata_of_a_nested_text_config():
    """R10."""

    class Outer:
        text_config = METADATA["qwen3-explicit-head-dim"][0]
        num_hidden_layers = hidden_size = 999

    runner = ModelRunner(ServerConfig(device="cpu"), dummy())
    runner._init_metadata(ModelSpec.of(Outer(), torch.float32))
    assert tuple(getattr(runner, name) for name in NAMES) == METADATA["qwen3-explicit-head-dim"][1]


def test_r10_context_len_is_the_models_or_the_one_asked_for():
    """R10."""
    assert make_runner(CONFIGS["llama"](), max_model_len=50).context_len == 50
    with pytest.raises(ValueError, match=r"max_model_len=129.*128"):
        make_runner(CONFIGS["llama"](), max_model_len=129)


def test_r11_kv_cache_dtype_is_the_models_unless_overridden():
    """R11: an unknown name raises, nothing falls back."""
    assert make_runner(CONFIGS["llama"]()).kv_cache_dtype is torch.float32
    runner = make_runner(CONFIGS["llama"](), kv_cache_dtype="bf16")
    assert runner.kv_cache_dtype is torch.bfloat16 is runner.token_to_kv_pool.dtype and runner.dtype is torch.float32
    exact = ByHand(make_runner(CONFIGS["llama"]()))
    hand = ByHand(runner)
    for ids in ({0: random_ids(9)}, {0: [4]}):
        near, precise = hand.extend(ids).next_token_logits, exact.extend(ids).next_token_logits
        assert near.dtype == torch.float32
        assert torch.cosine_similarity(near, precise).item() > 0.999 and not torch.equal(near, precise)
    with pytest.raises(ValueError, match="fp9"):
        ServerConfig(kv_cache_dtype="fp9")


def test_r12_forward_pass_id_counts_every_pass_idle_ones_too(runner):
    """R12."""
    hand, first = ByHand(runner), runner.forward_pass_id
    hand.extend({0: [1, 2]})
    hand.decode({0: 3})
    hand.extend({0: [4], 1: [5]}, Execution.MODULES)
    runner.forward(idle_batch())
    assert runner.forward_pass_id == first + 4


def idle_batch() -> ForwardBatch:
    none = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(ForwardMode.IDLE, 0, none, none, none.to(torch.int32), none, 0)


def test_r13_initialize_runs_its_parts_in_order_once_and_leaves_torchs_default_dtype(monkeypatch):
    """R13."""
    order = []
    parts = ("load_model", "init_memory_pool", "init_attention_backend", "init_cuda_graphs")
    for name, real in [(name, getattr(ModelRunner, name)) for name in parts]:

        def spy(self: ModelRunner, *args: Any, name: str = name, real: Any = real) -> Any:
            order.append((name, self.hidden_size > 0, self.kv_cache_dtype))
            return real(self, *args)

        monkeypatch.setattr(ModelRunner, name, spy)
    before = torch.get_default_dtype(), torch.get_num_threads()
    runner = make_runner(CONFIGS["llama"](), dtype="bfloat16", kv_cache_dtype="fp16")
    assert tuple(name for name, *_ in order) == parts
    assert all(known for _, known, _ in order), "metadata comes first"
    assert order[1][2] is torch.float16, "the KV dtype is known before the pools are made"
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before
    with pytest.raises(RuntimeError, match="initialised already"):
        runner.initialize()
    runner.shutdown()
    runner.initialize()
    assert ByHand(runner).extend({0: [1]}).next_token_logits.isfinite().all()


def test_r14_a_known_architecture_gets_its_native_class_and_its_weights(runner, oracle):
    """R14."""
    assert type(runner.model).__name__ == "LlamaForCausalLM" and type(runner.model).__module__.startswith(
        "pymllm_interp"
    )
    theirs = oracle("llama").state_dict()
    for name, parameter in runner.model.state_dict().items():
        assert torch.equal(parameter, theirs[name]), name
    assert not runner.model.training and not any(p.requires_grad for p in runner.model.parameters())


def test_r14_other_architectures_run_by_their_class_in_transformers():
    """R14: tests/models/test_families.py compares them."""
    config = GPTJConfig(n_layer=1, n_embd=8, n_head=2, n_positions=16, vocab_size=9, rotary_dim=2)
    with pytest.raises(UnsupportedModelError, match=r"GPTJForCausalLM has no native.*transformers.*LlamaForCausalLM"):
        ModelRunner(ServerConfig(device="cpu"), dummy(hf_config=config, impl="native")).initialize()
    assert make_runner(config).get_model().transformer.h[0].attn is not None
    llama = ModelRunner(
        ServerConfig(device="cpu", kv_cache_tokens=64), dummy(hf_config=CONFIGS["llama"](), impl="transformers")
    )
    llama.initialize()
    assert type(llama.get_model().model).__module__.startswith("transformers.")


def test_r14_missing_paths_and_weights_raise(tmp_path, oracle):
    """R14: missing and unexpected weights are tests/models/test_weights.py's, too."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make_runner(tmp_path / "nowhere")
    hf = oracle("qwen3")
    state = dict(hf.state_dict())
    state["model.layers.0.mlp.extra.weight"] = state.pop("model.layers.1.mlp.up_proj.weight")
    hf.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(WeightsError, match=r"missing.*layers\.1\.mlp\.up_proj[\s\S]*unexpected.*mlp\.extra"):
        make_runner(tmp_path)


def test_r15_pools_have_the_profiled_sizes_and_slot_zero_is_kept_back():
    """R15: their invariants are tests/mem_cache/test_memory_pool.py's."""
    runner = make_runner(CONFIGS["qwen3"](), kv_cache_tokens=64, page_size=4, max_running_requests=3, max_model_len=40)
    assert runner.req_to_token_pool.req_to_token.shape == (4, 40)
    assert runner.token_to_kv_pool.k_buffer[1].shape == (64 + 4, 2, 24)
    assert runner.get_kv_cache_spec() == {0: (2, 24, torch.float32), 1: (2, 24, torch.float32)}
    pages = runner.token_to_kv_pool_allocator.alloc_pages(16)
    slots = runner.token_to_kv_pool_allocator.slots_of(pages, 0, 64)
    assert sorted(slots) == list(range(4, 68)) and runner.token_to_kv_pool_allocator.alloc_pages(1) is None
    assert [runner.req_to_token_pool.alloc() for _ in range(4)] == [1, 2, 3, None]


def test_r16_the_torch_backend_serves_a_cpu_and_flashinfer_is_refused_there(runner):
    """R16: the conformance suite is tests/attention/test_attention.py."""
    assert isinstance(runner.attn_backend, TorchAttnBackend)
    assert isinstance(make_runner(CONFIGS["llama"](), attention_backend="torch").attn_backend, TorchAttnBackend)
    with pytest.raises(ValueError, match=r"flashinfer.*CUDA"):
        make_runner(CONFIGS["llama"](), attention_backend="flashinfer")


@pytest.mark.parametrize("skip", ["cpu", "disabled", "not a generation model", None])
def test_r17_cuda_graphs_are_skipped_for_three_reasons(skip, monkeypatch):
    """R17: `capture_model` is called unless one of the three holds; graph_runner is None without it."""
    captured = []
    monkeypatch.setattr(ModelRunner, "capture_model", lambda self, lazily: captured.append(1) or 0)
    runner = make_runner(CONFIGS["llama"](), disable_cuda_graph=skip == "disabled")
    assert runner.graph_runner is None and not captured
    runner.device = "cpu" if skip == "cpu" else "cuda"  # no CUDA call is made here
    if skip == "not a generation model":
        monkeypatch.setattr(ModelRunner, "is_generation", property(lambda self: False))
    runner.graphs.decoders[DECLARED] = "stale"  # pyright: ignore
    runner.init_cuda_graphs()
    assert runner.graph_runner is None
    assert bool(captured) == (skip is None)


def test_r18_prepare_extend_gives_golden_values_for_ragged_requests_with_prefixes(runner):
    """R18."""
    sizes, prefixes = torch.tensor([2, 1, 4], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)
    ids, slots = torch.arange(7) + 10, torch.arange(7) + 40
    batch = runner.prepare_forward_batch_extend(
        ids, torch.tensor([4, 2, 3]), sizes + prefixes, sizes, prefixes, slots, True, [1, 2, 3]
    )
    assert batch.forward_mode is ForwardMode.EXTEND and batch.batch_size == 3
    assert batch.positions.tolist() == [0, 1, 3, 5, 6, 7, 8]
    assert batch.extend_start_loc.tolist() == [0, 2, 3]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [2, 4, 9] and batch.seq_lens_sum == 15
    assert batch.extend_num_tokens == 7
    assert (batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu) == ([2, 1, 4], [0, 3, 5])
    assert batch.logits_indices.tolist() == [1, 2, 6]
    assert batch.input_ids is ids and batch.out_cache_loc is slots
    assert batch.return_logprob and batch.top_logprobs_nums == [1, 2, 3]
    names = list(inspect.signature(runner.prepare_forward_batch_extend).parameters)
    assert names[:8] == [
        "input_ids", "req_pool_indices", "seq_lens", "extend_seq_lens", "extend_prefix_lens", "out_cache_loc",
        "return_logprob", "top_logprobs_nums",
    ]  # fmt: skip


def test_r18_lengths_that_do_not_add_up_and_requests_without_a_token_are_refused(runner):
    """R18: the zero-length request."""
    lens = torch.tensor([2, 0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"request 1 has no new token.*\[2, 0, 1\]"):
        runner.prepare_forward_batch_extend(
            torch.arange(3), torch.arange(3), lens, lens, torch.zeros_like(lens), torch.arange(3)
        )
    with pytest.raises(ValueError, match="add up to 3, but input_ids has 4"):
        runner.prepare_forward_batch_extend(
            torch.arange(4), torch.arange(3), lens, lens, torch.zeros_like(lens), torch.arange(4)
        )


def test_r19_prepare_decode_gives_golden_values(runner):
    """R19: M-RoPE deltas reach the batch, which refuses them for text models (F8)."""
    ids, rows, slots = torch.tensor([7, 8]), torch.tensor([2, 1]), torch.tensor([33, 20])
    lens = torch.tensor([5, 1], dtype=torch.int32)
    batch = runner.prepare_forward_batch_decode(ids, rows, lens, slots)
    assert batch.forward_mode is ForwardMode.DECODE and batch.batch_size == 2 and batch.seq_lens_sum == 6
    assert batch.positions.tolist() == [4, 0] and batch.positions.dtype == torch.int64
    assert batch.input_ids is ids and batch.req_pool_indices is rows and batch.out_cache_loc is slots
    assert batch.logits_indices is None and not batch.return_logprob
    with pytest.raises(ValueError, match="mrope_position_deltas"):
        runner.prepare_forward_batch_decode(ids, rows, lens, slots, mrope_position_deltas=torch.zeros(2))


@pytest.mark.parametrize(
    ("mode", "called"),
    [
        (ForwardMode.EXTEND, "forward_extend"),
        (ForwardMode.MIXED, "forward_extend"),
        (ForwardMode.DECODE, "forward_decode"),
        (ForwardMode.IDLE, None),
    ],
)
def test_r20_forward_dispatches_on_the_mode(mode, called, runner, monkeypatch):
    """R20."""
    calls = []
    for name in ("forward_extend", "forward_decode"):
        monkeypatch.setattr(ModelRunner, name, lambda self, batch, how, name=name: calls.append((name, how)))
    batch = idle_batch()
    batch.forward_mode = mode
    runner.forward(batch, Execution.MODULES)
    assert calls == ([(called, Execution.MODULES)] if called else [])


def test_r20_an_unknown_mode_raises(runner):
    """R20."""
    batch = idle_batch()
    batch.forward_mode = 7  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"unknown forward mode 7.*EXTEND"):
        runner.forward(batch)


@pytest.mark.parametrize("execution", [Execution.PLAIN, Execution.MODULES])
def test_r21_the_plan_is_made_before_the_model_runs(execution, runner, monkeypatch):
    """R21."""
    order = []
    plan, call = TorchAttnBackend.init_forward_metadata, Executions.call_model
    monkeypatch.setattr(
        TorchAttnBackend, "init_forward_metadata", lambda self, batch: order.append("plan") or plan(self, batch)
    )
    monkeypatch.setattr(
        Executions, "call_model", lambda self, batch, how: order.append("model") or call(self, batch, how)
    )
    hand = ByHand(runner)
    hand.extend({0: [1, 2]}, execution)
    hand.decode({0: 3}, execution)
    assert order == ["plan", "model"] * 2


def test_r21_extend_then_decode_equals_one_longer_extend_and_a_cached_prefix_changes_nothing(runner):
    """R21; against transformers: tests/models/test_models.py."""
    ids = random_ids(18)
    whole = ByHand(runner).extend({0: ids}).next_token_logits
    hand = ByHand(runner)
    hand.extend({0: ids[:-1]})
    torch.testing.assert_close(hand.decode({0: ids[-1]}).next_token_logits, whole, rtol=0, atol=2e-5)
    hand = ByHand(runner)
    hand.extend({0: ids[:11]})
    torch.testing.assert_close(hand.extend({0: ids[11:]}).next_token_logits, whole, rtol=0, atol=2e-5)


def test_r22_an_idle_pass_has_no_rows(runner):
    """R22."""
    out = runner.forward(idle_batch())
    assert out.next_token_logits.shape == (0, 97) and out.next_token_logits.dtype == runner.dtype
    assert runner.sample(out, idle_batch()).shape == (0,)


def sampled(runner: ModelRunner, logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return runner.sample(LogitsProcessorOutput(logits), idle_batch(), **kwargs)


def test_r23_greedy_top_k_one_and_filters_that_are_off(runner):
    """R23."""
    logits = torch.randn(4, 97, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1)
    assert torch.equal(sampled(runner, logits).long(), best)
    assert torch.equal(sampled(runner, logits, temperatures=torch.zeros(4)).long(), best)
    warm = torch.full((4,), 5.0)
    assert torch.equal(sampled(runner, logits, temperatures=warm, top_ks=torch.ones(4, dtype=torch.int64)).long(), best)
    off = []
    for top_k in (None, -1, 0, 97):
        torch.manual_seed(3)
        top_ks = None if top_k is None else torch.full((4,), top_k)
        off.append(sampled(runner, logits, temperatures=warm, top_ks=top_ks, top_ps=torch.ones(4)).tolist())
    assert off.count(off[0]) == 4 and off[0] != best.tolist()


def test_r23_samples_follow_the_distribution_and_greedy_rows_beside_them_stay_greedy(runner):
    """R23: chi-square over a temperature of 2, with every second row greedy."""
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 3.0]])
    rows = 4000
    temperatures = torch.tensor([2.0, 0.0]).repeat(rows // 2)
    tokens = sampled(runner, logits.expand(rows, -1), temperatures=temperatures)
    assert (tokens[1::2] == 4).all()
    expected = (logits[0] / 2).softmax(-1) * (rows // 2)
    observed = torch.bincount(tokens[::2].long(), minlength=5)
    assert ((observed - expected) ** 2 / expected).sum() < 18.5  # 4 degrees of freedom, p = 0.001
    nucleus = sampled(runner, logits.expand(rows, -1), temperatures=torch.ones(rows), top_ps=torch.full((rows,), 0.7))
    assert set(nucleus.tolist()) == {2, 4}
    ones = torch.ones(20, dtype=torch.int32)
    assert sampled(runner, torch.zeros(20, 9), temperatures=ones.float(), top_ks=ones).tolist() == [0] * 20
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = (sampled(runner, torch.zeros(20, 999), temperatures=ones.float()).tolist() for _ in range(2))
        torch.manual_seed(0)
        assert sampled(runner, torch.zeros(20, 999), temperatures=ones.float()).tolist() == first != second


def test_r24_penalties_equal_a_loop_and_leave_the_logits(runner):
    """R24."""
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    histories = [[1, 1, 2], [], [11, 0, 11, 11]]
    repetition, frequency, presence = (
        torch.tensor([1.5, 2.0, 0.7]),
        torch.tensor([0.5, 1.0, -0.3]),
        torch.tensor([0.2, 1.0, 0.4]),
    )
    expected = logits.clone()
    for row, history in enumerate(histories):
        for token, count in Counter(history).items():
            value = expected[row, token]
            value = value / repetition[row] if value > 0 else value * repetition[row]
            expected[row, token] = value - frequency[row] * count - presence[row]
    kept = logits.clone()
    params = {
        "repetition_penalties": repetition, "frequency_penalties": frequency, "presence_penalties": presence,
        "token_histories": histories,
    }  # fmt: skip
    assert sampled(runner, logits, penalty_params=params).tolist() == expected.argmax(-1).tolist()
    assert torch.equal(logits, kept)
    strong = {
        **params,
        "frequency_penalties": torch.full((3,), 100.0),
        "token_histories": [[int(t)] for t in kept.argmax(-1)],
    }
    assert not (sampled(runner, logits, penalty_params=strong) == kept.argmax(-1)).any()
    with pytest.raises(ValueError, match="token_histories has 2 lists, logits has 3 rows"):
        sampled(runner, logits, penalty_params={**params, "token_histories": [[], []]})
    with pytest.raises(ValueError, match=r"frequency_penalties has shape \(2,\), expected \(3,\)"):
        sampled(runner, logits, penalty_params={**params, "frequency_penalties": torch.ones(2)})
    only = {**params, "repetition_penalties": None, "presence_penalties": None, "frequency_penalties": None}
    assert sampled(runner, logits, penalty_params=only).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r25_sample_returns_int32_of_the_batch(batch, dtype, runner):
    """R25."""
    logits = torch.randn(batch, 97).to(dtype)
    for kwargs in ({}, {"temperatures": torch.ones(batch), "top_ps": torch.full((batch,), 0.5)}):
        tokens = sampled(runner, logits, **kwargs)
        assert tokens.dtype == torch.int32 and tokens.shape == (batch,)


ASKING: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 2}


def test_v47_nothing_waits_for_the_device_at_sampling_with_logprobs(monkeypatch):
    """V47: a spy on what reads a tensor on the host; the lists are built on arrival."""
    steps, reads = Steps(make_runner(CONFIGS["llama"](), max_num_tokens=16)), []
    for prompt, params in ((random_ids(5), ASKING), (random_ids(20), ASKING), ([7], {}), ([8], {"logprobs": 0})):
        steps.add(prompt, 3, **params)
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        real = getattr(torch.Tensor, name)
        spy = lambda self, *args, name=name, real=real: reads.append(name) or real(self, *args)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, spy)
    found = []
    for _ in range(4):
        schedule = steps.scheduler.schedule()
        steps.runner.execute_model(schedule)
        reads.clear()
        waiting = steps.runner.sample_tokens_async()
        assert waiting is not None and reads == []
        output = waiting.get_output()
        assert reads
        found.append(output)
        steps.scheduler.launched(schedule)
        steps.scheduler.update(schedule, output)
    assert len(found[0].logprobs) == len(found[0].req_ids) and any(found[0].logprobs)
    assert sum(len(entries) for output in found for entries in output.prompt_logprobs.values()) == 4 + 19


def test_v47_the_copy_of_the_tokens_is_queued_before_what_follows_sampling(monkeypatch):
    """V47."""
    steps, order = Steps(make_runner(CONFIGS["llama"]())), []
    steps.add([1, 2, 3], 2, **ASKING)
    sample, feed = ModelRunner._sample, RequestState.feed
    copy, prompts = async_output.copy_to_host, StepInputs.prompt_logprobs

    def noted(name: str, real: Any) -> Any:
        return lambda *args: order.append(name) or real(*args)

    monkeypatch.setattr(ModelRunner, "_sample", noted("sample", sample))
    monkeypatch.setattr(StepInputs, "prompt_logprobs", noted("prompt logprobs", prompts))
    monkeypatch.setattr(RequestState, "feed", noted("feed", feed))
    monkeypatch.setattr(async_output, "copy_to_host", noted("copy", copy))
    steps.step()
    assert order == ["prompt logprobs", "sample", "copy", "feed"]


@pytest.mark.gpu
def test_v47_gpu_sampling_with_logprobs_does_not_wait_for_the_device():
    """V47: the copy of all that is asked for is one event's."""
    options = {"max_num_tokens": 16, "device": "cuda", "kv_cache_tokens": 4096}
    cuda, cpu = (Steps(make_runner(CONFIGS["llama"](), **{**options, "device": d})) for d in ("cuda", "cpu"))
    outputs: dict[str, list[ModelRunnerOutput]] = {"cuda": [], "cpu": []}
    for device, steps in (("cuda", cuda), ("cpu", cpu)):
        for prompt, params in ((random_ids(5), ASKING), (random_ids(20), ASKING), ([7], {}), ([8], {"logprobs": 0})):
            steps.add(prompt, 3, temperature=0.7, top_p=0.9, seed=3, **params)
        for _ in range(4):
            schedule = steps.scheduler.schedule()
            steps.runner.execute_model(schedule)
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                waiting = steps.runner.sample_tokens_async()
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            assert waiting is not None and (waiting._copied is not None) == (device == "cuda")
            outputs[device].append(waiting.get_output())
            steps.scheduler.launched(schedule)
            steps.scheduler.update(schedule, outputs[device][-1])
    for ours, theirs in zip(outputs["cuda"], outputs["cpu"], strict=True):
        assert ours.sampled_token_ids == theirs.sampled_token_ids
        assert ours.prompt_logprobs.keys() == theirs.prompt_logprobs.keys()
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert len(one) == len(other)
            for token, same in zip(one, other, strict=True):
                assert token.logprobs == pytest.approx(same.logprobs, abs=1e-4)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_v18_logprobs_mode_reaches_sampled_and_prompt_logprobs(mode):
    """V18: logits are log probabilities up to a constant; no processor is applied to prompt tokens."""

    def run(mode: str) -> list[ModelRunnerOutput]:
        steps = Steps(make_runner(CONFIGS["llama"](), logprobs_mode=mode))
        steps.add(random_ids(6), 3, temperature=2.0, seed=1, logprobs=40, prompt_logprobs=40)
        return [output for _, output in steps.run()]

    for raw, other in zip(run("raw_logprobs"), run(mode), strict=True):
        pairs = [
            (list(chain(*raw.logprobs)), list(chain(*other.logprobs)), 2.0 if mode.startswith("processed") else 1.0)
        ]
        pairs += [(raw.prompt_logprobs[rid], other.prompt_logprobs[rid], 1.0) for rid in raw.prompt_logprobs]
        for ours, theirs, temperature in pairs:
            for one, two in zip(ours, theirs, strict=True):
                assert one.token_ids == two.token_ids and one.ranks == two.ranks
                gaps = torch.tensor(one.logprobs) / temperature - torch.tensor(two.logprobs)
                assert gaps.std() < 1e-5
                if temperature == 1 and mode == "processed_logprobs":
                    assert gaps.abs().max() < 1e-6
                elif mode.endswith("logits"):
                    assert gaps.abs().max() > 0.1
    with pytest.raises(ValueError, match=r"logprobs_mode='raw'.*raw_logprobs"):
        ServerConfig(logprobs_mode="raw")


@pytest.mark.parametrize("cls", [ModelRunner, InterpModelRunner])
def test_r26_shutdown_releases_the_model_and_the_pools_and_twice_is_safe(cls):
    """R26."""
    runner = make_runner(CONFIGS["llama"](), cls)
    ByHand(runner).extend({0: [1, 2]})
    parts = (*PARTS[:5], "req_states", "input_buffers")
    alive = [weakref.ref(getattr(runner, name)) for name in parts]
    assert all(ref() is not None for ref in alive)
    runner.shutdown()
    gc.collect()
    dead = dict(zip(parts, (ref() is None for ref in alive), strict=True))
    assert all(dead.values()), dead
    runner.shutdown()
    ModelRunner(ServerConfig(device="cpu")).shutdown()  # never initialised


def test_r27_is_generation(runner):
    """R27; `sliding_window_size`: tests/models/test_models.py."""
    assert runner.is_generation is True
    with pytest.raises(AttributeError):
        runner.is_generation = False  # pyright: ignore
    runner_without_head = make_runner(CONFIGS["llama"]())
    runner_without_head.model = runner_without_head.model.model
    assert runner_without_head.is_generation is False


def test_r28_the_documented_life_cycle_runs_as_written(runner, caplog):
    """R28: the example of the module's docstring, with the names that it leaves open bound."""
    example = re.search(r"by hand::\n\n((?:    .*\n)+)", model_runner.__doc__ or "")
    assert example is not None and "runner.initialize()" in example[1]
    sizes = torch.tensor([3, 2], dtype=torch.int32)
    scope: dict[str, Any] = {
        "ModelRunner": ModelRunner, "server_config": ServerConfig(device="cpu"), "model_config": dummy(),
        "input_ids": torch.tensor([1, 2, 3, 4, 5]), "rows": torch.tensor([1, 2]), "seq_lens": sizes,
        "extend_seq_lens": sizes, "extend_prefix_lens": torch.zeros_like(sizes), "slots": torch.arange(16, 21),
    }  # fmt: skip
    with caplog.at_level(logging.INFO):
        exec(inspect.cleandoc(example[1]), scope)
    assert scope["next_token_ids"].shape == (2,) and scope["next_token_ids"].dtype == torch.int32
    scope["runner"].shutdown()
