"""`Requests`: makes the requests of a model's calls."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from ...core.image_input import ImageInput
from ...core.sampling_params import SamplingParams
from ...hooks.captures.spec import Capture
from ...hooks.interventions.knockout import Intervention
from ...hooks.site import Site
from ...hooks.traces.syntax.envoy import TracedModel
from ...hooks.traces.syntax.pass_options import NONE
from ...utils.arguments import PromptError
from ..backend import Backend, Submission
from ..chat import RenderedPrompt
from ..completion import RequestOutput
from ..handle import RequestHandle, results_of
from ..prompts import (
    as_prompts,
    captures_for_each_prompt,
    captures_in,
    checked,
    declared_for_each_prompt,
    for_each_prompt,
    names_of,
    params_for,
    warn_of_flat_list,
)
from ..request_options import RequestOptions, adapters_of, check_options, checked_salt, priorities_of
from .traced_prompts import PREFILL

T = TypeVar("T")
AHEAD = 2
"""Prompts that are read ahead of the first one that is still read, for each thread."""


def read_each(read: Callable[..., T], *columns: Sequence[Any]) -> Iterator[T]:
    """`read` of each prompt with images, in order, on several threads. They read a bounded number of prompts ahead.

    Args:
        read: raises the error of its prompt. The first one of them is raised here.
        columns: prompts, and further arguments of each call.
    """
    count = os.cpu_count() or 1
    threads = ThreadPoolExecutor(count)  # decoders and processors release the interpreter's lock
    ahead = deque[Future[T]]()
    try:
        for own in zip(*columns, strict=True):
            ahead.append(threads.submit(read, *own))
            if len(ahead) > AHEAD * count:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)


def _has_unread_images(prompt: Any) -> bool:
    """Whether a prompt may have images that are still to be read: a dict, a conversation, or a processor's outputs."""
    if isinstance(prompt, RenderedPrompt):
        return bool(prompt.images) and not isinstance(prompt.images[0], ImageInput)
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else prompt
    return isinstance(first, Mapping)


@dataclass(frozen=True)
class Requests:
    """Makes and submits the requests of a model's calls.

    Args:
        tree: has the persistent edits.
        backend: runs the requests.
        tokenizer: a transformers tokenizer, or None.
    """

    tree: TracedModel
    backend: Backend
    tokenizer: Any

    def read(self, prompt: Any, what: str) -> RenderedPrompt:
        """A prompt with its token ids. Raises PromptError: it is empty, of another type, or has ids outside the vocabulary."""
        return checked(self.tokenizer, prompt, self.backend.facts, what)

    def submission(
        self,
        prompts: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
        stream: bool = False,
        names: Sequence[str] | None = None,
        prompt_logits: bool = False,
        receipts: bool = False,
        read: bool = True,
    ) -> Submission:
        """The `Submission` of a call. Raises for invalid prompts, parameters and specs.

        Args:
            read: whether the prompts are read; else they are left out.
        """
        count, names = len(prompts), list(names or names_of(prompts))
        own = params_for(prompts, params)
        warn_of_flat_list(options.get("interventions"), count)
        declared = self.declared(options, count)
        captures = captures_in(options, count)
        edits = self.tree._edits_of(options.get("edits"))
        return Submission(
            prompts=list(self._read_all(prompts, names)) if read else [],
            params=own, interventions=declared, captures=captures, names=names, stream=stream, prompt_logits=prompt_logits,
            priority=priorities_of(options.get("priority"), count), cache_salt=checked_salt(options.get("cache_salt")),
            adapters=adapters_of(options.get("lora"), count), timeout=options.get("timeout"), edits=edits,
            passes=self.tree._pass_options(edits, {}) if edits else NONE, receipts=receipts,
        )  # fmt: skip

    def _read_all(self, prompts: Sequence[Any], names: Sequence[str]) -> Iterator[RenderedPrompt]:
        if len(prompts) > 1 and self._has_images(prompts):
            return read_each(self.read, prompts, names)
        return map(self.read, prompts, names)

    def _has_images(self, prompts: Sequence[Any]) -> bool:
        return self.backend.facts.images is not None and any(map(_has_unread_images, prompts))

    def with_monitors(self, options: Any) -> Any:
        """A call's options, with monitors in place of their names. Raises PromptError for an unknown name."""
        given = options.get("monitors")
        return {**options, "monitors": self.tree.monitors.resolved(given)} if given else options

    def declared(self, options: Any, prompts: int) -> list[list[Intervention]]:
        """The interventions and monitors of a call's options, one list per prompt. Raises ValueError for others."""
        return declared_for_each_prompt(self.with_monitors(options), prompts)

    def submit(self, prompts: list[Any], *asked: Any, **how: Any) -> list[RequestHandle]:
        """A handle for each prompt, all submitted at once. Takes the arguments of `submission`.

        Prompts with images for an engine of this process are submitted one by one, as they are read. An error of one ends the
        earlier ones.
        """
        self.backend.engine.check_open()
        if len(prompts) < 2 or not self.backend.in_process or not self._has_images(prompts):
            return self.backend.submit(self.submission(prompts, *asked, **how))
        handles = list[RequestHandle]()
        try:
            call = self.submission(prompts, *asked, **how, read=False)
            for i, prompt in enumerate(self._read_all(prompts, call.names)):
                handles += self.backend.submit(call.of(i, prompt))
        except BaseException:
            _cancel(handles)
            raise
        return handles

    def resolved(
        self, capture: Sequence[Capture | Site | str], interventions: Sequence[Intervention] | None = None
    ) -> tuple[list[Capture], list[Intervention]]:
        """Captures and interventions of one prompt, with the model's vectors in place of their names.
        Raises ValueError: an unknown name, or not a spec."""
        return self.backend.resolve(captures_for_each_prompt(capture, 1)[0], for_each_prompt(interventions, 1)[0])

    def prefill(
        self,
        prompt: RenderedPrompt | list[int],
        captures: Sequence[Capture],
        interventions: Sequence[Intervention] = (),
        what: str = "the prompt",
        lora: str | None = None,
    ) -> RequestHandle:
        """Start one forward pass over a prompt, which may fill the context. Returns at once; nothing is generated.

        Args:
            prompt: result of `read`, or token ids.
            captures, interventions: results of `resolved`.
            what: prompt name used in error messages.
            lora: the LoRA adapter that it runs with.

        Raises:
            PromptError: the prompt or its specs cannot be served.
            ValueError: the vector pool is full.
        """
        self.backend.engine.check_open()
        rendered = prompt if isinstance(prompt, RenderedPrompt) else RenderedPrompt(None, prompt)
        if rendered.encoder is None and self.backend.facts.spec.source is not None:
            raise PromptError(
                f"{what} has no encoder's side, which a model with an encoder needs: use lm.generate or lm.forward"
            )
        asked = Submission(
            prompts=[rendered], params=[PREFILL], interventions=[list(interventions)],
            captures=[list(captures)], priority=[0], names=[what], adapters=[lora],
        )  # fmt: skip
        return self.backend.submit(asked)[0]

    def start(
        self,
        who: str,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
    ) -> list[RequestHandle]:
        """Submit the prompts of a call.

        Args:
            who: the call, for messages.
        """
        check_options(who, options)
        if prompts is None:
            raise TypeError(f"{who}() needs prompts: {who}(['text'], SamplingParams(...))")
        return self.submit(as_prompts(prompts), params, options)

    def start_one(
        self,
        who: str,
        prompt: Any,
        params: SamplingParams | None,
        options: RequestOptions,
        streaming: bool = False,
    ) -> RequestHandle:
        """`start` for calls of one prompt."""
        check_options(who, options)
        prompts = as_prompts(prompt)
        if len(prompts) != 1:
            raise PromptError(f"one prompt is expected, got {len(prompts)}: lm.generate takes lists")
        return self.submit(prompts, params, options, streaming)[0]

    def sweep(
        self, prompt: Any, runs: Iterable[Any], params: SamplingParams | None, options: RequestOptions
    ) -> tuple[list[str], list[RequestHandle]]:
        """The names and handles of one prompt's runs, each with its own interventions."""
        check_options("lm.sweep", options)
        if "interventions" in options:
            raise TypeError("lm.sweep(prompt, runs) got interventions: the runs have them")
        lists = [[run] if isinstance(run, Intervention) else run for run in runs]
        rendered = self.read(prompt, "the prompt")
        options["interventions"], names = lists, [f"run {i}" for i in range(len(lists))]
        return names, self.submit([rendered] * len(lists), params, options, names=names)

    def imap(
        self, prompts: Iterable[Any], params: SamplingParams | None, max_in_flight: int | None, options: RequestOptions
    ) -> Iterator[RequestOutput]:
        """The outputs in order, with at most `max_in_flight` of them pending; None: twice the requests of a step."""
        check_options("lm.imap", options)
        most = 2 * self.backend.limits.max_running if max_in_flight is None else max_in_flight
        if most < 1:
            raise ValueError(f"max_in_flight={max_in_flight}: expected at least 1")
        return self._outputs(iter(prompts), params, most, options)

    def _outputs(
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
                        in_flight.append((name, self.submit([prompt], params, options, names=[name])[0]))
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


def wait_for(
    handles: list[RequestHandle], names: Sequence[str] | None = None, progress: bool | None = None
) -> list[RequestOutput]:
    """The outputs, when all have ended. Whatever interrupts the wait ends the requests.

    Args:
        names: see `results_of`.
        progress: see `CallProgress`.
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


async def wait_for_async(handles: list[RequestHandle]) -> list[RequestOutput]:
    """`wait_for` without a bar, for ``await``."""
    try:
        for handle in handles:
            await handle.ended()
    except BaseException:
        _cancel(handles)
        raise
    return results_of(handles)


def _cancel(handles: Iterable[RequestHandle]) -> None:
    for handle in handles:
        handle.cancel()


SECONDS_BEFORE = 2.0
"""Seconds until a call shows a progress bar."""


class CallProgress:
    """A progress bar on standard error, or in a notebook's output, shown while it is entered.

    Args:
        enabled: True shows the bar at once, False never. None shows it in notebooks and on terminals, after two seconds.
        total: number of parts of the call.
        what: word before the bar.
    """

    def __init__(self, enabled: bool | None, total: int, what: str) -> None:
        self._enabled, self._total, self._what = enabled, total, what
        self._started, self._done = time.perf_counter(), 0
        self._bar: Any = None

    def __enter__(self) -> CallProgress:
        if self._enabled:
            self._show()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        """Count a part that has ended."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(0, completed=self._done)
        elif self._enabled is None and time.perf_counter() - self._started >= SECONDS_BEFORE:
            self._show()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        if self._enabled is None and not (console.is_terminal or console.is_jupyter):
            self._enabled = False
            return
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._bar.add_task(self._what, total=self._total, completed=self._done)
        self._bar.start()
