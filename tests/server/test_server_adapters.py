"""LoRA adapters of a server: models by name, vLLM's routes, who may use them, and `LM.connect`."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helpers_server
import httpx
import pytest
import torch
from helpers_adapters import adapted, change_config, write_adapter
from helpers_runner import random_ids
from helpers_served import served
from helpers_server import CHAT_TEMPLATE, CLOSE, KEY_FILE, KEYS, Server, serving

from pymllm_interp import LM, SamplingParams, Steer
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.wire.failures import EngineError

PROMPT = random_ids(9, seed=1)
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, oracle: Callable[[str], Any]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, oracle("llama"), seed=seed, scale=0.2) for seed, name in enumerate("abc")
    }


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys")
    (keys / "template").write_text(CHAT_TEMPLATE)
    options = (
        "--chat-template",
        str(keys / "template"),
        "--lora-modules",
        f"a={folders['a']}",
        "--operator",
        "other",
        "--allow-code-from",
        "code",
    )
    with served(model_folder("llama"), *options, "--served-model-name", "base", keys=KEY_FILE,
                 folder=keys) as found:  # fmt: skip
        yield found


def tokens_of(client: httpx.Client, model: str | None, **more: Any) -> list[int]:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = client.post("/v1/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (model or "base")
    return answer.json()["choices"][0]["token_ids"]


@torch.no_grad()
def greedy(model: Any, steps: int = 5) -> list[int]:
    made = list(PROMPT)
    for _ in range(steps):
        made.append(int(model(torch.tensor([made]), use_cache=False).logits[0, -1].argmax()))
    return made[len(PROMPT) :]


def test_an_adapter_is_a_model(server: Server, folders: dict[str, Path], oracle: Callable[[str], Any]) -> None:
    base, changed = oracle("llama"), adapted(oracle("llama"), folders["a"])
    assert greedy(base) != greedy(changed), "else this shows nothing"
    with server.client("plain") as client:
        assert tokens_of(client, "base") == tokens_of(client, None) == greedy(base)
        assert tokens_of(client, "a") == greedy(changed)
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert set(cards) >= {"base", "a"} and (cards["a"]["parent"], cards["a"]["root"]) == ("base", str(folders["a"]))
        assert client.get("/v1/models/a").json() == cards["a"]
        chat = {"model": "a", "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=chat).json()["model"] == "a"
        refused = client.post("/v1/completions", json={"model": "x", "prompt": "w1"})
        assert refused.status_code == 404 and "this server has 'base', 'a'" in refused.json()["error"]["message"]


def test_operators_load_and_unload(server: Server, folders: dict[str, Path], oracle: Callable[[str], Any]) -> None:
    body = {"lora_name": "b", "lora_path": str(folders["b"])}
    for key in ("plain", "declared", "code"):
        with server.client(key) as client:
            for route, given in (("load", body), ("unload", {"lora_name": "a"})):
                answer = client.post(f"/v1/{route}_lora_adapter", json=given)
                assert answer.status_code == 403 and "is not an operator" in answer.json()["error"]["message"]
    with server.client("other") as client:
        answer = client.post("/v1/load_lora_adapter", json=body)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'b' added successfully.")
        assert tokens_of(client, "b") == greedy(adapted(oracle("llama"), folders["b"]))
        for given, status, message in (
            (body, 400, "is loaded already"),
            ({"lora_name": "base", "lora_path": "x"}, 400, "the model's own name"),
            ({"lora_name": "x", "lora_path": "/nowhere"}, 400, "has no adapter_config.json"),
            ({"lora_name": "x" * 10**5, "lora_path": "/nowhere"}, 400, "lora_name"),
            ({"lora_name": 7, "lora_path": "x"}, 400, "lora_name"),
            ({"lora_name": "x", "lora_path": "x", "load_inplace": True}, 400, "load_inplace"),
        ):
            answer = client.post("/v1/load_lora_adapter", json=given)
            assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "b"}).status_code == 200
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "b"}).status_code == 404
        assert client.post("/v1/completions", json={"model": "b", "prompt": "w1"}).status_code == 404


def test_connected_clients(server: Server, folders: dict[str, Path], oracle: Callable[[str], Any]) -> None:
    base, changed = oracle("llama"), adapted(oracle("llama"), folders["a"])
    with LM.connect(server.url, api_key=KEYS["code"]) as lm:
        assert lm.adapters["a"] == str(folders["a"])
        outs = lm.generate([PROMPT] * 2, GREEDY, lora=["a", None])
        assert [out.outputs[0].token_ids for out in outs] == [greedy(changed), greedy(base)]
        with torch.no_grad():
            expected = changed(torch.tensor([PROMPT]), output_hidden_states=True)
        out = lm.forward([PROMPT], lora="a", capture=["resid_post.0"])[0]
        torch.testing.assert_close(out.logits, expected.logits[0], rtol=CLOSE, atol=10 * CLOSE)
        with lm.trace(PROMPT, lora="a"):  # declared
            h = lm.model.layers[0].output.save()
        torch.testing.assert_close(h, expected.hidden_states[1], rtol=CLOSE, atol=10 * CLOSE)
        with lm.trace(PROMPT, lora="a"):  # code
            lm.model.layers[0].output[:] *= 1.0
            logits = lm.lm_head.output.save()
        torch.testing.assert_close(logits, expected.logits, rtol=CLOSE, atol=10 * CLOSE)
        with lm.trace() as tracer:
            with tracer.invoke(PROMPT, lora="a"):
                one = lm.lm_head.output.save()
            with tracer.invoke(PROMPT):
                two = lm.lm_head.output.save()
        torch.testing.assert_close(one, expected.logits, rtol=CLOSE, atol=10 * CLOSE)
        assert not torch.allclose(one, two, atol=1e-3)
        with pytest.raises(PromptError, match="there is no adapter 'x'"):
            lm.generate([PROMPT], GREEDY, lora="x")
        with pytest.raises(PermissionError, match="not an operator"):
            lm.adapters.load("c", folders["c"])
        vector = torch.randn(lm.hidden_size)
        steered = lm.generate([PROMPT], GREEDY, lora="a", interventions=[Steer("resid_post.0", vector, 0.0)])
        assert steered[0].outputs[0].token_ids == greedy(changed)
    with LM.connect(server.url, api_key=KEYS["other"]) as lm:
        lm.adapters.load("c", folders["c"])
        assert lm.generate([PROMPT], GREEDY, lora="c")[0].outputs[0].token_ids == greedy(adapted(base, folders["c"]))
        lm.adapters.unload("c")
        assert "c" not in lm.adapters


@pytest.mark.slow
def test_a_restarted_engine_has_its_adapters(
    model_folder: Callable[[str], Path], folders: dict[str, Path], tmp_path: Path
) -> None:
    """But for those whose folder is gone: they are left out, and the server lives."""
    gone = shutil.copytree(folders["c"], tmp_path / "gone")
    with serving(model_folder("llama"), "--lora-modules", f"a={folders['a']}", f"gone={gone}", keys=None) as server:
        with server.client(None) as client:
            assert {card["id"] for card in client.get("/v1/models").json()["data"]} >= {"a", "gone"}
            body = {"lora_name": "b", "lora_path": str(folders["b"])}
            assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
            shutil.rmtree(gone)
            os.kill(server.engine_pid(), signal.SIGKILL)
            while client.get("/health").status_code == 200:
                time.sleep(0.02)
            server.wait_until_healthy()
            names = {card["id"] for card in client.get("/v1/models").json()["data"]}
            assert names >= {"a", "b"} and "gone" not in names
            assert (
                client.post("/v1/completions", json={"model": "b", "prompt": "w1", "max_tokens": 2}).status_code == 200
            )


def test_a_server_does_not_start_with_an_adapter_that_it_cannot_load(
    model_folder: Callable[[str], Path], folders: dict[str, Path], tmp_path: Path
) -> None:
    bad = shutil.copytree(folders["a"], tmp_path / "bad")
    change_config(bad, use_dora=True)
    name = f"x={bad}"
    with pytest.raises(EngineError, match="use_dora"), served(model_folder("llama"), "--lora-modules", name, keys=None):
        pass


@pytest.mark.slow
def test_replicas_load_the_adapters_when_they_start(
    monkeypatch: pytest.MonkeyPatch,
    model_folder: Callable[[str], Path],
    folders: dict[str, Path],
    tmp_path: Path,
    server: Server,
) -> None:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEYS['plain']}"}) as client:
        expected = tokens_of(client, "a")
    monkeypatch.setattr(helpers_server, "REPLICAS", 2)
    options = "--lora-modules", f"a={folders['a']}", "--operator", "other", "--served-model-name", "base"
    with serving(model_folder("llama"), *options, keys=KEY_FILE, folder=tmp_path) as replicated:
        with httpx.Client(base_url=replicated.url, headers={"Authorization": f"Bearer {KEYS['other']}"}) as client:
            assert tokens_of(client, "a") == expected != tokens_of(client, "base")
            given = {"lora_name": "b", "lora_path": str(folders["b"])}
            refused = client.post("/v1/load_lora_adapter", json=given)
            assert refused.status_code == 400 and "--lora-modules" in refused.text
            refused = client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
            assert refused.status_code == 400 and "replicas keep" in refused.text
