"""Kernels of decode steps of Qwen3.5, gpt-oss and an 8B model with LoRA, on one GPU.

    python benchmarks/decode_profile.py --out benchmarks/results/NAME.json

Of each model a few layers are loaded, in the mix of all of them, with random weights. For each batch size the record has
microseconds a step by kernel, and all kernels of the last step in their order. Kernels that overlap wait for each other, so
that their times may add up to more than the step's. The lines have the kernels of a step, longest first.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lora_gpu import ADAPTERS, adapter_of, names_for
from suites.profile import profile_decode

from pymllm_interp import LM
from pymllm_interp.bench import describe_machine
from pymllm_interp.bench.suites import BenchSettings
from pymllm_interp.client.local_backend import InstallAdapter
from pymllm_interp.config import EngineTuning

CONFIGS = Path(__file__).parent / "configs"
CASES = {"qwen3_5": ("qwen3_5-9b", 8), "gpt-oss": ("gpt-oss-20b", 4), "lora": ("llama8b", 4)}
"""Config and layers of each model."""
RANK = 64


def config_of(name: str, layers: int, folder: Path) -> Path:
    """A config with its first layers only."""
    found = json.loads((CONFIGS / name / "config.json").read_text())
    found["num_hidden_layers"] = layers
    if "layer_types" in found:
        found["layer_types"] = found["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(found))
    return folder


def profiles(case: str, config: Path, settings: BenchSettings, device: str) -> dict[str, Any]:
    """Profiles by batch size; of LoRA without adapters and with them."""
    options: dict[str, Any] = {"max_loras": ADAPTERS, "max_lora_rank": RANK} if case == "lora" else {}
    found: dict[str, Any] = {}
    with LM(
        config, load_format="dummy", dtype="bfloat16", device=device, max_model_len=settings.longest,
        max_running_requests=max(settings.batches), kv_cache_tokens=settings.kv_tokens, enable_prefix_caching=False,
        tuning=EngineTuning(prefill_graph_tokens=0), **options,
    ) as lm:  # fmt: skip
        if case == "lora":
            first = adapter_of(lm, RANK)
            for name in map(str, range(ADAPTERS)):
                lm.backend.run(InstallAdapter(replace(first, name=name, digest=name)))
        for batch in settings.batches:
            found[str(batch)] = profile_decode(lm, batch, settings)
            if case == "lora":
                adapters = [{"lora": name} for name in names_for(batch)]
                found[f"{batch} adapted"] = profile_decode(lm, batch, settings, options=adapters)
    return found


def show(case: str, batch: str, profile: dict[str, Any]) -> None:
    """The kernels of a profile, by microseconds a step."""
    print(f"\n{case} {batch}: {profile['us']:.0f} us a step, {profile['busy_us']:.0f} busy", flush=True)
    for kernel in profile["kernels"]:
        if kernel["us"] > 1:
            each = kernel["us"] / kernel["launches"]
            print(
                f"  {kernel['us']:8.1f} us {kernel['launches']:6.1f} x {each:7.2f}  {kernel['kernel'][:84]}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--config", type=Path, help="a folder in place of the first case's own one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = BenchSettings(batches=tuple(args.batches), prompt_tokens=64, new_tokens=128)
    record: dict[str, Any] = {"machine": describe_machine(), "layers": {}, "profiles": {}}
    for case in args.cases:
        name, layers = CASES[case]
        with tempfile.TemporaryDirectory() as folder:
            config = args.config or config_of(name, layers, Path(folder))
            found = record["profiles"][case] = profiles(case, config, settings, args.device)
        record["layers"][case] = layers
        for batch, profile in found.items():
            show(case, batch, profile)
        if args.out:  # after each case: what comes later may fail
            args.out.write_text(json.dumps(record) + "\n")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
