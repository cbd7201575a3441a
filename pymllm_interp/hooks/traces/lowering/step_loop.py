"""Steps that only edit and append. They are not run: `Replay` takes them at once, by slices of the captured rows.

A loop's body costs some 20 microseconds a read. A slice and its split cost about one. Measured with 64 steps
and 16 requests of a tiny model on two CPU cores. Loops that are run take 2.0 times as long with eight layers, 1.4 with one.
Copies in place of `rows_in_place` take 1.04 and 1.19 times as long. With 135M parameters all differ by less than the noise.

A sweep has a thousand blocks of one step (`append_rows`). With 256 invokes of such a model, it takes 1.2 times as long if they
are run, with one layer. With four layers it takes 1.5 times as long.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from .plan import Row, StepLoop
from .site_rows import LoopRows
from .values import RowRead, SiteRead, Steps

KNOWN_TO_NUMPY = frozenset((torch.float16, torch.float32, torch.float64))
"""Dtypes that both have."""
Made = Callable[[str, torch.Tensor], Sequence[torch.Tensor]]
"""(site, its rows [n, ...]) -> tensors that exist for the first of them."""


class TakenLoop:
    """A loop over steps, or a block without one, that only appends rows as far as the walk has come.

    Args:
        steps: steps of the loop; None for a block.

    Attributes:
        reads: number of reads of one step.
        rows: parts of values that one step reads.
    """

    def __init__(self, steps: Steps | None) -> None:
        self._steps, self.reads = steps, 0
        self._appends: list[tuple[str, RowRead | SiteRead]] = []
        self.rows: list[RowRead] = []

    def takes(self, statement: ast.stmt) -> bool:
        """Whether the loop may have this statement, as far as its form says. A block may bind no name."""
        if self._steps is None and not isinstance(statement, ast.Expr):
            return False
        if isinstance(statement, ast.Expr):
            value = statement.value
            method = value.func if isinstance(value, ast.Call) else None
            appends = isinstance(method, ast.Attribute) and method.attr == "append"
            return appends or isinstance(value, ast.Constant)
        if isinstance(statement, ast.AugAssign):
            return not isinstance(statement.target, ast.Name)
        return isinstance(statement, ast.Pass | ast.For | ast.If | ast.Assign)

    def append(self, node: ast.Call, arguments: Sequence[Any]) -> bool:
        """Note ``name.append(row)``; False if it is something else."""
        assert isinstance(node.func, ast.Attribute)
        into = node.func.value
        if node.func.attr != "append" or len(arguments) != 1 or node.keywords or not isinstance(into, ast.Name):
            return False
        row = arguments[0]
        if not isinstance(row, RowRead | SiteRead) or row.steps is not self._steps:
            return False
        if isinstance(row, SiteRead) and row.in_tuple:
            return False
        self._appends.append((into.id, row))
        return True

    def loop(self) -> StepLoop | None:
        """The loop, once its body has ended. None if it reads nothing, or if two appends may be of one tensor."""
        parts = {id(read): read.origin for _, read in self._appends if isinstance(read, RowRead)}
        if len(set(map(id, parts.values()))) < len(parts):
            return None
        reads = list({_tensor(read): read for _, read in self._appends}.values())
        places = {_tensor(read): place for place, read in enumerate(reads)}
        rows = tuple(read.row if isinstance(read, RowRead) else Row(read.site) for read in reads)
        appends = tuple((name, places[_tensor(read)]) for name, read in self._appends)
        start, stop = (0, 1) if self._steps is None else (self._steps.start, self._steps.stop)
        unkept = tuple(read.row for read in self.rows if _tensor(read) not in places)
        return StepLoop(start, stop, rows, appends, self.reads, unkept) if self.reads else None


def _tensor(read: RowRead | SiteRead) -> Any:
    """Identity of a step's tensor. All reads of a site's whole value have the same one."""
    return id(read) if isinstance(read, RowRead) else read.site


def part_of(rows: LoopRows, row: Row) -> LoopRows:
    """Part of a site that a loop reads. Raises IndexError: the index is out of range."""
    prompt = None if rows.prompt is None else rows.prompt[row.indexes] if row.indexes else rows.prompt
    part = LoopRows(prompt, rows.generated[(slice(None), *row.indexes)])
    for method in row.methods:
        part = part.each(operator.methodcaller(method))
    return part


def taken_rows(
    parts: Sequence[LoopRows], loop: StepLoop, made: Made = lambda _site, _rows: ()
) -> list[list[torch.Tensor]]:
    """Values that a loop reads, by step, for each of its rows. Each tensor is contiguous and has separate storage, as saves do.

    If the loop takes most of the captured memory, nothing is copied (`rows_in_place`). A site's second read is copied.

    Args:
        made: tensors that exist already for the first rows of a site (`RowsAhead.take`).
    """
    taken: Counter[int] = Counter()
    for part in parts:
        taken[_memory(part.generated)] += part.generated.nbytes
    found: list[list[torch.Tensor]] = []
    claimed: set[tuple[int, str]] = set()
    for part, row in zip(parts, loop.rows, strict=True):
        generated, memory = part.generated, _memory(part.generated)
        stays = is_most(taken[memory], generated) and (memory, row.site) not in claimed and _has_whole_rows(generated)
        claimed.add((memory, row.site))
        values: list[torch.Tensor]
        values = rows_in_place(generated, made(row.site, generated)) if stays else [*torch.unbind_copy(generated)]  # pyright: ignore
        if part.prompt is not None:
            values.insert(0, part.prompt.clone(memory_format=torch.contiguous_format))
        found.append(values)
    return found


def is_most(num_bytes: int, of: torch.Tensor) -> bool:
    """Whether these bytes are most of a tensor's storage, so that it may live as long as any of them."""
    return num_bytes * 4 >= of.untyped_storage().nbytes() * 3


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _has_whole_rows(rows: torch.Tensor) -> bool:
    """Whether each of the rows [n, ...] is contiguous memory of the CPU."""
    return not rows.is_cuda and rows.numel() > 0 and rows[0].is_contiguous() and rows.stride(0) >= rows[0].numel()


def rows_in_place(rows: torch.Tensor, made: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """The rows of a tensor [n, ...] without a copy. Each one's storage is its part of the tensor's memory.

    The memory lives as long as one of them. A pickle of a row holds the row only.

    Args:
        made: tensors [width] of the first rows.
    """
    first, values = rows[0], list(made)
    if len(values) < len(rows):
        rest = rows[len(values) :]
        values += each_line(lines_of(rest.as_strided((len(rest), first.numel()), (rest.stride(0), 1))), rows.dtype)
    if first.dim() != 1:
        for value in values:
            value.resize_(first.shape)
    return values


def lines_of(rows: torch.Tensor) -> np.ndarray:
    """The memory of rows [n, width], for `each_line`."""
    return (rows if rows.dtype in KNOWN_TO_NUMPY else rows.view(torch.uint8)).numpy()


def each_line(lines: np.ndarray, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """A tensor for each of the `lines_of` rows of this dtype, without a copy."""
    return map(torch.from_numpy if dtype in KNOWN_TO_NUMPY else partial(torch.frombuffer, dtype=dtype), lines)


def lists_of(loop: StepLoop, scope: Mapping[str, Any]) -> list[list[Any]] | None:
    """The list of each append, in order. None if a name is not bound to a list.

    Args:
        scope: names of the block.
    """
    try:
        found = [scope[name] for name, _ in loop.appends]
    except (KeyError, NameError):
        return None
    return found if all(type(into) is list for into in found) else None
