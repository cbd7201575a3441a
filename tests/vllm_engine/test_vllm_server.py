"""A server over vLLM: OpenAI's routes, declared hooks and lowered traces by `LM.connect`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from helpers_adapters import write_adapter
from helpers_server import serving
from helpers_vllm import assert_close, assert_close_tensor, needs_vllm, own_lm, prompt, save_model, vector
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, Capture, SamplingParams, Steer
from pymllm_interp.captures import Lens

pytestmark = needs_vllm
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    options = [
        "--engine", "vllm", "--dtype", "float32", "--option", "max_model_len=128", "--option", "kv_cache_tokens=2048", "--option",
        "disable_cuda_graph=True", "--option", "gpu_memory_utilization=0.05", "--option", "max_running_requests=8",
        "--option", "inner_sites=['z']", "--vllm-option", "enable_lora=True",
    ]  # fmt: skip
    with serving(folder, *options, keys=None) as server:
        yield server.url


def test_a_client_gets_our_engines_results(url: str, folder: Path) -> None:
    options = {"interventions": [Steer("resid_post.1", vector(1), 2.0)], "capture": ["resid_post.*"]}
    with LM.connect(url) as lm, own_lm(folder) as oracle:
        for ids in (prompt(9, 1), prompt(30, 2)):
            assert_close(lm.generate([ids], GREEDY, **options)[0], oracle.generate([ids], GREEDY, **options)[0])
        saved = []
        for model in (lm, oracle):
            with model.trace(prompt(9, 1)):
                state = model.model.layers[2].output.save()
            saved.append(state)
        assert_close_tensor(*map(torch.as_tensor, saved))
        assert "vLLM" in lm.backend.facts.engine_name and "pattern.*" in lm.sites


def test_captured_rows_stream_to_a_client(url: str, folder: Path) -> None:
    capture = [
        Capture("resid_post.*", reduce=Lens(top_k=2, tokens=[3]), stream=True),
        Capture("mlp_out.1", stream=True),
    ]
    with LM.connect(url) as lm, own_lm(folder) as oracle:
        for model in (lm, oracle):
            pieces = list(model.stream(prompt(9, 1), GREEDY, capture=capture))
            parts, whole = [piece.captures for piece in pieces if piece.captures is not None], pieces[-1].activations
            assert len(parts) > 2 and set(whole) == {site for part in parts for site in part}
            for site in whole:
                assert torch.equal(torch.cat([part[site] for part in parts]), whole[site])
    with httpx.Client(base_url=url, timeout=120) as client:
        body = {
            "model": client.get("/v1/models").json()["data"][0]["id"], "prompt": [1, 2, 3], "max_tokens": 3, "stream": True,
            "capture": [{"site": "resid_post.*", "reduce": {"type": "lens", "top_k": 2}, "stream": True}],
        }  # fmt: skip
        with client.stream("POST", "/v1/completions", json=body) as stream:
            chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    found = [choice.get("pymllm", {}) for chunk in chunks for choice in chunk["choices"]]
    rows = [part["captures"] for part in found if "captures" in part]
    assert rows and all(part["tokens"] for part in rows)


def test_an_adapter_is_loaded_over_http(url: str, folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(folder), rank=8)
    options = {"interventions": [Steer("resid_post.1", vector(1), 2.0)], "capture": ["resid_post.*", "z.1"]}
    with httpx.Client(base_url=url, timeout=120) as client, LM.connect(url) as lm, own_lm(folder) as oracle:
        assert (
            client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": str(adapter)}).status_code == 200
        )
        oracle.adapters.load("a", adapter)
        found, wanted = (
            model.generate([prompt(9, 1)] * 2, GREEDY, lora=["a", None], **options) for model in (lm, oracle)
        )
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
        body = {"model": "a", "prompt": prompt(9, 1), "max_tokens": 5, "temperature": 0, "return_token_ids": True}
        plain = oracle.generate([prompt(9, 1)], GREEDY, lora="a")[0]
        answer = client.post("/v1/completions", json=body | {"ignore_eos": True}).json()
        assert answer["choices"][0]["token_ids"] == plain.token_ids
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 200
        assert client.post("/v1/completions", json=body).status_code == 404
        assert client.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "/none"}).status_code == 400


def test_openais_routes_and_metrics_answer(url: str) -> None:
    with httpx.Client(base_url=url, timeout=120) as client:
        body = {
            "prompt": "w3 w4 w5",
            "max_tokens": 4,
            "temperature": 0,
            "model": client.get("/v1/models").json()["data"][0]["id"],
        }
        answer = client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 4
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            assert "".join(stream.iter_text()).count("data: ") >= 4
        assert "pymllm_interp_steps_total" in client.get("/metrics").text
        assert client.get("/health").status_code == 200
