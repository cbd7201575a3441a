"""Payloads of blocks: their way to rank 0, and their results on the way back."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..core.receipt import Receipt
from ..core.request import Request
from ..hooks.traces.blocks.loops import LOOP_NAMES
from ..hooks.traces.blocks.trace import RequestTrace
from ..hooks.traces.nnsight_compat import EditingTracer, Mediator
from ..hooks.traces.syntax.envoy import TracedModel
from ..hooks.traces.syntax.tracer import EngineTracer
from ..wire.failures import Failure
from ..wire.trace_payload import Sources, block_to_data, dump, envoy_at, is_envoy_id, load
from ..wire.values import ValueDecoder, ValueEncoder, pack, tensors_of

MODEL, TRACER, EDITING = "model", "tracer", "edit"
"""Objects that a payload names."""


class TraceOnWire(NamedTuple):
    """Facts of a request's trace that all ranks know.

    Attributes:
        key: `RequestTrace.key` in the client's process.
        single: the request is one forward pass.
        stops: tokens that end it, once it has `min_tokens`.
    """

    key: int
    single: bool
    max_tokens: int
    min_tokens: int
    stops: tuple[int, ...]


def trace_on_wire(request: Request, key: int) -> TraceOnWire:
    """The facts of a request's trace."""
    params = request.params
    least = min(params.min_tokens, request.max_tokens)
    return TraceOnWire(key, request.forward_only, request.max_tokens, least, tuple(sorted(request.eos_token_ids)))


class TraceResult(NamedTuple):
    """Outcome of a request's blocks.

    Attributes:
        saves: saved values by name, on the CPU.
        outer: values that were saved above the block, by name, as the block has left them.
        result: see `RequestTrace.keeps_result`.
    """

    saves: dict[str, Any]
    outer: dict[str, Any]
    result: Any
    receipt: Receipt
    warnings: list[str]
    error: Failure | None
    stopped: bool


class StepEnds(NamedTuple):
    """Requests with blocks that have failed, or were stopped, in a step: the client ends them."""

    failed: list[str]
    stopped: list[str]


def _named(obj: Any) -> Any:
    if isinstance(obj, TracedModel):
        return MODEL
    if isinstance(obj, EditingTracer):
        return EDITING
    return TRACER if isinstance(obj, EngineTracer) else None


def payload_of(traces: Sequence[RequestTrace]) -> bytes:
    """The blocks of a ``with``, and the values that were saved above them.
    Raises TypeError, pickle.PicklingError: a block reads something that cannot travel."""
    content = [
        {
            "key": trace.key, "trace_id": trace.trace_id, "pad": trace.pad_token_id, "outer": trace.saves.outer,
            "blocks": [_data_of(block) for block in trace.blocks],
            "main": trace.main_block is not None, "result": trace.keeps_result,
        }
        for trace in traces
    ]  # fmt: skip
    return dump({"traces": content}, _named)


def _data_of(block: Mediator) -> dict[str, Any]:
    names = {name: value for name, value in block.lcls.items() if name not in LOOP_NAMES}
    return block_to_data(block.node, block.code.co_filename, block.code.co_name, block.glbls, names)


def traces_of(payload: bytes, root: TracedModel, sources: Sources) -> list[RequestTrace]:
    """The traces of a payload, over a tree. Runs code of whoever wrote it."""
    tracer, editing = EngineTracer(root, "generate"), EditingTracer(root)

    def find(pid: Any) -> Any:
        if is_envoy_id(pid):
            return envoy_at(root, pid)
        return {MODEL: root, TRACER: tracer, EDITING: editing}[pid]

    found = []
    for told in load(payload, find)["traces"]:
        blocks = [_block(data, sources) for data in told["blocks"]]
        main = blocks.pop() if told["main"] else None
        trace = RequestTrace(main, blocks)
        trace.key, trace.trace_id, trace.pad_token_id = told["key"], told["trace_id"], told["pad"]
        trace.saves.outer, trace.keeps_result = told["outer"], told["result"]
        found.append(trace)
    return found


def _block(data: Mapping[str, Any], sources: Sources) -> Mediator:
    code, node = sources.compiled(data)
    return Mediator(code, data["globals"], data["locals"], node=node)


def packed(result: TraceResult) -> bytes:
    """A result as bytes, with its tensors on the CPU. Raises TypeError: a saved value that cannot be sent. The message names it."""
    encoder, named = ValueEncoder(), {**result.saves, **result.outer, "": result.result}
    header = {name: encoder.encode(value, name or "the result") for name, value in named.items()}
    names = list(result.saves), list(result.outer)
    return pickle.dumps((result._replace(saves={}, outer={}, result=None), names, *pack(header, encoder.tensors)))


def unpacked(data: bytes, model: Any) -> TraceResult:
    """The result of `packed`.

    Args:
        model: the tree of the client, which caches are read by.
    """
    result, (saves, outer), header, tensors = pickle.loads(data)
    values = ValueDecoder(tensors_of(tensors), None, model)
    named = {name: values.decode(tree) for name, tree in json.loads(header).items()}
    return result._replace(
        saves={name: named[name] for name in saves}, outer={name: named[name] for name in outer}, result=named[""]
    )


def take_outer(trace: RequestTrace, outer: Mapping[str, Any]) -> None:
    """Update the caller's objects that were saved above a block, as the block has left them."""
    for name, value in outer.items():
        own = trace.saves.outer.get(name)
        if isinstance(own, list):
            own[:] = value
        elif isinstance(own, dict):
            own.clear()
            own.update(value)
        elif isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
            own.copy_(value)
