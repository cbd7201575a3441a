"""Hosts and origins: a web page of another site has no rights on a server without keys."""

from __future__ import annotations

import http.client
import json

import httpx
import pytest
from helpers_served import served
from helpers_server import Server

from pymllm_interp.server.http.errors import ApiError
from pymllm_interp.server.http.origins import check_origin, host_of, is_loopback
from pymllm_interp.server.http.trust import Keys, Trust
from pymllm_interp.server.settings import ServeSettings

LOOPBACK = ("localhost", "LocalHost", "127.0.0.1", "127.255.0.9", "::1", "[::1]", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1")
FOREIGN = (
    "", "127.evil.com", "127.0.0.1.evil.com", "127.0.0.1.", "localhost.", "localhost.evil.com", "evil.localhost", "127.1", "127",
    "2130706433", "0x7f.0.0.1", "127.0.0.01", "[127.0.0.1]", "[::1", "::1]", "[[::1]]", "[localhost]", "::1%evil.com", "::2", "::",
    "0.0.0.0", "10.0.0.1", "127.0.0.1:80", "127.0.0.1 ", "127.0.0.1, evil.com", "١٢٧.0.0.1", "user@127.0.0.1", "::ffff:10.0.0.1",
)  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_a_loopback_address_is_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_anybody_can_register_is_not_this_machine(host):
    assert not is_loopback(host)
    with pytest.raises(ValueError, match="reachable from other machines"):
        ServeSettings(model={}, server={}, name="x", keys=Keys([], Trust.CODE), host=host)


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("127.0.0.1", "127.0.0.1"), ("127.0.0.1:80", "127.0.0.1"), ("127.0.0.1:", "127.0.0.1"), ("[::1]:80", "[::1]"),
        ("[::1]", "[::1]"), ("::1", ""), ("127.0.0.1:evil.com", ""), ("127.0.0.1:80:80", ""), ("", ""), (":80", ""),
        ("[::1]evil.com", ""), ("evil.com:80", "evil.com"),
    ],
)  # fmt: skip
def test_the_host_of_a_header_has_no_port(header, host):
    assert host_of(header) == host


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_foreign_origins_are_refused_and_the_own_and_allowed_ones_are_not(method):
    host = {"host": "127.0.0.1:8000"}
    for origin in (
        "http://evil.com",
        "null",
        "",
        "http://127.0.0.1:9000",
        "file://",
        "http://",
        "http://127.0.0.1:8000.evil.com",
    ):
        with pytest.raises(ApiError, match="is foreign"):
            check_origin(method, host | {"origin": origin}, ())
        check_origin("GET", host | {"origin": origin}, ())
    check_origin(method, host, ())
    check_origin(method, host | {"origin": "http://127.0.0.1:8000"}, ())
    check_origin(method, host | {"origin": "https://mine.org"}, ["https://mine.org"])
    check_origin(method, host | {"origin": "https://mine.org"}, ["*"])


@pytest.fixture(scope="module")
def keyless(served_folder):
    with served(served_folder, "--allow-code-from", "anybody", keys=None) as found:
        yield found


def right(server: Server, **headers: str) -> str:
    answer = httpx.get(f"{server.url}/v1/interp/capabilities", headers=headers, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer.json()["trust"]


def test_without_keys_rights_are_of_this_machine_only(keyless: Server):
    assert right(keyless) == right(keyless, Host="localhost:80") == right(keyless, Host="[::1]:80") == "code"
    for host in ("127.evil.com", "evil.com", "127.0.0.1.", "", "127.0.0.1:x"):
        assert right(keyless, Host=host) == "plain", host
    for name in ("X-Forwarded-For", "Forwarded", "X-Real-IP"):
        assert right(keyless, **{name: "127.0.0.1"}) == "plain"
    refused = httpx.post(f"{keyless.url}/v1/interp/lens", json={"prompt": "w1"}, headers={"Host": "127.evil.com"})
    assert refused.status_code == 403 and "http://127.0.0.1" in refused.json()["error"]["message"]


@pytest.mark.parametrize("origin", ["http://evil.com", "null"])
def test_without_keys_a_foreign_page_changes_nothing_even_without_a_body(keyless: Server, origin):
    with httpx.Client(base_url=keyless.url, headers={"Origin": origin}, timeout=600) as page:
        for method, path in (
            ("POST", "/v1/interp/reset_prefix_cache"),
            ("PUT", "/v1/interp/vectors/x"),
            ("DELETE", "/v1/interp/vectors/x"),
            ("POST", "/v1/completions"),
        ):
            answer = page.request(method, path)
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_origin", path
            assert origin in answer.json()["error"]["message"]
        assert page.get("/v1/models").status_code == 200
        own = page.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}, headers={"Origin": keyless.url})
        assert own.status_code == 200


def test_a_page_that_binds_its_own_name_to_this_machine_is_a_stranger(keyless: Server):
    """DNS rebinding: to the browser, the server is of the page's own origin."""
    with keyless.client(None) as own:
        kept = own.post("/v1/responses", json={"input": "w1", "max_output_tokens": 1}).json()["id"]
        assert own.get(f"/v1/responses/{kept}").status_code == 200
    steer = {"op": "scale", "site": "resid_post.0", "factor": 2.0}
    for name in ("evil.com", "127.0.0.1.evil.com", "localhost.evil.com", "0.0.0.0", "[::]", "localhost."):
        headers = {"Host": f"{name}:80", "Origin": f"http://{name}:80"}
        with keyless.client(None, headers=headers) as page:
            found = [
                page.request(method, path, json=body).status_code
                for method, path, body in (
                    ("POST", "/v1/completions", {"prompt": "w1", "max_tokens": 1, "interventions": [steer]}),
                    ("POST", "/v1/completions", {"prompt": "w1", "max_tokens": 1, "capture": ["embed"]}),
                    ("POST", "/v1/completions", {"prompt": "w1", "max_tokens": 1, "priority": -1}),
                    ("POST", "/v1/interp/reset_prefix_cache", {}), ("POST", "/v1/interp/trace", {}),
                    ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}),
                    ("PUT", "/v1/interp/vectors/x", {}), ("GET", "/v1/interp/vectors", None),
                )
            ]  # fmt: skip
            assert found == [403] * 8, (name, found)
            assert page.get(f"/v1/responses/{kept}").status_code == 404
            assert page.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}).status_code == 200


def test_a_key_is_enough_for_a_page_of_any_origin(server: Server):
    with server.client("plain", headers={"Origin": "http://evil.com"}) as client:
        assert client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("name", ["Host", "Origin", "Authorization", "Content-Type"])
def test_a_header_that_is_given_twice_is_refused(server: Server, name):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=600)
    connection.putrequest("POST", "/v1/completions", skip_host=True)
    for value in ("127.0.0.1", "127.evil.com"):
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = json.loads(answer.read())
    assert answer.status == 400 and name.lower() in body["error"]["message"]
    connection.close()
