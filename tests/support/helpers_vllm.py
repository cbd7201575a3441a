"""Tiny models that vLLM's CPU kernels take, engines of vLLM over them, and comparisons with our own engine."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, random_model, tiny_tokenizer
from helpers_server import CHAT_TEMPLATE
from helpers_vision import PREPROCESSORS, PROCESSOR_SIZES, QWEN, WORDS, vision_config, vision_model, vision_tokenizer
from helpers_vllm_start import fork_engines
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from pymllm_interp import LM, SamplingParams
from pymllm_interp.client.completion import RequestOutput
from pymllm_interp.core.events import EngineClosedError
from pymllm_interp.vllm_engine.versions import installed_version

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not in this environment: make test-vllm has one")
"""For tests that start vLLM."""


def is_since(first: str) -> bool:
    """Whether vLLM has this version or a later one."""
    return HAS_VLLM and Version(installed_version()) >= Version(first)


def since(first: str, why: str) -> pytest.MarkDecorator:
    """Skips tests with versions of vLLM before this one. Any version that is accepted runs the others (`VLLM_CPU_VERSION`)."""
    return pytest.mark.skipif(HAS_VLLM and not is_since(first), reason=f"vLLM before {first}: {why}")


WIDTH, LAYERS = 96, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "mixtral": lambda: MixtralConfig(
        **{**SIZES, "num_key_value_heads": 1}, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "gemma2": lambda: Gemma2Config(
        **SIZES, query_pre_attn_scalar=16, attn_logit_softcapping=4.0, final_logit_softcapping=12.0, sliding_window=24
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, query_pre_attn_scalar=32, sliding_window=24, layer_types=["sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=True,
    ),
    "lfm2": lambda: Lfm2Config(
        **{**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1}, layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False, conv_dim=WIDTH, block_dim=WIDTH, block_multiple_of=32, block_ffn_dim_multiplier=1.0,
    ),
    "gpt_oss": lambda: GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=24),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=3, n_head=3, n_positions=512, n_inner=128, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    ),
}  # fmt: skip
V2 = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable that .ci/vllm-tests sets for the V2 runner: vLLM asks for Triton when it is imported."""
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}
V2_DRAFTS = since("0.32", "its V2 runner has neither n-grams nor draft models")
"""Skips cases of such drafts with the V2 runner."""
LORA = {"enable_lora": True, "max_loras": 2}
IMAGE_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
TOLERANCE = 1e-4
"""Of states and log probabilities in float32, relative to the largest."""


def save_model(family: str, folder: Path, **changes: Any) -> Path:
    """A random model of a family, with a tokenizer and a chat template.

    Args:
        changes: settings of the config.
    """
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return save_config(config, folder)


def save_config(config: PretrainedConfig, folder: Path) -> Path:
    """A random model of a config, with a tokenizer and a chat template."""
    random_model(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def save_image_model(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random model that reads images, with its tokenizer and image processor.

    Args:
        changes: settings of the text config.
    """
    config = vision_config(family, **{**IMAGE_SIZES, **changes})
    if WORDS[family] is QWEN:
        config.text_config.rope_parameters |= {"mrope_section": [8, 4, 4], "mrope_interleaved": family == "qwen3_vl"}
        config.vision_config.out_hidden_size = config.text_config.hidden_size
        config.text_config.tie_word_embeddings = False
    vision_model(config, seed).save_pretrained(folder)
    if family.startswith("llava"):  # by the names of LLaVA's own checkpoints, which vLLM reads
        tensors = load_file(folder / "model.safetensors")
        named = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in tensors.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    vision_tokenizer(family).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[family]))
    if family in PROCESSOR_SIZES:
        (folder / "processor_config.json").write_text(json.dumps(PROCESSOR_SIZES[family]))
    return folder


def vllm_lm(folder: Path | str, **options: Any) -> LM:
    """An LM over vLLM on the CPU: small, eager and in float32, unless `options` say otherwise."""
    fork_engines()
    small = {
        "dtype": "float32", "max_model_len": 128, "max_running_requests": 8, "kv_cache_tokens": 2048, "disable_cuda_graph": True,
        "gpu_memory_utilization": 0.05,
    }  # fmt: skip
    return LM(folder, engine="vllm", **{**small, **options})


def own_lm(folder: Path | str, dtype: str = "float32", **options: Any) -> LM:
    """Our own engine over the same folder. Without prefixes, for which it would cut prompts of models with states."""
    return LM(
        folder, dtype=dtype, device="cpu", max_model_len=128, kv_cache_tokens=2048, max_running_requests=8,
        enable_prefix_caching=False, **options,
    )  # fmt: skip


def needs_runner(second: bool) -> None:
    """Skip a test where the process has the other one of vLLM's runners."""
    if second != (os.environ.get(V2) == "1"):
        pytest.skip(f".ci/vllm-tests runs this with {V2}={int(second)}")


@contextmanager
def both_engines(
    family: str, factory: pytest.TempPathFactory, environment: Mapping[str, str], **options: Any
) -> Iterator[tuple[LM, LM]]:
    """vLLM with these options, and our own engine over the same weights. The end of vLLM leaves no shared memory."""
    folder = save_model(family, factory.mktemp(family))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_CACHE_ROOT", str(_nothing_compiled(factory)))
        two_ranks(patch, options)
        with vllm_lm(folder, **options) as lm, own_lm(folder) as oracle:
            files = shared_files(lm)
            yield lm, oracle
        assert not [file for file in files if file.exists()]


def _nothing_compiled(factory: pytest.TempPathFactory) -> Path:
    """A cache folder for vLLM without compiled code, whose keys do not tell all changes. What it knows of model classes stays.

    For each unknown class a process imports vLLM.
    """
    from vllm import envs  # pyright: ignore[reportMissingImports]

    known, root = Path(envs.VLLM_CACHE_ROOT) / "modelinfos", factory.mktemp("cache")
    known.mkdir(parents=True, exist_ok=True)
    (root / known.name).symlink_to(known)
    return root


def two_ranks(patch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Give ranks the two cores by turns, where `options` ask for several."""
    ranks = math.prod(options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    if ranks > 1:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(rank % 2) for rank in range(ranks)))


def ranks_of(lm: LM) -> list[Any]:
    """The processes (psutil) of vLLM's ranks, in their order."""
    import psutil  # pyright: ignore[reportMissingModuleSource]

    own: Any = lm.backend
    return [psutil.Process(rank["pid"]) for rank in own.core.ranks]


def engine_of(lm: LM) -> Any:
    """The process (psutil) of vLLM's engine, above several ranks."""
    return ranks_of(lm)[0].parent()


def vector(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (WIDTH,)), generator=torch.Generator().manual_seed(seed))


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB - 2, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(found: RequestOutput, wanted: RequestOutput) -> None:
    """Equal tokens, positions and counts; states and log probabilities within `TOLERANCE`."""
    assert found.prompt_token_ids == wanted.prompt_token_ids
    for one, other in zip(found.outputs, wanted.outputs, strict=True):
        assert one.token_ids == other.token_ids and one.text == other.text
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        assert_close_logprobs(one.logprobs, other.logprobs)
        assert list(one.activations) == list(other.activations)
        for site in other.activations:
            assert torch.equal(one.activations.positions[site], other.activations.positions[site]), site
            assert_close_tensor(one.activations[site], other.activations[site], site)
        if other.receipt is not None:
            assert one.receipt.interventions == other.receipt.interventions
            assert one.receipt.captures == other.receipt.captures and one.receipt.spec == other.receipt.spec
    assert_close_logprobs(found.prompt_logprobs, wanted.prompt_logprobs)


def assert_same_scores(found: Any, wanted: Any) -> None:
    """Equal scores of monitors, within rounding."""
    assert found.monitors.keys() == wanted.monitors.keys()
    for name, own in wanted.monitors.items():
        scores = found.monitors[name]
        assert (scores.fired, scores.stopped) == (own.fired, own.stopped)
        assert scores.positions.tolist() == own.positions.tolist()
        torch.testing.assert_close(scores.scores, own.scores, rtol=1e-3, atol=1e-3)


def assert_close_logprobs(
    found: Sequence[Any] | None, wanted: Sequence[Any] | None, tolerance: float = TOLERANCE
) -> None:
    assert (found is None) == (wanted is None)
    for one, other in zip(found or (), wanted or (), strict=True):
        assert (one is None) == (other is None)
        for token, value in (other or {}).items():
            if token in one:  # ties among the top ones may be broken otherwise
                assert abs(one[token].logprob - value.logprob) < tolerance * max(1, abs(value.logprob))


def assert_close_tensor(found: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, (what, found.shape, wanted.shape)
    scale = max(1.0, float(wanted.float().abs().max())) if wanted.numel() else 1.0
    off = float((found.float() - wanted.float()).abs().max()) if wanted.numel() else 0.0
    bound = TOLERANCE if found.dtype not in (torch.float16, torch.bfloat16) else 2 * torch.finfo(found.dtype).eps
    assert off <= bound * scale, f"{what}: off by {off:.3g}, of {scale:.3g}"


def assert_equal_pooled(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Equal states, positions, counts and scores of monitors."""
    for one, other in zip(found, wanted, strict=True):
        assert list(one.activations) == list(other.activations)
        for site in other.activations:
            assert_close_tensor(one.activations[site], other.activations[site], site)
            assert torch.equal(one.activations.positions[site], other.activations.positions[site])
        assert (
            one.receipt.interventions == other.receipt.interventions and one.receipt.captures == other.receipt.captures
        )
        assert list(one.monitors) == list(other.monitors)
        for name, monitor in other.monitors.items():
            torch.testing.assert_close(
                torch.as_tensor(one.monitors[name].scores), torch.as_tensor(monitor.scores), atol=1e-3, rtol=1e-4
            )


def shared_files(lm: LM) -> set[Path]:
    """Files in /dev/shm that an engine's processes have mapped."""
    processes = [*ranks_of(lm), *(rank.parent() for rank in ranks_of(lm))]
    maps = "".join(Path(f"/proc/{one.pid}/maps").read_text() for one in processes if one is not None)
    return {Path(name) for name in re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE)}


def assert_ends_with_a_rank(lm: LM, handles: Sequence[Any], message: str, files: set[Path]) -> None:
    """Requests end within 10 seconds with an error that names a process, and so do later ones; nothing is left of the engine.

    Args:
        message: pattern of the error.
        files: `shared_files` before.
    """
    start = time.monotonic()
    for handle in handles:
        handle.wait(60)
        (end,) = handle.ends
        assert isinstance(end.error, EngineClosedError) and re.search(message, str(end.error)), end.error
    assert time.monotonic() - start < 10
    with pytest.raises(EngineClosedError, match=message):
        lm.generate([[1, 2]], SamplingParams(max_tokens=1))
    own: Any = lm.backend
    pids = list(own.core._watch._names)
    lm.shutdown()
    deadline = time.monotonic() + 30
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_runs, pids))
    assert files and not [file for file in files if file.exists()]


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
