"""Random traces of several invokes, and the solo traces that they must equal."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from pymllm_interp import LM

PARTS = ("attention", "mlp", "layer")
STEPS = (1, 2, 4)
KINDS = ("read", "in place", "assign", "first", "skip", "source")


@dataclass(order=True)
class Act:
    """What a block does at one place of one step. Acts are sorted as the model runs."""

    step: int
    layer: int
    part: int
    late: bool
    """It is served at the module's output."""
    order: int
    kind: str = field(compare=False)
    scale: float = field(compare=False)

    def do(self, lm: LM) -> torch.Tensor:
        """Do it, and return the value's last positions: [prompts, width]."""
        layer: Any = lm.model.layers[self.layer]
        kind, part = self.kind, PARTS[self.part]
        if part == "attention":
            if kind == "in place":
                layer.self_attn.output[0][:, -1] *= self.scale
            elif kind == "assign":
                layer.self_attn.output = (layer.self_attn.output[0] * self.scale, *layer.self_attn.output[1:])
            return layer.self_attn.output[0][:, -1].clone()
        module = layer.mlp if part == "mlp" else layer
        if kind == "source" and part == "mlp":
            found = module.source.self_down_proj_0.output
            found[:, -1] *= self.scale
            return found[:, -1].clone()
        if kind == "skip" and part == "mlp":
            replacement = module.input * self.scale
            module.skip(replacement)
            return replacement[:, -1].clone()
        if kind == "in place":
            module.output[:, -1] *= self.scale
        elif kind == "assign":
            module.output = module.output * self.scale
        elif kind == "first":
            seen = module.output
            seen[:, -1:, :3] = self.scale
        return module.output[:, -1].clone()


@dataclass
class Invoke:
    """One invoke: its prompts (none: it sees the whole batch), and what its block does."""

    prompts: list[list[int]]
    acts: list[Act]
    new_tokens: int

    @property
    def input(self) -> Any:
        return self.prompts if len(self.prompts) > 1 else self.prompts[0]


def a_trace(rng: random.Random, layers: int, generates: bool, most: int = 4) -> list[Invoke]:
    """A random trace: a few invokes, and sometimes one without a prompt."""
    invokes = []
    steps = rng.choice(STEPS) if generates else 1
    for order in range(rng.randint(1, 3)):
        prompts = [
            [rng.randrange(90) for _ in range(rng.choice((1, 2, 3, 7, 15, 16, 17, 20)))]
            for _ in range(rng.randint(1, most))
        ]
        new = rng.randint(1, steps + 2) if generates else 1
        invokes.append(Invoke(prompts, random_acts(rng, layers, new, order), new))
    if rng.random() < 0.5:
        place = rng.randint(0, len(invokes))
        new = max(own.new_tokens for own in invokes)
        invokes.insert(place, Invoke([], random_acts(rng, layers, new, 0, whole=True), new))
    for order, own in enumerate(invokes):
        for act in own.acts:
            act.order = order
    return invokes


def random_acts(rng: random.Random, layers: int, steps: int, order: int, whole: bool = False) -> list[Act]:
    places = {
        (rng.randrange(steps), rng.randrange(layers), rng.randrange(len(PARTS))) for _ in range(rng.randint(1, 4))
    }
    acts = []
    for step, layer, part in places:
        kind = rng.choice(KINDS if not whole else KINDS[:4])
        late = kind not in ("skip", "source") or PARTS[part] != "mlp"
        acts.append(Act(step, layer, part, late, order, kind, rng.choice((0.5, 1.5, 2.0, -1.0))))
    return sorted(acts)


def played(lm: LM, invokes: list[Invoke], generates: bool) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """(what each invoke's acts saw, each invoke's result)."""
    seen: Any = [[] for _ in invokes]
    results: Any = [None for _ in invokes]
    if not generates:
        with lm.trace() as tracer:
            for i, own in enumerate(invokes):
                with tracer.invoke(*([own.input] if own.prompts else [])):
                    for act in own.acts:
                        seen[i].append(act.do(lm))
                    results[i] = lm.lm_head.output[:, -1].clone()
        return seen, results
    with lm.generate(ignore_eos=True) as tracer:
        for i, own in enumerate(invokes):
            given, kwargs = ([own.input], {"max_new_tokens": own.new_tokens}) if own.prompts else ([], {})
            with tracer.invoke(*given, **kwargs):
                for step in tracer.iter[:]:
                    for act in own.acts:
                        if act.step == step:
                            seen[i].append(act.do(lm))
                    lm.lm_head.output  # noqa: B018  # so that each step is waited for
                results[i] = tracer.result
    return seen, results


def alone(
    lm: LM, prompt: list[int], acts: list[Act], new_tokens: int, generates: bool
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """(what each act saw by its id, the result) of one prompt by itself."""
    mine = sorted(act for act in acts if act.step < new_tokens)
    found: Any = {}
    result: Any = []
    if not generates:
        with lm.trace(prompt):
            for act in mine:
                found[id(act)] = act.do(lm)
            result.append(lm.lm_head.output[:, -1].clone())
        return found, result[0]
    with lm.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            for act in mine:
                if act.step == step:
                    found[id(act)] = act.do(lm)
            lm.lm_head.output  # noqa: B018  # so that each step is waited for
        result.append(tracer.result)
    return found, result[0]


def check(lm: LM, invokes: list[Invoke], generates: bool, solo: LM | None = None) -> None:
    """Compare a trace with the solo traces of its prompts."""
    seen, results = played(lm, invokes, generates)
    whole = [i for i, own in enumerate(invokes) if not own.prompts]
    everyone = [(i, prompt) for i, own in enumerate(invokes) for prompt in own.prompts]
    first = {i: next(n for n, (j, _) in enumerate(everyone) if j == i) for i, own in enumerate(invokes) if own.prompts}
    for n, (i, prompt) in enumerate(everyone):
        new = invokes[i].new_tokens
        acts = [act for j in (i, *whole) for act in invokes[j].acts]
        found, result = alone(solo or lm, prompt, acts, new, generates)
        for j in (i, *whole):
            row = n - first[i] if j == i else n
            for act, values in zip(invokes[j].acts, seen[j], strict=True):
                where = f"prompt {n}, invoke {j}, {act}"
                expected = found[id(act)][0] if id(act) in found else torch.zeros_like(values[row])
                torch.testing.assert_close(
                    values[row], expected, atol=1e-4, rtol=1e-4, msg=lambda m, w=where: f"{w}: {m}"
                )
            prompts = invokes[j].prompts or [own for _, own in everyone]
            if generates:
                left = max(map(len, prompts)) - len(prompt)
                ids = results[j][row][left : left + len(prompt) + new]
                assert ids.tolist() == result[0].tolist(), (
                    f"prompt {n}, invoke {j}: {ids.tolist()}, {result[0].tolist()}"
                )
            else:
                torch.testing.assert_close(results[j][row], result[0], atol=1e-4, rtol=1e-4)
