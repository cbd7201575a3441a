"""Hooked steps with prompts as graphs between their blocks (runner/graphs/prompt_segments.py): bits of the pass without graphs.

On a CPU a graph is a function (tests/support/helpers_graphs.py); the same bodies run on CUDA, where it is one. Every engine here
pads its prompts to the same sizes, so that only the graphs differ. `hook_execution="eager"` has none between blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import held
from helpers_devices import DEVICES, ways
from helpers_graphs import captured_lms
from helpers_runner import random_ids

from pymllm_interp import LM, SamplingParams, Scale, Steer
from pymllm_interp.runner.graphs import graph_capture
from pymllm_interp.runner.graphs.prompt_segments import PromptSegments

Load = Callable[..., LM]
SIZES = {
    "max_running_requests": 8, "kv_cache_tokens": 2048, "max_num_tokens": 128, "prefill_graph_tokens": 64,
    "capture_ring_bytes": 64 << 20,
}  # fmt: skip
FAMILIES = ["llama", "qwen3", "mistral", "gpt2", "gpt_neox", "gemma2", "gemma3_text"]
WAIT = 600
REASON = "a block waits for a module, and the pass was captured"


@pytest.fixture(scope="module")
def load(model_folder: Callable[[str], Path]) -> Iterator[Load]:
    with captured_lms(model_folder, lower_traces="off", enable_prefix_caching=False, **SIZES) as found:
        yield found


def prompt_segments(lm: LM) -> PromptSegments:
    assert lm.runner.prompt_segments is not None
    return lm.runner.prompt_segments


def first(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def places(lm: LM) -> list[str]:
    """Modules of the tree's decoder layers whose output is a tensor or begins with one, in the order of the pass."""
    family = lm.model_spec.family
    inside = {
        "llama": ["self_attn.q_proj", "self_attn.o_proj", "self_attn", "mlp.act_fn", "mlp.down_proj", "mlp", ""],
        "gpt2": ["attn.c_attn", "attn.c_proj", "attn", "mlp.act", "mlp.c_proj", "mlp", ""],
        "gpt_neox": ["attention.query_key_value", "attention.dense", "attention", "mlp.act", "mlp", ""],
    }  # fmt: skip
    names = inside.get(lm.hf_config.model_type, inside["llama"])
    layers = range(lm.runner.num_hidden_layers)
    return [f"{family.layers}.{layer}.{name}".rstrip(".") for layer in layers for name in names]


def greedy(n: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **options)


def traced(lm: LM, prompts: list[list[int]], reads: list[list[str]], edited: str, **declared: Any) -> list[Any]:
    """Values that each prompt's block reads at its places in the prompt's step, and its logits. The first one also edits."""
    found: list[Any] = []
    with lm.generate(max_new_tokens=3, ignore_eos=True, **declared) as tracer:
        for i, (prompt, paths) in enumerate(zip(prompts, reads, strict=True)):
            with tracer.invoke(prompt):
                seen = list().save()
                found.append(seen)
                for path in paths:
                    value = first(lm.get(path).output)
                    if i == 0 and path == edited:
                        value[..., ::2] *= 0.5
                    seen.append(value.clone())
                seen.append(lm.logits.clone())
    return found


def together(lm: LM, seed: int, **declared: Any) -> tuple[list[torch.Tensor], list[list[int]], Any]:
    """Traced prompts that start with plain ones, beside a request that decodes; drawn from the seed."""
    rng = random.Random(seed)
    everywhere = places(lm)
    prompts = [random_ids(rng.choice([1, 7, 16, 23]), seed=10 * seed + i) for i in range(rng.randint(1, 3))]
    reads = [sorted(rng.sample(everywhere, rng.randint(1, 3)), key=everywhere.index) for _ in prompts]
    plain = [random_ids(rng.randint(1, 20), seed=1000 + seed), random_ids(5, seed=2000 + seed)]
    found: list[Any] = []
    with held(lm) as arrived:
        handles = [lm.submit(prompt, greedy(4, logprobs=1), **declared) for prompt in plain]
        arrived(len(plain))
        thread = Thread(target=lambda: found.extend(traced(lm, prompts, reads, reads[0][0], **declared)))
        thread.start()
        arrived(len(plain) + 1)
    thread.join(WAIT)
    outs = [handle.result(WAIT) for handle in handles]
    states = [state for out in outs for state in (out.activations or {}).values()]
    return [value for seen in found for value in seen] + states, [out.token_ids for out in outs], outs


@pytest.mark.few("family", "llama", "gpt2", "gemma3_text")
@pytest.mark.thin(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_has_the_bits_of_the_pass_without_graphs(family: str, dtype: str, device: str, load: Load) -> None:
    """Three times each: a segment is met, captured and replayed."""
    lm, eager = (load(device, family, dtype=dtype, hook_execution=how) for how in ("auto", "eager"))
    before, met = ways(lm), prompt_segments(lm).num_captured
    for seed in range(6):
        for _ in range(3):
            ours, theirs = together(lm, seed), together(eager, seed)
            assert ours[1] == theirs[1] and len(ours[0]) == len(theirs[0]) > 1
            assert all(map(torch.equal, ours[0], theirs[0])), (family, seed)
    ran = ways(lm) - before
    assert ran["segments"] and not ran["modules"] and prompt_segments(lm).num_captured > met


@pytest.mark.parametrize("device", DEVICES)
def test_a_read_changes_no_bit_of_the_prompts_beside_it(device: str, load: Load) -> None:
    """The pass that nobody reads is a replay of the whole; the same rows, at the same size."""
    lm, prompts = load(device), [random_ids(n, seed=n) for n in (9, 30, 16)]

    def logits(paths: list[str]) -> list[torch.Tensor]:
        found: list[Any] = []
        with lm.generate(max_new_tokens=1) as tracer:
            for i, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    seen = list().save()
                    found.append(seen)
                    for path in paths if i == 0 else []:
                        seen.append(lm.get(path).output)
                    seen.append(lm.logits)
        assert {how for receipt in tracer.receipts for how in receipt.steps} == {"segments" if paths else "replay"}
        return [seen[-1] for seen in found]

    untouched = logits([])
    for paths in (["model.layers.1"], ["model.layers.0", "model.layers.2.mlp"], ["model.layers.2.self_attn.o_proj"]):
        for _ in range(3):
            assert all(map(torch.equal, logits(paths), untouched)), paths


@pytest.mark.parametrize("device", DEVICES)
def test_declared_ops_and_captures_act_in_segments(device: str, load: Load) -> None:
    inner = "z", "mlp_act"
    options = {"tables": True, "inner_sites": inner}
    lm, eager = (load(device, hook_execution=how, **options) for how in ("auto", "eager"))
    hidden = lm.hidden_size
    declared: dict[str, Any] = {
        "interventions": [
            Steer("resid_post.0", torch.linspace(-1, 1, hidden), scale=3.0),
            Scale("mlp_out.2", 0.5),
            *(Scale(f"{kind}.1", 1.5) for kind in inner),
        ],
        "capture": ["resid_post.*", "attn_out.1", "final_norm", *(f"{kind}.1" for kind in inner)],
    }  # fmt: skip
    for seed in range(20, 21 if device == "cpu" else 26):  # the tables' kernels are slow in plain torch
        for _ in range(3):
            ours, theirs = together(lm, seed, **declared), together(eager, seed, **declared)
            assert ours[1] == theirs[1] and all(map(torch.equal, ours[0], theirs[0])), seed
            for a, b in zip(ours[2], theirs[2], strict=True):
                assert a.receipt.interventions == b.receipt.interventions and a.activations.keys()
    assert ways(lm)["segments"] and not ways(lm)["modules"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_segment_is_captured_when_it_is_met_again_and_counted(device: str, load: Load) -> None:
    lm = load(device, max_segments=65)
    prompt, place = random_ids(9, seed=1), "model.layers.1"
    for expected in (0, 3, 3):  # each layer
        before = lm.engine.stats()["execution"].get(f"segments: {REASON}", 0)
        with lm.trace(prompt) as tracer:
            lm.get(place).output.save()
        stats = lm.engine.stats()
        assert stats["prompt_segments"]["captured"] == stats["prompt_segments"]["kept"] == expected
        assert stats["execution"][f"segments: {REASON}"] == before + 1
        assert tracer.receipt.steps == {"segments": 1} and tracer.receipt.eager_parts == {}
    with lm.trace(prompt) as tracer:
        lm.model.layers[0].mlp.act_fn.output.save()
    assert tracer.receipt.eager_parts == {"model.layers.0.mlp.act_fn.output": 1}


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_block_saved_stays_what_it_was(device: str, load: Load) -> None:
    lm, prompt = load(device), random_ids(12, seed=2)
    kept: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    for _ in range(3):
        with lm.trace(prompt, device=lm.device):
            for layer in lm.model.layers:
                value = layer.output.save()
                kept.append(value)
                copies.append(value.clone().save())
    together(lm, 3)
    assert all(map(torch.equal, kept, copies))


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_between_two_segments_ends_its_request_and_no_other(device: str, load: Load) -> None:
    lm, other = load(device), random_ids(14, seed=4)
    (expected,) = lm.generate([other], greedy(6))
    for _ in range(3):
        with held(lm) as arrived:
            handle = lm.submit(other, greedy(6))
            arrived(1)
        with pytest.raises(ZeroDivisionError):
            with lm.trace(random_ids(9, seed=5)):
                lm.model.layers[0].output[:] = 1 // 0
        assert handle.result(WAIT).token_ids == expected.token_ids
    assert not lm.interleaver.interleaving and not lm.interleaver.points


@pytest.mark.parametrize("device", DEVICES)
def test_what_no_graph_serves_runs_module_by_module(device: str, load: Load) -> None:
    """A prompt longer than the captured sizes; gradients; transformers' own attention; edges that are cut."""
    lm = load(device)
    with lm.trace(random_ids(100, seed=1)) as longer:
        lm.model.layers[1].output.save()
    with lm.trace(random_ids(9, seed=1)) as gradients:
        h = lm.model.layers[0].output
        with lm.lm_head.output.sum().backward():
            h.grad.save()
    with lm.trace(random_ids(9, seed=1), output_hidden_states=True) as states:
        lm.output.hidden_states.save()
    for tracer in (longer, gradients, states):
        assert tracer.receipt.steps == {"modules": 1}


def test_segments_beyond_the_limit_replace_the_oldest(load: Load) -> None:
    lm, eager = load("cpu", max_segments=1), load("cpu", hook_execution="eager")
    segments, rng = prompt_segments(lm), random.Random(7)
    assert segments.capacity == 4
    for seed in [rng.randrange(30, 40) for _ in range(24)]:
        ours, theirs = together(lm, seed), together(eager, seed)
        assert ours[1] == theirs[1] and all(map(torch.equal, ours[0], theirs[0])), seed
        assert len(segments._recordings) <= 4
    assert segments.num_evicted > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_segment_that_cannot_be_captured_runs_kernel_by_kernel(
    device: str, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm, eager, tries = load(device, max_segments=5), load(device, hook_execution="eager"), []

    def fails(run: Any, pool: Any, **options: Any) -> Any:
        tries.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph_capture, "record_pieces", fails)
    for _ in range(3):
        ours, theirs = together(lm, 50), together(eager, 50)
        assert ours[1] == theirs[1] and all(map(torch.equal, ours[0], theirs[0]))
    assert len(tries) == 1 and lm.engine.stats()["prompt_segments"]["broken"] == 1
    assert "could not be captured" in caplog.text


@pytest.mark.gpu
def test_memory_stays_bounded_over_many_places(load: Load) -> None:
    lm, rng, memory = load("cuda", max_segments=2), random.Random(5), []
    for round_ in range(40):
        together(lm, rng.randrange(100))
        if round_ >= 16:
            torch.cuda.synchronize()
            memory.append(torch.cuda.memory_reserved())
    assert max(memory) - memory[0] <= 64 << 20, [m >> 20 for m in memory]
