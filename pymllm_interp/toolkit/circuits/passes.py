"""Passes of a circuit as messages to the engine, and the client's end of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from torch import Tensor

from ...runner.interp_model_runner import InterpModelRunner
from .replacement import ActiveFeatures, Replacement
from .run import CircuitRun


@dataclass(frozen=True)
class BeginCircuit:
    """Embed the prompt of a new circuit.

    Attributes:
        key: key in the worker (`InterpModelRunner.kept`).
        skip: first positions without nodes.
    """

    key: str
    token_ids: list[int]
    replacements: list[Replacement]
    skip: int

    def run(self, runner: InterpModelRunner) -> None:
        """Keep a `CircuitRun`."""
        runner.kept[self.key] = CircuitRun(runner, self.token_ids, self.replacements, self.skip)


@dataclass(frozen=True)
class CircuitStep:
    """Call a method of a `CircuitRun`."""

    key: str
    method: str
    arguments: tuple[Any, ...] = ()

    def run(self, runner: InterpModelRunner) -> Any:
        """The method's result."""
        return getattr(runner.kept[self.key], self.method)(*self.arguments)


@dataclass(frozen=True)
class EndCircuit:
    """Forget a circuit's run."""

    key: str

    def run(self, runner: InterpModelRunner) -> None:
        """Free its memory."""
        runner.kept.pop(self.key, None)


class CircuitPasses:
    """The client's end of a run: a message for each layer of a pass.

    Args:
        plan: a `CircuitPlan`.
        key: key in the worker.
        check: called before each message; an error ends the run.

    Attributes:
        features: active features of each replacement.
        logits: [vocab] float32 of the last position.
    """

    def __init__(self, plan: Any, key: str, check: Callable[[], None] | None = None) -> None:
        self._plan, self._key, self._check = plan, key, check
        lm = plan.lm
        lm.backend.run(BeginCircuit(key, plan.token_ids, plan.replacements, plan.skip))
        for layer in range(lm.model_spec.num_hidden_layers):
            self.call("forward_layer", layer)
        self.features: list[ActiveFeatures]
        self.features, self.logits = self.call("end_forward")

    @classmethod
    @contextmanager
    def of(cls, plan: Any, check: Callable[[], None] | None = None) -> Iterator[CircuitPasses]:
        """The passes of a plan. Their memory is freed at the end of the block."""
        key = uuid4().hex
        try:
            yield cls(plan, key, check)
        finally:
            plan.lm.backend.post(EndCircuit(key))

    def call(self, method: str, *arguments: Any) -> Any:
        """Result of a method of the `CircuitRun`. Raises RuntimeError: the weights were edited since the plan's version of them."""
        if self._check is not None:
            self._check()
        backend = self._plan.lm.backend
        found = backend.run(CircuitStep(self._key, method, arguments))
        if backend.weights_version != self._plan.weights_version:
            raise RuntimeError("the weights of the model were edited since this circuit began: make the circuit again")
        return found

    def rows_from(self, depth: int, on_device: bool = False) -> tuple[Tensor, Tensor]:
        """Rows, on the CPU unless asked, and constants of a pass that has begun, with reads up to a depth."""
        for layer in reversed(range((depth - 1) // 4 + 1)):
            self.call("back_layer", layer)
        return self.call("rows", on_device)
