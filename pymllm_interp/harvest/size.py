"""Estimate of a harvest's size on disk, in bytes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, TypeGuard

import torch

from ..core.model_spec import LOGITS, ModelSpec
from ..hooks.captures.spec import Capture
from ..hooks.monitors.monitor import Monitor
from ..hooks.positions import Positions, windows_of
from ..hooks.site import Site, expand
from ..utils.arguments import PromptError
from .folder import INDEX
from .inputs import Settings, is_token_stream, length_of

SAMPLED_TEXTS = 64
"""Texts of a list that are tokenised to estimate the size of all."""


def has_index_per_site(specs: Sequence[Capture | Monitor]) -> bool:
    """Whether the captures and monitors select different positions."""
    places = {(repr(_positions_of(spec)), spec.reduction.name if _pools(spec) else None) for spec in specs}
    return len(places) > 1


def _pools(spec: Capture | Monitor) -> TypeGuard[Capture]:
    return isinstance(spec, Capture) and spec.reduction.pools


def expected_bytes(specs: Sequence[Capture | Monitor], model: ModelSpec, tokens: int) -> int:
    """Bytes in a shard of a document of `tokens` tokens. Raises ValueError: positions are beyond the document."""
    total, index = 0, 8 * len(INDEX)
    for number, spec in enumerate(specs):
        sites = expand(spec.site, model.num_hidden_layers, model.family)
        rows = sum(window.size or tokens for window in windows_of(_positions_of(spec), tokens, spec.missing))
        row = torch.float32.itemsize if isinstance(spec, Monitor) else _row_bytes(spec, sites[0], model)
        if _pools(spec):
            rows = min(rows, 1)
        indexes = len(sites) if has_index_per_site(specs) else int(number == 0)
        total += rows * (len(sites) * row + indexes * index)
    return total


def _row_bytes(spec: Capture, site: Site, model: ModelSpec) -> int:
    values = len(spec.heads) * model.head_dim if isinstance(spec.heads, tuple) else model.width(site.kind)
    asked = spec.dtype if isinstance(spec.dtype, torch.dtype) else None
    return values * (asked or model.dtype).itemsize if spec.reduction.of_states else spec.reduction.row_bytes(asked)


def estimated_bytes(
    inputs: Iterable[Any], settings: Settings, size_of: Callable[[int], int], tokens_of: Callable[[Any], list[int]]
) -> tuple[int, bool]:
    """(bytes of all documents, whether that is exact). (0, True) if the input has no known length.

    Args:
        size_of: tokens of a pass -> bytes, as `expected_bytes`.
        tokens_of: text -> token ids.

    Raises:
        ValueError: positions are beyond a document.
    """
    lengths, factor = _lengths(inputs, settings.max_length, tokens_of)
    total = sum(count * _document_bytes(length, settings, size_of) for length, count in lengths.items())
    return int(factor * total), factor == 1


def _positions_of(spec: Capture | Monitor) -> Positions:
    """The positions that a harvest captures: a pass without generation has logits only at its last position."""
    return (-1,) if spec.site == LOGITS and spec.positions == "all" else spec.positions


def _document_bytes(length: int, settings: Settings, size_of: Callable[[int], int]) -> int:
    longest = settings.max_length
    if length <= longest or settings.too_long != "split":
        return size_of(min(length, longest)) if length else 0
    return length // longest * size_of(longest) + (size_of(length % longest) if length % longest else 0)


def _lengths(
    inputs: Iterable[Any], max_length: int, tokens_of: Callable[[Any], list[int]]
) -> tuple[Counter[int], float]:
    """(number of documents by length, factor from these documents to all)."""
    if not isinstance(inputs, Sized) or not hasattr(inputs, "__getitem__") or not len(inputs):
        return Counter(), 1
    items: Any = inputs
    if is_token_stream(items):
        whole, rest = divmod(len(items), max_length)
        return Counter({max_length: whole, rest: int(rest > 0)}), 1
    if not isinstance(items[0], str):
        return Counter(map(length_of, items)), 1
    lengths = Counter()
    sample = range(0, len(items), -(-len(items) // SAMPLED_TEXTS))
    for number in sample:
        with contextlib.suppress(PromptError):
            lengths[len(tokens_of(items[number]))] += 1
    return lengths, len(items) / len(sample)
