"""`lm.encode`: embeddings equal transformers and the formula of their pooling, whatever runs beside them (V14)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, held, random_model, tiny_tokenizer
from helpers_devices import DEVICES, lm_on
from helpers_st import TEXTS, folder_of_modules
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedModel

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.client.pooling.folders import pooler_of
from pymllm_interp.client.pooling.pooler import Pooler
from pymllm_interp.client.pooling.pooling import Pooling
from pymllm_interp.interventions import Monitor
from pymllm_interp.utils.arguments import PromptError

CLOSE = 1e-4 if torch.cuda.is_available() else 1e-5
GENERATOR = torch.Generator().manual_seed(7)
PROMPTS = [torch.randint(0, 95, (n,), generator=GENERATOR).tolist() for n in (1, 17, 40, 3, 16)]
MODES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda h: h[-1],
    "cls": lambda h: h[0],
    "mean": lambda h: h.mean(0),
    "max": lambda h: h.amax(0),
    "mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5,
    "weightedmean": lambda h: (h * torch.arange(1.0, len(h) + 1)[:, None]).sum(0) / (len(h) * (len(h) + 1) / 2),
    "all": lambda h: h,
}


@torch.no_grad()
def hidden(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """transformers' last hidden states [tokens, hidden]."""
    return model.base_model(torch.tensor([ids])).last_hidden_state[0]


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def data(outs: list[Any]) -> list[torch.Tensor]:
    return [out.data for out in outs]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=CLOSE, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize(
    ("family", "modes"),
    [("llama", list(MODES)), ("gemma2", ["last", "mean"]), ("gpt2", ["mean"]), ("glm4_moe", ["last"])],
)
def test_embeddings_equal_transformers_and_the_formula(family, modes, impl, device, lm_of, oracle) -> None:
    """Prompts of one token, of several chunks, and of a page and one; batches of a step with parts of several prompts."""
    lm, model = lm_of(family, impl=impl, max_num_tokens=16, device=device), oracle(family)
    states = [hidden(model, ids) for ids in PROMPTS]
    for mode in modes:
        equal(data(lm.encode(PROMPTS, pooling=mode)), [unit(MODES[mode](h)) for h in states])
        equal(data(lm.encode(PROMPTS, pooling=mode, normalize=False)), [MODES[mode](h) for h in states])
    equal(data(lm.encode(PROMPTS)), [unit(h[-1]) for h in states])
    equal(data(lm.encode(PROMPTS, dimensions=7)), [unit(h[-1][:7]) for h in states])


def test_a_cached_prefix_changes_no_embedding(lm_of, oracle) -> None:
    """ "last" takes the prefix from the cache; "mean" needs all its states, and computes them again."""
    lm, model = lm_of("llama"), oracle("llama")
    ids = torch.randint(0, 95, (70,), generator=GENERATOR).tolist()
    lm.reset_prefix_cache()
    fresh = {mode: lm.encode([ids], pooling=mode)[0] for mode in ("mean", "last")}
    lm.generate([ids], SamplingParams(temperature=0, max_tokens=4))
    for mode in ("mean", "last"):
        again = lm.encode([ids], pooling=mode)[0]
        equal([again.data, fresh[mode].data], [unit(MODES[mode](hidden(model, ids)))] * 2)
    assert lm.encode([ids], pooling="last")[0].num_cached_tokens >= 64
    (out,) = lm.generate([ids], SamplingParams(temperature=0, max_tokens=1))
    assert out.num_cached_tokens >= 64, "what an embedding computed, a generation takes"


@pytest.mark.parametrize("device", DEVICES)
def test_preempted_embeddings_are_those_of_an_empty_engine(device, model_folder, oracle) -> None:
    """A pool that holds a few of the requests: long generations and embeddings push each other out."""
    lm, model = lm_on(device, model_folder("llama"), kv_cache_tokens=192, max_model_len=128), oracle("llama")
    ids = [torch.randint(0, 95, (60,), generator=GENERATOR).tolist() for _ in range(6)]
    handles = [lm.submit(one, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)) for one in ids]
    for mode in ("mean", "last"):
        equal(data(lm.encode(ids, pooling=mode)), [unit(MODES[mode](hidden(model, one))) for one in ids])
    assert all(len(handle.result().token_ids) == 60 for handle in handles)
    assert sum(handle.requests[0].num_preemptions for handle in handles) > 0
    lm.shutdown()


def test_an_embedding_beside_others_changes_no_bit_of_them(lm_of) -> None:
    """Generating and steered requests, alone and with embeddings in their steps."""
    lm, params = lm_of("llama"), SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    steer = [Steer("resid_post.1", torch.arange(72.0) / 9, scale=2.0)]
    capture = [Capture("resid_post.2")]

    def run(ids: list[int]) -> list[Any]:
        """Of one shape of step: an embedding and a prompt of as many tokens take each other's place."""
        with held(lm) as arrived:
            plain = lm.submit(PROMPTS[1], params, capture=capture)
            steered = lm.submit(PROMPTS[2], params, interventions=steer, capture=capture)
            third = lm.submit(ids, SamplingParams(max_tokens=0), capture=[Capture("final_norm", reduce="mean")])
            arrived(3)
        outs = [handle.result() for handle in (plain, steered, third)]
        return [(out.token_ids, out.outputs[0].logprobs, out.activations["resid_post.2"]) for out in outs[:2]]

    lm.reset_prefix_cache()
    first = run(PROMPTS[4])
    lm.reset_prefix_cache()
    second = run([*reversed(PROMPTS[4])])
    for (ids, logprobs, rows), (ids2, logprobs2, rows2) in zip(first, second, strict=True):
        assert ids == ids2 and logprobs == logprobs2 and torch.equal(rows, rows2)


@pytest.mark.parametrize("device", DEVICES)
def test_hooks_act_on_embeddings_and_read_beside_them(device, lm_of, oracle) -> None:
    lm, model = lm_of("llama", device=device), oracle("llama")
    vector = torch.randn(72, generator=GENERATOR)

    def steered(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + vector

    handle = model.model.layers[1].register_forward_hook(steered)
    try:
        expected = [hidden(model, ids) for ids in PROMPTS]
    finally:
        handle.remove()
    lists = [[Steer("resid_post.1", vector)], None, [Steer("resid_post.1", vector)], None, None]
    monitor = Monitor("resid_post.0", vector, threshold=1e9, name="watch")
    outs = lm.encode(PROMPTS, pooling="mean", interventions=lists, capture=["resid_post.2"], monitors=[monitor])
    plain = [hidden(model, ids) for ids in PROMPTS]
    equal(data(outs), [unit((expected if own else plain)[i].mean(0)) for i, own in enumerate(lists)])
    for ids, out in zip(PROMPTS, outs, strict=True):
        assert out.activations["resid_post.2"].shape == (len(ids), 72)
        assert len(out.monitors["watch"].scores) == len(ids) and out.prompt_token_ids == ids
    assert outs[0].receipt.interventions and not outs[1].receipt.interventions


def test_steps_have_their_states_or_the_probabilities_of_tokens(lm_of, oracle) -> None:
    lm, model = lm_of("llama"), oracle("llama")
    ids = [5, 9, 3, 7, 9, 9, 2]
    at = [1, 4, 5]
    (out,) = lm.encode([ids], pooling="step", step_tag_id=9)
    equal([out.data], [unit(hidden(model, ids)[at])])
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    (out,) = lm.encode([ids], pooling="step", step_tag_id=9, returned_token_ids=[4, 11])
    equal([out.data], [logits[at][:, [4, 11]].softmax(-1)])
    (out,) = lm.encode([ids], pooling="step", step_tag_id=9, returned_token_ids=[4], normalize=False)
    equal([out.data], [logits[at][:, [4]]])


# -- sentence-transformers' folders ------------------------------------------------------------


def st_folder(folder: Path, modules: list[str], pooling: dict[str, Any], **files: dict[str, Any]) -> Path:
    """Write a folder's modules beside its model. Names of `modules` are the types."""
    entries = []
    for i, kind in enumerate(modules):
        path = "" if kind == "Transformer" else f"{i}_{kind}"
        entries.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"})
        if kind == "Pooling":
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(pooling))
        elif kind == "Dense":
            (folder / path).mkdir()
            torch.manual_seed(i)
            weight = {"linear.weight": torch.randn(24, 32) / 5, "linear.bias": torch.randn(24)}
            save_file(weight, folder / path / "model.safetensors")
            config = {"in_features": 32, "out_features": 24, "activation_function": "torch.nn.modules.activation.Tanh"}
            (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(entries))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def tiny_folder(tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    model = random_model(config)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path, model


def test_a_folder_of_sentence_transformers_says_how_it_pools(tiny_folder) -> None:
    folder, model = tiny_folder
    prompts = {"query": "W1 w2 ", "document": ""}
    st_folder(
        folder, ["Transformer", "Pooling", "Dense", "Normalize"],
        {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True, "include_prompt": False},
        config_sentence_transformers={"prompts": prompts, "default_prompt_name": None},
        sentence_bert_config={"max_seq_length": 12, "do_lower_case": True},
    )  # fmt: skip
    torch.manual_seed(2)
    weight, bias = torch.randn(24, 32) / 5, torch.randn(24)

    def expected(ids: list[int], skipped: int = 0, dimensions: int | None = None) -> torch.Tensor:
        return unit(torch.tanh(hidden(model, ids)[skipped:].mean(0) @ weight.T + bias)[:dimensions])

    lm = LM(folder, dtype="float32", kv_cache_tokens=256, max_model_len=48)
    equal(data(lm.encode(["W5 w6 w7", [8, 9]])), [expected([5, 6, 7]), expected([8, 9])])
    equal(data(lm.encode("w5 w6", prompt_name="query")), [expected([1, 2, 5, 6], 2)])
    equal(data(lm.encode("w5 w6", prompt="w3 W4 w9 ", dimensions=5)), [expected([3, 4, 9, 5, 6], 3, 5)])
    equal(data(lm.encode("w5 " * 20, truncate_prompt_tokens=-1)), [expected([5] * 12)])
    with pytest.raises(PromptError, match=r"20 tokens, .* 12 at most \(max_seq_length\)"):
        lm.encode("w5 " * 20)
    with pytest.raises(PromptError, match="'questions': the model's prompts are 'query', 'document'"):
        lm.encode("w5", prompt_name="questions")
    with pytest.raises(PromptError, match="dimensions=25: expected a whole number from 1 to 24"):
        lm.encode("w5", dimensions=25)
    with pytest.raises(PromptError, match="prompt and prompt_name are both"):
        lm.encode("w5", prompt="w1", prompt_name="query")
    lm.shutdown()


def test_a_capture_of_all_pooled_states_is_pooled_itself(lm_of) -> None:
    """Two captures of a site are refused, and a caller sees one."""
    lm = lm_of("llama")
    for how in [*({"pooling": mode} for mode in MODES), {"pooling": "step", "step_tag_id": 9}]:
        prompts = [[9], [4, 9, 3, 9, 9], list(range(30))]
        plain = lm.encode(prompts, **how)
        outs = lm.encode(prompts, **how, capture=["final_norm", "resid_post.0"])
        equal(data(outs), data(plain))
        assert [len(out.activations["final_norm"]) for out in outs] == [1, 5, 30]
    with pytest.raises(PromptError, match="captured twice"):
        lm.encode([1, 2], pooling="mean", capture=[Capture("final_norm", positions=[0])])


def test_captures_of_outputs_come_with_embeddings_and_calls_without_captures_refuse_them(lm_of) -> None:
    lm = lm_of("llama")
    for pooling in ("last", "mean"):
        plain, out = (lm.encode(PROMPTS[:2], pooling=pooling, output_hidden_states=more)[1] for more in (False, True))
        torch.testing.assert_close(plain.data, out.data, atol=1e-5, rtol=1e-4)
        assert len(out.activations["final_norm"]) == len(out.activations["resid_pre.1"]) == len(PROMPTS[1])
    (kv,) = lm.kv([PROMPTS[1]], output_hidden_states=True)
    assert len(kv.activations["final_norm"]) == len(PROMPTS[1])
    for options in ({"capture": ["resid_post.0"]}, {"output_hidden_states": True}, {"output_attentions": True}):
        with pytest.raises(TypeError, match=r"lm.score\(\) got .*: it returns numbers"):
            lm.score([PROMPTS[0]], [PROMPTS[1]], **options)
        for call in (lm.run_with_cache, lm.run_with_hooks):
            with pytest.raises(TypeError, match=r"got (capture|output_)"):
                call(PROMPTS[0], **options)


def test_special_tokens_are_not_lower_cased(tiny_folder) -> None:
    folder, model = tiny_folder
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"sep_token": "[SEP]", "mask_token": "[SEP]2"})
    ids = [5, *tokenizer.convert_tokens_to_ids(["[SEP]2", "[SEP]"]), 7]
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    st_folder(
        folder, ["Transformer", "Pooling"], {"pooling_mode": "mean"}, sentence_bert_config={"do_lower_case": True}
    )
    with LM(folder, dtype="float32", kv_cache_tokens=256) as lm:
        equal(data(lm.encode("W5 [SEP]2 [SEP] W7")), [hidden(model, ids).mean(0)])


def test_several_poolings_stand_side_by_side(tiny_folder) -> None:
    folder, model = tiny_folder
    st_folder(folder, ["Transformer", "Pooling"], {"pooling_mode": ["mean", "lasttoken", "weightedmean"]})
    lm = LM(folder, dtype="float32", kv_cache_tokens=256)
    states = [hidden(model, ids) for ids in PROMPTS]
    parts = [torch.cat([MODES[mode](h) for mode in ("mean", "last", "weightedmean")]) for h in states]
    equal(data(lm.encode(PROMPTS)), parts)
    assert lm.encode([1], dimensions=96)[0].data.shape == (96,)
    lm.shutdown()


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (["Transformer", "LSTM"], {}, "modules of type LSTM are not supported"),
        (["Transformer", "Pooling"], {"pooling_mode": "median"}, r"pooling \['median'\] is not supported"),
        (["Transformer", "Pooling", "Normalize", "Dense"], {}, "Dense after Normalize is not supported"),
    ],
)
def test_other_modules_are_refused_by_name_and_the_model_generates(modules, pooling, message, tiny_folder) -> None:
    folder = st_folder(tiny_folder[0], modules, pooling)
    lm = LM(folder, dtype="float32", kv_cache_tokens=256)
    with pytest.raises(PromptError, match=f"this model's pooling is not supported: .*{message}"):
        lm.encode("w1")
    assert len(lm.generate("w1", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    lm.shutdown()


def test_a_broken_file_is_a_reason_and_no_crash(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}", '[{"type": 3}]', '[{"path": "x"}]', "null", '[{"type": "a.Pooling", "path": "no"}]'):
        (tmp_path / "modules.json").write_text(text)
        found = pooler_of(tmp_path, encoder=False)
        assert found.modes == ("last",) and found.why_not.startswith(f"{tmp_path.name}/modules.json: "), text
        assert Pooler.of_json(found.to_json(), None).to_json() == found.to_json()


def test_embeddings_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    """A decoder without a head and without a prefix of its weights, as most checkpoints of embedding models are."""
    golden = json.loads((Path(__file__).parents[1] / "golden" / "embeddings.json").read_text())
    assert golden["made_by"] == "sentence-transformers 6.2.0"
    folder = folder_of_modules(tmp_path)
    for impl in ("native", "transformers"):
        lm = LM(folder, dtype="float32", impl=impl, kv_cache_tokens=256)
        equal(data(lm.encode(TEXTS)), list(torch.tensor(golden["plain"])))
        equal(data(lm.encode(TEXTS, prompt_name="query")), list(torch.tensor(golden["query"])))
        equal(data(lm.encode(TEXTS, dimensions=5)), list(torch.tensor(golden["short"])))
        assert lm.backend.facts.tasks == ("embed", "token_embed", "score")
        with pytest.raises(PromptError, match="generates nothing"):
            lm.generate(TEXTS)
        with pytest.raises(PromptError, match="no classification head"):
            lm.classify(TEXTS)
        lm.shutdown()


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_neox", "glm4_moe"])
def test_a_decoder_without_a_head_embeds(family: str, tmp_path: Path) -> None:
    """Its checkpoint names no prefix, and has no head."""
    model = random_model(CONFIGS[family]()).base_model
    model.save_pretrained(tmp_path)
    for impl in ("native", "transformers"):
        lm = LM(tmp_path, dtype="float32", impl=impl, kv_cache_tokens=256)
        states = [hidden(model, ids) for ids in PROMPTS]
        equal(data(lm.encode(PROMPTS, pooling="mean")), [unit(h.mean(0)) for h in states])
        lm.shutdown()


# -- wrong input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "how", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 97]], {}, "token id 97"),
        ([[1]], {"pooling": "median"}, r"pooling='median': expected one of 'last', 'mean'"),
        ([[1]], {"dimensions": 0}, "dimensions=0: expected a whole number from 1 to 72"),
        ([[1]], {"dimensions": 73}, "dimensions=73"),
        ([[1]], {"dimensions": 2.0}, r"dimensions=2\.0"),
        ([[1]], {"pooling": "step"}, "takes step_tag_id"),
        ([[1]], {"step_tag_id": 3}, "no other pooling does"),
        ([[1]], {"returned_token_ids": [3]}, "no other pooling does"),
        ([[1]], {"pooling": "step", "step_tag_id": 3}, "the prompt: there is no token 3 to pool"),
        ([[1]], {"pooling": "step", "step_tag_id": 1, "returned_token_ids": [97]}, "from 0 to 96"),
        ([[1]], {"pooling": "step", "step_tag_id": 1, "returned_token_ids": [3], "dimensions": 2}, "are not cut"),
        ([[1]], {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0: expected -1"),
        ([[1]], {"prompt_name": "query"}, "the model's prompts are none"),
        ([[1]], {"prompts": [2]}, None),
        ([[1]], {"max_tokens": 2}, "lm.encode"),
        ("", {}, "the prompt is empty"),
    ],
)
def test_wrong_arguments_are_refused_by_name(prompts, how, message, lm_of) -> None:
    lm = lm_of("llama")
    with pytest.raises((PromptError, TypeError), match=message):
        lm.encode(prompts, **how)
    assert len(lm.encode([[1, 2]])) == 1, "the engine lives"
    assert lm.encode([]) == []


def test_pooling_is_numpy_s_own_arithmetic() -> None:
    """`Pooling` knows nothing of the engine: a zero vector stays one, and rows of float32 stay contiguous."""
    how = Pooling(Pooler(), "final_norm", 4, 9, pooling="all", dimensions=2)
    found = how.pooled(torch.zeros(3, 4).numpy())
    assert found.shape == (3, 2) and not found.any() and found.flags.c_contiguous
