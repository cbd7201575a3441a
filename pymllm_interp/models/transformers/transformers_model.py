"""Any decoder of transformers, by its own class. Its attention runs over the paged KV pool; the rest is transformers' code.

    model = load_transformers_model(hf_config, config_spec(hf_config, dtype), device, folder, seed=0)

`TransformersModel` has the children of the family's class under their names, so traces see the family's own modules. Both
passes of models/base.py call them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from ...attention.attention_backend import RadixAttention
from ...core.current_pass import current_batch, current_pass
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import LOGITS, ModelSpec, has_images
from ...core.unsupported import UnsupportedModelError
from ...layers.edits.base import apply_inner
from ...mem_cache.state_pool import recurrent_places
from ..base import CausalLM
from ..weights.loading import WeightsError, init_dummy_weights
from . import site_ends
from .attention_interface import PAGED, PAGED_INDEXED, PagedCalls
from .attention_method import serve_methods
from .cache_probe import updates_of
from .cache_route import CACHED, PoolCache, cache_windows, serve_biases
from .fused_parts import fuse_parts
from .indexers import place_keys, serve_indexers
from .parts.cache_names import cache_parameter
from .parts.encoders import encoder_class, encoder_of, without_heads
from .parts.heads import classifier_class, model_of, with_head
from .parts.relative_attention import serve_relative
from .position_rules import serve_lengths, serve_positions
from .probe import attention_configs, probe, set_paged_calls, use_attention
from .probed import ProbedModel
from .recurrent import check_states, serve_states
from .structure import family_of, model_spec

LARGEST_CACHED_STEP = 32, 512
"""Requests and token rows of a step that computes scores of all rows and all keys (models/transformers/cache_route.py)."""


class TransformersModel(CausalLM):
    """A decoder of transformers with its head.

    Args:
        served: transformers model with its weights. Its children become this module's.
        declared: spec according to the config.

    Raises:
        UnsupportedModelError: its attention cannot run over the KV pool.
    """

    fuses_ops = False

    def __init__(self, served: PreTrainedModel, declared: ModelSpec) -> None:
        super().__init__()
        self.config = served.config
        family = family_of(served, declared)
        declared = replace(declared, context_len=declared.context_len - serve_positions(served))
        serve_methods(served)
        serve_relative(served)
        serve_biases(served)
        recurrent, indexers = serve_states(served), serve_indexers(served)
        found = probe(served, family, declared, bool(recurrent))
        self.state_layouts = check_states(type(served).__name__, recurrent)
        spec = model_spec(served, family, declared, found, bool(recurrent))
        embedding: Any = served.get_input_embeddings()
        places = recurrent_places(self.state_layouts, spec.num_hidden_layers)
        self.spec = replace(spec, states=places, embedding_dim=embedding.weight.shape[-1])
        self.why_no_graphs = "an encoder does not decode" if declared.bidirectional else found.why_no_graphs
        fuse_parts(served)
        self._layers = set_paged_calls(found, self.spec)
        width = self.spec.num_key_value_heads * self.spec.head_dim
        self.num_index_layers = place_keys(type(served).__name__, indexers, len(self._layers), width)
        self._by_cache = _layers_by_index(served, found, self._layers)
        if declared.bidirectional and found.cached:
            raise UnsupportedModelError(f"{type(served).__name__} cannot be served: its attention is of its own")
        self._is_cached = found.cached
        self.largest_step = LARGEST_CACHED_STEP if found.cached or any(call.takes for call in found.calls) else None
        self._attention_name = CACHED if found.cached else PAGED_INDEXED if found.is_indexed else PAGED
        calls: list[Any] = [vars(module).get("paged_calls") for module in served.modules()]
        self._calls: list[PagedCalls] = [each for each in calls if each is not None]
        use_attention(served, self._attention_name)
        self._configs = attention_configs(served)
        _forget_padding(served)
        serve_lengths(served)
        site_ends.install(served, self.spec, found.cached)
        served.base_model.register_forward_hook(_keep_hidden_states)
        self._served = [served]  # in a list: its children are this module's
        self._takes = frozenset(inspect.signature(type(served).forward).parameters)
        self._cache_name = cache_parameter(self._takes)
        self._modules.update(served._modules)
        self._parameters.update(served._parameters)
        self._buffers.update(served._buffers)

    def set_separator(self, token: int | None) -> None:
        """Set the token between two texts, of an encoder with types of tokens."""
        served: Any = self._served[0]
        served.sep_token_id = token

    def attention_layers(self) -> list[RadixAttention]:
        return [] if self.spec.bidirectional else self._layers  # which have no KV

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> CausalLMOutputWithPast:
        logits = self._run(self._served[0], input_ids, position_ids, forward_batch)
        transformers_pass = forward_batch.transformers_pass
        collected: Any = {} if transformers_pass is None else transformers_pass.collected()
        return CausalLMOutputWithPast(logits=logits, **collected)  # pyright: ignore[reportArgumentType]

    def forward_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """The logits of `forward`: the same modules."""
        with current_pass(forward_batch):
            try:
                return self._run(self._served[0], input_ids, position_ids, forward_batch)
            except site_ends.PassEnd:
                return self.no_logits(input_ids)

    def decoder_fused(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        self._start()
        with current_pass(forward_batch):
            return self._served[0].base_model(
                input_ids=input_ids, position_ids=position_ids, attention_mask=self._no_mask(), use_cache=False
            )[0]

    def head_fused(self, h: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        served: Any = _HeadOnly(self._served[0], h)
        with current_pass(forward_batch):
            return self._run(served, forward_batch.input_ids[None], None, forward_batch)

    def _run(
        self, served: Any, input_ids: torch.Tensor, position_ids: torch.Tensor | None, batch: ForwardBatch
    ) -> torch.Tensor:
        """Logits [1, logit rows, vocab], after their ops."""
        self._start()
        rows = batch.logits_indices
        kwargs: dict[str, Any] = {"position_ids": position_ids, "logits_to_keep": 0 if rows is None else rows}
        kwargs = {name: value for name, value in kwargs.items() if name in self._takes}
        with self._attention(batch) as attention:
            logits = served(input_ids=input_ids, use_cache=False, **kwargs, **attention).logits
        if rows is not None and "logits_to_keep" not in kwargs:
            logits = logits[:, rows]
        return apply_inner(logits, batch.site_ops, 0, LOGITS)

    def logits_of(self, h: torch.Tensor) -> torch.Tensor:
        head: Any = self.get_submodule(self.spec.family.head)
        return head(h)

    @contextmanager
    def _attention(self, batch: ForwardBatch) -> Iterator[dict[str, Any]]:
        """Keyword arguments of the model's forward, so that it attends to the pages of the pass."""
        transformers_pass = batch.transformers_pass
        is_eager = transformers_pass is not None and transformers_pass.eager and batch.attention_cuts is None
        if not self._is_cached and not (is_eager and self._by_cache):
            yield {"attention_mask": self._no_mask()}
            return
        cache = PoolCache(batch, self._by_cache, None if self._is_cached else cache_windows(self.config))
        mask = cache.padding_mask() if self._is_cached else None
        with cache.serve(), nullcontext() if self._is_cached else self._own_attention():
            yield {"attention_mask": mask, self._cache_name: cache}

    def _no_mask(self) -> torch.Tensor | None:
        """Mask [1, 1, 1, 1] for indexers, which slice it without using its values; else None."""
        return next(self.parameters()).new_zeros(1, 1, 1, 1) if self._attention_name == PAGED_INDEXED else None

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """Use the family's own eager attention and masks."""
        for config in self._configs:
            config._attn_implementation_internal = "eager"
        try:
            yield
        finally:
            for config in self._configs:
                config._attn_implementation_internal = self._attention_name

    def _start(self) -> None:
        for calls in self._calls:
            calls.index = 0  # a pass that failed may have stopped between two calls


def _layers_by_index(
    served: PreTrainedModel, found: ProbedModel, layers: list[RadixAttention]
) -> dict[int, RadixAttention]:
    """The pool's layers by the index that modules update a cache with. Empty: they do not update it once a call."""
    if found.cached:
        return {call.layer_idx: layer for call, layer in zip(found.calls, layers, strict=True)}
    updates = updates_of(served, use_attention)
    shapes = [(call.num_kv_heads, *call.head_dims) for call in found.calls]
    if [update[1:] for update in updates] != shapes or len({update[0] for update in updates}) != len(layers):
        return {}
    return {update[0]: layer for update, layer in zip(updates, layers, strict=True)}


def _keep_hidden_states(module: torch.nn.Module, args: tuple, output: Any) -> None:
    batch = current_batch()
    if batch is None:
        return
    h = output[0]
    if batch.return_hidden_states:
        batch.hidden_states = h[0, : batch.num_request_tokens]
    if batch.transformers_pass is not None:
        batch.transformers_pass.end_layers(h)


class _HeadOnly:
    """A model as its own forward sees it. Its decoder returns hidden states that are there already."""

    def __init__(self, served: PreTrainedModel, h: torch.Tensor) -> None:
        self._served, self._h = served, h

    def __getattr__(self, name: str) -> Any:
        if name == self._served.base_model_prefix:
            return lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=self._h)  # pyright: ignore
        return getattr(self._served, name)

    def __call__(self, **kwargs: Any) -> Any:
        forward: Any = type(self._served).forward
        return forward(self, **kwargs)


def _forget_padding(served: PreTrainedModel) -> None:
    """Switch off the search for padding tokens, for which each pass would wait for the device."""
    for module in served.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _nothing  # pyright: ignore[reportAttributeAccessIssue]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, as a replaced method."""


def check_has_class(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError where transformers has no causal language model for the config."""
    known: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if has_images(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    if not config.is_encoder_decoder and type(config) not in known:
        raise UnsupportedModelError(f"transformers has no causal language model for {config.model_type!r} models")


@torch.no_grad()
def load_transformers_model(
    config: PretrainedConfig, spec: ModelSpec, device: str, folder: Path | None, seed: int,
    make: type[TransformersModel] = TransformersModel,
) -> TransformersModel:  # fmt: skip
    """The model of a config, by its own class.

    Args:
        spec: `config_spec` of the config.
        folder: folder of safetensors, which transformers reads and converts; None: random weights.
        seed: seed of random weights.

    Raises:
        UnsupportedModelError: transformers has no causal language model for the config, or it cannot be served.
        WeightsError: missing, unexpected or misshapen tensors.
    """
    config = copy.deepcopy(config)
    if not spec.bidirectional:
        check_has_class(config)
    config._attn_implementation = "eager"  # every class has it; the model never runs it
    if spec.bidirectional:
        served = _encoder(config, spec, device, folder, seed)
    elif folder is None:
        with torch.device(device), no_init_weights():
            served = without_weights(config, spec)
        if spec.num_labels is None:
            served.tie_weights()
        init_dummy_weights(served, seed)
    elif spec.num_labels is None:
        served = _from_folder(auto_class(config, spec), config, spec.dtype, folder)
    else:
        served = with_head(_from_folder(classifier_class(config), config, spec.dtype, folder), config, spec)
    served.to(device)  # pyright: ignore[reportArgumentType]
    return make(served.eval().requires_grad_(False), spec)


def _encoder(config: PretrainedConfig, spec: ModelSpec, device: str, folder: Path | None, seed: int) -> Any:
    cls = encoder_class(config)
    if folder is not None:
        loaded: Any = _from_folder(cls, config, spec.dtype, folder, any_head=cls is AutoModel)
        return encoder_of(loaded.to(device), spec)
    with torch.device(device), no_init_weights():
        loaded = cls.from_config(config, dtype=spec.dtype)
    init_dummy_weights(loaded, seed)
    return encoder_of(loaded, spec)


def without_weights(config: PretrainedConfig, spec: ModelSpec) -> Any:
    """The model of a config by its own class, with memory of weights on torch's current device."""
    if spec.bidirectional:
        return encoder_of(encoder_class(config).from_config(config, dtype=spec.dtype), spec)
    return model_of(config, spec, auto_class(config, spec))


def auto_class(config: PretrainedConfig, spec: ModelSpec) -> Any:
    """transformers' auto class of a model that generates."""
    if spec.source is None:
        return AutoModelForImageTextToText if has_images(config) else AutoModelForCausalLM
    return AutoModelForSpeechSeq2Seq if spec.source.family.hears else AutoModelForSeq2SeqLM


def _from_folder(
    cls: Any, config: PretrainedConfig, dtype: torch.dtype, folder: Path, any_head: bool = False
) -> PreTrainedModel:  # fmt: skip
    load: Any = cls.from_pretrained
    served, report = load(
        folder, config=config, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    if getattr(config, "quantization_config", None):
        for parameter in served.parameters():  # dequantised experts are bfloat16 in any case
            if parameter.dtype is torch.bfloat16:
                parameter.data = parameter.data.to(dtype)
    problems = {name: sorted(map(str, report[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    problems = without_heads(served, problems) if any_head else problems
    if any(problems.values()):
        found = "; ".join(
            f"{name.replace('_', ' ')}: {', '.join(keys[:10])}" for name, keys in problems.items() if keys
        )
        raise WeightsError(
            f"these weights are not those of this {type(served).__name__}: {found}. Check that config.json and the weight "
            "files belong together."
        )
    return served
