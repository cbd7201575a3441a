"""`BridgeCache`: TransformerLens' cache; its keys are names of sites, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformer_lens

from ..client.calls.activation_cache import lens_name
from ..hooks.site import Site


class BridgeCache(transformer_lens.ActivationCache):
    """Values of hook points in the order of a forward pass.

    A key is TransformerLens' name or short form, or any name of a site: ``cache["resid_post.3"]``.
    """

    def __getitem__(self, key: Any) -> torch.Tensor:
        if key not in self.cache_dict and isinstance(key, str | Site):
            try:
                site = Site.parse(str(key))
            except ValueError:
                return super().__getitem__(key)
            if site.layer is not None:
                site = replace(site, layer=site.layer % self.model.cfg.n_layers)
            key = lens_name(site)
        return super().__getitem__(key)
