"""GB/s of an evicted prefix that comes back from host memory and from files, and what a connector that does nothing costs, as JSON.

python benchmarks/kv_connector.py            # the 8B shape, in bfloat16, on a GPU
python benchmarks/kv_connector.py --tiny     # on a CPU, to try the script

`restore`: GB/s of the copies alone, with checksums, until the device has them. `prompt_ms`: a prompt whose prefix is computed, is
kept in the pool, or comes back. Files are read from the page cache, unless --folder is on a disk that is slower than its writes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig

from pymllm_interp import LM, SamplingParams
from pymllm_interp.mem_cache.kv_connector import NO_CONNECTOR
from pymllm_interp.mem_cache.spill_connector import SpillConnector
from pymllm_interp.runner.stages.connector_stage import ConnectorStage

LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
ONE = SamplingParams(temperature=0, max_tokens=1)


def loaded(tiny: bool, **settings: Any) -> LM:
    """A model of random weights."""
    config = LlamaConfig(vocab_size=1000, max_position_embeddings=16384, **(SMALL if tiny else LARGE))
    config.architectures = ["LlamaForCausalLM"]
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    return LM(hf_config=config, load_format="dummy", device=device, dtype=dtype, kv_cache_tokens=32768, **settings)


def sync(lm: LM) -> None:
    if lm.runner.device.startswith("cuda"):
        torch.cuda.synchronize()


def milliseconds(lm: LM, prompt: list[int]) -> float:
    started = time.perf_counter()
    lm.generate([prompt], ONE)
    return round(1000 * (time.perf_counter() - started), 2)


def evict(lm: LM) -> None:
    """Evict all pages, and wait for the files."""
    kv, connector = lm.engine.scheduler.kv, lm.runner.kv_connector
    assert isinstance(connector, SpillConnector)

    def out() -> None:
        kv._free(kv._tree.evict(kv._tree.num_evictable))
        sync(lm)
        connector.post_forward(None)

    lm.engine.call(out)
    connector._writer.submit(lambda: None).result()


def prefixes(tiny: bool, tokens: int, repeats: int, **settings: Any) -> dict[str, Any]:
    """Speed of prefixes of so many tokens."""
    rng = random.Random(0)
    with loaded(tiny, **settings) as lm:
        connector: Any = lm.runner.kv_connector
        page_bytes = connector._pool.page_bytes
        restore, speeds = connector.restore, list[float]()

        def timed(keys: Any, pages: Any) -> int:
            sync(lm)
            started = time.perf_counter()
            found = restore(keys, pages)
            sync(lm)
            speeds.append(round(found * page_bytes / 1e9 / (time.perf_counter() - started), 3))
            return found

        connector.restore = timed
        found: dict[str, Any] = {"computed": [], "kept": [], "restored": []}
        for _ in range(repeats):
            prompt = [rng.randrange(1000) for _ in range(tokens)]
            found["computed"].append(milliseconds(lm, prompt))
            found["kept"].append(milliseconds(lm, prompt))
            evict(lm)
            found["restored"].append(milliseconds(lm, prompt))
            evict(lm)
        assert len(speeds) == repeats and connector.counts["corrupt"] == connector.counts["unwritten"] == 0
        return {"restore": speeds, "median": statistics.median(speeds), "prompt_ms": found}


def no_op(tiny: bool, repeats: int) -> dict[str, Any]:
    """Milliseconds of decode steps with a connector that does nothing, and without one, in turns."""
    tokens = 20 if tiny else 200
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with loaded(tiny) as lm:
        stages = {"none": lm.runner.stages, "no_op": (*lm.runner.stages, ConnectorStage(NO_CONNECTOR))}
        found: dict[str, Any] = {name: [] for name in stages}
        for turn in range(2 * repeats + 2):
            name = ("none", "no_op")[turn % 2]
            lm.runner.stages = stages[name]
            started = time.perf_counter()
            lm.generate([[turn, i, 3] for i in range(16)], params)
            if turn > 1:
                found[name].append(round(1000 * (time.perf_counter() - started) / tokens, 4))
        medians = {name: statistics.median(values) for name, values in found.items()}
        return {"step_ms": found, "ratio": round(medians["no_op"] / medians["none"], 4)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder")
    args = parser.parse_args()
    tokens = min(args.tokens, 500) if args.tiny else args.tokens
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = {
            "tokens": tokens,
            "host": prefixes(args.tiny, tokens, args.repeats, kv_spill_bytes=(64 << 20) if args.tiny else (8 << 30)),
            # A prompt is evicted at once, so it has to fit into the memory of pages on their way (MOST_WAITING).
            "files": prefixes(args.tiny, min(tokens, 2000), args.repeats, kv_spill_folder=folder),
            "no_op": no_op(args.tiny, args.repeats),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
