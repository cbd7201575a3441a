"""`CircuitRun`: one forward pass of a prompt with its replacements, and batched backward passes over it, on the worker.

Each layer of each pass is a separate message, as in a patch sweep. The engine's steps run in between. A backward pass starts
at the highest read of its batch, and has the rows up to its last position. The run is causal, so later rows are zero.

Depths order reads. ``4 * layer`` is the stream before a layer, 1 is added for `resid_mid`, 2 for `mlp_out`, 3 for `resid_post`.
At the last two an SAE reads, before it replaces them. The final norm reads at ``4 * layers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.readout import ModelReadout
from ...runner.interp_model_runner import InterpModelRunner
from .frozen import FrozenLayer, FrozenNorm, rotations_of
from .replacement import ActiveFeatures, Replacement
from .scores import ELEMENTS, PositionBuckets

DEPTHS = {"resid_pre": 0, "mlp_in": 1, "resid_mid": 1, "mlp_out": 2, "resid_post": 3}
"""Kind of a site that is read -> its depth in a layer."""


class WrittenSite(NamedTuple):
    """Parts of a written site beside features and linear parts."""

    error: Tensor  # [tokens, hidden], zero at the first positions, which have no nodes
    bias: Tensor  # [hidden] float32
    sink: Tensor  # [first positions, hidden]: all that their errors would be


class CircuitRun:
    """A run on the worker: its frozen layers, features and errors, and the backward pass that is under way.

    Columns of rows are the active features by layer, position and number, errors by layer and position, and embeddings.
    """

    def __init__(
        self, runner: InterpModelRunner, token_ids: list[int], replacements: list[Replacement], skip: int
    ) -> None:
        self._model: Any = runner.get_model()
        self._spec = runner.model_spec
        self._decoder = getattr(self._model, self._model.decoder_name)
        self._replacements, self._skip, self._device = replacements, skip, torch.device(runner.device)
        ids = torch.tensor(token_ids, device=self._device)
        positions = torch.arange(len(ids), device=self._device)
        self._rotations = rotations_of(self._decoder, positions, self._spec.rope_depends_on_length)
        self._h: Tensor = self._decoder.embed_fused(ids[None], positions[None], None)[0]
        self._embedded = self._h
        self._layers: list[FrozenLayer] = []
        self._written: dict[tuple[int, str], WrittenSite] = {}
        self._remainders: dict[int, WrittenSite] = {}
        self._made: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # (features and skip, bias) of sites to come
        self._found: list[ActiveFeatures] = []

    # -- the forward pass -----------------------------------------------------------------------

    def forward_layer(self, index: int) -> None:
        """Run a layer, and encode the input of its replacement."""
        layer = list(getattr(self._decoder, self._decoder.layers_name))[index]
        frozen = FrozenLayer(layer, self._h, self._rotations[layer.rotary])
        self._h = frozen.resid_mid + frozen.mlp_out
        for replacement in self._replacements:
            if replacement.layer == index:
                self._encode(replacement, replacement.input(frozen, self._h))
        mlp, post = (index, "mlp_out"), (index, "resid_post")
        if mlp in self._made:
            self._written[mlp] = self._settled(frozen.mlp_out, *self._made.pop(mlp))
        if post in self._made:
            self._written[post] = self._settled(self._h, *self._made.pop(post))
        jacobian = not any(index in made.writes for made in self._replacements if made.sae.transcoder)
        if jacobian:
            linear = frozen.mlp_linear().float()
            self._remainders[index] = self._settled(frozen.mlp_out, linear, torch.zeros_like(linear[0]))
        frozen.settle(jacobian)
        self._layers.append(frozen)

    def _encode(self, replacement: Replacement, x: Tensor) -> None:
        sae = replacement.sae.to(self._device)
        features = sae.encode_float32(x.to(sae.dtype))
        features[: self._skip] = 0
        positions, ids = features.nonzero(as_tuple=True)
        self._found.append(ActiveFeatures(positions, ids, features[positions, ids]))
        for layer in replacement.writes:
            columns, key = replacement.columns(layer), (layer, replacement.written_kind)
            made, bias = (features.to(sae.dtype) @ sae.W_dec[:, columns]).float(), sae.b_dec[columns].float()
            if (skip := replacement.skip(x, layer)) is not None:
                made = made + skip
            known = self._made.get(key)
            self._made[key] = (made, bias) if known is None else (known[0] + made, known[1] + bias)

    def _settled(self, value: Tensor, made: Tensor, bias: Tensor) -> WrittenSite:
        error = value.float() - made - bias
        sink = error[: self._skip].clone()
        error[: self._skip] = 0
        return WrittenSite(error.to(value.dtype), bias, sink)

    def end_forward(self) -> tuple[list[ActiveFeatures], Tensor]:
        """The active features of each replacement, and the logits [vocab] of the last position, on the CPU."""
        norm = getattr(self._decoder, self._decoder.norm_name)
        self._last = FrozenNorm(norm, self._h)
        final = norm.normalize(self._h[-1:])
        self._final = final[0].float()
        self._starts = torch.tensor([0, *(len(found.values) for found in self._found)]).cumsum(0).tolist()
        self._buckets = [PositionBuckets(found.positions) for found in self._found]
        logits = ModelReadout(self._model, self._spec).logits(final)[0]
        found = [ActiveFeatures(*(tensor.cpu() for tensor in each)) for each in self._found]
        return found, logits.float().cpu()

    def softcap(self) -> float | None:
        """The soft cap of the logits."""
        return getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)

    def constants(self) -> Tensor:
        """The part of each feature's pre-activation that its encoder's bias makes: [features] float32."""
        at_once = max(1, ELEMENTS // self._h.shape[1])  # encoder columns are gathered
        parts = [
            made.readers(ids, self._device)[1].float().cpu()
            for made, found in zip(self._replacements, self._found, strict=True)
            for ids in found.features.split(at_once)
        ]
        return torch.cat(parts)

    # -- backward passes ---------------------------------------------------------------------------

    def begin_targets(self, pairs: Sequence[tuple[int, int | None]]) -> Tensor:
        """Start a pass from logits at the last position. Returns their values [pairs], without a soft cap.

        Args:
            pairs: (token, other): the difference of two logits; (token, None): a logit less the mean of all.
        """
        weight = self._model.lm_head.weight
        mean = weight.mean(0, dtype=torch.float32)
        vectors = torch.stack(
            [weight[one].float() - (mean if other is None else weight[other].float()) for one, other in pairs]
        )
        last = len(self._h) - 1
        self._begin(
            vectors * self._last.gain * self._last.scale[last],
            [last] * len(pairs),
            [4 * len(self._layers)] * len(pairs),
        )
        return (vectors @ self._final).cpu()

    def begin_head(self, layer: int, head: int, position: int, keys: bool) -> Tensor:
        """Start a pass from a head's rotated query or key at a position. Returns the constants [head_dim] of these values."""
        vectors, constants = self._layers[layer].head_reader(head, position, keys)
        self._begin(vectors, [position] * len(vectors), [4 * layer] * len(vectors))
        return constants.cpu()

    def head_score(self, layer: int, head: int, query: int, key: int) -> tuple[float, float, float]:
        """A head's score without a soft cap, its attention weight, and the scale of its scores."""
        return self._layers[layer].head_score(head, query, key)

    def begin_features(self, nodes: Tensor) -> None:
        """Start a pass from the pre-activations of features.

        Args:
            nodes: [batch] int64, columns.
        """
        bounds = torch.tensor(self._starts[1:])
        which = torch.bucketize(nodes, bounds, right=True)
        vectors = torch.zeros(len(nodes), self._h.shape[1], device=self._device)
        positions, depths = torch.zeros_like(nodes), torch.zeros_like(nodes)
        for i in which.unique().tolist():
            made, found, rows = self._replacements[i], self._found[i], which == i
            own = (nodes[rows] - self._starts[i]).to(self._device)
            at = found.positions[own]
            readers = made.readers(found.features[own], self._device)[0].float()
            vectors[rows.to(self._device)] = made.at_stream(self._layers[made.layer], at, readers).float()
            positions[rows], depths[rows] = at.cpu(), 4 * made.layer + DEPTHS[made.kind]
        self._begin(vectors, positions.tolist(), depths.tolist())

    def _begin(self, vectors: Tensor, positions: list[int], depths: list[int]) -> None:
        count, rows = len(positions), max(positions) + 1
        self._reads = vectors.to(self._h.dtype)
        self._positions, self._depths = torch.tensor(positions, device=self._device), torch.tensor(depths)
        self._grad = torch.zeros(count, rows, self._h.shape[1], dtype=self._h.dtype, device=self._device)
        tokens, layers = len(self._h), len(self._layers)
        width = self._starts[-1] + (layers + 1) * tokens
        self._rows = torch.zeros(count, width, device=self._device)
        self._bias = torch.zeros(count, device=self._device)
        self._skips: dict[int, Tensor] = {}  # gradients that skip connections bring to lower layers
        self._watched: int | None = None
        self._effects: list[Tensor] = []

    def watch(self, source: int) -> None:
        """Keep a node's effects by the head that reads it first. The pass that has begun has one row.

        Args:
            source: column of the node.
        """
        self._watched = source

    def head_effects(self) -> Tensor:
        """The effects of the node that was watched: [layers, heads, queries] float32, up to the pass's highest layer."""
        return torch.stack(self._effects[::-1]).cpu()

    def _part(self, source: int, layer: int) -> tuple[Tensor, int]:
        """Part [hidden] float32 of the stream before a layer that a node adds at its own position, and this position."""
        tokens, count = len(self._h), self._starts[-1]
        cut = max((at for at, kind in self._written if kind == "resid_post" and at < layer), default=-1)
        part = torch.zeros(self._h.shape[1], device=self._device)

        def reaches(at: int, kind: str) -> bool:  # an SAE of the stream takes the place of all before it
            return cut < at < layer or (at == cut and kind == "resid_post")

        if source < count:
            i = int(torch.bucketize(source, torch.tensor(self._starts[1:]), right=True))
            made, number = self._replacements[i], source - self._starts[i]
            positions, ids, values = (tensor[number : number + 1] for tensor in self._found[i])
            for at in made.writes:
                if reaches(at, made.written_kind):
                    part += values[0] * made.decoder(at, ids, self._device)[0].float()
            return part, int(positions)
        at, position = divmod(source - count, tokens)
        if at == len(self._layers):
            return (self._embedded[position].float() if cut < 0 else part), position
        errors = [(kind, self._written.get((at, kind))) for kind in ("mlp_out", "resid_post")]
        for kind, written in [*errors, ("mlp_out", self._remainders.get(at))]:
            if written is not None and reaches(at, kind):
                part += written.error[position].float()
        return part, position

    def back_layer(self, index: int) -> None:
        """Take the gradient through a layer, from behind it to before it."""
        frozen, grad = self._layers[index], self._grad
        self._join(grad, 4 * (index + 1))
        if self._score(grad, index, "resid_post"):
            grad.zero_()
        self._join(grad, 4 * index + 3)
        grad += self._mlp_back(frozen, grad, index)
        self._join(grad, 4 * index + 1)
        constant = frozen.attn_constant
        if constant is not None:
            self._bias += torch.einsum("bth,th->b", grad.float(), constant[: grad.shape[1]].float())
        if self._watched is not None:
            self._effects.append(frozen.head_effects(grad[0], *self._part(self._watched, index)))
        grad += frozen.attention_back(grad)

    def _mlp_back(self, frozen: FrozenLayer, grad: Tensor, index: int) -> Tensor:
        """The gradient's way through an MLP and what replaces it: [batch, rows, hidden] at `mlp_out` -> at `resid_mid`."""
        through = grad.clone()
        if self._score(grad, index, "mlp_out"):
            through.zero_()
            for made in self._replacements:
                if made.sae.transcoder and index in made.writes and (skip := made.skip_back(grad, index)) is not None:
                    own = made.at_stream(self._layers[made.layer], slice(skip.shape[1]), skip)
                    self._skips[made.layer] = self._skips.get(made.layer, 0) + own.to(grad.dtype)
        self._join(through, 4 * index + 2)
        found = self._skips.pop(index, torch.zeros_like(grad))  # with skips of sites above
        if (remainder := self._remainders.get(index)) is None:
            return found
        self._score_rest(through, remainder, index)
        return found + frozen.mlp_norm.back(frozen.mlp_back(through))

    def _join(self, grad: Tensor, depth: int) -> None:
        """Add the reads of a depth."""
        rows = (self._depths == depth).nonzero()[:, 0].to(self._device)
        if len(rows):
            grad[rows, self._positions[rows]] += self._reads[rows]

    def _score(self, grad: Tensor, layer: int, kind: str) -> bool:
        """Whether a site is replaced. Adds the products of its features, error and bias with the gradient there."""
        written = self._written.get((layer, kind))
        if written is None:
            return False
        for made, found, start, buckets in zip(
            self._replacements, self._found, self._starts, self._buckets, strict=False
        ):
            if layer in made.writes and made.written_kind == kind:
                buckets.add_products(
                    grad, found, lambda ids, made=made: made.decoder(layer, ids, self._device), self._rows[:, start:]
                )
        self._score_rest(grad, written, layer)
        return True

    def _score_rest(self, grad: Tensor, written: WrittenSite, layer: int) -> None:
        tokens, count = len(self._h), grad.shape[1]
        first = self._starts[-1] + layer * tokens
        self._rows[:, first : first + count] += torch.einsum("bth,th->bt", grad, written.error[:count]).float()
        sink = written.sink[:count]
        self._bias += grad.sum(1, dtype=torch.float32) @ written.bias
        self._bias += torch.einsum("bth,th->b", grad[:, : len(sink)].float(), sink)

    def rows(self, on_device: bool = False) -> tuple[Tensor, Tensor]:
        """Direct effects of a finished pass [batch, columns], and of all constants [batch], on the CPU.

        Args:
            on_device: the effects stay on the device.
        """
        self._join(self._grad, 0)
        count, first = self._grad.shape[1], self._starts[-1] + len(self._layers) * len(self._h)
        self._rows[:, first : first + count] = torch.einsum("bth,th->bt", self._grad, self._embedded[:count]).float()
        found = self._rows if on_device else self._rows.cpu(), self._bias.cpu()  # synchronizes
        del self._rows, self._grad
        return found
