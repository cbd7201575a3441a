"""Properties of a transformers model's attention, found in a short pass: heads, scaling, windows, soft caps, sinks.

The pass runs with an attention function and a mask function that record their arguments. A mask function in transformers gets the
rule that says which keys a query sees. The rule is evaluated at a few queries. It must be causal, with or without a sliding window,
or chunked. A family without an attention function is probed through its cache (models/transformers/cache_probe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ...attention.attention_backend import RadixAttention
from ...core.families import Family
from ...core.model_spec import ModelSpec
from ...core.unsupported import UnsupportedModelError
from .attention_interface import PagedCall, PagedCalls
from .cache_probe import FAILURES, ProbeCache, differ, mixed_requests_differ, recording_modules, run_flat
from .cache_route import CACHED
from .encoder_decoder.cross_attention import cross_layer_of
from .position_rules import is_by_distance
from .probed import AttentionCall, ProbedModel
from .recurrent import as_decoding

PROBE, PROBE_DECODE = "pymllm_interp_probe", "pymllm_interp_probe_decode"
"""Attention functions of a probe. The second one has no mask function, so that models make no masks."""
PROBE_TOKENS = 4
TAKEN = ("indices", "position_bias")
"""Arguments of attention functions that change which keys a query sees, or their scores, by the token."""


class _ProbeOfThread(local):
    probe: ProbedModel | None = None


_recording = _ProbeOfThread()


def probe(model: PreTrainedModel, family: Family, spec: ModelSpec, has_states: bool = False) -> ProbedModel:
    """Run `model` over a few tokens, on its own device: with an attention function, or else with a cache.

    Args:
        spec: spec according to the config.
        has_states: the model has modules with a recurrent state, which run request by request. It may have no attention.

    Raises:
        UnsupportedModelError: its attention cannot run over the KV pool.
    """
    problem = "its attention goes neither through transformers' attention interface nor through its cache"
    for cached in (False, True):
        found = ProbedModel(spec.context_len, cached, both_ways=spec.bidirectional)
        use_attention(model, CACHED if cached else PROBE)
        try:
            with torch.no_grad():
                backwards = _both_ways(model, family, found, spec.num_attention_heads, has_states)
            is_served = bool(found.calls) or (has_states and not cached)
            if is_served and differ(found.logits, backwards.flip(1)):
                problem = (
                    "a token's state depends on other tokens outside of attention (recurrent layers, convolutions), or on its "
                    "place in the batch"
                )
            elif is_served and not (cached and mixed_requests_differ(model, use_attention)):
                return found
            elif found.calls:
                problem = "attention through its cache gives a batch of requests other results than each alone"
        except UnsupportedModelError as error:
            problem = str(error)
            break
        except FAILURES as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            problem = f"a pass over a flat batch failed in its own code ({type(error).__name__}: {error})"
        if found.calls:
            break
    raise UnsupportedModelError(f"{type(model).__name__} cannot be served: {problem}")


def _both_ways(
    model: PreTrainedModel, family: Family, found: ProbedModel, num_heads: int, has_states: bool
) -> torch.Tensor:
    """Fill `found` by a pass over a few tokens. Returns the logits of the same tokens in the opposite order."""
    positions = list(range(PROBE_TOKENS))
    with _recorded(model, family, found.states):
        found.logits = _run(model, found, positions, num_heads)
    again = ProbedModel(found.context_len, found.cached, reads_rules=False, both_ways=found.both_ways)
    with WaitsForDevice() as waits:
        logits = _run(model, again, positions[::-1], num_heads)
    if (
        has_states and not found.cached
    ):  # a decode pass begins with states, and runs other code than a prompt's first chunk
        use_attention(model, PROBE_DECODE)
        with as_decoding(), WaitsForDevice() as waits:
            _run(model, again, positions, num_heads, with_mask=False)
    found.waits = list(waits.found)
    return logits


def _run(
    model: PreTrainedModel, found: ProbedModel, positions: list[int], num_heads: int, with_mask: bool = True
) -> torch.Tensor:
    """The logits [1, tokens, vocab] of tokens at these positions, each a function of its own token and position.

    Each token is a separate request: attention returns the token's own values. So the order of the tokens must not matter.
    """
    at = torch.tensor(positions, device=next(model.parameters()).device)
    ids = (at[None] + 3) % model.config.get_text_config().vocab_size
    _recording.probe = found
    try:
        if not found.cached:
            return run_flat(model, ids, at, with_mask=with_mask)
        with recording_modules(model) as modules:
            cache = ProbeCache(at, lambda *call: _record_update(found, modules[-1], num_heads, *call))
            with cache.serve():
                return run_flat(model, ids, at, cache)
    finally:
        _recording.probe = None


def _record_update(
    found: ProbedModel,
    module: nn.Module,
    num_heads: int,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_idx: int,
    rule: Any,
) -> None:
    """Record a module's update of the cache. `rule` is that of the last mask; None if the model asked for none."""
    if rule is None:
        raise UnsupportedModelError("it makes attention masks of its own")
    window, chunk = found.pattern_of(rule, key.device)
    dims, num_kv_heads = (key.shape[-1], value.shape[-1]), key.shape[1]
    scaling = key.shape[-1] ** -0.5
    found.calls.append(
        AttentionCall(module, num_heads, num_kv_heads, dims, scaling, None, window, True, chunk, layer_idx)
    )


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """The configs that the model's modules look up their attention implementation in, each once."""
    found = [getattr(module, "config", None) for module in model.modules()]
    found += [model.config, model.config.get_text_config()]
    return list({id(config): config for config in found if hasattr(config, "_attn_implementation_internal")}.values())


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Make every module of the model use the attention function `name`.

    The attribute behind the setter: some classes refuse the setter, and obey the attribute.
    """
    for config in attention_configs(model):
        config._attn_implementation_internal = name


def set_paged_calls(found: ProbedModel, spec: ModelSpec) -> list[RadixAttention]:
    """Give each attention module its `paged_calls`, and return the attention layers of a pass, in order."""
    by_module: dict[nn.Module, list[PagedCall]] = {}
    layers = []
    for i, call in enumerate(found.calls):
        layer = RadixAttention(
            i, call.num_heads, spec.num_key_value_heads, spec.head_dim, call.scaling, call.window, call.softcap or None,
            None if call.sinks is None else call.sinks.detach(),
        )  # fmt: skip
        layers.append(layer)
        copies = spec.num_key_value_heads // call.num_kv_heads
        by_module.setdefault(call.module, []).append(PagedCall(layer, call.eager, call.chunk, copies, call.both_ways))
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
    if cross_layer_of(module) is not None:
        return torch.zeros_like(query).transpose(1, 2).contiguous(), None
    takes = next((name for name in TAKEN if kwargs.get(name) is not None), "")
    if takes == "position_bias" and not is_by_distance(module):
        raise UnsupportedModelError("its attention takes position_bias")
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError("its attention reads keys of other tokens than its own")
    rule, chunk = getattr(attention_mask, "mask_rule", None), None
    if found.both_ways:
        window = found.reach_of(rule, query.device) if rule is not None and found.reads_rules else None
    elif rule is not None:
        window, chunk = found.pattern_of(rule, query.device)
    elif attention_mask is not None:
        raise UnsupportedModelError("it makes attention masks of its own")
    elif getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError("its attention is not causal")
    else:
        window = sliding_window
    dims, sinks = (query.shape[-1], value.shape[-1]), kwargs.get("s_aux")
    paged = isinstance(sinks, nn.Parameter) and sinks.shape == query.shape[1:2]
    found.calls.append(
        AttentionCall(
            module, query.shape[1], key.shape[1], dims, query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap, window, chunk is not None or (sinks is not None and not paged) or bool(takes), chunk,
            sinks=sinks if paged else None, takes=takes, both_ways=found.both_ways,
        )
    )  # fmt: skip
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None


@contextmanager
def _recorded(model: nn.Module, family: Family, states: dict[tuple[str, str], torch.Tensor]) -> Iterator[None]:
    """Record the ends of the first layer's sites, and of those without layers. A module that runs twice has no site."""
    modules, handles, ran = dict(model.named_modules()), [], set[str]()

    def hook(path: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if path in ran:
                for end in ("input", "output"):
                    states.pop((path, end), None)
                return
            ran.add(path)
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
AttentionInterface.register(PROBE_DECODE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)


aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default: "reads a number off the device",
    aten.nonzero.default: "looks for entries that are not 0",
    aten.masked_select.default: "selects by a mask",
    aten._unique2.default: "looks for distinct values",
    aten.repeat_interleave.Tensor: "repeats by numbers on the device",
    aten.bincount.default: "counts by values on the device",
}
"""Operation -> description of its effect on a pass."""
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class WaitsForDevice(TorchDispatchMode):
    """Record of operations for which the host waits for the device.

    Attributes:
        found: descriptions of the operations, without duplicates.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in WAITING:
            self.found[WAITING[func]] = None
        elif func in INDEXING and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self.found["indexes by a mask"] = None
        return func(*args, **(kwargs or {}))
