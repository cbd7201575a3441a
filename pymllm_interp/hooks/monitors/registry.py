"""`MonitorRegistry`: monitors by name, for calls that give a name in place of a monitor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...utils.arguments import PromptError, shown
from ..by_name import ByName
from .monitor import Monitor


class MonitorRegistry(ByName[Monitor]):
    """Monitors by name.

    lm.monitors["toxic"] = Monitor("resid_post.12", probe, threshold=0.9, then="stop")
    lm.generate(prompts, monitors=["toxic"])
    """

    kind, attribute, example = "monitor", "monitors", "Monitor(site, probe, ...)"

    def __setitem__(self, name: str, monitor: Monitor) -> None:
        """Keep a monitor; its results have this name. Raises ValueError for anything else."""
        if not isinstance(monitor, Monitor):
            raise ValueError(f"lm.monitors[{shown(name)}] = {shown(monitor)}; expected {self.example}")
        self._keep(name, replace(monitor, name=name))

    def resolved(self, given: Any) -> Any:
        """A call's `monitors`, with monitors in place of names.

        Raises:
            PromptError: an unknown name.
        """
        if isinstance(given, str):
            raise PromptError(f"monitors={shown(given)}: expected a list of monitors or names")
        if not isinstance(given, list | tuple):
            return given
        try:
            return [
                self[entry]
                if isinstance(entry, str)
                else self.resolved(entry)
                if isinstance(entry, list | tuple)
                else entry
                for entry in given
            ]
        except KeyError as error:
            raise PromptError(error.args[0]) from None
