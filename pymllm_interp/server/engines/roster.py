"""The replicas of a cluster, as those who start them tell the fronts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from ... import __version__


@dataclass(frozen=True)
class LinkKeys:
    """The key pair of a cluster's fronts (CURVE, as Z85 text). The secret grants the rights of a front."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> LinkKeys:
        """Generate a key pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True)
class Replica:
    """An engine process that listens for fronts."""

    name: str
    address: str
    """Such as tcp://10.0.0.1:41234; empty while its process does not run."""
    key: str
    """Its public key, which is new with each process."""
    version: str
    """Version of pymllm-interp."""
    fingerprint: str
    """Fingerprint of the weights."""
    draining: bool = False
    """Whether it is taking no further calls."""

    @classmethod
    def of(cls, found: Mapping[str, Any], draining: bool = False) -> Replica:
        """The replica that an engine process announced."""
        names = ("name", "address", "key", "version", "fingerprint")
        return cls(**{name: found[name] for name in names}, draining=draining)

    @classmethod
    def down(cls, name: str, draining: bool) -> Replica:
        """A replica of the cluster without a running process."""
        return cls(name, "", "", "", "", draining)

    def differs_from(self, fingerprint: str) -> str:
        """Reason that it cannot serve beside replicas with weights of this fingerprint, or ""."""
        if self.version != __version__:
            return f"replica {self.name} runs pymllm-interp {self.version}, and this is {__version__}: install the same"
        if fingerprint and self.fingerprint != fingerprint:
            return (
                f"replica {self.name} has other weights ({self.fingerprint[:8]}) than the cluster ({fingerprint[:8]})"
            )
        return ""
