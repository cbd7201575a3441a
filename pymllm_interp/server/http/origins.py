"""Hosts and origins: which of them are this machine, and which are foreign."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from ipaddress import IPv6Address, ip_address

from .errors import ApiError

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""Headers that proxies add."""
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::\d*)?")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine: the name `localhost`, or a loopback address. IPv6 may be in brackets.

    No other name is: whoever owns `127.example.com` decides its address.
    """
    if host.lower() == "localhost":
        return True
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if "%" in bare or (bare is not host and ":" not in bare):
        return False
    try:
        address = ip_address(bare)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def host_of(header: str) -> str:
    """The host in a Host header, without its port; empty if the header is invalid."""
    found = _HOST.fullmatch(header)
    return found[1] if found else ""


def is_local(headers: Mapping[str, str], peer: str) -> bool:
    """Whether this machine's user sent a request, under a name that only this machine has.

    The Host header excludes web pages that bind another name to this address. The peer's address excludes other machines, and
    headers that proxies add exclude clients behind a proxy on this machine.
    """
    forwarded = any(name in headers for name in FORWARDED)
    return not forwarded and is_loopback(peer) and is_loopback(host_of(headers.get("host", "")))


def check_origin(method: str, headers: Mapping[str, str], allowed: Collection[str]) -> None:
    """Refuse a web page of another origin. Browsers send Origin with each request that may change something.

    Args:
        allowed: further origins; "*": all.

    Raises:
        ApiError: the origin is foreign.
    """
    origin = headers.get("origin")
    if origin is None or method in SAFE_METHODS or origin in allowed or "*" in allowed:
        return
    scheme, _, host = origin.lower().partition("://")
    if scheme not in ("http", "https") or not host or host != headers.get("host", "").lower():
        raise ApiError(
            403, f"the origin {origin[:200]!r} is foreign, and this server has no keys: a page of another origin may not send "
            f"{method}. Open the page that this server has at /, or give the server keys (--keys)", code="foreign_origin",
        )  # fmt: skip
