"""Captured rows in streams over HTTP: completions, chats, responses and `LM.connect`, and clients that read slowly or leave."""

from __future__ import annotations

import base64
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from helpers_served import served
from helpers_server import CLOSE, KEYS, SECONDS, Server
from openai import OpenAI

from pymllm_interp import LM, Capture, SamplingParams
from pymllm_interp.captures import Activations, Lens
from pymllm_interp.hooks.captures import streamed
from pymllm_interp.server.process import outbox

PROMPT, NEW = "w3 w14 w15 w9", 6
SITES = ["resid_post.0", "resid_post.1", "resid_post.2", "mlp_out.1"]
CAPTURE = [
    {"site": "resid_post.*", "reduce": {"type": "lens", "top_k": 2}, "stream": True},
    {"site": "mlp_out.1", "stream": True}, "attn_out.0",
]  # fmt: skip
SPECS = [Capture("resid_post.*", reduce=Lens(top_k=2), stream=True), Capture("mlp_out.1", stream=True), "attn_out.0"]
ROUTES = ("completions", "chat/completions", "responses")
PARAMS = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(served_folder, folder=tmp_path_factory.mktemp("keys")) as found:
        yield found


@pytest.fixture(scope="module")
def lm(server: Server) -> Iterator[LM]:
    with LM.connect(server.url, api_key=KEYS["declared"]) as found:
        yield found


def body_of(route: str, **more: Any) -> dict[str, Any]:
    given = {
        "completions": {"prompt": PROMPT, "max_tokens": NEW, "return_token_ids": True},
        "chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": NEW},
        "responses": {"input": PROMPT, "max_output_tokens": NEW},
    }[route]
    return {"temperature": 0, "ignore_eos": True, "stream": True, "capture": CAPTURE, **given, **more}


def events_of(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(one) for one in re.findall(rb"^data: (.*)$", raw, re.M) if one != b"[DONE]"]


def captured(found: dict[str, Any]) -> Activations:
    data = base64.b64decode(found["data"])
    assert found["format"] == "safetensors" and found["bytes"] == len(data)
    rows = Activations.from_bytes(data)
    assert found["sites"] == {site: list(rows[site].shape) for site in rows}
    return rows


def same(parts: Sequence[Activations], whole: Activations, sites: Sequence[str] = SITES) -> None:
    """The parts' rows, one after the other, are those of the whole."""
    assert {site for part in parts for site in part} == set(sites)
    for site in sites:
        own = [part for part in parts if site in part]
        torch.testing.assert_close(torch.cat([part[site] for part in own]), whole[site], rtol=CLOSE, atol=CLOSE)
        for name in ("positions", "token_ids", *(["indexes"] if site in whole.indexes else [])):
            assert torch.equal(torch.cat([getattr(part, name)[site] for part in own]), getattr(whole, name)[site])


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_has_the_rows_of_its_tokens(route: str, server: Server, lm: LM) -> None:
    with server.client("declared") as client:
        before = server.metric("captured_bytes_total")
        answer = client.post(f"/v1/{route}", json=body_of(route))
        assert answer.status_code == 200, answer.text
    events = events_of(answer.content)
    if route == "responses":
        found = [event["captures"] for event in events if event["type"] == "pymllm.captures"]
        whole = captured(events[-1]["response"]["activations"])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    else:
        choices = [event["choices"][0] for event in events if event["choices"]]
        found = [choice["pymllm"]["captures"] for choice in choices if "captures" in choice.get("pymllm", {})]
        whole = captured(choices[-1]["activations"])
    parts = [captured(one) for one in found]
    same(parts, whole)
    assert len(parts) == NEW and set(whole) == {*SITES, "attn_out.0"}
    assert [len(part.positions["mlp_out.1"]) for part in parts[1:]] == [1] * (NEW - 1), "a row with each token"
    assert server.metric("captured_bytes_total") > before + sum(one["bytes"] for one in found)
    for one, part in zip(found, parts, strict=True):
        named = {int(token) for site in SITES[:3] for token in part.indexes[site].flatten()}
        assert one["tokens"] == {str(token): lm.tokenizer.decode([token]) for token in named}


def test_several_completions_have_their_own_rows(server: Server) -> None:
    body = body_of("completions", prompt=[PROMPT, "w5"], n=2, temperature=1.3, seed=3)
    with server.client("declared") as client:
        events = events_of(client.post("/v1/completions", json=body).content)
    for index in range(4):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        parts = [captured(one["pymllm"]["captures"]) for one in choices if "captures" in one.get("pymllm", {})]
        whole = captured(choices[-1]["activations"])
        same(parts, whole)
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert whole.token_ids["mlp_out.1"].tolist() == choices[0]["prompt_token_ids"] + ids[:-1]


def test_an_answer_without_a_stream_has_the_result_alone(server: Server) -> None:
    with server.client("declared") as client:
        found = client.post("/v1/completions", json=body_of("completions", stream=False)).json()["choices"][0]
        refused = client.post("/v1/completions", json=body_of("completions", capture=[{"site": "embed", "stream": 1}]))
    assert "pymllm" not in found and set(captured(found["activations"])) == {*SITES, "attn_out.0"}
    assert refused.status_code == 400 and "stream" in refused.json()["error"]["message"]
    with server.client("plain") as client:
        assert client.post("/v1/completions", json=body_of("completions")).status_code == 403


def test_the_official_client_reads_the_events(server: Server) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["declared"], timeout=SECONDS, max_retries=0) as api:
        asked: Any = {"model": api.models.list().data[0].id, "extra_body": {"capture": CAPTURE, "ignore_eos": True}}
        events: list[Any] = list(
            api.responses.create(input=PROMPT, max_output_tokens=NEW, temperature=0, stream=True, **asked)
        )
        parts = [captured(event.captures) for event in events if event.type == "pymllm.captures"]
        same(parts, captured(events[-1].response.activations))
        messages: Any = [{"role": "user", "content": PROMPT}]
        chunks: list[Any] = list(
            api.chat.completions.create(messages=messages, max_tokens=NEW, temperature=0, stream=True, **asked)
        )
        choices = [chunk.choices[0] for chunk in chunks]
        parts = [
            captured(one.pymllm["captures"]) for one in choices if "captures" in (getattr(one, "pymllm", None) or {})
        ]
        same(parts, captured(choices[-1].activations))


def test_a_remote_lm_has_the_rows_of_a_local_one(lm: LM, lm_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in many pieces, of which few may be on their way at a time."""
    local = list(lm_of("llama").stream(PROMPT, PARAMS, capture=SPECS))
    for limits in ({}, {"part": 1, "unread": 1}):
        if limits:
            monkeypatch.setattr(streamed, "PART_BYTES", limits["part"])
            monkeypatch.setattr(outbox, "UNREAD_BYTES", limits["unread"])
        pieces = list(lm.stream(PROMPT, PARAMS, capture=SPECS))
        parts = [piece.captures for piece in pieces if piece.captures is not None]
        assert [token for piece in pieces for token in piece.token_ids] == [t for p in local for t in p.token_ids]
        same(parts, pieces[-1].activations)
        same(parts, local[-1].activations)
        assert len(parts) == (4 + NEW - 1 if limits else NEW)
    (out,) = lm.generate_with_lens([PROMPT], PARAMS, lens=Lens(top_k=2))
    pieces = list(lm.generate_with_lens(PROMPT, PARAMS, lens=Lens(top_k=2), stream=True))
    same([piece.captures for piece in pieces if piece.captures is not None], out.activations, SITES[:3])


def test_a_client_that_does_not_read_holds_up_nobody(server: Server, lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its rows a few are on their way; the rest wait as positions. When it leaves, its request ends and nothing is kept."""
    sent: list[int] = []
    made = outbox._states
    monkeypatch.setattr(outbox, "_states", lambda part: sent.append(1) or made(part))
    monkeypatch.setattr(streamed, "PART_BYTES", 1)
    monkeypatch.setattr(outbox, "UNREAD_BYTES", 60_000)
    sites = (
        "resid_post.*",
        "resid_mid.*",
        "attn_in.*",
        "q.*",
        "k.*",
        "v.*",
        "z.*",
        "attn_out.*",
        "mlp_in.*",
        "mlp_out.*",
    )
    capture = [{"site": site, "stream": True} for site in sites]
    body = json.dumps(
        body_of("completions", prompt=[5] * 60, max_tokens=60, n=8, temperature=1, capture=capture)
    ).encode()
    where = urlsplit(server.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((where.hostname, where.port))
        client.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {KEYS['declared']}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        deadline, before = time.monotonic() + SECONDS, -1
        while not sent or len(sent) != before:  # until no more of them come
            assert time.monotonic() < deadline
            before = len(sent)
            time.sleep(1)
        assert 2 < len(sent) < 8 * 80, (
            "there are eight times 119 positions, and they do not fit into the socket's buffers"
        )
        assert lm.generate([PROMPT], PARAMS)[0].finish_reason == "length"
        assert len(sent) == before
    server.wait_until_idle()
    assert lm.generate([PROMPT], PARAMS)[0].finish_reason == "length"
