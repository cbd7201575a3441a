"""`Fires`: how often the gates of a request fired."""

from __future__ import annotations

import torch


class Fires(dict[tuple[int, int], int | torch.Tensor]):
    """(site, index among the site's ops) -> fires of the op's gate. A count by functions is a tensor on their device."""

    _drafted: list[tuple[tuple[int, int], torch.Tensor]] | None = None

    def add(self, key: tuple[int, int], fired: torch.Tensor) -> None:
        """Count the fires of a pass, `fired` [rows] bool. Fires of drafts wait until they are settled."""
        if self._drafted is not None:
            self._drafted.append((key, fired))
        else:
            self[key] = self.get(key, 0) + fired.sum()

    def begin_draft(self) -> None:
        """Begin fires that may be taken back. Earlier unsettled ones are forgotten."""
        self._drafted = []

    def settle(self, taken_back: int) -> None:
        """Count fires of drafted passes, without the last `taken_back` rows."""
        drafted, self._drafted = self._drafted, None
        for key, fired in drafted or ():
            self.add(key, fired[: max(len(fired) - taken_back, 0)])
