"""Steering: add a direction to one layer's output at every position, and the text changes its subject.

The direction is the mean state of one text minus that of another: a trace reads both. What is added is declared, so that no
Python runs on the path. The same prompt is generated without it in the same batch, and does not notice.

Reference: Turner et al., "Steering Language Models With Activation Engineering" (2023), https://arxiv.org/abs/2308.10248

Usage: python examples/steering.py [scale]
"""

import sys

import torch

from pymllm_interp import LM, SamplingParams, Steer

PROMPT = "My neighbour told me that"
TOWARDS = "The ocean, the sea, waves, ships, sailors, whales and the deep blue water"
AWAY = "The office, the desk, papers, clerks, managers, meetings and the long grey hours"
LAYER = 15
SAMPLING = SamplingParams(max_tokens=24, temperature=0, repetition_penalty=1.1)


def direction(lm: LM) -> torch.Tensor:
    """[hidden]. The first token is left out: its state is unlike all others, and much larger."""
    with lm.trace() as tracer:
        with tracer.invoke(TOWARDS):
            towards = lm.model.layers[LAYER].output[0, 1:].mean(0).save()
        with tracer.invoke(AWAY):
            away = lm.model.layers[LAYER].output[0, 1:].mean(0).save()
    return towards - away


def main(scale: float = 1.0) -> tuple[str, str]:
    with LM("demo") as lm:
        steer = Steer(f"resid_post.{LAYER}", direction(lm), scale=scale)
        unsteered, steered = lm.generate([PROMPT, PROMPT], SAMPLING, interventions=[[], [steer]])
    print(f"{PROMPT} ...\n\nunsteered: {unsteered.text}\n\nsteered:   {steered.text}\n\n{steered.receipt}")
    return unsteered.text, steered.text


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
