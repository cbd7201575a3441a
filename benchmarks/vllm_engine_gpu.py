"""vLLM as the engine of an LM, beside plain vLLM of the same version.

    python benchmarks/vllm_engine_gpu.py --parts bf16,fp8 --out FILE         # speed, a GPU for each part where there are two
    python benchmarks/vllm_engine_gpu.py --parts moe,check,tp --out FILE     # a MoE shape; values; two ranks
    python benchmarks/vllm_engine_check.py --ranks 2 --out FILE              # values with two ranks

Speed: all engines of a part are loaded at once, each in a process of its own on the same GPU, and run in turns. Requests of
`--prompt` tokens generate `--new` tokens. A ratio is the median over rounds: plain vLLM's seconds divided by the case's in the same
round. "plain again" is plain vLLM at the end of a round. "front" and "norm": where the hooks are (docs/engine/vllm.md).
"idle": nothing is declared. "one site": each request steers one site. "all layers": it steers every layer.
"captured": it captures resid_post of all layers.

`--stages` measures and prints where the time of each case goes, in the ranks and in the client. It takes time itself, so use it
apart (`--rounds 1 --taps norm`). "cpu" is of the stage's own thread. The rest of "seconds" is waiting: for the GIL, a lock, a
queue or the device.
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
import threading
import time
from pathlib import Path
from typing import Any

import torch
from vllm_engine_check import NO_MULTICAST, WAYS, check, environment_of, prompts_of

from pymllm_interp.utils.stage_times import TIMES, VARIABLE

LOAD_SECONDS, RUN_SECONDS = 330, 120
MEMORY_OF_THREE = 110 << 30
"""Bytes of a GPU that holds three engines with an 8B model in bfloat16. On a smaller one two are loaded at a time."""
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
"""Qwen3-30B-A3B's widths, with half of its experts and layers."""
DENSE = Path(__file__).parent / "configs" / "llama8b"


# -- speed -----------------------------------------------------------------------------------

CASES = ("idle", "one site", "all layers", "captured")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that plain vLLM and ours share."""
    top = max(args.batches)
    sizes = sorted({*args.batches, *(size for size in (1, 8, 32, 128, 256) if size <= top)})
    found: dict[str, Any] = {
        "max_model_len": args.prompt + args.new + 8, "enable_prefix_caching": False, "gpu_memory_utilization": 0.2,
        "max_num_batched_tokens": args.step_tokens,
    }  # fmt: skip
    if not args.eager:
        found["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        found["kv_cache_memory_bytes"] = args.kv_bytes  # several engines profile the same GPU at once
    if args.quantization:
        found["quantization"] = args.quantization
    if args.moe_backend:
        found["moe_backend"] = args.moe_backend
    if args.ranks > 1:
        found |= {"tensor_parallel_size": args.ranks, "distributed_executor_backend": "mp"}
    if args.ranks > 1 or args.vllm:
        found["compilation_config"] = found.get("compilation_config", {}) | NO_MULTICAST
    return found | args.vllm


class PlainVllm:
    """vLLM as it is."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        self._loop = asyncio.new_event_loop()
        arguments = AsyncEngineArgs(
            args.config, disable_log_stats=True, scheduling_policy="priority", max_num_seqs=max(args.batches), dtype=args.dtype,
            load_format="dummy", skip_tokenizer_init=True, enforce_eager=args.eager, **engine_options(args),
        )  # fmt: skip

        async def made() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self._llm = self._loop.run_until_complete(made())
        self._params = SamplingParams(
            temperature=0,
            max_tokens=args.new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._number = 0
        self.name = "plain"

    def run(self, case: str, prompts: list[list[int]]) -> dict[str, Any]:
        """Seconds of one batch."""

        async def one(ids: list[int]) -> None:
            self._number += 1
            async for _ in self._llm.generate({"prompt_token_ids": ids}, self._params, str(self._number)):
                pass

        async def batch() -> float:
            start = time.perf_counter()
            await asyncio.gather(*map(one, prompts))
            return time.perf_counter() - start

        return {"seconds": self._loop.run_until_complete(batch())}

    def close(self) -> None:
        """End vLLM."""
        self._llm.shutdown()


class Ours:
    """An LM over vLLM."""

    def __init__(self, args: argparse.Namespace) -> None:
        from pymllm_interp import LM, SamplingParams, Steer
        from pymllm_interp.config import EngineTuning

        options = engine_options(args)
        if args.eager:
            options["kv_cache_tokens"] = max(args.batches) * (args.prompt + args.new + 8)
        self._lm = LM(
            args.config, engine="vllm", dtype=args.dtype, load_format="dummy", max_running_requests=max(args.batches),
            max_capture_bytes=4 << 30, disable_cuda_graph=args.eager,
            tuning=EngineTuning(capture_ring_bytes=args.ring, capture_kept_bytes=32 << 30),
            max_num_tokens=options.pop("max_num_batched_tokens"), **options,
        )  # fmt: skip
        layers, width = self._lm.num_layers, self._lm.hidden_size
        unit = torch.nn.functional.normalize(torch.randn(width, generator=torch.Generator().manual_seed(0)), dim=0)
        self._params = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)
        self._declared: dict[str, dict[str, Any]] = {
            "idle": {},
            "one site": {"interventions": [Steer(f"resid_post.{layers // 2}", unit, 0.1)]},
            "all layers": {"interventions": [Steer("resid_post.*", unit, 0.1)]},
            "captured": {"capture": ["resid_post.*"]},
        }
        self.name = self._lm.backend.facts.engine_name

    def run(self, case: str, prompts: list[list[int]]) -> dict[str, Any]:
        """Seconds of one batch, and how its last request ran."""
        self._stages()
        start = time.perf_counter()
        outs = self._lm.generate(prompts, self._params, **self._declared[case])
        found: dict[str, Any] = {"seconds": time.perf_counter() - start}
        if stages := self._stages():
            found["stages"] = stages
        if self._declared[case]:
            found["steps"] = dict(outs[-1].receipt.steps)
        if case == "captured":  # without reading them, which would copy them
            states = [out.outputs[0].activations for out in outs]
            found["captured bytes"] = sum(one.as_arrived(site).nbytes for one in states for site in one)
        return found

    def _stages(self) -> dict[str, Any]:
        """Of the ranks and the client, since the last call; empty where it is not measured."""
        if not TIMES.on:
            return {}
        ranks = self._lm.backend.core.call("interp_stages")  # pyright: ignore
        return {f"rank {i}": found for i, found in enumerate(ranks)} | {"client": TIMES.taken()}

    def close(self) -> None:
        """End vLLM."""
        self._lm.shutdown()


def serve(args: argparse.Namespace) -> None:
    """An engine that runs what it reads: lines of [case, batch]."""
    start = time.perf_counter()
    engine = PlainVllm(args) if args.serve == "plain" else Ours(args)
    print(json.dumps({"bench": "ready", "name": engine.name, "load": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        case, batch = json.loads(line)
        try:
            found = engine.run(case, prompts_of(batch, args.prompt, args.vocab))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps({"bench": "ran"} | found), flush=True)
    engine.close()


class Engine:
    """A process with an engine."""

    def __init__(self, which: str, gpus: str | None, options: list[str]) -> None:
        kind, _, taps = which.partition(" ")
        environment = environment_of(gpus) | ({"PYMLLM_INTERP_VLLM_TAPS": taps} if taps else {})
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind, *options], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self._said: list[str] = []

    def answer(self, seconds: float) -> dict[str, Any]:
        """Its next line of ours, or an error."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:  # pyright: ignore[reportOptionalIterable]
                if line.startswith('{"bench"'):
                    return json.loads(line)
                self._said.append(line)
        finally:
            timer.cancel()
        self._log.seek(0)
        return {"error": ("".join(self._said) + self._log.read())[-3000:]}

    def run(self, case: str, batch: int) -> dict[str, Any]:
        """One batch."""
        try:
            self._process.stdin.write(json.dumps([case, batch]) + "\n")  # pyright: ignore[reportOptionalMemberAccess]
            self._process.stdin.flush()  # pyright: ignore[reportOptionalMemberAccess]
        except OSError:
            return {"error": "the engine has ended"}
        return self.answer(RUN_SECONDS)

    def close(self) -> None:
        """End it."""
        try:
            self._process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()


class Side:
    """Plain vLLM and `ours` ("front", "norm") on the same GPUs, loaded at once."""

    def __init__(self, ours: list[str], gpus: str | None, options: list[str]) -> None:
        start = time.perf_counter()
        self.engines = {which: Engine(which, gpus, options) for which in ("plain", *(f"ours {taps}" for taps in ours))}
        self.found: dict[str, Any] = {"loads": {}, "seconds": {}, "steps": {}}
        for which, engine in list(self.engines.items()):
            ready = engine.answer(max(1.0, LOAD_SECONDS - (time.perf_counter() - start)))
            self.found["loads"][which] = ready
            if "error" in ready:
                print(which, ready["error"], flush=True)
                self.engines.pop(which).close()
        self.found["loaded after"] = time.perf_counter() - start

    def measured(self, args: argparse.Namespace) -> dict[str, Any]:
        """Seconds in turns, and ratios of tokens a second. The engines end."""
        start, found = time.perf_counter(), self.found
        try:
            for turn in range(-1, args.rounds):  # the first is not counted
                for batch in args.batches:
                    for which, case in turns_of(self.engines, turn):
                        self._ran(which, case, batch, turn)
                told = json.dumps(ratios_of(found["seconds"]))  # engines may take long to end
                print(f"round {turn} after {time.perf_counter() - start:.0f} s: {told}", flush=True)
        finally:
            self.close()
        found["ratios"] = ratios_of(found["seconds"])
        found["took"] = time.perf_counter() - start
        return found

    def _ran(self, which: str, case: str, batch: int, turn: int) -> None:
        found, what = self.found, f"{which}, {case}"
        ran = self.engines[which].run(case, batch)
        if "error" in ran:
            found.setdefault("errors", {})[f"{what}, {batch}"] = ran["error"]
        elif turn >= 0:
            found["seconds"].setdefault(what, {}).setdefault(str(batch), []).append(ran["seconds"])
            found["steps"][f"{what}, {batch}"] = ran.get("steps")
            if "stages" in ran:
                found.setdefault("stages", {})[f"{what}, {batch}"] = ran["stages"]
                print_stages(f"{what}, batch {batch}: {ran['seconds']:.3f} s", ran["stages"])
            if "captured bytes" in ran:
                found["captured bytes"] = found.get("captured bytes", {}) | {batch: ran["captured bytes"]}

    def close(self) -> None:
        """End the engines, all at once."""
        threads = [threading.Thread(target=engine.close) for engine in self.engines.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def print_stages(what: str, stages: dict[str, dict[str, dict[str, float]]]) -> None:
    """A table of one batch."""
    print(what)
    for process, own in stages.items():
        for stage, totals in own.items():
            values = "  ".join(f"{name} {value:<10.6g}" for name, value in totals.items())
            print(f"  {process:7} {stage:55} {values}", flush=True)


def turns_of(engines: dict[str, Engine], turn: int) -> list[tuple[str, str]]:
    """(engine, case) of a round, in an order that the next round turns around."""
    found = [(which, case) for case in CASES for which in engines if which != "plain"]
    found = found[::-1] if turn % 2 else found
    return [("plain", "plain"), *found, ("plain", "plain again")] if "plain" in engines else found


def ratios_of(seconds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """By case and batch: the median of plain vLLM's seconds divided by the case's, round by round."""
    plain, found = seconds.get("plain, plain", {}), {}
    for what, by_batch in seconds.items():
        for batch, own in by_batch.items():
            if what != "plain, plain" and batch in plain:
                ratio = statistics.median(a / b for a, b in zip(plain[batch], own, strict=False))
                found.setdefault(what, {})[batch] = round(ratio, 4)
    return found


# -- parts -----------------------------------------------------------------------------------


def part(name: str, args: argparse.Namespace, gpus: str | None, folder: Path) -> dict[str, Any]:
    """What a part of the record says."""
    if name == "check":
        return check(args.ways.split(","), gpus)
    moe = folder / "moe"
    if name == "moe" and not moe.is_dir():
        moe.mkdir()
        (moe / "config.json").write_text(json.dumps(MOE))
    config = args.config or str(moe if name == "moe" else DENSE)
    kv_bytes, ring = (4 << 30, 2 << 30) if name in ("moe", "tp") else (10 << 30, args.ring)
    options = [
        f"--batches={','.join(map(str, args.batches))}", f"--prompt={args.prompt}", f"--new={args.new}", f"--config={config}",
        f"--kv-bytes={kv_bytes}", f"--ring={ring}", f"--dtype={args.dtype}", f"--step-tokens={args.step_tokens}",
        f"--vocab={args.vocab}",
    ]  # fmt: skip
    options += ["--eager"] * args.eager + ["--quantization=fp8"] * (name == "fp8") + ["--ranks=2"] * (name == "tp")
    options += ["--moe-backend=triton"] * (name == "moe" and not args.eager)
    both = ["front", "norm"] if args.taps == "both" else [args.taps]
    taps = both if name in ("bf16", "fp8") else both[-1:]
    if len(taps) > 1 and not args.eager and torch.cuda.get_device_properties(0).total_memory < MEMORY_OF_THREE:
        found = {f"hooks: {one}": Side([one], gpus, options).measured(args) for one in taps}
        found["ratios"] = {one: each["ratios"] for one, each in found.items()}
    else:
        found = Side(taps, gpus, options).measured(args)
    return found


def record(args: argparse.Namespace) -> dict[str, Any]:
    """The parts: "tp" on both GPUs, the others on a GPU each where there are two."""
    count = torch.cuda.device_count()
    found: dict[str, Any] = {
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)], "prompt": args.prompt, "new": args.new, "rounds": args.rounds
    }  # fmt: skip
    start = time.perf_counter()

    def done(name: str, result: dict[str, Any]) -> None:
        found[name] = result
        print(
            f"{name} after {time.perf_counter() - start:.0f} s: {json.dumps(result.get('ratios', ''), indent=1)}",
            flush=True,
        )
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        alone = [name for name in args.parts.split(",") if name != "tp"]

        def queue(names: list[str], gpus: str | None) -> None:
            for name in names:
                done(name, part(name, args, gpus, Path(folder)))

        threads = [
            threading.Thread(target=queue, args=(alone[i :: max(count, 1)], str(i) if count else None))
            for i in range(max(count, 1))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if "tp" in args.parts.split(","):
            done("tp", part("tp", args, None, Path(folder)))
    found["took"] = time.perf_counter() - start
    return found


def main() -> None:
    """Run what the options name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="bf16", help="of bf16, fp8, moe, check, tp")
    parser.add_argument(
        "--config", default="", help="folder with a config.json, in place of the parts' own; weights are random"
    )
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--taps", choices=["both", "front", "norm"], default="both")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--serve", choices=["plain", "ours"], default=None)
    parser.add_argument("--kv-bytes", type=int, default=10 << 30)
    parser.add_argument("--ring", type=int, default=4 << 30)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--moe-backend", default=None)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--vllm", type=json.loads, default={}, help="further arguments of vLLM, as JSON")
    parser.add_argument("--stages", action="store_true", help="measure where the time goes, and print it")
    parser.add_argument("--eager", action="store_true", help="without graphs and compiler: to try this script on a CPU")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if args.stages:
        os.environ[VARIABLE] = "1"  # of the processes of engines
    if args.serve:
        serve(args)
        return
    found = record(args)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
