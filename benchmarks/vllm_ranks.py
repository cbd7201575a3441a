"""vLLM's ranks as the engine of an LM: values against one rank, and speed beside plain vLLM with the same ranks.

    python benchmarks/vllm_ranks.py --out FILE                                     # two GPUs: tp, pp, dp, ep, eplb
    python benchmarks/vllm_ranks.py --ways tp,pp --parts values --cpu --out FILE   # two processes on a CPU, through gloo

"values": a batch with ops and captures, and with tensor parallelism a block. "worst" is the largest error of a row of a site, as a
share of the site's rows (2-norms; of rows, the root mean square), beside our own engine on the CPU in float32. "one rank" is the
same of vLLM with one rank. "eplb" forces a move of experts after every few steps, and runs the batch three times. "experts" is the
share of rows with the same experts as with one rank.
"speed": see vllm_engine_gpu.py; "idle", "one site", "all layers" and "captured" by plain vLLM, in turns. Engines of all ways are
loaded at once, and measured one way after the other. A ring of 2 GiB holds one step of 8,192 tokens of the 8B shape: with captures
the next step waits for it. `--ring` is to be twice as large where only captures are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from vllm_engine_check import MOE, NO_MULTICAST, TINY, block, environment_of, prompts_of, saved_model
from vllm_engine_gpu import DENSE, Side
from vllm_engine_gpu import MOE as LARGE_MOE

from pymllm_interp.utils.stage_times import VARIABLE

TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
MOVES = {"window_size": 4, "step_interval": 4, "num_redundant_experts": 2, "use_async": False}
WAYS: dict[str, dict[str, Any]] = {
    "tp": TWO, "pp": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "dp": {"data_parallel_size": 2},
    "ep": TWO | {"enable_expert_parallel": True},
    "eplb": TWO | {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": MOVES},
    "dcp": TWO | {"decode_context_parallel_size": 2}, "tp of gemma3": TWO,
}  # fmt: skip
OF_EXPERTS = ("ep", "eplb")
CHILD_SECONDS = 300
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.0}
"""Of a row. In bfloat16, twice the error of one rank counts: a row that was not steered, or another token's, is off by about 1."""
MODEL = TINY | {"num_key_value_heads": 1}  # decode context parallelism is for fewer KV heads than ranks
SHAPES: dict[str, dict[str, Any]] = {
    "dense": MODEL, "moe": MOE | {"num_experts_per_tok": 2},
    "gemma3": TINY | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 64,
    },
}  # fmt: skip
SHAPE_OF = dict.fromkeys(WAYS, "dense") | {"ep": "moe", "eplb": "moe", "tp of gemma3": "gemma3"}
"""Model of the values."""


def values(way: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """The results of one engine: states by request and site, experts, and the values of a block."""
    from pymllm_interp import LM, Ablate, Patch, SamplingParams, Scale, Steer

    vector = lambda seed: torch.randn(TINY["hidden_size"], generator=torch.Generator().manual_seed(seed))  # noqa: E731
    moe = json.loads(Path(folder, "config.json").read_text())["model_type"] == "qwen3_moe"
    prompts = [*prompts_of(4, 40, TINY["vocab_size"]), *prompts_of(4, 7, TINY["vocab_size"])]
    ops = [
        [Steer("resid_post.*", vector(1), 1.0)], None, [Ablate("resid_mid.2", vector(2)), Scale("mlp_out.0", 0.5)],
        [Patch("resid_pre.1", vector(4), positions=[0, -1]), Steer("final_norm", vector(5))],
    ]  # fmt: skip
    kinds = ["attn_out", "resid_mid", "mlp_out", "resid_post", *(["experts"] if moe else ["z"])]
    options: dict[str, Any] = dict(WAYS.get(way, {}))
    if way == "exact":
        options |= {"device": "cpu", "dtype": "float32"}
    elif args.cpu:
        options |= {"engine": "vllm", "disable_cuda_graph": True, "kv_cache_tokens": 8192}
    else:
        # Memory that is given in bytes is not profiled: engines that start at once would disturb each other's profiles.
        options |= {"engine": "vllm", "compilation_config": NO_MULTICAST, "kv_cache_memory_bytes": 1 << 28} | (
            {"moe_backend": "triton"} if moe else {}
        )
    if way != "exact":
        options |= {"gpu_memory_utilization": 0.05, "inner_sites": (kinds[-1],), "enable_prefix_caching": False}
    with LM(folder, max_model_len=512, max_running_requests=16, **{"dtype": args.dtype, **options}) as lm:
        # The generated tokens are given, so that all rows can be compared.
        params = [
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={5 + i: 1e4})
            for i in range(len(prompts))
        ]
        calls = [
            lm.generate(prompts, params, interventions=ops * 2, capture=[f"{kind}.*" for kind in kinds])
            for _ in range(3 if way == "eplb" else 1)
        ]
        found: dict[str, Any] = {
            f"{i} {site}": states.float().clone()
            for outs in calls[-1:]
            for i, out in enumerate(outs)
            for site, states in out.outputs[0].activations.items()
        }
        if way in ("exact", "one", "tp", "dp", "tp of gemma3") and not moe:
            found |= {f"block {i}": value.float().cpu() for i, value in enumerate(block(lm, prompts[0], vector(10)))}
        steps = sorted({mode for out in calls[-1] if out.receipt for mode in out.receipt.steps})
        return {"values": found, "name": lm.backend.facts.engine_name, "steps": steps}


def child(way: str, folder: Path, args: argparse.Namespace, gpus: str | None) -> dict[str, Any]:
    """`values`, in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file, tempfile.TemporaryFile("w+") as log:
        command = [
            sys.executable,
            __file__,
            "--one",
            way,
            "--folder",
            str(folder),
            "--out",
            file.name,
            f"--dtype={args.dtype}",
        ]
        environment = environment_of(gpus) | (
            {"VLLM_CPU_OMP_THREADS_BIND": "0" if way == "one" else "0|1"} if args.cpu else {}
        )
        process = subprocess.Popen(
            command + ["--cpu"] * args.cpu, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            if process.wait(CHILD_SECONDS) == 0:
                return torch.load(file.name, weights_only=False)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        return {"error": log.read()[-6000:]}


def errors(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """The worst error of a row by kind of site."""
    worst: dict[str, float] = {}
    for name, own in found.items():
        kind = name.split()[1].split(".")[0] if not name.startswith("block") else "block"
        if kind != "experts" and name in wanted:
            own, other = own.reshape(-1, own.shape[-1]), wanted[name].reshape(-1, own.shape[-1])
            off = float((own - other).norm(dim=-1).max() / other.norm(dim=-1).square().mean().sqrt())
            worst[kind] = max(worst.get(kind, 0.0), off)
    return worst


def compared(found: dict[str, Any], one: dict[str, Any], exact: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The worst error by kind of site, of an engine and of the one with one rank."""
    if error := found.get("error") or one.get("error") or exact.get("error"):
        return {"error": error}
    result = {name: found[name] for name in ("name", "steps")}
    result["rows"] = sum(len(states) for states in found["values"].values())
    result["worst"], result["one rank"] = (errors(each["values"], exact["values"]) for each in (found, one))
    same = [
        float((own[:, 0].sort(-1)[0] == one["values"][name][:, 0].sort(-1)[0]).all(-1).float().mean())
        for name, own in found["values"].items()
        if "experts" in name
    ]
    if same:
        result["experts"] = sum(same) / len(same)
    # Rounding chooses other experts at ties, and their rows are others from there on: there the share of experts counts.
    result["ok"] = (
        result["experts"] > 0.9
        if same
        else all(off <= max(TOLERANCE[dtype], 2 * result["one rank"][kind]) for kind, off in result["worst"].items())
    )
    return result


def side(way: str, folder: Path, args: argparse.Namespace) -> Side:
    """Plain vLLM with these ranks, and an LM over it."""
    options = [
        f"--batches={','.join(map(str, args.batches))}", f"--prompt={args.prompt}", f"--new={args.new}", f"--dtype={args.dtype}",
        f"--kv-bytes={4 << 30}", f"--ring={args.ring}", "--vocab=1000", f"--vllm={json.dumps(WAYS[way])}",
        f"--config={args.config or (folder if way in OF_EXPERTS else DENSE)}",
    ]  # fmt: skip
    options += ["--eager"] * args.cpu + ["--moe-backend=triton"] * (way in OF_EXPERTS and not args.cpu)
    return Side(["norm"], None, options)


def main() -> None:
    """Run each part of each way, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", default="tp,pp,dp,ep,eplb", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--parts", default="values,speed")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--ring", type=int, default=2 << 30, help="bytes of the ring of captured states, of each engine"
    )
    parser.add_argument("--stages", action="store_true", help="measure where the time goes on each rank, and print it")
    parser.add_argument("--config", default="", help="folder with a config.json for speed; weights are random")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default=None)
    parser.add_argument("--cpu", action="store_true", help="two processes of a CPU, without graphs: to try this script")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--one", default=None)
    parser.add_argument("--folder", default="")
    args = parser.parse_args()
    args.dtype = args.dtype or ("float32" if args.cpu else "bfloat16")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if args.stages:
        os.environ[VARIABLE] = "1"  # of the processes of engines
    if args.one is not None:
        torch.save(values(args.one, args.folder, args), args.out)
        return
    found: dict[str, Any] = {
        "dtype": args.dtype,
        "prompt": args.prompt,
        "new": args.new,
        "rounds": args.rounds,
        "values": {},
        "speed": {},
    }
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    ways, start = args.ways.split(","), time.perf_counter()

    def done(part: str, way: str, result: dict[str, Any]) -> None:
        found[part][way] = result
        shown = result.get("ratios", result) if part == "speed" else result
        print(f"{part} {way} after {time.perf_counter() - start:.0f} s: {json.dumps(shown)[:1500]}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        if "values" in args.parts:
            models = {
                name: saved_model(Path(folder, name), shape)
                for name, shape in SHAPES.items()
                if name in {SHAPE_OF[way] for way in ways}
            }
            with ThreadPoolExecutor(1 if args.cpu else len(ways) + 2 * len(models)) as pool:  # all at once on the GPUs
                one, exact = (
                    {
                        name: pool.submit(child, way, model, args, None if args.cpu else "0")
                        for name, model in models.items()
                    }
                    for way in ("one", "exact")
                )
                running = {way: pool.submit(child, way, models[SHAPE_OF[way]], args, None) for way in ways}
                for way, future in running.items():
                    sides = (each[SHAPE_OF[way]].result() for each in (one, exact))
                    done("values", way, compared(future.result(), *sides, args.dtype))
        if "speed" in args.parts:
            large = Path(folder, "large")
            large.mkdir()
            (large / "config.json").write_text(json.dumps(LARGE_MOE))
            with ThreadPoolExecutor(len(ways)) as pool:
                sides = dict(zip(ways, pool.map(lambda way: side(way, large, args), ways), strict=True))
            for way, engines in sides.items():
                done("speed", way, engines.measured(args))
    sys.exit(any(not result.get("ok") for result in found["values"].values()))


if __name__ == "__main__":
    main()
