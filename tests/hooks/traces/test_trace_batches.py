"""A list of prompts in one invoke, and an invoke without a prompt: one block sees a padded batch, as in nnsight.

nnsight's model over the same weights is the oracle. Padding differs (zeros here, what the model made of it there), so only the
places of real tokens are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_parity import Pair, assert_same, beside_plain_requests, pair_of  # noqa: F401

from pymllm_interp import LM, SamplingParams, Steer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TEXTS = ["w5 w17 w3 w80 w44", "w7 w2", "w9 w61 w30 w8 w1 w90 w4"]
EQUAL = ["w5 w17 w3", "w7 w2 w8", "w1 w2 w3"]
PAGES = [" ".join(f"w{1 + i % 90}" for i in range(n)) for n in (16, 17, 1)]
LISTS = {"ragged": TEXTS, "equal": EQUAL, "pages": PAGES}


@pytest.fixture(params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest, pair_of: Callable[..., Pair]) -> Pair:  # noqa: F811
    return pair_of(request.param)


def lengths(texts: list[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def unpadded(value: Any, texts: list[str]) -> Any:
    """The places of real tokens of a padded batch [prompts, tokens, ...], prompt by prompt."""
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[:2] == (len(texts), max(lengths(texts))):
        return [own[-n:] for own, n in zip(value, lengths(texts), strict=True)]
    if isinstance(value, dict):
        return {key: unpadded(item, texts) for key, item in value.items()}
    return type(value)(unpadded(item, texts) for item in value) if isinstance(value, list | tuple) else value


def same(pair: Pair, script: Callable[..., Any], texts: list[str]) -> None:
    lm, reference = pair
    theirs = unpadded(script(reference, texts), texts)
    assert_same(unpadded(script(lm, texts), texts), theirs)
    with beside_plain_requests(lm):
        assert_same(unpadded(script(lm, texts), texts), theirs, "beside others: value")


def read(lm: Any, texts: list[str]) -> Any:
    with lm.trace(texts):
        norm = lm.model.layers[0].input_layernorm.output.save()
        q = lm.model.layers[0].self_attn.q_proj.output.save()
        attention = lm.model.layers[1].self_attn.output[0].save()
        args = lm.model.layers[1].mlp.input.save()
        layer = lm.model.layers[1].output.save()
        last = lm.lm_head.output[:, -1].argmax(-1).save()
        logits = lm.lm_head.output.save()
    return [norm, q, attention, args, layer, last, logits]


def read_in_an_invoke(lm: Any, texts: list[str]) -> Any:
    with lm.trace() as tracer:
        with tracer.invoke(texts):
            layer = lm.model.layers[1].output.save()
            logits = lm.output.logits.save()
    return [layer, logits]


def edit_in_order(lm: Any, texts: list[str]) -> Any:
    with lm.trace(texts):
        lm.model.layers[0].self_attn.output[0][:, -1] *= 2
        lm.model.layers[0].mlp.input = lm.model.layers[0].mlp.input * 0.5
        lm.model.layers[0].mlp.output[:, -1] *= 3
        lm.model.layers[0].output[0, -1] = 1.0
        lm.model.layers[1].output = lm.model.layers[1].output * 1.5
        logits = lm.lm_head.output[:, -1].save()
    return logits


def lens(lm: Any, texts: list[str]) -> Any:
    with lm.trace(texts):
        found = list().save()
        for layer in lm.model.layers:
            found.append(lm.lm_head(lm.model.norm(layer.output[:, -1])))
    return found


def generation(lm: Any, texts: list[str]) -> Any:
    with lm.generate(texts, max_new_tokens=4, min_new_tokens=4) as tracer:
        states = list().save()
        for step in tracer.iter[0:4]:
            states.append(lm.model.layers[1].output[:, -1])
            if step == 2:
                lm.model.layers[1].output[:, -1] *= 2
            states.append(lm.lm_head.output[:, -1])
        ids = tracer.result.save()
    return [states, [row[-4:] for row in ids]]


def skip(lm: Any, texts: list[str]) -> Any:
    with lm.trace(texts):
        lm.model.layers[1].mlp.skip(lm.model.layers[1].mlp.input * 2)
        logits = lm.lm_head.output[:, -1].save()
    return logits


def cached(lm: Any, texts: list[str]) -> Any:
    with lm.trace(texts) as tracer:
        cache = tracer.cache(modules=[lm.model.layers[1], lm.model.layers[0].mlp])
    return [cache["model.model.layers.1"].output, cache["model.model.layers.0.mlp"].output]


def whole_batch(lm: Any, texts: list[str]) -> Any:
    with lm.trace() as tracer:
        for text in texts:
            with tracer.invoke(text):
                lm.model.layers[0].output[:, -1] *= 2
        with tracer.invoke():
            seen = lm.model.layers[0].output.save()
            lm.model.layers[1].output[0, -1] = 1.0
            logits = lm.lm_head.output[:, -1].save()
    return [seen, logits]


def whole_batch_first(lm: Any, texts: list[str]) -> Any:
    with lm.trace() as tracer:
        with tracer.invoke():
            lm.model.layers[0].output[:, -1] *= 2
        with tracer.invoke(texts[0]):
            seen = lm.model.layers[0].output[:, -1].save()
        with tracer.invoke(texts[1:]):
            logits = lm.lm_head.output[:, -1].save()
    return [seen, logits]


def gradients(lm: Any, texts: list[str]) -> Any:
    with lm.trace(texts):
        early, late = lm.model.layers[0].output, lm.model.layers[1].output
        loss = lm.lm_head.output[:, -1].logsumexp(-1).sum()
        with loss.backward():
            of_late = late.grad.save()
            of_early = early.grad.save()
    return [of_late, of_early]


def hidden_states(lm: Any, texts: list[str]) -> Any:
    with lm.trace(texts, output_hidden_states=True) as tracer:
        lm.model.layers[0].output[:, -1] *= 2
        states = list(tracer.result.hidden_states).save()
    return states


SCRIPTS = [
    hidden_states,
    read,
    read_in_an_invoke,
    edit_in_order,
    lens,
    generation,
    skip,
    cached,
    whole_batch,
    whole_batch_first,
    gradients,
]


@pytest.mark.thin(2)
@pytest.mark.parametrize("which", LISTS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_block_over_several_prompts_does_what_it_does_in_nnsight(
    pair: Pair, script: Callable[..., Any], which: str
) -> None:
    same(pair, script, LISTS[which])


ENCODINGS = {
    "left": ([[0, 0, 5, 17], [7, 2, 93, 4]], [[0, 0, 1, 1], [1, 1, 1, 1]]),
    "right": ([[5, 17, 0, 0], [7, 2, 93, 4]], [[1, 1, 0, 0], [1, 1, 1, 1]]),
    "both": ([[0, 5, 17, 0], [7, 2, 93, 4]], [[0, 1, 1, 0], [1, 1, 1, 1]]),
}


@pytest.mark.parametrize("side", ENCODINGS)
def test_a_padded_encoding_keeps_its_places(lm_of: Callable[..., LM], side: str) -> None:
    lm, (ids, mask) = lm_of("llama"), map(torch.tensor, ENCODINGS[side])
    with lm.trace({"input_ids": ids, "attention_mask": mask}):
        states = lm.model.layers[1].output.save()
    assert states.shape[:2] == (2, 4)
    assert (states[~mask.bool()] == 0).all()
    for row, own, kept in zip(states, ids, mask.bool(), strict=True):
        with lm.trace(own[kept]):
            alone = lm.model.layers[1].output.save()
        torch.testing.assert_close(row[kept], alone[0])


FORMS: dict[str, Callable[[LM, list[str]], tuple[tuple, dict]]] = {
    "texts": lambda lm, texts: ((texts,), {}),
    "lists of ids": lambda lm, texts: (([lm.tokenizer(text)["input_ids"] for text in texts],), {}),
    "list of tensors": lambda lm, texts: (([torch.tensor(lm.tokenizer(text)["input_ids"]) for text in texts],), {}),
    "encoding": lambda lm, texts: ((lm.tokenizer(texts),), {}),
    "keywords": lambda lm, texts: ((), dict(lm.tokenizer(texts))),
    "tensor": lambda lm, texts: ((torch.tensor(lm.tokenizer(texts)["input_ids"]),), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_prompts_of_every_form_are_the_same_prompts(lm_of: Callable[..., LM], form: str) -> None:
    lm, texts = lm_of("llama"), EQUAL if form == "tensor" else TEXTS
    args, kwargs = FORMS[form](lm, texts)
    with lm.trace(texts):
        expected = lm.lm_head.output.save()
    with lm.trace(*args, **kwargs):
        logits = lm.lm_head.output.save()
    assert torch.equal(logits, expected)


def test_rows_of_a_finished_request_are_zeros_and_its_result_is_padded(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    (first, second) = lm.generate([[5, 17, 3], [7, 2]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    stop = first.token_ids[2]
    assert stop not in [*first.token_ids[:2], *second.token_ids]
    with lm.generate([[5, 17, 3], [7, 2]], max_new_tokens=6, ignore_eos=True, stop_token_ids=[stop]) as tracer:
        states, tokens = list().save(), list().save()
        for _ in tracer.iter[:]:
            states.append(lm.model.layers[1].output[:, -1])
            lm.model.layers[1].output[:, -1] += 0  # also where one is finished
            tokens.append(lm.samples[:, 0])
        ids = tracer.result.save()
    pad = lm.tokenizer.pad_token_id
    assert ids.tolist() == [[5, 17, 3, *first.token_ids[:3], pad, pad, pad], [pad, 7, 2, *second.token_ids]]
    assert [bool((step[0] == 0).all()) for step in states] == [False] * 3 + [True] * 3
    assert [step[1].item() for step in tokens] == second.token_ids
    assert tracer.receipt.steps and len(tracer.receipts) == 1


def test_streamed_tokens_of_several_prompts_come_together(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    outs = lm.generate([[5, 17, 3], [7, 2]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    with lm.generate([[5, 17, 3], [7, 2]], max_new_tokens=4, ignore_eos=True) as tracer:
        seen = list().save()
        for _ in tracer.iter[0:5]:
            seen.append(lm.generator.streamer.output)
    pad = lm.tokenizer.pad_token_id
    assert seen[0].tolist() == [[5, 17, 3], [pad, 7, 2]]
    assert torch.stack(seen[1:]).T.tolist() == [out.token_ids for out in outs]


def test_logits_and_samples_of_several_prompts_are_edited(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    with lm.generate([[5, 17, 3], [7, 2]], max_new_tokens=3, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            lm.logits[:, 9] = 1e4
            if step == 1:
                lm.samples = lm.samples + torch.tensor([[1], [2]], device=lm.samples.device)
        ids = tracer.result.save()
    assert ids[:, -3:].tolist() == [[9, 10, 9], [9, 11, 9]]


def test_declared_ops_and_captures_of_a_list_are_each_prompts_own(lm_of: Callable[..., LM]) -> None:
    lm, vector = lm_of("llama"), torch.ones(72)
    ops = [[Steer("resid_post.0", vector)], []]
    with lm.trace([[5, 17, 3], [7, 2]], interventions=ops, capture=["resid_post.0"]) as tracer:
        seen = lm.model.layers[0].output.save()
    (steered,) = lm.generate([[5, 17, 3]], SamplingParams(max_tokens=1), capture=["resid_post.0"], interventions=ops[0])
    (plain,) = lm.generate([[7, 2]], SamplingParams(max_tokens=1), capture=["resid_post.0"])
    for own, out, row in zip(tracer.captures, (steered, plain), seen, strict=True):
        state = own["resid_post.0"]
        torch.testing.assert_close(state, out.activations["resid_post.0"])
        torch.testing.assert_close(row[-len(state) :], state)


def test_an_error_in_the_block_ends_its_prompts_and_no_other_request(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    params = SamplingParams(temperature=0, max_tokens=60)
    (expected,) = lm.generate([[1, 2]], params)
    beside = lm.submit([1, 2], params)
    with pytest.raises(ZeroDivisionError), lm.generate([[5, 17, 3], [7, 2]], max_new_tokens=5):
        lm.model.layers[0].output.save()
        1 / 0  # noqa: B018
    with pytest.raises(ValueError, match=r"expected a tensor \[2, 3, 72\]"), lm.trace([[5, 17, 3], [7, 2]]):
        lm.model.layers[0].output = lm.model.layers[0].output[:1]
    with pytest.raises(ValueError, match="the whole batch's"), lm.trace() as tracer:
        with tracer.invoke([5, 17]):
            lm.model.layers[0].output.save()
        with tracer.invoke():
            raise ValueError("the whole batch's")
    assert beside.result().token_ids == expected.token_ids


def test_one_loss_over_two_invokes_gives_the_gradients_of_both(pair_of: Callable[..., Pair]) -> None:  # noqa: F811
    lm, reference = pair_of("llama")

    def script(lm: Any) -> Any:
        with lm.trace() as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke("w5 w17 w3"):
                early = lm.model.layers[0].output
                first = lm.lm_head.output[0, -1].logsumexp(0)
                barrier()
            with tracer.invoke("w7 w2 w9"):
                other = lm.model.layers[1].output
                second = lm.lm_head.output[0, -1].logsumexp(0)
                barrier()
                loss = first * second
                with loss.backward():
                    of_other = other.grad.save()
                    of_early = early.grad.save()
        return [of_other, of_early]

    assert_same(script(lm), script(reference))


def test_many_prompts_at_random_equal_their_solo_traces(lm_of: Callable[..., LM]) -> None:
    lm, generator = lm_of("qwen3"), torch.Generator().manual_seed(3)
    for _ in range(4):
        count = int(torch.randint(1, 9, (1,), generator=generator))
        prompts = [
            torch.randint(1, 97, (int(torch.randint(1, 20, (1,), generator=generator)),), generator=generator).tolist()
            for _ in range(count)
        ]
        with lm.generate(prompts, max_new_tokens=3, ignore_eos=True) as tracer:
            states = list().save()
            for _ in tracer.iter[0:3]:
                lm.model.layers[0].output[:, -1] *= 1.5
                states.append(lm.model.layers[1].output)
            ids = tracer.result.save()
        for i, prompt in enumerate(prompts):
            with lm.generate(prompt, max_new_tokens=3, ignore_eos=True) as tracer:
                alone = list().save()
                for _ in tracer.iter[0:3]:
                    lm.model.layers[0].output[:, -1] *= 1.5
                    alone.append(lm.model.layers[1].output)
                own = tracer.result.save()
            assert ids[i, -own.shape[1] :].tolist() == own[0].tolist()
            for together, solo in zip(states, alone, strict=True):
                torch.testing.assert_close(together[i, -solo.shape[1] :], solo[0], atol=1e-5, rtol=1e-5)


def test_transformers_attention_is_refused_for_several_prompts(lm_of: Callable[..., LM]) -> None:
    lm = lm_of("llama")
    with pytest.raises(ValueError, match="runs for one prompt at a time"):
        with lm.trace(TEXTS, attn_implementation="eager"):
            lm.model.layers[0].output.save()


def edit_after_a_barrier(lm: Any, texts: list[str]) -> Any:
    with lm.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(texts):
            early = lm.model.layers[0].output
            barrier()
            early[:, -1] = 0.5
            logits = lm.lm_head.output[:, -1].save()
        with tracer.invoke("w1 w2"):
            lm.model.layers[0].output[:, -1] *= 2
            barrier()
            others = lm.lm_head.output[:, -1].save()
    return [logits, others]


def edit_later_in_the_pass(lm: Any, texts: list[str]) -> Any:
    with lm.trace(texts):
        early = lm.model.layers[0].output
        early[:, -1] *= 2
        lm.model.layers[1].input_layernorm.output  # noqa: B018
        early[:, -1] = 0.5  # the residual stream still is this tensor
        logits = lm.lm_head.output[:, -1].save()
    return logits


def edit_of_what_was_assigned(lm: Any, texts: list[str]) -> Any:
    with lm.trace(texts):
        lm.model.layers[0].output = lm.model.layers[0].output * 2
        assigned = lm.model.layers[0].output
        lm.model.layers[1].input_layernorm.output  # noqa: B018
        assigned[:, -1] = 0.5
        logits = lm.lm_head.output[:, -1].save()
    return logits


def cache_before_others_edit(lm: Any, texts: list[str]) -> Any:
    with lm.trace() as tracer:
        with tracer.invoke():
            cache = tracer.cache(modules=[lm.model.layers[0]])
            lm.model.layers[0].output[:, -1] *= 2
        for text in texts:
            with tracer.invoke(text):
                lm.model.layers[0].output[:, -1] *= 2
    return cache["model.model.layers.0"].output[:, -1]


@pytest.mark.parametrize("which", LISTS)
@pytest.mark.parametrize(
    "script",
    [edit_after_a_barrier, edit_later_in_the_pass, edit_of_what_was_assigned, cache_before_others_edit],
    ids=lambda s: s.__name__,
)
def test_a_padded_batch_is_edited_in_place_as_a_view_is(pair: Pair, script: Callable[..., Any], which: str) -> None:
    same(pair, script, LISTS[which])
