"""API keys, and the permissions of their holders."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

ANYBODY = "anybody"
"""The name of clients without a key, if the server has no keys."""
STRANGERS = "strangers"
"""The name of those among them that are not this machine's user."""


class Trust(IntEnum):
    """Permissions of a key; each level includes those before it."""

    PLAIN = 0
    """Generate."""
    DECLARED = 1
    """Also declare interventions and captures, and store vectors: data, which the engine executes."""
    CODE = 2
    """Also send traces: arbitrary Python, with all permissions of the engine process."""

    @classmethod
    def of(cls, name: str) -> Trust:
        """The level of a name. Raises ValueError: no level has this name."""
        try:
            return cls[name.upper()]
        except KeyError:
            raise ValueError(
                f"trust {name!r}: expected one of {', '.join(level.name.lower() for level in cls)}"
            ) from None


@dataclass(frozen=True)
class Client:
    """The sender of a request. Clients of one name share their vectors and limits.

    Attributes:
        operator: may do what affects all clients. No level of trust includes it.
    """

    name: str
    trust: Trust
    operator: bool = False


@dataclass(frozen=True)
class Key:
    """A key by its hash: the key itself is not kept."""

    name: str
    digest: bytes
    trust: Trust
    operator: bool = False

    @classmethod
    def of(cls, name: str, secret: str, trust: Trust = Trust.DECLARED, operator: bool = False) -> Key:
        """A key of these words."""
        return cls(name, _digest(secret), trust, operator)


class Keys:
    """The keys of a server.

    Args:
        keys: none: clients need no key.
        keyless: permissions of clients if the server has no keys.
    """

    def __init__(self, keys: Sequence[Key], keyless: Trust = Trust.DECLARED) -> None:
        self._keys, self.keyless = tuple(keys), keyless

    @property
    def anybody(self) -> bool:
        """Whether clients need no key."""
        return not self._keys

    def client(self, authorization: str | None, local: bool = True) -> Client | None:
        """The sender of a request with this Authorization header; None: no key, or a wrong one.

        All keys are compared, each in constant time: how long it takes says nothing of them.

        Args:
            local: whether this machine's user sent it (`origins.is_local`). Without keys, others have the right `plain` only.
        """
        if self.anybody:
            return Client(ANYBODY, self.keyless, operator=True) if local else Client(STRANGERS, Trust.PLAIN)
        scheme, _, secret = (authorization or "").partition(" ")
        digest, found = _digest(secret.strip() if scheme.lower() == "bearer" else ""), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = Client(key.name, key.trust, key.operator)
        return found

    def names(self) -> list[str]:
        """Names of the keys' holders."""
        return [key.name for key in self._keys]


API_KEY = "api-key"
"""Name of the first key without one; the next are api-key-2, and so on."""


def read_keys(
    file: Path | None, allow_code_from: Iterable[str], operators: Iterable[str] = (), secrets: Sequence[str] = ()
) -> Keys:
    """The keys of a file with lines ``name key [plain | declared]``; ``#`` begins a comment.

    Args:
        allow_code_from: names of keys that may send code. "anybody": all clients of a server without keys. Such a server must
            listen on this machine only.
        operators: names of keys of operators. Without keys, this machine's user is one.
        secrets: further keys, without names, with the right `declared`.

    Raises:
        OSError: the file cannot be read.
        ValueError: an invalid line, a name or key given twice, or a name without a key.
    """
    allowed, leading, keys = set(allow_code_from), set(operators), list[Key]()
    for where, name, secret, trust in [*_lines_of(file), *_unnamed(secrets)]:
        key = Key.of(name, secret, Trust.CODE if name in allowed else trust, name in leading)
        if len(secret) < 8:
            raise ValueError(f"{where}: the key of {key.name} has fewer than 8 characters")
        if any(key.name == other.name or key.digest == other.digest for other in keys):
            raise ValueError(f"{where}: duplicate name or key")
        keys.append(key)
    if file is not None and not keys:
        raise ValueError(f"{file} has no keys")
    for option, given, more in (
        ("allow-code-from", allowed, {ANYBODY} if not keys else set()),
        ("operator", leading, set()),
    ):
        if unknown := given - {key.name for key in keys} - more:
            known = ", ".join(key.name for key in keys) or f"{ANYBODY} (no keys were given)"
            raise ValueError(f"--{option} {', '.join(sorted(unknown))}: no such key; there is {known}")
    return Keys(keys, Trust.CODE if ANYBODY in allowed else Trust.DECLARED)


def _lines_of(file: Path | None) -> Iterator[tuple[str, str, str, Trust]]:
    """(where, name, key, right) of each line."""
    for number, line in enumerate(file.read_text().splitlines() if file else (), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{file}:{number}"
        if len(words) not in (2, 3):
            raise ValueError(f"{where}: expected 'name key [plain | declared]', got {len(words)} words")
        trust = Trust.of(words[2]) if len(words) == 3 else Trust.DECLARED
        if trust is Trust.CODE:
            raise ValueError(f"{where}: code is allowed by --allow-code-from {words[0]}, not in this file")
        yield where, words[0], words[1], trust


def _unnamed(secrets: Sequence[str]) -> Iterator[tuple[str, str, str, Trust]]:
    for number, secret in enumerate(secrets, 1):
        yield "--api-key", API_KEY if number == 1 else f"{API_KEY}-{number}", secret, Trust.DECLARED


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
