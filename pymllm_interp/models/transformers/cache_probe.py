"""Probes families with an attention that reads keys and values from the cache it updates (models/transformers/cache_route.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .cache_route import CACHED, CacheRows, RequestsCache
from .parts.cache_names import cache_parameter

CHECKED: tuple[int, ...] = (3, 2)
"""Tokens of the requests that are run together and one by one."""


FAILURES = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of a family's code for an unexpected flat batch."""


class _Flat(local):
    positions: torch.Tensor | None = None


_flat = _Flat()


class ProbeCache(RequestsCache):
    """Each token is a separate request.

    Args:
        positions: [tokens] of the tokens.
        record: called with key, value, layer index and mask rule of each update.
    """

    def __init__(self, positions: torch.Tensor, record: Callable[..., None]) -> None:
        rows = CacheRows(torch.arange(len(positions), device=positions.device), positions)
        super().__init__(rows, rows)
        self._record = record

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self._record(key_states, value_states, layer_idx, self.rule)
        return key_states, value_states

    def padding_mask(self) -> torch.Tensor:
        return torch.ones_like(self.keys.positions)[None]


def updates_of(model: PreTrainedModel, use_attention: Callable[[PreTrainedModel, str], None]) -> list[tuple[int, ...]]:
    """(layer index, kv heads, head sizes of keys and of values) of each update of the cache. They are read in a pass with eager
    attention.

    Empty where such a pass fails.
    """
    found: list[tuple[int, ...]] = []

    def record(key: torch.Tensor, value: torch.Tensor, layer_idx: int, rule: Any) -> None:
        found.append((layer_idx, key.shape[1], key.shape[-1], value.shape[-1]))

    device = next(model.parameters()).device
    positions = torch.arange(CHECKED[0], device=device)
    use_attention(model, "eager")
    try:
        with torch.no_grad():
            run_flat(model, positions[None], positions, ProbeCache(positions, record))
    except FAILURES:  # its attention runs request by request then
        return []
    return found


@contextmanager
def recording_modules(model: nn.Module) -> Iterator[list[nn.Module]]:
    """List of the modules with a forward in progress, the innermost last."""
    running: list[nn.Module] = []
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda module, args: running.append(module)))
        handles.append(module.register_forward_hook(lambda module, args, output: _left(running), always_call=True))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _left(running: list[nn.Module]) -> None:
    running.pop()


def mixed_requests_differ(model: PreTrainedModel, use_attention: Callable[[PreTrainedModel, str], None]) -> bool:
    """Whether two requests in one pass get other logits than in passes of the family's own."""
    device = next(model.parameters()).device
    lens, vocab = list(CHECKED), model.config.get_text_config().vocab_size
    ids = torch.arange(sum(lens), device=device)[None] * 7 % vocab
    rows = CacheRows.of(lens, [0] * len(lens), device)
    cache = RequestsCache(rows, rows)
    with torch.no_grad():
        with cache.serve():
            mixed = run_flat(model, ids, rows.positions, cache)
        use_attention(model, "eager")
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(lens, 1)], 1)
        use_attention(model, CACHED)
    return differ(mixed, alone)


def run_flat(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: RequestsCache | None = None,
    with_mask: bool = True,
) -> torch.Tensor:
    """The logits [1, tokens, vocab] of ids [1, tokens] at positions [tokens].

    Args:
        with_mask: give it a mask of the padding, if it has no cache.
    """
    arguments: dict[str, Any] = {"input_ids": ids, "position_ids": positions[None]}
    takes = inspect.signature(type(model).forward).parameters
    if cache is None:
        arguments["attention_mask"] = torch.ones_like(ids) if with_mask else None
    else:
        arguments["attention_mask"] = cache.padding_mask()
        arguments[cache_parameter(takes)] = cache
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    _flat.positions = positions
    try:
        outputs: Any = model(
            **{name: value for name, value in arguments.items() if any_name or name in takes}, use_cache=False
        )
    finally:
        _flat.positions = None
    return outputs.logits


def probed_positions() -> torch.Tensor | None:
    """The positions [tokens] of the probe that runs on this thread; None outside of one."""
    return _flat.positions


def differ(logits: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether two results differ by more than rounding."""
    tolerance = 1e-3 if logits.dtype is torch.float32 else 5e-2
    return bool((logits - others).abs().max() > tolerance * logits.abs().max())
