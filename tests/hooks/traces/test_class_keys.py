"""`envoys=` and `rename=` take transformers' module classes, as nnsight does, though the tree's modules are of other classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS, random_model, tiny_tokenizer
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.eproperty import eproperty
from nnsight.modeling.transformers import TransformersModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from pymllm_interp import LM

PROMPT = [5, 17, 3, 80]


class Halves(Envoy):
    """An MLP whose output is also served as two halves."""

    @eproperty(key="output")
    def halves(self, value: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, 2, hidden / 2]"""
        return value.unflatten(-1, (2, -1))


def read_halves(model) -> tuple[torch.Tensor, torch.Tensor]:
    with model.trace(PROMPT):
        halves = model.model.layers[1].ffn.halves.save()
        logits = model.lm_head.output.save()
    return halves, logits


def test_transformers_classes_name_the_modules_that_stand_for_them(model_folder: Callable[[str], Path]) -> None:
    keys = {"envoys": {LlamaMLP: Halves}, "rename": {LlamaMLP: "ffn"}}
    theirs = TransformersModel(random_model(CONFIGS["llama"]()), tokenizer=tiny_tokenizer(), **keys)
    with LM(model_folder("llama"), dtype="float32", device="cpu", **keys) as lm:
        for ours, wanted in zip(read_halves(lm), read_halves(theirs), strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("argument", ["envoys", "rename"])
def test_a_class_of_no_module_is_refused(model_folder: Callable[[str], Path], argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} names GPT2MLP, which no module of this model is: .*LlamaMLP"):
        LM(model_folder("llama"), device="cpu", **{argument: {GPT2MLP: Halves if argument == "envoys" else "ffn"}})


class Heads(Envoy):
    """An attention that names its width."""

    width = 4


def test_an_envoys_class_is_the_one_that_was_given(model_folder: Callable[[str], Path]) -> None:
    keys = {"envoys": {"self_attn": Heads, LlamaMLP: Halves}}
    with LM(model_folder("llama"), dtype="float32", device="cpu", **keys) as lm:
        layer = lm.model.layers[0]
        assert type(layer.self_attn) is Heads and type(layer.mlp) is Halves
        below = type(layer.self_attn.q_proj)
        assert below is type(layer.input_layernorm) and below is not Envoy, "modules below have the engine's own class"
        assert layer.self_attn.q_proj.parent is layer.self_attn


def test_one_class_serves_every_module(model_folder: Callable[[str], Path]) -> None:
    with LM(model_folder("llama"), dtype="float32", device="cpu", envoys=Halves) as lm:
        assert {type(envoy) for envoy in lm.model.modules()} == {Halves}
        with lm.trace(PROMPT):
            halves = lm.model.layers[1].mlp.down_proj.halves.save()
            whole = lm.model.layers[1].mlp.output.save()
    assert torch.equal(halves.flatten(-2), whole)


def blocks(model) -> tuple:
    """Reads, edits, later steps and operations, of modules with classes of the caller's."""
    layer, attention = model.model.layers[0], model.model.layers[1].self_attn
    with model.trace(PROMPT):
        halves = layer.mlp.halves
        middle = halves.clone().save()
        halves.mul_(2)
        attention.q_proj.output[:, -1] = 0
        mixed = attention.output[0].save()
        edited = model.lm_head.output.save()
    with model.generate(PROMPT, max_new_tokens=3, min_new_tokens=3, do_sample=False) as tracer:
        steps = [].save()
        for _ in tracer.iter[:]:
            steps.append(layer.mlp.output[0, -1].clone())
    return middle, mixed, edited, torch.stack(steps)


def test_blocks_read_and_edit_by_a_class_of_the_callers_as_in_nnsight(model_folder: Callable[[str], Path]) -> None:
    keys = {"envoys": {"self_attn": Heads, LlamaMLP: Halves}}
    theirs = TransformersModel(random_model(CONFIGS["llama"]()), tokenizer=tiny_tokenizer(), **keys)
    with LM(model_folder("llama"), dtype="float32", device="cpu", **keys) as lm:
        for ours, wanted in zip(blocks(lm), blocks(theirs), strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


def test_a_class_of_the_callers_has_the_engines_source_and_seal(model_folder: Callable[[str], Path]) -> None:
    def weights(model) -> torch.Tensor:
        with model.trace(PROMPT):
            attention = model.model.layers[0].self_attn.source.attention_interface_1
            found = attention.source.nn_functional_softmax_0.output.save()
        return found

    keys = {"envoys": {"self_attn": Heads, "q_proj": Heads}}
    theirs = TransformersModel(
        random_model(CONFIGS["llama"]()), tokenizer=tiny_tokenizer(), attn_implementation="eager", **keys
    )
    theirs._module.set_attn_implementation("eager")
    with LM(model_folder("llama"), dtype="float32", device="cpu", **keys) as lm:
        torch.testing.assert_close(weights(lm), weights(theirs), atol=1e-5, rtol=1e-4)
        q_proj = lm.model.layers[0].self_attn.q_proj
        q_proj.weight = torch.zeros_like(q_proj.weight)
        assert not q_proj._module.weight.any(), "an assignment reaches the model"
        with pytest.raises(NotImplementedError, match="cannot be replaced"):
            lm.model.layers[0].self_attn.k_proj = torch.nn.Linear(2, 2)
        q_proj.probe = torch.nn.Linear(2, 2)
        assert type(q_proj.probe) is type(lm.model.layers[0])


def test_nnsights_own_models_keep_nnsights_envoys() -> None:
    model = TransformersModel(random_model(CONFIGS["llama"]()), tokenizer=tiny_tokenizer(), envoys={"mlp": Heads})
    mlp = model.model.layers[0].mlp
    assert type(mlp.source).__module__.startswith("nnsight.") and "self_down_proj_0" in mlp.source.names
    mlp.down_proj.weight = 3
    assert vars(mlp.down_proj)["weight"] == 3
