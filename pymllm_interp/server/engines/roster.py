"""The replicas of a cluster, as those who start them tell the fronts. One of them is chosen for each call.

Equal prompts with equal edits meet on one replica, where their KV is. Rendezvous hashing: each replica has a rank for each key.
A replica that comes or goes moves only its own keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from ... import __version__
from ...wire.messages import RunCircuit, RunTrace, Submit


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


BLOCK = 32
"""Tokens of a prompt that the key has: its first ones, which prompts with a common prefix share."""
LOAD_FACTOR, LOAD_MARGIN = 1.1, 4
"""The second choice takes a call if the first has more than LOAD_FACTOR times its requests, and LOAD_MARGIN more."""


def key_of(message: Submit) -> bytes:
    """Routing key of a call's first prompt: hash of owner, salt, edits and the first block of tokens."""
    edits = [message.interventions[:1], message.edits, message.options.get("cache_salt")]
    first = message.prompts[0][:BLOCK] if message.prompts else []
    return _digest(msgspec.msgpack.encode([message.owner, edits, first]))


def ranked(key: bytes, names: Sequence[str]) -> list[str]:
    """The replicas in the order of their ranks for a key."""
    return sorted(names, key=lambda name: _digest(key + name.encode()))


def choose(key: bytes, loads: Mapping[str, int]) -> str:
    """The replica for a key.

    Args:
        loads: requests that run, by replica; not empty.
    """
    first, *others = ranked(key, list(loads))
    if others and loads[first] > LOAD_FACTOR * loads[others[0]] + LOAD_MARGIN:
        return others[0]
    return first


def least_loaded(owner: str, loads: Mapping[str, int]) -> str:
    """The replica with the fewest requests; of equal ones, an owner has a first choice."""
    return min(ranked(_digest(owner.encode()), list(loads)), key=lambda name: loads[name])


def weight_of(message: object) -> int:
    """Requests that a call counts as."""
    if isinstance(message, Submit):
        return len(message.prompts)
    return int(isinstance(message, RunTrace | RunCircuit))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
