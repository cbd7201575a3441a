"""Targets of a circuit: logits, and differences of two."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

from torch import Tensor

from ...utils.arguments import PromptError, shown
from ..metrics import token_of

MAX_TARGETS = 256
"""Most targets of one circuit."""


class CircuitTarget(NamedTuple):
    """A logit, less the mean of all; or the difference of two logits.

    Attributes:
        token: token id.
        other: token id that is subtracted, or None.
        weight: probability of the token; 1 for a difference.
        label: tokens as text.
    """

    token: int
    other: int | None
    weight: float
    label: str


def checked_targets(target: Any, lm: Any) -> list[tuple[int, int | None]] | None:
    """Pairs (token, None or the token that is subtracted); None: the most probable tokens.

    Args:
        target: None; a token; (token, token), a difference of logits; or a list of tokens and differences.

    Raises:
        PromptError: a text of several tokens, an id beyond the vocabulary, none or too many, or a token twice.
    """
    if target is None:
        return None
    several = list(target) if isinstance(target, list) or (isinstance(target, Tensor) and target.dim()) else [target]
    if not 1 <= len(several) <= MAX_TARGETS:
        raise PromptError(f"target has {len(several)} entries; expected from 1 to {MAX_TARGETS}")
    found = [_pair(each, lm) for each in several]
    if len(set(found)) < len(found) or any(one == other for one, other in found):
        raise PromptError(f"target={shown(target)} names a token twice")
    return found


def _pair(target: Any, lm: Any) -> tuple[int, int | None]:
    if isinstance(target, str | Integral | Tensor):
        return token_of(target, lm, "target"), None
    pair = list(target) if isinstance(target, Sequence) else []
    if len(pair) != 2:
        raise PromptError(f"target={shown(target)}: expected a token, (token, token), or a list of these")
    return token_of(pair[0], lm, "target"), token_of(pair[1], lm, "target")


def weighted_targets(
    pairs: list[tuple[int, int | None]] | None, logits: Tensor, lm: Any, max_logits: int, logit_mass: float
) -> list[CircuitTarget]:
    """The targets with their weights.

    Args:
        pairs: result of `checked_targets`. None: the fewest tokens with `logit_mass` of the probability, at most `max_logits`.
        logits: [vocab] of the last position.
    """
    probabilities = logits.softmax(-1)
    if pairs is None:
        top = probabilities.topk(min(max_logits, len(logits)))
        count = int((top.values.cumsum(0) < logit_mass).sum()) + 1
        pairs = [(token, None) for token in top.indices[:count].tolist()]

    def text(token: int) -> str:
        return str(token) if lm.tokenizer is None else lm.to_str_tokens([token])[0]

    return [
        CircuitTarget(
            token, other, probabilities[token].item() if other is None else 1.0,
            text(token) if other is None else f"{text(token)} - {text(other)}",
        )
        for token, other in pairs
    ]  # fmt: skip
