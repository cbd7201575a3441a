"""A headless Chromium over its DevTools protocol; websocket-client comes with nnsight."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import websocket

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
SECONDS = 300
"""How long anything may take, on a machine that is busy with other work."""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--no-first-run", "--remote-debugging-port=0",
    "--window-size=1200,1400",
)  # fmt: skip
KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Page:
    """One page of the browser.

    Attributes:
        problems: errors of its console.
    """

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=SECONDS, suppress_origin=True)
        self._numbers = count(1)
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (message := self._receive()).get("id") != number:
            pass
        assert "error" not in message, message
        return message["result"]

    def event(self, method: str) -> dict[str, Any]:
        """The parameters of the next event of a kind; waits for it."""
        while (found := next((event for event in self._events if event["method"] == method), None)) is None:
            self._receive()
        self._events.remove(found)
        return found["params"]

    def _receive(self) -> dict[str, Any]:
        message = json.loads(self._socket.recv())
        if "method" in message:
            self._events.append(message)
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(message["params"]["entry"]["text"])
        return message

    def open(self, url: str) -> None:
        """Show `url`, once it is loaded."""
        self._events.clear()
        assert "errorText" not in self.send("Page.navigate", url=url)
        self.event("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of an expression."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of an expression, once it is true."""
        deadline = time.monotonic() + SECONDS
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"), self.problems)
            time.sleep(0.05)
        return found

    def press(self, key: str) -> None:
        """Press a key of `KEYS`, where the focus is."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **text)

    def screen(self, width: int, scheme: str) -> None:
        """Show the page on a screen so wide, in the "light" or the "dark" scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


@contextmanager
def browsing(profile: Path, *flags: str) -> Iterator[Page]:
    """An empty page of a browser of its own, with further flags."""
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + SECONDS
        while not (port_file.exists() and port_file.read_text().strip()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        address = f"http://127.0.0.1:{port_file.read_text().split()[0]}/json"
        while not (pages := [p for p in httpx.get(address, timeout=SECONDS).json() if p["type"] == "page"]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield Page(pages[0]["webSocketDebuggerUrl"])
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
