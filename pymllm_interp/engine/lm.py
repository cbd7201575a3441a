"""LM: the model that users hold. Generate with it as with vLLM, trace it as with nnsight.

lm = LM("demo")
outs = lm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))

with lm.trace("The Eiffel Tower is in") as tracer:
    h = lm.model.layers[12].output.save()     # [1, tokens, hidden]
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig

from .. import __version__
from ..config import ModelConfig, ServerConfig
from ..core.arguments import check_names
from ..core.output import RequestOutput
from ..core.request import Request
from ..core.sampling_params import SamplingParams
from ..harvest.folder import HarvestFolder, Identity
from ..harvest.inputs import Settings, tokenizer_fingerprint
from ..harvest.reader import expected_bytes, has_index_per_site
from ..harvest.run import READ, STEPS_AHEAD, HarvestResult, HarvestRun
from ..hooks.binding import captures_for_each_prompt, fingerprint_of, for_each_prompt, resolved
from ..hooks.captures.spec import Capture
from ..hooks.interventions.specs import Intervention
from ..hooks.positions import Generated
from ..hooks.receipt import Receipt
from ..hooks.site import Site
from ..hooks.traces.caller_frames import opens_with
from ..hooks.traces.envoy import TracedModel
from ..hooks.traces.trace import RequestTrace
from ..hooks.traces.tracer import EngineTracer, SessionTracer
from ..hooks.vectors import VectorRegistry
from ..layers.edits.base import LOGITS
from ..models.fingerprint import model_fingerprint
from ..models.source import load_tokenizer
from ..runner.interp_model_runner import InterpModelRunner
from .completion import StreamPiece
from .engine import Engine
from .handle import EngineClosedError, RequestHandle
from .request_factory import (
    IGNORED,
    Limits,
    PromptError,
    RequestFactory,
    as_prompts,
    default_max_tokens,
    sampling_from_kwargs,
)

Interventions = Sequence[Intervention] | Sequence[Sequence[Intervention]] | None
"""One list for all prompts, or a list for each."""
Captures = Sequence[Capture | Site | str] | Sequence[Sequence[Capture | Site | str]] | None
"""The same; a string is a site, or a pattern of sites."""
FORWARD = SamplingParams(temperature=0.0, max_tokens=1)
"""What a trace's single pass samples with, for blocks that read `lm.samples`."""
ELSEWHERE = {
    "device_map": "one device holds the model, device='cuda' or 'cpu'",
    "dispatch": "the weights are always loaded; leave it out",
    "torch_dtype": "here it is dtype",
    "max_num_seqs": "here it is max_running_requests",
    "max_num_batched_tokens": "here it is max_num_tokens",
    "enforce_eager": "here it is disable_cuda_graph=True",
    "tensor_parallel_size": "one device holds the model",
}
"""What nnsight's and vLLM's users write -> what to do."""


class LM(TracedModel):
    """A language model, its engine, and the tree that traces are written against.

    Args:
        model: "demo", a folder (config.json and safetensors), a .gguf file, or a hub id.
        dtype: "auto" is float32 on a CPU and bfloat16 on CUDA.
        device: "auto" is CUDA where there is one.
        load_format: "dummy" makes seeded random weights; config.json is enough, and no tokenizer is needed.
        impl: "native" or "auto", which are the same as yet: "transformers", the family's own class, is refused.
        max_model_len: tokens of one request, prompt and new ones.
        max_running_requests: requests in one step.
        max_num_tokens: token rows in one step; longer prompts run in chunks, traced ones must fit.
        kv_cache_tokens: slots of the KV pool.
        seed: of dummy weights, and of requests without a seed.
        rename: aliases for modules, as in nnsight.
        hf_config: a transformers config in place of config.json (with load_format="dummy").
        server: further fields of `ServerConfig`, by name.

    Attributes:
        vectors: by name, for interventions that give a name in a vector's place (hooks/vectors.py).

    Raises:
        FileNotFoundError, ValueError: no such model, or one that cannot be served; see `models`.
        TypeError: a model that is neither a name nor a path, or a keyword that is not known.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        dtype: Any = "auto",
        device: str = "auto",
        load_format: str = "auto",
        impl: str = "auto",
        max_model_len: int | None = None,
        max_running_requests: int = 256,
        max_num_tokens: int | None = None,
        kv_cache_tokens: int | None = None,
        seed: int = 0,
        rename: dict[Any, Any] | None = None,
        hf_config: PretrainedConfig | None = None,
        **server: Any,
    ) -> None:
        _check_arguments(model, server)
        model_config = ModelConfig(
            model=str(model), dtype=dtype, load_format=load_format, impl=impl, seed=seed, hf_config=hf_config
        )
        server_config = ServerConfig(
            device=device,
            max_model_len=max_model_len,
            max_running_requests=max_running_requests,
            max_num_tokens=max_num_tokens,
            kv_cache_tokens=kv_cache_tokens,
            **server,
        )

        def wrap(module: nn.Module) -> TracedModel:
            TracedModel.__init__(self, module, rename=rename)
            return self

        self.runner = InterpModelRunner(server_config, model_config, wrap=wrap)
        try:
            self.engine = Engine(self.runner)
        except BaseException:
            self.__dict__.clear()  # the tree holds the weights, and the error, which a notebook keeps, this frame
            raise
        assert self.runner.source is not None
        self.tokenizer = load_tokenizer(self.runner.source)
        self.hf_config: PretrainedConfig = self.runner.source.hf_config
        eos = eos_token_ids(self.hf_config, self.runner.source.folder)
        self._factory = RequestFactory(self.tokenizer, eos, self._limits, seed)
        self.vectors = VectorRegistry(self.runner.model_info)
        _open_models.add(self)

    def _limits(self) -> Limits:
        runner = self.runner
        return Limits(
            vocab_size=runner.vocab_size,
            max_model_len=runner.context_len,
            max_num_tokens=runner.max_num_tokens,
            kv_tokens=runner.max_total_num_tokens,
            max_running=runner.max_running_requests,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and states, as `lm.device` says where they are."""
        return self.runner.dtype

    @cached_property
    def model_fingerprint(self) -> str:
        """A hash of weights, dtype and config, of the weights as they are when it is first asked for."""
        model = self.runner.model
        if model is None:
            raise EngineClosedError("the engine was shut down, and its model released")
        return model_fingerprint(model, self.hf_config)  # on the caller's thread: who submits does not wait for a step

    # -- plain requests --------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate: as a call for outputs, as a ``with`` block to trace the generation.

        ``lm.generate(prompts, SamplingParams(...))`` returns a list of `RequestOutput`, in the order of the prompts. A prompt is
        text or token ids. One set of parameters serves all prompts, or a list gives each its own; so with `interventions`, a
        list of `Steer`, `Ablate`, `Clamp`, `Scale` and `Patch`, and with `capture`, a list of sites and `Capture`s (the states are
        in the output's `activations`). `timeout` is in seconds.

        ``with lm.generate(prompt, max_new_tokens=n) as tracer:`` is greedy unless asked otherwise, takes transformers' and
        vLLM's names for its parameters, and serves every step to the block. What that saves is on the CPU afterwards, or on
        `device`.

        Raises:
            PromptError, ValueError: a prompt or a parameter that cannot be served; nothing was scheduled then.
            RuntimeError: the engine was shut down.
        """
        if opens_with(sys._getframe(1)):
            return EngineTracer(self, "generate", *args, **kwargs)
        return self._generate(*args, **kwargs)

    def _generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        edits: list[str] | None = None,
        interventions: Interventions = None,
        capture: Captures = None,
        **unknown: Any,
    ) -> list[RequestOutput]:
        if unknown:
            raise TypeError(
                f"lm.generate(prompts, SamplingParams(...)) got {', '.join(sorted(unknown))}: a call takes SamplingParams; as "
                "keywords they belong to `with lm.generate(prompt, ...) as tracer:`"
            )
        if prompts is None:
            raise TypeError("lm.generate() needs prompts: lm.generate(['text'], SamplingParams(...))")
        handles = self._handles(as_prompts(prompts), sampling_params, timeout, edits, interventions, capture)
        self.engine.submit(handles)
        try:
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        edits: list[str] | None = None,
        interventions: Interventions = None,
        capture: Captures = None,
    ) -> RequestHandle:
        """Start a request and return at once: ``h.result()`` waits for its `RequestOutput`, ``h.cancel()`` ends it."""
        return self._submit(prompt, sampling_params, timeout, edits, interventions, capture, streaming=False)

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        edits: list[str] | None = None,
        interventions: Interventions = None,
        capture: Captures = None,
    ) -> Iterator[StreamPiece]:
        """The text as it comes, in pieces. Each is a string with `token_ids`, `output_index` and, at the end, `finish_reason`.

        Leaving the loop early ends the request.
        """
        return iter(self._submit(prompt, sampling_params, timeout, edits, interventions, capture, streaming=True))

    def astream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        edits: list[str] | None = None,
        interventions: Interventions = None,
        capture: Captures = None,
    ) -> AsyncIterator[StreamPiece]:
        """`stream` for ``async for``."""
        return self._submit(prompt, sampling_params, timeout, edits, interventions, capture, streaming=True).__aiter__()

    def _submit(
        self,
        prompt: Any,
        params: SamplingParams | None,
        timeout: float | None,
        edits: list[str] | None,
        interventions: Interventions,
        capture: Captures,
        streaming: bool,
    ) -> RequestHandle:
        prompts = as_prompts(prompt)
        if len(prompts) != 1:
            raise PromptError(f"one prompt is expected, got {len(prompts)}: lm.generate takes lists")
        handle = self._handles(prompts, params, timeout, edits, interventions, capture, streaming)[0]
        self.engine.submit([handle])
        return handle

    def _handles(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        timeout: float | None,
        edits: list[str] | None = None,
        interventions: Interventions = None,
        capture: Captures = None,
        streaming: bool = False,
    ) -> list[RequestHandle]:
        """A handle for each prompt. What is wrong with any of them is raised before one is scheduled."""
        params = self._params_for(prompts, sampling_params)
        declared = self._named(for_each_prompt(interventions, len(prompts)))
        captures = self._named(captures_for_each_prompt(capture, len(prompts)))
        blocks, handles = self.edits_of(edits), []
        traced = bool(blocks)
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            what = f"prompt {i}" if len(prompts) > 1 else "the prompt"
            text, ids = self._factory.tokens(prompt, what)
            if traced and param.n > 1:
                raise PromptError(
                    f"{what} asks for n={param.n}, but this model has edits, which follow one generation each"
                )
            requests = self._factory.requests(ids, param, what=what, timeout=timeout, traced=traced)
            for request in requests if traced else ():
                request.trace = RequestTrace(None, blocks)
                request.receipt = request.trace.receipt
            for request in requests:
                if any(spec.site == LOGITS for spec in captures[i]):
                    request.params = param  # the prompt's logits of each completion, where they are asked for
                self._declare(request, declared[i], captures[i])
            handles.append(RequestHandle(text, requests, self.tokenizer, self.engine.abort, streaming))
        self._hold(handles)
        return handles

    def _declare(
        self, request: Request, interventions: Sequence[Intervention], captures: Sequence[Capture] = ()
    ) -> None:
        request.declared = self.runner.declare(interventions, captures, request)
        if request.declared is None:
            return
        receipt = request.receipt = request.receipt or Receipt()
        receipt.engine, receipt.model = self._engine_name, self.model_fingerprint
        receipt.spec = fingerprint_of(interventions, captures)

    def _named(self, lists: list[list[Any]]) -> list[list[Any]]:
        """Each request's specs with this model's vectors in place of their names."""
        return resolved(lists, self.vectors, self.runner.model_info)

    @cached_property
    def _engine_name(self) -> str:
        """What computes: what the same specs on the same model may come out differently by, in the last bits."""
        runner = self.runner
        return (
            f"pymllm-interp {__version__}, torch {torch.__version__}, {runner.device}, "
            f"{type(runner.attn_backend).__name__}, {runner.dtype}"
        )

    def _hold(self, handles: list[RequestHandle]) -> None:
        """Keep a place for the vectors of all, or of none."""
        declared = [r.declared for handle in handles for r in handle.requests if r.declared is not None]
        try:
            for entry in declared:
                self.runner.hold(entry)
        except ValueError:
            for entry in declared:
                self.runner.let_go(entry)
            raise

    @staticmethod
    def _params_for(
        prompts: list[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or SamplingParams()] * len(prompts)
        if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
            raise TypeError(
                f"sampling_params is a {type(sampling_params).__name__}: SamplingParams is expected, or a list of them"
            )
        for params in sampling_params:
            if not isinstance(params, SamplingParams):
                raise TypeError(f"sampling_params holds a {type(params).__name__}: SamplingParams is expected")
        if len(sampling_params) != len(prompts):
            raise PromptError(
                f"{len(prompts)} prompts, but {len(sampling_params)} SamplingParams: one, or one for each"
            )
        return list(sampling_params)

    # -- harvests ----------------------------------------------------------------------

    def harvest(
        self,
        inputs: Iterable[Any],
        *,
        capture: Sequence[Capture | Site | str],
        out: str | Path,
        interventions: Sequence[Intervention] | None = None,
        shard_bytes: int = 1 << 29,
        max_length: int | None = None,
        too_long: str = "error",
        progress: bool | None = None,
    ) -> HarvestResult:
        """Write the states of a corpus to `out`, as safetensors shards that `open_harvest` reads.

        Each document is read in one forward pass, without generating; many are under way at once. A run that was killed, or
        stopped by an error, goes on where it was when the same call is made again: it skips the documents that are in whole
        shards, and deletes the rest.

        Args:
            inputs: an iterable of documents, which may be lazy and endless: texts, or token ids. Or one stream of tokens (a
                tensor [n], an array, an iterable of whole numbers), which is cut into documents of `max_length`.
            capture: sites and `Capture`s; what they select and reduce is of one pass.
            out: a new folder, or one of the same harvest.
            interventions: what acts while the documents are read.
            shard_bytes: of a shard at most; a document is never cut, so one that has more makes a larger shard. About twice as
                much is held in memory.
            max_length: tokens of one pass at most; max_model_len where None.
            too_long: of a document with more tokens: "error"; "truncate" reads its beginning; "split" reads it in several
                passes of `max_length`, which do not see each other. Positions count from the document's start then too, so the
                position in the pass is ``position % max_length``.
            progress: show documents, tokens and GB/s on standard error; None: where that is a terminal.

        Raises:
            ValueError: what cannot be captured; a folder of another harvest, or one of another input.
            FileExistsError: a folder with other things in it.
            HarvestError: it stopped before the input's end. The message names the document, and says what was kept.
        """
        captures, declared = self._harvest_specs(capture, interventions)
        limits, model = self._factory.limits, self.runner.model_info
        longest = min(limits.max_model_len, limits.kv_tokens)
        settings = Settings(longest if max_length is None else max_length, too_long, shard_bytes)
        if settings.max_length > longest:
            raise ValueError(
                f"max_length={max_length}: a pass takes at most {longest} (max_model_len, kv_cache_tokens)"
            )
        identity = Identity(
            model=self.model_fingerprint,
            tokenizer=tokenizer_fingerprint(self.tokenizer),
            spec=fingerprint_of(declared, captures),
            shard_bytes=settings.shard_bytes,
            max_length=settings.max_length,
            too_long=too_long,
            index_per_site=has_index_per_site(captures),
        )

        def handle(ids: list[int], what: str) -> RequestHandle:
            (request,) = self._factory.requests(ids, READ, what=what, reads_only=True)
            try:
                self._declare(request, declared, captures)
            except ValueError as error:
                raise PromptError(f"{what}: {error}") from error
            return RequestHandle(None, [request], None, self.engine.abort)

        def submit(handle: RequestHandle) -> None:
            self._hold([handle])
            self.engine.submit([handle])

        run = HarvestRun(
            HarvestFolder(out, identity),
            settings,
            tokens=lambda document, what: self._factory.tokens(document, what)[1],
            handle=handle,
            submit=submit,
            max_tokens=STEPS_AHEAD * limits.max_num_tokens,
            max_requests=STEPS_AHEAD * limits.max_running,
            expected_bytes=lambda tokens: expected_bytes(captures, model, tokens),
            engine=self._engine_name,
            progress=progress,
        )
        return run.run(inputs)

    def _harvest_specs(
        self, capture: Sequence[Capture | Site | str], interventions: Sequence[Intervention] | None
    ) -> tuple[list[Capture], list[Intervention]]:
        """What a harvest captures and applies, with what it cannot refused."""
        if self.engine.on_engine_thread:
            raise RuntimeError("a harvest cannot be run inside the block of a trace: the engine would wait for itself")
        if self.edits_of(None):
            raise NotImplementedError(
                "this model has edits, and a harvest does not apply them: clear them, or declare them"
            )
        (captures,) = self._named(captures_for_each_prompt(capture, 1))
        (declared,) = self._named(for_each_prompt(interventions, 1))
        if not captures:
            raise ValueError("harvest(capture=...): nothing to capture; name sites, as in ['resid_post.*']")
        for spec in [*captures, *declared]:
            if spec.positions == "generated" or isinstance(spec.positions, Generated):
                raise ValueError(f"{spec.name}: positions={spec.positions!r}; a harvest generates nothing")
        return captures, declared

    # -- traces ------------------------------------------------------------------------

    def trace(self, *inputs: Any, **kwargs: Any) -> EngineTracer:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One forward pass, with a block that reads and edits it: ``with lm.trace(prompt) as tracer:``.

        Without a prompt, the block opens one ``with tracer.invoke(prompt):`` for each of its prompts. What it saves is on the
        CPU afterwards, or on `device`.
        """
        return EngineTracer(self, "trace", *inputs, **kwargs)

    def session(self, device: Any = "cpu", **kwargs: Any) -> SessionTracer:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Several traces that see each other's values: ``with lm.session():``. What it saves is on `device` afterwards."""
        return SessionTracer(device, **kwargs)

    def run_traces(self, mode: str, traces: list[RequestTrace], inputs: list[tuple[tuple, dict]]) -> None:
        if self.engine.on_engine_thread:
            raise RuntimeError("a trace cannot be opened inside the block of another: use a session, or invokes")
        handles, sampling = [], {}
        for i, (trace, (args, kwargs)) in enumerate(zip(traces, inputs, strict=True)):
            what = f"invoke {i}" if len(traces) > 1 else "the prompt"
            kwargs = dict(kwargs)
            specs, captured = kwargs.pop("interventions", None), kwargs.pop("capture", None)
            request = self._traced_request(mode, args, kwargs, what, sampling)
            request.trace, request.receipt = trace, trace.receipt
            if specs is not None or captured is not None:
                (interventions,) = self._named(for_each_prompt(specs, 1))
                (captures,) = self._named(captures_for_each_prompt(captured, 1))
                self._declare(request, interventions, captures)
            request.alone = trace.grad
            if trace.grad and mode != "trace":
                raise PromptError(
                    f"{what}: gradients need a single forward pass: use `with lm.trace(...)` (the block names "
                    "backward, grad, requires_grad_, retain_grad or autograd, or grad=True was given)"
                )
            handles.append(RequestHandle(None, [request], None, self.engine.abort))
        if traces[0].gang:
            self._form_gang([handle.requests[0] for handle in handles])
        self._hold(handles)
        self.engine.submit(handles)
        try:
            for handle in handles:
                handle.wait()
        except BaseException:
            for handle in handles:
                handle.cancel()
            for handle in handles:
                handle.wait()
            raise
        for handle, trace in zip(handles, traces, strict=True):
            request = handle.requests[0]
            if request.activations is not None:
                trace.activations = request.activations
            # Why it ended comes before what its block, which still waited, made of that.
            trace.error = _ended_early(request) or request.error or trace.error

    def _form_gang(self, requests: list[Request]) -> None:
        """Bind the requests of a trace whose blocks need each other: one step must hold them all."""
        limits, tokens = self._factory.limits, sum(request.prompt_len for request in requests)
        kv = sum(request.max_total_tokens for request in requests)
        for need, limit, setting in (
            (tokens, limits.max_num_tokens, "max_num_tokens"),
            (len(requests), limits.max_running, "max_running_requests"),
            (kv, limits.kv_tokens - len(requests) * self.runner.server_config.page_size, "kv_cache_tokens"),
        ):
            if need > limit:
                raise PromptError(
                    f"the {len(requests)} invokes of this trace need each other (a barrier, or a name that one binds and another "
                    f"reads), so they run in the same steps; that takes {setting} of at least {need}, and it is {limit}"
                )
        self.runner.check_room([(request, request.declared) for request in requests], "invokes that need each other")
        for request in requests:
            request.gang = requests

    def _traced_request(
        self, mode: str, args: tuple, kwargs: dict[str, Any], what: str, sampling: dict[tuple, SamplingParams]
    ) -> Request:
        """The request of one prompt.

        Args:
            sampling: what the keywords of the trace's other prompts came to, which are most often the same objects.
        """
        timeout = kwargs.pop("timeout", None)
        prompt, kwargs = _prompt_of(args, kwargs, what)
        _, ids = self._factory.tokens(prompt, what)
        if mode == "trace":
            kwargs = {name: value for name, value in kwargs.items() if name not in IGNORED}
            if kwargs:
                raise TypeError(
                    f"lm.trace() got {', '.join(sorted(kwargs))}: it runs one forward pass and takes a prompt and timeout; "
                    "`with lm.generate(...)` takes sampling parameters"
                )
            params = FORWARD
        else:
            params = kwargs.pop("sampling_params", None)
            if params is None:
                key = (default_max_tokens(len(ids)), *((name, id(value)) for name, value in kwargs.items()))
                params = sampling.get(key)
                if params is None:
                    params = sampling[key] = sampling_from_kwargs(kwargs, len(ids))
        if params.n > 1:
            raise PromptError(f"{what} asks for n={params.n}: a trace follows one generation; use one invoke for each")
        (request,) = self._factory.requests(
            ids, params, what=what, timeout=timeout, traced=True, forward_only=mode == "trace"
        )
        return request

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        """Prompts in a trace's input: 1, or 0 where there are only parameters and the block holds invokes."""
        if not inputs and kwargs.get("input_ids") is None:
            return 0
        _prompt_of(inputs, kwargs, "the prompt")
        return 1

    # -- life ----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End what runs, and release all but the weights, which the tree shows: they go with the last reference (`del lm`).

        A second call does nothing.
        """
        engine = self.__dict__.get("engine")
        if engine is not None:
            engine.shutdown()
        _open_models.discard(self)

    def __enter__(self) -> LM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


_open_models: weakref.WeakSet[LM] = weakref.WeakSet()


@atexit.register
def _shutdown_all() -> None:
    for lm in list(_open_models):
        lm.shutdown()


def _check_arguments(model: Any, keywords: Mapping[str, Any]) -> None:
    """Raises TypeError where `LM` cannot take them, with what it takes instead."""
    if not isinstance(model, str | PathLike):
        raise TypeError(
            f"model is a {type(model).__name__}: 'demo', a folder, a .gguf file or a hub id is expected; one that is loaded "
            "already becomes a folder by model.save_pretrained(folder) and tokenizer.save_pretrained(folder)"
        )
    known = [*ModelConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__, "rename"]
    check_names("LM", keywords, known, ELSEWHERE)


def eos_token_ids(config: PretrainedConfig, folder: Path | None) -> frozenset[int]:
    """The end-of-sequence ids: generation_config.json's where there is one, else the config's."""
    eos = getattr(config, "eos_token_id", None)
    if folder is not None and (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id or eos
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _prompt_of(args: tuple, kwargs: Mapping[str, Any], what: str) -> tuple[Any, dict[str, Any]]:
    """(prompt, the other keywords) of an invoke."""
    rest = dict(kwargs)
    encoded = {name: rest.pop(name) for name in ("input_ids", "attention_mask") if name in rest}
    if not args and not encoded:
        raise PromptError(
            f"{what} has no prompt; nnsight's empty invoke sees the whole batch, but here a block sees its own request's "
            "rows and no others: give each invoke its prompt"
        )
    if len(args) > 1 or (args and "input_ids" in encoded):
        raise TypeError(f"{what}: one prompt is expected, got {len(args) + len(encoded)}")
    prompt: Any = args[0] if args else encoded
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | list | tuple):
        if len(prompt) > 1:
            raise PromptError(
                f"{what} is a list of {len(prompt)} prompts; each needs a block of its own: open `with lm.trace() as tracer:` "
                "and one `with tracer.invoke(prompt):` for each"
            )
        prompt = next(iter(prompt))
    if args and "attention_mask" in encoded:
        prompt = {"input_ids": prompt, **encoded}
    return prompt, rest


def _ended_early(request: Request) -> BaseException | None:
    if request.finish_reason == "timeout":
        return TimeoutError(f"request {request.request_id} ran into its timeout")
    return None
