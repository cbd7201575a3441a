"""TransformerLens' names over an `LM`: its `RemoteBridge`. nnterp's names are in `pymllm_interp.nnterp`.

from pymllm_interp import lens

bridge = lens.Bridge(lm)
logits, cache = bridge.run_with_cache("The Eiffel Tower is in", names_filter="blocks.3.hook_resid_post")

`lens.patching` has the functions of `transformer_lens.patching`. Both need it: ``pip install -e ".[lens]"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.extras import names_of_extra

if TYPE_CHECKING:
    from . import patching
    from .bridge import Bridge

__all__ = ["Bridge", "patching"]
__getattr__ = names_of_extra(
    __name__, "lens",
    {
        "Bridge": ("bridge", "transformer_lens"), "patching": ("patching", "transformer_lens"),
        "StandardizedLM": (".nnterp", "nnterp"),  # where it was before
    },
)  # fmt: skip
