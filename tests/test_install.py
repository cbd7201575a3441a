"""tools/install.py: uv is given what pip's settings say, and not asked where it has no word for one."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest
from helpers_paths import ROOT

INSTALL = ROOT / "tools" / "install.py"
variables = runpy.run_path(str(INSTALL))["variables"]


@pytest.mark.parametrize(
    "listed, wanted",
    [
        ("", {}),
        ("global.index-url='https://a/simple'\ninstall.index-url='https://b/simple'", {"UV_DEFAULT_INDEX": "https://b/simple"}),
        (":env:.find-links='/c /d'\nglobal.find-links='/e'", {"UV_FIND_LINKS": "/c,/d"}),
        ("global.extra-index-url='\\nhttps://a\\nfile:///b'", {"UV_INDEX": "https://a file:///b"}),
        ("global.disable-pip-version-check='1'\nlist.format='columns'", {}),
        ("global.client-cert='/key'", None),
    ],
)  # fmt: skip
def test_uv_gets_the_settings_of_pip(listed, wanted):
    assert variables(listed) == wanted


@pytest.mark.slow  # by hand whenever the file changes
def test_pip_installs_where_uv_cannot(monkeypatch, tmp_path):
    package = tmp_path / "of_nothing"
    package.mkdir()
    (package / "pyproject.toml").write_text('[project]\nname = "of-nothing"\nversion = "1"\n')
    monkeypatch.setenv("PIP_CLIENT_CERT", "/nowhere")
    monkeypatch.setenv("PIP_DRY_RUN", "1")
    ran = subprocess.run(
        [sys.executable, INSTALL, "--no-deps", "--no-build-isolation", package], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "pip does" in ran.stderr and "Would install of-nothing-1" in ran.stdout
