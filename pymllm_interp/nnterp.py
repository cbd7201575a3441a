"""nnterp's `StandardizedTransformer` over an engine.

nnterp 1.3 takes its name for a traced value from a module that nnsight 0.8 no longer has. Importing this file puts the name
there, so import it before nnterp.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

try:
    import_module("nnsight.intervention.tracing")
except ModuleNotFoundError:
    for _name in ("nnsight.intervention.tracing", "nnsight.intervention.tracing.globals"):
        sys.modules[_name] = ModuleType(_name)
    sys.modules["nnsight.intervention.tracing.globals"].Object = torch.Tensor  # pyright: ignore[reportAttributeAccessIssue]

from nnterp import StandardizedTransformer, get_rename_dict
from nnterp.rename_utils import IOType, LayerAccessor

from .lm import LM

_ACCESSORS = {
    "layers_input": (None, IOType.INPUT),
    "layers_output": (None, IOType.OUTPUT),
    "attentions": ("self_attn", None),
    "attentions_input": ("self_attn", IOType.INPUT),
    "attentions_output": ("self_attn", IOType.OUTPUT),
    "mlps": ("mlp", None),
    "mlps_input": ("mlp", IOType.INPUT),
    "mlps_output": ("mlp", IOType.OUTPUT),
}


def renames() -> dict[str, Any]:
    """nnterp's aliases, and `norm` for the final norm, which its functions expect of models that are not its own class."""
    return {
        name: [alias, "norm"] if alias == "ln_final" and name != "norm" else alias
        for name, alias in get_rename_dict().items()
    }


class Accessors:
    """nnterp's accessors and methods, for an nnsight model with modules that are renamed by `renames`."""

    def add_accessors(self) -> None:
        """Set `layers_output` and its kin."""
        for name, (module, end) in _ACCESSORS.items():
            object.__setattr__(self, name, LayerAccessor(self, module, end))

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)  # pyright: ignore[reportAttributeAccessIssue]

    token_embeddings = StandardizedTransformer.token_embeddings
    detect_layer_output_type = StandardizedTransformer.detect_layer_output_type
    skip_layer = StandardizedTransformer.skip_layer
    skip_layers = StandardizedTransformer.skip_layers
    steer = StandardizedTransformer.steer
    project_on_vocab = StandardizedTransformer.project_on_vocab
    get_topk_closest_tokens = StandardizedTransformer.get_topk_closest_tokens
    probs_to_dict = StandardizedTransformer.probs_to_dict

    @property
    def next_token_probs(self) -> Any:
        """Probabilities of the token after the prompt, [batch, vocab]; within a block."""
        return self.output.logits[:, -1].softmax(-1)  # pyright: ignore[reportAttributeAccessIssue]


class StandardizedLM(Accessors, LM):
    """An `LM` with nnterp's names: `layers_output[i]`, `attentions_input[i]`, `mlps[i]`, `token_embeddings`, `steer`.

    nnterp's functions (`nnterp.interventions`, `nnterp.nnsight_utils`) take it as a model. `logits` is the `LM`'s, of the current
    step; nnterp's are ``output.logits``.

    Args:
        model, kwargs: see `LM`.
        rename: further aliases.
    """

    def __init__(self, model: Any = "demo", *, rename: dict[Any, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(model, rename={**renames(), **(rename or {})}, **kwargs)
        self.add_accessors()
        if self.tokenizer is not None:
            self.tokenizer.padding_side = "left"  # as batches here are padded; nnterp's functions look
