"""docs/use/serve.md against a real server; and the other pages' Python with `LM.connect` in the place of `LM`."""

from __future__ import annotations

import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_docs import ROOT, script_of
from helpers_served import served
from helpers_server import Server

ADDRESS = "http://127.0.0.1:8000"
VOLATILE = re.compile(r'"(id|created|model|spec|engine)": ?("[^"]*"|\d+)')
"""Parts of an answer that differ from run to run, or from machine to machine."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served("demo", "--allow-code-from", "anybody", keys=None) as found:
        yield found


@pytest.mark.parametrize(
    "page",
    ["docs/use/serve.md", "README.md"]
    + [
        pytest.param(f"docs/{name}.md", marks=pytest.mark.slow)
        for name in ("guides/recipes", "use/trace", "use/intervene", "use/capture")
    ],
)
def test_the_python_of_a_page_runs_over_http(page: str, demo: Server, tmp_path: Path) -> None:
    script = script_of(ROOT / page).replace(ADDRESS, demo.url).replace('LM("demo")', f'LM.connect("{demo.url}")')
    file = tmp_path / "page.py"
    file.write_text(script)
    runpy.run_path(str(file), run_name="__main__")
    demo.wait_until_idle()


def test_the_transcript_was_run(demo: Server) -> None:
    text = (ROOT / "docs" / "use" / "serve.md").read_text()
    (block,) = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
    commands = re.findall(r"^\$ (curl .*?)\n(?=\{)(.*?)(?=^\$ |\Z)", block, flags=re.DOTALL | re.MULTILINE)
    assert len(commands) >= 3
    for command, shown in commands:
        run = subprocess.run(
            ["bash", "-c", command.replace(ADDRESS, demo.url)], capture_output=True, text=True, timeout=600
        )
        got, wanted = (VOLATILE.sub(r'"\1": ...', part).split() for part in (run.stdout, shown))
        assert got == wanted, f"{command}\n{run.stdout}"
