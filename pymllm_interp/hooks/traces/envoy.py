"""The nnsight model over a runner's weights: what a trace is written against.

`TracedModel` is the envoy tree of the module that the runner serves. `LM` (engine/lm.py) is the one that users hold; the
runner's own `nnsight_model` is the same object.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent
from torch import nn

from .interleaver import EngineInterleaver
from .nnsight_compat import EditingTracer, Envoy, Event, Generator, Mediator, Pending, eproperty

if TYPE_CHECKING:
    from .trace import RequestTrace
    from .tracer import EngineTracer


_NOBODY = None, -1, -2
OUTSIDE = (
    "Cannot access `{}.{}` outside of interleaving: a module has values inside the block of `with lm.trace(prompt):` or "
    "`with lm.generate(prompt):`; where these have no prompt, inside a `with tracer.invoke(prompt):` of theirs"
)


class Read(eproperty):
    """nnsight's property of the same name, with a short way to park: a read or an assignment takes one call in place of eight.

    Args:
        of: a property without a `transform`.
    """

    def __init__(self, of: Any) -> None:
        super().__init__(of.key, of.description)
        self(of._preprocess)
        self._postprocess = of._postprocess

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        worker: Any = getcurrent()
        mediator = getattr(worker, "mediator", None)
        block = mediator() if mediator is not None else None
        if obj is None or block is None or block.transform is not None:
            if obj is not None and mediator is None:
                raise ValueError(OUTSIDE.format(obj.path, self.key))
            return super().__get__(obj, owner)
        pending, moves, pace = obj._waits.get(self.key, _NOBODY)
        wanted = block.iteration
        if wanted is None:
            trace = block.trace
            if pace != trace.pace or moves != trace.interleaver.moves:
                pending = self._wait(obj, block)
        elif pending is None or pending[2] != wanted:
            pending = self._wait(obj, block)
        value = worker.parent.switch(pending)
        assert self._preprocess is not None
        return self._preprocess(obj, value)

    def _wait(self, obj: Any, block: Any) -> Pending:
        """What `block`, which reads here, waits for; kept for the next that does."""
        location = f"{obj.path}.{self.key}"
        pending = Pending(Event.VALUE, location, block.wanted(location))
        stands = block.trace.stands_at(location) if block.iteration is None else _NOBODY[1:]
        obj._waits[self.key] = pending, *stands
        return pending

    def __set__(self, obj: Any, value: Any) -> None:
        worker: Any = getcurrent()
        mediator = getattr(worker, "mediator", None)
        block = mediator() if mediator is not None else None
        if block is None or block.transform is not None:
            if mediator is None:
                raise ValueError(OUTSIDE.format(obj.path, self.key))
            super().__set__(obj, value)
            return
        if self._postprocess is not None:
            value = self._postprocess(obj, value)
        location = f"{obj.path}.{self.key}"
        worker.parent.switch(Pending(Event.SWAP, location, block.wanted(location), value))


class TracedEnvoy(Envoy):
    """An envoy whose errors name what there is."""

    input: Any = Read(of=Envoy.input)
    inputs: Any = Read(of=Envoy.inputs)
    output: Any = Read(of=Envoy.output)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # What the last block that read here waits for, and where it stood (`RequestTrace.stands_at`): most often as the next.
        self._waits: dict[str, tuple[Pending | None, int, int]] = {}
        # A serialised block names its envoys by path; without this it would carry the tree.
        self._persistent_id = f"Envoy:{self.path}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            raise AttributeError(self._unknown(name)) from None

    def _unknown(self, name: str) -> str:
        names = [child for child, _ in self._named_children()]
        if names and all(child.isdigit() for child in names):
            return f"`{self.path}` has no entry {name}: it holds {len(names)} modules, 0 to {len(names) - 1}"
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        return f"`{self.path}` has no module or attribute `{name}`{hint} (modules: {', '.join(names) or 'none'})"


class TracedModel(TracedEnvoy):
    """The root of the tree: the model's modules, the step's `logits` and `samples`, and the `generator`.

    Args:
        module: the runner's model; its weights are not copied.
        rename: aliases for modules, as in nnsight.
    """

    interleaver: EngineInterleaver

    def __init__(
        self,
        module: nn.Module,
        rename: dict[Any, Any] | None = None,
        interleaver: EngineInterleaver | None = None,
    ) -> None:
        super().__init__(
            module,
            path="model",
            interleaver=interleaver or EngineInterleaver(),
            rename=rename,
            envoys=TracedEnvoy,  # pyright: ignore
        )
        spec: Any = module.spec
        self.interleaver.bind(self, spec.family)
        self.generator = TracedEnvoy(
            Generator(), path=f"{self.path}.generator", interleaver=self.interleaver, parent=self
        )
        self._children.append(self.generator)

    @eproperty(description="this step's logits, before sampling")
    def logits(self, value: Any) -> Any:
        """[1, vocab]: of the request's next token. Assigning replaces what is sampled from."""
        return value

    @eproperty(description="this step's sampled token")
    def samples(self, value: Any) -> Any:
        """[1, 1] int64: the token id that was drawn. Assigning replaces the token that generation goes on with."""
        return value

    def edit(self, *, inplace: bool = False, name: str | None = None, backend: Any = None) -> EditingTracer:
        """A block that runs with every later request, ahead of its own: ``with lm.edit() as (tracer, edited):``.

        The edit belongs to the copy `edited`; with `inplace` to this model, and then only the tracer is bound. A `name` implies
        `inplace`; requests may say which named edits they want (``edits=["name"]``), and have all of them otherwise.
        """
        tracer = EditingTracer(self, inplace=inplace or name is not None, backend=backend)
        if name is not None:
            tracer.execute = _NamedEdit(self, name, tracer.execute)  # pyright: ignore[reportAttributeAccessIssue]
        return tracer

    def clear_edits(self, name: str | None = None) -> None:
        """Drop the edits of this name, or all."""
        known = {getattr(edit, "name", None) for edit in self._edits}
        if name is not None and name not in known:
            raise KeyError(f"no edit is named {name!r}: {sorted(n for n in known if n)}")
        self._edits = [edit for edit in self._edits if name is not None and getattr(edit, "name", None) != name]

    def edits_of(self, wanted: list[str] | None) -> list[Mediator]:
        """The edits that a request gets: all, or the unnamed ones and those of `wanted`. Raises KeyError on unknown names."""
        names = {getattr(edit, "name", None) for edit in self._edits}
        unknown = set(wanted or ()) - names
        if unknown:
            raise KeyError(
                f"edits={wanted}: no edit is named {sorted(unknown)}; there are {sorted(n for n in names if n)}"
            )
        return [e for e in self._edits if wanted is None or getattr(e, "name", None) in (None, *wanted)]

    def scan(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: the engine's passes run on real weights."""
        raise NotImplementedError("lm.scan is not supported: read the shapes in a trace of a short prompt")

    def run_traces(self, tracer: EngineTracer, traces: list[RequestTrace], inputs: list[tuple[tuple, dict]]) -> None:
        """Serve the traces' requests and return when all have ended. `inputs` are each trace's ``(args, kwargs)``.

        Raises:
            RuntimeError: this tree has no engine behind it.
        """
        raise RuntimeError("this model has no engine to run a trace on: open traces on an LM")


class _NamedEdit:
    """Stores an edit block under a name, in place of the one that had it."""

    def __init__(self, model: TracedModel, name: str, store: Callable[[CodeType], None]) -> None:
        self.model, self.name, self.store = model, name, store

    def __call__(self, code: CodeType) -> None:
        self.model._edits = [e for e in self.model._edits if getattr(e, "name", None) != self.name]
        self.store(code)
        self.model._edits[-1].name = self.name  # pyright: ignore[reportAttributeAccessIssue]
