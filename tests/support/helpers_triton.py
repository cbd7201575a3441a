"""Triton's interpreter, which runs the kernels where there is no GPU, without what it does again and again."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from typing import Any


def quicken_the_interpreter() -> None:
    """Have the interpreter do once what it does at each operation or call of a kernel. What kernels compute stays as it is.

    It replaces the functions of ``triton.language``, and puts them back after each call, for kernels that are compiled. Under
    `TRITON_INTERPRET` none is. The type of each value is made and checked anew, with its shape as a tuple of constants: two thirds
    of the time.
    """
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    nothing = interpreter._LangPatchScope()

    dtype_of = cache(interpreter._get_np_dtype)
    interpreter._patch_lang = lambda fn: nothing
    interpreter._get_np_dtype = lambda found: dtype_of(tl.uint64 if found.scalar.is_ptr() else found.scalar)
    _make_types_once(tl.core, TritonSemantic)
    names_of = cache(inspect.getfullargspec)
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getfullargspec": names_of, "getcallargs": _bind})


def _make_types_once(core: Any, semantic: Any) -> None:
    """Blocks of one element type and shape share what their type says, and tensors of one type their shape."""
    make_block, make_tensor, broadcast = core.block_type.__init__, core.tensor.__init__, semantic.broadcast_impl_value
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, list[Any]] = {}

    def key_of(dtype: Any) -> Any:
        if isinstance(dtype, core.pointer_type):
            return key_of(dtype.element_ty), dtype.address_space, dtype.const
        return dtype.name

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        try:
            sizes = tuple([getattr(size, "value", size) for size in shape])
            key = key_of(element_ty), sizes
            found = blocks.get(key)
        except (AttributeError, TypeError):  # no type, or no shape: as it is told
            make_block(self, element_ty, shape)
            return
        if found is None:
            make_block(self, element_ty, shape)
            self.of_tensors = shapes.setdefault(sizes, [])
            blocks[key] = dict(vars(self))
        else:
            self.__dict__.update(found)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        found = vars(type).get("of_tensors", of_scalars)
        if not found:
            make_tensor(self, handle, type)
            found += self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = found

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    of_scalars: list[Any] = []
    core.block_type.__init__, core.tensor.__init__ = block, tensor
    semantic.broadcast_impl_value = broadcast_unless_equal


def _bind(fn: Callable[..., Any], *given: Any, **named: Any) -> dict[str, Any]:
    """`inspect.getcallargs` for a kernel, whose arguments have been checked when all are there."""
    names, defaults = _arguments_of(fn)
    found = {**defaults, **dict(zip(names, given, strict=False)), **named}
    if len(found) != len(names) or len(given) + len(named) > len(names):
        return inspect.getcallargs(fn, *given, **named)  # which says what is wrong
    return {name: found[name] for name in names}


@cache
def _arguments_of(fn: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    parameters = inspect.signature(fn).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
    return tuple(parameters), defaults
