"""`PatchKV`: an intervention that replaces cached keys and values.

    PatchKV(5, positions=[3, 4], k=keys, v=values)  # [2, kv_heads, head_dim] each, as `lm.kv` returns them

All positions up to the last patched one are computed first, and a chunk of the prompt ends there. Tokens behind it attend to the
new K and V. The result equals transformers with an edited `past_key_values`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.forward_batch import PagedKV
from ...core.model_spec import KV, ModelSpec
from ...mem_cache.memory_pool import read_rows, write_rows
from ...utils.arguments import is_whole
from ..captures.kv_captures import check_kv
from ..heads import Heads, checked_heads
from ..positions import Positions, absolute_positions, checked_positions, selected, windows_of
from ..registry import op
from ..spec import PlacedSpec, Spec
from ..vectors.files import Source


@op
@dataclass(frozen=True, eq=False)
class PatchKV(PlacedSpec):
    """Replace cached keys, values or both at positions of the prompt, for the tokens behind the last of them.

    Args:
        layer: A layer; negative numbers count from the last one.
        positions: Positions of the prompt: "prompt", indexes, a mask, a range or a slice.
        k: Tensor [positions, heads, head_dim] or [positions, heads * head_dim]: keys as cached, after norm and rotation.
        v: Tensor of the same shape: values as cached. At least one of the two is given.
        heads: Key-value heads; None: all.

    Raises:
        ValueError: invalid positions or heads, no tensor, or one that is not finite.
    """

    layer: int
    positions: Positions
    k: Source = field(default=None, repr=False)
    v: Source = field(default=None, repr=False)
    heads: Heads = None
    missing = "error"

    def _set_place(self) -> None:
        self._check("layer", is_whole(self.layer), "a layer, counted from 0")
        try:
            self._set("positions", checked_positions(self.positions))
            self._set("heads", checked_heads(self.heads, "k"))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        if self.k is None and self.v is None:
            raise ValueError(f"{self.name}: give k=, v= or both")

    def _set_vectors(self, name: str, dims: tuple[int, ...] = (2, 3), rows: bool = False, **options: bool) -> None:
        if getattr(self, name) is not None:
            Spec._set_tensor(self, name, 2, 3)

    @property
    def site(self) -> str:
        """Site of its layer."""
        return f"{KV}.{self.layer}"


class KVPatch(NamedTuple):
    """A `PatchKV` in one model, for a prompt of one length."""

    layer: int
    positions: np.ndarray
    """[rows] int64, in the order of the rows."""
    heads: tuple[int, ...]
    rows: tuple[Tensor | None, Tensor | None]
    """New K and V, [rows, heads, head_dim] float32."""
    key: Any
    """Hashable, equal for patches that do the same."""

    @property
    def span(self) -> tuple[int, int]:
        """The first patched position, and the position behind the last one, where K and V are replaced."""
        return int(self.positions.min()), int(self.positions.max()) + 1

    def write(self, slots: Tensor, pool: PagedKV) -> None:
        """Replace the rows in the pool.

        Args:
            slots: [positions] KV slots of the request.
        """
        at, heads = slots[torch.from_numpy(self.positions).to(slots.device)].long(), list(self.heads)
        for new, stored, scale in zip(self.rows, pool.get_kv(self.layer), pool.scales(self.layer), strict=True):
            if new is not None:
                rows = read_rows(stored, at, torch.float32, scale)
                rows[:, heads] = new.to(rows.device)
                write_rows(stored, at, rows, scale)


def bind_kv_patches(specs: Iterable[PatchKV], model: ModelSpec, prompt_len: int) -> list[KVPatch]:
    """The patches of a request, in the order given.

    Raises:
        ValueError: an unknown layer or head, positions outside of the prompt, a tensor of another shape, or too large numbers.
        UnsupportedModelError: see `check_kv`.
    """
    return [_bound(spec, model, prompt_len) for spec in specs]


def _bound(spec: PatchKV, model: ModelSpec, prompt_len: int) -> KVPatch:
    check_kv(spec.name, model)
    layers, count = model.num_hidden_layers, model.num_key_value_heads
    if not -layers <= spec.layer < layers:
        raise ValueError(f"{spec.name}: layer={spec.layer}; the model has {layers} layers (num_hidden_layers)")
    listed: Any = range(count) if spec.heads is None else spec.heads
    heads: tuple[int, ...] = tuple(listed)
    wrong = [head for head in heads if not -count <= head < count]
    if wrong or len({head % count for head in heads}) < len(heads):
        raise ValueError(
            f"{spec.name}: heads={list(heads)}; the model has {count} (num_key_value_heads), each named once"
        )
    try:
        places: Any = spec.positions
        windows = windows_of(places, prompt_len)
        named = absolute_positions(tuple(places), prompt_len) if isinstance(places, tuple | range) else None
    except ValueError as error:
        raise ValueError(f"{spec.name}: {error}") from None
    if windows[-1].stop is None or windows[-1].stop > prompt_len:
        raise ValueError(f"{spec.name}: positions={spec.positions!r}; K and V are replaced at positions of the prompt")
    positions = np.array(named) if named is not None else np.flatnonzero(selected(windows, prompt_len))
    shape = len(positions), len(heads), model.head_dim
    limit, rows = torch.finfo(model.dtype).max, list[Tensor | None]()
    for name in ("k", "v"):
        given: Tensor | None = getattr(spec, name)
        if given is not None and tuple(given.shape) not in (shape, (shape[0], shape[1] * shape[2])):
            raise ValueError(
                f"{spec.name}: {name} has {list(given.shape)}; expected {list(shape)}: positions, "
                f"{'num_key_value_heads' if spec.heads is None else 'heads'}, head_dim"
            )
        if given is not None and given.abs().max() > limit:
            raise ValueError(f"{spec.name}: {name} has numbers that {model.dtype}, the model's dtype, cannot hold")
        rows.append(None if given is None else given.view(shape))
    key = spec.fingerprint, positions.tobytes()
    return KVPatch(spec.layer % layers, positions, tuple(head % count for head in heads), (rows[0], rows[1]), key)
