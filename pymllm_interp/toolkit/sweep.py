"""`lm.patch_sweep`: the plan of a sweep, its checks, and the two ways to run it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, product, repeat
from typing import Any

import torch
from einops import rearrange

from ..client.calls.requests import CallProgress
from ..core.sampling_params import SamplingParams
from ..hooks.captures.spec import Capture
from ..hooks.heads import Heads, channels_of, checked_heads, heads_in
from ..hooks.image_words import has_words
from ..hooks.interventions.specs import Patch
from ..hooks.positions import Positions, checked_positions, windows_of
from ..hooks.site import Site, expand
from ..utils.arguments import PromptError, shown
from .metrics import Metric, RowMetric, metric_of
from .read_prompts import ReadPrompt
from .sweep_result import PatchSweep
from .wavefront import WaveCell, Wavefront

SWEPT = ("resid_pre", "q", "k", "v", "z", "attn_out", "resid_mid", "mlp_act", "mlp_out", "resid_post")
"""Kinds of sites, in the order of a layer."""
ONE = SamplingParams(temperature=0.0, max_tokens=1)
LAST_LOGITS = Capture("logits", positions=[-1])
Place = tuple[int, ...]
"""Indexes of a cell in the values; () for a cell of the noise floor."""
Cell = tuple[Place, int, int, int]
"""Place, and indexes of layer, position and head."""


@dataclass
class Plan:
    """A sweep that can be served."""

    lm: Any
    metric: RowMetric
    token_ids: list[int]
    prompt: Any
    """The base prompt (`ReadPrompt.prompt`)."""
    kind: str
    layers: list[int]
    positions: list[int]
    heads: list[int] | None
    first_change: int
    """Position of the first token that differs. States before it are equal in both runs, so their cells are the base run."""
    states: tuple[torch.Tensor, torch.Tensor]
    """The base's and the source's states, [layers, positions, width] each."""
    lora: str | None
    """The adapter of all runs."""

    def _cells(self, changed: bool) -> Iterator[Cell]:
        """Cells at positions from `first_change` on, or before it."""
        which = [j for j, position in enumerate(self.positions) if (position >= self.first_change) == changed]
        heads = range(len(self.heads or [0]))
        for i, j, k in product(range(len(self.layers)), which, heads):
            yield (i, j) if self.heads is None else (i, j, k), i, j, k

    def equal_cells(self) -> list[Place]:
        """Places of the cells with a patch that changes nothing."""
        return [place for place, *_ in self._cells(changed=False)]

    def cells(self) -> list[Cell]:
        """The cells to run, in the order of the layers, and one of the noise floor for each layer."""
        found = list(self._cells(changed=True))
        which = sorted({j for _, _, j, _ in found}) or range(len(self.positions))
        heads = len(self.heads or [0])
        return found + [((), i, which[i % len(which)], i % heads) for i in range(len(self.layers))]

    def state(self, place: Place, i: int, j: int) -> torch.Tensor:
        """[width]: the patched value of the cell."""
        return self.states[1 if place else 0][i, j]

    def measured(self, logits: torch.Tensor) -> list[float]:
        """The metric of logits [rows, vocab]."""
        return self.metric(logits.float()).tolist()


def patch_sweep(
    lm: Any,
    base: Any,
    source: Any,
    *,
    site: str,
    metric: Metric,
    positions: Positions | None = None,
    heads: Heads | str = None,
    layers: Iterable[int] | None = None,
    how: str = "auto",
    stream: bool = False,
    progress: bool | None = None,
    lora: str | None = None,
) -> PatchSweep:
    """Patch each position of each layer, see `LM.patch_sweep`."""
    spec, measure = lm.model_spec, metric_of(metric, lm)
    if how not in ("auto", "wavefront", "requests"):
        raise ValueError(f"how={how!r}: expected 'auto', 'wavefront' or 'requests'")
    if lm._edits_of(None):
        raise NotImplementedError("this model has edits (lm.edit), and a sweep does not apply them: clear them first")
    first, second = ReadPrompt.of(lm, base, "the base prompt"), ReadPrompt.of(lm, source, "the source prompt")
    base_ids, source_ids = first.token_ids, second.token_ids
    if len(base_ids) != len(source_ids):
        raise PromptError(
            f"the base prompt has {len(base_ids)} tokens and the source prompt {len(source_ids)}: states are patched position by "
            "position, so both need equally many; reword one, or patch single positions with lm.sweep and Patch"
        )
    if len(base_ids) >= lm.limits.max_model_len:
        raise PromptError(
            f"the prompts have {len(base_ids)} tokens, and the context {lm.limits.max_model_len}, a new token included: shorten "
            "them, or raise max_model_len"
        )
    sites = _sites(site, layers, spec)
    kind = sites[0].kind
    found = _positions("prompt" if positions is None else positions, lm, sites[0], first, second)
    chosen = None if heads is None else _heads(heads, kind, spec)
    why = _why_requests(lm, lora, (first, second)) if how != "requests" else "asked for"
    if why and how == "wavefront":
        raise NotImplementedError(f"how='wavefront': {why}; how='requests' runs a request for each cell")
    states, logits = _both_runs(lm, [first.prompt, second.prompt], sites, found, lora)
    baselines = measure(logits).tolist()
    where = [one.layer or 0 for one in sites]
    pairs = enumerate(zip(base_ids, source_ids, strict=True))
    changes = (i for i, (one, other) in pairs if one != other) if first.ids_only and second.ids_only else iter(())
    plan = Plan(
        lm, measure, base_ids, first.prompt, kind, where, found, chosen, next(changes, 0), (states[0], states[1]), lora
    )  # fmt: skip
    cells = _shown(_by_requests(plan) if why else _by_wavefront(plan), len(plan.cells()), progress)
    equal = zip(plan.equal_cells(), repeat(baselines[0]), strict=False)
    texts = _texts(lm, first), _texts(lm, second)
    result = PatchSweep(
        kind, plan.layers, found, chosen, (baselines[0], baselines[1]), texts,
        f"requests ({why})" if why else "wavefront", chain(equal, cells),
    )  # fmt: skip
    return result if stream else result.finish()


# -- sites of the sweep ----------------------------------------------------------------------


def _sites(site: str, layers: Iterable[int] | None, spec: Any) -> list[Site]:
    if site in SWEPT:
        spec.family.check(site)
        return [Site(site, layer) for layer in _layers(layers, spec.num_hidden_layers)]
    known = f"a sweep patches {', '.join(SWEPT)}; resid_pre in layer 0 is the embedding"
    if re.fullmatch(r"[a-z_]+", str(site)):  # a kind, misspelt
        near = get_close_matches(str(site), SWEPT, n=1)
        raise ValueError(f"site={site!r}: {f'did you mean {near[0]!r}? ' if near else ''}{known}")
    found = expand(site, spec.num_hidden_layers, spec.family)
    if found[0].kind not in SWEPT:
        raise ValueError(f"site={site!r}: {known}")
    if layers is not None:
        raise ValueError(f"site={site!r} names layers, and layers={layers!r} does: give site={found[0].kind!r}")
    return found


def _layers(layers: Iterable[int] | None, count: int) -> list[int]:
    if layers is None:
        return list(range(count))
    found = list(layers)
    wrong = [
        layer for layer in found if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count
    ]
    if wrong or not found:
        raise ValueError(f"layers={found}: expected some of 0 to {count - 1}, or -{count} to -1 from the end")
    resolved = sorted({layer % count for layer in found})
    if len(resolved) < len(found):
        raise ValueError(f"layers={found} names a layer twice")
    return resolved


def _positions(positions: Positions, lm: Any, site: Site, base: ReadPrompt, source: ReadPrompt) -> list[int]:
    """Ascending positions of both prompts."""
    count = len(base.token_ids)
    if has_words(checked_positions(positions)) and (base.has_images or source.has_images):
        found, others = (prompt.places(lm, site, positions) for prompt in (base, source))
        if found != others:
            raise PromptError(
                f"positions={shown(positions)} are {found} in the base prompt, and {others} in the source prompt"
            )
        return found
    windows = windows_of(positions, count)
    if any(window.start >= count for window in windows):
        raise ValueError(
            f"positions={shown(positions)} are beyond the prompt, which has {count} tokens; nothing is generated here"
        )
    stops = [count if window.stop is None else window.stop for window in windows]
    return [p for window, stop in zip(windows, stops, strict=True) for p in range(window.start, stop, window.step)]


def _heads(heads: Heads | str, kind: str, spec: Any) -> list[int]:
    if isinstance(heads, str):
        if heads != "all":
            raise ValueError(f"heads={heads!r}: expected 'all', numbers of heads, or None")
        checked_heads([0], kind)
        return list(range(spec.shape(kind)[0]))
    return list(heads_in(checked_heads(heads, kind) or (), spec, kind))


def _why_requests(lm: Any, lora: str | None, prompts: Sequence[ReadPrompt]) -> str:
    """Reason that the cells run as requests; "" if the wavefront runs them."""
    if any(prompt.embedded for prompt in prompts):
        return "the prompts have embeddings"
    if any(prompt.has_images for prompt in prompts):
        return "the prompts have images"
    if lora is not None:
        return "they have an adapter"
    if not lm.backend.in_process:
        return "the engine is a server's"
    return Wavefront.why_not(lm)


def _both_runs(
    lm: Any, prompts: list[Any], sites: list[Site], positions: list[int], lora: str | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The states [layers, positions, width] of each prompt, and the logits [2, vocab] of their last positions."""
    captures = [*(Capture(site, positions=positions) for site in sites), LAST_LOGITS]
    outs = lm.generate(prompts, ONE, capture=captures, lora=lora)
    states = [
        rearrange([out.activations[str(site)] for site in sites], "layers positions ... -> layers positions (...)")
        for out in outs
    ]
    return states, torch.cat([out.activations["logits"] for out in outs]).float()


def _texts(lm: Any, prompt: ReadPrompt) -> list[str]:
    ids = prompt.token_ids
    texts = [str(token) for token in ids] if lm.tokenizer is None else lm.to_str_tokens(ids)
    return ["[vector]" if i in prompt.embedded else text for i, text in enumerate(texts)]


# -- how it runs -----------------------------------------------------------------------------


def _by_wavefront(plan: Plan) -> Iterator[tuple[Place, float]]:
    lm, entries = plan.lm, plan.cells()
    lm.engine.check_open()
    depth, most = lm.model_spec.num_hidden_layers, lm.limits.max_num_tokens
    front = Wavefront(lm.backend.run, lm.backend.post, plan.token_ids, depth, most)
    shape = lm.model_spec.shape(plan.kind)
    channels = [None] if plan.heads is None else [channels_of([head], shape) for head in plan.heads]
    cells = [
        WaveCell(Site(plan.kind, plan.layers[i]), plan.positions[j], plan.state(place, i, j), channels[k])
        for place, i, j, k in entries
    ]
    for indexes, logits in front.logits(cells):
        for index, value in zip(indexes, plan.measured(logits), strict=True):
            yield entries[index][0], value


def _by_requests(plan: Plan) -> Iterator[tuple[Place, float]]:
    entries, most = plan.cells(), plan.lm.limits.max_running
    for first in range(0, len(entries), most):
        part = entries[first : first + most]
        runs = [_patch(plan, *entry) for entry in part]
        outs = plan.lm.sweep(plan.prompt, runs, ONE, progress=False, capture=[LAST_LOGITS], lora=plan.lora)
        values = plan.measured(torch.cat([out.activations["logits"] for out in outs]))
        yield from zip([place for place, *_ in part], values, strict=True)


def _patch(plan: Plan, place: Place, i: int, j: int, k: int) -> Patch:
    site, value = Site(plan.kind, plan.layers[i]), plan.state(place, i, j).float()
    if plan.heads is None:
        return Patch(site, value, positions=[plan.positions[j]])
    count, _ = plan.lm.model_spec.shape(plan.kind)
    of_head = rearrange(value, "(heads dim) -> heads dim", heads=count)[plan.heads[k]]
    return Patch(site, of_head, positions=[plan.positions[j]], heads=[plan.heads[k]])


def _shown(cells: Iterator[tuple[Place, float]], total: int, progress: bool | None) -> Iterator[tuple[Place, float]]:
    """`cells` with a progress bar."""
    with CallProgress(progress, total, "patching") as shown:
        for cell in cells:
            yield cell
            shown.advance()
