"""`World`: an engine and the specs that jobs share, and random interventions and captures."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pymllm_interp import LM, SAE, Ablate, Capture, Clamp, Gate, Patch, Scale, Steer
from pymllm_interp.captures import Features, Lens, Project
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.hooks.site import Site, expand
from pymllm_interp.interventions import Generated, Knockout, SetFeature

KINDS = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post", "final_norm")
INNER_KINDS = ("q", "k", "v", "z", "mlp_act")
OF_PROMPTS: tuple[Any, ...] = ("all", "prompt", [0, -1], [-1], slice(1, None, 2))
POSITIONS: tuple[Any, ...] = (*OF_PROMPTS, "generated", Generated(1, 5, 2))
FEATURES = 24


def sae_of(width: int) -> SAE:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return SAE(
        W_enc=normal(width, FEATURES), b_enc=normal(FEATURES), W_dec=0.2 * normal(FEATURES, width), b_dec=0.2 * normal(width),
        architecture="jumprelu", threshold=normal(FEATURES).abs(), site="resid_post.0",
    )  # fmt: skip


@dataclasses.dataclass
class World:
    """What a job runs in."""

    lm: LM
    sae: SAE
    folder: Path
    """For harvests."""
    other: LM
    """Another engine."""
    kept: dict[OfSAE, Any] = dataclasses.field(default_factory=dict)

    @property
    def model(self) -> ModelSpec:
        return self.lm.runner.model_spec

    def anew(self) -> World:
        """The same engine with specs and an SAE that were never used."""
        tensors = {name: tensor.clone() for name, tensor in self.sae.tensors()}
        return World(self.lm, dataclasses.replace(self.sae, **tensors), self.folder, self.other)

    def made(self, specs: list[Any]) -> list[Any]:
        """The specs, with this world's SAE. Jobs of one world share such specs."""
        for spec in specs:
            if isinstance(spec, OfSAE) and spec not in self.kept:
                self.kept[spec] = spec.made(self.sae)
        return [self.kept[spec] if isinstance(spec, OfSAE) else spec for spec in specs]


@dataclasses.dataclass(frozen=True)
class OfSAE:
    """An intervention on a feature, or without a value a capture of the features."""

    feature: int = 0
    value: float | None = None

    def made(self, sae: SAE) -> Any:
        if self.value is None:
            return Capture(sae.site or "", reduce=Features(sae, top_k=FEATURES))
        return SetFeature(sae, {self.feature: self.value})


def places(model: ModelSpec, kinds: tuple[str, ...]) -> list[str]:
    """The sites of these kinds that the model has."""
    found = []
    for kind in kinds:
        if kind not in model.family.missing:
            layered = "." in str(Site.parse(f"{kind}.0" if kind not in ("embed", "final_norm", "logits") else kind))
            found += [str(s) for s in expand(f"{kind}.*" if layered else kind, model.num_hidden_layers, model.family)]
    return found


def vector(width: int, seed: int, *rows: int) -> torch.Tensor:
    return 0.5 * torch.randn(*rows, width, generator=torch.Generator().manual_seed(seed))


def random_gate(rng: random.Random, model: ModelSpec, site: str) -> Gate | None:
    """None, a gate at the op's own site, or at an earlier one."""
    kind = rng.choice(["none", "none", "own", "token", "prompt"])
    if kind == "none":
        return None
    seed, threshold = rng.randrange(100), rng.choice([0.0, 0.3, -0.3])
    if kind == "own" or site.partition(".")[0] in ("embed", "resid_pre", *INNER_KINDS):
        return Gate(vector(model.width(site.partition(".")[0]), seed), threshold)
    at = "resid_pre.0"
    return Gate(
        vector(model.width("resid_pre"), seed), threshold, site=at, scope="prompt" if kind == "prompt" else "token"
    )


def random_op(rng: random.Random, model: ModelSpec, positions: tuple[Any, ...] = POSITIONS) -> Any:
    drawn = rng.random()
    if drawn < 0.1 and model.cuts_edges:
        return Knockout("*", from_=-1, to=-2)
    if drawn < 0.25:
        return OfSAE(rng.randrange(3), rng.choice([0.0, 3.0]))  # few: they are used again after an edit
    site = rng.choice(places(model, (*KINDS, *INNER_KINDS)))
    width, seed = model.width(site.partition(".")[0]), rng.randrange(100)
    scale: float = rng.choice([0.5, 1.0, -2.0])
    more: dict[str, Any] = {"positions": rng.choice(positions), "when": random_gate(rng, model, site)}
    makers: list[Callable[[], Any]] = [
        lambda: Steer(site, vector(width, seed), scale=scale, **more),
        lambda: Steer(site, vector(width, seed), scale=0.5, norm="match", **more),
        lambda: Steer(site, vector(width, seed), scale=scale, norm="preserve", **more),
        lambda: Ablate(site, vector(width, seed, 2), **more),
        lambda: Clamp(site, vector(width, seed), low=-0.2, high=0.2, **more),
        lambda: Scale(site, 0.7, **more),
        lambda: Patch(site, vector(width, seed, 2), **{**more, "positions": [0, -1]}),
    ]
    return rng.choice(makers)()


def random_ops(rng: random.Random, model: ModelSpec, positions: tuple[Any, ...] = POSITIONS) -> list[Any]:
    return [random_op(rng, model, positions) for _ in range(rng.choice([1, 1, 2, 3]))]


def random_captures(rng: random.Random, model: ModelSpec) -> list[Any]:
    """One or two captures, of different kinds of sites."""
    found: dict[str, Any] = {}
    for _ in range(rng.choice([1, 1, 2])):
        where, drawn = rng.choice(POSITIONS), rng.random()
        if drawn < 0.3:
            directions = vector(model.hidden_size, 7, 3)
            found["stream"] = rng.choice([
                OfSAE(), Capture("resid_post.1", where, reduce=Lens(top_k=0, tokens=[3, 7])),
                Capture("resid_post.*", where, reduce=Project(directions)),
            ])  # fmt: skip
        elif drawn < 0.4 and model.cuts_edges:
            found["pattern"] = Capture("pattern.0", where)
        else:
            site = rng.choice([*places(model, (*KINDS, *INNER_KINDS)), "resid_post.*", "mlp_out.*", "logits"])
            reduce: Any = rng.choice([None, None, None, "mean", "last"])
            if site == "logits":
                where = "all"  # where tokens are drawn
            kind = site.partition(".")[0]
            # Sites between layers have two names, and are captured once.
            found["stream" if kind in ("embed", "resid_pre", "resid_post") else kind] = Capture(
                site, where, reduce=reduce
            )
    return list(found.values())


def captures_of_prompts(rng: random.Random, model: ModelSpec) -> list[Any]:
    """Rows of one width for each site, at positions of the prompt."""
    site = rng.choice([*places(model, KINDS), "resid_post.*", "resid_post.*"])
    return [OfSAE()] if rng.random() < 0.2 else [Capture(site, rng.choice(OF_PROMPTS))]
