"""`ConfigView`: a model's transformers config, which is read by TransformerLens' names of sizes, too."""

from __future__ import annotations

from copy import copy
from operator import attrgetter
from typing import Any

from ...core.unsupported import ATTRIBUTES


class ConfigView:
    """A read-only view of a transformers config.

    Attributes are the config's. Sizes also have TransformerLens' names: `n_layers`, `n_heads`, `d_model`, `d_head`, `d_mlp`,
    `d_vocab`, `n_ctx`. `lm.hf_config` is the config itself.

    Args:
        lm: has `hf_config`, and the sizes.
    """

    __slots__ = ("_lm",)

    def __init__(self, lm: Any) -> None:
        object.__setattr__(self, "_lm", lm)

    def __getattr__(self, name: str) -> Any:
        config = self._lm.hf_config
        if name in ATTRIBUTES and not hasattr(config, name):
            return attrgetter(ATTRIBUTES[name])(self._lm)
        try:
            return getattr(config, name)
        except AttributeError:
            raise AttributeError(
                f"{type(config).__name__} has no attribute {name!r}: print(lm.cfg) shows its names"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"lm.cfg.{name} = ... is not served: the model is built. LM(folder, hf_config=..., load_format='dummy') takes a config"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy, (self._lm.hf_config,)  # a copy is the config's, and may be edited

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._lm.hf_config), *ATTRIBUTES})

    def __repr__(self) -> str:
        return repr(self._lm.hf_config)
