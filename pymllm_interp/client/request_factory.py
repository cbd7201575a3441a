"""Requests from a caller's arguments. All errors of a request are found here, before anything runs."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..core.events import EngineClosedError
from ..core.image_input import ImageInput
from ..core.model_spec import LOGITS
from ..core.pass_parts import PromptEmbeds
from ..core.receipt import Receipt
from ..core.request import Request
from ..core.sampling_params import SamplingParams
from ..engine.bad_words import bad_word_ids, check_allowed
from ..engine.constraints import constraint_of
from ..engine.drafts import check_speculate
from ..engine.grammars.grammars import Grammars
from ..hooks.bind import fingerprint_of
from ..hooks.captures.spec import Capture
from ..hooks.declarations import Declarations
from ..hooks.interventions.knockout import Intervention
from ..hooks.monitors.monitor import Monitor
from ..hooks.saes.registry import SAERegistry
from ..hooks.traces.blocks.trace import RequestTrace
from ..hooks.traces.syntax.tracer import TraceInput
from ..hooks.vectors.registry import VectorRegistry
from ..models.adapters.slots import AdapterHold, unknown_adapter
from ..models.weights.model_state import ModelState
from ..runner.device_memory import free_bytes, long_pass_bytes
from ..utils.arguments import PromptError, shown
from ..utils.gc_threshold import LiveObjects
from .backend import Submission
from .calls.known_names import KnownNames
from .calls.pipe import GeneratedText
from .calls.traced_prompts import traced_prompt
from .detokenizer import StopStrings
from .facts import ModelFacts
from .prompt_batch import pad_together, prompts_of, repeated
from .prompts import captures_for_each_prompt, declared_for_each_prompt
from .request_options import adapters_of, check_boundary, check_embedded, max_tokens_of, neutral, num_objects, truncated

RELEASED = "the engine was shut down, and its model released"
PROMPT_LOGITS = Capture("logits", positions="prompt")
_ids = itertools.count()


class RequestFactory:
    """Makes requests from prompts.

    Args:
        facts: facts of the model that requests are checked against.
        tokenizer: or None, where prompts are token ids.
        declarations: binds interventions and captures.
        weights: version, fingerprint and adapters of the model.
        saes: SAEs by name, for specs that give a name in an SAE's place.
        hold_adapter: pins an adapter to a slot; None without adapters.

    Attributes:
        vectors: vectors by name, for interventions that give a name in a vector's place.
        grammars: structured outputs, compiled.
        watching: monitors of a server's operator, which all requests have.
        cache_owner: owner of the requests, if they share no KV with other owners'.
    """

    def __init__(
        self,
        facts: ModelFacts,
        tokenizer: Any,
        declarations: Declarations,
        weights: ModelState,
        saes: SAERegistry,
        hold_adapter: Callable[[str], AdapterHold] | None = None,
    ) -> None:
        self.facts, self.tokenizer, self.saes = facts, tokenizer, saes
        self._declarations, self._weights, self._hold_adapter = declarations, weights, hold_adapter
        self.device_memory, self.watching = declarations.device_memory, tuple[Monitor, ...]()
        self.grammars = Grammars(tokenizer, facts.limits.vocab_size, facts.defaults.eos_token_ids)
        self._own(None)

    def _own(self, cache_owner: str | None) -> None:
        self.cache_owner = cache_owner
        self.vectors, self._ordinals = VectorRegistry(self.facts.spec), itertools.count()

    def for_owner(self, cache_owner: str | None) -> RequestFactory:
        """A factory of the same engine, with vectors and a prefix cache of another owner."""
        found = copy.copy(self)
        found._own(cache_owner)
        return found

    @cached_property
    def pad_token_id(self) -> int:
        """Fills results of several prompts, as in nnsight: the tokenizer's token, or else an end-of-sequence token."""
        for found in (getattr(self.tokenizer, "pad_token_id", None), getattr(self.tokenizer, "eos_token_id", None)):
            if found is not None:
                return found
        return min(self.facts.defaults.eos_token_ids, default=0)

    @cached_property
    def eos_token_id(self) -> int | None:
        """The main end-of-sequence token: the tokenizer's, as in vLLM, or else the least of the model's."""
        found = getattr(self.tokenizer, "eos_token_id", None)
        return min(self.facts.defaults.eos_token_ids, default=None) if found is None else found

    @property
    def model_state(self) -> ModelState:
        """Version and fingerprint of the model."""
        if self._weights.closed:
            raise EngineClosedError(RELEASED)
        return self._weights

    # -- plain requests ---------------------------------------------------------------------

    def for_prompts(self, submission: Submission) -> list[list[Request]]:
        """The requests of each prompt. An error of any of them is raised before one is scheduled.
        Raises PromptError, ValueError: a prompt, a parameter, an intervention or a capture that cannot be served."""
        names, edits = submission.names, submission.edits
        live = LiveObjects(num_objects(submission.params, submission.interventions, submission.captures))
        declared, captures = self.named(submission.interventions, names), self.named(submission.captures, names)
        if submission.prompt_logits:
            named = (any(spec.site == LOGITS for spec in specs) for specs in captures)
            captures = [specs if own else [*specs, PROMPT_LOGITS] for specs, own in zip(captures, named, strict=True)]
        adapters = list(submission.adapters) or [None] * len(submission.prompts)
        for name, what in zip(adapters, names, strict=True):
            self._known_adapter(name, what)
        fingerprints = self._fingerprints(adapters) if any(declared) or any(captures) else {}
        found: list[list[Request]] = []
        for i, (prompt, param, what) in enumerate(zip(submission.prompts, submission.params, names, strict=True)):
            param = param or self.facts.defaults.fitting(self.facts.limits.max_model_len - len(prompt.token_ids))
            ids = truncated(prompt.token_ids, param, self.facts.limits.max_model_len)
            if edits and param.n > 1:
                raise PromptError(
                    f"{what} asks for n={param.n}, but edits of a model follow one generation: give the prompt n times"
                )
            requests = self.requests(
                ids, param, what=what, timeout=submission.timeout, embeds=prompt.embeds, images=prompt.images
            )
            for request in requests:
                request.stream, request.prompt_logits = submission.stream, submission.prompt_logits
                request.live_objects = live
                request.receipt = Receipt() if submission.receipts else None
                request.priority, request.cache_salt = submission.priority[i], submission.cache_salt
                request.adapter, request.encoder = adapters[i], prompt.encoder
                if edits:
                    request.trace = RequestTrace(None, list(edits), options=submission.passes)
                    request.exclusive = request.trace.options.exclusive
                    request.receipt = request.trace.receipt
                    self._check_pass([request], what)
                if any(spec.site == LOGITS for spec in captures[i]):
                    request.params = param  # the prompt's logits of each completion, if requested
                self.declare(request, declared[i], captures[i], what, fingerprints.get(adapters[i]))
                if param.speculate:
                    check_speculate(request, self.facts.speculates, what)
            found.append(requests)
        self.hold([request for requests in found for request in requests])
        return found

    def requests(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        what: str = "prompt",
        timeout: float | None = None,
        forward_only: bool = False,
        embeds: PromptEmbeds | None = None,
        images: tuple[ImageInput, ...] = (),
    ) -> list[Request]:
        """The `params.n` requests of a prompt. Without new tokens, it may fill the context.

        Args:
            embeds, images: see `RenderedPrompt`.

        Raises:
            PromptError: the request can never be served; the message names the limit and its setting.
        """
        words, size = params.bad_words, self.facts.limits.vocab_size
        bad_words = self.facts.banned + (bad_word_ids(self.tokenizer, words, size, what) if words else ())
        max_tokens = max_tokens_of(self.facts.limits, self.tokenizer, prompt_token_ids, params, what, forward_only)
        if not self.facts.limits.generates:
            params, bad_words = neutral(params, what), ()
        if images:
            check_embedded(params, what, "images")
        if embeds is not None:
            check_embedded(params, what)
            embeds.namespaces(self.facts.page_size)  # hashes them, here and not on the engine's thread
        if timeout is not None and not timeout > 0:
            raise PromptError(f"timeout={timeout}: expected seconds above 0, or None")
        number, ordinal = next(_ids), next(self._ordinals)
        seed = params.seed if params.seed is not None else _mix(self.facts.seed, ordinal)
        stops, ignored = self.facts.defaults.eos_token_ids, frozenset[int]()
        if params.ignore_eos:
            stops, ignored = ignored, stops
        if params.stop_token_ids:
            stops |= frozenset(params.stop_token_ids)
        if params.allowed_token_ids is not None:
            check_allowed(params, bad_words, stops | ignored, what)
        masked = params.max_tokens != 0 and (params.constraint is not None or params.structured_outputs is not None)
        requests = list[Request]()
        for index in range(params.n):
            requests.append(
                Request(
                    request_id=f"{number}-{index}" if params.n > 1 else str(number),
                    prompt_token_ids=prompt_token_ids,
                    params=params,
                    max_tokens=max_tokens,
                    seed=seed,
                    sample_index=index,
                    deadline=None if timeout is None else time.monotonic() + timeout,
                    eos_token_ids=stops,
                    ignored_eos_ids=ignored,
                    cache_owner=self.cache_owner,
                    embeds=embeds,
                    images=images,
                    bad_words=bad_words,
                    constraint=constraint_of(params, self.grammars, size, what) if masked else None,
                    eos_token_id=None if params.ignore_eos else self.eos_token_id,
                    forward_only=forward_only,
                    one_pass=self.facts.spec.bidirectional,
                    logprobs=None if params.logprobs is None else [],
                    prompt_logprobs=None if params.prompt_logprobs is None or index else [None],
                    stop_checker=StopStrings(self.tokenizer, params, prompt_token_ids) if params.stop_strings else None,
                )
            )
            if index == 0 and params.prompt_logprobs is not None and params.n > 1:
                params = replace(params, prompt_logprobs=None)  # the first computes them for all
        return requests

    # -- declared interventions and captures -------------------------------------------------

    def named(self, lists: list[list[Any]], names: Sequence[str] = ("the prompt",)) -> list[list[Any]]:
        """Each request's specs with this model's vectors and SAEs in place of their names.

        Args:
            names: prompt names used in error messages.

        Raises:
            PromptError: an unknown name, or a vector that a spec refuses.
        """
        if not any(lists):
            return lists
        try:
            return self._named(lists)
        except ValueError:
            for name, specs in zip(names, lists, strict=True):
                try:
                    self._named([specs])
                except ValueError as error:
                    raise PromptError(f"{name}: {error}") from error
            raise

    def _named(self, lists: list[list[Any]]) -> list[list[Any]]:
        known = KnownNames(self.vectors, self.saes, self.tokenizer, self.facts, lambda: self.model_state.fingerprint())
        return known.looked_up(lists)

    def declare(
        self,
        request: Request,
        interventions: Sequence[Intervention],
        captures: Sequence[Capture] = (),
        what: str = "the prompt",
        fingerprint: str | None = None,
    ) -> None:
        """Bind the request's interventions and captures.

        Args:
            fingerprint: fingerprint of the weights, for the receipt; None: the current one.

        Raises:
            PromptError: something that the model lacks, or that exceeds the tables, the ring or the results.
        """
        watched = (*interventions, *self.watching)
        if not (watched or captures or request.trace is not None):
            return
        try:
            self._declarations.declare(watched, captures, request)
        except ValueError as error:
            # The message has all that is the caller's.
            raise PromptError(f"{what}: {error}") from error.with_traceback(None)
        if request.declared is None:
            return
        receipt = request.receipt = request.receipt or Receipt()
        if interventions or captures:
            receipt.engine = self.facts.engine_name
            receipt.model = fingerprint or self.model_state.fingerprint(request.adapter)
            receipt.spec = fingerprint_of(interventions, captures)

    def _fingerprints(self, adapters: Sequence[str | None]) -> dict[str | None, str]:
        """The model's fingerprint with each of these adapters."""
        return {name: self.model_state.fingerprint(name) for name in {*adapters}}

    def _known_adapter(self, name: str | None, what: str) -> str | None:
        """The name of a loaded adapter, or None. Raises PromptError for another one."""
        if name is not None and name not in (loaded := self.model_state.adapters):
            raise PromptError(f"{what}: {unknown_adapter(name, sorted(loaded))}")
        return name

    def hold(self, requests: Sequence[Request]) -> None:
        """Reserve rows for the vectors of all requests, and slots for their adapters, or none of them. Requests that are not
        submitted then `release` them.

        Raises:
            PromptError: an adapter that is not loaded, or requests in flight use all slots.
            ValueError: the pool of vectors is full.
            RuntimeError, MemoryError: no memory for captures on the host.
        """
        try:
            for request in requests:
                if request.adapter is not None:
                    request.adapter_hold = self._held(request.adapter)
                if request.declared is not None:
                    self._declarations.hold(request)
        except BaseException:
            self.release(requests)
            raise

    def release(self, requests: Sequence[Request]) -> None:
        """Release the reservations of `hold`."""
        for request in requests:
            self._declarations.release(request)
            if request.adapter_hold is not None:
                request.adapter_hold.release()

    def _held(self, name: str) -> AdapterHold:
        if self._weights.closed or self._hold_adapter is None:
            raise EngineClosedError(RELEASED)
        try:
            return self._hold_adapter(name)
        except ValueError as error:
            raise PromptError(f"lora={shown(name)}: {error}") from error

    # -- traces ---------------------------------------------------------------------------------

    def for_traces(self, mode: str, traces: list[RequestTrace], inputs: Sequence[TraceInput | None]) -> list[Request]:
        """The requests of a ``with`` block: one for each prompt of its traces.

        Args:
            mode: "trace" (one forward pass), "generate" or "pipe".
            inputs: ``(args, kwargs)`` of each trace's prompts; None for a trace that sees the prompts of all others.

        Raises:
            PromptError, TypeError, ValueError: an invoke that cannot be served.
        """
        made: list[Request] = []
        sampling: dict[tuple, Any] = {}
        grad = any(trace.grad for trace in traces) if traces[0].gang else False
        text = GeneratedText(self.tokenizer) if mode == "pipe" else None
        for i, (trace, given) in enumerate(zip(traces, inputs, strict=True)):
            trace.grad, trace.pad_token_id = trace.grad or grad, self.pad_token_id
            if given is not None:
                what = f"invoke {i}" if len(traces) > 1 else "the prompt"
                own = self._of_trace(mode, trace, given, what, sampling)
                trace.request_ids = tuple(request.request_id for request in own)
                made += own
                if text is not None:
                    text.add(given, own)
                if len(own) > 1 and not trace.gang:
                    self._form_gang(own)
        for trace in traces:
            trace.num_prompts, trace.postprocess = len(made), text
            if not trace.request_ids:
                trace.request_ids = tuple(request.request_id for request in made)
        _check_gang(traces)
        pad_together(traces, {request.request_id: request.prompt_len for request in made})
        if traces[0].gang:
            self._form_gang(made)
        self.hold(made)
        return made

    def _of_trace(
        self, mode: str, trace: RequestTrace, given: TraceInput, what: str, sampling: dict[tuple, Any]
    ) -> list[Request]:
        """The requests of one trace, in the order of its prompts. `sampling` is that of `_traced`."""
        batch, kwargs = prompts_of(*given, what)
        copies = 1
        if mode != "trace":  # which takes no sampling parameters, and says so
            asked = [kwargs.pop(name) for name in ("n", "num_return_sequences") if kwargs.get(name) is not None]
            if len(asked) > 1:
                raise TypeError("n and num_return_sequences are the same: pass one of them")
            copies = asked[0] if asked else 1
        prompts, trace.padding = batch if copies == 1 else repeated(batch, copies)
        hooks = {name: kwargs.pop(name, None) for name in ("interventions", "monitors", "capture")}
        names = [what]
        if len(prompts) > 1:
            names = [f"prompt {i} of {what.removeprefix('the prompt') or 'the list'}" for i in range(len(prompts))]
        interventions = self.named(declared_for_each_prompt(hooks, len(prompts)), names)
        captures = self.named(captures_for_each_prompt(hooks["capture"], len(prompts)), names)
        given_adapters, requests = kwargs.pop("lora", None), list[Request]()
        adapters = [name for name in adapters_of(given_adapters, len(prompts) // copies) for _ in range(copies)]
        for i, (prompt, this) in enumerate(zip(prompts, names, strict=True)):
            own = {**kwargs, "lora": adapters[i]}
            request = self._traced(mode, prompt, own, this, sampling)
            request.receipt, request.sample_index = trace.receipt, i % copies
            requests.append(request)
            request.trace = trace
            request.differentiable, request.exclusive = trace.grad, trace.grad or trace.options.exclusive
            self.declare(request, interventions[i], captures[i], this)
            if request.params.speculate:
                check_speculate(request, self.facts.speculates, this)
            if trace.grad and mode != "trace":
                raise PromptError(
                    f"{this}: gradients need a single forward pass: use `with lm.trace(...)` (the block names "
                    "backward, grad, requires_grad_, retain_grad or autograd, or grad=True was given)"
                )
            self._check_pass([request], this)
        return requests

    def _check_pass(self, requests: Sequence[Request], what: str) -> None:
        """Check that traced prompts can run in one pass, and none again. One above `max_num_tokens` needs the memory now.
        Raises PromptError: prompts that need several passes, or more memory."""
        check_boundary(requests, self.facts.spec.rope_boundary, what)
        tokens, most = sum(request.prompt_len for request in requests), self.facts.limits.max_num_tokens
        if tokens <= most:
            return
        rule = (
            f"{what}: {tokens} tokens; traced prompts that run together run in one pass, and max_num_tokens is {most}. "
        )
        fix = f"raise max_num_tokens to at least {tokens} when the LM is made"
        if any(request.differentiable for request in requests):
            raise PromptError(f"{rule}A longer pass has no gradients: {fix}")
        if tokens > (longest := self.facts.longest_pass):
            raise PromptError(
                f"{rule}A longer pass holds {longest} at most (max_model_len): trace fewer prompts together"
            )
        eager = any(request.trace.options.modules_for != "" for request in requests)
        needed = long_pass_bytes(self.facts.spec, tokens, eager or self.facts.keeps_scores)
        free = free_bytes(self.facts.device)
        if needed > free:
            raise PromptError(
                f"{rule}A longer pass runs where memory allows: this one needs about {needed / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} are free: shorten the prompt, or leave more memory to passes (a lower kv_cache_tokens)"
            )

    def _form_gang(self, requests: list[Request]) -> None:
        """Bind requests with blocks that see or need each other: one step must hold them all."""
        limits = self.facts.limits
        page = self.facts.page_size
        kv = sum(-(-request.max_total_tokens // page) * page for request in requests)  # in whole pages
        for need, limit, setting in (
            (len(requests), limits.max_running, "max_running_requests"),
            (kv, limits.kv_tokens, "kv_cache_tokens"),
        ):
            if need > limit:
                raise PromptError(
                    f"the {len(requests)} prompts of this trace run in the same steps (they are one list, or a barrier, a name, or "
                    f"an invoke without a prompt joins their blocks); that takes {setting} of at least {need}, and it is {limit}"
                )
        self._check_pass(requests, f"the {len(requests)} prompts of this trace")
        self._declarations.check_room(requests, "prompts of one trace")
        gang = list(requests)  # which the engine empties at the end
        exclusive = any(request.exclusive for request in gang)
        for request in requests:
            request.gang, request.exclusive = gang, exclusive

    def _traced(self, mode: str, prompt: Any, kwargs: dict[str, Any], what: str, sampling: dict[tuple, Any]) -> Request:
        """The request of one prompt.

        Args:
            sampling: sampling parameters of the trace's other prompts, by keywords, which are often the same objects.
        """
        found = traced_prompt(self, mode, prompt, kwargs, what, sampling, lowered=False)
        (request,) = self.requests(
            found.token_ids, found.params, what=what, timeout=found.timeout, forward_only=mode == "trace", embeds=found.embeds,
            images=found.images,
        )  # fmt: skip
        request.priority, request.cache_salt = found.priority, found.cache_salt
        request.adapter, request.encoder = self._known_adapter(found.adapter, what), found.encoder
        return request


def _mix(seed: int, ordinal: int) -> int:
    """A seed for the ordinal-th request of an engine with `seed`."""
    return (seed * 0x9E3779B97F4A7C15 + ordinal * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63


def _check_gang(traces: Sequence[RequestTrace]) -> None:
    """Refuse transformers' own attention for prompts that run in the same passes.
    Raises PromptError: a trace of several prompts, or one of several that run together, asks for it."""
    together = bool(traces[0].gang)
    for trace in traces:
        if trace.options.eager_attention and (together or trace.watches_several):
            raise PromptError(
                "the prompts of this trace run in the same passes (they are one list, or their blocks are joined by a barrier, a "
                "name or an invoke without a prompt), but transformers' own attention runs for one prompt at a time: open a "
                "trace for each prompt, in `with lm.session():` or with saved values"
            )
