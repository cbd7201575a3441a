"""`lm.classify` and `lm.score`: labels and rewards equal transformers' classifiers, with hooks (V14)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, held, tiny_tokenizer
from helpers_devices import DEVICES, lm_on
from helpers_pooling import classifier
from transformers import PreTrainedModel

from pymllm_interp import LM, Capture, SamplingParams, Scale, Steer
from pymllm_interp.captures import Lens
from pymllm_interp.interventions import Monitor
from pymllm_interp.utils.arguments import PromptError

CLOSE = 1e-4 if torch.cuda.is_available() else 1e-5
GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(0, 95, (n,), generator=GENERATOR).tolist() for n in (1, 17, 40, 3, 16)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[PreTrainedModel], Path]:
    def folder(model: PreTrainedModel) -> Path:
        path = tmp_path_factory.mktemp("classifier")
        model.save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
        return path

    return folder


@torch.no_grad()
def logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, atol=CLOSE, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_labels_equal_transformers(family: str, impl: str, device: str, folder_of) -> None:
    """Without a soft-cap, a tied head or another's bias; in chunks."""
    model = classifier(family, 3)
    lm = lm_on(device, folder_of(model), impl=impl, max_num_tokens=16, kv_cache_tokens=512, max_model_len=64)
    expected = [logits(model, ids) for ids in PROMPTS]
    outs = lm.classify(PROMPTS)
    close([out.logits for out in outs], expected)
    close([out.probs for out in outs], [found.softmax(-1) for found in expected])
    assert [out.label for out in outs] == [model.config.id2label[int(found.argmax())] for found in expected]
    close([out.probs for out in lm.classify(PROMPTS, activation=False)], expected)
    assert lm.backend.facts.tasks[:2] == ("classify", "token_classify")
    with pytest.raises(PromptError, match=r"a head of one label, and this model has 3: use lm\.classify"):
        lm.score(PROMPTS)
    lm.shutdown()


def test_labels_of_tokens_have_a_bias_and_stand_at_each_position(folder_of) -> None:
    model = classifier("llama", 4, tokens=True)
    for impl in ("native", "transformers"):
        lm = LM(folder_of(model), dtype="float32", impl=impl, max_num_tokens=16, kv_cache_tokens=512, max_model_len=64)
        outs = lm.forward(PROMPTS)
        close([out.logits for out in outs], [logits(model, ids) for ids in PROMPTS])
        lm.shutdown()


OF_TOKENS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}, {"logit_bias": {5: 1.0}}, {"allowed_token_ids": [5]},
    {"bad_words": ["w7"]}, {"logprobs": 3}, {"stop_token_ids": [9]},
]  # fmt: skip


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_parameters_of_tokens_fail_no_step_of_labels(impl: str, folder_of) -> None:
    """They would index labels by token ids, and end all requests of their step."""
    with LM(folder_of(classifier("llama", 2)), dtype="float32", impl=impl, kv_cache_tokens=512) as lm:
        with held(lm):
            handles = [lm.submit(PROMPTS[0], SamplingParams(max_tokens=0, **own)) for own in ({}, *OF_TOKENS)]
        assert [handle.result().finish_reason for handle in handles] == ["length"] * len(handles)
        with pytest.raises(PromptError, match=r"prompt_logprobs are a language modelling head's"):
            lm.generate(PROMPTS, SamplingParams(max_tokens=0, prompt_logprobs=0))


@pytest.mark.parametrize("device", DEVICES)
def test_rewards_equal_transformers_with_hooks_and_traces(device: str, folder_of) -> None:
    model = classifier("llama", 1)
    lm = lm_on(device, folder_of(model), kv_cache_tokens=512, max_model_len=64)
    expected = [float(logits(model, ids)) for ids in PROMPTS]
    close(lm.score(PROMPTS), expected)
    close(lm.score(PROMPTS, activation=True), torch.tensor(expected).sigmoid().tolist())
    close(
        lm.score("w3 w4", ["w5", "w6 w7"], activation=False),
        [float(logits(model, ids)) for ids in ([3, 4, 5], [3, 4, 6, 7])],
    )
    close(lm.score("w3 w4", "w5"), [float(logits(model, [3, 4, 5]).sigmoid())])

    vector = torch.randn(72, generator=GENERATOR)
    handle = model.model.layers[1].register_forward_hook(lambda module, inputs, output: output + vector)
    try:
        steered = [float(logits(model, ids)) for ids in PROMPTS]
    finally:
        handle.remove()
    op, monitor = Steer("resid_post.1", vector), Monitor("resid_post.0", vector, threshold=1e9, name="watch")
    outs = lm.classify(
        PROMPTS, interventions=[op], monitors=[monitor], capture=[Capture("resid_post.2", positions=[-1])]
    )
    close([float(out.logits) for out in outs], steered)
    for ids, out in zip(PROMPTS, outs, strict=True):
        assert out.activations["resid_post.2"].shape == (1, 72) and len(out.monitors["watch"].scores) == len(ids)
    close(lm.score(PROMPTS, interventions=[op]), steered)
    close(lm.score(PROMPTS, interventions=[Scale("logits", 2.0)]), [2 * reward for reward in expected])
    with lm.trace(PROMPTS[1]):
        lm.model.layers[1].output = lm.model.layers[1].output + vector.to(lm.backend.facts.device)
        head = lm.lm_head.output.save()
    close(float(head[0, -1]), steered[1])
    states = lm.encode(PROMPTS, normalize=False)
    close([float(out.data @ model.score.weight.detach()[0]) for out in states], expected)
    lm.shutdown()


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"problem_type": "regression"}, lambda x: x),
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "single_label_classification"}, lambda x: x.softmax(-1)),
    ],
)
def test_the_config_says_how_logits_become_probabilities(settings, activation, folder_of) -> None:
    model = classifier("gpt2", 2, **settings, id2label={0: "bad", 1: "good"})
    lm = LM(folder_of(model), dtype="float32", kv_cache_tokens=256)
    outs = lm.classify(PROMPTS)
    close([out.probs for out in outs], [activation(logits(model, ids)) for ids in PROMPTS])
    assert {out.label for out in outs} <= {"bad", "good"}
    lm.shutdown()


def test_a_classifier_generates_nothing_and_says_so(folder_of) -> None:
    lm = LM(folder_of(classifier("llama", 2)), dtype="float32", kv_cache_tokens=256)
    for call in (
        lambda: lm.generate([[1]]),
        lambda: lm.generate([[1]], SamplingParams(max_tokens=2)),
        lambda: lm.submit([1]),
    ):
        with pytest.raises(PromptError, match=r"has no language modelling head, and generates nothing: lm\.classify"):
            call()
    with pytest.raises(PromptError, match="no language modelling head"), lm.generate([1], max_new_tokens=2):
        pass
    with pytest.raises(PromptError, match="a lens needs a language modelling head"):
        lm.encode([[1]], capture=[Capture("resid_post.1", reduce=Lens())])
    assert lm.runner.is_pooling_model and len(lm.classify([[1], [2]])) == 2
    lm.shutdown()


def test_dummy_weights_make_a_classifier_of_a_config() -> None:
    config = CONFIGS["llama"]()
    config.num_labels, config.architectures = 5, ["LlamaForSequenceClassification"]
    for impl in ("native", "transformers"):
        lm = LM("dummy", hf_config=config, load_format="dummy", impl=impl, kv_cache_tokens=256)
        assert lm.classify([[1, 2]])[0].logits.shape == (5,)
        lm.shutdown()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm.classify([[1]]), r"no classification head \(transformers' ...ForSequenceClassification\)"),
        (lambda lm: lm.score([[1]]), "no classification head"),
        (lambda lm: lm.score([[1], [2]], [[1], [2], [3]]), "2 and 3 texts"),
        (lambda lm: lm.score([[1]], []), "1 and 0 texts|0 and 0 texts"),
        (lambda lm: lm.score([[1]], [[]]), "prompt 1 is empty"),
        (lambda lm: lm.score("w1", "w2", max_tokens=3), "max_tokens"),
    ],
)
def test_models_that_generate_score_pairs_by_embeddings_only(call, message, lm_of) -> None:
    lm = lm_of("llama")
    with pytest.raises((PromptError, TypeError), match=message):
        call(lm)
    a, b = lm.encode([PROMPTS[1], PROMPTS[2]])
    close(lm.score([PROMPTS[1]], [PROMPTS[2], PROMPTS[1]]), [float(a.data @ b.data), 1.0])
