"""docs/use/serve.md against a real server; and the other pages' Python with `LM.connect` in the place of `LM`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_docs import ROOT, script_of
from helpers_served import served
from helpers_server import Server

from pymllm_interp.utils.arguments import PromptError

ADDRESS = "http://127.0.0.1:8000"
REFUSED = {
    "docs/guides/recipes.md": ["lm.attribute", "sae", "SamplingParams"],
    "docs/use/intervene.md": ["lm.saes"],
    "docs/use/capture.md": ["lm.saes"],
}
"""Calls of pages that only an LM in the caller's process has."""
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
    names, refused = {"__name__": "__main__"}, []
    for block in blocks_of(script, ROOT / page):
        try:
            exec(compile(block, str(file), "exec"), names)
        except (NotImplementedError, PromptError) as error:
            refused.append(re.match(r"[\w.]+", str(error))[0])
    assert refused == REFUSED.get(page, [])
    demo.wait_until_idle()


def blocks_of(script: str, page: Path) -> Iterator[str]:
    """Each Python block of the page, at its lines of the script."""
    lines, fences = script.splitlines(), page.read_text().splitlines()
    starts = [i + 1 for i, line in enumerate(fences) if line == "```python"]
    for start in starts:
        stop = fences.index("```", start)
        yield "\n" * start + "\n".join(lines[start:stop]) + "\n"


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
