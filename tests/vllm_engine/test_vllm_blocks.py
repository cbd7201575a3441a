"""Blocks between the modules of vLLM's passes, on rank 0: values, edits, loops and errors are our own engine's."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity_scripts as scripts
import pytest
import torch
from fuzz.traces import Traced
from helpers_adapters import write_adapter
from helpers_vllm import (
    LORA,
    NGRAM,
    V2_DRAFTS,
    WIDTH,
    assert_close,
    assert_close_tensor,
    assert_ends_with_a_rank,
    both_engines,
    engine_of,
    needs_runner,
    needs_vllm,
    own_lm,
    prompt,
    ranks_of,
    save_model,
    shared_files,
    since,
    two_ranks,
    vector,
    vllm_lm,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, Capture, Gate, SamplingParams, Scale, Steer
from pymllm_interp.core.events import EngineClosedError
from pymllm_interp.hooks.traces.blocks.errors import EditError, TraceTimeoutError
from pymllm_interp.hooks.traces.nnsight_compat import OutOfOrderError
from pymllm_interp.interventions import Knockout, Monitor
from pymllm_interp.vllm_engine.payloads import HookedOnWire
from pymllm_interp.vllm_engine.refusals import VllmRefusalError
from pymllm_interp.vllm_engine.settings import TAPS, WITH_TABLES

pytestmark = needs_vllm
DIED = r"rank 1 of 2 \(process \d+\) (was ended by SIGKILL|has ended)"
STOPPED = r"the process of engine 0 of 1, above its ranks, \(process \d+\) is stopped \(SIGSTOP\)"
SHORT = 4.0
"""Seconds after which a block is ended, in one case."""
INNER = ("q", "z", "mlp_act")
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "llama, chunks of 40, adapters": ("llama", {"max_num_tokens": 40, "trace_step_timeout": SHORT, **LORA}, {}),
    "qwen3, two ranks, drafts": ("qwen3", {"max_num_tokens": 64, "tensor_parallel_size": 2, "inner_sites": INNER, **NGRAM}, {}),
    "qwen3, two ranks, drafts, adapters": ("qwen3", {"max_num_tokens": 64, "tensor_parallel_size": 2, **NGRAM, **LORA}, {}),
    "mixtral, two ranks": ("mixtral", {"max_num_tokens": 64, "tensor_parallel_size": 2}, {}),
    "gemma2, compiled": ("gemma2", {"disable_cuda_graph": False, "max_num_tokens": 64}, {}),
    "llama, device tables, in the norms": (
        "llama", {"max_num_tokens": 64, "inner_sites": INNER}, {WITH_TABLES: "1", "TRITON_INTERPRET": "1", TAPS: "norm"}
    ),
    "qwen3, V2 runner, two ranks, drafts": (
        "qwen3", {"max_num_tokens": 64, "tensor_parallel_size": 2, **NGRAM}, {"TRITON_INTERPRET": "1"}
    ),
    "gemma3": ("gemma3", {"max_num_tokens": 64}, {}),
    "gpt_oss": ("gpt_oss", {"max_num_tokens": 64}, {}),
    "gpt_oss, two ranks": ("gpt_oss", {"max_num_tokens": 64, "tensor_parallel_size": 2}, {}),
    "llama, V2 runner, adapters": ("llama", {"max_num_tokens": 40, **LORA}, {"TRITON_INTERPRET": "1"}),
}  # fmt: skip
PROMPTS = [prompt(9, 1), prompt(33, 2), prompt(1, 3), prompt(17, 4)]


NIGHTLY = ("gemma3", "mixtral, two ranks", "llama, device tables, in the norms", "qwen3, two ranks, drafts, adapters")
MARKS = {
    **dict.fromkeys(NIGHTLY, pytest.mark.slow), "qwen3, V2 runner, two ranks, drafts": V2_DRAFTS,
    **dict.fromkeys(("gpt_oss", "gpt_oss, two ranks"), (pytest.mark.slow, since("0.32", "its experts for CPUs have no float32"))),
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=MARKS.get(name, ())) for name in CASES],
)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LM, LM]]:
    """vLLM, whose blocks never run after their requests, and our own engine over the same weights."""
    needs_runner("V2" in request.param)
    family, options, environment = CASES[request.param]
    with both_engines(family, tmp_path_factory, environment, lower_traces="off", **options) as found:
        yield found


def same(found: Any, wanted: Any, what: str = "") -> None:
    """Equal nests of tensors, within the tolerance."""
    if isinstance(wanted, torch.Tensor):
        assert_close_tensor(found, wanted, what)
        if not wanted.is_floating_point():
            assert torch.equal(found, wanted), what
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name in wanted:
            same(found[name], wanted[name], f"{what}.{name}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), what
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same(one, other, f"{what}[{i}]")
    else:
        assert found == (pytest.approx(wanted, rel=1e-4) if isinstance(wanted, float) else wanted), what


def runner_of(lm: LM) -> str:
    backend: Any = lm.backend
    return backend.core.ranks[0]["runner"]


def read(lm: LM, ids: list[int]) -> Any:
    """Values at all kinds of places, in the order of the pass."""
    layer = lm.model.layers[1]
    found: dict[str, Any] = {}
    with lm.trace(ids):
        found = dict().save()
        found["embed"] = lm.model.embed_tokens.output
        found["rotary"] = lm.model.rotary_emb.output
        found["in"] = layer.input
        found["norm"] = layer.input_layernorm.output
        found["q"] = layer.self_attn.q_proj.output
        found["k"] = layer.self_attn.k_proj.output
        found["v"] = layer.self_attn.v_proj.output
        found["z"] = layer.self_attn.o_proj.input
        found["attention"] = layer.self_attn.output[0]
        found["mlp in"] = layer.mlp.input
        found["mlp"] = layer.mlp.output
        found["out"] = layer.output
        found["lens"] = lm.lm_head(lm.model.norm(layer.output))
        found["again"] = layer.mlp(layer.output)
        found["last"] = lm.model.layers[-1].output
        found["final"] = lm.model.norm.output
        found["head"] = lm.lm_head.output
        found["logits"] = lm.output.logits
        found["step"] = lm.logits
    return found


def edit(lm: LM, ids: list[int]) -> Any:
    """Edits by assignment, in place, of inputs, of parts of products; a skip; and what follows from them."""
    layers, added = lm.model.layers, vector(3)
    with lm.trace(ids):
        layers[0].output[:, -1] += added
        layers[1].self_attn.q_proj.output *= 0.5
        layers[1].self_attn.o_proj.input[..., :32] = 0
        if isinstance(layers[1].mlp.output, tuple):  # of gpt-oss: states, and scores
            states, scores = layers[1].mlp.output
            layers[1].mlp.output = states * 2, scores
            layers[2].mlp.skip((layers[2].mlp.input * 0.1, scores))
        else:
            layers[1].mlp.output = layers[1].mlp.output * 2
            layers[2].mlp.skip(layers[2].mlp.input * 0.1)
        layers[3].input = layers[3].input + added
        hidden = layers[3].output.save()
        if hidden.sum() > 1e9:  # its value decides what runs
            hidden[:] = 0
        logits = lm.output.logits.save()
    return hidden, logits


def generation(lm: LM, ids: list[int]) -> Any:
    """Loops over steps: values of each, edits of some, a forced token, and the result."""
    layers, added = lm.model.layers, vector(4)
    with lm.generate(ids, max_new_tokens=6, temperature=0, ignore_eos=True) as tracer:
        states, tokens = list().save(), list().save()
        for step in tracer.iter[:]:
            states.append(layers[1].self_attn.v_proj.output)
            if step in (1, 3):
                layers[2].output[:] += added
            if step == 4:
                lm.logits[:] = lm.logits.flip(-1)
            if step == 2:
                lm.samples = torch.full_like(lm.samples, 5)
            else:
                tokens.append(lm.samples)
        result = tracer.result.save()
    return states, tokens, result


def few_steps(lm: LM, ids: list[int]) -> Any:
    """A block that waits for one step of six: the others run as without it."""
    with lm.generate(ids, max_new_tokens=6, temperature=0, ignore_eos=True) as tracer:
        for _ in tracer.iter[3:4]:
            state = lm.model.layers[2].output.save()
    return state


BLOCKS = [read, edit, generation, few_steps]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_a_block_sees_and_changes_what_it_does_in_our_engine(block: Any, engines: tuple[LM, LM]) -> None:
    lm, oracle = engines
    for ids in PROMPTS[:3]:
        same(block(lm, ids), block(oracle, ids), block.__name__)


SCRIPTS = [
    scripts.plain, scripts.read_root, scripts.edit_root, scripts.assign_root, scripts.fill_root, scripts.several_edits,
    scripts.saved_then_edited, scripts.generate_all_steps, scripts.generate_all, scripts.generate_without_iter,
    scripts.generate_forced, scripts.stop_early, scripts.stop_generation, scripts.step_logits, scripts.identity_edits,
    scripts.logit_lens, scripts.logit_lens_while_generating, scripts.call_of_projection, scripts.skip_layer, scripts.skip_mlp,
    scripts.skip_attention, scripts.no_skip, scripts.skip_at_every_step, scripts.edited_copy, scripts.edited_generation,
    scripts.branches, scripts.handlers, scripts.functions, scripts.reads_in_a_function, scripts.saved_values,
    scripts.negative_and_sliced_layers, scripts.heads_of_z, scripts.heads_of_q, scripts.flat_heads_of_q, scripts.reshaped_k,
    scripts.sequential_loops, scripts.break_and_else, scripts.source_of_mlp, scripts.cache_some, scripts.call_with_hook,
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_nnsights_scripts_give_what_they_do_in_our_engine(script: Any, engines: tuple[LM, LM]) -> None:
    lm, oracle = engines
    if lm.hf_config.model_type not in ("llama", "qwen3"):
        pytest.skip("the scripts name Llama's modules")
    same(script(lm, PROMPTS[3]), script(oracle, PROMPTS[3]), script.__name__)


@pytest.mark.parametrize("seed", range(6))
def test_random_blocks_are_our_engines(seed: int, engines: tuple[LM, LM]) -> None:
    """The grammar of tests/fuzz: reads and edits at random places of each step."""
    lm, oracle = engines
    job = Traced.random(random.Random(seed), lm.model_spec)
    job.fault, job.ops, job.captures = "", [], []
    job.prompt = [token % 97 for token in job.prompt]
    same(played(job, lm), played(job, oracle), str(job))


def played(job: Traced, lm: LM) -> list[torch.Tensor]:
    return (job.generation if job.new_tokens else job.forward)(lm, {})["seen"]


def test_only_the_steps_that_a_block_waits_for_run_by_modules(engines: tuple[LM, LM]) -> None:
    lm, _ = engines
    with lm.generate(PROMPTS[0], max_new_tokens=6, temperature=0, ignore_eos=True) as tracer:
        for _ in tracer.iter[3:4]:
            lm.model.layers[2].output.save()
    steps = tracer.receipt.steps
    assert steps.pop(f"vllm {runner_of(lm)} modules") == 1 and sum(steps.values()) == 5
    with lm.generate(PROMPTS[0], max_new_tokens=3, temperature=0, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            lm.logits[:] *= 0.5
    assert f"vllm {runner_of(lm)} modules" not in tracer.receipt.steps and tracer.receipt.edits == 3


def test_many_requests_at_once_are_each_their_own(engines: tuple[LM, LM]) -> None:
    """Blocks, declared requests and plain ones of many threads in the same steps; prompts that wait for room."""
    lm, oracle = engines
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    jobs = [(block, ids) for block in BLOCKS for ids in PROMPTS]
    wanted = [block(oracle, ids) for block, ids in jobs]
    options: dict[str, Any] = {
        "interventions": [[Steer("resid_post.1", vector(5), 2.0)], None, [Steer("mlp_out.2", vector(6))], None],
        "capture": [["resid_post.2", "logits"], None, [Capture("resid_mid.1", reduce="mean")], ["attn_out.3"]],
    }
    with ThreadPoolExecutor(10) as pool:
        declared = [pool.submit(lm.generate, PROMPTS, params, **options) for _ in range(3)]
        plain = [pool.submit(lm.generate, PROMPTS, params) for _ in range(2)]
        found = [pool.submit(block, lm, ids) for block, ids in jobs]
        for one, other, (block, _) in zip(found, wanted, jobs, strict=True):
            same(one.result(300), other, block.__name__)
    expected = oracle.generate(PROMPTS, params, **options)
    for handle in declared:
        for one, other in zip(handle.result(300), expected, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            for site in other.outputs[0].activations or ():
                assert_close_tensor(one.outputs[0].activations[site], other.outputs[0].activations[site], site)
            assert one.receipt is None or one.receipt.interventions == other.receipt.interventions
    tokens = [out.outputs[0].token_ids for out in oracle.generate(PROMPTS, params)]
    for handle in plain:
        assert [out.outputs[0].token_ids for out in handle.result(300)] == tokens


def adapted(lm: LM, ids: list[int], lora: str | None) -> Any:
    """Parts of adapted products, calls of modules on rows of the block's own, edits, and what the generation becomes."""
    layers, added = lm.model.layers, vector(7)
    own = layers[1]
    with lm.generate(ids, max_new_tokens=5, temperature=0, ignore_eos=True, lora=lora) as tracer:
        found = list().save()
        for step in tracer.iter[:]:
            attention, mlp = own.self_attn, own.mlp
            found.append([attention.q_proj.output, attention.k_proj.output, attention.v_proj.output])
            found.append([attention.o_proj.input, attention.o_proj.output])
            found.append([mlp.gate_proj.output, mlp.up_proj.output, mlp.down_proj.output])
            found.append(own.mlp(own.output))
            if step == 1:
                layers[2].output[:] += added
            found.append(lm.lm_head(lm.model.norm(layers[3].output))[:, -1])
            found.append(lm.logits)
        result = tracer.result.save()
    return found, result


def test_adapters_beside_blocks_are_our_engines(engines: tuple[LM, LM], tmp_path: Path) -> None:
    """As many adapters as there are slots, and requests without, in the same steps; declared, with cut edges, and plain."""
    lm, oracle = engines
    backend: Any = lm.backend
    if backend.core.config.lora_config is None:
        pytest.skip("this engine has no adapters")
    base = AutoModelForCausalLM.from_pretrained(oracle.backend.facts.folder)
    for i, name in enumerate(("one", "two")):
        folder = write_adapter(tmp_path / name, base, seed=i, rank=8)
        lm.adapters.load(name, folder)
        oracle.adapters.load(name, folder)
    named: list[str | None] = ["one", None, "two", "one"]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"interventions": CUT, "capture": READ, "lora": named}
    jobs = [(ids, lora) for ids, lora in zip(PROMPTS[:3] * 2, [*named[:3], "two", "one", None], strict=True)]
    wanted = [adapted(oracle, *job) for job in jobs]
    assert not torch.allclose(wanted[0][0][1][1], wanted[3][0][1][1])  # adapters are not alike
    with ThreadPoolExecutor(10) as pool:
        declared = [pool.submit(lm.generate, PROMPTS, params, **options) for _ in range(2)]
        plain = pool.submit(lm.generate, PROMPTS, params, lora=named)
        found = [pool.submit(adapted, lm, *job) for job in jobs]
        for one, other, job in zip(found, wanted, jobs, strict=True):
            same(one.result(300), other, str(job[1]))
    for handle in declared:
        for one, other in zip(handle.result(300), oracle.generate(PROMPTS, params, **options), strict=True):
            assert_close(one, other)
    for one, other in zip(plain.result(300), oracle.generate(PROMPTS, params, lora=named), strict=True):
        assert_close(one, other)
    for name in ("one", "two"):
        lm.adapters.unload(name)
        oracle.adapters.unload(name)


def test_a_request_with_a_block_has_no_drafts_and_others_have(engines: tuple[LM, LM]) -> None:
    """A block meets each position once, with steps of its own; drafts of others are accepted in the same steps."""
    lm, oracle = engines
    if not lm.backend.facts.speculates:
        pytest.skip("this engine has no drafts")
    repeated = PROMPTS[0][:3] * 6
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {
        "interventions": [Steer("resid_post.1", vector(5))],
        "capture": ["resid_post.2", "logits"],
    }

    def long(model: LM) -> Any:
        with model.generate(repeated, max_new_tokens=16, temperature=0, ignore_eos=True) as tracer:
            states = list().save()
            for _ in tracer.iter[:]:
                states.append(model.model.layers[2].mlp.output)
            result = tracer.result.save()
        return tracer, (states, result)

    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(lm.generate, [repeated], params, **options) for _ in range(2)]
        tracer, found = long(lm)
        same(found, long(oracle)[1])
    assert sum(tracer.receipt.steps.values()) == 16
    (wanted,) = oracle.generate([repeated], params, **options)
    for handle in beside:
        (one,) = handle.result(300)
        assert_close(one, wanted)
        assert sum(one.receipt.steps.values()) < 40, "no draft was accepted"
    with pytest.raises(ValueError, match="cannot be taken back from cut edges"):
        lm.generate(PROMPTS[3], replace(params, speculate=True), interventions=CUT[3])


def save_eagle(folder: Path, target: Path) -> Path:
    """A drafter of EAGLE (Li et al., 2024) with random weights: a layer over embeddings and the target's states."""
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(target / "model.safetensors").items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | {"fc.weight": vector(31, WIDTH, 2 * WIDTH) / WIDTH**0.5}, folder / "model.safetensors")
    return folder


def save_eagle3(folder: Path, target: Path) -> Path:
    """A drafter of EAGLE-3 (Li et al., 2025) with random weights: a layer over the target's states inside, and an own head."""
    config = json.loads((target / "config.json").read_text())
    read = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}  # V1 and V2 look for it at different places
    given = {"eagle_config": read, **read, "num_hidden_layers": 1}
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    inner, words = config["intermediate_size"], config["vocab_size"] // 2  # each second token
    shapes = {
        "midlayer.self_attn.q_proj": (heads * dim, 2 * WIDTH), "midlayer.self_attn.k_proj": (kv * dim, 2 * WIDTH),
        "midlayer.self_attn.v_proj": (kv * dim, 2 * WIDTH), "midlayer.self_attn.o_proj": (WIDTH, heads * dim),
        "midlayer.mlp.gate_proj": (inner, WIDTH), "midlayer.mlp.up_proj": (inner, WIDTH), "midlayer.mlp.down_proj": (WIDTH, inner),
        "fc": (WIDTH, 3 * WIDTH), "lm_head": (words, WIDTH),
    }  # fmt: skip
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors = {f"{name}.weight": vector(i, *shape) / shape[1] ** 0.5 for i, (name, shape) in enumerate(shapes.items())}
    tensors |= {f"{name}.weight": torch.ones(WIDTH) for name in norms}
    folder.mkdir()
    config |= given | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": words}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | {"d2t": torch.arange(words)}, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "runner"),
    [
        ("draft_model", "V1"), pytest.param("draft_model", "V2", marks=V2_DRAFTS), ("eagle", "V1"), ("eagle", "V2"),
        ("eagle3", "V1"), ("eagle3", "V2"), ("eagle3", "V1, two ranks"),
    ],
)  # fmt: skip
def test_blocks_beside_drafts_of_a_model_are_our_engines(
    method: str, runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model itself, whose drafts are accepted, and of a random EAGLE or EAGLE-3, which read states of the passes."""
    needs_runner(runner == "V2")
    ranks = {"tensor_parallel_size": 2} if "two ranks" in runner else {}
    two_ranks(monkeypatch, ranks)
    folder = save_model("llama", tmp_path / "llama")
    save = {"eagle": save_eagle, "eagle3": save_eagle3}.get(method)
    drafter = folder if save is None else save(tmp_path / method, folder)
    config = {"method": method, "model": str(drafter), "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"interventions": CUT, "capture": READ}
    with (
        vllm_lm(folder, lower_traces="off", max_num_tokens=64, speculative_config=config, **ranks) as lm,
        own_lm(folder) as oracle,
    ):
        jobs = [(block, ids) for block in BLOCKS for ids in PROMPTS[:3]]
        wanted = [block(oracle, ids) for block, ids in jobs]
        for _ in range(2):
            with ThreadPoolExecutor(10) as pool:
                plain = pool.submit(lm.generate, PROMPTS, params, capture=["resid_post.1"])
                cut = pool.submit(lm.generate, PROMPTS, params, **options)
                found = [pool.submit(block, lm, ids) for block, ids in jobs]
                for one, other, (block, _) in zip(found, wanted, jobs, strict=True):
                    same(one.result(300), other, block.__name__)
            for one, other in zip(cut.result(300), oracle.generate(PROMPTS, params, **options), strict=True):
                assert_close(one, other)
            for one, other in zip(
                plain.result(300), oracle.generate(PROMPTS, params, capture=["resid_post.1"]), strict=True
            ):
                assert_close(one, other)
                assert method != "draft_model" or sum(one.receipt.steps.values()) < 30


def test_a_module_behind_the_pass_is_called_by_one_rank_only(engines: tuple[LM, LM]) -> None:
    lm, oracle = engines

    def late(model: LM) -> Any:
        with model.generate(PROMPTS[0], max_new_tokens=3, temperature=0, ignore_eos=True) as tracer:
            found = list().save()
            for _ in tracer.iter[:]:
                state = model.model.layers[3].output
                found.append((model.logits, model.model.layers[1].mlp(state)))
        return found

    if len(ranks_of(lm)) > 1:
        with pytest.raises(RuntimeError, match="the other ranks do not take part"):
            late(lm)
        same(read(lm, PROMPTS[0]), read(oracle, PROMPTS[0]))
    else:
        same(late(lm), late(oracle))


def test_invokes_of_one_with_and_what_is_saved_above_them(engines: tuple[LM, LM]) -> None:
    found = []
    for lm in engines:
        with lm.generate(max_new_tokens=3, temperature=0, ignore_eos=True) as tracer:
            states = list().save()
            for i, ids in enumerate(PROMPTS[:2]):
                with tracer.invoke(ids):
                    states.append((i, lm.model.layers[1].self_attn.o_proj.input[:, -1]))
        found.append(sorted(states, key=lambda entry: entry[0]))
    same(*found)


def test_a_block_beside_declared_hooks_of_its_own_request(engines: tuple[LM, LM]) -> None:
    found = []
    for lm in engines:
        options: dict[str, Any] = {
            "interventions": [Steer("resid_post.1", vector(5), 2.0)],
            "capture": ["resid_post.2"],
        }
        with lm.trace(PROMPTS[1], **options) as tracer:
            lm.model.layers[2].output[:, 0] = 1
            state = lm.model.layers[3].self_attn.k_proj.output.save()
        found.append((state, tracer.activations["resid_post.2"]))
    same(*found)


CUT: list[Any] = [
    [Knockout(1, from_=[-1], to=[0])],
    [Knockout("*", from_=slice(6, None), to=slice(0, 5, 2), heads=[0, 3]), Steer("resid_post.0", vector(2), 2.0)],
    None,
    [Knockout([0, 2], from_="generated", to="prompt")],
]
READ: list[Any] = [
    ["pattern.1", "resid_post.*"],
    ["pattern.*"],
    ["resid_post.*"],
    [Capture("pattern.3", positions=[-1], heads=[1]), "logits"],
]


def test_cut_edges_and_patterns_are_our_engines(engines: tuple[LM, LM]) -> None:
    """In chunks, on two ranks, with eager steps among graphs; beside requests without any, and with the same prompts before."""
    lm = engines[0]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    plain = [lm.generate([ids], params)[0] for ids in PROMPTS]
    scored = [replace(params, prompt_logprobs=2) for _ in PROMPTS]  # by the heads of all ranks, in steps by modules
    for ops, captures in ((CUT, READ), (CUT, None), (None, READ), (CUT, READ)):
        found, wanted = (
            m.generate(PROMPTS, scored if captures is None else params, interventions=ops, capture=captures)
            for m in engines
        )
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
        assert ops is None or f"vllm {runner_of(lm)} modules" in found[1].receipt.steps
    own, before = (out.outputs[0].logprobs or [] for out in (wanted[1], plain[1]))
    assert any(
        abs(next(iter(a.values())).logprob - next(iter(b.values())).logprob) > 1e-3
        for a, b in zip(own, before, strict=True)
    )
    for one, before in zip(lm.generate(PROMPTS, params), plain, strict=True):  # no KV of cut edges is read
        assert_close(one, before)
    with pytest.raises(ValueError, match="beside a block"), lm.trace(PROMPTS[3], interventions=CUT[3]):
        lm.model.layers[3].output.save()


def test_a_stop_ends_the_generation(engines: tuple[LM, LM]) -> None:
    found = []
    for lm in engines:
        with lm.generate(PROMPTS[0], max_new_tokens=20, temperature=0, ignore_eos=True) as tracer:
            states = list().save()
            for step in tracer.iter[:]:
                states.append(lm.model.layers[1].output[:, -1])
                if step == 2:
                    tracer.stop()
        found.append(states)
    same(*found)


def test_end_of_sequence_is_the_last_step_that_a_block_sees(engines: tuple[LM, LM]) -> None:
    _, oracle = engines
    tokens = (
        oracle.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
        .outputs[0]
        .token_ids
    )
    found = []
    for model in engines:
        with model.generate(PROMPTS[1], max_new_tokens=20, temperature=0, stop_token_ids=[tokens[3]]) as tracer:
            states = list().save()
            for _ in tracer.iter[:]:
                states.append(model.model.layers[1].output[:, -1])
        found.append(states)
    same(*found)


def test_a_block_that_has_finished_does_not_count_the_step_behind_the_last_token(engines: tuple[LM, LM]) -> None:
    """Steps wait for no tokens once a block has finished, so that vLLM runs one step too many."""
    _, oracle = engines
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = oracle.generate(PROMPTS[1], params)[0].outputs[0].token_ids
    for model in engines:
        with model.generate(PROMPTS[1], max_new_tokens=20, temperature=0, stop_token_ids=[tokens[4]]) as tracer:
            for _ in tracer.iter[:1]:
                model.model.layers[1].output.save()
        assert sum(tracer.receipt.steps.values()) == tokens.index(tokens[4]) + 1


def test_layers_without_a_waiting_block_are_vllms_own(engines: tuple[LM, LM], request: pytest.FixtureRequest) -> None:
    """Their states have the bits of a request without blocks, whose states are captured, unless a compiler changes those."""
    lm, _ = engines
    last = len(lm.model.layers) - 1
    site = f"resid_post.{last}"
    captured = lm.generate([PROMPTS[1]], SamplingParams(max_tokens=1), capture=[site])[0].activations[site]
    with lm.trace(PROMPTS[1]):
        states = lm.model.layers[last].output.save()
    same(states[0], captured)
    assert torch.equal(states[0].cpu(), captured) or "compiled" in request.node.name


DECLARED: dict[str, Any] = {
    "interventions": [
        Steer("resid_post.0", vector(5), 2.0), Steer("mlp_out.1", vector(6)), Steer("attn_out.2", vector(7)),
        Steer("resid_post.2", vector(8)), Steer("resid_mid.3", vector(9), 0.5), Steer("embed", vector(10)),
    ],
    "capture": [f"{kind}.*" for kind in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")] + ["embed"],
}  # fmt: skip


def test_declared_hooks_in_these_layers_have_the_bits_of_a_step_without_blocks(
    engines: tuple[LM, LM], request: pytest.FixtureRequest
) -> None:
    lm, _ = engines
    params, declared = SamplingParams(max_tokens=1), DECLARED
    if kinds := CASES[request.node.callspec.params["engines"]][1].get("inner_sites", ()):
        ops = [Scale("z.0", 0.5, heads=[1]), Steer("mlp_act.2", vector(11, 128))]
        declared = {
            "interventions": DECLARED["interventions"] + ops,
            "capture": DECLARED["capture"] + [f"{kind}.*" for kind in kinds],
        }
    (wanted,) = lm.generate([PROMPTS[1]], params, **declared)
    with lm.trace(PROMPTS[1], **declared) as tracer:
        middle = lm.model.layers[1].output.save()
        last = lm.model.layers[3].output.save()
    assert tracer.receipt.steps == {f"vllm {runner_of(lm)} modules": 1}
    for site, rows in wanted.outputs[0].activations.items():
        same(tracer.activations[site], rows, site)
        assert torch.equal(tracer.activations[site], rows) or "compiled" in request.node.name, site
    for name, state in (("resid_post.1", middle), ("resid_post.3", last)):
        same(state[0], wanted.outputs[0].activations[name])


LINKED: dict[str, dict[str, Any]] = {
    "gate of a row": {"interventions": [Steer("resid_post.2", vector(2), 2.0, when=Gate(vector(9), 0.0, site="resid_post.0"))]},
    "gate of the prompt": {
        "interventions": [Steer("resid_post.2", vector(2), 2.0, when=Gate(vector(9), 0.0, site="resid_post.0", scope="prompt"))]
    },
    "monitor": {
        "monitors": [Monitor("resid_post.1", vector(9), -1e9, then=[Steer("resid_post.2", vector(2), 2.0)], positions="prompt")]
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", LINKED)
def test_what_an_op_waits_for_is_met_in_a_step_by_modules(engines: tuple[LM, LM], kind: str) -> None:
    """A block waits for the first step only. All ranks act alike in the later ones."""
    found = []
    for lm in engines:
        options = {"capture": ["resid_post.3"], "max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
        with lm.generate(PROMPTS[1], **options, **LINKED[kind]) as tracer:
            for _ in tracer.iter[0:1]:
                state = lm.model.layers[1].mlp.output.save()
        found.append((state, tracer.activations["resid_post.3"]))
    same(*found)


@pytest.mark.parametrize("place", ["positions", "rotation", "rotation in place"])
def test_edited_rotations_reach_layers_without_a_waiting_block(engines: tuple[LM, LM], place: str) -> None:
    found = []
    for model in engines:
        with model.trace(PROMPTS[1]):
            if place == "positions":
                args, kwargs = model.model.inputs
                model.model.inputs = args, {**kwargs, "position_ids": kwargs["position_ids"] * 2}
            elif place == "rotation":
                cos, sin = model.model.rotary_emb.output
                model.model.rotary_emb.output = cos * 0.5, sin
            else:
                model.model.rotary_emb.output[0][:, 3:] *= 0.5
            states = model.model.layers[-1].output.save()
        with model.trace(PROMPTS[1]):
            plain = model.model.layers[-1].output.save()
        assert (states - plain).abs().max() > 1e-2
        found.append(states)
    same(*found)


def test_an_error_of_a_block_is_its_requests_alone(engines: tuple[LM, LM]) -> None:
    lm, _ = engines
    wanted = read(engines[1], PROMPTS[0])

    def wrong_shape() -> None:
        with lm.trace(PROMPTS[1]):
            lm.model.layers[1].output = lm.model.layers[1].output[:, :-1]

    def raises() -> None:
        with lm.generate(PROMPTS[1], max_new_tokens=4, ignore_eos=True):
            lm.model.layers[1].output.save()
            raise KeyError("mine")

    def too_late() -> None:
        with lm.trace(PROMPTS[1]):
            lm.model.layers[2].output.save()
            lm.model.layers[1].output.save()

    def wrong_token() -> None:
        with lm.generate(PROMPTS[1], max_new_tokens=4, ignore_eos=True):
            lm.samples = torch.full_like(lm.samples, 10**6)

    with ThreadPoolExecutor(8) as pool:
        beside = [pool.submit(read, lm, PROMPTS[0]) for _ in range(3)]
        for failing, error in (
            (wrong_shape, EditError), (raises, KeyError), (too_late, OutOfOrderError), (wrong_token, ValueError)
        ):  # fmt: skip
            with pytest.raises(error):
                pool.submit(failing).result(300)
        for one in beside:
            same(one.result(300), wanted)


def test_a_block_that_meets_no_step_is_an_error(engines: tuple[LM, LM], monkeypatch: pytest.MonkeyPatch) -> None:
    lm, _ = engines
    with monkeypatch.context() as patch:  # the request does not name its trace, as if the rank had never begun it
        patch.setattr(
            "pymllm_interp.vllm_engine.client.uplink.HookedOnWire", lambda *told: HookedOnWire(*told[:-1], None)
        )
        with pytest.raises(RuntimeError, match="met no step"), lm.trace(PROMPTS[1]):
            lm.model.layers[1].output.save()
    read(lm, PROMPTS[0])


def test_a_block_that_overruns_is_ended(engines: tuple[LM, LM]) -> None:
    lm, oracle = engines
    backend: Any = lm.backend
    if backend.core.config.additional_config["pymllm_interp"]["trace_step_timeout"] != SHORT:
        pytest.skip("one engine has a short time limit")
    with pytest.raises(TraceTimeoutError, match=f"more than trace_step_timeout={SHORT}"), lm.trace(PROMPTS[1]):
        lm.model.layers[1].output.save()
        while True:
            pass
    same(read(lm, PROMPTS[0]), read(oracle, PROMPTS[0]))


def test_persistent_edits_follow_a_block(engines: tuple[LM, LM]) -> None:
    found = []
    for lm in engines:
        with lm.edit() as (_, edited):
            lm.model.layers[1].output[:] *= 1.5
        with edited.trace(PROMPTS[0]):
            state = edited.model.layers[2].output.save()
        found.append((state, edited(PROMPTS[0]).logits))
    same(*found)


def test_what_no_block_has_is_refused_by_name(engines: tuple[LM, LM]) -> None:
    lm, _ = engines
    with pytest.raises(VllmRefusalError, match="no gradients"), lm.trace(PROMPTS[0]):
        lm.model.layers[1].output.requires_grad_()
        lm.lm_head.output.sum().backward()
    with pytest.raises(VllmRefusalError, match="same steps"), lm.trace() as tracer:
        barrier = tracer.barrier(2)
        for ids in PROMPTS[:2]:
            with tracer.invoke(ids):
                barrier()
    with pytest.raises(VllmRefusalError, match="not at texts"):
        with lm.generate(PROMPTS[0], max_new_tokens=3, stop=["x"]):
            lm.model.layers[1].output.save()
    with pytest.raises(VllmRefusalError, match="no transformers' own attention"), lm.trace(PROMPTS[0]):
        lm.model.layers[1].self_attn.source.attention_interface_0.output.save()
    with pytest.raises(NotImplementedError, match=r"o_proj\.weight.* is in vLLM's kernels"), lm.trace(PROMPTS[0]):
        (lm.model.layers[1].self_attn.o_proj.input @ lm.model.layers[1].self_attn.o_proj.weight.T).save()
    assert lm.generate([PROMPTS[0]], SamplingParams(max_tokens=2))[0].finish_reason == "length"


def test_a_prompt_longer_than_a_step_is_refused(engines: tuple[LM, LM]) -> None:
    lm, _ = engines
    with pytest.raises(ValueError, match="max_num_tokens"), lm.trace(prompt(100, 7)):
        lm.model.layers[1].output.save()
    assert WIDTH == lm.hidden_size


def test_a_rank_or_engine_that_ends_in_a_block_is_named(engines: tuple[LM, LM]) -> None:
    """The last test of an engine."""
    lm, _ = engines
    if len(ranks := ranks_of(lm)) == 1:
        pytest.skip("one case is enough: the one with two ranks")

    def block() -> None:
        with lm.generate(PROMPTS[1], max_new_tokens=60, ignore_eos=True) as tracer:
            for _ in tracer.iter[:]:
                lm.model.layers[1].output[:] *= 1.01

    files, params = shared_files(lm), SamplingParams(max_tokens=90, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        plain, running = lm.submit(PROMPTS[0], params), pool.submit(block)
        time.sleep(0.3)  # some steps
        dense = lm.backend.facts.spec.num_experts == 0
        if dense:
            engine_of(lm).suspend()
        else:
            ranks[1].kill()
        with pytest.raises(EngineClosedError, match=STOPPED if dense else DIED):
            running.result(10)
        assert_ends_with_a_rank(lm, [plain], STOPPED if dense else DIED, files)
