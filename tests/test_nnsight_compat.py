"""The contract with nnsight: what hooks/ relies on, so that a new release fails here first."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from greenlet import GreenletExit, getcurrent, greenlet

import pymllm_interp
from pymllm_interp.hooks import nnsight_compat as compat

PACKAGE = Path(pymllm_interp.__file__).parent


def test_only_nnsight_compat_imports_nnsight() -> None:
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nnsight") and not node.level)
        or (isinstance(node, ast.Import) and any(alias.name.startswith("nnsight") for alias in node.names))
    }
    assert importers == {"hooks/nnsight_compat.py"}


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


def test_names_and_signatures_that_are_overridden_exist() -> None:
    assert list(inspect.signature(compat.Mediator.__init__).parameters)[:4] == ["self", "code", "glbls", "lcls"]
    assert {"iteration", "pending", "exception", "caches", "worker"} <= set(vars(compat.Mediator(None, {}, {})))
    assert {"mediators", "busy", "sourced", "defer_exceptions"} <= set(vars(compat.Interleaver()))
    for cls, names in {
        compat.InterleavingTracer: ("execute", "invoke", "barrier", "iter", "all", "cache", "stop", "result"),
        compat.Envoy: ("_named_children", "_edits", "_batch_size", "modules", "get", "skip", "source", "edit"),
        compat.Iterations: ("_indices", "__getitem__", "__iter__"),
        compat.Cache: ("subscriptions", "observe_selected"),
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
    original = type(lm).run_traces

    def keep(self, tracer, traces, inputs) -> None:
        captured.extend(compat.dumps(block) for block, _, _ in tracer._invocations)
        original(self, tracer, traces, inputs)

    type(lm).run_traces = keep
    try:
        with lm.trace([1, 2, 3]):
            h = lm.model.layers[1].output.save()
            lm.model.layers[2].mlp.output[:] = 0
    finally:
        type(lm).run_traces = original
    assert len(captured[0]) < 1000, len(captured[0])
    envoys = {f"Envoy:{envoy.path}": envoy for envoy in lm.modules()}
    mediator = compat.loads(captured[0], persistent_objects=envoys)
    mediator.start(compat.Interleaver())
    assert mediator.pending.provider == "model.model.layers.1.output"
    mediator.worker.throw(GreenletExit)
    assert h.shape == (1, 3, 72)
