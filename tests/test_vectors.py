"""Vectors: tensors, files and names."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pymllm_interp.hooks.intervention import Steer
from pymllm_interp.hooks.vectors import VectorRegistry, load_layer_vectors, load_vector, save_layer_vectors

VECTORS = {1: torch.tensor([1.0, 2.0, 3.0]), 2: torch.tensor([4.0, 5.0, 6.0]), 11: torch.tensor([7.0, 8.0, 9.0])}


def equal(a: dict[int, torch.Tensor], b: dict[int, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[layer], b[layer]) for layer in a)


def published_control_vector(path: Path, architecture: str = "controlvector", first_layer: int = 1) -> Path:
    """A file written byte by byte from the GGUF specification, with what repeng's and llama.cpp's exporters put in theirs."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def padded(data: bytes) -> bytes:
        return data + b"\0" * (-len(data) % 32)

    string_type, uint32_type, float32_tensor = 8, 4, 0
    fields = (
        text("general.architecture") + struct.pack("<I", string_type) + text(architecture),
        text("controlvector.model_hint") + struct.pack("<I", string_type) + text("llama"),
        text("controlvector.layer_count") + struct.pack("<II", uint32_type, len(VECTORS)),
    )
    infos, data = b"", b""
    for layer, vector in zip([first_layer, 2, 11], VECTORS.values(), strict=True):
        infos += text(f"direction.{layer}") + struct.pack("<IQIQ", 1, len(vector), float32_tensor, len(data))
        data += padded(vector.numpy().tobytes())
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(VECTORS), len(fields))
    path.write_bytes(padded(header + b"".join(fields) + infos) + data)
    return path


def test_a_control_vector_as_repeng_and_llama_cpp_write_it(tmp_path):
    pytest.importorskip("gguf")
    assert equal(load_layer_vectors(published_control_vector(tmp_path / "v.gguf")), VECTORS)


def test_what_is_saved_as_gguf_has_the_published_layout(tmp_path):
    gguf = pytest.importorskip("gguf")
    save_layer_vectors(tmp_path / "v.gguf", VECTORS, model_hint="llama")
    assert equal(load_layer_vectors(tmp_path / "v.gguf"), VECTORS)
    ours, theirs = (gguf.GGUFReader(p) for p in (tmp_path / "v.gguf", published_control_vector(tmp_path / "p.gguf")))
    for reader in (ours, theirs):
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert fields == {
            "general.architecture": "controlvector",
            "controlvector.model_hint": "llama",
            "controlvector.layer_count": 3,
        }
        assert [(t.name, t.tensor_type.name, list(t.shape)) for t in reader.tensors] == [
            (f"direction.{layer}", "F32", [3]) for layer in VECTORS
        ]


def test_a_control_vector_in_half_precision_is_read(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "controlvector")
    writer.add_tensor("direction.5", np.array([0.5, -2.0], dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert equal(load_layer_vectors(tmp_path / "v.gguf"), {5: torch.tensor([0.5, -2.0])})


def test_gguf_files_that_are_no_control_vectors_are_refused(tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "v.gguf"
    with pytest.raises(ValueError, match=r"has the architecture 'llama'; a control vector has 'controlvector'"):
        load_layer_vectors(published_control_vector(path, architecture="llama"))
    with pytest.raises(ValueError, match=r"direction.0 does not exist"):
        load_layer_vectors(published_control_vector(path, first_layer=0))
    with pytest.raises(ValueError, match=r"direction.0 does not exist"):
        save_layer_vectors(path, {0: torch.ones(3)})
    whole = published_control_vector(path).read_bytes()
    for cut in (whole[:40], whole[:-90], b"no gguf at all" * 9):
        path.write_bytes(cut)
        with pytest.raises(ValueError, match="not a GGUF file, or it is truncated or corrupt"):
            load_layer_vectors(path)


@pytest.mark.parametrize("prefix", ["layer", "direction"])
def test_safetensors_by_layer(tmp_path, prefix):
    path = tmp_path / "v.safetensors"
    save_file({f"{prefix}.{layer}": vector.to(torch.bfloat16) for layer, vector in VECTORS.items()}, path)
    loaded = load_layer_vectors(path)
    assert equal(loaded, VECTORS) and all(vector.dtype == torch.float32 for vector in loaded.values())
    assert torch.equal(load_vector(path, f"{prefix}.2"), VECTORS[2])


def test_what_is_saved_as_safetensors_is_read_again(tmp_path):
    vectors = {10: [1, 2], 0: torch.tensor([3.0, 4.0], dtype=torch.float16), 9: np.array([5.0, 6.0])}
    save_layer_vectors(tmp_path / "v.safetensors", vectors)
    loaded = load_layer_vectors(tmp_path / "v.safetensors")
    assert equal(loaded, {0: torch.tensor([3.0, 4.0]), 9: torch.tensor([5.0, 6.0]), 10: torch.tensor([1.0, 2.0])})


def test_the_only_tensor_of_a_file_is_its_vector(tmp_path):
    save_file({"anything": VECTORS[1]}, tmp_path / "v.safetensors")
    assert torch.equal(load_vector(tmp_path / "v.safetensors"), VECTORS[1])
    torch.save(VECTORS[1], tmp_path / "v.pt")
    assert torch.equal(load_vector(tmp_path / "v.pt"), VECTORS[1])
    assert Steer("resid_post.3", load_vector(tmp_path / "v.pt")).vector.shape == (3,)


@pytest.mark.parametrize("name", [lambda i: i, lambda i: f"layer.{i}"])
def test_torch_files_by_layer(tmp_path, name):
    torch.save({name(layer): vector for layer, vector in VECTORS.items()}, tmp_path / "v.pth")
    assert equal(load_layer_vectors(tmp_path / "v.pth"), VECTORS)


class Trap:
    """What a pickle could run."""

    def __reduce__(self):
        return (open, ("trapped", "w"))


def test_a_torch_file_that_holds_code_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"layer.1": Trap()}, tmp_path / "v.pt")
    with pytest.raises(ValueError, match="does not hold tensors alone"):
        load_vector(tmp_path / "v.pt")
    assert not (tmp_path / "trapped").exists()


def written(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        (
            {"layer.1": torch.ones(3), "bias": torch.ones(3)},
            r"'bias' is not of a layer; expected layer.<i> or direction.<i>",
        ),
        ({"layer.1": torch.ones(3), "direction.1": torch.ones(3)}, r"two vectors for layer 1"),
        ({"layer.1": torch.ones(3), "layer.2": torch.ones(4)}, r"different widths, \[3, 4\]"),
        ({"layer.1": torch.ones(3, 2)}, r"v.safetensors, layer.1: the shape is \[3, 2\]"),
        ({"layer.1": torch.tensor([1.0, torch.nan])}, r"layer.1: it holds NaN"),
        ({"layer.1": torch.tensor([1, 2])}, r"dtype torch.int64 cannot be converted"),
        ({}, r"holds no vectors"),
    ],
)
def test_a_file_of_layers_that_cannot_be_one_is_refused(tmp_path, tensors, error):
    with pytest.raises(ValueError, match=error):
        load_layer_vectors(written(tmp_path / "v.safetensors", tensors))


def test_which_vector_must_be_clear(tmp_path):
    path = written(tmp_path / "v.safetensors", {f"layer.{layer}": vector for layer, vector in VECTORS.items()})
    with pytest.raises(ValueError, match=r"holds 3 tensors \(layer.1, layer.11, layer.2\): give the name of one"):
        load_vector(path)
    with pytest.raises(ValueError, match=r"no tensor 'layer.3'; did you mean 'layer.*'"):
        load_vector(path, "layer.3")


def test_files_that_cannot_be_read_say_why(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_vector(tmp_path / "none.safetensors")
    for name, error in {
        "v.npy": "are read from .safetensors, .gguf, .pt, .pth files",
        "v.safetensors": "not a safetensors file",
    }.items():
        (tmp_path / name).write_bytes(b"something else")
        with pytest.raises(ValueError, match=error):
            load_vector(tmp_path / name)
    (tmp_path / "v.pt").write_bytes(b"something else")
    with pytest.raises(ValueError, match="does not hold tensors alone, or it is damaged"):
        load_vector(tmp_path / "v.pt")
    with pytest.raises(ValueError, match=r"are saved as \.safetensors or \.gguf"):
        save_layer_vectors(tmp_path / "v.pt", VECTORS)
    with pytest.raises(ValueError, match="no vectors to save"):
        save_layer_vectors(tmp_path / "v.safetensors", {})


def test_a_registry_keeps_copies_by_name():
    registry, source = VectorRegistry(), torch.ones(3, dtype=torch.bfloat16)
    registry.register("refusal", source)
    registry.register("by layer", VECTORS)
    source.zero_()
    assert torch.equal(registry.get("refusal"), torch.ones(3)) and equal(registry.get("by layer"), VECTORS)
    assert registry.names == ["by layer", "refusal"]
    registry.remove("refusal")
    assert registry.names == ["by layer"]
    registry.register("refusal", [1, 2])
    assert registry.get("refusal").tolist() == [1, 2]


def test_a_registry_names_the_nearest_names_and_refuses_what_is_taken():
    registry = VectorRegistry()
    with pytest.raises(ValueError, match="no vector 'x'; there are: none"):
        registry.get("x")
    registry.register("refusal", [1.0])
    with pytest.raises(ValueError, match=r"no vector 'refusla'; did you mean 'refusal'\?"):
        registry.get("refusla")
    with pytest.raises(ValueError, match="no vector 'zzz'; there are: refusal"):
        registry.remove("zzz")
    with pytest.raises(ValueError, match="there is a vector 'refusal' already"):
        registry.register("refusal", [2.0])
    with pytest.raises(ValueError, match=re.escape("vector 'bad', layer 3: it holds NaN")):
        registry.register("bad", {3: [torch.nan]})
    for name in ("", None):
        with pytest.raises(ValueError, match="a vector's name is a string"):
            registry.register(name, [1.0])
    assert registry.names == ["refusal"] and registry.get("refusal").tolist() == [1]
