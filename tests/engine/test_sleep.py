"""`lm.sleep` and `lm.wake`: memory is given back and taken again, and nothing else changes."""

from __future__ import annotations

import gc
import mmap
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS, random_model, tiny_tokenizer
from helpers_adapters import write_adapter
from helpers_devices import DEVICES
from helpers_drafts import drafted_by
from helpers_waits import assert_idle

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.client.lifecycle import orders as lifecycle_orders
from pymllm_interp.core.events import EngineSleepingError
from pymllm_interp.engine.lifecycle import sleep
from pymllm_interp.engine.lifecycle.lifecycle import EngineLifecycle
from pymllm_interp.models.weights.loading import WeightsError
from pymllm_interp.utils.pinned import pinned_memory

PROMPTS = [[1], list(range(5, 22)), [7, 8, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("sleeper")
    random_model(CONFIGS["llama"](), 0).save_pretrained(found)
    tiny_tokenizer().save_pretrained(found)
    return found


def load(folder: Path, device: str = "cpu", **kwargs: Any) -> LM:
    sizes = {"kv_cache_tokens": 512, "page_size": 4, "max_num_tokens": 32, "max_running_requests": 4}
    return LM(folder, **with_tuning(**{"device": device, **sizes, **kwargs}))


def seen(lm: LM, **options: Any) -> list[Any]:
    outputs = lm.generate(PROMPTS, GREEDY, capture=["resid_post.*", "logits"], **options)
    with lm.trace(PROMPTS[2], **options):
        lm.model.layers[1].output[:] *= 2
        logits = lm.lm_head.output.save()
    found = [output.activations[site] for output in outputs for site in sorted(output.activations)]
    return [[output.outputs[0].token_ids for output in outputs], *found, logits]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert ours[0] == theirs[0] and all(map(torch.equal, ours[1:], theirs[1:]))


def held(lm: LM) -> int:
    """Bytes of weights and KV."""
    storages = [
        t.untyped_storage() for t in (*lm.runner.get_model().parameters(), *lm.runner.token_to_kv_pool.tensors())
    ]
    return sum(storage.nbytes() for storage in storages)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_ten_nights_change_nothing(impl: str, device: str, folder: Path, tmp_path: Path):
    with load(folder, device, impl=impl) as lm:
        lm.adapters.load("a", write_adapter(tmp_path / "a", random_model(CONFIGS["llama"]())))
        expected, adapted, fingerprint, size = seen(lm), seen(lm, lora="a"), lm.weights.fingerprint, held(lm)
        version = lm.weights.version
        for night in range(10):
            tags = [["weights", "kv_cache", "captures"], ["weights"], ["kv_cache"]][night % 3]
            lm.sleep(tags=tags)
            assert lm.is_sleeping() and (held(lm) < size or impl == "transformers")  # whose weights are a mapped file
            with pytest.raises(EngineSleepingError, match=r"the engine sleeps: lm\.wake\(\)"):
                lm.generate([[1]], GREEDY)
            if "weights" in tags:
                with pytest.raises(EngineSleepingError, match="weights are asleep"):
                    _ = lm.weights.fingerprint
            assert lm.wake() and lm.wake() and not lm.is_sleeping()
            assert held(lm) == size
            if night in (0, 4, 9):
                assert_same(seen(lm), expected)
                assert_same(seen(lm, lora="a"), adapted)
        assert (lm.weights.fingerprint, lm.weights.version) == (fingerprint, version)
        lm.reset_prefix_cache()
        assert_idle(lm)


def test_dropped_weights_are_loaded_again_or_given(folder: Path, tmp_path: Path):
    new = random_model(CONFIGS["llama"](), 1)
    new.save_pretrained(tmp_path)
    with load(folder) as lm, load(tmp_path) as other:
        expected = seen(lm)
        lm.sleep(level=2)
        assert lm.wake() and not lm.is_sleeping()
        assert_same(seen(lm), expected)
        lm.sleep(level=2)
        with pytest.raises(ValueError, match=r"the weights are asleep: lm\.wake\(tags=\['weights'\]\)"):
            lm.update_weights(new.state_dict())
        assert not lm.wake(["weights"])
        with pytest.raises(WeightsError, match=r"missing: model\.embed_tokens\.weight"):
            lm.update_weights({"model.norm.weight": torch.ones(72)})
        assert not lm.wake(["kv_cache"]) and not lm.wake(["captures"]) and lm.is_sleeping()
        lm.update_weights(new.state_dict())
        assert not lm.is_sleeping()
        assert_same(seen(lm), seen(other))
        lm.sleep(level=2)
        with pytest.raises(ValueError, match=r"not those of a folder: lm\.update_weights gives all"):
            lm.wake()  # other weights than were there before would be a silent change
        with pytest.raises(EngineSleepingError):
            lm.generate([[1]], GREEDY)
        lm.update_weights(new.state_dict())
        assert_same(seen(lm), seen(other))


def test_live_requests_are_an_error_or_waited_for(folder: Path):
    with load(folder) as lm:
        lm.pause("keep")
        handle = lm.submit([1, 2], GREEDY)
        with pytest.raises(ValueError, match="1 requests are live: drain=True waits"):
            lm.sleep()
        assert not lm.is_sleeping()
        sleeper = threading.Thread(target=lm.sleep, kwargs={"drain": True})
        sleeper.start()
        sleeper.join(60)
        assert handle.result().outputs[0].finish_reason == "length" and lm.is_sleeping()
        lm.wake()
        assert lm.is_paused()
        lm.resume()
        for level, tags, message in ((3, ["weights"], "level=3"), (1, ["wieghts"], "tags="), (1, "weights", "tags=")):
            with pytest.raises(ValueError, match=message):
                lm.sleep(level=level, tags=tags)
        assert lm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids == handle.result().outputs[0].token_ids


def test_a_sleep_or_a_wake_that_failed_shuts_nobody_out(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted() -> Future[None]:
        done = Future[None]()
        done.set_exception(RuntimeError("lm.resume() was called"))
        return done

    def fails(lazily: bool) -> None:
        raise MemoryError

    with load(folder) as lm:
        expected = lm.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids
        with monkeypatch.context() as patched:
            patched.setattr(lm.engine.intake, "drain", interrupted)
            with pytest.raises(RuntimeError, match=r"lm\.resume"):
                lm.sleep(drain=True)
        assert lm.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids == expected
        lm.sleep()
        with monkeypatch.context() as patched:
            patched.setattr(lm.runner, "init_cuda_graphs", fails)
            with pytest.raises(MemoryError):
                lm.wake()
        assert lm.wake() and lm.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids == expected


def test_an_engine_of_which_nothing_falls_asleep_has_its_graphs(folder: Path, monkeypatch: pytest.MonkeyPatch):
    calls = list[int]()
    with load(folder) as lm:
        monkeypatch.setattr(lm.runner, "init_cuda_graphs", lambda lazily: calls.append(1))
        lm.sleep(tags=["captures"])
        assert calls == [1] and not lm.is_sleeping() and lm.generate(PROMPTS, GREEDY)[0].token_ids


def test_orders_run_one_after_another(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The end of an update waits for tensors that are still on their way."""
    with load(folder) as lm:
        weights, go = list(lm.runner.get_model().state_dict().items())[:2], threading.Event()

        def slowly(info: Any, device: str) -> Iterator[tuple[str, torch.Tensor]]:
            yield weights[0]
            assert go.wait(30)
            yield weights[1]

        monkeypatch.setattr(lifecycle_orders, "received", slowly)
        control = lm.backend.control
        control("init_weight_transfer_engine", init_info={})
        control("start_weight_update")
        with ThreadPoolExecutor(2) as pool:
            receive = pool.submit(control, "receive_weights", update_info={})
            orders: Any = lm.backend
            while not orders._orders._one_order.locked():
                time.sleep(0.01)
            finish = pool.submit(control, "finish_weight_update")
            assert not control("is_paused") and not finish.done()
            go.set()
            receive.result(30)
            assert finish.result(30)["tensors"] == 2


def test_weights_that_fell_asleep_during_an_update_are_not_written(folder: Path):
    with load(folder) as lm:
        expected, weights = lm.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids, lm.runner.get_model().state_dict()
        lifecycle = EngineLifecycle(lm.engine)
        update = lifecycle.new_update()
        update.add({name: tensor.clone() for name, tensor in weights.items()})
        lm.sleep(tags=["weights"])
        with pytest.raises(EngineSleepingError, match="the weights are asleep"):
            lifecycle.install(update)
        assert lm.wake() and lm.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids == expected


def test_a_request_that_comes_as_the_engine_falls_asleep_runs_no_pass(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with load(folder) as lm:
        expected = lm.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids
        lm.sleep()
        with monkeypatch.context() as patched:
            patched.setattr(lm.engine, "_check_awake", lambda: None)  # it looked before
            with pytest.raises((EngineSleepingError, RuntimeError), match="the engine sleeps"):
                lm.generate(PROMPTS, GREEDY)
        assert lm.wake() and lm.generate(PROMPTS, GREEDY)[0].outputs[0].token_ids == expected
        assert_idle(lm)


def test_a_command_that_comes_as_the_engine_falls_asleep_does_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The weights have no memory then."""
    with load(folder) as lm:
        lm.generate(PROMPTS, GREEDY)
        call, ran = lm.engine.call, list[int]()

        def late(function: Any) -> Any:
            monkeypatch.undo()
            lm.sleep()
            return call(function)

        monkeypatch.setattr(lm.engine, "call", late)
        with pytest.raises(EngineSleepingError):
            lm.engine.run(SimpleNamespace(run=lambda runner: ran.append(1)))
        assert not ran and lm.wake()
        assert lm.engine.run(SimpleNamespace(run=lambda runner: 7)) == 7


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_requests_that_keep_coming_do_not_keep_an_engine_awake(
    mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """From the order on they are refused, also those whose caller looked before it."""
    with load(folder) as lm:
        expected, stop = lm.generate(PROMPTS, GREEDY)[0].token_ids, threading.Event()
        ends = [list[str]() for _ in range(3)]

        def client(own: list[str]) -> None:
            while not stop.is_set():
                try:
                    own.append(lm.generate([[1]], GREEDY)[0].outputs[0].finish_reason or "")
                except (EngineSleepingError, RuntimeError) as error:
                    assert "the engine sleeps" in str(error)
                    own.append("refused")

        def of_two_more() -> set[str]:
            """How the second request of each client from now on ends: it begins after this call."""
            wanted, until = [len(own) + 2 for own in ends], time.monotonic() + 120
            while any(len(own) < count for own, count in zip(ends, wanted, strict=True)):
                [one.result() for one in clients if one.done()]  # raises its error
                assert time.monotonic() < until, "a request does not end"
                time.sleep(0.002)
            return {own[count - 1] for own, count in zip(ends, wanted, strict=True)}

        with monkeypatch.context() as patched, ThreadPoolExecutor(3) as pool:
            patched.setattr(lm.engine, "_check_awake", lambda: None)  # all looked before
            clients = [pool.submit(client, own) for own in ends]
            try:
                for _ in range(5):
                    assert of_two_more() == {"length"}
                    lm.backend.control("sleep", mode=mode)
                    assert lm.is_sleeping() and of_two_more() == {"refused"}
                    assert lm.wake() and not lm.is_paused()
            finally:
                stop.set()
            [one.result(30) for one in clients]
        found = {end for own in ends for end in own}
        assert found <= {"refused", "length", *(["abort"] if mode == "abort" else [])}
        with pytest.raises(ValueError, match="mode='later': expected one of"):
            lm.backend.control("sleep", mode="later")
        assert lm.generate(PROMPTS, GREEDY)[0].token_ids == expected
        assert_idle(lm)


def test_a_sleep_that_aborts_lets_a_waiting_pause_begin(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with load(folder) as lm, ThreadPoolExecutor(1) as pool:
        step = lm.engine.step
        monkeypatch.setattr(lm.engine, "step", lambda: (time.sleep(0.02), step()))
        handle = lm.submit([1, 2], SamplingParams(max_tokens=100, ignore_eos=True))
        waiting = pool.submit(lm.pause, "wait")
        while not lm.is_paused():
            time.sleep(0.002)
        held = lm.submit([3], GREEDY)
        while not lm.engine.intake.held:
            time.sleep(0.002)
        lm.backend.control("sleep", mode="abort")
        waiting.result(30)
        assert {one.result().outputs[0].finish_reason for one in (handle, held)} == {"abort"}
        assert lm.is_sleeping() and lm.wake() and lm.is_paused()
        lm.resume()
        assert lm.generate([[3]], GREEDY)[0].token_ids


def test_an_interrupted_wait_for_sleep_leaves_no_pause(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted() -> Future[None]:
        done: Any = drain()
        done.result = result
        return done

    def result() -> None:
        raise KeyboardInterrupt

    with load(folder) as lm:
        step, drain = lm.engine.step, lm.engine.intake.drain
        monkeypatch.setattr(lm.engine, "step", lambda: (time.sleep(0.01), step()))
        monkeypatch.setattr(lm.engine.intake, "drain", interrupted)
        handle = lm.submit([1, 2], SamplingParams(max_tokens=30, ignore_eos=True))
        while not lm.engine.stats()["running"]:
            time.sleep(0.002)
        with pytest.raises(KeyboardInterrupt):
            lm.sleep(drain=True)
        assert not lm.is_paused() and not lm.is_sleeping()
        assert handle.result().outputs[0].finish_reason == "length"
        assert lm.submit([3], GREEDY).result(timeout=20).outputs[0].token_ids
        assert_idle(lm)


@pytest.mark.parametrize("awake", [True, False])
def test_shutdown_frees_the_host_memory_of_a_sleep(awake: bool, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The `LM` may live on, as in a notebook."""
    made = list[weakref.ref[Any]]()

    def memory(size: int) -> torch.Tensor:
        found = np.zeros(size, np.uint8)
        made.append(weakref.ref(found))
        return torch.from_numpy(found)

    monkeypatch.setattr(sleep, "pinned_memory", memory)
    monkeypatch.setattr(sleep.EngineSleep, "_host", as_on_cuda(sleep.EngineSleep._host))
    lm = load(folder)
    expected = lm.generate(PROMPTS, GREEDY)[0].token_ids
    for _ in range(2):
        lm.sleep()
        assert lm.wake() and lm.generate(PROMPTS, GREEDY)[0].token_ids == expected
    kept = len(made)
    assert kept and all(one() is not None for one in made), "the next sleep takes it again"
    if not awake:
        lm.sleep()
    lm.shutdown()
    gc.collect()
    assert len(made) == kept and all(one() is None for one in made)


def as_on_cuda(host: Any) -> Any:
    """`EngineSleep._host` of an engine on CUDA."""

    def made(self: Any, number: int, size: int) -> torch.Tensor:
        runner = self._engine.runner
        device, runner.device = runner.device, "cuda"
        try:
            return host(self, number, size)
        finally:
            runner.device = device

    return made


def test_an_engine_ends_asleep(folder: Path):
    lm = load(folder)
    lm.sleep()
    lm.shutdown()
    other = load(folder)
    other.sleep()
    del other
    gc.collect()


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_model_sleeps_too(device: str, folder: Path):
    with load(folder, device, speculative=drafted_by(folder)) as lm:
        expected = [o.outputs[0].token_ids for o in lm.generate(PROMPTS, GREEDY)]
        before = lm.engine.stats()
        lm.sleep()
        draft: Any = lm.runner.drafter
        assert not any(parameter.untyped_storage().nbytes() for parameter in draft.runner.get_model().parameters())
        lm.wake()
        assert [o.outputs[0].token_ids for o in lm.generate(PROMPTS, GREEDY)] == expected
        assert lm.engine.stats()["steps"] > before["steps"]


@pytest.mark.gpu
@pytest.mark.gpu_exclusive
def test_memory_goes_back_to_the_device(folder: Path):
    def used() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    torch.zeros(1, device="cuda")
    first = used()
    with LM(folder, device="cuda", dtype="bfloat16", gpu_memory_utilization=0.5) as lm:
        expected, awake = seen(lm), used()
        assert awake - first > 8 << 30
        for _ in range(3):
            lm.sleep()
            assert used() - first < 1 << 30
            lm.wake()
            assert abs(used() - awake) < 1 << 30
            assert_same(seen(lm), expected)


@pytest.mark.parametrize("huge_pages", [True, False])
def test_pinned_memory_is_unpinned_before_it_is_unmapped(huge_pages: bool, monkeypatch: pytest.MonkeyPatch):
    """CUDA has no memory at an address that the next mapping may have. The last view decides."""
    pinned, unpinned = list[tuple[int, int]](), list[tuple[int, bool]]()

    class Runtime:
        """CUDA's runtime, on a machine without it."""

        @staticmethod
        def cudaHostRegister(address: int, size: int, flags: int) -> int:
            pinned.append((address, size))
            return 0

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
            unpinned.append((address, any(int(start, 16) <= address < int(end, 16) for start, end in spans)))
            return 0

    class SmallPages(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    if not huge_pages:
        monkeypatch.setattr(mmap, "mmap", SmallPages)
    memory = pinned_memory(3 << 20)
    address, view = memory.data_ptr(), memory[5:9]
    assert pinned == [(address, 3 << 20)] and not memory.any()
    del memory
    assert not unpinned and view.fill_(7).tolist() == [7] * 4
    del view
    assert unpinned == [(address, True)]
