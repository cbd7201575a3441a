"""`PassOptions`: a trace's options for its passes, by transformers' keywords."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class PassOptions(NamedTuple):
    """Options of a traced request's passes.

    Attributes:
        eager_attention: whether transformers' own attention forward and eager attention run. `.source` serves its operations.
        output_attentions: the model's output has the attention weights of all layers; implies `eager_attention`.
        output_hidden_states: the model's output has the hidden states of all layers.
    """

    eager_attention: bool = False
    output_attentions: bool = False
    output_hidden_states: bool = False

    @property
    def exclusive(self) -> bool:
        """Whether no other request takes part in such a pass."""
        return any(self)

    @property
    def modules_for(self) -> str:
        """Reason that such a pass runs module by module, wherever blocks wait, or ""."""
        if self.eager_attention:
            return "a trace asks for transformers' own attention"
        return "a trace asks for the hidden states of all layers" if self.output_hidden_states else ""


NONE = PassOptions()


def options_of(traces: Iterable[PassOptions]) -> PassOptions:
    """The options of a pass in which traces with these options take part."""
    found = NONE
    for options in traces:
        if options is not NONE:
            found = PassOptions(*map(any, zip(found, options, strict=True)))
    return found


def take_options(kwargs: dict[str, Any], default: PassOptions = NONE) -> PassOptions:
    """Take transformers' keywords out of the keywords of a trace.

    Args:
        default: options of a trace without these keywords.

    Raises:
        ValueError: an attention implementation other than "eager", or nnsight's `remote`.
    """
    if kwargs.pop("remote", False):  # scripts for nnsight and nnterp say remote=False
        raise ValueError("remote=True runs on NDIF's servers: LM.connect(url) runs traces on a server of this project")
    implementation = kwargs.pop("attn_implementation", None)
    if implementation not in (None, "eager"):
        raise ValueError(
            f"attn_implementation={implementation!r}: 'eager' runs transformers' own attention, with weights to read and edit; "
            "leave it out for the engine's kernels"
        )
    attentions = bool(kwargs.pop("output_attentions", None))
    states = bool(kwargs.pop("output_hidden_states", None))
    if implementation is None and not (attentions or states):
        return default
    return PassOptions(attentions or implementation == "eager" or default.eager_attention, attentions, states)
