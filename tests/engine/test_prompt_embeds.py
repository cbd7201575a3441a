"""Prompts with vectors in place of token embeddings: transformers' `inputs_embeds`, for each request by itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS, VOCAB
from helpers_declared import lms
from helpers_devices import DEVICES
from helpers_embeds import generated, mixed, vectors_of
from helpers_graphs import captured_lms
from transformers import AutoModelForCausalLM, OPTConfig, PreTrainedModel

from pymllm_interp import LM, Capture, Patch, SamplingParams, Steer
from pymllm_interp.core.pass_parts import PromptEmbeds, vector_keys
from pymllm_interp.runner.step_inputs import StepInputs
from pymllm_interp.utils.arguments import PromptError

PAGE = 16
GPU = [pytest.mark.gpu] if torch.cuda.is_available() else []
"""Marks of tests that run on a CUDA device where there is one."""
GREEDY = SamplingParams(temperature=0, max_tokens=5)
FAMILIES = ["llama", "gemma2", "gpt2", "gpt_neox", "glm4_moe"]


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in CONFIGS if f not in FAMILIES)]
)
def test_states_and_logits_are_those_of_inputs_embeds(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel], family: str, impl: str
) -> None:
    lm, model = lm_of(family, **({} if impl == "native" else {"impl": impl})), oracle(family)
    prompts, wholes = [], []
    for seed, length in enumerate((1, 2, PAGE + 1, 23)):
        prompt, whole = mixed(model, length, seed)
        prompts += [prompt, {"prompt_embeds": whole[0]}]
        wholes += [whole, whole]
    outs = lm.forward(prompts, capture=[Capture("resid_post.*"), "resid_pre.0"])
    for out, whole in zip(outs, wholes, strict=True):
        with torch.no_grad():
            wanted = model(inputs_embeds=whole, output_hidden_states=True, use_cache=False)
        torch.testing.assert_close(out.logits, wanted.logits[0], rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(out.activations["resid_pre.0"], wanted.hidden_states[0][0], rtol=1e-4, atol=1e-5)
        for layer in range(lm.num_layers - 1):  # transformers' last one is behind the final norm
            got = out.activations[f"resid_post.{layer}"]
            torch.testing.assert_close(got, wanted.hidden_states[layer + 1][0], rtol=1e-4, atol=2e-4)


def test_an_embedding_of_another_width_than_the_stream(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=48, word_embed_proj_dim=20, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, do_layer_norm_before=False, pad_token_id=1, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    prompt, whole = mixed(model, 9, 3)
    with LM(tmp_path, device="cpu", dtype="float32", kv_cache_tokens=256) as lm:
        (out,) = lm.forward([prompt])
        with pytest.raises(PromptError, match=r"embeddings \[4, 48\]: expected \[positions, 20\]"):
            lm.generate({"prompt_embeds": torch.zeros(4, 48)}, GREEDY)
    torch.testing.assert_close(out.logits, model(inputs_embeds=whole).logits[0].detach(), rtol=1e-4, atol=1e-4)


# -- beside each other -------------------------------------------------------------------------


def check_crowd(lm: LM, model: PreTrainedModel, seeds: range, most: int) -> None:
    """Mixes, embeddings only and plain prompts, some of them twice, all at once: each is what transformers makes of it."""
    chance, prompts, wanted = random.Random(seeds.start), [], []
    for seed in seeds:
        prompt, whole = mixed(model, chance.randrange(1, most), seed, chance.random())
        count = chance.randrange(1, 6)
        kind = chance.randrange(4)
        if kind == 0:
            prompt = {"prompt_embeds": whole[0].clone()}
        elif kind == 1:
            ids = prompt["prompt_token_ids"]
            prompt, whole = ids, model.get_input_embeddings()(torch.tensor([ids])).detach()
        expected = generated(model, whole, count)
        for _ in range(1 + (kind == 2)):
            prompts.append((prompt, count))
            wanted.append(expected)
    order = chance.sample(range(len(prompts)), len(prompts))
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(
            lambda i: lm.generate([prompts[i][0]], SamplingParams(temperature=0, max_tokens=prompts[i][1]))[0], order
        )
        for i, out in zip(order, found, strict=True):
            assert out.token_ids == wanted[i], prompts[i]


@pytest.mark.parametrize(
    "way", ["functions", pytest.param("tables", marks=GPU or pytest.mark.slow), pytest.param("graphs", marks=GPU)]
)
def test_requests_of_a_small_pool_do_not_see_each_other(
    model_folder: Callable[[str], Path], oracle: Callable[[str], PreTrainedModel], way: str
) -> None:
    """Chunks of 7 tokens, pages of 4, a pool that two long requests fill."""
    with lms(way, model_folder) as load:
        lm = load("llama", max_num_tokens=7, page_size=4, kv_cache_tokens=72, max_running_requests=4)
        check_crowd(lm, oracle("llama"), range(100, 124), 40)
        lm.engine.call(lm.engine.scheduler.check_integrity)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_with_embeddings_are_replayed(
    model_folder: Callable[[str], Path], oracle: Callable[[str], PreTrainedModel], device: str
) -> None:
    """Their vectors are in the memory that graphs read, and no later step finds them there."""
    with captured_lms(model_folder, prefill_graph_tokens=32, max_num_tokens=32, page_size=4) as load:
        lm = load(device, "llama", tables=device == "cuda")
        table, found = lm.model.embed_tokens.weight.detach(), []
        params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, skip_reading_prefix_cache=True)
        ids = list(range(3, 20))
        other = {"prompt_token_ids": ids, "embeds": {i: table[40 + i].cpu() for i in (0, 3, 16)}}
        for prompt in (ids, {"prompt_embeds": table[3:20]}, other, ids):
            before = Counter(lm.engine.stats()["execution"])
            found.append(lm.generate([prompt], params)[0].token_ids)
            steps = Counter(lm.engine.stats()["execution"]) - before
            assert sum(count for how, count in steps.items() if how.startswith("replay")) == 7, steps
        assert found[0] == found[1] == found[3] != found[2]
        check_crowd(lm, oracle("llama"), range(200, 212), 40)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_in_a_pass_with_embeddings_run_between_graphs(
    model_folder: Callable[[str], Path], oracle: Callable[[str], PreTrainedModel], device: str
) -> None:
    with captured_lms(model_folder, prefill_graph_tokens=32, max_num_tokens=32, lower_traces="off") as load:
        lm, model = load(device, "llama"), oracle("llama")
        prompt, whole = mixed(model, 13, 3)
        with lm.trace(prompt) as tracer:
            lm.model.layers[0].output *= 2
            logits = lm.lm_head.output.save()
        assert tracer.receipt.steps == {"segments": 1}
        with model.model.layers[0].register_forward_hook(lambda *found: found[-1] * 2):
            wanted = model(inputs_embeds=whole).logits.detach()
        torch.testing.assert_close(logits.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1400, 40))
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_crowds(lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel], start: int, impl: str) -> None:
    own = {} if impl == "native" else {"impl": impl}
    lm = lm_of("llama", max_num_tokens=11, page_size=4, kv_cache_tokens=96, max_running_requests=6, **own)
    check_crowd(lm, oracle("llama"), range(start, start + 40), 60)


def test_a_preempted_request_computes_its_vectors_again(
    model_folder: Callable[[str], Path], oracle: Callable[[str], PreTrainedModel]
) -> None:
    model = oracle("llama")
    own = [mixed(model, 18, seed) for seed in range(3)]
    params = SamplingParams(temperature=0, max_tokens=30)
    with LM(model_folder("llama"), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=64) as lm:
        outs = lm.generate([prompt for prompt, _ in own], params)
        stats = lm.engine.stats()
    assert stats["preempted"] > 0
    assert [out.token_ids for out in outs] == [generated(model, whole, 30) for _, whole in own]


# -- the prefix cache ------------------------------------------------------------------------


@pytest.fixture
def fresh(model_folder: Callable[[str], Path]) -> Iterator[LM]:
    with LM(model_folder("llama"), device="cpu", dtype="float32", page_size=4, kv_cache_tokens=1024) as lm:
        yield lm


@pytest.mark.parametrize("keyed", [False, True])
def test_equal_vectors_share_pages_and_others_never(
    fresh: LM, oracle: Callable[[str], PreTrainedModel], keyed: bool
) -> None:
    """One vector, at position 9 of 21, in its last bit: pages 0 and 1 are the template's, for all. Also by keys of a device."""
    model = oracle("llama")
    ids = random.Random(5).choices(range(VOCAB - 2), k=21)
    vector = vectors_of(model, 1, 5)[0]
    near = vector.clone()
    near[-1] = torch.nextafter(near[-1], torch.tensor(torch.inf))
    cached = []
    for given in (None, vector, vector.clone(), near, vector, None):
        prompt: Any = ids if given is None else {"prompt_token_ids": ids, "embeds": {9: given}}
        if keyed and given is not None:
            prompt["embeds"] = PromptEmbeds([9], given[None], vector_keys(given[None]))
        whole = model.get_input_embeddings()(torch.tensor([ids])).detach().clone()
        if given is not None:
            whole[0, 9] = given
        (out,) = fresh.generate([prompt], GREEDY)
        assert out.token_ids == generated(model, whole, 5)
        cached.append(out.num_cached_tokens)
    assert cached == [0, 8, 20, 8, 20, 20]
    assert fresh.engine.stats()["prefix_cache"]["hit_rate"].keys() == {"plain", "embedded"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 65])
def test_keys_of_vectors_differ_with_any_bit(dtype: torch.dtype, width: int, device: str) -> None:
    chance = random.Random(1)
    vectors = torch.randn(40, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    keys = vector_keys(vectors.to(device))
    assert keys.shape == (40, 4) and (keys == vector_keys(vectors.to(device))).all()
    assert all((vector_keys(vectors[i].to(device)) == keys[i]).all() for i in (0, 39)), "however many come at once"
    for i in range(40):
        changed = vectors[i].clone()
        integers = changed.view(torch.int32 if dtype is torch.float32 else torch.int16)
        integers[chance.randrange(width)] ^= 1 << chance.randrange(15)
        assert (vector_keys(changed.to(device)) != keys[i]).all()
        swapped = vectors[i].clone()
        swapped[[0, 1]] = swapped[[1, 0]]
        assert (vector_keys(swapped.to(device)) != keys[i]).all()
    assert len(np.unique(keys)) == keys.size


@pytest.mark.gpu
def test_vectors_of_the_engines_device_stay_there(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of a capture that are read, and embeddings beside others of the host in one step."""
    with LM(model_folder("llama"), device="cuda", dtype="float32", kv_cache_tokens=2048) as lm:
        ids = list(range(3, 12))
        (out,) = lm.generate([ids], GREEDY, capture=[Capture("resid_post.1", device="engine")])
        states = out.activations["resid_post.1"]
        table = lm.model.embed_tokens.weight.detach()
        mixed_prompts = [{"prompt_embeds": table[3:9]}, {"prompt_embeds": table[3:9].cpu()}, ids]
        wanted = lm.verbalize(states.cpu(), template=[5, 6, 7], placeholder=6, max_tokens=4).texts
        tokens = [found.token_ids for found in lm.generate(mixed_prompts, GREEDY)]
        read, cpu, met = StepInputs._uploaded, torch.Tensor.cpu, list[bool]()

        def noted(own: StepInputs, rows: np.ndarray, vectors: list[torch.Tensor]) -> Any:
            met.extend(vector.is_cuda for vector in vectors)
            return read(own, rows, vectors)

        def small(tensor: torch.Tensor) -> torch.Tensor:
            assert not tensor.is_cuda or tensor.dtype is not torch.float32, "vectors leave the device"
            return cpu(tensor)

        monkeypatch.setattr(StepInputs, "_uploaded", noted)
        lm.reset_prefix_cache()
        assert [found.token_ids for found in lm.generate(mixed_prompts, GREEDY)] == tokens
        assert set(met) == {True, False}
        met.clear()
        monkeypatch.setattr(torch.Tensor, "cpu", small)
        assert lm.verbalize(states, template=[5, 6, 7], placeholder=6, max_tokens=4).texts == wanted
        assert len(met) == len(states) and all(met)


def test_vectors_edits_and_salts_are_parts_of_one_key(fresh: LM, oracle: Callable[[str], PreTrainedModel]) -> None:
    """Requests that differ in a vector, in an op or in a salt: each equals itself in an engine without a prefix cache."""
    model = oracle("llama")
    prompt, _ = mixed(model, 22, 8, 0.2)
    other = {**prompt, "embeds": {place: -vector for place, vector in prompt["embeds"].items()}}
    steer = Steer("resid_post.0", vector=vectors_of(model, 1, 9)[0], positions=[3, 14])
    runs = [
        (given, ops, salt)
        for given in (prompt, other, prompt["prompt_token_ids"])
        for ops in ([], [steer])
        for salt in (None, "a")
    ] * 2
    random.Random(1).shuffle(runs)
    for given, ops, salt in runs:
        plain = SamplingParams(temperature=0, max_tokens=5, skip_reading_prefix_cache=True)
        (wanted,) = fresh.generate([given], plain, interventions=ops, cache_salt="never again" + str(id(ops)))
        (out,) = fresh.generate([given], GREEDY, interventions=ops, cache_salt=salt)
        assert out.token_ids == wanted.token_ids


# -- with everything else ---------------------------------------------------------------------


def test_traces_see_the_vectors(lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]) -> None:
    for impl in ("native", "transformers"):
        lm, model = lm_of("llama", **({} if impl == "native" else {"impl": impl})), oracle("llama")
        prompt, whole = mixed(model, 7, 2)
        with lm.trace(prompt):
            embedded = lm.model.embed_tokens.output.save()
            logits = lm.lm_head.output.save()
        with lm.trace() as tracer:
            for given in (prompt, {"prompt_embeds": whole[0]}):
                with tracer.invoke(given):
                    lm.model.embed_tokens.output[:, -1] = 0
        with lm.trace(prompt):
            state = lm.model.layers[0].output
            state.requires_grad_()
            with lm.lm_head.output[0, -1].max().backward():
                gradient = state.grad.save()
        wanted = model(inputs_embeds=whole)
        with lm.trace(inputs_embeds=torch.cat((whole, -whole))):
            several = lm.lm_head.output.save()
        with lm.trace([prompt, {"prompt_embeds": -whole[0]}]):
            gang = lm.lm_head.output.save()
        other = torch.cat((wanted.logits, model(inputs_embeds=-whole).logits)).detach()
        torch.testing.assert_close(several, other, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gang, other, rtol=1e-4, atol=1e-4)
        with pytest.raises(TypeError, match="one prompt is expected"):
            with lm.trace([1, 2], inputs_embeds=whole):
                pass
        assert torch.equal(embedded, whole)
        torch.testing.assert_close(logits, wanted.logits.detach(), rtol=1e-4, atol=1e-4)
        assert gradient.shape == (1, 7, lm.hidden_size) and gradient.abs().sum() > 0


def test_a_patch_at_the_embedding_acts_behind_the_vectors(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]
) -> None:
    lm, model = lm_of("llama"), oracle("llama")
    prompt, whole = mixed(model, 12, 4)
    vector, place = vectors_of(model, 1, 6)[0], next(iter(prompt["embeds"]))
    whole[0, place] = vector
    (out,) = lm.forward([prompt], interventions=[Patch("embed", vector, positions=[place])], capture=["embed"])
    torch.testing.assert_close(out.activations["embed"], whole[0])
    torch.testing.assert_close(out.logits, model(inputs_embeds=whole).logits[0].detach(), rtol=1e-4, atol=1e-4)


def test_penalties_do_not_count_placeholders(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]
) -> None:
    """The token that comes next stands at the embedded positions: a penalty of the prompt's tokens would forbid it."""
    lm, model = lm_of("llama"), oracle("llama")
    _, whole = mixed(model, 6, 11, 1.0)
    (plain,) = lm.generate([{"prompt_embeds": whole[0]}], GREEDY)
    first = plain.token_ids[0]
    params = SamplingParams(temperature=0, max_tokens=1, repetition_penalty=100.0)
    (out,) = lm.generate([{"prompt_token_ids": [first] * 6, "embeds": dict(enumerate(whole[0]))}], params)
    assert out.token_ids == [first] and out.prompt_token_ids == [first] * 6
    for last, penalised in ((0, first != 0), (first, True)):  # a token of the prompt that has its own embedding counts
        given = {"prompt_token_ids": [last] * 6, "embeds": dict(enumerate(whole[0][:5]))}
        (before,) = lm.generate([given], GREEDY)
        (out,) = lm.generate([given], params)
        assert (out.token_ids[0] == before.token_ids[0]) == (before.token_ids[0] != last), penalised


def test_samples_of_a_prompt_share_its_vectors(
    lm_of: Callable[..., LM], oracle: Callable[[str], PreTrainedModel]
) -> None:
    lm, model = lm_of("llama"), oracle("llama")
    prompt, whole = mixed(model, 20, 13)
    (out,) = lm.generate([prompt], SamplingParams(temperature=0, n=3, max_tokens=5))
    assert [one.token_ids for one in out.outputs] == [generated(model, whole, 5)] * 3
    numpy = {"prompt_embeds": whole[0].numpy()}
    assert lm.generate(numpy, GREEDY)[0].token_ids == lm.generate(whole[0], GREEDY)[0].token_ids == out.token_ids


def test_drafts_behind_vectors(model_folder: Callable[[str], Path], oracle: Callable[[str], PreTrainedModel]) -> None:
    model = oracle("llama")
    own = [mixed(model, 15, seed) for seed in range(4)]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LM(model_folder("llama"), device="cpu", dtype="float32", kv_cache_tokens=512, speculative=ngram) as lm:
        outs = lm.generate([prompt for prompt, _ in own], SamplingParams(temperature=0, max_tokens=12))
    assert [out.token_ids for out in outs] == [generated(model, whole, 12) for _, whole in own]


# -- bad input --------------------------------------------------------------------------------


def test_bad_embeddings_are_refused_before_anything_runs(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    width, ids = lm.hidden_size, [1, 2, 3]
    good, before = torch.zeros(3, width), lm.engine.stats()["steps"]
    bad: list[tuple[Any, str]] = [
        (good.double(), "float64, and the model computes in torch.float32: pass embeds.to"),
        (torch.zeros(3, width + 1), rf"embeddings \[3, {width + 1}\]: expected \[positions, {width}\]"),
        (torch.zeros(2, 3, width), "embeddings"),
        (good / 0, "NaN or infinity"),
        (good.to_sparse(), "dense"),
        ({"prompt_token_ids": ids, "embeds": {0: good[0].to("meta")}}, "dense"),
        (torch.zeros(0, width), "is empty: a prompt"),
        ({"prompt_embeds": good, "prompt_token_ids": ids}, "and nothing else"),
        ({"embeds": {0: good[0]}}, "prompt_token_ids with embeds"),
        ({"prompt_token_ids": ids, "embeds": {3: good[0]}}, "position 3, but the prompt has positions 0 to 2"),
        ({"prompt_token_ids": ids, "embeds": {-1: good[0]}}, "position -1"),
        ({"prompt_token_ids": ids, "embeds": {True: good[0]}}, "position True"),
        ({"prompt_token_ids": ids, "embeds": {"0": good[0]}}, "position '0'"),
        ({"prompt_token_ids": ids, "embeds": {}}, "expected a dict of position and vector"),
        ({"prompt_token_ids": ids, "embeds": [good[0]]}, "expected a dict of position and vector"),
        ({"prompt_token_ids": ids, "embeds": {0: good[0], 1: good[0, :5]}}, "differ in shape or dtype"),
        ({"prompt_token_ids": ids, "embeds": {0: good[0, :5]}}, rf"expected \[positions, {width}\]"),
        ({"prompt_token_ids": [1, 999], "embeds": {0: good[0]}}, "token id 999"),
        ({"prompt_token_ids": ids, "embeds": {0: good[0]}, "multi_modal_data": 1}, "multi_modal_data"),
    ]  # fmt: skip
    for given, message in bad:
        with pytest.raises(PromptError, match=message):
            lm.generate([[5, 6], given], GREEDY)
    for name, value in (("prompt_logprobs", 1), ("truncate_prompt_tokens", 2)):
        with pytest.raises(PromptError, match=f"has embeddings, and {name}"):
            lm.generate({"prompt_embeds": good}, SamplingParams(max_tokens=1, **{name: value}))
    with pytest.raises(PromptError, match="has embeddings, which this call does not take"):
        lm.token_ids({"prompt_embeds": good})
    assert lm.engine.stats()["steps"] == before


def test_names_of_other_projects_lead_to_the_prompt(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    for name in ("inputs_embeds", "prompt_embeds"):
        with pytest.raises(TypeError, match=r'embeddings are a prompt, lm\.generate\(\{"prompt_embeds": embeds\}\)'):
            lm.generate([1], GREEDY, **{name: torch.zeros(1, 72)})
    with pytest.raises(TypeError, match="an LM takes them in any case"):
        LM("demo", enable_prompt_embeds=True)
