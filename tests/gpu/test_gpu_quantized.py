"""Quantised weights in bfloat16 on CUDA: every site beside dequantised weights, graphs, adapters, and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_adapters import write_adapter
from helpers_devices import ways
from helpers_families import points_of
from helpers_quantized import write_quantized
from helpers_runner import random_ids
from transformers import AutoModelForCausalLM, LlamaConfig

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.calls.lm_arguments import with_tuning
from pymllm_interp.core.model_spec import INNER_SITES

pytestmark = pytest.mark.gpu
CONFIG: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PROMPTS = [random_ids(3 + 11 * i % 70, vocab=512, seed=i) for i in range(33)]
LONG = [random_ids(400, vocab=512, seed=50)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, skip_reading_prefix_cache=True)
OPTIONS: dict[str, Any] = {
    "kv_cache_tokens": 16384, "max_running_requests": 40, "capture_ring_bytes": 64 << 20, "inner_sites": INNER_SITES,
}  # fmt: skip


@pytest.fixture(scope="module", params=["fp8-channel", "fp8-blocks", "w4a16", "awq", "w8a16"])
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LM, LM, LM, Path]]:
    """The quantised model, the same with dequantised weights, these in float32, and an adapter of it."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("model")
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).eval()
    model.save_pretrained(root / "base")
    settings = {"weight_block_size": [24, 32]} if request.param == "fp8-blocks" else {}
    folder = write_quantized(root / "base", root / "m", request.param, group=32, **settings)
    adapter = write_adapter(root / "a", model, rank=8, scale=0.1)
    made = [LM(path, **with_tuning(dtype="bfloat16", device="cuda", **OPTIONS)) for path in (folder, folder / "plain")]
    made.append(LM(folder / "plain", **with_tuning(dtype="float32", device="cuda", **OPTIONS)))
    yield made[0], made[1], made[2], adapter
    for lm in made:
        lm.shutdown()


def angle(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """1 less the lowest cosine of rows."""
    return 1 - float(
        torch.nn.functional.cosine_similarity(ours.double().flatten(1), theirs.double().flatten(1), dim=-1).min()
    )


def close(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """Quantised weights are as near to float32 as dequantised weights in bfloat16 are."""
    off, allowed = angle(ours, exact), angle(plain, exact)
    assert off < 2 * allowed + 1e-5, f"{what}: {off}, and dequantised {allowed}"


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS, LONG], ids=["one", "batch", "long"])
def test_every_site_is_as_with_dequantised_weights(trio: tuple[LM, LM, LM, Path], prompts: list[list[int]]) -> None:
    """Few rows by the kernel, more than 256 by the dequantised weight."""
    *models, _ = trio
    points = list(points_of(models[0].model_spec))
    for outs in zip(*(model.forward(prompts, capture=points) for model in models), strict=True):
        close(*(out.logits for out in outs), "logits")
        for site in points:
            close(*(out.activations[site] for out in outs), site)


def test_decode_steps_are_replayed_and_near(trio: tuple[LM, LM, LM, Path]) -> None:
    lm, plain, _, _ = trio
    before = ways(lm)
    outs, again = lm.generate(PROMPTS, PARAMS), lm.generate(PROMPTS, PARAMS)
    after = ways(lm)
    assert sum(count - before.get(way, 0) for way, count in after.items() if str(way).startswith("replay")) >= 20
    assert [out.outputs[0].token_ids for out in outs] == [out.outputs[0].token_ids for out in again]
    expected = plain.generate(PROMPTS, PARAMS)
    first = [a.outputs[0].token_ids[0] == b.outputs[0].token_ids[0] for a, b in zip(outs, expected, strict=True)]
    assert sum(first) >= 30


def test_adapters_traces_and_gradients_run_on_quantised_weights(trio: tuple[LM, LM, LM, Path]) -> None:
    *models, adapter = trio
    found = []
    for model in models:
        model.adapters.load("a", adapter)
        logits = model.forward(PROMPTS[:4], lora=["a", None, "a", None])
        with model.trace(PROMPTS[1]):
            h = model.model.layers[0].output
            loss = model.lm_head.output.float().logsumexp(-1).sum()
            with loss.backward():
                grad = h.grad.save()
        model.adapters.unload("a")
        found.append((torch.cat([out.logits for out in logits]), grad))
    close(*(logits for logits, _ in found), "logits with adapters")
    close(*(grad.flatten(0, -2) for _, grad in found), "gradients")


def test_weights_read_as_dequantised_on_the_device(trio: tuple[LM, LM, LM, Path]) -> None:
    lm, plain, _, _ = trio
    for path in ("model.layers.0.self_attn.k_proj", "model.layers.2.mlp.down_proj"):
        ours, theirs = (model.runner.get_model().get_submodule(path).weight for model in (lm, plain))
        assert ours.is_cuda and torch.equal(ours.as_subclass(torch.Tensor), theirs.as_subclass(torch.Tensor))


def test_memory_holds_the_codes_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG | {"hidden_size": 512})).save_pretrained(tmp_path)
    sizes = []
    for quantize in (None, "fp8"):
        with LM(tmp_path, **with_tuning(dtype="bfloat16", device="cuda", quantize=quantize, **OPTIONS)) as lm:
            tensors = lm.runner.get_model().state_dict().values()
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
            head = sum(
                t.nbytes
                for t in (lm.runner.get_model().lm_head.weight, lm.runner.get_model().model.embed_tokens.weight)
            )
            sizes.append(sum(storages.values()) - head)
    assert sizes[1] < 0.53 * sizes[0]
