"""`TracedModel`: the nnsight model over a runner's weights, which traces are written against.

It is the envoy tree of the module that the runner serves. Users hold an `LM` (lm.py), which is the same object as the
runner's `nnsight_model`.
"""

from __future__ import annotations

import difflib
import warnings
import weakref
from collections.abc import Callable
from functools import cached_property, partial, wraps
from types import CodeType, SimpleNamespace
from typing import Any

from greenlet import getcurrent
from torch import Tensor, nn

from ....layers.seal import is_own_name
from ..blocks.trace import Block, RequestTrace
from ..nnsight_compat import (
    EditingTracer,
    Envoy,
    Event,
    Generator,
    Mediator,
    NNsightDeprecationWarning,
    Pending,
    eproperty,
)
from ..serving.interleaver import EngineInterleaver
from .pass_options import NONE, PassOptions, take_options
from .scanned import NOT_WRITTEN, current_scan, scanned
from .source import AttentionWords, attention_words, reads_attention_source, source_of

_NO_WAIT = None, -1, -2
_new, SWAP = tuple.__new__, Event.SWAP  # a named tuple's own constructor is slow, and so is looking up an enum's member
_INDEXES = tuple(map(str, range(1024)))
SERVED = frozenset({"input", "output"})
"""Names of an envoy that blocks edit most."""
NNSIGHTS_OWN = frozenset({"OVERLOAD_PREFIX", "all", "interleave", "interleaver", "iter"})
"""Names of envoys that `dir` leaves out: only nnsight's machinery uses them, or nnsight deprecates them (`all`, `iter`)."""
GENERATOR_OUTPUT = (
    "lm.generator.output is deprecated in nnsight: use tracer.result. "
    "lm.generator.streamer.output has the tokens of each step"
)
OUTSIDE = (
    "Cannot access `{}.{}` outside of interleaving: a module has values inside the block of `with lm.trace(prompt):` or "
    "`with lm.generate(prompt):`; if that has no prompt, inside its `with tracer.invoke(prompt):`"
)


class Read(eproperty):
    """nnsight's property of the same name, with a fast path: a read or an assignment takes one call, not eight.

    Args:
        of: nnsight's property, which must have no `transform`.
    """

    def __init__(self, of: Any) -> None:
        super().__init__(of.key, of.description)
        self(of._preprocess)
        self._postprocess = of._postprocess
        self._unchanged = of._preprocess is Envoy.output._preprocess  # a call less
        self._assigned = f"{of.key} assigned"  # reads have separate entries, which the next block of a loop reuses

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        worker: Any = getcurrent()
        try:
            block = worker.mediator()
            waits = obj._waits
        except AttributeError:
            if obj is not None and getattr(worker, "mediator", None) is None:
                raise ValueError(OUTSIDE.format(obj.path, self.key)) from None
            return super().__get__(obj, owner)
        if not isinstance(block, Block) or block.transform is not None:
            return super().__get__(obj, owner)
        pending, event_count, pass_index = waits.get(self.key, _NO_WAIT)
        wanted = block.iteration
        if wanted is None:
            if pass_index != block.trace.visits.pass_index or event_count != block.interleaver.visits.event_count:
                pending = self._wait(obj, block, self.key)
        elif pending is None or pending[2] != wanted:
            pending = self._wait(obj, block, self.key)
        value = worker.parent.switch(pending)
        return value if self._unchanged else self._preprocess(obj, value)  # pyright: ignore[reportOptionalCall]

    def _wait(self, obj: Any, block: Any, key: str | None) -> Pending:
        """A read of the value that `block` requests here. Stored in `_waits` under `key`, for the next block with the same
        read."""
        location, iteration, interleaver = f"{obj.path}.{self.key}", block.iteration, block.interleaver
        now = _NO_WAIT[1:]
        if iteration is None:
            block.check_order(location)
            visits, point, current = block.trace.visits, interleaver.points.at(location), interleaver.visits
            iteration, now = visits.occurrence(point, current), visits.key(point, current)
        pending = Pending(Event.VALUE, location, iteration)
        obj._waits[key] = pending, *now
        return pending

    def __set__(self, obj: Any, value: Any) -> None:
        worker: Any = getcurrent()
        mediator = getattr(worker, "mediator", None)
        block = mediator() if mediator is not None else None
        if not isinstance(block, Block) or block.transform is not None:
            if mediator is None:
                raise ValueError(OUTSIDE.format(obj.path, self.key))
            super().__set__(obj, value)
            return
        if self._postprocess is not None:
            value = self._postprocess(obj, value)
        elif block.take_back(obj._waits.get(self.key, _NO_WAIT)[0], value):
            return
        pending, event_count, pass_index = obj._waits.get(self._assigned, _NO_WAIT)
        wanted = block.iteration
        if wanted is None:
            if pass_index != block.trace.visits.pass_index or event_count != block.interleaver.visits.event_count:
                pending = self._wait(obj, block, self._assigned)
        elif pending is None or pending[2] != wanted:
            pending = self._wait(obj, block, self._assigned)
        assert pending is not None
        worker.parent.switch(_new(Pending, (SWAP, pending[1], pending[2], value)))


class TracedEnvoy(Envoy):
    """An envoy with errors that name the modules that exist."""

    input: Any = Read(of=Envoy.input)
    inputs: Any = Read(of=Envoy.inputs)
    output: Any = Read(of=Envoy.output)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # For each property, what the last block that read or assigned here waits for, and its `VisitCounts.key`. Most often the
        # next block has the same key, and waits for the same.
        self._waits: dict[str, tuple[Pending | None, int, int]] = {}
        # A serialised block refers to envoys by path. Without this it would contain the tree.
        self._persistent_id = f"Envoy:{self.path}"

    def _resolve_envoy_class(self, module: nn.Module, path: str) -> Any:
        return _maker(self, module, path)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            raise AttributeError(self._unknown(name)) from None

    def __getitem__(self, key: Any) -> Envoy:
        """A child by its index or name, or a slice of the children. Blocks look up a layer by its index at each visit."""
        if type(key) is int and 0 <= key < len(_INDEXES) and (child := self.__dict__.get(_INDEXES[key])) is not None:
            return child
        return super().__getitem__(key)

    def __dir__(self) -> list[str]:
        """Modules and public names, for completion, without nnsight's machinery."""
        return [name for name in super().__dir__() if not name.startswith("_") and name not in NNSIGHTS_OWN]

    def __delattr__(self, name: str) -> None:
        if is_own_name(self.__dict__.get("_module"), name):
            delattr(self._module, name)
        else:
            super().__delattr__(name)

    def _unknown(self, name: str) -> str:
        names = [child for child, _ in self._named_children()]
        if names and all(child.isdigit() for child in names):
            return f"`{self.path}` has no entry {name}: it holds {len(names)} modules, 0 to {len(names) - 1}"
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        return f"`{self.path}` has no module or attribute `{name}`{hint} (modules: {', '.join(names) or 'none'})"


def _maker(tree: Any, module: nn.Module, path: str) -> Callable[..., Envoy]:
    """Factory of a module's envoy: the class that `envoys=` names for it, or `TracedEnvoy`.

    Args:
        tree: has `_envoys` and `_rename`, which are the same for the whole tree.
    """
    of = Envoy._resolve_envoy_class(tree, module, path)
    if of is Envoy:
        return TracedEnvoy
    return of if issubclass(of, TracedEnvoy) else partial(_of_users_class, of)


def _of_users_class(of: type[Envoy], module: nn.Module, **kwargs: Any) -> Envoy:
    """An envoy of exactly this class. It gets the attributes that `TracedEnvoy`'s children need before it makes them."""
    envoy = of.__new__(of)
    tree = SimpleNamespace(_envoys=kwargs["envoys"], _rename=kwargs["rename"])
    vars(envoy).update(_resolve_envoy_class=partial(_maker, tree), _persistent_id=f"Envoy:{kwargs['path']}")
    envoy.__init__(module, **kwargs)
    return envoy


def _is_served(envoy: Envoy) -> bool:
    return isinstance(vars(envoy).get("interleaver"), EngineInterleaver)


def _serve_users_classes() -> None:
    """Give nnsight's `Envoy` this engine's `.source`, assignments and scans. Envoys of nnsight's own models keep nnsight's."""
    their_source, their_assignment = Envoy.source, Envoy.__setattr__
    their_call, their_attribute = Envoy.__call__, Envoy.__getattr__

    @wraps(their_source.fget)  # pyright: ignore[reportArgumentType]
    def source(self: Envoy) -> Any:
        envoy = scanned(self)
        return source_of(envoy) if _is_served(envoy) else their_source.__get__(envoy)

    @wraps(their_call)
    def call(self: Envoy, *args: Any, **kwargs: Any) -> Any:
        return their_call(scanned(self), *args, **kwargs)

    @wraps(their_attribute)
    def attribute(self: Envoy, name: str) -> Any:
        return their_attribute(scanned(self), name)

    @wraps(their_assignment)
    def assign(self: Envoy, name: str, value: Any) -> None:
        if name in SERVED and type(value) is Tensor:  # an edit: the property of `name` takes it
            object.__setattr__(self, name, value)
            return
        # Names of the module are set on the module, which refuses or writes them (layers/seal.py).
        own = not name.startswith("_") and not hasattr(type(self), name) and _is_served(self)
        if own and is_own_name(self._module, name):
            if current_scan() is not None:
                raise ValueError(NOT_WRITTEN.format(self.path, name))
            setattr(self._module, name, value)
        else:
            their_assignment(self, name, value)

    Envoy.source = property(source)  # pyright: ignore[reportAttributeAccessIssue]
    Envoy.__setattr__, Envoy.__call__, Envoy.__getattr__ = assign, call, attribute


_serve_users_classes()


class GeneratorEnvoy(TracedEnvoy):
    """The generation; its `output` is deprecated in nnsight, in favor of ``tracer.result``."""

    _output = TracedEnvoy.output

    @property
    def output(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Deprecated: token ids [prompts, prompt + new tokens]."""
        warnings.warn(GENERATOR_OUTPUT, NNsightDeprecationWarning, stacklevel=2)
        return self._output

    @output.setter
    def output(self, value: Any) -> None:
        warnings.warn(GENERATOR_OUTPUT, NNsightDeprecationWarning, stacklevel=2)
        self._output = value


TreeMaker = Callable[[nn.Module, EngineInterleaver], "TracedModel | weakref.ref[TracedModel]"]
"""Makes the envoy tree over a loaded module. A client that is the tree itself gives a weak reference: it holds the runner."""


class TracedModel(TracedEnvoy):
    """The root of the tree: the model's modules, the step's `logits` and `samples`, and the `generator`.

    Args:
        module: the runner's model; its weights are not copied.
        interleaver: serves the tree's values, and is bound to the tree; None makes one.
        rename: aliases for modules, as in nnsight.
        envoys: nnsight's map from module classes or paths to envoy classes.

    Attributes:
        _default_options: options of passes for traces without own ones.
    """

    interleaver: EngineInterleaver
    _default_options = NONE

    def __init__(
        self,
        module: nn.Module,
        interleaver: EngineInterleaver | None = None,
        rename: dict[Any, Any] | None = None,
        envoys: dict[Any, Any] | None = None,
    ) -> None:
        super().__init__(
            module,
            path="model",
            interleaver=EngineInterleaver() if interleaver is None else interleaver,
            rename=own_classes(rename, module, "rename"),
            envoys=own_classes(envoys, module, "envoys"),
        )
        spec: Any = module.spec
        self.interleaver.bind(self, spec.family)
        self.generator = GeneratorEnvoy(
            Generator(), path=f"{self.path}.generator", interleaver=self.interleaver, parent=self
        )
        self._children.append(self.generator)

    def _tree_maker(self, rename: dict[Any, Any] | None = None, envoys: dict[Any, Any] | None = None) -> TreeMaker:
        """Function that makes this uninitialised object the tree over a runner's loaded weights."""
        own: weakref.ref[TracedModel] = weakref.ref(self)

        def wrap(module: nn.Module, interleaver: EngineInterleaver) -> weakref.ref[TracedModel]:
            if (tree := own()) is None:
                raise ReferenceError("the client was deleted while its model was loaded")
            TracedModel.__init__(tree, module, interleaver, rename, envoys)
            return own

        return wrap

    @eproperty(description="this step's logits, before sampling")
    def logits(self, value: Any) -> Any:
        """Logits of the request's next token, [1, vocab]. Assign to replace the logits for sampling."""
        return value

    @eproperty(description="this step's sampled token")
    def samples(self, value: Any) -> Any:
        """The sampled token id, [1, 1] int64. Assign to replace the next token of the generation."""
        return value

    def edit(self, *, inplace: bool = False, name: str | None = None, backend: Any = None) -> EditingTracer:
        """A block that runs with every later request, before the request's own: ``with lm.edit() as (tracer, edited):``.

        Args:
            inplace: edit this model. Otherwise the edit belongs to the copy `edited`.
            name: implies `inplace`. A request selects named edits by ``edits=["name"]``; by default it gets all.
        """
        tracer = EditingTracer(self, inplace=inplace or name is not None, backend=backend)
        if name is not None:
            tracer.execute = _NamedEdit(self, name, tracer.execute)  # pyright: ignore[reportAttributeAccessIssue]
        return tracer

    def clear_edits(self, name: str | None = None) -> None:
        """Remove the edit of this name, or all edits. Raises KeyError: no edit has this name."""
        known = {getattr(edit, "name", None) for edit in self._edits}
        if name is not None and name not in known:
            raise KeyError(f"no edit is named {name!r}: {sorted(n for n in known if n)}")
        self._edits = [edit for edit in self._edits if name is not None and getattr(edit, "name", None) != name]

    def _edits_of(self, wanted: list[str] | None) -> list[Mediator]:
        """The edits of a request.

        Args:
            wanted: names of edits, added to the unnamed ones; None for all edits.

        Raises:
            KeyError: no edit has one of these names.
        """
        if not (self._edits or wanted):
            return []
        names = {getattr(edit, "name", None) for edit in self._edits}
        unknown = set(wanted or ()) - names
        if unknown:
            raise KeyError(
                f"edits={wanted}: no edit is named {sorted(unknown)}; there are {sorted(n for n in names if n)}"
            )
        return [e for e in self._edits if wanted is None or getattr(e, "name", None) in (None, *wanted)]

    @cached_property
    def _attention_words(self) -> AttentionWords:
        return attention_words(self)

    def _pass_options(self, blocks: list[Mediator], kwargs: dict[str, Any]) -> PassOptions:
        """Options of the passes of a request with these blocks. Takes transformers' keywords out of `kwargs`."""
        options = take_options(kwargs, self._default_options)
        codes = [block.code for block in blocks]
        eager = options.eager_attention or reads_attention_source(lambda: self._attention_words, codes)
        return options._replace(eager_attention=True) if eager else options

    def _run_traces(self, mode: str, traces: list[RequestTrace], inputs: list[tuple[tuple, dict] | None]) -> list[Any]:
        """Serve the traces' requests. Returns when all have ended: the plans of blocks that ran after them, or none.

        Args:
            mode: "trace" (one forward pass) or "generate".
            inputs: ``(args, kwargs)`` of each trace; None for a trace that sees the prompts of all others.

        Raises:
            RuntimeError: the tree has no engine.
        """
        raise RuntimeError("this model has no engine to run a trace on: open traces on an LM")


class _NamedEdit:
    """Stores an edit block under a name, and replaces the edit that had the name."""

    def __init__(self, model: TracedModel, name: str, store: Callable[[CodeType], None]) -> None:
        self.model, self.name, self.store = model, name, store

    def __call__(self, code: CodeType) -> None:
        self.model._edits = [e for e in self.model._edits if getattr(e, "name", None) != self.name]
        self.store(code)
        self.model._edits[-1].name = self.name  # pyright: ignore[reportAttributeAccessIssue]


def own_classes(keys: Any, model: nn.Module, argument: str) -> Any:
    """The map with the model's own class in place of transformers' class of the same name.

    Args:
        keys: nnsight's map from classes or paths, or one envoy class for all modules.
        model: the root module.
        argument: "rename" or "envoys", for the message.

    Raises:
        ValueError: a class of transformers that no module of the model stands for.
    """
    if not isinstance(keys, dict):
        return keys
    return {_own(key, model, argument): value for key, value in keys.items()}


def _own(key: Any, model: nn.Module, argument: str) -> Any:
    if not isinstance(key, type) or any(isinstance(module, key) for module in model.modules()):
        return key
    classes = {type(module).__name__: type(module) for module in model.modules()}
    if key.__name__ not in classes and key.__module__.startswith("transformers."):
        raise ValueError(
            f"{argument} names {key.__name__}, which no module of this model is: there are {', '.join(sorted(classes))}. "
            "A module's name, such as 'mlp' or 'model.layers.*', is a key, too"
        )
    return classes.get(key.__name__, key)
