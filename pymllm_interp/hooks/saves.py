"""What a trace saved: found, and freed from the batch that it was cut out of."""

from __future__ import annotations

from typing import Any

import torch


def release(value: Any, seen: dict[int, int]) -> None:
    """Give every tensor in `value` memory of its own, in place: a saved row must not hold on to the whole batch.

    Args:
        value: a tensor, or lists, tuples and dicts of them.
        seen: containers that were gone through before, by id, with how many of their items; a list that grows by an
            item a step is not walked anew each time.
    """
    if isinstance(value, torch.Tensor):
        _own(value)
    elif isinstance(value, (list, tuple)):
        first = seen.get(id(value), 0) if isinstance(value, list) else 0
        for item in value[first:]:
            release(item, seen)
        if isinstance(value, list):
            # The last item may still grow (a list of lists), so it is looked at again.
            seen[id(value)] = max(len(value) - 1, 0)
    elif isinstance(value, dict):
        for item in value.values():
            release(item, seen)


def _own(tensor: torch.Tensor) -> None:
    if tensor.requires_grad or tensor.layout is not torch.strided or type(tensor) is torch.nn.Parameter:
        return
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        with torch.no_grad():
            tensor.set_(tensor.clone(memory_format=torch.contiguous_format))  # pyright: ignore[reportArgumentType]


def detach(value: Any) -> Any:
    """`value` without its autograd graph; lists and dicts keep their identity, their tensors are replaced."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.requires_grad and not isinstance(value, torch.nn.Parameter) else value
    if isinstance(value, list):
        value[:] = [detach(item) for item in value]
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            value[key] = detach(item)
    elif type(value) is tuple:
        return tuple(detach(item) for item in value)
    return value
