"""Products of 33 to 256 rows: which algorithm is taken, that it stays, and that its products are right."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest
import torch

from pymllm_interp.kernels.products import fastest, library
from pymllm_interp.utils.files.cache_folder import cache_entries

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NAME = "4096x4096, 64 rows, bfloat16"


def algorithm(first: int, workspace: int = 0) -> library.Algorithm:
    return library.Algorithm((ctypes.c_uint64 * 8)(first, *[0] * 6, (1 << 64) - 1), workspace)


def test_only_times_that_are_shorter_at_both_ends_and_save_2_percent_are_taken() -> None:
    plain = {33: 10.0, 64: 20.0}
    assert fastest.best_of(plain, []) is None
    assert fastest.best_of(plain, [{33: 10.0, 64: 20.0}, {33: 9.9, 64: 19.8}]) is None  # 0 % and 1 %
    assert fastest.best_of(plain, [{33: 10.1, 64: 10.0}]) is None  # slower at one end
    assert fastest.best_of(plain, [{33: 10.0, 64: 19.0}, {33: 9.0, 64: 19.0}, {33: 10.1, 64: 1.0}]) == 1


def test_ranges_of_rows_follow_each_other() -> None:
    shapes = [fastest.Shape(0, 8, 8, most, torch.bfloat16) for most in fastest.RANGES]
    assert shapes[0].fewest == fastest.FEWEST and shapes[-1].most == fastest.MOST
    assert [one.most + 1 for one in shapes[:-1]] == [one.fewest for one in shapes[1:]]
    assert len({one.name for one in shapes}) == len(shapes)


def test_decisions_are_kept_and_the_first_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "new" / "products-0123456789abcdef.json"
    assert fastest.read(path) == {}
    found = fastest.write(path, NAME, algorithm(7, 4096))
    assert found is not None and (list(found.code), found.workspace) == ([7, *[0] * 6, (1 << 64) - 1], 4096)
    assert fastest.write(path, "other", None) is None
    again = fastest.write(path, NAME, algorithm(8))  # of another process, which measured at the same time
    assert again is not None and (again.code[0], again.workspace) == (7, 4096)
    assert fastest.read(path).keys() == {NAME, "other"} and fastest.read(path)["other"] is None
    assert [(one.path.name, one.kind) for one in cache_entries(path.parent)] == [(path.name, "measured products")]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": 1, "b": [1, 2], "c": "x"}', json.dumps({"a": [0] * 8 + [-1], "b": [0] * 8 + [1.5], "c": [0] * 10})],
)  # fmt: skip
def test_a_damaged_file_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "products-0123456789abcdef.json"
    path.write_text(text)
    assert fastest.read(path) == {}
    assert fastest.write(path, NAME, algorithm(3)) is not None
    assert json.loads(path.read_text()) == {NAME: [3, *[0] * 6, (1 << 64) - 1, 0]}


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = fastest.write(tmp_path / "file" / "products-0123456789abcdef.json", NAME, algorithm(3))
    assert found is not None and found.code[0] == 3


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("size", [(4096, 4096), (6144, 4096), (4096, 14336), (512, 520)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_right_for_all_numbers_of_rows(
    size: tuple[int, int], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYMLLM_INTERP_CACHE", str(tmp_path))
    for table in (fastest._chosen, fastest._kept):
        table.cache_clear() if callable(table) else table.clear()
    n, k = size
    weight = torch.randn(n, k, device="cuda").to(dtype) * k**-0.5
    x = torch.randn(300, k, device="cuda").to(dtype)
    wanted = x.float() @ weight.float().T
    with torch.no_grad():
        for rows in (2, 32, 33, 40, 64, 65, 97, 130, 191, 256, 257):
            found = fastest.product(x[:rows], weight)
            assert found.shape == (rows, n) and found.dtype is dtype
            assert fastest.same(found, wanted[:rows]), rows
        first = fastest.product(x[:200], weight)
        graph, kept = torch.cuda.CUDAGraph(), fastest._chosen.copy()
        with torch.cuda.graph(graph):
            replayed = fastest.product(x[:200], weight)
        graph.replay()
        assert torch.equal(replayed, first)  # the same algorithm, eager and captured
        fastest._chosen.clear()
        fastest._kept.cache_clear()
        assert torch.equal(fastest.product(x[:200], weight), first)  # as the next process has it, by the file
    assert len(kept) == (0 if n * k < fastest.SMALLEST else len(fastest.RANGES))
    assert len(list(tmp_path.glob("products-*.json"))) == bool(kept)


@pytest.mark.gpu
@GPU
def test_a_captures_first_product_is_torchs() -> None:
    shape = fastest.Shape(torch.cuda.current_device(), 4104, 4096, 64, torch.bfloat16)
    weight, x = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in (4104, 50))
    torch.mm(x, weight.t())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = fastest.product(x, weight)
    graph.replay()
    assert torch.equal(found, torch.mm(x, weight.t())) and fastest._chosen[shape] is None
