"""`RowAdapters`: the LoRA adapters of a product's rows. vLLM's kernels know the adapters of a step's rows only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .ranks import Function

TOKENS, LOGITS = -1, -2
"""Rows that a pass multiplies: its token rows, or the rows of its logits."""


class RowAdapters:
    """Adapters of rows in a pass by modules: token rows, logit rows, or rows of a block.

    Args:
        manager: vLLM's `LoRAModelManager`; None without `enable_lora`.
        most: most rows that its kernels have places for.
        is_own_call: whether a block calls the module, which then is without adapters, as in our own engine.
    """

    def __init__(self, manager: Any, most: int, is_own_call: Callable[[], bool]) -> None:
        self._manager, self._most, self._is_own_call = manager, most, is_own_call
        self._step: Any = None  # vLLM's mapping of the step, while a pass by modules changes it
        self._ids: dict[int, tuple[int, ...]] = {}  # vLLM's numbers of the adapters of the pass's rows

    @property
    def on(self) -> bool:
        """Whether vLLM serves adapters."""
        return self._manager is not None

    def begin(self, num_tokens: int, logit_tokens: np.ndarray) -> None:
        """A pass begins.

        Args:
            logit_tokens: token row of each row of the logits.
        """
        if self._manager is not None:
            self._step = self._manager._last_mapping
            ids = np.array(self._step.index_mapping[:num_tokens])
            self._ids = {TOKENS: tuple(ids.tolist()), LOGITS: tuple(ids[logit_tokens].tolist())}

    def end(self) -> None:
        """The pass is over, or a call of a block behind it: vLLM's own mapping is in use again."""
        if self._step is not None:
            self._manager.set_adapter_mapping(self._step)
            self._step, self._ids = None, {}

    def around(self, function: Function) -> Function:
        """The function with one more input: `of` its rows."""
        if self._manager is None:
            return function

        def adapted(*inputs: Any) -> torch.Tensor:
            *own, rows = inputs
            told = (0,) * rows if rows >= 0 else self._ids[rows]
            self._step = self._step or self._manager._last_mapping
            self._manager.set_adapter_mapping(replace(self._step, index_mapping=told, prompt_mapping=told))
            try:
                return function(*own)
            finally:
                if not self._ids:
                    self.end()

        return adapted

    def of(self, num_rows: int, of_logits: bool = False) -> tuple[int, ...]:
        """The further input: `TOKENS`, `LOGITS`, or the number of rows of a block's own; () without `enable_lora`.

        Args:
            of_logits: the pass multiplies rows of the logits.

        Raises:
            RuntimeError: more rows than the kernels have places for.
        """
        if self._manager is None:
            return ()
        if not self._is_own_call():
            return (LOGITS if of_logits else TOKENS,)
        if num_rows > self._most:
            raise RuntimeError(
                f"a module got {num_rows} rows, and adapters are applied to {self._most} at most: raise max_num_tokens"
            )
        return (num_rows,)

    def head(self, compute: Callable[[torch.Tensor], Any], rows: torch.Tensor, tokens: Any) -> Any:
        """vLLM's head of some rows of a step.

        Args:
            tokens: index of their token rows; None: rows that vLLM samples from. Its kernels know their adapters.
        """
        if self._manager is None or tokens is None:
            return compute(rows)
        before = self._manager._last_mapping
        told = tuple(np.array(before.index_mapping)[tokens].tolist())
        self._manager.set_adapter_mapping(replace(before, prompt_mapping=told))
        try:
            return compute(rows)
        finally:
            self._manager.set_adapter_mapping(before)


def keep_rows_plain(manager: Any) -> None:
    """Have rows without an adapter stay as they are on a CPU.

    vLLM's kernels there read their number, -1, as the last slot. It gets another last slot, which is empty.
    """
    for module in manager.modules.values():
        own = getattr(module, "lora_b_stacked", ())
        if isinstance(own, tuple):
            module.lora_b_stacked = tuple(map(_with_empty_slot, own))
        else:
            module.lora_b_stacked = _with_empty_slot(own)


def _with_empty_slot(slots: torch.Tensor) -> torch.Tensor:
    return torch.cat([slots, torch.zeros_like(slots[:1])])
