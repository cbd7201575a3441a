"""Which edits held NaN: found without a wait for the device, and with few kernels, however many requests edit a value."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from .nnsight_compat import apply

if TYPE_CHECKING:
    from ..receipt import Receipt
    from .trace import RequestTrace

Editor = tuple["Receipt", int, int, int]
"""Who edited a value, where its rows begin among those that were looked at, how many they are, and how often it edited them"""

Found = tuple[torch.Tensor, list[Editor]]
"""The greatest of each row, which is NaN where any is, and the editors"""


class _Sent:
    """What a pass has found, on its way to the host."""

    def __init__(self, number: int, found: list[Found]) -> None:
        self.number = number
        alike: dict[tuple[torch.dtype, torch.device], list[Found]] = {}
        for greatest, editors in found:
            alike.setdefault((greatest.dtype, greatest.device), []).append((greatest, editors))
        self._parts = [
            (torch.cat([g for g, _ in part]).isnan().to("cpu", non_blocking=True), [(len(g), e) for g, e in part])
            for part in alike.values()
        ]
        self._event: torch.cuda.Event | None = None
        if any(device.type == "cuda" for _, device in alike):
            self._event = torch.cuda.Event()
            self._event.record()

    def has_arrived(self) -> bool:
        return self._event is None or self._event.query()

    def count(self) -> None:
        """Add it to the receipts."""
        if self._event is not None:
            self._event.synchronize()
        for has_nan, part in self._parts:
            if has_nan.any():
                for rows, (_, editors) in zip(has_nan.split([length for length, _ in part]), part, strict=True):
                    for receipt, start, size, edits in editors:
                        if rows[start : start + size].any():
                            receipt.nan_edits += edits


class EditLog:
    """Counts the edits that held NaN.

    A value is looked at when its last block has gone on; several edits of one request at one place count as all or none.

    Attributes:
        number: of the pass that is under way.
    """

    def __init__(self) -> None:
        self.number = 0
        self._found: list[Found] = []
        self._sent: deque[_Sent] = deque()

    def note(self, value: Any, of_logits: bool, edits: dict[RequestTrace, int]) -> None:
        """`value` is what the model goes on with after so many `edits`."""
        for trace in edits:
            trace.last_edit = self.number
        apply(value, lambda tensor: self._note(tensor, of_logits, edits), torch.Tensor)

    def _note(self, tensor: torch.Tensor, of_logits: bool, edits: dict[RequestTrace, int]) -> torch.Tensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        state = tensor.detach() if tensor.requires_grad else tensor
        rows = next(iter(edits)).rows
        dim, logits = (None, False) if rows is None else rows.layout(tensor, of_logits)
        if dim is not None:
            places = [_place(trace, logits) for trace in edits]
            first, last = min(start for start, _ in places), max(start + size for start, size in places)
            if last - first < state.shape[dim]:
                state = state.narrow(dim, first, last - first)
            if len(places) > 1:
                others = [d for d in range(state.dim()) if d != dim]
                greatest = state.amax(others) if others else state.clone()
                editors = [
                    (t.receipt, start - first, size, n)
                    for (t, n), (start, size) in zip(edits.items(), places, strict=True)
                ]
                self._found.append((greatest, editors))
                return tensor
        self._found.append((state.max().reshape(1), [(trace.receipt, 0, 1, count) for trace, count in edits.items()]))
        return tensor

    def end_pass(self) -> None:
        """Send what was found to the host, and count what has arrived from earlier passes."""
        self._send()
        self.number += 1
        while self._sent and self._sent[0].has_arrived():
            self._sent.popleft().count()

    def settle(self, number: int) -> None:
        """Count what was found up to the pass `number`, whose outcome the host has seen."""
        if number == self.number:  # in a result, which comes after the last pass
            self._send()
        while self._sent and self._sent[0].number <= number:
            self._sent.popleft().count()

    def _send(self) -> None:
        if self._found:
            self._sent.append(_Sent(self.number, self._found))
            self._found = []


def _place(trace: RequestTrace, logits: bool) -> tuple[int, int]:
    rows = trace.rows
    assert rows is not None
    return (rows.logit_start, rows.logit_size) if logits else (rows.start, rows.size)
