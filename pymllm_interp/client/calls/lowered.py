"""Traces of blocks that run after their requests: which ones, and their replays."""

from __future__ import annotations

import os
import types
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

from ...core.families import NUMBERED_SITES
from ...hooks.captures.activations import Activations
from ...hooks.monitors.monitor import Monitor
from ...hooks.traces.blocks.block_analysis import variables_of
from ...hooks.traces.blocks.torch_modes import is_any_autocast_enabled
from ...hooks.traces.blocks.trace import Block, RequestTrace
from ...hooks.traces.lowering.ahead import RowsAhead
from ...hooks.traces.lowering.analysis import lower
from ...hooks.traces.lowering.plan import BlockPlan, LoweringModel, NotLowered, points_of
from ...hooks.traces.lowering.replay import Replay, append_rows, replay
from ...hooks.traces.nnsight_compat import Envoy, InterleavingTracer
from ...hooks.traces.saves.save_transfer import SaveTransfer
from ...hooks.traces.syntax.pass_options import NONE
from ...hooks.traces.syntax.tracer import EngineTracer, TraceInput
from ...models.native.decoder import DecoderForCausalLM
from ..handle import RequestHandle
from ..prompt_batch import prompts_of
from ..prompts import declared_for_each_prompt

OWN_WORDS = ("interventions", "capture", "n", "num_return_sequences")
"""Keywords of a trace with which its block runs in the passes."""
THREADS = min(8, max(1, (os.cpu_count() or 1) // 2))
"""Threads that copy values for the loops of several blocks."""
FEWEST_SHARED = 8
"""Blocks of a ``with`` from which on these threads are used."""
ANOTHER_INVOKE = "another invoke is not lowered"
ROOT = "model"
"""Path of the tree's root."""
MAX_ITEMS, MAX_KNOWN = 64, 512
"""Most items of a list in a key, and most blocks of which the lowering is kept."""
MISSING = object()
"""Stands for the value of an unbound name."""


class LoweringError(ValueError):
    """A block cannot run after its request, and ``lower_traces="require"`` demands it."""


class Ended(NamedTuple):
    """The request of a lowered trace, when it has ended.

    Attributes:
        token_ids: tokens of prompt and generation.
        ahead: tensors of its loop's rows that were made while it ran.
    """

    trace: RequestTrace
    plan: BlockPlan
    token_ids: Sequence[int]
    prompt_len: int
    states: Activations
    error: BaseException | None
    ahead: RowsAhead | None = None


def monitors_of(given: TraceInput | None) -> Sequence[Monitor]:
    """The monitors of a trace of one prompt. Raises ValueError for others."""
    assert given is not None, "an invoke without a prompt is not lowered"
    if "monitors" not in given[1]:
        return ()
    return cast(Any, declared_for_each_prompt({"monitors": given[1].get("monitors")}, 1)[0])


class Lowered:
    """Lowers the traces of one model.

    Args:
        module: the model that is served.
        mode: `ServerConfig.lower_traces`.
    """

    def __init__(self, module: Any, mode: str, device: torch.device) -> None:
        self.mode = mode
        self._known: dict[tuple[Any, ...], tuple[BlockPlan | NotLowered, Any]] = {}
        self._native = isinstance(module, DecoderForCausalLM)
        softcap = getattr(module.config, "final_logit_softcapping", None) if self._native else None
        points = points_of(ROOT, module.spec.family, module.spec.num_hidden_layers, softcap)
        widths = {kind: module.spec.width(kind) for kind in NUMBERED_SITES if kind not in module.spec.family.missing}
        self.model = LoweringModel(points, widths, module.spec.dtype, device)

    def lower(
        self, mode: str, traces: Sequence[RequestTrace], inputs: Sequence[TraceInput | None]
    ) -> list[BlockPlan] | str:
        """The plans of blocks that can all run after their requests. Else the reason; "" if no block may.
        Raises LoweringError: a block cannot, and must."""
        if self.mode == "off":
            return ""
        has_modes, same = _has_modes(), {}
        found = [
            self._lowering(mode, trace, given, has_modes, same) for trace, given in zip(traces, inputs, strict=True)
        ]
        prevented = next((each for each in found if isinstance(each, NotLowered)), None)
        if prevented is None:
            return [each for each in found if isinstance(each, BlockPlan)]
        if self.mode == "require":
            raise LoweringError(f"lower_traces='require', but this block runs in the forward passes: {prevented}")
        for trace, each in zip(traces, found, strict=True):  # one may fill or read what another reads or fills
            trace.receipt.not_lowered = str(each) if isinstance(each, NotLowered) else ANOTHER_INVOKE
        return str(prevented)

    def _lowering(
        self,
        mode: str,
        trace: RequestTrace,
        given: TraceInput | None,
        has_modes: bool,
        same: dict[Any, BlockPlan | NotLowered],
    ) -> BlockPlan | NotLowered:
        """Plan of a lowered block, or the reason that it is not lowered.

        Args:
            same: plans of this ``with`` by code and named objects, updated in place.
        """
        block = trace.main_block
        outside = (
            (not self._native, "this model runs by its class in transformers"),
            (block is None or block.node is None, "it has no block"),
            (mode == "pipe", "a pipeline"),
            (bool(trace.gang) or trace.sees_all or trace.padded, "its invokes run together"),
            (trace.grad, "it has gradients"),
            (trace.options != NONE, "its passes have options"),
            (len(trace.blocks) > 1, "the model has edits"),
            (trace.on_step is not None, "on_step is called while it runs"),
            (trace.saves.transfer.device is None, "it is part of a session"),
            (has_modes, "its caller has a mode of torch"),
        )
        for prevents, reason in outside:
            if prevents:
                return NotLowered(reason)
        assert block is not None and given is not None
        args, kwargs = given
        words = [word for word in OWN_WORDS if kwargs.get(word) is not None]
        if words:
            return NotLowered(f"{words[0]}= is given")
        try:
            count, monitors = len(prompts_of(args, kwargs, "the prompt")[0].prompts), monitors_of(given)
        except Exception:
            return NotLowered("its prompt or its monitors cannot be read")  # raised where the request is made
        if count != 1:
            return NotLowered("it has a list of prompts")
        if any(monitor.then == "stop" for monitor in monitors):
            return NotLowered("a monitor may stop it")
        saved = {id(value) for value in trace.saves.outer.values()}
        values = _values_of(block)
        own = block.code, frozenset(saved), *map(id, values.values())
        if own not in same:
            same[own] = self._lowered(block, saved, values, mode)
        if monitors and isinstance(found := same[own], BlockPlan) and found.interventions:
            return NotLowered("it has monitors, which score states before the block's edits")
        return same[own]

    def _lowered(self, block: Block, saved: set[int], values: dict[str, Any], mode: str) -> BlockPlan | NotLowered:
        key = _key(block, saved, values, mode)
        found = self._known.get(key) if key is not None else None
        if found is None:
            found = lower(block, saved, self.model, mode == "trace"), key
            if key is not None and not (isinstance(found[0], BlockPlan) and found[0].has_vectors):
                if len(self._known) == MAX_KNOWN:
                    self._known.clear()
                self._known[key] = found
        return found[0]

    def ahead(
        self, plans: Sequence[BlockPlan], handles: Sequence[RequestHandle], transfer: SaveTransfer
    ) -> list[RowsAhead | None]:
        """Makers of tensors while requests run, for the loops of many blocks over rows that stay where they arrive."""
        if len(plans) < FEWEST_SHARED:
            return [None] * len(plans)
        requests = (handle.requests[0] for handle in handles)
        moved = [self._device_of(plan) is not None for plan in plans]
        return [None if m else RowsAhead.of(p, r, transfer) for m, p, r in zip(moved, plans, requests, strict=True)]

    def replay(self, ended: Sequence[Ended]) -> None:
        """Run the blocks of requests that have ended. Blocks that fill a list of their ``with`` run together."""
        ready = [each for each in ended if self._may_run(each)]
        replays = {each.trace: self._replay_of(each) for each in ready}
        if append_rows(list(replays.values())):
            return
        # Copies of rows wait for memory more than for Python.
        copies = len(replays) >= FEWEST_SHARED and any(each.ahead is None for each in ready)
        pool = ThreadPoolExecutor(THREADS, "lowered") if copies else nullcontext()
        with pool:
            if isinstance(pool, ThreadPoolExecutor):
                for made in replays.values():
                    made.prepare(pool)
            replay([made for trace, made in replays.items() if trace.saves.outer])
            for trace, made in replays.items():
                if not trace.saves.outer:
                    replay([made])
                trace.saves.end()
                trace.saves.collected = trace.saves.saved_names()

    @staticmethod
    def _may_run(ended: Ended) -> bool:
        """Whether the block can run. Else its trace has the error."""
        trace, plan = ended.trace, ended.plan
        trace.receipt.edits = len(plan.edits)
        if (error := ended.error or ended.states.error) is not None:
            trace.error = error
            return False
        return True

    def _device_of(self, plan: BlockPlan) -> torch.device | None:
        """Device that the block computes on; None: the CPU."""
        return self.model.device if plan.computes and self.model.device.type != "cpu" else None

    def _replay_of(self, ended: Ended) -> Replay:
        trace, plan = ended.trace, ended.plan
        device = self._device_of(plan)
        states, ahead = ended.states, ended.ahead
        return Replay(trace, plan, self.model.points, states, ended.token_ids, ended.prompt_len, device, ahead)


def _has_modes() -> bool:
    """Whether torch computes otherwise on this thread than on the engine's."""
    modes = _len_torch_function_stack() or _len_torch_dispatch_stack()
    return bool(modes) or is_any_autocast_enabled() or torch.is_inference_mode_enabled()


def _values_of(block: Block) -> dict[str, Any]:
    """The values that the block's variables have before it runs; `MISSING` for those without any."""
    found: dict[str, Any] = {}
    for name in variables_of(block.code):
        try:
            found[name] = block.lcls[name]
        except (KeyError, NameError):
            found[name] = MISSING
    return found


def _key(block: Block, saved: set[int], values: dict[str, Any], mode: str) -> tuple[Any, ...] | None:
    """Cache key of a lowering: the block's code, and the values that it may read. None if they have no key."""
    parts: list[Any] = [block.code, mode]
    for name, value in values.items():
        if value is MISSING:
            continue
        part = ("saved",) if id(value) in saved else _part(value)
        if part is None:
            return None
        parts.append((name, part))
    return tuple(parts)


def _part(value: Any) -> Any:
    if type(value) in (bool, int, float, str, type(None)):
        return type(value), value
    if type(value) in (list, tuple) and len(value) <= MAX_ITEMS:
        items = [_part(item) for item in value]
        return None if None in items else (type(value), *items)
    if type(value) in (range, slice):
        return type(value), value.start, value.stop, value.step
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return "tensor", tuple(value.shape)
    if isinstance(value, InterleavingTracer):
        return ("tracer",)
    if isinstance(value, Envoy | types.ModuleType | types.FunctionType | types.BuiltinFunctionType | type):
        return weakref.ref(value)
    return None


def explain(tracer: EngineTracer) -> str:
    """A paragraph for each invoke: the declared hooks that replace it, or the line that prevents it.
    Raises ValueError: the trace has not run."""
    if not tracer.receipts:
        raise ValueError("lm.explain() needs the tracer of a trace that has run: call it behind the `with`")
    told = []
    for number, (receipt, plan) in enumerate(zip_longest(tracer.receipts, tracer.plans)):
        if receipt.lowered:
            told.append(f"invoke {number} runs after its request")
            told += [f"  {line}" for line in str(plan or "").splitlines()]
        else:
            reason = receipt.not_lowered or "lower_traces='off'"
            told.append(f"invoke {number} runs in the forward passes: {reason}")
    return "\n".join(told)
