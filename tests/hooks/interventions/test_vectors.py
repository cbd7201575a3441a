"""Vectors: tensors, files and names."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pymllm_interp import Ablate, Capture, Clamp, Gate, Patch, SamplingParams, Steer
from pymllm_interp.hooks.bind import bind
from pymllm_interp.hooks.captures.spec import Project
from pymllm_interp.hooks.vectors.files import load_layer_vectors, load_vector, save_layer_vectors
from pymllm_interp.hooks.vectors.registry import VectorRegistry

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
    for layer in (-1, "1", 1.0, True):
        with pytest.raises(ValueError, match=rf"a layer is a whole number from 0 on, not {layer!r}"):
            save_layer_vectors(tmp_path / "layers.safetensors", {layer: torch.ones(3)})
    assert not (tmp_path / "layers.safetensors").exists()
    with pytest.raises(ValueError, match="no vectors to save"):
        save_layer_vectors(tmp_path / "v.safetensors", {})


# -- names -----------------------------------------------------------------------------------------

WIDTH, LAYERS = 72, 3
"""Of the tiny Llama."""
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def registry(lm_of: Any) -> VectorRegistry:
    return VectorRegistry(lm_of("llama").runner.model_spec)


def test_a_registry_is_a_mapping_that_keeps_copies(registry):
    source = torch.ones(WIDTH, dtype=torch.bfloat16)
    registry["refusal"] = source
    registry["happy"] = {2: [2.0] * WIDTH, 0: torch.zeros(WIDTH)}
    registry["span"] = torch.eye(WIDTH)[:3]
    source.zero_()
    registry["refusal"].zero_()
    registry["happy"][0].fill_(9)
    assert torch.equal(registry["refusal"], torch.ones(WIDTH)) and registry["refusal"].dtype is torch.float32
    assert equal(registry["happy"], {0: torch.zeros(WIDTH), 2: torch.full((WIDTH,), 2.0)})
    assert list(registry) == ["happy", "refusal", "span"] and len(registry) == 3 and "span" in registry
    registry["refusal"] = [2.0] * WIDTH
    assert registry["refusal"].tolist() == [2.0] * WIDTH
    del registry["refusal"]
    assert "refusal" not in registry and registry.get("refusal") is None
    registry["by numpy"] = {np.int64(layer): torch.ones(WIDTH) for layer in (2, 1)}
    assert list(registry["by numpy"]) == [1, 2]


def test_a_registry_reads_files(registry, tmp_path):
    save_file({"anything": torch.ones(WIDTH)}, tmp_path / "one.safetensors")
    save_layer_vectors(tmp_path / "layers.safetensors", {1: torch.ones(WIDTH)})
    save_file({"a": torch.ones(WIDTH), "b": torch.ones(WIDTH)}, tmp_path / "two.safetensors")
    registry["one"], registry["layers"] = str(tmp_path / "one.safetensors"), tmp_path / "layers.safetensors"
    assert torch.equal(registry["one"], torch.ones(WIDTH)) and equal(registry["layers"], {1: torch.ones(WIDTH)})
    with pytest.raises(ValueError, match=r"holds 2 tensors \(a, b\)"):
        registry["two"] = tmp_path / "two.safetensors"
    with pytest.raises(FileNotFoundError, match="no such file"):
        registry["two"] = "nowhere.safetensors"


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("", [1.0] * WIDTH, "the vector's name is a string that is not empty, not ''"),
        (None, [1.0] * WIDTH, "the vector's name is a string"),
        ("x", [1.0, torch.nan] * (WIDTH // 2), "vector 'x': it holds NaN"),
        ("x", torch.ones(WIDTH + 1), r"vector 'x' has 73 values; the model's sites have .*72 \(hidden_size\)"),
        ("x", {0: torch.ones(WIDTH), 1: torch.ones(5)}, "vector 'x', layer 1 has 5 values"),
        ("x", {LAYERS: torch.ones(WIDTH)}, "vector 'x': there is no layer 3; the model has 0 to 2"),
        ("x", {}, "vector 'x': there is no layer in it"),
    ],
)
def test_what_no_site_could_take_is_not_registered(name, source, message, registry):
    with pytest.raises(ValueError, match=message):
        registry[name] = source
    assert not registry


def test_an_unknown_name_is_answered_with_the_nearest(registry, lm_of):
    with pytest.raises(
        KeyError,
        match=r"no vector 'x'; there are: none \(lm\.vectors\['x'\] = tensor puts one there; over HTTP, PUT /v1/",
    ):
        registry["x"]
    lm = lm_of("llama")
    lm.vectors["refusal"] = torch.ones(WIDTH)
    for use in (lambda: lm.vectors["refusla"], lambda: lm.vectors.__delitem__("refusla")):
        with pytest.raises(KeyError, match=r"no vector 'refusla'; did you mean 'refusal'\?"):
            use()
    steps = lm.engine.num_steps
    with pytest.raises(ValueError, match=r"Steer\('resid_post.0'\): no vector 'refusla'; did you mean 'refusal'\?"):
        lm.generate([[1, 2]], interventions=[Steer("resid_post.0", "refusla")])
    assert lm.engine.num_steps == steps
    with pytest.raises(ValueError, match="'refusal' is a name, and only an LM's `vectors` know whose"):
        bind(Steer("resid_post.0", "refusal"), lm.runner.model_spec, 3)


def test_a_name_stands_for_its_vector_wherever_a_spec_takes_one(lm_of):
    lm, made = lm_of("llama"), torch.Generator().manual_seed(0)
    v, rows, probe = (torch.randn(*shape, generator=made) for shape in ((WIDTH,), (2, WIDTH), (WIDTH,)))
    lm.vectors.update(v=v, rows=rows, probe=probe)

    def specs(v: Any, rows: Any, probe: Any) -> list[Any]:
        return [
            Steer("resid_post.0", v, norm="match", when=Gate(probe, -1e9)),
            Ablate("resid_post.1", rows),
            Clamp("resid_post.2", v, low=0.5),
            Patch("mlp_out.0", rows, positions=[0, -1]),
        ]

    def captures(rows: Any) -> list[Any]:
        return [Capture("resid_post.*"), Capture("final_norm", reduce=Project(rows, top_k=1))]

    prompt = [5, 6, 7, 8]
    by_name, by_value = (
        lm.generate([prompt], GREEDY, interventions=specs(*given), capture=captures(given[1]))[0]
        for given in (("v", "rows", "probe"), (v, rows, probe))
    )
    assert by_name.token_ids == by_value.token_ids
    assert all(torch.equal(by_name.activations[site], by_value.activations[site]) for site in by_value.activations)
    assert by_name.receipt.spec == by_value.receipt.spec, "what was applied counts, not what it was called"
    with lm.trace(prompt, interventions=specs("v", "rows", "probe")):
        state = lm.model.layers[2].output[0].save()
    torch.testing.assert_close(state, by_value.activations["resid_post.2"][:4])
    for message, spec in (
        ("a top_k|top_k=3; expected|top_k=3", lambda: Capture("embed", reduce=Project("rows", top_k=3))),
        (r"2 rows for positions without end", lambda: Steer("embed", "rows")),
    ):
        with pytest.raises(ValueError, match=message):
            key = "capture" if isinstance(spec(), Capture) else "interventions"
            lm.generate([prompt], GREEDY, **{key: [spec()]})


def test_vectors_by_layer_go_to_their_layers(lm_of):
    lm = lm_of("llama")
    by_layer = {layer: torch.randn(WIDTH, generator=torch.Generator().manual_seed(layer)) for layer in (1, 2)}
    lm.vectors["by layer"] = by_layer
    apart = [Steer(f"resid_post.{layer}", by_layer[layer], scale=2.0) for layer in by_layer]
    together, wanted = (
        lm.generate([[1, 2, 3]], GREEDY, interventions=given, capture=["resid_post.*"])[0]
        for given in ([Steer("resid_post.{1,2}", "by layer", scale=2.0)], apart)
    )
    assert all(torch.equal(together.activations[site], wanted.activations[site]) for site in wanted.activations)
    with pytest.raises(ValueError, match=r"vector 'by layer' has none for resid_post.0; it has the layers 1, 2"):
        lm.generate([[1]], interventions=[Steer("resid_post.*", "by layer")])
    with pytest.raises(ValueError, match="vector 'by layer' has none for final_norm"):
        lm.generate([[1]], interventions=[Steer("final_norm", "by layer")])


def test_requests_keep_what_a_name_stood_for_when_they_were_submitted(lm_of):
    lm, prompt, params = lm_of("llama"), [1, 2, 3], SamplingParams(temperature=0, max_tokens=60)
    first, second = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3)) * 3
    wanted = [
        lm.generate([prompt], params, interventions=[Steer("resid_post.1", v)])[0].token_ids for v in (first, second)
    ]
    assert wanted[0] != wanted[1]
    named = [Steer("resid_post.1", "v")]
    lm.vectors["v"] = first
    one = lm.submit(prompt, params, interventions=named)
    lm.vectors["v"] = second
    two = lm.submit(prompt, params, interventions=named)
    del lm.vectors["v"]
    assert [one.result(600).token_ids, two.result(600).token_ids] == wanted
    with pytest.raises(ValueError, match="no vector 'v'"):
        lm.submit(prompt, params, interventions=named)
