"""Blocks that only append parts of one step: no block runs, and their rows are put into their lists.

A sweep has a thousand such blocks of one code. Running each takes ten times as long as its rows. With them, a sweep of 256
invokes takes 1.2 to 1.3 times as long (a tiny model, two CPU cores). With 135M parameters it takes no longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....core.families import LOGITS
from ...captures.activations import Activations
from ..blocks.trace import RequestTrace
from .plan import LAST, BlockPlan, Row, StepLoop
from .site_rows import SiteRows
from .step_loop import part_of


def append_rows(
    plan: BlockPlan,
    traces: Sequence[RequestTrace],
    states: Sequence[Activations],
    prompt_lens: Sequence[int],
    passes: Sequence[int],
    device: torch.device | None,
) -> bool:
    """Run the appends of the blocks, place after place, request after request: the order of a forward pass.

    Args:
        plan: plan of all blocks.
        traces: traces of ended requests.
        states: captured states of each request.
        prompt_lens: positions of each prompt.
        passes: number of passes of each request.
        device: device that computes the values; None: the CPU.

    Returns:
        False, and nothing is appended, if a block has to run: they do more, or raise.
    """
    appends = plan.appends
    if appends is None:
        return False
    if len({row.site for row in appends.rows}) < len(appends.appends):
        return False
    single = traces[0].single
    try:
        lists = [_lists(trace, appends) for trace in traces]
        values = [
            _last_rows(plan, row, states)
            if row.indexes == (0, LAST) and not row.methods and device is None
            else _parts(plan, row, states, prompt_lens, single, device)
            for row in appends.rows
        ]
    except (LookupError, NameError):  # which a block raises at its line
        return False
    if not all(type(into) is list for own in lists for into in own):
        return False
    filled = {id(into): into for own in lists for into in own}
    empty = {key for key, into in filled.items() if not into}
    for number, (_, place) in enumerate(appends.appends):
        for own, value in zip(lists, values[place], strict=True):
            own[number].append(value)
    for key in empty:  # all of their items are rows with separate storage
        traces[0].saves.settle(filled[key])
    for trace, most in zip(traces, passes, strict=True):
        trace.max_passes = max(trace.max_passes, most)
        trace.receipt.reads += appends.reads
    return True


def _lists(trace: RequestTrace, appends: StepLoop) -> list[Any]:
    """Lists that a block appends to, in order. Raises KeyError for an unbound name."""
    assert trace.main_block is not None
    scope = trace.main_block.lcls
    return [scope[name] for name, _ in appends.appends]


def _last_rows(plan: BlockPlan, row: Row, states: Sequence[Activations]) -> Sequence[torch.Tensor]:
    """[width] of the last row of each prompt, with separate storage.

    Raises:
        LookupError: other rows were captured, or none.
    """
    found = [own.as_arrived(row.site) for own in states]
    if plan.needs[row.site].positions != (LAST,) or any(len(rows) != 1 for rows in found):
        raise LookupError(f"the last row of {row.site}")
    # Two calls of torch for all of them.
    return torch.unbind_copy(torch.cat(found).flatten(1))  # pyright: ignore[reportReturnType]


def _parts(
    plan: BlockPlan, row: Row, states: Sequence[Activations], prompt_lens: Sequence[int], single: bool,
    device: torch.device | None,
) -> list[torch.Tensor]:  # fmt: skip
    """Parts of a site that each block reads, with separate storage. Raises LookupError for an index out of range or not
    captured."""
    found: list[torch.Tensor] = []
    for own, length in zip(states, prompt_lens, strict=True):
        rows = SiteRows(
            own.as_arrived(row.site), plan.places(row.site, length), row.site == LOGITS and not single, device
        )
        part = part_of(rows.among(0, 1, row.is_last), row).prompt
        assert part is not None, "step 0 has the prompt"
        found.append(part.clone(memory_format=torch.contiguous_format))
    return found
