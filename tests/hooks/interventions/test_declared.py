"""Declared interventions through the engine: transformers' hooks that do the same maths are the oracle."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import pytest
import torch
from conftest import CONFIGS, held
from helpers_declared import INNER, SITES, hooked, ops_at, place_of, prompt_of, random_specs, vector
from helpers_runner import random_ids

from pymllm_interp import LM, Ablate, Capture, Gate, SamplingParams, Scale, Steer
from pymllm_interp.client.handle import RequestHandle
from pymllm_interp.hooks.interventions.op import Op
from pymllm_interp.utils.arguments import PromptError

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gemma2"]
WAIT = 600


@torch.no_grad()
def reference(model: Any, prompt: list[int], specs: list[Op], new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the logits that they come from, by a cached generation under hooks."""
    now = torch.arange(len(prompt))
    ids, cache, rows = list(prompt), None, []
    with hooked(model, specs, len(prompt), lambda: now):
        inputs = torch.tensor([prompt])
        for _ in range(new_tokens):
            out = model(inputs, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1])
            ids.append(int(rows[-1].argmax()))
            now, inputs = torch.tensor([len(ids) - 1]), torch.tensor([[ids[-1]]])
    return ids[len(prompt) :], torch.stack(rows)


def logits_of(lm: LM, prompt: list[int], specs: list[Op], new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """The same by a trace that carries the interventions: it reads what the head makes of them."""
    with lm.generate(prompt, max_new_tokens=new_tokens, interventions=specs) as tracer:
        rows = list().save()
        for _ in tracer.iter[:]:
            rows.append(lm.logits)
        ids = tracer.result.save()
    return ids[0, len(prompt) :].tolist(), torch.cat(rows)


@pytest.mark.thin(24)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("site", SITES + INNER)
def test_each_op_at_each_site_equals_a_hook_on_transformers(family: str, site: str, lm_of: Any, oracle: Any) -> None:
    lm, model, prompt = lm_of(family), oracle(family), random_ids(9, seed=3)
    place = place_of(site, lm.model_spec.family)
    if place is None:
        pytest.skip(f"{family} has no such site")
    site = place
    _, plain = reference(model, prompt, [], 6)
    changed = 0
    for spec in ops_at(site, model.config):
        wanted, rows = reference(model, prompt, [spec], 6)
        found, logits = logits_of(lm, prompt, [spec], 6)
        torch.testing.assert_close(logits, rows, rtol=1e-4, atol=1e-4)
        out = lm.generate([prompt], SamplingParams(temperature=0, max_tokens=6), interventions=[spec])[0]
        assert out.token_ids == found == wanted, spec
        changed += not torch.allclose(rows, plain, rtol=1e-3, atol=1e-3)
    assert changed, "ops that change nothing show little"


@pytest.mark.parametrize(
    "server", [{}, {"async_scheduling": True}, {"prefill_policy": "prefill_first", "hook_execution": "split"}]
)
def test_mixed_requests_in_a_tight_pool_equal_their_solo_runs(server: dict[str, Any], lm_of: Any, oracle: Any) -> None:
    """Chunked prompts, requests that give way and come back, traces beside them: each has its own ops and nobody else's."""
    rng, model = random.Random(7), oracle("llama")
    lm = lm_of("llama", kv_cache_tokens=80, page_size=4, max_num_tokens=16, **server)
    prompts = [prompt_of(rng.randrange(1, 15), i) for i in range(16)]
    specs = [random_specs(rng, model.config, SITES + INNER) for _ in prompts]
    wanted = [reference(model, p, s, 10)[0] for p, s in zip(prompts, specs, strict=True)]
    before = lm.engine.stats()
    params = SamplingParams(temperature=0, max_tokens=10)
    with held(lm):
        handles = [lm.submit(p, params, interventions=s) for p, s in zip(prompts, specs, strict=True)]
    with lm.generate(prompts[3], max_new_tokens=10, interventions=specs[3]) as tracer:
        for _ in tracer.iter[:]:
            lm.model.layers[1].output.save()
        traced = tracer.result.save()
    assert traced[0, len(prompts[3]) :].tolist() == wanted[3]
    assert [h.result(WAIT).token_ids for h in handles] == wanted
    assert lm.engine.stats()["preempted"] > before["preempted"]
    one_call = lm.generate(prompts, params, interventions=specs)
    assert [out.token_ids for out in one_call] == wanted


@pytest.mark.thin(12)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_in_any_order_at_any_time_equal_their_solo_runs(seed: int, ahead: bool, lm_of: Any) -> None:
    """Whoever ends lets the next one in, in the midst of others' prompts and tokens: its tokens, its states, its receipt."""
    rng, config = random.Random(seed), CONFIGS["qwen3"]()
    lm = lm_of("qwen3", kv_cache_tokens=40, page_size=4, max_num_tokens=12, async_scheduling=ahead)
    prompts = [prompt_of(rng.randrange(1, 20), i) for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=rng.randrange(1, 12)) for _ in prompts]
    declared = [random_specs(rng, config, SITES + INNER) for _ in prompts]
    capture = [rng.choice([[], ["resid_post.*", "final_norm"], [Capture("mlp_out.1", reduce="mean")]]) for _ in prompts]

    def submit(i: int) -> RequestHandle:
        return lm.submit(prompts[i], params[i], interventions=declared[i], capture=capture[i])

    solo = [submit(i).result(WAIT) for i in range(len(prompts))]
    left, handles, before = rng.sample(range(len(prompts)), len(prompts)), {}, lm.engine.stats()["preempted"]
    all_in = threading.Event()

    def let_in() -> None:
        for _ in range(rng.choice([1, 1, 2])):
            if left:
                handles[i] = submit(i := left.pop())
                handles[i].add_done_callback(let_in)
        if not left:
            all_in.set()

    with held(lm):
        while len(handles) < 5:
            let_in()
    assert all_in.wait(WAIT)
    for i, wanted in enumerate(solo):
        out = handles[i].result(WAIT)
        assert out.token_ids == wanted.token_ids, i
        assert bool(out.activations) == bool(wanted.activations) == bool(capture[i])
        for site, rows in wanted.activations.items():
            torch.testing.assert_close(out.activations[site], rows, rtol=1e-4, atol=1e-4)
            assert torch.equal(out.activations.token_ids[site], wanted.activations.token_ids[site])
        if wanted.receipt is not None:
            found = [(e.intervention, e.site, e.prompt_rows, e.generated_rows) for e in out.receipt.interventions]
            assert found == [
                (e.intervention, e.site, e.prompt_rows, e.generated_rows) for e in wanted.receipt.interventions
            ]
    assert lm.engine.stats()["preempted"] > before


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ops_that_change_nothing_change_no_bit(family: str, lm_of: Any) -> None:
    lm, prompt = lm_of(family), prompt_of(8, 1)
    width = lm.hf_config.hidden_size
    never = Gate(vector(width, 5), 1e30)
    nothing = [
        Steer("resid_post.*", vector(width, 6), scale=0),
        Scale("mlp_out.0", 1),
        Steer("embed", vector(width, 6), when=never),
    ]
    (_, plain), (_, same) = logits_of(lm, prompt, [], 4), logits_of(lm, prompt, nothing, 4)
    assert torch.equal(plain, same)


def test_a_trace_sees_a_sites_own_module_after_the_ops_and_what_is_inside_before(lm_of: Any) -> None:
    """Section 3's order of effects: the declared op, then the block, then what the model goes on with."""
    lm, prompt = lm_of("llama"), prompt_of(6, 2)
    specs = [
        Scale("attn_out.1", 0.0),
        Scale("mlp_out.0", 3.0),
        Scale("resid_post.0", 2.0),
        Scale("final_norm", 0.0),
        Scale("embed", 0.5),
    ]

    def read(interventions: list[Op]) -> dict[str, torch.Tensor]:
        with lm.trace(prompt, interventions=interventions):
            seen = dict().save()
            seen["embed"] = lm.model.embed_tokens.output.clone()
            seen["down"] = lm.model.layers[0].mlp.down_proj.output.clone()
            seen["mlp"] = lm.model.layers[0].mlp.output.clone()
            seen["layer"] = lm.model.layers[0].output.clone()
            seen["next"] = lm.model.layers[1].input.clone()
            seen["o"] = lm.model.layers[1].self_attn.o_proj.output.clone()
            seen["attn"] = lm.model.layers[1].self_attn.output[0].clone()
            seen["norm_in"] = lm.model.norm.input.clone()
            seen["norm"] = lm.model.norm.output.clone()
            again = lm.model.norm(seen["norm_in"])
            seen["again"] = again.clone()
        return seen

    plain, seen = read([]), read(specs)
    assert torch.equal(seen["embed"], plain["embed"] * 0.5)
    assert torch.equal(seen["mlp"], seen["down"] * 3)
    assert torch.equal(seen["layer"], seen["next"]) and not torch.allclose(seen["layer"], plain["layer"])
    assert seen["o"].abs().max() > 0 and seen["attn"].abs().max() == 0
    assert seen["norm"].abs().max() == 0 and seen["again"].abs().max() > 0, (
        "a block's own call of a module is not the pass's"
    )


def test_each_invoke_of_a_trace_has_its_own_interventions(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(6, 2)
    with lm.trace() as tracer:
        with tracer.invoke(prompt, interventions=[Scale("resid_post.0", 0.0)]):
            off = lm.model.layers[0].output.save()
        with tracer.invoke(prompt):
            on = lm.model.layers[0].output.save()
    assert off.abs().max() == 0 and on.abs().max() > 0
    assert [len(receipt.interventions) for receipt in tracer.receipts] == [1, 0]


def test_receipts_count_rows_by_phase_gates_and_how_steps_ran(lm_of: Any) -> None:
    lm, prompt = lm_of("llama"), prompt_of(7, 4)
    width = lm.hf_config.hidden_size
    always, never = Gate(torch.ones(width), -1e9), Gate(torch.ones(width), 1e9)
    specs = [
        Steer("resid_post.{0,2}", vector(width, 1), positions="all"),
        Scale("mlp_out.1", 0.5, positions="generated", when=always),
        Ablate("attn_out.0", vector(width, 2), positions=[0, -1], when=never),
        Scale("resid_mid.0", 1),
    ]
    out = lm.generate([prompt], SamplingParams(temperature=0, max_tokens=5), interventions=specs)[0]
    found = {
        entry.site: (entry.intervention, entry.prompt_rows, entry.generated_rows, entry.gate_fires)
        for entry in out.receipt.interventions
    }
    assert found == {
        "attn_out.0": ("Ablate", 2, 0, 0),
        "resid_post.0": ("Steer", 7, 4, None),
        "mlp_out.1": ("Scale", 0, 4, 4),
        "resid_post.2": ("Steer", 7, 4, None),
    }
    assert sum(out.receipt.steps.values()) == 5
    assert lm.generate([prompt], SamplingParams(temperature=0, max_tokens=2))[0].receipt is None


def test_a_receipt_leaves_out_the_step_that_ran_before_its_stop_token_was_known(lm_of: Any) -> None:
    lm, prompt = lm_of("llama", async_scheduling=True), prompt_of(7, 4)
    steer = [Steer("resid_post.0", vector(lm.hf_config.hidden_size, 1))]
    (out,) = lm.generate([prompt], SamplingParams(temperature=0, max_tokens=8), interventions=steer)
    stop = next(i for i, token in enumerate(out.token_ids) if i and token not in out.token_ids[:i])
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[out.token_ids[stop]])
    before = lm.engine.stats()["steps"]
    (out,) = lm.generate([prompt], params, interventions=steer)
    assert out.finish_reason == "stop" and len(out.token_ids) == stop + 1
    assert sum(out.receipt.steps.values()) == stop + 1
    assert lm.engine.stats()["steps"] - before == stop + 2, "it did run one step more"


def test_completions_of_one_prompt_share_their_interventions(lm_of: Any, oracle: Any) -> None:
    lm, prompt = lm_of("qwen3"), prompt_of(9, 6)
    specs = [Steer("resid_post.0", vector(lm.hf_config.hidden_size, 1), scale=2.0)]
    wanted = reference(oracle("qwen3"), prompt, specs, 5)[0]
    (out,) = lm.generate([prompt], SamplingParams(temperature=0, max_tokens=5, n=3), interventions=specs)
    assert [completion.token_ids for completion in out.outputs] == [wanted] * 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda w: Steer("resid_post.0", torch.ones(w + 1)), r"vector has \d+ values"),
        (lambda w: Steer("resid_post.99", torch.ones(w)), "99"),
        (lambda w: Scale("resid_post.0", 2.0, positions=[40]), "beyond the prompt"),
        (lambda w: Scale("mlp_in.0", 2.0), "interventions act at embed"),
        (lambda w: [Scale("resid_post.0", 2.0)] * 5, "max_interventions_per_site"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_scheduled(spec: Any, message: str, lm_of: Any) -> None:
    lm = lm_of("llama")
    made = spec(lm.hf_config.hidden_size)
    before = lm.engine.num_steps
    with pytest.raises(ValueError, match=message):
        lm.generate([[1, 2, 3]], interventions=made if isinstance(made, list) else [made])
    assert lm.engine.num_steps == before


def test_the_collector_has_its_threshold_raised_while_requests_live(lm_of: Any) -> None:
    gc.collect()  # requests of other tests raise it while they live
    lm, usual = lm_of("llama"), gc.get_threshold()
    steers = [[Steer("resid_post.*", vector(lm.model_spec.hidden_size, seed))] for seed in range(20)]
    with held(lm):
        handles = [
            lm.submit(prompt_of(5, i), SamplingParams(temperature=0, max_tokens=4), interventions=specs)
            for i, specs in enumerate(steers)
        ]
        assert gc.get_threshold()[0] >= usual[0] + 20 * 100
    results = [handle.result(WAIT) for handle in handles]
    del handles
    assert gc.get_threshold() == usual and len(results) == 20
    with pytest.raises(PromptError):
        lm.generate([prompt_of(5, 1), []], interventions=steers[0])
    assert gc.get_threshold() == usual
