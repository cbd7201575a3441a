"""`lm.edge_attribution`: the plan of an attribution over edges, and its passes.

An edge's score is ``(corrupted - clean) * gradient``, with the gradient at the target's input, before its norm. It estimates the
change of the clean run's metric if the edge carries the corrupted run's output (Syed et al. 2023, arXiv 2310.10348).
Hanna et al. 2024 (arXiv 2403.17806) average it over other runs than the clean one. All scores of a run come from one backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...client.calls.requests import CallProgress
from ...runner.device_memory import free_bytes
from ...utils.arguments import PromptError, is_whole, shown
from ..attribution import runs_of_pass
from ..circuits.memory import host_bytes
from ..metrics import RowMetric, metric_of
from ..read_prompts import ReadPrompt
from .stream import CLOSE, EdgeModel, SourceOutputs

METHODS = ("eap", "eap-ig-inputs", "eap-ig-activations", "clean-corrupted")
STEPS = 5
"""Steps of integrated gradients, as in the EAP-IG package."""
PASS_BYTES = 1 << 30
"""Memory of a pass for states by head or source; a single run may take more."""


class EdgePair(NamedTuple):
    """A clean and a corrupted prompt.

    Attributes:
        token_ids: token ids of both, equally many.
        metric: metric of its logits.
    """

    token_ids: tuple[list[int], list[int]]
    metric: RowMetric


class GradientRun(NamedTuple):
    """A run that gradients are taken in.

    Attributes:
        prompt: 0 for the clean prompt, 1 for the corrupted one.
        site: site with states between both runs, or "".
        share: share of the clean state there.
    """

    prompt: int = 0
    site: str = ""
    share: float = 1.0


def pairs_of(lm: Any, clean: Any, corrupted: Any, metric: Any) -> list[EdgePair]:
    """The pairs of one or several prompts.
    Raises PromptError: prompts of different lengths, with images or embeddings, or another number of them or of metrics."""
    several = isinstance(clean, list) and bool(clean) and not isinstance(clean[0], int)
    if several != (isinstance(corrupted, list) and bool(corrupted) and not isinstance(corrupted[0], int)):
        raise PromptError("clean and corrupted: expected two prompts, or two lists of prompts")
    cleans, others = (clean, corrupted) if several else ([clean], [corrupted])
    if len(cleans) != len(others):
        raise PromptError(f"there are {len(cleans)} clean prompts and {len(others)} corrupted ones; expected pairs")
    metrics = list(metric) if several and isinstance(metric, list) else [metric] * len(cleans)
    if len(metrics) != len(cleans):
        raise PromptError(f"there are {len(metrics)} metrics for {len(cleans)} pairs; a tuple of tokens is one for all")
    found = []
    for i, (one, other, own) in enumerate(zip(cleans, others, metrics, strict=True)):
        where = f" of pair {i}" if several else ""
        both = (
            ReadPrompt.of(lm, one, f"the clean prompt{where}"),
            ReadPrompt.of(lm, other, f"the corrupted prompt{where}"),
        )
        ids = both[0].token_ids, both[1].token_ids
        if not all(read.ids_only for read in both):
            raise PromptError("prompts of edges have token ids only: no images, and no vectors in place of embeddings")
        if len(ids[0]) != len(ids[1]):
            raise PromptError(
                f"the clean prompt{where} has {len(ids[0])} tokens and the corrupted prompt {len(ids[1])}: outputs are subtracted "
                "position by position, so both need equally many; reword one"
            )
        most = min(lm.limits.max_num_tokens, lm.limits.max_model_len - 1)
        if len(ids[0]) > most:
            raise PromptError(
                f"the prompts{where} have {len(ids[0])} tokens, and a traced pass of this model takes {most}"
            )
        found.append(EdgePair(ids, metric_of(own, lm)))
    return found


def runs_of(method: str, steps: int | None, layers: int) -> list[GradientRun]:
    """The runs of a method. Raises ValueError: an unknown method, or invalid steps."""
    if method not in METHODS:
        raise ValueError(f"method={shown(method)}: expected one of {', '.join(METHODS)}")
    if steps is not None and "ig" not in method:
        raise ValueError(f"method={method!r} has no steps; eap-ig-inputs and eap-ig-activations do")
    count = STEPS if steps is None else steps
    if not is_whole(count) or count < 1:
        raise ValueError(f"steps={shown(steps)}: expected a whole number from 1 on")
    if method == "eap-ig-inputs":
        return [GradientRun(0, "resid_pre.0", step / count) for step in range(count)]
    if method == "eap-ig-activations":
        sites = ["resid_pre.0", *(f"{kind}.{layer}" for layer in range(layers) for kind in ("attn_out", "mlp_out"))]
        return [GradientRun(0, site, step / count) for site in sites for step in range(1, count + 1)]
    return [GradientRun()] if method == "eap" else [GradientRun(), GradientRun(1)]


def outputs_of(model: EdgeModel, token_ids: Sequence[list[int]]) -> SourceOutputs:
    """SourceOutputs of the sources for equally long prompts, on the model's device.

    Raises:
        PromptError: they do not fit the memory; nothing was scheduled.
        NotImplementedError: the outputs do not add up to the stream.
    """
    kept, lm = list[SourceOutputs](), model.lm
    device, tokens = next(lm._module.parameters()).device, len(token_ids[0])
    states = 4 * len(model.graph.sources()) * tokens * lm.hidden_size * (len(token_ids) + 1)  # parts, and all together
    if states > (room := host_bytes() if device.type == "cpu" else free_bytes(str(device))):
        raise PromptError(
            f"outputs of all heads at {tokens} tokens take {states >> 20} MiB, and there are {room >> 20} MiB: shorten the prompt"
        )
    most = runs_of_pass(lm, len(token_ids[0]))
    for first in range(0, len(token_ids), most):
        with lm.trace(list(token_ids[first : first + most])):
            kept.append(model.outputs())
    worst = max(kept, key=lambda found: found.error)
    if not worst.error < CLOSE.get(lm.dtype, 0.1):
        raise NotImplementedError(
            f"edges of this model ({lm.model_spec.family.name}): heads, MLPs and embeddings do not add up to {worst.place}; the "
            f"error is {worst.error:.2g} of the largest value"
        )
    states, attention, last, logits = (torch.cat(parts) for parts in list(zip(*kept, strict=True))[:4])
    return SourceOutputs(states, attention, last, logits, worst.error, worst.place)


def chunks(count: int, tokens: int, model: EdgeModel, states: int) -> Iterator[slice]:
    """Parts of `count` runs that fit one pass.

    Args:
        states: states [tokens, hidden] float32 of one run that a pass holds.
    """
    by_memory = PASS_BYTES // (4 * states * tokens * model.lm.hidden_size)
    most = max(1, min(runs_of_pass(model.lm, tokens), by_memory))
    yield from (slice(first, min(first + most, count)) for first in range(0, count, most))


def pair_scores(model: EdgeModel, pair: EdgePair, runs: Sequence[GradientRun]) -> tuple[Tensor, tuple[float, float]]:
    """Mean scores [sources, targets] of a pair over the runs, float32, and the metric of both prompts."""
    found = outputs_of(model, pair.token_ids)
    clean, corrupted = pair.metric(found.logits).tolist()
    differences = found.states[1] - found.states[0]
    total = torch.zeros(())
    lm, metric = model.lm, pair.metric
    for part in chunks(len(runs), len(pair.token_ids[0]), model, 4 * model.graph.heads):
        own = runs[part]
        puts, kept = _puts(own, found, model.graph.heads), list[Tensor]()
        with lm.trace([pair.token_ids[run.prompt] for run in own], grad=True):
            kept.append(model.gradients(differences, puts, metric))
        total = total + kept[0].cpu()
    return total / len(runs), (clean, corrupted)


def _puts(runs: Sequence[GradientRun], found: SourceOutputs, heads: int) -> list[tuple[str, Tensor, Tensor]]:
    """The states that runs have in place, by site."""
    puts = []
    for site in dict.fromkeys(run.site for run in runs if run.site):
        rows = [i for i, run in enumerate(runs) if run.site == site]
        kind, _, number = site.partition(".")
        layer = int(number)
        if kind == "attn_out":
            both = found.attention[:, layer]
        else:
            both = found.states[:, 0 if kind == "resid_pre" else (layer + 1) * (heads + 1)]
        states = torch.stack([runs[i].share * both[0] + (1 - runs[i].share) * both[1] for i in rows])
        puts.append((site, torch.tensor(rows), states))
    return puts


def all_scores(
    model: EdgeModel, pairs: Sequence[EdgePair], runs: Sequence[GradientRun], progress: bool | None
) -> tuple[Tensor, Tensor]:
    """Mean scores [sources, targets] over the pairs, and the metrics [pairs, 2] of clean and corrupted prompts."""
    total, metrics = torch.zeros(()), list[tuple[float, float]]()
    with CallProgress(progress, len(pairs), "pairs") as bar:
        for pair in pairs:
            scores, both = pair_scores(model, pair, runs)
            model.lm.weights.check_version(model.weights_version, "lm.edge_attribution")
            total = total + scores / len(pairs)
            metrics.append(both)
            bar.advance()
    return total, torch.tensor(metrics)


def measured(model: EdgeModel, pair: EdgePair, patched: Tensor) -> list[float]:
    """The clean run's metric with patched edges, for each of several sets.

    Args:
        patched: [sets, sources, targets] bool.
    """
    corrupted, values = outputs_of(model, pair.token_ids).states[1], list[float]()
    lm, tokens = model.lm, len(pair.token_ids[0])
    for part in chunks(len(patched), tokens, model, corrupted.shape[0] + 3 * model.graph.heads):
        masks, kept = patched[part].to(corrupted), list[Tensor]()
        with lm.trace([pair.token_ids[0]] * len(masks)):
            kept.append(model.patched(corrupted, masks))
        values += pair.metric(kept[0]).tolist()
        lm.weights.check_version(model.weights_version, "faithfulness")
    return values
