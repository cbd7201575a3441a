"""docs/use/images.md on a tiny model, in the place of the one that it names."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_docs import ROOT, script_of
from helpers_vision import picture

NAMED = 'LM("Qwen/Qwen2.5-VL-7B-Instruct")'


def test_the_python_of_the_page_runs(
    vision_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = script_of(ROOT / "docs" / "use" / "images.md")
    assert script.count(NAMED) == 1
    monkeypatch.chdir(tmp_path)
    picture(300, 200).save("street.png")
    tiny = f"LM({str(vision_folder('qwen2_5_vl'))!r}, device='cpu', dtype='float32', kv_cache_tokens=2048)"
    Path("page.py").write_text(script.replace(NAMED, tiny))
    names = runpy.run_path(str(tmp_path / "page.py"), run_name="__main__")  # nnsight keeps sources by path
    names["lm"].shutdown()
