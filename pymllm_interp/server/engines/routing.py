"""Routing of calls to replicas, by pure functions.

Equal prompts with equal edits meet on one replica, where their KV is. Rendezvous hashing: each replica has a rank for each key.
A replica that comes or goes moves only its own keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from ...wire.messages import RunTrace, Submit

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
    return int(isinstance(message, RunTrace))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
