"""A value of the whole batch, cut into rows for blocks, and joined after their edits."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from ....core.forward_batch import ForwardBatch
from ..blocks.errors import EditError, MixedRowsError
from ..blocks.trace import RequestTrace
from ..nnsight_compat import apply
from .attention_mask import ServedMasks, takes_token_ids
from .batch_cut import BatchCut
from .rows import Rows


class SharedValue:
    """A value of the whole batch, while the blocks that wait for it are served one after another.

    Served rows share the batch's memory, so an in-place edit reaches the model. Assigned rows are held until the last block
    has been served (`settle`). So the batch's rows are copied once for all requests that assign.

    Args:
        value: result of the model. Its memory is never assigned to, since the model may use it elsewhere.
        of_logits: whether it has logit rows instead of token rows.
        readers: number of blocks that wait for it, as far as is known.

    Attributes:
        edits: number of edits of each trace.
        containers: the last tuple or dict that each trace was served, or has assigned.
        masks: the attention masks among them; None without any.
        row_memory: memory of the batch that was cut into single rows, [rows, ...] each; see `SaveTransfer.adopt`.
    """

    __slots__ = (
        "_assigned",
        "_cuts",
        "_differentiable",
        "_whole",
        "containers",
        "edits",
        "masks",
        "of_logits",
        "readers",
        "row_memory",
        "value",
    )

    def __init__(self, value: Any, of_logits: bool, readers: int = 1) -> None:
        self.value, self.of_logits, self.readers = value, of_logits, readers
        self.edits: dict[RequestTrace, int] = {}
        self.containers: dict[RequestTrace, Any] = {}
        self.masks: ServedMasks | None = None
        self._cuts: dict[int, BatchCut] = {}
        self._whole: BatchCut | None = None  # if the value is one tensor
        self._assigned = self._differentiable = False
        self.row_memory: list[torch.Tensor] = []

    def rows_of(self, rows: Rows | None) -> Any:
        """The request's rows of each tensor, or their assigned values. The whole value if `rows` is None."""
        value = self.value
        if rows is None or rows.covers_pass:
            return value
        if torch.is_grad_enabled():
            self._differentiable = True  # the model continues with served values, so that gradients reach them
        if self._whole is not None:
            return self._whole.rows_of(rows)
        if isinstance(value, torch.Tensor):
            self._whole = self._cut(value, rows)
            return self._whole.rows_of(rows)
        return apply(value, lambda tensor: self._cut(tensor, rows).rows_of(rows), torch.Tensor)

    def tensor_for(self, trace: RequestTrace) -> torch.Tensor | None:
        """`served_to` the trace, if that is a tensor; None for a container, or where it raises."""
        rows, cut = trace.rows, self._whole
        if cut is not None and rows is not None and not rows.covers_pass:
            return cut.rows_of(rows)
        if type(self.value) is not torch.Tensor:
            return None
        try:
            return self.rows_of(rows)
        except MixedRowsError:
            return None

    def served_to(self, trace: RequestTrace) -> Any:
        """`rows_of` the trace, without the engine's batch. A tuple or dict is one object, however often it is read."""
        rows = trace.rows
        if isinstance(self.value, torch.Tensor):
            return self.rows_of(rows)
        served = self.containers.get(trace)
        if served is None:
            served = without_batch(self.rows_of(rows))
            if takes_token_ids(self.value) and rows is not None:
                self.masks = self.masks or ServedMasks()
                served = self.masks.add_to(served, trace)
            self.containers[trace] = served
        return served

    def replace(self, rows: Rows | None, edited: Any) -> None:
        """Replace the request's served value by `edited`. Raises EditError: another type, shape, dtype or device."""
        if rows is None:
            self.value = edited
            return
        if self._whole is not None and not rows.covers_pass and self._whole.take_back(rows, edited):
            return
        if self.masks is not None:
            edited = self.masks.removed_from(edited)
        if not (self._assigned or rows.covers_pass or isinstance(self.value, torch.Tensor)):
            self.value = _each_once(self.value)
        assigned: list[tuple[BatchCut, torch.Tensor]] = []
        self.value = self._replaced(self.value, edited, rows, assigned)
        for cut, tensor in assigned:  # after every tensor was checked
            cut.assign(rows, tensor)
            self._assigned = True

    def take_back(self, trace: RequestTrace, edited: Any) -> bool:
        """Assign `edited` and count an edit, if it is the tensor that the trace was last served. Returns whether it is."""
        rows, cut = trace.rows, self._whole
        if rows is None or rows.covers_pass:
            if edited is not self.value:
                return False
        elif cut is None or not cut.take_back(rows, edited):
            return False
        self.count_edit(trace)
        return True

    def count_edit(self, trace: RequestTrace) -> None:
        """Count an edit by `trace`, in place or by assignment."""
        trace.receipt.edits += 1
        self.edits[trace] = self.edits.get(trace, 0) + 1

    def settle(self) -> Any:
        """Return the value that the model continues with."""
        if self.edits and self._whole is not None and self._whole.rows_count_alone:
            torch.autograd.graph.increment_version([self._whole.tensor])
        if self._assigned or self._differentiable:
            self.value = apply(self.value, self._settled, torch.Tensor)
            self._assigned, self._differentiable, self._whole = False, False, None
            self._cuts.clear()
        return self.value

    def _settled(self, tensor: torch.Tensor) -> torch.Tensor:
        cut = self._cuts.get(id(tensor))
        return tensor if cut is None else cut.settle()

    def _cut(self, tensor: torch.Tensor, rows: Rows) -> BatchCut:
        cut = self._cuts.get(id(tensor))
        if cut is None:
            place = rows.layout(tensor, self.of_logits)
            if place[0] is None and tensor.numel() > 1 and not isinstance(tensor, torch.nn.Parameter):
                raise MixedRowsError(
                    f"it is {list(tensor.shape)} in a pass of {rows.total} rows of several requests, and does not say which "
                    "rows are this request's. A request alone in its pass can read it, as with max_running_requests=1"
                )
            cut = self._cuts[id(tensor)] = BatchCut(tensor, *place, self.readers, tensor is self.value)
            self.row_memory += cut.row_memory()
        return cut

    def _replaced(self, full: Any, edited: Any, rows: Rows, assigned: list[tuple[BatchCut, torch.Tensor]]) -> Any:
        if isinstance(full, torch.Tensor):
            return self._replaced_tensor(full, edited, rows, assigned)
        if isinstance(full, (tuple, list)):
            if not isinstance(edited, (tuple, list)) or len(edited) != len(full):
                raise EditError(f"expected a {type(full).__name__} of {len(full)} values, got {describe(edited)}")
            parts = [self._replaced(f, e, rows, assigned) for f, e in zip(full, edited, strict=True)]
            return type(full)(*parts) if hasattr(full, "_fields") else type(full)(parts)
        if isinstance(full, dict):
            if not isinstance(edited, dict) or edited.keys() != full.keys():
                raise EditError(f"expected a dict with keys {sorted(full)}, got {describe(edited)}")
            merged = full.copy()
            for key in full:
                merged[key] = self._replaced(full[key], edited[key], rows, assigned)
            return merged
        if isinstance(full, ForwardBatch):  # blocks are served None for it
            return full
        if edited is not full and not rows.covers_pass:
            raise EditError(f"the whole batch shares this {type(full).__name__}: one request cannot replace it")
        return edited

    def _replaced_tensor(
        self, full: torch.Tensor, edited: Any, rows: Rows, assigned: list[tuple[BatchCut, torch.Tensor]]
    ) -> torch.Tensor:
        cut = None if rows.covers_pass else self._cut(full, rows)
        seen = full if cut is None else cut.seen_by(rows)
        if (
            not isinstance(edited, torch.Tensor)
            or edited.shape != seen.shape
            or edited.dtype != seen.dtype
            or edited.device != seen.device
        ):
            raise EditError(f"expected {describe(seen)}, got {describe(edited)}{_of_another_length(seen, edited)}")
        if cut is None or edited is full:
            return edited
        if cut.dim is None:
            raise EditError(f"the whole batch shares {describe(full)}: one request cannot replace it")
        assigned.append((cut, edited))
        return full


def _of_another_length(seen: torch.Tensor, edited: Any) -> str:
    """The hint for a value of an invoke with a prompt of another length; "" for another mistake."""
    if not isinstance(edited, torch.Tensor) or edited.dim() != seen.dim() or edited.dim() < 2:
        return ""
    others = [0, *range(2, edited.dim())]
    if edited.shape[1] == seen.shape[1] or any(edited.shape[dim] != seen.shape[dim] for dim in others):
        return ""
    return (
        ": the two differ in their tokens. Pick positions, such as `[:, -1]`, or let lm.trace(padding=True) pad all invokes to "
        "one length"
    )


def _each_once(value: Any) -> Any:
    """`value` with an alias for each repeated tensor, so that each place can be replaced on its own."""
    seen: set[int] = set()

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen and not isinstance(tensor, torch.nn.Parameter):
            return tensor.detach()
        seen.add(id(tensor))
        return tensor

    return apply(value, once, torch.Tensor)


def describe(value: Any) -> str:
    """A short description of a value, for error messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')} on {value.device}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} values"
    return f"{type(value).__name__}"


def leaves(value: Any) -> list[Any]:
    """The leaves of a module's ``(args, kwargs)``, or of its tuple or dict of outputs, in order."""
    if value is None or isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return [value]
    return [leaf for item in value for leaf in leaves(item)]


def same_objects(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold identical objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def versions_of(parts: list[Any]) -> int:
    """In-place edits that torch has counted on the tensors of `parts`, in total."""
    return sum(part._version for part in parts if isinstance(part, torch.Tensor) and not part.is_inference())


def without_batch(value: Any) -> Any:
    """A module's ``(args, kwargs)`` with None for the engine's `forward_batch`. A block must not keep the whole batch alive."""
    if type(value) is tuple and len(value) == 2 and type(value[1]) is dict and "forward_batch" in value[1]:
        return value[0], {**value[1], "forward_batch": None}
    return value
