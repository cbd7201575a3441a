"""Saved tensors: finding them, and giving them separate storage.

While a request runs, its saves are views of the batch's values. At the end of each pass they get separate storage
(`give_own_storage`). Or they share a piece with other saves of the same ``with`` block (`SaveTransfer.pack`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch

PLAIN = frozenset({torch.Tensor})
swap_tensor = torch._C._swap_tensor_impl  # pyright: ignore[reportAttributeAccessIssue]
"""Exchange two tensors in place, each with its storage and its base. Raises RuntimeError where torch refuses it."""


def find_tensors(value: Any, found: list[torch.Tensor], seen: dict[int, int]) -> None:
    """Append the tensors that `value` holds to `found`.

    Args:
        value: a tensor, or nested lists, tuples and dicts of tensors.
        seen: id of a list -> how many of its items earlier calls have searched. A list that grows by one item a step is
            not searched anew each time.
    """
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        first = seen.get(id(value), 0) if isinstance(value, list) else 0
        items = value[first:] if first else value
        if PLAIN.issuperset(map(type, items)):
            found += items
        else:
            for item in items:
                find_tensors(item, found, seen)
        if isinstance(value, list):
            # The last item may itself be a list that grows: it is searched again.
            seen[id(value)] = len(value) if not value or isinstance(value[-1], torch.Tensor) else len(value) - 1
    elif isinstance(value, dict):
        for item in value.values():
            find_tensors(item, found, seen)


def batch_views(tensors: Iterable[torch.Tensor], pieces: Collection[int] = ()) -> list[torch.Tensor]:
    """The tensors that keep more storage alive than they need, such as views of the batch. Each is listed once.

    Args:
        pieces: storages (`UntypedStorage._cdata`) that saves may share; see `SaveTransfer`.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and (
            tensor._base is not None or tensor.untyped_storage().nbytes() > tensor.nbytes
        ):
            if not (tensor.requires_grad or type(tensor) is torch.nn.Parameter):
                if not pieces or tensor.untyped_storage()._cdata not in pieces:
                    found[id(tensor)] = tensor
    return list(found.values())


def give_own_storage(tensors: Collection[torch.Tensor]) -> None:
    """Give each tensor a storage of its size, in place. On a GPU, tensors that are alike take one kernel."""
    if tensors:
        with torch.no_grad():
            _give_own_storage(tensors)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a new tensor of this shape."""
    return tuple(accumulate((max(size, 1) for size in shape[:0:-1]), mul, initial=1))[::-1] if shape else ()


def _give_own_storage(tensors: Collection[torch.Tensor]) -> None:
    # torch copies many tensors in one kernel only where dtypes, shapes and strides agree.
    alike: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.dtype, tensor.device, tensor.shape, tensor.stride()].append(tensor)
    for group in alike.values():
        copies = list(map(torch.empty_like, group))
        torch._foreach_copy_(copies, group)
        first = group[0]
        if first.is_contiguous() and first.stride() != (strides := contiguous_strides(first.shape)):
            # A dimension of size 1 has a stride of the batch, which would tell how many others were in it.
            for copy in copies:
                copy.as_strided_(first.shape, strides)
        for tensor, copy in zip(group, copies, strict=True):
            if tensor._base is None and not tensor.is_inference():
                tensor.data = copy
                continue
            try:
                # A view keeps its base alive, whatever its data is. So it is exchanged for the copy as a whole.
                swap_tensor(tensor, copy)
            except RuntimeError:
                pass  # torch refuses the base of other views: it keeps its storage


def saves_device(device: Any) -> torch.device:
    """The device that saves go to. Raises ValueError: torch has no such device here."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"device={device!r}: {str(error).splitlines()[0]}; it says where the saves of a trace go: 'cpu' (the default), or "
            "'cuda' to keep them on the GPU"
        ) from error
    return found
