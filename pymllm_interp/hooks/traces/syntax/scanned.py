"""Scan blocks: in them, a module stands for its double in the model of fake tensors (client/calls/scan.py)."""

from __future__ import annotations

from weakref import WeakValueDictionary

from greenlet import getcurrent

from ..nnsight_compat import Envoy, Interleaver

NOT_WRITTEN = "`{}.{}` cannot be assigned in the block of a scan: its weights are fake tensors. Assign it outside"


class ScanInterleaver(Interleaver):
    """Serves the blocks of scans.

    Args:
        served: the interleaver of the model that is scanned, which all of its envoys share.

    Attributes:
        doubles: the envoys of the model of fake tensors, by path.
    """

    def __init__(self, served: Interleaver) -> None:
        super().__init__()
        self.served = served
        self.doubles: WeakValueDictionary[str, Envoy] = WeakValueDictionary()


def current_scan() -> ScanInterleaver | None:
    """The interleaver of the current block, if it is the block of a scan."""
    mediator = getattr(getcurrent(), "mediator", None)
    interleaver = None if mediator is None else getattr(mediator(), "interleaver", None)
    return interleaver if isinstance(interleaver, ScanInterleaver) else None


def check_outside_scan() -> None:
    """Raise RuntimeError inside the block of a scan, which makes all tensors fake."""
    if current_scan() is not None:
        raise RuntimeError("a trace cannot be opened inside the block of a scan: use a session")


def scanned(envoy: Envoy) -> Envoy:
    """The double of a module's envoy inside the block of a scan; elsewhere, the envoy itself."""
    scan = current_scan()
    if scan is None or vars(envoy).get("interleaver") is not scan.served:  # an envoy that is being made has none yet
        return envoy
    return scan.doubles.get(envoy.path, envoy)
