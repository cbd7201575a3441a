"""`EngineDriver`: TransformerLens' `Driver` over an `LM`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.driver_protocol import ForwardResult, Intervention, TensorLike
from transformer_lens.model_bridge.sources._driver_base import DriverBase

from ..engine.lm import LM
from ..engine.site_hooks import state_at
from ..hooks.captures.spec import Capture
from ..hooks.site import Site
from .interventions import declared
from .names import UNSERVED, Place, norm_part, places_of

Edit = Callable[[torch.Tensor], torch.Tensor]
"""value -> the value to put in place; it may be edited in place."""


class EngineDriver(DriverBase):
    """Forward passes of an `LM`, under the names of `TransformerBridge`'s hook points.

    A pass that only captures is a fused one, if the engine has declared sites for all values that are asked for. Other passes
    are traces.

    Args:
        lm: a local `LM`, which stays the caller's.
        bridge_config: TransformerLens' config of the model.
        components: `component_mapping` of TransformerLens' adapter.
        tokenizer: for the bridge.
    """

    _supported_features = frozenset({"intervention_callbacks"})

    def __init__(self, lm: LM, bridge_config: TransformerBridgeConfig, components: Any, tokenizer: Any) -> None:
        super().__init__(bridge_config, tokenizer)
        self.lm = lm
        self.spec = lm.runner.model_spec
        places = places_of(components, self.spec, lm.runner.declared.limits.inner_sites)
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
        **kwargs: Any,
    ) -> ForwardResult:
        """One forward pass over prompts of equal length.

        Args:
            input_ids: [batch, tokens], or [tokens].
            capture: names of hook points.
            intervene: by hook point, a function of its value, which runs in a trace, or ``{"op": "add", "value": vector}``,
                which becomes a declared intervention where the hook point has a site. Ops are "suppress", "scale", "add" and
                "set"; "pos" is a position or several.
            max_new_tokens: 1; `lm.generate` generates.
            return_logits: whether the result has logits.
            attention_mask: ones. Padding is refused.
            output_attentions: ignored; `capture` has the patterns.
            interventions: declared ones, `Steer` and its kin, for each prompt.

        Returns:
            logits [batch, tokens, vocab], and the captured values [batch, ...] in the order of a forward pass, on the CPU.

        Raises:
            ValueError: an unknown hook point, padding, or no prompt.
        """
        if kwargs:
            raise TypeError(f"EngineDriver.forward() got {', '.join(kwargs)}; it takes interventions and intervene")
        if max_new_tokens != 1:
            raise NotImplementedError("a bridge runs one forward pass: generate with lm.generate(...)")
        if attention_mask is not None and not bool(torch.as_tensor(attention_mask).bool().all()):
            raise ValueError("attention_mask has padding: run prompts of different lengths each on its own")
        tokens = _rows(input_ids)
        self._check([*capture, *(intervene or {})])
        ops, edits = declared(intervene or {}, self.places, self.spec)
        wanted = set(capture)
        places = [place for name, place in self.places.items() if name in wanted]
        ops = [*(interventions or ()), *ops]
        if edits or any(place.site is None for place in places):
            logits, captured = self._traced(tokens, places, edits, ops)
        else:
            logits, captured = self._captured(tokens, places, ops)
        return ForwardResult(logits=logits if return_logits else None, captured=captured)

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.places:
                known = "; bridge.hook_dict has the names" if name not in self.non_fireable_hook_points else ""
                raise ValueError(f"this engine has no hook point {name!r}{known}")

    def _captured(
        self, tokens: list[list[int]], places: list[Place], ops: list[Any]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits and values of a fused pass."""
        sites = list(dict.fromkeys(place.site for place in places if place.site is not None))
        outs = self.lm.forward(tokens, capture=[Capture(site, positions="prompt") for site in sites], interventions=ops)
        rows: dict[Site, torch.Tensor] = {site: torch.stack([out.activations[site] for out in outs]) for site in sites}
        values = {}
        for place in places:
            assert place.site is not None
            rows_of = _by_heads(rows[place.site]) if place.is_pattern else rows[place.site]
            values[place.name] = self._part(place, place.captured_part, rows_of)
        return torch.stack([out.logits for out in outs]), values

    def _traced(
        self, tokens: list[list[int]], places: list[Place], edits: dict[str, Edit], ops: list[Any]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Logits and values of a traced pass, in which functions edit values."""
        eager = any(self.places[name].is_pattern for name in edits)
        captured = [place for place in places if place.is_pattern and place.site is not None and not eager]
        reached = {*places, *(self.places[name] for name in edits)} - {*captured}
        in_order = sorted(reached, key=lambda place: place.order)
        eager = any(place.is_pattern for place in in_order)
        if eager and len(tokens) > 1 and edits:
            raise ValueError(
                "a pass that edits attention patterns, by transformers' own attention, holds one prompt: run each on its own"
            )
        wanted = {place.name for place in places} - {place.name for place in captured}
        batches = [[row] for row in tokens] if eager else [tokens]
        found = [self._one_trace(batch, in_order, wanted, captured, edits, ops, eager) for batch in batches]
        values = {place.name: torch.cat([seen[place.name] for _, seen in found]) for place in places}
        return torch.cat([logits for logits, _ in found]), values

    def _one_trace(
        self,
        tokens: list[list[int]],
        reached: list[Place],
        wanted: set[str],
        patterns: list[Place],
        edits: dict[str, Edit],
        ops: list[Any],
        eager: bool,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        options: dict[str, Any] = {"interventions": ops} if ops else {}
        if patterns:
            options["capture"] = [place.site for place in patterns]
        if eager:
            options["attn_implementation"] = "eager"
            for place in reached:
                if place.is_pattern:
                    self._attention(place).source  # noqa: B018  # before the pass: its attention then runs operation by operation
        with self.lm.trace(tokens, **options) as tracer:
            values = dict().save()  # pyright: ignore[reportAttributeAccessIssue]
            for place in reached:
                value = self._visit(place, edits.get(place.name))
                if place.name in wanted:
                    values[place.name] = value
            logits = self.lm.output.logits.save()
        for place in patterns:
            rows = [activations[place.site] for activations in tracer.captures]
            values[place.name] = _by_heads(torch.stack(rows))
        return logits, values

    def _visit(self, place: Place, edit: Edit | None) -> torch.Tensor:
        """Read a place within a block, and let a function edit it. Returns a copy of the value that the model goes on with."""
        if place.is_pattern:
            interface = self._attention(place).source.attention_interface_1
            if edit is None:
                return interface.output[1].clone()
            point = interface.source.nn_functional_softmax_0
        else:
            point = self.lm.get(place.module)
        whole = getattr(point, place.end)
        held: torch.Tensor = whole[0] if isinstance(whole, tuple) else whole
        value = state_at(place.kind, held, self.spec) if place.kind else held
        if edit is None:
            return self._part(place, place.part, value).clone()
        seen = self._part(place, place.part, value).clone()
        version, new = seen._version, edit(seen)
        if place.edit_instead and (new is not seen or seen._version != version):
            raise NotImplementedError(f"{place.name} can be read, not edited: edit {place.edit_instead}")
        if new.shape != seen.shape:
            raise ValueError(
                f"the hook at {place.name} returned {list(new.shape)}; expected {list(seen.shape)}, or None"
            )
        if seen._version != version:
            value.copy_(seen)  # as in the module that reads it, whoever else holds the tensor sees the edit
        if new is not seen:
            if place.kind:
                value.copy_(new)
            else:
                new = new.to(held.dtype)
                setattr(point, place.end, (new, *whole[1:]) if isinstance(whole, tuple) else new)
        return new.clone()

    def _attention(self, place: Place) -> Any:
        return self.lm.get(f"{self.spec.family.layers}.{place.order[0]}.{self.spec.family.attention}")

    def _part(self, place: Place, part: Any, value: torch.Tensor) -> torch.Tensor:
        if part == "value":
            return value
        config = self.bridge_config
        norm = self.lm.get(place.norm)._module
        device, weights = value.device, next(iter(norm.parameters()), value)
        made = norm_part(part, value.to(weights.device), norm, config.normalization_type == "LN", config.eps)
        return made.to(device)


def _rows(input_ids: Any) -> list[list[int]]:
    """Token ids of each prompt."""
    if input_ids is None:
        raise ValueError("a prompt is expected: text, or token ids [batch, tokens]")
    ids = torch.as_tensor(input_ids)
    if ids.dim() not in (1, 2) or ids.numel() == 0:
        raise ValueError(f"token ids have shape {list(ids.shape)}; expected [batch, tokens], or [tokens]")
    return (ids if ids.dim() == 2 else ids[None]).tolist()


def _by_heads(patterns: torch.Tensor) -> torch.Tensor:
    """Captured patterns in TransformerLens' order."""
    return rearrange(patterns, "prompts queries heads keys -> prompts heads queries keys")
