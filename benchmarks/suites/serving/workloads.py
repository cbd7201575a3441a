"""Traffic for the suite "serving": prompts of random token ids, output lengths and arrival times, all seeded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

from pymllm_interp.bench.common import Prompts

SHORTEST = 4
"""Tokens of the shortest prompt or output."""
MIX_REQUESTS, SHARED_REQUESTS, LONG_REQUESTS = 512, 256, 32
DURATION = 20.0
"""Seconds over which the requests of `poisson` arrive."""
LONG_PROMPT, LONG_NEW_TOKENS = 8192, (66, 2)
"""Prompt tokens of `long`, and new tokens of its two runs: the difference is that of 64 decode steps."""
PREFIX, SHARED_NEW_TOKENS = 1024, 64
CHATS, TURNS, TURN_SECONDS, SYSTEM_PROMPT = 64, 8, 1.25, 256
INTERFERING_PROMPTS, INTERFERING_EVERY = 8, 0.5
INTERFERING_PROMPT = 8000
DECODING_REQUESTS, DECODING_PROMPT, DECODING_NEW_TOKENS = 32, 128, 1024


@dataclass(frozen=True)
class Workload:
    """Requests: what they ask for, and when they arrive. The lists have an entry for each request."""

    name: str
    prompts: Prompts
    """Token ids."""
    new_tokens: Sequence[int]
    """Tokens that each request generates, exactly."""
    arrivals: Sequence[float]
    """Seconds after the start, in ascending order."""
    seed: int
    background: int = 0
    """So many requests, the last ones, only disturb the others: their latencies do not count."""

    def head(self, requests: int, new_tokens: int) -> Workload:
        """The first `requests`, at once, with at most `new_tokens` each: a warm-up."""
        prompts = self.prompts[:requests]
        lengths = [min(length, new_tokens) for length in self.new_tokens[:requests]]
        return replace(self, prompts=prompts, new_tokens=lengths, arrivals=[0.0] * len(prompts), background=0)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a workload is made for.

    Workloads of equal seeds have equal lengths and arrivals. Their token ids differ with `run`, so that no run finds the prompts
    of another one in a prefix cache.
    """

    vocab_size: int
    longest: int
    """Tokens of a request at most, prompt and new ones. Outputs take up to half, prompts what is left."""
    scale: float = 1.0
    """Fraction of the requests, or of the duration."""
    seed: int = 0
    run: int = 0

    def __post_init__(self) -> None:
        if self.longest < 2 * SHORTEST:
            raise ValueError(f"longest={self.longest}: requests need at least {2 * SHORTEST} tokens")
        if not self.scale > 0:
            raise ValueError(f"scale={self.scale}: expected above 0")

    def count(self, requests: int) -> int:
        """The scaled number of requests, at least 2."""
        return max(2, round(requests * self.scale))


def mix(sizes: Sizes) -> Workload:
    """Many requests at once, with log-normal lengths."""
    rng, count = np.random.default_rng(sizes.seed), sizes.count(MIX_REQUESTS)
    return _with_prompts("mix", sizes, *_mixed_lengths(rng, count), [0.0] * count)


def poisson(sizes: Sizes, rate: float) -> Workload:
    """Requests with the lengths of `mix` that arrive independently of each other.

    Args:
        rate: mean requests a second.
    """
    rng, seconds = np.random.default_rng(sizes.seed), DURATION * sizes.scale
    count = max(1, int(rng.poisson(rate * seconds)))
    arrivals = np.sort(rng.uniform(0, seconds, count)).tolist()
    return _with_prompts(f"poisson-{rate:g}", sizes, *_mixed_lengths(rng, count), arrivals)


def long(sizes: Sizes, new_tokens: int = LONG_NEW_TOKENS[0]) -> Workload:
    """Long prompts at once, with `new_tokens` each."""
    count = sizes.count(LONG_REQUESTS)
    # Equal prompts for each number of new tokens: the longest outputs decide what is left.
    prompt = min(LONG_PROMPT, sizes.longest - min(LONG_NEW_TOKENS[0], sizes.longest // 2))
    return _with_prompts("long", sizes, [prompt] * count, [new_tokens] * count, [0.0] * count)


def shared_prefix(sizes: Sizes) -> Workload:
    """Requests at once; their prompts begin with the same tokens. A shorter `longest` shortens the prefix."""
    rng, count = np.random.default_rng(sizes.seed), sizes.count(SHARED_REQUESTS)
    new_tokens = min(SHARED_NEW_TOKENS, sizes.longest // 2)
    suffixes = _log_normal(rng, count, median=64, sigma=0.8, most=512)
    room = sizes.longest - new_tokens
    prefix = min(PREFIX, room // 2)
    made = _with_prompts(
        "shared-prefix", sizes, [prefix + min(length, room - prefix) for length in suffixes], [new_tokens] * count,
        [0.0] * count,
    )  # fmt: skip
    common = made.prompts[0][:prefix]
    return replace(made, prompts=[common + prompt[prefix:] for prompt in made.prompts])


def multi_turn(sizes: Sizes) -> Workload:
    """Chats: each prompt holds a common system prompt and all turns so far. About 80 % of the tokens were sent before.

    A chat sends its next turn at its time, whatever has ended by then. The replies within its prompts are random tokens, not those
    that were generated.
    """
    rng, chats = np.random.default_rng(sizes.seed), sizes.count(CHATS)
    reply = min(SHARED_NEW_TOKENS, sizes.longest // 4)
    system = min(SYSTEM_PROMPT, sizes.longest // 4)
    texts = np.random.default_rng([sizes.seed, sizes.run])
    common = texts.integers(sizes.vocab_size, size=system).tolist()
    turns: list[tuple[float, list[int]]] = []
    pause = TURN_SECONDS * sizes.scale
    for first in rng.uniform(0, pause, chats):
        history = common
        for turn, length in enumerate(_log_normal(rng, TURNS, median=60, sigma=0.8, most=300)):
            length = min(length, sizes.longest - reply - len(history))
            if length < SHORTEST:
                break
            prompt = history + texts.integers(sizes.vocab_size, size=length).tolist()
            turns.append((first + turn * pause, prompt))
            history = prompt + texts.integers(sizes.vocab_size, size=reply).tolist()
    turns.sort(key=lambda turn: turn[0])
    arrivals, prompts = [at for at, _ in turns], [prompt for _, prompt in turns]
    return Workload("multi-turn", prompts, [reply] * len(turns), arrivals, sizes.seed)


def interference(sizes: Sizes, prompts: bool = True) -> Workload:
    """Requests that decode, and long prompts that arrive beside them.

    Args:
        prompts: False: without the long prompts.
    """
    count, disturbing = sizes.count(DECODING_REQUESTS), sizes.count(INTERFERING_PROMPTS) if prompts else 0
    long_prompt = min(INTERFERING_PROMPT, sizes.longest - SHORTEST)
    return replace(
        _with_prompts(
            "interference", sizes, [DECODING_PROMPT] * count + [long_prompt] * disturbing,
            [DECODING_NEW_TOKENS] * count + [SHORTEST] * disturbing,
            [0.0] * count + [INTERFERING_EVERY * sizes.scale * (i + 1) for i in range(disturbing)],
        ),
        background=disturbing,
    )  # fmt: skip


WORKLOADS: dict[str, Callable[[Sizes], Workload]] = {
    "mix": mix, "long": long, "shared-prefix": shared_prefix, "multi-turn": multi_turn, "interference": interference,
}  # fmt: skip


def make_workload(name: str, sizes: Sizes) -> Workload:
    """The workload of a name: one of `WORKLOADS`, or "poisson-RATE" with the requests a second.

    Raises:
        ValueError: an unknown name.
    """
    kind, _, rate = name.partition("-")
    if kind == "poisson":
        try:
            value = float(rate)
        except ValueError:
            value = math.nan
        if 0 < value < math.inf:
            return poisson(sizes, value)
    elif name in WORKLOADS:
        return WORKLOADS[name](sizes)
    raise ValueError(f"workload {name!r}: expected one of {', '.join(WORKLOADS)}, or poisson-RATE (requests a second)")


def _log_normal(rng: Generator, count: int, median: float, sigma: float, most: int) -> list[int]:
    drawn = np.exp(rng.normal(math.log(median), sigma, count)).round()
    return np.clip(drawn, SHORTEST, most).astype(int).tolist()


def _mixed_lengths(rng: Generator, count: int) -> tuple[list[int], list[int]]:
    """(prompt tokens, new tokens) of each request."""
    return _log_normal(rng, count, 200, 0.8, 2000), _log_normal(rng, count, 150, 0.6, 600)


def _with_prompts(
    name: str, sizes: Sizes, lengths: Sequence[int], new_tokens: Sequence[int], arrivals: Sequence[float]
) -> Workload:
    """A workload with random prompts of these lengths; lengths are clipped to `longest`."""
    rng = np.random.default_rng([sizes.seed, sizes.run])
    new_tokens = [min(new, sizes.longest // 2) for new in new_tokens]
    clipped = [min(length, sizes.longest - new) for length, new in zip(lengths, new_tokens, strict=True)]
    prompts = [rng.integers(sizes.vocab_size, size=length).tolist() for length in clipped]
    return Workload(name, prompts, new_tokens, arrivals, sizes.seed)
