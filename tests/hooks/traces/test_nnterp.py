"""nnterp's accessors and interventions over an engine, against the same over nnsight's model of transformers.

nnterp 1.3's own `StandardizedTransformer` cannot be made under nnsight 0.8; its accessors and functions can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.testing import assert_close

if find_spec("nnterp") is None:
    pytest.skip('nnterp is not installed: pip install -e ".[lens]"', allow_module_level=True)

from pymllm_interp.lens import StandardizedLM  # isort: skip  # before nnterp: see there

from nnsight import LanguageModel
from nnterp.interventions import (
    TargetPrompt,
    logit_lens,
    patch_object_attn_lens,
    patchscope_generate,
    patchscope_lens,
)
from nnterp.nnsight_utils import get_token_activations
from transformers import AutoModelForCausalLM, AutoTokenizer

from pymllm_interp.nnterp import Accessors, renames

pytestmark = pytest.mark.local
CLOSE = {"rtol": 1e-4, "atol": 5e-5}
PROMPTS = ["w5 w6 w7 w8", "w1 w2 w3 w4"]
UNEVEN = ["w5 w6 w7 w8", "w1 w2"]


class Theirs(Accessors, LanguageModel):
    """nnsight's own model with nnterp's accessors."""

    hidden_size: int


@pytest.fixture(scope="module", params=["llama", "gpt2", "gpt_neox"])
def pair(request: Any, model_folder: Callable[[str], Any]) -> Iterator[tuple[StandardizedLM, Theirs]]:
    folder = str(model_folder(request.param))
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    theirs = Theirs(hf, tokenizer=AutoTokenizer.from_pretrained(folder), rename=renames())
    theirs.add_accessors()
    with StandardizedLM(folder, dtype="float32", device="cpu") as ours:
        theirs.hidden_size = ours.hidden_size
        yield ours, theirs


def read_all(model: Any) -> list[torch.Tensor]:
    with model.trace(PROMPTS[0]):
        found = list().save()
        found.append(model.token_embeddings)
        for layer in range(model.num_layers):
            found += [
                model.layers_input[layer],
                model.attentions_output[layer],
                model.mlps_input[layer],
                model.mlps_output[layer],
            ]
            found.append(model.layers_output[layer])
        probs = model.output.logits[:, -1].softmax(-1).save()
    return [*(value.detach().clone() for value in found), probs]


def steered(model: Any) -> list[torch.Tensor]:
    vector = torch.linspace(-1, 1, model.hidden_size)
    with model.trace(PROMPTS):
        model.steer([0, 1], vector, factor=2.0, token_positions=-1)
        logits = model.output.logits.save()
    return [logits]


def set_and_skipped(model: Any) -> list[torch.Tensor]:
    with model.trace(PROMPTS[0]):
        model.layers_output[0] = model.layers_output[0] * 0.5
        model.skip_layer(1)
        state = model.layers_output[1].save()
        logits = model.output.logits.save()
    return [state, logits]


SCRIPTS: dict[str, Callable[[Any], Any]] = {
    "accessors": read_all,
    "steer": steered,
    "logit_lens": lambda model: [logit_lens(model, UNEVEN)],
    "token_activations": lambda model: [*get_token_activations(model, UNEVEN)],
    "patchscope_lens": lambda model: [patchscope_lens(model, PROMPTS, TargetPrompt("w9 w3 w2", -1))],
    "patchscope_generate": lambda model: [
        *patchscope_generate(model, PROMPTS, TargetPrompt("w9 w3 w2", -1), max_length=3).values()
    ],
    "patch_object_attn_lens": lambda model: [patch_object_attn_lens(model, PROMPTS, ["w9 w3 w2", "w1 w2 w3"], -1, 2)],
    "set and skip": set_and_skipped,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_nnterp_gives_the_same_values(name: str, pair: tuple[Any, Any]) -> None:
    for model in pair:
        with model.trace(PROMPTS[0]):  # nnterp looks at the type of a layer's output before it skips one
            model.layers_output[0]
            kept = model.output.logits.save()
        assert kept is not None
    ours, theirs = (SCRIPTS[name](model) for model in pair)
    assert len(ours) == len(theirs) > 0
    for got, expected in zip(ours, theirs, strict=True):
        assert_close(got, expected, **CLOSE)
