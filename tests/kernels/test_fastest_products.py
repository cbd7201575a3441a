"""Products of 33 to 256 rows: which algorithm is taken, that it stays, and that its products are right."""

from __future__ import annotations

import ctypes
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pymllm_interp.kernels.products import fastest, library
from pymllm_interp.layers.gemm import Gemm
from pymllm_interp.utils.files.cache_folder import cache_entries

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NAME = "4096x4096, 64 rows, bfloat16"


def algorithm(first: int, workspace: int = 0) -> library.Algorithm:
    return library.Algorithm((ctypes.c_uint64 * 8)(first, *[0] * 6, (1 << 64) - 1), workspace)


def test_times_that_save_1_percent_are_taken() -> None:
    assert fastest.best_of([[10.0]]) == 0
    assert fastest.best_of([[10.0, 9.95, 9.92]] * 3) == 0
    assert fastest.best_of([[10.0, 9.9, 9.7, 9.75]] * 3) == 2
    # The clock changes from turn to turn: ratios of a turn are compared, and one outlier counts for nothing.
    assert fastest.best_of([[10.0, 9.5], [20.0, 19.0], [10.0, 30.0], [5.0, 4.75], [8.0, 7.6]]) == 1
    assert fastest.best_of([[10.0, 10.1], [10.0, 1.0], [10.0, 10.1]]) == 0


def test_ranges_of_rows_have_names_of_their_own() -> None:
    shapes = [
        fastest.Shape(0, 8, 8, most, dtype) for most in fastest.RANGES for dtype in (torch.bfloat16, torch.float16)
    ]
    assert shapes[-1].most == fastest.MOST and len({one.name for one in shapes}) == len(shapes)


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


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError("cuBLASLt answered 7")])
def test_where_nothing_can_be_measured_torch_multiplies_and_nothing_is_kept(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for copies, or by a library that knows less: a pass does not fail for it."""

    def refuse(*_: object) -> None:
        raise error

    shape, weight = fastest.Shape(0, 8, 8, 64, torch.bfloat16), torch.zeros(8, 8)
    kept: dict[str, library.Algorithm | None] = {}
    monkeypatch.setattr(fastest, "_kept", lambda device: kept)
    monkeypatch.setattr(fastest, "_path", lambda device: tmp_path / "products.json")
    monkeypatch.setattr(fastest, "measured", refuse)
    assert fastest._kept_or_measured(shape, weight) is None and not kept and not list(tmp_path.iterdir())
    monkeypatch.setattr(fastest, "measured", lambda *_: algorithm(5))
    found = fastest._kept_or_measured(shape, weight)
    assert found is not None and found is kept[shape.name] and found.code[0] == 5
    assert fastest.read(tmp_path / "products.json").keys() == {shape.name}


def test_processes_that_write_at_once_keep_all_decisions(tmp_path: Path) -> None:
    """Replicas measure the same shapes at the same time."""
    path, threads = tmp_path / "products-0123456789abcdef.json", 8
    begin = Barrier(threads)

    def write(number: int) -> list[library.Algorithm | None]:
        begin.wait()
        return [
            fastest.write(path, name, algorithm(number)) for i in range(12) for name in (f"{number} {i}", f"all {i}")
        ]

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(write, range(threads)))
    kept = fastest.read(path)
    assert len(kept) == 12 * (threads + 1)
    for i, decisions in enumerate(zip(*(own[1::2] for own in found), strict=True)):
        holds = kept[f"all {i}"]
        assert holds is not None and {one.code[0] for one in decisions if one is not None} == {holds.code[0]}


def test_tensors_without_an_address_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may map a module over its rows; and fake tensors have shapes only."""
    monkeypatch.setattr(fastest, "SMALLEST", 1)
    monkeypatch.setattr(fastest, "_algorithm_for", lambda *_: pytest.fail("it asks for an algorithm"))
    weight, rows, seen = torch.ones(8, 16), torch.ones(3, 4, 16), list[bool]()

    def module(x: torch.Tensor) -> torch.Tensor:
        seen.append(fastest._fits(x, weight))
        return x @ weight.t()

    assert torch.equal(torch.vmap(module)(rows), module(rows))
    assert seen == [False, True]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fastest.product(torch.ones(40, 16), weight).shape == (40, 8)


def test_a_measurement_leaves_torchs_random_numbers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that seeds them gets the same noise whether or not its pass was the first on the machine."""
    weight, found = torch.randn(8, 16), [algorithm(1), algorithm(2)]

    def run(one: library.Algorithm, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
        torch.mm(x, weight.t(), out=out)
        return one.code[0] == 2

    monkeypatch.setattr(library, "run", run)
    monkeypatch.setattr(fastest, "microseconds", lambda call, weights: 9.0 if hasattr(call, "args") else 10.0)
    monkeypatch.setattr(fastest, "rotating", lambda weight: [weight])
    torch.manual_seed(3)
    wanted = torch.randn(4)
    torch.manual_seed(3)
    assert fastest._measured(fastest.Shape(-1, 8, 16, 48, torch.float32), weight, found) is found[1]
    assert torch.equal(torch.randn(4), wanted)
    with pytest.raises(RuntimeError, match="not finite"):  # such weights tell nothing: the next model's may be numbers
        fastest._measured(fastest.Shape(-1, 8, 16, 48, torch.float32), weight / 0, found)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYMLLM_INTERP_CACHE", str(tmp_path))
    fastest._chosen.clear()
    fastest._kept.cache_clear()
    return tmp_path


def test_another_driver_measures_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setattr(library, "version", lambda device: 1)
    paths = list[Path]()
    for version in ("570.1", "570.2", "570.1"):
        monkeypatch.setattr(fastest, "driver_version", lambda own=version: own)
        paths.append(fastest._path(0))
    assert paths[0] == paths[2] != paths[1]


@pytest.mark.gpu
@GPU
def test_the_driver_tells_its_version() -> None:
    assert re.fullmatch(r"\d+(\.\d+)+", fastest.driver_version())


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    ("n", "k", "dtype"), [(4096, 4096, torch.bfloat16), (2048, 4096, torch.float16), (512, 520, torch.bfloat16)]
)
def test_products_are_right_for_all_numbers_of_rows(n: int, k: int, dtype: torch.dtype, empty_cache: Path) -> None:
    weight = torch.randn(n, k, device="cuda").to(dtype) * k**-0.5
    gemm, x = Gemm([weight], weight, None), torch.randn(300, k, device="cuda").to(dtype)
    wanted, counts = x.float() @ weight.float().T, (2, 32, 33, 48, 65, 191, 256, 257)
    with torch.no_grad():
        for rows in counts:
            found = gemm(x[None, :rows])
            assert found.shape == (1, rows, n) and found.dtype is dtype
            assert fastest.same(found[0], wanted[:rows]), rows
        first, chosen = gemm(x[:191]), fastest._chosen.copy()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = gemm(x[:191])
        graph.replay()
        assert torch.equal(replayed, first)  # the same algorithm, eager and captured
        fastest._chosen.clear()
        fastest._kept.cache_clear()
        assert torch.equal(gemm(x[:191]), first)  # as the next process has it, by the file
    assert sorted(shape.most for shape in chosen) == ([] if n * k < fastest.SMALLEST else [48, 80, 192, 256])
    assert len(list(empty_cache.glob("products-*.json"))) == bool(chosen)


@pytest.mark.gpu
@GPU
def test_a_captures_first_product_is_torchs(empty_cache: Path) -> None:
    shape = fastest.Shape(torch.cuda.current_device(), 4104, 4096, 64, torch.bfloat16)
    weight, x = (torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for rows in (4104, 50))
    torch.mm(x, weight.t())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = fastest.product(x, weight)
    graph.replay()
    assert torch.equal(found, torch.mm(x, weight.t())) and fastest._chosen[shape] is None


@pytest.mark.gpu
@GPU
def test_a_choice_is_not_slower_than_torchs(empty_cache: Path) -> None:
    """By the clock, with room for its noise."""
    n, k, most = 4096, 14336, 128
    weight, x = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (n, most))
    chosen = fastest.measured(fastest.Shape(torch.cuda.current_device(), n, k, most, torch.bfloat16), weight)
    out, weights = torch.empty(most, n, device="cuda", dtype=torch.bfloat16), fastest.rotating(weight) * 4
    if chosen is not None:
        own, plain = (
            min(fastest.microseconds(call, weights) for _ in range(5))
            for call in (lambda one: library.run(chosen, x, one, out), lambda one: torch.mm(x, one.t(), out=out))
        )
        assert own < 1.02 * plain
