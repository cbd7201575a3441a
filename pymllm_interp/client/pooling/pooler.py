"""`Pooler`: how a model makes one vector of a text, by the folders that sentence-transformers writes. Imports no torch.

A request captures the last hidden states, pooled by the engine where it can. The rest, on one row for each text, runs here: dense
layers, `dimensions` and the length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from ...utils.arguments import PromptError, is_whole, shown
from ..chat import tokenized

DENSE_FILE = "pooler.safetensors"
"""The dense layers' weights, beside the tokenizer's files of a server."""
MODES = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
}
"""Pooling of a text to one row -> its field in the folders of sentence-transformers before version 6."""
NAMES = {"lasttoken": "last"}
"""Names of poolings in sentence-transformers -> here."""
POOLINGS = (*MODES, "step", "all")
"""Values of `pooling`. "step" and "all" have several rows for a text."""
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
"""Activation functions of dense layers, by the name of the class in torch."""


class PooledText(NamedTuple):
    """A text's token ids, as pooling reads them.

    Attributes:
        text: the text, with the prompt before it; None for token ids.
        skipped: tokens of the prompt, if they are not pooled.
    """

    text: str | None
    token_ids: list[int]
    skipped: int = 0


class Dense(NamedTuple):
    """A linear layer behind the pooling, with an activation."""

    weight: np.ndarray  # [out, in] float32
    bias: np.ndarray | None  # [out] float32
    activation: str

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """[..., in] -> [..., out]."""
        out = rows @ self.weight.T
        return ACTIVATIONS[self.activation](out if self.bias is None else out + self.bias)


@dataclass(frozen=True, eq=False)
class Pooler:
    """A model's defaults for embeddings, from `modules.json` and the files beside it.

    Attributes:
        modes: poolings; results of several stand side by side.
        normalize: whether the result has length 1.
        dense: layers between pooling and length.
        prompts: name of a prompt -> text before the input, such as "query".
        default_prompt: name of the prompt of inputs without one, or None.
        include_prompt: whether the tokens of that text are pooled.
        max_tokens: tokens of a text, at most; None: the engine's limit.
        lower_case: whether texts are lower-cased first, prompts too.
        why_not: reason that the model's own pooling is not supported; "" if it is.
    """

    modes: tuple[str, ...] = ("last",)
    normalize: bool = True
    dense: tuple[Dense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True
    max_tokens: int | None = None
    lower_case: bool = False
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        """The defaults as JSON; of the dense layers, their activations."""
        names = ("normalize", "default_prompt", "include_prompt", "max_tokens", "lower_case", "why_not")
        found = {name: getattr(self, name) for name in names}
        dense = [layer.activation for layer in self.dense]
        return found | {"modes": list(self.modes), "prompts": dict(self.prompts), "dense": dense}

    @classmethod
    def of_json(cls, info: Mapping[str, Any], folder: Path | None) -> Pooler:
        """Inverse of `to_json`.

        Args:
            folder: folder with the file of `save_dense`.
        """
        found = cls(**{**info, "modes": tuple(info["modes"]), "dense": ()})
        if not info["dense"]:
            return found
        file = None if folder is None else folder / DENSE_FILE
        if file is None or not file.is_file():
            return replace(found, why_not="its dense layers are not here, for want of a tokenizer beside them")
        tensors = load_file(file)
        layers = [Dense(tensors[f"{i}.weight"], tensors.get(f"{i}.bias"), name) for i, name in enumerate(info["dense"])]
        return replace(found, dense=tuple(layers))

    def save_dense(self, folder: Path) -> None:
        """Write the dense layers' weights to `DENSE_FILE`; no file without any."""
        tensors = {f"{i}.weight": layer.weight for i, layer in enumerate(self.dense)}
        tensors |= {f"{i}.bias": layer.bias for i, layer in enumerate(self.dense) if layer.bias is not None}
        if tensors:
            save_file(tensors, folder / DENSE_FILE)

    def prompt_text(self, prompt: str | None, prompt_name: str | None) -> str:
        """The text before an input. Raises PromptError: an unknown name, or both."""
        if prompt is not None and prompt_name is not None:
            raise PromptError("prompt and prompt_name are both the text before the input: give one of them")
        if prompt is not None:
            return prompt
        name = self.default_prompt if prompt_name is None else prompt_name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise PromptError(f"prompt_name={shown(name)}: the model's prompts are {known}")
        return self.prompts[name]

    def read(
        self, tokenizer: Any, text: str, before: str, what: str, most: int | None = None, special: bool = True
    ) -> PooledText:
        """The token ids of a text behind its prompt.

        Args:
            before: result of `prompt_text`.
            what: name of the text in messages.
            most: tokens to keep; None: all.
            special: whether the tokenizer adds its special tokens.

        Raises:
            PromptError: no tokenizer, or a lone surrogate.
        """
        if self.lower_case:
            before, text = (_lowered(one, tokenizer) for one in (before, text))
        text = before + text
        how = {"add_special_tokens": special} | ({} if most is None else {"truncation": True, "max_length": most})
        ids = tokenized(tokenizer, text, what, **how).token_ids
        if self.include_prompt or not before:
            return PooledText(text, ids)
        own = tokenizer(before, add_special_tokens=special)["input_ids"]
        return PooledText(text, ids, len(own) - bool(own and own[-1] in tokenizer.all_special_ids))

    def most_tokens(self, given: int | None, max_model_len: int) -> int | None:
        """Tokens of a text that `truncate_prompt_tokens` keeps; None: all.
        Raises PromptError: neither -1 nor from 1 to the most that the model reads."""
        longest = min(self.max_tokens or max_model_len, max_model_len)
        if given is None or given == -1:
            return None if given is None else longest
        if not is_whole(given) or not 1 <= given <= longest:
            raise PromptError(
                f"truncate_prompt_tokens={shown(given)}: expected -1, for as many as the model reads, or 1 to {longest}"
            )
        return int(given)

    def check_length(self, count: int, what: str) -> None:
        """Raise PromptError for more tokens than the model was made for."""
        if self.max_tokens is not None and count > self.max_tokens:
            raise PromptError(
                f"{what} has {count} tokens, and the model's embeddings are of {self.max_tokens} at most (max_seq_length): "
                "truncate_prompt_tokens=-1 cuts it"
            )


def _lowered(text: str, tokenizer: Any) -> str:
    """The text in lower case, without the words of special tokens."""
    special = [word for word in getattr(tokenizer, "all_special_tokens", ()) if word != word.lower()]
    if not special:
        return text.lower()
    words = re.split(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})", text)
    return "".join(word if i % 2 else word.lower() for i, word in enumerate(words))
