"""What a trace saved: found, freed from the batch that it was cut out of, and handed to the caller.

While the request runs, a save lies where the block has it, in memory of its own (`release`). When it is over, the caller is
handed copies on the device of their choice (`Delivery`).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .nnsight_compat import apply


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
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        with torch.no_grad():
            own = tensor.clone(memory_format=torch.contiguous_format)
            if tensor._base is None and not tensor.is_inference():
                tensor.set_(own)  # pyright: ignore[reportArgumentType]
            else:
                # A view that the block made keeps its base, whatever memory it is given. torch refuses to replace a tensor
                # that has weak references: that one stays a view.
                with contextlib.suppress(RuntimeError):
                    torch.utils.swap_tensors(tensor, own)


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


class Delivery:
    """Hands the saves of one ``with`` block to its caller. A tensor is copied once, under however many names it is saved.

    Copies from a GPU go to pinned memory on a stream of their own, so that the engine's work does not wait for them.

    Args:
        device: of what is handed over; None leaves it where it is.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """id -> (the tensor, its version when it was copied, the copy); the tensor, so that its id stays its own"""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copies(self, value: Any) -> Any:
        """`value` with its tensors on the device, for one who looks while the block goes on with its own."""
        known, self._copies = self._copies, {}
        copied = apply(value, lambda tensor: self._copy(tensor, known), torch.Tensor)
        self.wait()
        return copied

    def hand(self, value: Any, detached: bool = False) -> Any:
        """`value` with its tensors on the device; lists and dicts stay the objects that they are. `wait` comes after it.

        Args:
            detached: without their autograd graphs, too.
        """
        if isinstance(value, torch.Tensor):
            if detached and value.requires_grad and not isinstance(value, torch.nn.Parameter):
                value = value.detach()
            return self._copy(value, self._copies)
        if isinstance(value, list):
            value[:] = [self.hand(item, detached) for item in value]
        elif isinstance(value, dict):
            for key, item in list(value.items()):
                value[key] = self.hand(item, detached)
        elif isinstance(value, tuple):
            items = [self.hand(item, detached) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def wait(self) -> None:
        """Wait for the copies that are under way."""
        for stream in self._streams.values():
            stream.synchronize()
        self._streams.clear()

    def _copy(self, tensor: torch.Tensor, known: dict[int, tuple[torch.Tensor, int, torch.Tensor]]) -> torch.Tensor:
        target = self.device
        if target is None or tensor.device == target or (target.index is None and tensor.device.type == target.type):
            return tensor
        version = 0 if tensor.is_inference() else tensor._version
        entry = known.get(id(tensor))
        if entry is None or entry[1] != version:
            entry = tensor, version, self._moved(tensor.detach(), target)
        self._copies[id(tensor)] = entry
        return entry[2]

    def _moved(self, tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
        if not tensor.is_cuda or target.type != "cpu" or tensor.layout is not torch.strided:
            return tensor.to(target)
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        copied = torch.empty_like(tensor, device=target, pin_memory=True)
        with torch.cuda.stream(stream):
            copied.copy_(tensor, non_blocking=True)
        return copied
