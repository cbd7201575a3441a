"""`Labels`: a classification head's labels and the activation of its logits, from the model's config. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...utils.arguments import PromptError

NO_HEAD = (
    "this model has no classification head (transformers' ...ForSequenceClassification): lm.score(text, others) compares "
    "embeddings, and lm.encode makes them"
)


@dataclass(frozen=True)
class Labels:
    """A classification head.

    Attributes:
        names: label of each logit.
        activation: "softmax", "sigmoid" or "identity", the model's own.
        pair_activation: activation of scores of pairs of texts.
    """

    names: tuple[str, ...]
    activation: str
    pair_activation: str

    @classmethod
    def of(cls, config: Mapping[str, Any], tasks: Any) -> Labels | None:
        """Labels by the values of a transformers config; None without such a head."""
        if "classify" not in tasks:
            return None
        names = {int(number): str(name) for number, name in (config.get("id2label") or {}).items()}
        found = tuple(names.get(i, f"LABEL_{i}") for i in range(len(names) or 2))
        kind = config.get("problem_type")
        activation = "softmax" if len(found) > 1 else "sigmoid"
        if kind in ("regression", "multi_label_classification"):
            activation = "identity" if kind == "regression" else "sigmoid"
        given = (config.get("sentence_transformers") or {}).get("activation_fn")
        given = str(given or config.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]
        pair = {"Identity": "identity", "Sigmoid": "sigmoid"}.get(given, "sigmoid" if len(found) == 1 else "identity")
        return cls(found, activation, pair)

    def probs(self, logits: np.ndarray, activated: bool | None = None) -> np.ndarray:
        """[..., labels] -> the same, after the activation unless `activated` is False."""
        return logits if activated is False else ACTIVATIONS[self.activation](logits)

    def score(self, logits: np.ndarray, activated: bool | None, pair: bool) -> float:
        """Score of a text's logits [1]. A single text has its reward: the logit, unless `activated`.

        Args:
            pair: whether it is the score of two texts.
        """
        if pair:
            return float(logits[0] if activated is False else ACTIVATIONS[self.pair_activation](logits)[0])
        return float(ACTIVATIONS[self.activation](logits)[0] if activated else logits[0])

    def check_one(self) -> None:
        """Raise PromptError for several labels."""
        if len(self.names) != 1:
            raise PromptError(
                f"a score needs a head of one label, and this model has {len(self.names)}: use lm.classify"
            )


def _softmax(x: np.ndarray) -> np.ndarray:
    exps = np.exp(x - x.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


ACTIVATIONS = {"softmax": _softmax, "sigmoid": _sigmoid, "identity": lambda x: x}


def logits_capture(encoder: bool) -> dict[str, Any]:
    """Fields of the `Capture` of a text's logits: at its last token, or at an encoder's first."""
    return {"site": "logits", "positions": [0 if encoder else -1], "dtype": "float32"}


def separator_of(tokenizer: Any) -> int | None:
    """Token of a pair before tokens of the second type; None for tokenizers of one type."""
    token = getattr(tokenizer, "sep_token_id", None)
    types = None if token is None else tokenizer("a", "b").get("token_type_ids")
    return token if types and any(types) else None


def has_types(config: Mapping[str, Any], tasks: Any) -> bool:
    """Whether a model gives tokens behind the first separator the second type: an encoder that classifies, as BERT."""
    return "classify" in tasks and config.get("type_vocab_size", 0) > 1


def check_types(tokenizer: Any, ids: list[int], types: Sequence[int] | None, what: str) -> None:
    """Raise PromptError for a text that holds a separator: with `has_types`, its tokens would not have the tokenizer's types.

    Args:
        types: types of the tokens, by the tokenizer; None: one type.
    """
    token = getattr(tokenizer, "sep_token_id", None)
    if token not in ids[:-1] or separator_of(tokenizer) is None:
        return
    first = ids.index(token)
    if list(types or [0] * len(ids)) != [int(place > first) for place in range(len(ids))]:
        raise PromptError(
            f"{what} holds the separator {tokenizer.sep_token!r} in a text, and the model would read the rest as a second text: "
            "leave it out, or give two texts, lm.score(first, second)"
        )


def pair_of(
    tokenizer: Any, first: str, second: str, what: str, most: int | None = None, special: bool = True, typed: bool = False
) -> list[int]:  # fmt: skip
    """Token ids of two texts, as the tokenizer joins them.

    Args:
        most: tokens to keep, of the second text if it is the longer one; None: all.
        special: whether the tokenizer adds its special tokens.
        typed: see `has_types`.

    Raises:
        PromptError: no tokenizer, or see `check_types`.
    """
    if tokenizer is None:
        raise PromptError(f"{what} is a pair of texts, but this model has no tokenizer: classify token ids of the pair")
    how = {"add_special_tokens": special} | ({} if most is None else {"truncation": True, "max_length": most})
    found = tokenizer([first], [second], **how)  # by itself, an empty second text would be none
    ids = found["input_ids"][0]
    if typed:
        check_types(tokenizer, ids, found.get("token_type_ids", [None])[0], what)
    return ids


def pairs_of(first: list[Any], second: list[Any]) -> list[tuple[Any, Any]]:
    """Pairs of two lists of equal length, or of one with each of the other. Raises PromptError: lists of other lengths."""
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second) or not first:
        raise PromptError(
            f"{len(first)} and {len(second)} texts: expected one or as many of the first, and one at least"
        )
    return list(zip(first, second, strict=True))
