"""Gates at earlier sites: their reads, the order of sites, and the flags of a pass on a CPU.

At a gate's site a `GateRead` follows the interventions there. It changes nothing, and sets a flag. This is one of each row, or the
first position of the prompt at which the gate fired. Interventions at later sites look at the flag. On CUDA the flags are in the
device tables (kernels/edit_codes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.model_spec import LOGITS, ModelSpec, final_norm_site, input_add, site_index
from ...kernels import edit_codes as codes
from ...kernels.edit_codes import OpWords
from ..positions import Positions
from ..site import Site, expand
from .op import Gate, Op, ReadOp, row_dots

ATTENTION_BRANCH = ("q", "k", "v", "z", "attn_out")
MLP_BRANCH = ("router", "experts", "mlp_act", "shared_out", "mlp_out")
_RANKS = {
    "resid_pre": 0, "q": 1, "k": 1, "v": 1, "z": 2, "attn_out": 3, "resid_mid": 4, "router": 5, "experts": 5,
    "mlp_act": 5, "shared_out": 5, "mlp_out": 6, "resid_post": 7,
}  # fmt: skip
"""Order within a layer. `q`, `k` and `v` are computed together."""


class Flag(NamedTuple):
    """Location of a decision by a gate at an earlier site."""

    slot: int
    """Index among the request's gates."""
    prompt_len: int | None
    """Number of deciding positions with scope="prompt"; None: each position decides for itself."""
    monitor: str = ""
    """Fingerprint of the monitor that sets it, from the host; "" for a gate."""


@dataclass(frozen=True, eq=False)
class GateRead(ReadOp):
    """The part of a gate at its site: sets the flag where ``dot(state, probe) > threshold``, and changes no state."""

    site: Site | str
    probe: Tensor = field(repr=False)
    threshold: float
    positions: Positions = "all"

    @property
    def name(self) -> str:
        """The gate's name in error messages."""
        return f"Gate(site={str(self.site)!r})"

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The probe."""
        return (self.probe,)

    def fired(self, state: Tensor) -> Tensor:
        """[rows, width] -> [rows] bool, on the state's device."""
        state = state.detach().float()
        return row_dots(state, self.probe.to(state.device))[:, 0] > self.threshold

    def words(self) -> OpWords:
        """Table words of GATE."""
        return OpWords(codes.GATE, rank=0)


class RequestGates:
    """The gates at earlier sites of one request's ops, each read once.

    Args:
        in_kernels: ops run as kernels, from device tables.
    """

    def __init__(self, model: ModelSpec, prompt_len: int, in_kernels: bool = False) -> None:
        self._model, self._prompt_len, self._in_kernels = model, prompt_len, in_kernels
        self._flags: dict[Gate, Flag] = {}
        self._of_monitors: list[Flag] = []

    def _next(self, who: str) -> int:
        """A free slot. Raises ValueError without one."""
        slot = len(self._flags) + len(self._of_monitors)
        if slot >= codes.MAX_GATES:
            raise ValueError(
                f"{who}: a request has up to {codes.MAX_GATES} different gates at earlier sites and monitors that act; use the "
                "same one for several interventions"
            )
        return slot

    def of_monitor(self, who: str, fingerprint: str) -> Flag:
        """A flag that the host sets when a monitor has fired. Raises ValueError for too many."""
        flag = Flag(self._next(who), self._prompt_len, fingerprint)
        self._of_monitors.append(flag)
        return flag

    def flag_of(self, op: Op, site: Site) -> Flag | None:
        """The flag that an op at a site looks at; None without a gate at an earlier site.
        Raises ValueError: the gate's site is not before the op's, or the request has too many gates."""
        gate: Gate | None = op.when
        if gate is None or gate.site is None:
            return None
        try:
            (read,) = expand(gate.site, self._model.num_hidden_layers, self._model.family)
            site_index(read, self._model.num_hidden_layers)  # raises if no intervention can act
        except ValueError as error:
            raise ValueError(f"{op.name}: when: {error}") from None
        if not is_before(read, site, self._model):
            raise ValueError(
                f"{op.name}: the gate reads {read}, which is not before {site}: a gate decides for later sites. Name an earlier "
                f"site, or leave out site=, and the state at {site} decides"
            )
        if self._in_kernels and gate.scope == "prompt" and share_kernel(read, site, self._model):
            raise ValueError(
                f"{op.name}: on CUDA one kernel computes {read} and {site}, and its rows do not wait for each other: name an "
                "earlier site for the gate, or use scope='token'"
            )
        flag = self._flags.get(gate)
        if flag is None:
            flag = Flag(self._next(op.name), self._prompt_len if gate.scope == "prompt" else None)
            self._flags[gate] = flag
        return flag

    def reads(self) -> Iterator[tuple[GateRead, Flag]]:
        """Reads of the gates' sites, with the flag that each sets."""
        for gate, flag in self._flags.items():
            positions = "all" if flag.prompt_len is None else "prompt"
            yield GateRead(str(gate.site), gate.probe, gate.threshold, positions), flag


def is_before(first: Site, second: Site, model: ModelSpec) -> bool:
    """Whether the state at `first` is known, at each position, before that at `second` is computed.

    Where attention and MLP read the same state, no site of one is before a site of the other.
    """
    parallel = "resid_mid" in model.family.missing
    if parallel and first.layer == second.layer:
        for branch, other in ((ATTENTION_BRANCH, MLP_BRANCH), (MLP_BRANCH, ATTENTION_BRANCH)):
            if first.kind in branch and second.kind in other:
                return False
    return _rank(first, model) < _rank(second, model)


def share_kernel(first: Site, second: Site, model: ModelSpec) -> bool:
    """Whether one kernel has the ops at two sites of the stream. The last residual add includes the norm behind it."""

    def residual_add(site: Site) -> int | None:
        number, last = site_index(site, model.num_hidden_layers), input_add(model.num_hidden_layers)
        if number > final_norm_site(model.num_hidden_layers):
            return None  # an inner site: a separate kernel
        adds_later = site.kind == "attn_out" and "resid_mid" in model.family.missing
        return min(number // 2 + adds_later, last)

    found = residual_add(first)
    return found is not None and found == residual_add(second)


def _rank(site: Site, model: ModelSpec) -> tuple[int, int]:
    if site.kind == "embed":
        return 0, 0
    if site.kind in ("final_norm", LOGITS):
        return model.num_hidden_layers, 1 + (site.kind == LOGITS)
    rank, layer = _RANKS[site.kind], site.layer or 0
    return (layer + 1, 0) if site.kind == "resid_post" else (layer, rank)


class PassFlags:
    """The flags of one request in a pass on a CPU.

    Args:
        positions: [rows] of the request.
        first_fired: slot -> the first position of the prompt at which a gate with scope="prompt" fired so far. It is kept from pass
            to pass.
    """

    def __init__(self, positions: Tensor, first_fired: dict[int, Tensor]) -> None:
        self._positions, self._first_fired = positions, first_fired
        self._fired: dict[int, Tensor] = {}

    def reader(self, read: GateRead, flag: Flag) -> Callable[[Tensor], Tensor]:
        """The function that sets a flag from rows [rows, width], and returns them."""

        def run(rows: Tensor) -> Tensor:
            fired = read.fired(rows)
            if flag.prompt_len is None:
                self._fired[flag.slot] = fired
                return rows
            positions = self._positions.to(rows.device)
            never = torch.full_like(positions, codes.NO_END)
            first = torch.where(fired & (positions < flag.prompt_len), positions, never).min()
            before = self._first_fired.get(flag.slot)
            self._first_fired[flag.slot] = first if before is None else torch.minimum(first, before.to(first.device))
            return rows

        return run

    def on(self, flag: Flag, count: int, device: torch.device) -> Tensor:
        """[count] bool: whether the flag is set for each of the last `count` rows."""
        if flag.prompt_len is None:
            fired = self._fired[flag.slot]
            return fired[len(fired) - count :].to(device)
        first = self._first_fired.get(flag.slot)
        positions = self._positions[len(self._positions) - count :].to(device)
        return positions >= (codes.NO_END if first is None else first.to(device))


class Fires(dict[tuple[int, int], int | torch.Tensor]):
    """(site, index among the site's ops) -> fires of the op's gate. A count by functions is a tensor on their device.

    A position counts once: a preemption may have it computed again.

    Attributes:
        since: position from which kernels count.
    """

    _drafted: list[tuple[tuple[int, int], int, torch.Tensor]] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.since = 0
        self._last: list[tuple[tuple[int, int], int]] = []
        self._stops: dict[tuple[int, int], int] = {}  # positions before these were counted by functions

    def add(self, key: tuple[int, int], first: int, fired: torch.Tensor) -> None:
        """Count the fires of a pass, `fired` [rows] bool at positions from `first` on. Fires of drafts wait for `settle`."""
        if self._drafted is not None:
            self._drafted.append((key, first, fired))
            return
        start = self._stops.get(key, 0)
        self[key] = self.get(key, 0) + fired[max(start - first, 0) :].sum()
        self._stops[key] = max(start, first + len(fired))

    def add_counted(self, key: tuple[int, int], fires: int, last: int) -> None:
        """Add fires that a kernel counted. `last` is the position of the last one."""
        self[key] = self.get(key, 0) + fires
        if fires:
            self._last.append((key, last))

    def take_back(self, stop: int) -> None:
        """Do not count a kernel's fire at a position from `stop` on: a step behind the request's last token."""
        for key, last in self._last:
            self[key] -= last >= stop
        self._last.clear()

    def count_from(self, since: int) -> None:
        """Have kernels count from a position on: the request's positions before it were computed once."""
        self.take_back(since)
        self.since = since

    def begin_draft(self) -> None:
        """Begin fires that may be taken back. Earlier unsettled ones are forgotten."""
        self._drafted = []

    def settle(self, num_positions: int) -> None:
        """Count fires of drafted passes at the first `num_positions` positions."""
        drafted, self._drafted = self._drafted, None
        for key, first, fired in drafted or ():
            self.add(key, first, fired[: max(num_positions - first, 0)])
