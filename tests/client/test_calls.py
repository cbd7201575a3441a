"""The calls of an LM without a block: prompts of every kind, errors that say which one, sweeps, asyncio and endless inputs."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import held
from transformers import PreTrainedModel

from pymllm_interp import LM, Ablate, RequestOutput, SamplingParams, Scale, Steer
from pymllm_interp.client.handle import EngineClosedError, RequestError, RequestHandle
from pymllm_interp.core.events import FinishedEvent
from pymllm_interp.core.request import Request
from pymllm_interp.utils.arguments import PromptError

GREEDY = SamplingParams(temperature=0, max_tokens=6)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.fixture
def lm(lm_of: Callable[..., LM]) -> LM:
    return lm_of("llama")


def tokens(outs: list[RequestOutput]) -> list[list[int]]:
    return [out.token_ids for out in outs]


def steer(scale: float) -> Steer:
    return Steer("resid_post.1", torch.arange(72.0), scale=scale)


def wait_until_idle(lm: LM) -> None:
    deadline = time.monotonic() + 600
    while lm.engine.scheduler.live:
        assert time.monotonic() < deadline, "requests are still live"
        time.sleep(0.001)


# -- nothing to do ---------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [[], ()])
@pytest.mark.parametrize("options", [{}, {"capture": ["resid_post.1"]}, {"interventions": [steer(1.0)]}])
def test_no_prompts_make_no_outputs(prompts: Any, options: dict[str, Any], lm: LM) -> None:
    assert lm.generate(prompts, GREEDY, **options) == []
    assert lm.generate(prompts, [], **options) == [] == lm.generate(prompts, **options)
    assert lm.chat(prompts, GREEDY, **options) == []
    assert lm.forward(prompts, **options) == []
    assert asyncio.run(lm.agenerate(prompts, GREEDY, **options)) == []
    assert list(lm.imap(prompts, GREEDY, **options)) == []


def test_no_runs_make_no_outputs(lm: LM) -> None:
    assert lm.sweep([1, 2, 3], [], GREEDY) == []


# -- failed requests -----------------------------------------------------------------------


@pytest.fixture
def one_fails(lm: LM) -> Iterator[LM]:
    """A model whose persistent edit fails in the request whose prompt has 4 tokens."""
    with lm.edit(name="fails"):
        assert lm.model.layers[0].output.shape[1] != 4, "four tokens"
    yield lm
    lm.clear_edits("fails")


def test_a_call_raises_what_stream_and_trace_raise_and_has_the_outputs(one_fails: LM) -> None:
    expected = tokens(one_fails.generate(PROMPTS, GREEDY, edits=[]))
    with pytest.raises(RequestError, match=r"prompt 1 failed \(1 of 3 failed\): AssertionError: four tokens") as failed:
        one_fails.generate(PROMPTS, GREEDY)
    error = failed.value
    assert error.index == 1 and isinstance(error.__cause__, AssertionError)
    assert [out.finish_reason for out in error.outputs] == ["length", "error", "length"]
    assert [error.outputs[i].token_ids for i in (0, 2)] == [expected[0], expected[2]]
    with pytest.raises(AssertionError, match="four tokens"):
        list(one_fails.stream(PROMPTS[1], GREEDY))


def test_the_error_is_there_when_the_last_event_is(lm: LM) -> None:
    """A stream once ended without its error, where it took the event before the engine's thread had noted it."""
    known: list[bool] = []

    class Watched(queue.SimpleQueue):
        def put(self, item: Any, *args: Any, **kwargs: Any) -> None:
            known.append(handle.error is not None)
            super().put(item, *args, **kwargs)

    requests = [Request("r", [1, 2, 3], GREEDY, 4, 0, stream=True)]
    handle = RequestHandle(None, requests, None, lm.engine, streaming=True)
    handle._events = Watched()
    handle.put(FinishedEvent(requests[0].request_id, [], "error", error=ValueError("why")))
    assert known == [True]
    with pytest.raises(ValueError, match="why"):
        list(handle)


def test_a_handles_result_raises_and_has_its_output(one_fails: LM) -> None:
    with pytest.raises(RequestError, match="the request failed: AssertionError: four tokens") as failed:
        one_fails.submit(PROMPTS[1], GREEDY).result()
    assert [out.finish_reason for out in failed.value.outputs] == ["error"]
    copy = pickle.loads(pickle.dumps(RequestError("why", [], 3)))
    assert (str(copy), copy.outputs, copy.index) == ("why", [], 3)


# -- which prompt ----------------------------------------------------------------------------


@pytest.mark.local
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"text", r"the prompt is bytes: pass text, such as prompt\.decode"),
        ([[1, 2], b"text"], "prompt 1 is bytes"),
        (bytearray(b"text"), "the prompt is bytearray"),
        ("w1 \ud800", r"the prompt has a lone surrogate, '\\ud800', at character 3"),
        (["w1", "w2", "\udfff"], r"prompt 2 has a lone surrogate"),
        ([[1], [2, 10**9]], "prompt 1 holds token id 1000000000"),
    ],
)
def test_a_prompt_that_is_no_prompt_is_refused_with_its_index(lm: LM, prompt: Any, message: str) -> None:
    steps = lm.engine.num_steps
    with pytest.raises(PromptError, match=message):
        lm.generate(prompt, GREEDY)
    assert lm.engine.num_steps == steps


def test_what_is_wrong_with_a_spec_says_whose_it_is(lm: LM) -> None:
    late = Steer("resid_post.1", torch.ones(72), positions=[3])
    with pytest.raises(PromptError, match=r"prompt 2: .*positions"):
        lm.generate(PROMPTS, GREEDY, interventions=[None, [late], [late]])
    with pytest.raises(PromptError, match=r"invoke 1: .*positions"), lm.trace() as tracer:
        with tracer.invoke([1, 2, 3, 4], interventions=[late]):
            lm.model.layers[0].output.save()
        with tracer.invoke([1, 2], interventions=[late]):
            lm.model.layers[0].output.save()
    with pytest.raises(PromptError, match=r"prompt 1: .*'nowhere'"):
        lm.generate(PROMPTS, GREEDY, interventions=[None, [Steer("resid_post.1", "nowhere")], None])
    with pytest.raises(ValueError, match="interventions of prompt 2: 5 is not one"):
        lm.generate(PROMPTS, GREEDY, interventions=[None, None, [5]])
    with pytest.raises(ValueError, match="capture of prompt 1: 5 is not one"):
        lm.generate(PROMPTS, GREEDY, capture=[None, [5], None])
    with pytest.raises(PromptError, match="prompt 1: logit_bias names token id 500"):
        lm.generate([[1], [2]], [GREEDY, SamplingParams(logit_bias={500: 1.0})])


def test_a_refused_spec_shows_the_callers_frames_once(lm: LM) -> None:
    """The cause is told by one line, without the frames that bind specs."""
    with pytest.raises(ValueError, match="vector has 3 values") as raised:
        lm.generate([PROMPTS[0]], interventions=[Steer("resid_post.0", torch.ones(3))])
    assert raised.value.__cause__ is not None and raised.value.__cause__.__traceback__ is None
    with pytest.raises(ValueError, match=r"got 2 of them; lm\.sweep\(prompt, lists\) runs one prompt under each$"):
        lm.generate([PROMPTS[0]], interventions=[[], []])


def test_what_a_block_raises_says_in_which_invoke(lm: LM) -> None:
    def opened(wrong: int | None, prompts: list[list[int]]) -> None:
        with lm.trace() as tracer:
            for i, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    assert lm.model.layers[0].output.shape[1] > 0 and i != wrong, "not this one"

    with pytest.raises(AssertionError, match="not this one") as failed:
        opened(2, PROMPTS)
    assert failed.value.__notes__ == ["(prompt 2 of the 3 of this trace)"]
    with pytest.raises(AssertionError) as alone:
        opened(0, PROMPTS[:1])
    assert not hasattr(alone.value, "__notes__")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm.generate([1], GREEDY, intervention=[]), r"lm\.generate\(\) .* did you mean interventions\?"),
        (lambda lm: lm.submit([1], GREEDY, captures=["embed"]), r"lm\.submit\(\) .* did you mean capture\?"),
        (lambda lm: lm.sweep([1], [None], GREEDY, capturing=[]), r"lm\.sweep\(\) .* did you mean capture\?"),
        (lambda lm: lm.imap([[1]], GREEDY, time_out=3), r"lm\.imap\(\) .* did you mean timeout\?"),
        (lambda lm: lm.generate([1], temprature=0.5), r"got temprature: a call takes SamplingParams"),
        (lambda lm: lm.submit([1], max_length=9), r"lm\.submit\(.* got max_length: a call takes SamplingParams"),
        (lambda lm: lm.generate([1], GREEDY, lora_request=1), r"lm\.adapters\.load\(name, folder\)"),
    ],
)
def test_a_misspelt_keyword_gets_the_right_hint(lm: LM, call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(lm)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm.generate([1, 2], intervention=[]), r"lm\.generate\(\) .* did you mean interventions\?"),
        (lambda lm: lm.generate([1, 2], captures=[]), r"lm\.generate\(\) .* did you mean capture\?"),
        (lambda lm: lm.trace([1, 2], intervention=[]), r"lm\.trace\(\) .* did you mean interventions\?"),
        (lambda lm: lm.trace([1, 2], captured=[]), r"lm\.trace\(\) .* did you mean capture\?"),
    ],
)
def test_a_misspelt_keyword_of_a_trace_gets_the_right_hint(lm: LM, call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message), call(lm):
        lm.model.layers[0].output.save()


# -- interventions of several prompts -----------------------------------------------------------


def test_a_flat_list_with_one_op_for_each_prompt_warns_at_the_callers_line(lm: LM) -> None:
    ops = [steer(0.5), Scale("mlp_out.0", 0.5)]
    with pytest.warns(UserWarning, match=r"\[\[a\], \[b\], \.\.\.\] .* \[ops\] \* 2") as warned:
        outs = lm.generate(PROMPTS[:2], GREEDY, interventions=ops)
    assert warned[0].filename == __file__
    assert [len(out.receipt.interventions) for out in outs] == [2, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for unambiguous in ([ops] * 2, [[ops[0]], [ops[1]]], [steer(0.5)], None):
            lm.generate(PROMPTS[:2], GREEDY, interventions=unambiguous)
        lm.generate(PROMPTS[:1], GREEDY, interventions=ops[:1])


def test_as_many_directions_as_layers_warn(lm: LM) -> None:
    """`Steer` takes [layers, width] as a vector for each layer, and `Ablate` takes all of them at each."""
    directions = torch.randn(3, 72)
    with pytest.warns(UserWarning, match=r"3 directions at each of 3 layers: \{layer: directions\}") as caught:
        lm.generate([[1, 2]], GREEDY, interventions=[Ablate("resid_post.*", directions)])
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_layer = dict.fromkeys(range(3), directions)
        fine = [
            Ablate("resid_post.*", by_layer),
            Ablate("resid_post.*", directions[:2]),
            Ablate("resid_post.1", directions),
        ]
        lm.generate([[1, 2]], GREEDY, interventions=fine)


def test_none_stands_for_no_interventions_and_no_captures(lm: LM) -> None:
    both = lm.generate(PROMPTS[:2], GREEDY, interventions=[None, [steer(0.5)]], capture=[["embed"], None])
    assert [bool(out.receipt.interventions) for out in both] == [False, True]
    assert [list(out.activations) for out in both] == [["embed"], []]
    assert tokens(lm.generate(PROMPTS[:2], GREEDY, interventions=[None, None])) == tokens(
        lm.generate(PROMPTS[:2], GREEDY)
    )


@pytest.mark.local
def test_a_sweep_is_one_request_a_run_in_one_batch(lm: LM) -> None:
    runs = [None, steer(0.7), [steer(-0.7), Scale("mlp_out.0", 0.5)], ()]
    alone = [
        lm.generate([PROMPTS[1]], GREEDY, interventions=[run] if isinstance(run, Steer) else run, capture=["embed"])[0]
        for run in runs
    ]
    steps = lm.engine.num_steps
    outs = lm.sweep(PROMPTS[1], runs, GREEDY, capture=["embed"])
    assert lm.engine.num_steps - steps <= GREEDY.max_tokens + 1, "the runs did not share steps"
    assert tokens(outs) == tokens(alone) and outs[0].token_ids != outs[1].token_ids
    assert [len(out.receipt.interventions) for out in outs] == [0, 1, 2, 0]
    for out, expected in zip(outs, alone, strict=True):
        assert torch.equal(out.activations["embed"], expected.activations["embed"])


@pytest.mark.local
def test_a_sweep_of_text_names_the_run_that_is_wrong(lm: LM) -> None:
    (out,) = lm.sweep("w1 w2", [None], GREEDY)
    assert out.prompt == "w1 w2" and out.prompt_token_ids == [1, 2]
    with pytest.raises(PromptError, match=r"run 1: .*positions"):
        lm.sweep("w1 w2", [None, Steer("resid_post.1", torch.ones(72), positions=[5])], GREEDY)
    with pytest.raises(TypeError, match="the runs have them"):
        lm.sweep("w1 w2", [None], GREEDY, interventions=[])
    assert lm.sweep("w1 w2", [], GREEDY) == []


# -- conversations --------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
TEMPLATE = (
    "{% for m in messages %}{{ 'w10 ' if m.role == 'user' else 'w11 ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}w12{% endif %}"
)
TOKENS = [10, 1, 2, 11, 3, 12]


@pytest.fixture
def chatty(lm: LM) -> Iterator[LM]:
    lm.tokenizer.chat_template = TEMPLATE
    yield lm
    lm.tokenizer.chat_template = None


def test_chat_is_generate_of_the_rendered_conversation(chatty: LM) -> None:
    expected = tokens(chatty.generate([TOKENS, [*TOKENS[:3], 12]], GREEDY))
    (one,) = chatty.chat(MESSAGES, GREEDY)
    assert one.prompt_token_ids == TOKENS and one.prompt == "w10 w1 w2 w11 w3 w12" and one.token_ids == expected[0]
    outs = chatty.chat([MESSAGES, MESSAGES[:1]], GREEDY, capture=["embed"])
    assert tokens(outs) == expected and len(outs[1].activations["embed"]) == 4 + 6 - 1
    assert chatty.chat(MESSAGES, GREEDY, add_generation_prompt=False)[0].prompt_token_ids == TOKENS[:-1]
    (open_ended,) = chatty.chat(MESSAGES, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert open_ended.prompt_token_ids == TOKENS[:-1]
    (other,) = chatty.chat(MESSAGES, GREEDY, chat_template="w5 {{ extra }}", chat_template_kwargs={"extra": "w6"})
    assert other.prompt_token_ids == [5, 6]


@pytest.mark.local
def test_a_developer_is_the_system_where_the_template_knows_none(chatty: LM) -> None:
    """As in vLLM: templates leave out a role that they do not know, and many take one system message, in the first place."""
    messages = [
        {"role": "system", "content": "w7"},
        *MESSAGES,
        {"role": "developer", "content": [{"type": "text", "text": "w8"}]},
    ]
    system = "{{ 'w20 ' + m.content + ' ' if m.role == 'system' }}"
    roles = f"{{% for m in messages %}}{system}{{{{ m.content if m.role == 'ROLE' }}}}{{% endfor %}}"
    (out,) = chatty.chat(messages, GREEDY, chat_template=roles.replace("ROLE", "user"))
    assert out.prompt_token_ids == [20, 7, 8, 1, 2]
    (out,) = chatty.chat(messages, GREEDY, chat_template=roles.replace("ROLE", "developer"))
    assert out.prompt_token_ids == [20, 7, 8]
    (out,) = chatty.chat(messages[:2], GREEDY, chat_template=roles.replace("ROLE", "user"))
    assert out.prompt_token_ids == [20, 7, 1, 2]


@pytest.mark.local
def test_messages_are_a_prompt_wherever_a_prompt_is(chatty: LM) -> None:
    assert chatty.token_ids(MESSAGES) == TOKENS
    (out,) = chatty.generate(MESSAGES, GREEDY)
    assert out.prompt_token_ids == TOKENS
    assert [o.prompt_token_ids for o in chatty.generate([MESSAGES, "w1", MESSAGES[:1]], GREEDY)] == [
        TOKENS, [1], [10, 1, 2, 12],
    ]  # fmt: skip
    assert chatty.forward(MESSAGES)[0].prompt_token_ids == TOKENS
    assert chatty.run_with_cache(MESSAGES, "embed")[0].shape[1] == len(TOKENS)
    assert chatty.submit(MESSAGES, GREEDY).result().prompt_token_ids == TOKENS
    with chatty.trace(MESSAGES):
        h = chatty.model.layers[0].output.save()
    assert h.shape[1] == len(TOKENS)
    with chatty.generate(MESSAGES, max_new_tokens=6) as tracer:
        ids = tracer.result.save()
    assert ids[0].tolist() == TOKENS + out.token_ids


CALLS = [
    {"role": "user", "content": [{"type": "text", "text": "w1"}, "w2", {"type": "refusal", "refusal": "w3"}], "tool_calls": None},
    {
        "role": "assistant", "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "w4", "arguments": '{"n": "w5"}'}}],
    },
]  # fmt: skip


def test_parts_null_and_calls_are_written_as_vllm_does(chatty: LM) -> None:
    """Parts are lines, null is no text, and arguments are an object: what the server writes, too."""
    given = copy.deepcopy(CALLS)
    calls = "{% for m in messages %}{{ m.content }}|{{ m.tool_calls | tojson if m.tool_calls else '' }}{% endfor %}"
    wanted = 'w1\nw2\nw3||[{"type": "function", "function": {"name": "w4", "arguments": {"n": "w5"}}}]'
    (out,) = chatty.chat(CALLS, GREEDY, chat_template=calls, tools=[])
    assert out.prompt == wanted and given == CALLS
    chatty.tokenizer.chat_template = calls
    assert [one.prompt for one in chatty.generate([CALLS, "w1"], GREEDY)] == [wanted, "w1"]
    with chatty.trace(CALLS):
        h = chatty.model.layers[0].output.save()
    assert h.shape[1] == len(out.prompt_token_ids)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda lm: lm.chat([{"role": "user", "content": [{"type": "image_url"}]}]),
            "message 0: .* a part that is not text",
        ),
        (
            lambda lm: lm.chat([*MESSAGES, {"role": "assistant", "tool_calls": [{}]}]),
            "message 2: .* a function with its",
        ),
        (lambda lm: lm.chat("w1"), "expected a list of"),
        (lambda lm: lm.chat([["w1"]]), "expected a list of"),
        (lambda lm: lm.chat(MESSAGES, tools=[{"name": "search"}]), "tools, which the model's chat template does not"),
        (lambda lm: lm.chat([{"role": "user", "content": 3}]), "message 0: the content is a int"),
        (lambda lm: lm.chat(MESSAGES, continue_final_message=True), "refuses this conversation"),
        (lambda lm: lm.chat([MESSAGES] * 2, chat_template="{{ raise_exception('no') }}"), "conversation 0: .* no"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_refused(chatty: LM, call: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        call(chatty)


def test_a_model_without_a_chat_template_says_so(lm: LM) -> None:
    with pytest.raises(PromptError, match=r"this model has no chat template: .*chat_template="):
        lm.chat(MESSAGES, GREEDY)
    with pytest.raises(PromptError, match="prompt 1 is a conversation"):
        lm.generate(["w1", MESSAGES], GREEDY)


# -- asyncio ----------------------------------------------------------------------------------------


def test_agenerate_and_awaited_handles_give_what_generate_gives(lm: LM) -> None:
    expected = tokens(lm.generate(PROMPTS, GREEDY))

    async def run() -> tuple[list[RequestOutput], RequestOutput, list[RequestOutput]]:
        both = asyncio.gather(lm.agenerate(PROMPTS, GREEDY), lm.agenerate(PROMPTS[0], GREEDY))
        (outs, (first,)), handle = await both, lm.submit(PROMPTS[1], GREEDY)
        return outs, first, [await handle, await handle]

    outs, first, again = asyncio.run(run())
    assert tokens(outs) == expected and first.token_ids == expected[0]
    assert tokens(again) == [expected[1]] * 2


@pytest.mark.local
def test_many_coroutines_share_steps(lm: LM) -> None:
    async def run() -> list[RequestOutput]:
        return await asyncio.gather(*(lm.submit(prompt, GREEDY) for prompt in PROMPTS * 10))

    with held(lm) as arrived:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(asyncio.run(run())))
        thread.start()
        arrived(30)
        steps = lm.engine.num_steps
    thread.join()
    assert lm.engine.num_steps - steps <= GREEDY.max_tokens + 1
    assert tokens(found[0]) == tokens(lm.generate(PROMPTS, GREEDY)) * 10


@pytest.mark.local
@pytest.mark.parametrize("call", [lambda lm: lm.submit([1, 2], LONG), lambda lm: lm.agenerate([[1, 2], [3]], LONG)])
def test_cancelling_the_task_that_waits_ends_the_requests(lm: LM, call: Any) -> None:
    async def wait_for(awaitable: Any) -> None:
        await awaitable

    async def run() -> None:
        task = asyncio.create_task(wait_for(call(lm)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with held(lm):  # so that the requests and their end reach the engine together, before any step
        asyncio.run(run())
        steps = lm.engine.num_steps
    wait_until_idle(lm)
    assert lm.engine.num_steps == steps


def test_an_awaited_request_that_fails_raises(one_fails: LM) -> None:
    async def run() -> None:
        with pytest.raises(RequestError, match="prompt 1 failed"):
            await one_fails.agenerate(PROMPTS, GREEDY)
        with pytest.raises(RequestError, match="four tokens"):
            await one_fails.submit(PROMPTS[1], GREEDY)

    asyncio.run(run())


# -- outputs ------------------------------------------------------------------------------------------


def test_cumulative_logprob_and_perplexity_are_transformers(lm: LM, oracle: Callable[[str], PreTrainedModel]) -> None:
    hf: Any = oracle("llama")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=5, logprobs=0, prompt_logprobs=0)
    (out,) = lm.generate([PROMPTS[1]], params)
    ids = torch.tensor([PROMPTS[1] + out.token_ids])
    with torch.no_grad():
        logprobs = hf(ids).logits[0].log_softmax(-1)
        loss = hf(ids[:, :4], labels=ids[:, :4]).loss
    expected = sum(logprobs[3 + i, token].item() for i, token in enumerate(out.token_ids))
    assert out.cumulative_logprob == pytest.approx(expected, rel=1e-4) == out.outputs[0].cumulative_logprob
    assert out.perplexity == pytest.approx(loss.exp().item(), rel=1e-4)
    (alone,) = lm.generate([PROMPTS[1]], SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=0))
    assert alone.perplexity == pytest.approx(out.perplexity) and alone.cumulative_logprob == 0


def test_what_was_not_asked_for_is_none(lm: LM, lm_of: Callable[..., LM]) -> None:
    (out,) = lm.generate([PROMPTS[0]], GREEDY)
    assert out.cumulative_logprob is None and out.perplexity is None
    params = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1)
    (one,) = lm.generate([[5]], params)
    assert one.perplexity is None and one.cumulative_logprob is not None
    (logits,) = lm_of("llama", logprobs_mode="raw_logits").generate([PROMPTS[0]], params)
    assert logits.logprobs and logits.cumulative_logprob is None and logits.perplexity is None


# -- endless inputs -----------------------------------------------------------------------------------


@pytest.mark.local
def test_imap_yields_in_order_and_reads_no_further_than_its_bound(lm: LM) -> None:
    expected = tokens(lm.generate(PROMPTS, GREEDY))
    read: list[int] = []

    def endless() -> Iterator[list[int]]:
        for i in itertools.count():
            read.append(i)
            yield PROMPTS[i % 3]

    outs = lm.imap(endless(), GREEDY, max_in_flight=4)
    assert not read, "imap reads before its first output is asked for"
    for i, out in enumerate(itertools.islice(outs, 10)):
        assert out.token_ids == expected[i % 3]
        assert len(read) <= i + 4
    outs.close()
    wait_until_idle(lm)


@pytest.mark.local
def test_leaving_imap_early_ends_what_is_in_flight(lm: LM) -> None:
    outs = lm.imap(([1, 2] for _ in itertools.count()), LONG, max_in_flight=3, capture=["embed"])
    assert next(outs).activations["embed"].shape == (2 + 100 - 1, 72)
    outs.close()
    wait_until_idle(lm)


@pytest.mark.local
def test_imap_raises_a_prompts_error_after_the_outputs_before_it(one_fails: LM) -> None:
    seen: list[RequestOutput] = []
    with pytest.raises(RequestError, match="prompt 4 failed: AssertionError: four tokens"):
        for out in one_fails.imap([[1], [2], [3], [1], [1, 2, 3, 4], [1]], GREEDY, max_in_flight=3):
            seen.append(out)
    assert len(seen) == 4
    seen.clear()
    with pytest.raises(PromptError, match="prompt 2 is empty"):
        for out in one_fails.imap([[1], [2], [], [1]], GREEDY):
            seen.append(out)
    assert len(seen) == 2
    with pytest.raises(ValueError, match="max_in_flight=0"):
        one_fails.imap([[1]], GREEDY, max_in_flight=0)
    wait_until_idle(one_fails)


def test_who_waits_for_an_engine_that_is_shut_down_is_told(model_folder) -> None:
    lm = LM(model_folder("llama"), dtype="float32", device="cpu")

    async def run() -> None:
        with held(lm):
            task = asyncio.create_task(lm.agenerate([[1, 2]], LONG))
            await asyncio.sleep(0)
        await asyncio.to_thread(lm.shutdown)
        with pytest.raises(EngineClosedError):
            await task

    asyncio.run(run())
