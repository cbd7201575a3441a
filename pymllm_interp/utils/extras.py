"""Names that are imported when they are first used, and libraries of extras."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from opcode import opmap
from typing import Any

from .busy_cores import share_cores


def install_command(extra: str) -> str:
    """The command that installs an extra. pymllm-interp is not on PyPI, so its name there may belong to another project."""
    return f'pip install -e ".[{extra}]" in a checkout of pymllm-interp'


@contextmanager
def library_of_extra(what: str, library: str, extra: str) -> Iterator[None]:
    """Say how to install `library`, if an import in the block does not find it.

    Args:
        what: feature that needs the library; it begins the message.
        extra: extra of pymllm-interp that installs the library.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        needed = "pillow" if library == "PIL" else library.replace("_", "-")
        raise ModuleNotFoundError(f"{what} needs {needed}: {install_command(extra)}", name=error.name) from error


def lazy_names(
    module: str, homes: Mapping[str, str], elsewhere: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """A package's `__getattr__`, which imports a name's file when the name is first used.

    Args:
        module: the package's `__name__`.
        homes: name -> its file. A file's own name is the module.
        elsewhere: name of another file of the package -> the file.

    Raises:
        AttributeError: another name. The message has the closest one, or all.
        ImportError: the same, in ``from package import name``: Python drops the message of an AttributeError there.
    """

    def find(name: str) -> Any:
        if name not in homes:
            near = get_close_matches(name, [*homes, *(elsewhere or {})], n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(homes))}"
            if elsewhere and near and near[0] in elsewhere:
                hint = f"{near[0]} is in {module}.{elsewhere[near[0]]}"
            if _is_from_import():
                raise ImportError(f"cannot import name {name!r} from {module!r}; {hint}", name=module)
            raise AttributeError(f"module {module!r} has no attribute {name!r}; {hint}")
        share_cores()  # most names import torch
        found = import_module(f".{homes[name]}", module)
        return found if name == homes[name] else getattr(found, name)

    return find


def _is_from_import() -> bool:
    """Whether the name is the one of a ``from package import name``, and not of `getattr`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name in ("find", "find_with_library", "__getattr__"):
        frame = frame.f_back
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def names_of_extra(module: str, extra: str, homes: Mapping[str, tuple[str, str]]) -> Callable[[str], Any]:
    """`lazy_names` for files that import libraries of an extra.

    Args:
        extra: extra of pymllm-interp that installs the libraries.
        homes: name -> its file, and the library that it needs.
    """
    find = lazy_names(module, {name: home for name, (home, _) in homes.items()})

    def find_with_library(name: str) -> Any:
        _, library = homes.get(name, ("", ""))
        with library_of_extra(f"{module}.{name}", library, extra):
            return find(name)

    return find_with_library
