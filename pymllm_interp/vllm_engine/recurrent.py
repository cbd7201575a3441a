"""Models of vLLM with recurrent states: short convolutions, state-space layers and delta rules.

vLLM keeps a request's states in blocks of its KV pool. Settings that are wrong on a CPU, or were not tested, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SHORT_CONV, MAMBA, MAMBA2, DELTA = "short convolutions", "Mamba", "Mamba-2", "gated delta rules"
RECURRENT = {
    "FalconH1ForCausalLM": MAMBA2,
    "FalconMambaForCausalLM": MAMBA,
    "GraniteMoeHybridForCausalLM": MAMBA2,
    "JambaForCausalLM": MAMBA,
    "Lfm2ForCausalLM": SHORT_CONV,
    "Lfm2MoeForCausalLM": SHORT_CONV,
    "Mamba2ForCausalLM": MAMBA2,
    "MambaForCausalLM": MAMBA,
    "NemotronHForCausalLM": MAMBA2,
    "NemotronHPuzzleForCausalLM": MAMBA2,
    "Qwen3NextForCausalLM": DELTA,
    "Qwen3_5ForCausalLM": DELTA,
    "Qwen3_5MoeForCausalLM": DELTA,
}
"""Architecture of vLLM -> the kind of layers with states."""
ROTARY = "-rotary_embedding"
"""Entry of vLLM's `custom_ops` that has it rotate by torch."""


def kind_of(config: Any) -> str | None:
    """The kind of layers with states in the model of a `VllmConfig`; None: it has no states."""
    named = getattr(config.model_config, "architectures", None) or ()
    return next((RECURRENT[name] for name in named if name in RECURRENT), None)


def on_cpu(config: Any) -> bool:
    """Whether a `VllmConfig` is for a CPU."""
    return getattr(getattr(config, "device_config", None), "device_type", "") == "cpu"


def rotate_by_torch(config: Any) -> None:
    """Change the settings of an engine of this package where `_rotates_wrongly`."""
    if _rotates_wrongly(config):
        config.compilation_config.custom_ops.append(ROTARY)


def _rotates_wrongly(config: Any) -> bool:
    """Whether a kernel rotates q and k of another shape than it takes.

    vLLM's kernel for CPUs takes the last dimension but one as tokens. LFM2 hands over [tokens, heads, head_dim].
    """
    ops = getattr(config.compilation_config, "custom_ops", ())
    uses_kernel = ROTARY not in ops and ("all" in ops or "+rotary_embedding" in ops)
    return on_cpu(config) and kind_of(config) == SHORT_CONV and uses_kernel


def refused_states(config: Any) -> Iterator[tuple[bool, str]]:
    """(whether it holds, reason) of each refusal of a model with recurrent states."""
    kind, cpu = kind_of(config), on_cpu(config)
    if kind is None:
        return
    model, cache = config.model_config, config.cache_config
    yield from (
        (
            config.speculative_config is not None,
            f"speculative_config for a model with {kind}, whose states drafts would change: leave it out",
        ),
        (
            config.parallel_config.pipeline_parallel_size > 1,
            f"pipeline_parallel_size above 1 for a model with {kind}, which was not tested: raise tensor_parallel_size",
        ),
        (
            kind == SHORT_CONV and not getattr(getattr(model, "hf_config", None), "tie_word_embeddings", True),
            "LFM2 with a head of its own (tie_word_embeddings=False), which vLLM does not read: LM(model), whose engine is our own",
        ),
        (
            cpu and kind == MAMBA,
            "Mamba layers on a CPU, where vLLM has no kernel for them (selective_scan_fwd): LM(model), whose engine is our own",
        ),
        (
            cpu and kind == DELTA and "bfloat16" not in str(getattr(model, "dtype", "")),
            "gated delta rules on a CPU in another precision than bfloat16, the only one of vLLM's kernel there: dtype='bfloat16'",
        ),
        (
            cpu and kind == MAMBA2 and getattr(cache, "enable_prefix_caching", False) is True,
            "enable_prefix_caching with Mamba-2 on a CPU, where vLLM's kernel returns a prompt's last state only, and reads "
            "others for the cache: enable_prefix_caching=False",
        ),
        (
            _rotates_wrongly(config),
            "LFM2 on a CPU with vLLM's kernel for rotations, which takes q and k in another shape: "
            f"compilation_config={{'custom_ops': ['all', {ROTARY!r}]}}",
        ),
    )  # fmt: skip
