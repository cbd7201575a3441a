"""`EdgeModel`: parts of a model that write to the stream and read it, and bodies of blocks over them.

A head's output is its share of `attn_out`. Where a norm follows the heads (Gemma 2), the share has the norm's scale in that run.
So the embeddings, all outputs and the biases add up to the stream. `outputs` compares these sums with the pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...client.calls.site_hooks import PlacedHooks, state_at
from ...hooks.site import Site
from ..attribution import placed, put_states, value_at
from ..metrics import RowMetric
from .graph import LOGITS_NODE, EdgeGraph
from .norms import StreamNorm

NEEDED = ("resid_pre", "q", "k", "v", "z", "attn_out", "mlp_out", "final_norm")
"""Kinds of sites that a graph of edges needs."""
UNREAD = ("bloom", "falcon", "mpt", "xglm")
"""Families with layers that do not say which rows of their first input are a prompt's."""
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest error of the sums, as a share of the largest state, by dtype; 0.1 for others."""


class EdgeLayer(NamedTuple):
    """Parts of a decoder layer.

    Attributes:
        stream, attn_out, z, mlp_out: places of the stream before it, and of its outputs.
        inputs: "q", "k" and "v" -> (place, weight [hidden, heads, head_dim]).
        mlp: path of the MLP.
        attn_norm, mlp_norm: norms before attention and MLP.
        post_norm: norm between the heads' sum and `attn_out`.
        out: [heads, head_dim, hidden], the output projection by head.
        out_bias: [hidden], its bias, or None.
    """

    stream: PlacedHooks
    inputs: dict[str, tuple[PlacedHooks, Tensor]]
    z: PlacedHooks
    attn_out: PlacedHooks
    mlp_out: PlacedHooks
    mlp: str
    attn_norm: StreamNorm
    mlp_norm: StreamNorm
    post_norm: StreamNorm
    out: Tensor
    out_bias: Tensor | None


class SourceOutputs(NamedTuple):
    """SourceOutputs of all sources in some runs.

    Attributes:
        states: [runs, sources, tokens, hidden] float32.
        attention: [runs, layers, tokens, hidden] float32, `attn_out`.
        last: [runs, hidden] float32, the stream before the final norm at the last position.
        logits: [runs, vocab] float32, of the last position.
        error: largest error of a sum, as a share of the largest state.
        place: the site with that error.
    """

    states: Tensor
    attention: Tensor
    last: Tensor
    logits: Tensor
    error: float
    place: str


class EdgeModel:
    """The parts of a model in this process.

    Args:
        lm: the model.

    Attributes:
        graph: its nodes and edges.
        weights_version: `lm.weights.version` of these parts.

    Raises:
        NotImplementedError: a family without one of the sites, norms or weights.
    """

    def __init__(self, lm: Any) -> None:
        self.lm, self._spec, self.weights_version = lm, lm.model_spec, lm.weights.version
        family = self._spec.family
        missing = [kind for kind in NEEDED if kind not in family.points]
        if missing or family.cross_attention or self._spec.has_states or family.name in UNREAD:
            why = f"has no site {missing[0]}" if missing else "has layers or states that cannot be read in a batch"
            raise NotImplementedError(f"edges of this model: {family.name} {why}")
        self.graph = EdgeGraph.of(lm)
        try:
            self._layers = [self._layer(index) for index in range(self.graph.layers)]
            self.final_norm = StreamNorm(self._module(family.final_norm))
        except (AttributeError, NotImplementedError) as error:
            raise NotImplementedError(f"edges of this model ({family.name}): {error}") from error
        self._final = placed(Site("final_norm"), self._spec)

    def _module(self, path: str) -> Any:
        return self.lm._module.get_submodule(path)

    def _layer(self, index: int) -> EdgeLayer:
        spec, family, points = self._spec, self._spec.family, self._spec.family.points
        places = {kind: placed(Site(kind, index), spec) for kind in NEEDED[:-1]}

        def norm(kind: str) -> StreamNorm:
            point = points.get(kind)
            return StreamNorm(self._module(point.module.format(index)) if point else None)

        attn_norm = norm("attn_in")
        # Families with one norm for both have no `mlp_in`, and neither have families with norms behind attention and MLP.
        mlp_norm = norm("mlp_in") if "mlp_in" in points or not self.graph.parallel else attn_norm
        o_proj = self._module(points["z"].module.format(index))
        out = weight_of(o_proj, points["z"].module).T.unflatten(0, spec.shape("z"))
        return EdgeLayer(
            stream=places["resid_pre"],
            inputs={kind: (places[kind], self._heads_of(places[kind])) for kind in "qkv"},
            z=places["z"],
            attn_out=places["attn_out"],
            mlp_out=places["mlp_out"],
            mlp=f"{family.layers}.{index}.{family.mlp}",
            attn_norm=attn_norm,
            mlp_norm=mlp_norm,
            post_norm=norm("attn_out") if family.attn_out.endswith("norm") else StreamNorm(None),
            out=out,
            out_bias=getattr(o_proj, "bias", None),
        )

    def _heads_of(self, place: PlacedHooks) -> Tensor:
        weight = weight_of(self._module(place.module), place.module)
        return state_at(place.point.site.kind, weight.T[None], self._spec)[0]

    # -- bodies of blocks ------------------------------------------------------------------------

    def outputs(self) -> SourceOutputs:
        """SourceOutputs of the sources in the runs of a block."""
        lm, graph, found, attention = self.lm, self.graph, list[Tensor](), list[Tensor]()
        worst = (0.0, "")
        stream = torch.zeros(())
        for index, layer in enumerate(self._layers):
            before = value_at(lm, layer.stream).float()
            if not index:
                found.append(before.unsqueeze(1))
                stream = before
            read = [(lm.get(layer.inputs["q"][0].module).input, layer.attn_norm(before), "q")]
            heads, constant = self._shares(layer)
            attn_out = value_at(lm, layer.attn_out).float()
            read.append((attn_out, heads.sum(1) + constant, "attn_out"))
            middle = before if graph.parallel else before + attn_out
            read.append((lm.get(layer.mlp).input, layer.mlp_norm(middle), "mlp_in"))
            mlp_out = value_at(lm, layer.mlp_out).float()
            stream = stream + attn_out + mlp_out
            found += [heads, mlp_out.unsqueeze(1)]
            attention.append(attn_out)
            worst = max(worst, *((_error(given, made), f"{kind}.{index}") for given, made, kind in read))
        final = lm.get(self._final.module).input.float()
        worst = max(worst, (_error(final, stream), "final_norm"))
        logits = lm.output.logits[:, -1].float()
        return SourceOutputs(torch.cat(found, 1), torch.stack(attention, 1), final[:, -1], logits, *worst)

    def _shares(self, layer: EdgeLayer) -> tuple[Tensor, Tensor]:
        """Shares of `attn_out`: of the heads [runs, heads, tokens, hidden], and of the biases [runs, tokens, hidden] or []."""
        z = layer.z.state_in(value_at(self.lm, layer.z)).float()
        heads = torch.einsum("bthd,hdm->bhtm", z, layer.out.float())
        bias = torch.zeros((), device=z.device) if layer.out_bias is None else layer.out_bias.float()
        total = heads.sum(1) + bias
        constant = layer.post_norm.frozen(total, bias.expand_as(total)) if layer.out_bias is not None else bias
        if layer.post_norm.bias is not None:
            constant = constant + layer.post_norm.bias
        return layer.post_norm.frozen(total.unsqueeze(1), heads), constant

    def gradients(self, differences: Tensor, puts: list[tuple[str, Tensor, Tensor]], metric: RowMetric) -> Tensor:
        """Sum over the runs of a block of the products of differences and gradients: [sources, targets] float32.

        Args:
            differences: [sources, tokens, hidden] float32.
            puts: (site, runs, states [runs, tokens, hidden]): states in place of a site's, in some of the runs.
        """
        lm, by_site = self.lm, {name: (rows, states) for name, rows, states in puts}
        read, streams = list[Tensor](), list[Tensor]()
        for layer in self._layers:
            before = self._replaced(layer.stream, by_site)
            modules = dict[str, Tensor]()
            for place, _ in layer.inputs.values():
                if place.module not in modules:  # one projection may make q, k and v
                    modules[place.module] = value_at(lm, place)
            read += modules.values()
            middle = before if self.graph.parallel else before + self._replaced(layer.attn_out, by_site)
            entered = lm.get(layer.mlp).input.clone()  # its gradient is the MLP's only
            lm.get(layer.mlp).input = entered
            read.append(entered)
            streams += [before.detach(), middle.detach()]
            self._replaced(layer.mlp_out, by_site)
        streams.append(lm.get(self._final.module).input.detach())
        read.append(value_at(lm, self._final))
        value = metric(lm.output.logits[:, -1].float())
        grads = iter(torch.autograd.grad(value.sum(), read))
        scores = torch.zeros(len(differences), len(self.graph.targets()), device=differences.device)
        for index, layer in enumerate(self._layers):
            by_module = dict[str, Tensor]()
            for kind, (place, weight) in layer.inputs.items():
                if place.module not in by_module:
                    by_module[place.module] = next(grads)
                own = place.state_in(by_module[place.module]).float()
                normed = torch.einsum("bthd,mhd->bhtm", own, weight.float())
                at_stream = layer.attn_norm.back(streams[2 * index].unsqueeze(1), normed).sum(0)
                count = self.graph.first_source(index)
                scores[:count, self.graph.targets_of(index, kind)] = _products(differences[:count], at_stream)
            at_stream = layer.mlp_norm.back(streams[2 * index + 1], next(grads)).sum(0, keepdim=True)
            count = self.graph.mlp_sources(index)
            scores[:count, self.graph.targets_of(index, "mlp")] = _products(differences[:count], at_stream)
        at_stream = self.final_norm.back(streams[-1], next(grads)).sum(0, keepdim=True)
        scores[:, self.graph.targets_of(0, LOGITS_NODE)] = _products(differences, at_stream)
        return scores

    def _replaced(self, place: PlacedHooks, by_site: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """The value at a place, with the states of some runs put there."""
        value, found = value_at(self.lm, place), by_site.get(str(place.point.site))
        if found is None:
            return value
        rows, states = found
        new = value.index_copy(0, rows.to(value.device), states.to(value))
        put_states(self.lm, place, value, new)
        return new

    def patched(self, corrupted: Tensor, masks: Tensor) -> Tensor:
        """Logits [runs, vocab] float32 of the last position, with patched edges.

        Args:
            corrupted: [sources, tokens, hidden] float32, outputs that patched edges carry.
            masks: [runs, sources, targets] float32, 1 at patched edges.
        """
        lm, graph, found = self.lm, self.graph, list[Tensor]()
        for index, layer in enumerate(self._layers):
            before = value_at(lm, layer.stream).float()
            if not index:
                found.append(before.unsqueeze(1))
            differences = corrupted[: graph.first_source(index)] - torch.cat(found, 1)
            for kind, (place, weight) in layer.inputs.items():
                change = _change(differences, masks, graph.targets_of(index, kind), layer.attn_norm, before)
                state = place.state_in(value_at(lm, place))
                if change is not None:
                    state += torch.einsum("bhtm,mhd->bthd", change, weight.float()).to(state.dtype)
            found.append(self._shares(layer)[0])
            middle = before if graph.parallel else before + value_at(lm, layer.attn_out).float()
            differences = corrupted[: graph.mlp_sources(index)] - torch.cat(found, 1)[:, : graph.mlp_sources(index)]
            change = _change(differences, masks, graph.targets_of(index, "mlp"), layer.mlp_norm, middle)
            if change is not None:
                entered = lm.get(layer.mlp).input
                lm.get(layer.mlp).input = entered + change[:, 0].to(entered.dtype)
            found.append(value_at(lm, layer.mlp_out).float().unsqueeze(1))
        final = lm.get(self._final.module).input.float()
        normed = value_at(lm, self._final)
        targets = graph.targets_of(0, LOGITS_NODE)
        change = _change(corrupted - torch.cat(found, 1), masks, targets, self.final_norm, final)
        if change is not None:
            normed += change[:, 0].to(normed.dtype)
        return lm.output.logits[:, -1].float()


def weight_of(module: Any, path: str) -> Tensor:
    """[out, in], the weight of a projection. Raises NotImplementedError: it is quantised."""
    if getattr(module, "quantized", None) is not None or not module.weight.is_floating_point():
        raise NotImplementedError(f"the weight of {path} is quantised")
    return module.weight.detach().T if hasattr(module, "nf") else module.weight.detach()  # transformers' Conv1D


def _products(differences: Tensor, at_stream: Tensor) -> Tensor:
    """[sources, tokens, hidden] and [targets, tokens, hidden] -> [sources, targets]."""
    return differences.flatten(1) @ at_stream.flatten(1).T


def _change(differences: Tensor, masks: Tensor, targets: slice, norm: StreamNorm, stream: Tensor) -> Tensor | None:
    """Change of a norm's output by patched edges: [runs, targets, tokens, hidden]; None without any."""
    own = masks[:, : differences.shape[1], targets]
    if not own.any():
        return None
    delta = torch.einsum("bsx,bstm->bxtm", own, differences)
    stream = stream.unsqueeze(1)
    return norm(stream + delta) - norm(stream)


def _error(given: Tensor, made: Tensor) -> float:
    """Largest difference as a share of the largest value; infinite for another shape."""
    if given.shape != made.shape:
        return float("inf")
    return ((given.float() - made).abs().max() / given.float().abs().max().clamp_min(1e-6)).item()
