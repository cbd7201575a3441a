"""Calls and corners of nnsight's own tests and documents: the same script over its model and over ours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CONFIGS, random_model, tiny_tokenizer
from helpers_parity import Pair, assert_same, pair_of  # noqa: F401
from nnsight import Envoy
from nnsight.intervention.eproperty import eproperty
from nnsight.modeling.transformers import TransformersModel
from transformers import GenerationConfig

from pymllm_interp import LM, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TEXT = "w5 w17 w3"


@pytest.fixture
def pair(pair_of: Callable[..., Pair]) -> Pair:  # noqa: F811
    return pair_of("llama")


def stop_and_cache(lm: Any) -> Any:
    with lm.trace(TEXT) as tracer:
        cache = tracer.cache(modules=[lm.model.layers[0], lm.model.layers[1], lm.model.layers[0].mlp])
        lm.model.layers[0].output  # noqa: B018
        tracer.stop()
    return {path: cache[path].output for path in cache.keys()}


def stop_and_cache_in_a_generation(lm: Any) -> Any:
    with lm.generate(TEXT, max_new_tokens=5) as tracer:
        cache = tracer.cache(modules=[lm.model.layers[0], lm.lm_head])
        for step in tracer.iter[:]:
            lm.lm_head.output  # noqa: B018
            if step == 2:
                tracer.stop()
    return [cache[path].output for path in ("model.model.layers.0", "model.lm_head")]


def cache_everything(lm: Any) -> Any:
    with lm.trace(TEXT) as tracer:
        cache = tracer.cache()
    return sorted(cache.keys())


def cache_a_generation(lm: Any) -> Any:
    with lm.generate(TEXT, max_new_tokens=3) as tracer:
        cache = tracer.cache()
    return [sorted(cache.keys()), cache["model.generator.streamer"].output, cache["model.generator"].output]


def result_is_the_output(lm: Any) -> Any:
    with lm.trace(TEXT) as tracer:
        output = lm.output.save()
        result = tracer.result.save()
        same = [result is output].save()
    return [same[0], output is result, output.logits]


def edited_output_is_the_result(lm: Any) -> Any:
    with lm.trace(TEXT) as tracer:
        lm.output.logits[:] = 1
        result = tracer.result.save()
    return result.logits


def without_a_block(lm: Any) -> Any:
    return [lm.trace(TEXT, trace=False).logits, lm(torch.tensor([[5, 17, 3]])).logits]


def streamed_tokens(lm: Any) -> Any:
    with lm.generate(TEXT, max_new_tokens=3) as tracer:
        tokens = list().save()
        for _ in tracer.iter[:]:
            tokens.append(lm.generator.streamer.output)
    return tokens


def gradients_afterwards(lm: Any) -> Any:
    with lm.trace(TEXT):
        h = lm.model.layers[0].output
        h.save()
        h.retain_grad()
        lm.lm_head.output.sum().backward()
    return h.grad


def a_saved_loss(lm: Any) -> Any:
    with lm.trace(TEXT):
        h = lm.model.layers[0].output.save()
        h.retain_grad()
        loss = lm.lm_head.output.sum().save()
    loss.backward()
    return h.grad


def _backward(loss: torch.Tensor) -> None:
    loss.backward()


def backward_in_a_helper(lm: Any) -> Any:
    with lm.trace(TEXT):
        h = lm.model.layers[0].output.save()
        h.register_hook(lambda grad: grad)
        _backward(lm.lm_head.output.sum())
    return h.detach()


def shapes(lm: Any) -> Any:
    with lm.scan(TEXT):
        shape = list(lm.model.layers[0].output.shape).save()
    return shape


def pipe(lm: Any) -> Any:
    with lm.pipe(TEXT, max_new_tokens=3, do_sample=False) as tracer:
        state = lm.model.layers[0].output.save()
        result = tracer.result.save()
    return [state, result, lm.pipe(TEXT, max_new_tokens=3, do_sample=False)]


def masks(lm: Any) -> Any:
    """The mask and the positions among the inputs of the whole model, and of the part below its head."""
    found = []
    for prompt in (TEXT, [[5, 17, 3], [7, 2]]):
        with lm.trace(prompt):
            whole, below = lm.inputs[1]["attention_mask"].save(), lm.model.inputs[1]["attention_mask"].save()
        found += [whole, below]
    ids, mask = torch.tensor([[5, 17, 3], [7, 2, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    with lm.trace(input_ids=ids, attention_mask=mask):
        padded_right = lm.inputs[1]["attention_mask"].save()
    with lm.generate([[5, 17, 3], [7, 2]], max_new_tokens=3, do_sample=False) as tracer:
        steps = list().save()
        for _ in tracer.iter[:]:
            steps.append(lm.inputs[1]["attention_mask"])
    return [*found, padded_right, *steps]


PIPE = {"max_new_tokens": 3, "do_sample": False}


def pipe_of_lists(lm: Any) -> Any:
    called = lm.pipe([TEXT, "the cat"], **PIPE)
    with lm.pipe([TEXT, "the cat"], **PIPE) as tracer:
        traced = tracer.result.save()
    return called, traced


def pipe_of_invokes(lm: Any) -> Any:
    """The pipeline runs once for all invokes, and each gets its result."""
    with lm.pipe(**PIPE) as tracer:
        with tracer.invoke(TEXT):
            first = tracer.result.save()
        with tracer.invoke("the cat"):
            second = tracer.result.save()
    return first, second


def pipe_of_an_invoke_with_a_list(lm: Any) -> Any:
    with lm.pipe(**PIPE) as tracer:  # nnsight reads one `with` after the other
        with tracer.invoke([TEXT, "the cat"]):
            listed = tracer.result.save()
    with lm.pipe(**PIPE) as tracer:
        with tracer.invoke([TEXT, "the cat"]):
            mixed = tracer.result.save()
        with tracer.invoke(TEXT):
            pass
    return listed, mixed


def with_a_generation_config(lm: Any) -> Any:
    config = GenerationConfig(max_new_tokens=5, repetition_penalty=1.5)
    with lm.generate(TEXT, generation_config=config) as tracer:
        ids = tracer.result.save()
    config = GenerationConfig(max_new_tokens=5, eos_token_id=int(ids[0, 4]))
    with lm.generate(TEXT, generation_config=config, repetition_penalty=1.5) as tracer:
        ended = tracer.result.save()
    return [ids, ended]


SCRIPTS = [with_a_generation_config,
    stop_and_cache, stop_and_cache_in_a_generation, cache_everything, cache_a_generation, result_is_the_output,
    edited_output_is_the_result, without_a_block, streamed_tokens, gradients_afterwards, a_saved_loss, backward_in_a_helper,
    shapes, masks, pipe, pipe_of_lists, pipe_of_invokes, pipe_of_an_invoke_with_a_list,
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_it_does_what_it_does_in_nnsight(pair: Pair, script: Callable[..., Any]) -> None:
    lm, reference = pair
    theirs = script(reference)
    assert_same(script(lm), theirs)
    beside = lm.submit([1, 2], SamplingParams(temperature=0, max_tokens=60))
    assert_same(script(lm), theirs, "beside another request: value")
    beside.cancel()


def write_into_the_mask(inputs: Any) -> None:
    inputs[1]["attention_mask"][:, 0] = 0


def put_another_mask(inputs: Any) -> None:
    inputs[1]["attention_mask"] = torch.zeros_like(inputs[1]["attention_mask"])


@pytest.mark.parametrize("edit", [write_into_the_mask, put_another_mask])
def test_a_mask_that_no_pass_uses_cannot_be_edited(pair: Pair, edit: Callable[..., None]) -> None:
    lm, _ = pair
    beside = lm.submit([1, 2], SamplingParams(temperature=0, max_tokens=20))
    with (
        pytest.raises(ValueError, match=r"edit of `model\.input`: the attention_mask is there to be read"),
        lm.trace([5, 17, 3]),
    ):
        edit(lm.inputs)
        lm.lm_head.output.save()
    assert len(beside.result().token_ids) == 20


def test_inputs_that_are_assigned_keep_their_mask(pair: Pair) -> None:
    lm, _ = pair
    with lm.trace([5, 17, 3]):
        args, kwargs = lm.inputs
        lm.inputs = args, {**kwargs, "input_ids": torch.tensor([[5, 17, 9]])}
        logits = lm.lm_head.output.save()
    with lm.trace([5, 17, 9]):
        wanted = lm.lm_head.output.save()
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("prompts", [TEXT, [TEXT], [TEXT, "the cat"]])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_pipe_gives_a_result_for_each_prompt_as_transformers_pipeline_does(
    pair: Pair, prompts: str | list[str], copies: int
) -> None:
    def structure(found: Any) -> Any:
        return [structure(x) for x in found] if isinstance(found, list) else sorted(found)

    lm, reference = pair
    sampled = {"max_new_tokens": 2, "do_sample": True, "num_return_sequences": copies}
    assert structure(lm.pipe(prompts, **sampled)) == structure(reference.pipeline(prompts, **sampled))


def test_the_generation_is_no_value_of_a_single_pass(pair: Pair) -> None:
    for lm in pair:
        with pytest.raises(Exception, match=r"generator\.output.*was requested"), lm.trace(TEXT):
            lm.generator.output.save()


def _calls(loss: torch.Tensor) -> None:
    getattr(loss, "back" + "ward")()


def test_hidden_gradients_are_refused_with_what_to_write(pair: Pair) -> None:
    lm, _ = pair
    with pytest.raises(RuntimeError, match="does not require grad") as caught, lm.trace(TEXT):
        _calls(lm.lm_head.output.sum())
    assert any("grad=True" in note for note in caught.value.__notes__)
    with lm.trace(TEXT, grad=True):
        _calls(lm.lm_head.output.sum())


class Heads(Envoy):
    """An attention with its output projection's input by heads."""

    @eproperty(key="o_proj.input")
    def heads(self, value: Any) -> Any:
        (z,), _ = value
        return z.unflatten(-1, (-1, 8))


class Doubled(Envoy):
    def double(self) -> Any:
        return self.output * 2


def test_custom_envoys_are_those_of_nnsight(model_folder: Any) -> None:
    reference = TransformersModel(
        random_model(CONFIGS["llama"]()), tokenizer=tiny_tokenizer(), envoys={"self_attn": Heads, "layers.*": Doubled}
    )
    with LM(
        model_folder("llama"), device="cpu", dtype="float32", envoys={"self_attn": Heads, "layers.*": Doubled}
    ) as lm:
        found = []
        for model in (lm, reference):
            assert isinstance(model.model.layers[0], Doubled) and isinstance(model.model.layers[0].self_attn, Heads)
            with model.trace(TEXT):
                z = model.model.layers[0].self_attn.heads.save()
                double = model.model.layers[1].double().save()
            found.append([z, double])
        assert_same(*found)


def test_num_return_sequences_are_rows_of_one_batch(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    with lm.generate(TEXT, max_new_tokens=4, do_sample=True, num_return_sequences=3, seed=7, ignore_eos=True) as tracer:
        state = lm.model.layers[0].output.save()
        ids = tracer.result.save()
    assert state.shape[:2] == (3, 3) and ids.shape == (3, 7)
    assert len({tuple(row) for row in ids.tolist()}) > 1
    params = SamplingParams(max_tokens=4, n=3, seed=7, temperature=1, top_k=50, ignore_eos=True)
    (out,) = lm.generate([TEXT], params)
    assert ids[:, 3:].tolist() == [completion.token_ids for completion in out.outputs]


def test_async_with_leaves_the_event_loop_free(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")

    async def one(prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        async with lm.generate(prompt, max_new_tokens=4, ignore_eos=True) as tracer:
            states = list().save()
            for _ in tracer.iter[:]:
                states.append(lm.model.layers[1].output[0, -1])
            ids = tracer.result.save()
        return torch.stack(states), ids

    async def failing() -> None:
        async with lm.trace([1, 2]):
            raise ValueError("a block's")

    async def main() -> list[Any]:
        with pytest.raises(ValueError, match="a block's"):
            await failing()
        return await asyncio.gather(*(one([1 + i, 2, 3]) for i in range(12)))

    for i, (states, ids) in enumerate(asyncio.run(main())):
        with lm.generate([1 + i, 2, 3], max_new_tokens=4, ignore_eos=True) as tracer:
            alone = list().save()
            for _ in tracer.iter[:]:
                alone.append(lm.model.layers[1].output[0, -1])
            own = tracer.result.save()
        assert ids.tolist() == own.tolist()
        torch.testing.assert_close(states, torch.stack(alone), atol=1e-4, rtol=1e-4)


@pytest.mark.local
def test_cancelling_the_task_of_an_async_trace_ends_its_request(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    reached, threads = threading.Event(), threading.active_count()

    async def traced() -> None:
        async with lm.generate([1, 2], max_new_tokens=120, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                lm.model.layers[0].output  # noqa: B018
                reached.set()

    async def main() -> None:
        task = asyncio.create_task(traced())
        while not reached.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not lm.engine.scheduler.requests
    assert threading.active_count() <= threads + 1


def test_remote_is_taken_as_nnsights_scripts_say_it(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    with lm.trace([1, 2], remote=False):
        state = lm.model.layers[0].output.save()
    assert state.shape[:2] == (1, 2)
    with pytest.raises(ValueError, match=r"LM\.connect\(url\)"):
        with lm.trace([1, 2], remote=True):
            lm.model.layers[0].output.save()
