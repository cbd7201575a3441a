"""`pymllm-interp cache list | clean`: models converted and kernels compiled on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from .utils.files.cache_folder import cache_entries, default_cache_dir, remove_entry


def run_cache(action: str, names: Sequence[str] = (), everything: bool = False) -> int:
    """List the cache, or remove entries. Returns the exit status.

    Args:
        action: "list" or "clean".
        names: names of the entries to remove.
        everything: remove all.

    Raises:
        ValueError: an unknown name, or nothing to clean was named.
        OSError: an entry cannot be removed.
    """
    folder = default_cache_dir()
    entries = cache_entries(folder)
    if action == "list" and (names or everything):
        raise ValueError("cache list takes no names and no --all")
    if action == "clean":
        known = {entry.path.name: entry for entry in entries}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{unknown[0]!r}: no entry of {folder}; `pymllm-interp cache list` shows them")
        if bool(names) == everything:
            raise ValueError("cache clean: name entries of `pymllm-interp cache list`, or give --all")
        entries = entries if everything else [known[name] for name in dict.fromkeys(names)]
    for entry in entries:
        if action == "clean":
            remove_entry(entry)
        print(f"{entry.num_bytes / 1e6:10.1f} MB  {entry.kind:16}  {entry.path.name}")
    word = "removed from" if action == "clean" else "in"
    print(f"{sum(entry.num_bytes for entry in entries) / 1e6:10.1f} MB  {word} {folder}")
    return 0
