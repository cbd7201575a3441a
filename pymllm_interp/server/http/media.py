"""Images that requests name: data URLs, addresses of hosts that the operator allows, and files of a folder.

An address is resolved once and connected to as resolved: a name cannot change its meaning between check and connection.
Each redirect is checked like the first address.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from ...utils.arguments import PromptError, shown
from ...wire.images import body_of_data_url, check_format

PART = 1 << 16
MAX_REDIRECTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48")


@dataclass(frozen=True)
class Media:
    """Reads images of requests.

    Args:
        domains: hosts that images are fetched from, without a port; "*": all public ones.
        folder: folder with files that requests may name by file URLs, or None.
        max_bytes: most bytes of an image's file.
        seconds: time limit of a fetch, redirects included.
    """

    domains: Sequence[str]
    folder: Path | None
    max_bytes: int
    seconds: float

    def read(self, source: Any, what: str) -> bytes:
        """The file of an image. Blocks while it is fetched. Raises PromptError: a source that is not served, or no image file."""
        if not isinstance(source, str):
            raise PromptError(f"{what} is {shown(source)[:80]}: expected a URL")
        scheme = source.partition(":")[0].lower()
        if scheme == "data":
            if len(source) > 2 * self.max_bytes:
                raise PromptError(f"{what} has more than {self.max_bytes} bytes (max_image_bytes)")
            body = body_of_data_url(source, what)
        elif scheme in ("http", "https"):
            body = self._fetched(source, what)
        elif scheme == "file":
            body = self._of_file(source, what)
        else:
            raise PromptError(f"{what}: expected a data URL, or an address with https: or http:")
        if len(body) > self.max_bytes:
            raise PromptError(f"{what} has more than {self.max_bytes} bytes (max_image_bytes)")
        check_format(body, what)
        return body

    def _of_file(self, source: str, what: str) -> bytes:
        if self.folder is None:
            raise PromptError(f"{what}: files of the server are not read (serve --allowed-local-media-path)")
        try:
            root = self.folder.resolve(strict=True)
            path = Path(urlsplit(source).path).resolve(strict=True)
            if not path.is_relative_to(root) or not path.is_file():
                raise OSError
            with path.open("rb") as file:
                return file.read(self.max_bytes + 1)
        except (OSError, ValueError):
            raise PromptError(f"{what}: no file of the folder that images may be in") from None

    def _fetched(self, source: str, what: str) -> bytes:
        if not self.domains:
            raise PromptError(
                f"{what}: addresses are not fetched here (serve --allowed-media-domains): send the image as a data URL"
            )
        deadline = time.monotonic() + self.seconds
        for _ in range(MAX_REDIRECTS + 1):
            found = self._answer(self._checked(source, what), deadline, what)
            if isinstance(found, bytes):
                return found
            source = urljoin(source, found)
        raise PromptError(f"{what}: more than {MAX_REDIRECTS} redirects")

    def _checked(self, source: str, what: str) -> SplitResult:
        """The parts of an address. Raises PromptError for another scheme, or a host that is not allowed."""
        try:
            url = urlsplit(source)
            host, _ = (url.hostname or "").rstrip("."), url.port
            source.encode("ascii")
        except ValueError:
            raise PromptError(f"{what}: {source[:200]!r} is no address") from None
        if url.scheme not in ("http", "https") or not host or url.username is not None or any(c <= " " for c in source):
            raise PromptError(f"{what}: {source[:200]!r} is no address of the form https://host/path")
        if "*" not in self.domains and host.lower() not in self.domains:
            raise PromptError(f"{what}: images of {host[:200]!r} are not fetched here (serve --allowed-media-domains)")
        return url

    def _answer(self, url: SplitResult, deadline: float, what: str) -> bytes | str:
        """The body of an answer, or the address that it redirects to."""
        connection: http.client.HTTPConnection | None = None
        guard: threading.Timer | None = None
        try:
            connection = _connection(url, deadline, what)
            guard = threading.Timer(max(deadline - time.monotonic(), 0), _hang_up, (connection.sock,))
            guard.start()  # the socket's own time limit begins anew with each byte
            if isinstance(connection.sock, ssl.SSLSocket):
                connection.sock.do_handshake()
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "pymllm-interp"})
            _limit(connection, deadline)
            answer = connection.getresponse()
            if answer.status in (301, 302, 303, 307, 308) and (place := answer.getheader("Location")):
                return place
            if answer.status != 200:
                raise PromptError(f"{what}: its host answered {answer.status}")
            return self._body(answer, connection, deadline, what)
        except PromptError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = time.monotonic() >= deadline or isinstance(error, TimeoutError)
            reason = f"it took more than {self.seconds:g} s (image_fetch_seconds)" if late else type(error).__name__
            raise PromptError(f"{what} could not be fetched: {reason}") from None
        finally:
            if guard is not None:
                guard.cancel()
            if connection is not None:
                connection.close()

    def _body(
        self, answer: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float, what: str
    ) -> bytes:
        body = bytearray()
        while True:
            _limit(connection, deadline)
            part = answer.read1(PART)
            if not part:
                _limit(connection, deadline)
                return bytes(body)
            body += part
            if len(body) > self.max_bytes:
                raise PromptError(f"{what} has more than {self.max_bytes} bytes (max_image_bytes)")


def _limit(connection: http.client.HTTPConnection, deadline: float) -> None:
    """Let the next read take no longer than until the deadline. Raises TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    if connection.sock is not None:
        connection.sock.settimeout(left)


def _hang_up(sock: socket.socket) -> None:
    """End the reads and writes of a socket that another thread waits for."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _connection(url: SplitResult, deadline: float, what: str) -> http.client.HTTPConnection:
    """A connection to one of the host's addresses, all of which must be public."""
    host, secure = url.hostname or "", url.scheme == "https"
    port = url.port or (443 if secure else 80)
    addresses = [info[4] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in addresses:
        if not is_public(str(address[0])):
            raise PromptError(f"{what}: {host[:200]!r} is not an address of the public web")
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock = socket.create_connection((str(addresses[0][0]), port), timeout=left)
    connection = http.client.HTTPConnection(host, port)
    try:
        connection.sock = sock
        if secure:
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise
    return connection


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public web: not private, loopback, link-local, shared or reserved."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        for inner in (found.ipv4_mapped, found.sixtofour, *(found.teredo or ())):
            if inner is not None and not is_public(str(inner)):
                return False
        if any(found in network for network in _NAT64):
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved
