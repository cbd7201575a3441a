"""`KnownNames`: the objects behind names in specs, looked up when a request is submitted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from ...core import unsupported
from ...hooks.bind import resolved
from ...hooks.captures.reductions.lens import Lens
from ...hooks.interventions.projections import Ablate
from ...hooks.saes.registry import SAERegistry
from ...hooks.saes.sae import SAE
from ...hooks.site import expand_in, is_several
from ...hooks.spec import Spec
from ...hooks.vectors.by_layer import LayerVectors
from ...hooks.vectors.registry import VectorRegistry
from ...utils.arguments import SHOWN, PromptError
from ...utils.caller_frames import warn_at_caller
from ..facts import ModelFacts

RENAMED = {
    "engine_name": ("backend.facts.engine_name", "lm.backend.facts.engine_name"),
    "fingerprint_with": ("weights.fingerprint_with", "lm.weights.fingerprint_with(lora)"),
    "head_dim": ("model_spec.head_dim", "lm.cfg.d_head"),
    "load_adapter": ("adapters.load", "lm.adapters.load(name, folder)"),
    "max_model_len": ("limits.max_model_len", "lm.limits.max_model_len"),
    "model_fingerprint": ("weights.fingerprint", "lm.weights.fingerprint"),
    "resolve_specs": ("_requests.resolved", "the names in the call itself"),
    "submit_prefill": ("_requests.prefill", "lm.submit(prompt, SamplingParams(max_tokens=0), capture=...)"),
    "unload_adapter": ("adapters.unload", "lm.adapters.unload(name)"),
    "weights_version": ("weights.version", "lm.weights.version"),
}
"""Old name of an `LM` -> its present place, and the replacement in the warning. Old names work until 0.2."""


class KnownNames(NamedTuple):
    """Names of vectors and SAEs, and tokens as text.

    Attributes:
        tokenizer: a transformers tokenizer, or None.
        facts: facts of the model: its spec, and names under which files may know it.
        fingerprint: returns the model's, as it is now.
    """

    vectors: VectorRegistry
    saes: SAERegistry
    tokenizer: Any
    facts: ModelFacts
    fingerprint: Callable[[], str]

    def looked_up(self, lists: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Each request's specs with vectors, SAEs and token ids in place of names. Warns of those made for another model.
        Raises ValueError: an unknown name, a text that is not one token, or a vector that a spec refuses."""
        made = {key: self._known(spec) for key, spec in {id(spec): spec for specs in lists for spec in specs}.items()}
        return resolved([[made[id(spec)] for spec in specs] for specs in lists], self.vectors, self.facts.spec)

    def _known(self, spec: Any) -> Any:
        found = self.saes.resolved(with_token_ids(spec, self.tokenizer))
        if isinstance(found, Ablate) and not found.named:
            self._warn_of_layers(found)
        for sae in _saes_of(found):
            names = self.facts.names
            if names and not fits_name(sae.model_name, names):
                warn_at_caller(
                    [
                        f"{spec.name}: the SAE was trained on {sae.model_name}, as it says, and this model is {names[0]}. "
                        "dataclasses.replace(sae, model_name='') ends this warning"
                    ]
                )
        for vectors in found.names():
            made_for = vectors.made_for if isinstance(vectors, LayerVectors) else self.vectors.made_for(vectors)
            if made_for and made_for != self.fingerprint():
                what = f"vector {vectors!r} was" if isinstance(vectors, str) else "the vectors were"
                warn_at_caller(
                    [
                        f"{spec.name}: {what} made with another model: its fingerprint begins with {made_for[:8]}, this model's "
                        f"with {self.fingerprint()[:8]} (other weights, config or dtype)"
                    ]
                )
        return found

    def _warn_of_layers(self, spec: Ablate) -> None:
        """Warn of as many directions as layers: they may be meant as `Steer` takes them, one for each layer."""
        count = len(spec.directions)
        if count > 1 and is_several(str(spec.site)):
            with suppress(ValueError):  # a wrong pattern, which is refused where specs are bound
                if len(expand_in(spec.site, self.facts.spec)) == count:
                    text = f"{spec.name}: {count} directions at each of {count} layers: {{layer: directions}} says which is meant"
                    warn_at_caller([text])


def with_token_ids(spec: Any, tokenizer: Any) -> Any:
    """The spec with token ids instead of texts in its `Lens`; itself without such texts.
    Raises PromptError: a text that is not one token, or no tokenizer."""
    lens = getattr(spec, "reduce", None)
    if not isinstance(lens, Lens) or not any(isinstance(token, str) for token in lens.tokens or ()):
        return spec
    ids = tuple(_token_id(token, tokenizer) if isinstance(token, str) else token for token in lens.tokens or ())
    return replace(spec, reduce=replace(lens, tokens=ids))


def _token_id(text: str, tokenizer: Any) -> int:
    if tokenizer is None:
        raise PromptError(f"Lens: tokens holds {text!r}, but this model has no tokenizer: give token ids")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) == 1:
        return ids[0]
    parts = [tokenizer.decode([token]) for token in ids]
    spaced = f" {text}"
    is_token = not text.startswith(" ") and len(tokenizer(spaced, add_special_tokens=False)["input_ids"]) == 1
    hint = f"; {spaced!r}, with a space, is one" if is_token else ": name one of them, or its id"
    raise PromptError(f"Lens: tokens holds {text!r}, which is {len(ids)} tokens, {parts}{hint}")


def _saes_of(spec: Spec) -> list[SAE]:
    """The SAEs of a spec and of its parts."""
    parts = [spec, *(part for _, part in spec._content().specs)]
    return [sae for part in parts if isinstance(sae := getattr(part, "sae", None), SAE)]


def fits_name(recorded: str, names: Sequence[str]) -> bool:
    """Whether a recorded model name may be a model's: one contains the other, spelling and owner aside ("gpt2-small", "gpt2")."""
    wanted, known = _plain(recorded), [_plain(name) for name in names]
    return not wanted or any(wanted in name or name in wanted for name in known if name)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())


def unknown_attribute(name: str, modules: Sequence[str], attributes: Sequence[str]) -> str:
    """Error message of an `LM` without the attribute `name`, with the nearest names."""
    if name in unsupported.ATTRIBUTES:
        hint = f"did you mean lm.{unsupported.ATTRIBUTES[name]}?"
    elif name in unsupported.METHODS:
        hint = unsupported.METHODS[name]
    else:
        near = get_close_matches(name[:SHOWN], dict.fromkeys([*modules, *attributes]), n=2)
        hint = f"did you mean {' or '.join(f'lm.{one}' for one in near)}? " if near else ""
        hint += f"modules: {', '.join(modules)}"
    return f"LM has no attribute {name!r}: {hint}"
