"""RoPE scalings that depend on the length of the sequence, on a running engine.

longrope has two lists of factors. The oracle is one pass over the whole text: transformers' `generate` (5.18) forgets the cache
where a text of Phi-3 first exceeds `original_max_position_embeddings`, and then feeds one token. "dynamic" has frequencies for each
length; there the oracle is transformers' generation with a cache, whose keys keep the rotation that they had.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from conftest import COMMON, random_model
from helpers_drafts import Told, drafted_by
from helpers_runner import random_ids
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, PhimoeConfig, PretrainedConfig, PreTrainedModel

from pymllm_interp import LM, Ablate, Capture, SamplingParams, Steer
from pymllm_interp.client.completion import RequestOutput
from pymllm_interp.utils.arguments import PromptError

pytestmark = pytest.mark.local  # looks into an engine of this process
ORIGINAL, NEW, WIDTH = 24, 12, 64
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
SHAPE: dict[str, Any] = {
    **COMMON, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, rope_parameters=LONG),
    "phi3": lambda: Phi3Config(**{**SHAPE, "original_max_position_embeddings": ORIGINAL}, rope_parameters=LONG),
    "phimoe": lambda: PhimoeConfig(
        **SHAPE,
        num_local_experts=3,
        num_experts_per_tok=2,
        rope_parameters={**LONG, "long_mscale": 1.3, "short_mscale": 1.1},
    ),
    "dynamic": lambda: LlamaConfig(**{**SHAPE, "max_position_embeddings": ORIGINAL}, rope_parameters=DYNAMIC),
    "dynamic, by type of layer": lambda: Gemma3TextConfig(
        **{**SHAPE, "max_position_embeddings": ORIGINAL},
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": DYNAMIC},
    ),
}
LONGROPE = [("llama", "auto"), ("llama", "transformers"), ("phi3", "transformers"), ("phimoe", "transformers")]
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=1)
PROMPTS = [random_ids(n, seed=n) for n in (ORIGINAL - 5, 3, ORIGINAL, ORIGINAL + 1, ORIGINAL - 1, 40)]
"""Below the boundary, far below it, at it, and above it."""
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
Loader = Callable[..., tuple[LM, PreTrainedModel]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    """(name, impl, **settings) -> an LM, and transformers' model over its weights. Each is made once."""
    models: dict[str, tuple[Any, PreTrainedModel]] = {}
    made: dict[tuple, LM] = {}

    def loaded(name: str, impl: str = "auto", **settings: Any) -> tuple[LM, PreTrainedModel]:
        if name not in models:
            models[name] = tmp_path_factory.mktemp(name), random_model(CONFIGS[name]())
            models[name][1].save_pretrained(models[name][0])
        folder, hf = models[name]
        key = (name, impl, *sorted(settings.items()))
        if key not in made:
            made[key] = LM(folder, dtype="float32", device="cpu", impl=impl, page_size=4, **settings)
        return made[key], hf

    yield loaded
    for lm in made.values():
        lm.shutdown()


def logprobs_of_one_pass(hf: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return _logprobs_of_one_pass(hf, tuple(ids))


@cache
@torch.no_grad()
def _logprobs_of_one_pass(hf: PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    """A pass changes the module's rotation: each has a copy. Texts come again, in other batches."""
    return copy.deepcopy(hf)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)


@cache
@torch.no_grad()
def logprobs_of_a_generation(
    hf: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> list[torch.Tensor]:
    """What transformers says before each of the tokens, with its cache."""
    fresh, ids, kept, found = copy.deepcopy(hf), torch.tensor([prompt]), None, []
    for token in tokens:
        out = fresh(input_ids=ids, past_key_values=kept, use_cache=True)
        kept, ids = out.past_key_values, torch.tensor([[token]])
        found.append(out.logits[0, -1].log_softmax(-1))
    return found


def assert_each_token_is_that_of_one_pass(hf: PreTrainedModel, prompt: list[int], out: RequestOutput) -> None:
    found = out.outputs[0]
    assert found.logprobs is not None and len(found.token_ids) == len(found.logprobs)
    for i, (token, said) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
        wanted = logprobs_of_one_pass(hf, prompt + found.token_ids[:i])
        assert token == int(wanted.argmax()), f"token {i} behind {len(prompt)}"
        assert said[token].logprob == pytest.approx(float(wanted[token]), abs=1e-3)


@pytest.mark.thin(4)
@pytest.mark.parametrize(("name", "impl"), LONGROPE)
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_tokens": 8}, {"async_scheduling": True}], ids=["large", "chunks", "ahead"]
)
def test_a_generation_across_the_boundary_is_that_of_passes_over_the_whole_text(name, impl, settings, load):
    """Alone, and beside requests on both sides of the boundary."""
    lm, hf = load(name, impl, **settings)
    for batch in (PROMPTS[:1], PROMPTS):
        before = lm.engine.stats()["preempted"]
        outs = lm.generate(batch, GREEDY)
        for prompt, out in zip(batch, outs, strict=True):
            assert_each_token_is_that_of_one_pass(hf, prompt, out)
        crossing = sum(len(prompt) <= ORIGINAL < len(prompt) + NEW - 1 for prompt in batch)
        assert lm.engine.stats()["preempted"] - before == crossing, "each that crosses is computed again once"
        lm.engine.call(lm.engine.scheduler.check_integrity)


def test_the_two_lists_of_factors_give_other_tokens(load):
    """What the tests above compare can fail: with the keys of the short factors, transformers says something else."""
    _, hf = load("llama")
    text = random_ids(ORIGINAL + 1, seed=9)
    kept = copy.deepcopy(hf)
    with torch.no_grad():
        cache = kept(input_ids=torch.tensor([text[:-1]]), use_cache=True).past_key_values
        mixed = kept(input_ids=torch.tensor([text[-1:]]), past_key_values=cache).logits[0, -1].log_softmax(-1)
    assert (mixed - logprobs_of_one_pass(hf, text)).abs().max() > 0.05


@pytest.mark.parametrize(("name", "impl"), LONGROPE[:2])
def test_a_preemption_before_or_behind_the_boundary_changes_nothing(name, impl, load):
    settings = {"kv_cache_tokens": 80, "max_num_tokens": 16, "max_running_requests": 4}
    lm, hf = load(name, impl, **settings)
    prompts = [random_ids(n, seed=n) for n in (20, 18, 22, 16, 26, 30)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=1)
    for prompt, out in zip(prompts, lm.generate(prompts, params), strict=True):
        assert_each_token_is_that_of_one_pass(hf, prompt, out)
    assert lm.engine.stats()["preempted"] > 4, "some for want of pages"


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["large", "ahead"])
def test_drafts_across_the_boundary_change_no_token(options, load):
    lm, hf = load("llama", **options)
    wanted = lm.generate(PROMPTS, GREEDY)
    for kind in ("right", "wrong", "partly"):
        told = Told(kind, k=3)
        told.tell(wanted)
        drafted, _ = load("llama", **options, speculative=told)
        for prompt, out in zip(PROMPTS, drafted.generate(PROMPTS, GREEDY), strict=True):
            assert_each_token_is_that_of_one_pass(hf, prompt, out)
        assert drafted.engine.stats()["speculation"]["drafted"] > 0


def test_a_draft_model_computes_its_keys_again_too(load, tmp_path):
    """A draft model with the model's own weights proposes the model's tokens, also behind the boundary."""
    _, hf = load("llama")
    hf.save_pretrained(tmp_path)
    drafted, _ = load("llama", speculative=Frozen(drafted_by(tmp_path)))
    for prompt, out in zip(PROMPTS, drafted.generate(PROMPTS, GREEDY), strict=True):
        assert_each_token_is_that_of_one_pass(hf, prompt, out)
        counts = out.outputs[0].drafts
        assert counts is not None and counts.drafted == counts.accepted > 0


class Frozen(dict[str, Any]):
    """Settings that a key may hold."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted((name, str(value)) for name, value in self.items())))


@pytest.mark.parametrize(("name", "impl"), LONGROPE[:2])
def test_states_are_captured_once_and_edits_are_made_again(name, impl, load):
    """A capture has one row for each position: of the pass that computed it first. Edits are made in the new keys."""
    lm, _ = load(name, impl)
    prompt, edit = PROMPTS[0], Steer("resid_pre.1", vector=torch.ones(WIDTH), scale=2.0, positions=[2, 7])
    capture = Capture("resid_post.1", positions="all")
    (out,) = lm.generate([prompt], GREEDY, interventions=[edit], capture=[capture])
    states = out.activations["resid_post.1"]
    assert len(states) == len(prompt) + NEW - 1
    assert out.activations.positions["resid_post.1"].tolist() == list(range(len(states)))
    assert out.receipt.preemptions == 1
    for i in range(NEW):
        text = prompt + out.token_ids[:i]
        one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, ignore_eos=True)
        (whole,) = lm.generate([text], one, interventions=[edit], capture=[capture])
        assert whole.token_ids[0] == out.token_ids[i]
        torch.testing.assert_close(whole.activations["resid_post.1"][-1], states[len(text) - 1], **CLOSE)


def test_prompt_logprobs_are_reported_once(load):
    lm, _ = load("llama")
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    (out,) = lm.generate([PROMPTS[0]], params)
    (short,) = lm.generate([PROMPTS[0]], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == len(PROMPTS[0])
    assert out.prompt_logprobs == short.prompt_logprobs


def test_requests_of_one_prompt_that_sample(load):
    """The noise of a token does not depend on how often its keys were computed."""
    lm, hf = load("llama")
    params = SamplingParams(max_tokens=NEW, temperature=1.0, seed=3, n=3, logprobs=1, ignore_eos=True)
    (out,) = lm.generate([PROMPTS[0]], params)
    for found in out.outputs:
        for i, said in enumerate(found.logprobs or []):
            wanted = logprobs_of_one_pass(hf, PROMPTS[0] + found.token_ids[:i])
            assert said[found.token_ids[i]].logprob == pytest.approx(float(wanted[found.token_ids[i]]), abs=1e-3)


def test_prompts_are_not_shared(load):
    """KV of a prompt depends on the length of the request that computed it."""
    lm, hf = load("llama")
    text = random_ids(40, seed=8)
    for prompt in (text[:20], text, text[:20], text[:28]):
        (out,) = lm.generate([prompt], GREEDY)
        assert out.num_cached_tokens == 0
        assert_each_token_is_that_of_one_pass(hf, prompt, out)


# -- traces --------------------------------------------------------------------------------------


def test_a_trace_with_a_pass_behind_the_boundary_is_refused_by_name(load):
    lm, _ = load("llama", lower_traces="off")
    with pytest.raises(PromptError, match=r"longrope.*24 tokens.*max_new_tokens of at most 6"):
        with lm.generate(PROMPTS[0], max_new_tokens=7):
            lm.model.layers[0].output.save()
    with lm.generate(PROMPTS[0], max_new_tokens=6) as tracer:
        out = tracer.result.save()
    assert len(out[0]) == ORIGINAL + 1
    with lm.generate(PROMPTS[3], max_new_tokens=7) as tracer:
        out = tracer.result.save()
    assert len(out[0]) == len(PROMPTS[3]) + 7


def test_a_lowered_trace_goes_on_behind_the_boundary(load):
    lm, hf = load("llama", lower_traces="require")
    with lm.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False) as tracer:
        states = lm.model.layers[1].output.save()
        out = tracer.result.save()
    assert states.shape[1] == len(PROMPTS[0])
    text = out[0].tolist()
    for stop in range(len(PROMPTS[0]), len(text)):
        assert text[stop] == int(logprobs_of_one_pass(hf, text[:stop]).argmax())


def test_a_model_with_edits_is_refused_by_name(load):
    lm, _ = load("llama", lower_traces="off")
    with lm.edit() as (_, edited):
        lm.model.layers[0].output[:] = 0
    with pytest.raises(PromptError, match="longrope"):
        edited.generate([PROMPTS[0]], GREEDY)


# -- dynamic ------------------------------------------------------------------------------------


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", ["dynamic", "dynamic, by type of layer"])
@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_tokens": 8}, {"kv_cache_tokens": 80, "max_num_tokens": 16, "max_running_requests": 4}],
    ids=["large", "chunks", "small pools"],
)
def test_dynamic_scaling_is_transformers_generation(impl, name, settings, load):
    """Whatever the lengths of requests beside it and before it."""
    lm, hf = load(name, impl, **settings)
    batches = [PROMPTS, PROMPTS[:1], PROMPTS[-1:], PROMPTS[2:3], PROMPTS[1:2]]
    for batch in batches:
        for prompt, out in zip(batch, lm.generate(batch, GREEDY), strict=True):
            theirs = logprobs_of_a_generation(hf, tuple(prompt), tuple(out.token_ids))
            for token, said, wanted in zip(out.token_ids, out.outputs[0].logprobs or [], theirs, strict=True):
                assert token == int(wanted.argmax())
                assert said[token].logprob == pytest.approx(float(wanted[token]), abs=1e-3)
    if "kv_cache_tokens" in settings:
        assert lm.engine.stats()["preempted"] > 0


def test_an_ablation_beside_others_of_other_lengths(load):
    lm, _ = load("dynamic")
    edit = Ablate("resid_pre.1", directions=torch.ones(1, WIDTH), positions="all")
    (alone,) = lm.generate([PROMPTS[0]], GREEDY, interventions=[edit])
    outs = lm.generate(PROMPTS, GREEDY, interventions=[[edit], *[[]] * (len(PROMPTS) - 1)])
    assert outs[0].token_ids == alone.token_ids
