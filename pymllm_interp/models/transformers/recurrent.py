"""Modules of transformers with a recurrent state, over the slots of a pass's requests.

State-space layers, linear attention and short convolutions carry a state from token to token. Their modules take a batch of
sequences of one length, and the pass is flat. So `RecurrentModule` stands in place of the forward of such a module. It runs the
module for all requests with one row as one batch, and once for each other request. All other modules see the flat batch.

The module's cache is a `LayerStates`: copies of the slots' states, which are written back after the module ran.

Some modules ignore their state in a call with several tokens, such as Mamba's in transformers. `check_states` finds them. Later
chunks of a prompt run token by token there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import local
from typing import Any

import torch
from torch import nn

from ...core.current_pass import current_batch
from ...core.forward_batch import ForwardBatch, LayerStatePool, PartQuery
from ...core.unsupported import UnsupportedModelError
from ...mem_cache.state_pool import StateKind, StateLayout
from .cache_probe import probed_positions
from .parts.cache_names import cache_parameter
from .parts.rows import CallRows, flat, joined, padded, parts_of, taken

ASKED_OF_CACHES = {"has_previous_state", "get_linear_cache", "get_recurrent_state", "get_conv_state"}
"""Methods of a cache by which a module finds its state. Attention layers do not call them."""

LEAST = -1e38
"""RWKV's largest exponent so far, of no token."""

StateKey = tuple[StateKind, int]
"""Kind of a state, and its index among the states of this kind in a layer."""


class LayerStates:
    """Cache of a module with states: one layer's, for the requests of one call.

    Args:
        states: [batch, *shape] each; None at the start of the requests.
    """

    record_past = False

    def __init__(self, states: dict[StateKey, torch.Tensor] | None = None) -> None:
        self._is_continued = states is not None
        self.states = {} if states is None else states

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        """Convolution states by index; a module may write to them in place."""
        return {index: state for (kind, index), state in self.states.items() if kind == "conv"}

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        """Recurrent states by index; a module may write to them in place."""
        return {index: state for (kind, index), state in self.states.items() if kind == "recurrent"}

    @property
    def layers(self) -> LayerStates:
        """The cache as a list of layers: each is this one."""
        return self

    def __getitem__(self, layer_idx: int) -> LayerStates:
        return self

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the requests have computed positions."""
        return self._is_continued

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution; None at the start of the requests."""
        return self.states["conv", state_idx] if self._is_continued else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A recurrent state; None at the start of the requests."""
        return self.states["recurrent", state_idx] if self._is_continued else None

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether the states of all positions are kept, to take some back."""
        return self.record_past

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Keep the last inputs of a convolution [batch, channels, tokens]. Returns them, behind the ones from before."""
        key: StateKey = ("conv", state_idx)
        if self._is_continued:
            size, inputs = self.states[key].shape[-1], torch.cat((self.states[key], conv_states), -1)
        else:
            size, inputs = conv_kernel_size or conv_states.shape[-1], conv_states
            if inputs.shape[-1] < size:
                inputs = nn.functional.pad(inputs, (size - inputs.shape[-1], 0))
        self.states[key] = inputs[..., -size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep a recurrent state [batch, ...]."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """MiniMax's name of the recurrent state."""
        return self.states.get(("recurrent", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Update the state, under MiniMax's name."""
        self.update_recurrent_state(linear_cache, layer_idx)


class _Probed(local):
    continued = False


_probed = _Probed()


@contextmanager
def as_decoding() -> Iterator[None]:
    """Give the tokens of a probe zero states, as in a decode pass."""
    _probed.continued = True
    try:
        yield
    finally:
        _probed.continued = False


class PartModule:
    """Replacement of the forward of a module that runs several times in a pass, for parts of its rows."""

    why = ""
    """Reason that it runs so, for messages: "...which `why`"."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self._forward: Any = module.forward
        self._module = module
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch, probed = current_batch(), probed_positions()
        if batch is None and probed is None:
            return self._forward(*args, **kwargs)
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        rows = given[self._names[0]].shape[1]
        if batch is None:
            return self._probe(given, rows)
        query = batch.hook_query if isinstance(batch.hook_query, PartQuery) and batch.batch_size > 1 else None
        apart = [] if query is None else query.rows_inside(self.path)
        parts = parts_of(batch, self._keeps(batch), {start for start, _ in apart})
        if len(parts) == 1 and not parts[0].batched:  # one request
            return padded(self._call(given, rows, parts[0], batch), rows)
        outs = []
        for part in parts:
            with query.serve_part(self.path, span=part.span(apart)) if query is not None else nullcontext():
                outs.append((part, flat(self._call(given, rows, part, batch), part.batched)))
        return padded(outs[0][1], rows) if len(outs) == 1 else joined(outs, rows)

    def _keeps(self, batch: ForwardBatch) -> bool:
        """Whether requests of the pass continue from the states of earlier passes."""
        raise NotImplementedError

    def _call(self, given: dict[str, Any], rows: int, part: CallRows, batch: ForwardBatch) -> Any:
        """The module's output for a part: [rows, 1, ...] if it is `batched`, else [1, rows, ...]."""
        raise NotImplementedError

    def _probe(self, given: dict[str, Any], rows: int) -> Any:
        """The output with each token as a separate request, outside of the engine's passes."""
        raise NotImplementedError


class RecurrentModule(PartModule):
    """Replacement of the forward of a module with a recurrent state.

    Attributes:
        layouts: layouts of its states by key, known after a first pass.
        first: number of its first state in the pool.
        by_token: later chunks of a prompt run token by token.
        arguments: arguments of its call in the first pass, by name.
    """

    why = "has a recurrent state"

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(path, module)
        self.layouts: dict[StateKey, StateLayout] = {}
        self.first, self.by_token = 0, False
        self.arguments: dict[str, Any] | None = None

    def _keeps(self, batch: ForwardBatch) -> bool:
        return batch.state_pool is not None and not batch.fresh_kv_only

    def _call(self, given: dict[str, Any], rows: int, part: CallRows, batch: ForwardBatch) -> Any:
        own = {name: taken(value, rows, part) for name, value in given.items()}
        pool = None if batch.fresh_kv_only else batch.state_pool
        if pool is None:
            return self.call(own, None)
        slots = batch.req_pool_indices[part.requests]
        states = LayerStates(self._read(pool, slots) if part.continued else None)
        out = self.run(own, states)
        for index, key in enumerate(self.layouts, self.first):
            pool.write(index, slots, states.states[key])
        return out

    @property
    def kind(self) -> type[nn.Module]:
        """The module's class in transformers."""
        return type(self._module)

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer that it is in."""
        return next((int(part) for part in self.path.split(".") if part.isdigit()), None)

    @property
    def is_exact(self) -> bool:
        """Whether the first pass had float32."""
        return self.arguments is not None and self.arguments[self._names[0]].dtype is torch.float32

    def call(self, given: dict[str, Any], states: LayerStates | None) -> Any:
        """The module's own forward. Without states it keeps none."""
        return self._forward(**given | {cache_parameter(self._names): states})

    def run(self, given: dict[str, Any], states: LayerStates) -> Any:
        """The module's output for [batch, tokens, ...]; updates `states`."""
        tokens = given[self._names[0]].shape[1]
        if not (self.by_token and states.has_previous_state() and tokens > 1):
            return self.call(given, states)
        whole = slice(0, 1)
        outs = []
        for token in range(tokens):
            part = CallRows(slice(token, token + 1), whole, True, False)
            own = {name: taken(value, tokens, part) for name, value in given.items()}
            outs.append((part, self.call(own, states)))
        return joined(outs, tokens)

    def _probe(self, given: dict[str, Any], rows: int) -> Any:
        every = CallRows(slice(0, rows), slice(0, rows), False, True)
        own = {name: taken(value, rows, every) for name, value in given.items()}
        zeros = {
            key: torch.zeros(rows, *layout.shape, dtype=layout.dtype, device=given[self._names[0]].device)
            for key, layout in self.layouts.items()
        }
        states = LayerStates(zeros if _probed.continued else None)
        out = self.call(own, states)
        if self.arguments is None:
            self.arguments = given
            for key, state in states.states.items():
                self.layouts[key] = StateLayout(key[0], tuple(state.shape[1:]), state.dtype, self.layer)
        return flat(out, True)

    def continuation_error(self) -> float:
        """Relative error of a run in two chunks against a run in one, for the tokens of the first pass.
        Returns the largest difference of outputs and states, over their largest value."""
        given, ends, outs = self.arguments, [], []
        assert given is not None
        tokens = given[self._names[0]].shape[1]
        for sizes in ((tokens,), (1, tokens - 1)):
            states, start, parts = LayerStates(), 0, []
            for size in sizes:
                part = CallRows(slice(start, start + size), slice(0, 1), start > 0, False)
                states = LayerStates(states.states if start else None)
                own = {name: taken(value, tokens, part) for name, value in given.items()}
                parts.append((part, self.run(own, states)))
                start += size
            outs.append(joined(parts, tokens) if len(parts) > 1 else parts[0][1])
            ends.append(states.states)
        first, second = (out if isinstance(out, tuple) else (out,) for out in outs)
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(b, torch.Tensor)]
        pairs += [(ends[0][key], ends[1][key]) for key in self.layouts]
        return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs)

    def _read(self, pool: LayerStatePool, slots: torch.Tensor) -> dict[StateKey, torch.Tensor]:
        return {key: pool.read(index, slots) for index, key in enumerate(self.layouts, self.first)}


class RecurrentGemmaModule(RecurrentModule):
    """RecurrentGemma keeps its states in attributes of its modules: here only while they run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_batch() is None and probed_positions() is None:
            return self.call({**dict(zip(self._names, args, strict=False)), **kwargs}, None)
        return super().__call__(*args, **kwargs)

    def call(self, given: dict[str, Any], states: LayerStates | None) -> Any:
        kept = LayerStates() if states is None else states
        block: Any = self._module
        before = (
            vars(block).get("conv1d_state"),
            vars(block.rg_lru).get("recurrent_states"),
        )  # a block of a trace calls it
        block.conv1d_state, block.rg_lru.recurrent_states = kept.conv_states.get(0), kept.recurrent_states.get(0)
        try:
            out = self._forward(**given | {"use_cache": states is not None})
            if states is not None:
                own: list[Any] = [block.conv1d_state, block.rg_lru.recurrent_states]
                states.states |= {("conv", 0): own[0], ("recurrent", 0): own[1]}
        finally:
            del vars(block)["conv1d_state"], vars(block.rg_lru)["recurrent_states"]
            if before[0] is not None:
                block.conv1d_state, block.rg_lru.recurrent_states = before
        return out


class RwkvModule(RecurrentModule):
    """RWKV's modules take a list of five states, of all layers.

    These are the last token's input of either module, and three of attention.
    Here the first two are of the module's own layer, and the three are one state [3, width].
    """

    def call(self, given: dict[str, Any], states: LayerStates | None) -> Any:
        hidden = given["hidden"]
        if states is None:
            out, _ = self._forward(**given | {"state": None})
            return out, None
        batch, tokens, _ = hidden.shape
        mixes: Any = getattr(self._module, "attention_hidden_size", 0)  # the other module of a layer only shifts tokens
        if states.has_previous_state():
            shift, kept = states.states["conv", 0], states.states.get(("recurrent", 0))
        else:
            shift, kept = hidden.new_zeros(batch, hidden.shape[-1]), None
        if mixes and kept is None:
            kept = hidden.new_zeros(batch, 3, mixes, dtype=torch.float32)
            kept[:, 2] = LEAST
        before = _OfLayer(shift.unsqueeze(1) if tokens == 1 else shift)  # which its code broadcasts over the batch
        parts = [] if kept is None else [_OfLayer(part) for part in kept.unbind(1)]
        out, _ = self._forward(**given | {"state": [before, before, *parts]})
        states.states["conv", 0] = before.value
        if mixes:
            states.states["recurrent", 0] = torch.stack([part.value for part in parts], 1)
        return out, None


class _OfLayer:
    """One of RWKV's states as its code indexes it, by the last dim, for one layer.

    Attributes:
        value: [batch, width], replaced by writes.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.value

    def __setitem__(self, index: Any, value: torch.Tensor) -> None:
        self.value = value


def serve_states(model: nn.Module) -> list[RecurrentModule]:
    """Put a `RecurrentModule` in place of the forward of each module with a recurrent state."""
    found = []
    for path, module in model.named_modules():
        if "forward" in vars(module):
            continue
        forward = inspect.unwrap(type(module).forward)
        names = set(getattr(forward, "__code__", serve_states.__code__).co_names)
        if hasattr(module, "conv1d_state") and hasattr(module, "rg_lru"):
            found.append(own := RecurrentGemmaModule(path, module))
        elif hasattr(module, "time_shift") and "state" in inspect.signature(type(module).forward).parameters:
            found.append(own := RwkvModule(path, module))
        elif names & ASKED_OF_CACHES:
            found.append(own := RecurrentModule(path, module))
        else:
            continue
        module.forward = own  # pyright: ignore[reportAttributeAccessIssue]
        vars(module)["part_module"] = own  # traces wrap `forward`
    return found


def check_states(name: str, modules: Sequence[RecurrentModule]) -> list[StateLayout]:
    """Find out how the states of all modules continue. A first pass has run them.

    Args:
        name: name of the model's class.

    Returns:
        the states of all modules, as a pool numbers them.

    Raises:
        UnsupportedModelError: chunks of a prompt give other outputs or states than the whole.
    """
    layouts: list[StateLayout] = []
    modules = [module for module in modules if module.arguments is not None]  # that a pass runs
    for kind in {module.kind for module in modules}:
        alike = [module for module in modules if module.kind is kind]
        errors = [module.continuation_error() for module in alike]
        for module in alike:
            module.by_token = True
        of_tokens = [module.continuation_error() for module in alike]
        exact, most = (1e-4, 1e-3) if alike[0].is_exact else (2e-3, 5e-2)
        by_token = any(a > max(3 * b, exact) for a, b in zip(errors, of_tokens, strict=True))
        for module, error in zip(alike, of_tokens if by_token else errors, strict=True):
            module.by_token = by_token
            if error > most:
                raise UnsupportedModelError(f"{name} cannot be served: {module.path} does not continue from its state")
    for module in modules:
        module.first, module.arguments = len(layouts), None
        layouts += module.layouts.values()
    return layouts
