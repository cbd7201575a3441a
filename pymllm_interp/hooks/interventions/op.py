"""`Op`, the base class of interventions, and `Gate`.

An op is one class. Its field annotations give the checks and the JSON form. It also has its vectors, its arithmetic, and its words
in the device tables (kernels/edit_codes.py). To add an op, write a subclass of `Op`, and register it (`registry.op`) to have it
over HTTP. To run it on CUDA, also add its code to kernels/edit_codes.py and a branch to kernels/edit_rows.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ...core.model_spec import EXPERTS, KV, PATTERN, STATE, ModelSpec
from ...kernels.edit_codes import OpWords
from ..saes.sae import SAE
from ..site import EDITED_PATTERNS, Site, canonical, kind_of
from ..spec import PlacedSpec, Spec
from ..vectors.files import Source


@dataclass(frozen=True, eq=False)
class Gate(Spec):
    """Condition of an intervention: it acts on a row only where ``dot(state, probe) > threshold``.

    The state is the one that the intervention would change. With `site` it is the state of that earlier site, after the
    interventions there. Conditional activation steering (Lee et al. 2024, arXiv 2409.05907) compares cosines in place of dot
    products.

    Args:
        probe: Tensor [width], or [heads, head_dim] at sites with heads, not normalized; or a name in `lm.vectors`.
        threshold: Dot product above which the intervention acts.
        site: One site, earlier in the pass than the sites of the intervention. None: the intervention's own.
        scope: "token": the state at a position decides for it. "prompt": the states at the prompt's positions up to this one
            decide, and one above the threshold suffices. So all of them decide for generated tokens, and a position of the
            prompt does not depend on later ones.

    Raises:
        ValueError: a probe or a threshold that is not finite, another shape than a vector, or a pattern of sites. So is
            scope="prompt" without a site.
    """

    probe: Source = field(repr=False, metadata={"dims": (1, 2)})
    threshold: float = 0.0
    site: Site | str | None = field(
        default=None, metadata={"description": "one site, earlier in the pass than those of the intervention"}
    )
    scope: Literal["token", "prompt"] = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.probe, Tensor):
            self._set("probe", self.probe.flatten())
        if self.site is not None:
            try:
                self._set("site", str(Site.parse(canonical(self.site))))
            except ValueError as error:
                raise ValueError(f"{self.name}: site: {error}") from None
            kind, _, layer = str(self.site).partition(".")
            if kind == EXPERTS:
                raise ValueError(f"{self.name}: site: {CAPTURED_ONLY.format(layer)}")
        decides = self.scope == "token" or self.site is not None
        self._check("scope", decides, "'token', or a site= whose states at the prompt decide")


CAPTURED_ONLY = (
    "experts.{0} is only captured; an op or a gate at router.{0}, the logits before the choice, takes its place"
)
PATCHED_ONLY = "a recurrent state is captured, or replaced at the prompt's end by Patch(..., positions=-1)"
Missing = Literal["error", "skip"]
"""Handling of positions that a prompt does not have: raise an error, or skip and count them."""


class Op(PlacedSpec, ABC):
    """An intervention: a spec that changes the state at its site.

    Arguments of all interventions:

    - `positions`: positions of the op (hooks/positions.py). `missing`: handling of positions that a prompt does not have.
    - `when`: a `Gate`, which decides row by row, by the row itself or by an earlier site.
    - `heads`: the attention heads that it acts on, at `q`, `k`, `v` and `z`. It then sees only the states of these heads,
      concatenated in the order given. Its vectors have len(heads) * head_dim values, or the shape [len(heads), head_dim].
    """

    when: Any
    replaces_states = False
    """Whether it may be at a recurrent state."""

    @property
    def identity(self) -> bool:
        """Whether it leaves every state unchanged, so that it can be skipped."""
        return False

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Vectors of the arithmetic, [width] or [n, width] float32 on the CPU. Each access returns the same tensors."""
        return ()

    @property
    def encodes(self) -> SAE | None:
        """The SAE that must encode the whole state before it acts; None for none."""
        return None

    @cached_property
    def vectors(self) -> tuple[Tensor, ...]:
        """The operands, then the probe of a gate at the op's own site."""
        return (*self.operands, self.when.probe) if self.tests_rows else self.operands

    def at(self, index: int, model: ModelSpec) -> Op:
        """The op at one of its sites in a model, which are in the order of the layers."""
        return self

    @property
    def tests_rows(self) -> bool:
        """Whether it has a gate that looks at the rows that it would change."""
        return self.when is not None and self.when.site is None

    @cached_property
    def addend(self) -> Tensor | None:
        """The vector [width] of an op that computes ``state + addend``, so that several requests' additions can be one."""
        return None

    @abstractmethod
    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """The new states. The caller takes the selected rows of them, and keeps the others as they were.

        Each row must be computed independently, so that its bits do not depend on its batch.

        Args:
            x: [rows, width] float32, not to be written to.
            selected: [rows, 1] bool. An op may clear, in place, rows that it leaves unchanged: they keep their bits.
            ordinals: [rows], each row's rank among the op's positions; -1 for rows that are not selected.
            vectors: `self.vectors`, on the device of `x`.

        Returns:
            [rows, width] float32.
        """

    def words(self) -> OpWords | None:
        """The op in the device tables; None for an op without a kernel, which CUDA engines refuse."""
        return None

    def _set_place(self) -> None:
        super()._set_place()
        kind, layer = kind_of(self.site), self.site.rpartition(".")[2]
        if kind == PATTERN:
            raise ValueError(f"{self.name}: {EDITED_PATTERNS}")
        if kind == EXPERTS:
            raise ValueError(f"{self.name}: {CAPTURED_ONLY.format(layer)}")
        if kind == KV:
            raise ValueError(
                f"{self.name}: cached K and V are captured, or replaced by PatchKV({layer}, positions, k=, v=)"
            )
        if kind == STATE and not self.replaces_states:
            raise ValueError(f"{self.name}: {PATCHED_ONLY}")


class ReadOp(Op):
    """An op that reads the states at its site, and changes none."""

    when = None

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """The states as they were."""
        return x


def row_dots(x: Tensor, vector: Tensor) -> Tensor:
    """[rows, width] and [width] -> [rows, 1]. Not a matrix product: its sums depend on the number of rows."""
    return (x * vector).sum(dim=-1, keepdim=True)


def row_norms(x: Tensor) -> Tensor:
    """[rows, width] -> [rows, 1]."""
    return x.norm(dim=-1, keepdim=True)


def apply(op: Op, state: Tensor, ordinals: Tensor | None = None) -> Tensor:
    """`state` after `op`, computed in float32 and rounded once to the state's dtype: the reference for every kernel.

    Each row is computed independently, so that its bits do not depend on its batch. An ordinal, or a gate at the op's own
    site, selects rows. Other rows keep their bits; an identity keeps all.

    Args:
        state: [rows, width] of a dtype that float32 holds.
        ordinals: [rows] from `ordinals_of`, on the state's device; -1 for rows that are not selected. None: row i is position i.

    Returns:
        [rows, width] in the state's dtype.
    """
    if ordinals is None:
        ordinals = torch.arange(len(state), device=state.device)
    vectors = [vector.to(state.device) for vector in op.vectors]
    return act(op, state, gated(op, state, ordinals, vectors), vectors)


def gated(op: Op, state: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """`ordinals` [rows] with -1 for rows whose gate does not fire. `vectors`: `op.vectors` on the state's device.

    A gate at an earlier site is not asked: its flags are with the pass (gates.py).
    """
    if not op.tests_rows:
        return ordinals
    fires = row_dots(_seen(op, state), vectors[-1])[:, 0] > op.when.threshold
    return torch.where(fires, ordinals, -1)


def act(op: Op, state: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """`apply` without the gate, to the rows with an ordinal of `gated` other than -1."""
    if op.identity:
        return state
    selected = (ordinals >= 0)[:, None]
    acted = op.act(_seen(op, state), selected, ordinals, vectors)
    if op.channels is not None:
        selected = selected & op.channels.to(state.device)
    return torch.where(selected, acted.to(state.dtype), state)


def _seen(op: Op, state: Tensor) -> Tensor:
    """The state in float32, with zeros at the heads that are not the op's."""
    if op.channels is None:
        return state.float()
    return torch.where(op.channels.to(state.device), state.float(), 0.0)
