"""`bridge.generate`: TransformerLens' call, by the engine."""

from __future__ import annotations

from typing import Any

import torch

from ..core.sampling_params import SamplingParams
from .layout import Layout


def generate(
    bridge: Any,
    input: Any,
    max_new_tokens: int = 10,
    *,
    stop_at_eos: bool = True,
    eos_token_id: int | None = None,
    do_sample: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    prepend_bos: bool | None = None,
    attention_mask: Any = None,
    return_type: str | None = "input",
    interventions: Any = None,
    verbose: bool = False,
    **other: Any,
) -> Any:
    """Continue prompts.

    Args:
        bridge: a `Bridge`.
        input: text, token ids [batch, tokens] or [tokens], or a list of texts or of token ids. Prompts may have different lengths.
        eos_token_id: ends a prompt's text in place of the model's end-of-sequence ids.
        do_sample: whether to sample; else greedy.
        seed: seed of the sampling.
        return_type: "str", "tokens", or "input": text for text, tokens for tokens.
        interventions: declared ones, for each prompt.
        verbose: ignored.

    Returns:
        text, a list of texts, or token ids [batch, tokens + new tokens]. The ids begin with the prompts, padded on their left. A
        row that ended is filled up with its end-of-sequence id.

    Raises:
        TypeError: another option; `lm.generate` takes all of `SamplingParams`.
        ValueError: an unknown return type.
    """
    if other:
        raise TypeError(
            f"bridge.generate got {', '.join(other)}: lm.generate(prompts, SamplingParams(...)) has the engine's other options"
        )
    if return_type not in ("input", "str", "tokens"):
        raise ValueError(f"return_type={return_type!r}: expected 'input', 'str' or 'tokens'")
    ids, mask = bridge._batch(input, prepend_bos, "left", attention_mask)
    params = SamplingParams(
        temperature=temperature if do_sample else 0.0, top_k=top_k or 0, top_p=1.0 if top_p is None else top_p,
        repetition_penalty=repetition_penalty, max_tokens=max_new_tokens, seed=seed,
        ignore_eos=not stop_at_eos or eos_token_id is not None,
        stop_token_ids=[eos_token_id] if stop_at_eos and eos_token_id is not None else None,
    )  # fmt: skip
    outs = bridge.lm.generate(Layout.of(ids, mask).tokens, params, interventions=interventions)
    new = [list(out.outputs[0].token_ids) for out in outs]
    longest = max(map(len, new))
    filled = [row + row[-1:] * (longest - len(row)) for row in new]
    tokens = torch.cat([ids, torch.tensor(filled, dtype=ids.dtype)], dim=1)
    texts = isinstance(input, str) or (isinstance(input, list) and isinstance(input[0], str))
    if return_type == "tokens" or (return_type == "input" and not texts):
        return tokens
    found = bridge.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return found[0] if isinstance(input, str) or len(found) == 1 else found
