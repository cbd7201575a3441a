"""A wheel of the package works from any folder: the demo, the page and the C++ kernels are in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from helpers_paths import ROOT

FIRST_STEP = """
import sys
from pathlib import Path
import pymllm_interp
from pymllm_interp import demo
from pymllm_interp.kernels.cpu.cpu_dispatch import cpu_kernels
assert Path(pymllm_interp.__file__).is_relative_to(sys.prefix), pymllm_interp.__file__
with demo.LM(sys.argv[1]) as lm:
    assert demo.logit_lens(lm, demo.LENS_PROMPT, 1).words
    assert (cpu_kernels() is None) == (sys.argv[2] == "None")
from pymllm_interp.server.http.app import resources
assert "<html" in resources.files("pymllm_interp.server").joinpath("static", "index.html").read_text()
"""


def test_each_file_of_the_package_is_named_in_its_data() -> None:
    """What is no Python has to be named in pyproject.toml to be in the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["pymllm_interp"]
    package = ROOT / "pymllm_interp"
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert len(files) > 5
    assert not [path for path in files if not any(fnmatch(str(path.relative_to(package)), p) for p in patterns)]


@pytest.mark.slow  # a minute: it builds, installs and loads the demo model
def test_the_wheel_runs_the_demo_from_another_folder(tmp_path: Path) -> None:
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    elsewhere.mkdir()
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "tests", "docs", "benchmarks", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pip = ["-m", "pip", "--disable-pip-version-check"]

    def run(python: str | Path, *arguments: str) -> str:
        done = subprocess.run([python, *arguments], cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, *pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = tmp_path / "venv" / "bin" / "python"
    run(python, *pip, "install", "--no-deps", str(wheel))
    # The site packages of the environment that runs this test, behind the venv's own: the wheel comes first.
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-c", FIRST_STEP, "demo", str(shutil.which("g++")))
    assert "--host" in run(python, "-m", "pymllm_interp.cli", "serve", "--help")
