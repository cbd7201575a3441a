"""`module.weight` of a quantised module: a dequantised copy. It refuses writes, which would be lost."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from .weight import QuantizedWeight

IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
)  # fmt: skip


def refuse_write(path: str) -> NoReturn:
    """Raise the error of a write to a quantised weight."""
    raise NotImplementedError(
        f"`{path or 'weight'}` is quantised: what is read here is a dequantised copy, and a write to it would be lost. Edit the "
        "module's output in a trace or by an op, add a LoRA adapter, or load unquantised weights"
    )


class DequantizedWeight(torch.Tensor):
    """A dequantised copy. Reads and arithmetic are torch's; in-place operations on it and on its views are refused."""

    path: ClassVar[str] | str = ""

    @classmethod
    def of(cls, weight: torch.Tensor, path: str) -> DequantizedWeight:
        """A tensor under these rules.

        Args:
            path: names it in errors.
        """
        found = weight.as_subclass(cls)
        found.path = path
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        own = next((arg for arg in args if isinstance(arg, cls)), None)
        written = args[0] if args and _writes(name) else kwargs.get("out")
        if isinstance(written, cls) and not (name == "requires_grad_" and args[1:2] == (False,)):
            refuse_write(written.path)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if isinstance(out, tuple | list):
            return type(out)(_guarded(value, own) for value in out) if type(out) in (tuple, list) else out
        return _guarded(out, own)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy as an ordinary parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            copied = memo[id(self)] = nn.Parameter(self.as_subclass(torch.Tensor).clone(), False)
        return copied


def _writes(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    return name in ("__setitem__", "__set__") or name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _guarded(value: Any, own: DequantizedWeight | None) -> Any:
    """A view of the weight follows its rules; other results are plain tensors."""
    if own is None or not isinstance(value, torch.Tensor):
        return value
    if value.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
        return value.as_subclass(torch.Tensor)
    return DequantizedWeight.of(value, own.path)


class QuantizableModule(nn.Module):
    """A module with `weight`, a parameter or quantised.

    Attributes:
        quantized: the weight as it is stored; None: `weight` is a parameter.
    """

    quantized: QuantizedWeight | None = None
    transposed = False
    """Whether `weight` is [in, out]."""

    def set_quantized(self, weight: QuantizedWeight) -> None:
        """Store a quantised weight in place of the parameter. Its tensors become the buffers `weight_codes` and so on."""
        self._parameters["weight"] = None
        self.quantized = weight
        for name, tensor in weight.tensors.items():
            self.register_buffer(f"weight_{name}", tensor)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.quantized is not None:
            weight = self.quantized.dequantize()
            path = f"{vars(self).get('sealed_path', '')}.weight".lstrip(".")
            return DequantizedWeight.of(weight.t() if self.transposed else weight, path)
        return super().__getattr__(name)
