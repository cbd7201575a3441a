"""What a transformers model's attention is, read off one short pass: heads, scaling, windows, soft-caps, sinks.

The pass runs with an attention function and a mask function that record their arguments. A mask function in transformers gets
the rule that says which keys a query sees; the rule is evaluated at a few queries, and must be causal, with or without a
sliding window.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import local
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..attention.attention_backend import RadixAttention
from ..core.families import Family
from ..core.unsupported import UnsupportedModelError
from .attention_interface import PagedCall, PagedCalls

PROBE = "pymllm_interp_probe"
PROBE_TOKENS = 4
MAX_PROBED_POSITIONS = 1 << 17
"""Sliding windows beyond this many positions count as none."""
NOT_SERVED = ("position_bias", "indices")
"""Arguments of attention functions that change which keys a query sees, or their scores, by the token."""


class _Recording(local):
    probe: Probe | None = None


_recording = _Recording()


@dataclass
class AttentionCall:
    """One call of the attention function in the probe."""

    # fmt: off
    module:       nn.Module
    num_heads:    int
    num_kv_heads: int
    head_dims:    tuple[int, int]  # of queries and keys, of values
    scaling:      float
    softcap:      float | None
    window:       int | None
    eager:        bool
    # fmt: on


@dataclass
class Probe:
    """A model's first pass.

    Attributes:
        calls: of the attention function, in order.
        states: what modules at the ends of sites hold, by (path, end): tensors [1, tokens, width].
        logits: [1, tokens, vocab].
        positions: [tokens], of the tokens.
    """

    context_len: int
    calls: list[AttentionCall] = field(default_factory=list)
    states: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    positions: torch.Tensor | None = None

    def window_of(self, rule: Callable[..., Any], device: torch.device) -> int | None:
        """The sliding window of a mask rule, None for a causal one.

        Raises:
            UnsupportedModelError: it is neither.
        """
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
            return None
        window = max(count for _, count in counts)
        if any(count != min(query + 1, window) for query, count in counts):
            raise UnsupportedModelError("its attention is chunked, neither causal nor with a sliding window")
        return window


def probe(model: PreTrainedModel, family: Family, context_len: int) -> Probe:
    """Run `model` over a few tokens, on its own device.

    Raises:
        UnsupportedModelError: its attention does not go through transformers' attention interface, or cannot be served.
    """
    found = Probe(context_len)
    use_attention(model, PROBE)
    try:
        with torch.no_grad():
            with _recorded(model, family, found.states):
                found.logits = _run(model, found, list(range(PROBE_TOKENS)))
            again = Probe(context_len)
            backwards = _run(model, again, list(range(PROBE_TOKENS))[::-1])
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be served: {error}") from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served: a pass over a flat batch failed in its own code "
            f"({type(error).__name__}: {error})"
        ) from error
    if not found.calls:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served: its attention does not go through transformers' attention interface"
        )
    if _differ(found.logits, backwards.flip(1)):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served: a token's state depends on other tokens outside of attention (recurrent "
            "layers, convolutions), or on its place in the batch"
        )
    return found


def _run(model: PreTrainedModel, found: Probe, positions: list[int]) -> torch.Tensor:
    """The logits [1, tokens, vocab] of tokens at these positions, each a function of its own token and position.

    Attention is not computed in a probe: it returns each token's own values. So the order of the tokens must not matter.
    """
    device = next(model.parameters()).device
    found.positions = torch.tensor(positions, device=device)
    ids = (found.positions[None] + 3) % model.config.get_text_config().vocab_size
    arguments = {"input_ids": ids, "position_ids": found.positions[None], "attention_mask": torch.ones_like(ids)}
    takes = inspect.signature(type(model).forward).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    _recording.probe = found
    try:
        outputs: Any = model(**{k: v for k, v in arguments.items() if any_name or k in takes}, use_cache=False)
    finally:
        _recording.probe = None
    return outputs.logits


def _differ(logits: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether two results differ by more than rounding."""
    tolerance = 1e-3 if logits.dtype is torch.float32 else 5e-2
    return bool((logits - others).abs().max() > tolerance * logits.abs().max())


def probed_positions() -> torch.Tensor | None:
    """The positions [tokens] of the probe that runs on this thread; None outside of one."""
    return None if _recording.probe is None else _recording.probe.positions


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Make every module of the model use the attention function `name`.

    The attribute behind the setter: some classes refuse the setter, and obey the attribute.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name
    for config in (model.config, model.config.get_text_config()):
        config._attn_implementation_internal = name


def set_paged_calls(found: Probe, head_dim: int) -> list[RadixAttention]:
    """Give each attention module its `paged_calls`, and return the attention layers of a pass, in order.

    Args:
        head_dim: of the KV pool, the largest in the model.
    """
    by_module: dict[nn.Module, list[PagedCall]] = {}
    layers = []
    for i, call in enumerate(found.calls):
        layer = RadixAttention(
            i, call.num_heads, call.num_kv_heads, head_dim, call.scaling, call.window, call.softcap or None
        )
        layers.append(layer)
        by_module.setdefault(call.module, []).append(PagedCall(layer, call.eager))
    for module, calls in by_module.items():
        module.paged_calls = PagedCalls(calls)  # pyright: ignore[reportArgumentType]
    return layers


class _Rule:
    """Carries a mask rule to the attention function, in place of a mask."""

    def __init__(self, tensor: torch.Tensor, rule: Callable[..., Any]) -> None:
        tensor.mask_rule = rule  # pyright: ignore[reportAttributeAccessIssue]
        self.tensor = tensor


def _probe_mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> torch.Tensor:
    device = kwargs.get("device") or "cpu"
    return _Rule(torch.zeros(1, 1, 1, 1, device=device), mask_function).tensor


def _probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    found = _recording.probe
    assert found is not None, "a probe calls it"
    wrong = [name for name in NOT_SERVED if kwargs.get(name) is not None]
    if wrong:
        raise UnsupportedModelError(f"its attention takes {', '.join(wrong)}")
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError("its attention reads keys that are not those of its tokens")
    rule = getattr(attention_mask, "mask_rule", None)
    if rule is not None:
        window = found.window_of(rule, query.device)
    elif attention_mask is not None:
        raise UnsupportedModelError("it makes attention masks of its own")
    elif getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError("its attention is not causal")
    else:
        window = sliding_window
    dims = query.shape[-1], value.shape[-1]
    found.calls.append(
        AttentionCall(
            module, query.shape[1], key.shape[1], dims, query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap, window, kwargs.get("s_aux") is not None,
        )
    )  # fmt: skip
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None


@contextmanager
def _recorded(model: nn.Module, family: Family, states: dict[tuple[str, str], torch.Tensor]) -> Iterator[None]:
    """Record the ends of the first layer's sites, and of those without layers."""
    modules, handles = dict(model.named_modules()), []

    def hook(path: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            states[path, "input"] = first_tensor((*args, *kwargs.values())).clone()
            states[path, "output"] = first_tensor(output).clone()

        return record

    for path in {point.module.format(0) for point in family.points.values()}:
        if path in modules:
            handles.append(modules[path].register_forward_hook(hook(path), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(value: Any) -> torch.Tensor:
    """The first tensor of a module's arguments or output."""
    if isinstance(value, torch.Tensor):
        return value
    return next(part for part in value if isinstance(part, torch.Tensor))


AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
