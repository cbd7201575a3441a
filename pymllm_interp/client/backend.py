"""`Backend`, the interface between an `LM` and the engine behind it.

`LocalBackend` is an engine of this process, `RemoteBackend` a server's. Another engine is one more subclass:
``LM(backend=...)`` has the calls of an `LM` over it. Undefined methods raise NotImplementedError with the names of backend
and feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..core.limits import EngineLimits
from ..core.sampling_params import SamplingParams
from ..hooks.captures.spec import Capture
from ..hooks.interventions.knockout import Intervention
from ..hooks.traces.blocks.trace import RequestTrace
from ..hooks.traces.nnsight_compat import Mediator
from ..hooks.traces.syntax.envoy import TracedModel
from ..hooks.traces.syntax.pass_options import NONE, PassOptions
from ..hooks.traces.syntax.session import SessionTracer
from ..hooks.traces.syntax.tracer import EngineTracer, TraceInput
from ..runner.interp_model_runner import RunnerCommand
from .calls.lowered import Lowered
from .chat import RenderedPrompt
from .facts import ModelFacts
from .generation_defaults import GenerationDefaults
from .handle import RequestHandle


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The requests of one call. They are submitted all at once or not at all; those with images one by one (`of`).

    The lists have an entry for each prompt.
    """

    prompts: list[RenderedPrompt]
    params: list[SamplingParams | None]
    """Sampling parameters of each prompt; None: the model's defaults."""
    interventions: list[list[Intervention]]
    captures: list[list[Capture]]
    priority: list[int]
    names: list[str]
    """Prompt names used in error messages."""
    adapters: Sequence[str | None] = ()
    """LoRA adapters by name, for each prompt; empty: none."""
    cache_salt: str | None = None
    timeout: float | None = None
    """Seconds, after which the requests end with finish_reason "timeout"."""
    stream: bool = False
    """Whether each token is an event."""
    prompt_logits: bool = False
    """Whether the logits of all prompt positions are computed. They are captured, unless a capture names the logits."""
    receipts: bool = False
    """Whether requests without interventions and captures have receipts, too."""
    edits: Sequence[Mediator] = ()
    """Persistent edits of the model, which follow each request."""
    passes: PassOptions = NONE
    """Options of forward passes, set by persistent edits."""

    def of(self, i: int, prompt: RenderedPrompt) -> Submission:
        """The call's i-th prompt, as it was read."""
        one = slice(i, i + 1)
        return replace(
            self, prompts=[prompt], params=self.params[one], interventions=self.interventions[one], names=self.names[one],
            captures=self.captures[one], priority=self.priority[one], adapters=self.adapters[one],
        )  # fmt: skip


class Backend(ABC):
    """An engine with a model, and all that a client needs to use it.

    Attributes:
        in_process: whether weights, modules and gradients are in this process.
        tracer: the class of a trace's ``with`` block: (model, mode, *inputs, **keywords).
        engine: runs the requests, and outlives the backend until they have ended. A `RequestEngine`.
        facts: the model, the engine's limits, and the defaults of requests.
        module: the model's modules (`nn.Module`), which traces are written against; on the meta device if the weights are
            elsewhere.
        lowered: finds the blocks of traces that can run after their requests; None: none can.
        runs_code: whether blocks may be sent to the model's process.
        interleaver: an `EngineInterleaver`, which serves the blocks of traces; None if they do not run in this process.
        tokenizer: a transformers tokenizer, or None: prompts are then token ids.
        vectors: named vectors, which interventions may give instead of tensors. Assignment uploads a vector.
        saes: named SAEs, for captures and interventions. Assignment raises NotImplementedError for a server's.
    """

    in_process: ClassVar[bool] = False
    tracer: ClassVar[type[EngineTracer]] = EngineTracer
    engine: Any
    facts: ModelFacts
    module: Any
    lowered: Lowered | None = None
    runs_code = False
    interleaver: Any = None
    tokenizer: Any
    vectors: MutableMapping[str, Any]
    saes: MutableMapping[str, Any]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.facts.name}, {self.engine.state})"

    @property
    def limits(self) -> EngineLimits:
        """Upper bounds of requests and steps."""
        return self.facts.limits

    @property
    def defaults(self) -> GenerationDefaults:
        """Sampling parameters of requests without any, and the end-of-sequence ids."""
        return self.facts.defaults

    def describe(self) -> dict[str, Any]:
        """`ModelFacts.to_json`, and the loaded vectors, SAEs and adapters: the answer of a server's
        ``/v1/interp/capabilities``."""
        return self.facts.to_json() | {
            "saes": {
                name: {"site": sae.site, "features": sae.d_sae} | ({"site_out": sae.site_out} if sae.transcoder else {})
                for name, sae in self.saes.items()
            },
            "adapters": self.adapters if self.in_process else {},
            "tokenizer": self.tokenizer is not None,
            "chat": bool(getattr(self.tokenizer, "chat_template", None)),
            "audio": None if self.facts.audio is None else self.facts.audio.to_json(),
            "images": None if self.facts.images is None else self.facts.images.to_json(),
        }

    @abstractmethod
    def submit(self, submission: Submission) -> list[RequestHandle]:
        """Start requests, and return a handle for each prompt at once.

        Raises:
            PromptError, ValueError: an invalid request; none is started then.
            EngineClosedError: the engine was shut down.
        """

    # -- traces ----------------------------------------------------------------------------

    def attach(self, model: TracedModel) -> None:  # noqa: B027
        """Serve traces that are written against this tree of `module`. Does not hold it."""

    @abstractmethod
    def run_pass(self, model: TracedModel, mode: str, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a trace without a block, on the CPU. Raises errors of `run_blocks`, and of its edits."""

    @abstractmethod
    def session(self, model: TracedModel, device: Any, **kwargs: Any) -> SessionTracer:
        """The ``with`` block around several traces of `model`. Its saves are on `device` afterwards."""

    def run_blocks(
        self,
        mode: str,
        traces: list[RequestTrace],
        inputs: Sequence[TraceInput | None],
        why: str,
        refused: Exception | None = None,
    ) -> None:
        """Serve traces of a ``with`` with blocks that cannot run after their requests. Returns when all have ended.

        Args:
            mode, inputs: see `traces.run`.
            why: reason that the blocks cannot run after their requests; "" with ``lower_traces="off"``.
            refused: error with which the engine refused their declared requests.

        Raises:
            PromptError, TypeError, ValueError: an invoke that cannot be served.
            NotImplementedError: the backend runs no blocks.
        """
        self.require_process("a block of this process")

    # -- calls that need the model's process -------------------------------------------------

    def require_process(self, feature: str, instead: str = "") -> None:
        """Raise NotImplementedError, which names the feature and this backend, unless the model is in this process.

        Args:
            feature: such as "lm.harvest".
            instead: advice about what works here.
        """
        if not self.in_process:
            hint = f"; {instead}" if instead else ""
            raise NotImplementedError(
                f"{feature} runs where the model is, {self.facts.name}: make a local LM there{hint}"
            )

    def run(self, command: RunnerCommand) -> Any:
        """Have the runner run a command between steps. Returns its answer."""
        self.require_process(f"the command {type(command).__name__}")

    def post(self, command: RunnerCommand) -> None:
        """`run` without waiting for the answer. Does nothing after the engine's end."""
        self.run(command)

    def resolve(
        self, captures: list[Capture], interventions: list[Intervention]
    ) -> tuple[list[Capture], list[Intervention]]:
        """One prompt's specs with this model's vectors and SAEs in place of names. Raises PromptError for an unknown name."""
        self.require_process("lm.backend.resolve")
        return captures, interventions

    def control(self, order: str, **arguments: Any) -> Any:
        """Carry out an order that concerns all requests: "pause", "resume", "is_paused", "update_weights".

        Raises:
            NotImplementedError: the backend has no such order.
        """
        raise NotImplementedError(f"{order} is an order to this package's own engine, and this model has another one")

    # -- LoRA adapters ----------------------------------------------------------------------

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter. See ``lm.adapters.load``."""
        self.require_process("lm.adapters.load")

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. See ``lm.adapters.unload``."""
        self.require_process("lm.adapters.unload")

    @property
    def adapters(self) -> dict[str, str]:
        """Loaded adapters: name -> folder."""
        self.require_process("lm.adapters")
        return {}

    def fingerprint(self, adapter: str | None = None) -> str:
        """A hash of config, dtype and weights, as they are now, and of an adapter."""
        self.require_process("lm.weights.fingerprint")
        return ""

    @property
    def weights_version(self) -> int:
        """Grows with every edit of the weights. Cheap: nothing is read from the device."""
        self.require_process("lm.weights.version")
        return 0
