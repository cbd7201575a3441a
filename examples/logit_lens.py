"""Logit lens: the next token that each layer predicts.

Each layer's output goes through the model's final norm and head. The model's answer appears in the last layers.

Reference: nostalgebraist, "interpreting GPT: the logit lens" (2020),
https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens

Usage: python examples/logit_lens.py [prompt]
"""

import sys

import torch

from pymllm_interp import LM


def main(prompt: str = "The Eiffel Tower is in the city of") -> list[str]:
    with LM("demo") as lm:
        with lm.trace(prompt):
            states = torch.stack([layer.output[0, -1] for layer in lm.model.layers])  # [layers, hidden]
            top = lm.lm_head(lm.model.norm(states)).softmax(-1).max(-1).save()  # over [layers, vocab]
        words = [lm.tokenizer.decode([token]) for token in top.indices.tolist()]
    for layer, (word, prob) in enumerate(zip(words, top.values.tolist(), strict=True)):
        print(f"layer {layer:2}  {word!r:12} {prob:6.1%}  {'#' * round(40 * prob)}")
    return words


if __name__ == "__main__":
    main(*sys.argv[1:2])
