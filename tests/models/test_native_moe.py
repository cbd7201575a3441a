"""Native mixtures of experts: checkpoints, routing, traces inside them, and what runs by its class instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import tiny_config
from helpers_devices import DEVICES
from helpers_graphs import use_eager_graphs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, Capture, Gate, SamplingParams, Steer
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.models.weights.loading import WeightsError

FAMILIES = ("mixtral", "qwen3_moe", "olmoe")
PROMPTS = [[5, 17, 3, 9, 40], [6, 2], [7, 8, 9, 10, 11, 12, 13, 14]]
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-5}
SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_tokens": 512, "max_running_requests": 4}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of transformers, and its checkpoint, which has three tensors for each expert."""
    torch.manual_seed(3)
    config = tiny_config(request.param)
    config.tie_word_embeddings = request.param == "mixtral"
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():  # experts are told apart
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def tensors_of(folder: Path, layers: int = 2) -> dict[str, torch.Tensor]:
    """Of a checkpoint with so many layers of experts."""
    found = load_file(folder / "model.safetensors")
    assert sum(".experts.1." in name for name in found) == 3 * layers, "transformers writes another format now"
    return found


def with_tensors(folder: Path, tensors: dict[str, torch.Tensor], to: Path) -> Path:
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_a_checkpoint_of_experts_is_read(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    with LM(folder, impl="native", **SIZES) as lm, torch.no_grad():
        for prompt, out in zip(PROMPTS, lm.forward(PROMPTS), strict=True):
            torch.testing.assert_close(out.logits, model(torch.tensor([prompt])).logits[0], **CLOSE)


def test_tensors_in_any_order_and_in_transformers_own_format_are_read(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = saved
    with LM(folder, impl="native", **SIZES) as lm:
        (expected,) = lm.forward(PROMPTS[:1])
    merged = {
        name: tensor.contiguous() for name, tensor in model.state_dict().items()
        if not (model.config.tie_word_embeddings and name == "lm_head.weight")
    }  # fmt: skip
    with LM(with_tensors(folder, merged, tmp_path / "merged"), impl="native", **SIZES) as lm:
        assert torch.equal(lm.forward(PROMPTS[:1])[0].logits, expected.logits)


@pytest.mark.parametrize("fault", ["missing", "one too many", "misshapen", "named twice", "int8", "float8", "scalars"])
def test_experts_that_do_not_fit_are_named(saved: tuple[Any, Path], fault: str, tmp_path: Path) -> None:
    _, folder = saved
    tensors = tensors_of(folder)
    name = next(name for name in tensors if ".experts.2." in name)
    named = re.search(r"layers\.\d+\..*experts\.2\.", name)
    if fault == "missing":
        del tensors[name]
    elif fault == "one too many":
        tensors[name.replace(".2.", ".4.")] = tensors[name].clone()
    elif fault == "misshapen":
        tensors[name] = tensors[name][:-1].clone()
    elif fault == "named twice":
        tensors[name.replace(".2.", ".02.")] = tensors[name] + 1
    elif fault == "scalars":
        tensors |= {other: torch.tensor(0.5) for other in tensors if other.endswith(name.rpartition(".2.")[2])}
    else:
        tensors[name] = tensors[name].to(torch.int8 if fault == "int8" else torch.float8_e4m3fn)
    with pytest.raises(WeightsError) as error:
        LM(with_tensors(folder, tensors, tmp_path / "m"), impl="native", **SIZES)
    wanted = {"one too many": ".experts.4.", "named twice": ".experts.02."}.get(fault, ".experts.2.")
    assert named and wanted in str(error.value)


def test_an_expert_that_is_not_there_gives_nan_to_its_row_alone(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    with LM(folder, impl="native", **SIZES) as lm:
        plain = lm.forward(PROMPTS)
        for wrong in (4, -1, 1 << 40):
            with lm.trace() as tracer:
                with tracer.invoke(PROMPTS[0]):
                    lm.model.layers[0].mlp.gate.output[2][1, 0] = wrong
                    own = lm.model.layers[0].mlp.output.save()
                with tracer.invoke(PROMPTS[1]):
                    other = lm.lm_head.output.save()
            assert own[0, 1].isnan().all() and not own[0, [0, 2]].isnan().any()
            torch.testing.assert_close(other[0], plain[1].logits, **CLOSE)


def test_a_row_is_routed_alike_whatever_else_is_in_the_batch(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    params = SamplingParams(temperature=0, max_tokens=8)
    with LM(folder, impl="native", **SIZES) as lm:
        together = lm.generate(PROMPTS, params, capture=["resid_post.*"])
        for prompt, out in zip(PROMPTS, together, strict=True):
            (alone,) = lm.generate([prompt], params, capture=["resid_post.*"])
            assert alone.token_ids == out.token_ids
            for site, states in alone.activations.items():
                torch.testing.assert_close(states, out.activations[site], **CLOSE)


@pytest.mark.parametrize("path", ["mlp.gate", "mlp.experts", "mlp"])
def test_blocks_read_and_edit_the_modules_of_experts(saved: tuple[Any, Path], path: str) -> None:
    """The router gives logits, scores and ids; the edit bans the expert that each token likes best."""
    model, folder = saved
    name = f"model.layers.0.{path}"

    def edited(found: Any) -> Any:
        if not isinstance(found, tuple):
            return found * 0.5
        return (found[0], found[1] * torch.tensor([0.0, 1.0]), found[2])

    kept: list[Any] = []

    def hook(module: Any, args: Any, out: Any) -> Any:
        kept.append(out)
        return edited(out)

    with LM(folder, impl="native", **SIZES) as lm, torch.no_grad():
        with lm.trace() as tracer:
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    read = lm.get(name).output.save()
            with tracer.invoke(PROMPTS[0]):
                lm.get(name).output = edited(lm.get(name).output)
                logits = lm.lm_head.output.save()
        model(torch.tensor([PROMPTS[-1]]))
        handle = model.get_submodule(name).register_forward_hook(hook)
        expected = model(torch.tensor([PROMPTS[0]])).logits
        model(torch.tensor([PROMPTS[-1]]))
        handle.remove()
        torch.testing.assert_close(logits, expected, **CLOSE)
        ours, theirs = (value if isinstance(value, tuple) else (value,) for value in (read, kept[-1]))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.reshape(other.shape), other, **CLOSE)


def test_rows_inside_experts_go_to_a_request_that_is_alone(saved: tuple[Any, Path]) -> None:
    """An expert gets the rows of all requests that chose it: no block may read or edit those of another request."""
    model, folder = saved
    kept: list[torch.Tensor] = []
    path = "model.layers.1.mlp.experts.act_fn"
    act = model.get_submodule(path)
    with LM(folder, impl="native", **SIZES) as lm, torch.no_grad():
        with lm.trace(PROMPTS[2]) as tracer:
            seen = lm.get(path).output.save()
        assert tracer.receipt.eager_parts or tracer.receipt.steps == {"modules": 1}
        handle = act.register_forward_hook(lambda _, args, out: kept.append(out))
        model.set_experts_implementation("eager")
        model(torch.tensor([PROMPTS[2]]))
        handle.remove()
        torch.testing.assert_close(seen, kept[0], **CLOSE)  # of the first expert that a token chose
        plain = lm.forward([PROMPTS[1]])[0].logits

        def read() -> None:
            lm.get(path).output.save()

        def assign() -> None:
            lm.get(path).output = torch.zeros(1, 48)

        def skip() -> None:
            lm.get(path).skip(torch.zeros(1, 48))

        for wrong in (read, assign, skip):
            with pytest.raises(RuntimeError, match=r"act_fn.*: it is \[.*several requests.*max_running_requests=1"):
                with lm.trace() as tracer:
                    with tracer.invoke(PROMPTS[0]):
                        wrong()
                    with tracer.invoke(PROMPTS[1]):
                        logits = lm.lm_head.output.save()
            lm.engine.scheduler.check_integrity()
        with lm.trace() as tracer:
            with tracer.invoke(PROMPTS[0]):
                lm.model.layers[0].output.save()
            with tracer.invoke(PROMPTS[1]):
                logits = lm.lm_head.output.save()
        torch.testing.assert_close(logits[0], plain, **CLOSE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a_request_alone_in_a_padded_pass_sees_its_own_rows_inside_experts(
    saved: tuple[Any, Path], impl: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA passes are padded to captured sizes. Rows of padding would be among those of the experts."""
    if device == "cpu":
        use_eager_graphs(monkeypatch)
    _, folder = saved
    path = "model.layers.1.mlp.experts.act_fn"
    sizes = SIZES | {"device": device, "prefill_graph_tokens": 64, "max_num_tokens": 128}
    seen = []
    for options in ({"disable_cuda_graph": True}, {}):
        with LM(folder, **with_tuning(impl=impl, **sizes | options)) as lm:
            with lm.trace(PROMPTS[2]):
                seen.append(lm.get(path).output.save())
            with lm.generate(PROMPTS[2], max_new_tokens=3, ignore_eos=True) as tracer:
                steps = list().save()
                for _ in tracer.iter[:]:
                    steps.append(lm.get(path).output.save())
            seen[-1] = [seen[-1], *steps]
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_what_the_native_classes_do_not_compute_runs_by_its_class() -> None:
    dense = tiny_config("qwen3_moe")
    dense.mlp_only_layers = [0]
    clipped = tiny_config("olmoe")
    clipped.clip_qkv = 0.5
    for config in (dense, clipped):
        with LM(hf_config=config, load_format="dummy", **SIZES) as lm:
            assert type(lm.runner.get_model()).__module__.startswith("pymllm_interp.models.transformers")
        with pytest.raises(ValueError, match="no native implementation for this config"):
            LM(hf_config=config, load_format="dummy", impl="native", **SIZES)
    with pytest.raises(ValueError, match="MixtralForCausalLM has experts or states, and is not quantised"):
        LM(hf_config=tiny_config("mixtral"), load_format="dummy", quantize="fp8", **SIZES)


@contextmanager
def shifted_logits(model: Any, layer: int, shift: torch.Tensor, kept: list[torch.Tensor]) -> Iterator[None]:
    """transformers' own router of a layer, with `shift` added to its logits."""
    gate = model.model.layers[layer].mlp.gate
    product = torch.nn.functional.linear

    def forward(hidden: torch.Tensor) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", lambda *args: product(*args) + shift)
            found = type(gate).forward(gate, hidden)
        kept.append(product(hidden.reshape(-1, hidden.shape[-1]), gate.weight) + shift)
        return found

    gate.forward = forward
    try:
        yield
    finally:
        del gate.forward


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_routers_are_captured_and_experts_banned(saved: tuple[Any, Path], device: str) -> None:
    """Each request chooses among its own experts, beside others, in prompts and generated tokens."""
    model, folder = saved
    experts = model.config.get_text_config().num_local_experts
    ban, force = torch.zeros(experts), torch.zeros(experts)
    ban[1], force[2] = -1e4, 1e4
    sizes = SIZES | {"device": device, "inner_sites": ("router",)}
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LM(folder, **with_tuning(impl="native", **sizes)) as lm, torch.no_grad():
        assert "router.*" in lm.sites
        shifts = [None, ban, force]
        handles = [
            lm.submit(
                prompt, greedy, capture=["router.*"],
                interventions=[] if shift is None else [Steer("router.1", shift)],
            )
            for prompt, shift in zip(PROMPTS, shifts, strict=True)
        ]  # fmt: skip
        for prompt, shift, handle in zip(PROMPTS, shifts, handles, strict=True):
            out = handle.result()
            found = out.outputs[0].activations
            kept: list[torch.Tensor] = []
            shift = torch.zeros(experts) if shift is None else shift
            with shifted_logits(model, 1, shift, kept):
                logits = model(torch.tensor([prompt + out.token_ids[:-1]])).logits[0]
            assert out.token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist()
            torch.testing.assert_close(found["router.1"].cpu(), kept[0], **CLOSE)
            assert found["router.0"].shape == (len(prompt) + 3, experts)
        cache = lm.run_with_cache(PROMPTS[0])[1]
        assert cache["router.1"].shape == (1, len(PROMPTS[0]), experts)
        with lm.trace(PROMPTS[0]) as tracer:
            chosen = lm.model.layers[1].mlp.gate.output.save()
        assert len(chosen) == 3 and not tracer.receipt.lowered
        with pytest.raises(ValueError, match=r"router\.1 is not served here"):
            lm.run_with_hooks(PROMPTS[0], fwd_hooks=[("router.1", lambda value, hook: value)])


def test_routers_are_sites_of_native_mixtures_only(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    with LM(folder, impl="transformers", **SIZES) as lm:
        assert "router.*" not in lm.sites
        with pytest.raises(ValueError, match="no site 'router'"):
            lm.generate([PROMPTS[0]], SamplingParams(max_tokens=1), capture=["router.0"])


def test_a_checkpoint_of_glm_is_read_without_the_layers_behind_the_last(
    model_folder: Any, oracle: Any, tmp_path: Path
) -> None:
    """Its first layer is dense, and its router's correction is a buffer."""
    model, folder = oracle("glm4_moe"), model_folder("glm4_moe")
    tensors = tensors_of(folder, layers=2)
    extra = {f"model.layers.3.{name}": torch.zeros(2) for name in ("eh_proj.weight", "mlp.experts.0.gate_proj.weight")}
    with LM(with_tensors(folder, tensors | extra, tmp_path / "m"), impl="native", **SIZES) as lm, torch.no_grad():
        correction = lm.runner.get_model().get_submodule("model.layers.2.mlp.gate").e_score_correction_bias
        assert torch.equal(correction, tensors["model.layers.2.mlp.gate.e_score_correction_bias"]) and correction.any()
        for prompt, out in zip(PROMPTS, lm.forward(PROMPTS), strict=True):
            torch.testing.assert_close(out.logits, model(torch.tensor([prompt])).logits[0], **CLOSE)


def test_sites_of_experts_are_in_layers_that_have_them(lm_of: Any, oracle: Any) -> None:
    """GLM's router: an expert is banned for one request, where its correction ranks it high. The shared experts are steered."""
    lm, model = lm_of("glm4_moe"), oracle("glm4_moe")
    (out,) = lm.generate([PROMPTS[0]], SamplingParams(max_tokens=0), capture=["router.*", "shared_out.*"])
    assert sorted(out.activations) == ["router.1", "router.2", "shared_out.1", "shared_out.2"]
    with pytest.raises(ValueError, match=r"router\.0.*first 1 layers have no experts"):
        lm.generate([PROMPTS[0]], SamplingParams(max_tokens=0), capture=["router.0"])
    logits = out.activations["router.1"]
    (_, scores, ids), gate = (
        (
            value := model.model.layers[1].mlp.gate(
                torch.linalg.lstsq(model.model.layers[1].mlp.gate.weight, logits.T).solution.T
            )
        ),
        lm.runner.get_model().get_submodule("model.layers.1.mlp.gate"),
    )
    ours = gate.choose(logits)
    assert torch.equal(ours[1].sort().values, ids.sort().values) and value is not None
    torch.testing.assert_close(ours[0].sort().values, scores.sort().values, **CLOSE)
    ban = torch.zeros(lm.model_spec.width("router"))
    ban[int(ids[-1, 0])] = -1e4
    (banned,) = lm.generate(
        [PROMPTS[0]],
        SamplingParams(max_tokens=0),
        interventions=[Steer("router.1", ban)],
        capture=["router.1", "mlp_out.1"],
    )
    assert int(ids[-1, 0]) not in gate.choose(banned.activations["router.1"])[1][-1]
    vector = torch.linspace(-1, 1, lm.model_spec.hidden_size)
    steered, plain = (
        lm.generate([PROMPTS[0]], SamplingParams(max_tokens=0), interventions=edits, capture=["mlp_out.1"])[
            0
        ].activations
        for edits in ([Steer("shared_out.1", vector)], [])
    )
    torch.testing.assert_close(steered["mlp_out.1"], plain["mlp_out.1"] + vector, **CLOSE)


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe", "mixtral"])
@pytest.mark.parametrize("execution", ["split", "eager"])
def test_the_chosen_experts_are_captured(family: str, execution: str) -> None:
    """Beside other requests, in prompts and generated tokens; what a block writes to a router's output is among them."""
    options: dict[str, Any] = {"load_format": "dummy", "hook_execution": execution, **SIZES}
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LM(**with_tuning(hf_config=tiny_config(family), **options)) as lm:
        name = lm.model_spec.family.router
        router = lm.runner.get_model().get_submodule(f"model.layers.1.mlp.{name}")
        for out in lm.generate(PROMPTS, greedy, capture=["router.1", "experts.*"]):
            states, logits = out.activations["experts.1"], out.activations["router.1"]
            scores, ids = router.choose(logits)
            assert states.shape == (len(logits), 2, 2) and torch.equal(states[:, 0].long(), ids)
            torch.testing.assert_close(states[:, 1], scores, **CLOSE)
            assert ("experts.0" in out.activations) == (family != "glm4_moe")
        with lm.generate(PROMPTS[0], max_new_tokens=1, capture=["experts.1"]) as tracer:
            lm.get(f"model.layers.1.mlp.{name}").output[2][0, 0] = 3
        assert tracer.activations["experts.1"][0, 0, 0] == 3
        with pytest.raises(ValueError, match=r"experts\.1 is only captured; an op or a gate at router\.1"):
            Steer("experts.1", torch.ones(4))
        with pytest.raises(ValueError, match=r"experts\.1 is only captured"):
            Steer("resid_post.1", torch.ones(32), when=Gate(torch.ones(4), site="experts.1"))


def test_ids_of_experts_that_a_dtype_rounds_are_refused() -> None:
    """bfloat16 has no 257: a capture would name another expert."""
    spec = ModelSpec.of(tiny_config("qwen3_moe"), torch.bfloat16)
    assert Capture("experts.1").sites_in(replace(spec, num_experts=257))
    many = replace(spec, num_experts=512)
    for capture, model in (
        (Capture("experts.1"), many),
        (Capture("experts.*", dtype="bfloat16"), replace(many, dtype=torch.float32)),
    ):
        with pytest.raises(ValueError, match=r"bfloat16 holds ids up to 256 exactly.* 512 experts: capture router\.i"):
            capture.sites_in(model)
    assert Capture("experts.1").sites_in(replace(many, dtype=torch.float16))
    assert Capture("router.1").sites_in(many)
