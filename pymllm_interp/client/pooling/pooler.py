"""`Pooler`: how a model makes one vector of a text, by the folders that sentence-transformers writes. Imports no torch.

A request captures the last hidden states, pooled by the engine where it can. The rest, on one row for each text, runs here: dense
layers, `dimensions` and the length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        lower_case: whether texts are lower-cased first.
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
        """The text before an input.

        Raises:
            PromptError: an unknown name, or both.
        """
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
        text = before + (text.lower() if self.lower_case else text)
        how = {"add_special_tokens": special} | ({} if most is None else {"truncation": True, "max_length": most})
        ids = tokenized(tokenizer, text, what, **how).token_ids
        if self.include_prompt or not before:
            return PooledText(text, ids)
        own = tokenizer(before, add_special_tokens=special)["input_ids"]
        return PooledText(text, ids, len(own) - bool(own and own[-1] in tokenizer.all_special_ids))

    def most_tokens(self, given: int | None, max_model_len: int) -> int | None:
        """Tokens of a text that `truncate_prompt_tokens` keeps; None: all.

        Raises:
            PromptError: neither -1 nor from 1 to the most that the model reads.
        """
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


@dataclass(frozen=True, eq=False)
class Pooling:
    """Pooling of one call: the model's, with the call's changes.

    Args:
        pooler: the model's.
        site: site of the last hidden states.
        width: width of a state.
        vocab_size: number of token ids.
        pooling: one of `POOLINGS`; None: the model's.
        normalize: whether each row has length 1, or sums to 1 over `returned_token_ids`. None: as the model says.
        dimensions: first values of a row to keep.
        step_tag_id: token at the positions that "step" returns.
        returned_token_ids: tokens of which "step" returns the logits, in place of states.

    Raises:
        PromptError: a value out of its range, or one that this pooling does not use.
    """

    pooler: Pooler
    site: str
    width: int
    vocab_size: int
    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise PromptError(f"pooling={shown(self.pooling)}: expected one of {', '.join(map(repr, POOLINGS))}")
        if self.pooler.why_not:
            raise PromptError(f"this model's pooling is not supported: {self.pooler.why_not}")
        steps = self.step_tag_id is not None or self.returned_token_ids is not None
        if (self.pooling == "step") != (self.step_tag_id is not None) or (steps and self.pooling != "step"):
            raise PromptError("pooling='step' takes step_tag_id, the token that ends a step; no other pooling does")
        if self.dimensions is not None and not (is_whole(self.dimensions) and 1 <= self.dimensions <= self.size):
            raise PromptError(f"dimensions={shown(self.dimensions)}: expected a whole number from 1 to {self.size}")
        if self.returned_token_ids is not None:
            self._check_ids(self.returned_token_ids)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if self.dimensions is not None:
            raise PromptError("dimensions: logits of returned_token_ids are not cut")
        if not ids or not all(is_whole(token) and 0 <= token < self.vocab_size for token in ids):
            raise PromptError(
                f"returned_token_ids={shown(ids)}: expected one or more token ids from 0 to {self.vocab_size - 1}"
            )

    @property
    def modes(self) -> tuple[str, ...]:
        """The poolings of this call."""
        return self.pooler.modes if self.pooling is None else (self.pooling,)

    @property
    def size(self) -> int:
        """Values of a row, before `dimensions`."""
        return len(self.pooler.dense[-1].weight) if self.pooler.dense else self.width * len(self.modes)

    @property
    def reads_logits(self) -> bool:
        """Whether the rows are logits, of all positions."""
        return self.returned_token_ids is not None

    def capture(self, token_ids: Sequence[int], skipped: int = 0) -> dict[str, Any]:
        """The fields of the `Capture` that a prompt needs.

        Args:
            skipped: tokens of a text before the input, which are not pooled.

        Raises:
            PromptError: no token is left to pool.
        """
        (mode, *more), reduce, count = self.modes, None, len(token_ids)
        positions: Any = [count - 1] if mode == "last" else [0] if mode == "cls" and not skipped else "prompt"
        if mode == "step":
            positions = [i for i, token in enumerate(token_ids) if token == self.step_tag_id]
        elif skipped and mode != "last":
            positions = list(range(skipped, count))
        if more:
            positions = "prompt" if not skipped else list(range(skipped, count))
        elif mode == "mean":
            reduce = "mean"
        if not positions:
            what = f"no token {self.step_tag_id}" if mode == "step" else "no token behind the prompt's text"
            raise PromptError(f"there is {what} to pool")
        site = "logits" if self.reads_logits else self.site
        return {"site": site, "positions": positions, "reduce": reduce, "dtype": "float32"}

    def pooled(self, rows: np.ndarray, skipped: int = 0) -> np.ndarray:
        """The result for the captured rows [positions, width]: [size], or [rows, size] with "step" and "all"."""
        if self.returned_token_ids is not None:
            found = rows[:, list(self.returned_token_ids)]
            if self.normalize is False:
                return found
            exps = np.exp(found - found.max(-1, keepdims=True))
            return exps / exps.sum(-1, keepdims=True)
        modes = self.modes
        several = modes[0] in ("step", "all")
        found = rows if several else np.concatenate([_pool(mode, rows, skipped) for mode in modes], axis=-1)
        for layer in self.pooler.dense:
            found = layer(found)
        found = found[..., : self.dimensions]
        if self.pooler.normalize if self.normalize is None else self.normalize:
            found = found / np.maximum(np.linalg.norm(found, axis=-1, keepdims=True), 1e-12)
        return np.ascontiguousarray(found)


def _pool(mode: str, rows: np.ndarray, skipped: int) -> np.ndarray:
    """[positions, width] -> [width]. Rows that the engine has pooled are one."""
    if mode == "last":
        return rows[-1]
    if mode == "cls":
        return rows[0]
    if mode == "max":
        return rows.max(0)
    if mode == "mean":
        return rows.mean(0)
    if mode == "mean_sqrt_len_tokens":
        return rows.sum(0) / np.sqrt(np.float32(len(rows)))
    weights = np.arange(skipped + 1, skipped + len(rows) + 1, dtype=np.float32)[:, None]
    return (rows * weights).sum(0) / weights.sum()
