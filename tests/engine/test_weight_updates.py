"""`lm.update_weights`: afterwards a model is, bit by bit, what a new engine loads from the same weights."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONFIGS, random_model, tiny_tokenizer
from helpers_adapters import write_adapter
from helpers_devices import DEVICES
from helpers_drafts import drafted_by
from helpers_mxfp4 import in_mxfp4
from helpers_quantized import write_quantized
from helpers_waits import assert_idle, until
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.models.weights.loading import WeightsError
from pymllm_interp.wire.weights import SentWeights

PROMPTS = [[1], [7, 8, 9], list(range(5, 22)), [*range(5, 22), 4]]
SITES = ["resid_post.*", "logits"]


def greedy(tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """(family, seed) -> a folder with random weights."""
    made: dict[tuple[str, int], Path] = {}

    def folder(family: str, seed: int) -> Path:
        if (family, seed) not in made:
            found = made[family, seed] = tmp_path_factory.mktemp(f"{family}-{seed}")
            random_model(CONFIGS[family](), seed).save_pretrained(found)
            tiny_tokenizer().save_pretrained(found)
        return made[family, seed]

    return folder


def load(folder: Path, device: str = "cpu", **kwargs: Any) -> LM:
    sizes = {"kv_cache_tokens": 512, "page_size": 4, "max_num_tokens": 16, "max_running_requests": 4}
    dtype = "float32" if device == "cpu" else "bfloat16"
    return LM(folder, **with_tuning(**{"device": device, "dtype": dtype, **sizes, **kwargs}))


def tensors_of(folder: Path, lm: LM) -> dict[str, torch.Tensor]:
    """A checkpoint as a trainer has it: in the model's dtype, on its device."""
    found = load_file(folder / "model.safetensors")
    if lm.backend.facts.impl == "transformers":  # the names of its own parameters, which checkpoints may not have
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    own = {name: tensor.dtype for name, tensor in lm.runner.get_model().state_dict().items()}
    found = {name: tensor.to(lm.runner.device) for name, tensor in found.items()}
    plain = {name for name, t in found.items() if t.dtype is torch.float32 and (name in own or "scale" not in name)}
    return {name: tensor.to(own.get(name, lm.dtype)) if name in plain else tensor for name, tensor in found.items()}


def seen(lm: LM, **options: Any) -> list[Any]:
    """Tokens, states and logits of some prompts, and a value of a trace."""
    outputs = lm.generate(PROMPTS, greedy(), capture=SITES, **options)
    found: list[Any] = [output.outputs[0].token_ids for output in outputs]
    found += [output.activations[site] for output in outputs for site in sorted(output.activations)]
    head = lm.get(lm.model_spec.family.head)
    with lm.trace(PROMPTS[1], **options):
        head.input[:] *= 1.5
        found.append(head.output.save())
    return found


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def assert_is(lm: LM, other: LM, **options: Any) -> None:
    """`lm` is what `other` is, for requests with and without cached prefixes."""
    for _ in range(2):
        assert_same(seen(lm, **options), seen(other, **options))
    assert lm.weights.fingerprint == other.weights.fingerprint
    lm.reset_prefix_cache()
    assert_idle(lm)


KINDS = [("llama", "native"), ("qwen2", "transformers"), ("glm4_moe", "native")]
OTHERS = ["llama", "gemma2", "gpt2", "gpt_oss", "gemma3_text", "llama-rope", "gpt_neox"]
SLOW = [(family, impl) for family in OTHERS for impl in ("native", "transformers") if (family, impl) not in KINDS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "impl"), [*KINDS, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_a_model_becomes_what_is_loaded(family: str, impl: str, device: str, folder_of: Callable[[str, int], Path]):
    with load(folder_of(family, 0), device, impl=impl) as lm, load(folder_of(family, 1), device, impl=impl) as other:
        before, old, first = seen(lm), lm.weights.fingerprint, lm.weights.version
        version = lm.update_weights(tensors_of(folder_of(family, 1), lm))
        assert version == lm.weights.version > first
        assert_is(lm, other)
        lm.update_weights(folder_of(family, 0))
        assert lm.weights.fingerprint == old
        assert_same(seen(lm), before)
        lm.update_weights(other.runner.get_model().state_dict())  # in its module tree's names
        assert_is(lm, other)


def test_some_tensors_are_enough(folder_of: Callable[[str, int], Path]):
    with load(folder_of("qwen3", 0)) as lm, load(folder_of("qwen3", 1)) as other:
        new = tensors_of(folder_of("qwen3", 1), lm)
        layer = {name: tensor for name, tensor in new.items() if ".layers.1." in name}
        lm.update_weights(iter(layer.items()))
        with load(folder_of("qwen3", 0)) as third:
            third.runner.get_model().load_state_dict(layer, strict=False)
            assert_is(lm, third)
        for name, tensor in new.items():
            lm.update_weights({name: tensor})
        assert_is(lm, other)


# -- requests in flight -----------------------------------------------------------------------


@pytest.mark.parametrize(("paused", "capture"), [(False, ()), (True, ("resid_post.1",))])
def test_tokens_after_an_update_are_the_new_models(
    paused: bool, capture: tuple[str, ...], folder_of: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
):
    with load(folder_of("llama", 0)) as lm, load(folder_of("llama", 1)) as other:
        new = tensors_of(folder_of("llama", 1), lm)
        step = lm.engine.step
        monkeypatch.setattr(lm.engine, "step", lambda: (time.sleep(0.003), step()))
        whole = lm.generate(PROMPTS, greedy(24))
        first = lm.weights.version
        handles = [lm.submit(prompt, greedy(24), capture=capture) for prompt in PROMPTS]
        until(lambda: all(len(handle.requests[0].output_token_ids) > 2 for handle in handles))
        if paused:
            lm.pause("keep")
        queued = lm.submit(PROMPTS[1], greedy(24))
        version = lm.update_weights(new)
        lm.resume()
        for prompt, handle, old in zip(PROMPTS, handles, whole, strict=True):
            output = handle.result()
            tokens, ((before, count), (after, rest)) = output.outputs[0].token_ids, output.receipt.weights
            assert (before, after, count + rest) == (first, version, 24) and 2 < count < 24
            assert tokens[:count] == old.outputs[0].token_ids[:count]
            assert tokens[count:] == other.generate([prompt + tokens[:count]], greedy(rest))[0].outputs[0].token_ids
            for states in output.activations.values():
                assert len(states) == len(prompt) + 23
        late = queued.result()
        assert late.outputs[0].token_ids == other.generate([PROMPTS[1]], greedy(24))[0].outputs[0].token_ids
        assert late.receipt is None or not late.receipt.weights
        assert_is(lm, other)


def test_a_trace_under_way_refuses_an_update(folder_of: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch):
    with load(folder_of("llama", 0), lower_traces="off") as lm, load(folder_of("llama", 0)) as other:
        new, errors = tensors_of(folder_of("llama", 1), lm), []

        def update() -> None:
            try:
                lm.backend.control("update_weights", weights=new)
            except ValueError as error:
                errors.append(str(error))

        step, steps = lm.engine.step, iter(range(10**6))

        def between() -> None:
            step()
            if next(steps) == 2:
                update()

        monkeypatch.setattr(lm.engine, "step", between)
        with lm.generate(PROMPTS[1], max_new_tokens=8, temperature=0) as tracer:
            for _ in tracer.iter[:]:
                lm.model.layers[1].output[:] *= 1.25
        assert len(errors) == 1 and "1 requests of traces are under way" in errors[0] and "mode='wait'" in errors[0]
        monkeypatch.undo()
        assert_is(lm, other)


# -- what does not fit ----------------------------------------------------------------------------


def test_weights_that_do_not_fit_leave_the_old_ones(folder_of: Callable[[str, int], Path], tmp_path: Path):
    with load(folder_of("llama", 0)) as lm, load(folder_of("llama", 0)) as other:
        good = tensors_of(folder_of("llama", 1), lm)
        name = "model.layers.1.mlp.up_proj.weight"
        for change, message in (
            ({"model.layers.9.mlp.up_proj.weight": good[name]}, "1 unknown: model.layers.9"),
            ({name: good[name][1:]}, rf"1 misshapen: {name} is \[55, 72\], the model's is \[56, 72\]"),
            (
                {name: good[name].half()},
                r"1 of another dtype: .*float16, the model's is torch.float32; give tensor.to\(",
            ),
            ({name: good[name].to(torch.float8_e4m3fn)}, "1 of another dtype: .*float8"),
            ({"lm_head.weight": good["model.embed_tokens.weight"] + 1}, "1 contradictory: lm_head.weight differs"),
        ):
            with pytest.raises(WeightsError, match="nothing was written:\n.*" + message):
                lm.update_weights(good | change)
        for weights, error, message in (
            ({}, WeightsError, "no weights"),
            ([(name, good[name])] * 2, WeightsError, "given twice"),
            ({name: [1.0]}, TypeError, "got list"),
            (["a"], TypeError, "tensors by name"),
            (folder_of("qwen2", 0), WeightsError, "has another config than the served model: .*model_type"),
            (tmp_path / "none", FileNotFoundError, "no such folder"),
        ):
            with pytest.raises(error, match=message):
                lm.update_weights(weights)
        with pytest.raises(ValueError, match="no draft model"):
            lm.update_weights(good, draft=True)
        assert_is(lm, other)


def sharded(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor, as FSDP's parameters are."""
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    return distribute_tensor(tensor, DeviceMesh("cpu", [0]), [Shard(0)])


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a freed memory, as FSDP leaves parameters between passes: reading it ends the process."""
    found = tensor.clone()
    found.untyped_storage().resize_(0)
    return found


@pytest.fixture
def one_process_group() -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_tensors_without_values_here_are_refused_and_end_nothing(
    folder_of: Callable[[str, int], Path], one_process_group: None
):
    name = "model.layers.1.mlp.up_proj.weight"
    with load(folder_of("llama", 0)) as lm, load(folder_of("llama", 0)) as other:
        good = tensors_of(folder_of("llama", 1), lm)
        for change in (sharded, freed, torch.Tensor.to_sparse, lambda tensor: tensor.to("meta")):
            with pytest.raises(WeightsError, match=rf"{name}: .* has no values in memory"):
                lm.update_weights(good | {name: change(good[name])})
            with pytest.raises(WeightsError, match=rf"{name}: .* has no values in memory"):
                SentWeights({name: change(good[name])})
        assert_is(lm, other)
        lm.update_weights(good | {name: sharded(good[name]).full_tensor()})


def test_weights_of_the_model_itself_may_change_places(folder_of: Callable[[str, int], Path]):
    names = ["model.layers.{}.mlp.up_proj.weight", "model.layers.{}.self_attn.k_proj.weight"]
    with load(folder_of("llama", 0)) as lm:
        own = lm.runner.get_model().state_dict()
        kept = {name.format(i): own[name.format(i)].clone() for name in names for i in range(2)}
        lm.update_weights({name.format(i): own[name.format(1 - i)] for name in names for i in range(2)})
        for name in names:
            assert_same([own[name.format(i)] for i in range(2)], [kept[name.format(1 - i)] for i in range(2)])
        lm.update_weights({names[0].format(0): own[names[0].format(0)].flip(0).flip(0)})


def test_a_write_that_fails_ends_the_engine(folder_of: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch):
    from pymllm_interp.client.handle import EngineClosedError
    from pymllm_interp.models.updates import WeightUpdate

    with load(folder_of("llama", 0)) as lm:
        monkeypatch.setattr(WeightUpdate, "write", lambda self: 1 / 0)
        with pytest.raises(EngineClosedError, match="written in part: ZeroDivisionError"):
            lm.update_weights(tensors_of(folder_of("llama", 1), lm))
        with pytest.raises(EngineClosedError, match="written in part"):
            lm.generate([[1]], greedy())


# -- layouts of their own, adapters, drafts --------------------------------------------------------


def quantised(form: str, folder_of: Callable[[str, int], Path], root: Path, seed: int) -> Path:
    """A checkpoint in this format."""
    if form == "mxfp4":
        config = CONFIGS["gpt_oss"]()
        config.hidden_size, config.intermediate_size = 96, 64
        random_model(config, seed).save_pretrained(root / f"base{seed}")
        return in_mxfp4(root / f"base{seed}", root / f"stored{seed}", root / f"plain{seed}")[0]
    return write_quantized(folder_of("llama", seed), root / f"{form}{seed}", form)


SLOW_FORMS = [pytest.param(form, marks=pytest.mark.slow) for form in ("gptq", "fp8-channel", "w4a16", "w8a16")]
FORMS = ["fp8-blocks", "awq", "mxfp4", *SLOW_FORMS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_codes_are_written_in_their_layout(
    form: str, device: str, folder_of: Callable[[str, int], Path], tmp_path: Path
):
    """Of a checkpoint's format: as a folder, and as tensors. Without scales, or unquantised, they are refused."""
    first, second = (quantised(form, folder_of, tmp_path, seed) for seed in (0, 1))
    with load(first, device, impl="native") as lm, load(second, device, impl="native") as other:
        old, tensors = seen(lm), tensors_of(second, lm)
        lm.update_weights(second)
        assert_is(lm, other)
        lm.update_weights(first)
        assert_same(seen(lm), old)
        scale = next(name for name in tensors if name.endswith(("scale_inv", "scales", "_scale", "down_proj_scales")))
        with pytest.raises(WeightsError):
            lm.update_weights({name: tensor for name, tensor in tensors.items() if name != scale})
        if form != "mxfp4":
            with pytest.raises(WeightsError, match=r"unquantised: .*codes"):
                lm.update_weights(tensors_of(folder_of("llama", 1), lm))
        assert_same(seen(lm), old)
        lm.update_weights(tensors)
        assert_is(lm, other)


def test_unquantised_weights_are_rounded_as_at_load(folder_of: Callable[[str, int], Path]):
    with load(folder_of("llama", 0), quantize="fp8") as lm, load(folder_of("llama", 1), quantize="fp8") as other:
        lm.update_weights(tensors_of(folder_of("llama", 1), lm))
        assert_is(lm, other)
        with pytest.raises(
            WeightsError, match=r"29 of another dtype: .*model\.layers\.0\.mlp\.down_proj\.weight is torch\.float16"
        ):
            lm.update_weights({n: t.half() for n, t in tensors_of(folder_of("llama", 0), lm).items()})
        assert_is(lm, other)


def test_experts_come_one_by_one_or_not_at_all(folder_of: Callable[[str, int], Path]):
    with load(folder_of("glm4_moe", 0)) as lm, load(folder_of("glm4_moe", 0)) as other:
        new = tensors_of(folder_of("glm4_moe", 1), lm)
        left_out = next(name for name in new if ".experts.2.up_proj" in name)
        with pytest.raises(WeightsError, match=r"gate_up_proj: 1 tensors are missing.*experts\.2\.up_proj"):
            lm.update_weights({name: tensor for name, tensor in new.items() if name != left_out})
        assert_is(lm, other)


def test_an_adapter_adds_to_the_new_weights(folder_of: Callable[[str, int], Path], tmp_path: Path):
    with load(folder_of("llama", 0)) as lm, load(folder_of("llama", 1)) as other:
        adapter = write_adapter(tmp_path / "a", random_model(CONFIGS["llama"]()))
        lm.adapters.load("a", adapter)
        other.adapters.load("a", adapter)
        seen(lm, lora="a")
        lm.update_weights(tensors_of(folder_of("llama", 1), lm))
        assert_is(lm, other, lora="a")
        assert_is(lm, other)


def test_drafts_follow_and_are_updated_themselves(folder_of: Callable[[str, int], Path]):
    """With the model's weights a draft model is right each time."""
    draft = drafted_by(folder_of("llama", 0))
    with load(folder_of("llama", 0), speculative=draft) as lm, load(folder_of("llama", 1)) as other:
        new, expected = tensors_of(folder_of("llama", 1), lm), other.generate(PROMPTS, greedy(24))

        lm.generate(PROMPTS, greedy(24))
        lm.update_weights(new)
        tokens = [output.outputs[0].token_ids for output in expected]
        assert [o.outputs[0].token_ids for o in lm.generate(PROMPTS, greedy(24))] == tokens
        poor = lm.generate(PROMPTS, greedy(24), interventions=[Steer("resid_post.1", torch.zeros(72))])
        lm.update_weights(new, draft=True)
        good = lm.generate(PROMPTS, greedy(24), interventions=[Steer("resid_post.1", torch.zeros(72))])
        for outputs in (poor, good):
            assert [o.outputs[0].token_ids for o in outputs] == tokens
        rates = [sum(o.receipt.accepted for o in outs) / sum(o.receipt.drafted for o in outs) for outs in (poor, good)]
        assert rates[0] < 0.9 < rates[1]


# -- in any order --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 50))])
def test_any_order_of_updates_and_requests(seed: int, folder_of: Callable[[str, int], Path], tmp_path: Path):
    """Each token is the one that an engine with its weights makes of the tokens before it."""
    draw = random.Random(seed)
    family = draw.choice(["llama", "qwen2"])
    options: dict[str, Any] = {"kv_cache_tokens": draw.choice([160, 512])}
    if draw.random() < 0.3:
        options["quantize"] = "fp8"
    elif draw.random() < 0.3:
        options["impl"] = "transformers"
    if draw.random() < 0.3:
        options["speculative"] = drafted_by(folder_of(family, 2))
    with (
        load(folder_of(family, 0), **options) as lm,
        load(folder_of(family, 0), **options) as a,
        load(folder_of(family, 1), **options) as b,
    ):
        engines, now = [a, b], 0
        adapter = write_adapter(tmp_path / "a", random_model(CONFIGS[family]()), seed=seed)
        for each in (lm, a, b):
            each.adapters.load("a", adapter)
        weights = [tensors_of(folder_of(family, i), lm) for i in (0, 1)]
        versions, handles = {lm.weights.version: 0}, []
        for _ in range(draw.randint(6, 12)):
            match draw.choice(["submit", "submit", "update", "pause", "resume", "sleep"]):
                case "submit":
                    prompt = draw.choice(PROMPTS) + [draw.randrange(90)] * draw.randint(0, 3)
                    lora = draw.choice([None, None, "a"])
                    capture = draw.choice([(), (), ("resid_post.1",)])
                    handles.append(
                        (prompt, lora, lm.submit(prompt, greedy(draw.randint(1, 30)), lora=lora, capture=capture))
                    )
                case "update":
                    now = 1 - now
                    versions[lm.update_weights(weights[now])] = now
                case "pause":
                    lm.pause(draw.choice(["keep", "keep", "wait", "abort"]))
                case "resume":
                    lm.resume()
                case "sleep":
                    time.sleep(draw.random() / 50)
        lm.resume()
        last = versions[lm.weights.version]
        for prompt, lora, handle in handles:
            output = handle.result()
            tokens, done = output.outputs[0].token_ids, 0
            parts = output.receipt.weights if output.receipt is not None else []
            if not parts:  # all of one version: which one, its tokens say
                made = [
                    e.generate([prompt], greedy(len(tokens)), lora=lora)[0].outputs[0].token_ids
                    for e in engines
                    if tokens
                ]
                assert not tokens or tokens in made
                continue
            for version, count in parts:
                if count:
                    expected = engines[versions[version]].generate([prompt + tokens[:done]], greedy(count), lora=lora)
                    assert tokens[done : done + count] == expected[0].outputs[0].token_ids
                done += count
            assert done == len(tokens)
        assert_is(lm, engines[last])
