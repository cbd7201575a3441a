"""Parts of vLLM as an engine that need no vLLM: payloads, results, salts, settings and refusals."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_model
from helpers_adapters import write_adapter
from torch import nn
from transformers import LlamaConfig

from pymllm_interp import LM, Capture, Clamp, SamplingParams, Steer
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.model_spec import ModelSpec, attention_add, delta_site, input_add, residual_site
from pymllm_interp.core.request import Request
from pymllm_interp.core.step import RequestHooks
from pymllm_interp.hooks.bound_hooks import Bindings, BoundHooks
from pymllm_interp.hooks.declared import Declared
from pymllm_interp.interventions import Generated
from pymllm_interp.layers.seal import refuse_weights, seal
from pymllm_interp.models.native.llama import LlamaForCausalLM
from pymllm_interp.models.weights.source import ModelSource
from pymllm_interp.server.http.errors import api_error
from pymllm_interp.vllm_engine import payloads, versions
from pymllm_interp.vllm_engine.client.adapters import VllmAdapters
from pymllm_interp.vllm_engine.client.arguments import engine_arguments
from pymllm_interp.vllm_engine.client.backend import VllmBackend
from pymllm_interp.vllm_engine.client.core import VllmCore
from pymllm_interp.vllm_engine.client.sampling import salt_of
from pymllm_interp.vllm_engine.client.uplink import Uplink
from pymllm_interp.vllm_engine.recurrent import ROTARY, rotate_by_torch
from pymllm_interp.vllm_engine.refusals import VllmRefusalError, refuse_config, without_full_graphs
from pymllm_interp.vllm_engine.results import SharedResults, TensorBlock, read_block
from pymllm_interp.vllm_engine.settings import additional_config, limits_of, server_config_of
from pymllm_interp.vllm_engine.structures import structure_of
from pymllm_interp.vllm_engine.worker.blocks.tree import WEIGHTS
from pymllm_interp.vllm_engine.worker.egress.result_arena import ResultArena

CONFIG = LlamaConfig(
    hidden_size=288, num_hidden_layers=2, num_attention_heads=4, vocab_size=50, max_position_embeddings=64
)
SPEC = ModelSpec.of(CONFIG, torch.float32)


def vector(seed: int) -> torch.Tensor:
    return torch.randn(288, generator=torch.Generator().manual_seed(seed))


# -- payloads ------------------------------------------------------------------------------


def test_hooks_travel_without_their_tensors_and_come_back_whole() -> None:
    ops = [Steer("resid_post.1", vector(1), 2.0), Clamp("mlp_out.0", vector(2), high=1.0)]
    hooks, keys, tensors = RequestHooks(ops, [Capture("resid_post.*")], 5, 3), payloads.TensorKeys(), {}
    data = payloads.dumped(hooks, keys, tensors)
    assert len(tensors) == 2 and len(data) < 2000
    found = payloads.loaded(
        data, {key: payloads.unpacked_tensor(payloads.packed_tensor(key, t)) for key, t in tensors.items()}
    )
    assert [op.fingerprint for op in found.interventions] == [op.fingerprint for op in ops] and found.max_tokens == 5
    again: dict[Any, Any] = {}
    payloads.dumped(RequestHooks([Steer("resid_post.0", vector(1).clone())]), keys, again)
    assert set(again) < set(tensors)  # equal numbers have one key
    with pytest.raises(KeyError):
        payloads.loaded(data, {})


def test_a_changed_tensor_has_another_key() -> None:
    keys, tensor = payloads.TensorKeys(), vector(1)
    before = keys.of(tensor)
    assert keys.of(tensor) == before
    tensor[0] += 1
    assert keys.of(tensor) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_any_dtype_and_shape_travels(dtype: torch.dtype) -> None:
    for shape in ((3, 5), (0, 4), ()):
        tensor = torch.ones(shape).to(dtype)
        found = payloads.unpacked_tensor(payloads.packed_tensor(b"key", tensor))
        assert found.dtype == dtype and torch.equal(found, tensor)


def test_only_what_the_clients_key_signed_is_read() -> None:
    sealed = payloads.Sealer(b"a" * 32).sealed(b"data")
    assert payloads.Sealer(b"a" * 32).opened(sealed) == b"data"
    for wrong in (payloads.Sealer(b"b" * 32).sealed(b"data"), sealed[:-1] + b"x", b"short"):
        with pytest.raises(PermissionError, match="not signed"):
            payloads.Sealer(b"a" * 32).opened(wrong)


def test_equal_hooks_are_bound_once_and_share_nothing_that_counts() -> None:
    bindings = Bindings(SPEC, limits_of(ServerConfig(), "cpu"), None)

    def bound(prompt_len: int = 3, scale: float = 2.0, max_tokens: int = 5) -> BoundHooks:
        ops, captures = (
            [Steer("resid_post.1", vector(1), scale)],
            [Capture("resid_post.*"), Capture("mlp_out.0", reduce="mean")],
        )
        return bindings.bound(RequestHooks(ops, captures, max_tokens, prompt_len - 1), prompt_len)

    first, second = Declared(bound()), Declared(bound())
    assert first.hooks is second.hooks and first.captures is not second.captures
    assert all(other is not first.hooks for other in (bound(4), bound(max_tokens=6), bound(scale=2.5)))
    assert first.captures is not None and second.captures is not None
    for site in first.captures.layout.by_site:
        first.captures.put(0, site, torch.full((3, 288), float(site)))
    rows = first.activations([1, 2, 3], 3)
    assert rows is not None and rows.error is None and float(rows["resid_post.0"].max()) > 0
    empty = second.activations([1, 2, 3], 3)
    assert empty is not None and empty.error is not None  # nothing has arrived of the second
    first.fires[0, 0] = 3
    assert not second.fires and first.hooks.applied(3, first.fires) == second.hooks.applied(3, second.fires)


def test_a_vector_that_did_not_reach_every_rank_is_named_and_sent_again() -> None:
    calls: list[tuple[str, int]] = []
    lossy = [1]  # ranks that lose what they get

    async def call(method: str, *arguments: Any) -> list[Any]:
        calls.append((method, len(arguments[0])))
        keys = [packed[0] for packed in arguments[0]]
        return [(rank, [] if rank in lossy else keys) for rank in range(2)]

    request = Request("1", [1, 2, 3], SamplingParams(), 5, 0)
    request.hooks = RequestHooks([Steer("resid_post.1", vector(1), 2.0)], [], 5, 2)
    uplink = Uplink(call, payloads.Sealer(b"a" * 32), 2)
    with pytest.raises(RuntimeError, match="1 of 1 vectors did not reach rank 1 of 2: the request was not started"):
        asyncio.run(uplink.sealed(request))
    lossy.clear()
    first, keys = asyncio.run(uplink.sealed(request))
    second, _ = asyncio.run(uplink.sealed(request))
    assert first == second and len(keys) == 1
    assert calls == [("interp_put", 1), ("interp_put", 1)]  # the third request found its vector there


# -- results -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["arena", "bytes"])
def test_results_arrive_whole(way: str) -> None:
    arena = ResultArena(1 << 26, 1 << 26) if way == "arena" else None
    kept = arena.empty((40, 9000), torch.float32).normal_() if arena else torch.randn(40, 9000)
    value = {
        "kept": kept,
        "part": kept[:7, 100:300],
        "large": torch.randn(1 << 19),
        "a": torch.randn(40, 30),
        "b": [torch.randn(300).bfloat16(), torch.ones(2)],
        "c": "text",
        "d": torch.randn(9, 99)[:, ::2],
    }
    block = TensorBlock(arena)
    shared = SharedResults(arena and (arena.name, arena.size), lambda: None)
    pickled = block.dumped(value)
    found = read_block(pickled, block.sent(), shared)
    for name in ("a", "d", "kept", "part", "large"):
        assert torch.equal(found[name], value[name])
    assert (
        torch.equal(found["b"][0], value["b"][0]) and torch.equal(found["b"][1], value["b"][1]) and found["c"] == "text"
    )
    found["a"].add_(1)  # the caller's own memory
    if arena is not None:
        assert shared.mapped and found["kept"].data_ptr() != value["kept"].data_ptr()
        found["kept"][3, 5] = 7.0
        assert value["kept"][3, 5] == 7.0  # it was not copied


def test_memory_of_results_is_used_again_when_the_last_view_is_gone() -> None:
    woken: list[int] = []
    arena = ResultArena(1 << 23, 1 << 26)
    shared = SharedResults((arena.name, arena.size), lambda: woken.append(1))

    def sent(rows: int) -> tuple[Any, int]:
        tensor = arena.empty((rows, 1000), torch.float32)
        tensor.fill_(rows)
        block = TensorBlock(arena)
        pickled = block.dumped({"a": tensor[:, :500], "b": tensor[:, 500:]})
        return read_block(pickled, None, shared), tensor.data_ptr()

    found, first = sent(1000)
    other, second = sent(1000)
    assert second != first and not woken
    view = found["b"][3]
    del found
    assert not shared.freed() and float(view[0]) == 1000  # a view keeps its block
    del view
    starts = shared.freed()
    assert len(starts) == 1 and woken
    arena.take_back(starts)
    again, third = sent(1000)
    assert third == first and arena.kept == 0
    del again, other
    arena.take_back(shared.freed())
    assert arena.kept == 2 * 4_194_304  # 4,000,000 bytes, rounded
    dropped = arena.empty((1500, 1000), torch.float32)  # of the rank's own, never sent
    del dropped
    arena.take_back([])
    assert 0 < arena.kept <= 1 << 23
    arena.close()
    assert arena.kept == 0 and arena._free == [(0, 1 << 26)]


def test_a_full_arena_is_an_error_of_the_request() -> None:
    arena = ResultArena(1 << 26, 1 << 23)
    held = arena.empty((1 << 22,), torch.uint8)
    with pytest.raises(MemoryError, match="results take more"):
        arena.empty((1 << 23,), torch.uint8)
    del held
    assert arena.empty((1 << 23,), torch.uint8).nbytes == 1 << 23  # what was kept of another size is released


def test_foreign_states_behind_the_used_rows_are_cleared() -> None:
    arena = ResultArena(1 << 26, 1 << 26)
    arena.empty((1024, 1024), torch.bfloat16).fill_(5)
    rows = arena.empty((1024, 1024), torch.bfloat16)
    arena.clear(rows, 3)
    assert float(rows[:3].min()) == 5 and not rows[3:].any()


# -- salts ---------------------------------------------------------------------------------


def salt(ops: list[Any], prompt_len: int = 7, **fields: Any) -> str | None:
    request = Request("1", list(range(prompt_len)), SamplingParams(), 5, 0, **fields)
    declared = (
        Declared(BoundHooks.of(ops, SPEC, prompt_len, limits_of(ServerConfig(), "cpu"), (), prompt_len + 4))
        if ops
        else None
    )
    return salt_of(request, declared)


def test_requests_share_kv_only_with_equal_edits_at_equal_positions() -> None:
    one = [Steer("resid_post.1", vector(1), 2.0)]
    assert salt([]) is None and salt(one) == salt([Steer("resid_post.1", vector(1).clone(), 2.0)])
    others = [
        salt([Steer("resid_post.0", vector(1), 2.0)]), salt([Steer("resid_post.1", vector(2), 2.0)]),
        salt([Steer("resid_post.1", vector(1), 3.0)]), salt([Steer("resid_post.1", vector(1), 2.0, positions="generated")]),
        salt([Steer("resid_post.1", vector(1), 2.0, positions=Generated(1))]), salt(one, cache_salt="mine"),
        salt(one, cache_owner="a"),
        salt([], cache_owner="a"), salt([], cache_owner="b"), salt([], cache_salt="a"),
    ]  # fmt: skip
    assert None not in others and len({salt(one), *others}) == len(others) + 1


def test_an_edit_from_the_prompts_end_is_another_one_for_another_prompt() -> None:
    last = [Steer("resid_post.1", vector(1), positions=[-1])]
    assert salt(last, 7) != salt(last, 8)
    everywhere = [Steer("resid_post.1", vector(1))]
    assert salt(everywhere, 7) == salt(everywhere, 8)


# -- settings and refusals -----------------------------------------------------------------


def test_settings_travel_and_another_version_is_named() -> None:
    config = ServerConfig(capture_ring_bytes=1 << 20, max_interventions_per_site=7)
    found = server_config_of(additional_config(config))
    assert (found.capture_ring_bytes, found.max_interventions_per_site) == (1 << 20, 7)
    with pytest.raises(ValueError, match="the client sent no settings"):
        server_config_of({})


def source(folder: Path | None = Path("/somewhere")) -> ModelSource:
    return ModelSource("model", CONFIG, folder, None)


def test_our_settings_become_vllms() -> None:
    server = ServerConfig(
        max_running_requests=8,
        max_num_tokens=64,
        kv_cache_tokens=100,
        disable_cuda_graph=True,
        max_model_len=32,
        kv_cache_dtype="fp8",
    )
    found = engine_arguments(ModelConfig(model="m", dtype="bf16"), server, source(), {"tensor_parallel_size": 4})
    assert (found["max_num_seqs"], found["max_num_batched_tokens"], found["max_model_len"]) == (8, 64, 32)
    assert found["num_gpu_blocks_override"] * found["block_size"] == 128 and found["enforce_eager"]
    assert found["kv_cache_dtype"] == "fp8"
    assert found["dtype"] == torch.bfloat16 and found["tensor_parallel_size"] == 4 and found["model"] == "/somewhere"


@pytest.mark.parametrize(
    ("server", "given", "message"),
    [
        ({"hook_execution": "eager"}, {}, "hook_execution=.*our own engine"),
        ({"speculative": {"method": "ngram", "num_speculative_tokens": 2}}, {}, "speculative=.*our own engine"),
        ({}, {"worker_cls": "mine"}, "worker_cls=.*the engine sets it"),
        ({}, {"additional_config": {}}, "additional_config=.*the engine sets it"),
    ],
)
def test_settings_that_mean_nothing_to_vllm_are_refused(
    server: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        engine_arguments(ModelConfig(), ServerConfig(**server), source(), given)


def test_drafts_and_adapters_become_vllms_arguments() -> None:
    given = {"enable_lora": True, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    found = engine_arguments(ModelConfig(), ServerConfig(max_loras=2, max_lora_rank=8), source(), given)
    assert (found["max_loras"], found["max_lora_rank"]) == (2, 8) and found["async_scheduling"] is False
    assert "max_loras" not in engine_arguments(ModelConfig(), ServerConfig(), source(), {})


def vllm_config(**changes: Any) -> Any:
    """Settings of vLLM that are served, but for `changes` ("parallel_config.data_parallel_size")."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, distributed_executor_backend="mp", tensor_parallel_size=2
        ),
        model_config=SimpleNamespace(
            runner_type="generate", is_encoder_decoder=False, dtype=torch.float16, architectures=["LlamaForCausalLM"], is_moe=True
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(), speculative_config=SimpleNamespace(method="ngram"),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
    )  # fmt: skip
    for path, value in changes.items():
        *parts, last = path.split(".")
        place: Any = config
        for part in parts:
            place = getattr(place, part)
        setattr(place, last, value)
    return config


REFUSED: list[tuple[str, Any, str]] = [
    ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size above 1 with speculative_config"),
    ("parallel_config.data_parallel_size", 2, "data_parallel_size above 1 for a model with experts on a CPU"),
    ("parallel_config.data_parallel_hybrid_lb", True, "data_parallel_hybrid_lb"),
    ("parallel_config.enable_elastic_ep", True, "enable_elastic_ep"),
    ("parallel_config.enable_expert_parallel", True, "enable_expert_parallel on a CPU"),
    ("parallel_config.prefill_context_parallel_size", 2, "prefill_context_parallel_size"),
    ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size"),
    ("parallel_config.enable_dbo", True, "enable_dbo"),
    ("parallel_config.distributed_executor_backend", "external_launcher", "external_launcher"),
    ("parallel_config.use_sequence_parallel_moe", True, "sequence-parallel MoE"),
    ("speculative_config", SimpleNamespace(method="medusa"), "speculative_config with method 'medusa': ngram"),
    ("scheduler_config.async_scheduling", True, "speculative_config with async_scheduling"),
    ("cache_config.cache_dtype", "bfloat16", "kv_cache_dtype with another precision"),
    ("kv_transfer_config", object(), "kv_transfer_config"),
    ("cache_config.kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
    ("compilation_config.pass_config.enable_sp", True, "enable_sp"),
    ("model_config.runner_type", "pooling", "pooling"),
    ("model_config.is_encoder_decoder", True, "encoder-decoder"),
    ("model_config.multimodal_config", object(), "multimodal"),
    ("model_config.architectures", ["DeepseekV3ForCausalLM"], "DeepSeek models in float16"),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_what_hooks_cannot_be_served_with_is_refused_by_name(path: str, value: Any, message: str) -> None:
    refuse_config(vllm_config())
    with pytest.raises(VllmRefusalError, match=message):
        refuse_config(vllm_config(**{path: value}))


GRAPHS = {"FULL_AND_PIECEWISE": "PIECEWISE", "FULL_DECODE_ONLY": "NONE", "FULL": "NONE", "PIECEWISE": "PIECEWISE"}


@pytest.mark.parametrize("mode", GRAPHS)
def test_no_graph_leaves_out_the_kv_of_context_parallel_ranks(mode: str) -> None:
    modes = pytest.importorskip("vllm.config", reason="needs vLLM's kinds of graphs").CUDAGraphMode
    for ranks in (1, 2):
        fields = {"parallel_config.decode_context_parallel_size": ranks, "device_config.device_type": "cuda"}
        config = vllm_config(**fields, **{"compilation_config.cudagraph_mode": modes[mode]})
        if ranks == 2 and mode != "PIECEWISE":
            with pytest.raises(VllmRefusalError, match="cudagraph_mode': 'PIECEWISE'"):
                refuse_config(config)
        without_full_graphs(config)
        assert config.compilation_config.cudagraph_mode.name == (GRAPHS[mode] if ranks == 2 else mode)
        refuse_config(config)


STATES: list[tuple[str, dict[str, Any], str]] = [
    ("Lfm2ForCausalLM", {"speculative_config": SimpleNamespace(method="ngram")}, "speculative_config for a model with short"),
    ("Lfm2ForCausalLM", {"parallel_config.pipeline_parallel_size": 2}, "pipeline_parallel_size above 1 for a model with short"),
    ("Lfm2ForCausalLM", {"compilation_config.custom_ops": ["all"]}, "custom_ops': \\['all', '-rotary_embedding'\\]"),
    ("Lfm2MoeForCausalLM", {"model_config.hf_config": SimpleNamespace(tie_word_embeddings=False)}, "LFM2 with a head of its own"),
    ("JambaForCausalLM", {}, "Mamba layers on a CPU.*selective_scan_fwd"),
    ("Qwen3NextForCausalLM", {}, "gated delta rules on a CPU.*dtype='bfloat16'"),
    ("FalconH1ForCausalLM", {"cache_config.enable_prefix_caching": True}, "with Mamba-2 on a CPU.*enable_prefix_caching=False"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), STATES)
def test_what_is_not_right_behind_recurrent_states_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str
) -> None:
    base: dict[str, Any] = {"speculative_config": None, "model_config.architectures": [name]}
    with pytest.raises(VllmRefusalError, match=message):
        refuse_config(vllm_config(**base | changes))
    on_cuda = vllm_config(**base | changes | {"device_config.device_type": "cuda"})
    anywhere = {"speculative_config", "parallel_config.pipeline_parallel_size", "model_config.hf_config"}
    if anywhere & changes.keys():
        with pytest.raises(VllmRefusalError, match=message):
            refuse_config(on_cuda)
    else:
        refuse_config(on_cuda)


@pytest.mark.parametrize(("ops", "left"), [(["all"], ["all", ROTARY]), (["none"], ["none"]), (["all", ROTARY],) * 2])
def test_lfm2_is_rotated_by_torch_on_a_cpu(ops: list[str], left: list[str]) -> None:
    fields = {"speculative_config": None, "model_config.architectures": ["Lfm2ForCausalLM"]}
    for device, wanted in (("cpu", left), ("cuda", ops)):
        config = vllm_config(
            **fields, **{"device_config.device_type": device, "compilation_config.custom_ops": list(ops)}
        )
        rotate_by_torch(config)
        refuse_config(config)
        assert config.compilation_config.custom_ops == wanted


def test_on_gpus_more_ranks_are_served() -> None:
    names = ("data_parallel_size", "decode_context_parallel_size", "enable_expert_parallel", "enable_eplb")
    refuse_config(
        vllm_config(**{"device_config.device_type": "cuda"} | {f"parallel_config.{name}": 2 for name in names})
    )
    refuse_config(vllm_config(**{"speculative_config": None, "parallel_config.pipeline_parallel_size": 2}))


def test_breakable_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    with pytest.raises(VllmRefusalError, match="VLLM_USE_BREAKABLE_CUDAGRAPH"):
        refuse_config(vllm_config())


def test_a_missing_or_untested_vllm_is_named_with_extra_and_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(versions, "_found", lambda: None)
    with pytest.raises(ModuleNotFoundError, match=r"-e .\.\[vllm\]"):
        versions.installed_version()
    for other in ("0.25.9", "0.33.0", "1.0"):
        monkeypatch.setattr(versions, "_found", lambda other=other: other)
        with pytest.raises(ImportError, match=rf"0\.26 to 0\.32, and {other}"):
            versions.installed_version()
    monkeypatch.setattr(versions, "_found", lambda: "0.26.1")
    assert versions.installed_version() == "0.26.1"
    with pytest.raises(ValueError, match="expected 'own' or 'vllm'"):
        LM(engine="sglang")


# -- structures ----------------------------------------------------------------------------


@dataclass(eq=False)
class Made(nn.Module):
    """A model with such layers."""

    layer: str
    count: int = 2
    names: tuple[str, ...] = field(default=("input_layernorm", "post_attention_layernorm"))

    def __post_init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        kind = type(self.layer, (nn.Module,), {})
        layers = [kind() for _ in range(self.count)]
        for made in layers:
            for name in self.names:
                made.add_module(name, nn.LayerNorm(4))
        self.model.layers, self.model.norm = nn.ModuleList(layers), nn.LayerNorm(4)


def test_norms_are_found_by_the_layers_class_and_others_are_refused() -> None:
    found = structure_of(Made("LlamaDecoderLayer", 3))
    assert len(found.layers) == 3 and found.taps == 8
    mixers = structure_of(Made("Mamba2DecoderLayer", 3, ("norm", "mixer")))
    assert mixers.taps == 8 and set(mixers.summands) == {delta_site(attention_add(layer)) for layer in range(3)}
    scaled = structure_of(Made("GraniteMoeHybridMambaDecoderLayer", 3))
    assert scaled.taps == 8 and scaled.is_plain and not scaled.summands
    with pytest.raises(NotImplementedError, match="BloomBlock is not known"):
        structure_of(Made("BloomBlock"))
    with pytest.raises(NotImplementedError, match="no list of decoder layers"):
        structure_of(nn.Linear(2, 2))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_each_pipeline_rank_has_the_sites_of_its_modules(first: int) -> None:
    """Together all sites, none twice: `resid_post` of a stage's last layer is on the next stage, which adds its MLP's output."""
    whole, stages = structure_of(Made("LlamaDecoderLayer", 3)), []
    elsewhere = type("PPMissingLayer", (nn.Module,), {})
    for own in (range(first), range(first, 3)):
        made = Made("LlamaDecoderLayer", 3)
        for layer in set(range(3)) - set(own):
            made.model.layers[layer] = elsewhere()
        if 2 not in own:
            made.model.norm = elsewhere()
        stages.append(structure_of(made))
    one, two = stages
    assert one.taps + two.taps == whole.taps and one.sites | two.sites == whole.sites and not one.sites & two.sites
    assert residual_site(input_add(first)) in two.sites and residual_site(input_add(3)) in two.sites
    assert not first or residual_site(attention_add(first - 1)) in one.sites


# -- the command line ----------------------------------------------------------------------


def test_the_commands_options_become_vllms_arguments() -> None:
    from pymllm_interp.cli import make_parser
    from pymllm_interp.server.command import settings_of

    def settings(*options: str) -> Any:
        return settings_of(make_parser().parse_args(["serve", "demo", *options]))

    assert settings().vllm is None and settings("--engine", "vllm").vllm == {}
    given = ("--tensor-parallel-size", "8", "--distributed-executor-backend", "mp", "--vllm-option", "quantization=fp8")
    assert settings("--engine", "vllm", *given).vllm == {
        "tensor_parallel_size": 8, "distributed_executor_backend": "mp", "quantization": "fp8"
    }  # fmt: skip
    with pytest.raises(ValueError, match="give --engine vllm"):
        settings("--tensor-parallel-size", "2")


def test_quantised_weights_are_vllms_to_read(model_folder: Any, tmp_path: Path) -> None:
    import json
    import shutil

    from pymllm_interp.models.weights.source import resolve_model

    folder = tmp_path / "quantised"
    shutil.copytree(model_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "quip"}}))
    with pytest.raises(ValueError, match="is quantised"):
        resolve_model(ModelConfig(model=str(folder)))
    assert resolve_model(ModelConfig(model=str(folder)), quantised=True).folder == folder


def test_what_needs_the_model_in_this_process_is_a_refusal_with_the_reason() -> None:
    backend = VllmBackend.__new__(VllmBackend)
    with pytest.raises(NotImplementedError, match="vLLM has it in its own: make a local LM") as caught:
        backend.require_process("lm.grad")
    assert api_error(caught.value, refused=True).status == 501


def test_a_call_without_an_answer_ends_with_vllms_engine() -> None:
    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    core: Any = VllmCore.__new__(VllmCore)
    core.llm = SimpleNamespace(collective_rpc=never, errored=True, dead_error=RuntimeError("it has ended"))
    with pytest.raises(RuntimeError, match="it has ended"):
        asyncio.run(asyncio.wait_for(core.call_async("interp_end_trace"), 10))


def test_adapters_have_numbers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes equal numbers for one adapter, and a user of an attached LLM numbers from 1."""
    requests: list[Any] = []
    made = {"LoRARequest": lambda *fields: requests.append(fields) or SimpleNamespace(lora_int_id=fields[1])}
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(**made))
    config = SimpleNamespace(lora_config="any")
    llm = SimpleNamespace(add_lora=lambda request: True)
    core: Any = SimpleNamespace(config=config, llm=llm, ask=lambda answer: answer, wait=lambda answer: answer)
    for seed in range(2):  # attached twice
        VllmAdapters(core, {}).load("one", str(write_adapter(tmp_path / str(seed), random_model(CONFIG), seed=seed)))
    (first, number, _), (second, other, _) = requests
    assert first != second and number != other and min(number, other) > 10**6


def test_weights_that_only_vllm_has_are_refused_by_name() -> None:
    module: Any = LlamaForCausalLM(CONFIG, SPEC, "meta", 1)
    seal(module)
    refuse_weights(module, WEIGHTS)
    layer, rows = module.model.layers[1], torch.ones(3, 288)
    for weight, name in (
        (layer.self_attn.q_proj.weight, r"model\.layers\.1\.self_attn\.q_proj\.weight"), (module.lm_head.weight, "lm_head"),
        (layer.mlp.gate_proj.weight, "gate_proj"), (module.model.embed_tokens.weight, "embed_tokens"),
    ):  # fmt: skip
        assert weight.shape[1] == 288 and weight.dtype is torch.float32 and "meta" in repr(weight)
        for read in (
            lambda weight: rows @ weight.T, lambda weight: weight[0], lambda weight: nn.functional.linear(rows, weight),
            lambda weight: weight.sum(), lambda weight: weight.detach(), lambda weight: weight.data.cpu(),
        ):  # fmt: skip
            with pytest.raises(NotImplementedError, match=f"{name}.* is in vLLM's kernels"):
                read(weight)
