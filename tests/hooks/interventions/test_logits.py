"""Ops and captures at the logits: transformers' head under hooks is the oracle."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB, held
from helpers_declared import INNER, SITES, WAYS, lms, ops_at, prompt_of, random_specs, states_of, vector
from helpers_runner import Steps, make_runner

from pymllm_interp import LM, Ablate, Capture, Clamp, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.core.model_spec import INNER_SITES
from pymllm_interp.core.receipt import Receipt
from pymllm_interp.harvest.progress import HarvestError
from pymllm_interp.harvest.reader import open_harvest
from pymllm_interp.hooks.bind import bind
from pymllm_interp.hooks.captures.group import Group
from pymllm_interp.hooks.captures.spec import Project
from pymllm_interp.hooks.interventions import device_tables, host_ops
from pymllm_interp.hooks.interventions.op import Op, apply
from pymllm_interp.hooks.positions import ordinals_of
from pymllm_interp.interventions import Generated
from pymllm_interp.runner.interp_model_runner import InterpModelRunner

pytest.importorskip("triton", reason="the kernels' tests need the package triton")

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if CUDA else []
TIGHT: dict[str, Any] = {"kv_cache_tokens": 80, "page_size": 4, "max_num_tokens": 16, "inner_sites": INNER_SITES}
"""Prompts in chunks, and requests that give way."""
WAIT = 600


@pytest.fixture(scope="module", params=[way for way in WAYS if way != "tables"])  # which graphs read, too
def lm_of(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Iterator[Callable[..., LM]]:
    """(family, **arguments) -> an LM in float32, its hooks in each of the ways."""
    with lms(request.param, model_folder) as load:
        yield load


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, what: Any = None) -> None:
    """Logits here are up to 10; the last bits depend on the batch."""
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, msg=lambda message: f"{what}: {message}")


@pytest.mark.few("family", "llama", ways=["graphs"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_op_at_the_logits_equals_a_hook_on_transformers_head(family: str, lm_of: Any, oracle: Any) -> None:
    lm, model, prompt = lm_of(family), oracle(family), prompt_of(9, 3)
    plain = lm.generate([prompt], greedy(6))[0].token_ids
    changed = 0
    for spec in ops_at("logits", model.config):
        (out,) = lm.generate([prompt], greedy(6), interventions=[spec], capture=["logits"])
        ids = (prompt + out.token_ids)[:-1]
        wanted = states_of(model, ids, [spec], len(prompt))["logits"][len(prompt) - 1 :]
        assert_close(out.activations["logits"], wanted, spec)
        assert out.token_ids == wanted.argmax(-1).tolist(), spec
        changed += out.token_ids != plain
    assert changed > 1, "ops that change no token show little"


CAPTURES: list[list[Any]] = [
    ["logits", "resid_post.1"],
    [Capture("logits", positions="generated"), Capture("resid_post.0", positions=[0])],
    [Capture("logits", positions=[-1], dtype="float16"), "mlp_out.*"],
    [Capture("logits", reduce="mean"), Capture("resid_post.2", reduce="mean"), "embed"],
    [Capture("logits", reduce="last"), Capture("final_norm", reduce="last")],
    [Capture("logits", reduce=Project(vector(VOCAB, 5, 3)))],
    [Capture("logits", positions=Generated(1, 6, 2), reduce=Project(vector(VOCAB, 6, 4), top_k=2)), "attn_out.1"],
    [Capture("logits", dtype="bfloat16", reduce=Project(vector(VOCAB, 7, 20)))],
    [],
]


@pytest.mark.parametrize(
    "server", [pytest.param({}, marks=pytest.mark.slow), {"async_scheduling": True, "capture_ring_bytes": 6000}]
)
def test_logits_of_mixed_requests_are_those_of_transformers(server: dict[str, Any], lm_of: Any, oracle: Any) -> None:
    """Whole and reduced, beside other states, with ops there and elsewhere, of requests that give way, each position once; in a
    ring that holds a few rows."""
    model, rng = oracle("llama"), random.Random(9)
    lm = lm_of("llama", **TIGHT, **server)
    count = 16 if lm.runner.device_tables is None or CUDA else 8
    prompts = [prompt_of(rng.randrange(1, 15), i) for i in range(count)]
    sites = [site for site in SITES + INNER if site not in ("resid_mid.1", "logits")]
    at_logits = ops_at("logits", model.config)[:-1]
    specs = [
        [*random_specs(rng, model.config, sites), *rng.sample(at_logits, rng.choice([0, 0, 1, 2]))] for _ in prompts
    ]
    asked = [CAPTURES[i % len(CAPTURES)] for i in range(len(prompts))]
    before = lm.engine.stats()["preempted"]
    outs = lm.generate(prompts, greedy(9), interventions=specs, capture=asked)
    assert lm.engine.stats()["preempted"] > before
    for prompt, declared, captures, out in zip(prompts, specs, asked, outs, strict=True):
        ids = (prompt + out.token_ids)[:-1]
        states = states_of(model, ids, declared, len(prompt))
        assert out.token_ids == states["logits"][len(prompt) - 1 :].argmax(-1).tolist()
        assert bool(captures) == bool(out.activations)
        for spec in (Capture(c) if isinstance(c, str) else c for c in captures):
            for bound in bind(spec, lm.runner.model_spec, len(prompt)):
                check(out, bound, states[str(bound.site)], len(prompt), ids)


def check(out: Any, bound: Any, state: torch.Tensor, prompt_len: int, ids: list[int]) -> None:
    """`state` [positions, width] is what the site's is."""
    site, spec = str(bound.site), bound.spec
    wanted = (ordinals_of(bound.windows, torch.arange(len(ids))) >= 0).nonzero()[:, 0]
    if site == "logits":
        wanted = wanted[wanted >= prompt_len - 1]
    rows, tolerance = state[wanted], 1e-4
    if spec.reduce == "mean":
        rows = rows.mean(0, keepdim=True)
    elif spec.reduce == "last":
        rows, wanted = rows[-1:], wanted[-1:]
    elif isinstance(spec.reduce, Project):
        rows = rows @ spec.reduce.directions.T
        if spec.reduce.top_k is not None:
            rows, indexes = rows.topk(spec.reduce.top_k)
            assert torch.equal(out.activations.indexes[site], indexes)
    if spec.dtype is not None:
        rows, tolerance = rows.to(spec.dtype), 2e-2
    found = out.activations
    torch.testing.assert_close(found[site], rows, rtol=tolerance, atol=tolerance, msg=lambda m: f"{spec}: {m}")
    assert found.positions[site].tolist() == wanted.tolist(), spec
    assert found.token_ids[site].tolist() == [ids[position] for position in wanted]


@pytest.mark.few("server", {"hook_execution": "eager"}, ways=["functions"])
@pytest.mark.few("server", {}, {"hook_execution": "split"}, ways=["graphs"])
@pytest.mark.parametrize("server", [{}, {"hook_execution": "eager"}, {"hook_execution": "split"}])
def test_beside_traces_each_request_has_its_own(server: dict[str, Any], lm_of: Any, oracle: Any) -> None:
    lm, model = lm_of("llama", **server), oracle("llama")
    prompts = [prompt_of(5, 4), prompt_of(9, 5), prompt_of(7, 6)]
    shared = Scale("logits", 0.5), Steer("logits", vector(VOCAB, 9), positions="generated")
    specs: list[list[Op]] = [
        [shared[0], Steer("logits", vector(VOCAB, i), scale=3.0), shared[1]][i % 2 :] for i in range(3)
    ]
    beside = [lm.submit(prompts[i], greedy(6), interventions=specs[i], capture=["logits"]) for i in (1, 2)]
    with lm.generate(prompts[0], max_new_tokens=6, interventions=specs[0], capture=["logits"]) as tracer:
        for _ in tracer.iter[1:4]:
            lm.model.layers[1].output[:] += 0
        ids = tracer.result.save()
    outs = [
        (ids[0, 5:].tolist(), tracer.activations),
        *((h.result(WAIT).token_ids, h.result().activations) for h in beside),
    ]
    for prompt, spec, (tokens, found) in zip(prompts, specs, outs, strict=True):
        wanted = states_of(model, (prompt + tokens)[:-1], spec, len(prompt))["logits"][len(prompt) - 1 :]
        assert_close(found["logits"], wanted)
        assert tokens == wanted.argmax(-1).tolist()


def test_what_a_trace_leaves_of_the_logits_is_captured_and_drawn_from(lm_of: Any) -> None:
    """At the head, where the ops have acted, and behind it, before the next token is drawn."""
    lm, prompt = lm_of("llama"), prompt_of(6, 2)
    with lm.generate(prompt, max_new_tokens=3, interventions=[Scale("logits", 0.5)], capture=["logits"]) as tracer:
        seen = list().save()
        for step in tracer.iter[:]:
            lm.lm_head.output[:, :, 11] = 400.0
            left = lm.logits
            if step == 0:
                left[:, 7] = 500.0
            elif step == 1:
                lm.logits = left = left.flip(-1)
            seen.append(left.clone())
        ids = tracer.result.save()
    assert ids[0, 6:].tolist() == [7, VOCAB - 12, 11]
    assert torch.equal(tracer.activations["logits"], torch.cat(seen))
    assert tracer.activations.positions["logits"].tolist() == [5, 6, 7]


def test_one_pass_and_prompt_logprobs_have_the_logits_of_the_whole_prompt(lm_of: Any, oracle: Any) -> None:
    lm, prompt = lm_of("llama", max_num_tokens=16), prompt_of(12, 8)
    steer: list[Op] = [Steer("logits", vector(VOCAB, 3), positions=slice(0, None, 2))]
    chosen = Capture("logits", positions=[0, 3, -1])
    with lm.trace(prompt, interventions=steer, capture=["logits"]) as tracer:
        seen = lm.output.logits.save()
        lm.logits[:] += 1.0  # that of the last position, which a token would be drawn from
    wanted = states_of(oracle("llama"), prompt, steer, len(prompt))["logits"]
    assert_close(seen[0], wanted)
    assert_close(tracer.activations["logits"][:-1], wanted[:-1])
    assert_close(tracer.activations["logits"][-1:], wanted[-1:] + 1.0)
    (out,) = lm.generate([prompt * 2], greedy(3, prompt_logprobs=0), interventions=steer, capture=[chosen])  # in chunks
    wanted = states_of(oracle("llama"), prompt * 2, steer, 24)["logits"]
    assert_close(out.activations["logits"], wanted[[0, 3, 23]])
    assert out.activations.positions["logits"].tolist() == [0, 3, 23]
    (whole,) = lm.generate([prompt], greedy(3, prompt_logprobs=0), capture=["logits"])
    assert whole.activations.positions["logits"].tolist() == list(range(14))
    assert [(entry.prompt_rows, entry.generated_rows) for entry in whole.receipt.captures] == [(12, 2)]
    with lm.trace(prompt, capture=["logits"]) as tracer:
        lm.model.layers[1].output.retain_grad()
        lm.output.logits.sum().backward()
    assert_close(tracer.activations["logits"], whole.activations["logits"][:12])
    assert not tracer.activations["logits"].requires_grad


@pytest.mark.parametrize("positions", ["all", "prompt", [0, -1]])
def test_each_completion_of_a_prompt_has_the_logits_of_all_of_it(positions: Any, lm_of: Any) -> None:
    """Where those are asked for; the log probabilities of the prompt are worked out once."""
    lm, prompt = lm_of("llama"), prompt_of(6, 2)
    params = SamplingParams(max_tokens=3, n=3, seed=1, prompt_logprobs=0)
    (out,) = lm.generate([prompt], params, capture=[Capture("logits", positions=positions)])
    found = [completion.activations for completion in out.outputs]
    wanted = {"all": list(range(8)), "prompt": list(range(6)), "[0, -1]": [0, 5]}[str(positions)]
    of_prompt = sum(position < 6 for position in wanted)
    assert [each.positions["logits"].tolist() for each in found] == [wanted] * 3
    for each in found[1:]:
        assert_close(each["logits"][:of_prompt], found[0]["logits"][:of_prompt])
    assert [c.receipt.captures[0].prompt_rows for c in out.outputs] == [of_prompt] * 3
    assert len(out.prompt_logprobs) == 6


@pytest.mark.parametrize("positions", ["prompt", [0], [0, -1], slice(None), slice(0, None, 5), range(4, 6)])
def test_positions_that_have_no_logits_are_refused_before_anything_is_scheduled(positions: Any, lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(6, 1)
    before = lm.engine.num_steps
    with pytest.raises(
        ValueError, match=r"'logits'.*from position 5 on, the prompt's last: name -1.*prompt_logprobs=0"
    ):
        lm.generate([prompt], greedy(2), capture=[Capture("logits", positions=positions)])
    assert lm.engine.num_steps == before
    (out,) = lm.generate([prompt[:1]], greedy(2), capture=[Capture("logits", positions="prompt")])
    assert out.activations.positions["logits"].tolist() == [0], "the only token of a prompt is its last"


def test_a_row_that_was_computed_after_the_end_is_not_captured(lm_of: Any) -> None:
    """With steps launched ahead, a request that stops has run a step too many."""
    lm, prompt = lm_of("llama", async_scheduling=True), prompt_of(6, 5)
    ids = lm.generate([prompt], greedy(9))[0].token_ids
    stop = next(i for i in range(2, 9) if ids[i] not in ids[:i])
    (out,) = lm.generate([prompt], greedy(9, stop_token_ids=[ids[stop]]), capture=["logits"])
    assert out.activations["logits"].argmax(-1).tolist() == out.token_ids == ids[: stop + 1]


def test_a_request_that_ends_in_the_midst_of_a_pass_leaves_it_to_the_others(lm_of: Any) -> None:
    """With a trace in the batch, the last step's tokens are read when the next pass is under way: what the request's vectors were
    in the pool is given back by then."""
    lm, prompt = lm_of("llama", async_scheduling=True), prompt_of(6, 5)
    ids = lm.generate([prompt], greedy(9))[0].token_ids
    stop = next(i for i in range(2, 9) if ids[i] not in ids[:i])
    capture = [Capture("logits", reduce=Project(torch.eye(VOCAB)[:16]))]
    specs: list[Op] = [Steer("logits", torch.ones(VOCAB))]
    with held(lm) as arrived:
        beside = lm.submit(prompt, greedy(9, stop_token_ids=[ids[stop]]), capture=capture, interventions=specs)

        def trace() -> None:
            with lm.generate(prompt, max_new_tokens=9, capture=["logits"]) as tracer:
                for _ in tracer.iter[:]:
                    lm.model.layers[1].output[:] += 0
                tokens = tracer.result.save()
            found.append((tokens, tracer.activations["logits"]))

        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        thread = threading.Thread(target=trace)
        thread.start()
        arrived(2)
    out = beside.result(WAIT)
    thread.join(WAIT)
    ((tokens, logits),) = found
    assert tokens[0, 6:].tolist() == logits.argmax(-1).tolist() == ids
    assert out.token_ids == ids[: stop + 1]
    assert_close(out.activations["logits"], logits[: stop + 1, :16] + 1.0)


def test_gates_at_the_logits_count_their_fires(lm_of: Any, oracle: Any) -> None:
    """In the rows that there are; beside gates elsewhere, and in each request by itself."""
    lm, model, v = lm_of("llama"), oracle("llama"), vector(VOCAB, 1)
    prompts = [prompt_of(5 + i, i) for i in range(4)]
    specs = [
        Steer("logits", v, scale=0.3, when=Gate(v, 0.0)),
        Scale("logits", 1.5),
        Scale("logits", 2.0, when=Gate(v, 9.0)),
    ]
    elsewhere = Scale("mlp_out.1", 1.0001, when=Gate(torch.ones(lm.hf_config.hidden_size), -1e9))
    counts = set()
    for prompt, out in zip(prompts, lm.generate(prompts, greedy(7), interventions=[*specs, elsewhere]), strict=True):
        ids = (prompt + out.token_ids)[:-1]
        state = states_of(model, ids, [elsewhere], len(prompt))["logits"][len(prompt) - 1 :]
        fires = []
        for spec in specs:
            if spec.when is not None:
                fires.append(int((state @ spec.when.probe > spec.when.threshold).sum()))
            state = apply(spec, state)
        found = [(e.site, e.prompt_rows, e.generated_rows, e.gate_fires) for e in out.receipt.interventions]
        assert found == [
            ("mlp_out.1", len(prompt), 6, len(ids)), ("logits", 1, 6, fires[0]), ("logits", 1, 6, None), ("logits", 1, 6, fires[1]),
        ]  # fmt: skip
        counts.update(fires)
    assert len(counts) > 2, "gates that are always open, or never, show little"


def test_what_ops_are_computed_with_is_on_the_device_before_the_first_step(lm_of: Any, monkeypatch: Any) -> None:
    """Afterwards a step sends where they act, one number for each row and op, and no vector; the rows come back at the end."""
    lm = lm_of("llama")
    probe, directions = vector(VOCAB, 2), vector(VOCAB, 3, 4)
    specs = [
        *ops_at("logits", lm.hf_config)[2:5],
        Patch("logits", directions[0], positions=[-1], when=Gate(probe, -1e9)),
    ]
    sent: Counter[int] = Counter()  # by step: elements
    used: dict[int, set[int]] = {}  # by step: addresses of vectors
    upload, act = device_tables.upload, host_ops.act

    def counted_upload(device: Any, *host: Any) -> Any:
        sent[lm.engine.num_steps] += sum(part.size if isinstance(part, np.ndarray) else part.numel() for part in host)
        return upload(device, *host)

    def seen_act(op: Any, state: Any, ordinals: Any, vectors: Any) -> torch.Tensor:
        used.setdefault(lm.engine.num_steps, set()).update(vector.data_ptr() for vector in vectors)
        return act(op, state, ordinals, vectors)

    for module in (device_tables, host_ops):
        monkeypatch.setattr(module, "upload", counted_upload)
    monkeypatch.setattr(host_ops, "act", seen_act)
    with held(lm):
        handles = [lm.submit(prompt_of(6, i), greedy(5), interventions=specs) for i in range(3)]
    assert [len(handle.result(WAIT).token_ids) for handle in handles] == [5, 5, 5]
    first, *later = used.values()
    assert len(used) == 5 and all(addresses <= first for addresses in later)
    if lm.runner.device_tables is None:
        assert not sent
        return
    begin, *steps = (sent[step] for step in used)
    assert begin > sum(vector.numel() for spec in specs for vector in spec.vectors)
    assert all(count <= 3 * len(specs) for count in steps)
    pool = lm.runner.device_tables.tables.vectors
    assert all(pool.data_ptr() <= address < pool.data_ptr() + pool.nbytes for address in first)
    assert lm.runner.declarations.pool.used == 0


def test_what_requests_have_in_common_is_done_once_a_step(lm_of: Any, oracle: Any, monkeypatch: Any) -> None:
    """Captures, and ops without a gate; the rows of a request that has none of them are left alone."""
    lm = lm_of("llama")
    written: list[int] = []
    acted: list[int] = []
    write, act = Group.write, host_ops.act

    def counted(group: Group, states: torch.Tensor, *args: Any) -> None:
        written.append(len(states))
        write(group, states, *args)

    def counted_act(op: Any, state: torch.Tensor, *args: Any) -> torch.Tensor:
        acted.append(len(state))
        return act(op, state, *args)

    monkeypatch.setattr(Group, "write", counted)
    monkeypatch.setattr(host_ops, "act", counted_act)
    prompts = [prompt_of(6, i) for i in range(5)]
    specs: list[list[Op]] = [[Scale("logits", -0.5), Steer("logits", vector(VOCAB, 1), scale=2.0)]] * 4 + [[]]
    with held(lm):
        handles = [
            lm.submit(prompt, greedy(5), capture=["logits", "resid_post.1"], interventions=declared)
            for prompt, declared in zip(prompts, specs, strict=True)
        ]
    for prompt, declared, handle in zip(prompts, specs, handles, strict=True):
        out = handle.result(WAIT)
        wanted = states_of(oracle("llama"), (prompt + out.token_ids)[:-1], declared, 6)["logits"][5:]
        assert_close(out.activations["logits"], wanted)
    if lm.runner.capture_ring is not None:
        assert written == [5] * 5 and acted == [4, 4] * 5


def test_a_vector_pool_that_is_full_of_the_vocabularys_is_an_error_that_names_its_setting(lm_of: Any) -> None:
    """A vector of the vocabulary takes as many rows as it is wider than a state."""
    lm = lm_of("llama", max_intervention_vectors=3)
    if lm.runner.device_tables is None:
        pytest.skip("functions have no pool")
    with pytest.raises(ValueError, match="max_intervention_vectors"):
        lm.generate([[1, 2]], interventions=[Steer("logits", vector(VOCAB, 1)), Steer("logits", vector(VOCAB, 2))])
    (out,) = lm.generate([[1, 2]], greedy(2), interventions=[Steer("logits", vector(VOCAB, 1), scale=1e3)])
    assert out.token_ids == [int(vector(VOCAB, 1).argmax())] * 2 and lm.runner.declarations.pool.used == 0


def test_the_vectors_of_a_request_are_given_back_however_it_ends(lm_of: Any, tmp_path: Path) -> None:
    """Cancelled, out of time, refused beside another one, in a trace that fails, in a harvest that finds no room."""
    lm, width = lm_of("llama", max_intervention_vectors=4), lm_of("llama").hf_config.hidden_size
    if lm.runner.device_tables is None:
        pytest.skip("functions have no pool")
    pool, long = lm.runner.declarations.pool, greedy(100)

    def steer(seed: int) -> list[Op]:
        return [Steer("embed", vector(width, seed))]

    many: list[Op] = [Ablate("embed", vector(width, 1, 5))]
    with held(lm):
        handle = lm.submit([1, 2], long, interventions=steer(1))
        assert pool.used == 1
        handle.cancel()
    assert handle.result(WAIT).finish_reason == "abort" and pool.used == 0
    (out,) = lm.generate([[1, 2]], long, timeout=1e-9, interventions=steer(1))
    assert out.finish_reason == "timeout" and pool.used == 0
    for given in ([steer(1), [Steer("embed", vector(3, 1))]], [steer(i) + steer(i + 1) + steer(i + 2) for i in (0, 3)]):
        with pytest.raises(ValueError, match=r"has 3 values|max_intervention_vectors"):
            lm.generate([[1, 2]] * 2, interventions=given)
        assert pool.used == 0
    with pytest.raises(ZeroDivisionError):
        with lm.trace([1, 2], interventions=steer(1)):
            lm.model.layers[0].output[:] = 1 // 0
    assert pool.used == 0
    with pytest.raises(ValueError, match="max_intervention_vectors"):
        with lm.trace([1, 2], interventions=many):
            lm.model.layers[0].output.save()
    with pytest.raises(HarvestError, match="max_intervention_vectors"):
        lm.harvest([[1, 2]], capture=["embed"], out=tmp_path, interventions=many)
    assert pool.used == 0
    lm.generate([[1, 2]], greedy(2), interventions=[Ablate("embed", vector(width, 1, 4))])
    assert pool.used == 0, "all of it"


def test_a_harvest_has_the_logits_of_each_documents_end(lm_of: Any, oracle: Any, tmp_path: Path) -> None:
    lm, documents = lm_of("llama"), [prompt_of(3 + i, i) for i in range(5)]
    lm.harvest(documents, capture=["logits", "resid_post.1"], out=tmp_path / "both")
    found = open_harvest(tmp_path / "both")
    wanted = [states_of(oracle("llama"), ids, [], len(ids)) for ids in documents]
    assert_close(found["logits"][:], torch.stack([states["logits"][-1] for states in wanted]))
    assert_close(found["resid_post.1"][:], torch.cat([states["resid_post.1"] for states in wanted]))
    assert found.positions("logits")[:].tolist() == [len(ids) - 1 for ids in documents]
    assert found.token_ids("logits")[:].tolist() == [ids[-1] for ids in documents]
    assert found.positions("resid_post.1")[:].tolist() == [i for ids in documents for i in range(len(ids))]


@pytest.mark.gpu
def test_the_host_waits_for_no_step_with_ops_and_captures_at_the_logits(model_folder: Any) -> None:
    runner, v = make_runner(model_folder("llama"), InterpModelRunner, device="cuda"), vector(VOCAB, 1)
    assert isinstance(runner, InterpModelRunner) and runner.capture_ring is not None and runner.declarations is not None
    steps = Steps(runner)
    steps.scheduler.ring_admission = runner.capture_ring.admission
    specs: list[Op] = [
        Steer("logits", v, scale=0.1, norm="preserve", when=Gate(v, 0.0)),
        Ablate("logits", vector(VOCAB, 2, 3)),
        Clamp("logits", v, low=-0.1, high=0.1),
        Patch("logits", v, positions="generated", when=Gate(v, 1e9)),
    ]
    captures = [[Capture("logits"), Capture("resid_post.1")], [Capture("logits", reduce=Project(v))], []]
    for i, asked in enumerate(captures):
        request = steps.add(prompt_of(6, i), max_tokens=12)
        request.receipt = Receipt()
        runner.declarations.declare(specs, asked, request)
        runner.declarations.hold(request)
    for i in range(8):
        schedule = steps.scheduler.schedule()
        torch.cuda.synchronize()
        if i > 3:  # what is done once has been done
            torch.cuda.set_sync_debug_mode("error")
        try:
            assert runner.execute_model(schedule) is None
            output = runner.sample_tokens_async()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert output is not None and len(schedule.scheduled) == 3
        steps.scheduler.launched(schedule)
        steps.scheduler.update(schedule, output.get_output())
    runner.shutdown()
