"""Native families other than Llama's kin: segments, replayed steps, traces, transformers' outputs, prefixes and preemption.

What does not depend on a family's module names runs over all families in the other files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import held
from helpers_devices import DEVICES, ways
from helpers_graphs import captured_lms
from helpers_runner import random_ids
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from pymllm_interp import LM, SamplingParams, Scale, Steer
from pymllm_interp.core.model_spec import INNER_SITES, NUMBERED_SITES
from pymllm_interp.hooks.site import WITHOUT_LAYER

FAMILIES = ["gpt2", "gpt_neox", "gemma2", "gemma3_text", "gpt_oss", "glm4_moe"]
PROMPT, OTHERS = random_ids(9, seed=1), [random_ids(4, seed=2), random_ids(17, seed=3)]
CLOSE: Any = {"rtol": 1e-4, "atol": 1e-4}
WAIT = 600

Load = Callable[..., LM]


@pytest.fixture(scope="module")
def load(model_folder: Callable[[str], Path]) -> Iterator[Load]:
    sizes = {"kv_cache_tokens": 2048, "max_running_requests": 8, "capture_ring_bytes": 64 << 20}
    with captured_lms(model_folder, hook_execution="segments", **sizes) as found:
        yield found


def first(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def read(lm: LM, paths: list[str], prompts: list[list[int]], steps: int = 6) -> list[list[torch.Tensor]]:
    """What the requests' blocks read of these modules in their decode steps, and the logits, request by request."""
    found: list[Any] = []
    with lm.generate(max_new_tokens=steps) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                seen = list().save()  # pyright: ignore[reportAttributeAccessIssue]
                for step in tracer.iter[:]:
                    for path in paths if step else []:
                        seen.append(first(lm.get(path).output).clone())
                    seen.append(lm.logits)
                found.append(seen)
    return found


@torch.no_grad()
def modules_of(model: PreTrainedModel, layer: str) -> list[str]:
    """The modules of a layer, itself included, in the order of their outputs in transformers."""
    order, handles = [], []
    for path, module in model.named_modules():
        if f"{path}.".startswith(f"{layer}.") and not isinstance(module, nn.Dropout):
            handles.append(module.register_forward_hook(lambda *_, path=path: order.append(path)))
    model(torch.tensor([PROMPT]))
    for handle in handles:
        handle.remove()
    return order


@pytest.mark.few("family", "gpt_neox", "gpt_oss")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_read_of_any_module_in_segments_is_what_the_eager_pass_gives(
    family: str, device: str, load: Load, oracle: Callable[[str], PreTrainedModel]
) -> None:
    """Each module of a layer by itself, then all of them; a read changes no bit of the logits."""
    segments, eager = load(device, family), load(device, family, hook_execution="eager")
    modules = modules_of(oracle(family), f"{segments.model_spec.family.layers}.1")
    modules = [path for path in modules if not path.endswith(".experts.act_fn")]  # it runs once for each expert
    assert len(modules) >= 10
    (plain,) = read(segments, [], [PROMPT])
    for paths in (*([path] for path in modules), modules):
        before = ways(segments)
        (ours,) = read(segments, paths, [PROMPT])
        ran = ways(segments) - before
        assert ran["segments"] == 5, (paths, ran, ours[0].shape)
        (theirs,) = read(eager, paths, [PROMPT])
        assert len(ours) == 6 + 5 * len(paths)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, **CLOSE, msg=lambda text, paths=paths: f"{paths}: {text}")
        assert all(map(torch.equal, [ours[0], *ours[1 + len(paths) :: len(paths) + 1]], plain)), paths


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_traces_edit_of_a_contribution_is_transformers_beside_requests_that_keep_their_tokens(
    family: str, device: str, load: Load, oracle: Callable[[str], PreTrainedModel]
) -> None:
    """In the midst of replayed steps, at each place where the residual stream is added to."""
    lm, model = load(device, family), oracle(family)
    row, params = lm.model_spec.family, SamplingParams(temperature=0, max_tokens=8)
    expected = [out.token_ids for out in lm.generate(OTHERS, params)]
    for kind in ("attn_out", "mlp_out", "resid_post"):
        path = row.points[kind].module.format(0)
        with held(lm) as arrived:
            handles = [lm.submit(prompt, params) for prompt in OTHERS]
            arrived(2)
        with lm.generate(PROMPT, max_new_tokens=6) as tracer:
            seen = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for _ in tracer.iter[:]:
                first(lm.get(path).output)[:] *= -0.5
                seen.append(lm.logits)
            ids = tracer.result.save()

        def edit(module: nn.Module, args: Any, out: Any) -> Any:
            return (-0.5 * out[0], *out[1:]) if isinstance(out, tuple) else -0.5 * out

        handle = model.get_submodule(path).register_forward_hook(edit)
        with torch.no_grad():
            logits = model(ids[:, :-1].cpu()).logits[0, len(PROMPT) - 1 :]
        handle.remove()
        torch.testing.assert_close(torch.cat(seen).cpu(), logits, **CLOSE)
        assert [h.result(WAIT).token_ids for h in handles] == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_function_at_each_site_does_what_the_declared_op_does(family: str, device: str, load: Load) -> None:
    """Also at q, k and v, which are slices of one projection's output in some families, and at logits behind a soft-cap."""
    lm = load(device, family, inner_sites=INNER_SITES)
    (plain,) = lm.forward(PROMPT)
    for kind in lm.model_spec.family.points:
        if kind not in NUMBERED_SITES or kind in ("router", "experts"):  # only captured, or declared
            continue
        site, shape = f"{kind}.1" if kind not in WITHOUT_LAYER else kind, lm.model_spec.shape(kind)

        def scaled(value: torch.Tensor, hook: Any, site: str = site, shape: tuple[int, ...] = shape) -> torch.Tensor:
            assert str(hook.site) == site and value.shape == (1, len(PROMPT), *shape)
            return -1.5 * value

        logits = lm.run_with_hooks(PROMPT, [(site, scaled)])
        (declared,) = lm.forward(PROMPT, interventions=[Scale(site, -1.5)])
        torch.testing.assert_close(logits[0], declared.logits, **CLOSE, msg=lambda text, site=site: f"{site}: {text}")
        assert not torch.allclose(logits[0], plain.logits, rtol=1e-3, atol=1e-3), site


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers(
    family: str, device: str, load: Load, oracle: Callable[[str], PreTrainedModel]
) -> None:
    lm, model = load(device, family), oracle(family)
    path = f"{lm.model_spec.family.layers}.0"
    with lm.trace(PROMPT):
        h = first(lm.get(path).output)
        loss = lm.output.logits[0, -1].square().sum()
        with loss.backward():
            found = h.grad.save()
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, out: Any) -> Any:
        kept.append(first(out).detach().requires_grad_())
        return (kept[0], *out[1:]) if isinstance(out, tuple) else kept[0]

    handle = model.get_submodule(path).register_forward_hook(keep)
    with torch.enable_grad():
        model(torch.tensor([PROMPT])).logits[0, -1].square().sum().backward()
    handle.remove()
    model.zero_grad()
    wanted = kept[0].grad
    assert wanted is not None and wanted.abs().max() > 1e-3
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_attentions_and_hidden_states_are_those_of_transformers(
    family: str, device: str, load: Load, oracle: Callable[[str], PreTrainedModel]
) -> None:
    """In a trace's prefill and its steps, with declared ops beside."""
    lm, model = load(device, family), oracle(family)
    with lm.generate(PROMPT, max_new_tokens=3, output_attentions=True, output_hidden_states=True) as tracer:
        found = list().save()  # pyright: ignore[reportAttributeAccessIssue]
        for _ in tracer.iter[:]:
            found.append((lm.output.attentions, lm.output.hidden_states))
        ids = tracer.result.save()
    with torch.no_grad():
        out = model(ids[:, :-1].cpu(), output_attentions=True, output_hidden_states=True)
    for step, (attentions, states) in enumerate(found):
        rows = slice(0, len(PROMPT)) if step == 0 else slice(len(PROMPT) + step - 1, len(PROMPT) + step)
        assert len(states) == len(attentions) + 1 == lm.model_spec.num_hidden_layers + 1
        for ours, theirs in zip(states, out.hidden_states, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs[:, rows], **CLOSE)
        for ours, theirs in zip(attentions, out.attentions, strict=True):
            keys = theirs[:, :, rows, : rows.stop]
            torch.testing.assert_close(ours.cpu(), keys[..., -ours.shape[-1] :], **CLOSE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate_in_chunks_after_preemption_and_from_a_shared_prefix(
    family: str, device: str, load: Load, oracle: Callable[[str], PreTrainedModel]
) -> None:
    options = {"kv_cache_tokens": 96, "page_size": 4, "max_num_tokens": 16, "enable_prefix_caching": True}
    lm, shared = load(device, family, **options), random_ids(18, seed=7)
    prompts = [shared + random_ids(n, seed=n) for n in (3, 1, 9, 5, 2)]
    steer = Steer("attn_out.0", torch.linspace(-1, 1, lm.model_spec.hidden_size), positions="generated")
    before = lm.engine.stats()
    outs = lm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), interventions=[[], [], [steer], [], []])
    after = lm.engine.stats()
    assert after["preempted"] > before["preempted"]
    again = lm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=12))[0]
    assert again.token_ids == outs[0].token_ids and again.num_cached_tokens >= 16
    for i, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
        if i != 2:
            with torch.no_grad():
                logits = oracle(family)(torch.tensor([prompt + out.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
            assert logits.argmax(-1).tolist() == out.token_ids


@pytest.mark.parametrize(("family", "renamed", "buffers"), [
    ("gpt2", ("transformer.", ""), ["h.0.attn.bias", "h.1.attn.masked_bias"]),
    ("gpt_neox", ("lm_head.", "embed_out."), [f"gpt_neox.layers.0.attention.{name}" for name in ("bias", "rotary_emb.inv_freq")]),
])  # fmt: skip
def test_checkpoints_with_the_names_of_the_hub_are_read(
    family: str,
    renamed: tuple[str, str],
    buffers: list[str],
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    load: Load,
) -> None:
    """Of the decoder alone, of a head under its old name, and with masks that follow from the config."""
    source = model_folder(family)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path)
    tensors = {name.replace(*renamed, 1): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    assert any(name.startswith(renamed[1] or "wte") for name in tensors)
    save_file({**tensors, **{name: torch.ones(2) for name in buffers}}, tmp_path / "model.safetensors")
    (wanted,) = load("cpu", family).forward(PROMPT)
    with LM(tmp_path, dtype="float32", device="cpu") as lm:
        assert torch.equal(lm.forward(PROMPT)[0].logits, wanted.logits)
