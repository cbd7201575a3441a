"""Folders of PEFT's format: what is read as PEFT reads it, and what is refused, with what to do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_adapters import PREFIX, change_config, change_tensors, write_adapter
from helpers_runner import random_ids
from safetensors.torch import load_file

from pymllm_interp import LM
from pymllm_interp.models.adapters.peft_config import AdapterError, PeftConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "adapters"
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def lm(model_folder: Callable[[str], Path]) -> Iterator[LM]:
    with LM(model_folder("llama"), dtype="float32", device="cpu", kv_cache_tokens=512, max_lora_rank=16) as lm:
        yield lm


@pytest.fixture
def folder(tmp_path: Path, oracle: Callable[[str], Any]) -> Path:
    return write_adapter(tmp_path / "adapter", oracle("llama"), targets=["q_proj", "down_proj"])


@pytest.mark.parametrize("case", json.loads((GOLDEN / "cases.json").read_text()), ids=lambda case: case["name"])
def test_logits_are_those_that_peft_computed(case: dict[str, Any]) -> None:
    """Golden files of PEFT 0.21 (tests/golden/make_adapters.py): its own saved folders, and its logits and states."""
    expected, states = load_file(GOLDEN / case["name"] / "expected.safetensors"), dict[str, torch.Tensor]()
    with LM(GOLDEN / case["model"], dtype="float32", device="cpu", kv_cache_tokens=512, lower_traces="off") as lm:
        lm.adapters.load("a", GOLDEN / case["name"])
        with lm.trace(expected["ids"].tolist(), lora="a"):
            for path in case["modules"]:
                states[path] = lm.get(path).output.save()
            logits = lm.lm_head.output.save()
    for name, value in {**states, "logits": logits}.items():
        wanted = expected[name]
        assert float((value[0] - wanted).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max())), name


REFUSED_FIELDS = {
    "use_dora": True, "modules_to_save": ["lm_head"], "trainable_token_indices": [1], "target_parameters": ["experts.w"],
    "layer_replication": [[0, 1]], "alora_invocation_tokens": [5], "lora_bias": True, "use_qalora": True,
    "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 1}, "megatron_config": {"a": 1}, "bias": "all",
    "init_lora_weights": "pissa_niter_4", "peft_type": "IA3", "a_field_of_tomorrow": 1,
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED_FIELDS)
def test_fields_that_change_the_result_are_refused_by_name(field: str, lm: LM, folder: Path) -> None:
    change_config(folder, **{field: REFUSED_FIELDS[field]})
    with pytest.raises(AdapterError, match=field):
        lm.adapters.load("a", folder)
    assert not lm.adapters


def test_all_other_fields_of_peft_are_known(lm: LM, folder: Path) -> None:
    """A config as PEFT writes it, with values that change nothing."""
    change_config(
        folder, lora_dropout=0.1, inference_mode=True, task_type="CAUSAL_LM", peft_version="0.21.0", fan_in_fan_out=True,
        init_lora_weights="gaussian", revision="main", loftq_config={}, eva_config={"rho": 2.0}, qalora_group_size=16,
        megatron_core="megatron.core", auto_mapping={"base_model_class": "LlamaForCausalLM", "parent_library": "x"},
    )  # fmt: skip
    lm.adapters.load("a", folder)
    lm.adapters.unload("a")


PEFT = "adapter_config.json"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda f: [path.unlink() for path in f.iterdir()], "has no adapter_config.json"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "a pickle": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), "is a pickle: save it with safe_serialization",
    ),
    "cut off": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"12345"), "cannot be read"),
    "a pipe": (lambda f: ((f / PEFT).unlink(), os.mkfifo(f / PEFT)), "has no adapter_config.json"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "cannot be read"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "expected an object"),
    "no tensors": (lambda f: change_tensors(f, lambda t: {}), "has no tensors"),
    "rank above": (lambda f: write_big(f), r"has rank 17, and max_lora_rank is 16: LM\(..., max_lora_rank=17\)"),
    "another base": (
        lambda f: change_config(f, auto_mapping={"base_model_class": "Qwen3ForCausalLM"}),
        r"is an adapter of Qwen3ForCausalLM \(tiny\), and this model is LlamaForCausalLM",
    ),
    "another width": (
        lambda f: change_tensors(f, lambda t: t | {f"{Q}.lora_A.weight": torch.zeros(4, 7)}),
        r"lora_A of model.layers.0.self_attn.q_proj has shape \[4, 7\].* an adapter of another base \(tiny\)",
    ),
    "another rank": (lambda f: change_config(f, r=5), r"lora_A of .* has shape \[4, 56\], and .* rank 5 takes \[5, 56\]"),
    "no B": (
        lambda f: change_tensors(f, lambda t: {n: v for n, v in t.items() if n != f"{Q}.lora_B.weight"}),
        "has no lora_B for model.layers.0.self_attn.q_proj",
    ),
    "no module": (
        lambda f: change_tensors(f, lambda t: {n: v for n, v in t.items() if not n.startswith(Q)}),
        "has no weights for model.layers.0.self_attn.q_proj, which adapter_config.json targets",
    ),
    "unknown target": (
        lambda f: change_tensors(f, lambda t: {n.replace("q_proj", "Wqkv"): v for n, v in t.items()}),
        "targets model.layers.0.self_attn.Wqkv: the model has no such module",
    ),
    "more layers": (
        lambda f: change_tensors(f, lambda t: t | {n.replace("layers.0", "layers.9"): v.clone() for n, v in t.items()}),
        "targets model.layers.9.mlp.down_proj: the model has no such module",
    ),
    "an embedding": (
        lambda f: change_tensors(f, lambda t: t | {f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(4, 97)}),
        "lora_embedding_A is an embedding's",
    ),
    "an embedding's matrix": (
        lambda f: change_tensors(f, lambda t: {n.replace("layers.0.self_attn.q_proj", "embed_tokens"): v for n, v in t.items()}),
        "targets model.embed_tokens: it is an embedding",
    ),
    "DoRA's": (
        lambda f: change_tensors(f, lambda t: t | {f"{Q}.lora_magnitude_vector.weight": torch.zeros(4)}), "is DoRA's",
    ),
    "a saved module": (
        lambda f: change_tensors(f, lambda t: t | {f"{PREFIX}lm_head.weight": torch.zeros(4)}), "not LoRA's A or B",
    ),
    "the head": (
        lambda f: change_tensors(f, lambda t: {n.replace("model.layers.0.self_attn.q_proj", "lm_head"): v for n, v in t.items()}),
        "targets lm_head: it is a Linear, and adapters change linear layers other than the head",
    ),
    "infinite": (
        lambda f: change_tensors(f, lambda t: {n: v / 0 for n, v in t.items()}), "holds no finite numbers",
    ),
    "integers": (lambda f: change_tensors(f, lambda t: {n: v.int() for n, v in t.items()}), "holds no finite numbers"),
    "no rank": (lambda f: change_config(f, r=0), "the rank of r is 0"),
    "a rank of text": (lambda f: change_config(f, rank_pattern={"q_proj": "4"}), "the rank of q_proj is '4'"),
    "no alpha": (lambda f: change_config(f, lora_alpha=None), "the alpha of lora_alpha is None"),
    "no pattern": (lambda f: change_config(f, target_modules="(q_proj"), "is not a regular expression"),
    "a list of ranks": (lambda f: change_config(f, rank_pattern=[4]), "rank_pattern is .4.: expected an object"),
    "no targets": (lambda f: change_config(f, target_modules=None), "target_modules is None"),
}  # fmt: skip


def write_big(folder: Path) -> None:
    change_config(folder, r=17)
    change_tensors(
        folder,
        lambda t: {n: torch.zeros((17, v.shape[1]) if "lora_A" in n else (v.shape[0], 17)) for n, v in t.items()},
    )


@pytest.mark.parametrize("what", BAD)
def test_a_folder_that_does_not_fit_is_refused(what: str, lm: LM, folder: Path) -> None:
    spoil, message = BAD[what]
    spoil(folder)
    with pytest.raises(AdapterError, match=re.compile(message, re.S)):
        lm.adapters.load("a", folder)
    assert not lm.adapters and lm.runner.get_model().model.layers[0].self_attn._qkv.lora is None
    assert lm.forward([random_ids(3)])[0].logits.isfinite().all()


def test_names_are_refused_where_they_are_taken_or_none(lm: LM, folder: Path) -> None:
    lm.adapters.load("a", folder)
    with pytest.raises(AdapterError, match="'a' is loaded already: unload it first"):
        lm.adapters.load("a", folder)
    for name in ("", 7, None):
        with pytest.raises(AdapterError, match="the name is a string that is not empty"):
            lm.adapters.load(name, folder)  # pyright: ignore
    lm.adapters.unload("a")


@pytest.mark.parametrize(
    ("fields", "module", "is_target"),
    [
        ({"target_modules": ["q_proj"]}, "model.layers.0.self_attn.q_proj", True),
        ({"target_modules": ["q_proj"]}, "model.layers.0.self_attn.my_q_proj", False),
        ({"target_modules": ["self_attn.q_proj"]}, "model.layers.0.self_attn.q_proj", True),
        ({"target_modules": r".*\.1\..*q_proj"}, "model.layers.1.self_attn.q_proj", True),
        ({"target_modules": r".*\.1\..*q_proj"}, "model.layers.0.self_attn.q_proj", False),
        ({"target_modules": "all-linear"}, "model.layers.0.mlp.up_proj", True),
        ({"target_modules": "all-linear", "exclude_modules": ["up_proj"]}, "model.layers.0.mlp.up_proj", False),
        ({"target_modules": "all-linear", "exclude_modules": ".*mlp.*"}, "model.layers.0.mlp.up_proj", False),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, "model.layers.1.self_attn.q_proj", True),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, "model.layers.0.self_attn.q_proj", False),
        (
            {"target_modules": ["c_attn"], "layers_to_transform": [0], "layers_pattern": "h"},
            "transformer.h.0.attn.c_attn",
            True,
        ),
        (
            {"target_modules": ["c_attn"], "layers_to_transform": [0], "layers_pattern": ["x"]},
            "transformer.h.0.attn.c_attn",
            False,
        ),
    ],
)
def test_targets_are_found_as_peft_finds_them(
    fields: dict[str, Any], module: str, is_target: bool, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}))
    assert PeftConfig.read(tmp_path).targets(module) is is_target


def test_patterns_of_ranks_and_alphas(tmp_path: Path) -> None:
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True,
        "rank_pattern": {"q_proj": 9, r"layers\.1\..*": 16}, "alpha_pattern": {"up_proj": 1},
    }  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = PeftConfig.read(tmp_path)
    ranks = [
        found.rank(f"model.layers.{layer}.{name}") for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")
    ]
    assert ranks == [9, 4, 9, 16]
    assert (
        found.scaling("model.layers.0.self_attn.q_proj") == 8 / 3
        and found.scaling("model.layers.1.mlp.up_proj") == 0.25
    )
