"""Memory of a circuit, by a formula (docs/guides/circuits.md), and its comparison with the machine's.

Each row of a batch has a gradient and no states, and patterns are made again. Rows of kept features are on the host: memory is
linear in them.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from ...runner.device_memory import free_bytes
from .frozen import QUERY_ROWS
from .pruning import CELL_BYTES, CELLS, SUMS_BYTES
from .scores import ELEMENTS

NODE_BYTES = 80
"""Most bytes on the host for each node, beside rows."""


class CircuitMemory(NamedTuple):
    """Most bytes of a circuit, beside weights and transcoders.

    Attributes:
        fixed: bytes on the device for any batch.
        states: the part of `fixed` that the run holds behind its forward pass.
        row: bytes on the device for each row of a batch.
        host: bytes on the host, also to rank and prune.
    """

    fixed: int
    states: int
    row: int
    host: int

    @classmethod
    def of(cls, plan: Any, active: int | None = None) -> CircuitMemory:
        """The memory of a `CircuitPlan`.

        Args:
            active: number of active features; None: not known yet, none is counted.
        """
        spec, tokens, replacements = plan.lm.model_spec, len(plan.token_ids), plan.replacements
        e, hidden, layers = spec.dtype.itemsize, spec.hidden_size, spec.num_hidden_layers
        heads, kv = spec.num_attention_heads, 2 * spec.num_key_value_heads * spec.head_dim
        qkv, neurons = heads * spec.head_dim + kv, spec.intermediate_size
        replaced = {layer for made in replacements if made.sae.transcoder for layer in made.writes}
        states = tokens * layers * e * (qkv + 3 * hidden)
        forward = tokens * (3 * e * neurons + 12 * max(made.sae.d_sae for made in replacements))
        patterns = 12 * heads * min(tokens, QUERY_ROWS) * tokens
        jacobian = 3 * e * (hidden + neurons) if len(replaced) < layers else 0
        attention = (3 * e + 4) * hidden + e * qkv
        found, rest = active or 0, (layers + 1) * tokens
        decoder = 8 * min(ELEMENTS, found * hidden)
        kept = found if plan.max_features is None else min(plan.max_features, found)
        rows = kept + (plan.max_logits if plan.pairs is None else len(plan.pairs))
        nodes = found + rest + rows - kept
        parts = CELL_BYTES * min(rows * nodes, max(CELLS, nodes)) + NODE_BYTES * nodes + SUMS_BYTES if found else 0
        return cls(
            states + max(forward, patterns + decoder), states,
            tokens * max(jacobian, attention, 4 * e * hidden) + 4 * (found + rest),
            # At the end there is a copy, with kept columns only. Pruning takes less: a byte for each of its entries.
            4 * rows * (found + kept + 2 * (rest + rows - kept)) + parts,
        )  # fmt: skip

    def device(self, batch: int) -> int:
        """Bytes on the device."""
        return self.fixed + batch * self.row


def host_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_of_rows(plan: Any, active: int, cells: int) -> torch.device:
    """The model's device if twice the memory of a circuit's rows is free, else the CPU.

    Args:
        active: number of active features.
        cells: entries of the rows.
    """
    device = next(plan.lm._module.parameters()).device
    if device.type == "cpu":
        return device
    wanted = 2 * (4 * cells + CELL_BYTES * CELLS) + CircuitMemory.of(plan, active).device(plan.batch)
    room = free_bytes(str(device))
    return device if wanted <= (room if plan.max_bytes is None else min(room, plan.max_bytes)) else torch.device("cpu")


def check_memory(plan: Any, active: int | None = None) -> None:
    """Compare a plan's memory with that of device and host, and with the plan's limit.
    Raises ValueError: it does not fit; the message names the argument and a value that does."""
    found, device = CircuitMemory.of(plan, active), next(plan.lm._module.parameters()).device
    host = has = host_bytes()
    if device.type != "cpu":
        has = free_bytes(str(device)) + (0 if active is None else found.states)  # which are taken by now
    most = host if plan.max_bytes is None else plan.max_bytes
    of = "this machine has" if plan.max_bytes is None else "this server's max_circuit_bytes allows"
    if found.device(plan.batch) > (room := min(has, most)):
        fits = (room - found.fixed) // found.row
        raise ValueError(
            f"batch={plan.batch}: passes over {len(plan.token_ids)} tokens need {found.device(plan.batch) >> 20} MiB of "
            f"{'host' if device.type == 'cpu' else 'device'} memory, and {of if room == most else 'there are'} {room >> 20} MiB: "
            + (f"batch={fits} fits" if fits > 0 else "shorten the prompt")
        )
    if found.host > most:
        raise ValueError(
            f"max_features={plan.max_features}: rows of {active} active features and {len(plan.token_ids)} tokens need "
            f"{found.host >> 20} MiB of host memory, and {of} {most >> 20} MiB"
        )
