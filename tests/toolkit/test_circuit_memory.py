"""A circuit's memory is at most what the formula says, and not much less; it is linear in the kept features; `batch` is bounded."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from circuits_gpu import random_transcoders
from test_circuits import CLOSE, ids, transcoder
from torch.profiler import ProfilerActivity, profile
from transformers import Gemma2Config, Qwen3Config

from pymllm_interp import LM, SamplingParams
from pymllm_interp.toolkit.circuits import build, interventions, memory, passes, pruning, run, scores
from pymllm_interp.toolkit.circuits.frozen import FrozenLayer, FrozenNorm

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "max_position_embeddings": 512,
}  # fmt: skip
SHAPES = {
    "gemma2": Gemma2Config(
        **SIZES, intermediate_size=512, num_key_value_heads=4, head_dim=32, query_pre_attn_scalar=32
    ),
    "qwen3": Qwen3Config(**SIZES, intermediate_size=384, num_key_value_heads=2, head_dim=16),
}
OWN = (run.CircuitRun, FrozenLayer, FrozenNorm, scores.PositionBuckets)
WEIGHTS = {"_model", "_decoder", "_replacements", "_attention", "_mlp", "_spec"}


def held(value: Any, found: dict[int, int]) -> dict[int, int]:
    """Bytes of each storage that a run holds, without weights."""
    if isinstance(value, torch.Tensor):
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            held(each, found)
    elif isinstance(value, OWN):
        held({name: each for name, each in vars(value).items() if name not in WEIGHTS}, found)
    return found


def measured(step: Any, runner: Any, peaks: dict[str, int], call: Any) -> Any:
    """A message's result. Its peak is what the run holds before it, and what it allocates at most."""
    before = sum(held(runner.kept[step.key], {}).values())
    result, most = peak_of(call, step, runner)
    peaks[step.method] = max(peaks[step.method], before + most)
    return result


def peak_of(call: Any, *arguments: Any) -> tuple[Any, int]:
    """A call's result, and the bytes that it allocates at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = call(*arguments)
    events: Any = found.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    sizes = [size for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")]
    return result, int(max(torch.tensor([0, *sizes]).cumsum(0).tolist()))


@pytest.mark.parametrize(
    ("shape", "dtype", "tokens", "layers"),
    [("gemma2", torch.float32, 96, 4), ("qwen3", torch.bfloat16, 96, 4), ("gemma2", torch.float32, 60, 3)],
)
def test_peaks_follow_the_formula(shape, dtype, tokens, layers, monkeypatch):
    """Of passes with transcoders of all layers, and with the Jacobian of one."""
    peaks, call, plans = defaultdict[str, int](int), passes.CircuitStep.run, list[Any]()
    monkeypatch.setattr(passes.CircuitStep, "run", lambda step, runner: measured(step, runner, peaks, call))
    monkeypatch.setattr(scores, "ELEMENTS", 1 << 14)
    monkeypatch.setattr(memory, "ELEMENTS", 1 << 14)
    monkeypatch.setattr(build, "check_memory", lambda plan, active=None: plans.append((plan, active)))
    with LM(
        shape, hf_config=SHAPES[shape], load_format="dummy", dtype=dtype, device="cpu", kv_cache_tokens=1024, max_num_tokens=512,
    ) as lm:  # fmt: skip
        coders = random_transcoders(SHAPES[shape], 512, 8, "cpu", dtype)[-layers:]
        for batch in (8, 32):
            peaks.clear()
            circuit = lm.circuit(
                list(range(1, tokens + 1)), coders, max_features=2 * batch, batch=batch, progress=False
            )
            formula = memory.CircuitMemory.of(*plans[-1])
            assert plans[-1][1] == circuit.active and {"forward_layer", "back_layer", "rows"} <= peaks.keys()
            assert 0.5 < max(peaks.values()) / formula.device(batch) <= 1.0, (dict(peaks), formula)


def test_memory_is_linear_in_the_kept_features(lm_of, monkeypatch):
    """Rows, on the host: each kept feature has as many bytes. The device's memory does not depend on them."""
    lm = lm_of("llama")
    for name in (
        "CELLS",
        "CELL_BYTES",
        "NODE_BYTES",
        "SUMS_BYTES",
    ):  # of parts, which do not grow with the kept features
        monkeypatch.setattr(memory, name, 0)
    coders, found = [transcoder(lm, layer) for layer in range(3)], []
    for most in (10, 20, 40):
        plan = build.planned(
            lm, ids(4, 60), coders, 3, max_features=most, max_logits=3, logit_mass=0.9, node_threshold=0.8, edge_threshold=0.9,
            batch=8, skip=1, offload=False,
        )  # fmt: skip
        circuit = build.build(plan, False)
        formula = memory.CircuitMemory.of(plan, circuit.active)
        held_bytes = 4 * len(circuit.row_nodes) * (circuit.active + 4 * 60 + 1) + circuit.weights.numel() * 4
        assert 0.9 < held_bytes / formula.host <= 1.0
        found.append(formula)
    assert len({(one.fixed, one.row) for one in found}) == 1
    assert found[2].host / found[0].host == pytest.approx(4, rel=0.1)


def test_ranking_and_pruning_are_in_the_formula(lm_of, monkeypatch):
    """Beside the weights: parts of rows, and a byte for each entry of the mask of edges. A limit below refuses the circuit."""
    lm, coders, ranking, peaks = lm_of("llama"), [], build._Rows._most_influential, list[int]()
    coders = [transcoder(lm, layer) for layer in range(3)]
    for module in (pruning, memory, interventions):
        monkeypatch.setattr(module, "CELLS", 1 << 12)

    def measured_rank(*arguments: Any) -> Any:
        result, most = peak_of(ranking, *arguments)
        peaks.append(most)
        return result

    monkeypatch.setattr(build._Rows, "_most_influential", measured_rank)
    plan = build.planned(
        lm, ids(4, 60), coders, 3, max_features=300, max_logits=3, logit_mass=0.9, node_threshold=1.0, edge_threshold=1.0,
        batch=8, skip=1, offload=False,
    )  # fmt: skip
    circuit = build.build(plan, False)
    formula, cells = memory.CircuitMemory.of(plan, circuit.active), circuit.weights.numel()
    during = 4 * len(circuit.weights) * (circuit.active + 4 * 60 + 1)
    assert len(circuit.weights) == 301 and len(peaks) > 5 and during + max(peaks) <= formula.host
    _, most = peak_of(lambda: (circuit.graph, circuit.scores()))
    beside = memory.SUMS_BYTES + memory.CELL_BYTES * (1 << 12) + memory.NODE_BYTES * circuit.weights.shape[1]
    assert cells < most < cells + beside
    assert 4 * cells + most < formula.host
    _, most = peak_of(interventions._predicted, circuit, {0: 1.0})
    assert most < cells
    bytes_of = memory.CircuitMemory.of(plan, circuit.active)
    with pytest.raises(ValueError, match=r"max_features=300: rows of \d+ active .* max_circuit_bytes allows"):
        build.build(plan._replace(max_bytes=bytes_of.host - 1, batch=1), False)


def test_a_batch_beyond_the_memory_is_refused_by_name(lm_of, monkeypatch):
    lm, prompt = lm_of("llama"), ids(4, 60)
    lm.generate([prompt], SamplingParams(max_tokens=1))  # messages that came before have been taken
    coder, before = transcoder(lm, 1), set(lm.runner.kept)
    with pytest.raises(
        ValueError, match=r"batch=1000000000: passes over 60 tokens need \d+ MiB of host memory, .* batch=\d+ fits"
    ):
        lm.circuit(prompt, coder, batch=10**9)
    whole = lm.circuit(prompt, coder, batch=8, max_features=9)
    given: dict[str, Any] = {
        "max_features": 9, "max_logits": 3, "logit_mass": 0.9, "node_threshold": 0.8, "edge_threshold": 0.9, "batch": 8,
        "skip": 1, "offload": False,
    }  # fmt: skip
    plan = build.planned(lm, prompt, coder, None, **given)
    bytes_of = memory.CircuitMemory.of(plan)
    with pytest.raises(ValueError, match=r"max_circuit_bytes allows .* batch=7 fits"):
        build.planned(lm, prompt, coder, None, **given, max_bytes=bytes_of.device(8) - 1)
    with pytest.raises(ValueError, match=r"max_circuit_bytes allows .* shorten the prompt"):
        build.planned(lm, prompt, coder, None, **given, max_bytes=bytes_of.fixed - 1)
    tight = build.planned(lm, prompt, coder, None, **given, max_bytes=bytes_of.device(8))
    with pytest.raises(ValueError, match=r"batch=8: .* batch=\d fits"):  # with its active features it is more
        build.build(tight, False)
    torch.testing.assert_close(lm.circuit(prompt, coder, batch=7, max_features=9).weights, whole.weights, **CLOSE)
    lm.generate([prompt], SamplingParams(max_tokens=1))
    assert set(lm.runner.kept) == before


def test_few_columns_of_encoders_are_gathered_at_once(lm_of, monkeypatch):
    """For the constants of all active features, of which there are many at long prompts."""
    lm, found, call = lm_of("llama"), list[int](), passes.CircuitStep.run

    def allocated(step: Any, runner: Any) -> Any:
        if step.method != "constants":
            return call(step, runner)
        peaks, before = defaultdict[str, int](int), sum(held(runner.kept[step.key], {}).values())
        result = measured(step, runner, peaks, call)
        found.append(peaks["constants"] - before)
        return result

    coders = [transcoder(lm, layer) for layer in range(3)]
    wanted = lm.circuit(ids(4, 90), coders, max_features=9)
    monkeypatch.setattr(passes.CircuitStep, "run", allocated)
    monkeypatch.setattr(run, "ELEMENTS", 1 << 10, raising=False)
    circuit = lm.circuit(ids(4, 90), coders, max_features=9)
    torch.testing.assert_close(circuit.bias, wanted.bias, **CLOSE)
    assert circuit.active * lm.hidden_size > 1 << 14 and len(found) == 1
    assert found[0] <= 12 * (1 << 10) + 16 * circuit.active


def test_states_of_the_run_are_not_counted_twice(lm_of, monkeypatch):
    """Behind the forward pass they are a part of what is not free on the device."""
    lm, given = lm_of("llama"), {"max_logits": 3, "logit_mass": 0.9, "node_threshold": 0.8, "edge_threshold": 0.9}
    plan = build.planned(lm, ids(4, 60), transcoder(lm, 1), 3, max_features=9, batch=8, skip=1, offload=False, **given)
    parameters = [SimpleNamespace(device=torch.device("cuda"))]
    there = SimpleNamespace(model_spec=lm.model_spec, _module=SimpleNamespace(parameters=lambda: iter(parameters)))
    formula = memory.CircuitMemory.of(plan, 5)
    monkeypatch.setattr(memory, "free_bytes", lambda device: formula.device(8) - formula.states)
    memory.check_memory(plan._replace(lm=there), 5)
    monkeypatch.setattr(memory, "free_bytes", lambda device: formula.device(8) - formula.states - 1)
    with pytest.raises(ValueError, match="batch=8: passes over 60 tokens"):
        memory.check_memory(plan._replace(lm=there), 5)


@pytest.mark.gpu
def test_rows_on_the_device_are_those_on_the_host(monkeypatch):
    """A device without room for the rows leaves them to the host: the circuit is the same."""
    config, made = SHAPES["gemma2"], []
    with LM(
        "circuit", hf_config=config, load_format="dummy", dtype=torch.bfloat16, device="cuda", kv_cache_tokens=512,
        max_num_tokens=512, max_running_requests=4, attention_backend="torch",
    ) as lm:  # fmt: skip
        coders = random_transcoders(config, 512, 8, "cuda", torch.bfloat16)
        for free, device in ((memory.free_bytes, "cuda"), (lambda _: 0, "cpu")):
            chosen = build.device_of_rows

            def seen(*given: Any, free: Any = free, device: str = device, chosen: Any = chosen) -> torch.device:
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(memory, "free_bytes", free)
                    found = chosen(*given)
                assert found.type == device
                return found

            with monkeypatch.context() as patched:
                patched.setattr(build, "device_of_rows", seen)
                made.append(lm.circuit(ids(1, 60), coders, max_features=100, batch=16, progress=False))
    on_device, on_host = made
    assert on_device.features.equal(on_host.features) and on_device.graph.nodes.equal(on_host.graph.nodes)
    torch.testing.assert_close(on_device.weights, on_host.weights)
    torch.testing.assert_close(on_device.rest, on_host.rest)
