"""`VllmBackend`: a `Backend` with vLLM as its engine."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from ... import __version__
from ...client import open_engines
from ...client.backend import Submission
from ...client.calls.lowered import Lowered
from ...client.calls.traces import run_pass, serve
from ...client.factory_backend import FactoryBackend
from ...client.facts import HOOK_LIMITS, ModelFacts
from ...client.generation_defaults import GenerationDefaults
from ...client.images.reader import image_reader
from ...client.lifecycle.orders import EngineOrders
from ...client.pooling.folders import last_site, pooler_of
from ...client.remote.remote_backend import tree_of
from ...client.request_factory import RequestFactory
from ...config import ModelConfig, ServerConfig
from ...core.limits import EngineLimits, tasks_of
from ...core.request import Request
from ...hooks.saes.registry import SAERegistry
from ...hooks.traces.blocks.trace import RequestTrace
from ...hooks.traces.syntax.envoy import TracedModel
from ...hooks.traces.syntax.session import SessionTracer
from ...hooks.traces.syntax.tracer import TraceInput
from ...models.registry import check_supported, is_native
from ...models.weights.source import ModelSource, load_tokenizer, resolve_model
from ..architectures import check_architecture
from ..blocks import payload_of
from ..refusals import VllmRefusalError
from ..scheduler import scheduler_name
from ..settings import OURS, RANK_MODULE, limits_of, served_spec, server_config_of, uses_tables
from ..versions import installed_version
from .adapters import VllmAdapters
from .arguments import engine_arguments
from .attached import AttachedLLM
from .blocks import check_blocks, check_traced, why_uncut
from .canary import check_steering
from .core import VllmCore
from .declarations import VllmDeclarations
from .engine import VllmRequestEngine
from .lifecycle import VllmLifecycle, VllmSleep
from .sampling import check_embeds, check_params
from .weights import VllmUpdate, VllmWeights

HOOKS = {
    "declared": "in front of vLLM's norms, inside its compiled passes and CUDA graphs",
    "traces": "after their requests, over captured states (lm.trace lowered); else on rank 0, between the modules of passes "
    "without graphs",
}
"""Description of how hooks run, by kind."""
INSTEAD = "declare it (interventions=, capture=), or use LM(model), whose engine is our own"


class VllmBackend(FactoryBackend):
    """A `Backend` with vLLM's processes: its scheduler, kernels, ranks and quantisation. Hooks are declared ones.

    Args:
        model, server: see `LocalBackend`; settings without a counterpart in vLLM are refused.
        arguments: further ones of vLLM's, such as `tensor_parallel_size`.
        attached: see `VllmCore`.

    Raises:
        ModuleNotFoundError, ImportError: vLLM is not installed, or a version that was not tested.
        NotImplementedError: a setting, a model or a structure that hooks cannot be served with; or the canary has failed.
        FileNotFoundError, ValueError: no such model, or one that cannot be served.
    """

    def __init__(
        self,
        model: ModelConfig,
        server: ServerConfig,
        arguments: Mapping[str, Any] | None = None,
        attached: Any = None,
    ) -> None:
        open_engines.wait_for_released()
        source = resolve_model(model, quantised=True)
        check_supported(source.hf_config)
        installed_version()
        check_architecture(source.hf_config)
        given = {} if attached is not None else engine_arguments(model, server, source, dict(arguments or {}))
        core = VllmCore(given, server, attached)
        try:
            self._describe(core, model, server, source)
            check_steering(self)
        except BaseException:
            core.close()
            raise

    @classmethod
    def of_llm(cls, llm: Any) -> VllmBackend:
        """A backend over a user's `vllm.LLM`. Raises VllmRefusalError: vLLM was started without `llm_arguments`."""
        config = llm.llm_engine.vllm_config
        if not str(config.parallel_config.worker_cls).startswith(RANK_MODULE):
            raise VllmRefusalError(
                "LM.attach(llm): this vLLM has no taps in its ranks: start it with vllm.LLM(model, **llm_arguments()), of "
                "pymllm_interp.vllm_engine"
            )
        found = config.model_config
        model = ModelConfig(model=str(found.model), dtype=found.dtype, seed=found.seed or 0)
        server = replace(server_config_of(config.additional_config), logprobs_mode=found.logprobs_mode)
        if found.multimodal_config is not None:
            most = found.multimodal_config.get_limit_per_prompt("image")
            server = replace(server, limit_mm_per_prompt={"image": most})
        return cls(model, server, attached=llm)

    def _describe(self, core: VllmCore, model: ModelConfig, server: ServerConfig, source: Any) -> None:
        config = core.config
        dtype, hf_config = config.model_config.dtype, source.hf_config
        device = "cuda" if core.on_cuda else "cpu"
        limits, why_cuts = limits_of(server, device), why_uncut(hf_config, config)
        spec = served_spec(hf_config, dtype)
        spec = replace(spec, cuts_edges=spec.cuts_edges and not why_cuts)
        scheduler = config.scheduler_config
        ring = server.capture_ring_bytes if uses_tables(device) else None
        declarations = VllmDeclarations(
            limits, spec, config.parallel_config.tensor_parallel_size, core.stages, scheduler.max_num_batched_tokens, ring,
            "" if config.speculative_config is None else "all" if scheduler.scheduler_cls != scheduler_name(config) else "chosen",
            why_cuts, lambda: core.wait(core.uplink.send_traces(payload_of([]))),
        )  # fmt: skip
        weights, saes = VllmWeights(hf_config, partial(core.call, "interp_checksum")), SAERegistry(spec, "cpu")
        for name, sae in model.saes.items():
            saes[name] = sae
        self.core, self.loaded = core, VllmAdapters(core, weights.adapters)
        self.engine = VllmRequestEngine(core, declarations.release, self.loaded, lambda: weights.version)
        open_engines.track(cast(Any, self.engine))
        self.module = tree_of(hf_config, "native" if is_native(hf_config, "auto") else "transformers", dtype)
        ranks = f"{len(core.ranks)} rank{'s' if len(core.ranks) > 1 else ''}"
        ranks += f" of {core.engines} engines" if core.engines > 1 else ""
        self.facts = ModelFacts(
            name=source.name, model=model.model, folder=source.folder, spec=spec, hf_config=hf_config,
            impl="native" if is_native(hf_config, model.impl) else "transformers", architecture=type(self.module).__name__,
            dtype=dtype, device=device, engine_name=(
                f"pymllm-interp {__version__}, vLLM {core.version} ({core.ranks[0]['runner']} runner, {ranks}), "
                f"torch {torch.__version__}, {device}, {dtype}"
            ),
            inner_sites=limits_of(server, device).inner_sites,
            limits=EngineLimits(
                spec.vocab_size, config.model_config.max_model_len, scheduler.max_num_batched_tokens, core.kv_tokens,
                scheduler.max_num_seqs, core.generates,
            ),
            settings={name: getattr(server, name) for name in HOOK_LIMITS},
            hooks={"hook_execution": server.hook_execution, **HOOKS},
            defaults=GenerationDefaults.of(model.generation_config, hf_config, source.folder), seed=model.seed,
            logprobs_mode=server.logprobs_mode, tasks=tasks_of(hf_config), names=source.names, page_size=server.page_size,
            speculates=config.speculative_config is not None, pooler=pooler_of(source.root, encoder=False),
            pooled_site=last_site(spec),
        )  # fmt: skip
        self.tokenizer = load_tokenizer(source)
        self.facts = replace(self.facts, images=image_reader(source, self.tokenizer, server, dtype))
        self._orders = self._orders_of(model, source, weights)
        self.lowered = Lowered(self.module, server.lower_traces, torch.device("cpu"))
        self._use(RequestFactory(self.facts, self.tokenizer, declarations, weights, saes, self.loaded.hold))
        open_engines.release_with(self.factory, cast(Any, self.engine))

    def prepare(self, submission: Submission) -> list[list[Request]]:
        for prompt, params, what in zip(submission.prompts, submission.params, submission.names, strict=True):
            check_embeds(prompt, params, self.core.config.model_config, what)
            if params is not None:
                check_params(params, what)
            if prompt.images and self.core.images is not None:
                self.core.images.check(prompt.images, what)
        found = super().prepare(submission)
        if submission.edits:
            requests = [request for group in found for request in group]
            self._send_blocks([request.trace for request in requests], requests)
        return found

    # -- traces ----------------------------------------------------------------------------

    def attach(self, model: TracedModel) -> None:
        self.core.tree = weakref.ref(model)

    def run_blocks(
        self,
        mode: str,
        traces: list[RequestTrace],
        inputs: Sequence[TraceInput | None],
        why: str,
        refused: Exception | None = None,
    ) -> None:
        """Run the blocks on rank 0, between the modules of its passes.
        Raises VllmRefusalError: no block can do this here. The message names it."""
        self.engine.check_open()
        check_blocks(self.facts, traces, self.core.config)
        requests = self.factory.for_traces(mode, traces, inputs)
        for trace in traces:
            trace.receipt.not_lowered = why
        self._send_blocks(traces, requests)
        serve(self, traces, requests)

    def _send_blocks(self, traces: Sequence[RequestTrace], requests: Sequence[Request]) -> None:
        """Make the blocks of requests known to the ranks."""
        try:
            if self.core.config.model_config.enable_prompt_embeds:
                raise VllmRefusalError(f"blocks and enable_prompt_embeds=True: leave one of them out. {OURS}")
            check_blocks(self.facts, traces, self.core.config)
            for request in requests:
                check_params(request.params, "the prompt")
                check_traced(request)
            self.core.wait(self.core.uplink.send_traces(payload_of(traces)))
        except BaseException:
            self.factory.release(requests)
            raise

    def session(self, model: TracedModel, device: Any, **kwargs: Any) -> SessionTracer:
        raise VllmRefusalError(
            f"lm.session: with engine='vllm' only saved values leave the ranks: write the traces one after the other, or {INSTEAD}"
        )

    def run_pass(self, model: TracedModel, mode: str, inputs: tuple, kwargs: dict[str, Any]) -> Any:
        return run_pass(self, model, mode, inputs, kwargs)

    def _orders_of(self, model: ModelConfig, source: ModelSource, weights: VllmWeights) -> EngineOrders | None:
        """The orders to an engine that is not its user's."""
        core, engine, folder = self.core, self.engine, None if model.load_format == "dummy" else source.folder
        if isinstance(core.llm, AttachedLLM):
            return None

        def make_update() -> VllmUpdate:
            if folder is None:
                raise VllmRefusalError(
                    f"update_weights needs the names of a checkpoint, and load_format='dummy' has none. {OURS}"
                )
            return VllmUpdate(self.module, source.hf_config, model, folder, core.ranks[0]["merged"])

        lifecycle = VllmLifecycle(core, engine, weights, make_update, self.facts.spec.num_experts > 0)
        sleep = VllmSleep(core, engine, weights, lifecycle, folder)
        return EngineOrders(lifecycle, sleep, self.facts.device)

    def control(self, order: str, **arguments: Any) -> Any:
        self.engine.check_open()
        if self._orders is None:
            raise VllmRefusalError(f"{order}: an attached vLLM is paused, updated and put to sleep by its own calls")
        return self._orders.run(order, **arguments)

    def load_adapter(self, name: str, folder: str) -> None:
        self.engine.check_open()
        self.loaded.load(name, folder)

    def unload_adapter(self, name: str) -> None:
        self.engine.check_open()
        self.loaded.unload(name)

    @property
    def adapters(self) -> dict[str, str]:
        self.engine.check_open()
        return self.loaded.folders

    def require_process(self, feature: str, instead: str = "") -> None:
        if feature == "lm.harvest":  # its passes are requests
            return
        hint = f"; {instead}" if instead else ""
        raise NotImplementedError(
            f"{feature} needs the model in this process, and vLLM has it in its own: make a local LM{hint}"
        )
