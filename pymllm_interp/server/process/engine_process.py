"""The engine process: a served model behind a door. Started by `ProcessDoor` or `ReplicaProcess`; ends with its parent."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

from ... import __version__
from ...config import ModelConfig, ServerConfig
from ...utils.log_lines import log_to_stderr
from ...wire import messages as m
from ...wire.failures import failure_of
from ...wire.schema import components
from .ends import DoorEnd, ProcessEnd
from .engine_server import EngineServer
from .fronts_end import FrontsEnd
from .lifeline import Lifeline
from .operator_monitors import OperatorMonitors
from .outbox import Outbox
from .served_model import ServedModel

logger = logging.getLogger(__name__)


def _load_adapters(served: ServedModel, adapters: dict[str, str], restarted: bool) -> None:
    """Load the operator's adapters.

    Args:
        restarted: omit adapters that can no longer be loaded.

    Raises:
        AdapterError: an adapter cannot be loaded.
    """
    for name, folder in adapters.items():
        try:
            served.backend.load_adapter(name, folder)
        except ValueError:
            if not restarted:
                raise
            logger.exception("adapter %r is not loaded again", name)


def serve(settings: dict[str, Any], lifeline: Lifeline) -> None:
    """Load the model, say that it is ready, and answer messages until told to stop, or the parent is gone."""
    end: DoorEnd = ProcessEnd(settings) if settings.get("replica") is None else FrontsEnd(settings)
    replica = settings.get("replica", {}).get("name", "")
    outbox = Outbox(end.send, Path(settings["store"]), settings["inline_bytes"], replica)
    try:
        served = ServedModel(
            ModelConfig(**settings["model"]),
            ServerConfig(**settings["server"]),
            settings["shared_prefix_cache"],
            settings["vllm"],
        )
        _load_adapters(served, settings["adapters"], settings["restarts"] > 0)
        if settings["chat_template"] is not None:
            if served.tokenizer is None:
                raise ValueError("--chat-template: this model has no tokenizer")
            served.tokenizer.chat_template = settings["chat_template"]
        monitors = OperatorMonitors(settings["monitors"], settings["monitor_visible"], served.backend.factory)
    except Exception as error:
        logger.debug("the engine does not start", exc_info=True)  # the server's message is one line
        outbox.put(m.Failed(0, failure_of(error)))
        outbox.close()
        end.close()
        raise SystemExit(1) from error
    info = served.backend.describe()
    if outbox.replica:
        info["replica"] = {"name": outbox.replica, "version": __version__, "fingerprint": served.backend.fingerprint()}
    if served.tokenizer is not None:
        served.tokenizer.save_pretrained(settings["tokenizer"])
        served.backend.facts.pooler.save_dense(Path(settings["tokenizer"]))
    server = EngineServer(served, outbox, settings["queued_bytes"], Path(settings["tokenizer"]), monitors)
    gc.collect()
    gc.freeze()  # modules and weights stay for good: a full collection over them would stop all requests for 0.2 s
    lifeline.ready = True
    outbox.put(m.Ready(0, info, components()))
    try:
        for message in end.messages(server):
            server.handle(message)
    finally:
        server.close()
        served.engine.shutdown()
        outbox.close()
        end.close()


def run(settings: dict[str, Any], lifeline: Lifeline) -> None:
    """Serve with the settings that the parent sent."""
    log_to_stderr(settings["log_format"], settings["log_level"], settings.get("replica", {}).get("name", "engine"))
    serve(settings, lifeline)
