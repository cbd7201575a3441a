"""Mutated files of strangers: each is read, or refused with an error that a server answers as 400. Time and memory are bounded.

pytest tests/fuzz/test_fuzz_files.py -m slow      # 5,000 files of each kind
"""

from __future__ import annotations

import json
import random
import resource
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_adapters import change_config, write_adapter
from helpers_gguf import announcing, overlapping
from safetensors.torch import save_file

from pymllm_interp import LM, SAE, SamplingParams
from pymllm_interp.captures import JacobianLens, TunedLens
from pymllm_interp.hooks.saes.formats import read_tensors
from pymllm_interp.hooks.vectors.files import load_layer_vectors, origin_of, save_layer_vectors
from pymllm_interp.models.adapters.peft_config import AdapterError
from pymllm_interp.utils.files.checked_files import check_gguf

REFUSALS = (ValueError, TypeError, KeyError)
"""What `api_error` answers as 400."""
SECONDS, MEMORY = 20, 3 << 30
"""For one file, and beside what the process has."""
HUGE = [0, 1, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
WRONG: list[Any] = [
    None, True, -1, 0, 10**18, 10**400, 1e308, float("nan"), float("inf"), "", "x" * 5000, [], [[1]], [1] * 5000, {},
    {"a": {"b": [{}]}}, "(a+)+b", "[", ["(a*)*c"], [None],
]  # fmt: skip


@contextmanager
def limits() -> Iterator[None]:
    """A time and a memory limit of this process for what runs inside."""

    def late(*_: object) -> None:
        raise AssertionError(f"more than {SECONDS} s")

    before, kept = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, kept)
        resource.setrlimit(resource.RLIMIT_AS, before)


def mutated(draw: random.Random, data: bytes) -> bytes:
    """Bytes with one to four faults: flipped, cut, inserted, repeated, and numbers that announce too much."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found)) if found else 0
        match draw.randrange(6):
            case 0:
                found[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del found[at:]
            case 2:
                found[at:at] = draw.randbytes(draw.choice([1, 8, 64]))
            case 3:
                found[at : at + 8] = struct.pack("<Q", draw.choice(HUGE))
            case 4:
                found[at : at + 4] = struct.pack("<I", draw.choice(HUGE) % 2**32)
            case 5:
                found[at:at] = found[at : at + draw.choice([8, 100])] * draw.choice([1, 50])
    return bytes(found)


def mutated_json(draw: random.Random, data: bytes) -> bytes:
    """A JSON object with wrong values in some fields, or broken text."""
    if draw.random() < 0.2:
        return mutated(draw, data)
    if draw.random() < 0.05:
        return b"[" * 100_000
    found = json.loads(data)
    for name in draw.sample(sorted(found), min(len(found), draw.randint(1, 3))):
        found[name] = draw.choice(WRONG)
    return json.dumps(found).encode()


class Kind:
    """A kind of file: how a right one is written, and how it is read."""

    def __init__(self, write: Callable[[Path], None], read: Callable[[Path], object], *files: str) -> None:
        self.write, self.read, self.files = write, read, files


def tensors(width: int = 24, d_sae: int = 37) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "W_enc": torch.randn(width, d_sae), "b_enc": torch.randn(d_sae), "W_dec": torch.randn(d_sae, width),
        "b_dec": torch.randn(width), "threshold": torch.rand(d_sae),
    }  # fmt: skip


def write_sae_lens(folder: Path) -> None:
    save_file({name: x for name, x in tensors().items() if name != "threshold"}, folder / "sae_weights.safetensors")
    config = {
        "architecture": "standard", "hook_name": "blocks.1.hook_resid_post", "activation_fn_str": "relu", "d_in": 24, "d_sae": 37,
        "normalize_activations": "expected_average_only_in", "norm_scaling_factor": 1.5, "apply_b_dec_to_input": True,
    }  # fmt: skip
    (folder / "cfg.json").write_text(json.dumps(config))


def write_npz(folder: Path) -> None:
    np.savez_compressed(folder / "params.npz", **{name: x.numpy() for name, x in tensors().items()})


def write_tuned_lens(folder: Path) -> None:
    torch.save({"0.weight": torch.eye(8), "0.bias": torch.zeros(8)}, folder / "params.pt")
    (folder / "config.json").write_text(json.dumps({"lens_type": "linear_tuned_lens", "d_model": 8}))


def vectors(suffix: str) -> Kind:
    def write(folder: Path) -> None:
        save_layer_vectors(folder / f"v{suffix}", {1: torch.ones(8), 2: torch.arange(8.0)}, "llama", "f" * 64)

    def read(folder: Path) -> object:
        return load_layer_vectors(folder / f"v{suffix}"), origin_of(folder / f"v{suffix}")

    return Kind(write, read, f"v{suffix}")


def write_torch_vectors(folder: Path) -> None:
    torch.save({1: torch.ones(8), 2: torch.arange(8.0)}, folder / "v.pt")


KINDS = {
    "gguf": vectors(".gguf"),
    "safetensors": vectors(".safetensors"),
    "pt": Kind(write_torch_vectors, lambda folder: load_layer_vectors(folder / "v.pt"), "v.pt"),
    "sae-lens": Kind(write_sae_lens, SAE.load, "sae_weights.safetensors", "cfg.json"),
    "sae-npz": Kind(write_npz, lambda folder: SAE.load(folder, site="resid_post.1"), "params.npz"),
    "tuned-lens": Kind(write_tuned_lens, TunedLens.load, "params.pt", "config.json"),
    "jacobian-lens": Kind(
        lambda folder: torch.save({"J": {0: torch.eye(8)}, "d_model": 8}, folder / "j.pt"),
        lambda folder: JacobianLens.load(folder / "j.pt"),
        "j.pt",
    ),
}


def run(kind: Kind, folder: Path, count: int, seed: int) -> tuple[int, int]:
    """(files that were read, files that were refused)."""
    folder.mkdir(exist_ok=True)
    kind.write(folder)
    kind.read(folder)  # a right file is read
    right = {name: (folder / name).read_bytes() for name in kind.files}
    draw, read, refused = random.Random(seed), 0, 0
    for number in range(count):
        for name, data in right.items():
            (folder / name).write_bytes(data)
        name = draw.choice(kind.files)
        changed = (mutated_json if name.endswith(".json") else mutated)(draw, right[name])
        (folder / name).write_bytes(changed)
        try:
            with limits():
                kind.read(folder)
            read += 1
        except REFUSALS:
            refused += 1
        except BaseException as error:
            kept = folder / f"failed-{number}"
            kept.write_bytes(changed)
            raise AssertionError(f"file {number} of {name} ({kept}): {type(error).__name__}: {error}") from error
    return read, refused


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    _, refused = run(KINDS[kind], tmp_path / kind, 100, seed=1)
    assert refused > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_mutated_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    run(KINDS[kind], tmp_path / kind, 5000, seed=2)


def adapter_kind(lm: LM, model: Any) -> Kind:
    def read(folder: Path) -> None:
        lm.adapters.load("fuzzed", folder)
        lm.adapters.unload("fuzzed")

    return Kind(
        lambda folder: write_adapter(folder, model, targets=["q_proj"]) and None,
        read,
        "adapter_config.json",
        "adapter_model.safetensors",
    )


@pytest.fixture(scope="module")
def adapting(model_folder: Callable[[str], Path]) -> Iterator[LM]:
    with LM(model_folder("llama"), dtype="float32", device="cpu", kv_cache_tokens=512, max_lora_rank=16) as lm:
        yield lm


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_adapters_are_loaded_or_refused_and_the_engine_serves(count, adapting, oracle, tmp_path) -> None:
    expected = adapting.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))[0].token_ids
    _, refused = run(adapter_kind(adapting, oracle("llama")), tmp_path / "adapter", count, seed=count)
    assert refused > count // 10
    assert adapting.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))[0].token_ids == expected


# -- single cases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [0, 4, 8, 9, 12])
@pytest.mark.parametrize("items", [2**63, 2**64 - 1, 2**40, 10**6])
def test_an_array_that_announces_more_than_the_file_has_is_refused_at_once(items, kind, tmp_path) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(announcing(items, kind))
    with limits(), pytest.raises(ValueError, match="truncated or corrupt"):
        load_layer_vectors(path)
    with limits(), pytest.raises(ValueError, match="truncated or corrupt"):
        check_gguf(path)


def test_a_vector_file_of_a_million_small_things_is_refused(tmp_path) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(announcing(10**6, 0) + bytes(10**6))
    check_gguf(path)  # a model's tokenizer may have as many
    with limits(), pytest.raises(ValueError, match="truncated or corrupt"):
        load_layer_vectors(path)


def test_tensors_of_a_vector_file_that_share_bytes_are_refused(tmp_path) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(overlapping(1000, 1 << 20))  # 6 MiB of memory for each, from a file of 1.1 MB
    with limits(), pytest.raises(ValueError, match="share bytes"):
        load_layer_vectors(path)
    path.write_bytes(overlapping(1, 64))
    assert set(load_layer_vectors(path)) == {1}


def test_an_archive_of_many_entries_is_refused_at_once(tmp_path) -> None:
    """numpy's time for it is quadratic: 46 s for 100,000 of them, in a file of 13 MB."""
    path = tmp_path / "params.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(8193):
            archive.writestr(f"{number}.npy", b"")
    with limits(), pytest.raises(ValueError, match="has 8193 entries; at most 8192"):
        read_tensors(path)


def test_torch_files_whose_tensors_repeat_bytes_are_refused(tmp_path) -> None:
    row = torch.zeros(100_000)
    repeated: list[Any] = [row]
    for _ in range(6):
        repeated = [repeated] * 10
    for content in (
        torch.zeros(1).expand(2**31),
        dict.fromkeys(range(2000), row),
        {"v": [row] * 2000},
        {"v": repeated},
    ):
        torch.save(content, tmp_path / "v.pt")
        with limits(), pytest.raises(ValueError, match="times its own size"):
            load_layer_vectors(tmp_path / "v.pt")
        with limits(), pytest.raises(ValueError, match="times its own size"):
            read_tensors(tmp_path / "v.pt")
    whole = torch.arange(200_000.0)
    torch.save({1: whole[:100_000], 2: whole[100_000:]}, tmp_path / "v.pt")  # parts of one storage, each byte once
    assert torch.equal(load_layer_vectors(tmp_path / "v.pt")[2], whole[100_000:])


def test_a_whole_number_beyond_float64_is_refused(tmp_path) -> None:
    write_sae_lens(tmp_path)
    config = json.loads((tmp_path / "cfg.json").read_text())
    (tmp_path / "cfg.json").write_text(json.dumps(config | {"norm_scaling_factor": 10**400}))
    with pytest.raises(ValueError, match=r"cfg\.json is not JSON \(a whole number of 401 digits\)"):
        SAE.load(tmp_path)


def test_archives_that_grow_beyond_their_size_are_refused(tmp_path) -> None:
    np.savez_compressed(tmp_path / "params.npz", W_enc=np.zeros((1000, 40_000), np.float32))
    with limits(), pytest.raises(ValueError, match="times its own size"):
        SAE.load(tmp_path, site="resid_post.1")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_alpha": 1e308}, r"the alpha of lora_alpha is 1e\+308"),
        ({"lora_alpha": 10**400}, "a whole number of 401 digits"),
        ({"lora_alpha": 1e29}, "no finite numbers in torch.float16"),
        ({"layers_to_transform": [[1]]}, "layers_to_transform is .*: expected a whole number"),
        ({"target_modules": {"q_proj": 1}}, "target_modules is .*: expected a pattern"),
        ({"target_modules": [["q_proj"]]}, "target_modules is .*: expected a pattern"),
        ({"target_modules": r"(.|\w|\.)*[!?]"}, r"takes more than 1\.0 s"),
        ({"rank_pattern": [1]}, "rank_pattern is .*: expected an object"),
        ({"auto_mapping": "x"}, "auto_mapping is .*: expected an object"),
        ({"base_model_name_or_path": [1]}, "base_model_name_or_path is"),
        ({"target_modules": ["q_proj"] * 5000}, "target_modules is"),
    ],
)
def test_fields_of_an_adapter_that_are_of_another_kind_are_refused_by_name(fields, message, oracle, tmp_path) -> None:
    folder = write_adapter(tmp_path / "a", oracle("llama"), targets=["q_proj"])
    with LM(
        hf_config=oracle("llama").config, load_format="dummy", dtype="float16", device="cpu", kv_cache_tokens=256
    ) as lm:
        change_config(folder, **fields)
        with limits(), pytest.raises(AdapterError, match=message):
            lm.adapters.load("a", folder)


def test_a_nested_configuration_is_refused(oracle, adapting, tmp_path) -> None:
    folder = write_adapter(tmp_path / "a", oracle("llama"), targets=["q_proj"])
    for data in (b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b" " * (2 << 20)):
        (folder / "adapter_config.json").write_bytes(data)
        with limits(), pytest.raises(AdapterError, match=r"is not JSON|bytes, the most"):
            adapting.adapters.load("a", folder)
