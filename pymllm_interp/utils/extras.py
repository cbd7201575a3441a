"""Names in files that import a library of an extra: found when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def install_command(extra: str) -> str:
    """The command that installs an extra. pymllm-interp is not on PyPI, where its name could be anybody's."""
    return f'pip install -e ".[{extra}]" in a checkout of pymllm-interp'


@contextmanager
def library_of_extra(what: str, library: str, extra: str) -> Iterator[None]:
    """Say how to install `library`, if an import in the block does not find it.

    Args:
        what: needs the library; it begins the message.
        extra: of pymllm-interp, which installs the library.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        needed = library.replace("_", "-")
        raise ModuleNotFoundError(f"{what} needs {needed}: {install_command(extra)}", name=error.name) from error


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
        with library_of_extra(f"{module}.{name}", library, extra):
            found = import_module(f".{home}", module)
        return found if name == home else getattr(found, name)

    return find
