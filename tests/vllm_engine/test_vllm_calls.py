"""Calls of an LM over vLLM (V1, eager, prompts in chunks of 16) against our own engine: every op and reduction, streams, stops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_saes import random_sae
from helpers_vllm import (
    LAYERS,
    WIDTH,
    assert_close,
    assert_close_tensor,
    assert_equal_pooled,
    needs_vllm,
    own_lm,
    prompt,
    save_model,
    vector,
    vllm_lm,
)

from pymllm_interp import LM, Ablate, Capture, Clamp, Gate, Patch, SamplingParams, Scale, Steer
from pymllm_interp.captures import Features, Lens, Project
from pymllm_interp.interventions import Generated, SetFeature
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.vllm_engine.refusals import VllmRefusalError

pytestmark = needs_vllm
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
PROMPTS = [prompt(5, 1), prompt(37, 2), prompt(20, 3)]
STREAM = [f"{kind}.*" for kind in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")]
SAE = random_sae(WIDTH, site="resid_post.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Iterator[LM]:
    with own_lm(folder) as found:
        yield found


@pytest.fixture(scope="module")
def lm(folder: Path) -> Iterator[LM]:
    with vllm_lm(folder, max_num_tokens=16) as found:
        yield found


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all states": {"capture": [*STREAM, "embed", "final_norm", "logits"]},
    "positions": {"capture": [Capture("resid_post.1", positions=[0, -1]), Capture("mlp_out.2", positions=slice(1, None, 2))]},
    "norms": {"capture": ["attn_in.1", "mlp_in.2"]},
    "pools": {"capture": [Capture("resid_post.*", reduce="mean"), Capture("attn_out.1", reduce="last")]},
    "directions": {"capture": [Capture("resid_mid.*", reduce=Project(vector(1, 2, WIDTH)))]},
    "features": {"capture": [Capture("resid_post.1", reduce=Features(SAE, top_k=5))]},
    "lens": {"capture": [Capture("resid_post.*", reduce=Lens(top_k=3, tokens=[4, 9]))]},
    "half": {"capture": [Capture("resid_post.*", dtype=torch.float16)]},
    "steer": {"interventions": [Steer("resid_post.1", vector(2), 2.0), Steer("resid_post.1", vector(3), positions="generated")]},
    "norms of steering": {
        "interventions": [Steer("attn_out.0", vector(2), norm="preserve"), Steer("mlp_out.2", vector(3), 0.3, norm="match")]
    },
    "ablate": {"interventions": [Ablate("resid_mid.1", vector(4, 3, WIDTH))]},
    "clamp": {"interventions": [Clamp("resid_post.2", vector(5), low=-0.2, high=0.2, positions="prompt")]},
    "scale": {"interventions": [Scale("mlp_out.0", 0.5, positions=Generated(1, 5, 2)), Scale("embed", 1.3)]},
    "patch": {"interventions": [Patch("resid_post.0", vector(6, 2, WIDTH), positions=[0, -1])]},
    "final norm": {"interventions": [Steer("final_norm", vector(7)), Steer(f"resid_post.{LAYERS - 1}", vector(8))]},
    "gate": {"interventions": [Steer("resid_post.1", vector(2), 2.0, when=Gate(vector(9), 0.5))]},
    "gate before": {"interventions": [Steer("resid_post.2", vector(2), when=Gate(vector(9), 0.0, site="resid_post.0"))]},
    "gate of the prompt": {
        "interventions": [Steer("resid_post.2", vector(2), when=Gate(vector(9), 2.0, site="resid_post.0", scope="prompt"))]
    },
    "feature": {"interventions": [SetFeature(SAE, {3: 2.0, 7: 0.0})]},
    "logits": {"interventions": [Steer("logits", vector(1, 97), 3.0)], "capture": ["logits"]},
    "each its own": {
        "interventions": [[Steer("resid_post.1", vector(2), 2.0)], None, [Ablate("mlp_out.*", vector(4))]],
        "capture": [None, STREAM, ["resid_post.3"]],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_op_and_reduction_is_our_engines(name: str, lm: LM, oracle: LM) -> None:
    options = CASES[name]
    found, wanted = lm.generate(PROMPTS, GREEDY, **options), oracle.generate(PROMPTS, GREEDY, **options)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)
        for gate, own in zip(
            one.receipt.interventions if one.receipt else (),
            other.receipt.interventions if other.receipt else (),
            strict=True,
        ):
            assert gate.gate_fires == own.gate_fires
    if options:
        assert set(found[1].receipt.steps if found[1].receipt else {"vllm V1 none"}) == {"vllm V1 none"}


def test_an_op_changes_the_tokens(lm: LM) -> None:
    """What the comparisons above could miss: ops that do nothing on both sides."""
    (plain,), (steered,) = (
        lm.generate([PROMPTS[1]], GREEDY, interventions=ops) for ops in (None, [Steer("resid_post.1", vector(2), 8.0)])
    )
    assert plain.outputs[0].token_ids != steered.outputs[0].token_ids


def test_plain_requests_beside_steered_ones_keep_all_bits(lm: LM) -> None:
    alone = [lm.generate([ids], GREEDY)[0] for ids in PROMPTS]
    lm.reset_prefix_cache()
    mixed = lm.generate(
        [PROMPTS[0], PROMPTS[1], PROMPTS[2]],
        GREEDY,
        interventions=[None, [Steer("resid_post.*", vector(2), 4.0)], None],
    )
    for i in (0, 2):
        assert mixed[i].outputs[0].token_ids == alone[i].outputs[0].token_ids
        assert_close(mixed[i], alone[i])


PARAMS: dict[str, SamplingParams] = {
    "one token": SamplingParams(temperature=0, max_tokens=1),
    "nothing generated": SamplingParams(temperature=0, max_tokens=0),
    "prompt log probabilities": SamplingParams(temperature=0, max_tokens=3, logprobs=3, prompt_logprobs=2),
    "penalties": SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.4, logit_bias={7: 2.0}),
    "frequency": SamplingParams(temperature=0, max_tokens=8, frequency_penalty=0.7, presence_penalty=0.4),
    "allowed": SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[3, 5, 8]),
    "bad words": SamplingParams(temperature=0, max_tokens=6, bad_words=["w3", "w44"]),
    "truncated": SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=3),
    "token stop": SamplingParams(temperature=0, max_tokens=20, stop_token_ids=list(range(0, 95, 2))),
    "minimum": SamplingParams(temperature=0, max_tokens=12, min_tokens=5, stop_token_ids=list(range(0, 95, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMS)
def test_sampling_parameters_do_what_they_do_here(name: str, lm: LM, oracle: LM) -> None:
    capture = ["resid_post.1", "logits"] if name == "nothing generated" else None
    for one, other in zip(
        lm.generate(PROMPTS, PARAMS[name], capture=capture),
        oracle.generate(PROMPTS, PARAMS[name], capture=capture),
        strict=True,
    ):
        assert_close(one, other)


def test_a_stop_string_ends_at_the_same_token(lm: LM, oracle: LM) -> None:
    (whole,) = oracle.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=12))
    stop = SamplingParams(temperature=0, max_tokens=12, stop=[lm.to_str_tokens(whole.token_ids)[3]])
    found, wanted = (m.generate([PROMPTS[1]], stop, capture=["resid_post.0"])[0] for m in (lm, oracle))
    assert_close(found, wanted)
    assert found.outputs[0].finish_reason == "stop"


def test_completions_of_one_prompt_differ_and_repeat(lm: LM) -> None:
    params = SamplingParams(n=3, seed=4, temperature=1.0, max_tokens=8)
    first, second = (lm.generate([PROMPTS[0]], params)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) > 1


def test_streams_and_coroutines_give_the_output_in_pieces(lm: LM, oracle: LM) -> None:
    (wanted,) = oracle.generate("w3 w14 w15", GREEDY)
    pieces = list(lm.stream("w3 w14 w15", GREEDY))
    assert "".join(pieces) == wanted.text and [t for piece in pieces for t in piece.token_ids] == wanted.token_ids
    assert_close(asyncio.run(lm.agenerate("w3 w14 w15", GREEDY))[0], wanted)
    for out in lm.imap(["w3 w14 w15"] * 3, GREEDY):
        assert_close(out, wanted)


def test_chat_is_our_engines(lm: LM, oracle: LM) -> None:
    turns = [{"role": "user", "content": "w3 w4"}]
    assert_close(lm.chat(turns, GREEDY)[0], oracle.chat(turns, GREEDY)[0])


def test_forward_passes_are_our_engines(lm: LM, oracle: LM) -> None:
    for found, wanted in zip(
        lm.forward([PROMPTS[0], PROMPTS[1]]), oracle.forward([PROMPTS[0], PROMPTS[1]]), strict=True
    ):
        assert_close_tensor(found.logits, wanted.logits)


def test_an_aborted_request_has_the_tokens_and_states_so_far(lm: LM, oracle: LM) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    (whole,) = oracle.generate([PROMPTS[0]], long, capture=["resid_post.1"])
    seconds, found = 0.02, []
    while seconds < 60:  # until one ends between its first token and its last, whatever the machine's pace
        handle = lm.submit(PROMPTS[0], long, capture=["resid_post.1"])
        time.sleep(seconds)
        handle.cancel()
        out = handle.result(600)
        count = len(out.token_ids)
        assert out.token_ids == whole.token_ids[:count]
        states = out.outputs[0].activations["resid_post.1"]
        assert len(states) == (len(PROMPTS[0]) + count - 1 if count else 0)
        assert_close_tensor(states, whole.outputs[0].activations["resid_post.1"][: len(states)])
        found.append((out.finish_reason, count))
        if out.finish_reason == "abort" and count:
            return
        seconds *= 1.3 if count == 0 else 0.8
    raise AssertionError(found)


def test_a_request_that_never_began_ends(lm: LM) -> None:
    (out,) = lm.generate([PROMPTS[1]], GREEDY, timeout=1e-6, capture=["resid_post.1"])
    assert out.finish_reason == "timeout"


def test_edits_never_taint_the_kv_of_others(lm: LM, oracle: LM) -> None:
    """Also of generated positions: vLLM keeps their KV under the hashes of prompts."""
    lm.reset_prefix_cache()
    ids, late = prompt(40, 8), [Steer("resid_post.1", vector(2), 6.0, positions="generated")]
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (first,) = lm.generate([ids], long, interventions=late)
    longer = ids + first.outputs[0].token_ids[:-1]
    for interventions in (None, [Steer("resid_post.0", vector(3))], late):
        (found,) = lm.generate([longer], GREEDY, interventions=interventions)
        assert_close(found, oracle.generate([longer], GREEDY, interventions=interventions)[0])
    (again,) = lm.generate([ids], long, interventions=late)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids and again.num_cached_tokens > 0


def test_a_captured_prompt_is_computed_though_it_is_cached(lm: LM, oracle: LM) -> None:
    ids = prompt(70, 9)
    lm.generate([ids], GREEDY)
    assert lm.generate([ids], GREEDY)[0].num_cached_tokens >= 32
    (found,) = lm.generate([ids], GREEDY, capture=["resid_post.2"])
    assert_close(found, oracle.generate([ids], GREEDY, capture=["resid_post.2"])[0])
    assert len(found.outputs[0].activations["resid_post.2"]) == 70 + 5


def test_named_vectors_and_saes(lm: LM, oracle: LM) -> None:
    for model in (lm, oracle):
        model.vectors["sea"] = vector(12)
        model.saes["own"] = SAE
    ops = [Steer("resid_post.2", "sea", 3.0), SetFeature("own", {1: 2.0})]
    assert_close(
        lm.generate([PROMPTS[2]], GREEDY, interventions=ops)[0],
        oracle.generate([PROMPTS[2]], GREEDY, interventions=ops)[0],
    )


def test_a_block_that_lowers_runs(lm: LM, oracle: LM) -> None:
    saved, added = [], vector(3)
    for model in (lm, oracle):
        with model.trace(PROMPTS[2]) as tracer:
            before = model.model.layers[1].output.save()
            top = model.lm_head.output[0, -1].argmax().save()
        with model.generate(PROMPTS[2], max_new_tokens=4, ignore_eos=True) as generation:
            states = list().save()
            for _ in generation.iter[:]:
                model.model.layers[1].output[:] += added
                states.append(model.model.layers[2].output[0, -1])
        saved.append((before, torch.stack(states)))
        assert tracer.receipt.lowered or model is oracle
        saved[-1] += (top,)
    for found, wanted in zip(*saved, strict=True):
        assert_close_tensor(torch.as_tensor(found), torch.as_tensor(wanted))


def test_a_block_that_does_not_lower_runs_in_the_passes(lm: LM, oracle: LM) -> None:
    saved: list[Any] = []
    ids = PROMPTS[0]
    for model in (lm, oracle):
        with model.trace(ids) as tracer:
            q = model.model.layers[1].self_attn.q_proj.output.save()
            hidden = model.model.layers[1].output
            if hidden[0, 0, 0] < 1e9:  # its value decides what runs
                model.model.layers[2].output[:] = hidden
            last = model.model.layers[3].output.save()
        assert model is oracle or (not tracer.receipt.lowered and "line" in tracer.receipt.not_lowered)
        with model.edit() as (_, edited):
            edited.model.layers[1].output[:] *= 0.5
        saved.append((q, last, model(ids).logits, torch.tensor(edited.generate([ids], GREEDY)[0].token_ids)))
    for found, wanted in zip(*saved, strict=True):
        assert_close_tensor(found, wanted)
    with pytest.raises(PromptError, match="max_num_tokens"), lm.trace(PROMPTS[2]):  # 20 tokens, and steps have 16
        lm.model.layers[1].self_attn.q_proj.output.save()
    with pytest.raises(VllmRefusalError, match=r"lm\.session"), lm.session():
        pass
    assert lm.generate([PROMPTS[2]], GREEDY)[0].finish_reason == "length"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "inner site": ({"capture": ["q.1"]}, r"q\.1: .*without taps at 'q'"),
    "inner op": ({"interventions": [Scale("mlp_act.0", 0.5)]}, r"mlp_act\.0: .*without taps at 'mlp_act'"),
    "K": ({"capture": ["kv.1"]}, "cached K and V are not captured"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_cannot_do_is_refused_by_name(name: str, lm: LM) -> None:
    options, message = REFUSED[name]
    with pytest.raises(PromptError, match=message):
        lm.generate([PROMPTS[0]], GREEDY, **options)


def test_embeddings_are_refused_by_name(lm: LM) -> None:
    with pytest.raises(PromptError, match="has embeddings: make the LM with enable_prompt_embeds=True"):
        lm.generate({"prompt_embeds": torch.zeros(2, lm.hidden_size, dtype=lm.dtype)}, GREEDY)


def test_a_pause_keeps_or_ends_what_runs(lm: LM, oracle: LM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)
    running = lm.submit(PROMPTS[0], params, capture=["resid_post.1"])
    lm.pause("keep")
    waiting = lm.submit(PROMPTS[1], GREEDY)
    time.sleep(1.0)
    assert lm.is_paused() and not waiting.done
    lm.resume()
    assert not lm.is_paused()
    assert_close(running.result(120), oracle.generate([PROMPTS[0]], params, capture=["resid_post.1"])[0])
    assert_close(waiting.result(120), oracle.generate([PROMPTS[1]], GREEDY)[0])
    running = lm.submit(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    lm.pause()
    assert running.result(60).finish_reason in ("abort", "length")
    lm.resume()
    with pytest.raises(ValueError, match="'abort', 'wait' or 'keep'"):
        lm.pause("later")


def test_a_harvest_over_vllm_has_our_engines_states(lm: LM, oracle: LM, tmp_path: Path) -> None:
    from pymllm_interp.harvest.reader import open_harvest

    read = []
    for name, model in (("found", lm), ("wanted", oracle)):
        model.harvest(PROMPTS, capture=["resid_post.1"], out=tmp_path / name, progress=False)
        read.append(open_harvest(tmp_path / name)["resid_post.1"][:])
    assert_close_tensor(*read)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len_tokens", "all"])
def test_embeddings_are_our_engines(pooling: str, lm: LM, oracle: LM) -> None:
    options: dict[str, Any] = {
        "pooling": pooling,
        "normalize": pooling != "max",
        **(CASES["gate before"] if pooling == "mean" else {}),
    }
    found, wanted = (model.encode(PROMPTS, **options) for model in (lm, oracle))
    for one, other in zip(found, wanted, strict=True):
        assert_close_tensor(one.data, other.data)
    assert_equal_pooled(found, wanted)


def test_steps_texts_and_pairs_are_our_engines(lm: LM, oracle: LM) -> None:
    for options in ({"returned_token_ids": [5, 9]}, {"returned_token_ids": [5, 9], "normalize": False}, {}):
        ids = [[1, 7, 2, 3, 7, 7], [7]]
        found, wanted = (m.encode(ids, pooling="step", step_tag_id=7, **options) for m in (lm, oracle))
        for one, other in zip(found, wanted, strict=True):
            assert_close_tensor(one.data, other.data)
    for one, other in zip(*(m.encode(["w3 w4 w5", "w9"], dimensions=32) for m in (lm, oracle)), strict=True):
        assert_close_tensor(one.data, other.data)
        assert one.prompt == other.prompt and one.data.shape == (32,)
    scores = [m.score("w3 w4", ["w5 w6", "w3 w4"]) for m in (lm, oracle)]
    torch.testing.assert_close(*(torch.tensor(one) for one in scores), atol=1e-4, rtol=1e-4)
    with pytest.raises(PromptError, match="no classification head"):
        lm.classify(PROMPTS)
    assert lm.backend.facts.tasks == oracle.backend.facts.tasks


def test_a_pause_that_waits_ends_with_a_resume_and_no_resume_runs_between_loads(
    lm: LM, oracle: LM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    backend: Any = lm.backend
    lifecycle, steps = backend._orders._lifecycle, backend.engine.stats()["steps"]
    handles, errors = [lm.submit(PROMPTS[0], params) for _ in range(8)], list[BaseException]()
    while backend.engine.stats()["steps"] < steps + 5:
        time.sleep(0.005)

    def wait() -> None:
        try:
            lm.pause("wait")
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while lifecycle._drained is None and waiting.is_alive():
        time.sleep(0.001)
    lm.resume()
    late = [lm.submit(PROMPTS[0], params) for _ in range(8)]  # vLLM is not idle until these have ended
    waiting.join(60)
    assert not late[-1].done and not lm.is_paused()
    assert len(errors) == 1 and "before the requests of lm.pause(mode='wait') had ended" in str(errors[0])
    for handle in (*handles, *late):
        assert handle.result(120).finish_reason == "length"
    load, states = lifecycle.load, list[bool]()

    def loaded(*args: Any) -> None:
        resuming = threading.Thread(target=lm.resume)
        resuming.start()
        resuming.join(0.5)
        states.append(resuming.is_alive() and lm.is_paused())
        load(*args)

    monkeypatch.setattr(lifecycle, "load", loaded)
    lm.update_weights(folder)
    assert states == [True] and not lm.is_paused()
    assert_close(lm.generate([PROMPTS[0]], GREEDY)[0], oracle.generate([PROMPTS[0]], GREEDY)[0])
