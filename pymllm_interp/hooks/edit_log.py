"""Which edits held NaN: found without a wait for the device, and with few kernels, however many requests edit a value."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from .nnsight_compat import apply

if TYPE_CHECKING:
    from .receipt import Receipt
    from .trace import RequestTrace

Editor = tuple["Receipt", int, int, int]
"""Who edited a value, where its rows begin among those that were looked at, how many they are, and how often it edited them"""


class _Sent:
    """What a pass has found, on its way to the host."""

    def __init__(self, number: int, found: list[tuple[torch.Tensor, list[Editor]]]) -> None:
        self.number = number
        self.found = [(has_nan.to("cpu", non_blocking=True), editors) for has_nan, editors in found]
        self.event: torch.cuda.Event | None = None
        if any(has_nan.is_cuda for has_nan, _ in found):
            self.event = torch.cuda.Event()
            self.event.record()

    def has_arrived(self) -> bool:
        return self.event is None or self.event.query()

    def count(self) -> None:
        """Add it to the receipts."""
        if self.event is not None:
            self.event.synchronize()
        for has_nan, editors in self.found:
            if has_nan.any():
                for receipt, start, size, edits in editors:
                    if has_nan[start : start + size].any():
                        receipt.nan_edits += edits


class EditLog:
    """Counts the edits that held NaN.

    A value is looked at when its last block has gone on; several edits of one request at one place count as all or none.

    Attributes:
        number: of the pass that is under way.
    """

    def __init__(self) -> None:
        self.number = 0
        self._found: list[tuple[torch.Tensor, list[Editor]]] = []
        self._sent: deque[_Sent] = deque()

    def note(self, value: Any, of_logits: bool, edits: dict[RequestTrace, int]) -> None:
        """`value` is what the model goes on with after so many `edits`."""
        for trace in edits:
            trace.last_edit = self.number
        apply(value, lambda tensor: self._note(tensor, of_logits, edits), torch.Tensor)

    def _note(self, tensor: torch.Tensor, of_logits: bool, edits: dict[RequestTrace, int]) -> torch.Tensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        rows = next(iter(edits)).rows
        dim, logits = (None, False) if rows is None else rows.layout(tensor, of_logits)
        state = tensor.detach()
        if dim is None:
            editors = [(trace.receipt, 0, 1, count) for trace, count in edits.items()]
            greatest = state.max().reshape(1)  # NaN where any is
        else:
            editors = [(trace.receipt, *_place(trace, logits), count) for trace, count in edits.items()]
            first = min(start for _, start, _, _ in editors)
            state = state.narrow(dim, first, max(start + size for _, start, size, _ in editors) - first)
            editors = [(receipt, start - first, size, count) for receipt, start, size, count in editors]
            greatest = state.movedim(dim, 0).flatten(1).amax(1) if state.ndim > 1 else state
        self._found.append((greatest.isnan(), editors))
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
