"""OpenTelemetry spans of a server's requests: what they say, whose children they are, and that their endpoint never matters."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers_served import served
from helpers_server import GREEDY

from pymllm_interp import LM, SamplingParams
from pymllm_interp.cli import main

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def received() -> Iterator[tuple[str, queue.Queue[Any]]]:
    """An OTLP receiver on loopback: (its URL, the spans that came)."""
    spans: queue.Queue[Any] = queue.Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in body.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        spans.put((resource.resource, span))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    server.shutdown()


def values_of(attributes: Any) -> dict[str, Any]:
    found = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
    return {
        name: [item.string_value for item in value.values] if hasattr(value, "values") else value
        for name, value in found.items()
    }


def test_each_request_has_a_span_under_the_clients_own(
    received: tuple[str, queue.Queue[Any]], model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, spans = received
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    options = ("--otlp-traces-endpoint", url, "--served-model-name", "tiny")
    with served(model_folder("llama"), *options, keys=None) as server, server.client(None) as client:
        before = time.time_ns()
        header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        first = client.post("/v1/completions", json={"model": "tiny", **GREEDY, "n": 2}, headers=header)
        found = [spans.get(timeout=30) for _ in range(2)]
        with client.stream("POST", "/v1/completions", json={"model": "tiny", **GREEDY, "stream": True}) as stream:
            assert stream.read()
        found.append(spans.get(timeout=30))
        lm = LM.connect(server.url)
        lm.generate(["w3 w14 w15"], SamplingParams(temperature=0, max_tokens=8))
        found.append(spans.get(timeout=30))
        after = time.time_ns()
    assert first.status_code == 200
    usage = first.json()["usage"]
    for resource, span in found:
        said = values_of(span.attributes)
        assert values_of(resource.attributes)["service.name"] == "pymllm-interp"
        assert (span.name, said["gen_ai.request.model"]) == ("llm_request", "tiny")
        assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] and said["gen_ai.usage.output_tokens"] == 8
        assert said["gen_ai.response.finish_reasons"] == ["length"]
        assert 0 < said["gen_ai.latency.time_to_first_token"] <= said["gen_ai.latency.e2e"]
        assert before - 10**9 < span.start_time_unix_nano < span.end_time_unix_nano < after
    parents = [(span.trace_id.hex(), span.parent_span_id.hex()) for _, span in found]
    assert parents[:2] == [(TRACE, PARENT)] * 2
    assert parents[2][0] != TRACE and parents[2][1] == ""


@pytest.mark.parametrize("accepts", [False, True])
def test_a_dead_endpoint_changes_nothing(
    accepts: bool, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens, or somebody who never answers (whose server ends in test_server_start.py): requests are served."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setattr("pymllm_interp.server.http.spans.END_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        if not accepts:
            silent.close()
        with served(model_folder("llama"), "--otlp-traces-endpoint", endpoint, keys=None) as server:
            with server.client(None) as client:
                slowest = 0.0
                for _ in range(20):
                    started = time.monotonic()
                    assert client.post("/v1/completions", json=GREEDY).status_code == 200
                    slowest = max(slowest, time.monotonic() - started)
            assert slowest < 5, "below a batch's time limit: nobody waited for it"
            started = time.monotonic()
        assert time.monotonic() - started < 60


def test_without_the_option_none_of_it_is_imported() -> None:
    """Libraries of the server may import OpenTelemetry's API, which does nothing by itself."""
    script = """
import sys, pymllm_interp.server.serve
wrong = ("opentelemetry.sdk", "opentelemetry.exporter", "pymllm_interp.server.http.spans")
sys.exit(any(name.startswith(wrong) for name in sys.modules))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_address_that_is_no_url_is_one_line(
    model_folder: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model_folder("llama")), "--otlp-traces-endpoint", "x:1"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "expected a URL such as" in error
