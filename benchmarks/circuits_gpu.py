"""Time and peak memory of `lm.circuit` with random weights and transcoders of given shapes, as JSON.

    python -m benchmarks.circuits_gpu --shape gemma-2-2b --tokens 500 --out circuits.json
    python -m benchmarks.circuits_gpu --shape gemma-2-2b --tokens 6000 --features 2048 --out circuits-long.json
    python -m benchmarks.circuits_gpu --shape qwen3-14b --tokens 1000 --out circuits-14b.json
    python -m benchmarks.circuits_gpu --shape tiny --tokens 40 --features 50    # CPU
    python -m benchmarks.circuits_gpu --shape gemma-2-2b --tokens 500 --peer circuit-tracer    # see circuits_peer.py

Transcoders have 16,384 features, of which `--active` are active at a position (top-k).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma2Config, Qwen3Config

from pymllm_interp import LM, SAE
from pymllm_interp.toolkit.circuits import build, memory

SHAPES: dict[str, Any] = {
    "gemma-2-2b": lambda: Gemma2Config(
        vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, query_pre_attn_scalar=256, sliding_window=4096,
    ),
    "qwen3-14b": lambda: Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=False,
    ),
    "tiny": lambda: Gemma2Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=128, query_pre_attn_scalar=16, sliding_window=32,
    ),
}  # fmt: skip


def random_transcoders(config: Any, features: int, active: int, device: str, dtype: torch.dtype) -> list[SAE]:
    """A top-k transcoder of each layer."""
    width = config.hidden_size
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    return [
        SAE(
            W_enc=drawn(width, features) / width**0.5, b_enc=torch.zeros(features, device=device, dtype=dtype),
            W_dec=drawn(features, width) * 0.02, b_dec=torch.zeros(width, device=device, dtype=dtype), transcoder=True,
            site=f"mlp_in.{layer}", site_out=f"mlp_out.{layer}", architecture="topk", k=active,
        )
        for layer in range(config.num_hidden_layers)
    ]  # fmt: skip


def peer_runs(given: argparse.Namespace, config: Any) -> list[dict[str, Any]]:
    """circuit-tracer's runs of the same shape on this machine, by its own Python."""
    script = Path(__file__).with_name("circuits_peer.py")
    arguments = {name: value for name, value in vars(given).items() if name != "out"} | {"config": config.to_dict()}
    command = [os.environ["CIRCUIT_TRACER_PYTHON"], str(script), json.dumps(arguments, default=str)]
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return json.loads(found.stdout.splitlines()[-1])["runs"]


def formula_gib(lm: LM, prompt: list[int], coders: list[SAE], given: argparse.Namespace, active: int) -> float:
    """Most device memory of a circuit beside weights and transcoders, by the formula."""
    plan = build.planned(
        lm, prompt, coders, None, max_features=given.features, max_logits=10, logit_mass=0.95, node_threshold=0.8,
        edge_threshold=0.98, batch=given.batch, skip=1, offload=False,
    )  # fmt: skip
    return memory.CircuitMemory.of(plan, active).device(given.batch) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--features", type=int, default=4096, help="max_features")
    parser.add_argument("--transcoder", type=int, default=16384, help="features of a transcoder")
    parser.add_argument("--active", type=int, default=32, help="active features of a position and layer")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument(
        "--peer", choices=["circuit-tracer"], help="run it, too: CIRCUIT_TRACER_PYTHON names its Python"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.peer and "CIRCUIT_TRACER_PYTHON" not in os.environ:
        parser.error(
            "--peer circuit-tracer needs CIRCUIT_TRACER_PYTHON, a Python with circuit-tracer 0.5.0 (circuits_peer.py)"
        )
    config, cuda = SHAPES[given.shape](), torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    pool = -(-given.tokens // 64) * 64 + 256
    with LM(
        "circuit", hf_config=config, load_format="dummy", dtype=dtype, device=device, kv_cache_tokens=pool,
        max_num_tokens=2048, max_running_requests=4, attention_backend="torch",  # circuits have their own attention
    ) as lm:  # fmt: skip
        coders = random_transcoders(config, given.transcoder, given.active, device, dtype)
        prompt = torch.randint(config.vocab_size, (given.tokens,), generator=torch.Generator().manual_seed(1)).tolist()
        runs, held = [], torch.cuda.memory_allocated() / 2**30 if cuda else None
        for _ in range(given.repeat):
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            circuit = lm.circuit(prompt, coders, max_features=given.features, batch=given.batch, progress=False)
            seconds = time.perf_counter() - started
            values = torch.cat((circuit.activations, circuit.target_values))
            missing = (circuit.weights.sum(1) + circuit.bias + circuit.rest - values).abs() / values.abs().clamp(
                min=1e-3
            )
            runs.append({
                "seconds": seconds, "active": circuit.active, "kept": len(circuit.features), "targets": len(circuit.targets),
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None, "median_error": missing.median().item(),
                "held_gib": held, "formula_gib": formula_gib(lm, prompt, coders, given, circuit.active),
            })  # fmt: skip
            started = time.perf_counter()
            runs[-1] |= {"nodes": len(circuit.nodes), "edges": int(circuit.graph.edges.sum())}
            runs[-1]["prune_seconds"] = time.perf_counter() - started
            print(json.dumps(runs[-1]), flush=True)
    name = torch.cuda.get_device_name() if cuda else "cpu"
    record = {
        "device": name,
        "dtype": str(dtype),
        **{key: value for key, value in vars(given).items() if key != "out"},
        "runs": runs,
    }
    if given.peer:
        record["peer_runs"] = peer_runs(given, config)
        ours, theirs = (min(run["seconds"] for run in each) for each in (runs, record["peer_runs"]))
        record["times_faster"] = theirs / ours
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1, default=str))
    print(json.dumps(record, default=str))


if __name__ == "__main__":
    main()
