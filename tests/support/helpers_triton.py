"""Triton's interpreter, which runs the kernels where there is no GPU, without what it does again and again."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

NUMPY = {
    **dict.fromkeys(("__add__", "__radd__"), np.add),
    **dict.fromkeys(("__mul__", "__rmul__"), np.multiply),
    "__sub__": np.subtract, "__truediv__": np.divide, "__mod__": np.fmod, "__and__": np.bitwise_and, "__or__": np.bitwise_or,
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal, "__eq__": np.equal,
    "__ne__": np.not_equal,
}  # fmt: skip
"""The interpreter's own functions of operators, for operands of one type."""
TYPES = {"int32": np.int32, "int64": np.int64, "fp32": np.float32, "fp64": np.float64}


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

    interpreter._patch_attr = _call_at_once
    interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    nothing = interpreter._LangPatchScope()

    tl.str_to_ty = cache(tl.str_to_ty)
    dtype_of = cache(interpreter._get_np_dtype)
    interpreter._patch_lang = lambda fn: nothing
    interpreter._get_np_dtype = lambda found: dtype_of(tl.uint64 if found.scalar.is_ptr() else found.scalar)
    _make_types_once(tl.core, TritonSemantic)
    _make_values_once(interpreter)
    _compute_at_once(tl, interpreter.TensorHandle)
    names_of = cache(inspect.getfullargspec)
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getfullargspec": names_of, "getcallargs": _bind})


def _call_at_once(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A function of the language as its innermost function, which is told its semantics: no dictionary is made for each call."""
    from triton.runtime.interpreter import interpreter_semantic

    inner = inspect.unwrap(member)

    def call(*given: Any, _semantic: Any = None, **named: Any) -> Any:
        return inner(*given, **named, _semantic=interpreter_semantic)

    scope.set_attr(owner, name, call)


def _make_values_once(interpreter: Any) -> None:
    """Ranges are made once, values checked once for each pair of types, and arguments on the host used where they are."""
    make_handle, fits = interpreter.TensorHandle, set[Any]()
    ranges = cache(lambda start, stop: np.arange(start, stop, dtype=np.int32))

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if (data.dtype, dtype.name) not in fits:
            self.__post_init__()
            fits.add((data.dtype, dtype.name))

    def make_range(self: Any, kind: Any, start: int, stop: int) -> Any:
        found = ranges(start, stop)
        found.flags.writeable = False
        return make_handle(found, interpreter.tl.int32)

    make_handle.__init__ = handle
    interpreter.InterpreterBuilder.create_make_range = make_range
    if not torch.cuda.is_available():
        interpreter.GridExecutor._init_args_hst = lambda self, given, named: (given, named)
        interpreter.GridExecutor._restore_args_dev = lambda self, *given: None


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


def _compute_at_once(tl: Any, handle_of: Any) -> None:
    """Operators, `where` and masked loads find what their first call with such types gave, and leave the rest to numpy.

    That call checks the types, and says the result's. Operands that need a conversion take this way each time.
    """
    core = tl.core
    for name, function in NUMPY.items():
        setattr(core.tensor, name, _operator(core, handle_of, name, getattr(core.tensor, name), function))
    core.tensor.to = _to(core, handle_of, core.tensor.to)
    core.where = tl.where = _where(core, handle_of, core.where)
    core.load = tl.load = _load(core, handle_of, core.load)


def _key_of(core: Any, value: Any) -> Any:
    """What a result's type depends on: a tensor's type, with its shape; or a number. None for others."""
    kind = type(value)
    if kind is core.tensor:
        return value.type.name
    return (kind, value) if kind is int else (kind, str(value)) if kind is float else None


def _constant(value: Any, dtype: str) -> np.ndarray | None:
    """A number among tensors of `dtype`; None where these are converted."""
    return np.array(value, TYPES[dtype]) if dtype in TYPES and (type(value) is int or dtype[0] == "f") else None


def _operator(core: Any, handle_of: Any, name: str, ordinary: Any, function: Any) -> Any:
    plans: dict[Any, Any] = {}

    def plan(left: Any, right: Any, result: Any) -> Any:
        """(the result's type, its handle's, numpy's, the right operand's number, bytes of what a pointer points to), or ()."""
        kind, number, width = left.dtype.name, None, 0
        if left.dtype.is_ptr():
            width = max(1, left.dtype.element_ty.primitive_bitwidth // 8)
            if type(right) is not core.tensor or name != "__add__" or right.dtype.name not in ("int32", "int64"):
                return ()
        elif type(right) is core.tensor:
            kinds = {kind, right.dtype.name}
            alike = len(kinds) == 1 and (kind in TYPES or (kind == "int1" and name in ("__and__", "__or__")))
            if not alike and kinds != {"int32", "int64"}:
                return ()
        elif (number := _constant(right, kind)) is None:
            return ()
        own = None if result.handle.dtype == left.handle.dtype else result.handle.dtype
        return result.type, own, result.handle.data.dtype, number, width

    def operator(self: Any, other: Any) -> Any:
        if type(other) is core.constexpr:
            other = other.value
        if (key := _key_of(core, other)) is None:
            return ordinary(self, other)
        key = self.type.name, key
        if not (found := plans.get(key)):
            result = ordinary(self, other)
            if found is None:
                plans[key] = plan(self, other, result)
            return result
        made, kind, dtype, number, width = found
        left, right = self.handle.data, other.handle.data if number is None else number
        if width:
            right = right.astype(np.uint64) * width
        data = function(left, right)
        if data.dtype is not dtype:
            return ordinary(self, other)
        return core.tensor(handle_of(data, kind or self.handle.dtype), made)

    return operator


def _to(core: Any, handle_of: Any, ordinary: Any) -> Any:
    plans: dict[Any, Any] = {}

    def plan(given: Any, result: Any) -> Any:
        """(the result's type, its handle's, numpy's), or (); no type for the tensor itself."""
        if result is given:
            return None, None, None
        alike = given.dtype.name in TYPES and result.dtype.name in TYPES
        return (result.type, result.handle.dtype, result.handle.data.dtype) if alike else ()

    def to(self: Any, dtype: Any, *options: Any, **named: Any) -> Any:
        if options or named:
            return ordinary(self, dtype, *options, **named)
        key = self.type.name, (dtype.value if type(dtype) is core.constexpr else dtype).name
        if not (found := plans.get(key)):
            result = ordinary(self, dtype)
            if found is None:
                plans[key] = plan(self, result)
            return result
        made, kind, numbers = found
        return self if made is None else core.tensor(handle_of(self.handle.data.astype(numbers), kind), made)

    return to


def _where(core: Any, handle_of: Any, ordinary: Any) -> Any:
    plans: dict[Any, Any] = {}

    def plan(condition: Any, chosen: list[Any], result: Any) -> Any:
        """(the result's type, its handle's, numpy's, the numbers among `chosen`), or ()."""
        numbers = [None if type(one) is core.tensor else _constant(one, result.dtype.name) for one in chosen]
        for one, number in zip(chosen, numbers, strict=True):
            if number is None and getattr(one, "dtype", None) != result.dtype:
                return ()
        alike = condition.dtype.name == "int1"
        return (result.type, result.handle.dtype, result.handle.data.dtype, numbers) if alike else ()

    def where(condition: Any, x: Any, y: Any) -> Any:
        chosen = [one.value if type(one) is core.constexpr else one for one in (x, y)]
        key = _key_of(core, condition), _key_of(core, chosen[0]), _key_of(core, chosen[1])
        if not (found := plans.get(key)):
            result = ordinary(condition, x, y)
            if found is None and None not in key:
                plans[key] = plan(condition, chosen, result)
            return result
        made, kind, dtype, numbers = found
        left, right = [
            one.handle.data if number is None else number for one, number in zip(chosen, numbers, strict=True)
        ]
        data = np.where(condition.handle.data, left, right)
        return core.tensor(handle_of(data, kind), made) if data.dtype is dtype else ordinary(condition, x, y)

    return where


def _load(core: Any, handle_of: Any, ordinary: Any) -> Any:
    from triton._C.libtriton import interpreter as native

    plans: dict[Any, Any] = {}

    def plan(pointer: Any, mask: Any, other: Any, result: Any) -> Any:
        """(the result's type, its handle's, the values of what is masked), or ()."""
        kind = result.dtype.name
        number = None if type(mask) is not core.tensor or type(other) is core.tensor else _constant(other, kind)
        if number is None or pointer.dtype.element_ty.name != kind:
            return ()
        return result.type, result.handle.dtype, np.full(result.handle.data.shape, number)

    def load(pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> Any:
        key = _key_of(core, pointer), _key_of(core, mask), _key_of(core, other)
        if not (found := plans.get(key)):
            result = ordinary(pointer, mask, other, **hints)
            if found is None and None not in key:
                plans[key] = plan(pointer, mask, other, result)
            return result
        made, kind, others = found
        places, wanted = [
            data if data.shape == others.shape else np.broadcast_to(data, others.shape)
            for data in (pointer.handle.data, mask.handle.data)
        ]
        return core.tensor(handle_of(native.load(places, wanted, others, others.dtype), kind), made)

    return load
