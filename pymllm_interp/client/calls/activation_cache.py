"""`ActivationCache`: the states of `LM.run_with_cache`, under TransformerLens' names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch

from ...core.model_spec import EXPERTS, INNER_SITES, LOGITS, NUMBERED_SITES, OF_PASSES, PATTERN, STATE, ModelSpec
from ...hooks.captures.by_site import BySite
from ...hooks.site import KINDS, PART_KINDS, TRANSFORMER_LENS, WITHOUT_LAYER, Site, expand, in_part

NamesFilter = str | Site | Sequence[str | Site] | Callable[[str], bool] | None
"""A site's name or pattern, several, or a function of TransformerLens' name. None: all sites."""

LENS_NAMES = {kind: name for name, kind in TRANSFORMER_LENS.items() if not name.endswith("hook_normalized")}
"""Kind of site -> TransformerLens' name, where both have the same value."""
OF_TRANSFORMER_LENS = frozenset({
    "accumulated_resid", "apply_ln_to_stack", "compute_head_results", "decompose_resid", "get_full_resid_decomposition",
    "get_neuron_results", "logit_attrs", "logit_lens", "stack_activation", "stack_head_results", "stack_neuron_results",
})  # fmt: skip
"""Methods of TransformerLens' `ActivationCache`."""


def lens_name(site: Site) -> str:
    """TransformerLens' name of a site; the site's own where TransformerLens has none with the same value."""
    name = LENS_NAMES.get(site.kind)
    return str(site) if name is None else name.format(site.layer)


def select_sites(
    names: NamesFilter, model: ModelSpec, inner_sites: frozenset[str] = frozenset(INNER_SITES), captured: bool = True
) -> list[Site]:
    """The sites that a filter selects, in the order of a forward pass.

    Args:
        model: spec with family and number of layers.
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
            if site.kind in OF_PASSES:
                what = {PATTERN: "attention patterns", STATE: "recurrent states"}.get(site.kind, "keys and values")
                raise ValueError(f"{site}: {what} are captured by lm.generate(prompt, capture=['{site}'])")

    def order(site: Site) -> tuple[int, int]:
        kind = KINDS.index(site.kind)
        if site.layer is not None:
            return site.layer, kind
        return (-1, kind) if site.kind == "embed" else (model.num_hidden_layers, kind)

    return sorted(dict.fromkeys(found), key=order)


def part_sites(model: ModelSpec) -> list[str]:
    """The sites of the parts that run before the language model, as patterns: "vision.resid_post.*", "vision.out"."""
    return [
        in_part(kind, part) + ("" if kind in WITHOUT_LAYER else ".*")
        for part, spec in model.parts.items()
        for kind in spec.family.points
        if kind in PART_KINDS.get(part, ("embed", "resid_post"))
    ]


def select_traced_sites(names: NamesFilter, model: ModelSpec) -> list[Site]:
    """`select_sites` for blocks, which read the value at a module: a router returns more than its logits.

    Raises:
        ValueError: an error of `select_sites`, or a router that is named.
    """
    found = select_sites(names, model, captured=False)
    routers = [site for site in found if site.kind in ("router", EXPERTS)]
    if routers and not (names is None or callable(names)):
        raise ValueError(
            f"{routers[0]} is not served here: a declared intervention or a capture takes it, or a trace, by the router's module"
        )
    return [site for site in found if site not in routers]


class ActivationCache(BySite):
    """States by site: [batch, tokens, width], and [batch, tokens, heads, head_dim] for `q`, `k`, `v` and `z`. On the CPU.

    Iteration yields TransformerLens' names (`blocks.3.hook_resid_post`). A key is any name of a site, or TransformerLens' short
    form: ``cache["resid_post", 3]``.

    It has the methods of TransformerLens' cache, such as `accumulated_resid`, `stack_head_results` and `logit_attrs`. These need
    its library (``pip install -e ".[lens]"``) and a local `LM`.

    Args:
        num_layers: number of layers of the model.
        states: site -> states.
        lm: the model, for TransformerLens' methods. Held by a weak reference.
    """

    def __init__(self, num_layers: int, states: Mapping[Site, torch.Tensor], lm: Any = None) -> None:
        super().__init__(num_layers)
        self._found = {str(site): rows for site, rows in states.items()}
        self._names = {str(site): lens_name(site) for site in states}
        self._lm: Callable[[], Any] = (lambda: None) if lm is None else weakref.ref(lm)

    @cached_property
    def transformer_lens(self) -> Any:
        """The states as the class that `lens.Bridge.run_with_cache` returns.

        Raises:
            ImportError: transformer-lens is not installed.
            RuntimeError: the `LM` of the states was deleted.
            TypeError: an `LM` of a server.
        """
        lm = self._lm()
        if lm is None:
            raise RuntimeError("TransformerLens' methods need the LM of these states, which was deleted")
        return lm._bridge().cache_of(self._tensors)

    def __getattr__(self, name: str) -> Any:
        if name not in OF_TRANSFORMER_LENS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.transformer_lens, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.values())
