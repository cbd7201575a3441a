"""`LM.circuit`. Its parts are imported when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...client.remote.remote_backend import RemoteBackend

if TYPE_CHECKING:
    from .circuit import Circuit


def circuit(
    lm: Any, prompt: Any, transcoders: Any, target: Any = None, *, max_features: int | None = 4096, max_logits: int = 10,
    logit_mass: float = 0.95, node_threshold: float = 0.8, edge_threshold: float = 0.98, batch: int = 64, skip: int = 1,
    offload: bool = False, progress: bool | None = None,
) -> Circuit:  # fmt: skip
    """Attribution graph of a prompt: which features, errors and tokens make its next token (docs/guides/circuits.md).

    An edge is the linear effect of one node on another, with the run's attention patterns and norm scales. MLPs without a
    transcoder count by their Jacobian. Each layer of a pass is a message to the engine; steps of requests run between.

    Args:
        prompt: a text, or token ids.
        transcoders: an SAE or transcoder, a name in `lm.saes`, or several; "set" also names all of "set/...". Transcoders, also
            cross-layer ones, read `mlp_in` or `resid_mid` and write `mlp_out`. SAEs are at `mlp_out` or `resid_post`. One reads a
            layer. A server's are named.
        target: logits of the last position. None: the most probable tokens. A token (text or id), a pair (a difference of two
            logits), or a list of these.
        max_features: features with rows, the most influential; None: all that are active.
        max_logits, logit_mass: the fewest tokens with this share of the probability, if `target` is None.
        node_threshold, edge_threshold: shares of the influence that the pruned graph keeps.
        batch: rows of one backward pass.
        skip: first positions without feature and error nodes; 1 leaves out the beginning-of-sequence token.
        offload: leave transcoders on their own device, and bring one layer's to the model's at a time.
        progress: show a bar of the rows; None: in notebooks and on terminals, above two seconds.

    Returns:
        a `Circuit`.

    Raises:
        PromptError, ValueError: an invalid prompt, target, transcoder or number; nothing was scheduled.
        NotImplementedError: a model with edits, or of another family.
    """
    from .build import build, planned
    from .circuit import Circuit as Made
    from .files import remote_circuit

    lm._check_outside()
    if lm._edits_of(None):
        raise NotImplementedError("this model has edits (lm.edit), and circuits do not apply them: clear them first")
    if isinstance(lm.backend, RemoteBackend):
        return remote_circuit(
            Made, lm, prompt, transcoders, target, progress, max_features=max_features, max_logits=max_logits,
            logit_mass=logit_mass, node_threshold=node_threshold, edge_threshold=edge_threshold, batch=batch, skip=skip,
            offload=offload,
        )  # fmt: skip
    lm.backend.require_process("lm.circuit")
    plan = planned(
        lm, prompt, transcoders, target, max_features=max_features, max_logits=max_logits, logit_mass=logit_mass,
        node_threshold=node_threshold, edge_threshold=edge_threshold, batch=batch, skip=skip, offload=offload,
    )  # fmt: skip
    return build(plan, progress)
