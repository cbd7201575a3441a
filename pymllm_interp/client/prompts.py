"""Reading and checking of prompts, sampling parameters and specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..core.limits import MAX_SPECS
from ..core.pass_parts import PromptEmbeds
from ..core.sampling_params import SamplingParams
from ..hooks.captures.spec import Capture
from ..hooks.interventions.knockout import Intervention
from ..hooks.monitors.monitor import Monitor
from ..hooks.site import Site
from ..utils.arguments import PromptError, shown
from ..utils.caller_frames import warn_at_caller
from .chat import PLACEHOLDER, RenderedPrompt, is_conversation, render, tokenized
from .facts import ModelFacts
from .images.parts import ImageSources
from .inputs.encoder_prompts import encoded, is_of_both, refuse_both
from .prompt_batch import EMBEDS, has_embeds, images_in, rows_of, split, vllm_prompt

BYTES = bytes | bytearray | memoryview
OUTPUTS = {
    "output_hidden_states": ("resid_pre.*", "final_norm"),
    "output_attentions": ("pattern.*",),
    "return_routed_experts": ("experts.*",),
}
"""Options of calls -> sites that they capture."""


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or a list of them, as a list. A list of whole numbers, or of messages, is one prompt."""
    if type(prompts) is list and prompts and type(prompts[0]) is list:  # prompts of token ids, or conversations
        return list(prompts)
    if isinstance(prompts, str | RenderedPrompt | BYTES) or is_conversation(prompts):
        return [prompts]
    if isinstance(prompts, Mapping) and is_of_both(prompts):
        return [prompts]
    if isinstance(prompts, (Mapping, torch.Tensor)) or (isinstance(prompts, np.ndarray) and has_embeds(prompts)):
        return split(prompts, "the prompt").prompts
    if not isinstance(prompts, Sequence):
        raise PromptError(f"prompts is a {type(prompts).__name__}: expected text, token ids, or a list of them")
    if prompts and all(isinstance(token, int) for token in prompts):
        return [prompts]
    return list(prompts)


def rendered(tokenizer: Any, prompt: Any, what: str) -> RenderedPrompt:
    """Text, if any, and token ids of a prompt of any kind. The ids are not checked.
    Raises PromptError: another type, text that no tokenizer reads, or no tokenizer."""
    if isinstance(prompt, RenderedPrompt):
        return prompt
    if type(prompt) is list and set(map(type, prompt)) == {int}:
        return RenderedPrompt(None, list(prompt))
    if is_conversation(prompt):
        return render(tokenizer, prompt, what)
    inner = vllm_prompt(prompt, what)
    if inner is not None:
        found, images = rendered(tokenizer, inner, what), images_in(prompt, what)
        return found._replace(images=ImageSources(images)) if images else found
    if not isinstance(prompt, str):
        return _of_ids(prompt, what)
    return tokenized(tokenizer, prompt, what)


def checked(tokenizer: Any, prompt: Any, facts: ModelFacts, what: str) -> RenderedPrompt:
    """Text and token ids of a prompt: text, token ids (list or tensor), a tokenizer's dict, messages, or embeddings.
    Raises PromptError: empty, of another type, with ids outside the vocabulary, or with embeddings that the model cannot take."""
    if facts.limits.max_source_len and (not isinstance(prompt, RenderedPrompt) or prompt.encoder is None):

        def read(side: Any, name: str) -> RenderedPrompt:
            if facts.audio is not None and isinstance(side, str):  # its special tokens are in the text
                side = tokenized(tokenizer, side, name, add_special_tokens=False)
            return _read(tokenizer, side, facts, name)

        return encoded(read, prompt, facts, what)
    return _read(tokenizer, prompt, facts, what)


def _read(tokenizer: Any, prompt: Any, facts: ModelFacts, what: str) -> RenderedPrompt:
    """`checked` of a prompt of one side."""
    plain = isinstance(prompt, str | list) or not has_embeds(prompt)
    if not plain or isinstance(prompt, Mapping):
        refuse_both(prompt, what)
    found = rendered(tokenizer, prompt, what) if plain else _embedded(tokenizer, prompt, facts, what)
    if facts.images is not None:
        found = facts.images.placed(found, what)
    elif found.images:
        raise PromptError(f"{what} has images, and {facts.name} ({facts.architecture}) takes text only")
    ids, vocab_size = found.token_ids, facts.limits.vocab_size
    if not ids:
        raise PromptError(f"{what} is empty: a prompt needs at least one token")
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise PromptError(f"{what} holds token id {token}, but the vocabulary goes from 0 to {vocab_size - 1}")
    return found


def _embedded(tokenizer: Any, prompt: Any, facts: ModelFacts, what: str) -> RenderedPrompt:
    """The prompt of embeddings [tokens, width], or of token ids with vectors [width] at some positions.
    Raises PromptError: another form, shape or dtype, a position outside the prompt, or numbers that are not finite."""
    given = prompt if isinstance(prompt, Mapping) else {"prompt_embeds": prompt}
    rest = {key: value for key, value in given.items() if key not in EMBEDS and value is not None}
    whole, placed = (given.get(key) for key in EMBEDS)
    if (whole is None) == (placed is None) or (whole is None) != bool(rest):
        raise PromptError(
            f"{what} has {', '.join(map(repr, given))}: expected prompt_embeds [tokens, {facts.spec.embedding_size}] and "
            "nothing else, or prompt_token_ids with embeds, a dict of position and vector"
        )
    if whole is not None:
        vectors = _vectors(whole, facts, what)
        found, places = RenderedPrompt(None, [PLACEHOLDER] * len(vectors)), range(len(vectors))
    else:
        found = rendered(tokenizer, rest, what)
        if found.images:
            raise PromptError(f"{what} has embeds and images: one of the two is expected")
        if isinstance(placed, PromptEmbeds):  # of `verbalize`, which has checked them
            return found._replace(embeds=placed)
        if not isinstance(placed, Mapping) or not placed:
            raise PromptError(f"{what}: embeds is {shown(placed)}: expected a dict of position and vector")
        for place in placed:
            if type(place) is not int or not 0 <= place < len(found.token_ids):
                raise PromptError(
                    f"{what}: embeds has position {shown(place)}, but the prompt has positions 0 to {len(found.token_ids) - 1}"
                )
        places = sorted(placed)
        rows = [torch.as_tensor(placed[place]) for place in places]
        if any(row.shape != rows[0].shape or row.dtype != rows[0].dtype for row in rows):
            raise PromptError(f"{what}: the vectors of embeds differ in shape or dtype")
        vectors = _vectors(torch.stack(rows), facts, what)
    return found._replace(embeds=PromptEmbeds(places, vectors))


def _vectors(given: Any, facts: ModelFacts, what: str) -> torch.Tensor:
    """Embeddings [positions, width] in memory of their own: on the engine's device if they are there, else on the CPU."""
    vectors, width = torch.as_tensor(given), facts.spec.embedding_size
    if vectors.layout is not torch.strided or vectors.is_meta or vectors.dim() != 2 or vectors.shape[1] != width:
        raise PromptError(f"{what} has embeddings {list(vectors.shape)}: expected [positions, {width}], dense")
    if vectors.dtype != facts.dtype:
        raise PromptError(
            f"{what} has embeddings of {vectors.dtype}, and the model computes in {facts.dtype}: pass embeds.to({facts.dtype})"
        )
    if not bool(vectors.isfinite().all()):
        raise PromptError(f"{what} has embeddings with NaN or infinity")
    return vectors.detach().to(vectors.device if vectors.device == facts.own_device else "cpu", copy=True)


def only_tokens(prompt: RenderedPrompt, what: str) -> list[int]:
    """Token ids of a prompt, for calls that take text. Raises PromptError for a prompt of another kind."""
    kinds = {"embeddings": prompt.embeds, "an encoder's side": prompt.encoder, "images": prompt.images or None}
    if kind := next((kind for kind, part in kinds.items() if part is not None), None):
        raise PromptError(f"{what} has {kind}, which this call does not take: lm.generate and lm.forward do")
    return prompt.token_ids


def names_of(prompts: Sequence[Any]) -> list[str]:
    """Names of a call's prompts, for messages."""
    return [f"prompt {i}" for i in range(len(prompts))] if len(prompts) > 1 else ["the prompt"] * len(prompts)


def _of_ids(prompt: Any, what: str) -> RenderedPrompt:
    """A prompt other than text: ids, a tensor, an array, or a tokenizer's or processor's dict.
    Raises PromptError: another type, several prompts in one, or ids that are not integers."""
    if isinstance(prompt, BYTES):
        raise PromptError(f"{what} is {type(prompt).__name__}: pass text, such as prompt.decode('utf-8')")
    batch = split(prompt, what).prompts
    if len(batch) > 1:
        raise PromptError(f"{what} holds {len(batch)} prompts in one: one is expected here")
    if isinstance(batch[0], RenderedPrompt):
        return batch[0]
    (ids,) = rows_of(batch[0], what)
    return RenderedPrompt(None, ids)


def params_for(
    prompts: list[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams | None]:
    """Sampling parameters of each prompt: one for all, a list, or None, for the model's defaults.

    Raises:
        TypeError: neither.
        PromptError: a list of another length.
    """
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * len(prompts)
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
        raise TypeError(
            f"sampling_params is a {type(sampling_params).__name__}: SamplingParams is expected, or a list of them"
        )
    for params in sampling_params:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params holds a {type(params).__name__}: SamplingParams is expected")
    if len(sampling_params) != len(prompts):
        raise PromptError(f"{len(prompts)} prompts, but {len(sampling_params)} SamplingParams: one, or one for each")
    return list(sampling_params)


def lists_for_prompts(given: Any, prompts: int, what: str) -> list[list[Any]]:
    """One list of specs per prompt.

    Args:
        given: None, a spec, a list of specs for all prompts, or one list per prompt, which may be None.
        what: the argument's name, for error messages.

    Raises:
        ValueError: lists mixed with specs, or not one list per prompt.
    """
    specs = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    lists = [spec is None or isinstance(spec, list | tuple) for spec in specs]
    if not any(lists):
        return [specs] * prompts
    if all(lists) and len(specs) == prompts:
        return [list(entry or ()) for entry in specs]
    others = len(specs) - sum(lists)
    got = f"{sum(lists)} of them" + (f" and {others} that are not in one" if others else "")
    hint = "; lm.sweep(prompt, lists) runs one prompt under each" if (what, prompts) == ("interventions", 1) else ""
    raise ValueError(f"{what}: expected one list for all prompts, or a list for each of the {prompts}; got {got}{hint}")


def for_each_prompt(given: Any, prompts: int) -> list[list[Intervention]]:
    """One list of interventions per prompt.

    Args:
        given: None, one list for all prompts, or one list (or None) per prompt.

    Raises:
        ValueError: anything else.
    """
    return _checked(given, prompts, "interventions", Intervention, "expected one such as Steer or Ablate")


def declared_for_each_prompt(options: Mapping[str, Any], prompts: int) -> list[list[Intervention]]:
    """The `interventions` of a call's options and its `monitors`, one list per prompt. Raises ValueError, as they do."""
    found = for_each_prompt(options.get("interventions"), prompts)
    watching = _checked(
        options.get("monitors"),
        prompts,
        "monitors",
        Monitor,
        "expected Monitor(site, probe, ...), or a name in lm.monitors",
    )
    return [[*own, *others] for own, others in zip(found, watching, strict=True)] if any(watching) else found


def captures_for_each_prompt(given: Any, prompts: int) -> list[list[Capture]]:
    """`for_each_prompt` of captures; a site or its name becomes a `Capture`."""
    return _checked(given, prompts, "capture", Capture, "expected a site, or Capture(site, ...)")


def captures_in(options: Mapping[str, Any], prompts: int) -> list[list[Capture]]:
    """Captures of a call for each prompt, with the sites of `OUTPUTS`."""
    outputs = captures_of_outputs(options)
    return [[*own, *outputs] for own in captures_for_each_prompt(options.get("capture"), prompts)]


def refuse_captures(who: str, options: Mapping[str, Any], why: str) -> None:
    """Raise TypeError for captures of a call that would not return them."""
    for name in ("capture", *OUTPUTS):
        if options.get(name):
            raise TypeError(f"{who} got {name}: {why}")


def captures_of_outputs(options: Mapping[str, Any]) -> list[Capture]:
    """Captures of `output_hidden_states`, `output_attentions` and `return_routed_experts`, where they are true."""
    return [_capture_of(site) for name, sites in OUTPUTS.items() if options.get(name) for site in sites]


def _checked(given: Any, prompts: int, what: str, kind: Any, expected: str) -> list[list[Any]]:
    found = lists_for_prompts(given, prompts, what)
    names = [""] * prompts if prompts < 2 or found[0] is found[-1] else [f" of prompt {i}" for i in range(prompts)]
    for name, entry in zip(names, found, strict=True):
        if len(entry) > MAX_SPECS:
            raise ValueError(f"{what}{name} has {len(entry)} entries; a prompt takes at most {MAX_SPECS}")
    if kind is Capture:
        found = [[_capture_of(spec) if isinstance(spec, str | Site) else spec for spec in entry] for entry in found]
    for name, entry in zip(names, found, strict=True):
        for spec in entry:
            if not isinstance(spec, kind):
                raise ValueError(f"{what}{name}: {shown(spec)} is not one; {expected}")
    return found


@lru_cache
def _capture_of(site: str | Site) -> Capture:
    return Capture(site)


def warn_of_flat_list(interventions: Any, prompts: int) -> None:
    """Warn, at the caller's line, of a flat list with one op for each prompt: it could mean either."""
    if prompts < 2 or not isinstance(interventions, list | tuple) or len(interventions) != prompts:
        return
    if all(isinstance(op, Intervention) for op in interventions):
        warn_at_caller(
            [
                f"interventions holds {prompts} ops for {prompts} prompts: each op acts on every prompt. Lists say which is meant: "
                f"[[a], [b], ...] is one op a prompt, [ops] * {prompts} is all ops on every prompt"
            ]
        )
