"""The contract with nnsight: what hooks/ relies on, so that a new release fails here first."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from greenlet import GreenletExit, getcurrent, greenlet
from nnsight import NNsight
from nnsight.intervention.cache import Cache
from nnsight.intervention.serialization import dumps, loads

import pymllm_interp
from pymllm_interp.hooks.traces import nnsight_compat as compat
from pymllm_interp.hooks.traces.serving.handover import Handover
from pymllm_interp.hooks.traces.serving.interleaver import EngineInterleaver
from pymllm_interp.hooks.traces.syntax.envoy import TracedModel

PACKAGE = Path(pymllm_interp.__file__).parent


def test_only_nnsight_compat_imports_nnsight() -> None:
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nnsight") and not node.level)
        or (isinstance(node, ast.Import) and any(alias.name.startswith("nnsight") for alias in node.names))
    }
    assert importers == {"hooks/traces/nnsight_compat.py"}


def test_an_unknown_version_is_refused_with_the_supported_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(compat.__file__).read_text()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9.9")
    with pytest.raises(ImportError, match=r"nnsight 0\.8\.1, but 9\.9\.9 is installed: pip install"):
        exec(compile(source, "nnsight_compat", "exec"), {"__name__": "probe"})


def test_a_block_parks_by_switching_a_pending_to_its_parent() -> None:
    mediator = compat.Mediator(
        compile("x = read()", "block", "exec"), {"read": lambda: compat.Mediator.value("m.output")}, {}
    )
    mediator.start(compat.Interleaver())
    pending = mediator.pending
    assert isinstance(pending, compat.Pending)
    assert (pending.event, pending.provider, pending.iteration) == (compat.Event.VALUE, "m.output", 0)
    assert mediator.alive and mediator.switch(7) is None and mediator.lcls["x"] == 7 and not mediator.alive


def test_the_running_block_is_found_through_its_greenlet() -> None:
    seen = []
    mediator = compat.Mediator(
        compile("look()", "block", "exec"), {"look": lambda: seen.append(getcurrent().mediator())}, {}
    )
    mediator.start(compat.Interleaver())
    assert seen == [mediator] and isinstance(mediator.worker, greenlet)


def test_a_scope_tells_what_a_block_bound_from_what_it_found() -> None:
    scope = compat.Scope({"found": 1}, {}, {"outside": 3})
    exec("bound = found + outside", scope)
    assert scope.writes() == {"bound": 4} and scope.written == {"bound"}
    dict.__setitem__(scope, "hidden", 5)
    assert "hidden" not in scope.writes()


def test_saves_are_ids_in_a_set_of_the_thread() -> None:
    compat.save_scope.depth = 1
    try:
        value = compat.mark([])
        assert id(value) in compat.thread_saves() and compat.save_scope.__dict__["saves"] is compat.thread_saves()
    finally:
        compat.save_scope.depth = 0
        compat.thread_saves().clear()


def test_a_module_hands_over_its_input_skip_gate_and_output_only_while_busy() -> None:
    envoy = compat.Envoy(torch.nn.Linear(2, 2), path="m")
    seen = []
    envoy.interleaver.handle = lambda provider, value: seen.append(provider) or value
    envoy._module(torch.zeros(1, 2))
    envoy.interleaver.interleaving = True
    envoy._module(torch.zeros(1, 2))
    assert not seen
    envoy.interleaver.busy = True
    envoy._module(torch.zeros(1, 2))
    assert seen == ["m.input", "m.skip", "m.output"]


def test_a_modules_state_tells_where_it_hands_over_and_what_it_runs() -> None:
    envoy = compat.Envoy(torch.nn.Linear(2, 2), path="m")
    state = compat.install_controller(envoy)
    assert type(envoy._module.__dict__["forward"]) is compat.Controller
    [(interleaver, path, locations)] = state.routes
    assert (interleaver(), path, locations) == (envoy.interleaver, "m", ("m.input", "m.skip", "m.output"))
    x = torch.zeros(1, 2)
    assert torch.equal(state.body(envoy._module, x), envoy._module(x))


def test_our_short_ways_hand_over_and_park_as_nnsights(lm_of) -> None:
    """`Handover` reaches the locations that nnsight's controller does, `Read` parks as its property does."""
    lm = lm_of("llama")
    mlp = lm.model.layers[0].mlp
    seen = []
    own = {name: getattr(type(mlp), name) for name in ("input", "inputs", "output")}
    for name, ours in own.items():
        theirs = getattr(compat.Envoy, name)
        for read in (ours, theirs):
            mediator = compat.Mediator(compile("read()", "block", "exec"), {"read": partial(read.__get__, mlp)}, {})
            mediator.start(compat.Interleaver())
            seen.append(mediator.pending)
            mediator.worker.throw(GreenletExit)
    for write in (own["output"].__set__, compat.Envoy.output.__set__):
        mediator = compat.Mediator(compile("write(5)", "block", "exec"), {"write": partial(write, mlp)}, {})
        mediator.start(compat.Interleaver())
        seen.append(mediator.pending)
        mediator.worker.throw(GreenletExit)
    assert seen.pop() == seen.pop() == (compat.Event.SWAP, "model.model.layers.0.mlp.output", 0, 5)
    assert seen[0::2] == seen[1::2] and [pending.provider for pending in seen[0::2]] == [
        "model.model.layers.0.mlp.input", "model.model.layers.0.mlp.input", "model.model.layers.0.mlp.output"
    ]  # fmt: skip
    assert type(mlp._module.__dict__["forward"]) is Handover
    with pytest.raises(ValueError, match="outside of interleaving"):
        _ = mlp.output


def test_a_tree_takes_an_interleaver_that_was_made_before_it(lm_of) -> None:
    interleaver = EngineInterleaver()
    module = lm_of("llama").runner.get_model()
    tree = TracedModel(module, interleaver=interleaver)
    assert tree.interleaver is tree.generator.interleaver is interleaver
    assert interleaver.points.at("model.model.layers.0.output").in_model and interleaver.samples == "model.samples"
    assert TracedModel(module).interleaver is not interleaver


def test_a_module_that_several_trees_share_is_served_to_each(lm_of) -> None:
    lm = lm_of("llama")
    norm = lm.model.norm._module
    theirs, other = NNsight(norm), compat.Envoy(norm, path="other", interleaver=EngineInterleaver())
    for latest in (None, lm.model.norm):
        if latest is not None:
            latest.interleaver.instrument(latest)  # as when weights are loaded anew
        with theirs.trace(torch.ones(1, 1, 72)):
            seen = theirs.output.save()
        with lm.trace([1, 2, 3]):
            ours = lm.model.norm.output.save()
        assert torch.equal(seen, norm(torch.ones(1, 1, 72))) and ours.shape == (1, 3, 72)
    assert other.interleaver.visits.counts == {}


def test_names_and_signatures_that_are_overridden_exist() -> None:
    assert list(inspect.signature(compat.Mediator.__init__).parameters)[:4] == ["self", "code", "glbls", "lcls"]
    assert {"iteration", "pending", "exception", "caches", "worker"} <= set(vars(compat.Mediator(None, {}, {})))
    assert {"mediators", "busy", "sourced", "defer_exceptions"} <= set(vars(compat.Interleaver()))
    for cls, names in {
        compat.InterleavingTracer: ("execute", "invoke", "barrier", "iter", "all", "cache", "stop", "result"),
        compat.Envoy: ("_named_children", "_edits", "_batch_size", "modules", "get", "skip", "source", "edit"),
        compat.Iterations: ("_indices", "__getitem__", "__iter__"),
        Cache: ("subscriptions", "observe_selected"),
        compat.Barrier: ("__call__",),
    }.items():
        instance_names = set(dir(cls)) | ({"_edits"} if cls is compat.Envoy else set())
        assert set(names) <= instance_names, cls
    assert (
        compat.dangling_unwind
        and compat.NO_SKIP is not None
        and compat.apply((1, [2]), lambda x: x + 1, int) == (2, [3])
    )


def test_a_serialised_block_names_its_envoys_by_path(lm_of) -> None:
    """Hundreds of bytes, not the tree: the form in which the remote LM will send a block."""
    lm = lm_of("llama")
    captured = []
    original = type(lm)._run_traces

    def keep(self, mode, traces, inputs) -> Any:
        captured.extend(dumps(block) for block in (trace.main_block for trace in traces))
        return original(self, mode, traces, inputs)

    type(lm)._run_traces = keep
    try:
        with lm.trace([1, 2, 3]):
            h = lm.model.layers[1].output.save()
            lm.model.layers[2].mlp.output[:] = 0
    finally:
        type(lm)._run_traces = original
    assert len(captured[0]) < 1000, len(captured[0])
    envoys = {f"Envoy:{envoy.path}": envoy for envoy in lm.modules()}
    mediator = loads(captured[0], persistent_objects=envoys)
    mediator.start(compat.Interleaver())
    assert mediator.pending.provider == "model.model.layers.1.output"
    mediator.worker.throw(GreenletExit)
    assert h.shape == (1, 3, 72)


OLD_ANYIO = """
from anyio import TypedAttributeSet

def check(cls):  # as anyio 4.15 does: annotations of the class itself
    for name in dir(cls):
        if not name.startswith("_") and name not in getattr(cls, "__annotations__", {}):
            raise TypeError(f"Attribute {name!r} is missing its type annotation")

TypedAttributeSet.__init_subclass__ = classmethod(check)
"""


@pytest.mark.parametrize(
    ("first", "anyio"),
    [
        ("nnsight", OLD_ANYIO),
        *(pytest.param(name, "", marks=pytest.mark.slow) for name in ("pymllm_interp.lm", "nnsight")),
    ],
)
def test_http_clients_import_after_nnsight(first: str, anyio: str) -> None:
    """nnsight gives every object a `save`, which anyio refuses in classes that it defines late."""
    late = "anyio.abc, anyio._backends._asyncio, anyio.streams.tls, anyio.from_thread, anyio.streams.file"
    code = f"{anyio}\nimport {first}, nnsight, pymllm_interp.lm, {late}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
