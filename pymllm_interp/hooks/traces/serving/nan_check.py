"""`NaNCheck`: counts edits that contain NaN, without waiting for the device, and with a few kernels per edited value."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch

from ....core.receipt import Receipt
from ..blocks.trace import RequestTrace
from ..nnsight_compat import apply

_Editor = tuple[Receipt, int, int, int]
"""(receipt of the request that edited, its first row, its number of rows, its number of edits)"""

_Found = tuple[torch.Tensor, list[_Editor]]
"""(maximum of each row [rows], or of all rows [], which is NaN if any element is; the requests that edited)"""


class _Sent:
    """Results of a pass, in flight to the host."""

    def __init__(self, pass_number: int, found: list[_Found]) -> None:
        self.pass_number = pass_number
        alike: defaultdict[tuple[torch.dtype, torch.device, bool], list[_Found]] = defaultdict(list)
        for maxima, editors in found:
            alike[maxima.dtype, maxima.device, maxima.dim() > 0].append((maxima, editors))
        self._parts = [
            (
                (torch.cat if by_row else torch.stack)([g for g, _ in part]).isnan().to("cpu", non_blocking=True),
                [(len(g) if by_row else 1, e) for g, e in part],
            )
            for (_, _, by_row), part in alike.items()
        ]
        self._event: torch.cuda.Event | None = None
        if any(device.type == "cuda" for _, device, _ in alike):
            self._event = torch.cuda.Event()
            self._event.record()

    def has_arrived(self) -> bool:
        return self._event is None or self._event.query()

    def count(self) -> None:
        """Wait for it, and add it to the receipts."""
        if self._event is not None:
            self._event.synchronize()
        for has_nan, part in self._parts:
            if has_nan.any():
                for rows, (_, editors) in zip(has_nan.split([length for length, _ in part]), part, strict=True):
                    for receipt, start, size, edits in editors:
                        if rows[start : start + size].any():
                            receipt.nan_edits += edits


class NaNCheck:
    """Counts edits that contain NaN, in the receipts of the requests that made them.

    A value is checked once, after its last block has been served. Several edits of one request at one value count as all
    or none.
    """

    def __init__(self) -> None:
        self.pass_number = 0
        self._found: list[_Found] = []
        self._sent: deque[_Sent] = deque()

    def check(self, value: Any, of_logits: bool, edits: dict[RequestTrace, int]) -> None:
        """Check an edited value.

        Args:
            value: value that the model continues with.
            of_logits: see `RowSpan.layout`.
        """
        for trace in edits:
            trace.last_edit = self.pass_number
        if isinstance(value, torch.Tensor):
            self._check(value, of_logits, edits)
        else:
            apply(value, lambda tensor: self._check(tensor, of_logits, edits), torch.Tensor)

    def _check(self, tensor: torch.Tensor, of_logits: bool, edits: dict[RequestTrace, int]) -> torch.Tensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        state = tensor.detach() if tensor.requires_grad else tensor
        rows = next(iter(edits)).rows
        dim, logits = (None, False) if rows is None or rows.covers_pass else rows.layout(tensor, of_logits)
        if dim is not None:
            spans = [_span(trace, logits) for trace in edits]
            first, last = min(start for start, _ in spans), max(start + size for start, size in spans)
            if last - first < state.shape[dim]:
                state = state.narrow(dim, first, last - first)
            if len(spans) > 1:
                others = [d for d in range(state.dim()) if d != dim]
                maxima = state.amax(others) if others else state.clone()
                editors = [
                    (t.receipt, start - first, size, n)
                    for (t, n), (start, size) in zip(edits.items(), spans, strict=True)
                ]
                self._found.append((maxima, editors))
                return tensor
        self._found.append((state.max(), [(trace.receipt, 0, 1, count) for trace, count in edits.items()]))
        return tensor

    def end_pass(self) -> None:
        """Send the pass's findings to the host, and count arrived ones of earlier passes."""
        self._send()
        self.pass_number += 1
        while self._sent and self._sent[0].has_arrived():
            self._sent.popleft().count()

    def settle(self, pass_number: int) -> None:
        """Count the findings up to the pass `pass_number`. Waits for the device."""
        if pass_number == self.pass_number:  # edits of a result come after the last pass
            self._send()
        while self._sent and self._sent[0].pass_number <= pass_number:
            self._sent.popleft().count()

    def _send(self) -> None:
        if self._found:
            self._sent.append(_Sent(self.pass_number, self._found))
            self._found = []


def _span(trace: RequestTrace, logits: bool) -> tuple[int, int]:
    rows = trace.rows
    assert rows is not None
    return (rows.logit_start, rows.logit_size) if logits else (rows.start, rows.size)
