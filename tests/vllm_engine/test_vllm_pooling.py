"""Embeddings, scores and labels over vLLM's processes, against our own engine and transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_tokenizer
from helpers_vllm import (
    FAMILIES,
    assert_close_tensor,
    assert_equal_pooled,
    needs_vllm,
    own_lm,
    prompt,
    save_model,
    two_ranks,
    vector,
    vllm_lm,
)
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaModel,
    PretrainedConfig,
    PreTrainedModel,
)

from pymllm_interp import LM, Capture, Gate, SamplingParams, Scale, Steer
from pymllm_interp.captures import Lens
from pymllm_interp.interventions import Monitor
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.vllm_engine.refusals import VllmRefusalError

pytestmark = needs_vllm
PROMPTS = [prompt(n, n) for n in (1, 17, 40, 3, 16)]


def save_classifier(config: PretrainedConfig, labels: int, folder: Path, tokens: bool = False) -> PreTrainedModel:
    """transformers' classifier with random weights."""
    config.num_labels, config.pad_token_id = labels, None
    cls = AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification
    torch.manual_seed(1)
    model = cls.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("score"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


OPTIONS: dict[str, Any] = {
    "interventions": [
        [Steer("resid_post.1", vector(2), 2.0)], None, [Scale("mlp_out.0", 0.5, positions=slice(3, None, 2))],
        [Steer("resid_post.2", vector(3), when=Gate(vector(4), 0.0, site="resid_post.0"))], [Steer("final_norm", vector(5))],
    ],
    "capture": [Capture("resid_post.*"), Capture("attn_out.1", positions=[-1])],
    "monitors": [Monitor("resid_post.0", vector(6), threshold=1e9, name="watch")],
}  # fmt: skip


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PreTrainedModel, LM, LM]]:
    folder = tmp_path_factory.mktemp("classifier")
    model = save_classifier(FAMILIES["llama"](), 3, folder)
    with vllm_lm(folder, max_num_tokens=24) as lm, own_lm(folder) as oracle:
        yield model, lm, oracle


def test_labels_are_transformers_and_our_engines(labelled: tuple[PreTrainedModel, LM, LM]) -> None:
    model, lm, oracle = labelled
    expected = [logits(model, ids) for ids in PROMPTS]
    for _ in range(2):  # the second time with KV of the prefix cache
        outs = lm.classify(PROMPTS)
        for out, wanted in zip(outs, expected, strict=True):
            assert_close_tensor(out.logits, wanted)
            assert_close_tensor(out.probs, wanted.softmax(-1))
            assert out.label == model.config.id2label[int(wanted.argmax())]
    (some,) = lm.classify(["w3 w4"], activation=False)
    assert_close_tensor(some.probs, logits(model, [3, 4]))
    head = [Scale("logits", 2.0)]
    for options in (
        OPTIONS,
        {"interventions": head},
        {"monitors": [Monitor("resid_post.1", vector(1), threshold=-1e9)]},
    ):
        found, wanted = (m.classify(PROMPTS, **options) for m in (lm, oracle))
        assert_equal_pooled(found, wanted)
    doubled = lm.classify(PROMPTS, interventions=head)
    assert_close_tensor(doubled[1].logits, 2 * expected[1])
    for one, other in zip(*(m.encode(PROMPTS, pooling="mean") for m in (lm, oracle)), strict=True):
        assert_close_tensor(one.data, other.data)
    handles = [lm.submit(ids, SamplingParams(max_tokens=0), capture=["logits"]) for ids in PROMPTS]  # at each position
    for handle, ids in zip(handles, PROMPTS, strict=True):
        assert_close_tensor(handle.result(60).outputs[0].activations["logits"][-1], logits(model, ids))
    with lm.trace(PROMPTS[1]):
        states = lm.model.layers[1].output.save()
    with oracle.trace(PROMPTS[1]):
        wanted = oracle.model.layers[1].output.save()
    assert_close_tensor(states, wanted)


def test_a_classifier_says_what_it_does_not_do(labelled: tuple[PreTrainedModel, LM, LM]) -> None:
    _, lm, oracle = labelled
    assert lm.backend.facts.tasks == oracle.backend.facts.tasks and not lm.limits.generates
    for call in (lambda: lm.generate([[1]]), lambda: lm.submit([1])):
        with pytest.raises(PromptError, match=r"has no language modelling head, and generates nothing: lm\.classify"):
            call()
    with pytest.raises(PromptError, match="a lens needs a language modelling head"):
        lm.encode([[1]], capture=[Capture("resid_post.1", reduce=Lens())])
    with pytest.raises(VllmRefusalError, match="a block has no classification heads"), lm.trace(PROMPTS[1]):
        if lm.model.layers[1].output.sum() > 0:
            lm.model.layers[1].output *= 2
    with pytest.raises(PromptError, match="a head of one label, and this model has 3"):
        lm.score(PROMPTS)
    with pytest.raises(VllmRefusalError, match="runner='pooling': leave it out"):
        vllm_lm(save_model("llama", Path(lm.backend.facts.folder or "") / "plain"), runner="pooling")


@pytest.mark.slow
@pytest.mark.parametrize("family, options", [
    ("llama", {"tensor_parallel_size": 2}), ("llama", {"disable_cuda_graph": False}), ("qwen3", {}), ("gemma2", {}), ("gpt2", {}),
])  # fmt: skip
def test_rewards_of_other_engines_are_transformers(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_ranks(monkeypatch, options)
    model = save_classifier(FAMILIES[family](), 1, tmp_path)
    with vllm_lm(tmp_path, max_num_tokens=24, **options) as lm:
        expected = torch.tensor([float(logits(model, ids)) for ids in PROMPTS])
        assert_close_tensor(torch.tensor(lm.score(PROMPTS)), expected)
        assert_close_tensor(torch.tensor(lm.score(PROMPTS, activation=True)), expected.sigmoid())
        assert_close_tensor(torch.tensor(lm.score("w3 w4", ["w5"])), logits(model, [3, 4, 5]).sigmoid())
        with own_lm(tmp_path) as oracle:
            ops = [Steer("resid_post.1", vector(2), 2.0)]
            assert_close_tensor(*(torch.tensor(m.score(PROMPTS, interventions=ops)) for m in (lm, oracle)))


@pytest.mark.slow
def test_a_decoder_without_a_head_gives_embeddings(tmp_path: Path) -> None:
    model = LlamaModel(FAMILIES["llama"]())
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with vllm_lm(tmp_path, max_num_tokens=24) as lm, own_lm(tmp_path) as oracle:
        for options in (
            {"pooling": "mean"},
            {"capture": ["resid_post.*"], "interventions": [Steer("resid_post.1", vector(2), 2.0)]},
        ):
            found, wanted = (m.encode(PROMPTS, **options) for m in (lm, oracle))
            for one, other in zip(found, wanted, strict=True):
                assert_close_tensor(one.data, other.data)
            assert_equal_pooled(found, wanted)
        with pytest.raises(PromptError, match="no language modelling head"):
            lm.generate([[1]])
        assert lm.backend.facts.tasks == oracle.backend.facts.tasks


@pytest.mark.slow
def test_labels_of_tokens_stand_at_each_position(tmp_path: Path) -> None:
    model = save_classifier(FAMILIES["qwen3"](), 4, tmp_path, tokens=True)
    with vllm_lm(tmp_path, max_num_tokens=24) as lm:
        for out, ids in zip(lm.forward(PROMPTS), PROMPTS, strict=True):
            assert_close_tensor(out.logits, logits(model, ids))


def test_new_weights_come_while_requests_wait(labelled: tuple[PreTrainedModel, LM, LM]) -> None:
    model, lm, _ = labelled
    norm = {"model.norm.weight": model.state_dict()["model.norm.weight"]}
    for factor in (2.0, 1.0):
        lm.pause("keep")
        handle = lm.submit(PROMPTS[1], SamplingParams(max_tokens=0), capture=["logits"])
        backend: Any = lm.backend
        while not all(one.vllm_id for one in backend.engine.live):
            time.sleep(0.01)
        lm.update_weights({name: factor * weight for name, weight in norm.items()})
        lm.resume()
        assert_close_tensor(handle.result(60).outputs[0].activations["logits"][-1], factor * logits(model, PROMPTS[1]))
