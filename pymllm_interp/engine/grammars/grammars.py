"""`Grammars`: the structured outputs of one engine, compiled by xgrammar on separate threads, and cached."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...core.structured.json_schema import with_plain_strings, with_plain_tags
from ...core.structured.structured_outputs import StructuredOutputs
from ...sampling.bitmasks import empty_bitmask
from ...utils.extras import library_of_extra
from .compile_process import START_SECONDS, CompileProcess, CompilerCall
from .grammar_constraint import GrammarConstraint

COMPILE_SECONDS = 10.0
"""Timeout of one compilation."""
QUEUE_SECONDS = 30.0
"""Timeout of a request in the compilation queue."""
COMPILING = 2
"""Grammars that are compiled at a time."""
MAX_WAITING = 64
"""Grammars that may wait for that; beyond it, requests with new ones are refused."""
MAX_GRAMMAR_BYTES = 64 << 20
MAX_KEPT_BYTES = 256 << 20
"""Limit of all cached compiled grammars; the least recently used one is dropped."""
MAX_WHITESPACE = 32
"""White space in a row, between the parts of JSON: a model may otherwise write nothing else."""
_PLACE = re.compile(r"^\s*\[[\d:]+\] \S+?:\d+: ")


class GrammarError(ValueError):
    """Structured outputs that cannot be compiled, or that no text fits."""


@dataclass(frozen=True)
class CompiledOutputs:
    """A compiled grammar, for any number of requests."""

    compiled: Any
    """xgrammar's CompiledGrammar."""
    allowed: torch.Tensor
    """[words] int32: tokens that may come at all. Special tokens may, if the grammar names them or they end the text."""
    within: torch.Tensor
    """The same without those that end the text."""
    end_ids: tuple[int, ...]
    name: str

    def constraint(self) -> GrammarConstraint:
        """The constraint of a new request."""
        return GrammarConstraint(self.compiled, self.allowed, self.within, self.end_ids, self.name)


class Grammars:
    """Compiles the structured outputs of a model's requests.

    Args:
        tokenizer: a transformers tokenizer, or None.
        vocab_size: vocabulary size of the model's logits.
        end_ids: end-of-sequence tokens, with which a text ends where its grammar allows it.

    Attributes:
        guarded: grammars come from strangers. Each is compiled in a `CompileProcess` first.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        found = set(end_ids) or {getattr(tokenizer, "eos_token_id", None)}
        self._end_ids = tuple(sorted(token for token in found if token is not None and token < vocab_size))
        self.guarded = False
        self._lock, self._slots = threading.Lock(), queue.SimpleQueue[CompileProcess]()
        for _ in range(COMPILING):
            self._slots.put(CompileProcess())
        self._compiling: dict[StructuredOutputs, Future[CompiledOutputs]] = {}
        self._kept: OrderedDict[StructuredOutputs, CompiledOutputs] = OrderedDict()
        self._deadlines: dict[Future[CompiledOutputs], float] = {}
        self._queued: set[Future[CompiledOutputs]] = set()
        self._first = threading.Lock()

    def compiled(self, spec: StructuredOutputs) -> CompiledOutputs:
        """The compiled grammar, once it is there.

        Raises:
            GrammarError: it cannot be compiled, no text fits it, or it takes too long.
            ModuleNotFoundError: xgrammar is not installed.
        """
        future = self.start(spec)
        self._wait([future])
        if future.done():
            return future.result()
        if self._is_queued(future):
            raise GrammarError("other grammars are being compiled: try again later")
        raise GrammarError(f"{_named(spec)} was not compiled in {COMPILE_SECONDS:g} s: make it simpler")

    def start(self, spec: StructuredOutputs) -> Future[CompiledOutputs]:
        """Have a grammar compiled, if it is not. Does not wait."""
        key = _key(spec)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                done: Future[CompiledOutputs] = Future()
                done.set_result(found)
                return done
            if (under_way := self._compiling.get(key)) is not None:
                return under_way
            future: Future[CompiledOutputs] = Future()
            if len(self._compiling) >= MAX_WAITING:
                future.set_exception(
                    GrammarError(f"{len(self._compiling)} grammars are being compiled: try again later")
                )
                return future
            self._compiling[key] = future
            self._deadlines[future] = time.monotonic() + QUEUE_SECONDS
            self._queued.add(future)
        # A thread that is not joined: a busy compiler cannot be stopped.
        threading.Thread(target=self._run, args=(key, future), name="pymllm-interp-grammar", daemon=True).start()
        return future

    def when_ready(self, specs: Iterable[StructuredOutputs], then: Callable[[], Any]) -> None:
        """Call `then` when these grammars are compiled, have failed or take too long. Does not wait; `compiled` does not then."""
        under_way = [future for future in map(self.start, specs) if not future.done()]
        if not under_way:
            then()
            return

        def run() -> None:
            self._wait(under_way)
            then()

        threading.Thread(target=run, name="pymllm-interp-grammar-wait", daemon=True).start()

    def close(self) -> None:
        """End the processes that check grammars. Grammars that are compiled afterwards start them again."""
        for _ in range(self._slots.qsize()):
            process = self._slots.get()
            process.close()
            self._slots.put(process)

    def _wait(self, futures: Collection[Future[CompiledOutputs]]) -> None:
        """Wait until they are done, or have taken too long."""
        while under_way := [future for future in futures if not future.done()]:
            with self._lock:
                deadline = max(self._deadlines.get(future, 0.0) for future in under_way)
            if (left := deadline - time.monotonic()) <= 0:
                return
            wait(under_way, min(left, 1.0))  # a deadline moves when its grammar's turn comes

    def _is_queued(self, future: Future[CompiledOutputs]) -> bool:
        with self._lock:
            return future in self._queued

    def _run(self, key: StructuredOutputs, future: Future[CompiledOutputs]) -> None:
        try:
            process = self._slots.get()
            with self._lock:
                start = START_SECONDS if self.guarded and not process.is_running else 0.0
                self._deadlines[future] = time.monotonic() + start + COMPILE_SECONDS
                self._queued.discard(future)
            try:
                found = self._compile(key, process)
            finally:
                self._slots.put(process)
            with self._lock:
                self._kept[key] = found
                while len(self._kept) > 1 and self.kept_bytes > MAX_KEPT_BYTES:
                    self._kept.popitem(last=False)
            future.set_result(found)
        except BaseException as error:
            future.set_exception(error if isinstance(error, ImportError | GrammarError) else _error_of(key, error))
        with self._lock:  # no request waits for it now
            del self._compiling[key], self._deadlines[future]
            self._queued.discard(future)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the compiled grammars that are kept."""
        return sum(found.compiled.memory_size_bytes for found in self._kept.values())

    def _compile(self, spec: StructuredOutputs, process: CompileProcess) -> CompiledOutputs:
        if self._tokenizer is None:
            raise GrammarError("structured_outputs: this model has no tokenizer")
        if not self._end_ids:
            raise GrammarError("structured_outputs: this model has no end-of-sequence token, which ends the text")
        with self._first:  # two threads would import and read the vocabulary at the same time
            compiler, info = self._compiler, self._info
        if self.guarded:
            try:
                wrong = process.check(info, _call_of(spec), COMPILE_SECONDS)
            except TimeoutError as error:
                raise GrammarError(f"{_named(spec)}: {error}; make it simpler") from error
            if wrong is not None:
                raise _error_of(spec, ValueError(wrong))
        compiled = _compiled(compiler, spec)
        if compiled.memory_size_bytes > MAX_GRAMMAR_BYTES:
            size = f"{compiled.memory_size_bytes >> 20} MiB; at most {MAX_GRAMMAR_BYTES >> 20}"
            raise GrammarError(f"{_named(spec)} takes {size}: make it simpler")
        special = {token for token, word in self._special.items() if word not in spec.text}.difference(self._end_ids)
        allowed, within = self._without(special), self._without(special.union(self._end_ids))
        found = CompiledOutputs(compiled, allowed, within, self._end_ids, spec.kind)
        row = empty_bitmask(1, self._vocab_size)[0]
        found.constraint().mask(row)
        if not row.any():
            raise GrammarError(f"{_named(spec)}: no token can begin a text that fits it")
        return found

    @cached_property
    def _info(self) -> Any:
        with library_of_extra("structured_outputs", "xgrammar", "structured"):
            import xgrammar

        return xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=list(self._end_ids)
        )

    @cached_property
    def _compiler(self) -> Any:
        info = self._info
        import xgrammar

        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _without(self, token_ids: Iterable[int]) -> torch.Tensor:
        """[words] int32: all tokens but these."""
        row = empty_bitmask(1, self._vocab_size)[0]
        eights = row.view(torch.uint8).numpy()
        for token in token_ids:
            if token < self._vocab_size:
                eights[token // 8] &= 255 ^ (1 << token % 8)
        return row

    @cached_property
    def _special(self) -> dict[int, str]:
        """Special tokens, which a text is shown without."""
        words = dict(zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=False))
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return words | {token: str(word) for token, word in added.items() if word.special}


def _key(spec: StructuredOutputs) -> StructuredOutputs:
    """The spec as a key, with all of its fields hashable."""
    if isinstance(spec.choice, list):
        return StructuredOutputs(choice=tuple(spec.choice), disable_any_whitespace=spec.disable_any_whitespace)
    return spec


def _compiled(compiler: Any, spec: StructuredOutputs) -> Any:
    return _call_of(spec).on(compiler)


def _call_of(spec: StructuredOutputs) -> CompilerCall:
    white = None if spec.disable_any_whitespace else MAX_WHITESPACE
    any_whitespace = not spec.disable_any_whitespace
    if spec.kind in ("json", "json_object"):
        schema = json.dumps(with_plain_strings(json.loads(spec.json or '{"type": "object"}')))
        options = {"any_whitespace": any_whitespace, "max_whitespace_cnt": white}
        return CompilerCall("compile_json_schema", schema, options)
    if spec.kind == "regex":
        return CompilerCall("compile_regex", spec.regex or "", {})
    if spec.kind == "grammar":
        return CompilerCall("compile_grammar", spec.grammar or "", {})
    if spec.kind == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=True) for text in spec.choice or ())
        return CompilerCall("compile_grammar", f"root ::= {texts}", {})
    return CompilerCall(
        "compile_structural_tag", json.dumps(with_plain_tags(json.loads(spec.structural_tag or ""))), {}
    )


def _named(spec: StructuredOutputs) -> str:
    return f"structured_outputs: the {spec.kind} {spec.text[:80]!r}"


def _error_of(spec: StructuredOutputs, error: BaseException) -> GrammarError:
    found = GrammarError(f"{_named(spec)} cannot be compiled: {_PLACE.sub('', str(error)).strip()[:500]}")
    found.__cause__ = error
    return found
