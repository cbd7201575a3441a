"""K and V in FP8: against the model's dtype, and alike however a request comes to its K and V."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_quantized import write_quantized
from helpers_runner import random_ids
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from pymllm_interp import LM, SamplingParams
from pymllm_interp.attention import create_attention_backend
from pymllm_interp.interventions import Knockout
from pymllm_interp.mem_cache.memory_pool import FP8, KVPool, read_rows, write_rows
from pymllm_interp.models.weights.loading import WeightsError

PROMPTS = [random_ids(length, seed=length) for length in (1, 17, 33, 64)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_running_requests": 4, "page_size": 4}


@pytest.mark.parametrize("scale", [1.0, 0.03, 7.0])
def test_rows_are_rounded_with_their_scale_and_bounded(scale: float) -> None:
    stored = torch.zeros(9, 2, 4, dtype=FP8)
    rows = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)) * scale
    rows[0, 0, 0], rows[1, 0, 0] = 1e9, float("-inf")
    slots = torch.tensor([7, 2, 4])
    write_rows(stored, slots, rows, scale)
    expected = (rows / scale).clamp(-448, 448).to(FP8).float() * scale
    found = read_rows(stored, slots, torch.float32, scale)
    assert torch.equal(found, expected) and found[0, 0, 0] == 448 * scale == -found[1, 0, 0]
    assert not read_rows(stored, torch.tensor([0, 1, 3, 5, 6, 8]), torch.float32).any()


def test_pages_move_bit_for_bit() -> None:
    pool = KVPool(2, 16, 2, 4, FP8, "cpu", 4, {1: (0.5, 2.0)})
    assert pool.scales(0) == (1, 1) and pool.scales(1) == (0.5, 2.0)
    k, v = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(0)).unbind()
    for layer in range(2):
        pool.set_kv(layer, torch.tensor([4, 5, 6]), k, v)
    pool.copy([4, 5, 6], [8, 9, 10])
    pool.swap_in([12, 13, 14], pool.swap_out([8, 9, 10]))
    for layer in range(2):
        for stored in (part.view(torch.uint8) for part in pool.get_kv(layer)):
            assert (
                torch.equal(stored[4:7], stored[12:15]) and torch.equal(stored[4:7], stored[8:11]) and stored[4:7].any()
            )


class RoundedCache(DynamicCache):
    """transformers' cache, of rounded K and V."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key, value = (x.clamp(-448, 448).to(FP8).to(x.dtype) for x in (key_states, value_states))
        return super().update(key, value, *args, **kwargs)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral", "qwen3"])
def test_logits_are_those_of_transformers_with_rounded_k_and_v(
    family: str, model_folder: Callable[[str], Path]
) -> None:
    """In both passes, which have the same bits. One K on the other side of a rounding changes a row a little."""
    folder = model_folder(family)
    oracle: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with LM(folder, kv_cache_tokens=512, kv_cache_dtype="fp8", **SMALL) as lm:
        assert lm.runner.token_to_kv_pool is not None and lm.runner.token_to_kv_pool.dtype is FP8
        for ids in PROMPTS:
            with torch.no_grad():
                exact = oracle(torch.tensor([ids])).logits[0]
                expected = oracle(torch.tensor([ids]), past_key_values=RoundedCache(config=oracle.config)).logits[0]
            found = lm.forward([ids])[0].logits
            cosine = torch.nn.functional.cosine_similarity(found, expected, dim=-1)
            assert float(cosine.min()) > 0.9999
            assert float((found - expected).abs().mean()) < 0.1 * float((found - exact).abs().mean())
            with lm.trace(ids):
                traced = lm.logits.save()
            assert torch.equal(traced[-1:], found[-1:])


@pytest.mark.local
def test_real_weights_lose_little() -> None:
    ids = list(range(1000, 1024))
    with LM("demo", device="cpu", dtype="bfloat16", kv_cache_tokens=512, max_running_requests=4) as lm:
        expected = lm.forward([ids])[0].logits.float()
    with LM(
        "demo", device="cpu", dtype="bfloat16", kv_cache_tokens=512, max_running_requests=4, kv_cache_dtype="fp8"
    ) as lm:
        found = lm.forward([ids])[0].logits.float()
    assert float(torch.nn.functional.cosine_similarity(found, expected, dim=-1).min()) > 0.995


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_however_the_kv_is_made_tokens_are_the_same(family: str, model_folder: Callable[[str], Path]) -> None:
    """Decoding, in chunks, from the prefix cache and after preemption: what is stored is what every pass reads."""
    folder, fp8 = model_folder(family), SMALL | {"kv_cache_dtype": "fp8"}
    with LM(folder, kv_cache_tokens=512, enable_prefix_caching=False, **fp8) as lm:
        expected = [lm.generate([ids], GREEDY)[0].outputs[0].token_ids for ids in PROMPTS]
    with LM(folder, kv_cache_tokens=160, max_num_tokens=16, **fp8) as lm:
        for _ in range(2):
            outs = lm.generate(PROMPTS, GREEDY)
            assert [out.outputs[0].token_ids for out in outs] == expected
        assert any(out.num_cached_tokens for out in outs)


@pytest.mark.parametrize("stored", ["fp8", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_knockouts_and_patterns_read_the_stored_k_and_v(
    stored: str, family: str, model_folder: Callable[[str], Path]
) -> None:
    """A cut of edges that carry nothing changes nothing; patterns of a wider cache are those of another width, nearly."""
    ids = PROMPTS[2]
    with LM(model_folder(family), kv_cache_tokens=256, **SMALL) as lm:
        expected = lm.generate([ids], GREEDY, capture=["pattern.1"])[0].activations["pattern.1"]
    with LM(model_folder(family), kv_cache_tokens=256, kv_cache_dtype=stored, **SMALL) as lm:
        found = lm.generate([ids], GREEDY, capture=["pattern.1"])[0].activations["pattern.1"]
        assert float((found - expected).abs().mean()) < (0.01 if stored == "fp8" else 0.001)
        plain = lm.forward([ids])[0].logits
        later = lm.forward([ids], interventions=[Knockout("*", from_=20, to=3)])[0].logits
        assert torch.equal(plain[:20], later[:20]) and not torch.allclose(plain[20:], later[20:], atol=1e-3)


def test_scales_of_a_checkpoint_are_used(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    folder = write_quantized(model_folder("llama"), tmp_path / "m", "w8a16")
    file = folder / "model.safetensors"
    stored = load_file(file)

    def logits_with(**scales: torch.Tensor) -> tuple[torch.Tensor, KVPool]:
        named = {f"model.layers.{name.replace('_', '.self_attn.', 1)}_scale": scale for name, scale in scales.items()}
        save_file(stored | named, file, {"format": "pt"})
        with LM(folder, kv_cache_tokens=256, kv_cache_dtype="fp8", **SMALL) as lm:
            assert lm.runner.token_to_kv_pool is not None
            return lm.forward([PROMPTS[2]])[0].logits, lm.runner.token_to_kv_pool

    plain, _ = logits_with()
    found, pool = logits_with(**{"1_k": torch.tensor(2.0), "0_v": torch.tensor([0.5])})
    assert [pool.scales(layer) for layer in range(3)] == [(1, 0.5), (2, 1), (1, 1)]
    close = torch.nn.functional.cosine_similarity(found, plain, dim=-1)
    assert float(close.min()) > 0.995
    bounded, _ = logits_with(**{"1_v": torch.tensor(1e-6)})
    assert not torch.allclose(plain, bounded, atol=1e-3), "V is at most 448 times its scale"
    with pytest.raises(WeightsError, match=r"layers\.1\.self_attn\.v_scale is not one positive number"):
        logits_with(**{"1_v": torch.tensor([1.0, 2.0])})


def test_flashinfer_refuses_other_dtypes_before_the_first_step() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype=torch.float16: .*'fp8'.*attention_backend='torch'"):
        create_attention_backend("flashinfer", "cuda", torch.bfloat16, 128, torch.float16)
