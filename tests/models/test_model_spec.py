"""Tests of what a model is: its spec, its site numbers, and the pass that its modules look up."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import CONFIGS
from helpers_runner import ByHand, make_runner, random_ids
from transformers import LlamaConfig

from pymllm_interp.core.current_pass import current_batch, current_pass, current_site_ops
from pymllm_interp.core.forward_batch import ForwardBatch, ForwardMode
from pymllm_interp.core.model_spec import (
    FAMILIES,
    INNER_SITES,
    LOGITS,
    NUMBERED_SITES,
    ModelSpec,
    attention_add,
    delta_site,
    final_norm_site,
    input_add,
    mlp_add,
    num_sites,
    residual_site,
    site_index,
)
from pymllm_interp.hooks.site import KINDS, WITHOUT_LAYER, Site
from pymllm_interp.layers.linear import MergedLinear
from pymllm_interp.models.base import CausalLM
from pymllm_interp.runner.partition import Execution

LAYERS = 5


def spec_of(config: Any) -> ModelSpec:
    return ModelSpec.of(config, torch.float32)


def test_a_nested_text_config_is_read():
    class Outer:
        text_config = CONFIGS["qwen3"]()
        model_type, num_hidden_layers = "outer", 999

    assert spec_of(Outer()) == spec_of(CONFIGS["qwen3"]())


def test_sliding_windows_are_those_of_the_family():
    windows = {name: spec_of(config()).sliding_windows for name, config in CONFIGS.items()}
    assert windows == {
        "llama": (None,) * 3, "llama-rope": (None,) * 2, "mistral": (5, 5), "qwen2": (None, 4, 4), "qwen3": (None, None),
        "gemma": (None, None), "gemma2": (5, None), "gemma3_text": (4, None, 4), "gpt2": (None, None),
        "gpt_neox": (None,) * 3, "gpt_neox-sequential": (None, None), "glm4_moe": (None,) * 3, "gpt_oss": (5, None, 5),
    }  # fmt: skip
    config = CONFIGS["llama"]()
    config.sliding_window = 4
    assert spec_of(config).sliding_windows == (None,) * 3, "transformers' Llama has no windows"


@pytest.mark.parametrize(
    ("scaling", "context", "depends"),
    [("default", 24, False), ("dynamic", 72, True), ("longrope", 24, True), ("yarn", 24, False)],
)
def test_the_context_and_the_rotation_follow_the_rope_scaling(scaling, context, depends):
    config = LlamaConfig(max_position_embeddings=24)
    config.rope_parameters = {"rope_type": scaling, "rope_theta": 1e4, "factor": 3.0}
    spec = spec_of(config)
    assert (spec.context_len, spec.rope_depends_on_length) == (context, depends)


def test_every_numbered_site_has_a_number_of_its_own_but_for_a_layers_input():
    sites = [
        Site(kind, None if kind in WITHOUT_LAYER else layer)
        for kind in NUMBERED_SITES
        for layer in range(1 if kind in WITHOUT_LAYER else LAYERS)
        if kind != "resid_pre"
    ]
    numbers = [site_index(site, LAYERS) for site in sites]
    # A pass has no delta at the embedding, which is residual add 0.
    assert sorted(numbers) == list(range(1, num_sites(LAYERS) + 1))
    assert max(numbers) == site_index(Site(LOGITS), LAYERS) == num_sites(LAYERS)
    for layer in range(1, LAYERS):
        assert site_index(Site("resid_pre", layer), LAYERS) == site_index(Site("resid_post", layer - 1), LAYERS)
    assert site_index(Site("resid_pre", 0), LAYERS) == site_index(Site("embed"), LAYERS)
    assert (
        delta_site(attention_add(2)) + 1 == residual_site(attention_add(2)) == site_index(Site("resid_mid", 2), LAYERS)
    )
    assert input_add(3) == mlp_add(2) and final_norm_site(LAYERS) == residual_site(mlp_add(LAYERS - 1)) + 1


def test_kinds_without_a_number_are_refused():
    assert set(KINDS) - set(NUMBERED_SITES) == {"attn_in", "mlp_in"}
    with pytest.raises(ValueError, match=r"attn_in\.1: interventions act at embed"):
        site_index(Site("attn_in", 1), LAYERS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_models_modules_are_at_the_familys_paths(name):
    model: Any = make_runner(CONFIGS[name]()).get_model()
    family = model.spec.family
    dense = getattr(model.config, "first_k_dense_replace", 0)
    assert family == replace(FAMILIES[model.config.model_type], dense_layers=dense) and isinstance(model, CausalLM)
    for layer in model.get_submodule(family.layers):
        for branch, last in ((family.attention, family.o_proj), (family.mlp, family.down_proj)):
            module = layer.get_submodule(branch)
            if hasattr(module, "experts"):
                assert module.name == branch
                continue
            assert (module.name, module.last_projection) == (branch, last) and module.inner_kind in INNER_SITES


# -- the current pass ----------------------------------------------------------------------------


class Hooks:
    """A hook query in which `own` says that a hook calls."""

    own = False

    def is_own_call(self) -> bool:
        return self.own


def batch_of(**fields: Any) -> ForwardBatch:
    one = torch.ones(1, dtype=torch.int64)
    return ForwardBatch(ForwardMode.DECODE, 1, one, one, one.int(), one, 1, **fields)


def test_modules_see_the_pass_of_their_thread_and_no_other():
    ops: Any = object()
    batch, seen = batch_of(site_ops=ops), []
    assert current_batch() is None and current_site_ops() is None
    with current_pass(batch):
        assert current_batch() is batch and current_site_ops() is ops
        thread = threading.Thread(target=lambda: seen.extend([current_batch(), current_site_ops()]))
        thread.start()
        thread.join()
    assert seen == [None, None] and current_batch() is None


def test_calls_that_a_hook_makes_do_not_see_the_pass():
    hooks: Any = Hooks()
    with current_pass(batch_of(site_ops=(ops := object()), hook_query=hooks)):
        assert current_site_ops() is ops
        hooks.own = True
        assert current_batch() is None and current_site_ops() is None
        hooks.own = False
        assert current_site_ops() is ops


def test_passes_cannot_be_nested_and_a_failed_one_is_over():
    batch = batch_of()
    with current_pass(batch):
        with pytest.raises(RuntimeError, match="passes cannot be nested"), current_pass(batch_of()):
            pass
        assert current_batch() is batch
    with pytest.raises(KeyError), current_pass(batch):
        raise KeyError
    assert current_batch() is None


def test_a_model_runs_as_the_current_pass_and_the_fused_pass_needs_none():
    runner = make_runner(CONFIGS["llama"]())
    model: Any = runner.get_model()
    seen, norm = [], model.model.norm
    handle = norm.register_forward_hook(lambda *_: seen.append(current_batch()))
    hand = ByHand(runner)
    hand.extend({0: random_ids(4)}, Execution.MODULES)
    handle.remove()
    assert len(seen) == 1 and isinstance(seen[0], ForwardBatch) and current_batch() is None
    assert norm(torch.ones(1, 1, 72)).shape == (1, 1, 72), "a plain module outside of a pass"


@pytest.mark.parametrize("execution", [Execution.PLAIN, Execution.MODULES])
def test_both_passes_go_through_the_linear_layers_one_method(execution, monkeypatch):
    """What a linear layer needs beside the product (an all-reduce, a LoRA) has one place."""
    runner = make_runner(CONFIGS["llama"]())
    model: Any = runner.get_model()
    linears = {"lm_head": model.lm_head}
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        linears |= {f"{i}.qkv": attention._qkv, f"{i}.o": attention.o_proj, f"{i}.gate_up": mlp._gate_up}
        linears |= {f"{i}.down": mlp.down_proj}
    calls = []
    for name, linear in linears.items():
        method = "_multiply" if isinstance(linear, MergedLinear) else "project"
        product = getattr(linear, method)
        monkeypatch.setattr(linear, method, lambda x, batch=None, n=name, p=product: calls.append(n) or p(x, batch))
    ByHand(runner).extend({0: random_ids(4)}, execution)
    assert sorted(calls) == sorted(linears)
