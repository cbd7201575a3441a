"""allowed_token_ids, bad_words and truncate_prompt_tokens, from a call to its tokens."""

from __future__ import annotations

import pytest

from pymllm_interp import LM, SamplingParams
from pymllm_interp.utils.arguments import PromptError

PROMPT = "w3 w14 w15 w9"
ALLOWED = [5, 6, 7]


def contains(ids: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(ids[i : i + len(word)]) == word for i in range(len(ids)))


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_bad_words_of_several_tokens_in_each_completion(lm_of, ahead):
    lm: LM = lm_of("llama", async_scheduling=ahead)
    params = {"n": 6, "temperature": 1.0, "seed": 4, "max_tokens": 60, "allowed_token_ids": ALLOWED}
    (free,) = lm.generate([PROMPT], SamplingParams(**params))
    (held,) = lm.generate([PROMPT], SamplingParams(**params, bad_words=["w5 w6", "w7 w7 w7"]))
    assert all(set(one.token_ids) <= set(ALLOWED) for one in (*free.outputs, *held.outputs))
    assert any(contains(one.token_ids, (5, 6)) for one in free.outputs)
    assert any(contains(one.token_ids, (7, 7, 7)) for one in free.outputs)
    for one in held.outputs:
        assert len(one.token_ids) == 60
        assert not contains(one.token_ids, (5, 6)) and not contains(one.token_ids, (7, 7, 7))
    for before, after in zip(free.outputs, held.outputs, strict=True):  # equal draws until something is banned
        first = next(i for i in range(60) if before.token_ids[i] != after.token_ids[i])
        assert before.token_ids[first - 1] == 5 or before.token_ids[first - 2 : first] == [7, 7]


def test_a_greedy_request_takes_the_best_allowed_token(lm_of):
    lm: LM = lm_of("llama")
    others = [lm.submit(PROMPT, SamplingParams(temperature=0, max_tokens=9)) for _ in range(2)]
    (found,) = lm.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=ALLOWED, logprobs=64)
    )
    for entry, token in zip(found.logprobs, found.token_ids, strict=True):
        best = max((value.logprob, -t) for t, value in entry.items() if t in ALLOWED)
        assert (entry[token].logprob, -token) == best  # log probabilities are of the raw logits
    (alone,) = lm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=9))
    assert [one.result().token_ids for one in others] == [alone.token_ids] * 2


def test_preempted_requests_keep_their_bans(lm_of):
    arguments = {"kv_cache_tokens": 256, "enable_prefix_caching": False, "max_model_len": 120}
    lm, roomy = lm_of("llama", **arguments), lm_of("llama", **{**arguments, "kv_cache_tokens": 4096})
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=90, allowed_token_ids=ALLOWED, bad_words=["w5 w6 w7"], top_k=50)
        for i in range(6)
    ]  # fmt: skip
    before = lm.engine.scheduler.num_preempted
    found = lm.generate([PROMPT] * 6, params)
    assert lm.engine.scheduler.num_preempted > before
    assert [one.token_ids for one in found] == [one.token_ids for one in roomy.generate([PROMPT] * 6, params)]
    assert not any(contains(one.token_ids, (5, 6, 7)) for one in found)


def test_a_prompt_is_cut_from_the_left(lm_of):
    lm: LM = lm_of("llama")
    greedy = {"temperature": 0, "max_tokens": 6}
    (whole,) = lm.generate(["w15 w9"], SamplingParams(**greedy))
    (cut,) = lm.generate([PROMPT], SamplingParams(**greedy, truncate_prompt_tokens=2))
    assert cut.prompt_token_ids == [15, 9] and cut.token_ids == whole.token_ids
    (same,) = lm.generate([PROMPT], SamplingParams(**greedy, truncate_prompt_tokens=1000))
    assert same.prompt_token_ids == [3, 14, 15, 9]
    long = [1] * 1000
    (fitting,) = lm.generate([long], SamplingParams(**greedy, truncate_prompt_tokens=-1))
    assert len(fitting.prompt_token_ids) == 128 - 6 and len(fitting.token_ids) == 6
    (fitting,) = lm.generate([long], SamplingParams(temperature=0, max_tokens=None, truncate_prompt_tokens=-1))
    assert len(fitting.prompt_token_ids) == 127 and len(fitting.token_ids) == 1
    (captured,) = lm.generate([PROMPT], SamplingParams(**greedy, truncate_prompt_tokens=2), capture=["resid_post.0"])
    assert captured.activations["resid_post.0"].shape[0] == 2 + 5


def test_token_sets_that_no_request_can_have(lm_of):
    lm: LM = lm_of("llama")
    for params, message in [
        ({"allowed_token_ids": [97]}, "allowed_token_ids names token id 97, the vocabulary ends at 96"),
        ({"allowed_token_ids": [5], "bad_words": ["w5"]}, "allowed_token_ids leaves no token"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}, "min_tokens=2"),
    ]:
        with pytest.raises(PromptError, match=message):
            lm.generate([PROMPT], SamplingParams(**params))
    with pytest.raises(PromptError, match="truncate_prompt_tokens is not for traces"):
        with lm.generate(PROMPT, max_new_tokens=2, truncate_prompt_tokens=2):
            lm.lm_head.output.save()


def test_a_traced_generation_has_them(lm_of):
    lm: LM = lm_of("llama")
    with lm.generate(
        PROMPT,
        max_new_tokens=12,
        do_sample=True,
        seed=3,
        top_k=0,
        allowed_token_ids=ALLOWED,
        bad_words=["w5"],
    ) as tracer:
        out = tracer.result.save()
    assert set(out[0].tolist()[4:]) <= {6, 7}
