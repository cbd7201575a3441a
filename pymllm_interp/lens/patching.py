"""`transformer_lens.patching` over a `Bridge`, with its names, arguments and results.

    _, clean_cache = bridge.run_with_cache(clean_tokens)
    effects = lens.patching.get_act_patch_resid_pre(bridge, corrupted_tokens, clean_cache, metric)  # [layers, positions]

The cells of a call run as a sweep. Native families run them in one growing pass over the layers (toolkit/wavefront.py), others as
requests in batches. A cell before the first token that differs is the corrupted run, and is not run. Cells of attention patterns,
and of other setters, run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from einops import rearrange
from torch.nn.functional import pad
from transformer_lens import patching as library
from transformer_lens.utilities import get_act_name

from ..hooks.captures.spec import Capture
from ..hooks.heads import channels_of
from ..hooks.interventions.specs import Patch
from ..hooks.site import Site
from ..toolkit.sweep import SWEPT
from ..toolkit.wavefront import WaveCell, Wavefront
from .bridge import Bridge

_SETTERS = {
    library.layer_pos_patch_setter: ("layer", "pos"),
    library.layer_pos_head_vector_patch_setter: ("layer", "pos", "head"),
    library.layer_head_vector_patch_setter: ("layer", "head"),
}
"""Setters with cells that are patches at a site -> meanings of a cell's indexes."""
Index = tuple[int, ...]
ROUNDING = 1e-5
"""Differences below this part of a state's largest value are rounding: such a cell is the corrupted run."""


class _Sweep:
    """Stand-in for the model in `transformer_lens.patching`: its patched runs are the next ones of a sweep.

    Args:
        bridge: bridge of the model.
        tokens: [batch, tokens] of the corrupted run.
        clean: a cache of the clean run.
        name: activation name, such as "resid_pre".
        axes: meanings of a cell's indexes.
        cells: cells in the order of the calls.
    """

    def __init__(
        self, bridge: Bridge, tokens: torch.Tensor, clean: Any, name: str, axes: Sequence[str], cells: list[Index]
    ) -> None:
        self.cfg, self.bridge, self.tokens, self.clean = bridge.cfg, bridge, tokens, clean
        self.name, self.axes = name, axes
        self._base, self._starts = self._corrupted_run(cells)
        self.cells = [cell for cell in cells if self._starts[cell] is not None]
        self._found: dict[Index, torch.Tensor] = {}
        run = self._by_requests if Wavefront.why_not(bridge.lm) else self._by_wavefront
        self._coming = zip(*(run(row, ids) for row, ids in enumerate(tokens.tolist())), strict=True)

    def run_with_hooks(self, tokens: torch.Tensor, fwd_hooks: list[Any]) -> torch.Tensor:
        """Logits [batch, tokens, vocab] of the cell with the hook's index; without a hook, of the corrupted run."""
        if not fwd_hooks:
            return self._base.clone()
        index = tuple(fwd_hooks[0][1].keywords["index"])
        if self._starts[index] is None:
            return self._base.clone()
        while index not in self._found:
            rows = next(self._coming)
            self._found[rows[0][0]] = torch.stack([logits for _, logits in rows])
        return self._found.pop(index)

    def _corrupted_run(self, cells: list[Index]) -> tuple[torch.Tensor, dict[Index, int | None]]:
        """Logits of the corrupted run; and by cell the first position that a patch changes, or None."""
        sites = list(dict.fromkeys(self._at(cell)[0] for cell in cells))
        captures = [Capture(site, positions="prompt") for site in sites]
        outs = self.bridge.lm.forward(self.tokens.tolist(), capture=captures)
        starts: dict[Index, int | None] = {}
        for cell in cells:
            site, position, head = self._at(cell)
            first = position or 0
            changed = torch.stack([
                _changed(self._values(cell, row), out.activations[site][first:], head) for row, out in enumerate(outs)
            ]).any(0)  # fmt: skip
            starts[cell] = first + int(changed.int().argmax()) if changed.any() else None
        return torch.stack([out.logits for out in outs]), starts

    def _at(self, cell: Index) -> tuple[Site, int | None, int | None]:
        """Site, position and head of a cell; negative numbers count from the end. Raises IndexError: no point has this number."""
        parts = dict(zip(self.axes, cell, strict=True))
        site = _place(self.bridge, self.name, parts["layer"]).site
        heads, _ = self.bridge.lm.model_spec.shape(site.kind) if "head" in parts else (0, 0)
        counts = {"pos": self.tokens.shape[1], "head": heads}
        position, head = (range(counts[axis])[parts[axis]] if axis in parts else None for axis in counts)
        return site, position, head

    def _values(self, cell: Index, row: int) -> torch.Tensor:
        """The clean run's values, [positions, ...]: of one position, or of all."""
        site, position, _ = self._at(cell)
        clean = self.clean[get_act_name(self.name, site.layer)]
        if clean.shape[1] != self.tokens.shape[1] or clean.shape[0] not in (1, len(self.tokens)):
            raise ValueError(
                f"the clean run has {list(clean.shape[:2])} prompts and tokens, and the corrupted run "
                f"{list(self.tokens.shape)}: states are patched position by position, so both need equally many"
            )
        value = clean[row % clean.shape[0]]
        return value if position is None else value[position : position + 1]

    def _by_wavefront(self, row: int, ids: list[int]) -> Iterator[tuple[Index, torch.Tensor]]:
        """Cells and their logits [tokens, vocab], of one prompt."""
        lm = self.bridge.lm
        lm.engine.check_open()
        made = []
        for cell in self.cells:
            site, position, head = self._at(cell)
            channels = None if head is None else channels_of([head], lm.model_spec.shape(site.kind))
            start = self._starts[cell] or 0
            values = self._values(cell, row).flatten(1)
            made.append(WaveCell(site, start, values if position is not None else values[start:], channels))
        front = Wavefront(lm.backend.run, lm.backend.post, ids, lm.num_layers, lm.limits.max_num_tokens)
        for i, logits in front.row_logits(made):
            yield self.cells[i], logits.cpu()

    def _by_requests(self, row: int, ids: list[int]) -> Iterator[tuple[Index, torch.Tensor]]:
        lm = self.bridge.lm
        for first in range(0, len(self.cells), lm.limits.max_running):
            part = self.cells[first : first + lm.limits.max_running]
            outs = lm.forward([ids] * len(part), interventions=[[self._patch(cell, row)] for cell in part])
            yield from ((cell, out.logits) for cell, out in zip(part, outs, strict=True))

    def _patch(self, cell: Index, row: int) -> Patch:
        site, position, head = self._at(cell)
        values = self._values(cell, row).float()
        where: Any = "prompt" if position is None else [position]
        if head is None:
            return Patch(site, values.flatten(1), positions=where)
        return Patch(site, values[:, head], positions=where, heads=[head])


def _changed(new: torch.Tensor, old: torch.Tensor, head: int | None) -> torch.Tensor:
    """Positions at which values [positions, ...] differ from another run's states: [positions] bool."""
    old = old[: len(new)]
    if head is not None:
        new, old = new[:, head], old[:, head]
    gap, size = ((x.flatten(1).abs().amax(1)) for x in (new - old, old))
    return gap > ROUNDING * size


def _place(bridge: Bridge, name: str, layer: int) -> Any:
    point = bridge.hook_dict[get_act_name(name, layer)]
    return bridge._driver.places[point.name]


def generic_activation_patch(
    model: Bridge,
    corrupted_tokens: torch.Tensor,
    clean_cache: Any,
    patching_metric: Any,
    patch_setter: Callable[..., torch.Tensor],
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: Any = None,
    **options: Any,
) -> Any:
    """Patch activations as `transformer_lens.patching.generic_activation_patch`; batched for TransformerLens' state setters.

    Args:
        model: a `Bridge` without hooks.
        patching_metric: function of logits [batch, tokens, vocab] on the CPU, as in TransformerLens.
        options: options of TransformerLens' function.

    Raises:
        ValueError: clean and corrupted runs of different lengths.
        NotImplementedError: the bridge has hooks, or its `LM` edits, which a sweep does not run.
    """
    generic: Any = library.generic_activation_patch
    given: Any = (model, corrupted_tokens, clean_cache, patching_metric, patch_setter, activation_name)
    axes = _SETTERS.get(patch_setter)
    if axes is None or not _sweeps(model, activation_name):
        return generic(*given, index_axis_names, index_df, **options)
    if any(point.fwd_hooks for point in model.hook_points()) or model.lm._edits_of(None):
        raise NotImplementedError(
            "a sweep runs without the hooks of the bridge and the edits of its LM: call bridge.reset_hooks(), and clear the edits"
        )
    cells = _cells(model, corrupted_tokens, activation_name, index_axis_names, index_df)
    sweep: Any = _Sweep(model, corrupted_tokens, clean_cache, activation_name, axes, cells)
    return generic(sweep, *given[1:], index_axis_names, index_df, **options)


def _sweeps(bridge: Bridge, name: str) -> bool:
    """Whether an edit of the activation is one of a swept site."""
    place = _place(bridge, name, 0)
    return place.site is not None and place.part == "value" == place.captured_part and place.site.kind in SWEPT


def _cells(bridge: Bridge, tokens: torch.Tensor, name: str, axes: Sequence[str] | None, index_df: Any) -> list[Index]:
    """The cells that TransformerLens runs, in its order."""
    if index_df is not None:
        return [tuple(row) for row in index_df.itertuples(index=False, name=None)]
    heads = bridge.cfg.n_heads
    if name in ("k", "v"):
        heads = bridge.cfg.n_key_value_heads or heads
    sizes = {"layer": bridge.cfg.n_layers, "pos": tokens.shape[-1], "head": heads, "head_index": heads}
    return list(product(*(range(sizes[axis]) for axis in axes or ())))


def _swept(name: str) -> Any:
    """One of TransformerLens' functions, over `generic_activation_patch` of this module."""
    theirs = getattr(library, name)
    ours = partial(generic_activation_patch, **theirs.keywords)
    ours.__doc__ = theirs.__doc__
    return ours


get_act_patch_resid_pre = _swept("get_act_patch_resid_pre")
get_act_patch_resid_mid = _swept("get_act_patch_resid_mid")
get_act_patch_attn_out = _swept("get_act_patch_attn_out")
get_act_patch_mlp_out = _swept("get_act_patch_mlp_out")
get_act_patch_attn_head_out_by_pos = _swept("get_act_patch_attn_head_out_by_pos")
get_act_patch_attn_head_q_by_pos = _swept("get_act_patch_attn_head_q_by_pos")
get_act_patch_attn_head_k_by_pos = _swept("get_act_patch_attn_head_k_by_pos")
get_act_patch_attn_head_v_by_pos = _swept("get_act_patch_attn_head_v_by_pos")
get_act_patch_attn_head_pattern_by_pos = _swept("get_act_patch_attn_head_pattern_by_pos")
get_act_patch_attn_head_pattern_dest_src_pos = _swept("get_act_patch_attn_head_pattern_dest_src_pos")
get_act_patch_attn_head_out_all_pos = _swept("get_act_patch_attn_head_out_all_pos")
get_act_patch_attn_head_q_all_pos = _swept("get_act_patch_attn_head_q_all_pos")
get_act_patch_attn_head_k_all_pos = _swept("get_act_patch_attn_head_k_all_pos")
get_act_patch_attn_head_v_all_pos = _swept("get_act_patch_attn_head_v_all_pos")
get_act_patch_attn_head_pattern_all_pos = _swept("get_act_patch_attn_head_pattern_all_pos")


def _each(names: Sequence[str], *given: Any) -> list[torch.Tensor]:
    """The values of several functions, [layers, ...] each, the last one first: it may be refused."""
    return [globals()[f"get_act_patch_{name}"](*given) for name in reversed(names)][::-1]


def get_act_patch_block_every(
    model: Bridge, corrupted_tokens: torch.Tensor, clean_cache: Any, metric: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """[3, layers, positions]: patches of `resid_pre`, `attn_out` and `mlp_out`. `metric` returns a scalar."""
    return torch.stack(_each(("resid_pre", "attn_out", "mlp_out"), model, corrupted_tokens, clean_cache, metric))


def get_act_patch_attn_head_all_pos_every(
    model: Bridge, corrupted_tokens: torch.Tensor, clean_cache: Any, metric: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """[5, layers, heads]: patches of z, q, k, v and the pattern at all positions. `metric` returns a scalar.

    One corrupted prompt: patterns are edited in passes of one prompt. With fewer KV heads, rows of k and v end in zeros.
    """
    names = [f"attn_head_{part}_all_pos" for part in ("out", "q", "k", "v", "pattern")]
    found = _each(names, model, corrupted_tokens, clean_cache, metric)
    return torch.stack([pad(one, (0, model.cfg.n_heads - one.shape[-1])) for one in found])


def get_act_patch_attn_head_by_pos_every(
    model: Bridge, corrupted_tokens: torch.Tensor, clean_cache: Any, metric: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """[5, layers, positions, heads]: patches of z, q, k, v and the pattern's rows. See the function of all positions."""
    names = [f"attn_head_{part}_by_pos" for part in ("out", "q", "k", "v", "pattern")]
    found = _each(names, model, corrupted_tokens, clean_cache, metric)
    found[-1] = rearrange(found[-1], "layers heads positions -> layers positions heads")
    return torch.stack([pad(one, (0, model.cfg.n_heads - one.shape[-1])) for one in found])
