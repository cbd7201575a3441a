"""`pymllm-interp serve`: starts the engine, listens, and ends in order."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvicorn

from .. import __version__
from ..core.events import EngineClosedError
from ..utils.busy_cores import share_lock
from ..utils.log_lines import log_handler
from ..wire.failures import EngineError
from .engines.call import EngineDiedError
from .engines.process_door import ProcessDoor
from .http.app import create_app, sweep
from .http.connections import OutOfFiles, http_config, with_room_for_files
from .http.state import MakeEngine, ServerState
from .settings import ServeSettings

logger = logging.getLogger("pymllm_interp.server")
ENDING = signal.SIGTERM, signal.SIGINT
"""Signals that end a server in order."""


def listen_at(path: Path) -> socket.socket:
    """A bound Unix socket. A socket file without a listener is replaced. Raises OSError: the path cannot be used."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink()
        found.bind(str(path))
    except OSError as error:
        found.close()
        raise OSError(f"cannot listen on --uds {path}: {error.strerror or error}") from error
    return found


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Bound before the model is loaded, so that a used port is reported at once.
    Raises OSError: the address cannot be used."""
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # named, or asyncio leaves Nagle's algorithm on
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; --port 0 takes any free port") from error
    return found


class DrainingServer(uvicorn.Server):
    """uvicorn, which waits for running requests before it closes their connections.

    Args:
        announce: called once connections are accepted.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._state, self._announce = state, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End at SIGTERM and Ctrl-C, in order. uvicorn's own would send itself the signal again at the end."""
        for number in ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            _on_signals(lambda: None)  # the end is in order from here, too; a second signal does not cut it

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state, deadline = self._state, time.monotonic() + self._state.settings.drain_seconds
        state.draining = True
        if state.num_running:
            logger.info("ending; %d requests run, and have %g s", state.num_running, state.settings.drain_seconds)
        while state.num_running and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.05)
        if state.num_running and not self.force_exit:
            logger.warning("%d requests still run, and end with an error", state.num_running)
            state.engine.fail_calls(EngineClosedError("the server ended before the request had; send it again"))
        await super().shutdown(sockets)  # which waits while the answers leave


def _on_signals(call: Callable[[], object]) -> None:
    for number in ENDING:
        asyncio.get_running_loop().add_signal_handler(number, call)


async def _serve(settings: ServeSettings, bound: socket.socket, engine: MakeEngine) -> int:
    loading = asyncio.current_task()
    assert loading is not None

    def end() -> None:
        _on_signals(lambda: None)  # another one would cut the end of this one
        loading.cancel()

    _on_signals(end)  # until `DrainingServer` has its own
    state = ServerState(settings, engine)
    tasks: list[asyncio.Task[None]] = []
    try:
        await state.start()
        config = http_config(
            create_app(state), settings.limits, ssl_keyfile=settings.ssl_keyfile, ssl_certfile=settings.ssl_certfile,
            ssl_ca_certs=None if settings.ssl_ca_certs is None else str(settings.ssl_ca_certs),
            ssl_cert_reqs=settings.ssl_cert_reqs,
        )  # fmt: skip
        asyncio.get_running_loop().set_exception_handler(OutOfFiles())
        server = DrainingServer(config, state, lambda: _announce(state, bound))
        tasks.append(asyncio.create_task(sweep(state)))
        tasks.append(asyncio.create_task(_exit_with_engine(state, server)))
        await server.serve(sockets=[bound])
        return 3 if state.exiting.is_set() else 0
    except asyncio.CancelledError:
        logger.info("ended by a signal before the model was loaded")
        return 0
    finally:
        for task in tasks:
            task.cancel()
        await state.engine.shutdown()
        if state.spans is not None:
            await asyncio.to_thread(state.spans.close)
        state.store.close()


def _announce(state: ServerState, bound: socket.socket) -> None:
    info, limits, uds = state.info, state.info["limits"], state.settings.uds
    host, port = (str(uds), 0) if uds is not None else bound.getsockname()[:2]
    entry = {
        "event": "serving", "version": __version__, "model": state.settings.name, "architecture": info["architecture"],
        "engine": info["engine"], "device": info["device"], "dtype": info["dtype"], "kv_tokens": limits["kv_tokens"],
        "max_model_len": limits["max_model_len"], "host": host, "port": port,
    }  # fmt: skip
    logger.info(json.dumps(entry), extra={"fields": entry})
    gc.freeze()  # a full collection over modules and routes would stop all streams for 0.1 s
    print(banner(state.settings, host, port), flush=True)


async def _exit_with_engine(state: ServerState, server: uvicorn.Server) -> None:
    await state.exiting.wait()
    logger.error("the engine process ended, and on_engine_exit is 'exit'")
    server.should_exit = True


def banner(settings: ServeSettings, host: str, port: int) -> str:
    """Start message for the operator: the address, and how to use it."""
    if settings.uds is not None:
        return f"{settings.name} is served at unix:{settings.uds}    (curl --unix-socket {settings.uds} http://localhost/health)"
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url = f"http{'s' if settings.ssl_certfile else ''}://{shown}:{port}"
    key = "" if settings.keys.anybody else " -H 'Authorization: Bearer KEY'"
    python = "" if settings.keys.anybody else ', api_key="KEY"'
    return (
        f"{settings.name} is served at {url}    (docs: {url}/docs)\n"
        f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json' "
        """-d '{"prompt": "Once upon a time", "max_tokens": 20}'\n"""
        f'  python -c \'from pymllm_interp import LM; print(LM.connect("{url}"{python}).generate("Once upon a time")[0].text)\''
    )


def run(settings: ServeSettings, engine: MakeEngine = ProcessDoor) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit status: 0, or 3 if the engine ended and was not to be started again.

    Args:
        engine: makes the engine.

    Raises:
        ValueError, OSError: the model or the address cannot be served.
    """
    root = logging.getLogger()
    before, level = root.handlers, root.level
    root.handlers = [log_handler(settings.log_format, "http")]
    root.setLevel(settings.log_level.upper())
    share_lock()
    try:
        return _run(settings, engine)
    finally:
        root.handlers = before
        root.setLevel(level)


def _run(settings: ServeSettings, engine: MakeEngine) -> int:
    most = with_room_for_files(settings.limits.max_connections)
    settings = replace(settings, limits=replace(settings.limits, max_connections=most))
    bound = listen(settings.host, settings.port) if settings.uds is None else listen_at(settings.uds)
    try:
        if settings.uds is None:
            settings.check_address(bound.getsockname()[0])  # the resolved address of a name such as localhost
        return asyncio.run(_serve(settings, bound, engine))
    except (EngineError, EngineDiedError) as error:  # while it starts: later ones are answers to requests
        raise ValueError(str(error)) from error
    finally:
        bound.close()
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)
