"""The circuits of clients, one at a time: their memory, and the engine's time between steps, are bounded."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any

import msgspec
from torch import Tensor

from ...toolkit.circuits.build import build, planned
from ...toolkit.circuits.circuit import Circuit
from ...toolkit.circuits.drawing import figure_of
from ...toolkit.circuits.files import parts_of
from ...toolkit.circuits.replacement import members_of
from ...utils.arguments import PromptError
from ...wire import messages as m
from ...wire.values import pack
from .outbox import Outbox
from .served_model import ServedModel

TURN_SECONDS = 0.2
"""Seconds between checks whether a circuit that waits was aborted."""
MAX_EDGES = 1 << 18
"""Most edges of a pruned graph that is sent as JSON."""
Part = tuple[dict[str, Any], dict[str, Tensor], bytes | None]
"""A header, and its tensors or JSON."""


def send_circuit(model: ServedModel, outbox: Outbox, turn: Lock, run: Any, message: m.RunCircuit) -> None:
    """Make a client's circuit, and send frames: that it is accepted, its progress, its parts.

    Args:
        turn: held by the circuit that runs.
        run: the client's `TraceRun`.

    Raises:
        PromptError, ValueError: invalid arguments, or beyond the limits.
        RunEndedError: the client is gone, or the time is over.
    """
    found = model.of(message.owner, [])
    plan = planned(
        found,
        message.prompt,
        message.transcoders,
        message.target,
        offload=False,
        max_bytes=message.max_bytes,
        **message.options,
    )

    def send(header: dict[str, Any], tensors: Any = (), body: bytes | None = None, wait: bool = True) -> None:
        frame = m.Frame(run.call, *pack(header, dict(tensors)))
        frame.body = frame.body if body is None else body
        run.send(len(frame.body), wait=wait)
        outbox.put(frame)

    send({"type": "accepted"})
    while not turn.acquire(timeout=TURN_SECONDS):
        run.check()
    try:
        circuit = build(plan, False, lambda rows, of: send({"type": "progress", "rows": rows, "of": of}), run.check)
        run.check()
        parts = _parts(model, found, circuit, message)  # its graph takes more memory than the circuit
    finally:
        turn.release()
    del circuit
    for header, tensors, body in parts:
        send(header, tensors, body)


def _parts(model: ServedModel, found: ServedModel, circuit: Circuit, message: m.RunCircuit) -> Iterator[Part]:
    """The answer: its headers, with tensors or JSON. Raises PromptError: a graph with too many edges."""
    names = [name for each in message.transcoders for name in members_of(found, each)]
    circuit.saes = {
        layer: next(name for name in names if found.saes[name] is sae) for layer, sae in circuit.saes.items()
    }
    if message.form == "tensors":
        return ((header, tensors, None) for header, tensors in parts_of(circuit))
    if (edges := int(circuit.graph.edges.sum())) > MAX_EDGES:
        raise PromptError(
            f"the pruned graph has {edges} edges; at most {MAX_EDGES} are sent: lower edge_threshold or max_features"
        )
    content = circuit.to_json(scan=model.backend.facts.name) if message.form == "graph" else figure_of(circuit, 500)
    header = {"type": "circuit", "form": message.form, "scores": circuit.scores()._asdict(), "summary": repr(circuit)}
    return iter([(header, {}, msgspec.json.encode(content))])
