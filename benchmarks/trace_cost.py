"""What a trace costs on a CPU: a read, an edit, a module that nobody touches, and a trace of 512 invokes.

Usage: python benchmarks/trace_cost.py [--out benchmarks/results/trace-cost-cpu.json] [--invokes 512]

The small model has 32 layers and no arithmetic to speak of, so that what is left is the cost of the machinery; nnsight's
own numbers are of the same reads on transformers' model, in turns with ours. Times are medians, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from nnsight.modeling.transformers import TransformersModel
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from pymllm_interp import LM, SamplingParams
from pymllm_interp.bench import describe_machine, random_prompts
from pymllm_interp.runner.partition import Execution

LAYERS = 32
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, vocab_size=97,
    max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def medians(*sides: Callable[[], None], rounds: int = 150) -> list[float]:
    """Median microseconds of each side, measured in turns."""
    for side in sides:
        side()
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, seen in zip(sides, times, strict=True):
            started = time.perf_counter()
            side()
            seen.append((time.perf_counter() - started) * 1e6)
    return [statistics.median(seen) for seen in times]


def read_layers(model, prompt: torch.Tensor, layers: list[int]) -> None:
    with model.trace(prompt):
        seen = list().save()
        for layer in layers:
            seen.append(model.model.layers[layer].output)


def edit_layers(model, prompt: torch.Tensor, layers: list[int]) -> None:
    with model.trace(prompt):
        for layer in layers:
            value = model.model.layers[layer].output
            model.model.layers[layer].output = value * 1.0


def read_in_many(model, prompts: list[torch.Tensor], layers: list[int]) -> None:
    with model.trace() as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                seen = list().save()
                for layer in layers:
                    seen.append(model.model.layers[layer].output)


def small_model() -> dict[str, float]:
    torch.set_num_threads(1)
    prompt, every, last = torch.tensor([[1]]), list(range(LAYERS)), [LAYERS - 1]
    theirs = _nnsight_model()
    with LM("small", load_format="dummy", hf_config=CONFIG, device="cpu", dtype="float32") as lm, torch.no_grad():
        t1, t32, o1, o32 = medians(
            lambda: read_layers(theirs, prompt, last),
            lambda: read_layers(theirs, prompt, every),
            lambda: read_layers(lm, prompt, last),
            lambda: read_layers(lm, prompt, every),
        )
        e1, e32 = medians(lambda: edit_layers(lm, prompt, last), lambda: edit_layers(lm, prompt, every))
        prompts = [prompt] * 8
        m1, m32 = medians(lambda: read_in_many(lm, prompts, last), lambda: read_in_many(lm, prompts, every))
        untouched = _untouched_module(lm, prompt)
    more = LAYERS - 1
    return {
        "nnsight_read": (t32 - t1) / more,
        "read": (o32 - o1) / more,
        "read_beside_7_others": (m32 - m1) / more / len(prompts),
        "read_and_edit": (e32 - e1) / more,
        "untouched_module": untouched,
        "nnsight_trace_of_one_read": t1,
        "trace_of_one_read": o1,
    }


def _nnsight_model() -> TransformersModel:
    import sys

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from conftest import tiny_tokenizer

    return TransformersModel(LlamaForCausalLM(CONFIG).eval(), tokenizer=tiny_tokenizer())


def _untouched_module(lm: LM, prompt: torch.Tensor) -> float:
    """A live trace that waits at the head, against the same modules without nnsight's handoffs: microseconds a module."""
    modules = [module for module in lm.runner.get_model().modules() if "forward" in module.__dict__]
    handoffs = {id(module): module.__dict__["forward"] for module in modules}

    def bare() -> None:
        for module in modules:
            module.__dict__.pop("forward", None)
        _timed_pass(lm, prompt)

    def wrapped() -> None:
        for module in modules:
            module.__dict__["forward"] = handoffs[id(module)]
        _timed_pass(lm, prompt)

    samples: dict[str, list[float]] = {"bare": [], "wrapped": []}
    for _ in range(150):
        bare()
        samples["bare"].append(_timed_pass.last)  # pyright: ignore[reportFunctionMemberAccess]
        wrapped()
        samples["wrapped"].append(_timed_pass.last)  # pyright: ignore[reportFunctionMemberAccess]
    difference = statistics.median(samples["wrapped"]) - statistics.median(samples["bare"])
    return difference / len(modules)


def _timed_pass(lm: LM, prompt: torch.Tensor) -> None:
    """One pass module by module, with a trace that waits for the logits; only the model's call is timed."""
    model, call = lm.runner, lm.runner._call_model

    def timed_call(batch, execution):
        started = time.perf_counter()
        out = call(batch, Execution.MODULES)
        _timed_pass.last = (time.perf_counter() - started) * 1e6  # pyright: ignore[reportFunctionMemberAccess]
        return out

    model._call_model = timed_call  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with lm.trace(prompt):
            lm.logits.save()
    finally:
        del model._call_model


def many_invokes(count: int) -> dict[str, float]:
    """One layer read over `count` short prompts in one trace, against plain generation of the same prompts."""
    torch.set_num_threads(2)
    with LM("demo", device="cpu", dtype="bfloat16", max_running_requests=256, kv_cache_tokens=16384) as lm:
        prompts = random_prompts(lm, count, 16)

        def plain() -> None:
            lm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))

        def traced() -> None:
            with lm.generate(max_new_tokens=16, ignore_eos=True) as tracer:
                for prompt in prompts:
                    with tracer.invoke(prompt):
                        seen = list().save()
                        for _ in tracer.iter[:]:
                            seen.append(lm.model.layers[15].output[0, -1])

        a, b = medians(plain, traced, rounds=3)
    return {"invokes": count, "plain_s": a / 1e6, "traced_s": b / 1e6, "ratio": b / a}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/trace-cost-cpu.json"))
    parser.add_argument("--invokes", type=int, default=512)
    args = parser.parse_args()
    record = {"machine": describe_machine(), "microseconds": small_model(), "many_invokes": many_invokes(args.invokes)}
    table = Table("what", "value")
    for name, value in {**record["microseconds"], **record["many_invokes"]}.items():
        table.add_row(name, f"{value:.2f}")
    Console().print(table)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
