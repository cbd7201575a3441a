"""`/metrics`: its size does not depend on what clients invent, and its labels are escaped."""

from __future__ import annotations

import random
import re
import string
from urllib.parse import quote

import httpx
from helpers_server import Server

from pymllm_interp.server.http.metrics import Metrics

SERIES = re.compile(r'pymllm_interp_\w+(?:\{(?:\w+="(?:[^"\\\n]|\\[\\"n])*",?)+\})? [\d.e+-]+')


def paths(server: Server) -> set[str]:
    text = httpx.get(f"{server.url}/metrics", timeout=600).text
    assert all(SERIES.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))
    return set(re.findall(r'http_requests_total\{path="([^"]*)"', text))


def test_paths_and_methods_of_clients_make_no_series(server: Server):
    rng = random.Random(1)

    def word() -> str:
        return quote("".join(rng.choices(string.ascii_letters + '"\\{}\n%é', k=8)))

    with server.client("declared") as client, server.client(None) as unknown:
        (
            client.get("/metrics"),
            client.get("/"),
            client.get("/static/app.js"),
            client.get("/v1/models/x"),
            client.get("/x"),
        )
        client.get("/v1/interp/vectors/x"), client.get("/v1/interp/activations/x")
        before = paths(server)
        for number in range(250):
            client.get(f"/v1/interp/activations/{word()}")
            client.request(rng.choice(["GET", "PUT", "DELETE"]), f"/v1/interp/vectors/{word()}/{word()}", content=b"")
            client.request(f"M{number}", f"/v1/models/{word()}")
            unknown.get(f"/{rng.choice(['', 'v1/', 'static/', 'v1/interp/vectors/'])}{word()}")
    after = paths(server)
    assert len(after - before) <= 2, after - before
    assert {"/v1/interp/vectors/{name:path}", "/v1/interp/activations/{name}", "other"} <= after


def test_labels_are_escaped():
    metrics = Metrics()
    metrics.answers['a"b\\c\nd', 200] += 1
    (line,) = [
        line for line in metrics.text({}, {}, {}).splitlines() if line.startswith("pymllm_interp_http_requests_total{")
    ]
    assert line == r'pymllm_interp_http_requests_total{path="a\"b\\c\nd",status="200"} 1'
