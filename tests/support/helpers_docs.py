"""The Python of README and docs, and the scripts of examples/."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from helpers_paths import ROOT

EXAMPLES = ROOT / "examples"


def script_of(page: Path) -> str:
    """The page's Python blocks as one script, each line where it stands in the page."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence else inside
    return "\n".join(lines) + "\n"


def run(name: str, *args: Any) -> Any:
    """What the example's `main` returns."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*args)
