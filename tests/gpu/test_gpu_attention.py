"""Inside attention on a CUDA device: transformers' own, and cut edges. float32 on the CPU is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import held, random_model
from helpers_gpu import CONFIGS
from helpers_runner import random_ids

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.interventions import Generated, Knockout

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
PROMPT = random_ids(17, seed=4)
PARAMS = SamplingParams(temperature=0, max_tokens=6)
CUTS = [Knockout("*", from_=[9, -1], to=[2, 3, 8]), Knockout(1, from_=Generated(1, 3), to="prompt", heads=[0, 3])]


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LM, LM]]:
    """An LM on the device in bfloat16, and one on the CPU in float32."""
    folder = tmp_path_factory.mktemp("gpu-attention")
    random_model(CONFIGS[request.param]()).save_pretrained(folder)
    options: dict[str, Any] = {"kv_cache_tokens": 2048, "max_running_requests": 8, "inner_sites": ("q", "z")}
    with LM(Path(folder), dtype="bfloat16", device=DEVICE, **options) as lm:
        with LM(Path(folder), dtype="float32", device="cpu", **options) as oracle:
            yield lm, oracle


def assert_similar(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Rounded to bfloat16."""
    assert ours.shape == theirs.shape and ours.isfinite().all()
    assert torch.cosine_similarity(ours.float().flatten(), theirs.flatten(), dim=0) > 0.995


def read_and_edit(lm: LM, prompt: list[int], steps: int) -> dict[str, Any]:
    steer = Steer("z.0", torch.ones(lm.model_spec.width("z")), 0.1)
    with lm.generate(prompt, max_new_tokens=steps, interventions=[steer, *CUTS], capture=["q.1", "z.1"]) as tracer:
        weights, states = list().save(), list().save()
        for _ in tracer.iter[0:steps]:
            inner = lm.model.layers[0].self_attn.source.attention_interface_1.source
            weights.append(inner.nn_functional_softmax_0.output.clone())
            inner.nn_functional_softmax_0.output[:, 1] *= 0.5
            states.append(lm.model.layers[-1].output)
    found = {f"weights {i}": w for i, w in enumerate(weights)} | {f"states {i}": s for i, s in enumerate(states)}
    return found | dict(tracer.activations) | {"steps": tracer.receipt.steps}


def test_transformers_attention_on_the_device(pair: tuple[LM, LM]) -> None:
    lm, oracle = pair
    others = [random_ids(n, seed=n) for n in (5, 33)]
    plain = [out.token_ids for out in lm.generate(others, PARAMS)]
    with held(lm) as arrived:
        handles = [lm.submit(prompt, PARAMS) for prompt in others]
        arrived(2)
    ours, theirs = read_and_edit(lm, PROMPT, 1), read_and_edit(oracle, PROMPT, 1)
    assert [handle.result().token_ids for handle in handles] == plain
    assert ours.pop("steps") == theirs.pop("steps") == {"modules": 1}
    for name, value in theirs.items():
        assert_similar(ours[name], value)
    assert read_and_edit(lm, PROMPT, 4)["steps"] == {"modules": 4}


def test_cut_edges_on_the_device(pair: tuple[LM, LM]) -> None:
    lm, oracle = pair

    def states_of(model: LM, cuts: list[Knockout]) -> dict[str, torch.Tensor]:
        ids = [*PROMPT, *random_ids(1, seed=9)]
        (out,) = model.generate(
            [ids], SamplingParams(temperature=0, max_tokens=1), interventions=cuts, capture=["z.*", "final_norm"]
        )
        return dict(out.activations)

    whole = [Knockout("*", from_=[9, -1], to=[2, 3, 8]), Knockout(1, from_=-2, to=range(16), heads=[0, 3])]
    ours, theirs, clean = states_of(lm, whole), states_of(oracle, whole), states_of(oracle, [])
    for site, states in theirs.items():
        assert_similar(ours[site], states)
    assert torch.cosine_similarity(theirs["z.2"][-1].flatten(), clean["z.2"][-1].flatten(), dim=0) < 0.999
    (out,) = lm.generate([PROMPT], PARAMS, interventions=CUTS)
    assert len(out.token_ids) == 6 and out.receipt.steps == {"plain": 1, "segments": 2, "replay": 3}


def test_gradients_of_transformers_attention_on_the_device(pair: tuple[LM, LM]) -> None:
    found: list[torch.Tensor] = []
    for lm in pair:
        with lm.trace(PROMPT, interventions=CUTS[:1]):
            weights = lm.model.layers[0].self_attn.source.attention_interface_1.source.nn_functional_softmax_0.output
            loss = lm.lm_head.output[0, -1].float().logsumexp(0)
            with loss.backward():
                gradient = weights.grad.save()
        found.append(gradient)
    assert_similar(*found)


def decode_steps(lm: LM, read: Callable[[LM], Any]) -> Any:
    with lm.generate(PROMPT, max_new_tokens=3, output_hidden_states=True) as tracer:
        states = list().save()
        for _ in tracer.iter[0:3]:
            states.append(read(lm))
    return tracer.receipt.steps, list(states)


def test_hidden_states_of_each_step_on_the_device(pair: tuple[LM, LM]) -> None:
    lm, _ = pair
    steps, states = decode_steps(lm, lambda lm: torch.stack([s[:, -1] for s in lm.output.hidden_states]))
    assert steps == {"modules": 3} and all(s.shape == (4, 1, 384) and s.isfinite().all() for s in states)
