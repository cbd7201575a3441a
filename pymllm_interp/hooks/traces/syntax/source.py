"""`.source`: the operations of a module's forward.

An attention shows transformers' own forward, which runs in passes with eager attention (`PassOptions.eager_attention`). All
other modules show the engine's forward. Its names for operations are transformers' names, or are not in transformers.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from inspect import unwrap
from types import CodeType
from typing import Any, NamedTuple

from greenlet import getcurrent

from ..blocks.block_analysis import codes_of
from ..nnsight_compat import (
    Envoy,
    Source,
    SourceEnvoy,
    compiled,
    install_controller,
    install_source,
    instrument,
    make_op,
)

NOT_EAGER = (
    "`{0}.source` holds the operations of transformers' own attention, and this pass runs the engine's kernels: open the "
    "trace with attn_implementation='eager' (a block that itself says `{1}.source` needs no argument)"
)


OF_PARTS = (
    "`{0}.source`: the module {1}, and runs several times in a pass: its operations are not served. Its input, "
    "its output and the modules inside of it are"
)


class EngineSource(Source):
    """The operations of a forward. The error of an unknown name says which forward it was looked up in."""

    def __getattr__(self, name: str) -> SourceEnvoy:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("__"):
                raise
            whose = "the engine's forward, which differs from transformers' there"
            if _is_attention(self.envoy):
                whose = "transformers' forward"
            raise AttributeError(f"{error} (operations of {whose})") from None


def source_of(envoy: Envoy) -> EngineSource:
    """The operations of the envoy's module. Raises ValueError: the operations are in an attention, and the trace runs the engine's
    kernels. Or the module runs several times in a pass."""
    own_parts: Any = getattr(envoy._module, "part_module", None)
    if own_parts is not None:
        raise ValueError(OF_PARTS.format(envoy.path, own_parts.why))
    if not _is_attention(envoy):
        return EngineSource(envoy, envoy.path, install_source(envoy))
    mediator = getattr(getcurrent(), "mediator", None)
    block = mediator() if mediator is not None else None
    trace = getattr(block, "trace", None)
    if trace is not None and not trace.options.eager_attention:
        raise ValueError(NOT_EAGER.format(envoy.path, envoy.path.rpartition(".")[2]))
    own = _transformers_forward(envoy)
    if own is None:  # transformers' own module
        return EngineSource(envoy, envoy.path, install_source(envoy))
    if own.instrumented is None:
        state = install_controller(envoy)
        own.instrumented, _ = instrument(own.original, make_op(lambda: state.active()[:2]))
    return EngineSource(envoy, envoy.path, compiled(own.original))


class AttentionWords(NamedTuple):
    """Names that tell the source of an attention."""

    modules: frozenset[str]
    """Attributes of decoder layers, and aliases of them."""
    operations: frozenset[str]


def attention_words(tree: Envoy) -> AttentionWords:
    """The names of a model's attentions."""
    attentions = [envoy for envoy in tree.modules() if _is_attention(envoy)]
    names = {envoy.path.rpartition(".")[2] for envoy in attentions}
    aliases = (entry for envoy in tree.modules() for entry in envoy._aliases.items())
    modules = names | {alias for alias, path in aliases if path.rpartition(".")[2] in names}
    operations = {name for envoy in attentions[:1] for name in compiled(_attention_forward(envoy)).names}
    return AttentionWords(frozenset(modules), frozenset(operations))


def reads_attention_source(words: Callable[[], AttentionWords], codes: Iterable[CodeType]) -> bool:
    """Whether the code of a block uses `.source` of an attention, as far as names tell.

    Args:
        words: attention words of the model; called if the code uses any `.source`.
    """
    uses = [use for code in codes for use in source_uses(code)]
    return any(owner in words().modules or operation in words().operations for owner, operation in uses)


@lru_cache(maxsize=1024)
def source_uses(code: CodeType) -> frozenset[tuple[str, str]]:
    """(name before, name after) of each `.source` in the code of a block and of its functions; "" for none."""
    return frozenset(use for part in codes_of(code) for use in _uses(part))


def _uses(code: CodeType) -> Iterator[tuple[str, str]]:
    if "source" not in code.co_names:
        return
    instructions = list(dis.get_instructions(code))
    for i, instruction in enumerate(instructions):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval == "source":
            before, after = instructions[i - 1], instructions[i + 1] if i + 1 < len(instructions) else None
            loads = after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
            yield (
                str(before.argval) if before.opname.startswith("LOAD") else "",
                str(after.argval) if loads else "",  # pyright: ignore[reportOptionalMemberAccess]
            )


def _is_attention(envoy: Envoy) -> bool:
    """Whether the envoy's module is an attention, native or of transformers (models/transformers/attention_interface.py)."""
    return not {"transformers_forward", "paged_calls"}.isdisjoint(envoy._module.__dict__)


def _attention_forward(envoy: Envoy) -> Callable[..., Any]:
    """The forward of an attention in transformers."""
    own = _transformers_forward(envoy)
    return unwrap(type(envoy._module).forward) if own is None else own.original


def _transformers_forward(envoy: Envoy) -> Any:
    """The `TransformersForward` of the envoy's module (models/transformers/transformers_pass.py), or None."""
    return envoy._module.__dict__.get("transformers_forward")
