"""examples/deploy: what can be checked without systemd, a container engine or nginx."""

from __future__ import annotations

import ast
import json
import re
import shlex
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import yaml
from helpers_paths import ROOT

from pymllm_interp.cli import SERVE_LIMITS, make_parser
from pymllm_interp.server.http.families import FAMILIES, REASONS

FOLDER = ROOT / "examples" / "deploy"


def words_of(path: Path) -> dict[str, str]:
    """Instruction of a Containerfile -> its last words; continued lines are joined."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    return dict(re.findall(r"^([A-Z]+) (.+)$", text, re.M))


def test_the_systemd_unit_serves_and_waits_for_the_drain():
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # pyright: ignore
    unit.read(FOLDER / "pymllm-interp.service")
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "pymllm-interp"
    found = make_parser().parse_args(arguments)
    assert found.command == "serve" and found.drain_seconds < int(service["TimeoutStopSec"])
    assert service["LoadCredential"].startswith(f"{found.keys.name}:") and str(found.keys.parent) == "%d"
    assert found.store.is_relative_to(Path("/var/cache") / service["CacheDirectory"])  # else it is read-only


def test_the_container_serves_with_keys():
    found = words_of(FOLDER / "Containerfile")
    program, *arguments = [*ast.literal_eval(found["ENTRYPOINT"]), *ast.literal_eval(found["CMD"])]
    assert program == "pymllm-interp"
    args = make_parser().parse_args(arguments)
    assert args.host == "0.0.0.0" and args.keys is not None and str(args.port) == found["EXPOSE"]
    assert found["USER"] in found["RUN"] and found["STOPSIGNAL"] == "SIGTERM"
    command = ast.literal_eval(found["HEALTHCHECK"].partition("CMD ")[2])
    compile(command[2], "healthcheck", "exec")
    assert f":{args.port}/health" in command[2]


def test_the_proxy_fits_the_servers_limits():
    text = "\n".join(line for line in (FOLDER / "nginx.conf").read_text().splitlines() if "#" not in line)
    assert text.count("{") == text.count("}") and all(
        line.strip()[-1] in "{};" for line in text.splitlines() if line.strip()
    )
    directives = dict(re.findall(r"^\s*(\w+) ([^;{}]+);$", text, re.M))
    args = make_parser().parse_args(["serve"])
    assert directives["proxy_pass"] == f"http://{args.host}:{args.port}/"
    size = int(directives["client_max_body_size"].removesuffix("m")) << 20
    assert size == SERVE_LIMITS["max_body_bytes"][1] == SERVE_LIMITS["max_trace_bytes"][1]
    assert int(directives["proxy_read_timeout"].removesuffix("s")) >= SERVE_LIMITS["trace_timeout"][1]
    assert directives["proxy_buffering"] == "off"
    (location,) = re.findall(r"location (\S+)/ ", text)
    head = (FOLDER / "nginx.conf").read_text()
    (command,) = re.findall(r"`pymllm-interp (.+?)`", head)
    assert make_parser().parse_args(shlex.split(command)).root_path == location


def check_metrics(expression: str) -> None:
    """A query names metrics that the server exports, in the way that their kind is asked for."""
    names = re.findall(r"pymllm_interp_(\w+)", expression)
    assert names, expression
    for name in names:
        part = re.fullmatch(r"(\w+)_(bucket|sum|count)", name)
        kind = FAMILIES[part[1] if part and part[1] in FAMILIES else name].kind
        rated = re.search(rf"(rate|increase)\(pymllm_interp_{name}[\[{{]", expression) is not None
        assert rated == (kind != "gauge"), expression
        assert (kind == "histogram") == bool(part and part[1] in FAMILIES), expression
    assert set(re.findall(r'finished_reason=~?"(\w+)"', expression)) <= set(REASONS)
    assert all(expression.count(first) == expression.count(last) for first, last in ("()", "{}", "[]"))


def test_the_board_draws_metrics_that_the_server_exports():
    board: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    assert len(targets) > 20 and len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for target in targets:
        check_metrics(target["expr"])
    check_metrics(next(one["query"] for one in board["templating"]["list"] if one["name"] == "model"))


def test_alerts_are_of_metrics_that_the_server_exports():
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 5
    for rule in group["rules"]:
        check_metrics(rule["expr"])
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("warning", "critical")
    (store,) = [rule["expr"] for rule in group["rules"] if rule["alert"] == "StoreFull"]
    assert str(SERVE_LIMITS["max_store_bytes"][1]) in store
