"""LoRA adapters against transformers with PEFT's formula in its modules: native families, mixed batches, hooks, prefixes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_adapters import LLAMA_TARGETS, adapted, linear_modules, merged_folder, write_adapter
from helpers_devices import DEVICES
from helpers_families import points_of, states_of
from helpers_graphs import use_eager_graphs
from helpers_runner import random_ids

from pymllm_interp import LM, SamplingParams, Scale, Steer
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.config import EngineTuning
from pymllm_interp.core.events import EngineClosedError
from pymllm_interp.core.model_spec import INNER_SITES
from pymllm_interp.harvest.progress import HarvestError
from pymllm_interp.harvest.reader import open_harvest
from pymllm_interp.interventions import Knockout
from pymllm_interp.models.adapters.peft_config import AdapterError
from pymllm_interp.runner.graphs.captured_passes import DECLARED
from pymllm_interp.utils.arguments import PromptError

ADAPTED = DECLARED._replace(adapted=True)

NATIVE = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox"]
PROMPTS = [random_ids(9, seed=1), random_ids(4, seed=2), random_ids(17, seed=3), random_ids(1, seed=4)]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
Adapted = Callable[..., Path]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str = "") -> None:
    """Within 1e-5 of the largest number: float32, and products in another order."""
    assert ours.shape == theirs.shape, what
    error, size = float((ours - theirs).abs().max()), max(1.0, float(theirs.abs().max()))
    assert error <= 1e-5 * size, f"{what}: {error} of {size}"


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory, oracle: Callable[[str], Any]) -> Adapted:
    """(family, seed, **how) -> a folder with an adapter of the family."""

    def folder(family: str, seed: int = 0, **how: Any) -> Path:
        return write_adapter(tmp_path_factory.mktemp("adapter") / "a", oracle(family), seed=seed, **how)

    return folder


@pytest.fixture(params=DEVICES)
def load(model_folder: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[Callable[..., LM]]:
    """(family, **options) -> a new LM in float32, which the test's end shuts down."""
    made: list[LM] = []
    own: dict[str, Any] = {"device": request.param, "kv_cache_tokens": 2048, "max_running_requests": 16}
    if request.param == "cuda":
        own |= {"inner_sites": INNER_SITES, "capture_ring_bytes": 128 << 20}

    def lm_of(family: str, **options: Any) -> LM:
        made.append(LM(model_folder(family), **with_tuning(dtype="float32", **(own | options))))
        return made[-1]

    yield lm_of
    for lm in made:
        lm.shutdown()


@torch.no_grad()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def greedy(model: Any, ids: list[int], steps: int) -> list[int]:
    made = list(ids)
    for _ in range(steps):
        made.append(int(logits_of(model, made)[-1].argmax()))
    return made[len(ids) :]


@pytest.mark.few("family", "llama", "gemma2", "gpt2", "gpt_neox")
@pytest.mark.parametrize("family", NATIVE)
def test_states_and_logits_are_those_of_peft(
    family: str, load: Callable[..., LM], oracle: Callable[[str], Any], adapter: Adapted
) -> None:
    """Each family, each site, base and two adapters in one batch."""
    lm, base = load(family), oracle(family)
    folders = {
        "a": adapter(family, 1, rank=3, scale=0.03),
        "b": adapter(family, 2, rank=16, use_rslora=True, scale=0.01),
    }
    for name, folder in folders.items():
        lm.adapters.load(name, folder)
    models = {None: base} | {name: adapted(base, folder) for name, folder in folders.items()}
    names = ["a", None, "b", "a"]
    points = {site: point for site, point in points_of(lm.model_spec).items() if not _is_slice(lm, site)}
    outs = lm.forward(PROMPTS, lora=names, capture=list(points))
    for ids, name, out in zip(PROMPTS, names, outs, strict=True):
        states, logits = states_of(models[name], points, ids)
        assert_close(out.logits, logits)
        for site, state in states.items():
            assert_close(out.activations[site].flatten(1), state, site)
    for ids, name, out in zip(PROMPTS, names, lm.generate(PROMPTS, GREEDY, lora=names), strict=True):
        assert out.outputs[0].token_ids == greedy(models[name], ids, 6), name
    assert not torch.equal(outs[0].logits, lm.forward(PROMPTS[0])[0].logits)


def _is_slice(lm: LM, site: str) -> bool:
    """Whether the site is a part of its module's output (q of one projection for q, k and v)."""
    return lm.model_spec.family.is_slice(site.partition(".")[0])


@pytest.mark.few("rank", 1, 8, 33)
@pytest.mark.parametrize("rank", [1, 2, 5, 8, 16, 33, 64])
def test_every_rank(rank: int, load: Callable[..., LM], oracle: Callable[[str], Any], adapter: Adapted) -> None:
    lm, folder = load("llama"), adapter("llama", rank, rank=rank, scale=0.1)
    lm.adapters.load("a", folder)
    assert_close(lm.forward(PROMPTS[2], lora="a")[0].logits, logits_of(adapted(oracle("llama"), folder), PROMPTS[2]))


@pytest.mark.few("target", "k_proj", "o_proj", "up_proj", "down_proj")
@pytest.mark.parametrize("target", LLAMA_TARGETS)
def test_every_target_alone(
    target: str, load: Callable[..., LM], oracle: Callable[[str], Any], adapter: Adapted
) -> None:
    """With patterns of ranks and alphas, too; modules show the delta to a trace, in both kinds of passes."""
    lm, folder = load("llama"), adapter(
        "llama", 5, targets=[target], rank=4, ranks={rf"layers.1.*{target}": 7}, alpha_pattern={rf"layers.0.*{target}": 3}
    )  # fmt: skip
    lm.adapters.load("a", folder)
    changed = adapted(oracle("llama"), folder)
    found, states = {}, {}
    for path in linear_modules(oracle("llama")):
        module = changed.get_submodule(path)
        module.register_forward_hook(lambda m, args, out, path=path: states.__setitem__(path, out[0].detach()))
    expected = logits_of(changed, PROMPTS[0])
    with lm.trace(PROMPTS[0], lora="a"):
        for path in states:
            found[path] = lm.get(path).output.save()
        logits = lm.lm_head.output[0].cpu().save()
    assert_close(logits, expected)
    for path, state in states.items():
        assert_close(found[path][0].cpu(), state, path)
    assert torch.equal(lm.forward(PROMPTS[0], lora="a")[0].logits, logits), "the fused pass has the module pass's bits"


def test_an_adapter_of_zeros_is_bit_equal_to_none(load: Callable[..., LM], adapter: Adapted) -> None:
    lm = load("llama")
    lm.adapters.load("zero", adapter("llama", 3, scale=0.0))
    plain, zero = lm.forward(PROMPTS[2])[0], lm.forward(PROMPTS[2], lora="zero")[0]
    assert torch.equal(plain.logits, zero.logits)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
    own, other = (lm.generate(PROMPTS, params, lora=name) for name in (None, "zero"))
    for one, two in zip(own, other, strict=True):
        assert (
            one.outputs[0].token_ids == two.outputs[0].token_ids and one.outputs[0].logprobs == two.outputs[0].logprobs
        )


def test_a_row_does_not_depend_on_the_adapters_of_others(load: Callable[..., LM], adapter: Adapted) -> None:
    """Bit for bit, in batches of the same prompts."""
    lm = load("llama")
    for seed in range(3):
        lm.adapters.load(f"{seed}", adapter("llama", seed, rank=2 + seed))
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=2, skip_reading_prefix_cache=True)
    prompts = [random_ids(1 + 3 * i, seed=i) for i in range(8)]
    names = [None if i % 4 == 3 else str(i % 4) for i in range(8)]
    together = lm.generate(prompts, params, lora=names)
    for name in (None, "0", "2"):
        for own, out, alike in zip(names, together, lm.generate(prompts, params, lora=name), strict=True):
            assert own != name or alike.outputs[0].logprobs == out.outputs[0].logprobs


def test_preempted_requests_keep_their_adapters(
    load: Callable[..., LM], adapter: Adapted, oracle: Callable[[str], Any]
) -> None:
    """In chunks of at most 16 tokens, too."""
    lm = load("llama", kv_cache_tokens=160, max_running_requests=8, max_model_len=100, max_num_tokens=16)
    folders = {name: adapter("llama", seed) for seed, name in enumerate("ab")}
    for name, folder in folders.items():
        lm.adapters.load(name, folder)
    prompts, names = [random_ids(17, seed=i) for i in range(6)], ["a", "b", None] * 2
    outs = lm.generate(prompts, SamplingParams(temperature=0, max_tokens=24), lora=names)
    assert lm.engine.stats()["preempted"] > 0
    models = {None: oracle("llama")} | {name: adapted(oracle("llama"), folder) for name, folder in folders.items()}
    for prompt, name, out in zip(prompts, names, outs, strict=True):
        assert out.outputs[0].token_ids == greedy(models[name], prompt, 24), name


def test_two_adapters_never_share_kv(load: Callable[..., LM], adapter: Adapted, oracle: Callable[[str], Any]) -> None:
    """Nor does an adapter with the model itself, nor with another one that was loaded under its name."""
    lm, prompt = load("llama"), random_ids(50, seed=9)
    first, second = adapter("llama", 1), adapter("llama", 2)
    lm.adapters.load("a", first)
    lm.adapters.load("b", second)

    def cached(name: str | None) -> int:
        return lm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), lora=name)[0].num_cached_tokens

    assert [cached(name) for name in (None, "a", "b")] == [0, 0, 0]
    assert [cached(name) for name in (None, "a", "b")] == [48, 48, 48]
    lm.adapters.unload("a")
    lm.adapters.load("a", adapter("llama", 3))
    assert cached("a") == 0
    lm.adapters.unload("b")
    lm.adapters.load("again", second)
    assert cached("again") == 48, "equal weights are equal KV"
    expected = logits_of(adapted(oracle("llama"), second), prompt)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    out = lm.generate([prompt], params, lora="again")[0]
    assert out.outputs[0].token_ids == [int(expected[-1].argmax())]


def test_fingerprints_and_receipts_name_the_adapter(load: Callable[..., LM], adapter: Adapted) -> None:
    lm, folder = load("llama"), adapter("llama", 1)
    plain = lm.weights.fingerprint
    lm.adapters.load("a", folder)
    lm.adapters.load("b", adapter("llama", 2))
    assert lm.weights.fingerprint == plain, "loading changes nothing of the model"
    receipts = [out.receipt.model for out in lm.forward([[1, 2]] * 4, lora=[None, "a", "b", "a"], capture=["embed"])]
    assert receipts[0] == plain and receipts[1] == receipts[3] and len(set(receipts)) == 3
    lm.adapters.unload("a")
    lm.adapters.load("c", folder)
    assert lm.forward([[1, 2]], lora="c", capture=["embed"])[0].receipt.model == receipts[1]


def test_steering_and_other_ops_compose(
    load: Callable[..., LM], adapter: Adapted, oracle: Callable[[str], Any]
) -> None:
    lm, folder = load("llama"), adapter("llama", 1)
    lm.adapters.load("a", folder)
    model, points, vector = adapted(oracle("llama"), folder), points_of(lm.model_spec), torch.randn(lm.hidden_size)
    edits = {points["resid_post.0"]: lambda h: h + 2 * vector, points["mlp_out.1"]: lambda h: h * 0.5}
    states, logits = states_of(model, points, PROMPTS[2], edits)
    ops = [Steer("resid_post.0", vector, 2.0), Scale("mlp_out.1", 0.5)]
    out, plain = lm.forward([PROMPTS[2]] * 2, lora=["a", None], interventions=[ops, None], capture=["resid_post.1"])
    assert_close(out.logits, logits)
    assert_close(out.activations["resid_post.1"], states["resid_post.1"])
    assert_close(plain.logits, logits_of(oracle("llama"), PROMPTS[2]))


def test_invokes_have_adapters_of_their_own(
    load: Callable[..., LM], adapter: Adapted, oracle: Callable[[str], Any]
) -> None:
    """Base and adapters in one trace; one block's value goes into another's pass."""
    lm, folder = load("llama", lower_traces="off"), adapter("llama", 1)
    lm.adapters.load("a", folder)
    base, changed = oracle("llama"), adapted(oracle("llama"), folder)
    with lm.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPTS[0], lora="a"):
            h = lm.model.layers[0].output.save()
            barrier()
            one = lm.model.layers[1].self_attn.q_proj.output.save()
        with tracer.invoke(PROMPTS[0]):
            zero = lm.model.layers[0].self_attn.q_proj.output.save()
            barrier()
            lm.model.layers[0].output = h
            logits = lm.lm_head.output.save()
    seen: dict[int, torch.Tensor] = {}
    for layer, model in enumerate((base, changed)):
        handle = model.model.layers[layer].self_attn.q_proj.register_forward_hook(
            lambda m, args, out, layer=layer: seen.__setitem__(layer, out.detach())
        )
        logits_of(model, PROMPTS[0])
        handle.remove()
    assert_close(zero, seen[0])
    assert_close(one, seen[1])
    hidden = changed(input_ids=torch.tensor([PROMPTS[0]]), output_hidden_states=True).hidden_states[1].detach()
    assert_close(h, hidden)
    handle = base.model.layers[0].register_forward_hook(lambda m, args, out: hidden)
    assert_close(logits[0], logits_of(base, PROMPTS[0]))
    handle.remove()


@pytest.mark.parametrize("lowering", ["off", "require"])
def test_generation_with_a_block(
    lowering: str, load: Callable[..., LM], adapter: Adapted, oracle: Callable[[str], Any]
) -> None:
    lm, folder = load("llama", lower_traces=lowering), adapter("llama", 1)
    lm.adapters.load("a", folder)
    with lm.generate(PROMPTS[1], max_new_tokens=4, lora="a") as tracer:
        seen = list().save()
        for _ in tracer.iter[:]:
            seen.append(lm.model.layers[1].output[:, -1])
    model = adapted(oracle("llama"), folder)
    tokens = greedy(model, PROMPTS[1], 4)
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[1] + tokens])
        states: list[torch.Tensor] = []
        handle = model.model.layers[1].register_forward_hook(lambda m, a, out: states.append(out))
        model(input_ids=ids)
        handle.remove()
    for step, state in enumerate(seen):
        assert_close(state[0], states[0][0, len(PROMPTS[1]) - 1 + step])
    assert (tracer.receipt.lowered, len(seen)) == (lowering == "require", 4)


def test_gradients_go_through_the_deltas(
    load: Callable[..., LM], adapter: Adapted, oracle: Callable[[str], Any]
) -> None:
    lm, folder = load("llama"), adapter("llama", 1)
    lm.adapters.load("a", folder)
    with lm.trace(PROMPTS[0], lora="a"):
        h = lm.model.layers[0].output
        h.retain_grad()
        loss = lm.lm_head.output[0, -1, 5]
        with loss.backward():
            grad = h.grad.save()
    model, kept = adapted(oracle("llama"), folder), []

    def keep(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        kept.append(out.requires_grad_() if out.is_leaf else out)
        kept[0].retain_grad()
        return kept[0]

    model.model.layers[0].register_forward_hook(keep)
    model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1, 5].backward()
    assert_close(grad[0], kept[0].grad[0])


def test_transformers_own_attention(load: Callable[..., LM], adapter: Adapted, oracle: Callable[[str], Any]) -> None:
    """Its forward calls q, k and v one by one."""
    for family in ("llama", "gpt2"):
        lm, folder = load(family), adapter(family, 1)
        lm.adapters.load("a", folder)
        with torch.no_grad():
            expected = adapted(oracle(family), folder)(input_ids=torch.tensor([PROMPTS[0]]), output_attentions=True)
        with lm.trace(PROMPTS[0], lora="a", output_attentions=True):
            out = lm.output.save()
        assert_close(out.logits, expected.logits)
        for ours, theirs in zip(out.attentions, expected.attentions, strict=True):
            assert_close(ours, theirs)


def test_captured_passes(model_folder: Callable[[str], Path], adapter: Adapted, oracle: Callable[[str], Any]) -> None:
    """Decode passes with adapters are captured from the first adapter to the last, in a set of their own."""
    folders = {name: adapter("llama", seed, rank=rank) for seed, (name, rank) in enumerate({"a": 4, "b": 20}.items())}
    models = {None: oracle("llama")} | {name: adapted(oracle("llama"), folder) for name, folder in folders.items()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_eager_graphs(monkeypatch)
        with LM(model_folder("llama"), dtype="float32", device="cpu", kv_cache_tokens=2048, max_running_requests=8,
                lower_traces="off", tuning=EngineTuning(hook_execution="segments")) as lm:  # fmt: skip
            assert ADAPTED not in lm.runner.graphs.decoders and lm.runner.input_buffers.adapter_tiles is None
            lm.adapters.load("a", folders["a"])
            assert lm.runner.graphs.decoders[ADAPTED].graphs.keys() == lm.runner.graph_runner.graphs.keys()
            lm.adapters.load("b", folders["b"])
            names = ["a", None, "b", "a"]
            before = lm.engine.stats()["execution"]
            vector = torch.randn(lm.hidden_size)
            steered = [None, None, [Steer("resid_post.0", vector, 0.0)], None]
            outs = lm.generate(PROMPTS, GREEDY, lora=names, interventions=steered)
            for ids, name, out in zip(PROMPTS, names, outs, strict=True):
                assert out.outputs[0].token_ids == greedy(models[name], ids, 6), name
            after = lm.engine.stats()["execution"]
            assert _count(after, "replay") - _count(before, "replay") >= 5, (before, after)
            for name in ("a", None):  # segments
                with lm.generate(PROMPTS[0], max_new_tokens=6, lora=name) as tracer:
                    seen = list().save()
                    for _ in tracer.iter[1:]:
                        seen.append(lm.model.layers[0].output.clone())
                    tokens = tracer.result.save()
                assert tokens[0, len(PROMPTS[0]) :].tolist() == greedy(models[name], PROMPTS[0], 6)
                assert tracer.receipt.steps["segments"] == 5
            lm.adapters.unload("a")
            assert ADAPTED in lm.runner.graphs.decoders
            lm.adapters.unload("b")
            assert ADAPTED not in lm.runner.graphs.decoders
            assert lm.runner.get_model().model.layers[0].self_attn.o_proj.lora is None


def _count(execution: dict[str, Any], way: str) -> int:
    return sum(count for key, count in execution.items() if str(key).startswith(way))


def test_a_copy_of_a_module_is_plain(load: Callable[..., LM], adapter: Adapted) -> None:
    import copy

    lm = load("llama")
    lm.adapters.load("a", adapter("llama", 1))
    attention = copy.deepcopy(lm.model.layers[0].self_attn._module)
    assert attention.o_proj.__class__ is torch.nn.Linear and attention._qkv.lora is None


def test_requests_name_a_loaded_adapter(load: Callable[..., LM], adapter: Adapted) -> None:
    lm = load("llama")
    with pytest.raises(PromptError, match=r"prompt 1: there is no adapter 'x' .none is loaded.: lm.adapters.load"):
        lm.generate([[1], [2]], GREEDY, lora=[None, "x"])
    lm.adapters.load("a", adapter("llama", 1))
    with pytest.raises(PromptError, match=r"there is no adapter 'x' .loaded are a."):
        lm.generate([[1]], GREEDY, lora="x")
    with pytest.raises(PromptError, match=r"lora=7: expected the name of a loaded adapter"):
        lm.generate([[1]], GREEDY, lora=7)
    with pytest.raises(PromptError, match=r"for each of the 2 prompts"):
        lm.generate([[1], [2]], GREEDY, lora=["a"])
    with pytest.raises(PromptError, match=r"there is no adapter 'x'"), lm.trace([1, 2], lora="x"):
        lm.lm_head.output.save()
    with pytest.raises(TypeError, match=r"lm.adapters.load"):
        lm.generate([[1]], GREEDY, lora_request="a")
    assert lm.generate([[1]], GREEDY, lora="a")[0].outputs[0].finish_reason == "length"


def test_slots_are_taken_by_the_least_recently_used(
    load: Callable[..., LM], adapter: Adapted, oracle: Callable[[str], Any]
) -> None:
    lm = load("llama", max_loras=2)
    folders = {str(seed): adapter("llama", seed) for seed in range(4)}
    for name, folder in folders.items():
        lm.adapters.load(name, folder)
    assert sorted(lm.adapters) == ["0", "1", "2", "3"]
    models = {name: adapted(oracle("llama"), folder) for name, folder in folders.items()}
    for name in "0123210":
        out = lm.generate([PROMPTS[0]], GREEDY, lora=name)[0].outputs[0].token_ids
        assert out == greedy(models[name], PROMPTS[0], 6), name
    long = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    held = [lm.submit(PROMPTS[0], long, lora=name) for name in "01"]
    with pytest.raises(PromptError, match=r"'2' has no slot: requests in flight use all 2 .0, 1.. .*max_loras=3"):
        lm.generate([PROMPTS[0]], GREEDY, lora="2")
    lm.adapters.load("more", more := adapter("llama", 9))  # to the host
    with pytest.raises(PromptError, match=r"'more' has no slot: requests in flight use all 2 .0, 1.."):
        lm.generate([PROMPTS[0]], GREEDY, lora="more")
    with pytest.raises(ValueError, match=r"'0' is in use by 1 requests"):
        lm.adapters.unload("0")
    assert lm.generate([PROMPTS[0]], GREEDY, lora="1")[0].outputs[0].token_ids == greedy(models["1"], PROMPTS[0], 6)
    for handle in held:
        handle.cancel()
        handle.wait()
    assert lm.generate([PROMPTS[0]], GREEDY, lora="2")[0].outputs[0].token_ids == greedy(models["2"], PROMPTS[0], 6)
    wanted = greedy(adapted(oracle("llama"), more), PROMPTS[0], 6)
    assert lm.generate([PROMPTS[0]], GREEDY, lora="more")[0].outputs[0].token_ids == wanted
    lm.adapters.unload("0")
    assert "more" in lm.adapters and "0" not in lm.adapters
    with pytest.raises(ValueError, match=r"there is no adapter '0'"):
        lm.adapters.unload("0")


def test_sweeps_streams_and_chat_take_adapters(
    load: Callable[..., LM], adapter: Adapted, oracle: Callable[[str], Any]
) -> None:
    lm, folder = load("llama"), adapter("llama", 1)
    lm.adapters.load("a", folder)
    expected = greedy(adapted(oracle("llama"), folder), PROMPTS[0], 6)
    assert [token for piece in lm.stream(PROMPTS[0], GREEDY, lora="a") for token in piece.token_ids] == expected
    assert lm.submit(PROMPTS[0], GREEDY, lora="a").result().outputs[0].token_ids == expected
    runs = lm.sweep(PROMPTS[0], [None, Scale("mlp_out.0", 0.0)], GREEDY, lora="a")
    assert runs[0].outputs[0].token_ids == expected
    assert [out.outputs[0].token_ids for out in lm.imap([PROMPTS[0]] * 3, GREEDY, lora="a")] == [expected] * 3
    logits, _ = lm.run_with_cache(PROMPTS[0], "resid_post.0", lora="a")
    assert_close(logits[0], logits_of(adapted(oracle("llama"), folder), PROMPTS[0]))
    hooked = lm.run_with_hooks(PROMPTS[0], [], lora="a")
    assert_close(hooked[0], logits[0])
    result = lm(PROMPTS[0], lora="a").logits[0]
    assert_close(result, logits[0])


def test_harvests_take_an_adapter(
    load: Callable[..., LM], adapter: Adapted, oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    lm, folder = load("llama"), adapter("llama", 1)
    lm.adapters.load("a", folder)
    lm.harvest(PROMPTS, capture=["resid_post.1"], out=tmp_path / "a", lora="a", progress=False)
    points, states = points_of(lm.model_spec), open_harvest(tmp_path / "a")["resid_post.1"][:]
    model = adapted(oracle("llama"), folder)
    expected = torch.cat(
        [states_of(model, {"resid_post.1": points["resid_post.1"]}, ids)[0]["resid_post.1"] for ids in PROMPTS]
    )
    assert_close(torch.as_tensor(states), expected)
    lm.adapters.unload("a")
    lm.adapters.load("a", adapter("llama", 2))
    with pytest.raises(ValueError, match=r"model"):
        lm.harvest(PROMPTS, capture=["resid_post.1"], out=tmp_path / "a", lora="a", progress=False)
    with pytest.raises(ValueError, match=r"there is no adapter 'x'"):
        lm.harvest(PROMPTS, capture=["resid_post.1"], out=tmp_path / "b", lora="x", progress=False)

    def documents() -> Iterator[list[int]]:
        yield PROMPTS[0]
        while "a" in lm.adapters:
            with suppress(AdapterError):  # the first document runs
                lm.adapters.unload("a")
            time.sleep(0.01)
        lm.adapters.load("a", folder)
        yield PROMPTS[1]

    with pytest.raises(HarvestError, match=r"document 1: the adapter 'a' was loaded anew, with other weights"):
        lm.harvest(documents(), capture=["resid_post.1"], out=tmp_path / "c", lora="a", progress=False)


def test_drafts_knockouts_and_scans_with_adapters(
    load: Callable[..., LM], adapter: Adapted, oracle: Callable[[str], Any]
) -> None:
    """Steps with several rows a request, passes with cut edges, and shapes without a pass."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    lm, folder = load("llama", speculative=drafts), adapter("llama", 1)
    lm.adapters.load("a", folder)
    model, prompts = adapted(oracle("llama"), folder), [PROMPTS[0] * 3, PROMPTS[1] * 4, PROMPTS[2]]
    outs = lm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), lora=["a", None, "a"])
    for prompt, own, out in zip(prompts, (model, oracle("llama"), model), outs, strict=True):
        assert out.outputs[0].token_ids == greedy(own, prompt, 12)
    cut = Knockout(0, from_=-1, to=0)
    plain, knocked = lm.forward([PROMPTS[0]] * 2, lora="a", interventions=[None, [cut]])
    assert_close(plain.logits, logits_of(model, PROMPTS[0]))
    assert torch.equal(plain.logits[:-1], knocked.logits[:-1]) and not torch.equal(plain.logits[-1], knocked.logits[-1])
    with lm.scan(PROMPTS[0], lora="a"):
        assert lm.lm_head.output.shape[-1] == lm.limits.vocab_size


def test_many_slots_cost_nothing_until_they_are_used(load: Callable[..., LM], adapter: Adapted) -> None:
    lm = load("llama", max_loras=10**18) if not torch.cuda.is_available() else load("llama", max_loras=64)
    lm.adapters.load("a", adapter("llama", 1))
    assert lm.generate([PROMPTS[0]], GREEDY, lora="a")
    with pytest.raises(ValueError, match=r"max_loras=0"):
        load("llama", max_loras=0)


def test_adapters_are_not_loaded_in_the_midst_of_a_pass(load: Callable[..., LM], adapter: Adapted) -> None:
    lm, folder = load("llama", lower_traces="off"), adapter("llama", 1)
    lm.adapters.load("a", folder)
    for call in (lambda: lm.adapters.load("b", folder), lambda: lm.adapters.unload("a")):
        with pytest.raises(RuntimeError, match=r"cannot run inside the block of a trace"), lm.trace([1, 2]):
            lm.model.layers[0].output.save()
            call()
    assert list(lm.adapters) == ["a"]
    lm.shutdown()
    with pytest.raises(EngineClosedError):
        lm.adapters.load("b", folder)


def test_patch_sweeps_and_attribution_take_an_adapter(
    load: Callable[..., LM],
    adapter: Adapted,
    oracle: Callable[[str], Any],
    model_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """As of a model with the adapter in its weights."""
    folder = adapter("llama", 1, scale=0.1)
    whole = merged_folder(oracle("llama"), folder, model_folder("llama"), tmp_path)
    lm, merged = load("llama"), LM(whole, dtype="float32", device="cpu", kv_cache_tokens=2048)
    lm.adapters.load("a", folder)
    base, source = PROMPTS[0], [*PROMPTS[0][:3], 5, *PROMPTS[0][4:]]
    options: dict[str, Any] = {"site": "resid_post", "metric": (7, 11), "positions": [3, -1]}
    with merged:
        expected, plain = merged.patch_sweep(base, source, **options), lm.patch_sweep(base, source, **options)
        for how in ("auto", "requests"):
            found = lm.patch_sweep(base, source, how=how, lora="a", **options)
            assert_close(torch.as_tensor(found.values), torch.as_tensor(expected.values))
            assert found.how.startswith("requests")
        assert float((torch.as_tensor(plain.values) - torch.as_tensor(found.values)).abs().max()) > 1e-3
        sites = ["resid_post.*", "mlp_act.1"]
        for steps in (1, 2):
            ours, theirs = (
                model.attribute(base, source, metric=(7, 11), sites=sites, steps=steps, **own)
                for model, own in ((lm, {"lora": "a"}), (merged, {}))
            )
            assert list(ours) == list(theirs) and len(list(ours)) > 1
            for site in ours:
                torch.testing.assert_close(ours[site], theirs[site], rtol=1e-3, atol=2e-5)
    with pytest.raises(NotImplementedError, match="they have an adapter"):
        lm.patch_sweep(base, source, how="wavefront", lora="a", **options)
    with pytest.raises(ValueError, match="there is no adapter 'b'"):
        lm.patch_sweep(base, source, lora="b", **options)
    with pytest.raises(ValueError, match="there is no adapter 'b'"):
        lm.attribute(base, source, metric=(7, 11), sites=sites, lora="b")
