"""How a server starts and ends: one line for what cannot be, a file of options, a Unix socket, and a log of JSON lines."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import httpx
import pytest
from helpers_served import served
from helpers_server import Server, serving

from pymllm_interp import __version__
from pymllm_interp.cli import main, make_parser
from pymllm_interp.server.command import read_config
from pymllm_interp.server.serve import listen, listen_at
from pymllm_interp.wire.failures import EngineError


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command ends with."""
    assert main(["serve", *arguments]) == 2
    *log, line = capfd.readouterr().err.splitlines()
    assert line.startswith("pymllm-interp serve: ") and not any("Traceback" in one for one in log), log
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drain-seconds", "-1"], "drain_seconds=-1.0"),
        (["--drain-seconds", "nan"], "drain_seconds=nan"),
        (
            ["--lora-modules", "x=/nope", "--engine", "vllm"],
            "--lora-modules: adapters are not served with --engine vllm",
        ),
        (["--lora-modules", "x=/nope"], "--lora-modules x=/nope: there is no adapter_config.json"),
        (["--sae", "x=/nope"], "--sae x=/nope: no such file"),
        (["--keys", "/nope"], "/nope"),
        (["--keys", "/"], "Is a directory"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
        (["--uds", "/nope/socket"], "cannot listen on --uds /nope/socket"),
        (["--option", "kv_cache_tokens=-4"], "kv_cache_tokens=-4"),
        (["--ssl-certfile", "FILE"], "no certificate and its private key"),
        (["--ssl-certfile", "FILE", "--ssl-keyfile", "FILE"], "no certificate and its private key"),
        (["--chat-template", "FILE"], "line 1: Unexpected end of template"),
        (["--config", "/nope"], "/nope"),
        (["--config", "FILE"], "not YAML"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_the_model_loads(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def start(*_: object) -> None:
        raise AssertionError("the engine process was started")

    monkeypatch.setattr("pymllm_interp.server.engines.process_door.ProcessDoor.start", start)
    (tmp_path / "file").write_text("{% if x %}")
    given = [str(tmp_path / "file") if one == "FILE" else one for one in arguments]
    assert message in refused(capfd, "demo", *given)


def test_a_port_in_use_is_refused(capfd: pytest.CaptureFixture[str]):
    with listen("127.0.0.1", 0) as other:
        other.listen()
        assert "in use" in refused(capfd, "demo", "--port", str(other.getsockname()[1]))


def test_what_the_engine_process_refuses_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Neither error has a builtin class of wrong values in transformers or torch."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    line = refused(capfd, str(tmp_path), "--port", "0")
    assert "config.json" in line and "'hidden_size' expected int, got str" in line
    for model, options, message in (
        (tmp_path, ("--device", "cuda:99"), "device='cuda:99'"), (tmp_path / "nothing", (), "nothing"),
    ):  # fmt: skip
        with pytest.raises(EngineError, match=message), served(model, *options, keys=None):
            pass


def test_a_generation_template_is_a_template(tmp_path: Path):
    """The tag that transformers adds is no error."""
    from pymllm_interp.server.command import _template_of

    text = "{% for m in messages %}{%- generation %}{{ m.content }}{% endgeneration -%}{% break %}{% endfor %}"
    (tmp_path / "template").write_text(text)
    assert _template_of(tmp_path / "template") == text


def test_the_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as status:
        main(["--version"])
    assert status.value.code == 0 and capsys.readouterr().out == f"pymllm-interp {__version__}\n"


CONFIG = """
model: /models/a
port: 8100
served_model_name: a            # underscores, too
drain-seconds: 5
shared-prefix-cache: true
allow-credentials: false
allowed-origins: ["https://a.example", "https://b.example"]
lora-modules: {x: /adapters/x, y: /adapters/y}
option: {max_model_len: 4096, inner_sites: "('q',)"}
operator: [ann, bob]
"""


def test_a_file_of_options_is_read_and_the_command_line_wins(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(CONFIG)

    def parsed(*arguments: str):
        parser = make_parser()
        given = ["serve", "--config", str(tmp_path / "config.yaml"), *arguments]
        args = parser.parse_args(given)
        read_config(args.config_file, args.parser)
        return parser.parse_args(given)

    args = parsed()
    assert (args.model, args.port, args.served_model_name, args.drain_seconds) == ("/models/a", 8100, "a", 5.0)
    assert args.shared_prefix_cache and not args.allow_credentials
    assert args.allowed_origins == ("https://a.example", "https://b.example") and args.operator == ["ann", "bob"]
    assert dict(args.lora_modules) == {"x": "/adapters/x", "y": "/adapters/y"}
    assert dict(args.option) == {"max_model_len": 4096, "inner_sites": ("q",)}
    args = parsed("/models/b", "--port", "1", "--option", "max_model_len=8", "--operator", "eve")
    assert (args.model, args.port, dict(args.option)["max_model_len"]) == ("/models/b", 1, 8)
    assert args.operator == ["ann", "bob", "eve"] and args.served_model_name == "a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "'prot' is not an option"), ("port: [1, 2]", "port: expected one value"), ("- port", "expected long options"),
        ("port:", "port: expected text or a number"), ("allow-credentials: 1", "expected true or false"),
        ("a: [", "not YAML"), ("config: x", "'config' is not an option"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_options_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.yaml").write_text(text)
    assert main(["serve", "--config", str(tmp_path / "config.yaml")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_socket_file_that_nobody_listens_on_is_replaced(tmp_path: Path):
    path = tmp_path / "socket"
    listen_at(path).close()
    with listen_at(path) as second:
        second.listen()
        with pytest.raises(OSError, match="in use"):
            listen_at(path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="in use"):
        listen_at(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_unix_socket_serves_and_all_processes_log_json(served_folder: Path, tmp_path: Path):
    """The log of a whole life: no line of another form comes, not even at the end, where nanobind would report leaks.

    The receiver of its spans never answers, which changes nothing.
    """
    path = tmp_path / "socket"
    silent = socket.create_server(("127.0.0.1", 0))
    spans = f"otlp-traces-endpoint: http://127.0.0.1:{silent.getsockname()[1]}/v1/traces\n"
    (tmp_path / "config.yaml").write_text(f"uds: {path}\nserved-model-name: named\nlog-level: debug\n{spans}")
    with serving(served_folder, "--config", str(tmp_path / "config.yaml"), keys=None, announces="unix:") as server:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            body = {"prompt": [1, 2], "max_tokens": 2}
            answer = client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}, timeout=600)
            limits = client.get("/v1/models").json()["data"][0]
            kv_tokens = client.get("/status").json()["kv_tokens"]
        assert answer.status_code == 200, answer.text
        assert server.end() == 0 and not path.exists()
    silent.close()
    check_log(server, {"model": "named", "max_model_len": limits["max_model_len"], "kv_tokens": kv_tokens})
    entries = entries_of(server)
    (access,) = [one for one in entries if one.get("client_request_id") == "mine"]
    assert access["path"] == "/v1/completions" and re.fullmatch("[0-9a-f]{32}", access["request_id"])


def entries_of(server: Server) -> list[dict]:
    """The log: all that is not the banner on standard output."""
    lines = [line for line in server.log if line.strip()]
    return [json.loads(line) for line in lines if "is served at" not in line]


def check_log(server: Server, start: dict[str, object]) -> None:
    entries = entries_of(server)
    assert {one["process"] for one in entries} == {"http", "engine"}
    assert all({"time", "level", "logger"} <= one.keys() for one in entries)
    (found,) = [one for one in entries if one.get("event") == "serving"]
    assert found | start == found and found["version"] == __version__ and found["dtype"] == "float32"
