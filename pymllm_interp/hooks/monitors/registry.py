"""`MonitorRegistry`: monitors by name, for calls that give a name in place of a monitor."""

from __future__ import annotations

from collections import UserDict
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from ...utils.arguments import PromptError, shown
from .monitor import Monitor


class MonitorRegistry(UserDict[str, Monitor]):
    """Monitors by name.

    lm.monitors["toxic"] = Monitor("resid_post.12", probe, threshold=0.9, then="stop")
    lm.generate(prompts, monitors=["toxic"])
    """

    def __setitem__(self, name: str, monitor: Monitor) -> None:
        """Keep a monitor; its results have this name. Raises ValueError for anything else."""
        if not isinstance(monitor, Monitor):
            raise ValueError(f"lm.monitors[{shown(name)}] = {shown(monitor)}; expected Monitor(site, probe, ...)")
        super().__setitem__(name, replace(monitor, name=name))

    def resolved(self, given: Any) -> Any:
        """A call's `monitors`, with monitors in place of names.

        Raises:
            PromptError: an unknown name.
        """
        if isinstance(given, str):
            raise PromptError(f"monitors={shown(given)}: expected a list of monitors or names")
        if not isinstance(given, list | tuple):
            return given
        return [
            self._known(entry)
            if isinstance(entry, str)
            else self.resolved(entry)
            if isinstance(entry, list | tuple)
            else entry
            for entry in given
        ]

    def _known(self, name: str) -> Monitor:
        if name not in self.data:
            near = get_close_matches(name, self.data, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(self.data)[:8]) or 'none'}"
            raise PromptError(f"lm.monitors has no {shown(name)}: {hint}")
        return self.data[name]
