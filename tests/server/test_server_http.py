"""The HTTP side of a server: keys of the command line, TLS, CORS, a proxy's path, tokens, late orders, and the end of a drain."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from helpers_server import Server, serving
from openai import OpenAI
from safetensors.torch import save

from pymllm_interp import LM, __version__
from pymllm_interp.cli import main, make_parser
from pymllm_interp.core.sampling_params import MAX_LOGPROBS
from pymllm_interp.server.command import BURST_TOKENS, KEY_VARIABLE, settings_of
from pymllm_interp.server.http.trust import Trust

ORIGIN, FIRST, SECOND = "https://pages.example", "first-key-0000", "second-key-0000"
TEMPLATE = "{% for m in messages %}w7 {{ m['content'] }} {% endfor %}{{ ending }}"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    """A self-signed certificate of 127.0.0.1, with its key in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=server", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def secure(served_folder, certificate, tmp_path_factory) -> Iterator[Server]:
    """A server with all of these options, which is ended by the last test."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    options = [
        "--ssl-keyfile", certificate / "key.pem", "--ssl-certfile", certificate / "cert.pem",
        "--api-key", FIRST, "--api-key", SECOND, "--chat-template", template,
        "--root-path", "/llm", "--allowed-origins", json.dumps([ORIGIN]), "--drain-seconds", "0.5",
        "--order-seconds", "0.8", "--operator", "api-key",
    ]  # fmt: skip
    with serving(served_folder, *map(str, options), keys=None) as server:
        assert server.url.startswith("https://")
        yield server


@pytest.fixture(scope="module")
def client(secure, certificate) -> Iterator[httpx.Client]:
    trusted = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    with secure.client(SECOND, verify=trusted) as found:
        yield found


# -- keys, TLS, templates, paths ---------------------------------------------------------------


def test_keys_of_the_command_line_open_what_needs_one(client):
    found = client.get("/v1/interp/capabilities").json()
    assert (found["client"], found["trust"]) == ("api-key-2", "declared")
    for path in ("/v1/models", "/tokenize", "/detokenize", "/v1/completions"):
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer other"}):
            found = client.request("GET" if "models" in path else "POST", path, headers=headers)
            assert found.status_code == 401, path
    assert client.get("/version", headers={"Authorization": ""}).json() == {"version": __version__}
    assert client.get("/load", headers={"Authorization": ""}).json() == {"server_load": 0}
    for method in ("GET", "POST"):
        assert client.request(method, "/ping", headers={"Authorization": ""}).status_code == 200


def test_tls_serves_the_openai_client_and_connect(secure, certificate, client, monkeypatch):
    api = OpenAI(base_url=f"{secure.url}/v1", api_key=FIRST, http_client=client, max_retries=0)
    name = api.models.list().data[0].id
    assert api.completions.create(model=name, prompt="w1", max_tokens=3).usage.completion_tokens == 3
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    with LM.connect(secure.url, api_key=FIRST) as lm:
        assert lm.tokenizer.chat_template == TEMPLATE
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secure.url}/health")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{secure.url.replace('https', 'http')}/health")


def test_the_operators_chat_template_is_in_the_tokenizers_place(client):
    body = {"messages": [{"role": "user", "content": "w4"}, {"role": "user", "content": "w5"}]}
    found = client.post("/tokenize", json=body | {"return_token_strs": True}).json()
    assert found == {"count": 4, "max_model_len": 128, "tokens": [7, 4, 7, 5], "token_strs": ["w7", "w4", "w7", "w5"]}
    found = client.post("/tokenize", json=body | {"chat_template_kwargs": {"ending": "w9"}}).json()
    assert found["tokens"] == [7, 4, 7, 5, 9] and found["token_strs"] is None
    answer = client.post("/v1/chat/completions", json=body | {"max_tokens": 1, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == [7, 4, 7, 5]


@pytest.mark.parametrize("prefix", ["", "/llm"], ids=["stripped", "kept"])
def test_a_proxy_may_keep_the_root_path_or_strip_it(client, prefix):
    body = {"prompt": "w1", "max_tokens": 1}
    assert client.post(f"{prefix}/v1/completions", json=body).status_code == 200
    for path in ("/v1/completions", "/tokenize", "/v1/interp/trace"):
        assert client.post(prefix + path, json={}, headers={"Authorization": "Bearer other"}).status_code == 401
    assert client.post(f"{prefix}/v1/interp/trace", json={}).status_code == 403
    assert client.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/llm"}]
    page = client.get(f"{prefix}/").text
    assert '"static/app.js"' in page and client.get(f"{prefix}/static/app.js").status_code == 200
    assert client.get("/llmv1/models").status_code == 404


def test_pages_of_allowed_origins_may_read_answers(client):
    asks = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,authorization",
    }
    found = client.options("/v1/completions", headers=asks | {"Authorization": ""})
    assert found.status_code == 200 and found.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in found.headers["access-control-allow-headers"]
    assert client.options("/v1/completions", headers=asks | {"Origin": "https://evil.example"}).status_code == 400
    for key, status in ((SECOND, 200), ("other", 401)):  # errors can be read, too
        headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}"}
        found = client.get("/v1/models", headers=headers)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (status, ORIGIN)
    assert (
        "access-control-allow-origin"
        not in client.get("/v1/models", headers={"Origin": "https://evil.example"}).headers
    )


def test_a_server_without_origins_allows_none(server):
    with server.client() as plain:
        found = plain.options("/v1/models", headers={"Origin": ORIGIN, "Access-Control-Request-Method": "GET"})
        assert found.status_code in (401, 403, 405) and "access-control-allow-origin" not in found.headers


# -- tokens ---------------------------------------------------------------------------------------


def test_tokens_and_back(server):
    with server.client("plain") as plain:
        found = plain.post("/tokenize", json={"prompt": "w3 w14", "add_special_tokens": False, "model": None}).json()
        assert found == {"count": 2, "max_model_len": 128, "tokens": [3, 14], "token_strs": None}
        assert plain.post("/detokenize", json={"tokens": [3, 14]}).json() == {"prompt": "w3w14"}
        assert plain.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
        refused: list[tuple[str, dict[str, Any], str]] = [
            ("/tokenize", {}, "expected prompt, a text, or messages"),
            ("/tokenize", {"prompt": "w1", "messages": [{"role": "user", "content": "w1"}]}, "and not both"),
            ("/tokenize", {"prompt": "w1", "nonsense": 1}, "nonsense"),
            ("/tokenize", {"prompt": "w1", "chat_template": "x"}, "serve --chat-template"),
            ("/tokenize", {"messages": [{"role": "user"}], "add_special_tokens": True}, "add_special_tokens"),
            ("/detokenize", {"tokens": [97]}, "the vocabulary goes from 0 to 96"),
            ("/detokenize", {"tokens": [-1]}, "tokens holds -1"),
            ("/detokenize", {"tokens": [1 << 70]}, "tokens"),
        ]
        for path, body, message in refused:
            found = plain.post(path, json=body)
            assert found.status_code == 400 and message in found.json()["error"]["message"], body
        assert plain.post("/tokenize", json={"prompt": "w1", "model": "other"}).status_code == 404
        assert (
            plain.post("/tokenize", content='{"prompt": "w1"}', headers={"Content-Type": "text/plain"}).status_code
            == 415
        )
        assert plain.post("/tokenize", json={"prompt": "w1", "chat_template": None}).status_code == 200


# -- the command line ---------------------------------------------------------------------------


def settings(*options: str) -> Any:
    return settings_of(make_parser().parse_args(["serve", "demo", *options]))


def test_a_server_bounds_the_prompt_tokens_of_a_step_and_an_option_says_otherwise():
    assert settings().server["max_prefill_tokens"] == BURST_TOKENS
    assert settings("--option", "max_prefill_tokens=512").server["max_prefill_tokens"] == 512
    assert settings("--option", "max_prefill_tokens=None").server["max_prefill_tokens"] is None
    assert "max_prefill_tokens" not in settings("--engine", "vllm").server


def test_the_key_of_the_environment_is_taken_and_not_passed_on(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "from-environment")
    found = settings("--allow-code-from", "api-key").keys.client("Bearer from-environment")
    assert found is not None and (found.name, found.trust) == ("api-key", Trust.CODE)
    assert KEY_VARIABLE not in os.environ
    monkeypatch.setenv(KEY_VARIABLE, "from-environment")
    assert settings("--api-key", "from-the-line").keys.client("Bearer from-environment") is None
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert settings().keys.anybody


def test_keys_of_a_file_and_of_the_command_line(tmp_path):
    (tmp_path / "keys").write_text("ada ada-key-0000\n")
    keys = settings("--keys", str(tmp_path / "keys"), "--api-key", "another-key").keys
    assert keys.names() == ["ada", "api-key"]
    with pytest.raises(ValueError, match="fewer than 8"):
        settings("--api-key", "short")
    with pytest.raises(ValueError, match="duplicate name or key"):
        settings("--api-key", "another-key", "--api-key", "another-key")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ssl-keyfile", __file__], "need ssl_certfile"),
        (["--ssl-certfile", "/nowhere/cert.pem"], "ssl_certfile='/nowhere/cert.pem': there is no such file"),
        (["--ssl-certfile", __file__, "--ssl-cert-reqs", "2"], "needs ssl_ca_certs"),
        (["--root-path", "llm"], "expected a path such as '/llm'"),
        (["--chat-template", os.devnull], "the file is empty"),
        (["--allow-code-from", "anybody", "--allowed-origins", '["*"]'], "any web page would run code"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        settings(*options)


def test_origins_are_a_json_list(capsys):
    found = settings("--allowed-origins", '["*"]', "--allow-credentials")
    assert (found.allowed_origins, found.allowed_methods, found.allow_credentials) == (("*",), ("*",), True)
    with pytest.raises(SystemExit):
        settings("--allowed-origins", "https://a.example")
    assert "expected a JSON list of strings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--max-model-len", "4096"], "--max-model-len: here it is --option max_model_len=4096"),
        (["--gpu-memory-utilization=0.8"], "here it is --option gpu_memory_utilization=0.8"),
        (["--max-num-seqs", "64"], "here it is --option max_running_requests=64"),
        (["--enable-prefix-caching"], "here it is --option enable_prefix_caching=True"),
        (["--no-enable-prefix-caching"], "use --option enable_prefix_caching=False"),
        (["--tensor-parallel-size", "2"], "an argument of vLLM's: give --engine vllm"),
        (["-tp", "2"], "-tp: our own engine has no tensor parallelism"),
        (["--enable-lora"], "--enable-lora: it is not needed: --lora-modules NAME=FOLDER loads adapters"),
        (["--max-loras", "8"], "--max-loras: here it is --option max_loras=8"),
        (["--max-lora-rank=16"], "here it is --option max_lora_rank=16"),
        (["--max-logprobs", "20"], f"at most {MAX_LOGPROBS} log probabilities"),
        (["--data-parallel-size", "2"], "cluster MODEL --replicas N"),
        (["-dp", "2"], "cluster MODEL --replicas N"),
        (["--api-server-count", "2"], "cluster MODEL --fronts N"),
        (["--enable-expert-parallel"], "one device holds all experts"),
        (["--quantization", "fp8"], "quantize='fp8' or 'fp8-w8a8'"),
        (["--enforce-eager"], "use --option disable_cuda_graph=True"),
        (["--model", "demo"], "the model is the first argument"),
        (["--nonsense", "--block-size", "32"], "--block-size: here it is --option page_size=32"),
    ],
)
def test_a_flag_of_vllm_is_answered_with_what_serves_here(options, hint, capsys):
    assert main(["serve", "demo", *options]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1


def test_hinted_options_exist_and_other_flags_are_errors(capsys):
    from pymllm_interp.config import ModelConfig, ServerConfig
    from pymllm_interp.server.command import OTHERS, RENAMED, SAME

    known = {*ModelConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__}
    assert {*SAME, *RENAMED.values()} <= known
    named = {word.partition("=")[0] for text in OTHERS.values() for word in text.split("--option ")[1:]}
    assert named and named <= known
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo", "--nonsense"])
    assert ended.value.code == 2 and "unrecognized arguments: --nonsense" in capsys.readouterr().err


# -- an engine that does not answer ---------------------------------------------------------------


def test_an_order_that_is_late_is_a_504_and_is_carried_out_later(secure, client):
    """An engine that is stopped costs the client of an order a 504, not its connection for ever."""
    engine, operator = secure.engine_pid(), {"Authorization": f"Bearer {FIRST}"}
    os.kill(engine, signal.SIGSTOP)
    try:
        late = client.put("/v1/interp/vectors/v", content=save({"vector": torch.ones(72)}))
        adapter = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/no"}, headers=operator)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert late.status_code == adapter.status_code == 504 and "--order-seconds" in late.json()["error"]["message"]
    deadline = time.monotonic() + 60
    while not (found := client.get("/v1/interp/vectors").json()["vectors"]):
        assert time.monotonic() < deadline, "the order went on"
        time.sleep(0.05)
    assert found[0]["name"] == "v" and secure.engine_pid() == engine
    assert client.delete("/v1/interp/vectors/v").json() == {"deleted": "v"}


# -- the end ------------------------------------------------------------------------------------


def test_what_a_drain_does_not_await_ends_with_an_error(secure, client):
    """The engine process is stopped, so that requests run on; the last test of this server."""
    found: dict[str, str] = {}
    pid, stopped = secure.engine_pid(), threading.Event()
    api = OpenAI(base_url=f"{secure.url}/v1", api_key=FIRST, http_client=client, max_retries=0)
    name = api.models.list().data[0].id

    def stream() -> None:
        body = {"prompt": [[1]] * 200, "max_tokens": 120, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGSTOP)  # far from the end of 24,000 tokens
            stopped.set()
            found["stream"] = "\n".join(lines)

    def whole() -> None:
        response = client.post("/v1/completions", json={"prompt": "w1"})
        found["whole"] = f"{response.status_code} {response.text}"

    def official() -> None:
        with pytest.raises(openai.InternalServerError) as error:
            api.chat.completions.create(model=name, messages=[{"role": "user", "content": "w2"}])
        found["official"] = f"{error.value.status_code} {error.value}"

    threads = [threading.Thread(target=run) for run in (stream, whole, official)]
    try:
        threads[0].start()
        assert stopped.wait(600)
        for thread in threads[1:]:
            thread.start()
        deadline = time.monotonic() + 600
        while client.get("/load").json()["server_load"] < 202:
            assert time.monotonic() < deadline
        secure.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(600)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert secure.process.wait(600) == 0
    reason = "the server ended before the request had"
    assert found["whole"].startswith("503 ") and reason in found["whole"]
    assert found["official"].startswith("503 ") and reason in found["official"]
    *_, error, done = [line for line in found["stream"].splitlines() if line]
    assert reason in json.loads(error.removeprefix("data: "))["error"]["message"] and done == "data: [DONE]"
