"""Positions of a flat batch for transformers' modules that find them by themselves.

RoPE scalings that depend on the length of the sequence. The frequencies of a call in transformers follow from its largest position.
Here the module is called once for each length. Learned and sinusoidal positions: BART and its kin count from the length of the
cache. Here they get the positions of the pass. Inkling adds a bias to scores, by the distance of query and key. Here each token
has its bias at all distances, if a pass has several requests. Attention takes the biases of its keys.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.current_pass import current_batch
from ...core.model_spec import LENGTH_DEPENDENT_ROPE
from .cache_probe import probed_positions
from .parts.cache_names import CACHES, cache_parameter

CACHE_LENGTHS = {"cache_length", "past_key_values_length"}
"""Names of the parameter with the length of the cache, by which modules count positions without `position_ids`."""
BIAS_BY_DISTANCE = {"relative_states", "query_positions", "key_positions"}
"""Parameters of modules that make a bias of attention."""


def serve_positions(model: nn.Module) -> int:
    """Give the positions of the pass to the modules that count from the length of the cache.
    Returns number of reserved rows of a position table: RoBERTa and similar models start after the padding token's id."""
    unused = 0
    for module in model.modules():
        parameters = inspect.signature(type(module).forward).parameters
        if parameters.keys() >= BIAS_BY_DISTANCE and hasattr(module, "rel_extent"):
            module.forward = RelativeBias(module)  # pyright: ignore[reportAttributeAccessIssue]
        elif any(getattr(child, "rel_extent", None) for child in module.children()) and parameters.keys() & set(CACHES):
            module.register_forward_pre_hook(_with_offsets, with_kwargs=True)
        if "position_ids" not in parameters:
            continue
        padding = getattr(module, "padding_idx", None)
        if padding is not None and hasattr(module, "create_position_ids_from_inputs_embeds"):
            module.register_forward_pre_hook(_behind_padding, with_kwargs=True)
            unused = padding + 1
        elif parameters.keys() & CACHE_LENGTHS:
            module.register_forward_pre_hook(_with_positions, with_kwargs=True)
    return unused


def _behind_padding(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """RoBERTa and its kin count from the padding token's id, if they are not given positions."""
    return args, {**kwargs, "position_ids": kwargs["position_ids"] + module.padding_idx + 1}


def _with_positions(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    batch = current_batch()
    positions = probed_positions() if batch is None else batch.positions
    if positions is None:
        return None
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    counted = given.get("position_ids")
    return (), {**given, "position_ids": positions if counted is None else positions.view_as(counted)}


class _Offsets:
    """Cache for an attention that asks it for the positions of its queries."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:
        """Offsets added to the row numbers."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> Any:
        """The keys and values of the pass: the attention function writes them."""
        return key_states, value_states


def _with_offsets(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    batch = current_batch()
    positions = probed_positions() if batch is None else batch.positions
    if positions is None:
        return None
    name = cache_parameter(inspect.signature(type(module).forward).parameters)
    return args, {**kwargs, name: _Offsets(positions)}


class RelativeBias:
    """Replacement of a module that makes an attention bias by distance.

    In a pass of one request it gives [1, heads, tokens, keys], as transformers does. The keys of earlier passes are among them.
    Else it gives [1, 1, heads, tokens, extent]: the bias at each distance, the largest first. No dim of that is taken for the rows
    of a pass, so that a trace beside others is refused.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward: Any = module.forward
        self._module: Any = module

    def __call__(
        self, relative_states: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor
    ) -> torch.Tensor:
        batch, extent = current_batch(), self._module.rel_extent
        if batch is None and probed_positions() is None:
            return self._forward(relative_states, query_positions, key_positions)
        if batch is not None and batch.batch_size == 1:
            lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
            return self._forward(relative_states, query_positions, _numbers(int(lens[0]), query_positions))
        farthest = torch.full_like(query_positions, extent - 1)
        return self._forward(relative_states, farthest, _numbers(extent, query_positions)).unsqueeze(0)


class DistanceBias:
    """Replacement of a T5 attention's `compute_bias`, of a decoder's self-attention: a bias by distance.

    As `RelativeBias`, but of the positions that a pass has: all distances of its longest request.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._compute = module, module.compute_bias

    def __call__(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int = 0
    ) -> torch.Tensor:
        batch = current_batch()
        if batch is None:
            return self._compute(query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
        lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        longest = int(lens.max())
        if batch.batch_size == 1:
            rows = batch.num_request_tokens
            found = self._compute(rows, longest, device=device, past_seen_tokens=longest - rows)
            return F.pad(found, (0, 0, 0, query_length - rows))
        by_distance = self._compute(1, longest, device=device, past_seen_tokens=longest - 1)
        return by_distance.unsqueeze(0).expand(-1, -1, -1, query_length, -1)


def is_by_distance(module: nn.Module) -> bool:
    """Whether an attention's `position_bias` follows from distances only."""
    return isinstance(vars(module).get("compute_bias"), DistanceBias) or any(
        hasattr(child, "rel_extent") for child in module.children()
    )


def serve_distances(decoder: nn.Module) -> None:
    """Make T5's decoder layers see the positions of a pass's requests. The first layer's bias serves all."""
    for module in decoder.modules():
        if hasattr(module, "relative_attention_num_buckets"):
            module.compute_bias = DistanceBias(module)  # pyright: ignore[reportArgumentType]


def _numbers(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, device=like.device)


def serve_lengths(model: nn.Module) -> None:
    """Make the model's length-dependent rotations see the lengths of the pass's requests (`ForwardBatch.rope_lens`)."""
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else (kind,)  # by type of layer
        if any(each in LENGTH_DEPENDENT_ROPE for each in kinds):
            module.forward = _ByLength(module)  # pyright: ignore[reportAttributeAccessIssue]


class _ByLength:
    """The forward of a rotation. A module keeps frequencies of earlier calls, so each length starts from its first state."""

    def __init__(self, module: Any) -> None:
        self._module = copy.deepcopy(module)
        self._forward = self._module.forward
        self._attributes, self._buffers = dict(vars(self._module)), dict(self._module._buffers)

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = current_batch()
        if batch is None or batch.rope_lens is None:
            self._reset()
            return self._forward(x, position_ids, *args, **kwargs)
        lens, outs = batch.rope_lens[: position_ids.shape[1]], []
        rows_of = [(length, (lens == length).nonzero()[:, 0]) for length in lens.unique().tolist()]
        for length, rows in rows_of:
            self._reset()
            positions = torch.cat((position_ids[:, rows], position_ids.new_full((1, 1), max(length - 1, 0))), 1)
            outs.append([part[:, :-1] for part in self._forward(x, positions, *args, **kwargs)])
        order = torch.cat([rows for _, rows in rows_of]).argsort()
        cos, sin = (torch.cat(parts, 1)[:, order] for parts in zip(*outs, strict=True))
        return cos, sin

    def _reset(self) -> None:
        state = vars(self._module)
        state.clear()
        state.update(self._attributes, _buffers=dict(self._buffers))
