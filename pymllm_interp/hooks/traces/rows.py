"""`RowSpan`: which rows of a pass's values belong to one request.

The batch is flat. Most values have one row per token of the step, in dim 1 behind a leading 1 at module boundaries and in
dim 0 inside a module. Values of the head have *logit rows* instead: one row per token whose logits are computed.
"""

from __future__ import annotations

from typing import Any

import torch


class RowSpan:
    """A request's rows in the values of one pass.

    Attributes:
        start, size, total: first row, number of rows, and rows of all requests, among token rows.
        logit_start, logit_size, logit_total: the same among logit rows.
        alone: the request has all rows, so that values are served whole.
    """

    __slots__ = ("alone", "logit_size", "logit_start", "logit_total", "size", "start", "total")

    def __init__(self, start: int, size: int, total: int, logit_start: int, logit_size: int, logit_total: int) -> None:
        self.start, self.size, self.total = start, size, total
        self.logit_start, self.logit_size, self.logit_total = logit_start, logit_size, logit_total
        self.alone = size == total and logit_size == logit_total

    def layout(self, tensor: torch.Tensor, of_logits: bool) -> tuple[int | None, bool]:
        """(the dim of `tensor` that holds the pass's rows, or None; whether they are logit rows).

        Args:
            of_logits: logit rows are the first guess where `tensor` could have either kind.
        """
        if type(tensor) is torch.Tensor or not isinstance(tensor, torch.nn.Parameter):
            shape = tensor.shape
            for logits in (True, False) if of_logits else (False, True):
                total = self.logit_total if logits else self.total
                if len(shape) >= 2 and shape[0] == 1 and shape[1] == total:
                    return 1, logits
                if len(shape) >= 1 and shape[0] == total:
                    return 0, logits
        return None, False

    def narrow(self, tensor: torch.Tensor, of_logits: bool) -> Any:
        """The request's rows of `tensor`, as a view."""
        if self.alone:
            return tensor
        dim, logits = self.layout(tensor, of_logits)
        if dim is None:
            return tensor
        start, size = (self.logit_start, self.logit_size) if logits else (self.start, self.size)
        return tensor.narrow(dim, start, size).detach()
