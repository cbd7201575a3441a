"""lm-eval and inspect-ai over an engine, against lm-eval's own model of transformers and plain calls."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_tokenizer
from helpers_served import served

from pymllm_interp import LM, Ablate, SamplingParams, Steer
from pymllm_interp.interventions import Generated
from pymllm_interp.utils.arguments import PromptError

pytestmark = pytest.mark.local
needs_lm_eval = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason='lm-eval is not installed: pip install -e ".[evals]"'
)
needs_inspect = pytest.mark.skipif(
    find_spec("inspect_ai") is None, reason='inspect-ai is not installed: pip install -e ".[evals]"'
)
GREEDY = {"until": ["w7"], "do_sample": False, "max_gen_toks": 9}


@pytest.fixture(scope="module")
def vector() -> torch.Tensor:
    return 3 * torch.randn(72, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The llama folder; its tokenizer has an EOS, which lm-eval's model needs."""
    folder = tmp_path_factory.mktemp("evals")
    shutil.copytree(model_folder("llama"), folder, dirs_exist_ok=True)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<unk>"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["local", "connected"])
def lm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LM]:
    """An engine of this process, and that of a server."""
    if request.param == "local":
        with LM(folder, dtype="float32", device="cpu") as lm:
            yield lm
    else:
        with served(folder, keys=None) as server, LM.connect(server.url) as lm:
            yield lm


def instances(kind: Any, *arguments: tuple) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def words(*ids: int) -> str:
    return " ".join(f"w{i}" for i in ids)


PAIRS = [
    (words(5, 6, 7), " " + words(8)), (words(*range(30)), " " + words(40, 41, 42, 43)), ("", words(3, 4, 5)),
    (words(1) + " ", words(2, 9)), (words(*range(90)), " " + words(*range(50, 70))),
    (words(*range(94), *range(60)), " " + words(7)),
]  # fmt: skip
LONG = words(*(7 * i % 95 for i in range(160)))


@pytest.fixture(scope="module")
def pair(lm: LM, folder: Path) -> tuple[Any, Any]:
    """Our model for lm-eval, and lm-eval's own over transformers."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from pymllm_interp.evals import HarnessLM

    theirs = HFLM(str(folder), dtype="float32", device="cpu", batch_size=4, max_length=100)
    return HarnessLM(lm, max_length=100), theirs


@needs_lm_eval
def test_log_likelihoods_are_those_of_lm_evals_own_model(pair: tuple[Any, Any]) -> None:
    ours, theirs = (model.loglikelihood(instances("loglikelihood", *PAIRS), disable_tqdm=True) for model in pair)
    for (got, greedy), (expected, expected_greedy) in zip(ours, theirs, strict=True):
        assert got == pytest.approx(expected, abs=1e-4) and greedy == expected_greedy
    (_, best), *_ = pair[0].loglikelihood(instances("loglikelihood", (words(5), " " + greedy_word(pair[0].lm, 5))))
    assert best  # a continuation that is the most likely one


def greedy_word(lm: LM, token: int) -> str:
    return lm.generate([[token]], SamplingParams(temperature=0, max_tokens=1))[0].text


@needs_lm_eval
def test_rolling_log_likelihoods_of_long_and_short_texts_are_those_of_lm_evals_own_model(pair: tuple[Any, Any]) -> None:
    texts = [(LONG,), (words(4, 5, 6),), (words(*range(90), *range(10)),)]
    ours, theirs = (model.loglikelihood_rolling(instances("loglikelihood_rolling", *texts), True) for model in pair)
    assert ours == pytest.approx(theirs, abs=1e-3)  # sums over up to 160 tokens


@needs_lm_eval
def test_generations_are_those_of_lm_evals_own_model(pair: tuple[Any, Any]) -> None:
    contexts = [(words(5, 6, 7), GREEDY), (words(*range(40)), GREEDY), (LONG, {"until": [], "max_gen_toks": 5})]
    ours, theirs = (model.generate_until(instances("generate_until", *contexts), True) for model in pair)
    assert ours[:2] == theirs[:2]
    assert ours[2].count("w") == 5


@needs_lm_eval
@pytest.mark.parametrize("positions", ["all", "prompt", "generated", [-1], Generated(1, 3)], ids=str)
def test_a_steered_log_likelihood_is_that_of_the_steered_generation(
    positions: Any, lm: LM, vector: torch.Tensor
) -> None:
    """The engine's own greedy tokens score, under the same intervention, what they had when they were drawn."""
    from pymllm_interp.evals import HarnessLM

    steer = [Steer("resid_post.1", vector, positions=positions)]
    (out,) = lm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5, logprobs=0), interventions=steer)
    continuation = words(*out.token_ids)
    request = instances("loglikelihood", (words(5, 6, 7), " " + continuation))
    ((got, greedy),) = HarnessLM(lm, interventions=steer).loglikelihood(request, disable_tqdm=True)
    ((plain, _),) = HarnessLM(lm).loglikelihood(request, disable_tqdm=True)
    assert got == pytest.approx(out.cumulative_logprob, abs=1e-4) and greedy
    assert abs(plain - got) > 1e-2


@needs_lm_eval
def test_lm_eval_runs_a_task_with_it(pair: tuple[Any, Any], vector: torch.Tensor) -> None:
    """A multiple-choice task of our own, through `evaluate`."""
    import lm_eval
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    from pymllm_interp.evals import HarnessLM

    docs = [{"text": words(i, i + 1), "choices": [words(i + 2), words(60 - i)], "label": i % 2} for i in range(6)]

    task = ConfigurableTask(
        config={
            "task": "tiny", "custom_dataset": lambda **_: {"test": Dataset.from_list(docs)},
            "test_split": "test", "output_type": "multiple_choice",
            "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}",
            "metric_list": [{"metric": "acc"}],
        }
    )  # fmt: skip
    models = (*pair, HarnessLM(pair[0].lm, interventions=[Steer("resid_post.1", 9 * vector)]))
    results = [lm_eval.evaluate(lm=model, task_dict={"tiny": task}, bootstrap_iters=0) for model in models]
    found = [result["results"]["tiny"]["acc,none"] for result in results]
    assert found[0] == found[1] and 0 <= found[2] <= 1


@needs_lm_eval
def test_what_lm_eval_cannot_have_is_refused_with_the_fix(lm: LM) -> None:
    from pymllm_interp.evals import HarnessLM

    with pytest.raises(TypeError, match="a list of Steer"):
        HarnessLM(lm, interventions="sea")
    with pytest.raises(ValueError, match="max_gen_toks=500: the model takes 128 tokens"):
        HarnessLM(lm).generate_until(instances("generate_until", ("w1", {"max_gen_toks": 500})), True)
    with pytest.raises(ValueError, match="a continuation of 30 tokens: the model takes 20"):
        HarnessLM(lm, max_length=20).loglikelihood(instances("loglikelihood", ("w1", " " + words(*range(30)))), True)


# -- inspect-ai --------------------------------------------------------------------------


@needs_inspect
def test_inspect_ai_finds_the_provider_and_its_answers_are_the_engines(lm: LM, vector: torch.Tensor) -> None:
    from inspect_ai.model import GenerateConfig, get_model

    import pymllm_interp.evals.inspect  # noqa: F401  # as the entry point does

    prompt, config = "w5 w6", GenerateConfig(max_tokens=6, temperature=0, logprobs=True, top_logprobs=2)
    steer = [Steer("resid_post.1", vector)]
    texts = [lm.token_ids(f"user: {prompt}\n")]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    for interventions in (
        None,
        steer,
        json.dumps([{"op": "steer", "site": "resid_post.1", "vector": vector.tolist()}]),
    ):
        model = get_model("pymllm_interp/tiny", lm=lm, interventions=interventions, memoize=False)
        out = asyncio.run(model.generate(prompt, config=config))
        (expected,) = lm.generate(texts, params, interventions=None if interventions is None else steer)
        assert out.completion == expected.text and out.stop_reason == "max_tokens"
        assert out.usage is not None and (out.usage.input_tokens, out.usage.output_tokens) == (len(texts[0]), 6)
        content = out.choices[0].logprobs.content  # pyright: ignore[reportOptionalMemberAccess]
        assert sum(token.logprob for token in content) == pytest.approx(expected.cumulative_logprob)
        assert [len(token.top_logprobs or ()) for token in content] == [2] * 6
        assert ("receipt" in (out.metadata or {})) == (interventions is not None)


@needs_inspect
def test_inspect_ai_runs_a_task_with_it(lm: LM, tmp_path: Any) -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    answers = [
        lm.generate([lm.token_ids(f"user: w{i}\n")], SamplingParams(temperature=0, max_tokens=4))[0].text
        for i in range(3)
    ]
    samples = [Sample(input=f"w{i}", target=answer) for i, answer in enumerate(answers)]
    task = Task(
        dataset=samples, solver=generate(), scorer=includes(), config=GenerateConfig(temperature=0, max_tokens=4)
    )
    for interventions, correct in ((None, 1.0), ([Ablate("resid_post.2", torch.eye(72)[:8])], None)):
        model = get_model("pymllm_interp/tiny", lm=lm, interventions=interventions, memoize=False)
        (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
        assert log.status == "success" and log.results is not None
        accuracy = log.results.scores[0].metrics["accuracy"].value
        assert accuracy == correct if correct is not None else accuracy < 1


@needs_inspect
def test_what_inspect_ai_cannot_have_is_refused_with_the_fix(lm: LM) -> None:
    from inspect_ai.model import ChatMessageUser, GenerateConfig
    from inspect_ai.tool import ToolInfo

    from pymllm_interp.evals import EngineAPI

    api = EngineAPI("tiny", lm=lm)
    tool = ToolInfo(name="add", description="Adds.")
    with pytest.raises(NotImplementedError, match="no tool calls"):
        asyncio.run(api.generate([ChatMessageUser(content="w1")], [tool], "auto", GenerateConfig()))
    with pytest.raises(TypeError, match="dtype belong to a new LM"):
        EngineAPI("tiny", lm=lm, dtype="float32")


CONVERSATION_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }} {% endfor %}"
)


@needs_inspect
@needs_lm_eval
def test_evals_write_conversations_as_chat_does(lm: LM) -> None:
    from inspect_ai.model import (
        ChatMessageAssistant,
        ChatMessageTool,
        ChatMessageUser,
        ContentImage,
        ContentReasoning,
        ContentText,
    )
    from inspect_ai.tool import ToolCall

    from pymllm_interp.evals import EngineAPI, HarnessLM

    arguments = {"name": "add", "arguments": {"n": 3}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": arguments}]},
        {"role": "tool", "tool_call_id": "1", "content": "w4"},
    ]
    theirs = [
        ChatMessageUser(content=[ContentText(text="w1"), ContentText(text="w2")]),
        ChatMessageAssistant(
            content=[ContentReasoning(reasoning="w9")], tool_calls=[ToolCall("1", "add", {"n": 3})]
        ),
        ChatMessageTool(tool_call_id="1", content="w4"),
    ]  # fmt: skip
    api = EngineAPI("tiny", lm=lm)
    lm.tokenizer.chat_template = CONVERSATION_TEMPLATE
    try:
        (own,) = lm.chat(messages, SamplingParams(max_tokens=1))
        assert HarnessLM(lm).apply_chat_template(messages) == own.prompt
        assert api._prompt(theirs) == own.prompt_token_ids
    finally:
        lm.tokenizer.chat_template = None
    with pytest.raises(PromptError, match="a part that is not text"):
        api._prompt([ChatMessageUser(content=[ContentImage(image="data:image/png;base64,")])])
