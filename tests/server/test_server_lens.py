"""`POST /v1/interp/lens`: the page's logit lens, as an ordinary request."""

from __future__ import annotations

import json
import socket

import pytest
import torch
from helpers_server import KEYS, Server

from pymllm_interp import LM

PROMPT = "w3 w14 w15 w9"
LENS = "/v1/interp/lens"


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT + " w1 w2 w5" * 35])
def test_the_lens_is_the_final_norm_and_head_of_each_layer(server: Server, prompt: str) -> None:
    """Of a long prompt, what is captured comes as a file."""
    with server.client("declared") as client:
        found = client.post(LENS, json={"prompt": prompt, "top": 8})
    assert found.status_code == 200, found.text
    files = server.metric("store_files")
    with LM.connect(server.url, api_key=KEYS["code"]) as lm:
        with lm.trace(prompt):
            probs = list().save()
            for layer in lm.model.layers:
                probs.append(torch.softmax(lm.lm_head(lm.model.norm(layer.output))[0].float(), -1))
        tokens = [lm.tokenizer.decode([token]) for token in lm.tokenizer(prompt)["input_ids"]]
        words = [[[lm.tokenizer.decode([t]) for t in row] for row in one.topk(8).indices.tolist()] for one in probs]
    answer = found.json()
    assert answer["tokens"] == tokens and files == 0
    assert [[[one["token"] for one in top] for top in row] for row in answer["layers"]] == words
    got = torch.tensor([[[one["prob"] for one in top] for top in row] for row in answer["layers"]])
    torch.testing.assert_close(got, torch.stack([one.topk(8).values for one in probs]), rtol=1e-4, atol=1e-6)


def test_a_lens_that_is_too_large_is_refused_by_name(server: Server) -> None:
    with server.client("declared") as client:
        for prompt, message in (
            ([1] * 129, "the prompt has 129 tokens, but the context holds 128 (max_model_len)"),
            ("w1 " * 5000, "15000 characters; the 128 tokens of the context (max_model_len)"),
            ([1] * 100_000, "a lens of 3 layers x 100000 positions x top=3 tokens; at most 262144"),
        ):
            answer = client.post(LENS, json={"prompt": prompt})
            assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    with server.client("plain") as client:
        assert client.post(LENS, json={"prompt": PROMPT}).status_code == 403


def test_a_client_that_leaves_ends_its_lens(server: Server) -> None:
    """It waits behind requests that run; once its client is gone, it does not run any more."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": [1] * 128, "top": 20}).encode()
    head = f"POST {LENS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {KEYS['declared']}\r\n"
    before = server.metric("disconnects_total")
    for _ in range(20):
        with socket.create_connection((host, int(port)), timeout=600) as connection:
            connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    server.wait_until_idle()
    assert server.metric("disconnects_total") > before
    assert server.metric("kv_tokens_free") == server.metric("kv_tokens") and server.metric("store_files") == 0
