"""Tab completion in IPython: ``lm.model.layers[0].``, ``out.activations["``.

IPython's completer evaluates attributes and indexes of known types only. It infers others from annotations, which lack a model's
modules.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from ...hooks.captures.activations import Activations
from ...hooks.captures.by_site import BySite
from ...hooks.saes.registry import SAERegistry
from ...hooks.traces.syntax.envoy import GeneratorEnvoy, TracedEnvoy
from ...hooks.vectors.registry import VectorRegistry
from ..calls.activation_cache import ActivationCache
from ..calls.forward_calls import ForwardOutput
from ..completion import CompletionOutput, RequestOutput

SAFE = (
    ActivationCache, Activations, BySite, CompletionOutput, ForwardOutput, GeneratorEnvoy, RequestOutput, SAERegistry,
    TracedEnvoy, VectorRegistry,
)  # fmt: skip
"""Types with attributes and entries that can be read outside a block without effects."""


def set_up_completion(model: type) -> None:
    """Let IPython complete the module tree and the keys of outputs. Does nothing outside IPython."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return
    with suppress(ImportError, AttributeError, KeyError):  # an IPython without these names completes less
        policy = import_module("IPython.core.guarded_eval").EVALUATION_POLICIES["limited"]
        policy.allowed_getattr.update((*SAFE, model))
        policy.allowed_getitem.update((*SAFE, model))
        matchers = shell.Completer.custom_matchers
        if not any(getattr(matcher, "__name__", "") == _children.__name__ for matcher in matchers):
            matchers.append(import_module("IPython.core.completer").context_matcher()(_children))


def _children(context: Any) -> dict[str, Any]:
    """A matcher of IPython: names of the modules of an envoy, ``lm.model.layers[0].``."""
    completer = import_module("IPython.core.completer")
    guarded = import_module("IPython.core.guarded_eval")
    found = re.search(r"([\w.\[\]-]+)\.(\w*)$", context.text_until_cursor)
    if found is None:
        return {"completions": []}
    shell = sys.modules["IPython"].get_ipython()
    scope = guarded.EvaluationContext(
        globals=shell.user_global_ns, locals=shell.user_ns, evaluation=shell.Completer.evaluation, in_subscript=False
    )
    try:
        envoy = guarded.guarded_eval(found[1], scope)
    except Exception:  # any incomplete expression may raise
        return {"completions": []}
    names = [name for name, _ in envoy._named_children()] if isinstance(envoy, TracedEnvoy) else []
    matches = [name for name in names if name.startswith(found[2]) and name.isidentifier()]
    return {
        "completions": [completer.SimpleCompletion(name, type="module") for name in matches], "matched_fragment": found[2],
    }  # fmt: skip
