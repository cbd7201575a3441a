"""Activation patching: which layer carries the fact?

A clean and a corrupted prompt differ in one token. The corrupted prompt runs once for each layer, with that layer's state at
the differing token replaced by the clean prompt's state. Where the clean answer returns, the layer holds the fact at that token.
All runs are requests of one trace, so the engine batches them.

Reference: Meng et al., "Locating and Editing Factual Associations in GPT" (2022), https://arxiv.org/abs/2202.05262

Usage: python examples/activation_patching.py
"""

from pymllm_interp import LM

CLEAN, CORRUPTED = "The capital of France is the city of", "The capital of Italy is the city of"
ANSWERS = " Paris", " Rome"


def main() -> list[float]:
    with LM("demo") as lm:
        clean_ids, corrupted_ids = lm.tokenizer(CLEAN)["input_ids"], lm.tokenizer(CORRUPTED)["input_ids"]
        assert len(clean_ids) == len(corrupted_ids), "patching by position needs prompts of the same length"
        (subject,) = [i for i, pair in enumerate(zip(clean_ids, corrupted_ids, strict=True)) if pair[0] != pair[1]]
        paris, rome = (lm.tokenizer(word)["input_ids"][0] for word in ANSWERS)

        with lm.trace(CLEAN):
            clean = list().save()
            for layer in lm.model.layers:
                clean.append(layer.output[0, subject])
            logits = lm.lm_head.output[0, -1]
            clean_gap = (logits[paris] - logits[rome]).save()

        with lm.trace() as tracer:
            gaps = list().save()
            with tracer.invoke(CORRUPTED):  # unpatched, for comparison
                logits = lm.lm_head.output[0, -1]
                corrupted_gap = (logits[paris] - logits[rome]).save()
            for layer, state in enumerate(clean):
                with tracer.invoke(CORRUPTED):
                    lm.model.layers[layer].output[0, subject] = state
                    logits = lm.lm_head.output[0, -1]
                    gaps.append((logits[paris] - logits[rome]).item())

    baselines = f"clean prompt {clean_gap.item():+.2f}, corrupted {corrupted_gap.item():+.2f}"
    print(f"logit of{ANSWERS[0]} minus logit of{ANSWERS[1]}: {baselines}")
    for layer, gap in enumerate(gaps):
        print(f"patched at layer {layer:2}  {gap:+6.2f}  {'#' * max(0, round(4 * gap))}")
    return gaps


if __name__ == "__main__":
    main()
