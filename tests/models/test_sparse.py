"""Models with sparse attention, by their classes: an indexer selects the keys of each query. Equal to transformers.

`index_topk` is 8 in their tiny configs, so most queries of these prompts do not attend to all keys before them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_adapters import adapted, write_adapter
from helpers_classes import (
    GREEDY,
    TOLERANCE,
    check_chunks,
    check_padding,
    check_preempted,
    check_samples,
    check_unwritten,
    greedily,
    load,
    oracle_of,
    random_prompt,
)

from pymllm_interp import Capture, Patch, SamplingParams, Steer
from pymllm_interp.captures import Lens
from pymllm_interp.interventions import Knockout
from pymllm_interp.models.adapters.peft_config import AdapterError

SPARSE = "deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"
PILOTS = "deepseek_v32", "hy_v4"
"""Half-rotated keys; a layer that shares indices, sinks, and several residual streams."""
SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in SPARSE if name != "glm_moe_dsa"]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in SPARSE if name not in PILOTS]


@pytest.mark.parametrize("name", [*PILOTS, *OTHERS])
def test_chunks_of_any_size_are_transformers(name: str) -> None:
    check_chunks(name)


@pytest.mark.parametrize("name", ["glm_moe_dsa", *SLOWLY])
def test_preempted_requests_end_as_they_would_alone(name: str) -> None:
    check_preempted(name)


@pytest.mark.parametrize("name", [*PILOTS, *OTHERS])
def test_a_reused_prefix_has_the_keys_of_its_indexers(name: str) -> None:
    """A steered prefix serves no plain request, nor the other way round."""
    lm = load(name)
    width = lm.model_spec.hidden_size
    oracle, prompt = oracle_of(lm, name), random_prompt(30, 2)
    steer = Steer("resid_post.0", torch.ones(width) * 4)
    plain = greedily(oracle, prompt, 6)

    def edit(module: Any, args: Any, output: Any) -> Any:
        return (output[0] + 4, *output[1:]) if isinstance(output, tuple) else output + 4

    handle = oracle.get_submodule("model.layers.0").register_forward_hook(edit)
    steered = greedily(oracle, prompt, 6)
    handle.remove()
    assert steered != plain
    for asked, expected, cached in ((steer, steered, 0), (None, plain, 0), (None, plain, 28), (steer, steered, 28)):
        out = lm.submit(prompt, GREEDY, interventions=[] if asked is None else [asked]).result()
        assert out.token_ids == expected and out.num_cached_tokens in (0, cached)
    longer = [*prompt, *random_prompt(9, 3)]
    (out,) = lm.generate([longer], GREEDY)
    assert out.num_cached_tokens >= 28 and out.token_ids == greedily(oracle, longer, 6)
    lm.shutdown()


def test_the_keys_of_all_indexers_are_in_one_layer_of_the_pool() -> None:
    lm = load("hy_v4")
    pool, model = lm.runner.token_to_kv_pool, lm.runner.get_model()
    assert pool.num_layers == lm.model_spec.num_hidden_layers + 1 and model.num_index_layers == 1
    assert len(lm.runner.get_kv_cache_spec()) == pool.num_layers
    places = [module.part_module.place for module in model.modules() if hasattr(module, "part_module")]
    assert [place.first for place in places] == [0, 16] and {place.layer for place in places} == {3}
    lm.shutdown()


def test_slots_that_hold_nothing_do_not_matter() -> None:
    check_unwritten("deepseek_v32", (1, 6, 11, 26), (1, 2, 5), (4, 1, 3))  # beyond `index_topk`, and within


def test_samples_of_one_prompt_are_samples_of_it_alone() -> None:
    check_samples("hy_v4")


def test_rows_that_gather_their_keys_apart_are_as_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load("axk2")
    prompts = [random_prompt(n, n) for n in (9, 3, 20)]
    together = [out.token_ids for out in lm.generate(prompts, GREEDY)]
    monkeypatch.setattr("pymllm_interp.models.transformers.attention_interface.MAX_GATHERED", 1)
    assert [out.token_ids for out in lm.generate(prompts, GREEDY)] == together
    lm.shutdown()


@pytest.mark.parametrize("name", ["deepseek_v32", "hy_v4"])
def test_knockouts_and_patterns_are_of_the_selected_edges(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut edge is cut behind the indexer: its selection stays."""
    lm = load(name, max_num_tokens=64)
    oracle, prompt = oracle_of(lm, name), random_prompt(20, 4)
    attentions = oracle(input_ids=torch.tensor([prompt]), output_attentions=True, use_cache=False).attentions
    (out,) = lm.generate([prompt], GREEDY, capture=["pattern.1"])
    pattern = out.activations["pattern.1"]
    torch.testing.assert_close(pattern[:20, :, :20], attentions[1][0].transpose(0, 1), **TOLERANCE)
    assert ((pattern > 0).sum(-1) <= 8).all() and out.token_ids == greedily(oracle, prompt, 6)

    queries, keys = [15, 19], [0, 3, 12, 14, 15, 16, 18]
    file = type(oracle.get_submodule("model.layers.1.self_attn")).__module__
    eager = __import__(file, fromlist=["x"]).eager_attention_forward

    def cut(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx == 1 and query.shape[2] == len(prompt):
            mask = mask.clone()
            for position in queries:
                mask[..., position, keys] = torch.finfo(mask.dtype).min
        return eager(module, query, key, value, mask, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(f"{file}.eager_attention_forward", cut)
        expected = oracle(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
    plain = oracle(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
    found = lm.forward([prompt], interventions=[Knockout(layer=1, from_=queries, to=keys)])[0].logits[-1]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert not torch.allclose(found, plain, **TOLERANCE)
    lm.shutdown()


@pytest.mark.parametrize("name", ["deepseek_v32", "hy_v4"])
def test_gradients_of_a_prompt_are_those_of_transformers(name: str) -> None:
    lm = load(name, max_num_tokens=64)
    oracle, prompt = oracle_of(lm, name), random_prompt(13, 1)
    with lm.trace(prompt):
        output = lm.get("model.layers.0").output
        hidden = output[0] if isinstance(output, tuple) else output
        with lm.lm_head.output[0, -1].square().sum().backward():
            found = hidden.grad.save()
    states: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output).requires_grad_())

    handle = oracle.get_submodule("model.layers.0").register_forward_hook(keep)
    oracle.requires_grad_(False)
    oracle(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].square().sum().backward()
    handle.remove()
    torch.testing.assert_close(found, states[0].grad, **TOLERANCE)
    lm.shutdown()


def test_what_indexers_do_not_allow_is_refused_by_name(tmp_path: Path) -> None:
    lm = load("glm_moe_dsa")
    with pytest.raises(ValueError, match=r"self_attn\.indexer\.source.*selects keys"):
        lm.get("model.layers.0.self_attn.indexer").source  # noqa: B018
    oracle = oracle_of(lm, "glm_moe_dsa")
    with pytest.raises(AdapterError, match=r"inside model\.layers\.0\.self_attn\.indexer, which selects keys"):
        lm.adapters.load("a", write_adapter(tmp_path / "a", oracle, targets=["weights_proj"]))
    folder = write_adapter(tmp_path / "b", oracle, targets=["q_b_proj", "o_proj"])
    lm.adapters.load("b", folder)
    prompt = random_prompt(20, 4)
    plain, found = (lm.submit(prompt, GREEDY, **options).result().token_ids for options in ({}, {"lora": "b"}))
    assert plain == greedily(oracle, prompt, 6) and found == greedily(adapted(oracle, folder), prompt, 6) != plain
    lm.shutdown()


@pytest.mark.parametrize("name", PILOTS)
def test_rows_of_padding_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_padding(name, monkeypatch)


def test_drafts_of_a_decode_pass_select_keys_by_their_own_length() -> None:
    lm = load("deepseek_v32", speculative={"method": "ngram", "num_speculative_tokens": 3}, max_num_tokens=64)
    oracle, prompts = oracle_of(lm, "deepseek_v32"), [[5, 6, 7, 8] * 5, [3, 4] * 6, random_prompt(9, 1)]
    outs = lm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    assert [out.token_ids for out in outs] == [greedily(oracle, prompt, 12) for prompt in prompts]
    assert lm.engine.stats()["speculation"]["accepted"] > 0
    lm.shutdown()


def test_streams_are_one_site() -> None:
    """HY-V4's sites have all streams: effects of patches are found there, and a lens, which wants a final norm, is refused."""
    lm = load("hy_v4", max_num_tokens=64)
    oracle, clean, corrupted = oracle_of(lm, "hy_v4"), random_prompt(12, 1), random_prompt(12, 2)
    scores = lm.attribute(clean, corrupted, metric=(4, 11), sites="resid_post.*")
    assert lm.hidden_size == 128 and all(score.abs().max() > 0 for score in scores.values())
    # Behind the layer that attends to the keys which the first one selects, in a run of its own prompt.
    (out,) = lm.generate([clean], GREEDY, capture=["resid_post.1"])
    patch = Patch("resid_post.1", out.activations["resid_post.1"][:12], positions=range(12))
    found = lm.forward([corrupted], interventions=[patch])[0].logits[-1]
    torch.testing.assert_close(found, oracle(input_ids=torch.tensor([clean])).logits[0, -1], **TOLERANCE)
    with pytest.raises(ValueError, match=r"hy_v4 models have no site final_norm"):
        lm.generate([clean], GREEDY, capture=[Capture("resid_post.0", reduce=Lens())])
    lm.shutdown()
