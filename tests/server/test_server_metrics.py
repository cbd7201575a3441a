"""`/metrics`: what requests are counted as, which names and labels there are, and that clients cannot add any."""

from __future__ import annotations

import asyncio
import random
import re
import string
from collections import Counter
from urllib.parse import quote

import httpx
import pytest
from helpers_server import Server

from pymllm_interp import LM, SamplingParams
from pymllm_interp.server.engines.replicas_door import ReplicasDoor
from pymllm_interp.server.engines.roster import LinkKeys, Replica
from pymllm_interp.server.http.families import FAMILIES, REASONS
from pymllm_interp.server.http.metrics import Histogram, Metrics
from pymllm_interp.server.settings import ServeSettings

SERIES = re.compile(r'pymllm_interp_(\w+)\{((?:\w+="(?:[^"\\\n]|\\[\\"n])*",?)+)\} ([\d.e+-]+)')
PARTS = ("_bucket", "_sum", "_count")


def series_of(text: str) -> dict[tuple[str, str], float]:
    """(name, labels) -> value; all lines are of the format."""
    found = [SERIES.fullmatch(line) for line in text.splitlines() if not line.startswith("#")]
    assert all(found)
    return {(match[1], match[2]): float(match[3]) for match in found if match}


def metrics_of(server: Server) -> str:
    return httpx.get(f"{server.url}/metrics", timeout=600).text


def paths(server: Server) -> set[str]:
    return set(re.findall(r'http_requests_total\{path="([^"]*)"', metrics_of(server)))


class Differences:
    """How much the metrics have grown, summed over labels; `labels` keeps only series with a text in them."""

    def __init__(self, server: Server) -> None:
        self._server, self._before = server, series_of(metrics_of(server))

    def __call__(self, name: str, labels: str = "") -> float:
        return sum(
            value - self._before.get(key, 0)
            for key, value in series_of(metrics_of(self._server)).items()
            if key[0] == name and labels in key[1]
        )


def test_whole_requests_streams_and_remote_calls_are_counted_alike(server: Server):
    """The histograms have one entry a request, and their sums are what clients are told of lengths."""
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    grown = Differences(server)
    with server.client("declared") as client:
        used = client.post("/v1/completions", json=body | {"n": 2, "seed": 1, "temperature": 1}).json()["usage"]
        assert client.post("/v1/completions", json=body | {"stream": True}).status_code == 200
    with LM.connect(server.url, api_key="code-key-0000") as lm:
        lm.generate([[1, 2], [3, 4, 5, 6]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        pieces = list(lm.stream([7, 8, 9], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)))
    assert used["completion_tokens"] == 10 and len([token for piece in pieces for token in piece.token_ids]) == 3
    requests = 2 + 1 + 2 + 1
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_time_per_output_token_seconds",
        "request_prompt_tokens", "request_generation_tokens",
    ):  # fmt: skip
        assert grown(f"{name}_count") == grown(f"{name}_bucket", 'le="+Inf"') == requests, name
    assert grown("inter_token_latency_seconds_count") == (5 - 1) + (3 - 1)
    assert grown("request_generation_tokens_sum") == grown("generation_tokens_total") == 10 + 5 + 4 + 4 + 3
    assert grown("request_prompt_tokens_sum") == 3 + 3 + 3 + 2 + 4 + 3  # a prompt for each of its n
    assert grown("prompt_tokens_total") == 3 + 3 + 2 + 4 + 3
    assert grown("request_success_total", 'finished_reason="length"') == grown("request_success_total") == requests
    latency, first = grown("e2e_request_latency_seconds_sum"), grown("time_to_first_token_seconds_sum")
    steps = grown("request_prefill_time_seconds_sum") + grown("request_decode_time_seconds_sum")
    assert 0 < first < latency and 0 < steps + grown("request_queue_time_seconds_sum") <= latency


def test_other_routes_are_no_generations(server: Server):
    grown = Differences(server)
    httpx.get(f"{server.url}/health")
    assert grown("http_request_duration_seconds_count") >= 1
    assert grown("e2e_request_latency_seconds_count") == grown("request_success_total") == 0


def test_ends_are_counted_by_their_reason(server: Server):
    """`stop` where a stop token came, `timeout`, and `abort` where the client left; other values cannot come."""
    body = {"prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    grown = Differences(server)
    with server.client("declared") as client:
        first = client.post("/v1/completions", json=body | {"max_tokens": 1}).json()["choices"][0]["token_ids"]
        client.post("/v1/completions", json=body | {"stop_token_ids": first})
        client.post("/v1/completions", json=body | {"timeout": 1e-6})
        with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 100, "stream": True}) as answer:
            next(answer.iter_bytes())
    server.wait_until_idle()
    ends = Counter({reason: grown("request_success_total", f'finished_reason="{reason}"') for reason in REASONS})
    ended = ends["abort"] + ends["length"]  # a short stream may have ended before the client left
    assert (ends["stop"], ends["timeout"], ended, ends["error"]) == (1, 1, 2, 0)
    assert set(re.findall('finished_reason="(.*?)"', metrics_of(server))) == set(REASONS)


def test_all_series_have_a_name_a_help_a_type_and_the_model(server: Server):
    text = metrics_of(server)
    heads = re.findall(r"^# HELP pymllm_interp_(\w+) (.+)\n# TYPE pymllm_interp_(\w+) (\w+)$", text, re.M)
    assert [(name, FAMILIES[name].help, name, FAMILIES[name].kind) for name, *_ in heads] == heads
    assert len(heads) == len({name for name, *_ in heads}) == text.count("# HELP") == text.count("# TYPE")
    names = {name for name, _ in series_of(text)}
    histograms = {name for name in FAMILIES if FAMILIES[name].kind == "histogram"}
    assert {name for name in names if name not in FAMILIES} == {
        f"{name}{part}" for name in histograms for part in PARTS
    }
    (model,) = {re.search('model_name="(.*?)"', labels)[1] for _, labels in series_of(text)}  # pyright: ignore
    assert model == server.client().get("/v1/models").json()["data"][0]["id"]
    assert names >= {"kv_cache_usage_perc", "num_requests_running", "num_preemptions_total", "prefix_cache_hits_total"}


@pytest.mark.parametrize(("free", "used"), [(100, 0.0), (25, 0.75), (0, 1.0)])
def test_the_used_part_of_the_kv_cache(free: int, used: float):
    stats = dict.fromkeys(
        ("running", "waiting", "swapped", "traces", "steps", "overlapped_steps", "preempted", "moved_to_host", "block_seconds",
         "flat_logits"), 0
    )  # fmt: skip
    stats |= {"kv_tokens": 100, "free_kv_tokens": free, "execution": {}}
    found = series_of(Metrics("m").text({"": stats}, {}, {}))
    assert found["kv_cache_usage_perc", 'model_name="m"'] == used


def test_buckets_are_cumulative_and_their_bounds_belong_to_them():
    histogram = Histogram((1.0, 2.0, 5.0))
    for value, count in ((0.5, 1), (1.0, 1), (1.5, 3), (9.0, 2)):
        histogram.add(value, count)
    found = [(labels.get("le", name), value) for name, labels, value in histogram.samples("x")]
    assert found == [("1", 2), ("2", 5), ("5", 5), ("+Inf", 7), ("x_sum", 24.0), ("x_count", 7)]


def test_a_replica_that_is_down_is_shown_as_down():
    async def states() -> dict:
        engine = ReplicasDoor(ServeSettings(model={}, server={}, name="m"), LinkKeys.new(), follow=None)  # pyright: ignore
        engine.update([Replica.down("r0", draining=False), Replica.down("r1", draining=True)])
        found = engine.states()
        engine.update([])
        assert not engine.states()
        await engine.shutdown()
        return found

    found = series_of(Metrics("m").text({}, {}, asyncio.run(states())))
    assert found["replica_up", 'replica="r0",model_name="m"'] == found["replica_up", 'replica="r1",model_name="m"'] == 0
    assert found["replica_draining", 'replica="r1",model_name="m"'] == 1


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
    metrics = Metrics('m"')
    metrics.answers['a"b\\c\nd', 200] += 1
    (line,) = [
        line for line in metrics.text({}, {}, {}).splitlines() if line.startswith("pymllm_interp_http_requests_total{")
    ]
    assert line == r'pymllm_interp_http_requests_total{path="a\"b\\c\nd",status="200",model_name="m\""} 1'
