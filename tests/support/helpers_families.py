"""Where the sites of a transformers model are, and what a pass of transformers holds there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pymllm_interp.core.model_spec import NUMBERED_SITES, ModelSpec, SitePoint


def first(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def points_of(spec: ModelSpec) -> dict[str, SitePoint]:
    """Every site with a number, but for the logits, and for `resid_pre` behind the first layer, which is a `resid_post`."""
    found = {}
    for kind, (module, end) in spec.family.points.items():
        if kind in NUMBERED_SITES and kind not in ("logits", "experts"):  # the chosen experts are no state of a module
            first = spec.family.first_layer(kind)
            layers = range(first, spec.num_hidden_layers) if "{}" in module else [None]
            for layer in layers:
                found[kind if layer is None else f"{kind}.{layer}"] = SitePoint(module.format(layer), end)
    return found


def states_of(
    model: nn.Module, points: dict[Any, SitePoint], ids: list[int], edits: dict[SitePoint, Any] | None = None
) -> Any:
    """(what the points hold in a pass of transformers, [tokens, width] each; its logits [tokens, vocab])."""
    found: dict[Any, torch.Tensor] = {}
    handles = []
    for key, point in points.items():
        module = model.get_submodule(point.module)

        def record(
            module: nn.Module, args: Any, kwargs: Any, output: Any, key: Any = key, end: str = point.end
        ) -> None:
            state = first(output if end == "output" else (*args, *kwargs.values()))
            found[key] = (state if state.ndim == 2 else state[0].flatten(1)).clone()  # a router's rows are flat

        handles.append(module.register_forward_hook(record, with_kwargs=True))
    for point, edit in (edits or {}).items():

        def replace(module: nn.Module, args: Any, output: Any, edit: Any = edit) -> Any:
            return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)

        handles.append(model.get_submodule(point.module).register_forward_hook(replace))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return found, logits
