"""`lm.das`: distributed alignment search, a subspace of a state that carries a variable (Geiger et al. 2023, arXiv 2303.02536).

An interchange gives the base run the source run's state in the subspace: ``base + Q Q^T (source - base)``. Training lowers the
cross entropy of the tokens that should follow it. With ``rank=None`` Q rotates the whole state, and the number of dimensions is
trained (boundless: Wu et al. 2023, arXiv 2305.08809). The result is declared interventions, which servers take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..client.calls.requests import CallProgress
from ..client.calls.site_hooks import PlacedHooks
from ..core.model_spec import LOGITS, site_index
from ..core.sampling_params import SamplingParams
from ..hooks.captures.spec import Capture
from ..hooks.interventions.projections import MAX_RANK, Ablate
from ..hooks.interventions.specs import Steer
from ..hooks.site import Site
from ..utils.arguments import PromptError, is_whole, shown
from .attribution import placed, put_states, runs_of_pass, value_at
from .metrics import token_of
from .read_prompts import ReadPrompt

ONE = SamplingParams(temperature=0.0, max_tokens=1)
COLD = 0.1
"""Last temperature of a boundary. The first one is the width over 80, as pyvene's 50 for 4,096."""


@dataclass(frozen=True, eq=False)
class AlignedSubspace:
    """A subspace of a site's state, with the interventions that interchange it: `lm.das` returns it.

    Attributes:
        site: name of the site.
        basis: [rank, width] float32, orthonormal rows.
        positions: position of the base's state, and of the source's.
        losses: [steps] float32 of the training.
    """

    site: str
    basis: Tensor
    positions: tuple[int, int] = (-1, -1)
    losses: Tensor | None = None

    def interchange(self, source: Tensor, position: int) -> list[Ablate | Steer]:
        """Interventions that give a run the source's state in the subspace.

        Args:
            source: [width] or [heads, head_dim], state of the source run.
            position: position in the base prompt, from 0 on.
        """
        vector = self.basis.T @ (self.basis @ source.float().flatten().cpu())
        removed = [Ablate(self.site, part, positions=[position]) for part in self.basis.split(MAX_RANK)]
        return [*removed, Steer(self.site, vector, positions=[position])]

    def logits(self, lm: Any, bases: Sequence[Any], sources: Sequence[Any]) -> Tensor:
        """Logits [examples, vocab] float32 of the last position of each base with its source's state there, by requests."""
        examples = _examples(lm, bases, sources, None, self.positions)
        states = _source_states(lm, self.site, examples)
        runs = [self.interchange(state, own.position) for state, own in zip(states, examples, strict=True)]
        prompts, last = [own.base for own in examples], [Capture("logits", positions=[-1])]
        outs = lm.generate(prompts, ONE, interventions=runs, capture=last, progress=False)
        return torch.cat([out.activations["logits"] for out in outs]).float()

    def accuracy(self, lm: Any, bases: Sequence[Any], sources: Sequence[Any], labels: Sequence[Any]) -> float:
        """Share of examples with the label as the most probable token (interchange intervention accuracy), by requests.

        Args:
            labels: a token for each example.
        """
        wanted = torch.tensor([token_of(label, lm, f"label {i}") for i, label in enumerate(labels)])
        found = self.logits(lm, bases, sources).argmax(-1)
        if len(wanted) != len(found):
            raise PromptError(f"there are {len(found)} bases and {len(wanted)} labels")
        return (found == wanted).float().mean().item()


class AlignmentExample(NamedTuple):
    """A base and a source prompt.

    Attributes:
        base, source: token ids.
        position, source_position: positions of their states, from 0 on.
        label: token after the interchange; -1 if there is no training.
    """

    base: list[int]
    source: list[int]
    position: int
    source_position: int
    label: int


def das(
    lm: Any, bases: Sequence[Any], sources: Sequence[Any], labels: Sequence[Any], *, site: str, rank: int | None, positions: Any,
    steps: int, batch: int, lr: float, boundary: float, seed: int, progress: bool | None,
) -> AlignedSubspace:  # fmt: skip
    """Train a subspace, see `LM.das`."""
    found = Site.parse(site)
    if found.kind == LOGITS:
        raise ValueError(f"site={site!r}: expected one site of a layer, such as 'resid_post.3'")
    site_index(found, lm.model_spec.num_hidden_layers)  # refuses sites without interventions
    place = placed(found, lm.model_spec)
    for name, value in (("steps", steps), ("batch", batch)):
        if not is_whole(value) or value < 1:
            raise ValueError(f"{name}={shown(value)}: expected a whole number from 1 on")
    for name, value in (("lr", lr), ("boundary", boundary)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{name}={shown(value)}: expected a number from 0 on")
    examples, version = _examples(lm, bases, sources, labels, positions), lm.weights.version
    states = _source_states(lm, str(found), examples)
    width = states.shape[1]
    if rank is not None and (not is_whole(rank) or not 1 <= rank <= width):
        raise ValueError(f"rank={shown(rank)}: expected a whole number from 1 to {width}, or None")
    generator = torch.Generator().manual_seed(seed)
    device = next(lm._module.parameters()).device
    start = torch.linalg.qr(torch.randn(width, rank or width, generator=generator))[0]
    weight = start.to(device).requires_grad_()
    edge = None if rank is not None else torch.full((), 0.5, device=device, requires_grad=True)
    parameters = [weight] if edge is None else [weight, edge]
    optimizer, losses = torch.optim.Adam(parameters, lr=lr), list[float]()
    batches = _batches(lm, examples, batch, generator)
    with CallProgress(progress, steps, "steps") as bar:
        for step in range(steps):
            own = next(batches)
            heat = max(1.0, width / 80)
            heat += (COLD - heat) * step / max(1, steps - 1)
            rotation = _Rotation(weight, edge, heat, boundary)
            kept = list[Any]()
            with lm.trace([examples[i].base for i in own], grad=True):
                kept.append(_step(lm, place, rotation, [examples[i] for i in own], states[own]))
            lm.weights.check_version(version, "lm.das")
            loss, gradients = kept[0]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            if edge is not None:
                edge.data.clamp_(1e-3, 1.0)
            losses.append(loss)
            bar.advance()
    count = rank or max(1, round(edge.item() * width))  # pyright: ignore[reportOptionalMemberAccess]
    basis = torch.linalg.qr(weight.detach())[0][:, :count].T.contiguous().cpu()
    return AlignedSubspace(str(found), basis, _positions(positions), torch.tensor(losses))


class _Rotation(NamedTuple):
    """Parameters of a step.

    Attributes:
        weight: matrix [width, rank]; Q is its orthonormal basis.
        edge: share of the dimensions in the subspace, or None: all.
        heat: temperature of its boundary.
        cost: factor of `edge` in the loss.
    """

    weight: Tensor
    edge: Tensor | None
    heat: float
    cost: float


def _step(
    lm: Any, place: PlacedHooks, rotation: _Rotation, examples: Sequence[AlignmentExample], states: Tensor
) -> tuple[float, tuple[Tensor, ...]]:
    """The body of a block: interchange, and differentiate. Returns the loss, and the gradients of the parameters."""
    value = value_at(lm, place)
    new = place.state_in(value).clone()
    at = (
        torch.arange(len(examples), device=new.device),
        torch.tensor([own.position for own in examples], device=new.device),
    )
    base = new[at].flatten(1).float()
    basis = torch.linalg.qr(rotation.weight)[0]
    change = (states.to(base.device) - base) @ basis
    if rotation.edge is not None:
        number = torch.arange(basis.shape[1], device=basis.device) + 0.5
        change = change * ((rotation.edge * basis.shape[1] - number) / rotation.heat).sigmoid()
    new[at] = (base + change @ basis.T).to(new.dtype).view_as(new[at])
    put_states(lm, place, value, new)
    labels = torch.tensor([own.label for own in examples], device=new.device)
    loss = torch.nn.functional.cross_entropy(lm.output.logits[:, -1].float(), labels)
    total = loss if rotation.edge is None else loss + rotation.cost * rotation.edge
    parameters = [rotation.weight] if rotation.edge is None else [rotation.weight, rotation.edge]
    return loss.item(), torch.autograd.grad(total, parameters)


def _batches(
    lm: Any, examples: Sequence[AlignmentExample], batch: int, generator: torch.Generator
) -> Iterator[list[int]]:
    """Examples with equally long bases, for ever; each once before any again."""
    groups = dict[int, list[int]]()
    for i, own in enumerate(examples):
        groups.setdefault(len(own.base), []).append(i)
    while True:
        parts = list[list[int]]()
        for length, group in groups.items():
            order = torch.randperm(len(group), generator=generator).tolist()
            size = min(batch, runs_of_pass(lm, length))
            parts += [[group[i] for i in order[first : first + size]] for first in range(0, len(order), size)]
        yield from (parts[i] for i in torch.randperm(len(parts), generator=generator).tolist())


def _source_states(lm: Any, site: str, examples: Sequence[AlignmentExample]) -> Tensor:
    """[examples, width] float32, states of the source runs, by requests."""
    captures = [[Capture(site, positions=[own.source_position])] for own in examples]
    outs = lm.generate([own.source for own in examples], ONE, capture=captures, progress=False)
    return torch.stack([out.activations[site].flatten().float() for out in outs])


def _positions(positions: Any) -> tuple[int, int]:
    both = (positions, positions) if is_whole(positions) else positions
    if not isinstance(both, tuple | list) or len(both) != 2 or not all(map(is_whole, both)):
        raise PromptError(
            f"positions={shown(positions)}: expected a position, or one of the base and one of the source"
        )
    return int(both[0]), int(both[1])


def _examples(
    lm: Any, bases: Sequence[Any], sources: Sequence[Any], labels: Sequence[Any] | None, positions: Any
) -> list[AlignmentExample]:
    """The examples.

    Raises:
        PromptError: prompts that are not equally many, lack the position or have images, or a label that is no token.
    """
    both, found = _positions(positions), list[AlignmentExample]()
    given = [bases, sources] if labels is None else [bases, sources, labels]
    if any(isinstance(each, str) or not isinstance(each, Sequence) for each in given) or not bases:
        raise PromptError("bases, sources and labels: expected lists, one of each for an example")
    if len({len(each) for each in given}) > 1:
        raise PromptError(
            f"there are {', '.join(str(len(each)) for each in given)} bases, sources and labels; expected one each"
        )
    most = min(lm.limits.max_num_tokens, lm.limits.max_model_len - 1)
    for i, prompts in enumerate(zip(bases, sources, strict=True)):
        ids, places = list[list[int]](), list[int]()
        for prompt, position, what in zip(prompts, both, ("base", "source"), strict=True):
            read = ReadPrompt.of(lm, prompt, f"{what} {i}")
            count = len(read.token_ids)
            if not read.ids_only:
                raise PromptError(f"{what} {i}: expected token ids only, no images or embeddings")
            if not -count <= position < count or count > most:
                raise PromptError(
                    f"{what} {i} has {count} tokens: expected position {position}, and at most {most} tokens"
                )
            ids.append(read.token_ids)
            places.append(position % count)
        label = -1 if labels is None else token_of(labels[i], lm, f"label {i}")
        found.append(AlignmentExample(ids[0], ids[1], places[0], places[1], label))
    return found
