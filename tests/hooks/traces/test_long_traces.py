"""Traced prompts that are longer than `max_num_tokens`: one pass of their own, where memory allows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.utils.arguments import PromptError

SMALL = {"max_num_tokens": 16, "page_size": 4, "kv_cache_tokens": 1024}
LENGTHS = (17, 33, 64, 90)


def ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(length)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_long_traced_prompt_is_one_visit_beside_other_requests(family: str, lm_of: Callable[..., LM]) -> None:
    lm, roomy = lm_of(family, **SMALL), lm_of(family)
    plain = [ids(n, seed=100 + n) for n in (3, 20, 40)]
    expected = [out.token_ids for out in roomy.generate(plain, greedy(12))]
    for length in LENGTHS:
        prompt = ids(length, seed=length)
        handles = [lm.submit(p, greedy(12)) for p in plain]
        with lm.generate(prompt, max_new_tokens=3, do_sample=False, ignore_eos=True) as tracer:
            seen = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for step in tracer.iter[:]:
                if step == 0:
                    lm.model.layers[0].output[0, 5:] *= 0.5
                seen.append(lm.model.layers[1].output[0].clone())
            out = tracer.result.save()
        with roomy.generate(prompt, max_new_tokens=3, do_sample=False, ignore_eos=True) as tracer:
            known = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for step in tracer.iter[:]:
                if step == 0:
                    roomy.model.layers[0].output[0, 5:] *= 0.5
                known.append(roomy.model.layers[1].output[0].clone())
            same = tracer.result.save()
        assert [len(state) for state in seen] == [length, 1, 1]
        for state, other in zip(seen, known, strict=True):
            torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-4)
        assert torch.equal(out, same)
        assert [handle.result(600).token_ids for handle in handles] == expected
    lm.engine.call(lm.engine.scheduler.check_integrity)


def test_a_trace_of_several_long_prompts_and_declared_ops(lm_of: Callable[..., LM]) -> None:
    lm, roomy = lm_of("llama", **SMALL), lm_of("llama")
    prompts = [ids(30, seed=1), ids(19, seed=2)]
    steer = [Steer("resid_post.0", torch.ones(lm.hf_config.hidden_size), positions=slice(4, 25))]
    found = []
    for each in (lm, roomy):
        with each.trace(prompts, interventions=steer, capture=["resid_post.1"]) as tracer:
            logits = each.lm_head.output.save()
        found.append((logits, tracer.captures))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    for own, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(own["resid_post.1"], other["resid_post.1"], rtol=1e-4, atol=1e-4)


def test_a_long_pass_with_gradients_names_the_setting(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama", max_num_tokens=8)
    with pytest.raises(PromptError, match="no gradients: raise max_num_tokens to at least 9"):
        with lm.trace([1] * 9):
            h = lm.model.layers[0].output
            h.requires_grad_(True)
            lm.lm_head.output.sum().backward()
            h.grad.save()


def test_a_pass_beyond_memory_says_what_it_needs(tmp_path: Path) -> None:
    """A quarter of a million rows of logits over 200,000 words take more than this machine has."""
    LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        vocab_size=200_000, max_position_embeddings=1 << 18,
    ).save_pretrained(tmp_path)  # fmt: skip
    sizes: dict[str, Any] = {"kv_cache_tokens": 1 << 18, "max_num_tokens": 256, "device": "cpu", "dtype": "float32"}
    sizes["lower_traces"] = "off"
    with LM(tmp_path, load_format="dummy", **sizes) as lm:
        with pytest.raises(PromptError, match=r"262144 tokens; .* needs about \d{3}\.\d GiB, and \d+\.\d are free"):
            with lm.trace([1] * (1 << 18)):
                lm.model.layers[0].output.save()
        with lm.trace([1] * 300):  # longer than a step, and small
            h = lm.model.layers[0].output.save()
        assert h.shape == (1, 300, 8)


@pytest.mark.gpu
def test_a_long_traced_prompt_on_the_device(model_folder: Callable[[str], Path]) -> None:
    prompt, found = ids(90, seed=3), []
    for most in (16, 128):
        with LM(model_folder("llama"), device="cuda", dtype="float32", **{**SMALL, "max_num_tokens": most}) as lm:
            handle = lm.submit(ids(40, seed=4), greedy(12))
            with lm.trace(prompt, capture=["resid_post.0"]) as tracer:
                state = lm.model.layers[1].output.save()
            found.append((state.cpu(), tracer.activations["resid_post.0"], handle.result(600).token_ids))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-4)
    assert found[0][2] == found[1][2]
