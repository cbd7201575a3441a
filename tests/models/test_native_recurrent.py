"""Qwen3.5 and Qwen3-Next by our own classes: module by module as transformers, fused bit for bit, in segments and from checkpoints.

test_recurrent.py has what does not depend on the implementation: chunks, slots, preemption, ops.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_adapters import adapted, write_adapter
from helpers_classes import state_gradient
from helpers_devices import ways
from helpers_graphs import use_eager_graphs
from helpers_runner import ByHand, make_runner, random_ids
from registry_configs import registry_config
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.core.forward_batch import ForwardMode
from pymllm_interp.runner.partition import Execution

FAMILIES = "qwen3_5_text", "qwen3_next"
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-4}
SIZES: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "kv_cache_tokens": 512, "page_size": 4, "max_running_requests": 4, "max_model_len": 96,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [random_ids(n, seed=n) for n in (9, 1, 70)]


def model_of(name: str, weights: Any = None) -> Any:
    config = copy.deepcopy(registry_config(name))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    if weights is not None:
        model.load_state_dict(weights)
    return model


def first(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[LM, Any]]:
    """An LM with captured decode passes, and transformers' model."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_eager_graphs(monkeypatch)
        lm = LM(
            **with_tuning(
                hf_config=registry_config(request.param),
                load_format="dummy",
                impl="native",
                hook_execution="segments",
                lower_traces="off",
                **SIZES,
            ),
        )
        yield lm, model_of(request.param, lm.runner.get_model().state_dict())
        lm.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_fused_pass_is_the_module_by_module_pass_bit_for_bit(name: str, dtype: str) -> None:
    """Logits, hidden states and the states that are kept: of prompts, steps, both, and a chunk behind another."""
    runner = make_runner(registry_config(name), dtype=dtype, kv_cache_tokens=2048, page_size=4, max_running_requests=8)
    passes = [
        (ForwardMode.EXTEND, {0: random_ids(7), 1: random_ids(1, seed=1), 2: random_ids(66, seed=2)}),
        (ForwardMode.DECODE, {0: [5], 1: [6], 2: [7]}),
        (ForwardMode.MIXED, {0: [8], 2: [9], 1: random_ids(6, seed=4), 3: random_ids(17, seed=5)}),
        (ForwardMode.DECODE, {3: [1]}),
    ]
    hand, pool = ByHand(runner), runner.gdn_pool
    for mode, tokens in passes:
        batch, found = hand.batch(tokens, mode), []
        batch.return_hidden_states = True
        before = [state.clone() for state in pool.states]
        for execution in (Execution.PLAIN, Execution.MODULES):
            for state, old in zip(pool.states, before, strict=True):
                state.copy_(old)
            out = runner.forward(batch, execution)
            found.append([out.next_token_logits, out.hidden_states, *(state[1:].clone() for state in pool.states)])
        assert all(map(torch.equal, *found)), mode
        assert found[0][0].isfinite().all()
    runner.shutdown()


@torch.no_grad()
def modules_of(model: Any, layer: str) -> list[str]:
    """The modules of a layer, itself included, in the order of their outputs."""
    order: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, path=path: order.append(path))
        for path, module in model.named_modules()
        if f"{path}.".startswith(f"{layer}.")
    ]
    model(torch.tensor([PROMPTS[0]]))
    for handle in handles:
        handle.remove()
    return list(dict.fromkeys(path for path in order if not path.endswith("experts.act_fn")))


def read(lm: LM, paths: list[str], prompt: list[int], steps: int) -> list[torch.Tensor]:
    with lm.generate(prompt, max_new_tokens=steps, ignore_eos=True) as tracer:
        seen = list().save()  # pyright: ignore[reportAttributeAccessIssue]
        for _ in tracer.iter[0:steps]:
            for path in paths:
                seen.append(first(lm.get(path).output).clone())
            seen.append(lm.lm_head.output[:, -1].clone())
    return seen


@pytest.mark.parametrize("layer", [0, 1])
def test_each_modules_output_is_transformers_in_a_prompt_and_in_segments(pair: tuple[LM, Any], layer: int) -> None:
    """Alone and all together, of a layer with states and of one with attention; a read changes no bit of the logits."""
    lm, model = pair
    modules = modules_of(model, f"model.layers.{layer}")
    assert len(modules) >= 11
    plain = read(lm, [], PROMPTS[0], 4)
    tokens = [int(logits.argmax()) for logits in plain]
    whole: dict[str, torch.Tensor] = {}

    def keep(path: str) -> Any:
        return lambda module, args, output: whole.__setitem__(path, first(output))

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in modules]
    model(torch.tensor([PROMPTS[0] + tokens[:-1]]))
    for handle in handles:
        handle.remove()
    rows = len(PROMPTS[0]) + 3
    for paths in (*([path] for path in modules), modules):
        before = ways(lm)
        found = read(lm, paths, PROMPTS[0], 4)
        assert (ways(lm) - before)["segments"] == 3, paths
        assert all(map(torch.equal, found[len(paths) :: len(paths) + 1], plain)), paths
        for i, path in enumerate(paths):
            ours = torch.cat([value.reshape(-1, whole[path].numel() // rows) for value in found[i :: len(paths) + 1]])
            torch.testing.assert_close(
                ours, whole[path].reshape(rows, -1), **CLOSE, msg=lambda m, path=path: f"{path}: {m}"
            )


@pytest.mark.parametrize("child", ["", ".norm", ".out_proj"])
def test_a_traces_edit_in_a_layer_with_states_is_transformers_beside_others(pair: tuple[LM, Any], child: str) -> None:
    lm, model = pair
    path = f"model.layers.0.linear_attn{child}"
    expected = lm.generate(PROMPTS[1:], GREEDY)
    handles = [lm.submit(prompt, GREEDY) for prompt in PROMPTS[1:]]
    with lm.generate(PROMPTS[0], max_new_tokens=5, ignore_eos=True) as tracer:
        seen = list().save()  # pyright: ignore[reportAttributeAccessIssue]
        for _ in tracer.iter[0:5]:
            lm.get(path).output[:] *= -0.5
            seen.append(lm.lm_head.output[:, -1].clone())
        ids = tracer.result.save()
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: output * -0.5)
    logits = model(ids[:, :-1]).logits[0, len(PROMPTS[0]) - 1 :]
    handle.remove()
    torch.testing.assert_close(torch.cat(seen), logits, **CLOSE)
    assert [handle.result().token_ids for handle in handles] == [out.token_ids for out in expected]


def test_gradients_of_a_prompt_are_transformers(pair: tuple[LM, Any]) -> None:
    lm, model = pair
    with lm.trace(PROMPTS[0]):
        hidden = lm.get("model.layers.0").output
        with lm.lm_head.output[0, -1].square().sum().backward():
            found = hidden.grad.save()
    wanted = state_gradient(model, PROMPTS[0])
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_an_adapter_inside_of_a_layer_with_states_is_its_merged_weights(pair: tuple[LM, Any], tmp_path: Path) -> None:
    lm, model = pair
    inner = "in_proj_qkv" if "5" in lm.model_spec.family.name else "in_proj_qkvz"
    folder = write_adapter(tmp_path, copy.deepcopy(model), targets=[inner, "out_proj"])
    lm.adapters.load("a", folder)
    handles = [lm.submit(PROMPTS[0], GREEDY, capture=["resid_post.2"], lora=name) for name in ("a", None)]
    found: list[torch.Tensor] = []
    for handle, oracle in zip(handles, (adapted(model, folder), model), strict=True):
        out, layer = handle.result(), oracle.get_submodule("model.layers.2")
        hook = layer.register_forward_hook(lambda module, args, output: found.append(output[0]))
        oracle(torch.tensor([PROMPTS[0] + out.token_ids[:-1]]))
        hook.remove()
        assert float((out.activations["resid_post.2"] - found[-1]).abs().max() / found[-1].abs().max()) < 1e-4
    assert float((found[0] - found[1])[: len(PROMPTS[0])].abs().max() / found[1].abs().max()) > 1e-2


def test_checkpoints_of_the_multimodal_model_are_read(tmp_path: Path) -> None:
    """Without their part for images and their head for drafts."""
    model = model_of("qwen3_5_text")
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    tensors |= {"mtp.fc.weight": torch.ones(2), "model.visual.merger.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(tmp_path)
    with LM(tmp_path, impl="native", **SIZES) as lm, torch.no_grad():
        torch.testing.assert_close(
            lm.forward(PROMPTS[0])[0].logits, model(torch.tensor([PROMPTS[0]])).logits[0], **CLOSE
        )


def test_a_sweep_runs_by_requests_and_weights_are_not_quantised(pair: tuple[LM, Any]) -> None:
    lm, model = pair
    base, source = random_ids(6, seed=1), random_ids(6, seed=2)
    sweep = lm.patch_sweep(base, source, site="resid_post", metric=(5, 7))
    assert sweep.how == "requests (the model has recurrent states)"
    states: list[torch.Tensor] = []
    layer = model.get_submodule("model.layers.1")
    handle = layer.register_forward_hook(lambda module, args, output: states.append(output))
    model(torch.tensor([source]))
    handle.remove()

    def patch(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat((output[:, :2], states[0][:, 2:3], output[:, 3:]), 1)

    handle = layer.register_forward_hook(patch)
    logits = model(torch.tensor([base])).logits[0, -1]
    handle.remove()
    torch.testing.assert_close(sweep.values[1, 2], logits[5] - logits[7], **CLOSE)
    with pytest.raises(ValueError, match="has experts or states, and is not quantised"):
        LM(hf_config=lm.runner.get_model().config, load_format="dummy", quantize="fp8", **SIZES)


def test_a_mixture_with_dense_layers_runs_by_its_class() -> None:
    config = copy.deepcopy(registry_config("qwen3_next"))
    config.mlp_only_layers = [1]
    with LM(hf_config=config, load_format="dummy", **SIZES) as lm:
        assert not lm.runner.get_model().fuses_ops


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter; tests/gpu has the same on CUDA"
)
@pytest.mark.parametrize("name", ["qwen3_5_text", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_passes_by_the_triton_kernels_are_those_by_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, chunks, steps and all of them in one pass, with slots that were not zero before."""
    pytest.importorskip("triton", reason="the kernels' tests need the package triton")
    from pymllm_interp.kernels import triton_delta

    passes = [
        (ForwardMode.EXTEND, {0: random_ids(7), 1: random_ids(1, seed=1), 2: random_ids(30, seed=2)}),
        (ForwardMode.MIXED, {0: [8], 2: [9], 1: random_ids(6, seed=4), 3: random_ids(5, seed=5)}),
        (ForwardMode.DECODE, {3: [1], 0: [5], 1: [6]}),
    ]
    found: list[list[torch.Tensor]] = []
    for modules in ([], ["layers.delta", "models.native.qwen3_5"]):
        for module in modules:
            monkeypatch.setattr(f"pymllm_interp.{module}.triton_kernels_for", lambda x: triton_delta)
        runner = make_runner(registry_config(name), kv_cache_tokens=512, page_size=4, max_running_requests=8)
        for state in runner.gdn_pool.states:
            state.fill_(float("nan"))
        hand = ByHand(runner)
        found.append([runner.forward(hand.batch(tokens, mode)).next_token_logits for mode, tokens in passes])
        found[-1] += [state[1:5] for state in runner.gdn_pool.states]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
        assert ours.isfinite().all()
