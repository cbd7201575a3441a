"""`KeptKV`: K and V of requests with cut edges or captured patterns. vLLM's own cache has layouts of its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ....attention.cut_edges import PassCuts
from ....core.model_spec import ModelSpec

LEAST = 256
"""Positions that a request's memory begins with."""
SPARE = 1 << 30
"""Bytes of a CUDA device that are left to vLLM's passes: a rank without memory for one ends."""


class KeptKV:
    """K and V on rank 0, whole and rotated, beside vLLM's.

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
    ) -> list[str]:  # fmt: skip
        """Place the requests of a pass.

        Args:
            cuts: cut edges and captured patterns in this pass.
            rows: (vLLM's id, first row, first position, number of rows) of requests that may cut edges.
            longest: the most positions of a request.

        Returns:
            requests without memory. They leave `cuts`, and are to fail: the pass is one of others, too.
        """
        first, self._rows, places, lost = 0, [], dict[int, torch.Tensor](), list[str]()
        for vllm_id, row, start, count in rows:
            stop = start + count
            try:
                kept = self._memory_of(vllm_id, stop, longest(vllm_id))
            except RuntimeError:  # torch.OutOfMemoryError, and its like on a CPU
                lost.append(vllm_id)
                continue
            self._rows.append((kept, row, start, stop))
            places[row] = torch.arange(first, first + stop, device=self._device)
            first += stop
        if cuts is not None:
            cuts.requests[:] = [request for request in cuts.requests if request.first_row in places]
            for request in cuts.requests:
                request.place(places[request.first_row])
        return lost

    def _memory_of(self, vllm_id: str, stop: int, longest: int) -> torch.Tensor:
        """Memory of a request for at least `stop` positions. It grows: most requests end long before max_tokens."""
        kept, model = self._kept.get(vllm_id), self._model
        if kept is None or kept.shape[2] < stop:
            size = max(stop, min(longest, LEAST if kept is None else 2 * kept.shape[2]))
            shape = 2, model.num_hidden_layers, size, model.num_key_value_heads, model.head_dim
            self._check_room(math.prod(shape) * model.dtype.itemsize)
            found = torch.empty(shape, dtype=model.dtype, device=self._device)
            if kept is not None:
                found[:, :, : kept.shape[2]] = kept
            self._kept[vllm_id] = kept = found
        return kept

    def _check_room(self, num_bytes: int) -> None:
        """Raise torch.OutOfMemoryError if less than `SPARE` would be left."""
        if self._device.type == "cuda":
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            if torch.cuda.mem_get_info(self._device)[0] + unused - num_bytes < SPARE:
                raise torch.OutOfMemoryError(f"{num_bytes} bytes of K and V leave less than {SPARE}")

    def add(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep the rows of a pass: k and v [tokens, kv_heads, head_dim]."""
        for kept, row, start, stop in self._rows:
            rows = slice(row, row + stop - start)
            kept[0, layer, start:stop], kept[1, layer, start:stop] = k[rows], v[rows]

    def get_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [positions, kv_heads, head_dim] of the pass's requests, one behind the other."""
        k, v = (torch.cat([kept[i, layer, :stop] for kept, _, _, stop in self._rows]) for i in range(2))
        return k, v

    def forget(self, vllm_id: str) -> None:
        """vLLM has removed a request."""
        self._kept.pop(vllm_id, None)
        self._rows = []
