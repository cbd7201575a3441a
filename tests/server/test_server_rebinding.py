"""DNS rebinding in a browser: pages whose names stand for this machine, against a server without keys."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helpers_browser import CHROMIUM, Page, browsing
from helpers_served import served
from helpers_server import Server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
STEER = {"op": "scale", "site": "resid_post.0", "factor": 2.0}
PLAIN = {"prompt": "w1", "max_tokens": 1}
RIGHTS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/completions", PLAIN | {"interventions": [STEER]}), ("POST", "/v1/completions", PLAIN | {"capture": ["embed"]}),
    ("POST", "/v1/interp/reset_prefix_cache", {}), ("POST", "/v1/interp/lens", {"prompt": "w1"}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}), ("PUT", "/v1/interp/vectors/x", {}),
    ("GET", "/v1/interp/vectors", None), ("GET", "/v1/interp/vectors/mine", None), ("DELETE", "/v1/interp/vectors/mine", None),
]  # fmt: skip
"""What only this machine's user may do."""


class Quiet(BaseHTTPRequestHandler):
    """A site of somebody else."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>a page</title>")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def keyless(served_folder) -> Iterator[Server]:
    with served(served_folder, "--allow-code-from", "anybody", keys=None) as found:
        yield found


@pytest.fixture(scope="module")
def foreign_port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site.server_address[1]
        site.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    rules = "--host-resolver-rules=MAP *.test 127.0.0.1"
    with browsing(tmp_path_factory.mktemp("browser") / "profile", rules) as page:
        yield page


def fetched(
    page: Page, method: str, url: str, body: Any = None, mode: str = "cors", kind: str = "application/json"
) -> Any:
    """[status, text] that the page's script reads; the error's name where it reads nothing."""
    options: dict[str, Any] = {"method": method, "mode": mode}
    if body is not None:
        options |= {"headers": {"Content-Type": kind}, "body": json.dumps(body)}
    script = "fetch(%s, %s).then(async (one) => [one.status, await one.text()], (error) => error.name)"
    return page.run(script % (json.dumps(url), json.dumps(options)))


def port_of(server: Server) -> str:
    return server.url.rpartition(":")[2]


def test_a_page_whose_name_stands_for_this_machine_has_no_rights(browser: Page, keyless: Server) -> None:
    """To the browser the server is of the page's own origin: the page may read all that it is answered."""
    with keyless.client(None) as own:
        kept = own.post("/v1/responses", json={"input": "w1", "max_output_tokens": 1}).json()["id"]
        assert own.get("/v1/interp/capabilities").json()["trust"] == "code"
    browser.open(f"http://evil.test:{port_of(keyless)}/")
    assert browser.run("location.hostname") == "evil.test"
    status, text = fetched(browser, "GET", "/v1/interp/capabilities")
    seen = json.loads(text)
    assert (status, seen["trust"], seen["operator"], seen["client"]) == (200, "plain", False, "strangers")
    for method, path, body in RIGHTS:
        status, text = fetched(browser, method, path, body)
        assert status == 403, (method, path, status, text)
    assert fetched(browser, "POST", "/v1/interp/trace", "x", kind="application/x-pymllm-trace")[0] in (403, 415)
    for method in ("GET", "DELETE"):
        assert fetched(browser, method, f"/v1/responses/{kept}")[0] == 404
    with keyless.client(None) as own:
        assert own.get(f"/v1/responses/{kept}").status_code == 200


def test_a_page_of_another_origin_reads_nothing_and_changes_nothing(
    browser: Page, keyless: Server, foreign_port: int
) -> None:
    """Neither at this machine's address, nor at a name that stands for it; also where it may send and not read (`no-cors`)."""
    with keyless.client(None) as own:
        assert own.get("/v1/interp/vectors").json()["vectors"] == []
    browser.open(f"http://evil.test:{foreign_port}/")
    before = keyless.metric("prompt_tokens_total"), keyless.metric("requests_traces")
    for host in ("127.0.0.1", "localhost", "rebound.test"):
        base = f"http://{host}:{port_of(keyless)}"
        for method, path, body in (
            *RIGHTS,
            ("POST", "/v1/completions", PLAIN),
            ("GET", "/v1/models", None),
            ("GET", "/", None),
        ):
            assert fetched(browser, method, base + path, body) == "TypeError", (host, method, path)
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            assert fetched(browser, "POST", f"{base}/v1/completions", PLAIN, "no-cors", kind) == [0, ""]
    assert (keyless.metric("prompt_tokens_total"), keyless.metric("requests_traces")) == before


def test_the_servers_own_page_is_in_no_frame_of_another(browser: Page, keyless: Server, foreign_port: int) -> None:
    """Clicks of its visitor would be this machine's user's."""
    browser.open(f"http://evil.test:{foreign_port}/")
    script = """new Promise((done) => { const frame = document.createElement('iframe'); frame.src = %s;
        frame.onload = () => done(frame.contentDocument === null ? 'hidden' : 'read'); document.body.append(frame); })"""
    assert browser.run(script % json.dumps(f"{keyless.url}/")) == "hidden"
    assert any("frame-ancestors" in one or "Framing" in one for one in browser.problems), browser.problems
