"""Harvests: states of a corpus on disk. transformers is the oracle for what is in them, an uninterrupted run for the rest."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_embeds import mixed
from helpers_forks import forking
from helpers_harvest import ALONE, corpus
from safetensors.torch import load_file

from pymllm_interp import LM, Capture, SamplingParams, Scale, Steer
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.harvest.progress import HarvestError
from pymllm_interp.harvest.reader import Harvest, open_harvest
from pymllm_interp.harvest.size import expected_bytes
from pymllm_interp.hooks.captures.activations import CaptureError
from pymllm_interp.hooks.captures.rows import GroupRows
from pymllm_interp.hooks.captures.spec import Project
from pymllm_interp.interventions import Generated
from pymllm_interp.runner.stages.declared_stage import DeclaredStage
from pymllm_interp.utils.arguments import PromptError


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rows_of(harvest: Harvest, document: int, site: str) -> torch.Tensor:
    index = harvest.document_ids(site) if harvest.manifest["identity"]["index_per_site"] else harvest.document_ids()
    return harvest[site][(index[:] == document).nonzero()[:, 0]]


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-4) -> None:
    """The last bits depend on the batch."""
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def states_of(model: Any, ids: list[int]) -> dict[str, torch.Tensor]:
    """What each layer and each MLP of transformers' model makes of a document."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Any) -> None:
            found[name] = (out[0] if isinstance(out, tuple) else out).view(len(ids), -1)

        return hook

    handles = []
    for i, layer in enumerate(model.model.layers):
        handles.append(layer.register_forward_hook(keep(f"resid_post.{i}")))
        handles.append(layer.mlp.register_forward_hook(keep(f"mlp_out.{i}")))
    model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return found


# -- contents --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rows_are_transformers_states_in_the_order_of_the_input(
    family: str, lm_of: Any, oracle: Any, tmp_path: Path
) -> None:
    """Many documents at once, most of them in chunks; the longest fills the context."""
    lm, documents = lm_of(family, max_num_tokens=16, max_running_requests=5), corpus(40)
    documents[7] = corpus(1, 129, seed=5)[0] * 128
    documents[7] = documents[7][: lm.runner.context_len]
    result = lm.harvest(
        iter(documents), capture=["resid_post.*", "mlp_out.1"], out=tmp_path / "out", shard_bytes=30_000
    )
    harvest = open_harvest(tmp_path / "out")
    layers = lm.runner.num_hidden_layers
    assert (
        harvest.sites == sorted(harvest.sites, key=lambda site: (site[-1], "r" in site))
        and len(harvest.sites) == layers + 1
    )
    assert harvest.document_ids()[:].tolist() == [i for i, ids in enumerate(documents) for _ in ids]
    assert harvest.positions()[:].tolist() == [position for ids in documents for position in range(len(ids))]
    assert harvest.token_ids()[:].tolist() == [token for ids in documents for token in ids]
    for i, ids in enumerate(documents):
        wanted = states_of(oracle(family), ids)
        for site in harvest.sites:
            close(rows_of(harvest, i, site), wanted[site])
    tokens = sum(map(len, documents))
    assert (result.documents, result.tokens, result.new_documents) == (40, tokens, 40)
    assert result.rows == dict.fromkeys(harvest.sites, tokens)
    assert result.shards == len(harvest.shards) == len(list((tmp_path / "out").glob("*.safetensors"))) > 5
    assert result.bytes == result.new_bytes == sum(shard.path.stat().st_size for shard in harvest.shards)
    assert harvest.manifest["complete"] and result.seconds > 0
    harvest.verify()


def test_documents_with_embeddings(lm_of: Any, oracle: Any, tmp_path: Path) -> None:
    """Some beside documents of tokens, split into passes; a resumed run knows them by their vectors."""
    lm, model = lm_of("llama", max_num_tokens=16, max_running_requests=5), oracle("llama")
    documents, wholes = [], []
    for seed, length in enumerate((3, 25, 1, 14, 8)):
        prompt, whole = mixed(model, length, seed)
        documents += [prompt, {"prompt_embeds": whole[0]}, prompt["prompt_token_ids"]]
        wholes += [whole, whole, model.get_input_embeddings()(torch.tensor([prompt["prompt_token_ids"]])).detach()]
    out, options = tmp_path / "out", {"capture": ["resid_post.0"], "max_length": 10, "too_long": "split"}
    lm.harvest(documents[:6], out=out, **options)
    lm.harvest(documents, out=out, **options)
    harvest = open_harvest(out)
    for i, whole in enumerate(wholes):
        wanted = [
            model(inputs_embeds=part, output_hidden_states=True).hidden_states[1][0] for part in whole.split(10, dim=1)
        ]
        close(rows_of(harvest, i, "resid_post.0"), torch.cat(wanted).detach())
    other = {**documents[3], "embeds": {place: 1.5 * row for place, row in documents[3]["embeds"].items()}}
    with pytest.raises(ValueError, match="are not the same"):
        lm.harvest([*documents[:3], other, *documents[4:]], out=out, **options)
    wide = {"prompt_embeds": torch.zeros(3, 2 * lm.hidden_size)}
    skipped = lm.harvest([wide, documents[0]], out=tmp_path / "skipped", on_error="skip", **options)
    assert skipped.documents == 1 and "expected [positions" in str(skipped.skipped[0])


def test_states_that_come_through_the_ring_are_the_same(
    lm_of: Any, model_folder: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """As on CUDA, with a ring that holds a part of a step; without a GPU the kernels run under Triton's interpreter."""
    pytest.importorskip("triton")
    captures, documents = ["resid_post.*", Capture("mlp_out.0", positions=[0])], corpus(12, 20)
    monkeypatch.setattr(DeclaredStage, "has_tables", True)
    options = {"max_num_tokens": 16, "max_running_requests": 3, "capture_ring_bytes": 60_000}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with LM(model_folder("llama"), **with_tuning(dtype="float32", device=device, **options)) as lm:
        assert lm.runner.capture_ring is not None
        lm.harvest(iter(documents), capture=captures, out=tmp_path / "ring", shard_bytes=20_000)
    monkeypatch.undo()
    lm_of("llama").harvest(iter(documents), capture=captures, out=tmp_path / "none", shard_bytes=20_000)
    ring, none = open_harvest(tmp_path / "ring"), open_harvest(tmp_path / "none")
    assert ring.sites == none.sites and len(ring.shards) == len(none.shards)
    for site in none.sites:
        assert torch.equal(ring.document_ids(site)[:], none.document_ids(site)[:])
        assert torch.equal(ring.positions(site)[:], none.positions(site)[:])
        close(ring[site][:], none[site][:])


def test_no_row_is_lost_where_the_kv_pool_is_full(lm_of: Any, tmp_path: Path) -> None:
    """Documents beside requests that generate, in a pool too small for both, with steps launched ahead of their tokens."""
    lm, documents = (
        lm_of("llama", kv_cache_tokens=72, page_size=4, max_num_tokens=24, async_scheduling=True),
        corpus(60, 14),
    )

    def traffic() -> list[Any]:
        return [lm.submit([1, 2, 3, i], SamplingParams(max_tokens=40, temperature=0)) for i in range(8)]

    handles, before = traffic(), lm.engine.stats()["preempted"]
    result = lm.harvest(iter(documents), capture=["resid_post.*"], out=tmp_path / "out")
    harvest = open_harvest(tmp_path / "out")
    assert harvest.document_ids()[:].tolist() == [i for i, ids in enumerate(documents) for _ in ids]
    assert result.rows == dict.fromkeys(harvest.sites, sum(map(len, documents))) and not result.skipped
    handles += traffic()
    outs = lm.forward(documents)
    assert [len(out.logits) for out in outs] == [len(ids) for ids in documents]
    assert [len(handle.result().token_ids) for handle in handles] == [40] * 16
    stats = lm.engine.stats()
    assert stats["preempted"] > before and stats["overlapped_steps"] > 0, "the traffic was too light"


def test_a_document_with_too_few_rows_is_an_error_and_never_silent(
    lm_of: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A layer's rows of one document do not arrive."""
    lm, put = lm_of("llama"), GroupRows.put

    def lose_some(rows: GroupRows, column: int, first: int, states: Any, integers: Any, row: int, count: int) -> None:
        lost = count == 9 and str(rows.group.names[column]) == "resid_post.1"
        put(rows, column, first, states, integers, row, 4 if lost else count)

    monkeypatch.setattr(GroupRows, "put", lose_some)
    documents, wanted = [[1, 2, 3], [5] * 9, [4, 5]], "resid_post.1: 4 of 9 rows"
    with pytest.raises(HarvestError, match=wanted):
        lm.harvest(iter(documents), capture=["resid_post.*"], out=tmp_path / "raise")
    result = lm.harvest(iter(documents), capture=["resid_post.*"], out=tmp_path / "skip", on_error="skip")
    assert list(result.skipped) == [1] and wanted in result.skipped[1] and set(result.rows.values()) == {5}
    outs = lm.generate([[5] * 9, [4, 5]], SamplingParams(max_tokens=2, temperature=0), capture=["resid_post.1"])
    with pytest.raises(CaptureError, match=r"resid_post\.1: 5 of 10 rows"):
        outs[0].activations["resid_post.1"]
    assert len(outs[1].activations["resid_post.1"]) == 3 and "rows" in outs[0].warnings[0]


def test_shards_are_safetensors_of_whole_documents_and_of_the_size_that_was_asked_for(
    lm_of: Any, tmp_path: Path
) -> None:
    lm, documents = lm_of("llama"), corpus(60)
    documents[20] = [3] * 100  # larger than a shard, alone
    lm.harvest(documents, capture=["resid_post.0"], out=tmp_path, shard_bytes=20_000)
    row = 4 * lm.runner.hidden_size + 3 * 8
    following = 0
    for shard in open_harvest(tmp_path).shards:
        tensors, entry = load_file(shard.path), shard.entry
        assert set(tensors) == {"resid_post.0", "document_ids", "positions", "token_ids"}
        ids = tensors["document_ids"]
        assert ids.unique().tolist() == list(range(entry.first_document, entry.last_document + 1))
        assert entry.first_document == following
        following = entry.last_document + 1
        assert all(int((ids == i).sum()) == len(documents[i]) for i in ids.unique().tolist())
        size = len(ids) * row
        assert size <= 20_000 or ids.unique().tolist() == [20]
        if following < len(documents):
            assert size + len(documents[following]) * row > 20_000
        assert entry.rows == {"resid_post.0": len(ids)} and entry.tokens == len(ids)
    assert following == len(documents)


def test_texts_and_steered_models_are_harvested(lm_of: Any, tmp_path: Path) -> None:
    lm, texts = lm_of("llama"), ["w1 w2 w3", "w7 nonsense", "w9"]
    lm.vectors["there"] = torch.ones(lm.runner.hidden_size)
    specs = [Steer("resid_post.0", "there", scale=0.7), Scale("mlp_out.1", 0.5, positions=[-1])]
    lm.harvest(texts, capture=["resid_post.*"], out=tmp_path, interventions=specs)
    del lm.vectors["there"]
    harvest = open_harvest(tmp_path)
    steer = [Steer("resid_post.0", torch.ones(lm.runner.hidden_size), scale=0.7), specs[1]]
    outs = lm.generate(texts, SamplingParams(max_tokens=1), capture=["resid_post.*"], interventions=steer)
    for i, out in enumerate(outs):
        assert harvest.token_ids()[(harvest.document_ids()[:] == i).nonzero()[:, 0]].tolist() == out.prompt_token_ids
        for site in harvest.sites:
            close(rows_of(harvest, i, site), out.activations[site])


def test_captures_at_different_positions_have_an_index_each(lm_of: Any, tmp_path: Path) -> None:
    lm, documents = lm_of("llama"), [[*ids, 1, 2] for ids in corpus(9)]
    probes = torch.randn(6, lm.runner.hidden_size)
    captures = [
        Capture("resid_post.0", positions=[0, -1], dtype="bfloat16"),
        Capture("resid_post.1", reduce="mean"),
        Capture("resid_post.2", reduce="last"),
        Capture("mlp_out.0", positions=slice(0, None, 2), reduce=Project(probes, top_k=3)),
    ]
    lm.harvest(documents, capture=captures, out=tmp_path / "some", shard_bytes=3000)
    lm.harvest(documents, capture=["resid_post.*", "mlp_out.0"], out=tmp_path / "all")
    some, whole = open_harvest(tmp_path / "some"), open_harvest(tmp_path / "all")
    assert len(some.shards) > 1
    for i, ids in enumerate(documents):
        full = {site: rows_of(whole, i, site) for site in whole.sites}
        end = len(ids) - 1
        assert rows_of(some, i, "resid_post.0").dtype is torch.bfloat16
        close(rows_of(some, i, "resid_post.0").float(), full["resid_post.0"][[0, end]], 1e-2)
        close(rows_of(some, i, "resid_post.1"), full["resid_post.1"].mean(0, keepdim=True))
        close(rows_of(some, i, "resid_post.2"), full["resid_post.2"][-1:])
        best = (full["mlp_out.0"][::2] @ probes.T).topk(3)
        close(rows_of(some, i, "mlp_out.0"), best.values)
        places = {
            site: some.positions(site)[(some.document_ids(site)[:] == i).nonzero()[:, 0]].tolist()
            for site in some.sites
        }
        assert places == {
            "resid_post.0": [0, end], "resid_post.1": [end], "resid_post.2": [end], "mlp_out.0": list(range(0, end + 1, 2)),
        }  # fmt: skip
    top = torch.cat([shard.tensor("indexes.mlp_out.0") for shard in some.shards])
    assert top.shape == (len(some["mlp_out.0"]), 3) and top.dtype is torch.int64
    with pytest.raises(ValueError, match=r"name one, positions\('resid_post.0'\)"):
        some.positions()


def test_long_documents_are_refused_truncated_or_split(lm_of: Any, tmp_path: Path) -> None:
    lm, documents = lm_of("llama"), [[5] * 4, list(range(1, 24)), [7] * 10]
    kwargs: dict[str, Any] = {"capture": ["resid_post.1"], "max_length": 10}
    with pytest.raises(HarvestError, match=r"document 1 has 23 tokens, and a pass takes 10 \(max_length"):
        lm.harvest(documents, out=tmp_path / "error", **kwargs)
    lm.harvest(documents, out=tmp_path / "truncate", too_long="truncate", **kwargs)
    lm.harvest(documents, out=tmp_path / "split", too_long="split", **kwargs)
    lm.harvest([documents[1][a : a + 10] for a in (0, 10, 20)], out=tmp_path / "parts", capture=["resid_post.1"])
    cut, split, parts = (open_harvest(tmp_path / name) for name in ("truncate", "split", "parts"))
    assert cut.token_ids()[:].tolist() == [5] * 4 + list(range(1, 11)) + [7] * 10
    assert split.document_ids()[:].tolist() == [0] * 4 + [1] * 23 + [2] * 10
    assert split.positions()[:].tolist() == [*range(4), *range(23), *range(10)]
    assert split.token_ids()[4:27].tolist() == documents[1]
    close(rows_of(split, 1, "resid_post.1"), parts["resid_post.1"][:])
    with pytest.raises(ValueError, match="too_long='shorten': expected one of"):
        lm.harvest(documents, out=tmp_path / "x", capture=["resid_post.1"], too_long="shorten")
    with pytest.raises(ValueError, match=r"max_length=129: a pass takes at most 128 \(max_model_len"):
        lm.harvest(documents, out=tmp_path / "x", capture=["resid_post.1"], max_length=129)


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array, iter])
def test_a_stream_of_tokens_is_cut_into_documents(kind: Any, lm_of: Any, tmp_path: Path) -> None:
    stream = [i * 7 % 90 for i in range(50)]
    result = lm_of("llama").harvest(kind(stream), capture=["resid_post.0"], out=tmp_path, max_length=16)
    harvest = open_harvest(tmp_path)
    assert result.documents == 4 and harvest.token_ids()[:].tolist() == stream
    assert harvest.positions()[:].tolist() == [*range(16), *range(16), *range(16), *range(2)]


@pytest.mark.parametrize("kind", [torch.tensor, np.array, lambda rows: [{"input_ids": row} for row in rows]])
def test_documents_come_in_the_shapes_that_datasets_have(kind: Any, lm_of: Any, tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    lm_of("llama").harvest(kind(rows), capture=["resid_post.0"], out=tmp_path)
    assert open_harvest(tmp_path).token_ids()[:].tolist() == [1, 2, 3, 4, 5, 6]


def test_the_input_is_read_no_further_ahead_than_two_steps_hold(lm_of: Any, tmp_path: Path) -> None:
    lm = lm_of("llama", max_num_tokens=16, max_running_requests=2)
    before, read = lm.engine.num_steps, []

    def endless() -> Iterator[list[int]]:
        for i in itertools.count():
            read.append((i, lm.engine.num_steps - before))
            yield [i % 90] * (1 + i % 9)
            if i == 60:
                raise ConnectionError("the data set went away")

    with pytest.raises(
        HarvestError, match=r"(?s)the data set went away.*has documents 0 to 5[0-9].*continues at document"
    ):
        lm.harvest(endless(), capture=["resid_post.0"], out=tmp_path, shard_bytes=8000)
    # Two requests in a step, four under way: document i is asked for when i - 4 are done, or nearly.
    assert len(read) == 61 and all(2 * steps >= i - 5 for i, steps in read)


# -- resuming --------------------------------------------------------------------------------------


class Killed(BaseException):
    """No `except Exception`, `except OSError` cleans up after it, as nothing does after a kill."""


def interrupted_at(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> SimpleNamespace:
    """Let the `step`-th of the calls that make files durable fail, and those after it."""
    state = SimpleNamespace(calls=0)

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            state.calls += 1
            if state.calls > step:
                raise error
            return real(*args)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    return state


def test_a_run_that_dies_at_any_step_of_its_writing_resumes_to_the_same_bytes(lm_of: Any, tmp_path: Path) -> None:
    lm, documents = lm_of("llama", **ALONE), corpus(8, 30)
    kwargs: dict[str, Any] = {"capture": ["resid_post.0", "mlp_out.2"], "shard_bytes": 30_000}
    lm.harvest(iter(documents), out=tmp_path / "whole", **kwargs)
    wanted, left_behind = files_of(tmp_path / "whole"), set()
    assert len(wanted) >= 4
    for step in itertools.count():
        out = tmp_path / str(step)
        with pytest.MonkeyPatch.context() as patch:
            state = interrupted_at(patch, step, Killed())
            try:
                lm.harvest(iter(documents), out=out, **kwargs)
                break
            except Killed:
                assert state.calls > step
        left_behind |= {name.rpartition("-")[0] or name for name in set(files_of(out)) - set(wanted)}
        listed = len(open_harvest(out).shards) if (out / "manifest.json").exists() else 0
        result = lm.harvest(iter(documents), out=out, **kwargs)
        assert files_of(out) == wanted, f"after step {step}"
        assert result.new_documents == len(documents) - sum(
            shard.entry.last_document + 1 - shard.entry.first_document for shard in open_harvest(out).shards[:listed]
        )
    assert step == 6 * (len(wanted) - 1) + 6 and {"manifest.json.tmp"} < left_behind


CHILD = """
import os, random, signal, sys, time
from pymllm_interp import LM

folder, parent, moments = sys.argv[1], sys.argv[2], sys.argv[3:]
rng = random.Random(1)
documents = [[rng.randrange(90) for _ in range(rng.randrange(1, 60))] for _ in range(60)]

def run(out, seconds):
    lm = LM(folder, dtype="float32", device="cpu", max_running_requests=1, max_num_tokens=16)
    lm.harvest([[1]], capture=["embed"], out=out + "-warm")
    if seconds is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its action, with no handler, is to end the process as it stands
    lm.harvest(documents, capture=["resid_post.*"], out=out, shard_bytes=30_000)
    os._exit(0)

killed = [("killed", seconds) for seconds in [*map(float, moments), None]]
for name, seconds in [("whole", None), *killed]:
    child = os.fork()  # before there are threads
    if child == 0:
        run(os.path.join(parent, name), seconds)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_at_random_moments_resumes_to_the_same_bytes(
    model_folder: Any, tmp_path: Path
) -> None:
    """When they come is up to the machine; that nothing is lost must not be."""
    command = [sys.executable, "-c", CHILD, str(model_folder("llama")), str(tmp_path), "0.02", "0.2"]
    with forking():
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    codes = list(map(int, done.stdout.split()))
    assert codes[0] == codes[-1] == 0 and set(codes) <= {0, -signal.SIGALRM}, (codes, done.stderr)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_a_finished_harvest_is_left_alone_and_takes_a_longer_input(lm_of: Any, tmp_path: Path) -> None:
    lm, documents = lm_of("llama", **ALONE), corpus(20)
    kwargs: dict[str, Any] = {"capture": ["resid_post.0"], "shard_bytes": 20_000, "out": tmp_path / "out"}
    first, steps = lm.harvest(documents[:12], **kwargs), lm.engine.num_steps
    before = files_of(tmp_path / "out")
    again = lm.harvest(documents[:12], **kwargs)
    assert lm.engine.num_steps == steps
    assert again.new_documents == again.new_bytes == 0 and again.rows == first.rows and again.bytes == first.bytes
    assert {k: v for k, v in files_of(tmp_path / "out").items() if k != "manifest.json"} == {
        k: v for k, v in before.items() if k != "manifest.json"
    }
    more = lm.harvest(documents, **kwargs)
    assert (more.documents, more.new_documents) == (20, 8)
    harvest = open_harvest(tmp_path / "out")
    assert harvest.token_ids()[:].tolist() == [token for ids in documents for token in ids]


def test_another_model_spec_layout_or_input_is_refused_and_nothing_is_touched(
    lm_of: Any, model_folder: Any, tmp_path: Path
) -> None:
    lm, documents, out = lm_of("llama"), corpus(12), tmp_path / "out"
    vector = torch.ones(lm.runner.hidden_size)
    kwargs: dict[str, Any] = {
        "capture": ["resid_post.0"],
        "shard_bytes": 20_000,
        "interventions": [Steer("resid_post.0", vector)],
    }
    lm.harvest(documents, out=out, **kwargs)
    before = files_of(out)
    changed = vector.clone()
    changed[3] += 1e-6
    with LM(model_folder("llama"), dtype="bfloat16", device="cpu") as other:
        refusals: list[tuple[LM, list[Any], dict[str, Any], str]] = [
            (
                other,
                documents,
                {},
                "with other settings.*model: llama, 3 layers, .* float32, .*, and now llama, .* bfloat16,",
            ),
            (
                lm,
                documents,
                {"interventions": [Steer("resid_post.0", changed)]},
                r"  interventions: .*vector=\[72\] (\w{8})\)\"\], and now .*vector=\[72\] (?!\1)\w{8}\)\"\]$",
            ),
            (
                lm,
                documents,
                {"capture": ["resid_post.1"]},
                r"capture: .*Capture\('resid_post.0'\).*, and now .*'resid_post.1'\)",
            ),
            (lm, documents, {"shard_bytes": 30_000}, "  shard_bytes: 20000, and now 30000"),
            (
                lm,
                documents,
                {"max_length": 64, "too_long": "split"},
                "max_length: 128, and now 64\n  too_long: error, and now split",
            ),
            (lm, documents[:-1], {}, "this input ends after 11"),
            (lm, [[*documents[0][:-1], 94], *documents[1:]], {}, r"documents 0 to \d+ in shard-000000.* not the same"),
            (lm, [*documents[:-1], [*documents[-1], 1]], {}, r"to 11 in shard-00000\d.* not the same"),
        ]
        for model, inputs, change, message in refusals:
            with pytest.raises(ValueError, match=f"(?s){message}"):
                model.harvest(inputs, out=out, **{**kwargs, **change})
            assert files_of(out) == before, message
    with open(next(out.glob("*.safetensors")), "ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"bytes long, as manifest.json says: it is damaged"):
        lm.harvest(documents, out=out, **kwargs)


def test_a_folder_that_is_not_a_harvests_is_refused_and_its_files_stay(lm_of: Any, tmp_path: Path) -> None:
    lm = lm_of("llama")
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "shard-000000.safetensors").write_text("not ours")
    with pytest.raises(FileExistsError, match=r"holds shard-000000.safetensors, thesis.tex and no manifest.json"):
        lm.harvest([[1]], capture=["embed"], out=tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "something else"}))
    with pytest.raises(ValueError, match=r"is not the manifest of a harvest.*'something else'"):
        lm.harvest([[1]], capture=["embed"], out=tmp_path)
    assert len(files_of(tmp_path)) == 3
    with pytest.raises(FileNotFoundError, match=r"has no manifest.json"):
        open_harvest(tmp_path / "nowhere")


def test_what_a_killed_run_left_is_deleted_and_what_is_not_of_a_harvest_is_not(lm_of: Any, tmp_path: Path) -> None:
    lm, documents = lm_of("llama"), corpus(6)
    lm.harvest(documents, capture=["embed"], out=tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("shard-000007.safetensors", "shard-000007.safetensors.tmp", "manifest.json.tmp"):
        (tmp_path / name).write_text("left")
    lm.harvest(documents, capture=["embed"], out=tmp_path)
    assert sorted(files_of(tmp_path)) == ["manifest.json", "notes.txt", "shard-000000.safetensors"]


def test_two_runs_cannot_write_to_one_folder(lm_of: Any, tmp_path: Path) -> None:
    lm = lm_of("llama")

    def inputs() -> Iterator[list[int]]:
        yield [1, 2]
        with pytest.raises(RuntimeError, match="another run is harvesting to this folder"):
            lm.harvest([[1, 2]], capture=["embed"], out=tmp_path)
        yield [3]

    assert lm.harvest(inputs(), capture=["embed"], out=tmp_path).documents == 2
    assert lm.harvest([[1, 2], [3]], capture=["embed"], out=tmp_path).new_documents == 0


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1, 99], "document 9 holds token id 99"),
        ([], "document 9 is empty"),
        ("", "document 9 is empty"),
        ([1], r"document 9: Capture\('mlp_out.0'\): positions \[1\] are beyond the prompt"),
        ([1, "w"], "document 9 is a list: expected text, or token ids"),
        (None, "document 9 is a NoneType"),
    ],
)
@pytest.mark.parametrize("kind", [list, iter])
def test_a_bad_document_is_named_and_those_before_it_are_kept(
    kind: Any, bad: Any, message: str, lm_of: Any, tmp_path: Path
) -> None:
    lm, documents = lm_of("llama"), [[*ids, 1] for ids in corpus(15)]
    capture = ["resid_post.0", Capture("mlp_out.0", positions=[1])]
    shard_bytes = 15_000
    broken = [*documents[:9], bad, *documents[10:]]
    with pytest.raises(
        HarvestError, match=rf"(?s){message}.*has documents 0 to [5-8], in \d whole shards; the same"
    ) as caught:
        lm.harvest(kind(broken), capture=capture, out=tmp_path, shard_bytes=shard_bytes)
    assert isinstance(caught.value.__cause__, PromptError)
    kept = open_harvest(tmp_path)
    assert not kept.manifest["complete"]
    assert f"continues at document {kept.shards[-1].entry.last_document + 1}" in str(caught.value)
    assert lm.engine.stats()["running"] == lm.engine.stats()["waiting"] == 0
    result = lm.harvest(kind(documents), capture=capture, out=tmp_path, shard_bytes=shard_bytes)
    assert 0 < result.new_documents < len(documents) == result.documents
    harvest = open_harvest(tmp_path)
    assert harvest.token_ids("resid_post.0")[:].tolist() == [token for ids in documents for token in ids]


def test_a_document_that_fails_in_the_engine_is_named(lm_of: Any, tmp_path: Path, monkeypatch: Any) -> None:
    lm, documents = lm_of("llama", **ALONE), corpus(12)
    documents[8] = [93] * 9
    real = lm.runner.execute_model

    def failing(step: Any, *args: Any) -> Any:
        if any(new.token_ids == documents[8] for new in step.scheduled_new_reqs):
            raise RuntimeError("a kernel broke")
        return real(step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(lm.runner, "execute_model", failing)
        with pytest.raises(HarvestError, match=r"(?s)document 8: RuntimeError\('a kernel broke'\).*has documents 0 to"):
            lm.harvest(documents, capture=["resid_post.0"], out=tmp_path, shard_bytes=15_000)
    assert lm.harvest(documents, capture=["resid_post.0"], out=tmp_path, shard_bytes=15_000).documents == 12


def test_a_shard_that_is_being_written_when_the_run_fails_is_counted(
    lm_of: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    lm, documents = lm_of("llama", **ALONE), [[i] * 5 for i in range(8)]
    failed, execute, sync = threading.Event(), lm.runner.execute_model, os.fsync

    def failing(step: Any, *args: Any) -> Any:
        if any(new.token_ids == documents[5] for new in step.scheduled_new_reqs):
            failed.set()
            raise RuntimeError("a kernel broke")
        return execute(step, *args)

    def late(fd: int) -> None:
        if threading.current_thread().name.startswith("pymllm-interp-harvest"):
            assert failed.wait(600)
            time.sleep(0.05)  # the caller has every chance to be ahead of it
        sync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(lm.runner, "execute_model", failing)
        patch.setattr(os, "fsync", late)
        with pytest.raises(
            HarvestError, match=r"(?s)document 5: .*has documents 0 to 2, in 1 whole shards; .*document 3"
        ):
            lm.harvest(iter(documents), capture=["resid_post.0"], out=tmp_path, shard_bytes=16 * (4 * 72 + 24))
    assert len(open_harvest(tmp_path).shards) == 1


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"capture": []}, ValueError, "nothing to capture"),
        ({"capture": ["pattern.0"]}, ValueError, "rows of patterns have the lengths"),
        ({"capture": ["resid_post.9"]}, ValueError, "there is no layer 9"),
        ({"capture": [Capture("embed", positions="generated")]}, ValueError, "a harvest generates nothing"),
        ({"interventions": [Scale("embed", 2.0, positions=Generated(1))]}, ValueError, "a harvest generates nothing"),
        ({"interventions": [Steer("embed", "unknown")]}, ValueError, "no vector 'unknown'"),
        ({"on_error": "ignore"}, ValueError, "on_error='ignore': expected one of"),
        ({"shard_bytes": 0}, ValueError, "shard_bytes=0: expected a whole number of at least 1"),
        ({"inputs": "one text"}, PromptError, "inputs is a str: expected an iterable"),
        ({"inputs": 5}, PromptError, "inputs is a int: expected an iterable"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(
    kwargs: dict[str, Any], error: type[Exception], message: str, lm_of: Any, tmp_path: Path
) -> None:
    lm, given = lm_of("llama"), {"inputs": [[1, 2]], "capture": ["embed"], "out": tmp_path / "out", **kwargs}
    for _ in range(2):  # the second time too: no lock, and no half of a folder, stays behind
        with pytest.raises(error, match=message):
            lm.harvest(given["inputs"], **{name: value for name, value in given.items() if name != "inputs"})


def test_a_harvest_inside_of_a_block_is_refused(lm_of: Any, tmp_path: Path) -> None:
    lm = lm_of("llama")
    with pytest.raises(Exception, match="the engine would wait for itself"):
        with lm.trace([1, 2, 3]):
            lm.harvest([[1]], capture=["embed"], out=tmp_path)
            lm.model.layers[0].output.save()


# -- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "captures",
    [
        ["resid_post.*", "mlp_out.0"],
        [Capture("resid_post.*", dtype="bfloat16"), Capture("z.1", dtype="float32"), "mlp_act.0"],
        [Capture("resid_post.*", reduce="mean"), Capture("q.0", reduce="mean", dtype="float16")],
        [Capture("resid_post.{0,2}", reduce="last"), Capture("embed", positions=[-1, 0]), "mlp_out.1"],
        [Capture("resid_post.*", reduce=Project(torch.ones(5, 72), top_k=2)), "embed"],
        [
            Capture("resid_post.*", reduce=Project(torch.ones(5, 72)), dtype="float16"),
            Capture(
                "embed", reduce=Project(torch.ones(20, 72), top_k=4), dtype="bfloat16", positions=slice(1, None, 3)
            ),
        ],
    ],
)
def test_the_size_of_a_harvest_is_known_to_the_byte(captures: Any, lm_of: Any, tmp_path: Path) -> None:
    lm, documents = lm_of("llama"), [[*ids, 1, 2] for ids in corpus(12)]
    lm.harvest(documents, capture=captures, out=tmp_path, shard_bytes=4000)
    tensors = [tensor for shard in open_harvest(tmp_path).shards for tensor in load_file(shard.path).values()]
    specs = [spec if isinstance(spec, Capture) else Capture(spec) for spec in captures]
    expected = [expected_bytes(specs, lm.runner.model_spec, len(ids)) for ids in documents]
    assert sum(expected) == sum(tensor.nbytes for tensor in tensors)


def test_a_list_that_cannot_fit_is_refused_before_anything_is_computed(
    lm_of: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    lm, documents = lm_of("llama"), corpus(50, 60)
    texts = [" ".join(f"w{token}" for token in ids) for ids in documents]
    capture = [Capture("resid_post.{0,1}", dtype="bfloat16"), Capture("embed", positions=[0])]
    real, steps = shutil.disk_usage(tmp_path), lm.engine.num_steps

    def size(**kwargs: Any) -> int:
        folder = tmp_path / "measured"
        found = lm.harvest(documents, capture=capture, out=folder, **kwargs).bytes
        shutil.rmtree(folder)
        return found

    written, split = size(), size(max_length=10, too_long="split")

    def has_room(inputs: Any, free: float, **kwargs: Any) -> bool:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=int(free)))
        out, before = tmp_path / "out", lm.engine.num_steps
        try:
            lm.harvest(inputs, capture=capture, out=out, **kwargs)
        except HarvestError as error:
            assert re.search(
                r"this input takes (about )?0\.00 GB more, and 0\.00 GB are free(?s:.*)no documents yet", str(error)
            )
            assert lm.engine.num_steps == before
            return False
        finally:
            shutil.rmtree(out)
            monkeypatch.undo()
        return True

    assert has_room(documents, written) and not has_room(documents, written * 0.98)
    assert has_room(documents, split, max_length=10, too_long="split")
    assert not has_room(documents, split * 0.98, max_length=10, too_long="split")
    assert has_room(texts, written * 1.3) and not has_room(texts, written * 0.7)
    assert has_room(iter(documents), 0), "where the size is not known, the run finds out"
    stream = [token for ids in documents for token in ids]
    assert not has_room(stream, written * 0.5) and has_room(stream, written)
    assert lm.engine.num_steps > steps


def test_a_disk_that_fills_up_stops_the_run_at_a_shards_border(lm_of: Any, tmp_path: Path) -> None:
    """The system's own limit on the size of a file: a write beyond it fails as one on a full disk does."""
    lm, documents = lm_of("llama", **ALONE), [*corpus(20, 10), [5] * 100, *corpus(5, 10, seed=2)]
    kwargs: dict[str, Any] = {"capture": ["resid_post.0"], "shard_bytes": 8_000}
    lm.harvest(documents, out=tmp_path / "whole", **kwargs)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(
            HarvestError,
            match=r"(?s)shard (\d+) could not be written: .*File too large.*in \1 whole shards; the same call",
        ):
            lm.harvest(iter(documents), out=tmp_path / "out", **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    whole, kept = files_of(tmp_path / "whole"), files_of(tmp_path / "out")
    assert len(kept) > 2 and not [name for name in kept if name.endswith(".tmp")]
    assert all(content == whole[name] for name, content in kept.items() if name != "manifest.json")
    lm.harvest(iter(documents), out=tmp_path / "out", **kwargs)
    assert files_of(tmp_path / "out") == whole


def test_a_full_disk_at_any_step_loses_nothing_that_was_listed(lm_of: Any, tmp_path: Path) -> None:
    lm, documents = lm_of("llama", **ALONE), corpus(14)
    kwargs: dict[str, Any] = {"capture": ["resid_post.0"], "shard_bytes": 20_000}
    lm.harvest(iter(documents), out=tmp_path / "whole", **kwargs)
    for step in (3, 4, 8, 11, 13, 18):  # each of the six steps of a shard, of several
        with pytest.MonkeyPatch.context() as patch:
            interrupted_at(patch, step, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            with pytest.raises(HarvestError, match="No space left on device"):
                lm.harvest(iter(documents), out=tmp_path / str(step), **kwargs)
        lm.harvest(iter(documents), out=tmp_path / str(step), **kwargs)
        assert files_of(tmp_path / str(step)) == files_of(tmp_path / "whole"), step


# -- reading, and what is shown --------------------------------------------------------------------


def test_rows_are_indexed_over_all_shards(lm_of: Any, tmp_path: Path) -> None:
    lm = lm_of("llama")
    lm.harvest(corpus(30), capture=["resid_post.0"], out=tmp_path, shard_bytes=10_000)
    harvest = open_harvest(tmp_path)
    rows, whole = harvest["resid_post.0"], torch.cat([shard["resid_post.0"] for shard in harvest.shards])
    assert len(rows) == len(whole) and len(harvest.shards) > 5
    assert rows.shape == whole.shape and repr(rows) == f"ShardedRows({list(whole.shape)})"
    assert repr(harvest) == f"Harvest({str(tmp_path)!r}, {len(harvest.shards)} shards of resid_post.0)"
    mixed = torch.randperm(len(rows))
    assert torch.equal(rows[mixed], whole[mixed]) and torch.equal(rows[mixed.tolist()[:7]], whole[mixed[:7]])
    assert torch.equal(rows[5:-3:4], whole[5:-3:4]) and torch.equal(rows[-1], whole[-1])
    assert torch.equal(rows[[-2, 0]], whole[[-2, 0]]) and rows[:0].shape == (0, lm.runner.hidden_size)
    assert rows[[]].shape == rows[torch.zeros(len(rows), dtype=torch.bool)].shape == (0, lm.runner.hidden_size)
    for mask in (harvest.document_ids()[:] == 7, torch.arange(len(rows)) % 3 == 0):
        assert 1 < mask.sum() < len(rows) and torch.equal(rows[mask], whole[mask])
        assert torch.equal(rows[mask.tolist()], whole[mask]) and torch.equal(rows[mask.numpy()], whole[mask])
    for wrong in (True, [True, False], torch.ones(len(rows) + 1, dtype=torch.bool), 1.0, [0.5], torch.tensor([[1, 2]])):
        with pytest.raises(IndexError, match=rf"whole numbers \[n\], or by a mask of {len(rows)} bools"):
            rows[wrong]
    for beyond in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            rows[beyond]
    loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)
    assert sum(map(len, loader)) == len(rows)
    with pytest.raises(KeyError, match=r"was not captured; there is resid_post.0"):
        harvest["resid_post.1"]
    damaged = harvest.shards[2].path
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-000002.safetensors is damaged: its CRC-32 is"):
        open_harvest(tmp_path).verify()


def test_an_empty_input_is_a_harvest_without_documents(lm_of: Any, tmp_path: Path) -> None:
    result = lm_of("llama").harvest([], capture=["embed"], out=tmp_path)
    assert (result.documents, result.shards, result.bytes, result.rows) == (0, 0, 0, {})
    assert open_harvest(tmp_path).manifest["complete"] and open_harvest(tmp_path).sites == ["embed"]
    ids = open_harvest(tmp_path).document_ids()
    assert len(ids) == 0 and ids[:].dtype is torch.int64 and ids[ids[:] == 0].shape == (0,)


def test_progress_is_shown_where_it_is_asked_for(lm_of: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lm, documents = lm_of("llama"), corpus(12)
    lm.harvest(documents, capture=["embed"], out=tmp_path / "quiet")
    assert capfd.readouterr() == ("", ""), "no terminal, nothing shown"
    lm.harvest(documents, capture=["embed"], out=tmp_path / "shown", progress=True)
    out, shown = capfd.readouterr()
    assert out == "" and "12 documents" in shown and f"{sum(map(len, documents))} tokens" in shown and "GB/s" in shown
