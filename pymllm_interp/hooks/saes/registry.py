"""`SAERegistry`: the SAEs of an engine, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from ...core.model_spec import ModelSpec
from ..by_name import ByName
from ..site import expand
from ..spec import Spec
from .sae import SAE

SpecT = TypeVar("SpecT", bound=Spec)


class SAERegistry(ByName[SAE]):
    """SAEs by name, on the model's device, for captures and interventions that hold a name in place of an SAE.

        lm.saes["sea"] = SAE.load(path)                    # or a path, or an SAE of the package sae_lens
        Capture(lm.saes["sea"].site, reduce=Features("sea"))

    Replacing or deleting an SAE affects later requests only.

    Args:
        model: model that the SAEs must fit.
    """

    kind, attribute, example = "SAE", "saes", "SAE.load(path)"
    over_http = "serve --sae NAME=PATH"

    def __init__(self, model: ModelSpec, device: torch.device | str) -> None:
        super().__init__()
        self._model, self._device = model, device
        self._moved: WeakKeyDictionary[SAE, tuple[int, SAE]] = WeakKeyDictionary()  # (version, copy on the device)

    def __setitem__(self, name: str, source: SAE | str | Path | Any) -> None:
        """Store an SAE under `name`.

        Raises:
            ValueError: an empty name, no site, a site that the model lacks, another width, or an error of `SAE.load`.
            FileNotFoundError: as `SAE.load`.
        """
        self._check_name(name)
        sae = source if isinstance(source, SAE) else SAE.load(source)
        check_fits(sae, self._model, f"SAE {name!r}")
        self._keep(name, self._copy_of(sae))

    def resolved(self, spec: SpecT) -> SpecT:
        """A spec with SAEs on the model's device, in place of names and of SAEs elsewhere. Without SAEs it is the spec itself.

        If an SAE or a lens was edited in place, the spec reads its current values.

        Raises:
            ValueError: an unknown name.
        """
        changes: dict[str, Any] = {}
        if "sae" in spec.__dict__:
            changes["sae"] = self._on_device(spec.__dict__["sae"], spec.name)
        for name, value in spec._content().specs:
            changes[name] = self.resolved(value)
        changes = {name: value for name, value in changes.items() if value is not getattr(spec, name)}
        return replace(spec, **changes) if changes or spec.is_stale else spec  # pyright: ignore[reportArgumentType, reportReturnType, reportCallIssue]

    def _on_device(self, sae: SAE | str, who: str) -> SAE:
        if isinstance(sae, str):
            try:
                return self[sae]
            except KeyError as error:
                raise ValueError(f"{who}: {error.args[0]}") from None
        return self._copy_of(sae)

    def _copy_of(self, sae: SAE) -> SAE:
        """The SAE on the device; one object for each SAE, until it is edited."""
        version = sae.version
        known, found = self._moved.get(sae, (-1, sae))
        if known != version:
            found = sae.to(self._device)
            if found is not sae:  # a value that is its own key would never be dropped
                self._moved[sae] = version, found
        return found

    def close(self) -> None:
        """Drop all SAEs."""
        self._found.clear()
        self._moved.clear()


def check_fits(sae: SAE, model: ModelSpec, who: str) -> None:
    """Check that a model has the sites of an SAE, with its widths.
    Raises ValueError: the model lacks a site or its width; the message names the SAE's own model."""
    of = f", of {sae.model_name}," if sae.model_name else ""
    if sae.site is None:
        raise ValueError(
            f"{who}{of} does not say which site it reads: SAE.load(..., site='resid_post.12') or sae.at(site)"
        )
    for site, width in ((sae.site, sae.width), (sae.site_out, sae.d_out)):
        if site is None:
            continue
        try:
            sites = expand(site, model.num_hidden_layers, model.family)
        except ValueError as error:
            raise ValueError(f"{who}{of} is for another model: {error}") from None
        kind = sites[0].kind
        if width != len(sites) * model.width(kind):
            own, settings = len(sites) * model.width(kind), " * ".join(model.settings(kind))
            settings = f"{len(sites)} sites * {settings}" if len(sites) > 1 else settings
            raise ValueError(
                f"{who}{of} is for another model: it has {width} values at {site}; this model has {own} ({settings})"
            )
