"""`prompt_embeds` over HTTP: vLLM's field of /v1/completions, and what `LM.connect` sends. Neither reads a pickle."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers_embeds import generated, mixed
from helpers_served import served
from helpers_server import KEYS, Server
from openai import OpenAI
from safetensors.torch import save
from transformers import PreTrainedModel

from pymllm_interp import LM, SamplingParams
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.wire.embeds import embeds_of


@pytest.fixture(scope="module")
def server(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(model_folder("llama"), folder=tmp_path_factory.mktemp("keys")) as found:
        yield found


def base64_of(body: bytes) -> str:
    return base64.b64encode(body).decode()


def torch_file(value: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64_of(file.getvalue())


def completion(server: Server, key: str = "declared", **fields: Any) -> httpx.Response:
    with server.client(key) as client:
        return client.post(
            "/v1/completions", json={"max_tokens": 5, "temperature": 0, "return_token_ids": True, **fields}
        )


def test_embeddings_of_both_kinds_are_prompts(server: Server, oracle: Callable[[str], PreTrainedModel]) -> None:
    """One, a list, and beside texts, as OpenAI's client and vLLM's examples send them."""
    wholes = [mixed(oracle("llama"), length, length)[1][0] for length in (1, 9, 20)]
    wanted = [generated(oracle("llama"), whole[None], 5) for whole in wholes]
    texts = [torch_file(wholes[0]), base64_of(save({"any name": wholes[1]})), torch_file(wholes[2])]
    found = completion(server, prompt_embeds=texts, prompt=[5, 6, 7]).json()
    assert [choice["token_ids"] for choice in found["choices"][:3]] == wanted and len(found["choices"]) == 4
    assert found["choices"][0]["prompt_token_ids"] == [0] and found["usage"]["prompt_tokens"] == 1 + 9 + 20 + 3
    api = OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["declared"], max_retries=0)
    name = api.models.list().data[0].id
    for prompt_embeds, own in zip(texts, wanted, strict=True):
        more = {"prompt_embeds": prompt_embeds, "return_token_ids": True}
        out: Any = api.completions.create(model=name, prompt="", max_tokens=5, temperature=0, extra_body=more)
        assert out.choices[0].token_ids == own


def test_a_connected_lm_sends_mixes(server: Server, oracle: Callable[[str], PreTrainedModel]) -> None:
    model = oracle("llama")
    own = [mixed(model, length, length + 50) for length in (2, 17, 21)]
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
        outs = lm.generate(
            [prompt for prompt, _ in own] + [own[0][1][0], [1, 2]], SamplingParams(temperature=0, max_tokens=5)
        )
        (read,) = lm.forward([own[1][0]], capture=["resid_post.1"])
        with pytest.raises(PromptError, match="float64"):
            lm.generate(own[0][1][0].double(), SamplingParams(max_tokens=1))
        states = torch.randn(3, lm.hidden_size)
        readings = lm.verbalize(states, template=[1, 2, 7, 3], placeholder=7, max_tokens=4, norm="match")
    wanted = [generated(model, whole, 5) for _, whole in (*own, own[0])]
    assert [out.token_ids for out in outs[:4]] == wanted and outs[1].prompt_token_ids == own[1][0]["prompt_token_ids"]
    hidden = model(inputs_embeds=own[1][1], output_hidden_states=True).hidden_states[2][0].detach()
    torch.testing.assert_close(read.activations["resid_post.1"], hidden, rtol=1e-4, atol=1e-4)
    assert len(readings) == 3 and all(len(out.token_ids) == 4 for out in readings.outputs)


def test_a_key_needs_the_right_to_declare(server: Server) -> None:
    text = torch_file(torch.zeros(2, 72))
    assert completion(server, "plain", prompt_embeds=text).status_code == 403
    body = {"prompts": [[0, 0]], "params": [{"max_tokens": 1}], "embeds": [base64_of(save({"e": torch.zeros(2, 72)}))]}
    with server.client("plain") as client:
        assert client.post("/v1/interp/generate", json=body).status_code == 403


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_bad_embeddings_are_400s_and_no_pickle_runs(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)  # the server runs on a thread of this process
    good = torch.zeros(2, 72)
    nested = b"[" * 4000
    huge = b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 72], "data_offsets": [0, 0]}}'
    bad: list[tuple[dict[str, Any], str]] = [
        ({"prompt_embeds": torch_file(Harmful())}, "expected base64"),
        ({"prompt_embeds": torch_file({"a": good})}, "expected base64"),
        ({"prompt_embeds": torch_file(torch.randn(72, 2).T)}, "not contiguous"),
        ({"prompt_embeds": torch_file(torch.zeros(2, 72, dtype=torch.int64))}, "expected base64"),
        ({"prompt_embeds": torch_file(torch.zeros(2, 3, 72))}, "expected base64"),
        ({"prompt_embeds": torch_file(torch.zeros(2, 71))}, "embeddings [2, 71]: expected [positions, 72]"),
        ({"prompt_embeds": torch_file(good.half())}, "float16"),
        ({"prompt_embeds": torch_file(good / 0)}, "NaN"),
        ({"prompt_embeds": torch_file(torch.zeros(500, 72))}, "500 tokens, but the context holds 128"),
        ({"prompt_embeds": "%%"}, "expected base64"),
        ({"prompt_embeds": base64_of(b"PK" + bytes(40))}, "expected base64"),
        ({"prompt_embeds": base64_of(len(nested).to_bytes(8, "little") + nested)}, "expected base64"),
        ({"prompt_embeds": base64_of(len(huge).to_bytes(8, "little") + huge)}, "but the context holds 128"),
        ({"prompt_embeds": torch_file(good), "echo": True}, "echo"),
        ({"prompt_embeds": torch_file(good), "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": torch_file(good), "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"prompt_embeds": 5}, "prompt_embeds"),
        ({}, "prompt"),
    ]  # fmt: skip
    for fields, message in bad:
        found = completion(server, **fields)
        assert found.status_code == 400 and message in found.json()["error"]["message"], (message, found.text)
    assert not (tmp_path / "harm").exists()
    sent = {"prompts": [[0, 0]], "params": [{"max_tokens": 1}]}
    for tensors, message in (
        ({"prompt_embeds": good, "positions": torch.tensor([0, 0])}, "different positions"),
        ({"prompt_embeds": good, "positions": torch.tensor([0, 9])}, "position 9"),
        ({"prompt_embeds": good, "positions": torch.tensor([0])}, "different positions"),
        ({"prompt_embeds": torch.zeros(3, 72)}, "at most 2"),
        ({"a": good, "b": good.clone()}, "one tensor"),
    ):
        with server.client("declared") as client:
            found = client.post("/v1/interp/generate", json=sent | {"embeds": [base64_of(save(tensors))]})
        assert message in found.text, (message, found.text)
    with server.client("declared") as client:
        assert client.post("/v1/interp/generate", json=sent | {"embeds": [None, None]}).status_code == 400
        assert client.post("/v1/interp/generate", json=sent | {"embeds": ["%"]}).status_code == 400
        found = client.post("/v1/chat/completions", json={"messages": [], "prompt_embeds": "a"})
        assert found.status_code == 400


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_torch_files_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    from safetensors.torch import load

    whole = torch.randn(9, 7).to(dtype)
    for tensor in (whole, whole[3:6], whole[:1], whole.clone().requires_grad_()):
        found = embeds_of(torch_file(tensor), "x")
        (read,) = load(found.body).values()
        assert found.tokens == len(tensor) and read.dtype == dtype and torch.equal(read, tensor.detach())
