"""Hooks of requests with images beside others: rings, chunks, small pools, preemption, prefix hits. transformers is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers_declared import lms
from helpers_images import prompt_of, random_prompt, reference
from transformers import PreTrainedModel

from pymllm_interp import Capture, SamplingParams
from pymllm_interp.client.chat import RenderedPrompt
from pymllm_interp.utils.arguments import PromptError

Folders = Callable[[str], Path]
Oracle = Callable[[str], PreTrainedModel]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
GPU = [pytest.mark.gpu] if torch.cuda.is_available() else []
POSITION_BYTES = 3 * 32 * 4
"""Of three layers' states in the ring."""


def states_of(family: str, model: PreTrainedModel, prompt: RenderedPrompt, tokens: list[int]) -> list[torch.Tensor]:
    """transformers' hidden states of a prompt with its new tokens, [positions, width] a layer."""
    whole = prompt._replace(token_ids=[*prompt.token_ids, *tokens[:-1]])
    return [state[0] for state in reference(family, model, whole, output_hidden_states=True).hidden_states]


# -- Gemma 3's spans and the ring ----------------------------------------------------------------


@pytest.mark.parametrize("positions", [40, 5, 16])
def test_a_ring_cuts_no_image(positions: int, vision_folder: Folders, vision_oracle: Oracle) -> None:
    """A chunk may end anywhere between images, and never in one: the ring of 5 positions holds one image of 4 and little else."""
    prompts = [random_prompt("gemma3", seed) for seed in range(6)]
    with lms("tables", vision_folder) as load:
        lm = load("gemma3", page_size=4, max_num_tokens=11, capture_ring_bytes=positions * POSITION_BYTES)
        with ThreadPoolExecutor(3) as threads:
            outs = list(threads.map(lambda p: lm.generate([p], GREEDY, capture=["resid_post.*"])[0], prompts))
        lm.engine.call(lm.engine.scheduler.check_integrity)
    for prompt, out in zip(prompts, outs, strict=True):
        wanted = states_of("gemma3", vision_oracle("gemma3"), prompt, out.token_ids)
        for layer in range(2):
            torch.testing.assert_close(out.activations[f"resid_post.{layer}"], wanted[layer + 1], **CLOSE)


def test_a_ring_without_room_for_an_image_refuses_it_by_name(vision_folder: Folders) -> None:
    prompt, text = prompt_of("gemma3", [1, 2], 0, [3]), [5, 6, 7, 8, 9, 10]
    with lms("tables", vision_folder) as load:
        lm = load("gemma3", capture_ring_bytes=3 * POSITION_BYTES)
        for _ in range(2):
            lm.generate([text], GREEDY, capture=["resid_post.*"])
            with pytest.raises(PromptError, match="in one step, and the ring that they leave the device through"):
                lm.generate([prompt], GREEDY, capture=["resid_post.*"])
        (out,) = lm.generate([prompt], GREEDY, capture=[Capture("resid_post.*", "text")])
    assert len(out.activations["resid_post.1"]) == len(prompt.token_ids) - 4
