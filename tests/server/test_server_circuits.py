"""`/v1/interp/circuit` and `LM.connect(...).circuit`: the same circuit as a local one, bounded by name, ended with its client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_browser import CHROMIUM, browsing
from helpers_saes import random_sae
from helpers_served import served
from helpers_server import KEYS, Server
from safetensors.torch import save_file

from pymllm_interp import LM
from pymllm_interp.server.process import circuits
from pymllm_interp.toolkit import Circuit
from pymllm_interp.toolkit.circuits import passes
from pymllm_interp.toolkit.circuits.drawing import figure_of
from pymllm_interp.utils.arguments import PromptError

PROMPT, PATH = "w3 w14 w15 w9 w2 w6", "/v1/interp/circuit"
CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}


def save_transcoders(folder: Path, width: int, layers: int) -> list[str]:
    """Files of SAELens' form. Returns the server's options that name them, as a set."""
    options = []
    for layer in range(layers):
        own = random_sae(width, seed=layer)
        path = folder / str(layer)
        path.mkdir()
        tensors = {"W_enc": own.W_enc / width**0.5, "W_dec": own.W_dec * 0.1, "b_enc": own.b_enc, "b_dec": own.b_dec}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "sae_weights.safetensors")
        names = {"hook_name": f"blocks.{layer}.hook_resid_mid", "hook_name_out": f"blocks.{layer}.hook_mlp_out"}
        (path / "cfg.json").write_text(json.dumps({"architecture": "transcoder", **names}))
        options += ["--sae", f"tc/{layer}={path}"]
    return options


@pytest.fixture(scope="module")
def coders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("transcoders")
    return folder, save_transcoders(folder, 72, 3)


@pytest.fixture(scope="module")
def server(
    served_folder: Path, coders: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    options = [*coders[1], "--max-circuit-tokens", "40", "--max-circuit-features", "300"]
    with served(served_folder, *options, folder=tmp_path_factory.mktemp("keys")) as found:
        yield found


@pytest.fixture(scope="module")
def local(served_folder: Path, coders: tuple[Path, list[str]]) -> Iterator[LM]:
    with LM(str(served_folder), dtype="float32", device="cpu", kv_cache_tokens=512) as lm:
        for layer in range(3):
            lm.saes[f"tc/{layer}"] = coders[0] / str(layer)
        yield lm


def events_of(text: str) -> list[dict[str, Any]]:
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def check_equal(found: Circuit, wanted: Circuit) -> None:
    for name in ("features", "activations", "weights", "bias", "rest", "target_values"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), **CLOSE)
    assert (found.layers, found.softcap, found.node_threshold) == (wanted.layers, wanted.softcap, wanted.node_threshold)
    assert [target[:2] for target in found.targets] == [target[:2] for target in wanted.targets]
    assert (found.token_ids, found.tokens, found.active) == (wanted.token_ids, wanted.tokens, wanted.active)
    assert found.scores() == pytest.approx(wanted.scores(), abs=1e-4)


def test_a_connected_circuit_is_the_local_one(server: Server, local: LM) -> None:
    """With interventions on it, measured by requests with the names of the server's transcoders."""
    options: dict[str, Any] = {"target": ["w3", ("w7", "w11")], "max_features": 60, "batch": 7}
    wanted = local.circuit(PROMPT, "tc", **options)
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
        found = lm.circuit(PROMPT, "tc", **options)
        check_equal(found, wanted)
        check_equal(
            lm.circuit(PROMPT, ["tc/2", "tc/0", "tc/1"], max_features=60), local.circuit(PROMPT, "tc", max_features=60)
        )
        node = max((node for node in wanted.nodes if node.kind == "feature"), key=lambda node: node.influence)
        theirs, ours = (circuit.intervene({node.key: 0.0}) for circuit in (found, wanted))
        torch.testing.assert_close(theirs.measured, ours.measured, **CLOSE)
        torch.testing.assert_close(theirs.predicted, ours.predicted, **CLOSE)
        with pytest.raises(NotImplementedError, match=r"circuit\.qk runs where the model is"):
            found.qk((1, 0, 3, 1))


def test_the_route_answers_with_progress_and_a_graph_or_a_figure(server: Server, local: LM) -> None:
    wanted = local.circuit(PROMPT, "tc", [3, (7, 11)], max_features=60)
    body = {"prompt": PROMPT, "transcoders": "tc", "target": [3, [7, 11]], "max_features": 60, "batch": 16}
    with server.client("declared") as client:
        answer = client.post(PATH, json=body)
        drawn = client.post(PATH, json={**body, "form": "figure"})
    accepted, *progress, last = events_of(answer.text)
    assert accepted == {"type": "accepted"} and {event["type"] for event in progress} == {"progress"}
    rows = [event["rows"] for event in progress]
    assert rows == sorted(rows) and len(rows) >= 4 and rows[-1] == progress[-1]["of"] == 62
    assert last["scores"] == pytest.approx(wanted.scores()._asdict(), abs=1e-4) and last["form"] == "graph"
    links = {(link["source"], link["target"]): link["weight"] for link in last["graph"]["links"]}
    mine = {(link["source"], link["target"]): link["weight"] for link in wanted.to_json()["links"]}
    assert links == pytest.approx(mine, abs=1e-4)
    assert len(Circuit.load(last["graph"]).edges) == len(wanted.edges)
    figure, own = events_of(drawn.text)[-1]["figure"], figure_of(wanted, 500)
    assert [trace["name"] for trace in figure["data"]] == [trace["name"] for trace in own["data"]]
    assert figure["layout"] == own["layout"] and len(figure["data"][2]["x"]) == len(own["data"][2]["x"]) > 5


def test_what_is_refused_by_name(server: Server) -> None:
    """Before anything is scheduled, with a status."""
    body = {"prompt": PROMPT, "transcoders": "tc", "max_features": 60}
    for fields, text in (
        ({"prompt": [1] * 41}, "a circuit of 41 tokens of the prompt; at most 40 (max_circuit_tokens)"),
        ({"max_features": 301}, "a circuit of 301 features; at most 300 (max_circuit_features)"),
        ({"batch": 10**7}, "this server's max_circuit_bytes allows 2048 MiB: batch="),
        ({"transcoders": "/etc/passwd"}, "no SAE '/etc/passwd'"),
        ({"transcoders": ["tc", "tc/1"]}, "takes one SAE or transcoder that reads a layer"),
        ({"transcoders": []}, "needs transcoders"),
        ({"transcoders": ["tc/1"] * 513}, "transcoders"),
        ({"target": [3] * 257}, "target"),
        ({"target": [3, 3]}, "names a token twice"),
        ({"target": [[3, 4, 5]]}, "target"),
        ({"target": 10**6}, "is not a token"),
        ({"skip": 6}, "leaves no position with nodes"),
        ({"prompt": [10**6]}, "10"),
        ({"path": "/tmp"}, "unknown field"),
        ({"logit_mass": 2}, "logit_mass"),
        ({"max_logits": 0}, "max_logits"),
        ({"target": "w" * 10**5}, "target"),
        ({"transcoders": ["t" * 10**5]}, "transcoders"),
    ):
        with server.client("declared") as client:
            answer = client.post(PATH, json={**body, **fields})
        assert answer.status_code == 400 and text in answer.json()["error"]["message"], (fields, answer.text)
    with server.client("plain") as client:
        assert client.post(PATH, json=body).status_code == 403
    with LM.connect(server.url, api_key=KEYS["declared"]) as lm:
        for error, text, given in (
            (ValueError, "are names", {"transcoders": random_sae(72)}),
            (ValueError, "are on its device", {"offload": True}),
            (ValueError, "no SAE 'sea'", {"transcoders": "sea"}),
            (PromptError, "max_circuit_features", {"max_features": 301}),
            (PromptError, "names a token twice", {"target": [3, 3]}),
        ):
            with pytest.raises(error, match=text):
                lm.circuit(PROMPT, **{"transcoders": "tc", "max_features": 60, **given})
        with lm.edit() as (_, edited):
            edited.model.layers[0].output[:] *= 0
        with pytest.raises(NotImplementedError, match="this model has edits"):
            edited.circuit(PROMPT, "tc")
        with pytest.raises(PromptError, match="token ids only"):  # vectors would be left out
            lm.circuit({"prompt_token_ids": [1, 2, 3], "embeds": {1: torch.zeros(72)}}, "tc")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Passes that wait at their layers until the test ends. Returns the number of layers that were reached."""
    reached, call = list[str](), passes.CircuitPasses.call

    def waiting(own: Any, method: str, *arguments: Any) -> Any:
        if method == "back_layer":
            reached.append(method)
            time.sleep(0.05)
        return call(own, method, *arguments)

    monkeypatch.setattr(passes.CircuitPasses, "call", waiting)
    yield lambda: len(reached)


def test_a_client_that_leaves_ends_its_circuit(server: Server, slow: Callable[[], int]) -> None:
    """A second one of the same key is refused while it runs; the next one runs, and requests run beside it."""
    body = {"prompt": PROMPT, "transcoders": "tc", "max_features": 300, "batch": 1}
    with server.client("declared") as client, client.stream("POST", PATH, json=body) as answer:
        lines = answer.iter_lines()
        while '"progress"' not in next(lines):
            pass
        with server.client("declared") as second:
            refused = second.post(PATH, json=body)
            assert refused.status_code == 429 and "max_circuits" in refused.text
            done = second.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
            assert done.status_code == 200
        waiting: list[int] = []

        def ask() -> None:
            with server.client("other") as third:
                waiting.append(third.post(PATH, json={**body, "max_features": 1}).status_code)

        other = threading.Thread(target=ask)
        other.start()
        time.sleep(0.5)
        assert not waiting  # the engine makes one circuit at a time
    other.join(60)
    assert waiting == [200]
    server.wait_until_idle()
    before = slow()
    time.sleep(0.3)
    assert slow() == before < 300 * 3


def test_graphs_are_made_one_at_a_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is more than the circuits'. So a client that leaves and comes back has one at most."""
    running, most, draw = list[int](), list[int](), circuits.figure_of

    def slowly(*arguments: Any) -> Any:
        running.append(1)
        most.append(len(running))
        time.sleep(0.6)
        running.pop()
        return draw(*arguments)

    monkeypatch.setattr(circuits, "figure_of", slowly)
    body = {"prompt": PROMPT, "transcoders": "tc", "max_features": 4, "form": "figure"}

    def ask(name: str) -> None:
        with server.client(name) as client:
            assert events_of(client.post(PATH, json=body).text)[-1]["type"] == "circuit"

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("declared", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1, 1]


def test_a_circuit_that_takes_too_long_is_ended(
    served_folder: Path, coders: tuple[Path, list[str]], tmp_path: Path, slow: Callable[[], int]
) -> None:
    body = {"prompt": PROMPT, "transcoders": "tc", "batch": 1}
    with served(served_folder, *coders[1], "--circuit-timeout", "0.5", folder=tmp_path) as own:
        with own.client("declared") as client:
            answer = client.post(PATH, json=body)
        assert "the circuit took longer than 0.5 s, the server's limit (circuit_timeout)" in answer.text
        with LM.connect(own.url, api_key=KEYS["declared"]) as lm, pytest.raises(Exception, match="circuit_timeout"):
            lm.circuit(PROMPT, "tc", batch=1)
        own.wait_until_idle()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_draws_the_figure(server: Server, local: LM, tmp_path: Path) -> None:
    """Nodes and edges of `circuit.plot()`; the texts of nodes are shown, by keyboard too. Nothing comes from elsewhere."""
    own = figure_of(local.circuit(PROMPT, "tc", max_features=300), 500)
    with browsing(tmp_path / "profile") as page:
        page.open(f"{server.url}/")
        page.wait_for("document.body.dataset.state === 'ready'")
        page.run(f"""(() => {{ const set = (id, value) => {{ document.getElementById(id).value = value;
            document.getElementById(id).dispatchEvent(new Event('change')); }};
            set('key', '{KEYS["declared"]}'); set('prompt', '{PROMPT}'); }})()""")
        page.wait_for("!document.getElementById('circuit-section').hidden")
        assert page.run("document.getElementById('transcoders').value") == "tc"
        assert page.run("[...document.getElementById('saes').options].map((one) => one.value)") == [
            "tc",
            "tc/0",
            "tc/1",
            "tc/2",
        ]
        page.run("document.getElementById('circuit').click()")
        page.wait_for("document.querySelectorAll('#graph circle').length > 0")
        page.wait_for("document.getElementById('circuit').ariaDisabled === 'false'")
        text = "document.getElementById('circuit-node').textContent"
        assert page.run(text).startswith("Circuit(") and "completeness" in page.run(text)
        nodes = [(trace["marker"]["color"], len(trace["x"])) for trace in own["data"] if trace["mode"] == "markers"]
        for colour, count in nodes:
            assert page.run(f"document.querySelectorAll('#graph circle[fill=\"{colour}\"]').length") == count
        ticks = [*own["layout"]["xaxis"]["ticktext"], *own["layout"]["yaxis"]["ticktext"]]
        assert page.run("[...document.querySelectorAll('#graph text')].map((one) => one.textContent)") == ticks
        lines = page.run(
            "[...document.querySelectorAll('#graph path')].map((one) => one.getAttribute('d').split('M').length - 1)"
        )
        assert lines == [len(trace["x"]) // 3 for trace in own["data"] if trace["mode"] == "lines"]
        page.run("document.getElementById('circuit').focus()")
        page.press("Tab")
        first = page.run(text)
        page.press("ArrowRight")
        assert first.startswith("feature ") and page.run(text).startswith("feature ") and page.run(text) != first
        assert page.run("document.getElementById('error').textContent") == "" and page.problems == []
