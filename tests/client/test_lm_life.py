"""The life of an `LM`, its engine and its handles: construction, faults at the end, and the end of the process."""

from __future__ import annotations

import _thread
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CONFIGS, held
from helpers_declared import lms
from helpers_forks import forking
from helpers_graphs import use_eager_graphs
from helpers_paths import ROOT
from helpers_runner import random_ids

from pymllm_interp import LM, SamplingParams, Scale, Steer
from pymllm_interp import lm as lm_module
from pymllm_interp.client import local_backend, open_engines
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.client.handle import EngineClosedError, RequestHandle
from pymllm_interp.client.local_backend import LocalBackend
from pymllm_interp.client.request_factory import RequestFactory
from pymllm_interp.config import ServerConfig
from pymllm_interp.core.events import FinishedEvent
from pymllm_interp.core.request import Request
from pymllm_interp.engine.engine import Engine
from pymllm_interp.hooks.captures.egress.ring import CaptureRing
from pymllm_interp.layers.rope import RotaryEmbedding
from pymllm_interp.runner import device_memory
from pymllm_interp.runner.interp_model_runner import InterpModelRunner
from pymllm_interp.runner.stages.declared_stage import DeclaredStage

SHORT = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
LONG = SamplingParams(max_tokens=90, ignore_eos=True, temperature=0, logprobs=1)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "engine" in thread.name}


@pytest.mark.parametrize(
    "body",
    [
        "stream = LM(folder, device='cpu').stream([1, 2, 3], long); next(iter(stream))",
        pytest.param("handle = LM(folder, device='cpu').submit([1, 2, 3], long)", marks=pytest.mark.slow),
        pytest.param("lm = LM(folder, device='cpu'); handle = lm.submit([1, 2, 3], long)", marks=pytest.mark.slow),
        pytest.param("LM(folder, device='cpu')", marks=pytest.mark.slow),
    ],
)
def test_a_process_ends_cleanly_while_requests_run(body: str, model_folder: Callable[[str], Path]) -> None:
    """Also where the `LM` itself is gone: its engine still serves the handles."""
    script = (
        "import sys, time\nfrom pymllm_interp import LM, SamplingParams\nfolder = sys.argv[1]\n"
        "long = SamplingParams(max_tokens=90, ignore_eos=True)\n"
        f"for _ in range(2):\n    {body}\ntime.sleep(0.02)\n"
    )
    command = [sys.executable, "-c", script, str(model_folder("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("rename", [5, {"model": 3}, {3: "x"}])
def test_an_lm_that_cannot_be_made_leaves_no_engine(rename: Any, model_folder: Callable[[str], Path]) -> None:
    before = engine_threads()
    with pytest.raises((TypeError, AttributeError, ValueError)):
        LM(model_folder("llama"), device="cpu", rename=rename)
    assert engine_threads() == before


def test_a_block_that_waits_for_a_lock_ends_no_wait_but_its_own(model_folder: Callable[[str], Path]) -> None:
    """Nothing can end it. Requests with a time limit end, submitted before it or behind it, and so does its own call."""
    with LM(model_folder("llama"), device="cpu", trace_step_warning=0.05, trace_step_timeout=0.1) as lm:
        lock, begun, found = threading.Lock(), threading.Event(), []

        def trace() -> None:
            try:
                with lm.trace([1, 2]):
                    lm.model.layers[0].output.save()
                    begun.set()
                    with lock:
                        pass
            except TimeoutError as error:
                found.append(str(error))

        with held(lm):
            before = lm.submit([1, 2, 3], LONG, timeout=0.6)
            lock.acquire()
            thread = threading.Thread(target=trace)
            thread.start()
            while not lm.engine._inbox:
                pass
        assert begun.wait(600)
        behind, patient = lm.submit([4], SHORT, timeout=0.2), lm.submit([5], SHORT)
        assert behind.result(600).finish_reason == "timeout"
        assert before.result(600).finish_reason in ("timeout", "length")
        thread.join(600)
        assert "cannot be ended: it waits for a lock" in found[0]
        assert not patient.done
        with pytest.raises(TimeoutError, match="the block of request"):
            lm.shutdown(timeout=0.05)
        lock.release()
        with pytest.raises(EngineClosedError):
            patient.result(600)


def test_a_block_that_returns_late_leaves_its_engine_whole(model_folder: Callable[[str], Path]) -> None:
    with LM(model_folder("llama"), device="cpu", trace_step_warning=0.05, trace_step_timeout=0.1) as lm:
        goes_on = threading.Event()
        with pytest.raises(TimeoutError, match="cannot be ended"):
            with lm.generate([1, 2], max_new_tokens=2):
                lm.model.layers[0].output.save()
                goes_on.wait()
        late = lm.submit([4], SHORT, timeout=0.1)
        assert late.result(600).finish_reason == "timeout"
        goes_on.set()
        assert lm.submit([4], SHORT).result(600).finish_reason == "length"
        lm.engine.call(lm.engine.scheduler.check_integrity)
        assert not lm.engine.scheduler.live and not lm.engine.ends.subscribers


def test_engines_whose_blocks_call_each_other_are_told_so(model_folder: Callable[[str], Path]) -> None:
    with LM(model_folder("llama"), device="cpu") as one, LM(model_folder("llama"), device="cpu") as two:
        handle = two.submit([1], SHORT)
        handle.wait(600)
        for wait in (
            lambda: two.generate([[1]], SHORT),
            lambda: two.trace([1], trace=False),
            lambda: two.engine.call(int),
            lambda: next(two.stream([1], SHORT)),
        ):
            with pytest.raises(RuntimeError, match=r"thread of an engine|engine's thread|of another"):
                with one.trace([1, 2]):
                    one.model.layers[0].output.save()
                    wait()
        with one.trace([1, 2]):  # what does not wait is allowed
            begun = [two.submit([1], SHORT), handle.result().finish_reason].save()
        assert begun[0].result(600).finish_reason == begun[1] == "length"


def test_a_process_ends_though_a_block_waits_for_ever(model_folder: Callable[[str], Path]) -> None:
    script = """
        import sys, threading
        from pymllm_interp import LM
        from pymllm_interp.client import open_engines
        open_engines.EXIT_SECONDS = 0.2
        lm, lock, begun = LM(sys.argv[1], device="cpu"), threading.Lock(), threading.Event()
        lock.acquire()

        def trace():
            with lm.trace([1, 2]):
                lm.model.layers[0].output.save()
                begun.set()
                lock.acquire()

        threading.Thread(target=trace, daemon=True).start()
        assert begun.wait(600)
        """
    command = [sys.executable, "-c", textwrap.dedent(script), str(model_folder("llama"))]
    with forking():
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "waits for a lock; the process ends without it" in done.stderr, done.stderr[-2000:]


INTERRUPTED = [
    (InterpModelRunner, "load_model"), (InterpModelRunner, "init_memory_pool"), (InterpModelRunner, "init_cuda_graphs"),
    (Engine, "start"), (Engine, "_initialize"), (open_engines, "track"), (open_engines, "release_with"),
    (local_backend, "load_tokenizer"), (RequestFactory, "__init__"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), INTERRUPTED)
def test_ctrl_c_while_an_lm_is_made_leaves_neither_thread_nor_weights(
    owner: Any, name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread is interrupted in the midst of it, wherever its work is done; the model is released in the end."""
    before, models, real = engine_threads(), [], getattr(owner, name)
    load = InterpModelRunner.load_model

    def noted(runner: Any, *args: Any, **kwargs: Any) -> None:
        load(runner, *args, **kwargs)
        models.append(weakref.ref(runner.model))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        found = (noted if name == "load_model" else real)(*args, **kwargs)
        _thread.interrupt_main()
        return found

    monkeypatch.setattr(InterpModelRunner, "load_model", noted)
    monkeypatch.setattr(owner, name, interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for its background jobs
    try:
        with pytest.raises(KeyboardInterrupt):
            LM(model_folder("llama"), device="cpu")
            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, handler)
    until(lambda: engine_threads() == before)
    gc.collect()
    assert [model() for model in models] == [None] * len(models)


def test_the_output_of_a_request_that_runs_has_its_tokens_so_far(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    while True:
        handle = lm.submit(random_ids(3), LONG)
        while len(handle.requests[0].output_token_ids) < 3:
            pass
        with held(lm):
            partial = handle.output()
        whole = handle.result()
        if not partial.finished:  # else it had ended before the engine stood still
            break
    assert 3 <= len(partial.token_ids) < 90 and partial.token_ids == whole.token_ids[: len(partial.token_ids)]
    assert partial.finish_reason is None and whole.finish_reason == "length"
    assert partial.logprobs == (whole.logprobs or [])[: len(partial.token_ids)]


def test_a_fault_while_the_engine_closes_leaves_no_caller_waiting(model_folder: Callable[[str], Path]) -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("cudaErrorIllegalAddress")

        def close(self) -> None:
            pass

    lm = LM(model_folder("llama"), device="cpu")
    with held(lm):
        handles = [lm.submit(random_ids(3), LONG) for _ in range(3)]
        stage: Any = lm.runner.declared
        stage.capture_ring = Broken()
        closing = threading.Thread(target=lm.shutdown)
        closing.start()
    closing.join(600)
    for handle in handles:
        with pytest.raises(EngineClosedError):
            handle.result(600)


def test_a_handle_whose_notification_fails_still_ends() -> None:
    """As where the event loop of an asynchronous stream was closed."""
    handle = RequestHandle(None, [Request("r", [1], LONG, 4, 0)], None, None, streaming=True)  # pyright: ignore[reportArgumentType]

    def closed() -> None:
        raise RuntimeError("Event loop is closed")

    handle._on_event = closed
    with pytest.raises(RuntimeError, match="Event loop"):
        handle.put(FinishedEvent("r", [7], "stop"))
    assert handle.done and handle.output().token_ids == [7]


def test_requests_that_find_no_pinned_memory_give_their_vectors_back(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host ring is allocated for the first request that captures; a device's failure there is a RuntimeError."""
    steer = [Steer("resid_post.0", torch.ones(72))]
    with lms("tables", model_folder) as lm_of:
        lm: Any = lm_of("llama")
        pool = lm.runner.declarations.pool
        captures, interventions = lm._requests.resolved(["resid_post.1"], steer)

        def open_trace() -> None:
            with lm.trace([1, 2], interventions=steer, capture=["resid_post.1"]):
                lm.model.layers[0].output.save()

        def no_memory(ring: CaptureRing) -> None:
            raise RuntimeError("CUDA error: out of memory (cudaHostAlloc)")

        monkeypatch.setattr(CaptureRing, "open", no_memory)
        for submit in (
            lambda: lm.generate([[1, 2], [3]], SHORT, interventions=steer, capture=["resid_post.1"]),
            lambda: lm.submit([1, 2], SHORT, interventions=steer, capture=["resid_post.1"]),
            lambda: lm._requests.prefill([1, 2], captures, interventions),
            open_trace,
        ):
            with pytest.raises(RuntimeError, match="cudaHostAlloc"):
                submit()
            assert pool.used == 0
        monkeypatch.undo()
        (out,) = lm.generate([[1, 2]], SHORT, interventions=steer, capture=["resid_post.1"])
        assert len(out.activations["resid_post.1"]) == 4 and pool.used == 0


# -- deleted and replaced ----------------------------------------------------------------------


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def dummy(**options: Any) -> LM:
    return LM(
        "dummy", **with_tuning(**{"load_format": "dummy", "hf_config": CONFIGS["llama"](), "device": "cpu"} | options)
    )


def parts_of(lm: LM) -> list[weakref.ref[Any]]:
    """The LM, its engine's thread, a weight and the KV pool."""
    pool = lm.runner.token_to_kv_pool
    assert pool is not None
    return [weakref.ref(part) for part in (lm, lm.engine, lm.get("model.embed_tokens").weight, pool)]


def end_of(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive(), f"{thread.name} goes on"


def plain(lm: Any) -> Any:
    return lm.generate([[1, 2], [3]], SHORT)


def declared(lm: Any) -> Any:
    return lm.generate([[1, 2]], SHORT, interventions=[Scale("embed", 0.5)], capture=["resid_post.*"])


def traced(lm: Any) -> Any:
    with lm.generate([1, 2], max_new_tokens=3) as tracer:
        states = [].save()  # pyright: ignore[reportAttributeAccessIssue]
        for _ in tracer.iter[:]:
            states.append(lm.model.layers[0].output)
    return tracer, states


def differentiated(lm: Any) -> Any:
    with lm.trace([1, 2]) as tracer:
        h = lm.model.layers[0].output
        with lm.lm_head.output.sum().backward():
            g = h.grad.save()
    return tracer, g


def in_a_session(lm: Any) -> Any:
    with lm.session() as session:
        with lm.trace([1, 2]):
            h = lm.model.layers[0].output.save()
        with lm.trace([1, 2]):
            lm.model.layers[1].output = h
    return session


def failed(lm: Any) -> Any:
    try:
        with lm.trace([1, 2]):
            raise ValueError("of the block")
    except ValueError:
        pass


def streamed(lm: Any) -> Any:
    return list(lm.stream([1, 2], SHORT))


def refused(lm: Any) -> Any:
    with pytest.raises(NotImplementedError):
        lm.model.layers[0].register_forward_hook(print)


@pytest.mark.parametrize("use", [plain, declared, traced, in_a_session, streamed, refused], ids=lambda f: f.__name__)
@pytest.mark.usefixtures("without_gc")
def test_a_deleted_lm_ends_its_thread_and_frees_weights_and_kv_pool(use: Callable[[LM], Any]) -> None:
    """Without the garbage collector, and while its outputs, tracers and streams are kept."""
    before = engine_threads()
    lm = dummy()
    kept = use(lm)
    threads, parts = engine_threads() - before, parts_of(lm)
    assert len(threads) == 1
    del lm
    end_of(threads)
    assert [part() for part in parts] == [None] * 4 and kept is kept


@pytest.mark.usefixtures("without_gc")
def test_twenty_lms_under_one_name_leave_threads_and_memory_where_they_were() -> None:
    """As a notebook's cell that is run again: at most the old and the new one are there at a time."""
    before, parts, lm = engine_threads(), [], None
    for _ in range(20):
        lm = dummy()
        plain(lm)
        parts.append(parts_of(lm))
        assert len(engine_threads() - before) <= 2
        assert sum(weight() is not None for _, _, weight, _ in parts) <= 2
    threads = engine_threads() - before
    del lm
    end_of(threads)
    assert not any(part() is not None for made in parts for part in made)
    assert engine_threads() == before


@pytest.mark.slow
def test_the_memory_of_replaced_lms_comes_back_to_the_process() -> None:
    """KV pools of 32 MiB: twenty of them would take 640 MB."""
    script = """
        import gc, sys
        sys.path[:0] = ["tests", "tests/support"]
        from conftest import CONFIGS
        from pymllm_interp import LM, SamplingParams

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

        seen = []
        for i in range(20):
            lm = LM("dummy", load_format="dummy", hf_config=CONFIGS["llama"](), device="cpu", kv_cache_tokens=1 << 16)
            lm.generate([[1, 2]], SamplingParams(max_tokens=2))
            pool = lm.runner.token_to_kv_pool
            for layer in range(3):
                for part in pool.get_kv(layer):
                    part.fill_(1)
            seen.append(resident())
            del pool
        print(seen)
        assert max(seen) < seen[1] + 100, seen
    """
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    run_script(script)


@pytest.mark.slow
def test_the_memory_of_deleted_weights_comes_back_to_the_process() -> None:
    """glibc has such weights, below 32 MiB, in its heap: pages between them stay with the process until it trims the heap."""
    script = """
        import gc, threading, time
        from pymllm_interp import LM, SamplingParams

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

        def left():
            gc.collect()
            for thread in threading.enumerate():
                if "engine" in thread.name:
                    thread.join(600)
            return resident()

        seen = []
        for i in range(6):
            lm = LM("demo")
            lm.generate(["one two"], SamplingParams(max_tokens=2))
            kept = bytearray(1 << 20)  # between the weights and what comes after them
            with lm.trace("one two"):
                h = lm.model.layers[3].output.save()
            del lm
            seen.append(left())
        print(seen)
        assert max(seen) < seen[0] + 150, seen
    """
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    run_script(script)


def run_script(script: str, *arguments: str) -> str:
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(script), *arguments]
    with forking():
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def edited(lm: Any) -> Any:
    with lm.edit(inplace=True):
        lm.model.layers[0].output[:] *= 2
    return plain(lm)


@pytest.mark.parametrize("use", [edited, differentiated, failed], ids=lambda f: f.__name__)
@pytest.mark.usefixtures("without_gc")
def test_an_lm_in_a_cycle_of_references_is_freed_before_the_next_one_is_made(use: Callable[[LM], Any]) -> None:
    """nnsight's objects of an edit, of gradients and of an error refer to their caller's variables, and so to the LM."""
    lm = dummy()
    use(lm)
    parts = parts_of(lm)
    del lm
    with dummy():
        assert [part() for part in parts] == [None] * 4


def test_the_copy_that_an_edit_makes_keeps_the_engine_of_a_deleted_lm() -> None:
    before = engine_threads()

    def copy_of_an_lm() -> Any:
        lm: Any = dummy()
        with lm.edit() as (_, edited):
            lm.model.layers[0].output[:] *= 0
        plain(lm)
        return edited

    def state_of(lm: Any) -> Any:
        with lm.trace([1, 2]):
            h = lm.model.layers[0].output.save()
        return h

    copied = copy_of_an_lm()
    threads = engine_threads() - before
    assert not state_of(copied).any()
    del copied
    gc.collect()
    end_of(threads)


@pytest.mark.usefixtures("without_gc")
def test_requests_of_a_deleted_lm_are_served_to_their_end() -> None:
    before = engine_threads()
    lm = dummy()
    with held(lm):
        handles = [lm.submit([1, 2], LONG) for _ in range(3)]
        stream = lm.stream([3, 4], LONG)
        alive = weakref.ref(lm)
        del lm
    threads = engine_threads() - before
    assert [len(handle.result(600).token_ids) for handle in handles] == [90] * 3
    assert len([piece for piece in stream if piece.token_ids]) >= 1
    engine = handles[0]._engine
    end_of(threads)
    assert alive() is None
    with pytest.raises(EngineClosedError, match=r"the engine ended with its LM, which was deleted or replaced"):
        engine.submit([], None)  # pyright: ignore
    handles[0].cancel()  # of no effect


def test_a_failed_construction_frees_what_it_had_made(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the error is kept, as a notebook does."""
    made: list[weakref.ref[Any]] = []

    class Watched(LocalBackend):
        def _describe_model(self) -> None:
            super()._describe_model()
            pool = self.runner.token_to_kv_pool
            assert pool is not None
            made.extend(map(weakref.ref, (self.engine, self.module.lm_head.weight, pool)))
            raise ValueError("the last part")

    monkeypatch.setattr(lm_module, "LocalBackend", Watched)
    errors = []
    for _ in range(3):
        with pytest.raises(ValueError, match="the last part") as caught:
            LM(model_folder("llama"), device="cpu")
        errors.append(caught.value)
    gc.collect()
    assert len(made) == 9 and [part() for part in made] == [None] * 9 and len(errors) == 3


def test_two_lms_of_one_model_serve_beside_each_other(model_folder: Callable[[str], Path]) -> None:
    first, second = (LM(model_folder("llama"), device="cpu", dtype="float32") for _ in range(2))
    (expected,) = first.generate([[1, 2]], SHORT)
    second.get("model.layers.0.mlp.down_proj").weight.zero_()
    assert first.generate([[1, 2]], SHORT)[0].token_ids == expected.token_ids
    assert first.weights.fingerprint != second.weights.fingerprint
    first.shutdown()
    assert len(second.generate([[1, 2]], SHORT)[0].token_ids) == 3
    second.shutdown()


def test_a_with_block_shuts_its_lm_down(model_folder: Callable[[str], Path]) -> None:
    before = engine_threads()
    with pytest.raises(KeyError), LM(model_folder("llama"), device="cpu") as lm:
        assert len(engine_threads() - before) == 1
        raise KeyError
    assert engine_threads() == before
    with pytest.raises(EngineClosedError, match="was shut down"):
        lm.submit([1], SHORT)


@pytest.mark.parametrize("kept", [0, 6 << 30])
@pytest.mark.parametrize("config", [ServerConfig(max_running_requests=None), ServerConfig(kv_cache_tokens=100_000)])
def test_memory_that_the_allocator_keeps_for_nobody_is_free_for_the_next_engine(
    config: ServerConfig, kept: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 20 GiB, 8 are free for everybody's use, `kept` of them still reserved by torch."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: ((8 << 30) - kept, 20 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: (3 << 30) + kept)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda gpu: 3 << 30)
    runner: Any = SimpleNamespace(
        server_config=config, device="cuda:0", gpu_id=0, context_len=4096, draft=None,
        get_kv_cache_spec=lambda: dict.fromkeys(range(32), (8, 64, torch.float16)),
    )  # fmt: skip
    assert device_memory.kv_bytes_per_token(runner) == 1 << 16
    if config.kv_cache_tokens is None:
        left = 20 * config.gpu_memory_utilization - 12
        assert device_memory.num_running_requests(runner) == int(left * 2**30) // (1 << 16) // 512
    else:
        assert device_memory.num_kv_tokens(runner) == 100_000 // config.page_size * config.page_size
        assert (
            "leaves room for" in caplog.text
            and str(int((20 * config.gpu_memory_utilization - 12) * 2**14)) in caplog.text
        )


@pytest.mark.gpu
@pytest.mark.parametrize("end", ["shutdown", "del", "replaced"])
def test_device_memory_is_back_after_twenty_lms(end: str) -> None:
    def reserved() -> int:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one for each thread that has computed at the same time
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = engine_threads()
    with dummy(device="cuda", dtype="float32", kv_cache_tokens=4096) as first:
        plain(first)  # what libraries allocate once stays
    del first
    gc.collect()
    start, free = reserved(), []
    lm = None
    for _ in range(20):
        replaced = engine_threads() - before
        lm = dummy(device="cuda", dtype="float32", kv_cache_tokens=1 << 16)
        plain(lm)
        end_of(replaced)
        if end == "shutdown":
            lm.shutdown()
        elif end == "del":
            threads, lm = engine_threads() - before, None
            end_of(threads)
        free.append(torch.cuda.mem_get_info()[0])
    threads, lm = engine_threads() - before, None
    end_of(threads)
    assert reserved() == start
    assert min(free[2:]) > free[1] - 64 * 2**20, "no LM takes from what the earlier ones had"


@pytest.mark.parametrize("shut_down", [False, True])
@pytest.mark.usefixtures("without_gc")
def test_an_engine_with_graphs_and_a_ring_is_in_no_cycle_when_it_has_ended(
    shut_down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where steps are overlapped, too."""
    use_eager_graphs(monkeypatch)
    monkeypatch.setattr(DeclaredStage, "has_tables", True)
    before = engine_threads()
    lm = dummy(
        kv_cache_tokens=4096, async_scheduling=True, hook_execution="segments", dtype="float32", max_running_requests=8,
        prefill_graph_tokens=16,
    )  # fmt: skip
    for use in (plain, declared, traced):
        use(lm)
    model = lm.runner.get_model()
    tables = [module._table for module in model.modules() if isinstance(module, RotaryEmbedding)]
    assert tables
    parts = [weakref.ref(part) for part in (lm.engine, lm.runner, *model.modules(), *model.parameters(), *tables)]
    del model, tables
    threads = engine_threads() - before
    if shut_down:
        lm.shutdown()
    del lm
    end_of(threads)
    assert not [type(part()) for part in parts if part() is not None]


def test_a_shut_down_engine_holds_no_kv_though_its_lm_is_held() -> None:
    lm = dummy(kv_cache_tokens=4096)
    plain(lm)
    pool, rows = lm.runner.token_to_kv_pool, lm.runner.req_to_token_pool
    assert pool is not None and rows is not None
    parts = [weakref.ref(part) for part in (pool._kv, pool.k_buffer[0], rows.req_to_token)]
    assert pool.nbytes > 4096
    del rows
    lm.shutdown()
    assert pool.nbytes == 0 and [part() for part in parts] == [None] * 3


# -- forks -------------------------------------------------------------------------------------

FORK = """
    import asyncio, multiprocessing, os, signal, sys, tempfile
    signal.alarm(100)
    from pymllm_interp import LM, SamplingParams, Scale
    from pymllm_interp.client.handle import EngineClosedError

    long = SamplingParams(max_tokens=90, ignore_eos=True)
    lm = LM(sys.argv[1], device="cpu", dtype="float32")
    finished = lm.submit([1, 2], SamplingParams(max_tokens=2))
    finished.result()
    lm.generate([[1, 2]] * 4, SamplingParams(max_tokens=3))
    parent = os.getpid()
"""
USES = """
    def trace():
        with lm.trace([1, 2]):
            lm.model.layers[0].output.save()

    async def read():
        async for piece in lm.astream([1, 2]):
            pass

    def use():
        signal.alarm(50)  # a fork does not inherit it
        uses = {
            "generate": lambda: lm.generate([[1, 2]]),
            "declared": lambda: lm.generate([[1, 2]], interventions=[Scale("embed", 0.5)]),
            "submit": lambda: lm.submit([1, 2]),
            "stream": lambda: list(lm.stream([1, 2])),
            "astream": lambda: asyncio.run(read()),
            "trace": trace,
            "harvest": lambda: lm.harvest([[1]], capture=["embed"], out=tempfile.mkdtemp()),
            "fingerprint": lambda: lm.weights.fingerprint,
            "call": lambda: lm.engine.call(print),
            "result": lambda: running.result(),
            "pieces": lambda: list(streaming),
        }
        for name, what in uses.items():
            try:
                what()
            except EngineClosedError as error:
                assert f"process {os.getpid()} is a fork of process {parent}" in str(error), error
                assert "Make an LM in the child" in str(error) and "spawn" in str(error)
            else:
                raise AssertionError(f"{name} went through")
        assert len(finished.result().token_ids) == 2
        running.cancel()
        lm.shutdown()
"""


@pytest.mark.slow
def test_a_forked_child_that_uses_the_lm_gets_an_error_and_ends(model_folder: Callable[[str], Path]) -> None:
    script = (
        FORK
        + USES
        + """
    running, streaming = lm.submit([1, 2], long), lm.stream([1, 2], long)
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            use()
            sys.exit(7)  # through all handlers of the exit
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [7] * 3
    assert len(running.result().token_ids) == 90 and list(streaming)
    print("the parent goes on")
    """
    )
    assert "the parent goes on" in run_script(script, str(model_folder("llama")))


def test_a_child_of_multiprocessings_fork_gets_an_error_and_may_make_its_own_lm(
    model_folder: Callable[[str], Path],
) -> None:
    script = (
        FORK
        + USES
        + """
    running, streaming = lm.submit([1, 2], long), lm.stream([1, 2], long)

    def child(results):
        global lm
        use()
        lm = LM(sys.argv[1], device="cpu", dtype="float32")
        results.put(lm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=3))[0].token_ids)

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=child, args=(results,))
    process.start()
    found = results.get(timeout=600)
    process.join(600)
    assert process.exitcode == 0
    assert found == lm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=3))[0].token_ids
    print("equal")
    """
    )
    assert "equal" in run_script(script, str(model_folder("llama")))


@pytest.mark.slow
def test_a_forked_child_that_never_uses_the_lm_ends(model_folder: Callable[[str], Path]) -> None:
    script = (
        FORK
        + """
    import gc
    running = lm.submit([1, 2], long)
    child = os.fork()
    if child == 0:
        signal.alarm(50)
        del lm
        gc.collect()
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert len(running.result().token_ids) == 90
    """
    )
    run_script(script, str(model_folder("llama")))


def test_an_engine_that_was_shut_down_goes_with_its_last_reference() -> None:
    """Cycles would keep the weights and the KV pool until a garbage collection, which device memory does not cause."""
    with dummy(kv_cache_tokens=4096) as first:
        plain(first)
    lm = dummy(kv_cache_tokens=4096)
    plain(lm)
    gc.collect()
    gc.disable()
    try:
        left = [weakref.ref(lm.engine), weakref.ref(lm.runner)]
        lm.shutdown()
        del lm
        assert [ref() for ref in left] == [None, None]
    finally:
        gc.enable()


def test_a_drafter_that_holds_its_lm_is_freed_with_it() -> None:
    """As one of a script's top level does, by its module."""

    class Drafter:
        num_speculative_tokens = 2
        lm: LM

        def propose(self, requests: Any, k: int) -> list[list[int]]:
            return [[] for _ in requests]

    drafter = Drafter()
    drafter.lm = lm = dummy(speculative=drafter)
    plain(lm)
    left = parts_of(lm)
    lm.shutdown()
    del lm, drafter
    gc.collect()
    assert [part() for part in left] == [None] * 4
