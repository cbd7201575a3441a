"""What each backend must fulfil: the same calls over a local engine and over a server, compared with a further local engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_server import KEYS, Server
from helpers_vllm import HAS_VLLM, assert_close, assert_close_tensor, save_model, vllm_lm

from pymllm_interp import LM, SAE, Ablate, Capture, SamplingParams, Steer
from pymllm_interp.client.backend import Backend, Submission
from pymllm_interp.client.completion import RequestOutput
from pymllm_interp.client.handle import RequestHandle
from pymllm_interp.client.local_backend import LocalBackend
from pymllm_interp.client.remote.remote_backend import RemoteBackend
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.events import EngineClosedError
from pymllm_interp.interventions import Generated, SetFeature
from pymllm_interp.runner import InterpModelRunner
from pymllm_interp.utils.arguments import PromptError

PROMPT = "w3 w14 w15 w9"
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
WIDTH = 72
WINDOW, POOL = 128, 2048


def vector(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (WIDTH,)), generator=torch.Generator().manual_seed(seed))


class Forwarding(Backend):
    """The least that a backend is: its abstract methods, over another engine."""

    def __init__(self, inner: LocalBackend) -> None:
        self.inner, self.engine, self.module, self.interleaver = inner, inner.engine, inner.module, inner.interleaver
        self.facts, self.tokenizer = inner.facts, inner.tokenizer
        self.vectors, self.saes = inner.vectors, inner.saes

    def submit(self, submission: Submission) -> list[RequestHandle]:
        return self.inner.submit(submission)

    def run_pass(self, *args: Any) -> Any:
        return self.inner.run_pass(*args)

    def session(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.session(*args, **kwargs)


Make = Callable[[], LM]


@pytest.fixture(scope="module", params=["local", "remote", "vllm"])
def engine(request: pytest.FixtureRequest) -> str:
    """What runs the requests. vLLM has other kernels: results are close, and what it cannot do is refused by name."""
    if request.param == "vllm" and not HAS_VLLM:
        pytest.skip("vLLM is not in this environment: make test-vllm has one")
    return request.param


@pytest.fixture(scope="module")
def folder(engine: str, served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model; for vLLM one with heads of a width that its CPU kernels take."""
    return (
        save_model("llama", tmp_path_factory.mktemp("served"), hidden_size=WIDTH) if engine == "vllm" else served_folder
    )


@pytest.fixture(scope="module")
def make(engine: str, folder: Path, request: pytest.FixtureRequest) -> Make:
    """Makes an LM over such a backend."""
    if engine == "vllm":
        return lambda: vllm_lm(folder, max_model_len=WINDOW, max_num_tokens=POOL, kv_cache_tokens=POOL)
    if engine == "local":
        config = ModelConfig(model=str(folder), dtype="float32")
        return lambda: LM(backend=LocalBackend(config, ServerConfig(device="cpu")))
    server: Server = request.getfixturevalue("server")
    return lambda: LM(backend=RemoteBackend(server.url, KEYS["code"]))


@pytest.fixture(scope="module")
def lm(make: Make) -> Iterator[LM]:
    with make() as found:
        yield found


@pytest.fixture(scope="module")
def oracle(engine: str, folder: Path) -> Iterator[LM]:
    """A further engine of this process."""
    vllm = {"max_model_len": WINDOW, "max_num_tokens": POOL, "kv_cache_tokens": POOL, "max_running_requests": 8}
    same: dict[str, Any] = vllm if engine == "vllm" else {}
    with LM(folder, dtype="float32", device="cpu", **same) as found:
        yield found


REFUSED_BY_VLLM = {
    "steered": "vLLM's kernels|there is no head 5",
    "captured": "without taps at",
    "each its own": "vLLM's kernels|there is no head 5",
}
"""Calls of the table below with sites inside attention -> what the message says."""
OTHER_NOISE = ("the neutral parameters", "sampled", "n")
"""Calls that sample: vLLM draws its own noise."""


def equal(found: RequestOutput, wanted: RequestOutput) -> None:
    """All of an output but its request id."""
    assert found.prompt == wanted.prompt and found.prompt_token_ids == wanted.prompt_token_ids
    assert found.prompt_logprobs == wanted.prompt_logprobs and found.finished == wanted.finished
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert (one.index, one.text, one.token_ids) == (other.index, other.text, other.token_ids)
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        assert one.logprobs == other.logprobs and one.logprobs_mode == other.logprobs_mode
        assert list(one.activations) == list(other.activations)
        for site in other.activations:
            assert torch.equal(one.activations[site], other.activations[site]), site
            assert torch.equal(one.activations.positions[site], other.activations.positions[site])
        if other.receipt is not None:
            assert one.receipt.interventions == other.receipt.interventions
            assert one.receipt.captures == other.receipt.captures and one.receipt.spec == other.receipt.spec


STEERED = [
    Steer("resid_post.1", vector(1), 3.0, positions=Generated(1, 4)),
    Ablate("z.1", vector(2, 2, 16), heads=[0, 5]),
]
CALLS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "plain": (PROMPT, GREEDY, {}),
    "the neutral parameters": (PROMPT, SamplingParams(seed=1), {}),
    "a long prompt truncated": ([[3, 7] * 100], replace(GREEDY, truncate_prompt_tokens=9), {}),
    "token ids": ([3, 14, 15, 9, 2], GREEDY, {}),
    "several prompts": ([PROMPT, [7, 8], "w2 w5"], [GREEDY, replace(GREEDY, max_tokens=3), GREEDY], {}),
    "no prompts": ([], GREEDY, {}),
    "sampled": (PROMPT, SamplingParams(seed=5, temperature=1.2, top_k=20, max_tokens=9), {}),
    "n": (PROMPT, SamplingParams(n=3, seed=3, max_tokens=6), {}),
    "penalties": (PROMPT, replace(GREEDY, repetition_penalty=1.4, logit_bias={7: 2.0}), {}),
    "log probabilities": (PROMPT, replace(GREEDY, logprobs=3, prompt_logprobs=2), {}),
    "truncated": (PROMPT, replace(GREEDY, truncate_prompt_tokens=2), {}),
    "nothing generated": (PROMPT, replace(GREEDY, max_tokens=0), {"capture": ["resid_post.*", "logits"]}),
    "steered": (PROMPT, GREEDY, {"interventions": STEERED}),
    "captured": (PROMPT, GREEDY, {"capture": ["resid_post.*", Capture("q.1", positions=[0, -1], heads=[2])]}),
    "reduced": (PROMPT, GREEDY, {"capture": [Capture("mlp_out.*", reduce="mean"), Capture("pattern.2", heads=[0])]}),
    "each its own": ([PROMPT, "w2 w5"], GREEDY, {"interventions": [STEERED, None], "capture": [None, ["resid_mid.0"]]}),
    "options": (PROMPT, GREEDY, {"priority": 2, "cache_salt": "own", "timeout": 600.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_the_oracles_output(name: str, lm: LM, oracle: LM, engine: str) -> None:
    prompts, params, options = CALLS[name]
    if engine == "vllm":
        _check_close(name, lm, oracle)
        return
    for found, wanted in zip(
        lm.generate(prompts, params, **options), oracle.generate(prompts, params, **options), strict=True
    ):
        equal(found, wanted)


def _check_close(name: str, lm: LM, oracle: LM) -> None:
    """A call over vLLM: its output is close to the oracle's, or it is refused by name, or it draws as many tokens."""
    prompts, params, options = CALLS[name]
    if name in REFUSED_BY_VLLM:
        with pytest.raises(PromptError, match=REFUSED_BY_VLLM[name]):
            lm.generate(prompts, params, **options)
        return
    for found, wanted in zip(
        lm.generate(prompts, params, **options), oracle.generate(prompts, params, **options), strict=True
    ):
        if name in OTHER_NOISE:
            assert [len(o.token_ids) for o in found.outputs] == [len(o.token_ids) for o in wanted.outputs]
        else:
            assert_close(found, wanted)


def _same(engine: str) -> Callable[[RequestOutput, RequestOutput], None]:
    return assert_close if engine == "vllm" else equal


def test_a_stop_ends_at_the_same_token(lm: LM, oracle: LM, engine: str) -> None:
    (whole,) = oracle.generate(PROMPT, GREEDY)
    text = lm.to_str_tokens(whole.token_ids)[3]
    for params in (replace(GREEDY, stop=[text]), replace(GREEDY, stop_token_ids=[whole.token_ids[2]])):
        (found,), (wanted,) = lm.generate(PROMPT, params), oracle.generate(PROMPT, params)
        _same(engine)(found, wanted)
        assert found.finish_reason == "stop" and len(found.token_ids) < len(whole.token_ids)


def test_streams_and_coroutines_give_the_output_in_pieces(lm: LM, oracle: LM, engine: str) -> None:
    (wanted,) = oracle.generate(PROMPT, GREEDY)
    pieces = list(lm.stream(PROMPT, GREEDY))
    assert "".join(pieces) == wanted.text and pieces[-1].finish_reason == "length"
    assert [token for piece in pieces for token in piece.token_ids] == wanted.token_ids
    _same(engine)(asyncio.run(lm.agenerate(PROMPT, GREEDY))[0], wanted)
    for out in lm.imap([PROMPT] * 3, GREEDY):
        _same(engine)(out, wanted)


def test_an_aborted_request_has_the_tokens_so_far(lm: LM, oracle: LM) -> None:
    long = replace(GREEDY, max_tokens=100)
    (whole,) = oracle.generate(PROMPT, long)
    while True:
        handle = lm.submit(PROMPT, long)
        handle.cancel()
        out = handle.result(600)
        if out.finish_reason == "abort":  # else it had ended before
            break
    assert len(out.token_ids) < 100 and out.token_ids == whole.token_ids[: len(out.token_ids)]
    handle.cancel()  # of no effect


WRONG: dict[str, Callable[[LM], Any]] = {
    "empty": lambda lm: lm.generate([[]], GREEDY),
    "beyond the vocabulary": lambda lm: lm.generate([[3, 97]], GREEDY),
    "bytes": lambda lm: lm.generate(b"w3", GREEDY),
    "too long": lambda lm: lm.generate([[3] * (lm.limits.max_model_len + 1)], GREEDY),
    "too long for the defaults": lambda lm: lm.generate([[3] * (lm.limits.max_model_len + 1)]),
    "too many new tokens": lambda lm: lm.generate([[3]] * 2, [GREEDY, replace(GREEDY, max_tokens=1 << 20)]),
    "bias beyond the vocabulary": lambda lm: lm.generate(PROMPT, replace(GREEDY, logit_bias={97: 1.0})),
    "parameters": lambda lm: lm.generate([PROMPT, PROMPT], [GREEDY]),
    "no parameters": lambda lm: lm.generate(PROMPT, {"temperature": 0}),
    "priority": lambda lm: lm.generate(PROMPT, GREEDY, priority="high"),
    "salt": lambda lm: lm.generate(PROMPT, GREEDY, cache_salt=""),
    "timeout": lambda lm: lm.generate(PROMPT, GREEDY, timeout=-1.0),
    "unknown vector": lambda lm: lm.generate(PROMPT, GREEDY, interventions=[Steer("resid_post.1", "nobody's")]),
    "unknown layer": lambda lm: lm.generate(PROMPT, GREEDY, capture=["resid_post.17"]),
    "unknown site": lambda lm: lm.generate(PROMPT, GREEDY, capture=["resid_pots.1"]),
    "width": lambda lm: lm.generate(PROMPT, GREEDY, interventions=[Steer("resid_post.1", vector(1, 5))]),
    "the second prompt": lambda lm: lm.generate([PROMPT, "w1"], GREEDY, capture=[None, ["q.9"]]),
    "edit": lambda lm: lm.generate(PROMPT, GREEDY, edits=["nobody's"]),
    "logits twice": lambda lm: lm.forward(PROMPT, capture=["logits"]),
    "lengths": lambda lm: lm.run_with_cache([[1, 2], [3]]),
    "traced parameters": lambda lm: lm("w3", max_tokens=3),
}


def assert_same(found: Any, wanted: Any, engine: str) -> None:
    """Equal tensors; of vLLM, which has its own kernels, close ones."""
    (assert_close_tensor if engine == "vllm" else torch.testing.assert_close)(
        torch.as_tensor(found), torch.as_tensor(wanted), **({} if engine == "vllm" else {"rtol": 0, "atol": 0})
    )


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_served_has_the_oracles_error(name: str, lm: LM, oracle: LM) -> None:
    with pytest.raises(Exception) as wanted:
        WRONG[name](oracle)
    with pytest.raises(type(wanted.value)) as found:
        WRONG[name](lm)
    assert type(found.value) is type(wanted.value) and str(found.value) == str(wanted.value)


def test_a_block_that_raises_has_its_own_error(lm: LM) -> None:
    with pytest.raises(KeyError, match="of mine"), lm.trace(PROMPT):
        lm.model.layers[0].output.save()
        raise KeyError("of mine")
    (out,) = lm.generate(PROMPT, GREEDY)
    assert out.finish_reason == "length"


def test_a_trace_reads_and_edits_what_the_oracles_does(lm: LM, oracle: LM, engine: str) -> None:
    saved = []
    for model in (lm, oracle):
        with model.trace(PROMPT) as tracer:
            before = model.model.layers[1].output.clone().save()
            model.model.layers[1].output[:] *= 1.5
            logits = model.lm_head.output.save()
        with model.generate(PROMPT, max_new_tokens=5, ignore_eos=True) as generation:
            states = list().save()
            for _ in generation.iter[:]:
                states.append(model.model.layers[2].output[0, -1])
            ids = generation.result.save()
        saved.append([before, logits, torch.stack(states), ids, model(PROMPT).logits])
        assert tracer.receipt.reads
        if engine != "vllm":  # whose kernels have no derivatives
            with model.trace(PROMPT, grad=True):
                read = model.model.layers[0].output
                (gradient,) = torch.autograd.grad(model.output.logits[0, -1, 7], read)
                gradient = gradient.save()
            saved[-1].append(gradient)
    for found, wanted in zip(*saved, strict=True):
        assert_same(found, wanted, engine)


def test_sessions_and_edits_are_the_oracles(lm: LM, oracle: LM, engine: str) -> None:
    if engine == "vllm":
        pytest.skip("its sessions are refused: tests/vllm_engine has persistent edits")
    saved = []
    for model in (lm, oracle):
        with model.session():
            with model.trace(PROMPT):
                state = model.model.layers[0].output.save()
            with model.trace("w2 w8 w5 w1"):
                model.model.layers[0].output[:] = state
                logits = model.lm_head.output.save()
        with model.edit() as (_, edited):
            edited.model.layers[1].output[:] = 0
        saved.append([logits, torch.tensor(edited.generate(PROMPT, GREEDY)[0].token_ids)])
        equal(model.generate(PROMPT, GREEDY)[0], oracle.generate(PROMPT, GREEDY)[0])  # the copy has the edit
    for found, wanted in zip(*saved, strict=True):
        assert torch.equal(found, wanted)


def test_forward_passes_and_transformer_lens_calls_are_the_oracles(lm: LM, oracle: LM, engine: str) -> None:
    def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
        if engine == "vllm":
            assert_close_tensor(found, wanted)
            return True
        return torch.equal(found, wanted)

    for found, wanted in zip(lm.forward([PROMPT, "w2"]), oracle.forward([PROMPT, "w2"]), strict=True):
        assert same(found.logits, wanted.logits) and found.prompt_token_ids == wanted.prompt_token_ids
    (logits, cache), (own_logits, own) = (model.run_with_cache(PROMPT, "resid_post.*") for model in (lm, oracle))
    assert same(logits, own_logits) and list(cache) == list(own)
    assert all(same(cache[name], own[name]) for name in own)


def test_vectors_are_uploaded_and_used_by_name(lm: LM, oracle: LM) -> None:
    lm.vectors["of a test"] = vector(4)
    lm.vectors["by layer"] = {0: vector(5), 2: vector(6)}
    assert {"of a test", "by layer"} <= set(lm.vectors) and torch.equal(lm.vectors["of a test"], vector(4))
    for name, value in (("of a test", vector(4)), ("by layer", {0: vector(5), 2: vector(6)})):
        sites = "resid_post.1" if name == "of a test" else ["resid_post.0", "resid_post.2"]
        for site in [sites] if isinstance(sites, str) else sites:
            whole = value if isinstance(value, torch.Tensor) else value[int(site[-1])]
            (found,) = lm.generate(PROMPT, GREEDY, interventions=[Steer(site, name, 4.0)])
            (wanted,) = oracle.generate(PROMPT, GREEDY, interventions=[Steer(site, whole, 4.0)])
            assert found.token_ids == wanted.token_ids
    for name in ("of a test", "by layer"):
        del lm.vectors[name]
    with pytest.raises(KeyError, match="of a test"):
        lm.vectors["of a test"]
    with pytest.raises(PromptError, match="no vector 'of a test'"):
        lm.generate(PROMPT, GREEDY, interventions=[Steer("resid_post.1", "of a test")])


def test_limits_and_facts_are_the_oracles(lm: LM, oracle: LM, engine: str) -> None:
    assert lm.limits == replace(oracle.limits, max_running=lm.limits.max_running)
    assert 0 < lm.limits.max_running <= oracle.limits.max_running
    most = lm.limits.max_model_len
    (out,) = lm.generate([[3] * (most - 2)], replace(GREEDY, max_tokens=2))
    assert len(out.token_ids) == 2
    assert [len(model.generate([[3] * (most - 3)])[0].token_ids) for model in (lm, oracle)] == [
        3,
        3,
    ]  # the defaults fit
    known = {"spec", "dtype", "device", "engine_name", "inner_sites", "logprobs_mode", "model"}
    if engine == "vllm":  # which names itself, and has no sites inside attention
        known -= {"spec", "engine_name", "inner_sites"}
        assert "vLLM" in lm.backend.facts.engine_name and not lm.backend.facts.inner_sites
        assert replace(lm.backend.facts.spec, cuts_edges=True) == oracle.backend.facts.spec
    for name in known:
        assert getattr(lm.backend.facts, name) == getattr(oracle.backend.facts, name), name
    assert lm.backend.facts.hf_config.to_dict() == oracle.backend.facts.hf_config.to_dict()
    own = {"q.*", "k.*", "v.*", "z.*", "mlp_act.*"} if engine == "vllm" else set()
    assert lm.sites == [site for site in oracle.sites if site not in own]
    assert lm.default_sampling_params == oracle.default_sampling_params
    told, wanted = (json.loads(json.dumps(model.capabilities)) for model in (lm, oracle))
    if engine == "vllm":
        for name in ("engine", "inner_sites", "hooks", "sites"):
            told.pop(name), wanted.pop(name)
        for name in ("max_loras", "max_lora_rank"):
            wanted["limits"].pop(name)  # no adapters there
    assert {name: told[name] for name in wanted if name != "limits"} == {
        name: value for name, value in wanted.items() if name != "limits"
    }
    assert told["limits"] | wanted["limits"] == told["limits"]
    assert lm.capabilities["tasks"] == ["generate", "embed", "token_embed", "score"]
    assert told["sliding_window_size"] is None
    assert lm.to_str_tokens(PROMPT) == oracle.to_str_tokens(PROMPT)


def test_stats_count_steps(lm: LM) -> None:
    before = lm.engine.stats()
    lm.generate([[5, 6, 7]], GREEDY)
    after = lm.engine.stats()
    assert after["steps"] - before["steps"] >= GREEDY.max_tokens and before.keys() == after.keys()
    assert lm.engine.state.startswith(("idle", "live", "0"))
    lm.reset_prefix_cache()
    assert lm.generate([[5, 6, 7]], GREEDY)[0].num_cached_tokens == 0


def test_what_needs_the_models_process_says_so(lm: LM, oracle: LM, tmp_path: Path, engine: str) -> None:
    """A local backend has it; of another, the error names the feature and the backend."""
    asked: dict[str, Callable[[], Any]] = {
        "lm.harvest": lambda: lm.harvest([[1, 2]], capture=["embed"], out=tmp_path / "out", progress=False),
        "lm.attribute": lambda: lm.attribute(PROMPT, "w3 w2 w15 w9", metric="w7", sites="resid_post.0"),
        "lm.weights.fingerprint": lambda: lm.weights.fingerprint,
        "lm.weights.version": lambda: lm.weights.version,
        "lm.backend.resolve": lambda: lm._requests.resolved(["embed"]),
        "lm.runner": lambda: lm.runner,
    }
    for feature, ask in asked.items():
        if lm.backend.in_process or (engine == "vllm" and feature not in ("lm.attribute", "lm.runner")):
            ask()
        elif engine == "vllm":
            with pytest.raises(NotImplementedError, match=rf"{feature} needs the model in this process"):
                ask()
        else:
            with pytest.raises(NotImplementedError, match=rf"{feature} runs where the model is, .* at http"):
                ask()
    if engine == "vllm":
        with pytest.raises(NotImplementedError, match=r"circuits of this model|lm\.circuit .*: make a local LM"):
            lm.circuit(PROMPT, [])
    elif not lm.backend.in_process:
        with pytest.raises(ValueError, match="a circuit needs transcoders"):
            lm.circuit(PROMPT, [])
    if lm.backend.in_process:
        assert lm.weights.fingerprint == oracle.weights.fingerprint


@dataclass(frozen=True)
class CountLayers:
    """A command: what a runner answers to one."""

    def run(self, runner: InterpModelRunner) -> int:
        return runner.num_hidden_layers


def test_commands_run_in_the_models_process(lm: LM, engine: str) -> None:
    if lm.backend.in_process:
        assert lm.backend.run(CountLayers()) == lm.num_layers
        lm.backend.post(CountLayers())
        assert lm.patch_sweep(PROMPT, "w3 w2 w15 w9", metric=("w7", "w11"), progress=False).how == "wavefront"
        return
    for send in (lm.backend.run, lm.backend.post):
        needs = "needs the model in this process" if engine == "vllm" else "runs where the model is, .* at http"
        with pytest.raises(NotImplementedError, match=rf"the command CountLayers {needs}"):
            send(CountLayers())
    assert lm.patch_sweep(PROMPT, "w3 w2 w15 w9", metric=("w7", "w11"), progress=False).how.startswith("requests")


def test_saes_are_the_models(lm: LM, engine: str) -> None:
    assert list(lm.saes) == []
    sae = SAE(
        W_enc=vector(1, WIDTH, 4), b_enc=torch.zeros(4), W_dec=vector(2, 4, WIDTH), b_dec=torch.zeros(WIDTH), site="resid_post.1",
    )  # fmt: skip
    if engine == "remote":
        with pytest.raises(
            NotImplementedError, match=r"lm.saes\['sea'\]: a server has the SAEs that it is started with"
        ):
            lm.saes["sea"] = sae
        return
    lm.saes["sea"] = sae
    (out,) = lm.generate(PROMPT, GREEDY, interventions=[SetFeature("sea", {3: 1.0})])
    assert out.receipt.interventions
    del lm.saes["sea"]


def test_a_timeout_ends_a_request_and_a_pass(lm: LM) -> None:
    (out,) = lm.generate(PROMPT, replace(GREEDY, max_tokens=100), timeout=1e-6)
    assert out.finish_reason == "timeout"
    with pytest.raises(TimeoutError, match="ran into its timeout"):
        lm.forward(PROMPT, timeout=1e-6)


def test_a_backend_that_was_shut_down_takes_no_requests(make: Make) -> None:
    lm = make()
    handle = lm.submit(PROMPT, replace(GREEDY, max_tokens=100))
    lm.shutdown()
    lm.shutdown()
    try:
        assert handle.result(600).finish_reason in ("abort", "length")
    except (EngineClosedError, ConnectionError):
        pass  # it had not ended
    assert lm.engine.state == "shut down" and "shut down" in repr(lm.backend)
    with pytest.raises(EngineClosedError, match="shut down"):
        lm.generate(PROMPT, GREEDY)


def test_the_least_backend_generates_and_names_what_it_lacks(oracle: LM) -> None:
    backend: Any = oracle.backend
    lm = LM(backend=Forwarding(backend))
    equal(lm.generate(PROMPT, GREEDY)[0], oracle.generate(PROMPT, GREEDY)[0])
    with pytest.raises(NotImplementedError, match=r"lm\.harvest runs where the model is, .*: make a local LM there"):
        lm.harvest([[1]], capture=["embed"], out="nowhere")
    with pytest.raises(NotImplementedError, match="a block of this process"), lm.trace(PROMPT):
        lm.model.layers[0].output.save()


def test_an_incomplete_backend_is_not_made() -> None:
    class Empty(Backend):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Empty()  # pyright: ignore[reportAbstractUsage]


def test_a_backends_engine_has_its_settings_already(oracle: LM) -> None:
    for given in ({"dtype": "float16"}, {"device": "cpu"}, {"page_size": 8}, {"model": "gpt2"}, {"seed": 3}):
        with pytest.raises(TypeError, match=f"LM\\(backend=..., {next(iter(given))}=...\\): the backend's engine"):
            LM(backend=oracle.backend, **given)
    assert oracle.generate(PROMPT, GREEDY)[0].finish_reason == "length"


def test_an_lm_that_cannot_be_made_leaves_its_backend_open(oracle: LM) -> None:
    with pytest.raises((TypeError, AttributeError, ValueError)):
        LM(backend=oracle.backend, rename={"model": 3})
    assert oracle.generate(PROMPT, GREEDY)[0].finish_reason == "length"
