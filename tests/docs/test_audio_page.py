"""docs/use/audio.md on a tiny model, in the place of the one that it names."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from conftest import tiny_tokenizer
from helpers_docs import ROOT, script_of
from helpers_encoder_decoder import GENERATION, audio, saved, wav
from transformers import GenerationConfig


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("whisper", tmp_path)
    GenerationConfig(**GENERATION).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "speech.wav").write_bytes(wav(audio(1, 6000)))
    script = script_of(ROOT / "docs" / "use" / "audio.md")
    assert script.count('"openai/whisper-small"') == 1
    script = script.replace('"openai/whisper-small"', f"{str(tmp_path)!r}, kv_cache_tokens=512, cross_cache_tokens=80")
    monkeypatch.chdir(tmp_path)
    Path("page.py").write_text(script)
    names = runpy.run_path(str(tmp_path / "page.py"), run_name="__main__")  # nnsight keeps sources by path
    assert names["heard"].shape == (20, 36)
    names["lm"].shutdown()
