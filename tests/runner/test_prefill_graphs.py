"""Prefill and mixed steps as piecewise CUDA graphs (runner/graphs/prefill_graphs.py): the values of the same pass kernel by kernel.

On a CPU a graph is a function (tests/support/helpers_graphs.py); the same bodies run on CUDA, where it is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_devices import DEVICES, ways
from helpers_graphs import captured_lms, use_eager_graphs
from helpers_runner import random_ids

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.runner.graphs import graph_capture, prefill_graphs
from pymllm_interp.runner.graphs.graph_capture import capture_token_counts

Load = Callable[..., LM]
SIZES = {
    "max_running_requests": 8, "kv_cache_tokens": 2048, "max_num_tokens": 128, "prefill_graph_tokens": 64,
    "capture_ring_bytes": 64 << 20,
}  # fmt: skip
LENGTHS = [1, 15, 16, 17, 33, 63, 64, 65, 100]
"""Around the captured sizes, and longer than the largest."""


@pytest.fixture(scope="module")
def load(model_folder: Callable[[str], Path]) -> Iterator[Load]:
    with captured_lms(model_folder, **SIZES) as found:
        yield found


def greedy(n: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **options)


def traffic(lm: LM, seed: int, **options: Any) -> list[Any]:
    """Outputs of requests of all `LENGTHS`, which arrive a few at a time, so that decode rows and prompt rows meet."""
    rng = random.Random(seed)
    lengths = rng.sample(LENGTHS, len(LENGTHS))
    handles = []
    for i, length in enumerate(lengths):
        handles.append(lm.submit(random_ids(length, seed=100 * seed + i), greedy(3 + i % 4, logprobs=2), **options))
        if i % 3 == 2:
            handles[-2].result(600)
    return [handle.result(600) for handle in handles]


def test_sizes_to_capture() -> None:
    assert capture_token_counts(1) == [1]
    assert capture_token_counts(40) == [16, 32, 40]
    sizes = capture_token_counts(1024)
    assert sizes[-1] == 1024 and sizes == sorted(set(sizes))
    padding = [min(size for size in sizes if size >= n) - n for n in range(1, 1025)]
    assert all(p <= max(15, n // 4) for n, p in enumerate(padding, 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_prompts_of_one_token_in_a_padded_pass(device: str, family: str, load: Load) -> None:
    """One query for each request, as in a decode pass, and rows of padding behind them, also where a graph cannot run."""
    graphs, eager = load(device, family), load(device, family, disable_cuda_graph=True)
    prompts = [[token] for token in (5, 17, 3, 9)]
    vector = torch.ones(graphs.hidden_size)
    for options in ({}, {"capture": ["resid_post.*"]}, {"interventions": [Steer("resid_post.0", vector)]}):
        found, wanted = (lm.generate(prompts, greedy(3), **options) for lm in (graphs, eager))
        assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
    read = []
    for lm in (graphs, eager):
        with lm.trace() as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    state = lm.model.layers[1].mlp.act_fn.output.save()
        read.append(state)
    torch.testing.assert_close(*read)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
def test_traffic_equals_that_of_an_engine_without_graphs(device: str, family: str, policy: str, load: Load) -> None:
    graphs = load(device, family, prefill_policy=policy)
    eager = load(device, family, prefill_policy=policy, disable_cuda_graph=True)
    assert graphs.runner.graphs.prefill is not None and eager.runner.graphs.prefill is None
    before = ways(graphs)
    for a, b in zip(traffic(graphs, 1), traffic(eager, 1), strict=True):
        assert a.token_ids == b.token_ids
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert all(abs(x[t].logprob - y[t].logprob) < 1e-3 for t in x if t in y)
    ran = ways(graphs) - before
    assert ran["replay"] and set(ran) <= {"replay", "plain"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_trace_that_changes_nothing_changes_no_bit_of_a_padded_prefill(device: str, length: int, load: Load) -> None:
    lm, prompt = load(device), random_ids(length, seed=length)
    with lm.generate(prompt, max_new_tokens=2, ignore_eos=True) as tracer:
        logits = lm.logits.clone().save()
    (plain,) = lm.generate([prompt], greedy(2, logprobs=1))
    with lm.generate(prompt, max_new_tokens=2, ignore_eos=True) as tracer:
        h = lm.model.layers[1].output
        shape = tuple(h.shape)
        lm.model.layers[1].output = h.clone()
        hooked = lm.logits.clone().save()
        kept = list(shape).save()
    assert tuple(kept) == (1, length, lm.hf_config.hidden_size)
    assert torch.equal(logits, hooked)
    assert tracer.receipt.steps["segments" if length <= SIZES["prefill_graph_tokens"] else "modules"] == 1
    assert plain.token_ids[0] == int(logits[-1].argmax())


@pytest.mark.parametrize("device", DEVICES)
def test_padding_reaches_no_trace(device: str, load: Load) -> None:
    """Values at modules, inside of attention, and the logits of all positions have the prompt's rows."""
    lm, prompt = load(device), random_ids(19, seed=5)
    with lm.trace(prompt):
        ids = lm.model.embed_tokens.input.save()
        q = lm.model.layers[0].self_attn.q_proj.output.save()
        act = lm.model.layers[0].mlp.act_fn.output.save()
        normed = lm.model.norm.output.save()
        logits = lm.lm_head.output.save()
    assert [t.shape[1] for t in (ids, q, act, normed, logits)] == [19] * 5
    assert ids[0].tolist() == prompt


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_and_all_hidden_states_are_those_of_the_prompt_alone(device: str, load: Load) -> None:
    lm, prompt = load(device), random_ids(19, seed=6)
    with lm.trace(prompt):
        h = lm.model.layers[0].output
        h.retain_grad()
        with lm.lm_head.output.sum().backward():
            gradient = h.grad.save()
    assert gradient.shape[1] == 19
    with lm.trace(prompt, output_hidden_states=True):
        states = lm.output.hidden_states.save()
    assert all(state.shape[1] == 19 for state in states)


@pytest.mark.parametrize("device", DEVICES)
def test_ops_and_captures_act_on_padded_prefills(device: str, load: Load) -> None:
    hidden = load(device).hf_config.hidden_size
    declared = {
        "interventions": [Steer("resid_post.0", torch.linspace(-1, 1, hidden), scale=3.0)],
        "capture": ["resid_post.*", "logits"],
    }
    outs = [traffic(load(device, **extra), 2, **declared) for extra in ({}, {"disable_cuda_graph": True})]
    for a, b in zip(*outs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.receipt.interventions == b.receipt.interventions
        for site in b.activations:
            torch.testing.assert_close(a.activations[site], b.activations[site], rtol=1e-3, atol=1e-3)


def test_a_capture_that_fails_is_an_error_that_says_what_helps(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        use_eager_graphs(monkeypatch)

    def fails(run: Any, pool: Any) -> None:
        raise torch.OutOfMemoryError("no memory for a graph")

    with monkeypatch.context() as patch:
        patch.setattr(graph_capture, "record_pieces", fails)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with pytest.raises(
            RuntimeError, match=r"(?s)prefill of 64 rows failed: no memory.*prefill_graph_tokens \(now 64"
        ):
            LM(model_folder("llama"), **with_tuning(device=device, dtype="float32", **SIZES))
        with LM(
            model_folder("llama"), **with_tuning(device=device, dtype="float32", **{**SIZES, "prefill_graph_tokens": 0})
        ) as lm:
            assert lm.runner.graphs.prefill is None
            assert len(lm.generate([[1, 2, 3]], greedy(2))[0].token_ids) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("steered", [False, True])
def test_replayed_prefills_have_the_bits_of_eager_ones(
    steered: bool, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load("cuda", dtype="bfloat16", prefill_graph_tokens=64)
    hidden = lm.hf_config.hidden_size
    declared: dict[str, Any] = {"capture": ["resid_post.*", "logits"]}
    if steered:
        declared["interventions"] = [Steer("resid_mid.1", torch.linspace(-1, 1, hidden), scale=2.0)]
    for length in LENGTHS[:7]:
        prompt = random_ids(length, seed=length)
        (replayed,) = lm.generate([prompt], greedy(2), **declared)
        assert replayed.receipt.steps == {"replay": 2}
        with monkeypatch.context() as patch:
            patch.setattr(prefill_graphs.PrefillGraphs, "can_run", lambda self, batch: False)
            (eager,) = lm.generate([prompt], greedy(2), **declared)
        assert eager.receipt.steps == {"plain": 1, "replay": 1}
        for site in eager.activations:
            assert torch.equal(replayed.activations[site], eager.activations[site]), (length, site)


@pytest.mark.gpu
def test_engines_of_one_process_prefill_at_once(model_folder: Callable[[str], Path]) -> None:
    """Graphs of one engine are replayed between those of another's pass: no memory that lives so long may be shared."""
    prompts = [random_ids(60, seed=i) for i in range(40)]
    sizes = {**SIZES, "dtype": "float32", "device": "cuda", "max_running_requests": 2}
    with (
        LM(model_folder("llama"), **with_tuning(**sizes)) as first,
        LM(model_folder("llama"), **with_tuning(**sizes)) as second,
    ):
        expected = [lm.generate(prompts, greedy(3), capture=["resid_post.*"]) for lm in (first, second)]
        for _ in range(3):
            handles = [[lm.submit(p, greedy(3), capture=["resid_post.*"]) for p in prompts] for lm in (first, second)]
            for lm_handles, outs in zip(handles, expected, strict=True):
                for handle, out in zip(lm_handles, outs, strict=True):
                    got = handle.result(600)
                    assert got.token_ids == out.token_ids
                    for site in out.activations:
                        a, b = got.activations[site].float(), out.activations[site].float()
                        assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.999


@pytest.mark.gpu
def test_prefill_graphs_are_released(model_folder: Callable[[str], Path]) -> None:
    torch.cuda.synchronize()
    lm = LM(model_folder("llama"), **with_tuning(device="cuda", **SIZES))
    graphs = lm.runner.graphs.prefill
    assert graphs is not None
    lm.generate([random_ids(9, seed=1)], greedy(2))
    lm.shutdown()
    assert not graphs._pieces
