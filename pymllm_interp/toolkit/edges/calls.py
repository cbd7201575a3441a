"""`LM.edge_attribution`, and calls beside it. Their parts are imported when they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .scores import EdgeScores


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
    from .run import all_scores, pairs_of, runs_of
    from .scores import EdgeScores

    model = _edge_model(lm, "lm.edge_attribution")
    runs = runs_of(method, steps, model.graph.layers)
    pairs = pairs_of(lm, clean, corrupted, metric)
    values, metrics = all_scores(model, pairs, runs, progress)
    return EdgeScores(model.graph, values, metrics, method, (model, pairs))


def _edge_model(lm: Any, call: str) -> Any:
    """The parts of a model. Raises NotImplementedError."""
    from .stream import EdgeModel

    lm.backend.require_process(call, "the weights are read here")
    lm._check_outside()
    if lm._edits_of(None):
        raise NotImplementedError(f"this model has edits (lm.edit), and {call} does not apply them: clear them first")
    return EdgeModel(lm)
