"""Traces on their way to a server: a block's source and the names that it reads, pickled with nnsight's serialiser.

Reading a payload runs code of whoever wrote it. The HTTP process never does; the engine process does, for keys with `code`.

A model in the block is not pickled: it is named, with the persistent edits that it has.
"""

from __future__ import annotations

import ast
import hashlib
import io
import linecache
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle
import torch

from ..hooks.traces.blocks.loops import AST_LOCK, forget_rewritten
from ..hooks.traces.nnsight_compat import (
    BLOCKS,
    SOURCES,
    CustomCloudPickler,
    CustomCloudUnpickler,
    Envoy,
    Mediator,
    Tracer,
    code_reduce,
    load_function,
)

KEPT_SOURCES = 256
"""Sources of traces that the server keeps, for tracebacks and for the blocks inside of them."""
MOST_LINES = 1_000_000
"""Limit of lines in the file of a block or function."""
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


# -- the client's side ---------------------------------------------------------------------


def source_of_block(node: ast.With | ast.AsyncWith, filename: str) -> str:
    """The block's own lines, at their own line numbers, under an ``if True:`` that lets them be indented."""
    first = _checked_line(min(getattr(part, "lineno", node.body[0].lineno) for part in ast.walk(node.body[0])))
    lines = Tracer.source(filename).splitlines()[first - 1 : node.end_lineno]
    return "\n" * (first - 2) + "if True:\n" + "\n".join(lines) + "\n"


def _checked_line(line: int) -> int:
    """A line number, represented by empty lines. Raises ValueError: a number above the limit."""
    if not 0 <= line <= MOST_LINES:
        raise ValueError(f"line {line}: a trace's source has at most {MOST_LINES} lines")
    return line


def block_to_data(
    node: Any, filename: str, name: str, glbls: Mapping[str, Any], lcls: Mapping[str, Any],
    first_argument: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A block with the names that it reads from around it.

    Args:
        first_argument: name of the first argument of the function around it, for `super()`.
    """
    with AST_LOCK:
        text = source_of_block(node, filename)
        if first_argument is not None and "__class__" in lcls:
            text = with_arguments_of_super(text, first_argument)
        source, used_globals, used_locals = code_reduce(text, dict_of(glbls), dict(lcls))
    return {"source": source, "filename": filename, "name": name, "globals": used_globals, "locals": used_locals}


def with_arguments_of_super(source: str, first: str) -> str:
    """A block's source with ``super(__class__, first)`` for ``super()``: a method's frame would give its own arguments."""
    lines = source.encode().split(b"\n")
    places = [
        (call.end_lineno, call.end_col_offset)
        for call in _calls_of_super(ast.parse(source))
        if not call.args + call.keywords
    ]
    for line, end in sorted(places, reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[: end - 1] + b"__class__, " + first.encode() + text[end - 1 :]
    return b"\n".join(lines).decode()


def _calls_of_super(node: ast.AST) -> Iterator[Any]:
    """Calls of `super` in a block. Calls inside its functions and classes, which have their own arguments, are omitted."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == "super":
            yield child
        yield from _calls_of_super(child)


def dict_of(names: Mapping[str, Any]) -> Any:
    """Globals as `code_reduce` looks names up: a frame's are a dict already."""
    return names if isinstance(names, dict) else dict(names)


def edit_to_data(edit: Mediator) -> dict[str, Any]:
    """A persistent edit as data."""
    data = block_to_data(edit.node, edit.code.co_filename, edit.code.co_name, edit.glbls, edit.lcls)
    return data | {"edit": getattr(edit, "name", None)}


class _Pickler(CustomCloudPickler):
    """Names models and tracers in place of pickling them. Functions of the caller's own files travel as source."""

    def __init__(self, file: io.BytesIO, names: Callable[[Any], Any]) -> None:
        super().__init__(file, protocol=4)
        self._names = names

    def persistent_id(self, obj: Any) -> Any:
        found = self._names(obj)
        return super().persistent_id(obj) if found is None else found

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            _by_value(obj)
        if type(obj) is torch.Tensor and obj.layout is torch.strided and obj.dtype not in _PICKLED | _QUANTISED:
            codes = obj.detach().resolve_conj().contiguous().flatten().view(torch.uint8)
            return tensor_of_bytes, (codes, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


_PICKLED = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip
"""Dtypes that torch's pickles of tensors can have."""
_QUANTISED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def tensor_of_bytes(codes: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of a younger dtype, such as float8."""
    return codes.view(dtype).reshape(shape)


def _by_value(obj: Any) -> None:
    """Have a function or class of the caller's own files pickled by value: the server does not have these files."""
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    path = getattr(module, "__file__", None)
    if module is None or path is None or module.__name__.partition(".")[0] in ("pymllm_interp", "nnsight"):
        return
    if not _of_library(path, module.__name__) and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(module)


def _of_library(path: str, module: str) -> bool:
    """Whether a module's file is installed: in one of Python's folders, or in a folder of packages by their metadata."""
    if path.startswith(_LIBRARIES):
        return True
    depth = module.count(".") + (Path(path).name == "__init__.py")
    parents = Path(path).parents
    return depth < len(parents) and _has_packages(parents[depth])


@cache
def _has_packages(folder: Path) -> bool:
    return any(folder.glob("*.dist-info"))


def dump(content: dict[str, Any], names: Callable[[Any], Any]) -> bytes:
    """The payload of a trace.

    Args:
        names: the persistent id of an object that is not pickled, or None.

    Raises:
        TypeError, pickle.PicklingError: the block reads something that cannot travel.
    """
    file = io.BytesIO()
    _Pickler(file, names).dump(content)
    return file.getvalue()


# -- the server's side ---------------------------------------------------------------------


class _Unpickler(CustomCloudUnpickler):
    def __init__(self, file: io.BytesIO, find: Callable[[Any], Any]) -> None:
        super().__init__(file, {})
        self._find = find

    def persistent_load(self, pid: Any) -> Any:
        return self._find(pid)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = super().find_class(module_name, global_name)
        return _checked_function if found is load_function else found


def _checked_function(*args: Any) -> Any:
    """A function of a payload. nnsight puts as many empty lines before its source as its line number says."""
    _checked_line(args[-1])
    return load_function(*args)


def load(payload: bytes, find: Callable[[Any], Any]) -> dict[str, Any]:
    """Read a payload. Runs code of whoever wrote it.

    Args:
        find: the object of a persistent id.
    """
    return _Unpickler(io.BytesIO(payload), find).load()


class Sources:
    """Compiles blocks, and keeps their sources for tracebacks and for nnsight, which reads the blocks inside of a block there.

    Equal line numbers of equal file names are not equal blocks, since many clients have files of one name. So a block's
    file is named with the hash of its source.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[CodeType, ast.With]] = {}

    def compiled(self, block: Mapping[str, Any]) -> tuple[CodeType, ast.With]:
        """A block's code, and its syntax tree."""
        source = block["source"]
        digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        filename = f"{block['filename']} [{digest}]"
        if filename in self._kept:
            self._kept[filename] = self._kept.pop(filename)  # the newest is the last
        else:
            with AST_LOCK:
                tree = ast.parse(source, filename)
                code = compile(tree, filename, "exec").replace(co_name=block["name"])
            (branch,) = tree.body
            assert isinstance(branch, ast.If)
            node = ast.copy_location(ast.With(items=[], body=branch.body, type_comment=None), branch)
            linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
            self._kept[filename] = code, node
            while len(self._kept) > KEPT_SOURCES:
                self._forget(next(iter(self._kept)))
        return self._kept[filename]

    def _forget(self, filename: str) -> None:
        del self._kept[filename]
        linecache.cache.pop(filename, None)
        SOURCES.pop(filename, None)
        for key in [key for key in BLOCKS if key[0] == filename]:
            del BLOCKS[key]
        forget_rewritten(filename)


def is_envoy_id(pid: Any) -> bool:
    """Whether a persistent id names an envoy, as `TracedEnvoy` does."""
    return isinstance(pid, str) and pid.startswith("Envoy:")


def envoy_at(root: Envoy, pid: str) -> Envoy:
    """The envoy that a persistent id names. Raises ValueError: the model has no such module."""
    path = pid.removeprefix("Envoy:")
    found: Any = root
    for part in path.split(".")[1:]:
        children = dict(found._named_children())
        if part not in children:
            raise ValueError(f"the server's model has no module {path!r}")
        found = children[part]
    return found
