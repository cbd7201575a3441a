"""Names in files that import a library of an extra: found when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names_of_extra(module: str, extra: str, homes: Mapping[str, tuple[str, str]]) -> Callable[[str], Any]:
    """A package's `__getattr__`.

    Args:
        module: the package's `__name__`.
        extra: of pymllm-interp, which installs the libraries.
        homes: name -> its file, and the library that it needs. A file's own name is the module.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        home, library = homes[name]
        try:
            found = import_module(f".{home}", module)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != library:
                raise
            needed = library.replace("_", "-")
            raise ModuleNotFoundError(
                f'{module}.{name} needs {needed}: pip install "pymllm-interp[{extra}]"', name=error.name
            ) from error
        return found if name == home else getattr(found, name)

    return find
