"""`VllmCore`: vLLM's own asynchronous engine, on a separate loop and thread, and its ranks."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ...config import ServerConfig
from ...core.events import EngineClosedError
from ...core.families import lacks_head
from ..faults import with_causes
from ..images import VllmImages
from ..orphans import ClientProcess
from ..payloads import Sealer
from ..recurrent import rotate_by_torch
from ..refusals import VllmRefusalError, refuse_config, without_full_graphs
from ..scheduler import scheduler_name
from ..settings import rank_arguments
from ..versions import installed_version
from .attached import AttachedLLM
from .ranks.rank_watch import RankWatch
from .results_link import ResultsLink
from .uplink import Uplink

CALL_SECONDS = 120.0
"""Timeout of a call to all ranks."""
DEAD_SECONDS = 1.0
"""Seconds between looks at whether vLLM's engine has ended, while a call waits for its answer."""
ResultT = TypeVar("ResultT")


class VllmCore:
    """Starts vLLM's processes, and opens each rank.

    Args:
        arguments: fields of vLLM's `AsyncEngineArgs`.
        config: config of the client; the ranks receive parts of it.
        attached: a user's `vllm.LLM` that was started with `llm_arguments`. Then no processes are started.

    Attributes:
        version: vLLM's.
        config: vLLM's `VllmConfig`.
        on_cuda: the ranks have CUDA devices.
        engines: number of data parallel engines, each with all layers.
        ranks: answers of all ranks to `interp_open`, in the order of the engines.
        uplink: connection to all ranks.
        links: connections from the first ranks of the pipeline stages, for each engine.
        stages: sites of each pipeline stage, by number; empty with one stage.
        failure: error of all calls, once a rank has ended.
        kinds: the module `vllm.sampling_params`.
        images: makes prompts with images; None for models that take text only.
        tree: weak reference to the tree that traces are written against, or None.

    Raises:
        ModuleNotFoundError, ImportError: vLLM is missing, or was not tested.
        NotImplementedError: a setting or a model that hooks cannot be served with.
        ValueError: likewise, of vLLM.
    """

    engines = 1
    failure: BaseException | None = None
    _watch: RankWatch | None = None

    def __init__(self, arguments: dict[str, Any], config: ServerConfig, attached: Any = None) -> None:
        self.version, self.attached = installed_version(), attached is not None
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import sampling_params  # pyright: ignore[reportMissingImports]
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        self.kinds: Any = sampling_params
        self.on_cuda = bool(current_platform.is_cuda())
        if not self.on_cuda and not current_platform.is_cpu():
            raise VllmRefusalError(f"LM(engine='vllm') runs on CUDA and on CPUs, not on {current_platform.device_name}")
        if attached is None:
            own = rank_arguments(config, arguments.get("quantization"))
            self.config: Any = AsyncEngineArgs(**arguments, **own).create_engine_config()
            rotate_by_torch(self.config)
            without_full_graphs(self.config)
            if self.config.scheduler_config.scheduler_cls is None:
                self.config.scheduler_config.scheduler_cls = scheduler_name(self.config)
        else:
            self.config = attached.llm_engine.vllm_config
        refuse_config(self.config)
        if attached is not None and self.config.parallel_config.data_parallel_size > 1:
            raise VllmRefusalError(
                "LM.attach(llm): llm is one of several data parallel engines: LM(engine='vllm') starts all"
            )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pymllm-interp-vllm", daemon=True)
        self._thread.start()
        self.tree: Any = None
        self.images = VllmImages.of(self.config.model_config)
        self.llm: Any = None
        self.links: list[list[ResultsLink]] = []
        self.engines = self.config.parallel_config.data_parallel_size
        try:
            with with_causes():
                self.llm = self.wait(self._start(AsyncLLM)) if attached is None else AttachedLLM(attached, self._loop)
            key = secrets.token_bytes(32)
            # A user's own vLLM ends with its process, not with this client.
            self.ranks = self.call("interp_open", key, ClientProcess.here() if attached is None else None)
            for engine in range(self.engines):
                leads = [rank for rank in self.ranks_of(engine) if rank["address"] is not None]
                self.links.append([ResultsLink(tuple(rank["address"]), key, self.soon) for rank in leads])
            self.stages = [rank["sites"] for rank in self.ranks_of(0) if rank["address"] and rank["sites"] is not None]
            self.uplink = Uplink(self.call_async, Sealer(key), len(self.ranks))
        except BaseException:
            self.close()
            raise

    def watch(self, failed: Callable[[str], None]) -> None:
        """Call a function with the process and the cause, on the loop, when a rank or engine ends or stops."""
        manager = getattr(getattr(self.llm.engine_core, "resources", None), "engine_manager", None)
        engines = getattr(manager, "processes", ())  # Ray has actors

        async def begin() -> RankWatch:
            return RankWatch(self.ranks, engines, failed)

        self._watch = self.wait(begin())

    def look(self) -> None:
        """Have ended processes noticed now, on the loop: vLLM may be the first to see them."""
        if self._watch is not None:
            self._watch.look()

    async def _start(self, cls: Any) -> Any:
        found = cls.from_vllm_config(self.config, disable_log_stats=True)
        if self.images is not None:  # with a tokenizer vLLM adds the end of sequence to what min_tokens forbids
            found.renderer.tokenizer = None
        return found

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def ranks_of(self, engine: int) -> list[dict[str, Any]]:
        """The ranks of a data parallel engine."""
        count = len(self.ranks) // self.engines
        return self.ranks[engine * count : (engine + 1) * count]

    def firsts(self, answers: list[ResultT]) -> list[ResultT]:
        """Answers of the first rank of each engine, among the answers of all ranks."""
        return answers[:: len(answers) // self.engines]

    @property
    def kv_tokens(self) -> int:
        """Slots of an engine's KV pool. vLLM adds up the blocks of all engines."""
        cache = self.config.cache_config
        return (cache.num_gpu_blocks or 0) // self.engines * cache.block_size

    @property
    def generates(self) -> bool:
        """Whether the model has a language modelling head."""
        return self.config.model_config.runner_type == "generate"

    @property
    def pools(self) -> str:
        """vLLM's task of requests to a model that generates nothing."""
        return "embed" if lacks_head(self.config.model_config.hf_config) else "classify"

    @property
    def on_loop(self) -> bool:
        """Whether the caller runs on the loop's thread, which must not wait."""
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, ResultT], timeout: float | None = None) -> ResultT:
        """The result of a coroutine on the loop."""
        return self.start(work).result(timeout)

    def soon(self, function: Any, *arguments: Any) -> None:
        """Call a function on the loop. Does nothing after the loop's end."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    async def call_async(self, method: str, *arguments: Any, timeout: float = CALL_SECONDS) -> list[Any]:
        """Call a method of all ranks. Returns their answers. Raises TimeoutError: a rank did not answer in time."""
        try:
            called = self.answered(self._on_all_ranks(method, timeout, arguments))
            return await asyncio.wait_for(called, timeout + 5)
        except Exception as error:
            if isinstance(error, TimeoutError) or "timed out" in str(error):  # vLLM tells its own as a plain Exception
                raise TimeoutError(f"a rank of vLLM has not answered {method} within {timeout:g} s") from error
            raise

    async def _on_all_ranks(self, method: str, timeout: float, arguments: tuple[Any, ...]) -> list[Any]:
        if self.engines == 1:
            return await self.llm.collective_rpc(method, timeout, arguments)
        client = self.llm.engine_core  # its public method returns the answers of one engine only
        calls = [
            client._call_utility_async("collective_rpc", method, timeout, arguments, None, engine=engine)
            for engine in client.core_engines
        ]
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    async def answered(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The answer of a call of vLLM's engine. If the engine ends meanwhile, vLLM leaves the call without one.
        Raises Exception: vLLM's EngineDeadError, then."""
        llm, call = self.llm, asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({call}, timeout=DEAD_SECONDS))[0]:
                if self.failure is not None:
                    raise self.failure
                if llm.errored:
                    raise llm.dead_error
            return call.result()
        finally:
            call.cancel()

    def ask(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """`answered`, for other threads than the loop's."""
        return self.wait(self.answered(work))

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all ranks, and wait for the answers."""
        return self.wait(self.call_async(method, *arguments))

    def close(self) -> None:
        """End vLLM's processes, and the loop. A second call does nothing."""
        if self._loop.is_closed():
            return
        for link in (link for links in self.links for link in links):
            link.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            self.soon(watch.close)
        if self.llm is not None:
            llm, self.llm = self.llm, None
            try:
                self.wait(self._shut_down(llm), 60)
            except Exception:  # too slow, or psutil's of a process that has ended meanwhile: the ranks are killed then
                logging.getLogger(__name__).warning("vLLM's shutdown has failed", exc_info=True)
        if watch is not None:
            (watch.release if self.attached else watch.kill)()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        if not self._thread.is_alive():
            self._loop.close()

    async def _shut_down(self, llm: Any) -> None:
        llm.shutdown()


def closed() -> EngineClosedError:
    """Error of calls after `close`."""
    return EngineClosedError("the engine was shut down: it takes no more requests")
