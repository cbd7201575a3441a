"""LoRA adapters in bfloat16 on CUDA: graphs of their own, steps with prompts, and what an adapter leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_adapters import adapted, write_adapter
from helpers_devices import ways
from helpers_runner import random_ids
from transformers import AutoModelForCausalLM, LlamaConfig

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.client.calls.lm_arguments import with_tuning

pytestmark = pytest.mark.gpu
CONFIG: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PROMPTS = [random_ids(3 + 11 * i % 70, vocab=512, seed=i) for i in range(33)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True, skip_reading_prefix_cache=True)
NAMES = [None if i % 5 == 4 else f"a{i % 5}" for i in range(33)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model in float32 with weights that bfloat16 holds, and its folder with adapters of several ranks."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    found: Any = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).to(torch.bfloat16).float().eval()
    found.save_pretrained(folder / "base")
    for seed, rank in enumerate((1, 8, 16, 64)):
        write_adapter(folder / f"a{seed}", found, rank=rank, seed=seed, scale=0.1 if rank < 64 else 0.03)
    write_adapter(folder / "zero", found, rank=64, scale=0.0)
    return found, folder


@pytest.fixture(scope="module")
def lm(model: tuple[Any, Path]) -> Iterator[LM]:
    options: dict[str, Any] = {"kv_cache_tokens": 16384, "max_running_requests": 40, "capture_ring_bytes": 64 << 20}
    with LM(model[1] / "base", **with_tuning(dtype="bfloat16", device="cuda", lower_traces="off", **options)) as lm:
        yield lm


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    cosine = torch.nn.functional.cosine_similarity(ours.float(), theirs, dim=-1)
    assert float(cosine.min()) > 0.999, cosine


def test_an_adapter_of_zeros_changes_no_bit(lm: LM, model: tuple[Any, Path]) -> None:
    """In replayed decode steps, and in steps with prompts, which the plain requests replay."""
    plain = lm.generate(PROMPTS, PARAMS)
    lm.adapters.load("zero", model[1] / "zero")
    zero = lm.generate(PROMPTS, PARAMS, lora="zero")
    lm.adapters.unload("zero")
    for one, two in zip(plain, zero, strict=True):
        assert (
            one.outputs[0].token_ids == two.outputs[0].token_ids and one.outputs[0].logprobs == two.outputs[0].logprobs
        )


def test_mixed_batches_are_those_of_peft_and_replayed(lm: LM, model: tuple[Any, Path]) -> None:
    base, folder = model
    allocated = torch.cuda.memory_allocated()
    for name in ("a0", "a1", "a2", "a3"):
        lm.adapters.load(name, folder / name)
    before = ways(lm)
    outs = lm.generate(PROMPTS, PARAMS, lora=NAMES)
    assert (ways(lm) - before)["replay"] >= 10
    models = {None: base} | {name: adapted(base, folder / name) for name in ("a0", "a1", "a2", "a3")}
    for ids, name, out, alone in zip(PROMPTS, NAMES, outs, lm.forward(PROMPTS, lora=NAMES), strict=True):
        tokens = out.outputs[0].token_ids
        with torch.no_grad():
            logits = models[name](torch.tensor([ids + tokens])).logits[0]
        close(alone.logits, logits[: len(ids)])
        # Decoded tokens are the likeliest ones, but for near ties.
        at = logits[len(ids) - 1 : -1]
        lost = at.max(-1).values - at.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert float(lost.max()) < 0.1 * float(at.std()), name
    for name in ("a0", "a1", "a2", "a3"):
        lm.adapters.unload(name)
    assert not any(variant.adapted for variant in lm.runner.graphs.decoders)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + (8 << 20), "the last adapter takes the memory with it"


def test_graphs_that_are_captured_again_leave_the_prefix_cache_as_it_was(lm: LM, model: tuple[Any, Path]) -> None:
    """The rows of the step before are in the input buffers: here those of cached prompts, after a step with an adapter."""
    once, prompt = SamplingParams(temperature=0, max_tokens=1, logprobs=2), random_ids(65, vocab=512, seed=99)
    lm.adapters.load("a3", model[1] / "a3")
    lm.generate(PROMPTS, PARAMS, lora="a3")
    lm.adapters.unload("a3")
    _, (expected,) = [lm.generate([prompt], once, cache_salt="one") for _ in range(2)]
    lm.generate([prompt], once, cache_salt="two")
    lm.adapters.load("a2", model[1] / "a2")
    (found,) = lm.generate([prompt], once, cache_salt="two")
    lm.adapters.unload("a2")
    assert found.num_cached_tokens == expected.num_cached_tokens >= 64
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs


@pytest.mark.parametrize("steered", [False, True])
def test_replays_have_the_tokens_of_eager_passes(steered: bool, lm: LM, model: tuple[Any, Path]) -> None:
    """Kernel by kernel, and from graphs: the same kernels at the same shapes."""
    folder = model[1]
    vector = torch.randn(256, generator=torch.Generator().manual_seed(1))
    prompts = PROMPTS[:32]  # a captured size: an eager decode pass is not padded
    ops: Any = [[Steer("resid_post.1", vector, 0.3)] if i % 3 == 0 else None for i in range(32)] if steered else None
    for name in ("a1", "a3"):
        lm.adapters.load(name, folder / name)
    names = [(None, "a1", "a3")[i % 3] for i in range(32)]
    replayed = lm.generate(prompts, PARAMS, lora=names, interventions=ops)
    graphs = lm.runner.graphs.decoders.copy()
    lm.runner.graphs.decoders.clear()
    eager = lm.generate(prompts, PARAMS, lora=names, interventions=ops)
    lm.runner.graphs.decoders.update(graphs)
    for one, two in zip(replayed, eager, strict=True):
        assert (
            one.outputs[0].token_ids == two.outputs[0].token_ids and one.outputs[0].logprobs == two.outputs[0].logprobs
        )
    for name in ("a1", "a3"):
        lm.adapters.unload(name)


def test_blocks_between_segments_see_the_deltas(lm: LM, model: tuple[Any, Path]) -> None:
    base, folder = model
    lm.adapters.load("a2", folder / "a2")
    with lm.generate(max_new_tokens=8) as tracer:
        with tracer.invoke(PROMPTS[7], lora="a2"):
            changed = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for _ in tracer.iter[:]:
                changed.append(lm.model.layers[2].mlp.down_proj.output[:, -1].clone())
            changed_tokens = tracer.result.save()
        with tracer.invoke(PROMPTS[7]):
            plain = list().save()  # pyright: ignore[reportAttributeAccessIssue]
            for _ in tracer.iter[:]:
                plain.append(lm.model.layers[2].mlp.down_proj.output[:, -1].clone())
            plain_tokens = tracer.result.save()
    found = (changed, changed_tokens, adapted(base, folder / "a2")), (plain, plain_tokens, base)
    for states, tokens, own in found:
        seen: list[torch.Tensor] = []
        handle = own.model.layers[2].mlp.down_proj.register_forward_hook(
            lambda m, a, out, s=seen: s.append(out.detach())
        )
        with torch.no_grad():
            own(tokens.cpu())
        handle.remove()
        close(torch.cat(list(states)).cpu(), seen[0][0, len(PROMPTS[7]) - 1 : -1])
    lm.adapters.unload("a2")


def test_slots_are_written_while_requests_run(model: tuple[Any, Path]) -> None:
    """Two slots, four adapters, one after the other beside a long request."""
    _, folder = model
    with LM(
        folder / "base", dtype="bfloat16", device="cuda", kv_cache_tokens=8192, max_running_requests=8, max_loras=2
    ) as lm:
        for name in ("a0", "a1", "a2", "a3"):
            lm.adapters.load(name, folder / name)
        alone = {
            name: lm.generate([PROMPTS[3]], PARAMS, lora=name)[0].outputs[0].token_ids
            for name in ("a0", "a1", "a2", "a3")
        }
        long = lm.submit(PROMPTS[5], SamplingParams(temperature=0, max_tokens=600, ignore_eos=True), lora="a3")
        for _ in range(3):
            for name in ("a0", "a1", "a2"):
                assert lm.generate([PROMPTS[3]], PARAMS, lora=name)[0].outputs[0].token_ids[:4] == alone[name][:4], name
        long.cancel()
        long.wait()
