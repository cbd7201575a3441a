"""CUDA graphs of decode passes: seed 002's names and life cycle (rows G1 to G14).

What only a device can do is marked gpu. The rest runs on a CPU with a graph that does what a captured one does: it computes
again, from the same buffers, into the same output.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import helpers_graphs
import pytest
import torch
from conftest import CONFIGS
from helpers_graphs import use_eager_captures, use_eager_graphs
from helpers_runner import ByHand, make_runner, random_ids
from transformers import LlamaConfig

from pymllm_interp import LM, SamplingParams
from pymllm_interp.attention import AttentionBackend
from pymllm_interp.config import EngineTuning
from pymllm_interp.core.forward_batch import ForwardMode
from pymllm_interp.core.step import LogitsProcessorOutput, SchedulerOutput
from pymllm_interp.layers.edits.host import HostOps
from pymllm_interp.runner import ModelRunner
from pymllm_interp.runner.graphs import graph_capture
from pymllm_interp.runner.graphs.captured_passes import DECLARED
from pymllm_interp.runner.graphs.cuda_graph_runner import (
    CudaGraphRunner,
    freeze_gc,
    get_global_graph_memory_pool,
    is_capture_mode,
    model_capture_mode,
    set_global_graph_memory_pool,
)
from pymllm_interp.runner.input_batch import InputBuffers
from pymllm_interp.runner.partition import Execution, Partition


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Captures work on a CPU; (rows, capture mode) of each recording, in order."""
    seen: list[tuple[int, bool]] = []

    use_eager_captures(monkeypatch)
    record = graph_capture.record

    def noted(*args: Any) -> Any:
        graph, outputs = record(*args)
        seen.append((outputs[0].shape[0], is_capture_mode()))
        return graph, outputs

    monkeypatch.setattr(graph_capture, "record", noted)
    return seen


@pytest.fixture
def runner(recorded: list) -> Iterator[ModelRunner]:
    """A runner on the CPU with its decode passes of up to 6 rows captured: sizes 1, 2, 4 and 6."""
    runner = make_runner(CONFIGS["llama"](), max_running_requests=6)
    runner.graphs.decoders[DECLARED] = CudaGraphRunner(runner)
    yield runner
    runner.shutdown()


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """The collector has nothing frozen when the test begins: what conftest.py froze is so again when it is over."""
    gc.unfreeze()
    yield
    gc.freeze()


def graphs_of(runner: ModelRunner) -> CudaGraphRunner:
    assert runner.graph_runner is not None
    return runner.graph_runner


def decode_batch(runner: ModelRunner, n: int, hand: ByHand | None = None):
    """A decode pass of `n` sequences of 1 to 40 tokens that were prefilled."""
    hand = hand or ByHand(runner)
    prompts = {i: random_ids(1 + (i * 13) % 40, seed=i) for i in range(n)}
    hand.extend(prompts)
    return hand.batch({i: [(i + 1) % runner.vocab_size] for i in range(n)}, ForwardMode.DECODE)


def release(hand: ByHand) -> None:
    for key, row in hand.rows.items():
        hand.runner.req_to_token_pool.free(row)
        hand.runner.token_to_kv_pool_allocator.free_pages(hand.pages[key])


def eager(runner: ModelRunner, batch: Any) -> LogitsProcessorOutput:
    with torch.no_grad():
        return runner.executions.plan_and_call(batch, Execution.PLAIN)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str = "") -> None:
    worst = (actual.float() - expected.float()).abs().max().item()
    limit = tolerance * max(1.0, expected.float().abs().max().item())
    assert actual.shape == expected.shape and worst <= limit, f"{what}: off by {worst:.3g}, allowed {limit:.3g}"


# -- module functions (G1, G2, G3, G6) -----------------------------------------------------


def test_g02_capture_mode_holds_within_the_block_however_it_ends():
    """G2."""
    assert not is_capture_mode()
    with model_capture_mode():
        with model_capture_mode():
            assert is_capture_mode()
        assert is_capture_mode()
        with pytest.raises(KeyError), model_capture_mode():
            raise KeyError
        assert is_capture_mode()
    assert not is_capture_mode()
    with pytest.raises(KeyError), model_capture_mode():
        raise KeyError
    assert not is_capture_mode()


def test_g02_capture_mode_is_the_threads_and_the_runners_own():
    """G2: engines of one process capture on threads of their own."""
    here, other = make_runner(CONFIGS["llama"]()), make_runner(CONFIGS["llama"]())
    elsewhere: list[bool] = []
    with model_capture_mode(here):
        with pytest.raises(KeyError), model_capture_mode(here):
            raise KeyError
        thread = threading.Thread(target=lambda: elsewhere.append(is_capture_mode()))
        thread.start()
        thread.join()
        assert is_capture_mode() and here.is_capturing and not other.is_capturing
    assert elsewhere == [False] and not here.is_capturing and not is_capture_mode()


def test_g02_during_a_capture_traces_wait_and_traced_passes_are_refused_on_that_engine_alone(
    model_folder, lm_of, monkeypatch
):
    """G2: the capture of a graph segment, in the middle of a pass of another trace."""
    params, other = SamplingParams(temperature=0, max_tokens=4), lm_of("llama")
    folder, prompt, seen, states = model_folder("llama"), random_ids(5, seed=1), [], []
    use_eager_graphs(monkeypatch)
    expected = other.generate([prompt], params)[0].token_ids
    with other.trace(prompt):
        expected_states = other.model.layers[0].output.save()

    def trace_of_another_thread() -> None:
        with lm.trace(prompt):
            h = lm.model.layers[0].output.save()
        states.append(h)

    def capture(run: Any, pool: Any) -> Any:
        if not seen:
            seen.append((is_capture_mode(), lm.runner.is_capturing, other.runner.is_capturing))
            with pytest.raises(RuntimeError, match="this runner captures CUDA graphs: no pass can start, and no hook"):
                lm.runner.execute_model(SchedulerOutput())
            with ThreadPoolExecutor(1) as threads:  # an engine's thread may not wait for another engine
                assert threads.submit(other.generate, [prompt], params).result(600)[0].token_ids == expected
            thread.start()
            thread.join(0.1)
            assert thread.is_alive() and not states
        return helpers_graphs.capture(run, pool)

    thread = threading.Thread(target=trace_of_another_thread)
    with LM(
        folder,
        dtype="float32",
        device="cpu",
        max_running_requests=4,
        tuning=EngineTuning(hook_execution="segments"),
        lower_traces="off",
    ) as lm:
        monkeypatch.setattr(graph_capture, "capture", capture)
        with lm.generate(prompt, max_new_tokens=5) as tracer:
            for _ in tracer.iter[:]:
                lm.model.layers[1].output.save()
        thread.join(600)
        assert tracer.receipt.steps["segments"] >= 3, "one step may hold the prompt of the other trace"
    assert seen == [(True, True, False)]
    torch.testing.assert_close(states[0], expected_states, rtol=0, atol=1e-5)


def test_g03_the_collector_is_frozen_within_the_block_only(unfrozen):
    """G3."""
    with suppress(KeyError), freeze_gc():
        assert gc.get_freeze_count() > 0 and not gc.isenabled()
        raise KeyError
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_g03_what_a_server_has_frozen_stays_frozen(unfrozen):
    """A load of adapters captures once more, in a server that runs. All that it froze would be looked through again."""
    gc.freeze()
    before = gc.get_freeze_count()
    with freeze_gc():
        assert not gc.isenabled()
    assert gc.isenabled() and 0.9 * before < gc.get_freeze_count() <= before
    gc.unfreeze()


@pytest.mark.parametrize(
    ("cap", "head", "tail", "count"),
    [
        (1, [1], [1], 1),
        (3, [1, 2], [3], 3),
        (17, [1, 2, 4, 8, 12, 16], [16, 17], 7),
        (256, [1, 2, 4, 8, 12, 16, 24], [248, 256], 36),
        (300, [1, 2, 4, 8, 12, 16, 24], [256, 272, 288, 300], 39),
        (600, [1, 2, 4, 8, 12, 16, 24], [496, 512, 544, 576, 600], 55),
    ],
)
def test_g06_the_sizes_are_dense_where_batches_are_small_and_end_at_the_cap(cap, head, tail, count):
    """G6: and R of the pitfalls, a cap of thousands of requests does not make thousands of graphs."""
    sizes = graph_capture.capture_batch_sizes(cap)
    assert sizes == sorted(set(sizes)) and len(sizes) == count
    assert sizes[: len(head)] == head and sizes[-len(tail) :] == tail
    assert len(graph_capture.capture_batch_sizes(4096)) < 170


# -- the runner (G4, G5, G7, G10, G12, G13, G14) ----------------------------------------------


def test_g04_an_uninitialised_runner_is_refused():
    """G4."""
    runner = make_runner(CONFIGS["llama"]())
    runner.shutdown()
    with pytest.raises(RuntimeError, match=r"model, req_to_token_pool.* is None: call initialize\(\) first"):
        CudaGraphRunner(runner)


def test_g05_g10_every_size_is_captured_once_largest_first_in_capture_mode(runner, recorded):
    """G5, G10."""
    graphs = graphs_of(runner)
    assert recorded == [(6, True), (4, True), (2, True), (1, True)] and not is_capture_mode()
    assert sorted(graphs.graphs) == sorted(graphs.output_buffers) == graphs.capture_bs == [1, 2, 4, 6]
    assert (graphs.max_bs, graphs.seq_len_fill_value, graphs.device) == (6, 1, "cpu")
    assert graphs.model_runner is runner
    for bs, buffer in graphs.output_buffers.items():
        assert buffer.next_token_logits.shape == (bs, runner.vocab_size)


def test_g10_captures_write_to_the_dummy_slot_alone(recorded):
    """G10, and D of the pitfalls."""
    runner = make_runner(CONFIGS["llama"](), max_running_requests=6)
    assert runner.token_to_kv_pool is not None
    before = [buffer.clone() for buffer in runner.token_to_kv_pool.k_buffer]
    CudaGraphRunner(runner)
    for buffer, was in zip(runner.token_to_kv_pool.k_buffer, before, strict=True):
        assert torch.equal(buffer[1:], was[1:])


def test_g12_shutdown_lets_go_of_everything_and_may_come_twice(runner):
    """G12."""
    graphs = graphs_of(runner)
    for _ in range(2):
        graphs.shutdown()
        assert not graphs.graphs and not graphs.output_buffers
    assert not graphs.can_run(decode_batch(runner, 1))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        pytest.param(RuntimeError("capture was invalidated"), marks=pytest.mark.slow),
    ],
)
def test_g13_a_capture_that_fails_says_what_to_change(error, unfrozen, monkeypatch):
    """G13; and G3, that captures run with the collector frozen."""
    frozen = []

    def fail(*args: Any) -> None:
        frozen.append(gc.get_freeze_count() > 0)
        raise error

    monkeypatch.setattr(graph_capture, "record", fail)
    runner = make_runner(CONFIGS["llama"](), max_running_requests=6)
    with pytest.raises(RuntimeError, match=f"of 6 rows failed: {error}") as caught:
        CudaGraphRunner(runner)
    assert frozen == [True]
    for hint in ("gpu_memory_utilization", "max_running_requests (now 6)", "disable_cuda_graph=True"):
        assert hint in str(caught.value)
    assert not is_capture_mode() and gc.get_freeze_count() == 0


def test_g13_graphs_captured_before_one_that_fails_are_released(recorded, monkeypatch):
    """G13: clean-up. They would hold the model's memory while the caller handles the error."""
    record, runner = graph_capture.record, make_runner(CONFIGS["llama"](), max_running_requests=6)
    graphs = object.__new__(CudaGraphRunner)

    def fail_third(*args: Any) -> Any:
        if len(graphs.graphs) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return record(*args)

    monkeypatch.setattr(graph_capture, "record", fail_third)
    with pytest.raises(RuntimeError, match="of 2 rows failed"):
        graphs.__init__(runner)
    assert not graphs.graphs and not graphs.output_buffers and not graphs._batches and not is_capture_mode()
    monkeypatch.setattr(graph_capture, "record", record)
    assert sorted(CudaGraphRunner(runner).graphs) == [1, 2, 4, 6], "the runner can capture again"


def test_g14_backends_that_cannot_be_captured_say_so():
    """G14."""

    class Other(AttentionBackend):
        def init_forward_metadata(self, forward_batch): ...

        def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True): ...

    for name, argument in (
        ("init_cuda_graph_state", 4),
        ("init_forward_metadata_capture_cuda_graph", None),
        ("init_forward_metadata_replay_cuda_graph", None),
    ):
        with pytest.raises(NotImplementedError, match="Other cannot be captured"):
            getattr(Other(), name)(argument)


def test_g14_a_replay_plans_its_own_batch_and_not_the_eager_way(runner, monkeypatch):
    """G14: bypasses `init_forward_metadata`."""
    backend, calls = runner.attn_backend, []
    replayed = type(backend).init_forward_metadata_replay_cuda_graph
    monkeypatch.setattr(backend, "init_forward_metadata", lambda batch: pytest.fail("planned the eager way"))
    monkeypatch.setattr(
        backend,
        "init_forward_metadata_replay_cuda_graph",
        lambda batch: calls.append(batch.batch_size) or replayed(backend, batch),
    )
    batch = ByHand(runner).batch({0: [3], 1: [4], 2: [5]}, ForwardMode.DECODE)
    runner.forward(batch)
    assert calls == [4]


@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({}, []), ({"torch_compile_max_bs": 3}, []),
        pytest.param({"enable_torch_compile": True, "torch_compile_max_bs": 3}, [1, 2], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_g07_small_sizes_are_compiled_where_asked_for(recorded, monkeypatch, options, compiled):
    """G7: and a compiled pass gives what an eager one gives."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    runner = make_runner(CONFIGS["llama"](), max_running_requests=4, **options)
    graphs = runner.graphs.decoders[DECLARED] = CudaGraphRunner(runner)
    assert graphs.compile_bs == compiled and graphs.capture_bs == [1, 2, 4]
    for n in (1, 2, 3):
        hand = ByHand(runner)
        batch = decode_batch(runner, n, hand)
        close(graphs.replay(batch).next_token_logits, eager(runner, batch).next_token_logits, 1e-5, f"{n} rows")
        release(hand)


# -- replay (G8, G9, G11) --------------------------------------------------------------------


def test_g08_padded_rows_are_reset_after_a_larger_batch(runner):
    """G8: D of the pitfalls. A row that an earlier batch filled must not write to that batch's memory."""
    buffers = InputBuffers(6, "cpu")
    hand = ByHand(runner)
    buffers.populate(decode_batch(runner, 5, hand), 6)
    assert (buffers.rows[:5] > 0).all() and (buffers.out_cache_loc[:5] > 0).all()
    small = hand.batch({3: [9], 4: [8]}, ForwardMode.DECODE)
    buffers.populate(small, 6)
    for name in ("input_ids", "positions", "rows", "out_cache_loc", "seq_lens"):
        assert torch.equal(getattr(buffers, name)[:2], getattr(small, {"rows": "req_pool_indices"}.get(name, name)))
    for name in ("input_ids", "positions", "rows", "out_cache_loc"):
        assert getattr(buffers, name)[2:].tolist() == [0] * 4
    assert buffers.seq_lens[2:].tolist() == buffers.seq_lens_cpu[2:].tolist() == [1] * 4
    assert buffers.seq_lens_cpu[:2].tolist() == small.seq_lens_cpu.tolist()


def test_cleared_buffers_are_as_new_ones():
    """A pass that runs to be captured reads them: it must not write where the step before did."""
    used, new = InputBuffers(6, "cpu"), InputBuffers(6, "cpu")
    for buffers in (used, new):
        buffers.open_adapters(2)
    tensors = [name for name, value in vars(new).items() if isinstance(value, torch.Tensor)]
    for name in tensors:
        getattr(used, name).fill_(7)
    for tiles in used.adapter_tiles or ():
        tiles.fill_(7)
    used.clear()
    assert "blocks" in tensors and all(torch.equal(getattr(used, name), getattr(new, name)) for name in tensors)
    assert not any(tiles.any() for tiles in used.adapter_tiles or ())


@pytest.mark.parametrize("n", range(1, 7))
def test_g11_a_replay_equals_the_eager_pass_at_every_batch_size(runner, n):
    """G8, G11: the padded run equals the unpadded one, in logits and in what it writes."""
    batch = decode_batch(runner, n)
    expected = eager(runner, batch).next_token_logits
    kv = runner.token_to_kv_pool._kv.clone()
    runner.token_to_kv_pool._kv[:, :, batch.out_cache_loc] = 0
    output = graphs_of(runner).replay(batch)
    close(output.next_token_logits, expected, 1e-5, f"{n} rows")
    torch.testing.assert_close(runner.token_to_kv_pool._kv[:, :, 1:], kv[:, :, 1:])
    assert output.hidden_states is None


@pytest.mark.parametrize("n", [1, 3, 6])
def test_r04_a_replay_returns_hidden_states_where_asked_for_in_memory_of_their_own(runner, n):
    """R4: the final norm's output of the batch's own rows."""
    graphs, hand = graphs_of(runner), ByHand(runner)
    batch = replace(decode_batch(runner, n, hand), return_hidden_states=True)
    expected = eager(runner, batch).hidden_states
    output = runner.forward(batch)
    assert output.hidden_states is batch.hidden_states and output.hidden_states.shape == (n, 72)
    close(output.hidden_states, expected, 1e-5)
    first, kept = output.hidden_states, output.hidden_states.clone()
    batch.input_ids.fill_(50)
    second = graphs.replay(batch, in_place=True).hidden_states
    assert torch.equal(first, kept) and not torch.equal(first, second)
    for buffer in graphs.output_buffers.values():
        for states in (first, second):
            assert states.untyped_storage().data_ptr() != buffer.hidden_states.untyped_storage().data_ptr()
    assert graphs.replay(replace(batch, return_hidden_states=False)).hidden_states is None
    release(hand)


def test_g11_the_next_replay_changes_nothing_that_was_returned(runner):
    """G11: S of the pitfalls."""
    graphs, batch = graphs_of(runner), decode_batch(runner, 3)
    first = graphs.replay(batch).next_token_logits
    kept = first.clone()
    batch.input_ids.fill_(50)
    second = graphs.replay(batch).next_token_logits
    assert torch.equal(first, kept) and not torch.equal(first, second)
    buffer = graphs.output_buffers[4].next_token_logits
    assert first.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()


def test_g09_can_run_is_a_truth_table(runner):
    """G9: a hooked batch is not its business: the partition decides that before it asks."""
    graphs, hand = graphs_of(runner), ByHand(runner)
    batch = decode_batch(runner, 6, hand)
    assert graphs.can_run(batch)
    assert graphs.can_run(replace(batch, forward_mode=ForwardMode.IDLE))
    assert graphs.can_run(replace(batch, return_hidden_states=True))
    for change in (
        {"forward_mode": ForwardMode.EXTEND},
        {"forward_mode": ForwardMode.MIXED},
        {"fresh_kv_only": True},
        {"logits_indices": torch.tensor([0])},
        {"attn_backend": object()},
        {"site_ops": HostOps({}, {}, 0)},
    ):
        assert not graphs.can_run(replace(batch, **change)), change
    graphs.graphs.pop(6)
    assert not graphs.can_run(batch), "its size is not captured"
    del graphs.capture_bs[-1]
    graphs.max_bs = 4
    assert not graphs.can_run(batch), "larger than every captured size"


def test_g09_lengths_past_what_was_captured_run_eagerly(recorded, monkeypatch):
    """G9: the torch backend gathers up to a fixed length in a graph."""
    monkeypatch.setattr("pymllm_interp.attention.torch_backend.STATIC_KV_BYTES", 2 * 2 * 3 * 8 * 4 * 30)
    runner = make_runner(CONFIGS["llama"](), max_running_requests=2)
    graphs, hand = CudaGraphRunner(runner), ByHand(runner)
    hand.extend({0: random_ids(28), 1: random_ids(3)})
    assert graphs.can_run(hand.batch({0: [1], 1: [1]}, ForwardMode.DECODE))
    hand.batch({0: [1], 1: [1]}, ForwardMode.DECODE)
    assert not graphs.can_run(hand.batch({0: [1], 1: [1]}, ForwardMode.DECODE))


def test_an_idle_replay_gives_no_rows(runner):
    """R22."""
    empty = torch.empty(0, dtype=torch.int64)
    lens = torch.empty(0, dtype=torch.int32)
    batch = runner.prepare_forward_batch_decode(empty, empty, lens, empty, seq_lens_cpu=lens)
    batch = replace(batch, forward_mode=ForwardMode.IDLE)
    assert graphs_of(runner).can_run(batch)
    assert graphs_of(runner).replay(batch).next_token_logits.shape == (0, runner.vocab_size)


def test_r20_a_plain_decode_pass_replays_and_one_by_modules_does_not(runner, monkeypatch):
    """R20, R28: `forward` delegates to the graph runner."""
    calls = []
    replay = CudaGraphRunner.replay
    monkeypatch.setattr(
        CudaGraphRunner, "replay", lambda self, batch, *args: calls.append(1) or replay(self, batch, *args)
    )
    batch = decode_batch(runner, 3)
    plain = runner.forward(batch).next_token_logits
    assert calls == [1]
    close(runner.forward(batch, Execution.MODULES).next_token_logits, plain, 1e-5)
    assert calls == [1]


def test_r20_steps_replay_plain_decode_and_run_hooked_decode_by_modules(lm_of, recorded, model_folder):
    """R20: counted by reason and by request; the tokens are those of an engine without graphs."""
    params = SamplingParams(temperature=0, max_tokens=6)
    prompts = [random_ids(5, seed=1), random_ids(9, seed=2), random_ids(1, seed=3)]
    expected = [out.token_ids for out in lm_of("llama").generate(prompts, params)]
    with LM(model_folder("llama"), dtype="float32", device="cpu", max_running_requests=8, lower_traces="off") as lm:
        lm.runner.graphs.decoders[DECLARED] = lm.engine.call(lambda: CudaGraphRunner(lm.runner))
        assert [out.token_ids for out in lm.generate(prompts, params)] == expected
        ways = {
            how: sum(n for (way, _), n in lm.runner.partition.counts.items() if way == how)
            for how in ("plain", "replay")
        }
        assert ways == {"plain": 1, "replay": 5}
        with lm.generate(prompts[0], max_new_tokens=6) as tracer:
            hidden = lm.model.layers[1].output.save()  # at the prompt; the decode steps behind it are nobody's business
            out = tracer.result.save()
        assert out[0, 5:].tolist() == expected[0] and hidden.shape == (1, 5, 72)
        assert tracer.receipt.steps == {"modules": 1, "replay": 5}
        with lm.generate(prompts[0], max_new_tokens=4) as tracer:
            seen = list().save()
            for _ in tracer.iter[:]:
                seen.append(lm.model.layers[1].output)
        assert tracer.receipt.steps == {"modules": 4}
        assert [h.shape[1] for h in seen] == [5, 1, 1, 1]


@pytest.mark.parametrize("mode", list(ForwardMode))
@pytest.mark.parametrize("hooked", [0, 2])
@pytest.mark.parametrize("is_profile", [False, True])
def test_v29_a_captured_pass_replays_unless_somebody_waits_for_a_module(mode, hooked, is_profile):
    """V29: the row of the decision table that graphs add; the others are tests/runner/test_runner_steps.py's."""
    partition = Partition()
    decided = partition.decide(mode, 3, 3, hooked, is_profile, can_replay=True)
    if mode is ForwardMode.IDLE:
        expected = Execution.IDLE
    else:
        captured = Execution.SEGMENTS if hooked else Execution.REPLAY
        expected = Execution.MODULES if is_profile else captured
    assert decided.execution is expected and partition.counts == {(expected.value, decided.reason): 1}


def test_r17_a_rope_that_depends_on_the_lengths_is_not_captured(runner):
    """R17: it asks the device for the lengths, which a graph cannot."""
    dynamic = CONFIGS["llama"]()
    dynamic.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    for config, reason in ((dynamic, "RoPE depends on the lengths"), (CONFIGS["llama"](), None)):
        other = make_runner(config)
        other.device = "cuda"  # no CUDA call is made here
        assert (other.graphs.why_none() is None) == (reason is None)
        assert reason is None or reason in other.graphs.why_none()
        assert (other.profile_cudagraph_memory() == 0) == (reason is not None)


# -- on a device --------------------------------------------------------------------------------

TINY = LlamaConfig(
    vocab_size=97, hidden_size=256, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
ON_CUDA = {"device": "cuda", "kv_cache_tokens": 4096, "max_running_requests": 20}
TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-5}


@pytest.fixture(scope="module")
def cuda_runner() -> Iterator[Callable[..., ModelRunner]]:
    made: dict[tuple, ModelRunner] = {}

    def make(dtype: str, **options: Any) -> ModelRunner:
        key = (dtype, *options.items())
        if key not in made:
            made[key] = make_runner(TINY, dtype=dtype, **{**ON_CUDA, **options})
        return made[key]

    yield make
    for runner in made.values():
        runner.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_g10_gpu_replay_equals_eager_at_every_size(cuda_runner, dtype, page_size):
    """G10: sizes between the captured ones are padded; float32 runs on the torch backend."""
    runner = cuda_runner(dtype, page_size=page_size)
    graphs = graphs_of(runner)
    assert graphs.capture_bs == [1, 2, 4, 8, 12, 16, 20] == sorted(graphs.graphs)
    failed = []
    for n in (20, 1, 2, 3, 4, 7, 8, 11, 12, 16, 17, 20):
        hand = ByHand(runner)
        batch = decode_batch(runner, n, hand)
        for step in range(3):
            assert graphs.can_run(batch)
            expected = eager(runner, batch).next_token_logits
            try:
                close(graphs.replay(batch).next_token_logits, expected, TOLERANCE[dtype], f"{n} rows, step {step}")
            except AssertionError as error:
                failed.append(str(error))
            batch = hand.batch({i: [i + 2 + step] for i in range(n)}, ForwardMode.DECODE)
        release(hand)
    assert not failed, failed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_g10_gpu_replay_equals_eager_at_every_size_of_the_default(cuda_runner, dtype):
    """G10: all 36 sizes up to 256, each full and with a row of padding."""
    runner = cuda_runner(dtype, kv_cache_tokens=1 << 14, max_running_requests=256)
    graphs = graphs_of(runner)
    assert graphs.capture_bs == graph_capture.capture_batch_sizes(256) == sorted(graphs.graphs)
    for n in sorted({n for bs in graphs.capture_bs for n in (bs, max(1, bs - 1))}):
        hand = ByHand(runner)
        batch = decode_batch(runner, n, hand)
        expected = eager(runner, batch).next_token_logits
        close(graphs.replay(batch).next_token_logits, expected, TOLERANCE[dtype], f"{n} rows")
        release(hand)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_g11_gpu_two_replays_do_not_overwrite_each_other(cuda_runner, dtype):
    """G11."""
    runner = cuda_runner(dtype, page_size=16)
    hand = ByHand(runner)
    batch = decode_batch(runner, 3, hand)
    first = graphs_of(runner).replay(batch).next_token_logits
    kept = first.clone()
    batch.input_ids.fill_(50)
    second = graphs_of(runner).replay(batch).next_token_logits
    assert torch.equal(first, kept) and not torch.equal(first, second)
    release(hand)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_r04_gpu_a_replay_returns_hidden_states_in_memory_of_their_own(cuda_runner, dtype):
    """R4."""
    runner = cuda_runner(dtype, page_size=16)
    for n in (1, 3, 20):
        hand = ByHand(runner)
        batch = replace(decode_batch(runner, n, hand), return_hidden_states=True)
        expected = eager(runner, batch).hidden_states
        assert graphs_of(runner).can_run(batch)
        first = graphs_of(runner).replay(batch).hidden_states
        close(first, expected, TOLERANCE[dtype], f"{n} rows")
        kept = first.clone()
        batch.input_ids.fill_(50)
        second = graphs_of(runner).replay(batch, in_place=True).hidden_states
        assert torch.equal(first, kept) and not torch.equal(first, second)
        release(hand)


@pytest.mark.gpu
def test_g08_gpu_padded_rows_write_to_nobody(cuda_runner):
    """G8: after a batch of 4 rows a batch of 3 leaves the fourth's KV alone."""
    runner = cuda_runner("bfloat16", page_size=16)
    hand = ByHand(runner)
    graphs_of(runner).replay(decode_batch(runner, 4, hand))
    kv = runner.token_to_kv_pool._kv
    before = kv.clone()
    batch = hand.batch({i: [7] for i in range(3)}, ForwardMode.DECODE)
    graphs_of(runner).replay(batch)
    changed = (kv != before).flatten(3).any(-1).any(0).any(0).nonzero().squeeze(1).tolist()
    assert set(changed) <= {0, *batch.out_cache_loc.tolist()}
    release(hand)


def test_g1_graphs_are_captured_into_the_pool_that_is_given_else_the_global_one_else_their_own(monkeypatch):
    pools = []

    def noted(plan: Any, run: Any, pool: Any, *warm_ups: Any) -> Any:
        pools.append(pool)
        return record(plan, run, pool, *warm_ups)

    use_eager_captures(monkeypatch)
    record = graph_capture.record
    monkeypatch.setattr(graph_capture, "record", noted)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
    runner = make_runner(CONFIGS["llama"](), max_running_requests=2)
    assert get_global_graph_memory_pool() is None
    assert CudaGraphRunner(runner, [1, 2]).pool is None and graph_capture.memory_pool("cpu") is None
    own = [graph_capture.memory_pool("cuda:0") for _ in range(2)]
    assert None not in own and own[0] is not own[1]
    try:
        set_global_graph_memory_pool((0, 7))
        assert get_global_graph_memory_pool() == (0, 7) == graph_capture.memory_pool("cuda:0")
        shared, explicit = CudaGraphRunner(runner, [1, 2]), CudaGraphRunner(runner, [1], pool=(0, 8))
    finally:
        set_global_graph_memory_pool(None)
    assert shared.pool == (0, 7) and explicit.pool == (0, 8)
    assert pools == [None, None, (0, 7), (0, 7), (0, 8)]
    assert CudaGraphRunner(runner, [1]).pool is None


@pytest.mark.gpu
def test_g1_gpu_runners_of_one_pool_give_what_those_of_their_own_give(cuda_runner):
    runner = cuda_runner("bfloat16", page_size=16)
    hand, pool = ByHand(runner), torch.cuda.graph_pool_handle()
    batch = decode_batch(runner, 4, hand)
    expected = CudaGraphRunner(runner, [4]).replay(batch).next_token_logits
    for sharing in [CudaGraphRunner(runner, [4], pool=pool) for _ in range(2)]:
        assert torch.equal(sharing.replay(batch).next_token_logits, expected)
        sharing.shutdown()
    release(hand)


@pytest.mark.gpu
def test_g13_gpu_a_capture_that_fails_leaves_the_process_as_it_was():
    """What waits for a stream invalidates a capture; random numbers, other captures and their memory are as before."""
    value = torch.zeros(4, device="cuda")
    generator = torch.cuda.default_generators[0]
    generator.manual_seed(5)
    current, torch_state = torch.cuda.current_stream(), generator.get_state()

    def fails() -> None:
        value.add_(1).item()

    pool = torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError):
        graph_capture.capture(fails, pool)
    assert torch.cuda.current_stream() == current
    assert torch.equal(generator.get_state(), torch_state)
    drawn = torch.rand(3, device="cuda")
    assert torch.equal(drawn, torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(5)))
    graph = graph_capture.capture(lambda: value.add_(2), torch.cuda.graph_pool_handle())
    graph.replay()
    assert value.tolist() == [2, 2, 2, 2]


@pytest.mark.gpu
def test_gpu_no_stream_that_torch_deals_out_is_the_one_of_captures():
    """What another thread does to it while it captures would end the capture, and that thread's own work."""
    captures = graph_capture._capture_stream(0).cuda_stream
    assert captures not in {torch.cuda.Stream().cuda_stream for _ in range(200)}


@pytest.mark.gpu
@pytest.mark.gpu_exclusive
def test_g12_gpu_memory_is_counted_and_comes_back():
    """G1, G6, G12, R26: graphs of an engine share one pool, their memory is known, and a shutdown returns it."""
    left = []
    for _ in range(2):  # the first round leaves the libraries' workspaces behind
        runner = make_runner(TINY, dtype="bfloat16", **ON_CUDA)
        graphs = graphs_of(runner)
        assert graphs.pool is not None
        assert 0 < graphs.memory_usage < 4 << 30, f"{graphs.memory_usage / 2**20:.0f} MiB"
        runner.shutdown()
        del graphs, runner
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert left[1] - left[0] <= 1 << 20, f"a round leaves {(left[1] - left[0]) / 2**20:.1f} MiB"


@pytest.mark.gpu
def test_g07_gpu_compiled_equals_eager():
    """G7."""
    options = {**ON_CUDA, "max_running_requests": 2, "enable_torch_compile": True}
    runner = make_runner(TINY, dtype="bfloat16", **options)
    assert graphs_of(runner).compile_bs == [1, 2]
    for n in (1, 2):
        hand = ByHand(runner)
        batch = decode_batch(runner, n, hand)
        close(
            graphs_of(runner).replay(batch).next_token_logits, eager(runner, batch).next_token_logits, 2e-2, f"{n} rows"
        )
        release(hand)
    runner.shutdown()


@pytest.mark.gpu
@pytest.mark.gpu_exclusive
def test_r15_gpu_the_pool_is_sized_to_the_memory_that_is_free():
    """R15, R17: by default; the graphs have room beside it."""
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.05
    runner = make_runner(
        TINY, dtype="bfloat16", **{**ON_CUDA, "kv_cache_tokens": None, "gpu_memory_utilization": share}
    )
    assert runner.token_to_kv_pool.nbytes <= 0.05 * total + (2 << 30)
    assert runner.max_total_num_tokens > 4096
    assert graphs_of(runner).graphs
    runner.shutdown()
