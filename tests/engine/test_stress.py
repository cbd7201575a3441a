"""Many traces at once, beside plain requests, declared interventions and captures, broken blocks and aborts, in a pool so small
that requests give way.

Each trace must equal its own run on nnsight's TransformersModel, each plain request transformers' generate, each declared one
transformers under hooks.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import VOCAB, held, tiny_tokenizer
from helpers_declared import hooked, random_specs, states_of
from helpers_devices import ways
from helpers_idle import left_behind
from nnsight.modeling.transformers import TransformersModel

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.completion import RequestOutput
from pymllm_interp.hooks.interventions.op import Op
from pymllm_interp.hooks.traces.blocks.errors import EditError
from pymllm_interp.hooks.traces.nnsight_compat import OutOfOrderError

READS = ["model.layers.{}.output", "model.layers.{}.mlp.output", "model.layers.{}.self_attn.o_proj.input",
         "model.layers.{}.mlp.down_proj.input"]  # fmt: skip


@dataclass
class Plan:
    """What one client does: reads at some steps, scaled edits at others, in the order of the layers."""

    prompt: list[int]
    new_tokens: int
    actions: dict[int, list[tuple[str, float | None]]]
    fault: str | None = None
    logits: bool = False
    delay: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None

    @classmethod
    def random(cls, rng: random.Random, layers: int, faults: bool) -> Plan:
        new_tokens = rng.randint(1, 12)
        actions = {}
        for step in range(new_tokens):
            if rng.random() < 0.6:
                actions[step] = [
                    (rng.choice(READS).format(layer), rng.choice([None, None, 0.5, -1.0]))
                    for layer in sorted(rng.sample(range(layers), rng.randint(1, layers)))
                ]
        return cls(
            prompt=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))],
            new_tokens=new_tokens,
            actions=actions,
            fault=rng.choice(["raise", "order", "shape", None, None]) if faults else None,
            logits=rng.random() < 0.3,
            delay=rng.random() * 0.05,
        )


def run(model: Any, plan: Plan) -> None:
    """Carry out a plan as one traced generation, on ours or on nnsight's model; what it read goes to `plan.result`."""
    ours = isinstance(model, LM)
    try:
        with model.generate(torch.tensor([plan.prompt]), max_new_tokens=plan.new_tokens) as tracer:
            seen = list().save()
            if plan.fault == "order":
                seen.append(model.model.norm.output)
                seen.append(model.model.layers[0].output)
            for step in tracer.iter[:] if ours else tracer.iter[: plan.new_tokens]:
                for path, factor in plan.actions.get(step, []):
                    value = model.get(path)
                    seen.append((step, path, value.clone()))
                    if factor is not None:
                        value[:] = value * factor
                if plan.fault == "raise" and step == plan.new_tokens // 2:
                    raise ZeroDivisionError("planned")
                if plan.fault == "shape" and step == plan.new_tokens // 2:
                    model.model.norm.output = torch.zeros(1, 99, 3)
                if plan.logits:
                    seen.append((step, "logits", model.logits.clone() if ours else model.lm_head.output[:, -1].clone()))
            ids = tracer.result.save()
        plan.result = {"seen": seen, "ids": ids}
    except Exception as error:
        plan.error = error


FAULTS = {"raise": ZeroDivisionError, "order": OutOfOrderError, "shape": EditError}


def assert_same(got: Plan, wanted: Plan) -> None:
    if got.fault is not None:
        assert type(got.error) is FAULTS[got.fault], got.error
        return
    assert got.error is None and wanted.error is None, (got.error, wanted.error)
    assert torch.equal(got.result["ids"], wanted.result["ids"].cpu())
    assert [(s, p) for s, p, _ in got.result["seen"]] == [(s, p) for s, p, _ in wanted.result["seen"]]
    for (step, path, value), (_, _, reference) in zip(got.result["seen"], wanted.result["seen"], strict=True):
        assert value.shape == reference.shape
        assert torch.allclose(value.cpu(), reference.cpu(), atol=1e-3), (step, path)


@dataclass
class Declared:
    """A request with interventions and captures."""

    prompt: list[int]
    specs: list[Op]
    sites: list[str]

    @classmethod
    def random(cls, rng: random.Random, config: Any) -> Declared:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        # Without gates: one that opens at 0 may do so for one rounding of a state and not for another.
        specs = [spec for spec in random_specs(rng, config) if spec.when is None]
        return cls(prompt, specs, rng.sample(["embed", "mlp_out.1", "resid_post.0", "resid_post.2"], 2))

    def check(self, out: RequestOutput, model: Any) -> None:
        """Its tokens are the likeliest, and its states those, of transformers' model with the same interventions.

        To a thousandth of the largest value: what a vector makes large has roundings to match.
        """
        ids = self.prompt + out.token_ids
        at, size = torch.arange(len(ids) - 1), len(self.prompt)
        with hooked(model, self.specs, size, lambda: at), torch.no_grad():
            logits = model(torch.tensor([ids[:-1]])).logits[0]
        sampled = logits[size - 1 :]
        chosen = sampled.gather(1, torch.tensor(out.token_ids)[:, None])
        assert (sampled.amax(1, keepdim=True) - chosen).max() <= 1e-3 * sampled.abs().max()
        states = states_of(model, ids[:-1], self.specs, size)
        for site in self.sites:
            found = out.activations
            assert found.positions[site].tolist() == at.tolist() and found.token_ids[site].tolist() == ids[:-1]
            assert (found[site] - states[site]).abs().max() <= 1e-3 * states[site].abs().max()


FIRST, POOL = 4, 48
"""The first traces' prompts fill the pool of so many tokens: one must move to the host before any can go on."""


class Load(NamedTuple):
    """What is asked for at once, and what each is to give."""

    traced: list[Plan]
    """With their results on nnsight's model, where nothing is planned to fail."""
    plain: list[tuple[list[int], list[int]]]
    """Prompts, and what transformers generates."""
    declared: list[Declared]


@functools.cache
def load_of(oracle: Any, seed: int, count: int) -> Load:
    """The same for every server."""
    rng, model = random.Random(seed), oracle("llama")
    plans = [Plan.random(rng, layers=3, faults=number >= FIRST) for number in range(count)]
    for plan in plans[:FIRST]:
        plan.prompt, plan.new_tokens = [rng.randrange(VOCAB) for _ in range(POOL // FIRST)], POOL // FIRST
    nnsight_model = TransformersModel(copy.deepcopy(model), tokenizer=tiny_tokenizer())
    for plan in plans:
        if plan.fault is None:
            run(nnsight_model, plan)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(count // 4)]
    declared = [Declared.random(rng, model.config) for _ in range(count // 4)]
    generated = [
        model.generate(torch.tensor([p]), max_new_tokens=16, do_sample=False)[0, len(p) :].tolist() for p in prompts
    ]
    return Load(plans, list(zip(prompts, generated, strict=True)), declared)


def stress(lm_of: Any, oracle: Any, seed: int, count: int, **server: Any) -> None:
    references, plain, declared = load_of(oracle, seed, count)
    plans = [replace(reference, result={}, error=None) for reference in references]
    params = SamplingParams(temperature=0, max_tokens=16)
    lm = lm_of("llama", kv_cache_tokens=POOL, page_size=4, max_running_requests=8, max_num_tokens=48, **server)
    before = lm.engine.stats()
    timers = [threading.Timer(plan.delay, run, (lm, plan)) for plan in plans]
    with held(lm) as arrived:
        for timer in timers[:FIRST]:
            timer.start()
        arrived(FIRST)
        for timer in timers[FIRST:]:
            timer.start()
        handles = [lm.submit(prompt, params) for prompt, _ in plain]
        with_specs = [lm.submit(d.prompt, params, interventions=d.specs, capture=d.sites) for d in declared]
        arrived(len(handles) + len(with_specs) + count // 2)
    cancelled = [lm.submit([1, 2, 3], SamplingParams(max_tokens=30)) for _ in range(3)]
    for handle in cancelled:
        handle.cancel()
    for timer in timers:
        timer.join(timeout=600)
        assert not timer.is_alive(), "a trace hangs"
    assert [h.result(timeout=600).token_ids for h in handles] == [generated for _, generated in plain]
    for request, handle in zip(declared, with_specs, strict=True):
        request.check(handle.result(timeout=600), oracle("llama"))
    assert all(h.result(timeout=600).finish_reason in ("abort", "length") for h in cancelled)
    for plan, reference in zip(plans, references, strict=True):
        assert_same(plan, reference)
    after = lm.engine.stats()
    if server.get("hook_execution") == "split":
        assert any(how.startswith("split") for how in after["execution"]), after["execution"]
    assert after["preempted"] > before["preempted"] and after["moved_to_host"] > before["moved_to_host"]
    assert left_behind(lm) == {}


SERVERS = [
    {"prefill_policy": policy, **how}
    for policy in ("mixed", "prefill_first")
    for how in ({}, {"hook_execution": "split", "async_scheduling": True})
]


@pytest.mark.few("server", SERVERS[0], SERVERS[3])
@pytest.mark.parametrize("server", SERVERS, ids=lambda server: "-".join(map(str, server.values())))
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])  # beside ten seeds of four hundred
def test_concurrent_traces_equal_their_solo_runs(lm_of, oracle, seed: int, server: dict[str, Any]) -> None:
    stress(lm_of, oracle, seed, 40, **server)


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS, ids=lambda server: "-".join(map(str, server.values())))
@pytest.mark.parametrize("seed", range(100, 110))
def test_four_hundred_concurrent_traces_equal_their_solo_runs(lm_of, oracle, seed: int, server: dict[str, Any]) -> None:
    stress(lm_of, oracle, seed, 400, **server)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_concurrent_traces_beside_replayed_steps_equal_their_solo_runs(policy, lm_of, oracle):
    """Blocks on CUDA are greenlets of the thread that launches the graphs."""
    made: list[LM] = []

    def on_cuda(family: str, **options: Any) -> LM:
        made.append(lm_of(family, device="cuda", **options))
        return made[-1]

    stress(on_cuda, oracle, 7, 40, prefill_policy=policy)
    (lm,) = made
    ran = ways(lm)
    assert lm.runner.graph_runner is not None and ran["replay"] > 0 and ran["segments"] > 0, ran
