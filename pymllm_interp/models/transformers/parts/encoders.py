"""Encoders of transformers with a head: attention goes both ways, and each prompt runs in one pass, without KV."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from ....core.current_pass import current_batch
from ....core.families import CLASSIFIERS
from ....core.model_spec import ModelSpec
from ....core.unsupported import UnsupportedModelError


class Encoder(nn.Module):
    """An encoder and its head, called as a decoder with its head is. The head's rows are single positions.

    Args:
        base: the family's encoder.
        head: [1, rows, hidden] -> [1, rows, labels].
        classifies: whether it reads pairs of texts. A text that is embedded may have separators, and has one type.

    Attributes:
        sep_token_id: token between two texts. Tokens behind it have the second type, in classifiers of families with types.
    """

    sep_token_id: int | None = None

    def __init__(self, base: Any, head: nn.Module, classifies: bool) -> None:
        super().__init__()
        self.config, self.base_model_prefix = base.config, base.base_model_prefix or "model"
        self.add_module(self.base_model_prefix, base)
        self.lm_head = head
        takes = inspect.signature(type(base).forward).parameters
        self._has_types = classifies and "token_type_ids" in takes and getattr(base.config, "type_vocab_size", 0) > 1
        counts = [module for module in base.modules() if hasattr(module, "create_position_ids_from_inputs_embeds")]
        self._padding: int | None = counts[0].padding_idx if counts else None

    @property
    def base_model(self) -> nn.Module:
        """The encoder without the head."""
        return getattr(self, self.base_model_prefix)

    def get_input_embeddings(self) -> Any:
        base: Any = self.base_model
        return base.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, attention_mask: Any = None,
        use_cache: bool | None = None, logits_to_keep: Any = 0,
    ) -> CausalLMOutput:  # fmt: skip
        """The logits [1, rows, labels] of the rows `logits_to_keep`; 0: of all."""
        given: dict[str, Any] = {"position_ids": position_ids, "attention_mask": attention_mask}
        batch = current_batch()
        if self._padding is not None and batch is not None:
            given["position_ids"] = _positions(input_ids, self._padding, batch)
        if self._has_types and self.sep_token_id is not None and batch is not None:
            given["token_type_ids"] = _types(input_ids, self.sep_token_id, batch.batch_groups)
        takes = inspect.signature(type(self.base_model).forward).parameters
        any_name = any(one.kind is one.VAR_KEYWORD for one in takes.values())
        h = self.base_model(input_ids=input_ids, **{k: v for k, v in given.items() if any_name or k in takes})[0]
        rows = h if isinstance(logits_to_keep, int) else h[:, logits_to_keep]
        return CausalLMOutput(logits=self.lm_head(rows))  # pyright: ignore[reportArgumentType]


def _types(ids: torch.Tensor, separator: int, groups: Any) -> torch.Tensor:
    """Types [1, tokens]: 0 up to a request's first separator, 1 behind it."""
    found, before = torch.zeros_like(ids), (ids == separator).long()
    for start, size in groups:
        part = before[:, start : start + size]
        found[:, start : start + size] = (part.cumsum(-1) - part).clamp(max=1)
    return found


def _positions(ids: torch.Tensor, padding: int, batch: Any) -> torch.Tensor:
    """Positions [1, tokens] of RoBERTa and its kin, which do not count padding tokens; these have position -1."""
    found, counted = torch.full_like(ids, -1), (ids != padding).long()
    if batch.input_embeds is not None:
        counted[0, batch.input_embeds.rows] = 1  # their ids are placeholders
    for start, size in batch.batch_groups:
        part = counted[:, start : start + size]
        found[:, start : start + size] = part.cumsum(-1) * part - 1
    return found


class EncoderHead(nn.Module):
    """The classification head of an encoder, on the states of first tokens.

    Args:
        pooler: [rows, 1, hidden] -> [rows, hidden], or None.
        classifier: the rest.
    """

    def __init__(self, pooler: nn.Module | None, classifier: nn.Module) -> None:
        super().__init__()
        self.pooler, self.classifier = pooler, classifier

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """[1, rows, hidden] -> [1, rows, labels]."""
        rows = h.transpose(0, 1)  # each row as the first token of a text
        if self.pooler is not None:
            rows = self.pooler(rows)
        return self.classifier(rows).unsqueeze(0)


class _FirstToken(nn.Module):
    """A head of ModernBERT or DistilBERT on first tokens."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(rows[:, 0])


def encoder_class(config: PretrainedConfig) -> Any:
    """transformers' auto class of an encoder's config. Heads that do not classify are not loaded."""
    is_classifier = (config.architectures or [""])[0].endswith(CLASSIFIERS[0])
    return AutoModelForSequenceClassification if is_classifier else AutoModel


def without_heads(served: nn.Module, problems: dict[str, list[str]]) -> dict[str, list[str]]:
    """The names of tensors that an encoder lacks, or has too many. A checkpoint may have other heads, and no pooler.

    Args:
        problems: kind of problem -> names, in the checkpoint's or in the encoder's own form.
    """
    own = {name for name, _ in served.named_children()} - {"pooler"}
    prefix = f"{getattr(served, 'base_model_prefix', '')}."
    return {
        kind: [name for name in names if name.removeprefix(prefix).partition(".")[0] in own]
        for kind, names in problems.items()
    }


def encoder_of(loaded: Any, spec: ModelSpec) -> Any:
    """The encoder of a loaded model, with its classification head, or one that gives a logit of 0.
    Raises UnsupportedModelError: a head that reads other rows than the first token's."""
    base, name = loaded.base_model, type(loaded).__name__
    pooler = getattr(base, "pooler", None)
    if pooler is not None:
        base.pooler = None  # it would read the first row of a pass, of some request
    if not name.endswith(CLASSIFIERS[0]):
        head = nn.Linear(spec.hidden_size, 1, bias=False, dtype=spec.dtype, device=next(base.parameters()).device)
        nn.init.zeros_(head.weight)
        return Encoder(base, head, classifies=False)
    parts = {part: child for part, child in loaded.named_children() if not isinstance(child, nn.Dropout)}
    classifier, pooler = parts.get("classifier"), parts.get("pooler", pooler)
    extra = parts.keys() - {loaded.base_model_prefix, "classifier", "pooler"}
    if "pre_classifier" in extra:  # DistilBERT's
        pooler, extra = _FirstToken(nn.Sequential(parts["pre_classifier"], nn.ReLU())), extra - {"pre_classifier"}
    if "head" in extra and getattr(loaded.config, "classifier_pooling", "") == "cls":
        pooler, extra = _FirstToken(parts["head"]), extra - {"head"}
    if classifier is None or extra or (pooler is None and isinstance(classifier, nn.Linear)):
        raise UnsupportedModelError(f"{name} cannot be served: its head does not read the first token's state")
    return Encoder(base, EncoderHead(pooler, classifier), classifies=True)
