"""Hooked decode passes as graphs between their blocks (runner/graphs/segments.py): the same values as kernel by kernel.

On a CPU a graph is a function (tests/support/helpers_graphs.py); the same bodies run on CUDA, where it is one. The trace
suites run in this way, too: ``pytest tests/hooks/traces/test_trace_parity.py --hook-execution segments``.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import helpers_flashinfer
import pytest
import torch
from conftest import COMMON, held, random_model
from family_configs import tiny_config
from helpers_devices import DEVICES, ways
from helpers_graphs import captured_lms, use_eager_graphs
from helpers_runner import random_ids
from transformers import LlamaConfig, MistralConfig, PretrainedConfig

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.attention import FlashInferAttnBackend, flashinfer_backend
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.config import EngineTuning
from pymllm_interp.models.native.llama import LlamaAttention
from pymllm_interp.runner import model_runner
from pymllm_interp.runner.graphs import graph_capture
from pymllm_interp.runner.graphs.segments import Segments
from pymllm_interp.runner.stages.declared_stage import DeclaredStage

PROMPT, OTHERS = random_ids(9, seed=1), [random_ids(4, seed=2), random_ids(17, seed=3)]
WAIT = 600
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""Between batch shapes: products and attention round by them."""

Load = Callable[..., LM]
HEADS_OF_64: dict[str, Any] = {
    **COMMON,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "head_dim": 64,
    "initializer_range": 0.1,
}
OF_64: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**HEADS_OF_64, num_attention_heads=4, num_key_value_heads=2),
    "mistral": lambda: MistralConfig(**HEADS_OF_64, num_attention_heads=2, num_key_value_heads=1, sliding_window=9),
}
"""With heads that FlashInfer has kernels for."""


@pytest.fixture(scope="module")
def load(model_folder: Callable[[str], Path]) -> Iterator[Load]:
    with captured_lms(model_folder, kv_cache_tokens=2048, max_running_requests=8, hook_execution="segments") as found:
        yield found


def segments_of(lm: LM) -> Segments:
    assert lm.runner.segments is not None
    return lm.runner.segments


@contextmanager
def counted(lm: LM, found: Counter[str]) -> Iterator[None]:
    """Steps of the body, by how they ran."""
    before = ways(lm)
    yield
    found.update(ways(lm) - before)


def reads(lm: LM, prompts: list[list[int]], paths: list[str], new_tokens: int) -> list[list[torch.Tensor]]:
    """What each request's block reads at `paths` in its decode steps."""
    found: list[Any] = []
    with lm.generate(max_new_tokens=new_tokens) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                seen = list().save()
                for step in tracer.iter[:]:
                    for path in paths if step else []:
                        seen.append(lm.get(path).output)
                found.append(seen)
    return found


def tensors(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


# -- the same values -----------------------------------------------------------------------------------

INSIDE = [
    "self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn", "post_attention_layernorm", "mlp.gate_proj",
    "mlp.act_fn", "mlp.down_proj", "mlp", "",
]  # fmt: skip


@pytest.mark.thin(9)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("where", INSIDE, ids=lambda where: where or "layer")
def test_a_read_anywhere_is_what_the_whole_batch_eager_gives(where: str, family: str, device: str, load: Load) -> None:
    """One request and three, padded to one row and to four; the third step of a segment is its first replay."""
    segments, eager = load(device, family), load(device, family, hook_execution="eager")
    paths = [f"model.layers.{layer}.{where}".rstrip(".") for layer in range(segments.runner.num_hidden_layers)]
    for chosen in ([paths[0]], [paths[-1]], paths):
        for prompts in ([PROMPT], [PROMPT, *OTHERS]):
            steps: Counter[str] = Counter()
            with counted(segments, steps):
                ours = reads(segments, prompts, chosen, 6)
            assert steps["segments"] >= 5 and not steps["modules"], steps
            theirs = reads(eager, prompts, chosen, 6)
            for one, other in zip(ours, theirs, strict=True):
                assert len(one) == len(other) == 5 * len(chosen)
                for a, b in zip(one, other, strict=True):
                    torch.testing.assert_close(tensors(a), tensors(b), **CLOSE)


@pytest.mark.parametrize("device", DEVICES)
def test_the_receipt_names_what_sent_a_part_of_the_step_off_its_graph(device: str, load: Load) -> None:
    """Reads at a boundary cost no graph; those inside of a kernel's reach, or of an operation, do, for their own request."""
    lm = load(device)
    before = Counter(lm.engine.stats()["eager_parts"])
    layers = lm.model.layers
    with lm.generate(max_new_tokens=7) as tracer:
        with tracer.invoke(PROMPT):
            for _ in tracer.iter[:]:
                layers[0].self_attn.o_proj.input.save()
                layers[1].mlp.output.save()
        with tracer.invoke(OTHERS[0]):
            for step in tracer.iter[:]:
                if step % 2:
                    layers[0].self_attn.q_proj.output.save()
                layers[2].mlp.act_fn.output.save()
        with tracer.invoke(OTHERS[1]):
            for _ in tracer.iter[:]:
                layers[1].mlp.source.self_act_fn_0.output.save()
    receipts = tracer.receipts
    assert all(receipt.steps["segments"] == 7 for receipt in receipts), receipts
    found = [receipt.eager_parts for receipt in receipts]
    assert found[0] == {} and found[1] == {
        "model.layers.0.self_attn.q_proj.output": 3, "model.layers.2.mlp.act_fn.output": 7,
    }  # fmt: skip
    ((where, count),) = found[2].items()
    assert where.startswith("model.layers.1.mlp.source.") and count == 7
    after = Counter(lm.engine.stats()["eager_parts"])
    assert after - before == {"self_attn.q_proj": 3, "mlp.act_fn": 7, "mlp.source": 7}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["in place", "assigned"])
def test_an_edit_is_seen_by_the_next_segment_and_in_nobody_elses_rows(how: str, device: str, load: Load) -> None:
    lm, eager = load(device), load(device, hook_execution="eager")
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
    alone = [out.outputs[0] for out in lm.generate(OTHERS, params)]

    def edited(model: LM) -> Any:
        with model.generate(PROMPT, max_new_tokens=8) as tracer:
            kept = list().save()
            for step in tracer.iter[:]:
                if how == "in place":
                    model.model.layers[0].output[0, -1, ::2] *= 0.5
                else:
                    model.model.layers[0].output = model.model.layers[0].output * 0.5
                kept.append((step, model.model.layers[1].output, model.model.layers[2].mlp.output))
            ids = tracer.result.save()
        return kept, ids

    steps: Counter[str] = Counter()
    with counted(lm, steps):
        with held(lm) as arrived:
            handles = [lm.submit(prompt, params) for prompt in OTHERS]
            arrived(2)
        kept, ids = edited(lm)
        beside = [handle.result(WAIT).outputs[0] for handle in handles]
    assert steps["segments"] >= 6, steps
    expected, expected_ids = edited(eager)
    assert torch.equal(ids, expected_ids)
    for ours, theirs in zip(kept, expected, strict=True):
        assert ours[0] == theirs[0]
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
    for out, solo in zip(beside, alone, strict=True):
        assert out.token_ids == solo.token_ids
    plain = lm.generate([PROMPT], params)[0].token_ids
    assert ids[0, len(PROMPT) :].tolist() != plain, "the edit reached the model"


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_between_two_segments_ends_its_request_and_no_other(device: str, load: Load) -> None:
    lm = load(device)
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [out.token_ids for out in lm.generate(OTHERS, params)]
    handles = [lm.submit(prompt, params) for prompt in OTHERS]
    with pytest.raises(ZeroDivisionError):
        with lm.generate(PROMPT, max_new_tokens=12) as tracer:
            for step in tracer.iter[:]:
                h = lm.model.layers[1].output
                if step == 4:
                    h[:] = h / 0 * (1 // 0)
    assert [handle.result(WAIT).token_ids for handle in handles] == expected
    assert not lm.interleaver.interleaving and not lm.interleaver.points


@pytest.mark.thin(9)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("how", ["segments", "split"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_flashinfers_plans_serve_hooked_requests_beside_replayed_ones(
    family: str, how: str, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two halves of a split step have plans of their own, segments share the step's; FlashInfer itself in plain torch."""
    use_eager_graphs(monkeypatch)
    monkeypatch.setattr(flashinfer_backend, "import_flashinfer", lambda: helpers_flashinfer)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 16)
    backend = functools.partial(FlashInferAttnBackend, "cpu", torch.bfloat16)
    monkeypatch.setattr(model_runner, "create_attention_backend", lambda *args: backend())
    random_model(OF_64[family]()).save_pretrained(tmp_path)
    params, found = SamplingParams(temperature=0, max_tokens=24, logprobs=3), {}
    size = {"kv_cache_tokens": 512, "max_running_requests": 6, "page_size": page_size}
    for way in ("eager", how):
        with LM(
            tmp_path, **with_tuning(dtype="bfloat16", device="cpu", hook_execution=way, lower_traces="off", **size)
        ) as lm:
            with held(lm) as arrived:
                handles = [lm.submit(prompt, params) for prompt in [PROMPT, *OTHERS]]
                arrived(3)
            with lm.generate(random_ids(15, seed=9), max_new_tokens=20) as tracer:
                states = list().save()
                for _ in tracer.iter[:]:
                    for layer in lm.model.layers:
                        states.append(layer.self_attn.output[0][:, -1])
            outs = [handle.result(WAIT) for handle in handles]
            assert tracer.receipt.steps[{"eager": "modules"}.get(way, way)] >= 19 and ways(lm)["replay"] > 0
            found[way] = torch.cat(states), outs
    (expected, wanted), (states, outs) = found.values()
    torch.testing.assert_close(states, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
    for out, other in zip(outs, wanted, strict=True):
        for token, theirs, ours, reference in zip(
            out.token_ids, other.token_ids, out.logprobs, other.logprobs, strict=True
        ):
            assert abs(ours[token].logprob - reference[token].logprob) < 0.1 if token in reference else False
            if token != theirs:  # as likely, to rounding; what follows is another text
                break


# -- what is kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_segment_is_captured_when_it_is_met_again_and_then_replayed(device: str, load: Load) -> None:
    lm = load(device, max_segments=32)
    segments, before = segments_of(lm), segments_of(lm).num_captured
    reads(lm, [PROMPT], ["model.layers.1"], 2)
    assert segments.num_captured == before, "one decode step: each segment was met once"
    reads(lm, [PROMPT], ["model.layers.1"], 9)
    assert segments.num_captured == before + 2, "up to the layer's output, and from there on"
    reads(lm, [PROMPT], ["model.layers.1"], 9)
    assert segments.num_captured == before + 2 and segments.num_evicted == 0


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_block_saved_stays_what_it_was(device: str, load: Load) -> None:
    """No block holds memory that a later replay writes to."""
    lm = load(device)
    registers = segments_of(lm)._registers
    with lm.generate(PROMPT, max_new_tokens=7) as tracer:
        kept, copies = list().save(), list().save()
        for _ in tracer.iter[:]:
            for layer in lm.model.layers:
                value = layer.output
                kept.append(value)
                copies.append(value.clone())
    assert len(kept) == 7 * len(lm.model.layers) and registers
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_segments_beyond_the_limit_replace_the_oldest_and_take_no_more_memory(device: str, load: Load) -> None:
    """A sweep over sets of layers: what is kept is bounded, and every value right."""
    lm, eager = load(device, max_segments=6), load(device, hook_execution="eager")
    segments, rng = segments_of(lm), random.Random(5)
    paths = [f"model.layers.{i}{end}" for i in range(lm.runner.num_hidden_layers) for end in ("", ".mlp", ".self_attn")]
    memory = []
    for round_ in range(24):
        chosen = sorted(rng.sample(range(len(paths)), rng.randint(1, 4)), key=lambda i: (i // 3, -(i % 3)))
        picked, prompts = [paths[i] for i in chosen], [PROMPT, *OTHERS][: rng.randint(1, 3)]
        ours, theirs = reads(lm, prompts, picked, 5), reads(eager, prompts, picked, 5)
        for one, other in zip(ours, theirs, strict=True):
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(tensors(a), tensors(b), **CLOSE)
        assert len(segments._recordings) <= 6
        if device == "cuda" and round_ >= 8:
            torch.cuda.synchronize()
            memory.append(torch.cuda.memory_reserved())
    assert segments.num_evicted > 6
    assert not memory or max(memory) - memory[0] <= 64 << 20, [m >> 20 for m in memory]


# -- ahead -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_block_that_runs_ahead_sees_the_steps_that_happened_and_no_other(
    device: str, stop_at: int, load: Load
) -> None:
    """The step behind the last one was launched already: it is dropped."""
    ahead, lm = load(device, async_scheduling=True), load(device, async_scheduling=False)
    plain = lm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=10))[0].token_ids
    params = {"max_new_tokens": 10, "stop_token_ids": [plain[stop_at]]}
    first = plain.index(plain[stop_at])
    results = []
    for model in (ahead, lm):
        before, passes = model.engine.stats()["overlapped_steps"], []
        with model.generate(PROMPT, **params, on_step=lambda step, _, passes=passes: passes.append(step)) as tracer:
            seen = list().save()
            for step in tracer.iter[:]:
                seen.append((step, model.model.layers[1].output[0, -1]))
            after = ["the loop ended"].save()
            ids = tracer.result.save()
        assert after == ["the loop ended"] and passes == list(range(first + 1)) == [step for step, _ in seen]
        assert tracer.receipt.steps.total() == first + 1 == tracer.receipt.reads - 1, "the result is read, too"
        results.append((ids, seen, model.engine.stats()["overlapped_steps"] - before))
    (ids, seen, launched_ahead), (expected_ids, expected, _) = results
    assert torch.equal(ids, expected_ids) and launched_ahead > 0
    for (_, a), (_, b) in zip(seen, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert ahead.engine.stats()["running"] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_that_a_block_changes_are_those_that_the_next_step_goes_on_with(device: str, load: Load) -> None:
    """The only place where a step ahead waits for the one before."""
    ahead, lm = load(device, async_scheduling=True), load(device, async_scheduling=False)
    results = []
    for model in (ahead, lm):
        with model.generate(PROMPT, max_new_tokens=7) as tracer:
            drawn, states = list().save(), list().save()
            for step in tracer.iter[:]:
                states.append(model.model.layers[2].output[0, -1])
                token = model.samples
                if step % 3 == 1:
                    model.samples = (token + 5) % 90
                drawn.append(token.clone())
            ids = tracer.result.save()
        results.append((ids, drawn, states))
    (ids, drawn, states), (expected_ids, expected_drawn, expected) = results
    assert torch.equal(ids, expected_ids) and all(map(torch.equal, drawn, expected_drawn))
    for a, b in zip(states, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert [d.item() for d in drawn] != ids[0, len(PROMPT) :].tolist()


# -- how a step runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_logits_and_samples_cost_no_segment(device: str, load: Load) -> None:
    lm = load(device)
    steps: Counter[str] = Counter()
    with counted(lm, steps), lm.generate(PROMPT, max_new_tokens=6) as tracer:
        kept = list().save()
        for _ in tracer.iter[:]:
            lm.logits[:, 7] = -1e4
            kept.append(lm.samples)
    assert len(kept) == 6 and steps == {"replay": 6} == tracer.receipt.steps


@pytest.mark.parametrize("device", DEVICES)
def test_without_graphs_hooked_steps_go_module_by_module(device: str, load: Load) -> None:
    lm, captured = load(device, disable_cuda_graph=True), load(device)
    assert lm.runner.segments is None
    steps: Counter[str] = Counter()
    with counted(lm, steps):
        ours = reads(lm, [PROMPT], ["model.layers.1"], 5)
    assert steps["modules"] == 4 and not steps["segments"], steps
    for a, b in zip(ours[0], reads(captured, [PROMPT], ["model.layers.1"], 5)[0], strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 3])
def test_a_trace_that_changes_nothing_leaves_every_bit_of_a_replayed_step(count: int, device: str, load: Load) -> None:
    """The same kernels at the same shapes, however they are cut: logits of each request."""
    lm, prompts = load(device), [PROMPT, *OTHERS][:count]

    def logits(paths: list[str]) -> list[list[torch.Tensor]]:
        found: list[Any] = []
        with lm.generate(max_new_tokens=9) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    rows = list().save()
                    for _ in tracer.iter[:]:
                        for path in paths:
                            module = lm.get(path)
                            module.output = module.output
                        rows.append(lm.logits)
                    found.append(rows)
        return found

    steps: Counter[str] = Counter()
    with counted(lm, steps):
        untouched = logits([])
    assert not steps["segments"] and steps["replay"] >= 8
    for paths in (
        ["model.layers.1"],
        ["model.layers.0.self_attn", "model.layers.0.mlp.down_proj", "model.layers.2.mlp"],
    ):
        touched = logits(paths)
        for one, other in zip(touched, untouched, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))


# -- what goes wrong -------------------------------------------------------------------------------------------


def test_a_pass_that_fails_in_a_segment_leaves_later_traces_as_they_were(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load("cpu", disable_cuda_graph=True)
    expected = reads(lm, [PROMPT], ["model.layers.1"], 4)[0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(LlamaAttention, "forward_fused", broken)
        with pytest.raises(torch.OutOfMemoryError):
            reads(lm, [PROMPT], ["model.layers.1"], 4)
    for a, b in zip(reads(lm, [PROMPT], ["model.layers.1"], 4)[0], expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_a_segment_that_fails_when_it_is_first_met_is_met_anew(
    device: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has compiled nothing, and made no register, so nothing may be captured yet."""
    lm, place = load(device, max_segments=11), ["model.layers.1.self_attn"]
    segments, fused, failures = segments_of(lm), LlamaAttention.forward_fused, []

    def fails_once(self: LlamaAttention, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.layer_idx == 1 and x.shape[1] == 1 and not failures:
            failures.append(torch.OutOfMemoryError("CUDA out of memory"))
            raise failures[0]
        return fused(self, x, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward_fused", fails_once)
    assert "delta" not in segments._registers
    with pytest.raises(torch.OutOfMemoryError):
        reads(lm, [PROMPT], place, 6)
    ours, theirs = reads(lm, [PROMPT], place, 6), reads(load(device, hook_execution="eager"), [PROMPT], place, 6)
    assert len(failures) == 1 and len(segments) > 0 and not segments.broken
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(tensors(a), tensors(b), **CLOSE)


def test_a_segment_that_cannot_be_captured_runs_kernel_by_kernel(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm = load("cpu", max_segments=9)
    expected = reads(load("cpu"), [PROMPT], ["model.layers.1"], 6)[0]
    tries = []

    def fails(run: Any, pool: Any) -> Any:
        tries.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph_capture, "capture", fails)
    for _ in range(2):
        for a, b in zip(reads(lm, [PROMPT], ["model.layers.1"], 6)[0], expected, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
    assert len(tries) == 1 and len(segments_of(lm)) == 0, "one is enough to know"
    assert "could not be captured" in caplog.text and lm.engine.stats()["segments"]["broken"] == 1


# -- beside what is declared --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(model_folder: Callable[[str], Path], load: Load) -> Iterator[Load]:
    """(hook_execution) -> an LM that reads declared ops from tables, as on CUDA."""
    made: dict[str, LM] = {}

    def lm_of(how: str) -> LM:
        if how not in made:
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr(DeclaredStage, "has_tables", True)
                device = "cuda" if torch.cuda.is_available() else "cpu"
                size = {"kv_cache_tokens": 512, "max_running_requests": 4, "capture_ring_bytes": 1 << 16}
                made[how] = LM(
                    model_folder("llama"), **with_tuning(dtype="float32", device=device, hook_execution=how, **size)
                )
        return made[how]

    yield lm_of
    for lm in made.values():
        lm.shutdown()


@pytest.mark.parametrize("site", ["resid_post.0", "logits"])
def test_logits_that_a_block_keeps_are_not_those_of_the_next_replay(site: str, tables: Load) -> None:
    lm = tables("segments")
    width = lm.hf_config.vocab_size if site == "logits" else lm.hf_config.hidden_size
    with lm.generate(PROMPT, max_new_tokens=6, interventions=[Steer(site, torch.ones(width), scale=0.1)]) as tracer:
        kept, copies = list().save(), list().save()
        for _ in tracer.iter[:]:
            value = lm.logits
            kept.append(value)
            copies.append(value.clone())
    assert tracer.receipt.steps["replay"] == 6
    assert all(map(torch.equal, kept, copies))


@pytest.mark.parametrize("how", ["segments", "split", "eager"])
def test_ops_at_the_logits_act_however_the_step_beside_them_runs(how: str, tables: Load) -> None:
    lm = tables(how)
    seven = torch.zeros(lm.hf_config.vocab_size)
    seven[7] = 1000.0
    params = SamplingParams(temperature=0, max_tokens=6)
    with held(lm) as arrived:
        handle = lm.submit(OTHERS[0], params, interventions=[Steer("logits", seven)])
        arrived(1)
    beside = reads(lm, [PROMPT], ["model.layers.1"], 6)
    assert handle.result(WAIT).token_ids == [7] * 6 and len(beside[0]) == 5


@pytest.mark.parametrize("call", ["mlp", "lm_head"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_blocks_own_call_of_a_module_leaves_the_passes_its_ops(graphs: bool, call: str, load: Load) -> None:
    """The module gets its ops beside its inputs, for one call: the model's."""
    lm = load("cpu", disable_cuda_graph=not graphs)
    seven = torch.zeros(lm.hf_config.vocab_size)
    seven[7] = 1000.0
    specs = [Steer("mlp_out.1", torch.ones(lm.hf_config.hidden_size), scale=5.0), Steer("logits", seven)]
    module = lm.lm_head if call == "lm_head" else lm.model.layers[1].mlp

    def run(own: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        handle = lm.submit(OTHERS[0], SamplingParams(temperature=0, max_tokens=30))
        with lm.generate(PROMPT, max_new_tokens=5, interventions=specs) as tracer:
            states = list().save()
            for _ in tracer.iter[:]:
                x = module.input
                if own:
                    module(x)
                states.append(lm.lm_head.output[:, -1])
            ids = tracer.result.save()
        handle.cancel()
        return ids, states

    (ids, states), (expected_ids, expected) = run(True), run(False)
    assert torch.equal(ids, expected_ids) and ids[0, len(PROMPT) :].tolist() == [7] * 5
    for a, b in zip(states, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("mistral", "segments"), ("mistral", "split"), ("olmo2", "split"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("mistral", "eager"), ("olmo2", "segments"), ("olmo2", "eager"))),
    ],
)  # fmt: skip
def test_blocks_and_plain_requests_beside_them_run_as_alone(family: str, how: str) -> None:
    """Every pass of a transformers class calls modules: a block that waits for one must not be served in another half."""
    config = tiny_config(family)
    config.initializer_range = 0.2
    lm = LM(
        "dummy", load_format="dummy", hf_config=config, dtype="float32", device="cpu", tuning=EngineTuning(hook_execution=how),
        kv_cache_tokens=2048, lower_traces="off",
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def traced() -> torch.Tensor:
        with lm.generate(PROMPT, max_new_tokens=8, ignore_eos=True) as tracer:
            kept = list().save()
            for _ in tracer.iter[:]:
                lm.model.layers[0].output[:] *= 1.5
                kept.append(lm.model.layers[1].output[0, -1].clone())
        assert set(tracer.receipt.steps) <= {"modules", "split", "segments"}
        return torch.stack(list(kept))

    alone = traced()
    plain = [out.token_ids for out in lm.generate(OTHERS[:2], params)]
    with held(lm) as arrived:
        handles = [lm.submit(prompt, params) for prompt in OTHERS[:2]]
        arrived(2)
    together = traced()
    assert [handle.result(WAIT).token_ids for handle in handles] == plain
    assert together.shape == alone.shape
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    lm.shutdown()
