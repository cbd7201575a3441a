"""`KeptKV`: K and V of requests with cut edges or captured patterns. vLLM's own cache has layouts of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....attention.cut_edges import PassCuts
from ....core.model_spec import ModelSpec


class KeptKV:
    """K and V on rank 0, whole and rotated, beside vLLM's. It has the methods of a pass's KV pool that `PassCuts` calls.

    A position that is computed again, as after a preemption, is written again.

    Args:
        model, device: the model's spec and device.
    """

    def __init__(self, model: ModelSpec, device: torch.device) -> None:
        self._model, self._device = model, device
        self._kept: dict[str, torch.Tensor] = {}  # by vLLM's id: [2, layers, positions, kv_heads, head_dim]
        self._rows: list[
            tuple[torch.Tensor, int, int, int]
        ] = []  # memory, first row, first position and the one behind the last

    @torch.inference_mode(False)
    def begin(
        self, cuts: PassCuts | None, rows: Sequence[tuple[str, int, int, int]], longest: Callable[[str], int]
    ) -> None:  # fmt: skip
        """Place the requests of a pass.

        Args:
            cuts: cut edges and captured patterns in this pass.
            rows: (vLLM's id, first row, first position, number of rows) of requests that may cut edges.
            longest: the most positions of a request.
        """
        model, first, self._rows, places = self._model, 0, [], dict[int, torch.Tensor]()
        for vllm_id, row, start, count in rows:
            if vllm_id not in self._kept:
                shape = 2, model.num_hidden_layers, longest(vllm_id), model.num_key_value_heads, model.head_dim
                self._kept[vllm_id] = torch.empty(shape, dtype=model.dtype, device=self._device)
            stop = start + count
            self._rows.append((self._kept[vllm_id], row, start, stop))
            places[row] = torch.arange(first, first + stop, device=self._device)
            first += stop
        for request in cuts.requests if cuts is not None else ():
            request.place(places[request.first_row])

    def add(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep the rows of a pass: k and v [tokens, kv_heads, head_dim]."""
        for kept, row, start, stop in self._rows:
            rows = slice(row, row + stop - start)
            kept[0, layer, start:stop], kept[1, layer, start:stop] = k[rows], v[rows]

    def get_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [positions, kv_heads, head_dim] of the pass's requests, one behind the other."""
        k, v = (torch.cat([kept[i, layer, :stop] for kept, _, _, stop in self._rows]) for i in range(2))
        return k, v

    def scales(self, layer: int) -> tuple[float, float]:
        """Scales of K and V: none."""
        return 1.0, 1.0

    def forget(self, vllm_id: str) -> None:
        """vLLM has removed a request."""
        self._kept.pop(vllm_id, None)
        self._rows = []
