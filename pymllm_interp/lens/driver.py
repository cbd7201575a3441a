"""`EngineDriver`: TransformerLens' `Driver` over an `LM`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, rearrange
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.driver_protocol import ForwardResult, Intervention, TensorLike
from transformer_lens.model_bridge.sources._driver_base import DriverBase

from ..client.calls.model import ClientModel
from ..client.calls.site_hooks import put_state, state_at
from ..hooks.captures.spec import Capture
from .interventions import declared
from .layout import Layout
from .names import UNSERVED, Place, norm_part, places_of

Edit = Callable[[torch.Tensor], torch.Tensor]
"""value -> the value to put in place; it may be edited in place."""


class EngineDriver(DriverBase):
    """Forward passes of an `LM`, under the names of `TransformerBridge`'s hook points.

    A pass that only captures is a fused one, if all values that are asked for have declared sites. Other passes are traces.

    Args:
        lm: a local `LM`, which stays the caller's.
        bridge_config: TransformerLens' config of the model.
        components: `component_mapping` of TransformerLens' adapter.
        tokenizer: tokenizer for the bridge.
        output_weight: function from a layer to its W_O [heads, head_dim, hidden].
    """

    _supported_features = frozenset({"intervention_callbacks"})

    def __init__(
        self,
        lm: ClientModel,
        bridge_config: TransformerBridgeConfig,
        components: Any,
        tokenizer: Any,
        output_weight: Callable[[int], torch.Tensor],
    ) -> None:
        super().__init__(bridge_config, tokenizer)
        self.lm = lm
        self.output_weight = output_weight
        self.spec = lm.model_spec
        places = places_of(components, self.spec, lm.backend.facts.inner_sites)
        self.places = dict(sorted(places.items(), key=lambda item: item[1].order))
        self.supported_hook_points = frozenset(self.places)
        layers = range(self.spec.num_hidden_layers)
        self.non_fireable_hook_points = (
            frozenset(name.format(layer) for name in UNSERVED for layer in layers) - self.supported_hook_points
        )

    def forward(
        self,
        input_ids: TensorLike | None = None,
        *,
        capture: tuple[str, ...] = (),
        intervene: Mapping[str, Intervention] | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = True,
        attention_mask: Any = None,
        output_attentions: bool = False,
        interventions: Any = None,
        stop_at_layer: int | None = None,
        **kwargs: Any,
    ) -> ForwardResult:
        """One forward pass.

        Args:
            input_ids: [batch, tokens], or [tokens].
            capture: names of hook points.
            intervene: hook point -> function of its value, which runs in a trace. ``{"op": "add", "value": vector}``
                becomes a declared intervention if the hook point has a site. Ops are "suppress", "scale", "add" and
                "set"; "pos" is a position or several.
            max_new_tokens: 1; `lm.generate` generates.
            return_logits: whether the result has logits.
            attention_mask: mask with the shape of `input_ids`; 0 is padding, which is not computed. Its values are zeros.
            output_attentions: ignored; `capture` has the patterns.
            interventions: declared ones, `Steer` and its kin, for each prompt.
            stop_at_layer: end the pass before this layer, in a trace. The result has no logits.

        Returns:
            logits [batch, tokens, vocab], and the captured values [batch, ...] in the order of a forward pass, on the CPU.

        Raises:
            ValueError: an unknown hook point, or no prompt.
        """
        if kwargs:
            raise TypeError(f"EngineDriver.forward() got {', '.join(kwargs)}; it takes interventions and intervene")
        if max_new_tokens != 1:
            raise NotImplementedError(
                "this is one forward pass: generate with bridge.generate(...) or lm.generate(...)"
            )
        layout = Layout.of(input_ids, attention_mask)
        self._check([*capture, *(intervene or {})])
        wanted = set(capture)
        places = [place for name, place in self.places.items() if name in wanted]
        ops, edits = declared(intervene or {}, self.places, self.spec)
        self._check_positions(intervene or {}, layout)
        ops = [*(interventions or ()), *ops]
        if edits or stop_at_layer is not None or any(place.site is None for place in places):
            logits, captured = self._traced(layout, places, edits, ops, stop_at_layer)
        else:
            logits, captured = self._captured(layout, places, ops)
        return ForwardResult(logits=logits if return_logits else None, captured=captured)

    __call__ = forward

    def states(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Contents of captured states by hook point: values at their sites, and the scales of their norms.

        Args:
            rows: captured rows by site, [batch, tokens, ...].
        """
        found = {}
        for name, place in self.places.items():
            if not place.is_eager and str(place.site) in rows and place.captured_part in ("value", "scale"):
                found[name] = self._part(place, place.captured_part, rows[str(place.site)])
        return found

    def _check_positions(self, intervene: Mapping[str, Intervention], layout: Layout) -> None:
        """A "pos" counts from a column that all prompts begin at."""
        named = [name for name, what in intervene.items() if not callable(what) and "pos" in what]
        if named and layout.padded:
            raise ValueError(
                f"intervene[{named[0]!r}] has pos, and the prompts have different lengths: run each on its own, or give a function"
            )

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.places:
                known = "; bridge.hook_dict has the names" if name not in self.non_fireable_hook_points else ""
                raise ValueError(f"this engine has no hook point {name!r}{known}")

    def _captured(
        self, layout: Layout, places: list[Place], ops: list[Any]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits and values of a fused pass."""
        sites = list(dict.fromkeys(place.site for place in places if place.site is not None))
        captures = [Capture(site, positions="prompt") for site in sites]
        outs = self.lm.forward(layout.tokens, capture=captures, interventions=ops)
        values = {}
        for place in places:
            assert place.site is not None
            rows = [out.activations[place.site] for out in outs]
            if place.is_eager:
                values[place.name] = layout.stacked([_by_heads(row) for row in rows], square=True)
            else:
                values[place.name] = layout.stacked([self._part(place, place.captured_part, row) for row in rows])
        return layout.stacked([out.logits for out in outs]), values

    def _traced(
        self, layout: Layout, places: list[Place], edits: dict[str, Edit], ops: list[Any], stop: int | None
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Logits and values of a traced pass, in which functions edit values."""
        eager = any(self.places[name].is_eager for name in edits) or any(place.needs_eager for place in places)
        captured = [place for place in places if place.is_eager and place.site is not None and not eager]
        reached = {*places, *(self.places[name] for name in edits)} - {*captured}
        in_order = sorted(reached, key=lambda place: place.order)
        if eager and len(layout.tokens) > 1 and edits:
            raise ValueError(
                "a pass of transformers' own attention, which has scores, rotated q and k, and patterns to edit, holds one prompt: "
                "run each on its own, or leave these out of names_filter"
            )
        run = _Pass(
            in_order, {place.name for place in places} - {place.name for place in captured}, captured, edits, ops, stop
        )
        if not eager:
            run.edits = {name: layout.edit(edit) for name, edit in edits.items()}
            logits, seen = self._one_trace(layout.tokens, run, eager)
            values = {
                name: value if self.places[name].is_eager else layout.from_trace(value) for name, value in seen.items()
            }
            for place in captured:
                values[place.name] = layout.stacked(seen[place.name], square=True)
            return None if logits is None else layout.from_trace(logits), {
                place.name: values[place.name] for place in places
            }
        found = [self._one_trace([row], run, eager) for row in layout.tokens]
        values = {
            place.name: layout.stacked([seen[place.name][0] for _, seen in found], square=place.is_square)
            for place in places
        }
        return None if stop is not None else layout.stacked(
            [logits[0] for logits, _ in found if logits is not None]
        ), values

    def _one_trace(
        self, tokens: list[list[int]], run: _Pass, eager: bool
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """Logits and values of a trace; of captured patterns, a list of each prompt's [heads, queries, keys]."""
        options: dict[str, Any] = {"interventions": run.ops} if run.ops else {}
        if run.patterns:
            options["capture"] = [place.site for place in run.patterns]
        if eager:
            options["attn_implementation"] = "eager"
            for place in run.reached:
                if place.is_eager:
                    self._attention(place).source  # noqa: B018  # before the pass: its attention then runs operation by operation
        with self.lm.trace(tokens, **options) as tracer:
            values = dict().save()  # pyright: ignore[reportAttributeAccessIssue]
            found = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for place in run.reached:
                value = self._visit(place, run.edits.get(place.name))
                if place.name in run.wanted:
                    values[place.name] = value
            if run.stop is None:
                found.append(self.lm.output.logits)
            else:
                tracer.stop()
        for place in run.patterns:
            values[place.name] = [_by_heads(activations[place.site]) for activations in tracer.captures]
        return (found[0] if found else None), values

    def _visit(self, place: Place, edit: Edit | None) -> torch.Tensor:
        """Read a place within a block, and let a function edit it. Returns a copy of the value, with which the model continues."""
        if place.is_eager:
            return self._visit_attention(place, edit)
        point = self.lm.get(place.module)
        whole = getattr(point, place.end)
        held: torch.Tensor = whole[0] if isinstance(whole, tuple) else whole
        value = state_at(place.kind, held, self.spec) if place.kind else held
        seen = self._part(place, place.part, value).clone()
        if edit is None:
            return seen
        before, (new, changed) = seen.clone(), _edited(place, edit, seen)
        if not changed:
            return seen
        if place.edit_instead:
            raise NotImplementedError(f"{place.name} can be read, not edited: edit {place.edit_instead}")
        if place.part == "result":
            point.output = point.output + (new - before).sum(-2).to(held.dtype)
        elif place.kind:
            value.copy_(new)
            put_state(place.kind, held, self.spec, value)
        else:
            if new is seen:
                value.copy_(seen)  # as in the module that reads it, whoever else holds the tensor sees the edit
            else:
                new = new.to(held.dtype)
                setattr(point, place.end, (new, *whole[1:]) if isinstance(whole, tuple) else new)
        return new.clone()

    def _visit_attention(self, place: Place, edit: Edit | None) -> torch.Tensor:
        """`_visit` within transformers' own attention."""
        interface = self._attention(place).source.attention_interface_1
        if place.hook == "hook_pattern":
            value = interface.output[1] if edit is None else interface.source.nn_functional_softmax_0.output
        elif place.hook == "hook_attn_scores":
            value = interface.source.nn_functional_softmax_0.inputs[0][0]
        else:  # the interface's arguments are the module, queries, keys and values
            states = interface.inputs[0][1 if place.hook == "hook_rot_q" else 2]
            value = rearrange(states, "batch heads tokens dim -> batch tokens heads dim")
        seen = value.clone()
        if edit is None:
            return seen
        new, changed = _edited(place, edit, seen)
        if changed:
            value.copy_(new)
        return new.clone()

    def _attention(self, place: Place) -> Any:
        return self.lm.get(f"{self.spec.family.layers}.{place.order[0]}.{self.spec.family.attention}")

    def _part(self, place: Place, part: Any, value: torch.Tensor) -> torch.Tensor:
        if part == "value":
            return value
        if part == "result":
            weight = self.output_weight(place.order[0])
            return einsum(value, weight.to(value), "... head dim, head dim hidden -> ... head hidden")
        config = self.bridge_config
        norm = self.lm.get(place.norm)._module
        device, weights = value.device, next(iter(norm.parameters()), value)
        made = norm_part(part, value.to(weights.device), norm, config.normalization_type == "LN", config.eps)
        return made.to(device)


@dataclass
class _Pass:
    """Reads and edits of a trace.

    Attributes:
        reached: places, in the order of a forward pass.
        wanted: names of the values to keep.
        patterns: places of attention patterns, which are captured.
        edits: functions by hook point.
        ops: declared interventions.
        stop: the layer before which the pass ends, or None.
    """

    reached: list[Place]
    wanted: set[str]
    patterns: list[Place]
    edits: dict[str, Edit]
    ops: list[Any]
    stop: int | None


def _edited(place: Place, edit: Edit, seen: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Result of a function of a value, and whether it edited the value, in place or by returning another."""
    version, new = seen._version, edit(seen)
    if new.shape != seen.shape:
        raise ValueError(f"the hook at {place.name} returned {list(new.shape)}; expected {list(seen.shape)}, or None")
    return new, new is not seen or seen._version != version


def _by_heads(pattern: torch.Tensor) -> torch.Tensor:
    """A captured pattern in TransformerLens' order."""
    return rearrange(pattern, "queries heads keys -> heads queries keys")
