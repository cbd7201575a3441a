"""`BoundHooks`: the hooks of recent requests, bound. Requests with the same hooks and prompts of one length bind them once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from ..core.model_spec import ModelSpec
from ..core.step import RequestHooks
from ..hooks.captures.reductions.reduction import Readout
from ..hooks.declared import Declared, DeclaredLimits

KEPT = 64
"""Bound hooks that are kept."""


class BoundHooks:
    """Binds hooks, as `Declared.bound` does. Thread-safe.

    Args:
        model, limits, readout: as there.
    """

    def __init__(self, model: ModelSpec, limits: DeclaredLimits, readout: Readout | None) -> None:
        self._model, self._limits, self._readout = model, limits, readout
        self._known: OrderedDict[Any, tuple[Any, Declared]] = (
            OrderedDict()
        )  # with the specs, so that their ids stay theirs
        self._lock = threading.Lock()

    def bound(self, hooks: RequestHooks, prompt_len: int) -> Declared:
        """The hooks of one request, bound.

        Raises:
            ValueError: see `Declared.bound`.
        """
        specs = *hooks.interventions, None, *hooks.captures
        # By identity: specs do not change.
        key = *map(id, specs), prompt_len, hooks.max_tokens, hooks.logits_from
        with self._lock:
            if (found := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return found[1].fresh()
        found = Declared.bound(hooks, prompt_len, self._model, self._limits, self._readout)
        if found.patterns is not None:
            return found
        with self._lock:
            self._known[key] = specs, found
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return found.fresh()

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._known.clear()
