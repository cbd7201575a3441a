"""Captured states as values: contiguous, small in a pickle, in files, stacked by layer."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_declared import lms, prompt_of, vector
from safetensors.torch import load_file, save_file

from pymllm_interp import LM, Activations, Capture, SamplingParams
from pymllm_interp.captures import Lens, Project
from pymllm_interp.hooks.captures.activations import CaptureError

pytest.importorskip("triton", reason="the kernels' tests need the package triton")

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
GREEDY = SamplingParams(temperature=0, max_tokens=5)
LAYERS, HIDDEN = CONFIGS["llama"]().num_hidden_layers, CONFIGS["llama"]().hidden_size


@pytest.fixture(scope="module", params=["functions", "tables"])
def lm_of(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    """(family, **arguments) -> an LM, captures as functions or through the ring."""
    with lms(request.param, model_folder) as load:
        yield load


def captured(lm_of: Any) -> Any:
    lm, top = lm_of("llama"), Project(vector(HIDDEN, 1, 6), top_k=2)
    specs = [
        "resid_post.*",
        Capture("mlp_out.1", reduce="last"),
        Capture("attn_out.0", reduce=top),
        Capture("embed", [-1, 0]),
    ]
    return lm.generate([prompt_of(9, 1)], GREEDY, capture=specs)[0]


def test_states_are_contiguous_and_go_to_safetensors_as_they_are(lm_of: Any, tmp_path: Path) -> None:
    found = captured(lm_of).activations
    for rows in found.values():
        assert rows.is_contiguous() and rows.untyped_storage().nbytes() == rows.nbytes
        assert rows.view(-1).shape == (rows.numel(),)
    save_file(dict(found), tmp_path / "states.safetensors")
    read = load_file(tmp_path / "states.safetensors")
    assert set(read) == set(found) and all(torch.equal(read[site], found[site]) for site in found)
    assert found["resid_post.1"] is found["model.layers.1"], "copied once"


def test_a_pickled_output_is_no_larger_than_its_states(lm_of: Any) -> None:
    lm = lm_of("llama", max_num_tokens=256)
    params = SamplingParams(temperature=0, max_tokens=60, stop_token_ids=list(range(97)))  # ends early, in much memory
    (out,) = lm.generate([prompt_of(40, 1)], params, capture=["resid_post.*", "embed"])
    states = sum(out.activations.as_arrived(site).nbytes for site in out.activations)
    content = pickle.dumps(out)
    assert states <= len(content) <= 1.1 * states + 10_000, (states, len(content))
    again = pickle.loads(content)
    assert again.text == out.text and list(again.activations) == list(out.activations)
    for site, rows in out.activations.items():
        assert torch.equal(again.activations[site], rows)
        assert torch.equal(again.activations.positions[site], out.activations.positions[site])
    assert torch.equal(again.activations["resid_post.-1"], out.activations[f"resid_post.{LAYERS - 1}"])


def test_saved_states_come_back_with_their_positions_tokens_and_indexes(lm_of: Any, tmp_path: Path) -> None:
    found = captured(lm_of).activations
    found.save(tmp_path / "states.safetensors")
    read = Activations.load(tmp_path / "states.safetensors")
    assert list(read) == list(found) and list(read.indexes) == list(found.indexes) == ["attn_out.0"]
    for here, there in (
        (read, found),
        *((getattr(read, n), getattr(found, n)) for n in ("positions", "token_ids", "indexes")),
    ):
        assert all(torch.equal(here[site], there[site]) for site in there)
    assert torch.equal(read["layers_output[-1]"], found[f"resid_post.{LAYERS - 1}"])
    with pytest.raises(ValueError, match=r"states.pt: states are saved as .safetensors"):
        found.save(tmp_path / "states.pt")


def test_a_pair_of_kind_and_layer_is_a_key(lm_of: Any) -> None:
    """TransformerLens' key, as in the cache of `run_with_cache`."""
    found = captured(lm_of).activations
    assert found["resid_post", 1] is found["resid_post.1"] and found["resid_post", -1] is found["resid_post.-1"]
    assert found["embed", None] is found["embed"] and ("resid_post", 1) in found and ("mlp_out", 9) not in found
    assert torch.equal(found.positions["resid_post", 1], found.positions["resid_post.1"])
    with pytest.raises(KeyError, match=r"'mlp_out.9' was not captured"):
        found["mlp_out", 9]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"resid_post.0": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"was not written by Activations.save"):
        Activations.load(tmp_path / "other.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a safetensors file, or it is damaged"):
        Activations.load(tmp_path / "bad.safetensors")
    with pytest.raises(FileNotFoundError):
        Activations.load(tmp_path / "none.safetensors")


def test_layers_are_stacked_in_their_order(lm_of: Any) -> None:
    lm = lm_of("llama")
    (out,) = lm.generate(
        [prompt_of(9, 1)], GREEDY, capture=["resid_post.{2,0}", "mlp_out.1", Capture("mlp_out.2", [-1])]
    )
    found = out.activations
    assert found.layers("resid_post") == [0, 2]
    assert torch.equal(found.stack("resid_post"), torch.stack([found["resid_post.0"], found["resid_post.2"]]))
    with pytest.raises(ValueError, match=r"mlp_out.2 and mlp_out.1 were captured at different positions"):
        found.stack("mlp_out")
    with pytest.raises(KeyError, match=r"'attn_out.\*' was not captured; there is resid_post.\{0,2\}, mlp_out"):
        found.stack("attn_out")


def test_what_reductions_add_is_stacked_as_the_states_are(lm_of: Any) -> None:
    lens = Lens(top_k=3, tokens=[5, 9])
    elsewhere = Capture("resid_post.2", reduce=lens, positions=[-1])
    captures = [Capture("resid_post.{0,1}", reduce=lens, positions=[0]), elsewhere]
    (out,) = lm_of("llama").generate([prompt_of(9, 1)], GREEDY, capture=[Capture("resid_post.*", reduce=lens)])
    for found, width in (
        (out.activations.indexes, 3), (out.activations.token_log_probs, 2), (out.activations.token_ranks, 2)
    ):  # fmt: skip
        assert found.layers("resid_post") == [0, 1, 2]
        stacked = found.stack("resid_post")
        assert stacked.shape[0] == 3 and stacked.shape[2] == width
        assert torch.equal(stacked, torch.stack([found[f"resid_post.{layer}"] for layer in range(3)]))
    (out,) = lm_of("llama").generate([prompt_of(9, 1)], SamplingParams(max_tokens=1), capture=captures)
    with pytest.raises(ValueError, match=r"resid_post.2 and resid_post.0 were captured at different positions"):
        out.activations.indexes.stack("resid_post")


def test_lost_states_are_pickled_as_lost() -> None:
    lost = Activations(2)
    lost.error = CaptureError("no room")
    again = pickle.loads(pickle.dumps(lost))
    with pytest.raises(CaptureError, match="no room"):
        again["resid_post.0"]
