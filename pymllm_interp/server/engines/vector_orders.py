"""`VectorOrders`: the newest order of each named vector, a PUT or a DELETE. All who know the same orders have the same vectors."""

from __future__ import annotations

import copy

from ...wire.messages import DropVector, PutVector

MOST_DROPPED = 4096
"""Names of dropped vectors that are remembered, and up to as many more; those that came first are forgotten first."""

VectorOrder = PutVector | DropVector


class VectorOrders:
    """Orders by (owner, name). Of two orders for one name, the one with the later `stamp` holds, in whatever order they come."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, str], VectorOrder] = {}

    def is_news(self, order: VectorOrder) -> bool:
        """Whether the order is later than the known one of its name."""
        known = self._newest.get((order.owner, order.name))
        return known is None or _rank(order) > _rank(known)

    def take(self, order: VectorOrder) -> bool:
        """Keep an order, if it is news. Returns whether it was."""
        if not self.is_news(order):
            return False
        self._newest.pop((order.owner, order.name), None)
        self._newest[order.owner, order.name] = order  # the last one
        if isinstance(order, DropVector):
            self._forget_dropped()
        return True

    def all(self) -> list[VectorOrder]:
        """Newest order of each vector."""
        return list(self._newest.values())

    def vectors(self, owner: str) -> dict[str, PutVector]:
        """An owner's vectors by name."""
        found = [order for order in self.all() if order.owner == owner]
        return {order.name: order for order in found if isinstance(order, PutVector)}

    def _forget_dropped(self) -> None:
        dropped = [key for key, order in self._newest.items() if isinstance(order, DropVector)]
        for key in dropped[: len(dropped) - MOST_DROPPED] if len(dropped) >= 2 * MOST_DROPPED else ():
            del self._newest[key]


def numbered(order: VectorOrder, call: int) -> VectorOrder:
    """The order as a message of this call."""
    found = copy.copy(order)
    found.call = call
    return found


def _rank(order: VectorOrder) -> tuple[int, bytes]:
    """Two orders of one nanosecond have one rank everywhere, too."""
    return order.stamp, order.body if isinstance(order, PutVector) else b""
