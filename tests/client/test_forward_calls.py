"""Forward passes without generation: max_tokens=0, lm.forward, run_with_cache, run_with_hooks, and tokens, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import held
from helpers_declared import prompt_of
from torch.testing import assert_close
from transformers import PreTrainedModel

from pymllm_interp import LM, Capture, Patch, SamplingParams, Steer
from pymllm_interp.captures import Site
from pymllm_interp.client.handle import RequestError
from pymllm_interp.utils.arguments import PromptError

PROMPT = [5, 6, 7, 8, 9]
PROMPTS = [PROMPT, [1, 2], list(range(40))]
NOTHING = SamplingParams(temperature=0, max_tokens=0)
ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture
def lm(lm_of: Callable[..., LM]) -> LM:
    return lm_of("llama")


@pytest.fixture
def hf(oracle: Callable[[str], PreTrainedModel]) -> Any:
    return oracle("llama")


def logits_of(hf: Any, *prompts: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return hf(torch.tensor(prompts)).logits


# -- max_tokens=0 --------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_no_new_token_is_the_prompt_alone(ahead: bool, lm_of: Callable[..., LM]) -> None:
    """The prompt's log probabilities and captures, in chunks too, and nothing of the token that is not made."""
    lm = lm_of("llama", async_scheduling=ahead, max_num_tokens=16)
    asked = {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1}
    wanted = lm.generate(PROMPTS, SamplingParams(**asked, max_tokens=1), capture=["resid_post.1"])
    beside = lm.generate([[3, 4]], SamplingParams(temperature=0, max_tokens=9))[0].token_ids
    with held(lm):
        other = lm.submit([3, 4], SamplingParams(temperature=0, max_tokens=9))
        handles = [lm.submit(p, SamplingParams(**asked, max_tokens=0), capture=["resid_post.1"]) for p in PROMPTS]
    for handle, expected in zip(handles, wanted, strict=True):
        out = handle.result()
        assert (out.token_ids, out.text, out.finish_reason, out.logprobs) == ([], "", "length", [])
        assert [list(e or ()) for e in out.prompt_logprobs or ()] == [
            list(e or ()) for e in expected.prompt_logprobs or ()
        ]
        assert_close(out.activations["resid_post.1"], expected.activations["resid_post.1"])
        assert out.activations.positions["resid_post.1"].tolist() == list(range(len(out.prompt_token_ids)))
    assert other.result().token_ids == beside
    lm.engine.call(lm.engine.scheduler.check_integrity)


def test_a_prompt_that_fills_the_context_needs_no_room_for_a_token(lm: LM) -> None:
    full = [1] * 128
    assert lm.generate([full], NOTHING)[0].finish_reason == "length"
    with pytest.raises(PromptError, match="128 tokens and asks for 1 new ones"):
        lm.generate([full], ONE)


def test_no_new_token_for_streams_and_for_several_completions(lm: LM) -> None:
    (piece,) = lm.stream(PROMPT, NOTHING)
    assert (piece, piece.finish_reason, piece.token_ids) == ("", "length", [])
    (out,) = lm.generate([PROMPT], SamplingParams(max_tokens=0, n=3))
    assert [c.token_ids for c in out.outputs] == [[], [], []]
    with pytest.raises(PromptError, match=r"max_tokens=0 generates nothing: use `with lm\.trace"):
        with lm.generate(PROMPT, max_new_tokens=0):
            lm.model.layers[0].output.save()


# -- forward -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_forward_has_the_logits_and_states_of_transformers(family: str, lm_of, oracle) -> None:
    lm, hf = lm_of(family), oracle(family)
    outs = lm.forward(PROMPTS, capture=["resid_post.*", Capture("z.1", positions=[-1])])
    assert [out.prompt_token_ids for out in outs] == PROMPTS
    for out in outs:
        with torch.no_grad():
            expected = hf(torch.tensor([out.prompt_token_ids]), output_hidden_states=True)
        assert out.logits.dtype == lm.dtype and out.logits.device.type == "cpu"
        assert_close(out.logits, expected.logits[0], rtol=1e-4, atol=1e-5)
        assert_close(out.activations["resid_post.0"], expected.hidden_states[1][0], rtol=1e-4, atol=1e-5)
        assert out.activations["z.1"].shape[0] == 1


def test_forward_in_chunks_and_with_interventions_is_a_traces_pass(lm_of) -> None:
    steer = Steer("resid_post.1", torch.arange(72.0) / 9)
    lm, whole = lm_of("llama", max_num_tokens=16), lm_of("llama")
    with whole.trace(PROMPTS[2], interventions=[steer]):
        expected = whole.lm_head.output.save()
    plain, steered = lm.forward([PROMPTS[2]] * 2, interventions=[None, [steer]])
    assert_close(steered.logits, expected[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain.logits, steered.logits) and steered.receipt.interventions[0].prompt_rows == 40
    (one,) = lm.forward("w1 w2 w3")
    assert one.prompt == "w1 w2 w3" and one.logits.shape == (3, 97)
    with pytest.raises(PromptError, match="captured in any case"):
        lm.forward(PROMPT, capture=["embed", "logits"])
    with pytest.raises(TypeError, match="did you mean interventions"):
        lm.forward(PROMPT, intervention=[])


# -- run_with_cache -------------------------------------------------------------------------------------


def test_a_name_that_the_cache_lacks_says_how_it_is_captured(lm: LM) -> None:
    _, cache = lm.run_with_cache(prompt_of(4, 1))
    for key in ("blocks.1.attn.hook_pattern", "pattern.1", ("pattern", 1)):
        with pytest.raises(
            KeyError, match=r"attention patterns are captured by lm\.generate\(prompt, capture=\['pattern\.1'\]"
        ):
            cache[key]  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        KeyError, match=r"hook_attn_scores' was not captured: .*Capture\('pattern\.3'\) reads attention patterns"
    ):
        cache["blocks.1.attn.hook_attn_scores"]
    with pytest.raises(KeyError, match=r"hook_nope' was not captured: .*there is embed, resid_pre\.\{0\.\.2\}, "):
        cache["blocks.1.hook_nope"]
    (out,) = lm.generate([prompt_of(4, 1)], SamplingParams(max_tokens=0), capture=["pattern.1"])
    assert "pattern.1" in out.activations


def test_run_with_cache_gives_transformer_lens_shapes_and_names(lm: LM, hf: Any) -> None:
    logits, cache = lm.run_with_cache(PROMPT)
    assert_close(logits, logits_of(hf, PROMPT), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        states = hf(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    for layer in range(3):
        assert_close(cache[f"blocks.{layer}.hook_resid_pre"], states[layer], rtol=1e-4, atol=1e-5)
    assert cache["resid_post", 1] is cache["blocks.1.hook_resid_post"] is cache["resid_post.-2"]
    assert cache["q", 0].shape == (1, 5, 9, 8) and cache["k", 0].shape == (1, 5, 3, 8)
    assert cache["post", 2].shape == (1, 5, 56) and cache["embed"].shape == (1, 5, 72)
    names = list(cache)
    assert names[:3] == ["hook_embed", "blocks.0.hook_resid_pre", "blocks.0.attn.hook_q"] and names[-1] == "final_norm"
    assert len(cache) == 2 + 3 * 10 and "blocks.2.attn.hook_z" in cache and ("pattern", 0) not in cache
    _, steered = lm.run_with_cache(
        PROMPT, "resid_mid.0", interventions=[Patch("embed", torch.zeros(72), positions=[0])]
    )
    assert not torch.allclose(steered["resid_mid", 0], cache["resid_mid", 0])


def test_keywords_of_transformer_lens_that_ask_for_nothing_else_are_taken(lm: LM) -> None:
    logits, cache = lm.run_with_cache(PROMPT, "embed", return_type="logits", remove_batch_dim=False)  # pyright: ignore
    assert torch.equal(logits, lm.run_with_cache(PROMPT, "embed")[0]) and cache["embed"].shape == (1, 5, 72)
    assert lm.run_with_hooks(PROMPT, [], return_type="logits", reset_hooks_end=True).shape == logits.shape  # pyright: ignore
    with pytest.raises(TypeError, match="the logits are returned"):
        lm.run_with_cache(PROMPT, return_type="loss")  # pyright: ignore


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("blocks.1.hook_resid_post", ["blocks.1.hook_resid_post"]),
        (["resid_post.{0,2}", "hook_embed"], ["hook_embed", "blocks.0.hook_resid_post", "blocks.2.hook_resid_post"]),
        (Site("mlp_out", 1), ["blocks.1.hook_mlp_out"]),
        (lambda name: name.endswith("hook_z"), [f"blocks.{i}.attn.hook_z" for i in range(3)]),
        (lambda name: False, []),
    ],
)
def test_a_names_filter_selects_sites(names: Any, found: list[str], lm: LM) -> None:
    _, cache = lm.run_with_cache(PROMPT, names)
    assert list(cache) == found


def test_prompts_of_equal_length_make_a_batch_and_others_are_refused(lm: LM, hf: Any) -> None:
    other = [1, 2, 3, 4, 5]
    logits, cache = lm.run_with_cache([PROMPT, other], "resid_post.0")
    assert_close(logits, logits_of(hf, PROMPT, other), rtol=1e-4, atol=1e-5)
    assert cache["resid_post", 0].shape == (2, 5, 72)
    assert torch.equal(lm.run_with_cache(torch.tensor([PROMPT, other]), "embed")[0], logits)
    for call in (lm.run_with_cache, lm.run_with_hooks):
        with pytest.raises(PromptError, match=r"the prompts have \[5, 2\] tokens"):
            call([PROMPT, [1, 2]])
        with pytest.raises(PromptError, match="expected at least one"):
            call([])
        with pytest.raises(TypeError, match=r"'return_type': the logits are returned"):
            call(PROMPT, return_type="loss")
    with pytest.raises(ValueError, match=r"attention patterns are captured by lm\.generate"):
        lm.run_with_cache(PROMPT, "blocks.0.attn.hook_pattern")


# -- run_with_hooks ------------------------------------------------------------------------------------------


@pytest.mark.local
def test_hooks_are_called_in_the_order_of_the_pass_and_see_what_the_cache_has(lm: LM) -> None:
    names = [
        "final_norm", "resid_post.*", "mlp_out.*", "mlp_act.*", "resid_mid.*", "attn_out.*", "z.*", "v.*", "k.*", "q.*",
        "resid_pre.*", "embed",
    ]  # fmt: skip
    seen: dict[str, torch.Tensor] = {}

    def look(value: torch.Tensor, hook: Any) -> None:
        seen[hook.name] = value.clone()

    logits = lm.run_with_hooks(PROMPT, [(names, look)])
    expected, cache = lm.run_with_cache(PROMPT)
    assert_close(logits, expected)
    assert list(seen) == list(cache)
    for name, value in seen.items():
        assert_close(value, cache[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind", ["embed", "resid_pre.1", "q.1", "v.1", "z.1", "attn_out.1", "resid_mid.1", "mlp_act.1",
                                  "mlp_out.1", "resid_post.1", "final_norm"])  # fmt: skip
def test_what_a_hook_returns_or_writes_is_what_a_patch_does(kind: str, in_place: bool, lm: LM) -> None:
    (source,) = lm.forward([4, 3, 2, 1, 0], capture=[kind])
    values = source.activations[kind]

    def replace(value: torch.Tensor, hook: Any) -> torch.Tensor | None:
        assert hook.site == Site.parse(kind)
        if not in_place:
            return values[None].to(value.device)
        value[:] = values
        return None

    logits = lm.run_with_hooks(PROMPT, [(kind, replace)])
    (patched,) = lm.forward(PROMPT, interventions=[Patch(kind, values.flatten(1), "prompt")])
    assert_close(logits[0], patched.logits, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits[0], lm.forward(PROMPT)[0].logits)


def test_hooks_at_one_site_see_each_others_values_and_a_head_is_one_index(lm: LM, hf: Any) -> None:
    def zero_head(z: torch.Tensor, hook: Any) -> None:
        assert hook.layer() == 1 and hook.name == "blocks.1.attn.hook_z"
        z[:, :, 3] = 0

    def double(value: torch.Tensor, hook: Any) -> torch.Tensor:
        assert not value[:, :, 3].any()
        return value * 2

    logits = lm.run_with_hooks(PROMPT, fwd_hooks=[("blocks.1.attn.hook_z", zero_head), ("z.1", double)])

    def by_hand(_: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        z = args[0].unflatten(-1, (9, 8)).clone()
        z[:, :, 3] = 0
        return ((2 * z).flatten(-2),)

    handle = hf.model.layers[1].self_attn.o_proj.register_forward_pre_hook(by_hand)
    try:
        assert_close(logits, logits_of(hf, PROMPT), rtol=1e-4, atol=1e-5)
    finally:
        handle.remove()


@pytest.mark.local
def test_hooks_of_several_prompts_and_filters(lm: LM) -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []

    def count(value: torch.Tensor, hook: Any) -> None:
        calls.append((hook.name, tuple(value.shape)))

    logits = lm.run_with_hooks([PROMPT, PROMPT[::-1]], [(lambda name: name.endswith("resid_post"), count)])
    assert logits.shape == (2, 5, 97)
    assert sorted(calls) == sorted([(f"blocks.{i}.hook_resid_post", (1, 5, 72)) for i in range(3)] * 2)
    calls.clear()
    lm.run_with_hooks("w1 w2", [("attn_in.0", count), ("logits", count)])
    assert calls == [("attn_in.0", (1, 2, 72)), ("logits", (1, 2, 97))]


def test_what_a_hook_does_wrong_is_raised_and_the_engine_lives(lm: LM) -> None:
    def fails(value: torch.Tensor, hook: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as failed:
        lm.run_with_hooks(PROMPT, [("resid_post.1", fails)])
    assert any(entry.name == "fails" for entry in failed.traceback)
    with pytest.raises(
        ValueError, match=r"hook at blocks\.1\.hook_resid_post returned \[1, 5\]; expected \[1, 5, 72\]"
    ):
        lm.run_with_hooks(PROMPT, [("resid_post.1", lambda value, hook: value[..., 0])])
    with pytest.raises(TypeError, match="expected pairs"):
        lm.run_with_hooks(PROMPT, [fails])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unknown site"):
        lm.run_with_hooks(PROMPT, [("blocks.1.hook_resid_pots", fails)])
    with pytest.raises(ValueError, match="hook_embed has no layer"):
        lm.run_with_hooks(PROMPT, [("embed", lambda value, hook: hook.layer())])
    assert lm.run_with_hooks(PROMPT).shape == (1, 5, 97)


def test_persistent_edits_apply_to_forward_passes(lm: LM) -> None:
    expected = lm.forward(PROMPT)[0].logits
    with lm.edit(name="zero"):
        lm.model.layers[1].output[:] *= 0
    try:
        with lm.trace(PROMPT):
            edited = lm.lm_head.output.save()
        assert_close(lm.forward(PROMPT)[0].logits, edited[0])
        assert_close(lm.run_with_hooks(PROMPT), edited)
        logits, cache = lm.run_with_cache(PROMPT, "resid_post.1")
        assert_close(logits, edited)
        assert not cache["resid_post", 1].any()
        assert_close(lm.forward(PROMPT, edits=[])[0].logits, expected)
    finally:
        lm.clear_edits("zero")


@pytest.mark.local
def test_a_failed_forward_raises(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*_: Any, **__: Any) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(lm.runner.model, "forward_fused", boom)
        with pytest.raises(RequestError, match=r"prompt 0 failed.* boom"):
            lm.forward(PROMPTS)
    assert lm.forward(PROMPT)[0].logits.shape == (5, 97)


# -- tokens ---------------------------------------------------------------------------------------------------


def test_tokens_to_text_and_back(lm: LM) -> None:
    assert lm.to_tokens("w1 w2").tolist() == [[1, 2]] and lm.to_tokens(["w1 w2", "w3 w4"]).tolist() == [[1, 2], [3, 4]]
    assert lm.to_str_tokens("w1 w20") == ["w1", "w20"] == lm.to_str_tokens(torch.tensor([[1, 20]]))
    assert lm.to_str_tokens(["w1", "w2 w3"]) == [["w1"], ["w2", "w3"]]
    assert lm.to_single_token("w7") == 7
    assert lm.to_string([1, 2]) == lm.tokenizer.decode([1, 2]) == lm.to_string(torch.tensor([1, 2]))
    assert lm.to_string(torch.tensor([[1], [2]])) == ["w1", "w2"] and lm.to_string(5) == "w5"
    for call, message in (
        (lambda: lm.to_single_token("w1 w2"), r"'w1 w2' is 2 tokens, not one: \['w1', 'w2'\]"),
        (lambda: lm.to_tokens(["w1", "w1 w2"]), r"the texts have \[1, 2\] tokens"),
        (lambda: lm.to_tokens("w1", prepend_bos=True), "no BOS token"),
    ):
        with pytest.raises(PromptError, match=message):
            call()


def test_a_bos_token_is_there_once_or_not_at_all(lm: LM) -> None:
    from tokenizers.processors import TemplateProcessing

    kept = lm.tokenizer.backend_tokenizer.post_processor, lm.tokenizer.bos_token
    lm.tokenizer.bos_token = "w90"
    try:
        assert lm.to_tokens("w1").tolist() == [[1]] and lm.to_tokens("w1", prepend_bos=True).tolist() == [[90, 1]]
        lm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="w90 $A", pair="w90 $A $B", special_tokens=[("w90", 90)]
        )
        assert lm.to_tokens("w1").tolist() == [lm.token_ids("w1")] == [[90, 1]]
        assert lm.to_tokens("w1", prepend_bos=True).tolist() == [[90, 1]]
        assert lm.to_tokens("w1", prepend_bos=False).tolist() == [[1]] and lm.to_single_token("w1") == 1
    finally:
        lm.tokenizer.backend_tokenizer.post_processor, lm.tokenizer.bos_token = kept
