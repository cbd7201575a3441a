"""`RequestCalls`: the calls of an `LM` that submit requests without a block."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Unpack

from ...core.sampling_params import SamplingParams
from ...hooks.interventions.knockout import Intervention
from ...hooks.traces.syntax.caller_frames import opens_with
from ...utils.arguments import PromptError
from ..chat import is_conversation, render
from ..completion import RequestOutput, StreamPiece
from ..handle import RequestHandle, results_of
from ..notebook.progress import CallProgress
from ..notebook.signatures import names_options, signature_of
from ..prompts import as_prompts
from ..request_options import RequestOptions, check_options
from .backed import BackedModel


class RequestCalls(BackedModel):
    """Calls for outputs: `generate`, `chat`, `sweep`, `submit`, `stream`, and theirs for asyncio and for endless inputs."""

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
        return wait_for(self._start("lm.generate", prompts, sampling_params, options), progress=shown)

    @signature_of(_generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate: as a call for outputs, as a ``with`` block to trace the generation.

        ``lm.generate(prompts, SamplingParams(...))`` returns a list of `RequestOutput`, in the order of the prompts. A prompt is
        text, token ids, or a list of messages. One set of parameters serves all prompts, or a list gives each its own; so with
        `interventions`, a list of `Steer`, `Ablate`, `Clamp`, `Scale` and `Patch`, and with `capture`, a list of sites and
        `Capture`s (the states are in the output's `activations`). `timeout` is in seconds. `progress` (vLLM's `use_tqdm`) shows a
        bar of the prompts. By default calls of above two seconds show one, in notebooks and on terminals.

        ``with lm.generate(prompt, max_new_tokens=n) as tracer:`` is greedy unless asked otherwise, takes transformers' and
        vLLM's names for its parameters, and serves every step to the block. What that saves is on the CPU afterwards, or on
        `device`.

        Raises:
            PromptError, ValueError: a prompt or a parameter that cannot be served; nothing was scheduled then.
            RequestError: a request failed. The others ran to their end; the error has all `outputs`.
            RuntimeError: the engine was shut down.
        """
        if opens_with(sys._getframe(1)):
            return self.backend.tracer(self, "generate", *args, **kwargs)
        return self._generate(*args, **kwargs)

    @names_options()
    async def agenerate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """`generate` for ``await``. Cancelling the task that waits ends the requests."""
        handles = self._start("lm.agenerate", prompts, sampling_params, options)
        try:
            for handle in handles:
                await handle.ended()
        except BaseException:
            _cancel(handles)
            raise
        return results_of(handles)

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
            sampling_params: one for all conversations, or a list.
            chat_template: in place of the tokenizer's.
            add_generation_prompt: end the prompt where the assistant's answer begins.
            continue_final_message: continue the last message; needs add_generation_prompt=False.
            tools: for templates that describe tools.
            chat_template_kwargs: further variables of the template.
            progress, use_tqdm: as `generate`.
            options: as `generate`.

        Raises:
            PromptError: the model has no chat template, or it refuses the conversation.
        """
        conversations = [messages] if is_conversation(messages) else messages
        if not isinstance(conversations, list | tuple) or not all(map(is_conversation, conversations)):
            raise PromptError("messages: expected a list of {'role': ..., 'content': ...}, or a list of such lists")
        prompts = [
            render(
                self.tokenizer, conversation, f"conversation {i}" if len(conversations) > 1 else "the conversation",
                chat_template=chat_template, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, tools=tools, chat_template_kwargs=chat_template_kwargs,
            )
            for i, conversation in enumerate(conversations)
        ]  # fmt: skip
        shown = use_tqdm if progress is None else progress
        return wait_for(self._start("lm.chat", prompts, sampling_params, options), progress=shown)

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
            options: as `generate`, but for `interventions`.

        Returns:
            the outputs, in the order of the runs.
        """
        check_options("lm.sweep", options)
        if "interventions" in options:
            raise TypeError("lm.sweep(prompt, runs) got interventions: the runs have them")
        lists = [[run] if isinstance(run, Intervention) else run for run in runs]
        rendered = self._read(prompt, "the prompt")
        options["interventions"], names = lists, [f"run {i}" for i in range(len(lists))]
        handles = self._submit_all([rendered] * len(lists), sampling_params, options, names=names)
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
            sampling_params: of each prompt.
            max_in_flight: outputs that may be pending, or wait for the loop. None: twice the requests of a step.
            options: as `generate`; the same for each prompt.

        Raises:
            PromptError, RequestError: of a prompt, after the outputs of those before it.
        """
        check_options("lm.imap", options)
        most = 2 * self.limits.max_running if max_in_flight is None else max_in_flight
        if most < 1:
            raise ValueError(f"max_in_flight={max_in_flight}: expected at least 1")
        return self._imap(iter(prompts), sampling_params, most, options)

    def _imap(
        self, prompts: Iterator[Any], params: SamplingParams | None, most: int, options: RequestOptions
    ) -> Iterator[RequestOutput]:
        in_flight: deque[tuple[str, RequestHandle]] = deque()
        numbers, failure, ended = count(), None, False
        try:
            while True:
                while len(in_flight) < most and not ended and failure is None:
                    name = f"prompt {next(numbers)}"
                    try:
                        prompt = next(prompts)
                        in_flight.append((name, self._submit_all([prompt], params, options, names=[name])[0]))
                    except StopIteration:
                        ended = True
                    except Exception as error:
                        failure = error
                if not in_flight:
                    break
                name, handle = in_flight[0]
                out = handle.result(name=name)
                in_flight.popleft()
                yield out
        finally:
            _cancel(handle for _, handle in in_flight)
        if failure is not None:
            raise failure

    @names_options()
    def submit(
        self, prompt: Any, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestHandle:
        """Start a request and return at once: ``h.result()`` or ``await h`` waits for its output, ``h.cancel()`` ends it."""
        return self._submit("lm.submit", prompt, sampling_params, options)

    @names_options()
    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Iterator[StreamPiece]:
        """The text as it comes, in pieces. Each is a string with `token_ids`, `output_index` and, at the end, `finish_reason`.

        Leaving the loop early ends the request.
        """
        return iter(self._submit("lm.stream", prompt, sampling_params, options, streaming=True))

    @names_options()
    def astream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[StreamPiece]:
        """`stream` for ``async for``."""
        return self._submit("lm.astream", prompt, sampling_params, options, streaming=True).__aiter__()

    def _start(
        self,
        who: str,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
    ) -> list[RequestHandle]:
        check_options(who, options)
        if prompts is None:
            raise TypeError(f"{who}() needs prompts: {who}(['text'], SamplingParams(...))")
        return self._submit_all(as_prompts(prompts), params, options)

    def _submit(
        self,
        who: str,
        prompt: Any,
        params: SamplingParams | None,
        options: RequestOptions,
        streaming: bool = False,
    ) -> RequestHandle:
        check_options(who, options)
        prompts = as_prompts(prompt)
        if len(prompts) != 1:
            raise PromptError(f"one prompt is expected, got {len(prompts)}: lm.generate takes lists")
        return self._submit_all(prompts, params, options, streaming)[0]

    def _submit_all(self, prompts: list[Any], *asked: Any, **how: Any) -> list[RequestHandle]:
        """A handle for each prompt, all submitted at once. Takes the arguments of `submission`."""
        self.engine.check_open()
        return self.backend.submit(self.submission(prompts, *asked, **how))


def wait_for(
    handles: list[RequestHandle], names: Sequence[str] | None = None, progress: bool | None = None
) -> list[RequestOutput]:
    """The outputs, when all have ended. Whatever interrupts the wait ends the requests.

    Args:
        names: as `results_of`.
        progress: as `CallProgress`.
    """
    try:
        with CallProgress(progress, len(handles), "requests") as shown:
            for handle in handles:
                handle.wait()
                shown.advance()
    except BaseException:
        _cancel(handles)
        raise
    return results_of(handles, names)


def _cancel(handles: Iterable[RequestHandle]) -> None:
    for handle in handles:
        handle.cancel()
