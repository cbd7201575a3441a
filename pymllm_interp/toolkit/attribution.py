"""`lm.attribute`: attribution patching, and integrated gradients along the path between two runs' states.

Attribution patching is a first-order estimate of a patch's effect: ``(clean - corrupted) * gradient``. The gradient is the
metric's, in the corrupted run (Nanda 2023; Syed et al. 2023, arXiv 2310.10348). One pass with gradients serves all sites.

The estimate is wrong if the metric bends. With more steps the gradient is averaged over states between the two runs
(Sundararajan et al. 2017, arXiv 1703.01365), at one site at a time, as in Marks et al. 2024 (arXiv 2403.19647).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import reduce

from ..client.calls.activation_cache import NamesFilter, lens_name, select_traced_sites
from ..client.calls.requests import CallProgress
from ..client.calls.site_hooks import HookPoint, PlacedHooks
from ..core.model_spec import HEAD_SITES, LOGITS
from ..hooks.site import Site
from ..utils.arguments import PromptError, is_whole
from .attribution_result import Attribution, Completeness
from .metrics import Metric, RowMetric, metric_of
from .read_prompts import ReadPrompt


def attribute(
    lm: Any, clean: Any, corrupted: Any, *, metric: Metric, sites: NamesFilter, steps: int = 1, neurons: bool = False,
    progress: bool | None = None, lora: str | None = None,
) -> Attribution:  # fmt: skip
    """Estimate patching effects by gradients, see `LM.attribute`."""
    spec, measure = lm.model_spec, metric_of(metric, lm)
    if not is_whole(steps) or steps < 1:
        raise ValueError(f"steps={steps!r}: expected a whole number from 1 on; 1 is attribution patching")
    if lm._edits_of(None):
        raise NotImplementedError(
            "this model has edits (lm.edit), and attribution does not apply them: clear them first"
        )
    chosen = [site for site in select_traced_sites(sites, spec) if site.kind != LOGITS]
    if not chosen:
        raise ValueError(f"sites={sites!r} selects no site; 'resid_post.*' selects one in each layer")
    first, second = ReadPrompt.of(lm, clean, "the clean prompt"), ReadPrompt.of(lm, corrupted, "the corrupted prompt")
    clean_ids, corrupted_ids = first.token_ids, second.token_ids
    if len(clean_ids) != len(corrupted_ids):
        raise PromptError(
            f"the clean prompt has {len(clean_ids)} tokens and the corrupted prompt {len(corrupted_ids)}: their states are "
            "subtracted position by position, so both need equally many; reword one"
        )
    places = [placed(site, spec) for site in chosen]
    wanted, measured_clean = _states(lm, first.prompt, places, measure, lora)
    gradients, found, measured = _gradients(lm, second.prompt, places, measure, lora)
    values, completeness = dict[str, torch.Tensor](), dict[str, Completeness]()
    with CallProgress(progress, len(places), "sites") as shown:
        for place, target, start, gradient in zip(places, wanted, found, gradients, strict=True):
            name, change = str(place.point.site), target.float() - start.float()
            reached = measured
            if steps > 1:
                gradient, reached = _along(
                    lm, second.prompt, len(corrupted_ids), place, start, target, steps, measure, lora
                )
            products = change * gradient.float()
            if steps > 1:
                completeness[name] = Completeness(products.sum().item(), reached - measured)
            values[name] = products if neurons else _summed(products, place.point.site.kind)
            shown.advance()
    texts = [str(token) for token in corrupted_ids] if lm.tokenizer is None else lm.to_str_tokens(corrupted_ids)
    return Attribution(values, measured_clean, measured, steps, completeness, texts, neurons)


def _summed(products: torch.Tensor, kind: str) -> torch.Tensor:
    """[tokens, ...] -> [tokens], and [tokens, heads] at sites with heads."""
    return reduce(products, "tokens heads dim -> tokens heads" if kind in HEAD_SITES else "tokens ... -> tokens", "sum")


# -- passes ---------------------------------------------------------------------------------


def runs_of_pass(lm: Any, tokens: int) -> int:
    """Traced prompts of `tokens` tokens that one pass takes."""
    limits, page = lm.limits, lm.backend.facts.page_size
    pages = -(-(tokens + 1) // page) * page
    return max(1, min(limits.max_num_tokens // tokens, limits.kv_tokens // pages, limits.max_running))


def placed(site: Site, spec: Any) -> PlacedHooks:
    """Place of a site in a model's modules."""
    point = spec.family.point(site)
    return PlacedHooks(HookPoint(lens_name(site), site), point.module, point.end, spec)


def value_at(lm: Any, place: PlacedHooks) -> torch.Tensor:
    """Value at the place's end of its module: [prompts, tokens, ...]. Called in a block, which waits for it."""
    found = getattr(lm.get(place.module), place.end)
    return found[0] if isinstance(found, tuple) else found


def _states(
    lm: Any, prompt: Any, places: Sequence[PlacedHooks], metric: RowMetric, lora: str | None
) -> tuple[list[torch.Tensor], float]:
    """The states [tokens, ...] of a run at each place, and its metric."""
    with lm.trace(prompt, lora=lora):
        states = _read(lm, places).save()  # pyright: ignore[reportAttributeAccessIssue]
        logits = lm.output.logits[:, -1].save()
    return states, metric(logits.float()).item()


def _read(lm: Any, places: Sequence[PlacedHooks]) -> list[torch.Tensor]:
    return [place.state_in(value_at(lm, place))[0].clone() for place in places]


def _gradients(
    lm: Any, prompt: Any, places: Sequence[PlacedHooks], metric: RowMetric, lora: str | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """The metric's gradients at each place, the states there, [tokens, ...] each, and the metric."""
    with lm.trace(prompt, grad=True, lora=lora):
        found = _differentiated(lm, places, metric).save()
    gradients, states, value = found
    return gradients, states, value.item()


def _differentiated(lm: Any, places: Sequence[PlacedHooks], metric: RowMetric) -> Any:
    tensors, states = list[torch.Tensor](), list[torch.Tensor]()
    for place in places:
        tensors.append(value_at(lm, place))
        states.append(place.state_in(tensors[-1])[0].detach().clone())  # Falcon adds to its MLP's output in place
    value = metric(lm.output.logits[:, -1].float())
    gradients = torch.autograd.grad(value.sum(), tensors)
    return (
        [place.state_in(gradient)[0].clone() for place, gradient in zip(places, gradients, strict=True)],
        states,
        value.detach(),
    )


def _along(
    lm: Any,
    prompt: Any,
    length: int,
    place: PlacedHooks,
    start: torch.Tensor,
    target: torch.Tensor,
    steps: int,
    metric: RowMetric,
    lora: str | None,
) -> tuple[torch.Tensor, float]:
    """The mean gradient at the middle of each of `steps` parts of the way, and the metric at its end."""
    points = [(step + 0.5) / steps for step in range(steps)] + [1.0]
    most = runs_of_pass(lm, length)
    total, reached = torch.zeros(start.shape), 0.0
    for first in range(0, len(points), most):
        part = points[first : first + most]
        with lm.trace([prompt] * len(part), grad=True, lora=lora):
            found = _from(lm, place, start, target, part, metric).save()  # pyright: ignore[reportAttributeAccessIssue]
        gradients, values = found
        total += gradients[: steps - first].sum(0)  # the end counts only for the metric
        reached = values[-1].item()
    return total / steps, reached


def _from(
    lm: Any, place: PlacedHooks, start: torch.Tensor, target: torch.Tensor, points: list[float], metric: RowMetric
) -> tuple[torch.Tensor, torch.Tensor]:
    """The body of a block: put the states at `points` of the way in place, and differentiate.
    Returns gradients [prompts, tokens, ...] float32, and the metric [prompts]."""
    value = value_at(lm, place)
    share = torch.tensor(points, device=value.device).view(-1, *[1] * start.dim())
    one, other = (state.to(value.device).float() for state in (start, target))
    states = ((1 - share) * one + share * other).to(value.dtype).requires_grad_()
    put_states(lm, place, value, states)
    found = metric(lm.output.logits[:, -1].float())
    (gradients,) = torch.autograd.grad(found.sum(), states)
    return gradients.float(), found.detach()


def put_states(lm: Any, place: PlacedHooks, value: torch.Tensor, states: torch.Tensor) -> None:
    """Continue the pass with `states` at the place, as a part of the graph."""
    base, width = value if value._base is None else value._base, value.shape[-1]
    if states.shape[2:].numel() < width:  # q, k and v of one projection are views that cannot be written to
        channels = place.state_in(torch.arange(width, device=value.device).view(1, 1, width)).flatten()
        setattr(lm.get(place.module), place.end, value.index_copy(-1, channels, states.flatten(2)))
    elif base.is_leaf:  # the embeddings, with which the graph begins
        setattr(lm.get(place.module), place.end, states.view_as(value))
    else:  # in place: a norm's input is the stream, which other modules read too
        place.state_in(value).copy_(states)
