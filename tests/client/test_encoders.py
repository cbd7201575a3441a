"""Encoders by transformers' classes: attention goes both ways, each text runs in one pass, and hooks act as in decoders (V14)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_devices import DEVICES, lm_on
from helpers_tokenizers import wordpiece
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    Gemma3TextConfig,
    ModernBertConfig,
    MPNetConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
)

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.core.unsupported import UnsupportedModelError
from pymllm_interp.interventions import Knockout, Monitor
from pymllm_interp.models.weights.loading import WeightsError
from pymllm_interp.utils.arguments import PromptError

CLOSE = 1e-4 if torch.cuda.is_available() else 1e-5
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(5, 95, (n,), generator=GENERATOR).tolist() for n in (1, 17, 30, 3, 16)]
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3,
    "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "bert": lambda: BertConfig(**SIZES),
    "xlm-roberta": lambda: XLMRobertaConfig(**SIZES, pad_token_id=1),
    "mpnet": lambda: MPNetConfig(**SIZES),
    "electra": lambda: ElectraConfig(**SIZES, embedding_size=20),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=97, dim=36, hidden_dim=40, n_layers=3, n_heads=3, max_position_embeddings=64
    ),
    "deberta-v3": lambda: DebertaV2Config(
        **SIZES, relative_attention=True, position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0,
    ),
    "deberta-v2": lambda: DebertaV2Config(
        **SIZES, relative_attention=True, max_relative_positions=20, pos_att_type=["p2c", "c2p"], type_vocab_size=2
    ),
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
    torch.testing.assert_close(found, expected, atol=CLOSE, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "cls"),
    [(family, AutoModel) for family in CONFIGS]
    + [(family, AutoModelForMaskedLM) for family in ("bert", "mpnet", "distilbert", "deberta-v3")]
    + [(family, AutoModelForPreTraining) for family in ("bert", "electra")],
)
def test_embeddings_equal_transformers(family: str, cls: Any, tmp_path: Path, device: str) -> None:
    """Several texts in a step, whole ones only; the same text twice takes nothing from the other."""
    model = saved(family, tmp_path, cls)
    lm = lm_on(device, tmp_path, kv_cache_tokens=256, max_num_tokens=48)
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


@pytest.mark.parametrize("family", ["xlm-roberta", "mpnet", "bert"])
def test_padding_tokens_in_a_text_are_not_counted_where_transformers_does_not(family: str, tmp_path: Path) -> None:
    """A text may have the padding token's own word, "<pad>"."""
    model = saved(family, tmp_path)
    padding = model.config.pad_token_id
    texts = [[padding], [5, padding, 6, padding, padding, 7], [8, 9, 10], [padding, 11]]
    with LM(tmp_path, device="cpu", dtype="float32", kv_cache_tokens=256) as lm:
        close([out.data for out in lm.encode(texts, pooling="all")], [unit(hidden(model, ids)) for ids in texts])
        embeds = torch.randn(3, 36)
        whole = {"prompt_token_ids": [padding] * 3, "embeds": {i: embeds[i] for i in range(3)}}
        with torch.no_grad():
            expected = unit(model(inputs_embeds=embeds[None]).last_hidden_state[0])
        close([out.data for out in lm.encode([whole, {"prompt_embeds": embeds}], pooling="all")], [expected] * 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["bert", "modernbert", "xlm-roberta", "mpnet", "deberta-v3", "distilbert"])
def test_hooks_act_on_encoders(family: str, tmp_path: Path, device: str) -> None:
    model = saved(family, tmp_path)
    lm = lm_on(device, tmp_path, kv_cache_tokens=256)
    vector = torch.randn(36, generator=GENERATOR)
    path = next(each for each in ("encoder.layer", "transformer.layer", "layers") if hasattr(model, each.split(".")[0]))
    layers = model.get_submodule(path)
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
    with lm.trace(PROMPTS[1]):
        base = getattr(lm, model.base_model_prefix)
        module = base
        for part in path.split("."):
            module = getattr(module, part)
        found = module[1].output.save()
    close((found[0] if isinstance(found, tuple) else found).reshape(-1, 36) + vector, states[1])
    lm.shutdown()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "gemma3_text"])
def test_classifiers_equal_transformers(family: str, tmp_path: Path, device: str) -> None:
    model = saved(family, tmp_path, AutoModelForSequenceClassification, num_labels=3)
    lm = lm_on(device, tmp_path, kv_cache_tokens=256)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
    close([out.logits for out in lm.classify(PROMPTS)], expected)
    lm.shutdown()


def test_traces_of_several_texts_read_and_edit_an_attention_that_runs_for_each(tmp_path: Path) -> None:
    """Texts with blocks and without in one step; inside of DeBERTa's and MPNet's attention, too."""
    for family, inner in (("mpnet", "attn.v"), ("deberta-v3", "self.value_proj")):
        folder = tmp_path / family
        model = saved(family, folder)
        lm = LM(folder, dtype="float32", kv_cache_tokens=256)
        seen: list[torch.Tensor] = []

        def doubled(module: Any, inputs: Any, output: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            if output.shape[1] != 16:  # DeBERTa projects its relative positions by the same module
                seen.append(output[0])
            return output * 2 if output.shape[1] == 17 else output

        handle = model.get_submodule(f"encoder.layer.1.attention.{inner}").register_forward_hook(doubled)
        expected = [hidden(model, ids) for ids in PROMPTS[1:4]]
        handle.remove()
        found: list[Any] = []
        with lm.trace() as tracer:
            for ids in PROMPTS[1:4]:
                with tracer.invoke(ids):
                    base: Any = getattr(lm, model.base_model_prefix)
                    layer = base.encoder.layer[1].attention
                    value = layer.attn.v if family == "mpnet" else layer.self.value_proj
                    rows = value.output.clone().save()
                    if len(ids) == 17:
                        value.output = value.output * 2
                    found.append((rows, base.encoder.layer[2].output[0].save()))
        for (rows, last), own, states in zip(found, seen, expected, strict=True):
            close(rows.reshape(own.shape), own)
            close(last.reshape(states.shape), states)
        lm.shutdown()


def test_a_deberta_with_a_convolution_is_refused(tmp_path: Path) -> None:
    saved("deberta-v2", tmp_path, conv_kernel_size=3, conv_act="tanh")
    with pytest.raises(UnsupportedModelError, match="conv_kernel_size cannot be served"):
        LM(tmp_path, dtype="float32")


def test_weights_that_an_encoder_lacks_are_an_error_and_other_heads_are_not(tmp_path: Path) -> None:
    """A folder of sentence-transformers has the encoder's own tensors beside the config of a class with a head."""
    model = saved("mpnet", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["MPNetForMaskedLM"]}))
    tensors = load_file(tmp_path / "model.safetensors")
    other = {"lm_head.bias": torch.zeros(3), "embeddings.position_ids": torch.arange(64)[None]}
    save_file(tensors | other, tmp_path / "model.safetensors", metadata={"format": "pt"})
    lm = LM(tmp_path, dtype="float32", kv_cache_tokens=256)
    close(lm.encode([PROMPTS[1]])[0].data, unit(hidden(model, PROMPTS[1])[0]))
    lm.shutdown()
    for changed, message in (
        ({name: value for name, value in tensors.items() if "layer.1.attention.attn.q" not in name}, "missing keys"),
        (tensors | {"encoder.layer.7.attention.attn.q.weight": torch.zeros(36, 36)}, "unexpected keys"),
    ):
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(WeightsError, match=message):
            LM(tmp_path, dtype="float32", kv_cache_tokens=256)


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


def typed_tokenizer(typed: bool = True) -> PreTrainedTokenizerFast:
    """BERT's pairs of words w0 to w89, with types of tokens or without."""
    own = Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, unk_token="w0"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens([AddedToken("[CLS]", special=True), AddedToken("[SEP]", special=True)])
    own.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 90), ("[SEP]", 91)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"] if typed else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=own, cls_token="[CLS]", sep_token="[SEP]", pad_token="w0", model_input_names=names
    )


@pytest.mark.parametrize("typed", [True, False])
def test_tokens_of_a_pair_have_the_types_that_the_tokenizer_gives(typed: bool, tmp_path: Path) -> None:
    model = saved("bert", tmp_path, AutoModelForSequenceClassification, num_labels=1)
    tokenizer = typed_tokenizer(typed)
    tokenizer.save_pretrained(tmp_path)
    pair = tokenizer("w5 w6", "w7 w8 w9", return_tensors="pt")
    assert ("token_type_ids" in pair) == typed
    with LM(tmp_path, device="cpu", dtype="float32", kv_cache_tokens=256) as lm, torch.no_grad():
        empty = tokenizer(["w5 w6"], [""], return_tensors="pt")  # a batch, as sentence-transformers tokenizes pairs
        expected = [float(model(**each).logits.sigmoid()) for each in (pair, empty)]
        assert lm.score("w5 w6", ["w7 w8 w9", ""]) == pytest.approx(expected, abs=1e-5)
        for text in ("w5 [SEP] w6", "w5 [SEP]", "[SEP] w5"):  # types by the tokenizer, or a refusal
            single, both = tokenizer(text, return_tensors="pt"), tokenizer("w5", text, return_tensors="pt")
            calls = (lambda text=text: lm.score([text]), lambda text=text: lm.score("w5", [text]))
            for call, given in zip(calls, (single, both), strict=True):
                if typed and given is single:
                    with pytest.raises(PromptError, match=r"holds the separator '\[SEP\]' in a text"):
                        call()
                    with pytest.raises(PromptError, match="holds the separator"):
                        lm.encode([text])
                else:
                    logits = model(**given).logits
                    wanted = logits if given is single else logits.sigmoid()
                    assert call() == pytest.approx([float(wanted)], abs=1e-5)
        if typed:
            with pytest.raises(PromptError, match="pair 0 holds the separator"):
                lm.score("w5 [SEP] w6", ["w7"])
        ids = [90, 5, 91, 6, 91]  # a pair by its convention
        assert lm.score([ids])[0] == pytest.approx(
            float(model(**tokenizer("w5", "w6", return_tensors="pt")).logits), abs=1e-5
        )


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "electra"])
def test_a_text_with_separators_has_one_type(family: str, tmp_path: Path) -> None:
    """SPECTER and its kin embed "title[SEP]abstract" as one text: transformers' tokenizers give it one type."""
    model, ids = saved(family, tmp_path), [5, 9, 11, 7, 20, 21, 7]
    with LM(tmp_path, device="cpu", dtype="float32", kv_cache_tokens=256) as lm:
        lm.runner.get_model().set_separator(7)
        (out,) = lm.encode([ids], pooling="all")
        close(out.data, unit(hidden(model, ids)))


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


def test_a_server_refuses_a_text_with_a_separator_of_a_classifier_with_types(tmp_path: Path) -> None:
    from helpers_served import served

    saved("bert", tmp_path, AutoModelForSequenceClassification, num_labels=1)
    typed_tokenizer().save_pretrained(tmp_path)
    with served(tmp_path, keys=None) as server, server.client(None) as client:
        for path, body, status in (
            ("/classify", {"input": "w5 [SEP] w6"}, 400), ("/classify", {"input": "w5 w6"}, 200),
            ("/classify", {"input": [90, 5, 91, 6, 91]}, 200), ("/score", {"text_1": "w5 [SEP] w6", "text_2": "w7"}, 400),
            ("/score", {"text_1": "w5", "text_2": "w7 [SEP] w8"}, 200),
        ):  # fmt: skip
            answer = client.post(path, json=body)
            assert answer.status_code == status and (status == 200 or "holds the separator" in answer.text), answer.text
