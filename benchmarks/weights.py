"""Seconds of an update of all weights by CUDA IPC (shared memory on a CPU), and of sleep and wake, as JSON.

python benchmarks/weights.py            # the 8B shape, in bfloat16, on a GPU
python benchmarks/weights.py --tiny     # on a CPU, to try the script
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as mp
from transformers import LlamaConfig

from pymllm_interp import LM, SamplingParams
from pymllm_interp.wire.weights import SentWeights

LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def send(shapes: dict[str, list[int]], device: str, dtype: torch.dtype, pipe: Any) -> None:
    """Another process, with the trainer's weights."""
    weights = {name: torch.randn(shape, device=device, dtype=dtype) * 0.02 for name, shape in shapes.items()}
    with SentWeights(weights) as sent:
        pipe.send((sent.backend, sent.info))
        pipe.recv()


def seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return round(time.perf_counter() - started, 3)


def asleep(lm: LM) -> dict[str, Any]:
    """The memory that sleeps, by tag."""
    orders: Any = lm.backend
    return orders._orders._sleep._asleep


def timed(function: Callable[..., Any], parts: dict[str, float]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        parts["graphs"] = seconds(partial(function, *args, **kwargs))

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    config = LlamaConfig(vocab_size=1000 if tiny else 128256, tie_word_embeddings=False, **(SMALL if tiny else LARGE))
    config.architectures = ["LlamaForCausalLM"]
    lm = LM(hf_config=config, load_format="dummy", device=device, dtype=dtype, kv_cache_tokens=8192)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    shapes = {name: list(tensor.shape) for name, tensor in lm.runner.get_model().named_parameters()}
    ours, theirs = mp.get_context("spawn").Pipe()
    sender = mp.get_context("spawn").Process(target=send, args=(shapes, device, dtype, theirs))
    sender.start()
    backend, info = ours.recv()
    orders: list[tuple[str, dict[str, Any]]] = [
        ("init_weight_transfer_engine", {"init_info": {"backend": backend}}),
        ("start_weight_update", {}),
        ("receive_weights", {"update_info": info}),
        ("finish_weight_update", {}),
    ]
    found: dict[str, Any] = {"device": device, "bytes": sum(p.nbytes for p in lm.runner.get_model().parameters())}
    found["update"] = [
        seconds(lambda: [lm.backend.control(order, **given) for order, given in orders]) for _ in range(3)
    ]
    ours.send("done")
    sender.join()
    tokens = lm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
    found["sleep"], found["wake"], found["wake_parts"] = [], [], []
    for _ in range(3):
        found["sleep"].append(seconds(lm.sleep))
        parts = {tag: seconds(partial(lm.engine.call, memory.restore)) for tag, memory in asleep(lm).items()}
        lm.runner.init_cuda_graphs, capture = timed(lm.runner.init_cuda_graphs, parts), lm.runner.init_cuda_graphs
        found["wake"].append(round(sum(parts.values()) + seconds(lm.wake), 3))
        lm.runner.init_cuda_graphs = capture
        found["wake_parts"].append(parts)
    assert lm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids == tokens
    lm.shutdown()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
