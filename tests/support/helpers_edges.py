"""Edges by transformers' modules and hooks, one edge at a time: the oracle of `lm.edge_attribution`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pymllm_interp.core.model_spec import ModelSpec


class EdgeOracle:
    """Runs of transformers' model, with one edge's input changed.

    Args:
        model: a causal language model, eager attention.
        spec: sizes and module paths.
        clean, corrupted: token ids.
        metric: two tokens.
    """

    def __init__(
        self, model: Any, spec: ModelSpec, clean: Sequence[int], corrupted: Sequence[int], metric: tuple[int, int]
    ) -> None:
        self.model, self.spec, self.metric = model.requires_grad_(False), spec, metric
        self.points = spec.family.points
        self.heads, self.kv_heads = spec.shape("q")[0], spec.shape("k")[0]
        self.embeds = [model.get_input_embeddings()(torch.tensor([ids])).detach() for ids in (clean, corrupted)]
        self.states = [self._outputs(embeds) for embeds in self.embeds]

    def _module(self, kind: str, layer: int) -> Any:
        return self.model.get_submodule(self.points[kind].module.format(layer))

    @torch.no_grad()
    def _outputs(self, embeds: Tensor) -> dict[str, Tensor]:
        """Outputs of all sources, and of attention and MLP by site."""
        found, handles = dict[str, Tensor](), []

        def keep(name: str, end: str) -> Any:
            def after(module: Any, args: Any, out: Any) -> None:
                found[name] = (out[0] if isinstance(out, tuple) else out).clone()

            def before(module: Any, args: Any) -> None:
                found[name] = args[0].clone()

            return before if end == "input" else after

        for layer in range(self.spec.num_hidden_layers):
            for kind in ("resid_pre", "z", "attn_out", "mlp_out"):
                module, end = self._module(kind, layer), self.points[kind].end
                hook = keep(f"{kind}.{layer}", end)
                handles.append(
                    module.register_forward_pre_hook(hook) if end == "input" else module.register_forward_hook(hook)
                )
        try:
            self.model(inputs_embeds=embeds)
        finally:
            for handle in handles:
                handle.remove()
        found["input"] = found["resid_pre.0"]
        for layer in range(self.spec.num_hidden_layers):
            found[f"m{layer}"] = found[f"mlp_out.{layer}"]
            o_proj, z = self._module("z", layer), found[f"z.{layer}"]
            total, none = o_proj(z), o_proj(torch.zeros_like(z))
            factor = found[f"attn_out.{layer}"] / total  # of a norm behind the heads; 1 without one
            for head in range(self.heads):
                own = torch.zeros_like(z).unflatten(-1, (self.heads, -1))
                own[..., head, :] = z.unflatten(-1, (self.heads, -1))[..., head, :]
                found[f"a{layer}.h{head}"] = (o_proj(own.flatten(-2)) - none) * factor
        return found

    def run(self, edge: str, share: Any, mix: float = 1.0, put: tuple[str, float] | None = None) -> Tensor:
        """Metric of the clean run with `share` of the difference of an edge's outputs added to its target's input.

        Args:
            mix: share of the clean embeddings.
            put: (site, share of the clean state): an output between both runs.
        """
        source, _, target = edge.partition("->")
        change = share * (self.states[1][source] - self.states[0][source])
        handles = []
        if target == "logits":
            norm = self.model.get_submodule(self.spec.family.final_norm)
            handles.append(norm.register_forward_pre_hook(lambda module, args: (args[0] + change, *args[1:])))
        elif target.startswith("m"):
            handles += self._into_mlp(int(target[1:]), change)
        else:
            layer, _, rest = target[1:].partition(".")
            head, kind = int(rest.strip("khv<>q")), rest[-2]
            handles += self._into_head(int(layer), head, kind, change)
        if put is not None:
            name, part = put
            value = part * self.states[0][name] + (1 - part) * self.states[1][name]
            kind, _, layer = name.partition(".")
            module = self._module(kind, int(layer))
            handles.append(
                module.register_forward_hook(
                    lambda module, args, out: (value, *out[1:]) if isinstance(out, tuple) else value
                )
            )
        try:
            embeds = mix * self.embeds[0] + (1 - mix) * self.embeds[1]
            logits = self.model(inputs_embeds=embeds).logits[0, -1]
        finally:
            for handle in handles:
                handle.remove()
        return logits[self.metric[0]] - logits[self.metric[1]]

    def _into_mlp(self, layer: int, change: Tensor) -> list[Any]:
        mlp = self.model.get_submodule(f"{self.spec.family.layers}.{layer}.{self.spec.family.mlp}")
        if "mlp_in" not in self.points:
            return [mlp.register_forward_pre_hook(lambda module, args: (args[0] + change, *args[1:]))]
        norm = self._module("mlp_in", layer)
        return [norm.register_forward_pre_hook(lambda module, args: (args[0] + change, *args[1:]))]

    def _into_head(self, layer: int, head: int, kind: str, change: Tensor) -> list[Any]:
        norm = self._module("attn_in", layer) if "attn_in" in self.points else torch.nn.Identity()
        stream: list[Tensor] = []
        block = self.model.get_submodule(f"{self.spec.family.layers}.{layer}")
        sizes = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        channels = sizes[kind] * self.spec.head_dim
        first = 0 if not self.spec.family.qkv else {"q": 0, "k": self.heads, "v": self.heads + self.kv_heads}[kind]
        first *= self.spec.head_dim

        def keep(module: Any, args: Any, kwargs: Any) -> None:
            stream.append(args[0] if args else kwargs["hidden_states"])

        def after(module: Any, args: Any, out: Tensor) -> Tensor:
            if not stream:  # the call below
                return out
            changed = module(norm(stream.pop() + change))
            own = slice(first + head * self.spec.head_dim, first + (head + 1) * self.spec.head_dim)
            assert own.stop <= first + channels
            new = out.clone()
            new[..., own] = changed[..., own]
            return new

        return [
            block.register_forward_pre_hook(keep, with_kwargs=True),
            self._module(kind, layer).register_forward_hook(after),
        ]

    def slope(self, edge: str, mix: float = 1.0, put: tuple[str, float] | None = None) -> float:
        """Derivative of `run` by `share` at 0."""
        share = torch.zeros((), requires_grad=True)
        value = self.run(edge, share, mix, put)
        if not value.requires_grad:  # `put` is behind the target
            return 0.0
        return torch.autograd.grad(value, share)[0].item()
