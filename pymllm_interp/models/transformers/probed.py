"""Results of a model's first pass: its attention calls, and whether its passes can be captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...core.unsupported import UnsupportedModelError

MAX_PROBED_POSITIONS = 1 << 17
"""Sliding windows beyond this many positions count as none."""


@dataclass
class AttentionCall:
    """One call of the attention function in the probe."""

    # fmt: off
    module:       nn.Module
    num_heads:    int
    num_kv_heads: int
    head_dims:    tuple[int, int]  # (queries and keys, values)
    scaling:      float
    softcap:      float | None
    window:       int | None
    eager:        bool
    chunk:        int | None = None  # a query sees the keys of its chunk of positions
    layer_idx:    int = 0            # layer index of the cache, without an attention function
    sinks:        nn.Parameter | None = None  # [heads], if the backend applies them
    takes:        str = ""           # "indices" of each query's keys, or "position_bias"
    both_ways:    bool = False       # a query sees later keys, too
    # fmt: on


@dataclass
class ProbedModel:
    """A model's first pass.

    Attributes:
        calls: calls of the attention function, in order.
        states: values at the ends of sites, by (path, end): tensors [1, tokens, width].
        logits: [1, tokens, vocab].
        cached: the family computes attention itself, over the values of its cache.
        reads_rules: evaluate the rules of masks.
        both_ways: queries see later keys, too.
        waits: operations of a pass for which the host waits for the device.
    """

    context_len: int
    cached: bool = False
    reads_rules: bool = True
    both_ways: bool = False
    calls: list[AttentionCall] = field(default_factory=list)
    states: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    waits: list[str] = field(default_factory=list)

    @property
    def is_indexed(self) -> bool:
        """Whether indexers select the keys of queries."""
        return any(call.takes == "indices" for call in self.calls)

    @property
    def why_no_graphs(self) -> str | None:
        """Reason that passes cannot be captured in CUDA graphs, or None."""
        if self.cached:
            return "its modules compute attention over the lengths in the batch"
        if any(call.chunk is not None for call in self.calls):
            return "its attention is chunked, and runs request by request"
        takes = next((call.takes for call in self.calls if call.takes), "")
        if takes:
            return f"its attention takes {takes}, and gathers keys over the lengths in the batch"
        if any(call.eager for call in self.calls):
            return "its attention has sinks that are no parameter, and runs request by request"
        return f"a pass {' and '.join(self.waits)}" if self.waits else None

    def reach_of(self, rule: Callable[..., Any], device: torch.device) -> int | None:
        """Positions that a mask rule lets a query see on each side; None: all. Raises UnsupportedModelError: another rule."""
        n = min(self.context_len, MAX_PROBED_POSITIONS)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        keys = torch.arange(n, device=device)
        found = set[Any]()
        for query in (n // 2, n // 3):
            allowed = torch.as_tensor(rule(zero, zero, torch.tensor(query, device=device), keys), device=device).expand(
                n
            )
            if bool(allowed.all()):
                found.add(None)
                continue
            reach = query - int(allowed.nonzero()[0, 0])
            if not torch.equal(allowed.cpu(), ((keys - query).abs() <= reach).cpu()):
                raise UnsupportedModelError("its attention is neither of all positions nor of a window around each")
            found.add(reach)
        if len(found) > 1:
            raise UnsupportedModelError("the windows of its attention differ by position")
        return found.pop()

    def pattern_of(self, rule: Callable[..., Any], device: torch.device) -> tuple[int | None, int | None]:
        """(sliding window, chunk) of a mask rule, None for neither.
        Raises UnsupportedModelError: it is neither causal, nor has a sliding window, nor is chunked."""
        if not self.reads_rules:
            return None, None
        n = min(self.context_len, MAX_PROBED_POSITIONS)
        zero, keys = torch.zeros((), dtype=torch.int64, device=device), torch.arange(n, device=device)
        counts: list[tuple[int, int]] = []
        for query in sorted({n - 1, max(n - 2, 0), n // 2, n // 3}):
            allowed = rule(zero, zero, torch.tensor(query, device=device), keys)
            seen = torch.as_tensor(allowed, device=device).expand(n).nonzero()[:, 0].tolist()
            if not seen or seen[-1] != query or len(seen) != query - seen[0] + 1:
                raise UnsupportedModelError("its attention is not causal over consecutive positions")
            counts.append((query, len(seen)))
        if all(count == query + 1 for query, count in counts):
            return None, None
        window = max(count for _, count in counts)
        if all(count == min(query + 1, window) for query, count in counts):
            return window, None
        chunk = int(
            torch.as_tensor(rule(zero, zero, keys, zero), device=device).expand(n).sum()
        )  # that see the first key
        if any(count != query % chunk + 1 for query, count in counts):
            raise UnsupportedModelError("its attention is neither causal, nor has a sliding window, nor is chunked")
        return None, chunk
