"""`Ranks`: functions that all ranks compute together. Rank 0 calls them in the order of its pass, and the others follow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

Function = Callable[..., torch.Tensor]
"""Whole tensors, and perhaps a number -> a whole tensor. Each rank computes its own part."""
END = -1


class Ranks:
    """The functions of a model's parts, in the same order on all ranks.

    Only rank 0 knows the edits of a block, and the modules that it calls. So the other ranks run no model of their own meanwhile.
    They are told which function comes next, and its inputs.

    Args:
        group: vLLM's `GroupCoordinator` of the ranks.
        context: context of the calls.
    """

    def __init__(self, group: Any, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.group, self.size, self.rank = group, group.world_size, group.rank_in_group
        self._context = context
        self.followed = False  # others wait for rank 0's calls
        self._functions: list[Function] = []

    def add(self, function: Function) -> Function:
        """The function as rank 0 calls it: all ranks compute it."""
        function = in_inference_mode(function, self._context)
        self._functions.append(function)
        return function if self.size == 1 else partial(self._call, len(self._functions) - 1)

    def _call(self, index: int, *inputs: Any) -> torch.Tensor:
        if not self.followed:
            raise RuntimeError(
                "with several ranks a block calls modules while it waits for one: behind the pass, at `lm.logits` or `lm.samples`, "
                "the other ranks do not take part"
            )
        self._tell(index, inputs)
        return self._functions[index](*inputs)

    def _tell(self, index: int, inputs: tuple[Any, ...] = ()) -> None:
        contiguous = (one.contiguous() if isinstance(one, torch.Tensor) else one for one in inputs)
        told: dict[str, Any] = {"function": index} | {str(i): one for i, one in enumerate(contiguous)}
        self.group.broadcast_tensor_dict(told, src=0)

    def follow(self) -> bool:
        """Take part in rank 0's calls until its pass ends. False: the pass has failed, and is run again without blocks."""
        while True:
            told = self.group.broadcast_tensor_dict(None, src=0)
            index = told.pop("function")
            if index < 0:
                return index == END
            self._functions[index](*told.values())

    def end(self, failed: bool = False) -> None:
        """Let the other ranks leave `follow`."""
        self.followed = False
        if self.size > 1:
            self._tell(END - failed)

    def shared(self, rows: torch.Tensor) -> torch.Tensor:
        """Rank 0's rows, on all ranks. Others give memory of their shape."""
        return rows if self.size == 1 else self.group.broadcast(rows.contiguous(), src=0)

    def agreed(self, value: Any) -> Any:
        """Rank 0's value, on all ranks: anything that pickles."""
        return value if self.size == 1 else self.group.broadcast_object(None if self.rank else value, src=0)

    # -- parts of the ranks ----------------------------------------------------------------------

    def own(self, whole: torch.Tensor, parts: int | None = None) -> torch.Tensor:
        """This rank's part of the last dim.

        Args:
            parts: number of different parts; None: one for each rank. Fewer are shared by ranks that follow each other.
        """
        count = self.size if parts is None else parts
        width = whole.shape[-1] // count
        return whole.narrow(-1, self.rank * count // self.size * width, width)

    def joined(self, own: torch.Tensor, parts: int | None = None) -> torch.Tensor:
        """The reverse of `own`."""
        if self.size == 1:
            return own
        found = self.group.all_gather(own.contiguous(), -1)
        step = 1 if parts is None else self.size // parts
        return found if step == 1 else torch.cat(found.split(own.shape[-1], -1)[::step], -1)


def in_inference_mode(function: Function, context: Callable[[], AbstractContextManager[Any]]) -> Function:
    """A function of vLLM as vLLM calls it: its kernels write to tensors that were made in inference mode.

    The outcome is another tensor, which a block may edit.
    """

    def call(*inputs: Any) -> torch.Tensor:
        with torch.inference_mode(), context():
            out = function(*inputs)
        return out.clone() if isinstance(out, torch.Tensor) and out.is_inference() else out

    return call
