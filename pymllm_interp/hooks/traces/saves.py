"""What a trace saved: found, freed from the batch that it was cut out of, and handed to the caller.

While the request runs, a save lies where the block has it; from the end of its step on, in memory of its own (`own`), or in a
piece with others of its ``with`` block, which starts for the caller's device at once (`Delivery.pack`). When the request is over,
the caller is handed copies on the device of their choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable
from typing import Any

import torch


def find_tensors(value: Any, found: list[torch.Tensor], seen: dict[int, int]) -> None:
    """Look for tensors.

    Args:
        value: a tensor, or lists, tuples and dicts of them.
        found: they are added here.
        seen: lists that were gone through before, by id, with how many of their items; one that grows by an item a step is
            not walked anew each time.
    """
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        first = seen.get(id(value), 0) if isinstance(value, list) else 0
        items = value[first:] if first else value
        if _PLAIN.issuperset(map(type, items)):
            found += items
        else:
            for item in items:
                find_tensors(item, found, seen)
        if isinstance(value, list):
            # The last item may still grow (a list of lists): then it is looked at again.
            seen[id(value)] = len(value) if not value or isinstance(value[-1], torch.Tensor) else len(value) - 1
    elif isinstance(value, dict):
        for item in value.values():
            find_tensors(item, found, seen)


def unowned(tensors: Iterable[torch.Tensor], pieces: Container[int] = ()) -> list[torch.Tensor]:
    """Those that hold on to more memory than their own, the batch's as a rule, or to another's, each once.

    Args:
        pieces: memory that they may share; see `Delivery`.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            memory = tensor.untyped_storage()
            if memory.nbytes() > tensor.nbytes or tensor._base is not None:
                if not (tensor.requires_grad or memory._cdata in pieces or type(tensor) is torch.nn.Parameter):
                    found[id(tensor)] = tensor
    return list(found.values())


_PLAIN = frozenset({torch.Tensor})
_swap = torch._C._swap_tensor_impl  # pyright: ignore[reportAttributeAccessIssue]


def own(tensors: Collection[torch.Tensor]) -> None:
    """Give each tensor memory of its own, just as large as it is, in place. On a GPU that is one kernel for many."""
    if tensors:
        with torch.no_grad():
            _own(tensors)


def _own(tensors: Collection[torch.Tensor]) -> None:
    # torch copies many at once where all strides are the same, and else one by one.
    alike: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.dtype, tensor.device, tensor.shape, tensor.stride()].append(tensor)
    for group in alike.values():
        memories = list(map(torch.empty_like, group))
        torch._foreach_copy_(memories, group)
        for tensor, memory in zip(group, memories, strict=True):
            if tensor._base is None and not tensor.is_inference():
                tensor.data = memory
                continue
            try:
                # A view that the block made keeps its base, whatever memory it is given; so it becomes another tensor.
                _swap(tensor, memory)
            except RuntimeError:
                pass  # torch refuses that for the base of other views: that one stays as it is


def saves_device(device: Any) -> torch.device:
    """Where saves go. Raises ValueError if that is no device that torch has here."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"device={device!r}: {str(error).splitlines()[0]}; it says where the saves of a trace go: 'cpu' (the default), or "
            "'cuda' to keep them on the GPU"
        ) from error
    return found
