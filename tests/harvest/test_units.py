"""Harvests in units: a plan, attempts that may die or come twice, and records. Each document counts exactly once."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_harvest import corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from pymllm_interp import LM, SamplingParams, Scale
from pymllm_interp.harvest.folder import Identity
from pymllm_interp.harvest.on_ray.workers import MOST_LOSSES, SLOW_SECONDS, UnitQueue, UnitTask
from pymllm_interp.harvest.plan import HarvestPlan, Unit, make_plan, read_plan
from pymllm_interp.harvest.progress import HarvestError
from pymllm_interp.harvest.reader import open_harvest
from pymllm_interp.harvest.run import AskedHarvest, asked_of
from pymllm_interp.harvest.sources import portions_of, read_portion, source_of
from pymllm_interp.harvest.units import UnitFolder, done_units, run_unit, settle

IDENTITY = Identity("model", "", "spec", 1 << 20, 64, "truncate", False)
DESCRIPTION = {"sites": ["resid_post.0"], "num_hidden_layers": 1}
FORK = multiprocessing.get_context("fork")


# -- the commit, in real processes that are killed ------------------------------------------------


def attempt(folder: Path, unit: Unit, shards: int = 2) -> bool | None:
    """One attempt at a unit, with rows that say which document they are of."""
    plan = read_plan(folder)
    own = UnitFolder(folder, plan, unit)
    if own.record.exists():
        own.close()
        return False
    documents = read_portion(plan.sources[unit.portion.file], unit.portion, plan.column)
    with own.attempted():
        write(own, documents, shards)
    own.close()
    return own.won


def write(own: UnitFolder, documents: list[list[int]], shards: int) -> None:
    per_shard = -(-len(documents) // shards)
    for start in range(0, len(documents), per_shard):
        part = documents[start : start + per_shard]
        first = own.unit.first + start
        ids = torch.tensor([first + i for i, document in enumerate(part) for _ in document])
        tokens = torch.tensor([token for document in part for token in document])
        tensors = {
            "resid_post.0": [tokens.float()[:, None].repeat(1, 4)], "document_ids": [ids], "positions": [ids * 0],
            "token_ids": [tokens],
        }  # fmt: skip
        entry = {
            "rows": {"resid_post.0": len(ids)}, "tokens": len(ids), "first_document": first,
            "last_document": first + len(part) - 1, "inputs": "", "engine": "", "skipped": {},
        }  # fmt: skip
        own.add(tensors, entry)
    own.finish()


def die_at(call: int, after: bool) -> None:
    """SIGKILL at the n-th call that changes a file system, before or after it."""
    counts = Counter[str]()

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            counts["calls"] += 1
            if counts["calls"] == call and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            found = real(*args, **kwargs)
            if counts["calls"] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return wrapped

    for name in ("fsync", "replace", "link", "unlink"):
        setattr(os, name, dying(getattr(os, name)))
    Path.unlink = dying(Path.unlink)


def worker(folder: Path, numbers: Sequence[int], barrier: Any, call: int, after: bool) -> None:
    torch.set_num_threads(1)
    if call:
        die_at(call, after)
    plan = read_plan(folder)
    barrier.wait(60)
    for number in numbers:
        attempt(folder, plan.units[number])
    settle(folder)
    os._exit(0)


def run_workers(folder: Path, workers: Sequence[tuple[Sequence[int], int, bool]]) -> None:
    barrier = FORK.Barrier(len(workers))
    processes = [FORK.Process(target=worker, args=(folder, *one[:1], barrier, *one[1:])) for one in workers]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        process.close()


def assert_exactly_once(folder: Path, documents: list[list[int]]) -> None:
    found = open_harvest(folder)
    assert found.manifest["complete"]
    ids, tokens = found.document_ids(), found.token_ids()
    assert ids.tolist() == [number for number, document in enumerate(documents) for _ in document]
    assert tokens.tolist() == [token for document in documents for token in document]
    assert (found["resid_post.0"][:][:, 0] == tokens).all()
    found.verify()
    named = {shard.path.name for shard in found.shards}
    assert {path.name for path in folder.iterdir()} == named | {
        "manifest.json",
        "plan.json",
        "documents.jsonl",
        "units",
    }
    assert {path.name for path in (folder / "units").iterdir()} == {
        f"{i:06}.json" for i in range(len(read_plan(folder).units))
    }


KILLED = st.tuples(st.integers(0, 40), st.booleans())


@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_each_document_is_there_once_whenever_workers_are_killed(examples: int):
    """Several workers take all units at once, in orders of their own, and die at some call; the next run has no stray file."""

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(KILLED, min_size=1, max_size=3), st.integers(0, 2**32))
    def check(kills: list[tuple[int, bool]], seed: int) -> None:
        rng = random.Random(seed)
        documents = [[rng.randrange(50) for _ in range(rng.randrange(1, 6))] for _ in range(rng.randrange(1, 9))]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "out"
            plan = make_plan(folder, IDENTITY, DESCRIPTION, documents, None, rng.randrange(1, 4))
            numbers = range(len(plan.units))
            run_workers(folder, [(rng.sample(numbers, len(numbers)), *kill) for kill in kills])
            run_workers(folder, [(list(numbers), 0, False)])
            assert_exactly_once(folder, documents)

    check()


def test_of_two_attempts_at_one_unit_behind_a_barrier_one_counts(tmp_path: Path):
    documents = [[1, 2], [3]]
    for repeat in range(3):
        folder = tmp_path / f"{repeat}"
        make_plan(folder, IDENTITY, DESCRIPTION, documents, None, 2)
        run_workers(folder, [([0], 0, False)] * 2)
        assert_exactly_once(folder, documents)


def test_files_of_a_unit_that_another_one_still_computes_are_left(tmp_path: Path):
    plan = make_plan(tmp_path / "out", IDENTITY, DESCRIPTION, [[1], [2]], None, 1)
    folder = tmp_path / "out"
    running = folder / "unit-000001-000-00000000.safetensors"
    running.write_bytes(b"half")
    (folder / "unit-000000-000-00000000.safetensors").write_bytes(b"lost")
    attempt(folder, plan.units[0])
    assert settle(folder) is False and running.exists()
    assert not (folder / "unit-000000-000-00000000.safetensors").exists()
    attempt(folder, plan.units[1])
    assert settle(folder) is True
    assert_exactly_once(folder, [[1], [2]])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_fails_costs_the_attempt_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    documents = [[1, 2], [3], [4, 5]]
    folder = tmp_path / "out"
    plan = make_plan(folder, IDENTITY, DESCRIPTION, documents, None, 2)
    for name in ("fsync", "link", "replace"):
        with monkeypatch.context() as patch:

            def fail(*args: Any, **kwargs: Any) -> None:
                raise OSError(code, os.strerror(code))

            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match=os.strerror(code)):
                attempt(folder, plan.units[0])
        assert done_units(folder) == set()
    for unit in plan.units:
        attempt(folder, unit)
    settle(folder)
    assert_exactly_once(folder, documents)


DISK = """
import errno, subprocess, sys
from pathlib import Path
from test_units import *

disk = Path(sys.argv[1])
remount = lambda how: subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
documents = [[number] * 3000 for number in range(4)]
folder = disk / "out"
plan = make_plan(folder, IDENTITY, DESCRIPTION, documents, None, 1)
codes = []
for how in ("size=256k", "size=8m,ro", "size=8m,rw"):
    remount(how)
    for unit in plan.units:
        before = sorted(folder.iterdir())
        try:
            attempt(folder, unit, 1)
        except OSError as error:
            codes.append(errno.errorcode[error.errno])
            assert sorted(folder.iterdir()) == before and len(done_units(folder)) == 1
settle(folder)
assert codes == ["ENOSPC"] * 3 + ["EROFS"] * 3, codes
assert_exactly_once(folder, documents)
print("whole")
"""


@pytest.mark.slow  # above, calls fail as such a disk's do
def test_a_disk_that_is_full_or_read_only_costs_attempts_only(tmp_path: Path):
    """A small tmpfs in a name space of its own: the first of four units fits."""
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "mount", "-t", "tmpfs", "t", tmp_path]).returncode:
        pytest.skip("this machine lets no user mount a tmpfs in a name space of its own")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [*alone, sys.executable, "-c", DISK, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "whole\n", done.stderr


# -- plans ----------------------------------------------------------------------------------------


def test_a_plan_is_written_once_and_another_one_is_refused(tmp_path: Path):
    documents = corpus(20, seed=3)
    out = tmp_path / "out"
    plan = make_plan(out, IDENTITY, DESCRIPTION, documents, None, 6)
    assert [unit.portion.documents for unit in plan.units] == [6, 6, 6, 2] and plan.documents == 20
    assert make_plan(out, IDENTITY, DESCRIPTION, iter(documents), None, 6) == plan
    for other, word in ((documents[:-1], "other documents"), ([[1], *documents[1:]], "other documents")):
        with pytest.raises(ValueError, match=word):
            make_plan(out, IDENTITY, DESCRIPTION, other, None, 6)
    with pytest.raises(ValueError, match="unit_documents"):
        make_plan(out, IDENTITY, DESCRIPTION, documents, None, 5)
    with pytest.raises(ValueError, match="model: model, and now other"):
        make_plan(out, Identity("other", *list(vars(IDENTITY).values())[1:]), DESCRIPTION, documents, None, 6)
    assert {path.name for path in out.iterdir()} == {"plan.json", "documents.jsonl", "units"}


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        make_plan(tmp_path, IDENTITY, DESCRIPTION, [[1]], None, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def files_of_documents(folder: Path, documents: list[Any], kind: str) -> list[Path]:
    """The documents in two files."""
    cut, paths = len(documents) // 3, []
    for number, part in enumerate((documents[:cut], documents[cut:])):
        path = folder / f"part-{number}.{kind}"
        if kind == "jsonl":
            path.write_text("\n\n".join(json.dumps({"meta": 1, "input_ids": one}) for one in part) + "\n")
        else:
            pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
            pq.write_table(pa.table({"meta": [1] * len(part), "input_ids": part}), path, row_group_size=4)
        paths.append(path)
    return paths


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("per_unit", [1, 3, 5, 100])
def test_files_are_read_where_their_units_are_computed(tmp_path: Path, kind: str, per_unit: int):
    documents = corpus(23, seed=1)
    paths = files_of_documents(tmp_path, documents, kind)
    plan = make_plan(tmp_path / "out", IDENTITY, DESCRIPTION, paths, None, per_unit)
    found = [one for unit in plan.units for one in read_portion(plan.sources[unit.portion.file], unit.portion, None)]
    assert found == documents and plan.documents == len(documents)
    assert [unit.first for unit in plan.units] == [
        sum(u.portion.documents for u in plan.units[:i]) for i in range(len(plan.units))
    ]
    with pytest.raises(ValueError, match="no column text"):
        read_portion(plan.sources[0], plan.units[0].portion, "text")


@pytest.mark.parametrize("line", ["[" * 200_000 + "]" * 200_000, "\udc80", '{"text": "a', "[" + "1" * 5000 + "]"])
def test_a_line_that_is_not_json_is_named(tmp_path: Path, line: str):
    path = tmp_path / "part.jsonl"
    path.write_text(f'"a text"\n\n{line}\n', errors="surrogateescape")
    source = source_of(path)
    with pytest.raises(ValueError, match=r"part\.jsonl: the line at byte 10 is not JSON"):
        read_portion(source, next(portions_of(0, source, 9)), None)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_input_that_changed_is_refused(tmp_path: Path, kind: str):
    paths = files_of_documents(tmp_path, corpus(12, seed=2), kind)
    make_plan(tmp_path / "out", IDENTITY, DESCRIPTION, paths, None, 4)
    files_of_documents(tmp_path, corpus(12, seed=4), kind)
    with pytest.raises(ValueError, match="another harvest"):
        make_plan(tmp_path / "out", IDENTITY, DESCRIPTION, paths, None, 4)
    with pytest.raises(ValueError, match="missing, or was changed"):
        read_plan(tmp_path / "out").check_sources()


def test_junk_is_no_plan(tmp_path: Path):
    for junk in (b"", b"{}", b'{"format": "other"}', b"[1]", b"\xff"):
        with pytest.raises(ValueError, match=r"plan\.json is not the plan"):
            HarvestPlan.of_json(junk)


# -- with a model ---------------------------------------------------------------------------------


def asked(lm: LM, **more: Any) -> AskedHarvest:
    how: dict[str, Any] = {"shard_bytes": 20_000, "max_length": 32, "too_long": "truncate", "on_error": "raise", **more}
    return asked_of(lm, ["resid_post.*"], None, **how)  # pyright: ignore[reportArgumentType]


def run_all(lm: LM, folder: Path, what: AskedHarvest, skip: bool = False) -> None:
    plan = read_plan(folder)
    for unit in plan.units:
        assert run_unit(lm, folder, plan, unit, what.captures, what.interventions, skip)  # pyright: ignore[reportArgumentType]
    assert settle(folder)


def test_units_have_the_documents_rows_and_index_of_a_harvest_without(lm_of: Any, tmp_path: Path):
    lm, documents = lm_of("llama"), corpus(60, seed=5)
    options: dict[str, Any] = {
        "capture": ["resid_post.*"],
        "shard_bytes": 20_000,
        "max_length": 32,
        "too_long": "truncate",
    }
    lm.harvest(documents, out=tmp_path / "local", progress=False, **options)
    what = asked(lm)
    make_plan(tmp_path / "out", what.identity, what.description, documents, None, 7)
    run_all(lm, tmp_path / "out", what)
    one, other = open_harvest(tmp_path / "local"), open_harvest(tmp_path / "out")
    assert torch.equal(one.document_ids(), other.document_ids()) and torch.equal(one.positions(), other.positions())
    assert torch.equal(one.token_ids(), other.token_ids()) and one.sites == other.sites
    for site in one.sites:
        states = one[site][:]
        assert ((other[site][:] - states).norm(dim=-1) <= 1e-5 * states.norm(dim=-1)).all()
    assert one.manifest["identity"] == other.manifest["identity"]
    with pytest.raises(ValueError, match="call with cluster="):
        lm.harvest(documents, out=tmp_path / "out", progress=False, **options)
    with pytest.raises(FileExistsError, match="call without cluster="):
        make_plan(tmp_path / "local", what.identity, what.description, documents, None, 7)


def test_skipped_documents_are_named_also_where_a_whole_unit_is_skipped(lm_of: Any, tmp_path: Path):
    lm = lm_of("llama")
    documents: list[Any] = corpus(12, longest=6, seed=6)
    for number in (2, 3, 4, 11):
        documents[number] = [10**6]  # no token of the model
    what = asked(lm, on_error="skip")
    make_plan(tmp_path / "out", what.identity, what.description, documents, None, 3)
    documents_kept = [number for number in range(12) if number not in (2, 3, 4, 11)]
    run_all(lm, tmp_path / "out", what, skip=True)
    found = open_harvest(tmp_path / "out")
    assert sorted(set(found.document_ids().tolist())) == documents_kept
    assert {2, 3, 4} <= set(found.skipped)
    one_unit = make_plan(tmp_path / "all", what.identity, what.description, [[10**6]] * 3, None, 3)
    assert run_unit(lm, tmp_path / "all", one_unit, one_unit.units[0], what.captures, [], True)
    assert settle(tmp_path / "all") and done_units(tmp_path / "all") == {0}


def test_a_document_that_fails_ends_the_unit_and_leaves_nothing(lm_of: Any, tmp_path: Path):
    lm = lm_of("llama")
    what = asked(lm, shard_bytes=1)
    plan = make_plan(tmp_path / "out", what.identity, what.description, [[1, 2], [3], [10**6]], None, 3)
    with pytest.raises(ValueError, match="document 2"):
        run_unit(lm, tmp_path / "out", plan, plan.units[0], what.captures, [], False)
    assert done_units(tmp_path / "out") == set()
    assert not list((tmp_path / "out").glob("unit-*"))


def test_generation_over_a_corpus_has_each_documents_completions_once(lm_of: Any, tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    lm, documents = lm_of("llama"), corpus(11, longest=8, seed=8)
    params = SamplingParams(temperature=1.0, max_tokens=4, n=2, seed=3)
    ops = [Scale("resid_post.0", 0.5)]
    how: dict[str, Any] = {"out": tmp_path / "out", "interventions": ops, "unit_documents": 4, "progress": False}
    found = lm.generate_corpus(iter(documents), params, **how)
    assert found.documents == 11 and found.rows == {"outputs": 22} and found.new_documents == 11
    names = sorted(path.name for path in (tmp_path / "out").glob("*.parquet"))
    rows = [row for name in names for row in parquet.read_table(tmp_path / "out" / name).to_pylist()]
    assert [(row["document"], row["sample"]) for row in rows] == [(i, j) for i in range(11) for j in range(2)]
    for number, document in enumerate(documents):
        (wanted,) = lm.generate([document], dataclasses.replace(params, seed=3 + number), interventions=ops)
        for row, one in zip(rows[2 * number :], wanted.outputs, strict=False):
            assert row["token_ids"] == one.token_ids and row["finish_reason"] == one.finish_reason
    (tmp_path / "out" / "units" / "000001.json").unlink()  # as if its worker had been killed before
    again = lm.generate_corpus(documents, params, **how)
    assert again.new_documents == 4
    assert len(list((tmp_path / "out").glob("*.parquet"))) == len(names), "the files of the lost attempt are gone"
    with pytest.raises(ValueError, match="another harvest"):
        lm.generate_corpus(documents, dataclasses.replace(params, max_tokens=5), **how)
    with pytest.raises(ValueError, match="pymllm-interp outputs 1"):
        open_harvest(tmp_path / "out")
    with pytest.raises(ValueError, match="workers=0"):
        lm.generate_corpus(documents, params, **how, workers=0)


# -- the queue ------------------------------------------------------------------------------------


def test_units_that_others_have_done_are_passed_over():
    queue = UnitQueue([0, 1, 2, 3])
    assert [queue.next({0, 2}.__contains__, 0.0) for _ in range(3)] == [1, 3, None]


def test_a_unit_that_takes_long_is_given_out_once_more_and_not_again():
    queue = UnitQueue([7])
    task = UnitTask(queue.next(lambda unit: False, 0.0) or 0, "a", 100.0)
    queue.running.append(task)
    assert queue.next(lambda unit: False, 100.0 + SLOW_SECONDS / 2) is None
    assert queue.next(lambda unit: False, 101.0 + SLOW_SECONDS) == 7
    queue.running.append(UnitTask(7, "b", 120.0))
    assert queue.next(lambda unit: False, 1000.0) is None


def test_a_unit_that_workers_are_lost_with_ends_the_harvest_in_the_end():
    queue = UnitQueue([4])
    for _ in range(MOST_LOSSES - 1):
        assert queue.next(lambda unit: False, 0.0) == 4
        queue.lost(4, "killed")
    with pytest.raises(HarvestError, match="unit 4"):
        queue.lost(4, "killed")
