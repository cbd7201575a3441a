"""A GPT-2 shaped model with dummy weights does what the demo model does: each example, and the README's Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers_docs import ROOT, run, script_of
from transformers import GPT2Config

import pymllm_interp
from pymllm_interp import LM

pytestmark = pytest.mark.usefixtures("demo_tokenizer")
NAMES = {"transformer": "model", "h": "layers", "ln_f": "norm"}
"""GPT-2's names -> those that scripts for the demo model use."""
LAYERS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config and the demo model's tokenizer, without weights."""
    made = tmp_path_factory.mktemp("gpt2")
    with LM("demo") as lm:
        lm.tokenizer.save_pretrained(made)
        config = GPT2Config(
            vocab_size=lm.model_spec.vocab_size, n_embd=72, n_layer=LAYERS, n_head=9, n_positions=512, bos_token_id=None,
            eos_token_id=None, architectures=["GPT2LMHeadModel"],
        )  # fmt: skip
    config.save_pretrained(made)
    return made


@pytest.fixture(autouse=True)
def gpt2_as_demo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`LM("demo")` is the GPT-2 shaped model."""
    made: list[str] = []

    @functools.wraps(LM)
    def load(model: str, *args: Any, **kwargs: Any) -> LM:
        assert model == "demo"
        lm = LM(str(folder), *args, load_format="dummy", rename=NAMES, **kwargs)
        made.append(type(lm.runner.get_model()).__name__)
        return lm

    monkeypatch.setattr(pymllm_interp, "LM", load)
    yield
    assert made and set(made) == {"GPT2LMHeadModel"}


def assert_lens(words: list[str]) -> None:
    assert len(words) == LAYERS and len(set(words)) > 1


def assert_steered(texts: tuple[str, str]) -> None:
    assert len(texts) == 2 and texts[0] != texts[1]


def assert_patched(gaps: list[float]) -> None:
    assert len(gaps) == LAYERS and len(set(gaps)) > LAYERS // 2


def assert_streamed(texts: list[str]) -> None:
    assert len(texts) == 3 and all(texts)


def assert_probed(accuracy: float) -> None:
    assert 0 <= accuracy <= 1


EXAMPLES: dict[str, tuple[Callable[[Any], None], tuple[Any, ...]]] = {
    "logit_lens": (assert_lens, ()),
    "steering": (assert_steered, (40.0,)),
    "activation_patching": (assert_patched, ()),
    "streaming": (assert_streamed, ()),
    "harvest": (assert_probed, ()),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_runs(name: str) -> None:
    check, args = EXAMPLES[name]
    check(run(name, *args))


def test_the_readmes_python_runs() -> None:
    exec(compile(script_of(ROOT / "README.md"), "README.md", "exec"), {"__name__": "__main__"})
