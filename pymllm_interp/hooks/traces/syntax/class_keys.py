"""Module classes as keys of `rename` and `envoys`: callers name transformers' classes, the tree has native ones."""

from __future__ import annotations

from typing import Any

from torch import nn


def own_classes(keys: Any, model: nn.Module, argument: str) -> Any:
    """The map with the model's own class in place of transformers' class of the same name.

    Args:
        keys: nnsight's map from classes or paths, or one envoy class for all modules.
        model: the root module.
        argument: "rename" or "envoys", for the message.

    Raises:
        ValueError: a class of transformers that no module of the model stands for.
    """
    if not isinstance(keys, dict):
        return keys
    return {_own(key, model, argument): value for key, value in keys.items()}


def _own(key: Any, model: nn.Module, argument: str) -> Any:
    if not isinstance(key, type) or any(isinstance(module, key) for module in model.modules()):
        return key
    classes = {type(module).__name__: type(module) for module in model.modules()}
    if key.__name__ not in classes and key.__module__.startswith("transformers."):
        raise ValueError(
            f"{argument} names {key.__name__}, which no module of this model is: there are {', '.join(sorted(classes))}. "
            "A module's name, such as 'mlp' or 'model.layers.*', is a key, too"
        )
    return classes.get(key.__name__, key)
