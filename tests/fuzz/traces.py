"""Jobs with blocks: traces, traced generations, gangs, gradients, and blocks that fail, wait or call engines."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers_trace_fuzz import Invoke, played, random_acts

from pymllm_interp import LM, SamplingParams
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.hooks.site import Site

from .jobs import WAIT, WORDS, Job, raise_system_exit, random_prompt
from .results import Differs, of_activations, of_receipt
from .world import World, random_captures, random_ops

KINDS = ("attn_out", "mlp_out", "resid_post")
"""In the order of a layer."""
SHORT = SamplingParams(temperature=0.0, max_tokens=2)


@dataclass(frozen=True)
class Act:
    """A read of a module's output, and what is then done to it."""

    path: str
    end: str
    kind: str
    scale: float

    def do(self, lm: LM) -> torch.Tensor:
        module: Any = lm.get(self.path)
        value = first(getattr(module, self.end))
        if self.kind == "scale":
            value[:] = value * self.scale
        elif self.kind == "last":
            value[:, -1, :3] = self.scale
        return value.clone()


def first(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def layers_of(model: ModelSpec) -> list[str]:
    return [f"{model.family.layers}.{i}" for i in range(model.num_hidden_layers)]


def random_layer_acts(rng: random.Random, model: ModelSpec) -> list[Act]:
    """Acts at a few places of one pass, in its order."""
    places = [
        (layer, kind) for layer in range(model.num_hidden_layers) for kind in KINDS if kind not in model.family.missing
    ]
    points = [
        model.family.point(Site(kind, layer))
        for layer, kind in sorted(rng.sample(places, rng.randint(1, 3)), key=places.index)
    ]
    return [
        Act(point.module, point.end, rng.choice(["read", "scale", "last"]), rng.choice([0.5, 1.5, -1.0])) for point in points
    ]  # fmt: skip


@dataclass
class Traced(Job):
    """A forward pass, or a generation, whose block reads and edits states; some fail in the midst of it."""

    prompt: list[int]
    new_tokens: int
    """0: a forward pass."""
    acts: dict[int, list[Act]]
    fault: str = ""
    ops: list[Any] = field(default_factory=list)
    captures: list[Any] = field(default_factory=list)

    @classmethod
    def random(cls, rng: random.Random, model: ModelSpec) -> Traced:
        new_tokens = rng.choice([0, 0, *range(2, 12)])
        acts = {step: random_layer_acts(rng, model) for step in range(max(new_tokens, 1)) if rng.random() < 0.7}
        # An endless loop of steps ends at such an order, with a warning, as nnsight's does.
        faults = ["raise", "shape"] if new_tokens else ["raise", "shape", "order"]
        return cls(
            random_prompt(rng), new_tokens, acts, rng.choice(faults) if rng.random() < 0.3 else "",
            random_ops(rng, model) if rng.random() < 0.2 else [], random_captures(rng, model) if rng.random() < 0.3 else [],
        )  # fmt: skip

    @classmethod
    def long(cls, rng: random.Random, model: ModelSpec) -> Traced:
        """Four of them do not fit the pool under pressure: one is swapped."""
        acts = {step: random_layer_acts(rng, model) for step in range(14)}
        return cls([rng.randrange(WORDS) for _ in range(16)], 14, acts)

    @property
    def fails(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {"": "", "raise": "ZeroDivisionError", "order": "OutOfOrderError", "shape": "EditError"}[self.fault]

    def run(self, world: World) -> Any:
        declared = {"interventions": world.made(self.ops), "capture": world.made(self.captures)}
        return (self.generation if self.new_tokens else self.forward)(world.lm, declared)

    def forward(self, lm: LM, declared: dict[str, Any]) -> Any:
        with lm.trace(self.prompt, **declared) as tracer:
            seen = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for act in self.acts.get(0, ()):
                seen.append(act.do(lm))
            self.go_wrong(lm)
            seen.append(first(lm.lm_head.output)[:, -1].clone())
        return {"seen": list(seen), **results(tracer)}

    def generation(self, lm: LM, declared: dict[str, Any]) -> Any:
        with lm.generate(self.prompt, max_new_tokens=self.new_tokens, ignore_eos=True, **declared) as tracer:
            seen = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for step in tracer.iter[:]:
                for act in self.acts.get(step, ()):
                    seen.append(act.do(lm))
                if step == self.new_tokens // 2:
                    self.go_wrong(lm)
                seen.append(lm.logits.clone())
            ids = tracer.result.save()
        return {"seen": list(seen), "ids": ids, **results(tracer)}

    def go_wrong(self, lm: LM) -> None:
        layers: Any = [lm.get(path) for path in layers_of(lm.model_spec)]
        if self.fault == "raise":
            raise ZeroDivisionError("planned")
        if self.fault == "order":
            layers[-1].output  # noqa: B018
            layers[0].output  # noqa: B018
        if self.fault == "shape":
            layers[-1].output = torch.zeros(1, 99, 3)


def results(tracer: Any) -> dict[str, Any]:
    """What a trace has beside what it saved."""
    captured = tracer.captures
    return {"captures": captured and of_activations(captured[0]), "receipt": of_receipt(tracer.receipt)}


@dataclass
class Gang(Job):
    """Two prompts of one trace, and perhaps a block that sees both."""

    invokes: list[Invoke]

    @classmethod
    def random(cls, rng: random.Random) -> Gang:
        invokes = [
            Invoke(
                [[rng.randrange(WORDS) for _ in range(rng.randint(1, 8))]],
                random_acts(rng, 2, 4, order),
                rng.choice([2, 6]),
            )
            for order in range(2)
        ]
        if rng.random() < 0.5:
            invokes.append(Invoke([], random_acts(rng, 2, 2, 2, whole=True), 6))
        return cls(invokes)

    def run(self, world: World) -> Any:
        return played(world.lm, self.invokes, generates=True)


@dataclass
class Static(Job):
    """Two sites of a block that runs after its request, as they are and with what their reader does next."""

    prompt: list[int]
    layers: tuple[int, int]
    new_tokens: int
    """0: a forward pass."""

    @classmethod
    def random(cls, rng: random.Random, model: ModelSpec) -> Static:
        first, second = sorted(rng.choices(range(model.num_hidden_layers), k=2))
        return cls(random_prompt(rng), (first, second), rng.choice([0, 0, 3, 9]))

    def run(self, world: World) -> Any:
        return (self.generation if self.new_tokens else self.forward)(world.lm)

    def forward(self, lm: Any) -> Any:
        i, j = self.layers
        with lm.trace(self.prompt) as tracer:
            a = lm.model.layers[i].output.save()
            last = a[0, -1].save()
            rows = a[0, 1:].save()
            b = lm.model.layers[j].output
            flat = b.view(-1).save()
            turned = b.transpose(1, 2).save()
            mean = b.mean().save()
        self.is_lowered(lm, tracer)
        return {
            "a": a,
            "last": last,
            "rows": rows,
            "flat": flat,
            "turned": turned,
            "mean": mean,
            "tail": a[0, -1].view(-1),
        }

    def generation(self, lm: Any) -> Any:
        i, j = self.layers
        with lm.generate(self.prompt, max_new_tokens=self.new_tokens, ignore_eos=True) as tracer:
            kept = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            norms = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for _ in tracer.iter[:]:
                a = lm.model.layers[i].output
                kept.append(a[0, -1])
                b = lm.model.layers[j].output
                kept.append(b.view(-1))
                kept.append(b)
                norms.append(b[0, -1].norm())
            ids = tracer.result.save()
        self.is_lowered(lm, tracer)
        return {"kept": list(kept), "norms": list(norms), "ids": ids}

    @staticmethod
    def is_lowered(lm: Any, tracer: Any) -> None:
        """Where the engine lowers blocks, this one is: else it compares nothing."""
        if lm.backend.lowered.mode == "auto" and not tracer.receipt.lowered:
            raise Differs(f"the block ran in the passes: {tracer.receipt.not_lowered}")


@dataclass
class Gradient(Job):
    """The gradient of a pass at some layer, by `backward` and by `lm.attribute`."""

    prompt: list[int]
    layer: int

    def run(self, world: World) -> Any:
        lm = world.lm
        path = layers_of(lm.model_spec)[self.layer]
        with lm.trace(self.prompt):
            found = dict().save()  # pyright: ignore[reportAttributeAccessIssue]
            h = first(lm.get(path).output)
            with lm.output.logits[0, -1].square().sum().backward():
                found["grad"] = h.grad
        return dict(found)


@dataclass
class OnStep(Job):
    """A generation whose `on_step` raises."""

    prompt: list[int]
    fails = "SystemExit"

    def run(self, world: World) -> Any:
        lm, path = world.lm, layers_of(world.model)[0]
        with lm.generate(self.prompt, max_new_tokens=6, ignore_eos=True, on_step=raise_system_exit) as tracer:
            seen = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for _ in tracer.iter[:]:
                seen.append(first(lm.get(path).output).clone())
        return list(seen)


@dataclass
class Stuck(Job):
    """A block that waits until a request behind it has run into its time limit."""

    prompt: list[int]

    def run(self, world: World) -> Any:
        lm, path = world.lm, layers_of(world.model)[0]
        begun, goes_on, seen = threading.Event(), threading.Event(), []

        def trace() -> None:
            with lm.trace(self.prompt):
                found = first(lm.get(path).output).save()  # pyright: ignore[reportAttributeAccessIssue]
                begun.set()
                goes_on.wait(2 * WAIT)
            seen.append(found)

        thread = threading.Thread(target=trace, daemon=True)
        thread.start()
        try:
            assert begun.wait(WAIT), "the block is not served"
            reason = lm.submit(self.prompt, SHORT, timeout=0.05).result(WAIT / 4).finish_reason
        finally:
            goes_on.set()
        thread.join(WAIT)
        return {"reason": reason, "seen": seen}


@dataclass
class CallsAnother(Job):
    """A block that waits for another engine, which is refused."""

    prompt: list[int]
    fails = "RuntimeError"

    def run(self, world: World) -> Any:
        lm, other, path = world.lm, world.other, layers_of(world.model)[0]
        with lm.trace(self.prompt):
            lm.get(path).output.save()
            other.generate([[1, 2]], SHORT)
