"""Each native family equals transformers' own class, and its two forward passes equal each other bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import COMMON, CONFIGS, random_model
from helpers_runner import ByHand, make_runner, random_ids
from transformers import LlamaConfig, PreTrainedModel

from pymllm_interp.core.forward_batch import ForwardBatch, ForwardMode
from pymllm_interp.layers.gemm import Gemm
from pymllm_interp.runner import ModelRunner
from pymllm_interp.runner.partition import Execution

FAMILIES = sorted(CONFIGS)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """To 1e-5 of the tensor's own scale, which is 1 at least."""
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale, msg=lambda text: f"{what}: {text}")


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of a module's output, without caches and attention weights."""
    if isinstance(output, torch.Tensor):
        return [output]
    if hasattr(output, "logits"):
        return [output.logits]
    if hasattr(output, "last_hidden_state"):
        return [output.last_hidden_state]
    if isinstance(output[0], torch.Tensor) and output[1] is None:
        return [output[0]]
    return [x for x in output if isinstance(x, torch.Tensor) and x.dim() == 3]


class Outputs:
    """Every module's output in the forward passes within ``with``."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.found = model, {}

    def __enter__(self) -> dict[str, list[torch.Tensor]]:
        def watch(name: str) -> Any:
            return lambda module, args, output: self.found.__setitem__(name, tensors_of(output))

        self.handles = [module.register_forward_hook(watch(name)) for name, module in self.model.named_modules()]
        return self.found

    def __exit__(self, *exc: object) -> None:
        for handle in self.handles:
            handle.remove()


@pytest.fixture(scope="module")
def runner_of(model_folder):
    made = {}

    def load(family: str, dtype: str = "float32") -> ModelRunner:
        if (family, dtype) not in made:
            made[family, dtype] = make_runner(model_folder(family), dtype=dtype, kv_cache_tokens=2048, page_size=4,
                                              max_running_requests=64)  # fmt: skip
        return made[family, dtype]

    yield load
    for runner in made.values():
        runner.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_r03_every_modules_output_equals_transformers(family, runner_of, oracle):
    runner, hf = runner_of(family), oracle(family)
    # One token, a page, a page plus one, and more than any sliding window.
    prompts = {i: random_ids(n, seed=i) for i, n in enumerate((1, 4, 5, 23))}
    with Outputs(runner.get_model()) as ours:
        ByHand(runner).extend(prompts, Execution.MODULES, every_row=True)
    start = 0
    for ids in prompts.values():
        with Outputs(hf) as theirs, torch.no_grad():
            hf(input_ids=torch.tensor([ids]), use_cache=False)
        # Experts are one product, where no hook waits at their activation.
        theirs = {name: found for name, found in theirs.items() if not name.endswith(".mlp.experts.act_fn")}
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        for name, expected in theirs.items():
            if (family, name) == ("gemma3_text", "model.rotary_emb"):
                continue  # called for each type of layers, in the order of a set
            assert len(ours[name]) == len(expected), name
            for mine, his in zip(ours[name], expected, strict=True):
                if family == "gemma3_text" and his.dim() == 4:  # norms of heads; ours have tokens first, as Qwen3's
                    his = his.transpose(1, 2)
                rows = mine[0, start : start + len(ids)] if mine.shape[0] == 1 else mine[start : start + len(ids)]
                his = his if his.dim() == 2 else his[0]  # routers and experts have flat rows
                assert_near(rows, his, f"{family} {name or 'model'}, prompt of {len(ids)}")
        start += len(ids)


@pytest.mark.parametrize("execution", [Execution.PLAIN, Execution.MODULES])
@pytest.mark.parametrize("family", FAMILIES)
def test_r21_prefix_chunks_and_decode_equal_one_pass_of_transformers(family, execution, runner_of, oracle):
    ids = random_ids(19, seed=3)
    with torch.no_grad():
        expected = oracle(family)(input_ids=torch.tensor([ids])).logits[0]
    hand, done = ByHand(runner_of(family)), 0
    for count in (1, 6, 5):  # then one by one
        logits = hand.extend({0: ids[done : done + count]}, execution, every_row=True).next_token_logits
        assert_near(logits, expected[done : done + count], f"chunk at {done}")
        done += count
    for position in range(done, len(ids)):
        assert_near(hand.decode({0: ids[position]}, execution).next_token_logits[0], expected[position], f"{position}")


def both_passes(runner: ModelRunner, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    batch.return_hidden_states = True
    results = []
    for execution in (Execution.PLAIN, Execution.MODULES):
        out = runner.forward(batch, execution)
        results.append(torch.cat([out.next_token_logits.flatten(), out.hidden_states.flatten()]))
    return results[0], results[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_pass_equals_the_module_by_module_pass_bit_for_bit(family, dtype, runner_of):
    runner = runner_of(family, dtype)
    hand = ByHand(runner)
    steps = [
        (ForwardMode.EXTEND, {0: random_ids(7), 1: random_ids(1, seed=1), 2: random_ids(16, seed=2)}),
        (ForwardMode.DECODE, {0: [5], 1: [6], 2: [7]}),
        (ForwardMode.MIXED, {0: [8], 2: [9], 1: random_ids(6, seed=4), 3: random_ids(17, seed=5)}),
        (ForwardMode.DECODE, {3: [1]}),
    ]
    for mode, tokens in steps:
        fused, modules = both_passes(runner, hand.batch(tokens, mode))
        assert fused.isfinite().all()
        assert torch.equal(fused, modules), f"{family} {dtype} {mode.name}: {(fused - modules).abs().max()}"


@pytest.mark.parametrize("family", FAMILIES)
def test_f10_a_mixed_pass_equals_separate_passes(family, runner_of):
    runner = runner_of(family)
    prompts = {0: random_ids(5), 1: random_ids(9, seed=1)}
    mixed, apart = ByHand(runner), ByHand(runner)
    for hand in (mixed, apart):
        hand.extend(prompts)
    batch = mixed.batch({0: [3], 1: [4], 2: random_ids(8, seed=2)}, ForwardMode.MIXED)
    together = runner.forward(batch).next_token_logits
    alone = [
        apart.decode({0: 3}).next_token_logits,
        apart.decode({1: 4}).next_token_logits,
        apart.extend({2: random_ids(8, seed=2)}).next_token_logits,
    ]
    assert_near(together, torch.cat(alone))


def test_the_fused_pass_calls_no_module(runner_of):
    runner = runner_of("qwen3")
    hand = ByHand(runner)
    with Outputs(runner.get_model()) as called:
        hand.extend({0: [1, 2, 3]})
        hand.decode({0: 4})
    assert not called


@pytest.mark.parametrize("family", FAMILIES)
def test_r04_hidden_states_are_the_normed_last_ones_and_only_when_asked_for(family, runner_of, oracle):
    runner, ids = runner_of(family), random_ids(6)
    batch = ByHand(runner).batch({0: ids})
    assert runner.forward(batch).hidden_states is None
    with torch.no_grad():
        expected = oracle(family)(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    for execution in (Execution.PLAIN, Execution.MODULES):
        batch.return_hidden_states = True
        out = runner.forward(batch, execution)
        assert out.hidden_states.shape == (6, runner.hidden_size)
        assert_near(out.hidden_states, expected)


def test_r27_sliding_windows_reach_the_layers_that_have_them(runner_of):
    windows = {f: [layer.sliding_window for layer in runner_of(f).model.attention_layers()] for f in FAMILIES}
    assert windows["mistral"] == [5, 5] and windows["qwen2"] == [None, 4, 4]
    assert windows["llama"] == [None] * 3 and windows["qwen3"] == [None] * 2
    sizes = {f: runner_of(f).sliding_window_size for f in FAMILIES}
    assert sizes == {**dict.fromkeys(FAMILIES), "mistral": 5}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_embeddings_are_one_tensor_and_an_edit_reaches_the_head(dtype, model_folder):
    runner = make_runner(model_folder("llama"), dtype=dtype)
    model: Any = runner.get_model()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = ByHand(runner).extend({0: [1, 2]}).next_token_logits
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = 0  # a token that the prompt does not have
    after = ByHand(runner).extend({0: [1, 2]}).next_token_logits
    kept = torch.arange(97) != 50
    assert after[0, 50] == 0 and before[0, 50] != 0
    assert torch.equal(before[:, kept], after[:, kept])


def test_untied_heads_have_weights_of_their_own(runner_of):
    model: Any = runner_of("qwen3").get_model()
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert isinstance(model.lm_head.gemm, Gemm)


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 24},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 24,
    },
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": 24,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    },
}  # fmt: skip


def rope_model(scaling: str) -> PreTrainedModel:
    limit = 24 if scaling == "dynamic" else 96  # dynamic's own limit is what it stretches
    config = LlamaConfig(**{
        **COMMON, "max_position_embeddings": limit, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
        "rope_parameters": {"rope_type": scaling, "rope_theta": 10000.0, **SCALINGS[scaling]},
    })  # fmt: skip
    return random_model(config)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scalings_equal_transformers_below_at_and_above_the_original_length(scaling, tmp_path):
    hf = rope_model(scaling)
    hf.save_pretrained(tmp_path)
    runner = make_runner(tmp_path)
    # Of different lengths in one batch, so that one's length must not reach another's rows.
    prompts = {i: random_ids(n, seed=i) for i, n in enumerate((3, 24, 25, 61))}
    for execution in (Execution.PLAIN, Execution.MODULES):
        logits = ByHand(runner).extend(prompts, execution, every_row=True).next_token_logits
        parts = logits.split([len(ids) for ids in prompts.values()])
        for ids, mine in zip(prompts.values(), parts, strict=True):
            fresh = copy.deepcopy(hf)  # its rotary embedding remembers the longest sequence that it saw
            with torch.no_grad():
                assert_near(mine, fresh(input_ids=torch.tensor([ids])).logits[0], f"{scaling} {len(ids)}")
    runner.shutdown()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scalings_equal_transformers_while_a_generation_grows_past_the_original_length(scaling, tmp_path):
    hf = rope_model(scaling)
    hf.save_pretrained(tmp_path)
    runner = make_runner(tmp_path)
    ids = random_ids(30, seed=5)
    hand, cache = ByHand(runner), None
    for start, stop in [(0, 20), *((i, i + 1) for i in range(20, 30))]:
        with torch.no_grad():
            out = hf(input_ids=torch.tensor([ids[start:stop]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        mine = hand.extend({0: ids[:20]}) if start == 0 else hand.decode({0: ids[start]})
        assert_near(mine.next_token_logits[0], out.logits[0, -1], f"{scaling} at {stop}")
    runner.shutdown()


def test_rope_scalings_differ_from_each_other(tmp_path):
    """The tests above compare different things: no two scalings give the same logits."""
    seen = []
    for scaling in SCALINGS:
        with torch.no_grad():
            seen.append(rope_model(scaling)(input_ids=torch.tensor([random_ids(61)])).logits)
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(seen) for b in seen[:i])
