"""`Pooling`: how one call pools, from the captured rows to the result. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...utils.arguments import PromptError, is_whole, shown
from .pooler import POOLINGS, Pooler


@dataclass(frozen=True, eq=False)
class Pooling:
    """Pooling of one call: the model's, with the call's changes.

    Args:
        pooler: the model's.
        site: site of the last hidden states.
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
        elif mode in ("mean", "max"):
            reduce = mode
        if not positions:
            what = f"no token {self.step_tag_id}" if mode == "step" else "no token behind the prompt's text"
            raise PromptError(f"there is {what} to pool")
        site = "logits" if self.reads_logits else self.site
        return {"site": site, "positions": positions, "reduce": reduce, "dtype": "float32"}

    def num_values(self, capture: Mapping[str, Any], count: int) -> int:
        """Numbers in the result of a prompt of `count` tokens with this `capture`."""
        if self.returned_token_ids is not None:
            return len(capture["positions"]) * len(self.returned_token_ids)
        width = self.dimensions or self.size
        if self.modes[0] not in ("step", "all"):
            return width
        return (count if capture["positions"] == "prompt" else len(capture["positions"])) * width

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
