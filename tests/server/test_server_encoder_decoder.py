"""Encoder-decoder models over HTTP and `LM.connect`: tokens, captures and traces are those of transformers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from conftest import VOCAB, tiny_tokenizer
from helpers_encoder_decoder import greedy, saved, states_of
from helpers_served import served
from helpers_server import KEYS, Server
from openai import OpenAI
from safetensors.torch import load, save
from transformers import PreTrainedModel

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.utils.arguments import PromptError

TEXT = {"t5": [0], "bart": [2]}
SOURCE, OTHER = [5, 9, 40, 41, 6], [7, 3, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LIMIT = 64


class Served(Server):
    """A server of a kind of model, which transformers has too."""

    kind: str
    model: PreTrainedModel


@pytest.fixture(scope="module", params=["t5", "bart"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    model = saved(request.param, folder)
    tiny_tokenizer().save_pretrained(folder)
    options = ["--option", f"max_model_len={LIMIT}", "--option", "cross_cache_tokens=256", "--allow-code-from", "code"]
    with served(folder, *options, folder=tmp_path_factory.mktemp("keys")) as found:
        found.kind, found.model = request.param, model  # pyright: ignore[reportAttributeAccessIssue]
        yield found  # pyright: ignore[reportReturnType]


def words(ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


def complete(server: Server, prompt: Any, key: str = "declared", **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    with server.client(key) as client:
        return client.post("/v1/completions", json=body)


def close(found: Any, wanted: torch.Tensor) -> None:
    scale = wanted.abs().max()
    torch.testing.assert_close(torch.as_tensor(found) / scale, wanted / scale, rtol=0, atol=2e-5)


def test_prompts_of_completions_are_the_encoders(server: Served) -> None:
    start, wanted = TEXT[server.kind], [greedy(server.model, ids, TEXT[server.kind], 6) for ids in (SOURCE, OTHER)]
    for prompts in ([words(SOURCE), words(OTHER)], [SOURCE, OTHER]):
        found = complete(server, prompts, key="plain").json()
        assert [choice["token_ids"] for choice in found["choices"]] == wanted
        assert found["choices"][0]["prompt_token_ids"] == start
        assert found["usage"]["prompt_tokens"] == len(SOURCE) + len(OTHER) + 2 * len(start)
    api = OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["plain"], max_retries=0)
    name, more = api.models.list().data[0].id, {"ignore_eos": True}
    how: dict[str, Any] = {
        "model": name,
        "prompt": words(SOURCE),
        "max_tokens": 6,
        "temperature": 0,
        "extra_body": more,
    }
    pieces = [piece.choices[0].text for piece in api.completions.create(**how, stream=True)]
    assert "".join(pieces) == api.completions.create(**how).choices[0].text == tiny_tokenizer().decode(wanted[0])


def test_hooks_of_both_sides_act_over_http(server: Served) -> None:
    vector = torch.randn(36, generator=torch.Generator().manual_seed(3))
    steer = {"op": "steer", "site": "encoder.resid_post.0", "vector": vector.tolist(), "scale": 4.0, "positions": [1]}
    sites = ["encoder.resid_post.1", "cross_attn_out.1"]
    choice = complete(server, SOURCE, interventions=[steer], capture=sites, return_token_ids=True).json()["choices"][0]
    assert complete(server, SOURCE).json()["choices"][0]["token_ids"] == greedy(
        server.model, SOURCE, TEXT[server.kind], 6
    )

    def edited(state: torch.Tensor) -> torch.Tensor:
        state = state.clone()
        state[0, 1] += 4 * vector
        return state

    read = TEXT[server.kind] + choice["token_ids"][:-1]
    wanted, logits = states_of(server.kind, server.model, SOURCE, read, {"encoder.resid_post.0": edited})
    assert choice["token_ids"] == logits.argmax(-1).tolist()
    states = load(base64.b64decode(choice["activations"]["data"]))
    for site in sites:
        close(states[site], wanted[site])


def test_a_connected_lm_sends_both_sides(server: Served) -> None:
    start = TEXT[server.kind] + [11, 12, 13]
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
        prompts: list[Any] = [SOURCE, {"encoder_prompt": words(OTHER), "decoder_prompt": start}, words(OTHER)]
        outs = lm.generate(prompts, GREEDY, capture=["encoder.resid_post.1", "resid_post.1"])
        for source, own, out in zip((SOURCE, OTHER, OTHER), (start[:1], start, start[:1]), outs, strict=True):
            assert out.token_ids == greedy(server.model, source, own, 6)
            wanted, _ = states_of(server.kind, server.model, source, own + out.token_ids[:-1])
            for site in ("encoder.resid_post.1", "resid_post.1"):
                close(out.activations[site], wanted[site])
        vector = torch.randn(36, generator=torch.Generator().manual_seed(4))
        steered = lm.generate(SOURCE, GREEDY, interventions=[Steer("encoder.resid_post.0", vector, scale=5)])[0]
        assert steered.receipt.interventions[0].prompt_rows == len(SOURCE)
        for prompt, message in (
            ({"decoder_prompt": start}, "no encoder_prompt"),
            ([5] * (LIMIT * 80), "positions for the encoder"),
            ({"encoder_prompt": SOURCE, "decoder_prompt": [VOCAB]}, "vocabulary"),
        ):
            with pytest.raises(PromptError, match=message):
                lm.generate(prompt, GREEDY)


def test_traces_over_a_connection_see_the_encoder(server: Served) -> None:
    wanted, logits = states_of(server.kind, server.model, SOURCE, TEXT[server.kind])
    with LM.connect(server.url, api_key=KEYS["code"]) as lm:
        if server.kind == "t5":
            with lm.trace(SOURCE):
                state = lm.encoder.block[1].output.save()
                head = lm.lm_head.output.save()
        else:
            with lm.trace(SOURCE):
                state = lm.model.encoder.layers[1].output.save()
                head = lm.lm_head.output.save()
    close((state[0] if isinstance(state, tuple) else state)[0], wanted["encoder.resid_post.1"])
    close(head[0] + getattr(server.model, "final_logits_bias", torch.zeros(1, 1)), logits)


def test_other_routes_answer_or_refuse_by_name(server: Served) -> None:
    with server.client("declared") as client:
        found = client.post("/tokenize", json={"prompt": words(SOURCE)}).json()
        assert found["tokens"] == SOURCE
        lens = client.post("/v1/interp/lens", json={"prompt": words(SOURCE), "top": 2})
        assert lens.status_code == (200 if server.kind == "t5" else 400), lens.text
        for route, body in (
            ("/v1/embeddings", {"input": words(SOURCE)}),
            ("/pooling", {"input": words(SOURCE)}),
            ("/score", {"text_1": words(SOURCE), "text_2": words(OTHER)}),
        ):
            answer = client.post(route, json=body)
            assert answer.status_code == 400 and "encoder-decoder" in answer.text, (route, answer.text)
    for fields in ({"echo": True}, {"truncate_prompt_tokens": 3}):
        answer = complete(server, words(SOURCE), **fields)
        assert answer.status_code == 400 and "encoder-decoder" in answer.text
    embeds = base64.b64encode(save({"prompt_embeds": torch.zeros(2, 36)})).decode()
    for field in ({"prompt": [3] * 5000}, {"prompt": [VOCAB]}, {"prompt": []}, {"prompt": "", "prompt_embeds": embeds}):
        answer = complete(server, **field)
        assert answer.status_code in (400, 422), answer.text
    assert complete(server, SOURCE).status_code == 200


BAD: dict[str, dict[str, torch.Tensor] | bytes] = {
    "floats": {"input_ids": torch.zeros(3)},
    "a table": {"input_ids": torch.zeros(2, 3, dtype=torch.int64)},
    "another name": {"ids": torch.zeros(3, dtype=torch.int64)},
    "two tensors": {"input_ids": torch.zeros(3, dtype=torch.int64), "more": torch.zeros(1)},
    "no tokens": {"input_ids": torch.zeros(0, dtype=torch.int64)},
    "a token outside": {"input_ids": torch.tensor([VOCAB])},
    "a negative token": {"input_ids": torch.tensor([-1])},
    "no file": b"\x00" * 40,
    "nothing": b"",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_inputs_of_encoders_are_400s(server: Served, case: str) -> None:
    given = BAD[case]
    body = given if isinstance(given, bytes) else save(given)
    sent = {"prompts": [[0]], "params": [{"max_tokens": 1}], "encoders": [base64.b64encode(body).decode()]}
    with server.client("declared") as client:
        answer = client.post("/v1/interp/generate", json=sent)
        assert b"PromptError" in answer.content, answer.content
        for encoders in (["%"], [None, None]):
            assert client.post("/v1/interp/generate", json={**sent, "encoders": encoders}).status_code == 400
    assert complete(server, SOURCE).status_code == 200


def test_random_bytes_end_no_server(server: Served) -> None:
    rng, good = np.random.default_rng(5), save({"input_ids": torch.tensor(SOURCE)})
    with server.client("declared") as client:
        for _ in range(40):
            body = bytearray(good)
            for place in rng.integers(0, len(body), rng.integers(1, 5)):
                body[place] = rng.integers(0, 256)
            sent = {"prompts": [[0]], "params": [{"max_tokens": 1}], "encoders": [base64.b64encode(body).decode()]}
            assert client.post("/v1/interp/generate", json=sent).status_code in (200, 400)
    assert complete(server, SOURCE).json()["choices"][0]["token_ids"] == greedy(
        server.model, SOURCE, TEXT[server.kind], 6
    )
