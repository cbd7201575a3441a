"""What a step copies to the host, and what it waits for: monitors add neither a copy nor a wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import held
from helpers_declared import lms, vector
from helpers_devices import DEVICES
from helpers_runner import random_ids
from torch.utils._python_dispatch import TorchDispatchMode

from pymllm_interp import LM, SamplingParams
from pymllm_interp.interventions import Monitor, Probe
from pymllm_interp.runner import async_output

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
METHODS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that wait for its device."""
OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
"""Operators that do, where another one calls them."""


def monitors(width: int) -> list[Monitor]:
    """Of each kind of decision, on every request; none fires."""
    hidden = Probe(vector(width, 4, 5), activation="relu", out_weight=vector(5, 1))
    return [
        Monitor("resid_post.0", vector(width, 1), 1e9),
        Monitor("resid_post.1", vector(width, 2), 1e9, then="stop", name="stop", positions="generated"),
        Monitor("mlp_out.0", hidden, 1e9, then="stop", name="mlp", reduce="ewma", patience=2),
    ]


class Waits(TorchDispatchMode):
    """Counts `OPERATORS`."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) in OPERATORS:
            self.counts[name] += 1
        elif name == "index" and any(i is not None and i.dtype is torch.bool for i in args[1]):
            self.counts["index by a mask"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(lm: LM, patch: pytest.MonkeyPatch) -> Iterator[list[Counter[str]]]:
    """What each step waits for, from the schedule to its tokens on their way."""
    steps: list[Counter[str]] = []
    current: list[Counter[str]] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            for counts in current:
                counts[name] += 1
            return real(*args, **kwargs)

        return call

    def launched(real: Callable[..., Any], first: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if first:
                steps.append(Counter())
            current.append(steps[-1])
            try:
                with Waits(steps[-1]):
                    return real(*args, **kwargs)
            finally:
                current.clear()

        return call

    with patch.context() as inner:
        for name in METHODS:
            inner.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
        inner.setattr(async_output, "copy_to_host", counted("copy_to_host", async_output.copy_to_host))
        for name in ("execute_model", "sample_tokens_async"):
            inner.setattr(lm.runner, name, launched(getattr(lm.runner, name), name == "execute_model"))
        yield steps


def decode_steps(lm: LM, patch: pytest.MonkeyPatch, own: list[Monitor]) -> list[Counter[str]]:
    """The steps in which four requests decode."""
    with counting(lm, patch) as steps:
        with held(lm):
            handles = [lm.submit(random_ids(5, seed=i), PARAMS, monitors=own) for i in range(4)]
        for handle in handles:
            assert handle.result(600).finish_reason == "length"
    return steps[2:9]


@pytest.mark.parametrize("way", ["functions", "tables"])
def test_a_step_with_monitors_waits_for_nothing_and_has_one_copy(
    way: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with lms(way, model_folder) as load:
        lm = load("llama")
        plain, watched = (decode_steps(lm, monkeypatch, own) for own in ([], monitors(lm.hidden_size)))
    assert len(plain) == len(watched) == 7
    for step in (*plain, *watched):
        assert step["copy_to_host"] == 1, step
    assert watched == plain


@pytest.mark.parametrize("device", DEVICES)
def test_any_tensors_come_whole_in_one_copy(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    dtypes = [torch.int32, torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.float64, torch.uint8]
    for count in (1, 2, 7):
        for shapes in ([(3,)], [(0,), (5, 3), (1,)], [(1, 1, 7), (2, 0), (257,)]):
            tensors = [
                (torch.rand(shapes[i % len(shapes)], generator=generator) * 200).to(dtypes[(i + count) % 7]).to(device)
                for i in range(count)
            ]
            if device == "cuda":
                found, copied = async_output.copy_to_host(tensors)
                assert copied is not None
                copied.synchronize()
            else:
                found = async_output.unpacked(async_output.packed(tensors), tensors)
            for one, other in zip(found, tensors, strict=True):
                assert one.dtype is other.dtype and torch.equal(one, other.cpu())


@pytest.mark.gpu
def test_copies_of_a_generation_are_as_many_with_monitors(model_folder: Callable[[str], Path]) -> None:
    """By the profiler, over all threads; and no step of theirs waits, if no plain one does."""
    with lms("graphs", model_folder) as load:
        lm = load("llama")
        copies = []
        for own in ([], monitors(lm.hidden_size)):
            for profiled in (False, True):
                with held(lm):
                    handles = [lm.submit(random_ids(5, seed=i), PARAMS, monitors=own) for i in range(4)]
                    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                    if profiled:
                        profile.start()
                for handle in handles:
                    handle.result(600)
                if profiled:
                    torch.cuda.synchronize()
                    profile.stop()
                    copies.append(sum(event.count for event in profile.key_averages() if "DtoH" in event.key))
        assert 0 < copies[1] <= copies[0]


@pytest.mark.gpu
def test_no_step_with_monitors_waits_for_the_device(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with lms("graphs", model_folder) as load:
        lm = load("llama")
        waited: list[str] = []

        def checked(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return real(*args, **kwargs)
                except RuntimeError as error:
                    waited.append(str(error))
                    raise
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            return call

        for own in ([], monitors(lm.hidden_size)):
            handles = [lm.submit(random_ids(5, seed=i), PARAMS, monitors=own) for i in range(4)]
            [handle.result(600) for handle in handles]  # bound, and compiled
            with monkeypatch.context() as patch:
                for name in ("execute_model", "sample_tokens_async"):
                    patch.setattr(lm.runner, name, checked(getattr(lm.runner, name)))
                with held(lm):
                    handles = [lm.submit(random_ids(5, seed=i), PARAMS, monitors=own) for i in range(4)]
                outs = [handle.result(600) for handle in handles]
            if waited and not own:
                pytest.skip(f"plain steps wait: {waited[0]}")
            assert not waited and all(out.finish_reason == "length" for out in outs)
