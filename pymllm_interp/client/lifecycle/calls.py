"""``lm.pause`` and ``lm.resume``, new weights by `update_weights`, and ``lm.sleep`` and ``lm.wake``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.updates import NamedTensors

if TYPE_CHECKING:
    from ..calls.model import ClientModel


def pause(self: ClientModel, mode: str = "abort") -> None:
    """Stop launching steps until `resume`. New requests wait. On a server this needs the operator's right.

    Args:
        mode: treatment of running requests. "abort": they end with finish_reason "abort". "wait": the call waits until they have
            ended. "keep": they continue after `resume`.

    Raises:
        ValueError: another mode.
        RuntimeError: inside a block of a trace; or `resume` was called while mode "wait" still waited. Or a server got a later
            `resume` first.
        EngineClosedError: the engine was shut down.
    """
    if not _control(self, "pause", mode=mode):
        raise RuntimeError("the engine runs: an lm.resume() that was called after this lm.pause() came before it")


def resume(self: ClientModel) -> None:
    """Launch steps again after `pause`. Without a pause it does nothing.

    Raises:
        RuntimeError: a server got a later `pause` first.
        EngineClosedError: the engine was shut down.
    """
    if not _control(self, "resume"):
        raise RuntimeError("the engine is paused: an lm.pause() that was called after this lm.resume() came before it")


def is_paused(self: ClientModel) -> bool:
    """Whether the engine is paused, or mode "wait" waits."""
    return _control(self, "is_paused")


def update_weights(self: ClientModel, weights: NamedTensors | str | Path, *, draft: bool = False) -> int:
    """Give the model new weights, in whole or in part, between two steps. Nothing is loaded anew.

    All weights are checked before the first is written. After an error the engine keeps its old weights. KV of the old weights
    is not used again: running requests, and requests that a pause keeps, are computed anew. So each later token is the token of
    a new engine with these weights, after the same tokens. States and scores from before stay. The receipt's `weights` counts
    the tokens of each version.

    Adapters stay loaded: their weights are added to the new ones. SAEs and vectors do not change.

    Args:
        weights: a mapping or iterable of names and tensors, such as ``trainer.named_parameters()``. Or a folder of the same
            model, with all weights. Names are the module tree's; native models take a checkpoint's names, too. Some of the
            experts of a layer are refused. A quantised model takes codes and scales in its format. With `quantize` it takes
            unquantised weights, and rounds them.
        draft: update the draft model of speculative decoding instead.

    Returns:
        new ``lm.weights.version``.

    Raises:
        WeightsError: unknown or incomplete tensors, other shapes or dtypes, or a folder of another model.
        ValueError: traces are under way: pause with "wait" or "abort" first.
        TypeError: neither a folder nor named tensors.
        EngineClosedError: the engine was shut down.
    """
    return _control(self, "update_weights", weights=weights, draft=draft)["version"]


def sleep(
    self: ClientModel, level: int = 1, *, tags: Sequence[str] = ("weights", "kv_cache", "captures"), drain: bool = False
) -> None:
    """Give the device's memory back until `wake`. Calls in between raise EngineSleepingError; weights must not be read.

    Adapters, SAEs, vectors and the tables of requests stay on the device. The prefix cache is emptied with "kv_cache".

    Args:
        level: 1 keeps the weights in host memory. 2 drops them.
        tags: memory to give back: "weights", "kv_cache" (recurrent states included), and "captures" (the ring on CUDA).
        drain: wait for live requests. Without it they are an error.

    Raises:
        ValueError: live requests, or another level or tag.
        EngineClosedError: the engine was shut down.
    """
    tags = tags if isinstance(tags, str) else list(tags)
    _control(self, "sleep", level=level, tags=tags, mode="wait" if drain else "keep")


def wake(self: ClientModel, tags: Sequence[str] | None = None, *, all_graphs: bool = False) -> bool:
    """Take memory again after `sleep`. CUDA graphs are captured anew while requests are served already, with the same results.

    Weights that were dropped (level 2) are loaded again from the model's folder, if they were not changed since. Else
    ``wake(["weights"])`` gives them memory, and `update_weights` with all of them wakes the engine.

    Args:
        tags: memory to take; None: all.
        all_graphs: wait until all graphs are captured, in an engine that is awake, too.

    Returns:
        whether the engine is awake.

    Raises:
        ValueError: another tag, or dropped weights that cannot be loaded again.
        torch.OutOfMemoryError: no room; the engine still sleeps.
        RuntimeError: with `all_graphs`, a graph could not be captured. The engine serves without it.
    """
    tags = tags if tags is None or isinstance(tags, str) else list(tags)
    return _control(self, "wake", tags=tags, all_graphs=all_graphs)


def is_sleeping(self: ClientModel) -> bool:
    """Whether the engine sleeps."""
    return _control(self, "is_sleeping")


def _control(model: Any, order: str, **arguments: Any) -> Any:
    model._check_outside()
    return model.backend.control(order, **arguments)
