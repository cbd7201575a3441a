"""Steering: a direction added to one layer's output at every position changes the subject of the text.

The direction is the difference of two texts' mean states, which a trace reads. The steering is a declared intervention, so no
Python runs in the forward pass. The same prompt runs unsteered in the same batch.

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
    """[hidden]. Leaves out the first token, which has a much larger state than all others."""
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
