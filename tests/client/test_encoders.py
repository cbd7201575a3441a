"""Encoders by transformers' classes: attention goes both ways, each text runs in one pass, and hooks act as in decoders (V14)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_tokenizers import wordpiece
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma3TextConfig,
    ModernBertConfig,
    PretrainedConfig,
    XLMRobertaConfig,
)

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.interventions import Knockout, Monitor
from pymllm_interp.utils.arguments import PromptError

GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(5, 95, (n,), generator=GENERATOR).tolist() for n in (1, 17, 30, 3, 16)]
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3,
    "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "bert": lambda: BertConfig(**SIZES),
    "xlm-roberta": lambda: XLMRobertaConfig(**SIZES, pad_token_id=1),
    "modernbert": lambda: ModernBertConfig(
        **SIZES, global_attn_every_n_layers=2, local_attention=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2, classifier_pooling="cls",
    ),
    "gemma3_text": lambda: Gemma3TextConfig(
        **{**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 6},
        use_bidirectional_attention=True, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}  # fmt: skip


def saved(family: str, folder: Path, cls: Any = AutoModel, **settings: Any) -> Any:
    """transformers' model with random weights, float32, in a folder."""
    config = CONFIGS[family]()
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(2)
    model = cls.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0 if name.endswith("bias") or "gemma" in family else 1, 0.1)
            else:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def hidden(model: Any, ids: list[int]) -> torch.Tensor:
    return model.base_model(torch.tensor([ids])).last_hidden_state[0]


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cls", [AutoModel, AutoModelForMaskedLM])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_embeddings_equal_transformers(family: str, cls: Any, tmp_path: Path) -> None:
    """Several texts in a step, whole ones only; the same text twice takes nothing from the other."""
    if family == "gemma3_text" and cls is AutoModelForMaskedLM:
        pytest.skip("transformers has no such class")
    model = saved(family, tmp_path, cls)
    lm = LM(tmp_path, dtype="float32", kv_cache_tokens=256, max_num_tokens=48)
    states = [hidden(model, ids) for ids in PROMPTS]
    for _ in range(2):
        close([out.data for out in lm.encode(PROMPTS)], [unit(h[0]) for h in states])
        outs = lm.encode(PROMPTS, pooling="mean", normalize=False)
        close([out.data for out in outs], [h.mean(0) for h in states])
    assert not any(out.num_cached_tokens for out in outs)
    close([out.data for out in lm.encode(PROMPTS, pooling="all")], [unit(h) for h in states])
    assert lm.limits.max_model_len == 48 and lm.backend.facts.tasks == ("embed", "token_embed", "score")
    with pytest.raises(PromptError, match="generates nothing"):
        lm.generate([[5]], SamplingParams(max_tokens=1))
    with pytest.raises(PromptError, match="max_model_len"):
        lm.encode([[5] * 49])
    lm.shutdown()


@pytest.mark.parametrize("family", ["bert", "modernbert", "xlm-roberta"])
def test_hooks_act_on_encoders(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    lm = LM(tmp_path, dtype="float32", kv_cache_tokens=256)
    vector = torch.randn(36, generator=GENERATOR)
    layers = model.encoder.layer if hasattr(model, "encoder") else model.layers
    states: list[torch.Tensor] = []

    def steered(module: Any, inputs: Any, output: Any) -> Any:
        h = output[0] if isinstance(output, tuple) else output
        states.append(h[0] + vector)
        return (h + vector, *output[1:]) if isinstance(output, tuple) else h + vector

    handle = layers[1].register_forward_hook(steered)
    try:
        expected = [hidden(model, ids) for ids in PROMPTS]
    finally:
        handle.remove()
    op, monitor = Steer("resid_post.1", vector), Monitor("resid_post.0", vector, threshold=1e9, name="watch")
    lists = [[op], [op], None, [op], [op]]
    outs = lm.encode(PROMPTS, pooling="mean", interventions=lists, monitors=[monitor], capture=["resid_post.1"])
    plain = hidden(model, PROMPTS[2])
    close([out.data for out in outs], [unit((expected[i] if own else plain).mean(0)) for i, own in enumerate(lists)])
    close(outs[1].activations["resid_post.1"], states[1])
    assert [len(out.monitors["watch"].scores) for out in outs] == [len(ids) for ids in PROMPTS]
    with pytest.raises(ValueError, match=r"[Kk]nockout|attention"):
        lm.encode(PROMPTS, interventions=[Knockout(1, from_=[-1], to=[0])])
    path = "encoder.layer" if family != "modernbert" else "layers"
    with lm.trace(PROMPTS[1]):
        base = getattr(lm, model.base_model_prefix)
        module = base
        for part in path.split("."):
            module = getattr(module, part)
        found = module[1].output.save()
    close((found[0] if isinstance(found, tuple) else found).reshape(-1, 36) + vector, states[1])
    lm.shutdown()


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert"])
def test_classifiers_equal_transformers(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path, AutoModelForSequenceClassification, num_labels=3)
    lm = LM(tmp_path, dtype="float32", kv_cache_tokens=256)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
    close([out.logits for out in lm.classify(PROMPTS)], expected)
    lm.shutdown()


def test_a_cross_encoder_types_the_tokens_of_a_pair(tmp_path: Path) -> None:
    model = saved("bert", tmp_path, AutoModelForSequenceClassification, num_labels=1)
    tokenizer = wordpiece()
    tokenizer.add_special_tokens({"sep_token": "[SEP]", "cls_token": "[CLS]"})
    separator = 7
    lm = LM(tmp_path, dtype="float32", kv_cache_tokens=256)
    lm.runner.get_model().set_separator(separator)
    ids = [5, 9, 11, 7, 20, 21, 7]
    types = [0, 0, 0, 0, 1, 1, 1]
    with torch.no_grad():
        expected = float(model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits)
        plain = float(model(torch.tensor([PROMPTS[3]])).logits)
    found = lm.score([ids, PROMPTS[3]])
    assert found == pytest.approx([expected, plain], abs=1e-5)
    lm.shutdown()


def test_a_connected_lm_encodes_by_an_encoder(tmp_path: Path) -> None:
    from helpers_served import served

    model = saved("bert", tmp_path, AutoModelForSequenceClassification, num_labels=2)
    with served(tmp_path, keys=None) as server, LM.connect(server.url) as lm:
        with torch.no_grad():
            expected = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
        close([out.logits for out in lm.classify(PROMPTS)], expected)
        close([out.data for out in lm.encode(PROMPTS)], [unit(hidden(model, ids)[0]) for ids in PROMPTS])
        with server.client(None) as client:
            found = client.post("/classify", json={"input": PROMPTS, "use_activation": False}).json()
        close([torch.tensor(entry["probs"]) for entry in found["data"]], expected)
