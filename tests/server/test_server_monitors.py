"""Monitors over HTTP: of clients, with their scores in answers and streams, and the operator's, which clients do not see."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers_served import served
from helpers_server import CLOSE, KEYS, SECONDS, Server
from openai import OpenAI

from pymllm_interp import LM, SamplingParams
from pymllm_interp.captures import Capture
from pymllm_interp.cli import make_parser
from pymllm_interp.hooks.bind import fingerprint_of
from pymllm_interp.interventions import Monitor, Scale, Steer
from pymllm_interp.server.command import settings_of
from pymllm_interp.wire.failures import EngineError
from pymllm_interp.wire.specs import to_json

PROMPT = "w3 w14 w15 w9"
SITE, NEW = "resid_post.1", 8
SAMPLING: dict[str, Any] = {"temperature": 1.5, "seed": 3, "ignore_eos": True}
ASKED = {"max_tokens": NEW, "logit_bias": {"95": -100, "96": -100}, **SAMPLING}
ROUTES = ("completions", "chat/completions", "responses")
PARAMS = SamplingParams(max_tokens=NEW, logit_bias={95: -100.0, 96: -100.0}, **SAMPLING)
"""Sampling, so that a token is not repeated; none of the special ones."""


def body_of(route: str, **more: Any) -> dict[str, Any]:
    """The body of a request with one prompt, for a route of OpenAI's."""
    given = {
        "completions": {"prompt": PROMPT},
        "chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
        "responses": {"input": PROMPT, "max_output_tokens": NEW},
    }[route]
    asked = {name: value for name, value in ASKED.items() if route != "responses" or name != "max_tokens"}
    return {**asked, **given, **more}


def post(server: Server, route: str, key: str = "declared", **more: Any) -> dict[str, Any]:
    with server.client(key) as client:
        answer = client.post(f"/v1/{route}", json=body_of(route, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: Server, route: str, key: str = "declared", **more: Any) -> bytes:
    """The bytes of a stream."""
    with server.client(key) as client:
        answer = client.post(f"/v1/{route}", json=body_of(route, stream=True, **more))
    assert answer.status_code == 200, answer.text
    return answer.content


def result_of(route: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The choice, or the response."""
    return answer if route == "responses" else answer["choices"][0]


def text_of(route: str, answer: dict[str, Any]) -> str:
    found = result_of(route, answer)
    if route == "responses":
        return found["output"][0]["content"][0]["text"]
    return found["text"] if route == "completions" else found["message"]["content"]


def events_of(raw: bytes) -> list[dict[str, Any]]:
    data = re.findall(rb"^data: (.*)$", raw, re.M)
    return [json.loads(one) for one in data if one != b"[DONE]"]


def behind(own: Wanted, raw: bytes) -> list[str]:
    """Words behind the stop that some bytes have."""
    assert all(re.search(word.encode() + rb"(?!\d)", raw) for word in own.words[:4])
    return [word for word in own.words[4:] if re.search(word.encode() + rb"(?!\d)", raw)]


class Wanted:
    """A probe, and a threshold above which its score first is at the generated token `after`, of a route's text."""

    def __init__(self, lm: LM, prompt: Any, after: int = 3) -> None:
        out = lm.generate([prompt], PARAMS, capture=[Capture(SITE, dtype="float32")])[0]
        self.prompt_len = len(out.prompt_token_ids)
        self.states, self.ids = out.activations[SITE], out.token_ids
        self.words = [lm.tokenizer.decode([token]) for token in out.token_ids]
        assert len(set(self.ids)) == len(self.ids), f"{prompt}, {self.words}: a token says where it is from"
        generator = torch.Generator().manual_seed(0)
        while True:
            self.probe = torch.randn(self.states.shape[1], generator=generator)
            scores = (self.states @ self.probe)[self.prompt_len :]
            rest = scores[:after].max()
            if scores[after] - rest > 0.1:
                break
        self.threshold = float((scores[after] + rest) / 2)
        self.kept = self.ids[: after + 1]

    def monitor(self, **more: Any) -> dict[str, Any]:
        return {
            "site": SITE, "probe": self.probe.tolist(), "threshold": self.threshold, "name": "m", "positions": "generated",
        } | more  # fmt: skip


@pytest.fixture(scope="module")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keys")
    with served(served_folder, "--allow-code-from", "code", "--operator", "code", folder=folder) as found:
        yield found


@pytest.fixture(scope="module")
def lm(server: Server) -> Iterator[LM]:
    with LM.connect(server.url, api_key=KEYS["declared"]) as found:
        yield found


@pytest.fixture(scope="module")
def wanted(lm: LM) -> dict[str, Wanted]:
    chat = Wanted(lm, f"{PROMPT} w1")
    return {"completions": Wanted(lm, PROMPT), "chat/completions": chat, "responses": chat}


# -- clients' ------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_scores_are_those_of_the_states(route: str, server: Server, wanted: dict[str, Wanted]) -> None:
    own = wanted[route]
    monitors = [own.monitor(op="monitor"), {"site": SITE, "probe": own.probe.tolist(), "reduce": "max"}]
    found = result_of(route, post(server, route, monitors=monitors))
    scored = found["pymllm"]["monitors"]
    whole = own.states @ own.probe
    assert scored.keys() == {"m", SITE}
    assert scored[SITE]["positions"] == list(range(len(whole))) and scored["m"]["positions"] == list(
        range(own.prompt_len, len(whole))
    )
    torch.testing.assert_close(torch.tensor(scored[SITE]["scores"]), whole, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(torch.tensor(scored[SITE]["values"]), whole.cummax(0).values, rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(torch.tensor(scored["m"]["scores"]), whole[own.prompt_len :], rtol=CLOSE, atol=CLOSE)
    above = [
        p for p, score in zip(scored["m"]["positions"], scored["m"]["scores"], strict=True) if score > own.threshold
    ]
    assert scored["m"]["fired"] == above and scored["m"]["fired"][0] == own.prompt_len + 3
    assert scored["m"]["threshold"] == own.threshold and not scored["m"]["stopped"]
    assert "scores" not in found["pymllm"], "those are a stream's"


@pytest.mark.parametrize("route", ROUTES)
def test_a_stop_ends_the_answer(route: str, server: Server, wanted: dict[str, Wanted]) -> None:
    own = wanted[route]
    answer = post(server, route, monitors=[own.monitor(then="stop")])
    found, name = result_of(route, answer), "output_tokens" if route == "responses" else "completion_tokens"
    assert text_of(route, answer) == "".join(own.words[:4]) and answer["usage"][name] == 4
    assert found["pymllm"]["monitors"]["m"]["stopped"]
    if route == "responses":
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "monitor"})
    else:
        assert (found["finish_reason"], found["stop_reason"]) == ("monitor", "m")


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_has_the_scores_and_nothing_behind_a_stop(
    route: str, server: Server, wanted: dict[str, Wanted]
) -> None:
    own = wanted[route]
    raw = streamed(server, route, monitors=[own.monitor(then="stop")])
    assert not behind(own, raw), "a word behind the stop was sent"
    events = events_of(raw)
    if route == "responses":
        texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        pieces, end = [event.get("pymllm", {}) for event in events], events[-1]["response"]
        assert events[-1]["type"] == "response.incomplete" and end["incomplete_details"] == {"reason": "monitor"}
        done = [event for event in events if event["type"] == "response.output_text.done"]
        assert [event["text"] for event in done] == ["".join(texts)]
    else:
        choices = [event["choices"][0] for event in events]
        texts = [choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices]
        pieces, end = [choice.get("pymllm", {}) for choice in choices], choices[-1]
        assert (end["finish_reason"], end["stop_reason"]) == ("monitor", "m")
        assert raw.endswith(b"data: [DONE]\n\n") and all(choice["finish_reason"] is None for choice in choices[:-1])
    assert "".join(texts) == "".join(own.words[:4])
    result = end["pymllm"]["monitors"]["m"]
    scores = [pair for piece in pieces for pair in piece.get("scores", {}).get("m", [])]
    assert scores == [list(pair) for pair in zip(result["positions"], result["scores"], strict=True)]
    assert [position - own.prompt_len for position, _ in scores] == [0, 1, 2, 3] and result["stopped"]
    assert sum("scores" in piece for piece in pieces) > 1, "they come with the tokens"


def test_the_official_client_reads_the_answers(server: Server, wanted: dict[str, Wanted]) -> None:
    own = wanted["chat/completions"]
    more = {name: ASKED[name] for name in ("logit_bias", "seed", "ignore_eos")}
    monitors: Any = {"monitors": [own.monitor(then="stop")], **more}
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["declared"], timeout=SECONDS, max_retries=0) as api:
        name, messages = api.models.list().data[0].id, [{"role": "user", "content": PROMPT}]
        asked: Any = {"model": name, "temperature": 1.5, "extra_body": monitors}
        chunks = list(api.chat.completions.create(messages=messages, max_tokens=NEW, stream=True, **asked))
        assert chunks[-1].choices[0].finish_reason == "monitor"
        events = list(api.responses.create(input=PROMPT, max_output_tokens=NEW, stream=True, **asked))
        scores = [pair for event in events for pair in getattr(event, "pymllm", {}).get("scores", {}).get("m", [])]
        final: Any = events[-1].response
        assert len(scores) == 4 and final.status == "incomplete" and final.incomplete_details.reason == "monitor"
        more = api.responses.create(input="w5", previous_response_id=final.id, max_output_tokens=2, model=name)
        assert more.usage.output_tokens == 2, "what a monitor ended can be continued"


def test_ops_behind_a_monitor_are_in_the_receipt(server: Server, wanted: dict[str, Wanted]) -> None:
    own = wanted["completions"]
    op = {"op": "steer", "site": "resid_post.0", "vector": own.probe.tolist(), "scale": 9.0}
    found = post(server, "completions", monitors=[own.monitor(then=op)], interventions=[op | {"scale": 0.01}])[
        "choices"
    ][0]
    first, second = found["receipt"]["interventions"]
    assert first["monitor"] == "m" if "monitor" in first else second["monitor"] == "m"
    assert sum("monitor" in one for one in (first, second)) == 1
    assert {one["generated_rows"] for one in (first, second)} == {NEW - 1, NEW - 5}


def test_a_remote_lm_has_the_outputs_of_a_local_one(lm: LM, lm_of: Any, wanted: dict[str, Wanted]) -> None:
    own, local = wanted["completions"], lm_of("llama")
    monitors = [
        Monitor(SITE, own.probe, own.threshold, "stop", "m", positions="generated"),
        Monitor("resid_post.0", own.probe, reduce="ewma"),
    ]
    if not getattr(local, "is_remote", False):
        (here,), (there,) = (one.generate([PROMPT], PARAMS, monitors=monitors) for one in (local, lm))
        assert (there.token_ids, there.finish_reason) == (here.token_ids, here.finish_reason) == (own.kept, "monitor")
        for name, scores in here.monitors.items():
            found = there.monitors[name]
            assert found.fired == scores.fired and found.stopped == scores.stopped
            torch.testing.assert_close(found.values, scores.values, rtol=CLOSE, atol=CLOSE)
    pieces = list(lm.stream(PROMPT, PARAMS, monitors=monitors))
    assert [token for piece in pieces for token in piece.token_ids] == own.kept
    pairs = [pair for piece in pieces for pair in piece.scores.get("m", [])]
    found = pieces[-1].monitors["m"]
    assert pairs == list(zip(found.positions.tolist(), found.scores.tolist(), strict=True)) and len(pairs) == 4
    with pytest.raises(ValueError, match="a function is not sent to a server"):
        lm.generate([PROMPT], PARAMS, monitors=[Monitor(SITE, own.probe, then=print)])


def test_a_score_that_is_not_finite_is_null(server: Server, lm: LM, wanted: dict[str, Wanted]) -> None:
    huge = [3e38] * len(wanted["completions"].probe)
    choice = post(server, "completions", monitors=[{"site": SITE, "probe": huge}])["choices"][0]
    scores = choice["pymllm"]["monitors"][SITE]["scores"]
    assert None in scores
    events = events_of(streamed(server, "completions", monitors=[{"site": SITE, "probe": huge}]))
    pairs = [pair for event in events for pair in event["choices"][0].get("pymllm", {}).get("scores", {}).get(SITE, [])]
    assert [score for _, score in pairs] == scores
    out = lm.generate([PROMPT], PARAMS, monitors=[Monitor(SITE, huge)])[0]
    assert [None if math.isnan(score) else score for score in out.monitors[SITE].scores.tolist()] == scores
    list(lm.stream(PROMPT, PARAMS, monitors=[Monitor(SITE, huge)]))


WRONG: list[tuple[Any, str]] = [
    ([{"site": SITE, "probe": [1.0, 2.0]}], "has 2 values"),
    ([{"site": SITE}], "monitors[0]: Monitor needs 'probe'"),
    ([{"op": "steer", "site": SITE, "vector": [1.0]}], "monitors[0]: op is 'steer'; expected one of monitor"),
    ([{"site": SITE, "probe": [1.0], "treshold": 1}], "monitors[0]: Monitor has no field 'treshold'"),
    ([{"site": SITE, "probe": [1.0], "then": "lora:x"}], "then='lora:x'"),
    ([{"site": SITE, "probe": [1.0], "then": {"op": "monitor", "site": SITE, "probe": [1.0]}}], "behind a monitor"),
    ([{"site": SITE, "probe": "nowhere"}], "nowhere"),
    ([{"site": SITE, "probe": {"sae": "none", "feature": 1}}], "none"),
    ([{"site": SITE, "probe": [1.0], "threshold": "high"}], "threshold"),
    ([{"site": SITE, "probe": [0.5] * 72, "name": f"{i}"} for i in range(65)], "65 monitors; at most 64"),
    ([{}] * 1025, "at most 1024"),
    ([{"site": SITE, "probe": [0.5] * 64, "name": "server:x"}], "names that begin with 'server:' are the server's"),
    ([{"site": SITE, "probe": [1.0], "positions": list(range(100000))}], "positions; the context"),
    ("resid_post.1", "monitors"),
]


@pytest.mark.parametrize(("monitors", "message"), WRONG)
def test_what_is_wrong_is_said(monitors: Any, message: str, server: Server) -> None:
    with server.client("declared") as client:
        answer = client.post("/v1/completions", json=body_of("completions", monitors=monitors))
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_a_threshold_that_is_no_number_and_a_million_monitors(server: Server) -> None:
    with server.client("declared") as client:
        for given in (
            f'[{{"site": "{SITE}", "probe": {[0.5] * 64}, "threshold": NaN}}]',
            "[" + "{}," * 1_000_000 + "{}]",
        ):
            content = json.dumps(body_of("completions"))[:-1] + f', "monitors": {given}}}'
            answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400 and len(answer.text) < 1000, answer.text


@pytest.mark.parametrize("route", [*ROUTES, "interp/generate"])
def test_monitors_need_the_right_to_declare(route: str, server: Server, wanted: dict[str, Wanted]) -> None:
    monitors: list[Any] = [{"site": SITE, "probe": wanted["completions"].probe.tolist()}]
    if route == "interp/generate":
        body: dict[str, Any] = {"prompts": [[1, 2]], "params": [{"max_tokens": 2}], "monitors": [monitors]}
    else:
        body = body_of(route, monitors=monitors)
    with server.client("plain") as client:
        assert client.post(f"/v1/{route}", json=body).status_code == 403
    with server.client("declared") as client:
        answer = client.post(f"/v1/{route}", json=body)
        assert answer.status_code == 200 and SITE.encode() in answer.content


# -- the operator's -------------------------------------------------------------------------


def operator_file(folder: Path, own: Wanted, *others: dict[str, Any]) -> str:
    """A file with a monitor "m" that stops, and others."""
    file = folder / "monitors.json"
    file.write_text(json.dumps([own.monitor(then="stop"), *others]))
    return str(file)


@pytest.fixture(scope="module")
def steering(wanted: dict[str, Wanted]) -> dict[str, Any]:
    """A monitor that steers from the second generated token on."""
    op = Steer("resid_post.0", wanted["completions"].probe, scale=0.01)
    return to_json(Monitor(SITE, wanted["completions"].probe, -1e9, [op], "hiddenone", positions="generated"))


@pytest.fixture(scope="module")
def guarded(
    served_folder: Path, tmp_path_factory: pytest.TempPathFactory, wanted: dict[str, Wanted], steering: dict[str, Any]
) -> Iterator[Server]:
    """A server with hidden monitors."""
    folder = tmp_path_factory.mktemp("guarded")
    file = operator_file(folder, wanted["completions"], steering)
    with served(served_folder, "--monitor", file, "--allow-code-from", "code", folder=folder) as found:
        yield found


def test_a_hidden_monitor_stops_and_is_not_seen(
    guarded: Server, server: Server, wanted: dict[str, Wanted], steering: Any
) -> None:
    own = wanted["completions"]
    same = post(server, "completions", monitors=[own.monitor(then="stop"), steering])
    for key in ("plain", "declared", "code"):
        answer = post(guarded, "completions", key)
        choice = answer["choices"][0]
        assert choice["text"] == same["choices"][0]["text"] and answer["usage"]["completion_tokens"] == 4
        assert (choice["finish_reason"], choice["stop_reason"]) == ("content_filter", None)
        assert choice.keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    raw = streamed(guarded, "completions", "plain")
    assert not behind(own, raw)
    frames = {"prompts": [own_ids(guarded)], "params": [ASKED], "stream": True}
    with guarded.client("plain") as client:
        raw += client.post("/v1/interp/generate", json=frames).raise_for_status().content
        paths = ("/v1/interp/capabilities", "/v1/interp/stats", "/openapi.json", "/status")
        told = b"".join(client.get(path).content for path in paths)
    assert not [word for word in (b"pymllm", b"scores", b"monitor", b"receipt") if word in raw]
    assert b"hiddenone" not in told and b"server:" not in told
    assert b"content_filter" in raw


def own_ids(server: Server) -> list[int]:
    with server.client("plain") as client:
        return client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]


def test_a_response_that_a_hidden_monitor_ends_is_filtered(
    served_folder: Path, tmp_path: Path, wanted: dict[str, Wanted]
) -> None:
    file = operator_file(tmp_path, wanted["responses"])
    with served(served_folder, "--monitor", file, folder=tmp_path) as found:
        with OpenAI(base_url=f"{found.url}/v1", api_key=KEYS["plain"], timeout=SECONDS, max_retries=0) as api:
            more = {name: ASKED[name] for name in ("logit_bias", "seed", "ignore_eos")}
            asked: Any = {"model": api.models.list().data[0].id, "temperature": 1.5, "extra_body": more}
            response = api.responses.create(input=PROMPT, max_output_tokens=NEW, **asked)
            assert response.status == "incomplete" and response.incomplete_details.reason == "content_filter"
            assert "server:" not in response.model_dump_json() and response.usage.output_tokens == 4
            chat = api.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], max_tokens=NEW, **asked)
            assert chat.choices[0].finish_reason == "content_filter"


def test_clients_have_their_own_beside_hidden_ones(guarded: Server, wanted: dict[str, Wanted]) -> None:
    own = wanted["completions"]
    with LM.connect(guarded.url, api_key=KEYS["declared"]) as lm:
        mine, scale = Monitor(SITE, own.probe, 1e9, "stop", "m"), Scale("resid_post.2", 1.0 + 1e-4)
        (out,) = lm.generate([PROMPT], PARAMS, monitors=[mine], interventions=[scale], capture=[SITE])
        assert out.finish_reason == "content_filter" and out.token_ids == own.kept
        assert out.monitors.keys() == {"m"} and not out.monitors["m"].fired
        assert [applied.intervention for applied in out.receipt.interventions] == ["Scale"]
        assert out.receipt.spec == fingerprint_of([scale, mine], [Capture(SITE)])
        pieces = list(lm.stream(PROMPT, PARAMS, monitors=[mine]))
        assert {name for piece in pieces for name in piece.scores} == {"m"}
        assert pieces[-1].finish_reason == "content_filter" and pieces[-1].monitors.keys() == {"m"}
        assert lm.generate([PROMPT], PARAMS)[0].receipt is None
        assert "monitors" not in lm.engine.stats()
        with lm.trace(PROMPT):  # lowered: a request like others
            h = lm.model.layers[1].output.save()
        assert h.shape[-2] == own.prompt_len
    with LM.connect(guarded.url, api_key=KEYS["code"], lower_traces="off") as lm:
        with lm.trace(PROMPT):
            h = lm.model.layers[1].output
            with lm.lm_head.output.sum().backward():
                grad = h.grad.save()
        assert grad.shape[-1] == len(own.probe)


def series_of(server: Server, name: str) -> dict[str, float]:
    """Monitor -> value."""
    text = httpx.get(f"{server.url}/metrics", timeout=SECONDS).text
    found = re.findall(rf'^pymllm_interp_{name}{{monitor="(\w+)"[^}}]*}} ([\d.e+-]+)$', text, re.M)
    return {monitor: float(value) for monitor, value in found}


def test_metrics_count_the_operators_by_name_and_clients_as_one(guarded: Server, wanted: dict[str, Wanted]) -> None:
    own, names = wanted["completions"], ("fires_total", "stops_total", "score_count", "score_sum")
    before = {name: series_of(guarded, f"monitor_{name}") for name in names}
    mine = [own.monitor(name=f"mine {i}", threshold=-1e9, positions="prompt") for i in range(3)]
    post(guarded, "completions", monitors=mine)
    post(guarded, "completions")
    after = {name: series_of(guarded, f"monitor_{name}") for name in names}
    grown = {name: {monitor: after[name][monitor] - before[name][monitor] for monitor in after[name]} for name in names}
    assert grown["fires_total"] == {"m": 2, "hiddenone": 8, "clients": 3 * own.prompt_len}
    assert grown["stops_total"] == {"m": 2, "hiddenone": 0, "clients": 0}
    assert grown["score_count"] == {"m": 8, "hiddenone": 8, "clients": 3 * own.prompt_len}
    prompt = float((own.states[: own.prompt_len] @ own.probe).sum())
    assert grown["score_sum"]["clients"] == pytest.approx(3 * prompt, rel=1e-3, abs=1e-3)


def test_visible_monitors_are_in_the_answers(served_folder: Path, tmp_path: Path, wanted: dict[str, Wanted]) -> None:
    own = wanted["completions"]
    file = operator_file(tmp_path, own)
    with served(served_folder, "--monitor", file, "--monitor-visible", folder=tmp_path) as found:
        choice = post(found, "completions", "plain")["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("monitor", "server:m")
        scores = choice["pymllm"]["monitors"]["server:m"]
        assert scores["stopped"] and scores["fired"] == [own.prompt_len + 3] and choice["receipt"]["spec"] == ""
        both = post(found, "completions", monitors=[own.monitor(threshold=1e9)])["choices"][0]
        assert both["pymllm"]["monitors"].keys() == {"server:m", "m"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "expected a list of monitors"),
        ("[]", "expected a list of monitors"),
        ("[{'site': 1}", "neither JSON nor YAML"),
        ('[{"site": "resid_post.0", "probe": [1]}]', "a name of its own"),
        ('[{"name": "clients"}]', "other than 'clients'"),
        ("- name: a\n- name: a\n", "a name of its own"),
    ],
)
def test_a_file_that_is_wrong_is_refused_at_once(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        settings_of(make_parser().parse_args(["serve", "demo", "--monitor", str(tmp_path / "file")]))
    with pytest.raises(ValueError, match="there are no monitors"):
        settings_of(make_parser().parse_args(["serve", "demo", "--monitor-visible"]))


def test_a_monitor_that_the_model_refuses_ends_the_start(served_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("- name: narrow\n  site: resid_post.0\n  probe: [1.0, 2.0]\n")
    with pytest.raises((EngineError, AssertionError), match=r"--monitor.*has 2 values"):
        with served(served_folder, "--monitor", str(tmp_path / "file"), folder=tmp_path):
            pass
