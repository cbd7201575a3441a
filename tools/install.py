"""Installs packages into an environment by uv with pip's settings: a sixth of pip's time. Where uv cannot, pip does.

.venv/bin/python tools/install.py -c constraints.txt -e ".[dev]"
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
AS_UV_HAS_IT = {
    "index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS", "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT", "cert": "SSL_CERT_FILE", "trusted-host": "UV_INSECURE_HOST", "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}  # fmt: skip
OF_NO_IMPORT = {
    "disable-pip-version-check",
    "no-cache-dir",
    "no-compile",
    "progress-bar",
    "no-input",
    "root-user-action",
}


def variables(listed: str) -> dict[str, str] | None:
    """Variables of uv that say what pip's settings say; None where there are none for one of them.

    Args:
        listed: What `pip config list` prints: lines such as "global.index-url='https://...'".
    """
    found: dict[str, str] = {}
    settings = [line.partition("=")[::2] for line in listed.splitlines() if "=" in line]
    for section in ("global.", "install.", ":env:."):  # a later one is stronger
        for key, value in settings:
            name = key.removeprefix(section)
            if not key.startswith(section) or name in OF_NO_IMPORT:
                continue
            if name not in AS_UV_HAS_IT:
                return None
            words = str(ast.literal_eval(value)).split()
            found[AS_UV_HAS_IT[name]] = ("," if name == "find-links" else " ").join(words)
    return found


def by_uv(arguments: list[str]) -> bool:
    """Whether uv installed what is asked for."""
    settings = variables(subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout)
    if settings is None or subprocess.run([*PIP, "install", "-q", "--no-compile", "uv"]).returncode:
        return False
    # Hard links from uv's cache where it can make them, else copies. pip takes the best version of all indexes.
    ways = {"UV_LINK_MODE": "hardlink", "UV_INDEX_STRATEGY": "unsafe-best-match"}
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *arguments]
    return subprocess.run(uv, env={**ways, **settings, **os.environ}).returncode == 0


if __name__ == "__main__":
    if not by_uv(sys.argv[1:]):
        print("uv could not install them; pip does, in minutes.", file=sys.stderr, flush=True)
        sys.exit(subprocess.run([*PIP, "install", "--no-compile", *sys.argv[1:]]).returncode)
