"""Speed of `lm.activations`: rows a second of one site, alone and beside an SAE that trains on the same device.

    python benchmarks/activations.py MODEL [--device cuda] [--rows 4096] [--features 32768] [--out FILE]

`share` is the rate of batches that are only taken, over the rate of the same passes that keep a row of each document; 1 is as fast.
`training` is the rate with a step of the SAE for each batch, and `sae` the rate of these steps. `bytes_sent` are bytes
of states that went to the host: 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pymllm_interp import LM, Capture, SamplingParams
from pymllm_interp.bench import describe_machine
from pymllm_interp.config import EngineTuning


def sae_step(width: int, features: int, device: str, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
    """A training step of a ReLU SAE with an L1 penalty, on rows [n, width]."""
    encoder = torch.nn.Linear(width, features, device=device, dtype=dtype)
    decoder = torch.nn.Linear(features, width, device=device, dtype=dtype)
    optimizer = torch.optim.Adam(
        [*encoder.parameters(), *decoder.parameters()], lr=1e-4, fused=device.startswith("cuda")
    )

    def step(rows: torch.Tensor) -> None:
        rows = rows.to(dtype)
        active = torch.relu(encoder(rows))
        loss = (decoder(active) - rows).square().mean() + 1e-3 * active.mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def measured(lm: LM, given: argparse.Namespace) -> dict[str, Any]:
    """Median rates, in rows a second."""
    device, site = lm.backend.facts.device, f"resid_post.{given.layer}"
    generator = torch.Generator().manual_seed(0)
    vocab = lm.backend.facts.limits.vocab_size
    documents = torch.randint(8, vocab, (given.documents, given.length), generator=generator).tolist()
    step = sae_step(
        lm.hidden_size, given.features, device, torch.bfloat16 if device.startswith("cuda") else torch.float32
    )
    some = torch.randn(given.rows, lm.hidden_size, device=device)
    count, batches = given.documents * given.length, -(-given.documents * given.length // given.rows)

    def take(train: bool) -> None:
        for batch in lm.activations(documents, site, rows=given.rows, shuffle=given.shuffle):
            if train:
                step(batch.rows)

    def prefill() -> None:
        lm.generate(documents, SamplingParams(max_tokens=0), capture=None, progress=False)

    def early() -> None:  # passes that end behind the layer, and keep a row of each document
        lm.generate(documents, SamplingParams(max_tokens=0), capture=[Capture(site, positions=[-1])], progress=False)

    def train_alone() -> None:
        for _ in range(batches):
            step(some)

    runs: dict[str, Callable[[], Any]] = {
        "prefill": prefill, "prefill_to_layer": early, "batches": lambda: take(False), "training": lambda: take(True),
        "sae": train_alone,
    }  # fmt: skip
    ring = lm.runner.capture_ring
    sent, found = 0, {name: list[float]() for name in runs}
    for turn in range(given.turns + 1):
        for name, run in runs.items():
            lm.reset_prefix_cache()
            before, started = 0 if ring is None else ring.bytes_sent, time.perf_counter()
            run()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if turn:  # before, kernels are compiled
                found[name].append(time.perf_counter() - started)
            if name in ("batches", "training") and ring is not None:
                sent += ring.bytes_sent - before
    rates = {name: count / statistics.median(times) for name, times in found.items()}
    return {
        "site": site, "documents": given.documents, "length": given.length, "rows": given.rows, "shuffle": given.shuffle,
        "features": given.features, "rows_per_second": rates, "share": rates["batches"] / rates["prefill_to_layer"],
        "share_while_training": rates["training"] / rates["prefill_to_layer"], "bytes_sent": sent,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--layer", type=int, default=12)
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--shuffle", type=int, default=65536)
    parser.add_argument("--features", type=int, default=32768)
    parser.add_argument("--device-capture-bytes", type=int, default=2 << 30)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.7)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    tuning = EngineTuning(device_capture_bytes=given.device_capture_bytes)
    options = {"load_format": given.load_format, "gpu_memory_utilization": given.gpu_memory_utilization}
    with LM(given.model, device=given.device, tuning=tuning, **options) as lm:
        result = {"machine": describe_machine(), "model": given.model, "device": lm.backend.facts.device}
        result |= measured(lm, given)
    text = json.dumps(result, indent=1, default=str)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
