"""``with loss.backward():``. Its block reads and edits gradients. All other code has torch's `backward` and `.grad`.

When nnsight is imported, it replaces `Tensor.backward`. It takes every call on the line of a ``with`` for the context of that
``with``. While a block reads gradients, it replaces `Tensor.grad` for all threads. `mount_backward` installs another
function.
The caller's bytecode tells whether ``with`` enters the call's result, and only that block itself is served gradients.
"""

from __future__ import annotations

import functools
import sys
import threading
from types import CodeType
from typing import Any

import torch
from greenlet import getcurrent

from ....utils.caller_frames import opens_with
from ..nnsight_compat import (
    BackwardTracer,
    Interleaver,
    Mediator,
    grad_property,
    nnsight_backward,
    push_result,
    torch_backward,
)
from .loops import under_ast_lock

TORCH_GRAD: Any = torch.Tensor.grad


SECOND_ORDER = (
    "open the second one behind the block of the first one, which has `.backward(create_graph=True)`; "
    "or use torch.autograd.grad"
)


class GradientBlock(Mediator):
    """The block of a ``with loss.backward():``.

    Attributes:
        gradients: nnsight's property, which the block reads and edits gradients by.
    """

    gradients: property


class GradientTracer(BackwardTracer):
    """A ``with loss.backward():`` block, as nnsight's. Only code of the block sees another `Tensor.grad`."""

    parse, compile = under_ast_lock(BackwardTracer.parse), under_ast_lock(BackwardTracer.compile)

    def execute(self, code: CodeType) -> None:
        """Run the backward pass, which serves gradients to the block, and bind its names in the caller's frame."""
        if _served() is not None:
            raise RuntimeError(f"`with ....backward():` inside the block of another one: {SECOND_ORDER}")
        if not self.tensor.requires_grad:
            try:
                return super().execute(code)  # raises nnsight's error
            except NotImplementedError as error:
                error.add_note(f"for a gradient of a gradient, {SECOND_ORDER}")
                raise
        frame: Any = self.info.frame  # pyright: ignore[reportOptionalMemberAccess]
        interleaver, hooks = Interleaver(), []
        block = GradientBlock(code, frame.f_globals, dict(frame.f_locals))
        block.gradients = grad_property(interleaver, set(), hooks)
        interleaver.mediators.append(block)
        try:
            with SERVED_GRADIENTS:
                # The block's greenlet belongs to this thread: autograd must not use other threads.
                with interleaver, torch.autograd.set_multithreading_enabled(False):
                    self.fn(self.tensor, *self.args, **self.kwargs)
                interleaver.check_dangling_mediators()
            push_result(frame, block.lcls)
        finally:
            for hook in hooks:
                hook.remove()
            interleaver.cancel()
            block.interleaver = None  # a cycle, which would keep the caller's variables


def _served() -> property | None:
    """The property of the block that is running now; None in all other code."""
    mediator = getattr(getcurrent(), "mediator", None)
    block = None if mediator is None else mediator()
    return block.gradients if isinstance(block, GradientBlock) else None


def _read(tensor: torch.Tensor) -> Any:
    served: Any = _served()
    return TORCH_GRAD.__get__(tensor, type(tensor)) if served is None else served.fget(tensor)


def _assign(tensor: torch.Tensor, value: Any) -> None:
    served: Any = _served()
    if served is None:
        TORCH_GRAD.__set__(tensor, value)
    else:
        served.fset(tensor, value)


def _delete(tensor: torch.Tensor) -> None:
    TORCH_GRAD.__delete__(tensor)


class _ServedGradients:
    """`Tensor.grad` is served to blocks as long as one of them is open, in any thread."""

    def __init__(self) -> None:
        self._lock, self._open = threading.Lock(), 0
        self._property: Any = property(_read, _assign, _delete)

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1
            torch.Tensor.grad = self._property

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                del torch.Tensor.grad  # torch's own is in its base class


SERVED_GRADIENTS = _ServedGradients()


@functools.wraps(torch_backward)
def _backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    caller = sys._getframe().f_back
    if caller is None or not opens_with(caller):
        return torch_backward(tensor, *args, **kwargs)
    tracer = GradientTracer(tensor, torch_backward, *args, **kwargs)
    tracer.capture()
    return tracer


def mount_backward() -> None:
    """Replace nnsight's `Tensor.backward`."""
    if torch.Tensor.backward is nnsight_backward:
        torch.Tensor.backward = _backward  # pyright: ignore[reportAttributeAccessIssue]


mount_backward()
