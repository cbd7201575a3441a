"""Traces of blocks that run after their requests: which ones, and their replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.request import Request
from ...hooks.traces.blocks.trace import RequestTrace
from ...hooks.traces.lowering.analysis import lower
from ...hooks.traces.lowering.plan import NotLowered, Plan, Points, points_of
from ...hooks.traces.lowering.replay import Replay, replay
from ...hooks.traces.syntax.envoy import TracedModel
from ...hooks.traces.syntax.pass_options import NONE
from ...models.native.decoder import DecoderForCausalLM
from ..prompt_batch import prompts_of

OWN_WORDS = ("interventions", "capture", "n", "num_return_sequences")
"""Keywords of a trace with which its block runs in the passes."""
TraceInput = tuple[tuple, dict[str, Any]] | None


class LoweringError(ValueError):
    """A block cannot run after its request, and ``lower_traces="require"`` demands it."""


class Lowered:
    """Lowers the traces of one model.

    Args:
        model: the root of the tree that blocks are written against.
        mode: `ServerConfig.lower_traces`.
        device: of the model.
    """

    def __init__(self, model: TracedModel, mode: str, device: Any) -> None:
        self.mode, self._device = mode, device
        module: Any = model._module
        self._native = isinstance(module, DecoderForCausalLM)
        self._points: Points = points_of(
            model.path,
            module.spec.family,
            module.spec.num_hidden_layers,
            getattr(module.config, "final_logit_softcapping", None),
        )

    def lower(self, mode: str, traces: Sequence[RequestTrace], inputs: Sequence[TraceInput]) -> None:
        """Set the `plan` of each trace whose block can run after its request.

        Raises:
            LoweringError: a block cannot, and must.
        """
        if self.mode == "off":
            return
        for trace, given in zip(traces, inputs, strict=True):
            found = self._lowering(mode, trace, given)
            if isinstance(found, Plan):
                trace.plan, trace.receipt.lowered, trace.single = found, True, mode == "trace"
            elif self.mode == "require":
                raise LoweringError(f"lower_traces='require', but this block runs in the forward passes: {found}")
            else:
                trace.receipt.not_lowered = str(found)

    def _lowering(self, mode: str, trace: RequestTrace, given: TraceInput) -> Plan | NotLowered:
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
        )
        for prevents, reason in outside:
            if prevents:
                return NotLowered(reason)
        assert block is not None and given is not None
        args, kwargs = given
        words = [word for word in OWN_WORDS if kwargs.get(word) is not None]
        if words:
            return NotLowered(f"{words[0]}= is given")
        if len(prompts_of(args, kwargs, "the prompt")[0].prompts) != 1:
            return NotLowered("it has a list of prompts")
        saved = {id(value) for value in trace.saves.outer.values()}
        return lower(block.node, block.lcls, saved, self._points, mode == "trace")

    def unlower(self, traces: Sequence[RequestTrace], error: BaseException) -> None:
        """Run the blocks in the passes after all: the captures do not fit.

        Raises:
            LoweringError: they must not.
        """
        if self.mode == "require":
            raise LoweringError(
                "lower_traces='require', but the states that this block reads cannot be captured"
            ) from error
        for trace in traces:
            if trace.plan is not None:
                trace.plan, trace.receipt.lowered, trace.receipt.not_lowered = None, False, str(error)

    def replay(self, ended: Sequence[tuple[RequestTrace, Request]]) -> None:
        """Run the blocks of requests that have ended. Blocks that fill a list of their ``with`` run together."""
        replays = {trace: made for trace, request in ended if (made := self._replay_of(trace, request)) is not None}
        replay([made for trace, made in replays.items() if trace.saves.outer])
        for trace, made in replays.items():
            if not trace.saves.outer:
                replay([made])
            trace.saves.end()

    def _replay_of(self, trace: RequestTrace, request: Request) -> Replay | None:
        states, plan = request.activations, trace.plan
        trace.receipt.preemptions = request.num_preemptions
        trace.warnings += trace.receipt.warnings
        if request.error is not None or states is None or states.error is not None:
            trace.error = request.error or (None if states is None else states.error)
            return None
        device = self._device if plan.computes and self._device.type != "cpu" else None
        token_ids = (*request.prompt_token_ids, *request.output_token_ids)
        return Replay(trace, plan, self._points, states, token_ids, request.prompt_len, device)
