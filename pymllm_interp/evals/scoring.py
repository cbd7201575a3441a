"""Log likelihoods of continuations, and the interventions of harnesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.sampling_params import SamplingParams
from ..hooks.interventions.knockout import Intervention
from ..hooks.positions import Window, windows_of
from ..hooks.spec import PlacedSpec
from ..lm import LM
from ..wire.specs import intervention_of

_SCORED = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)


class Score(NamedTuple):
    """The log likelihood of a continuation."""

    logprob: float
    """Sum over its tokens."""
    is_greedy: bool
    """Whether each of its tokens is the most likely one."""


def interventions_of(given: Any) -> list[Intervention]:
    """Interventions of a harness's arguments: `Steer` and its kin, or the JSON form of the HTTP API.
    Raises TypeError, ValueError: neither."""
    if given is None:
        return []
    several = [given] if isinstance(given, Intervention | Mapping) else given
    if isinstance(several, str) or not isinstance(several, Sequence):
        raise TypeError(f"interventions is {given!r}; expected a list of Steer, Ablate or other interventions")
    return [intervention_of(entry) if isinstance(entry, Mapping) else entry for entry in several]


def score(
    lm: LM, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], interventions: Sequence[Intervention]
) -> list[Score]:
    """The log likelihood of each continuation after its context, all in one batch.

    Positions of interventions count as in a generation: the context is the prompt, the continuation is generated.

    Args:
        pairs: (context, continuation), token ids; neither is empty.

    Raises:
        PromptError: a pair does not fit in the context of the model.
    """
    prompts = [[*context, *continuation] for context, continuation in pairs]
    specs = [
        placed_after(interventions, len(context), len(prompt))
        for (context, _), prompt in zip(pairs, prompts, strict=True)
    ]
    outs = lm.generate(prompts, _SCORED, interventions=specs)
    scores = []
    for (context, continuation), out in zip(pairs, outs, strict=True):
        found = out.prompt_logprobs[len(context) :]
        tokens = [entry[token] for entry, token in zip(found, continuation, strict=True)]
        scores.append(Score(sum(token.logprob for token in tokens), all(token.rank == 1 for token in tokens)))
    return scores


def placed_after(interventions: Sequence[Intervention], context: int, total: int) -> list[Intervention]:
    """The interventions for a prompt of `total` tokens; its first `context` tokens are the prompt of a generation.

    Those that select no position of it are left out.
    """
    return [found for spec in interventions for found in _placed(spec, context, total)]


def _placed(spec: Any, context: int, total: int) -> list[Any]:
    if not isinstance(spec, PlacedSpec) or spec.positions == "all":
        return [spec]
    windows = windows_of(spec.positions, context, spec.missing)
    positions = [position for window in windows for position in _within(window, total)]
    return [replace(spec, positions=positions)] if positions else []  # pyright: ignore[reportArgumentType]


def _within(window: Window, total: int) -> range:
    return range(window.start, total if window.stop is None else min(window.stop, total), window.step)
