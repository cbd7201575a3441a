"""`ActivationCache`: the states of `LM.run_with_cache`, under TransformerLens' names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch

from ..core.model_spec import INNER_SITES, LOGITS, NUMBERED_SITES, PATTERN, ModelSpec
from ..hooks.captures.activations import BySite
from ..hooks.site import KINDS, TRANSFORMER_LENS, Site, expand

NamesFilter = str | Site | Sequence[str | Site] | Callable[[str], bool] | None
"""A site's name or pattern, several, or a function of TransformerLens' name. None: all sites."""

LENS_NAMES = {kind: name for name, kind in TRANSFORMER_LENS.items() if not name.endswith("hook_normalized")}
"""Kind of site -> TransformerLens' name, where both have the same value."""
SHORT_NAMES = {"post": "mlp_act"}
"""TransformerLens' short names that are not our kinds -> our kind."""


def lens_name(site: Site) -> str:
    """TransformerLens' name of a site; the site's own where TransformerLens has none with the same value."""
    name = LENS_NAMES.get(site.kind)
    return str(site) if name is None else name.format(site.layer)


def select_sites(
    names: NamesFilter, model: ModelSpec, inner_sites: frozenset[str] = frozenset(INNER_SITES), captured: bool = True
) -> list[Site]:
    """The sites that a filter selects, in the order of a forward pass.

    Args:
        model: its family and number of layers.
        inner_sites: kinds of inner sites that None and a function select among.
        captured: whether the sites are captured; a function then sees no others.

    Raises:
        ValueError: an unknown name, a layer beyond the model's, or a kind that the family does not have.
    """
    if names is None or (callable(names) and not isinstance(names, str | Site)):
        kinds = [
            kind for kind in model.family.points
            if kind != LOGITS and (kind not in INNER_SITES or kind in inner_sites) and (kind in NUMBERED_SITES or not captured)
        ]  # fmt: skip
        patterns = [kind if kind in ("embed", "final_norm") else f"{kind}.*" for kind in kinds]
        found = [site for pattern in patterns for site in expand(pattern, model.num_hidden_layers, model.family)]
        if names is not None:
            keeps = cast(Callable[[str], bool], names)
            found = [site for site in found if keeps(lens_name(site))]
    else:
        given = [names] if isinstance(names, str | Site) else cast(Sequence[str | Site], names)
        found = [site for name in given for site in expand(name, model.num_hidden_layers, model.family)]
        for site in found:
            if site.kind == PATTERN:
                raise ValueError(f"{site}: attention patterns are captured by lm.generate(prompt, capture=['{site}'])")

    def order(site: Site) -> tuple[int, int]:
        kind = KINDS.index(site.kind)
        if site.layer is not None:
            return site.layer, kind
        return (-1, kind) if site.kind == "embed" else (model.num_hidden_layers, kind)

    return sorted(dict.fromkeys(found), key=order)


class ActivationCache(BySite):
    """States by site: [batch, tokens, width], and [batch, tokens, heads, head_dim] for `q`, `k`, `v` and `z`. On the CPU.

    Iteration yields TransformerLens' names (`blocks.3.hook_resid_post`). A key is any name of a site, or TransformerLens' short
    form: ``cache["resid_post", 3]``.
    """

    def __init__(self, num_layers: int, states: Mapping[Site, torch.Tensor]) -> None:
        super().__init__(num_layers)
        self._tensors = {str(site): rows for site, rows in states.items()}
        self._names = {str(site): lens_name(site) for site in states}

    def __getitem__(self, site: str | Site | tuple) -> torch.Tensor:
        if isinstance(site, tuple):
            kind, layer, *_ = (*site, None)
            kind = SHORT_NAMES.get(str(kind), str(kind))
            site = kind if layer is None else f"{kind}.{layer}"
        return super().__getitem__(site)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.values())
