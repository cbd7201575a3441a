"""EAGLE-3: the head's numbers, the states that it reads, and that its drafts change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, VOCAB
from golden_eagle3 import DRAFT_VOCAB, HEADS, LENGTH, PATH, STEPS, d2t, inputs
from helpers_declared import lms, vector
from helpers_drafts import SMALL, WAYS, checked_steps, drafted_by, drawn, greedy, proposals, replayed
from helpers_eagle import checkpoint, drafts_of
from helpers_graphs import use_eager_graphs
from helpers_runner import random_ids
from test_random_drafts import traffic

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.core.unsupported import UnsupportedModelError

pytestmark = pytest.mark.local  # looks into an engine of this process
PROMPTS = [random_ids(7, seed=1), random_ids(40, seed=2), random_ids(1, seed=3)]


def eagle(folder: Path, k: int = 3) -> dict[str, Any]:
    return drafted_by(folder, k, "eagle3")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of `speculators`, and its weights."""
    folder = tmp_path_factory.mktemp("eagle3")
    return folder, checkpoint(folder)


@pytest.fixture(scope="module")
def plain(lm_of: Callable[..., LM]) -> LM:
    return lm_of("llama")


# -- the head ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_that_of_speculators(name, tmp_path, model_folder):
    """Logits of all positions and steps, float32, in passes of the head's runner over its KV pages."""
    checkpoint(tmp_path, name)
    golden = torch.tensor(json.loads(PATH.read_text())[name])
    states, tokens = inputs()
    with LM(model_folder("llama"), dtype="float32", device="cpu", speculative=eagle(tmp_path)) as lm:
        runner: Any = lm.runner.drafter.runner  # pyright: ignore[reportOptionalMemberAccess]
        rows, model = runner.req_to_token_pool, runner.head()
        ids = torch.arange(DRAFT_VOCAB) + d2t()
        for p in range(LENGTH - STEPS + 1):
            row, pages = rows.alloc(), runner.token_to_kv_pool_allocator.alloc_pages(2)
            slots = torch.from_numpy(runner.token_to_kv_pool_allocator.slots_of(pages, 0, LENGTH))
            rows.write(row, 0, slots)
            rows.apply_staged_writes()
            n, index = torch.tensor([p + 1], dtype=torch.int32), torch.tensor([row])
            model.states[: p + 1] = model.project(states[: p + 1])
            batch = runner.prepare_forward_batch_extend(
                torch.tensor(tokens[: p + 1]), index, n, n, torch.zeros_like(n), slots[: p + 1]
            )
            found = [runner.forward(batch).next_token_logits[0]]
            model.states[0] = model.states[p]
            for i in range(1, STEPS):
                batch = runner.prepare_forward_batch_decode(
                    torch.tensor([tokens[p + i]]), index, n + i, slots[p + i : p + i + 1]
                )
                found.append(runner.forward(batch).next_token_logits[0])
            for i, logits in enumerate(found):
                torch.testing.assert_close(logits[ids], golden[i, p], rtol=1e-5, atol=1e-5)
                assert torch.isinf(logits).sum() == VOCAB - DRAFT_VOCAB
            rows.free(row)
            runner.token_to_kv_pool_allocator.free_pages(pages)


# -- the states -------------------------------------------------------------------------------


def hidden_states(model: Any, tokens: list[int]) -> torch.Tensor:
    """[n, 3 * hidden]: the inputs of transformers' layers, by forward hooks."""
    found: list[torch.Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: found.append(args[0][0])) for layer in model.model.layers]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.cat(found, dim=-1)


@pytest.mark.parametrize("way", ["functions", "graphs"])
def test_the_states_are_the_inputs_of_the_layers_behind_ops(way, head, model_folder, oracle):
    """By forward hooks on transformers' model; with ops, what a capture sees. Replays, traces and chunks have the same."""
    width = CONFIGS["llama"]().hidden_size
    steer = Steer("resid_post.1", vector(width, 1), scale=3.0)
    with lms(way, model_folder) as load:
        lm = load("llama", speculative=eagle(head[0]), max_num_tokens=16)
        stage: Any = lm.runner.drafter.stage  # pyright: ignore[reportOptionalMemberAccess]
        kept: list[tuple[int, torch.Tensor]] = []
        assert lm.runner.get_mtp_target_hidden_states() is stage.aux.states, "V53"
        ran = stage.ran

        def seen(batch: Any, output: Any) -> None:
            rows = stage._rows
            for entry, first in zip(rows.entries, rows.query_start_loc.tolist(), strict=False):
                kept.append((entry.start, stage.aux.states[first : first + entry.num_tokens].clone()))
            ran(batch, output)

        stage.ran = seen
        (out,) = lm.generate([PROMPTS[1]], greedy(4, speculate=False))
        wanted = hidden_states(oracle("llama"), out.prompt_token_ids + out.token_ids)
        for start, rows in kept:
            torch.testing.assert_close(rows, wanted[start : start + len(rows)], rtol=1e-4, atol=5e-5)
        assert sum(len(rows) for _, rows in kept) == len(PROMPTS[1]) + 3

        kept.clear()
        capture = [Capture(f"resid_post.{layer}") for layer in range(2)]
        (out,) = lm.generate([PROMPTS[0]], greedy(4, speculate=False), interventions=[steer], capture=capture)
        for start, rows in kept:
            for layer in range(2):
                state = out.activations[f"resid_post.{layer}"][start : start + len(rows)]
                part = rows[:, (layer + 1) * width : (layer + 2) * width]
                torch.testing.assert_close(part, state, rtol=1e-4, atol=1e-5)

        kept.clear()
        lm.reset_prefix_cache()
        with lm.trace(PROMPTS[0]):
            inner = lm.model.layers[1].mlp.output.save()
            lm.logits.save()  # else the pass ends after this layer
        assert inner.shape[1] == len(PROMPTS[0])
        (start, rows) = kept[0]
        wanted = hidden_states(oracle("llama"), PROMPTS[0])
        torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=5e-5)


# -- drafts -----------------------------------------------------------------------------------


@WAYS
def test_a_head_proposes_what_plain_torch_says(graphs, options, head, plain, model_folder, oracle, monkeypatch):
    """Behind rejected drafts, chunks, preemptions and prefixes of the prefix cache, from the first state that it has."""
    folder, weights = head
    if graphs:
        use_eager_graphs(monkeypatch)
    with LM(model_folder("llama"), dtype="float32", device="cpu", speculative=eagle(folder), **options) as lm:
        drafter: Any = lm.runner.drafter
        replays = replayed(lm, monkeypatch) if graphs else []
        wanted = plain.generate(PROMPTS * 2, greedy(30))
        firsts: list[int] = []
        with checked_steps(lm), proposals(lm) as found:
            propose = drafter.propose

            def noting(requests: Any, k: int) -> Any:
                drafts = propose(requests, k)
                for request in requests:
                    sequence = drafter.sequences.get(request.request_id)
                    firsts.append(-1 if sequence is None else sequence.first)
                return drafts

            drafter.propose = noting
            outs = lm.generate(PROMPTS * 2, greedy(30))
        assert [out.token_ids for out in outs] == [out.token_ids for out in wanted]
        assert sum(bool(drafts) for _, drafts in found) > 5 and len(firsts) == len(found)
        assert len(replays) > 3 or not graphs
        for first, (tokens, drafts) in zip(firsts, found, strict=True):
            if drafts:
                states = hidden_states(oracle("llama"), tokens[:-1])[first - 1 :]
                assert drafts == drafts_of(weights, states, tokens[first:], len(drafts))
        assert options is not SMALL or (lm.engine.stats()["preempted"] and max(firsts) > 1)


def test_drafts_of_a_head_that_knows_the_text_are_accepted(plain, model_folder, tmp_path):
    """A text of one token, the only one of the head's vocabulary. SafeAILab's form, with the model's embedding."""
    weights, said = checkpoint(tmp_path, form="safeailab"), 7
    weights["d2t"] = said - torch.arange(DRAFT_VOCAB)
    saved = {key.replace("layers.0.", "midlayer."): value for key, value in weights.items()}
    torch.save(saved, tmp_path / "pytorch_model.bin")
    params = greedy(24, allowed_token_ids=[said])
    with LM(model_folder("llama"), dtype="float32", device="cpu", speculative=eagle(tmp_path)) as lm:
        before = lm.engine.stats()["steps"]
        found, wanted = lm.generate(PROMPTS, params), plain.generate(PROMPTS, params)
        assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
        counts = [out.outputs[0].drafts for out in found]
        assert all(c is not None and c.drafted == c.accepted >= 17 for c in counts)
        assert lm.engine.stats()["steps"] - before < 10


def test_a_head_is_updated_and_follows_the_models_update(plain, model_folder, tmp_path):
    """Its vocabulary is one token, which is then another one. A folder is refused by name."""
    checkpoint(tmp_path, form="safeailab")
    with LM(model_folder("llama"), dtype="float32", device="cpu", speculative=eagle(tmp_path)) as lm:
        for said in (7, 9):
            lm.update_weights({"d2t": said - torch.arange(DRAFT_VOCAB)}, draft=True)
            params = greedy(24, allowed_token_ids=[said])
            found, wanted = lm.generate(PROMPTS, params), plain.generate(PROMPTS, params)
            assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
            counts = [out.outputs[0].drafts for out in found]
            assert all(c is not None and c.drafted == c.accepted >= 17 for c in counts)
        for wrong, message in (({"nope": torch.ones(2)}, "1 unknown: nope"), (tmp_path, "takes named tensors")):
            with pytest.raises(ValueError, match=message):
                lm.update_weights(wrong, draft=True)
        own: Any = plain
        weights = {name: tensor * 1.01 for name, tensor in own.runner.get_model().state_dict().items()}
        with LM(model_folder("llama"), dtype="float32", device="cpu") as other:
            other.update_weights(weights)
            lm.update_weights(weights)
            wanted = other.generate(PROMPTS, greedy(24))
            assert [o.token_ids for o in lm.generate(PROMPTS, greedy(24))] == [o.token_ids for o in wanted]


@pytest.mark.parametrize(
    "server", [pytest.param({}, marks=pytest.mark.slow), {"async_scheduling": True}], ids=["in turn", "ahead"]
)
def test_random_traffic_with_a_head_gives_what_it_gives_without(server, head, model_folder):
    with lms("functions", model_folder) as load:
        small = {"page_size": 4, "kv_cache_tokens": 72, "max_num_tokens": 32, "max_running_requests": 6}
        lm = load("llama", speculative=eagle(head[0]), **small, **server)
        with proposals(lm):
            traffic(lm, load("llama", enable_prefix_caching=False), None, 5, 40)
        stats = lm.engine.stats()
        assert stats["preempted"] and stats["free_kv_tokens"] == lm.runner.max_total_num_tokens
        lm.generate([PROMPTS[0]], SamplingParams(max_tokens=1))  # its step says which requests have ended
        assert len(lm.runner.drafter.stage.kept) <= 1  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tables", "graphs"])
def test_random_traffic_with_a_head_as_on_cuda(way, head, model_folder):
    with lms(way, model_folder) as load:
        small = {"page_size": 4, "kv_cache_tokens": 72, "max_num_tokens": 32, "max_running_requests": 6}
        lm = load("llama", speculative=eagle(head[0]), async_scheduling=True, **small)
        with proposals(lm):
            traffic(lm, load("llama", enable_prefix_caching=False), None, 5, 40)


def test_sampled_texts_are_those_without_a_head(head, plain, model_folder):
    with LM(model_folder("llama"), dtype="float32", device="cpu", speculative=eagle(head[0])) as lm:
        for params in (drawn(n=3), drawn(logprobs=2)):
            wanted, found = plain.generate(PROMPTS, params), lm.generate(PROMPTS, params)
            assert [[o.token_ids for o in out.outputs] for out in found] == [
                [o.token_ids for o in out.outputs] for out in wanted
            ]


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"], "speculators_model_type": "eagle"}, UnsupportedModelError, "not an EAGLE-3"),
        ({"hidden_size": 81}, ValueError, "hidden size of 81, and this one has 72"),
        ({"vocab_size": 105}, ValueError, f"vocabulary of 105, and this one has {VOCAB}"),
        ({"num_hidden_layers": 2}, UnsupportedModelError, "a head of 2 llama layers: expected one"),
        ({"model_type": "gpt2"}, UnsupportedModelError, "a head of 1 gpt2 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, UnsupportedModelError, r"layers \[1, 2, 3\]: expected.*0 to 2"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused(change, error, message, tmp_path, model_folder):
    checkpoint(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    inner = {name: value for name, value in change.items() if name in config["transformer_layer_config"]}
    config["transformer_layer_config"] |= inner
    path.write_text(json.dumps(config | {name: value for name, value in change.items() if name not in inner}))
    with pytest.raises(error, match=message):
        LM(model_folder("llama"), dtype="float32", device="cpu", speculative=eagle(tmp_path))


def test_a_head_of_a_model_by_its_transformers_class_is_refused(head, model_folder):
    with pytest.raises(UnsupportedModelError, match="EAGLE-3 reads hidden states of native models"):
        LM(model_folder("llama"), dtype="float32", device="cpu", impl="transformers", speculative=eagle(head[0]))


def test_a_folder_without_a_head_is_refused(tmp_path, model_folder):
    with pytest.raises(FileNotFoundError, match=r"no config\.json: method='eagle3' takes the folder"):
        LM(model_folder("llama"), dtype="float32", device="cpu", speculative=eagle(tmp_path))
