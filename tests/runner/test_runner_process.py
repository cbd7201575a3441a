"""The seam between engine and runner: steps, ends and commands are bytes. Traces stay in the engine's process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import held
from helpers_constraints import Alternating, OnlyThese
from runner_process import WorkerProcess

from pymllm_interp import LM, Ablate, Capture, Clamp, Gate, Patch, SamplingParams, Steer
from pymllm_interp.captures import Lens
from pymllm_interp.client import local_backend
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.client.completion import RequestOutput
from pymllm_interp.config import EngineTuning
from pymllm_interp.core.step import DeclaredResult, ModelRunnerOutput, RequestEnd, SchedulerOutput
from pymllm_interp.hooks.captures.spec import Project
from pymllm_interp.interventions import Knockout
from pymllm_interp.runner.interp_model_runner import InterpModelRunner, RunnerCommand
from pymllm_interp.runner.stages.declared_stage import DeclaredStage
from pymllm_interp.sampling import TokenMasks

FAMILY, WIDTH = "llama", 72
WAIT = 300.0


def through_bytes(value: Any) -> Any:
    """What another process would read."""
    return pickle.loads(pickle.dumps(value))


class ByBytes(InterpModelRunner):
    """A runner whose every message, and every answer but live traces' values, goes through bytes."""

    num_steps = num_ends = num_commands = 0

    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: None = None) -> Any:
        self.num_steps += 1
        return super().execute_model(through_bytes(scheduler_output), intermediate_tensors)

    def finish_declared(self, end: RequestEnd) -> Future[DeclaredResult]:
        self.num_ends += 1
        found: Future[DeclaredResult] = Future()
        found.set_result(through_bytes(super().finish_declared(through_bytes(end)).result()))
        return found

    def finish_nnsight(self, ends: Any) -> ModelRunnerOutput:
        return super().finish_nnsight(through_bytes(ends))

    def constrain(self, masks: TokenMasks) -> None:
        super().constrain(through_bytes(masks))

    def run(self, command: RunnerCommand) -> Any:
        self.num_commands += 1
        return through_bytes(super().run(through_bytes(command)))


class Answer:
    """A step's output that has arrived."""

    done = True

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        return self.output


class Elsewhere(InterpModelRunner):
    """The engine's end of a runner in another process. It computes nothing itself: it gives the engine pages, rows and limits."""

    process: ClassVar[WorkerProcess]
    """Of all of them."""
    worker: int

    def initialize(self) -> None:
        super().initialize()
        self.worker = self.process.start(self.server_config, self.model_config)

    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: None = None) -> Any:
        self._masks: TokenMasks | None = None
        return self.process.ask(self.worker, "execute_model", scheduler_output)

    def constrain(self, masks: TokenMasks) -> None:
        self._masks = masks

    def sample_tokens_async(self) -> Any:
        return Answer(self.process.ask(self.worker, "sample_tokens", self._masks))

    def finish_declared(self, end: RequestEnd) -> Future[DeclaredResult]:
        found: Future[DeclaredResult] = Future()
        found.set_result(self.process.ask(self.worker, "finish_declared", end))
        return found

    def run(self, command: RunnerCommand) -> Any:
        return self.process.ask(self.worker, "run", command)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("passes run in the other process")

    def shutdown(self) -> None:
        if hasattr(self, "worker"):
            self.process.ask(self.worker, "end")
            del self.worker
        super().shutdown()


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def vector(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (WIDTH,)), generator=torch.Generator().manual_seed(seed))


def sampling(tokens: int, seed: int | None = None, **kwargs: Any) -> SamplingParams:
    temperature = 0.0 if seed is None else 0.9
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True, **kwargs)


GATE = Gate(vector(7), 0.2)
SHARED = prompt(40, 1)
"""A prompt whose pages later requests share."""
LOADS: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {"prompt": prompt(5, 2), "params": sampling(6)},
        {"prompt": prompt(9, 3), "params": sampling(6, seed=5, n=2, logprobs=2, prompt_logprobs=1)},
        {"prompt": prompt(7, 4), "params": sampling(6, repetition_penalty=1.3)},
    ],
    "steered": [
        {"prompt": prompt(5, 2), "interventions": [Steer("resid_post.1", vector(1), scale=4.0, norm="preserve")]},
        {"prompt": prompt(6, 3), "interventions": [Ablate("resid_mid.*", vector(2, 2, WIDTH), positions="generated")]},
        {"prompt": prompt(7, 3), "interventions": [Patch("embed", vector(3), positions=[2]), Clamp("z.0", vector(4), high=0.0)]},
        {"prompt": prompt(8, 3), "interventions": [Knockout(1, [-1], [2])]},
    ],
    "captured": [
        {"prompt": prompt(5, 2), "capture": ["resid_post.*", Capture("logits", positions="generated")]},
        {"prompt": prompt(6, 3), "capture": [Capture("resid_mid.1", reduce="mean"), Capture("mlp_out.*", reduce="last")]},
        {"prompt": prompt(7, 3), "capture": [Capture("resid_post.2", reduce=Project(vector(5)))]},
        {"prompt": prompt(7, 3), "capture": [Capture("pattern.1", positions=[-1]), "attn_in.1"]},
        {"prompt": prompt(7, 3), "capture": [Capture("resid_post.1", reduce=Lens(top_k=3))]},
        {"prompt": prompt(8, 4), "capture": ["mlp_out.2"], "interventions": [Steer("resid_pre.1", vector(6))]},
    ],
    "constrained": [
        {"prompt": prompt(5, 2), "params": sampling(9, constraint=Alternating())},
        {"prompt": prompt(9, 3), "params": sampling(9, seed=5, n=2, logprobs=2, constraint=Alternating())},
        {"prompt": prompt(6, 3), "params": sampling(9, constraint=OnlyThese((5, 40))), "capture": ["resid_post.1"]},
        {"prompt": prompt(7, 4), "params": sampling(6)},
    ],
    "gated": [
        {"prompt": prompt(6, 5), "interventions": [Steer("resid_post.1", vector(1), scale=6.0, when=GATE)]},
        {
            "prompt": prompt(6, 6),
            "interventions": [
                Steer("resid_post.2", vector(2), when=Gate(vector(8), 0.1, site="resid_post.0", scope=scope))
                for scope in ("token", "prompt")
            ],
        },
    ],
}  # fmt: skip


def equal(left: RequestOutput, right: RequestOutput) -> None:
    for one, other in zip(left.outputs, right.outputs, strict=True):
        assert (one.token_ids, one.finish_reason, one.error) == (other.token_ids, other.finish_reason, other.error)
        assert one.logprobs == other.logprobs
        assert one.receipt == other.receipt
        assert list(one.activations or ()) == list(other.activations or ())
        for site in one.activations or ():
            assert torch.equal(one.activations[site], other.activations[site]), site
            assert torch.equal(one.activations.positions[site], other.activations.positions[site])
    assert left.prompt_logprobs == right.prompt_logprobs and left.warnings == right.warnings


def served(lm: LM, load: list[dict[str, Any]]) -> list[RequestOutput]:
    """The outputs of requests that start together."""
    with held(lm):
        handles = []
        for asked in load:
            hooks = {name: asked[name] for name in ("interventions", "capture") if name in asked}
            handles.append(lm.submit(asked["prompt"], asked.get("params") or sampling(6), **hooks))
    return [handle.result(WAIT) for handle in handles]


@pytest.fixture(scope="module", params=[ByBytes, Elsewhere], ids=["bytes", "process"])
def far(request: Any, model_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    """(arguments) -> an LM with such a runner, made once for equal arguments."""
    made: dict[tuple, LM] = {}

    def make(**kwargs: Any) -> LM:
        key = tuple(sorted(kwargs.items()))
        if key not in made:
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr(local_backend, "InterpModelRunner", request.param)
                made[key] = LM(model_folder(FAMILY), **with_tuning(dtype="float32", device="cpu", **kwargs))
            assert type(made[key].runner) is request.param
        return made[key]

    if request.param is Elsewhere:
        Elsewhere.process = WorkerProcess()
    yield make
    for lm in made.values():
        lm.shutdown()
    if request.param is Elsewhere:
        Elsewhere.process.close()


@pytest.mark.thin(99)
@pytest.mark.parametrize("kind", list(LOADS))
def test_requests_are_served_by_bytes_alone(kind: str, far: Callable[..., LM], lm_of: Callable[..., LM]) -> None:
    for one, other in zip(served(far(), LOADS[kind]), served(lm_of(FAMILY), LOADS[kind]), strict=True):
        equal(one, other)


def test_all_of_them_together_in_a_pool_that_preempts(far: Callable[..., LM], lm_of: Callable[..., LM]) -> None:
    """Requests enter again after a preemption; what was captured before it is there."""
    load = [dict(asked, params=sampling(40)) for kind in ("captured", "gated", "steered") for asked in LOADS[kind]]
    small = {"kv_cache_tokens": 160, "max_num_tokens": 24}
    lm = far(**small)
    found, wanted = served(lm, load), served(lm_of(FAMILY, **small), load)
    assert lm.engine.stats()["preempted"] > 0
    for one, other in zip(found, wanted, strict=True):
        equal(one, other)


def test_vectors_and_records_of_tables_go_by_bytes(model_folder: Callable[[str], Path]) -> None:
    """As on CUDA: vectors in the rows that the step says, shared by requests, and captures through the ring."""
    shared = [Steer("resid_post.1", vector(1), scale=4.0), Ablate("resid_mid.*", vector(2, 2, WIDTH))]
    gated = [Steer("resid_post.2", vector(3), when=Gate(vector(8), 0.1, site="resid_post.0"))]
    load: list[dict[str, Any]] = [
        {"prompt": prompt(5, 2), "interventions": shared, "capture": ["resid_post.*"]},
        {"prompt": prompt(6, 3), "interventions": shared[:1], "capture": [Capture("mlp_out.1", reduce="mean")]},
        {
            "prompt": prompt(7, 4),
            "interventions": gated,
            "capture": [Capture("resid_post.2", reduce=Project(vector(5)))],
        },
    ]
    found = []
    for runner in (ByBytes, InterpModelRunner):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(DeclaredStage, "has_tables", True)
            monkeypatch.setattr(local_backend, "InterpModelRunner", runner)
            with LM(
                model_folder(FAMILY), dtype="float32", device="cpu", tuning=EngineTuning(capture_ring_bytes=1 << 16)
            ) as lm:
                found.append(served(lm, [dict(asked, params=sampling(3)) for asked in load]))
                assert lm.runner.declarations is not None and (pool := lm.runner.declarations.pool) is not None
                assert pool.used == 0
    for one, other in zip(*found, strict=True):
        equal(one, other)


def test_prefixes_are_shared(far: Callable[..., LM], lm_of: Callable[..., LM]) -> None:
    steer = [Steer("resid_post.1", vector(1), scale=3.0, positions=[20])]
    load = [{"prompt": SHARED + prompt(3, i), **({"interventions": steer} if i % 2 else {})} for i in range(4)]
    load.append({"prompt": [*SHARED, 7], "capture": [Capture("resid_post.1", positions=[-1])]})
    lm, near = far(), lm_of(FAMILY)
    for one in (lm, near):
        one.reset_prefix_cache()
    cached = 0
    for asked in load:
        (found,), (wanted,) = served(lm, [asked]), served(near, [asked])
        equal(found, wanted)
        assert found.num_cached_tokens == wanted.num_cached_tokens
        cached += found.num_cached_tokens
    assert cached > 0


def test_a_sweep_of_patches(far: Callable[..., LM], lm_of: Callable[..., LM]) -> None:
    lms = far(), lm_of(FAMILY)
    one, other = (lm.patch_sweep(prompt(7, 8), prompt(7, 9), metric=("w7", "w9")) for lm in lms)
    assert one.how == other.how == "wavefront"
    torch.testing.assert_close(one.values, other.values, rtol=0, atol=0)


def test_requests_that_end_before_their_first_step_and_in_between(far: Callable[..., LM]) -> None:
    """The worker hears of the one for the first time when it ends; the next request gets rows, and its own results."""
    lm = far()
    hooks: dict[str, Any] = {
        "capture": ["resid_post.1"],
        "interventions": [Steer("resid_post.0", vector(1), when=GATE)],
    }
    with held(lm):
        never = lm.submit(prompt(5, 1), sampling(4), **hooks)
        never.cancel()
    (completion,) = never.result(WAIT).outputs
    assert completion.finish_reason == "abort" and completion.activations["resid_post.1"].shape == (0, WIDTH)
    assert [applied.gate_fires for applied in completion.receipt.interventions] == [0]
    late = lm.submit(prompt(5, 1), sampling(120), timeout=0.2, **hooks)
    (completion,) = late.result(WAIT).outputs
    assert completion.finish_reason in ("timeout", "length")
    rows = completion.receipt.captures[0]
    assert len(completion.activations["resid_post.1"]) == rows.prompt_rows + rows.generated_rows
    assert served(lm, LOADS["plain"][:1])[0].outputs[0].finish_reason == "length"


def test_traces_run_where_their_engine_is(far: Callable[..., LM], lm_of: Callable[..., LM]) -> None:
    """Their steps are bytes, too; their blocks are found by their key. Another process says that it cannot know them."""
    lm, states = far(lower_traces="off"), []
    if isinstance(lm.runner, Elsewhere):
        with (
            pytest.raises(RuntimeError, match="blocks of traces run in the process of their engine"),
            lm.trace(prompt(5, 1)),
        ):
            lm.model.layers[1].output.save()
        equal(*(served(one, LOADS["steered"][:1])[0] for one in (lm, lm_of(FAMILY))))
        return
    for one in (lm, lm_of(FAMILY)):
        with one.generate(prompt(5, 1), max_new_tokens=4, interventions=[Steer("embed", vector(1))]) as tracer:
            found = list().save()
            for _ in tracer.iter[:]:
                found.append(one.model.layers[1].output)
        states.append(torch.cat(list(found), dim=1))
    assert torch.equal(*states)
