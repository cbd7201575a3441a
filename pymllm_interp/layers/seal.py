"""Writes to a served model through torch: each takes effect, or is refused at once.

Most passes run fused, or as CUDA graphs, so they call no module and hold the addresses of the weights. `seal` therefore
gives the modules of a loaded model these rules:

| what is written | what happens |
|---|---|
| ``weight[:] = x``, ``weight.data.copy_(x)``, ``weight.add_(x)``, ``load_state_dict`` | torch's: in place, seen by every pass |
| ``weight.data = x``, ``module.weight = nn.Parameter(x)`` | `x` is copied into the weight, which stays the same object |
| ``register_forward_hook`` and its relatives, ``module.forward = f``, ``compile()`` | refused: passes call no module |
| ``layer.mlp = Other()``, ``del layer.mlp``, ``layers.append(...)``, ``norm.variance_epsilon = 1`` | refused: passes were built |
| ``.to(...)``, ``.half()``, ``.cuda()`` | work where they change nothing; refused otherwise |
| ``.train()``, ``requires_grad_()`` | refused; ``.eval()`` and ``requires_grad_(False)`` work |
| ``layer.sae = SAE()``: a name that the model does not have | torch's: blocks of traces call such modules |
| ``copy.deepcopy(lm.lm_head._module)`` | an ordinary module with its own weights, which do not require gradients |

A parameter of your own is made from a weight by ``nn.Parameter(weight.data)``; torch refuses ``nn.Parameter(weight)``.

Not seen by any of this: writes to ``module._modules`` and other private attributes, and torch's global module hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from functools import cache
from types import new_class
from typing import Any, NoReturn

import torch
from torch import nn

from .quantization.experts import QuantizableExperts
from .quantization.readable import QuantizableModule, refuse_write

INSTEAD_OF_HOOKS = (
    "in a trace, `with lm.trace(prompt): h = lm.{path}.output` reads and edits the rows of its own request; "
    "`lm.run_with_hooks(prompts, fwd_hooks=[(site, function)])` calls functions, and `with lm.edit(inplace=True):` is a block "
    "that runs with every later request"
)
INSTEAD_OF_MODULES = (
    "edit the values in its place: `lm.{path}.output = other(lm.{path}.input)` in a trace, or in `with lm.edit(inplace=True):` "
    "for every later request; a module under a new name can be attached and called there"
)
HOOKS = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_backward_hook",
)  # fmt: skip


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of those that belong to the weights, as a router's bias does. Others follow from the config."""
    saved = model.state_dict(keep_vars=True)
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def quantised_names(module: nn.Module) -> Collection[str]:
    """Names of a module's quantised weights."""
    if isinstance(module, QuantizableExperts):
        return module.quantized
    return ("weight",) if isinstance(module, QuantizableModule) and module.quantized is not None else ()


class Weight(nn.Parameter):
    """A parameter of a sealed module: it keeps its memory, which fused passes and CUDA graphs read."""

    is_tied = False
    """Whether several modules have it (tied embeddings)."""
    path = "a copy of a weight"

    @property
    def data(self) -> torch.Tensor:
        """An alias without gradients. Its in-place edits count in `_version`, unlike torch's, so they are noticed."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        write(self, value)

    @property
    def requires_grad(self) -> bool:
        """False: weights have no gradients."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, mode: bool = True) -> Weight:
        """Raise NotImplementedError for `mode=True`."""
        if mode:
            raise NotImplementedError(
                f"`{self.path}` cannot require gradients: a trace has gradients of hidden states (`with loss.backward(): h.grad`), "
                "not of weights; for those, load the model with transformers"
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy as an ordinary parameter."""
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), False)
        return copied

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: the weight would get other memory."""
        raise NotImplementedError(
            f"`{self.path}` keeps its memory, which captured passes read: write `weight.copy_(x)`"
        )


class ElsewhereWeight(Weight):
    """A weight with its values elsewhere: on a server, or in kernels of vLLM. Only its shape and the like can be read.

    Torch computes with a meta tensor beside one of the CPU in some products, and returns memory without values.
    """

    FACTS = frozenset({
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "is_meta", "is_cuda", "is_leaf", "size", "dim",
        "numel", "nelement", "element_size", "is_floating_point", "is_complex", "__len__", "__repr__", "__format__", "__hash__",
        "_version", "grad", "grad_fn",
    })  # fmt: skip
    why = "has its values elsewhere"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for `FACTS`; refuse all else."""
        name = getattr(func, "__name__", "")
        name = getattr(func.__self__, "__name__", name) if name == "__get__" else name
        if name not in cls.FACTS:
            own = next((arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls)), None)
            raise NotImplementedError(f"a weight {cls.why}" if own is None else f"`{own.path}` {own.why}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def refuse_weights(module: nn.Module, why: str) -> None:
    """Have uses of the values that a sealed tree does not have refused.

    Args:
        why: message behind the weight's name.
    """
    for parameter in module.parameters():
        if parameter.is_meta:
            parameter.__class__ = ElsewhereWeight
            assert isinstance(parameter, ElsewhereWeight)
            parameter.why = why


def write(weight: Weight | WeightBuffer, value: Any) -> None:
    """Copy `value` into a weight. Raises ValueError: no tensor, or one of another shape, dtype or device."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"`{weight.path}` is a weight of the served model; expected a tensor, got {type(value).__name__}"
        )
    for name in ("shape", "dtype", "device"):
        old, new = getattr(weight, name), getattr(value, name)
        if old != new:
            old, new = (list(old), list(new)) if name == "shape" else (old, new)
            fix = "" if name == "shape" else "; write `x.to(weight)`"
            raise ValueError(f"`{weight.path}` has {name} {old}, and the assigned tensor has {new}{fix}")
    with torch.no_grad():
        if value.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr():
            value = value.clone()  # a view of the weight itself, such as its transpose
        weight.copy_(value)


class WeightBuffer(torch.Tensor):
    """A persistent buffer of a sealed module: part of the weights, though not trained. It keeps its memory, too."""

    # As a parameter's: results are ordinary tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]
    is_tied = False
    path = "a copy of a buffer"

    data = Weight.data
    set_ = Weight.set_

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy as an ordinary tensor."""
        copied = memo[id(self)] = self.detach().clone()
        return copied


class Sealed(nn.Module):
    """The rules of `seal`, as a base class of a sealed module's class."""

    sealed_path: str
    """The module's name in the model."""
    sealed_names: frozenset[str]
    """The model's own names: of modules, parameters and public attributes."""

    def _refuse(self, what: str, why: str, instead: str) -> NoReturn:
        path = self.sealed_path
        raise NotImplementedError(
            f"`{path or 'the model'}`: {what}: {why}. Instead: {instead.format(path=path or 'model')}"
        )

    def _refuse_replacement(self, name: str) -> NoReturn:
        path = f"{self.sealed_path}.{name}".lstrip(".")
        why = "the passes of the engine were built from this model, and would go on without the change"
        if name not in self._modules and not isinstance(self, nn.ModuleList):
            self._refuse(
                f"`{name}` cannot be changed", why, "load the model with another config, or edit values in a trace"
            )
        raise NotImplementedError(
            f"`{path}` cannot be replaced or removed: {why}. Instead: {INSTEAD_OF_MODULES.format(path=path)}"
        )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: passes run fused, and a hook would see the rows of all requests of a step."""
        why = "most passes call no module, and those that do hold the rows of every request in the batch"
        self._refuse("torch's hooks are not supported", why, INSTEAD_OF_HOOKS)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError: fused passes do not call the module."""
        why = "fused passes do not call it"
        self._refuse(
            "it cannot be compiled on its own", why, "EngineTuning(enable_torch_compile=True) compiles captured passes"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            self._refuse("`forward` cannot be replaced", "most passes call no module", INSTEAD_OF_HOOKS)
        if name not in self.sealed_names:
            super().__setattr__(name, value)
            return
        if name in quantised_names(self):
            refuse_write(f"{self.sealed_path}.{name}")
        if value is getattr(self, name):
            return
        weight = self._parameters.get(name)
        if weight is None:
            weight = self._buffers.get(name)
        if weight is None:
            self._refuse_replacement(name)
        assert isinstance(weight, Weight | WeightBuffer)
        if weight.is_tied:
            raise NotImplementedError(
                f"`{weight.path}` is tied: another module has the same weight, and both would change. Where that is meant, write "
                "`weight.data = x`; to untie them, load the model with tie_word_embeddings=False"
            )
        write(weight, value)

    def __delattr__(self, name: str) -> None:
        if name in self.sealed_names:
            self._refuse_replacement(name)
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Attach a module under a new name."""
        if self._modules.get(name, self) is module:
            return
        if name in self.sealed_names or isinstance(self, nn.ModuleList):
            self._refuse_replacement(name)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Attach a parameter under a new name; one of the model's own is written in place."""
        if name in self.sealed_names:
            setattr(self, name, param)
            return
        if isinstance(param, Weight):  # as torch.nn.utils.prune does, before it computes the weight in a hook
            self._refuse(
                "a weight cannot be registered under another name",
                "passes read the weight itself",
                "write `weight[:] = x`",
            )
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Attach a buffer under a new name; a persistent one of the model's own is written in place."""
        if name in self.sealed_names:
            setattr(self, name, tensor)
            return
        super().register_buffer(name, tensor, persistent)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy that is not served: it follows torch's rules."""
        cls = type(self).__bases__[1]
        own = getattr(cls, "__deepcopy__", None)
        if own is not None:
            return own(self, memo)
        copied: nn.Module = object.__new__(cls)
        memo[id(self)] = copied
        kept = {name: value for name, value in vars(self).items() if name not in ("sealed_path", "sealed_names")}
        vars(copied).update(deepcopy(kept, memo))
        return copied

    def train(self, mode: bool = True) -> Sealed:
        """Raise NotImplementedError for `mode=True`; do nothing for `eval()`."""
        if mode:
            self._refuse("it cannot be trained", "the engine serves it", "load the model with transformers")
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Sealed:
        """Check that `.to`, `.half`, `.cuda` and their relatives, which call this, change nothing."""
        for tensor in (*self.parameters(recurse), *self.buffers(recurse)):
            if (changed := fn(tensor)) is not tensor:
                self._refuse(
                    f"its weights stay {tensor.dtype} on {tensor.device}",
                    f"this would make them {changed.dtype} on {changed.device}, and the engine's memory was laid out for them",
                    "LM(..., dtype=..., device=...)",
                )
        return self


class SealedList(Sealed):
    """An `nn.ModuleList` that refuses replacement of its modules."""

    def __getitem__(self, idx: Any) -> Any:
        """A module; of a slice, an ordinary list of modules."""
        if isinstance(idx, slice):
            return nn.ModuleList(list(self._modules.values())[idx])  # pyright: ignore[reportArgumentType]
        return nn.ModuleList.__getitem__(self, idx)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def insert(self, index: int, module: nn.Module) -> None:
        """Raise NotImplementedError."""
        self._refuse_replacement(str(index))


for _hook in HOOKS:
    setattr(Sealed, _hook, Sealed._refuse_hook)


@cache
def _sealed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `cls` with the rules of `Sealed`, and its name."""
    bases = (SealedList if issubclass(cls, nn.ModuleList) else Sealed, cls)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return new_class(cls.__name__, bases, exec_body=lambda namespace: namespace.update(names))


def seal(model: nn.Module) -> None:
    """Apply the rules above to all modules, parameters and persistent buffers of a loaded model. Their objects stay the same."""
    named = list(model.named_parameters(remove_duplicate=False))
    times: dict[int, int] = {}
    for _, parameter in named:
        times[id(parameter)] = times.get(id(parameter), 0) + 1
    for path, parameter in reversed(named):  # a tied weight gets its first name
        parameter.__class__ = Weight
        assert isinstance(parameter, Weight)
        parameter.path, parameter.is_tied = path, times[id(parameter)] > 1
    for path, buffer in persistent_buffers(model):
        buffer.__class__ = WeightBuffer
        assert isinstance(buffer, WeightBuffer)
        buffer.path = path
    for path, module in model.named_modules():
        buffers = {name for name, buffer in module._buffers.items() if isinstance(buffer, WeightBuffer)}
        attributes = {name for name in vars(module) if not name.startswith("_") and name != "training"}
        names = frozenset(attributes | buffers | {*module._modules, *module._parameters})
        vars(module).update(sealed_path=path, sealed_names=names)
        module.__class__ = _sealed_class(type(module))


def is_own_name(module: Any, name: str) -> bool:
    """Whether a module is sealed, and `name` is one of the model's own names there."""
    return isinstance(module, Sealed) and (name in module.sealed_names or name == "forward")
