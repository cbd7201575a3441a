"""What a trace saved: found, freed from the batch that it was cut out of, and handed to the caller.

While the request runs, a save lies where the block has it; from the end of its step on, in memory of its own (`own`). When the
request is over, the caller is handed copies on the device of their choice (`Delivery`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import torch

from .nnsight_compat import apply


def find_unowned(value: Any, found: dict[int, torch.Tensor], seen: dict[int, int]) -> None:
    """Look for tensors in `value` that hold on to more memory than their own: the batch's, as a rule.

    Args:
        value: a tensor, or lists, tuples and dicts of them.
        found: they are added here, by id.
        seen: containers that were gone through before, by id, with how many of their items; a list that grows by an
            item a step is not walked anew each time.
    """
    if isinstance(value, torch.Tensor):
        if not value.requires_grad and value.layout is torch.strided and type(value) is not torch.nn.Parameter:
            if value.untyped_storage().nbytes() > value.nbytes:
                found[id(value)] = value
    elif isinstance(value, (list, tuple)):
        first = seen.get(id(value), 0) if isinstance(value, list) else 0
        for item in value[first:] if first else value:
            find_unowned(item, found, seen)
        if isinstance(value, list):
            # The last item may still grow (a list of lists), so it is looked at again.
            seen[id(value)] = max(len(value) - 1, 0)
    elif isinstance(value, dict):
        for item in value.values():
            find_unowned(item, found, seen)


def own(tensors: Collection[torch.Tensor]) -> None:
    """Give each tensor memory of its own, just as large as it is, in place. On a GPU that is one kernel for many."""
    if tensors:
        with torch.no_grad():
            _own(tensors)


def _own(tensors: Collection[torch.Tensor]) -> None:
    alike: dict[tuple[torch.dtype, torch.device, bool], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for tensor in tensors:
        memory = torch.empty_like(tensor)
        # torch copies many at once where all strides are the same, and else one by one.
        kind = tensor.dtype, tensor.device, memory.stride() == tensor.stride()
        alike.setdefault(kind, []).append((tensor, memory))
    for pairs in alike.values():
        torch._foreach_copy_([memory for _, memory in pairs], [tensor for tensor, _ in pairs])
        for tensor, memory in pairs:
            if tensor._base is None and not tensor.is_inference():
                tensor.data = memory
            else:
                # A view that the block made keeps its base, whatever memory it is given; so it becomes another tensor.
                # torch refuses that for the base of other views: that one stays as it is.
                with contextlib.suppress(RuntimeError):
                    torch._C._swap_tensor_impl(tensor, memory)  # pyright: ignore[reportAttributeAccessIssue]


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


_Copies = dict[int, tuple[torch.Tensor, int, torch.Tensor]]
"""id -> (the tensor, its version when it was copied, the copy); the tensor, so that its id stays its own"""


class Delivery:
    """Hands the saves of one ``with`` block to its caller. A tensor is copied once, under however many names it is saved.

    Copies from a GPU go to pinned memory on a stream of their own, so that the engine's work does not wait for them. Of many
    small tensors, those that are alike travel in one piece (`expect`, `send`); what the caller gets is cut from it and has
    memory of its own.

    Args:
        device: of what is handed over; None leaves it where it is.
    """

    SMALL = 1 << 20
    """Bytes of a tensor that travels together with others, at most."""
    PIECE = 64 << 20
    """Bytes that travel in one piece, at most."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self._copies: _Copies = {}
        self._expected: dict[int, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def expect(self, value: Any) -> None:
        """Note the tensors of `value`, which `hand` will be asked for: `send` copies them together."""
        if isinstance(value, torch.Tensor):
            small = value.layout is torch.strided and value.nbytes <= self.SMALL
            if small and not value.requires_grad and not self._is_there(value):
                self._expected[id(value)] = value
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.expect(item)
        elif isinstance(value, dict):
            for item in value.values():
                self.expect(item)

    def send(self) -> None:
        """Copy what is expected."""
        alike: dict[tuple[torch.dtype, torch.device, torch.Size], list[torch.Tensor]] = {}
        for tensor in self._expected.values():
            if self._copy_of(tensor, self._copies) is None:
                alike.setdefault((tensor.dtype, tensor.device, tensor.shape), []).append(tensor)
        self._expected = {}
        for tensors in alike.values():
            count = max(1, self.PIECE // max(1, tensors[0].nbytes))
            for first in range(0, len(tensors), count):
                self._send(tensors[first : first + count])

    def _send(self, tensors: list[torch.Tensor]) -> None:
        assert self.device is not None
        with torch.no_grad():
            piece = torch.stack(tensors)
            moved = self._moved(piece, self.device)
            self.wait()
            for tensor, copied in zip(tensors, moved.unbind(), strict=True):
                self._copies[id(tensor)] = tensor, _version(tensor), copied.clone()

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

    def _is_there(self, tensor: torch.Tensor) -> bool:
        target = self.device
        return target is None or tensor.device == target or (target.index is None and tensor.device.type == target.type)

    def _copy(self, tensor: torch.Tensor, known: _Copies) -> torch.Tensor:
        target = self.device
        if target is None or self._is_there(tensor):
            return tensor
        copied = self._copy_of(tensor, known)
        if copied is None:
            copied = self._moved(tensor.detach(), target)
        self._copies[id(tensor)] = tensor, _version(tensor), copied
        return copied

    @staticmethod
    def _copy_of(tensor: torch.Tensor, known: _Copies) -> torch.Tensor | None:
        _, version, copied = known.get(id(tensor), (None, None, None))
        return copied if version == _version(tensor) else None

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


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
