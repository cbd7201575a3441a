"""`LocalBackend`: an engine of this process, as `LM` and the server's engine process use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import Any, ClassVar

import torch

from .. import __version__
from ..config import ModelConfig, ServerConfig
from ..core.limits import EngineLimits
from ..engine.engine import Engine
from ..engine.lifecycle.lifecycle import EngineLifecycle
from ..engine.lifecycle.sleep import EngineSleep
from ..hooks.traces.blocks.trace import RequestTrace
from ..hooks.traces.syntax.envoy import TracedModel, TreeMaker
from ..hooks.traces.syntax.session import SessionTracer
from ..hooks.traces.syntax.tracer import TraceInput
from ..layers.seal import seal
from ..models.adapters.adapter import Adapter
from ..models.adapters.slots import AdapterSlots
from ..models.registry import is_native
from ..models.weights.source import load_tokenizer
from ..runner import device_memory
from ..runner.device_memory import keeps_scores
from ..runner.interp_model_runner import InterpModelRunner, RunnerCommand
from . import open_engines
from .calls.lowered import Lowered
from .calls.traces import run_pass, serve
from .factory_backend import FactoryBackend
from .facts import HOOK_LIMITS, ModelFacts
from .generation_defaults import GenerationDefaults
from .images.reader import image_reader
from .inputs.audio import AudioReader
from .inputs.encoder_prompts import decoder_start_ids
from .inputs.speech import SpeechTokens
from .lifecycle.orders import EngineOrders
from .pooling.folders import last_site, pooler_of
from .pooling.labels import separator_of
from .request_factory import RequestFactory

HOOKS = {
    "declared": "inside the forward pass; no Python runs, and CUDA graphs are replayed",
    "traces": "Python at module boundaries, between graph segments on CUDA",
}
"""Description of how hooks run, by kind."""


class LocalBackend(FactoryBackend):
    """A `Backend` with its engine, runner and weights in this process.

    Args:
        wrap: makes the tree of the client over the loaded weights (`TracedModel._tree_maker`); None if it is made later.

    Attributes:
        runner: the model's.
        factory: makes requests, with the named vectors of one owner.

    Raises:
        FileNotFoundError, ValueError: no such model, or one that cannot be served.
    """

    in_process: ClassVar[bool] = True

    def __init__(self, model: ModelConfig, server: ServerConfig, wrap: TreeMaker | None = None) -> None:
        open_engines.wait_for_released()
        self.runner = InterpModelRunner(server, model, wrap=wrap)
        engine = None
        try:
            self.engine = engine = Engine(self.runner)
            open_engines.track(engine)
            engine.start()
            self._describe_model()
            self._orders = EngineOrders(EngineLifecycle(engine), EngineSleep(engine), self.runner.device)
            open_engines.release_with(self.factory, engine)  # which views and copies of an LM (`lm.edit()`) have, too
        except BaseException as error:
            self._undo(engine, error)
            engine = None
            raise

    def _undo(self, engine: Engine | None, error: BaseException) -> None:
        """End an engine that could not be set up. A notebook keeps the error, which holds this frame and those below."""
        try:
            if engine is not None:
                engine.shutdown()  # a second Ctrl-C ends this wait; the thread then ends without it
        finally:
            vars(self).clear()
            clear_frames(error.__traceback__)

    def _describe_model(self) -> None:
        runner, source = self.runner, self.runner.source
        self.module: Any = runner.get_model()
        self.interleaver: Any = runner.interleaver
        assert source is not None
        seal(self.module)
        device = torch.device(runner.device)
        self.lowered = Lowered(self.module, runner.server_config.lower_traces, device)
        self.tokenizer = load_tokenizer(source)
        if runner.model_spec.bidirectional:
            self.module.set_separator(separator_of(self.tokenizer))
        self.facts = replace(
            facts_of(runner), images=image_reader(source, self.tokenizer, runner.server_config, runner.dtype)
        )
        weights, saes, declarations, adapters = runner.model_state, runner.saes, runner.declarations, runner.adapters
        assert weights is not None and saes is not None and declarations is not None and adapters is not None
        self._use(RequestFactory(self.facts, self.tokenizer, declarations, weights, saes, adapters.hold))

    def control(self, order: str, **arguments: Any) -> Any:
        self.engine.check_open()
        return self._orders.run(order, **arguments)

    def load_adapter(self, name: str, folder: str) -> None:
        self.engine.check_open()
        assert self.runner.adapters is not None, "the engine is open"
        self.engine.run(InstallAdapter(self.runner.adapters.read(name, folder)))

    def unload_adapter(self, name: str) -> None:
        self.engine.run(RemoveAdapter(name))

    @property
    def adapters(self) -> dict[str, str]:
        self.engine.check_open()
        loaded = self.runner.adapters
        return {} if loaded is None else {name: loaded.folder_of(name) for name in loaded.names}

    def attach(self, model: TracedModel) -> None:
        self.runner.adopt(model)

    # -- traces ----------------------------------------------------------------------------

    def session(self, model: TracedModel, device: Any, **kwargs: Any) -> SessionTracer:
        return SessionTracer(device, **kwargs)

    def run_blocks(
        self,
        mode: str,
        traces: list[RequestTrace],
        inputs: Sequence[TraceInput | None],
        why: str = "",
        refused: Exception | None = None,
    ) -> None:
        self.engine.check_open()
        serve(self, traces, self.factory.for_traces(mode, traces, inputs))

    def run_pass(self, model: TracedModel, mode: str, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        return run_pass(self, model, mode, inputs, kwargs)

    # -- commands and facts ----------------------------------------------------------------

    def run(self, command: RunnerCommand) -> Any:
        return self.engine.run(command)

    def post(self, command: RunnerCommand) -> None:
        self.engine.post(command)


def facts_of(runner: InterpModelRunner) -> ModelFacts:
    """Facts of an open runner's model."""
    config, settings, source, spec = runner.model_config, runner.server_config, runner.source, runner.model_spec
    assert source is not None and runner.attn_backend is not None
    attention = type(runner.attn_backend).__name__
    defaults = GenerationDefaults.of(config.generation_config, source.hf_config, source.folder)
    cross, audio, start = runner.cross_pool, None, tuple[int, ...]()
    if spec.source is not None:
        start = decoder_start_ids(source.hf_config, defaults.values)
    if spec.source is not None and spec.source.family.hears:
        tokens = SpeechTokens.of(start[0] if start else 0, defaults.values)
        audio, start = AudioReader.of(source.hf_config, source.folder, tokens), tuple(tokens.ids())
    return ModelFacts(
        name=source.name, model=config.model, folder=source.folder, spec=spec, hf_config=source.hf_config,
        impl="native" if is_native(source.hf_config, config.impl) else "transformers",
        architecture=type(runner.get_model()).__name__, dtype=runner.dtype, device=runner.device,
        engine_name=f"pymllm-interp {__version__}, torch {torch.__version__}, {runner.device}, {attention}, {runner.dtype}"
        + (f", batch-invariant {runner.kernels[:16]}" if runner.kernels else ""),
        inner_sites=runner.declared.limits.inner_sites,
        limits=EngineLimits(
            runner.vocab_size, runner.context_len, runner.max_num_tokens, runner.max_total_num_tokens,
            runner.max_running_requests, not runner.is_pooling_model,
            0 if cross is None else cross.longest,
        ),
        decoder_start_ids=start, audio=audio, banned=() if audio is None else tuple(map(tuple, audio.tokens.banned)),
        settings={name: getattr(settings, name) for name in (*HOOK_LIMITS, "max_loras", "max_lora_rank")},
        hooks={"hook_execution": settings.hook_execution, **HOOKS},
        defaults=defaults,
        seed=config.seed, logprobs_mode=settings.logprobs_mode, tasks=runner.get_supported_tasks(), names=source.names,
        page_size=settings.page_size, longest_pass=len(runner.input_buffers.input_ids),
        own_device=runner.input_buffers.input_ids.device,
        keeps_scores=keeps_scores(runner.get_model(), runner.attn_backend), speculates=settings.speculative is not None,
        pooler=pooler_of(source.root, spec.bidirectional), pooled_site=last_site(spec),
    )  # fmt: skip


@dataclass(frozen=True)
class InstallAdapter:
    """Load a LoRA adapter. The first one captures decode passes with adapters, where passes are captured."""

    adapter: Adapter

    def run(self, runner: InterpModelRunner) -> None:
        """Load it; nothing has changed where that fails.

        Raises:
            AdapterError: the name is taken.
            torch.OutOfMemoryError: no memory for the slots or the graphs.
        """
        slots = runner.server_config.max_loras
        device_memory.fitting(
            runner,
            lambda: self._install(runner),
            f"no memory for LoRA adapters of rank {self.adapter.rank} in {slots} slots",
            "a lower max_loras, a lower gpu_memory_utilization, or fewer kv_cache_tokens",
        )

    def _install(self, runner: InterpModelRunner) -> None:
        adapters = _slots(runner)
        adapters.install(self.adapter)
        try:
            if runner.graphs.decode is not None or runner.device.startswith("cuda"):
                runner.input_buffers.open_adapters(adapters.max_loras)
            runner.graphs.capture_adapted(adapters)
        except BaseException:
            RemoveAdapter(self.adapter.name).run(runner)
            raise


@dataclass(frozen=True)
class RemoveAdapter:
    """Unload a LoRA adapter. The last one takes the graphs with it."""

    name: str

    def run(self, runner: InterpModelRunner) -> None:
        """Remove the adapter. Raises AdapterError for an unknown name, or while requests use it."""
        adapters = _slots(runner)
        adapters.remove(self.name)
        if not adapters.any_loaded:
            runner.graphs.release_adapted()


def _slots(runner: InterpModelRunner) -> AdapterSlots:
    assert runner.adapters is not None, "call initialize() first"
    return runner.adapters
