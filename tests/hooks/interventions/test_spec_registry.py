"""The registry of ops and reductions: what is made of the classes, and that a new one needs no other module."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers_paths import ROOT
from helpers_server import CLOSE, serving

from pymllm_interp import Capture
from pymllm_interp.captures import Lens
from pymllm_interp.hooks.captures.activations import Activations
from pymllm_interp.hooks.captures.reductions.pools import Last, Max, Mean
from pymllm_interp.hooks.catalogue import ops, reductions
from pymllm_interp.hooks.interventions.op import Gate, Op
from pymllm_interp.hooks.registry import is_spelled, op
from pymllm_interp.hooks.spec import Spec, arguments_of
from pymllm_interp.utils.arguments import PromptError
from pymllm_interp.wire.specs import capture_of, to_json

DOCS = ROOT / "docs"
PROMPT = [3, 14, 15, 9, 2]


@pytest.fixture(scope="module")
def client(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a server whose engine process has imported helpers_new_specs.py."""
    engine = tmp_path_factory.mktemp("engine") / "python"
    code = "import runpy, helpers_new_specs; runpy.run_module('pymllm_interp.server.process', run_name='__main__')"
    engine.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    engine.chmod(0o755)
    options = ("--option", "kv_cache_tokens=256", "--option", "max_model_len=64")
    with serving(model_folder("llama"), *options, keys=None, engine_python=str(engine)) as server:
        with server.client(None) as found:
            yield found


def answer(client: httpx.Client, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True} | fields
    return client.post("/v1/completions", json=body)


def states(client: httpx.Client, capture: Any, **fields: Any) -> Activations:
    (choice,) = answer(client, capture=[capture], **fields).json()["choices"]
    return Activations.from_bytes(base64.b64decode(choice["activations"]["data"]))


def test_a_new_op_runs_over_http(client: httpx.Client) -> None:
    damp = {"op": "damp", "site": "resid_post.1", "share": 0.75, "sign": "flip", "positions": "prompt"}
    plain = states(client, "resid_post.1")["resid_post.1"][: len(PROMPT)]
    found = states(client, "resid_post.1", interventions=[damp])["resid_post.1"][: len(PROMPT)]
    torch.testing.assert_close(found, -0.25 * plain, atol=CLOSE, rtol=CLOSE)
    (choice,) = answer(client, interventions=[damp]).json()["choices"]
    (applied,) = choice["receipt"]["interventions"]
    assert (applied["intervention"], applied["prompt_rows"]) == ("Damp", len(PROMPT))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"share": "x"}, "Damp('resid_post.1'): share='x'; expected a number"),
        ({"share": 1e39}, "expected a finite number"),
        ({"sign": "turn"}, "sign='turn'; expected 'keep' or 'flip'"),
        ({"factor": 2}, "Damp has no field 'factor'; it has site, share, sign, positions, when"),
        ({"positions": [0] * 1000}, "positions has 1000 positions; the context (max_model_len) holds 64"),
        ({"when": {"probe": "v" * 300}}, "when.probe has 300 characters; the name of a vector has at most 256"),
        ({"when": {}}, "Gate needs 'probe'"),
        ({"op": "dump"}, "op is 'dump'; did you mean 'damp'?"),
        ({"op": "x"}, "op is 'x'; expected one of"),
    ],
)
def test_a_new_op_is_checked_by_its_annotations(client: httpx.Client, fields: dict[str, Any], message: str) -> None:
    response = answer(client, interventions=[{"op": "damp", "site": "resid_post.1"} | fields])
    assert response.status_code == 400 and message in response.json()["error"]["message"]


@pytest.mark.parametrize("reduce", ["largest", {"type": "largest"}])
def test_a_new_reduction_runs_over_http(client: httpx.Client, reduce: Any) -> None:
    whole = states(client, "resid_post.*")
    found = states(client, {"site": "resid_post.*", "reduce": reduce})
    for site in ("resid_post.0", "resid_post.2"):
        wanted = whole[site].max(0, keepdim=True).values
        torch.testing.assert_close(found[site], wanted, atol=CLOSE, rtol=CLOSE)
        assert found.positions[site].tolist() == whole.positions[site].tolist()


def test_new_classes_are_in_the_documents(client: httpx.Client) -> None:
    assert "damp" in client.get("/v1/interp/capabilities").json()["ops"]
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["Damp"]["properties"]
    assert fields["share"] == {"default": 0.5, "title": "Share", "type": "number"}
    assert fields["sign"]["enum"] == ["keep", "flip"] and fields["op"]["const"] == "damp"
    assert "ref" in str(schemas["Intervention"]) and "/Damp" in str(schemas["Intervention"])
    spelled = next(form["enum"] for form in schemas["Capture"]["properties"]["reduce"]["anyOf"] if "enum" in form)
    assert set(spelled) == {"mean", "max", "last", "largest"}


@pytest.mark.parametrize(("cls", "name"), [(Mean, "mean"), (Max, "max"), (Last, "last")])
def test_a_reduction_without_fields_and_its_name_are_one(cls: type[Any], name: str) -> None:
    spelled, made = Capture("embed", reduce=name), Capture("embed", reduce=cls())  # pyright: ignore[reportArgumentType]
    assert spelled == made and spelled.fingerprint == made.fingerprint and made.reduce == name
    assert type(spelled.reduction) is cls
    assert to_json(made) == {"site": "embed", "reduce": name}
    assert capture_of({"site": "embed", "reduce": {"type": name}}) == spelled


def test_a_reduction_with_fields_has_no_string() -> None:
    with pytest.raises(
        ValueError, match=r"reduce='lens'; expected 'mean', 'max', 'last', a Project or another .*Features, Lens"
    ):
        Capture("embed", reduce="lens")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"reduce=\['mean'\]; expected 'mean', 'max', 'last'"):
        Capture("embed", reduce=["mean"])  # pyright: ignore[reportArgumentType]
    assert Capture("embed", reduce=Lens()).reduction == Lens()


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"'steer' is the name of pymllm_interp.hooks.interventions.specs.Steer"):

        @op
        @dataclass(frozen=True, eq=False)
        class Steer(Op):  # pyright: ignore[reportUnusedClass]
            """Another."""

    assert ops()["steer"].__module__ == "pymllm_interp.hooks.interventions.specs"


def test_a_class_that_is_not_registered_is_not_sent() -> None:
    @dataclass(frozen=True, eq=False)
    class Twice(Gate):
        """Not registered."""

    with pytest.raises(PromptError, match="Twice is not registered"):
        to_json(Twice([1.0]))


def own_of(classes: Mapping[str, type[Spec]]) -> dict[str, type[Spec]]:
    return {name: cls for name, cls in classes.items() if cls.__module__.startswith("pymllm_interp.")}


@pytest.mark.parametrize(
    ("classes", "page", "heading"), [(ops, "intervene", "intervention"), (reductions, "capture", "`reduce`")]
)
def test_the_table_of_the_docs_is_that_of_the_registry(classes: Any, page: str, heading: str) -> None:
    """A row for each class. It names arguments that the class has, and all that have no default."""
    text = (DOCS / "use" / f"{page}.md").read_text()
    table = text.partition(f"| {heading} |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\"?)(\w+)\"?(?:\((.*?)\))?` \|", table, flags=re.MULTILINE)
    known = {name if is_spelled(cls) else cls.__name__: cls for name, cls in own_of(classes()).items()}
    assert sorted(name for _, name, _ in rows) == sorted(known)
    for quoted, name, given in rows:
        arguments = {argument.name: argument for argument in arguments_of(known[name])}
        shown = {re.split(r"[=:]", part)[0].strip() for part in re.sub(r"\{.*?\}", "features", given).split(",")} - {""}
        needed = {argument.name for argument in arguments.values() if argument.default is MISSING}
        assert shown <= arguments.keys() and needed <= shown, name
        assert bool(quoted) == is_spelled(known[name])


def test_the_page_of_the_server_has_every_name() -> None:
    page = (DOCS / "use" / "serve.md").read_text()
    missing = [
        name
        for name in {**own_of(ops()), **own_of(reductions())}
        if f"`{name}`" not in page and f'"{name}"' not in page
    ]
    assert missing == ["project"], "which has no `type`"


def test_every_argument_of_a_registered_class_has_a_form_in_json() -> None:
    from pymllm_interp.wire.schema import components

    schemas = components()
    for cls in (*own_of(ops()).values(), *own_of(reductions()).values(), Capture, Gate):
        if not is_spelled(cls):
            fields = schemas[cls.__name__]["properties"].keys() - {"op", "type"}
            local = {"device"} if cls is Capture else set[str]()  # rows that stay on a device
            assert fields == {argument.name for argument in arguments_of(cls)} - local
