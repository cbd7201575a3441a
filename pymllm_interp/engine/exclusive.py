"""Requests that share no pass with others: those with gradients, with transformers' own attention, or with its outputs."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.request import Request
from ..hooks.traces.blocks.trace import RequestTrace
from ..utils.arguments import PromptError


class ExclusiveTurns:
    """Turns of the requests that run in exclusive steps. Their steps alternate with the steps of all other requests.

    Attributes:
        requests: live requests that run in exclusive steps, in the order of their turns.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._others_next = False

    def add(self, request: Request) -> None:
        """Add a request, if it runs in exclusive steps."""
        if request.exclusive:
            self.requests.append(request)

    def finish(self, request: Request) -> None:
        """Remove a request that ended."""
        if request.exclusive:
            self.requests.remove(request)

    def next(self, others: bool) -> list[Request]:
        """The request that has the next step, with its gang. Empty: it is the others' turn, or no such request generates.

        Args:
            others: whether other requests exist.
        """
        request = next((r for r in self.requests if r.is_decoding), None)
        if request is None or (self._others_next and others):
            self._others_next = False
            return []
        self._others_next = True
        turn = [r for r in self.requests if r is request or (request.gang and r in request.gang)]
        self.requests = [r for r in self.requests if r not in turn] + turn
        return turn


def check_gang(traces: Sequence[RequestTrace]) -> None:
    """Refuse transformers' own attention for prompts that run in the same passes.

    Raises:
        PromptError: a trace of several prompts, or one of several that run together, asks for it.
    """
    together = bool(traces[0].gang)
    for trace in traces:
        if trace.options.eager_attention and (together or trace.watches_several):
            raise PromptError(
                "the prompts of this trace run in the same passes (they are one list, or their blocks are joined by a barrier, a "
                "name or an invoke without a prompt), but transformers' own attention runs for one prompt at a time: open a "
                "trace for each prompt, in `with lm.session():` or with saved values"
            )
