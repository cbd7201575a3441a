"""Calls of `LM` over edges and subspaces, and `LM.circuit`. Their parts are imported when they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..client.remote.remote_backend import RemoteBackend

if TYPE_CHECKING:
    from .alignment import AlignedSubspace
    from .circuits.circuit import Circuit
    from .edges.logits import LogitAttribution
    from .edges.paths import PathPatches
    from .edges.scores import EdgeScores


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
    from .circuits.build import build, planned
    from .circuits.circuit import Circuit as Made
    from .circuits.files import remote_circuit

    _check(lm, "lm.circuit")
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


def edge_attribution(
    lm: Any, clean: Any, corrupted: Any, *, metric: Any, method: str = "eap", steps: int | None = None,
    progress: bool | None = None,
) -> EdgeScores:  # fmt: skip
    """Edge attribution patching: estimates the change of the clean run's metric by patching each edge from the corrupted run.

    Edges go from embeddings, heads and MLPs to the inputs of later heads (query, key, value), MLPs and the logits. One backward
    pass gives the scores of all edges (docs/guides/edges.md).

    Args:
        clean, corrupted: prompts with equally many tokens; or two lists of prompts, and the scores are means over the pairs.
        metric: see `patch_sweep`; a function must be differentiable. For lists of prompts, also a list with one for each pair.
        method: "eap": gradients of the clean run (Syed et al. 2023). "eap-ig-inputs": their mean over embeddings between both
            runs. "eap-ig-activations": their mean over runs with one output between both. "clean-corrupted": of both runs.
        steps: steps between both runs; None: 5.
        progress: show a bar of the pairs; None: in notebooks and on terminals, above two seconds.

    Returns:
        an `EdgeScores`.

    Raises:
        PromptError, ValueError: prompts of different lengths, or an invalid metric, method or number of steps; nothing was
            scheduled.
        NotImplementedError: a model with edits, a server's, with quantised weights, or with other parts in its stream.
    """
    from .edges.run import all_scores, pairs_of, runs_of
    from .edges.scores import EdgeScores

    model = _edge_model(lm, "lm.edge_attribution")
    runs = runs_of(method, steps, model.graph.layers)
    pairs = pairs_of(lm, clean, corrupted, metric)
    values, metrics = all_scores(model, pairs, runs, progress)
    return EdgeScores(model.graph, values, metrics, method, (model, pairs))


def path_patching(
    lm: Any, clean: Any, corrupted: Any, *, receivers: Any, metric: Any, senders: Any = None, through_mlps: bool = True,
    progress: bool | None = None,
) -> PathPatches:  # fmt: skip
    """Path patching: the effect of each sender on the clean run's metric, through the receivers only (Wang et al. 2022).

    The receivers' inputs are from a run with the sender's corrupted output. Its other heads are as in the clean run. Both runs are
    requests with declared patches, in batches. A server runs them, too (docs/guides/edges.md).

    Args:
        clean, corrupted: prompts with equally many tokens.
        receivers: names, or one: "a9.h6<q>", "a9.h6" (query, key and value), "m3"; or "logits". They are patched together.
        metric: see `patch_sweep`.
        senders: names, or one: "a3.h2", "m3", "input"; each is patched by itself. None: all heads before the last receiver.
        through_mlps: whether MLPs between sender and receiver are computed anew; else they are as in the clean run.
        progress: show a bar of the senders; None: in notebooks and on terminals, above two seconds.

    Returns:
        a `PathPatches`: `values` and `effects` [senders].

    Raises:
        PromptError, ValueError: prompts of different lengths, an invalid metric, or no such node; nothing was scheduled.
        NotImplementedError: a model with edits.
    """
    from .edges.paths import path_patching as run

    _check(lm, "lm.path_patching")
    return run(
        lm,
        clean,
        corrupted,
        receivers=receivers,
        senders=senders,
        metric=metric,
        through_mlps=through_mlps,
        progress=progress,
    )


def logit_attribution(lm: Any, prompt: Any, target: Any = None) -> LogitAttribution:
    """Direct logit attribution: the parts of the last position's logits that each head, MLP and the embeddings make.

    The final norm has the scale of the run. The parts add up to the logits before a soft cap (docs/guides/edges.md).

    Args:
        prompt: a text, or token ids.
        target: a token (text or id), a pair (a difference of two logits), or a list of these. None: the most probable token.

    Returns:
        a `LogitAttribution`: `values` [targets, sources], `heads` [targets, layers, heads].

    Raises:
        PromptError: an invalid prompt or target; nothing was scheduled.
        NotImplementedError: see `edge_attribution`; and a head that scales its logits.
    """
    from .edges.logits import logit_attribution as run

    return run(_edge_model(lm, "lm.logit_attribution"), prompt, target)


def das(
    lm: Any, bases: Sequence[Any], sources: Sequence[Any], labels: Sequence[Any], *, site: str, rank: int | None = 1,
    positions: Any = -1, steps: int = 200, batch: int = 32, lr: float = 0.01, boundary: float = 1.0, seed: int = 0,
    progress: bool | None = None,
) -> AlignedSubspace:  # fmt: skip
    """Distributed alignment search: train a subspace, so that its interchange makes the model say the labels (Geiger et al. 2023).

    In the subspace the base run has the source run's state. The result's interventions are declared: `lm.generate`, servers and
    other engines take them (docs/guides/edges.md).

    Args:
        bases, sources: lists of prompts, of any lengths.
        labels: the token after each interchange.
        site: one site that interventions act at, "resid_post.3".
        rank: dimensions of the subspace; None: trained, too (boundless).
        positions: position of the state in bases and sources, or a pair. Negative ones count from the end.
        steps, batch, lr: steps of Adam, examples of a step at most, and the learning rate.
        boundary: cost of the share of dimensions, if `rank` is None.
        seed: seed of the first rotation and of the order.
        progress: show a bar of the steps; None: in notebooks and on terminals, above two seconds.

    Returns:
        an `AlignedSubspace`.

    Raises:
        PromptError, ValueError: invalid prompts, labels, site, positions or numbers; nothing was scheduled.
        NotImplementedError: a model with edits, or a server's.
    """
    from .alignment import das as run

    lm.backend.require_process("lm.das", "AlignedSubspace.interchange runs here")
    _check(lm, "lm.das")
    return run(
        lm, bases, sources, labels, site=site, rank=rank, positions=positions, steps=steps, batch=batch, lr=lr, boundary=boundary,
        seed=seed, progress=progress,
    )  # fmt: skip


def _edge_model(lm: Any, call: str) -> Any:
    """The parts of a model. Raises NotImplementedError."""
    from .edges.stream import EdgeModel

    lm.backend.require_process(call, "the weights are read here")
    _check(lm, call)
    return EdgeModel(lm)


def _check(lm: Any, call: str) -> None:
    lm._check_outside()
    if lm._edits_of(None):
        raise NotImplementedError(f"this model has edits (lm.edit), and {call} does not apply them: clear them first")
