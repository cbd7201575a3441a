"""`ClientModel`: the tree that traces are written against, over a backend, with all calls of a client."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable, Iterator, MutableMapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Unpack

import torch
from greenlet import getcurrent
from transformers import PretrainedConfig

from ...core.limits import EngineLimits
from ...core.model_spec import ModelSpec
from ...core.sampling_params import SamplingParams
from ...hooks.captures.reductions.lens import Lens
from ...hooks.captures.spec import Capture
from ...hooks.interventions.knockout import Intervention
from ...hooks.monitors.monitor import MonitorRegistry
from ...hooks.site import Site
from ...hooks.traces.blocks.trace import RequestTrace
from ...hooks.traces.syntax.envoy import TracedModel
from ...hooks.traces.syntax.session import SessionTracer
from ...hooks.traces.syntax.tracer import EngineTracer
from ...utils.arguments import warn_renamed
from ...utils.caller_frames import opens_with
from ..backend import Backend
from ..chat import rendered_conversations
from ..completion import RequestOutput, StreamPiece
from ..handle import RequestHandle
from ..notebook.signatures import OF_TRACES, names_options, signature_of
from ..prompt_batch import prompts_of
from ..prompts import as_prompts, only_tokens
from ..request_options import RequestOptions, check_options
from .activation_cache import ActivationCache, NamesFilter, part_sites, select_sites
from .config_view import ConfigView
from .forward_calls import ForwardOutput, forward, logits_with_hooks, states_of
from .known_names import RENAMED, unknown_attribute
from .lowered import explain
from .model_weights import ModelWeights
from .pipe import PIPELINE
from .requests import Requests, wait_for, wait_for_async
from .scan import FakeModel, ScanTracer
from .site_hooks import HookFunction
from .token_calls import to_single_token, to_str_tokens, to_string, to_tokens
from .traces import run


class ClientModel(TracedModel):
    """A model's module tree, the backend that runs it, and the calls. `LM` is a subclass, and so is a server's model.

    Args:
        backend: has the model, and runs requests.
        rename: aliases for modules, as in nnsight.
        envoys: nnsight's map from module classes or paths to envoy classes.

    Attributes:
        backend: likewise.
        tokenizer: a transformers tokenizer, or None.
        hf_config: the model's transformers config.
        monitors: monitors by name, for calls that give a name in place of one.
    """

    def __init__(
        self, backend: Backend, rename: dict[Any, Any] | None = None, envoys: dict[Any, Any] | None = None
    ) -> None:
        if "_module" not in vars(self):  # else the runner has made the tree when it loaded the model
            super().__init__(backend.module, backend.interleaver, rename, envoys)
        self.backend = backend
        backend.attach(self)
        self.tokenizer: Any = backend.tokenizer
        self.hf_config: PretrainedConfig = backend.facts.hf_config
        self.monitors = MonitorRegistry()

    @property
    def engine(self) -> Any:
        """The engine that runs the requests: `stats()` returns counters of steps and requests."""
        return self.backend.engine

    @property
    def vectors(self) -> MutableMapping[str, Any]:
        """Vectors by name, for interventions that give a name in a vector's place."""
        return self.backend.vectors

    @property
    def saes(self) -> MutableMapping[str, Any]:
        """Sparse autoencoders by name, for captures and interventions that give a name in place of one."""
        return self.backend.saes

    @property
    def weights(self) -> ModelWeights:
        """Fingerprint and version of the weights."""
        return ModelWeights(self.backend)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and states."""
        return self.backend.facts.dtype

    @property
    def cfg(self) -> ConfigView:
        """The model's transformers config, which is read by TransformerLens' names of sizes, too: ``lm.cfg.n_layers``."""
        return ConfigView(self)

    @property
    def model_spec(self) -> ModelSpec:
        """Sites and widths of the model."""
        return self.backend.facts.spec

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.model_spec.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.model_spec.hidden_size

    @property
    def num_heads(self) -> int:
        """Number of attention heads of the queries. `lm.model_spec.num_key_value_heads` is that of keys and values."""
        return self.model_spec.num_attention_heads

    @property
    def vocab_size(self) -> int:
        """Number of token ids, which is the width of the logits."""
        return self.limits.vocab_size

    @property
    def sites(self) -> list[str]:
        """The sites that captures read, in the order of a forward pass; ``.*`` stands for the layer: "resid_post.*"."""
        found = select_sites(None, self.model_spec, self.backend.facts.inner_sites, captured=False)
        kinds = [site.kind if site.layer is None else f"{site.kind}.*" for site in (*found, Site("logits"))]
        others = {"pattern.*": self.model_spec.cuts_edges, "state.*": any(self.model_spec.states)}
        return [*dict.fromkeys(kinds), *(kind for kind, has in others.items() if has), *part_sites(self.model_spec)]

    @property
    def limits(self) -> EngineLimits:
        """Upper bounds of requests and steps, as they are now."""
        return self.backend.limits

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of calls without any, from the model's generation_config.json, as in vLLM."""
        return self.backend.defaults.sampling_params

    def __getattr__(self, name: str) -> Any:
        if name in RENAMED:
            where, new = RENAMED[name]
            warn_renamed(f"lm.{name}", new)
            return attrgetter(where)(self)
        return super().__getattr__(name)

    def _unknown(self, name: str) -> str:
        return unknown_attribute(name, [child for child, _ in self._named_children()], dir(self))

    # -- requests --------------------------------------------------------------------------

    @property
    def _requests(self) -> Requests:
        """Made anew: a server's view of a model has another backend."""
        return Requests(self, self.backend, self.tokenizer)

    @names_options()
    def _generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        shown = use_tqdm if progress is None else progress
        return wait_for(self._requests.start("lm.generate", prompts, sampling_params, options), progress=shown)

    @signature_of(_generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate: as a call for outputs, as a ``with`` block to trace the generation.

        ``lm.generate(prompts, SamplingParams(...))`` returns a list of `RequestOutput`, in the order of the prompts. A prompt
        is text, token ids, messages or embeddings. `RequestOptions` are shared by all prompts; lists of them give each its own.
        `progress` (vLLM's `use_tqdm`) shows a bar; by default for calls of above two seconds.

        ``with lm.generate(prompt, max_new_tokens=n) as tracer:`` is greedy by default, takes transformers' and vLLM's names for
        its parameters, and serves every step to the block. Its saves are on the CPU afterwards, or on `device`.

        Raises:
            PromptError, ValueError: a prompt or a parameter that cannot be served; nothing was scheduled then.
            RequestError: a request failed. The others ran to their end; the error has all `outputs`.
            RuntimeError: the engine was shut down.
        """
        if opens_with(sys._getframe(1)):
            return self.backend.tracer(self, "generate", *args, **kwargs)
        return self._generate(*args, **kwargs)

    @names_options("capture")
    def generate_with_lens(
        self, prompts: Any, sampling_params: Any = None, *, lens: Lens | None = None, stream: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput] | Iterator[StreamPiece]:  # fmt: skip
        """`generate`, or `stream`, with ``capture=[Capture("resid_post.*", reduce=lens or Lens(), stream=True)]``."""
        if "capture" in options:
            raise TypeError("lm.generate_with_lens() got capture: lens= says what it reads")
        options["capture"] = [Capture("resid_post.*", reduce=lens or Lens(), stream=True)]
        return (self.stream if stream else self._generate)(prompts, sampling_params, **options)

    @names_options()
    async def agenerate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """`generate` for ``await``. Cancelling the task that waits ends the requests."""
        handles = self._requests.start("lm.agenerate", prompts, sampling_params, options)
        return await wait_for_async(handles)

    @names_options()
    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each of a list; the arguments are vLLM's.

        Args:
            messages: a list of ``{"role": ..., "content": ...}``, or a list of such lists.
            sampling_params: parameters for all conversations, or a list.
            chat_template: template to use instead of the tokenizer's.
            add_generation_prompt: end the prompt at the beginning of the assistant's answer.
            continue_final_message: continue the last message; needs add_generation_prompt=False.
            tools: tool descriptions for the template.
            chat_template_kwargs: further variables of the template.
            progress, use_tqdm: see `generate`.
            options: see `generate`.

        Raises:
            PromptError: the model has no chat template, or it refuses the conversation.
        """
        prompts = rendered_conversations(
            self.tokenizer, messages, chat_template=chat_template, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, tools=tools, chat_template_kwargs=chat_template_kwargs,
        )  # fmt: skip
        shown = use_tqdm if progress is None else progress
        return wait_for(self._requests.start("lm.chat", prompts, sampling_params, options), progress=shown)

    @names_options("interventions")
    def sweep(
        self,
        prompt: Any,
        runs: Iterable[Intervention | Sequence[Intervention] | None],
        sampling_params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """One prompt under many interventions: a request for each run, all in one batch.

        Args:
            prompt: one prompt.
            runs: the interventions of each run: an op, a list of ops, or None for a run without.
            progress: show a bar of the runs; as `generate`.
            options: see `generate`; `interventions` is not accepted.

        Returns:
            the outputs, in the order of the runs.
        """
        names, handles = self._requests.sweep(prompt, runs, sampling_params, options)
        return wait_for(handles, names, progress)

    @names_options()
    def imap(
        self,
        prompts: Iterable[Any],
        sampling_params: SamplingParams | None = None,
        *,
        max_in_flight: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[RequestOutput]:
        """The outputs of many prompts, in their order, each as soon as it and those before it have ended.

        Reads `prompts`, which may be endless, no further than `max_in_flight` ahead of the loop. Leaving the loop early ends
        the requests in flight.

        Args:
            sampling_params: sampling parameters of each prompt.
            max_in_flight: outputs that may be pending, or wait for the loop. None: twice the requests of a step.
            options: see `generate`; the same for each prompt.

        Raises:
            PromptError, RequestError: of a prompt, after the outputs of those before it.
        """
        return self._requests.imap(prompts, sampling_params, max_in_flight, options)

    @names_options()
    def submit(
        self, prompt: Any, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestHandle:
        """Start a request and return at once: ``h.result()`` or ``await h`` waits for its output, ``h.cancel()`` ends it."""
        return self._requests.start_one("lm.submit", prompt, sampling_params, options)

    @names_options()
    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Iterator[StreamPiece]:
        """The text as it comes, in pieces. Each is a string with `token_ids`, `output_index` and, at the end, `finish_reason`.

        Leaving the loop early ends the request.
        """
        return iter(self._requests.start_one("lm.stream", prompt, sampling_params, options, streaming=True))

    @names_options()
    def astream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[StreamPiece]:
        """Stream one completion for ``async for``, like `stream`."""
        return self._requests.start_one("lm.astream", prompt, sampling_params, options, streaming=True).__aiter__()

    # -- forward passes --------------------------------------------------------------------

    @names_options()
    def forward(
        self, prompts: Any, *, progress: bool | None = None, **options: Unpack[RequestOptions]
    ) -> list[ForwardOutput]:
        """One forward pass over each prompt: the logits of all positions, and captures.

        Args:
            prompts, progress: see `generate`.
            options: `capture`, `interventions`, `timeout` and `edits`, as `generate`.

        Raises:
            PromptError, ValueError: a prompt or a spec that cannot be served; nothing was scheduled then.
            RequestError: a request failed.
            TimeoutError: a request ran into its timeout.
        """
        check_options("lm.forward", options)
        return forward(self._requests, as_prompts(prompts), options, progress)

    @names_options("capture")
    def run_with_cache(
        self, prompts: Any, names_filter: NamesFilter = None, **options: Unpack[RequestOptions]
    ) -> tuple[torch.Tensor, ActivationCache]:
        """The logits and the states of one forward pass, as TransformerLens gives them.

        Args:
            prompts: one prompt, or several of equal length.
            names_filter: a site's name, several names, or a function of TransformerLens' name; None: all that can be captured.
                On CUDA, None and a function leave out inner sites that the engine has no kernels for (`inner_sites`).
            options: `interventions`, `timeout` and `edits`, as `generate`.

        Returns:
            logits [batch, tokens, vocab], and the states by site, [batch, tokens, ...]. Both are on the CPU.

        Raises:
            PromptError: prompts of different lengths, or a site that cannot be captured.
        """
        logits, states = states_of(self._requests, prompts, names_filter, options)
        return logits, ActivationCache(self.num_layers, states, self)

    @names_options("capture")
    def run_with_hooks(
        self,
        prompts: Any,
        fwd_hooks: Iterable[tuple[NamesFilter, HookFunction]] = (),
        **options: Unpack[RequestOptions],
    ) -> torch.Tensor:
        """The logits of one forward pass in which functions read and replace states, as in TransformerLens.

        Args:
            prompts: one prompt, or several of equal length. A function is called once for each prompt.
            fwd_hooks: pairs (site, function). A site is one that `run_with_cache` takes. A
                function is called as ``function(value, hook=hook)``. `value` is [1, tokens, width], and [1, tokens, heads,
                head_dim] at `q`, `k`, `v` and `z`. It may be edited in place, or the function returns another of its shape.
                `hook.name` is TransformerLens' name, `hook.layer()` the layer.
            options: `interventions`, `timeout` and `edits`, as `generate`.

        Returns:
            [batch, tokens, vocab] on the CPU.
        """
        return logits_with_hooks(self, self._requests, prompts, fwd_hooks, options)

    # -- traces ----------------------------------------------------------------------------

    @names_options(options=OF_TRACES, rest=True)
    def trace(self, *inputs: Any, trace: bool = True, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One forward pass, with a block that reads and edits it: ``with lm.trace(prompt) as tracer:``.

        A list of prompts is one padded batch [prompts, tokens, ...] to its block. Without a prompt, the block opens one ``with
        tracer.invoke(prompt):`` for each of its prompts. ``padding=True`` pads these to the longest one, on the left. Saves are
        on the CPU afterwards, or on `device`. In a coroutine, ``async with`` leaves the event loop free.

        Args:
            trace: False runs the pass without a block, and returns the model's output.
        """
        if not trace:
            return self.backend.run_pass(self, "trace", inputs, kwargs)
        return self.backend.tracer(self, "trace", *inputs, **kwargs)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's output for a prompt: a `CausalLMOutputWithPast` with logits [prompts, tokens, vocab] on the CPU."""
        if hasattr(getcurrent(), "mediator"):
            raise RuntimeError(
                "the whole model cannot be called inside a block: call its modules, or open another trace"
            )
        return self.backend.run_pass(self, "trace", inputs, kwargs)

    @names_options(options=OF_TRACES, rest=True)
    def scan(self, *inputs: Any, **kwargs: Any) -> EngineTracer:
        """Shapes and dtypes without a pass of the engine: a block over fake tensors, which hold no values.

        The block is written as for `trace`, and the same values have the same shapes. It runs over the model's class in
        transformers with fake weights, which is built at the first call. Its `.source` has transformers' operations.

        Raises:
            TypeError: `interventions`, `capture` or `on_step` is given.
            RuntimeError: the call is inside the block of a trace or of another scan.
        """
        return ScanTracer(self, "scan", *inputs, **kwargs)

    @cached_property
    def _fake_model(self) -> FakeModel:
        """The model of `scan`, built at the first one."""
        device = self.device
        if device is None or device.type == "meta":  # a server's model has no weights here
            device = torch.device("cpu")
        return FakeModel(self.hf_config, self.dtype, device, self.interleaver)

    @names_options(options=OF_TRACES, rest=True)
    def pipe(self, *inputs: Any, **kwargs: Any) -> Any:
        """transformers' text-generation pipeline, which samples: ``with lm.pipe(prompt) as tracer:``, or a call.

        ``tracer.result``, or a call's, is ``[{"generated_text": ...}]``; for several prompts, a list of these, in each invoke.
        """
        if opens_with(sys._getframe(1)):
            return self.backend.tracer(self, "pipe", *inputs, **(PIPELINE | kwargs))
        return self.backend.run_pass(self, "pipe", inputs, PIPELINE | kwargs)

    def session(self, device: Any = "cpu", **kwargs: Any) -> SessionTracer:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Several traces that see each other's values: ``with lm.session():``. Their saves are on `device` afterwards."""
        return self.backend.session(self, device, **kwargs)

    def explain(self, tracer: EngineTracer) -> str:
        """Explanation of how the blocks of a trace ran: lowered, or the line that prevents it. Raises ValueError before it ran."""
        return explain(tracer)

    def _run_traces(self, mode: str, traces: list[RequestTrace], inputs: list[tuple[tuple, dict] | None]) -> list[Any]:
        named = [given and (given[0], self._requests.with_monitors(given[1])) for given in inputs]
        return run(self.backend, mode, traces, named)

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        """Prompts in an invoke's input. Without any, a trace's block holds invokes, and an invoke's sees all others' prompts."""
        return len(prompts_of(inputs, kwargs, "the prompt")[0].prompts)

    # -- tokens, with TransformerLens' names ---------------------------------------------------

    def token_ids(self, prompt: Any, what: str = "the prompt") -> list[int]:
        """Token ids of a prompt: a text, token ids (list or tensor), or a tokenizer's dict. `what` names it in messages.

        Raises:
            PromptError: it is empty, of another type, or has ids outside the vocabulary.
        """
        return only_tokens(self._requests.read(prompt, what), what)

    to_tokens, to_string, to_str_tokens, to_single_token = to_tokens, to_string, to_str_tokens, to_single_token
