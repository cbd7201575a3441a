"""What a trace costs on a CPU: a read, an edit, an unused module, steps in which 256 blocks wait at one
module or at eight, and a trace of 512 invokes.

Usage: python benchmarks/trace_cost.py [--out benchmarks/results/trace-cost-cpu.json] [--invokes 512] [--quick]

The small model has 32 layers and little arithmetic, so the overhead of traces remains. nnsight's numbers are of the same reads on
transformers' model, in turns with ours. A cost is the CPU time of the visits where 32 layers are read, minus that where one is, by
layer. Ours have the begin and the end of the pass, nnsight's are calls of its `handle`. Microseconds, lower quartiles over the
rounds, since other processes may use the machine. Ours runs layers without a waiting block fused. So a read has a second cost, of
the whole pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
PROMPT, EVERY, LAST = torch.tensor([[1]]), list(range(LAYERS)), [LAYERS - 1]
MANY = [PROMPT] * 8
PLACES = list(range(0, LAYERS, 4))


def read_layers(model, layers: list[int]) -> None:
    with model.trace(PROMPT):
        seen = list().save()
        for layer in layers:
            seen.append(model.model.layers[layer].output)


def edit_layers(model, layers: list[int]) -> None:
    with model.trace(PROMPT):
        for layer in layers:
            value = model.model.layers[layer].output
            model.model.layers[layer].output = value * 1.0


def read_in_many(model, layers: list[int]) -> None:
    with model.trace() as tracer:
        for prompt in MANY:
            with tracer.invoke(prompt):
                seen = list().save()
                for layer in layers:
                    seen.append(model.model.layers[layer].output)


class PassTimer:
    """CPU microseconds of the latest call of ``owner.name``, on its own thread, and of all calls since `take`."""

    def __init__(self, owner: Any, name: str) -> None:
        self.last = self.total = 0.0
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.last = (time.thread_time() - started) * 1e6
                self.total += self.last

        setattr(owner, name, timed)

    def take(self) -> float:
        """`total`, which starts again at 0."""
        taken, self.total = self.total, 0.0
        return taken


def lower_quartiles(sides: dict[str, tuple[Callable[[], None], Callable[[], float]]], rounds: int) -> dict[str, float]:
    """Run the sides in turns, `rounds` times. The second function of a side returns the duration of its last run."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for name, (run, took) in list(sides.items()) * (rounds + 1):
        run()
        taken[name].append(took())
    return {name: statistics.quantiles(seen[1:], n=4)[0] for name, seen in taken.items()}


def small_model(rounds: int = 200) -> dict[str, float]:
    torch.set_num_threads(1)
    theirs = _nnsight_model()
    with (
        LM("small", load_format="dummy", hf_config=CONFIG, device="cpu", dtype="float32", lower_traces="off") as lm,
        torch.no_grad(),
    ):
        ours_took, theirs_took = PassTimer(lm.runner.executions, "call_model"), PassTimer(theirs._module, "forward")
        ours_visits = [PassTimer(lm.interleaver, name) for name in ("begin_pass", "visit", "end_pass")]
        theirs_visits = PassTimer(theirs.interleaver, "handle")

        def ours() -> float:
            return sum(timer.take() for timer in ours_visits)

        def passes(timer: PassTimer) -> float:
            ours(), theirs_visits.take()  # which would else count for the next side
            return timer.last

        sides: dict[str, tuple[Callable[[], None], Callable[[], float]]] = {}
        for name, run in (("read", read_layers), ("edit", edit_layers), ("many", read_in_many)):
            # The two sides of a difference have the same side's turn before them, which leaves the caches alike.
            for layers, which in ((LAST, " one"), (EVERY, "")):
                sides[f"nnsight {name}{which}"] = partial(run, theirs, layers), theirs_visits.take
                sides[f"{name}{which}"] = partial(run, lm, layers), ours
        for name, layers in (("one", LAST), ("all", EVERY)):
            sides[f"nnsight pass {name}"] = partial(read_layers, theirs, layers), partial(passes, theirs_took)
            sides[f"pass {name}"] = partial(read_layers, lm, layers), partial(passes, ours_took)
        took = lower_quartiles(sides, rounds)
        untouched = _untouched_module(lm, ours_took, rounds)

    def cost(name: str, readers: int = 1) -> float:
        return (took[name] - took[f"{name} one"]) / (LAYERS - 1) / readers

    return {
        "nnsight_read": cost("nnsight read"),
        "read": cost("read"),
        "read_over_fused_layers": (took["pass all"] - took["pass one"]) / (LAYERS - 1),
        "nnsight_read_beside_7_others": cost("nnsight many", readers=len(MANY)),
        "read_beside_7_others": cost("many", readers=len(MANY)),
        "nnsight_read_and_edit": cost("nnsight edit"),
        "read_and_edit": cost("edit"),
        "edit": cost("edit") - cost("read"),
        "untouched_module": untouched,
        "pass_with_one_read": took["pass one"],
        "nnsight_pass_with_one_read": took["nnsight pass one"],
    }


def _nnsight_model() -> TransformersModel:
    tests = Path(__file__).parent.parent / "tests"
    sys.path[:0] = [str(tests), str(tests / "support")]
    from conftest import tiny_tokenizer

    return TransformersModel(LlamaForCausalLM(CONFIG).eval(), tokenizer=tiny_tokenizer())


def _untouched_module(lm: LM, timer: PassTimer, rounds: int) -> float:
    """Microseconds a module of a trace that waits at the logits, against the same modules without the handover."""
    modules = [module for module in lm.runner.get_model().modules() if "forward" in module.__dict__]
    handovers = {id(module): module.__dict__["forward"] for module in modules}
    call = lm.runner.executions.call_model
    lm.runner.executions.call_model = lambda batch, _: call(batch, Execution.MODULES)  # pyright: ignore[reportAttributeAccessIssue]
    watch = lm.interleaver
    watch.first_hook = lambda first, stop: (first, "within")
    watch.try_fuse = lambda layer, module="", but="": False

    def bare() -> None:
        for module in modules:
            module.__dict__.pop("forward", None)
        trace_logits(lm)

    def wrapped() -> None:
        for module in modules:
            module.__dict__["forward"] = handovers[id(module)]
        trace_logits(lm)

    took = lower_quartiles({"bare": (bare, lambda: timer.last), "wrapped": (wrapped, lambda: timer.last)}, rounds)
    return (took["wrapped"] - took["bare"]) / len(modules)


def trace_logits(lm: LM) -> None:
    with lm.trace(PROMPT):
        lm.logits.save()


def empty_trace(rounds: int = 15) -> dict[str, float]:
    """CPU milliseconds of 32 steps of the small model, with an empty block and without a trace."""
    torch.set_num_threads(1)
    with LM("small", load_format="dummy", hf_config=CONFIG, device="cpu", dtype="float32", lower_traces="off") as lm:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

        def plain() -> None:
            lm.generate([1], params)

        def traced() -> None:
            with lm.generate([1], max_new_tokens=32, ignore_eos=True):
                pass

        started = 0.0

        def clocked(run: Callable[[], None]) -> Callable[[], None]:
            def side() -> None:
                nonlocal started
                started = time.process_time()
                run()

            return side

        def took() -> float:
            return (time.process_time() - started) * 1e3

        took_by = lower_quartiles({"plain": (clocked(plain), took), "traced": (clocked(traced), took)}, rounds)
    return {
        "plain_32_steps_ms": took_by["plain"],
        "empty_trace_ms": took_by["traced"] - took_by["plain"],
        "empty_trace_ratio": took_by["traced"] / took_by["plain"],
    }


def crowd(count: int = 256, steps: int = 24) -> dict[str, float]:
    """Decode steps in which `count` requests wait at one layer, or at `len(PLACES)`: microseconds of the engine's thread for each
    visit, including all work of hooks; lower quartiles over the steps."""
    torch.set_num_threads(1)
    capacity: dict[str, Any] = {"max_running_requests": count, "kv_cache_tokens": count * 64}
    with LM(
        "small", load_format="dummy", hf_config=CONFIG, device="cpu", dtype="float32", lower_traces="off", **capacity
    ) as lm:
        parts = [PassTimer(lm.interleaver, name) for name in ("begin_pass", "visit", "end_pass")]
        taken: list[float] = []
        end_pass = lm.interleaver.end_pass

        def ended() -> None:
            end_pass()
            taken.append(sum(part.take() for part in parts) / count)

        lm.interleaver.end_pass = ended

        def read() -> None:
            with lm.generate(max_new_tokens=steps, ignore_eos=True) as tracer:
                for i in range(count):
                    with tracer.invoke([i % 90]):
                        for _ in tracer.iter[:]:
                            lm.model.layers[5].output  # noqa: B018

        def save() -> None:
            with lm.generate(max_new_tokens=steps, ignore_eos=True) as tracer:
                for i in range(count):
                    with tracer.invoke([i % 90]):
                        seen = list().save()
                        for _ in tracer.iter[:]:
                            seen.append(lm.model.layers[5].output[0, -1])

        def edit() -> None:
            with lm.generate(max_new_tokens=steps, ignore_eos=True) as tracer:
                for i in range(count):
                    with tracer.invoke([i % 90]):
                        for _ in tracer.iter[:]:
                            lm.model.layers[5].output *= 1.0

        def save_at_places() -> None:
            with lm.generate(max_new_tokens=steps, ignore_eos=True) as tracer:
                for i in range(count):
                    with tracer.invoke([i % 90]):
                        seen = list().save()
                        for _ in tracer.iter[:]:
                            for layer in PLACES:
                                seen.append(lm.model.layers[layer].output[0, -1])

        costs = {}
        for name, run in (("read", read), ("saved_read", save), ("edit", edit)):
            run()
            taken.clear()
            run()
            costs[f"{name}_beside_{count - 1}_others"] = statistics.quantiles(taken[2:-2], n=4)[0]
        save_at_places()
        taken.clear()
        save_at_places()
        step = statistics.quantiles(taken[2:-2], n=4)[0]
        costs[f"saved_read_at_{len(PLACES)}_places_beside_{count - 1}_others"] = step / len(PLACES)
        costs[f"step_of_{count * len(PLACES)}_saved_reads_ms"] = step * count / 1e3
    return costs


def many_invokes(count: int, rounds: int = 3) -> dict[str, float]:
    """Seconds of one trace that reads a layer of `count` short prompts, against plain generation of the same prompts."""
    torch.set_num_threads(2)
    with LM(
        "demo",
        device="cpu",
        dtype="bfloat16",
        max_running_requests=256,
        kv_cache_tokens=16384,
        enable_prefix_caching=False,
    ) as lm:
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

        times: list[list[float]] = [[], []]
        for _ in range(rounds):
            for side, seen in zip((plain, traced), times, strict=True):
                started = time.perf_counter()
                side()
                seen.append(time.perf_counter() - started)
        a, b = (statistics.median(seen) for seen in times)
    return {"invokes": count, "plain_s": a, "traced_s": b, "ratio": b / a}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/trace-cost-cpu.json"))
    parser.add_argument("--invokes", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="a few rounds: shows that it runs, measures nothing")
    args = parser.parse_args()
    quick = args.quick
    record = {
        "machine": describe_machine(),
        "microseconds": small_model(2 if quick else 200),
        "crowd": crowd(4 if quick else 256, 8 if quick else 24),
        "empty_trace": empty_trace(2 if quick else 15),
        "many_invokes": many_invokes(4 if quick else args.invokes, 1 if quick else 3),
    }
    table = Table("what", "value")
    values = record["microseconds"] | record["crowd"] | record["empty_trace"] | record["many_invokes"]
    for name, value in values.items():
        table.add_row(name, f"{value:.2f}")
    Console().print(table)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
