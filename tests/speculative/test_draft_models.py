"""Drafts of a second model: what it proposes is what it says itself, and the text is the text without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, VOCAB, random_model
from helpers_declared import lms, vector
from helpers_drafts import NEW, SMALL, WAYS, checked_steps, drafted_by, drawn, greedy, proposals, replayed
from helpers_graphs import use_eager_graphs
from helpers_runner import random_ids
from test_random_drafts import Call, traffic
from transformers import AutoConfig, Qwen2VLConfig

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.unsupported import UnsupportedModelError
from pymllm_interp.runner.device_memory import kv_bytes_per_token
from pymllm_interp.runner.interp_model_runner import InterpModelRunner

pytestmark = pytest.mark.local  # looks into an engine of this process
PROMPTS = [random_ids(7, seed=1), random_ids(40, seed=2), random_ids(1, seed=3)]


def continued(model: Any, tokens: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers' model."""
    ids = torch.tensor([tokens])
    for _ in range(count):
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return ids[0, len(tokens) :].tolist()


@pytest.fixture(scope="module")
def plain(lm_of: Callable[..., LM]) -> LM:
    return lm_of("llama")


# -- drafts ---------------------------------------------------------------------------------


@WAYS
def test_all_drafts_of_the_model_itself_are_accepted(graphs, options, plain, model_folder, monkeypatch):
    """Greedy ones, and sampled ones, whose noise is the request's."""
    folder = model_folder("llama")
    if graphs:
        use_eager_graphs(monkeypatch)
    with LM(folder, dtype="float32", device="cpu", speculative=drafted_by(folder), **options) as lm:
        replays = replayed(lm, monkeypatch) if graphs else []
        for params in (greedy(), drawn()):
            for prompts in (PROMPTS, PROMPTS[:1]):
                replays.clear()
                wanted, before = plain.generate(prompts, params), lm.engine.stats()["steps"]
                with checked_steps(lm), proposals(lm):
                    found = lm.generate(prompts, params)
                assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
                counts = [out.outputs[0].drafts for out in found]
                assert all(c is not None and c.drafted == c.accepted > NEW / 2 for c in counts)
                assert len(replays) > 3 or not graphs
                assert options is SMALL or lm.engine.stats()["steps"] - before <= 2 + -(-NEW // 4)


@pytest.mark.few("family", "gemma3_text")
@pytest.mark.parametrize("family", ["llama-rope", "gpt2", "gemma3_text"])
def test_a_draft_proposes_what_it_says_itself(family, plain, model_folder, oracle):
    """Behind rejected drafts, evicted KV, chunks and preemptions, too: the KV of the draft is that of the request's tokens."""
    options = {**SMALL, "speculative": drafted_by(model_folder(family), 4)}
    with LM(model_folder("llama"), dtype="float32", device="cpu", **options) as lm:
        params = greedy(24)
        wanted = plain.generate(PROMPTS * 2, params)
        with checked_steps(lm), proposals(lm) as found:
            outs = lm.generate(PROMPTS * 2, params)
            assert [out.token_ids for out in outs] == [out.token_ids for out in wanted]
        assert lm.engine.stats()["preempted"] and sum(bool(drafts) for _, drafts in found) > 10
        for tokens, drafts in found:
            assert drafts == continued(oracle(family), tokens, len(drafts))


def test_the_draft_sees_no_hook(plain, model_folder, oracle):
    """It says what it says without: steering costs acceptance."""
    width, folder = CONFIGS["llama"]().hidden_size, model_folder("llama")
    hooks: Any = {
        "interventions": [Steer("resid_post.1", vector(width, 1), scale=30.0)],
        "capture": [Capture("resid_post.2")],
    }
    with LM(folder, dtype="float32", device="cpu", speculative=drafted_by(folder)) as lm:
        (wanted,) = plain.generate(PROMPTS[:1], greedy(), **hooks)
        with proposals(lm) as found:
            (out,) = lm.generate(PROMPTS[:1], greedy(), **hooks)
        assert out.token_ids == wanted.token_ids and found
        for tokens, drafts in found:
            assert drafts == continued(oracle("llama"), tokens, len(drafts))
        assert out.outputs[0].drafts.accepted < out.outputs[0].drafts.drafted
        torch.testing.assert_close(
            out.activations["resid_post.2"], wanted.activations["resid_post.2"], rtol=1e-4, atol=1e-5
        )


def test_drafts_end_where_the_draft_s_positions_end(plain, tmp_path, model_folder):
    config = CONFIGS["llama"]()
    config.max_position_embeddings = 20
    random_model(config).save_pretrained(tmp_path)
    with LM(model_folder("llama"), dtype="float32", device="cpu", speculative=drafted_by(tmp_path)) as lm:
        wanted = plain.generate(PROMPTS, greedy())
        found = lm.generate(PROMPTS, greedy())
        assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
        drafted = [out.outputs[0].drafts.drafted for out in found]
        assert drafted[1] == 0 and 5 < drafted[0] < NEW / 2 < drafted[2]


def test_a_draft_that_fails_is_asked_no_more_for_its_requests(plain, model_folder, monkeypatch):
    folder = model_folder("llama")
    with LM(folder, dtype="float32", device="cpu", speculative=drafted_by(folder)) as lm:
        drafter, wanted = lm.runner.drafter, plain.generate(PROMPTS, greedy())
        with monkeypatch.context() as patch:
            patch.setattr(drafter.runner, "sample_tokens_async", lambda: 1 / 0)
            found = lm.generate(PROMPTS, greedy())
        assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
        assert all("the drafter ModelDrafter: propose() raised ZeroDivisionError" in out.warnings[0] for out in found)
        assert not len(drafter.sequences)
        found = lm.generate(PROMPTS, greedy())
        assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
        assert all(out.outputs[0].drafts.accepted == out.outputs[0].drafts.drafted > 0 for out in found)


def is_plain(call: Call) -> bool:
    """Whether the model's distribution is all that its tokens come of, to its last token."""
    params, given = call.params, {"max_tokens", "ignore_eos", "seed", "n", "logprobs", "prompt_logprobs", "temperature"}
    changed = {f.name for f in fields(params) if getattr(params, f.name) != getattr(SamplingParams(), f.name)}
    return not (call.traced or call.aborted or changed - given or "interventions" in call.options)


@pytest.mark.parametrize(("draft", "server"), [("llama", {}), ("gpt2", {"async_scheduling": True})])
def test_random_traffic_with_a_draft_model_gives_what_it_gives_without(draft, server, model_folder):
    with lms("functions", model_folder) as load:
        small = {"page_size": 4, "kv_cache_tokens": 72, "max_num_tokens": 32, "max_running_requests": 6}
        lm = load("llama", speculative=drafted_by(model_folder(draft)), **small, **server)
        with proposals(lm):
            calls = traffic(lm, load("llama", enable_prefix_caching=False), None, 5, 40)
        stats = lm.engine.stats()
        assert stats["preempted"] and stats["prefix_cache"]["cached_tokens"]["plain"]
        counts = [one.drafts for call in calls if is_plain(call) for one in call.found.outputs if one.drafts]
        drafted, accepted = sum(c.drafted for c in counts), sum(c.accepted for c in counts)
        assert drafted and (accepted == drafted if draft == "llama" else accepted < 0.5 * drafted)
        assert stats["free_kv_tokens"] == lm.runner.max_total_num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tables", "graphs"])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_with_a_draft_model_as_on_cuda(way, seed, model_folder):
    with lms(way, model_folder) as load:
        small = {"page_size": 4, "kv_cache_tokens": 72, "max_num_tokens": 32, "max_running_requests": 6}
        lm = load("llama", speculative=drafted_by(model_folder("llama")), async_scheduling=True, **small)
        with proposals(lm):
            traffic(lm, load("llama", enable_prefix_caching=False), None, seed, 60)


# -- what is refused --------------------------------------------------------------------------


def refused(model_folder: Callable[[str], Path], speculative: Any, **options: Any) -> None:
    LM(model_folder("llama"), dtype="float32", device="cpu", speculative=speculative, **options).shutdown()


def test_a_draft_of_another_vocabulary_is_refused(model_folder, tmp_path):
    config = CONFIGS["llama"]()
    config.vocab_size = VOCAB + 8
    random_model(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"a vocabulary of {VOCAB + 8} tokens, and .* has {VOCAB}: expected one"):
        refused(model_folder, drafted_by(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AutoConfig.for_model("mamba", vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2), "recurrent states"),
        (Qwen2VLConfig(), "a multimodal model"),
    ],
    ids=["recurrent", "multimodal"],
)  # fmt: skip
def test_a_draft_of_another_kind_is_refused(config, message, model_folder, tmp_path):
    if message == "recurrent states":
        random_model(config).save_pretrained(tmp_path)
    else:
        config.save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedModelError, match=rf"speculative=.'model'.*{message}"):
        refused(model_folder, drafted_by(tmp_path))


def test_a_draft_that_is_not_there_is_refused(model_folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing.*no such folder"):
        refused(model_folder, drafted_by(tmp_path / "nothing"))


def test_more_drafts_than_a_step_has_rows_are_refused(model_folder):
    folder = model_folder("llama")
    with pytest.raises(ValueError, match=r"=4 takes 5 rows of a step, which has 4: .*max_num_tokens"):
        refused(model_folder, drafted_by(folder, 4), max_num_tokens=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "draft_model", "num_speculative_tokens": 2}, r"speculative\['model'\]=None: expected the draft model's"),
        ({"method": "draft_model", "num_speculative_tokens": 2, "model": 3}, r"speculative\['model'\]=3: expected"),
        ({"method": "ngram", "num_speculative_tokens": 2, "model": "x"}, "not a setting of method='ngram': it has prompt_lookup"),
        ({"method": "draft_model", "num_speculative_tokens": 2, "prompt_lookup_max": 2}, "not a setting of method='draft_model'"),
    ],
)  # fmt: skip
def test_settings_of_drafts_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(speculative=given)


# -- memory ----------------------------------------------------------------------------------


def test_the_kv_of_the_draft_counts_in_the_pool_s_size(model_folder):
    folder = model_folder("llama")
    sizes = []
    for speculative in (None, drafted_by(model_folder("gpt2"))):
        runner = InterpModelRunner(
            ServerConfig(device="cpu", kv_cache_tokens=64, speculative=speculative),
            ModelConfig(model=str(folder), dtype="float32"),
        )
        runner.initialize()
        sizes.append(kv_bytes_per_token(runner))
        if speculative is not None:
            assert runner.drafter is not None and runner.drafter.runner.max_total_num_tokens == 64
            draft = runner.drafter.runner
        runner.shutdown()
        assert runner.drafter is None and runner.draft is None
    config = CONFIGS["gpt2"]()
    assert sizes[1] - sizes[0] == 2 * 4 * config.n_layer * config.n_embd
    assert draft.model is None and draft.token_to_kv_pool is None
