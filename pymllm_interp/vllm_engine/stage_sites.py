"""The part of a request's captures that a pipeline rank makes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from ..core.model_spec import ModelSpec, site_index
from ..hooks.captures.spec import Capture
from ..hooks.site import NORMED, Site, expand, stream_of


def number_of(site: Site, model: ModelSpec) -> int:
    """Number of the site with the state that a capture reads. Attention and MLP read the stream."""
    return site_index(stream_of(site, model) if site.kind in NORMED else site, model.num_hidden_layers)


def part_of_captures(captures: Sequence[Capture], model: ModelSpec, sites: Container[int]) -> list[Capture]:
    """The captures at these sites, one for each.

    Args:
        sites: numbers of the sites.
    """
    return [
        replace(spec, site=site)
        for spec in captures
        for site in expand(spec.site, model.num_hidden_layers, model.family)
        if number_of(site, model) in sites
    ]
