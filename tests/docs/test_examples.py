"""Each script in examples/ runs on the demo model and shows what it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from helpers_docs import EXAMPLES, run
from transformers import AutoConfig, AutoModelForCausalLM

import pymllm_interp
from pymllm_interp import LM

pytestmark = pytest.mark.usefixtures("one_demo")


def texts_of(svg: Path) -> list[str | None]:
    return [element.text for element in ElementTree.parse(svg).iter() if element.tag.endswith("text")]


def test_the_logit_lens_ends_at_the_models_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = run("logit_lens", "The Eiffel Tower is in the city of", str(tmp_path / "lens.svg"))
    drawn = texts_of(tmp_path / "lens.svg")
    committed = texts_of(EXAMPLES.parent / "docs" / "images" / "logit_lens.svg")
    assert drawn[-9:] == ["The", "E", "iffel", "Tower", "is", "in", "the", "city", "of"]
    assert drawn[0] == "layer 29" and drawn[9] == "Paris"
    same = sum(a == b for a, b in zip(drawn, committed, strict=True))  # a near tie may fall otherwise on another CPU
    assert same >= 0.95 * len(drawn), "python examples/logit_lens.py --svg docs/images/logit_lens.svg"
    assert len(words) == 30 and words[-1] == " Paris" and words[0] != " Paris"
    assert "layer 29  ' Paris'" in capsys.readouterr().out


def test_steering_changes_the_subject_and_not_the_twins() -> None:
    unsteered, steered = run("steering")
    assert "sea" in steered and "sea" not in unsteered
    readme = (EXAMPLES.parent / "README.md").read_text()  # shows how the two texts begin
    assert f"| plain | {unsteered.strip()[:40]}" in readme and f"| steered | {steered.strip()[:40]}" in readme
    same, unchanged = run("steering", 0.0)
    assert same == unsteered and unchanged == unsteered


def test_patching_early_brings_the_clean_answer_back_and_late_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    gaps = run("activation_patching")
    clean, corrupted = map(float, re.findall(r"(?:clean prompt|corrupted) ([+-][\d.]+)", capsys.readouterr().out))
    assert clean > 1 and abs(corrupted - gaps[-1]) < 0.1  # at the last layer the fact has left the token
    assert len(gaps) == 30
    assert gaps[0] > 1 and gaps[-1] < -1


def test_streams_give_each_reader_its_own_text(capsys: pytest.CaptureFixture[str]) -> None:
    texts = run("streaming")
    out = capsys.readouterr().out
    assert len(texts) == len(set(texts)) == 3
    for prompt, text in zip(("Once upon a time", "The best way to learn is", "In the year 2050"), texts, strict=True):
        assert text and f"{prompt}{text}" in out


def test_a_probe_reads_from_harvested_states_what_their_texts_are_about(tmp_path: Path) -> None:
    assert run("harvest", str(tmp_path)) >= 0.9
    assert len(list((tmp_path / "states").glob("*.safetensors"))) > 1


def test_an_sae_that_was_trained_on_the_device_steers() -> None:
    explained, plain, edited = run("train_sae")
    assert explained > 0.9 and plain != edited
    assert re.search("sea|ocean|wave|beach|ship|boat|water|sail", edited)


def test_rollouts_earn_more_of_their_probe() -> None:
    rewards, off, versions = run("rollouts")
    assert rewards[-1] > rewards[0] + 1, rewards
    assert off < 1e-3, "the trainer's log probabilities are those that were sampled by"
    assert sum(tokens for _, tokens in versions) == 24 and versions[-1][0] > versions[0][0]


def test_every_example_is_tested_and_says_how_to_use_it() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {
        "logit_lens",
        "steering",
        "activation_patching",
        "streaming",
        "harvest",
        "image_patches",
        "train_sae",
        "rollouts",
    }
    for name in names:
        doc = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
        assert doc and f"Usage: python examples/{name}.py" in doc


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of Qwen3.5's shape: 28 layers, of which every fourth has attention, with the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("qwen3_5")
    with LM("demo") as lm:
        lm.tokenizer.save_pretrained(folder)
        vocab = lm.model_spec.vocab_size
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=28, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["logit_lens", "steering", "activation_patching", "streaming", "harvest"])
def test_examples_run_on_a_model_with_recurrent_states(
    name: str, hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pymllm_interp, "LM", lambda model, **options: LM(hybrid, **options))
    found = run(name, *[str(tmp_path)] * (name == "harvest"))
    if name in ("logit_lens", "activation_patching"):
        assert len(found) == 28
    elif name == "harvest":
        assert 0 <= found <= 1
    else:
        assert all(found)


def test_patches_of_a_picture_are_patched_one_by_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    effect = run("image_patches", None, str(tmp_path / "heat.png"))
    assert effect.shape == (4, 6) and effect.abs().max() > 0.1 and effect.std() > 0.05
    assert f"{effect[1, 2]:+.3f}" in capsys.readouterr().out
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")
    late = run("image_patches", None, None, 3)
    assert late.abs().max() < 1e-5, "behind the last layer, no token reads another"
