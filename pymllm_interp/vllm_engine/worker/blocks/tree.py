"""The module tree that blocks see: this package's own model, computed by the products, norms and attention of vLLM's.

The tree has the names, shapes and passes of our own engine. Its only weights are the norms', which are
vLLM's. A merged product of vLLM is a `MergedLinear`'s product, and its attention is the backend of a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ....attention.attention_backend import AttentionBackend, RadixAttention
from ....attention.cut_edges import PassCuts
from ....core.forward_batch import ForwardBatch
from ....core.model_spec import ModelSpec
from ....layers.linear import Embedding, Linear, MergedLinear, Projection
from ....layers.moe import TopKRouter
from ....layers.norm import NormModule
from ....layers.quantization.experts import QuantizableExperts
from ....models.registry import NATIVE, architecture_of
from ...settings import OURS
from ..stage import RankStage
from .kept_kv import KeptKV
from .ranks import Ranks
from .row_adapters import RowAdapters
from .whole_layers import WholeLayers

MERGED = {"_qkv": "qkv_proj", "_gate_up": "gate_up_proj"}
"""Attribute with a merged product -> vLLM's module."""
RENAMED = {".mlp.": ".block_sparse_moe.", ".self_attn": ".attn", ".embed_tokens": ".embedding"}
"""Parts of paths that vLLM names otherwise in some models."""
WEIGHTS = (
    "is in vLLM's kernels, in a layout of their own, and a block with engine='vllm' reads no values of it: call its module. "
    f"{OURS}"
)
"""Reason that a weight's values are refused, behind its name."""


class VllmAttention(AttentionBackend):
    """Attention of a pass over vLLM's KV cache, laid out by vLLM's forward context.

    Cut edges and patterns are computed here. Kernels would write to a pool of the pass by another layout.

    Args:
        layers: attention of each layer: q, k and v [tokens, heads * head_dim] -> the same as q.

    Attributes:
        cuts, kept: cut edges and captured patterns of the pass, and K and V of their requests; None without.
    """

    cuts: PassCuts | None = None
    kept: KeptKV | None = None

    def __init__(self, layers: list[Callable[..., torch.Tensor]]) -> None:
        self._layers = layers

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Do nothing: vLLM's runner has planned the pass."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """Attention [tokens, heads * head_dim] in fresh memory."""
        out = self._layers[layer.layer_id](q.flatten(1), k.flatten(1), v.flatten(1))
        if self.kept is not None:
            self.kept.add(layer.layer_id, k, v)
            if self.cuts is not None:
                out = self.cuts.apply(out, q, *self.kept.get_kv(layer.layer_id), layer, forward_batch)
        return out


class LayerInputs:
    """Inputs of some layers in a pass. Stands for `models.native.decoder.AuxStates`.

    Args:
        layers: their numbers, in ascending order; the number of layers stands for the input of the final norm.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._states: dict[int, torch.Tensor] = {}

    def keep(self, layer: int, h: torch.Tensor) -> None:
        """Copy h [1, tokens, hidden], the input of a layer."""
        if layer in self.layers:
            self._states[layer] = h[0].clone()

    def take(self) -> list[torch.Tensor]:
        """The inputs [tokens, hidden] of the last pass, in the order of `layers`."""
        states, self._states = self._states, {}
        return [states[layer] for layer in self.layers]


class BlockTree:
    """The tree over a loaded model of vLLM.

    Args:
        model: vLLM's.
        ranks: tensor-parallel ranks.
        adapters: adapters of the rows of products.
        stage: declared ops of the rank.

    Attributes:
        module: the tree's root, a `CausalLM`.
        attention: the backend of its passes.
        layers: vLLM's decoder layers, for those in which no block waits.
        read: inputs of layers that a drafter reads (EAGLE-3); None: it reads none.

    Raises:
        NotImplementedError: a part of the tree has no counterpart in vLLM's model. The message names it.
    """

    def __init__(
        self, model: Any, config: Any, spec: ModelSpec, device: torch.device, ranks: Ranks, adapters: RowAdapters,
        stage: RankStage,
    ) -> None:  # fmt: skip
        self._model, self._spec, self._ranks, self._adapters = model, spec, ranks, adapters
        cls = NATIVE[architecture_of(config)]
        self.module: Any = cls(config, spec, "meta", 1)
        decoder: Any = getattr(self.module, self.module.decoder_name)
        decoder.rotary_emb = decoder.rotary_of(config, spec, str(device), spec.context_len)
        served = set[int]()
        for path, own in list(self.module.named_modules(remove_duplicate=False)):
            served |= self._serve(path, own)
        missing = [n for n, p in self.module.named_parameters() if p.is_meta and id(p) not in served]
        if missing:
            raise NotImplementedError(
                f"vLLM's {type(model).__name__} has no counterpart of {', '.join(missing[:3])}. {OURS}"
            )
        layers = range(spec.num_hidden_layers)
        self.attention = VllmAttention([self._attention(i) for i in layers])
        self.layers = WholeLayers([self._theirs(f"model.layers.{i}") for i in layers], self._called, stage)
        self.layers.watch(decoder.rotary_emb)
        read: tuple[int, ...] = getattr(self._theirs("model"), "aux_hidden_state_layers", ())
        self.read = decoder.aux = LayerInputs(read) if read else None

    def _serve(self, path: str, own: Any) -> set[int]:
        """Have a module computed by vLLM's. Returns the ids of its parameters that are never read."""
        for name, theirs in MERGED.items():
            if isinstance(getattr(own, name, None), MergedLinear):
                self._merged(getattr(own, name), self._theirs(f"{path}.{theirs}"), attention=name == "_qkv")
        if hasattr(own, "sinks"):
            sinks = self._ranks.joined(self._theirs(path).sinks.detach()[None])[0].to(self._spec.dtype)
            own.sinks, own.attn = nn.Parameter(sinks, False), replace(own.attn, sinks=sinks)
        if isinstance(own, Projection):
            return {id(p) for p in own.parameters()}
        if isinstance(own, NormModule):
            own.weight = nn.Parameter(self._theirs(path).weight.detach(), False)  # the same memory
            return set()
        if isinstance(own, Embedding):
            own.look_up = self._rows_of_ids(self._theirs(path))
        elif path == "lm_head":
            own.gemm = self._rows(self._head(), of_logits=True)
        elif isinstance(own, Linear):
            own.gemm = self._rows(self._row_parallel(self._theirs(path)))
        elif isinstance(own, TopKRouter):
            own._gemm = self._rows(_product(self._theirs(path)))  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(own, QuantizableExperts):
            own.elsewhere = self._called(partial(_through_experts, self._theirs(path), own.num_experts))
        else:
            return set()
        return {id(p) for p in own.parameters(recurse=False)}

    def _theirs(self, path: str) -> Any:
        for old, new in (("", ""), *RENAMED.items()):
            try:
                return self._model.get_submodule(path.replace(old, new) if old else path)
            except AttributeError:
                continue
        raise NotImplementedError(f"vLLM's {type(self._model).__name__} has no module {path}. {OURS}")

    def _called(self, function: Callable[..., torch.Tensor], of_logits: bool = False) -> Callable[..., torch.Tensor]:
        """A function of rows [n, ...] with their adapters. With several ranks, rank 0 calls the others."""
        called, adapters = self._ranks.add(self._adapters.around(function)), self._adapters
        return lambda *inputs: called(*inputs, *adapters.of(len(inputs[0]), of_logits))

    def _rows(self, function: Callable[[torch.Tensor], torch.Tensor], of_logits: bool = False) -> Any:
        """A product [..., in] -> [..., out] of one of rows [n, in]."""
        called = self._called(function, of_logits)

        def product(x: torch.Tensor) -> torch.Tensor:
            out = called(x.reshape(-1, x.shape[-1]))
            return out.view(*x.shape[:-1], out.shape[-1])

        return product

    def _rows_of_ids(self, theirs: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        look_up = self._called(lambda ids: theirs(ids))
        return lambda ids: look_up(ids.reshape(-1)).view(*ids.shape, -1)

    def _merged(self, own: MergedLinear, theirs: Any, attention: bool) -> None:
        ranks = self._ranks
        counts = [None, *[min(ranks.size, self._spec.num_key_value_heads)] * 2] if attention else [None, None]
        local = [size // (count or ranks.size) for size, count in zip(own.sizes, counts, strict=True)]
        multiply = _product(theirs)

        def whole(x: torch.Tensor) -> torch.Tensor:
            out = multiply(x)
            if ranks.size == 1:
                return out
            parts = zip(out.split(local, -1), counts, strict=True)
            return torch.cat([ranks.joined(part, count) for part, count in parts], -1)

        own.compute_by(self._rows(whole))

    def _row_parallel(self, theirs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        multiply, ranks = _product(theirs), self._ranks
        return lambda x: multiply(ranks.own(x).contiguous())

    def _head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head's product, without the soft cap that vLLM's `compute_logits` applies."""
        model = self._model
        head = getattr(model, "lm_head", None) or model.model.embed_tokens
        return lambda rows: model.logits_processor._get_logits(rows, head, None)

    def _attention(self, layer: int) -> Callable[..., torch.Tensor]:
        ranks, kv = self._ranks, min(self._ranks.size, self._spec.num_key_value_heads)
        attend = self._theirs(f"model.layers.{layer}.self_attn.attn")

        def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            own = (ranks.own(q), ranks.own(k, kv), ranks.own(v, kv))
            return ranks.joined(attend(*(part.contiguous() for part in own)))

        return ranks.add(whole)


def _product(theirs: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A linear layer of vLLM as a function of rows."""

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        out = theirs(rows)
        return out[0] if isinstance(out, tuple) else out

    return multiply


def _through_experts(
    theirs: nn.Module, count: int, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """x [tokens, hidden] through the experts `ids`, weighted by `scores` [tokens, top_k].

    vLLM's experts choose by logits. They get logits of which exactly these are chosen: the logarithms of the scores.
    """
    scores = scores.float()
    total = scores.sum(-1, keepdim=True)
    logits = torch.full((len(x), count), -torch.inf, device=x.device)
    logits.scatter_(-1, ids, scores.log())
    out = theirs(x, logits)[:, : x.shape[-1]]  # kernels of some formats pad the columns
    return (out.float() * total).to(out.dtype)
