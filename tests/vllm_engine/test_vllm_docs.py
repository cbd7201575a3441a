"""What docs/engine/vllm.md says of models is what vLLM's sources say."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_vllm import needs_vllm, since

from pymllm_interp import LM
from pymllm_interp.cli import main
from pymllm_interp.vllm_engine.refusals import VllmRefusalError

PAGE = Path(__file__).parents[2] / "docs" / "engine" / "vllm.md"
pytestmark = needs_vllm
newest = since("0.32", "the page names models of the newest one")


@newest
def test_the_table_of_models_is_that_of_vllms_sources() -> None:
    from pymllm_interp.vllm_engine.architectures import table

    page = PAGE.read_text()
    missing = [row for row in table() if row not in page]
    assert not missing, "\n".join(table())


@newest
def test_a_model_with_other_layers_is_refused_before_it_is_loaded(
    model_folder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(VllmRefusalError, match="has no GPTNeoXForCausalLM"):
        LM(model_folder("gpt_neox"), engine="vllm")
    assert main(["doctor", str(model_folder("gpt_neox")), "--engine", "vllm"]) == 1
    assert "refused" in capsys.readouterr().out


def test_the_doctor_says_where_the_hooks_are(model_folder, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(model_folder("llama")), "--engine", "vllm"])
    told = " ".join(capsys.readouterr().out.split())
    assert "a version that was tested" in told and "LlamaDecoderLayer" in told
