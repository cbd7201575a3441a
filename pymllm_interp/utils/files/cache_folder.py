"""The folder of files that are made once on a machine: converted models and compiled kernels."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

CACHE_VARIABLE = "PYMLLM_INTERP_CACHE"
_KINDS = {
    "converted model": re.compile(r".+-[0-9a-f]{16}-v\d+"),
    "compiled kernels": re.compile(r"[a-z_]+-[0-9a-f]{16}\.so"),
    "measured products": re.compile(r"products-[0-9a-f]{16}\.json"),
    "unfinished": re.compile(r"\..+-[0-9a-f]{16}-v\d+\..+|tmp\w{8}"),
}
"""Kind of an entry -> pattern of its name."""


class CacheEntry(NamedTuple):
    """A file or folder of the cache."""

    path: Path
    kind: str
    num_bytes: int


def default_cache_dir() -> Path:
    """Folder of the cache: `$PYMLLM_INTERP_CACHE`, `$XDG_CACHE_HOME/pymllm-interp`, or ~/.cache/pymllm-interp."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pymllm-interp"


def cache_entries(folder: Path) -> list[CacheEntry]:
    """This package's entries in a folder, by name. Other files are omitted."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        kind = next((kind for kind, name in _KINDS.items() if name.fullmatch(path.name)), None)
        if kind is not None and not path.is_symlink():
            files = path.rglob("*") if path.is_dir() else [path]
            found.append(CacheEntry(path, kind, sum(one.lstat().st_size for one in files if one.is_file())))
    return found


def remove_entry(entry: CacheEntry) -> None:
    """Remove an entry. A process that has it open keeps its open files. Raises OSError: it cannot be removed."""
    if entry.path.is_dir():
        shutil.rmtree(entry.path)
    else:
        entry.path.unlink(missing_ok=True)
