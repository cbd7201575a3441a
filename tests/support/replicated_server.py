"""`pymllm-interp serve` over several replicas, without Ray: the front is this process, and starts and restarts its replicas.

python replicated_server.py REPLICAS serve MODEL [options of serve]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

from pymllm_interp.cli import make_parser
from pymllm_interp.server.command import settings_of
from pymllm_interp.server.engines.replica_process import ReplicaProcess, ReplicaSettings
from pymllm_interp.server.engines.replicas_door import ReplicasDoor
from pymllm_interp.server.engines.roster import LinkKeys, Replica
from pymllm_interp.server.serve import run


class Supervisor:
    """Starts replicas, and starts those again that end."""

    def __init__(self, settings: ReplicaSettings, count: int) -> None:
        self._settings, self._count = settings, count
        self._live: dict[str, Replica] = {}

    async def follow(self, engine: ReplicasDoor) -> None:
        await asyncio.gather(*(self._keep(engine, f"r{i}") for i in range(self._count)))

    async def _keep(self, engine: ReplicasDoor, name: str) -> None:
        while True:
            if os.environ.get("REPLICA_GPUS"):  # one for each; `start` reads the environment before it first waits
                os.environ["CUDA_VISIBLE_DEVICES"] = name.removeprefix("r")
            process = ReplicaProcess(self._settings, name, os.environ.get("REPLICA_HOST", "127.0.0.1"))
            try:
                self._live[name] = await process.start()
                if len(self._live) == self._count or engine.ready:  # all of them before the server answers
                    engine.update(self._live.values())
                await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.close()


def main() -> int:
    args = make_parser().parse_args(sys.argv[2:])
    settings, keys = settings_of(args), LinkKeys.new()
    supervisor = Supervisor(ReplicaSettings.of(settings, keys), int(sys.argv[1]))
    return run(settings, lambda settings, on_exit: ReplicasDoor(settings, keys, supervisor.follow))


if __name__ == "__main__":
    sys.exit(main())
