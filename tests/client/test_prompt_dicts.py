"""vLLM's prompt dicts, `TextPrompt` and `TokensPrompt`, are prompts of every call and of traces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pymllm_interp import LM, SamplingParams

IDS = [5, 17, 3, 80]
TEXT = "w5 w17 w3 w80"


@pytest.mark.parametrize(
    "prompt", [{"prompt": TEXT}, {"prompt_token_ids": IDS}, {"prompt_token_ids": IDS, "prompt": "w1"}], ids=str
)
def test_a_vllm_prompt_is_the_prompt_that_it_holds(lm_of: Callable[..., LM], prompt: dict) -> None:
    lm = lm_of("llama")
    params = SamplingParams(temperature=0, max_tokens=4)
    (plain,) = lm.generate([IDS], params)
    for given in (prompt, [prompt]):
        (out,) = lm.generate(given, params)
        assert out.prompt_token_ids == IDS and out.token_ids == plain.token_ids
    with lm.trace(IDS):
        wanted = lm.lm_head.output.save()
    with lm.trace(prompt):
        logits = lm.lm_head.output.save()
    with lm.trace() as tracer:
        with tracer.invoke(prompt):
            invoked = lm.lm_head.output.save()
    assert torch.equal(logits, wanted) and torch.equal(invoked, wanted)


def test_what_a_vllm_prompt_has_beside_its_text_is_refused_by_name(lm_of: Callable[..., LM]) -> None:
    with pytest.raises(ValueError, match="'mm_processor_kwargs', which is not supported"):
        lm_of("llama").generate({"prompt": TEXT, "mm_processor_kwargs": {"size": 1}})
    with pytest.raises(ValueError, match=r"the prompt has images, and .*Llama.* takes text only"):
        lm_of("llama").generate({"prompt": TEXT, "multi_modal_data": {"image": 1}})
