"""Harvests as a reader finds them: names of sites, indexes, skipped documents, the manifest in words, and progress in lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_declared import vector
from helpers_harvest import ALONE, corpus

from pymllm_interp import Capture, Steer
from pymllm_interp.captures import Project, Site
from pymllm_interp.harvest import HarvestError, progress
from pymllm_interp.harvest.reader import open_harvest


def test_a_site_is_found_by_each_of_its_names(lm_of: Any, tmp_path: Path) -> None:
    lm = lm_of("llama")
    lm.harvest(corpus(8), capture=["resid_post.{1,2}", Capture("v.1", heads=[2, 0])], out=tmp_path, shard_bytes=20_000)
    harvest = open_harvest(tmp_path)
    assert list(harvest) == harvest.sites == ["resid_post.1", "resid_post.2", "v.1"] and len(harvest.shards) > 1
    whole = harvest["resid_post.1"][:]
    for name in (
        "blocks.1.hook_resid_post",
        "model.layers.1",
        "layers_output[1]",
        "resid_post.-2",
        Site("resid_post", 1),
    ):
        assert name in harvest and torch.equal(harvest[name][:], whole), name
        assert name in harvest.shards[0] and torch.equal(harvest.shards[0][name], harvest.shards[0]["resid_post.1"])
    assert harvest["v.1"].shape == (len(whole), 2, lm.model_spec.head_dim)
    for missing in ("resid_post.0", "resid_post.*", "nothing", 3):
        assert missing not in harvest
    with pytest.raises(KeyError, match=r"'blocks.0.hook_resid_post' was not captured; there is resid_post.1"):
        harvest["blocks.0.hook_resid_post"]


def test_index_arrays_are_tensors_and_top_k_has_its_indexes(lm_of: Any, tmp_path: Path) -> None:
    lm, documents, directions = lm_of("llama"), corpus(9), vector(72, 1, 6)
    project = Capture("resid_post.1", reduce=Project(directions, top_k=2))
    lm.harvest(documents, capture=[project, "resid_post.0"], out=tmp_path, shard_bytes=20_000)
    harvest = open_harvest(tmp_path)
    lengths = torch.tensor([len(ids) for ids in documents])
    assert torch.equal(harvest.document_ids(), torch.arange(len(documents)).repeat_interleave(lengths))
    assert torch.equal(harvest.token_ids(), torch.tensor([token for ids in documents for token in ids]))
    assert torch.equal(harvest.positions(), torch.cat([torch.arange(length) for length in lengths.tolist()]))
    indexes, values = harvest.indexes("blocks.1.hook_resid_post"), harvest["resid_post.1"][:]
    assert indexes.shape == values.shape == (int(lengths.sum()), 2) and indexes.dtype is torch.int64
    assert ((indexes >= 0) & (indexes < 6)).all() and (values[:, 0] >= values[:, 1]).all()
    lm.harvest(documents, capture=[Capture("resid_post.1", reduce=Project(directions))], out=tmp_path / "all")
    torch.testing.assert_close(
        open_harvest(tmp_path / "all")["resid_post.1"][:].gather(1, indexes), values, atol=1e-3, rtol=1e-3
    )
    with pytest.raises(KeyError, match=r"resid_post.0 has no indexes: it was captured without a reduction"):
        harvest.indexes("resid_post.0")


def test_the_manifest_says_what_was_harvested_in_words(lm_of: Any, tmp_path: Path) -> None:
    lm = lm_of("llama")
    capture = ["resid_post.{0,2}", Capture("mlp_out.1", positions=[-1], reduce="mean")]
    edits = [Steer("resid_post.0", torch.ones(72), scale=2.0)]
    lm.harvest(corpus(3), capture=capture, interventions=edits, out=tmp_path)
    words = json.loads((tmp_path / "manifest.json").read_text())["description"]
    assert words["sites"] == ["resid_post.0", "mlp_out.1", "resid_post.2"] == open_harvest(tmp_path).sites
    assert words["capture"] == ["Capture('resid_post.{0,2}')", "Capture('mlp_out.1', positions=(-1,), reduce='mean')"]
    (steer,) = words["interventions"]
    assert re.fullmatch(r"Steer\('resid_post.0', vector=\[72\] \w{8}, scale=2.0\)", steer)
    assert words["model"].startswith("llama, 3 layers, hidden_size 72, float32, fingerprint ")
    assert words["tokenizer"].startswith("fingerprint ")


def test_documents_that_fail_are_skipped_and_named(lm_of: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Empty, of unknown tokens, too short for a position, too long, and failing in the engine: the others are all there."""
    lm, documents = lm_of("llama", **ALONE), [[*ids, 1] for ids in corpus(14, longest=12)]
    bad: dict[int, tuple[Any, str]] = {
        0: ([], "document 0 is empty"),
        3: ([1, 99], "document 3 holds token id 99"),
        4: ([7], r"document 4: Capture('mlp_out.0'): positions [1] are beyond the prompt"),
        7: ([5] * 15, "document 7 has 15 tokens"),
        9: ([93] * 9, "document 9: RuntimeError('a kernel broke')"),
        13: (None, "document 13 is a NoneType"),
    }
    for number, (document, _) in bad.items():
        documents[number] = document  # pyright: ignore[reportArgumentType]
    kwargs: dict[str, Any] = {
        "capture": ["resid_post.0", Capture("mlp_out.0", positions=[1])], "out": tmp_path, "shard_bytes": 6_000,
        "max_length": 14, "on_error": "skip",
    }  # fmt: skip
    real = lm.runner.execute_model

    def failing(step: Any, *args: Any) -> Any:
        if any(new.token_ids == documents[9] for new in step.scheduled_new_reqs):
            raise RuntimeError("a kernel broke")
        return real(step, *args)

    monkeypatch.setattr(lm.runner, "execute_model", failing)
    result = lm.harvest(iter(documents), **kwargs)
    assert (result.documents, result.new_documents) == (8, 8) and result.skipped.keys() == bad.keys()
    for number, (_, message) in bad.items():
        assert result.skipped[number].startswith(message), result.skipped[number]
    harvest = open_harvest(tmp_path)
    assert len(harvest.shards) > 2 and set(harvest.skipped) == set(bad)
    kept = [number for number in range(14) if number not in bad]
    assert harvest.document_ids("resid_post.0").unique().tolist() == kept
    assert harvest.token_ids("resid_post.0").tolist() == [token for number in kept for token in documents[number]]
    again = lm.harvest(iter([*documents, [1, 2, 3]]), **kwargs)
    assert (again.documents, again.new_documents) == (9, 1) and again.skipped.keys() == bad.keys()
    assert open_harvest(tmp_path).manifest["complete"] and set(open_harvest(tmp_path).skipped) == set(bad)


def test_a_document_that_fails_in_one_of_its_parts_is_skipped_whole(lm_of: Any, tmp_path: Path) -> None:
    lm, capture = lm_of("llama", **ALONE), [Capture("resid_post.0", positions=[2])]
    documents = [[1] * 4, [2] * 5, [3] * 4]  # the second one's second part has one token
    result = lm.harvest(documents, capture=capture, out=tmp_path, max_length=4, too_long="split", on_error="skip")
    assert result.documents == 2 and list(result.skipped) == [1]
    assert open_harvest(tmp_path).document_ids().tolist() == [0, 2]


def test_skipped_documents_after_the_last_shard_are_tried_again(lm_of: Any, tmp_path: Path) -> None:
    lm, kwargs = lm_of("llama", **ALONE), {"capture": ["embed"], "out": tmp_path, "shard_bytes": 1, "on_error": "skip"}
    first = lm.harvest([[1], [2], [], [99]], **kwargs)
    assert (first.documents, list(first.skipped)) == (2, [2, 3]) and not open_harvest(tmp_path).skipped
    again = lm.harvest([[1], [2], [3], [99], [4]], **kwargs)
    assert (again.documents, again.new_documents, list(again.skipped)) == (4, 2, [3])
    assert open_harvest(tmp_path).document_ids().tolist() == [0, 1, 2, 4] and list(open_harvest(tmp_path).skipped) == [
        3
    ]


def test_an_engine_that_ends_skips_nothing(lm_of: Any, model_folder: Any, tmp_path: Path) -> None:
    from pymllm_interp import LM

    with LM(model_folder("llama"), dtype="float32", device="cpu", **ALONE) as lm:

        def documents() -> Any:
            for number in range(8):
                if number == 6:
                    lm.shutdown()
                yield [number] * 5

        with pytest.raises(HarvestError, match="was shut down"):
            lm.harvest(documents(), capture=["embed"], out=tmp_path, on_error="skip", shard_bytes=1)
    assert not open_harvest(tmp_path).skipped


def test_progress_is_lines_where_there_is_no_terminal(
    lm_of: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    lm, documents = lm_of("llama", **ALONE), corpus(6, longest=9)
    documents[2] = []
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    lm.harvest(documents, capture=["embed"], out=tmp_path / "all", on_error="skip")
    out, shown = capfd.readouterr()
    lines = shown.splitlines()
    tokens = f"{sum(map(len, documents)):,} tokens, "
    assert out == "" and lines[0].startswith("1 of 6 documents, ") and lines[0].endswith(" left")
    assert (
        lines[-1].startswith(f"6 of 6 documents, {tokens}")
        and " a second, " in lines[-1]
        and lines[-1].endswith("1 skipped")
    )
    lm.harvest(iter(documents[3:]), capture=["embed"], out=tmp_path / "unknown")
    assert capfd.readouterr().err.splitlines()[0].startswith("1 documents, ")
    lm.harvest(documents, capture=["embed"], out=tmp_path / "quiet", on_error="skip", progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_parquet_file_has_the_rows_of_all_shards(lm_of: Any, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    lm, documents = lm_of("llama", **ALONE), corpus(12)
    capture: list[Any] = ["resid_post.1", Capture("z.0", dtype="bfloat16")]
    lm.harvest(documents, capture=capture, out=tmp_path / "out", shard_bytes=20_000, progress=False)
    harvest = open_harvest(tmp_path / "out")
    harvest.to_parquet(tmp_path / "rows.parquet")
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert parquet.ParquetFile(tmp_path / "rows.parquet").num_row_groups == len(harvest.shards) > 1
    for name in ("document_ids", "positions", "token_ids"):
        assert table[name].to_pylist() == getattr(harvest, name)()[:].tolist()
    for site in harvest.sites:
        assert torch.equal(torch.tensor(table[site].to_pylist()), harvest[site][:].float().flatten(1))
    captures: list[Any] = ["embed", Capture("resid_post.0", positions=[0])]
    lm.harvest(documents, capture=captures, out=tmp_path / "two", progress=False)
    with pytest.raises(ValueError, match="different positions"):
        open_harvest(tmp_path / "two").to_parquet(tmp_path / "no.parquet")
    assert not (tmp_path / "no.parquet").exists()
