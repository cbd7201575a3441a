"""Indexers of sparse attention: modules of transformers that select the keys that each query attends to (DeepSeek-V3.2's DSA).

An indexer keeps a key for each position, and scores a request's queries against them. The pass is flat. So `IndexerModule`
replaces its forward. It runs the module for all requests with one row as one batch, and once for each other request. The
results are positions, for `attention_interface.paged_attention`.

Its keys are in the KV pool, behind the attention layers. A layer there holds the keys of several indexers. So they are written,
reused, copied and swapped with K and V.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...core.forward_batch import ForwardBatch
from ...core.unsupported import UnsupportedModelError
from ...mem_cache.memory_pool import read_rows, write_rows
from .parts.cache_names import cache_parameter
from .parts.rows import CallRows, taken
from .recurrent import PartModule

NO_KEY = -1
"""Padding position, if a query selects fewer keys."""


class KeyPlace(NamedTuple):
    """Location of an indexer's keys: channels of K or V in a layer of the KV pool."""

    layer: int
    half: int
    first: int
    width: int

    def of(self, batch: ForwardBatch) -> torch.Tensor:
        """The pool's own memory [slots, width]."""
        assert batch.token_to_kv_pool is not None, "prepare_forward_batch_* sets the pools"
        rows = batch.token_to_kv_pool.get_kv(self.layer)[self.half].flatten(1)
        return rows[:, self.first : self.first + self.width]


class _IndexCache:
    """Cache of an indexer. `update` takes its keys [batch, tokens, width], and returns the keys to score."""

    def __init__(self, update: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._update = update

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return self._update(indexer_key_states)


class IndexerModule(PartModule):
    """Replacement of an indexer's forward.

    Attributes:
        width: width of a key, known after a first pass.
        place: location of its keys, set by `place_keys`.
    """

    why = "selects keys"

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(path, module)
        self.width = 0
        self.place: KeyPlace | None = None

    def _keeps(self, batch: ForwardBatch) -> bool:
        return batch.token_to_kv_pool is not None and not batch.fresh_kv_only

    def _call(self, given: dict[str, Any], rows: int, part: CallRows, batch: ForwardBatch) -> torch.Tensor:
        own = {name: taken(value, rows, part) for name, value in given.items()}
        if not self._keeps(batch):
            size = own[self._names[0]].shape[1]
            visible = torch.ones(1, size, size, dtype=torch.bool, device=batch.input_ids.device).tril()
            return self._select(own, visible, lambda keys: keys)
        slots, visible = _keys_of(batch, part)

        def update(keys: torch.Tensor) -> torch.Tensor:
            assert self.place is not None, "place_keys"
            stored = self.place.of(batch)
            write_rows(stored, batch.out_cache_loc[part.rows], keys.flatten(0, 1))
            return read_rows(stored, slots.flatten(), keys.dtype).view(*slots.shape, -1)

        return self._select(own, visible, update)

    def _select(
        self, given: dict[str, Any], visible: torch.Tensor, update: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The positions of the selected keys, [batch, tokens, index_topk] int32.

        Args:
            visible: [batch, tokens, keys] bool: which keys a query may select.
        """
        cache = cache_parameter(self._names)
        found = self._forward(**given | {"attention_mask": visible, cache: _IndexCache(update)})
        # A query with few keys before it gets others, too: any, which the mask of attention would hide.
        found = found.masked_fill(~visible.gather(-1, found.long()), NO_KEY)
        most: Any = self._module.index_topk  # requests of a pass have equal widths, whatever the length of the others
        return F.pad(found, (0, most - found.shape[-1]), value=NO_KEY)

    def _probe(self, given: dict[str, Any], rows: int) -> torch.Tensor:
        every = CallRows(slice(0, rows), slice(0, rows), False, True)
        own = {name: taken(value, rows, every) for name, value in given.items()}
        visible = torch.ones(rows, 1, 1, dtype=torch.bool, device=own[self._names[0]].device)
        return self._select(own, visible, self._record).transpose(0, 1)

    def _record(self, keys: torch.Tensor) -> torch.Tensor:
        self.width = keys.shape[-1]
        return keys


def _keys_of(batch: ForwardBatch, part: CallRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots [batch, keys] of a part's requests, and which keys each row sees, [batch, rows, keys] bool."""
    assert batch.req_to_token_pool is not None and batch.positions is not None, "prepare_forward_batch_* sets them"
    lens = (batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu).tolist()
    if part.batched:
        longest = max(length for length, (_, size) in zip(lens, batch.batch_groups, strict=False) if size == 1)
    else:
        assert isinstance(part.requests, slice)
        longest = lens[part.requests.start]
    table = batch.req_to_token_pool.req_to_token[batch.req_pool_indices[part.requests], :longest]
    positions = batch.positions[part.rows]
    visible = torch.arange(longest, device=positions.device) <= positions[:, None]
    return table.to(torch.int64), visible.unsqueeze(1 if part.batched else 0)


def serve_indexers(model: nn.Module) -> list[IndexerModule]:
    """Put an `IndexerModule` in place of the forward of each indexer."""
    found = []
    for path, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        names = getattr(forward, "__code__", serve_indexers.__code__).co_names
        if "update_indexer" in names and hasattr(module, "index_topk") and "forward" not in vars(module):
            found.append(own := IndexerModule(path, module))
            module.forward = own  # pyright: ignore[reportAttributeAccessIssue]
            vars(module)["part_module"] = own  # traces wrap `forward`
    return found


def place_keys(name: str, indexers: list[IndexerModule], first_layer: int, width: int) -> int:
    """Give each indexer a place for its keys, once a first pass has run them.

    Args:
        name: name of the model's class.
        first_layer: first free layer of the KV pool, after the attention layers.
        width: values of K, and of V, in a slot of a layer.

    Returns:
        the layers that are needed.

    Raises:
        UnsupportedModelError: a key is wider than that.
    """
    half, used = 0, 0
    for indexer in indexers:
        if indexer.width > width:
            raise UnsupportedModelError(
                f"{name} cannot be served: a key of {indexer.path} has {indexer.width} values, and K of a token {width}"
            )
        if used + indexer.width > width:
            half, used = half + 1, 0
        indexer.place = KeyPlace(first_layer + half // 2, half % 2, used, indexer.width)
        used += indexer.width
    return half // 2 + 1 if indexers else 0
