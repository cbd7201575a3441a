"""vLLM as the engine of an LM, beside plain vLLM of the same version, in one process after the other on one GPU.

    python benchmarks/vllm_engine_gpu.py --config FOLDER_WITH_CONFIG_JSON --out FILE
    python benchmarks/vllm_engine_gpu.py --check                           # correctness only: V2 and V1, eager and graphs

Speed: requests of `--prompt` tokens that generate `--new` tokens, at each batch size; the median of `--repeats` runs, after one
that is not counted. "idle": nothing is declared. "one site": each request steers one site. "all layers": it steers every layer.
"captured": it captures resid_post of all layers. Each is divided by plain vLLM's tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
TOLERANCE = 0.04
"""Of states in bfloat16 against float32, relative to the largest."""


def prompts_of(count: int, length: int, vocab: int) -> list[list[int]]:
    """Random prompts, different for each request."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocab - 1, (count, length), generator=generator).tolist()


# -- correctness -----------------------------------------------------------------------------


def saved_model(folder: Path) -> Path:
    """A small llama with random weights in bfloat16."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(**{name: value for name, value in TINY.items() if name not in ("architectures", "dtype")})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 if "norm" in name else 3)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def check(ways: list[str]) -> dict[str, Any]:
    """Each way in a process of its own."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        saved_model(Path(folder))
        for way in ways:
            runner, graphs = way.split("-")
            environment = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0"}
            command = [sys.executable, __file__, "--check-one", graphs, "--config", folder]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            found[way] = json.loads(lines[-1]) if lines else {"error": (done.stdout + done.stderr)[-3000:]}
            print(way, found[way], flush=True)
    return found


def check_one(folder: str, graphs: str) -> dict[str, Any]:
    """Ops and captures of one engine against our own engine on the CPU, in float32 over the same weights."""
    from pymllm_interp import LM, Ablate, Capture, Gate, Generated, Patch, Project, SamplingParams, Steer

    width = TINY["hidden_size"]
    vector = lambda seed, *shape: torch.randn(*(shape or (width,)), generator=torch.Generator().manual_seed(seed))  # noqa: E731
    modes: dict[str, dict[str, Any]] = {
        "eager": {"disable_cuda_graph": True},
        "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
        "full": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
    }
    kinds = ("attn_out", "resid_mid", "mlp_out", "resid_post")
    prompts = [*prompts_of(3, 40, TINY["vocab_size"]), *prompts_of(3, 7, TINY["vocab_size"])]
    ops = [
        [Steer("resid_post.1", vector(1), 3.0)],
        None,
        [Ablate("resid_mid.2", vector(2, 2, width)), Steer("mlp_out.0", vector(3), positions="generated")],
        [Patch("resid_post.0", vector(4, 2, width), positions=[0, -1])],
        [Steer("resid_post.2", vector(5), 2.0, when=Gate(vector(6), 0.0, site="resid_post.0"))],
        [Steer("embed", vector(7), 0.5), Steer("final_norm", vector(8), positions=Generated(1, 5, 2))],
    ]
    captures = [
        [f"{kind}.*" for kind in kinds], None, ["resid_post.*"], [Capture("resid_post.*", reduce=Project(vector(9, 3, width)))],
        [Capture("resid_post.*", reduce="mean")], ["embed", "final_norm", "logits"],
    ]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LM(
        folder,
        engine="vllm",
        dtype="bfloat16",
        max_model_len=512,
        max_running_requests=16,
        gpu_memory_utilization=0.3,
        kv_cache_tokens=8192,
        **modes[graphs],
    ) as lm:
        outs = lm.generate(prompts, params, interventions=ops, capture=captures)
        again = lm.generate(prompts, params, interventions=ops, capture=captures)
        plain = lm.generate([prompts[0]], params, capture=["resid_post.1"])[0]
        name = lm.engine_name
    with LM(folder, dtype="float32", device="cpu", max_model_len=512) as own:
        worst: dict[str, float] = {}
        for i, out in enumerate(outs):
            completion = out.outputs[0]
            if not captures[i]:
                continue
            # The tokens that vLLM chose, as one prompt; positions of the generation are then positions of the prompt.
            wanted = own.generate([prompts[i]], params, interventions=ops[i], capture=captures[i])[0].outputs[0]
            same = next(
                (
                    k
                    for k, pair in enumerate(zip(completion.token_ids, wanted.token_ids, strict=True))
                    if pair[0] != pair[1]
                ),
                12,
            )
            rows = len(prompts[i]) + same
            for site, states in completion.activations.items():
                count = (
                    len(states)
                    if "mean" in str(captures[i])
                    else min(rows - (site == "logits") * (len(prompts[i]) - 1), len(states))
                )
                if "mean" in str(captures[i]) and same < 12:
                    continue
                theirs = wanted.activations[site][:count].float()
                off = (states[:count].float() - theirs).abs().max() / theirs.abs().max()
                worst[site.split(".")[0]] = max(worst.get(site.split(".")[0], 0.0), float(off))
    # At the site itself the change is exact: the state before, plus the vector, rounded once.
    first = outs[0].outputs[0].activations["resid_post.1"][: len(prompts[0])]
    before = plain.outputs[0].activations["resid_post.1"][: len(prompts[0])]
    exact = (before.float() + 3.0 * vector(1)).to(before.dtype)
    steps = sorted({mode for out in outs if out.receipt for mode in out.receipt.steps})
    return {
        "engine": name, "steps": steps, "worst": {site: round(off, 5) for site, off in worst.items()},
        "ok": max(worst.values()) < TOLERANCE, "steered rows equal": float((first == exact).float().mean()),
        "again equal": [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(outs, again, strict=True)],
        "captured rows": {site: len(rows) for site, rows in list(outs[0].outputs[0].activations.items())[:2]},
    }  # fmt: skip


# -- speed -----------------------------------------------------------------------------------


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    sizes = sorted({*args.batches, *(size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= max(args.batches))})
    return {
        "max_model_len": args.prompt + args.new + 8, "gpu_memory_utilization": 0.85, "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_capture_sizes": sizes}, **dict(args.vllm_option or ()),
    }  # fmt: skip


def timed(run: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each of `repeats` runs, after one that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def plain_vllm(args: argparse.Namespace) -> dict[str, Any]:
    """vLLM as it is: seconds by batch size."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    async def main() -> dict[str, Any]:
        options = {
            "max_num_seqs": max(args.batches),
            "dtype": "bfloat16",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
        }
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                args.config, disable_log_stats=True, scheduling_policy="priority", **options, **engine_options(args)
            )
        )
        params = SamplingParams(
            temperature=0,
            max_tokens=args.new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        number = 0

        async def one(ids: list[int]) -> None:
            nonlocal number
            number += 1
            async for _ in llm.generate({"prompt_token_ids": ids}, params, str(number)):
                pass

        found = {}
        for batch in args.batches:
            prompts, seconds = prompts_of(batch, args.prompt, 32000), []
            for _ in range(args.repeats + 1):
                start = time.perf_counter()
                await asyncio.gather(*map(one, prompts))
                seconds.append(time.perf_counter() - start)
            found[str(batch)] = seconds[1:]
        llm.shutdown()
        return {"plain": found}

    return asyncio.run(main())


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """An LM over vLLM: seconds by what requests declare, and batch size."""
    from pymllm_interp import LM, SamplingParams, Steer

    found: dict[str, Any] = {}
    options = engine_options(args)
    utilization = options.pop("gpu_memory_utilization")
    length = options.pop("max_model_len")
    caching = options.pop("enable_prefix_caching")
    start = time.perf_counter()
    with LM(
        args.config, engine="vllm", dtype="bfloat16", load_format="dummy", max_running_requests=max(args.batches),
        max_model_len=length, gpu_memory_utilization=utilization, enable_prefix_caching=caching, capture_ring_bytes=4 << 30,
        max_capture_bytes=4 << 30, **options,
    ) as lm:  # fmt: skip
        found["load seconds"] = time.perf_counter() - start
        layers, width = lm.num_layers, lm.hidden_size
        unit = torch.nn.functional.normalize(torch.randn(width, generator=torch.Generator().manual_seed(0)), dim=0)
        params = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)
        declared: dict[str, dict[str, Any]] = {
            "idle": {},
            "one site": {"interventions": [Steer(f"resid_post.{layers // 2}", unit, 0.1)]},
            "all layers": {"interventions": [Steer("resid_post.*", unit, 0.1)]},
            "captured": {"capture": ["resid_post.*"]},
        }
        for what, own in declared.items():
            found[what] = {}
            for batch in args.batches:
                prompts = prompts_of(batch, args.prompt, 32000)
                last: list[Any] = []

                def run(prompts: Any = prompts, own: Any = own, last: list[Any] = last) -> None:
                    last[:] = lm.generate(prompts, params, **own)

                try:
                    found[what][str(batch)] = timed(run, args.repeats)
                except Exception as error:
                    found[what][str(batch)] = {"error": f"{type(error).__name__}: {error}"[:600]}
                    continue
                if own:
                    found[f"steps of {what}"] = dict(last[0].receipt.steps)
        found["engine"] = lm.engine_name
    return found


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Plain vLLM, then an LM over it, each in a process of its own; and the ratios of tokens a second."""
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "prompt": args.prompt, "new": args.new}
    options = [f"--batches={','.join(map(str, args.batches))}", f"--prompt={args.prompt}", f"--new={args.new}"]
    for part in ("plain", "ours", "plain again"):
        command = [
            sys.executable,
            __file__,
            "--part",
            part.split()[0],
            "--config",
            args.config,
            f"--repeats={args.repeats}",
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            found[part] = {"error": (done.stdout + done.stderr)[-3000:]}
            print(part, found[part], flush=True)
            continue
        measured = json.loads(lines[-1])
        if part == "plain again":
            measured = {"plain again": measured["plain"]}
        found |= measured
        print(json.dumps(measured)[:1500], flush=True)
    base = found.get("plain")
    if isinstance(base, dict) and "error" not in base:
        for what in ("plain again", "idle", "one site", "all layers", "captured"):
            for batch, seconds in (found.get(what) or {}).items():
                if isinstance(seconds, list):
                    found.setdefault("ratios", {}).setdefault(what, {})[batch] = round(
                        statistics.median(base[batch]) / statistics.median(seconds), 4
                    )
        print(json.dumps(found.get("ratios"), indent=1), flush=True)
    return found


def main() -> None:
    """Run what the options name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="", help="folder with a config.json; weights are random")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--ways", default="v2-full,v2-piecewise,v2-eager,v1-full,v1-eager")
    parser.add_argument("--check-one", default=None)
    parser.add_argument("--part", choices=["plain", "ours"], default=None)
    parser.add_argument("--vllm-option", action="append", type=lambda text: tuple(text.split("=", 1)))
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if args.check_one:
        found = check_one(args.config, args.check_one)
    elif args.check:
        found = check(args.ways.split(","))
    elif args.part:
        found = plain_vllm(args) if args.part == "plain" else ours(args)
    else:
        found = speed(args)
    if args.part or args.check_one:
        print(json.dumps(found), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
