"""Rules of captures and copies that only a CUDA device shows; and one that graphs as functions show, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_model
from helpers_drafts import Told, greedy
from helpers_gpu import CONFIGS
from helpers_graphs import use_eager_graphs
from helpers_runner import random_ids

from pymllm_interp import LM
from pymllm_interp.runner.async_output import copy_to_host
from pymllm_interp.runner.graphs import graph_capture

PROMPTS = [random_ids(n, seed=n) for n in (5, 9, 3, 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("drafted")
    random_model(next(iter(CONFIGS.values()))()).save_pretrained(made)
    return made


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cpu":
        use_eager_graphs(monkeypatch)
    yield request.param


def test_v10_graphs_have_rows_for_the_drafts_of_all_requests(folder: Path, device: str) -> None:
    """Each request of a decode pass has a row, and one for each of its drafts: such steps replay."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    common: dict[str, Any] = {"device": device, "dtype": dtype, "max_running_requests": 4, "kv_cache_tokens": 2048}
    with LM(folder, **common) as lm:
        wanted = lm.generate(PROMPTS, greedy(12))
        assert lm.runner.graph_runner.max_bs == 4
    told = Told("right", k=3)
    told.tell(wanted)
    with LM(folder, **common, speculative=told) as lm:
        assert lm.runner.rows_of_request == 4 and lm.runner.graph_runner.max_bs == 16
        sizes, replay = [], lm.runner.graph_runner.replay

        def replayed(batch: Any, *args: Any, **options: Any) -> Any:
            sizes.append(batch.num_request_tokens)
            return replay(batch, *args, **options)

        lm.runner.graph_runner.replay = replayed
        lm.generate(PROMPTS, greedy(12))
        assert max(sizes) == 16, f"a step of four requests with three drafts each was not replayed: {sizes}"


@pytest.mark.gpu
def test_g13_a_capture_that_fails_leaves_nothing_set() -> None:
    """The current stream, random numbers and the allocator are as before, and a capture into another pool works.

    torch 2.11 does not take the pool of the failed capture again: a runner captures no more segments then.
    """
    stream, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    value = torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError):
        graph_capture.capture(lambda: torch.cuda.synchronize(), pool)
    assert torch.cuda.current_stream() == stream
    assert torch.rand(8, device="cuda").sum().item() > 0, "the generator does not wait for the capture"
    assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20
    graph = graph_capture.capture(lambda: value.add_(1), torch.cuda.graph_pool_handle())
    before = value.clone()
    graph.replay()
    assert torch.equal(value, before + 1)


@pytest.mark.gpu
def test_v5_a_copy_to_the_host_waits_for_what_was_launched_before_it() -> None:
    """And for nothing behind it: the tokens arrive while the next step runs."""
    value = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(10**8)  # cycles: some 50 ms
    value.fill_(7)
    (host,), copied = copy_to_host([value])
    torch.cuda._sleep(10**9)
    behind = torch.cuda.Event()
    behind.record()
    assert copied is not None
    copied.synchronize()
    assert not behind.query() and (host == 7).all()
    torch.cuda.synchronize()
