"""A front of a cluster: the HTTP process over replicas that others started. It imports neither torch nor Ray.

    python -m pymllm_interp.server.front

Its parent writes to standard input. First comes a pickle of (ServeSettings, LinkKeys) behind its length (8 bytes, big-endian). Then
comes a JSON line with all replicas, whenever they change, or oftener. The front answers each with an empty line on standard output,
so that its parent knows when it is stuck. At the end of standard input the front drains and ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import struct
import sys

from .engines.replicas_door import ReplicasDoor
from .engines.roster import LinkKeys, Replica
from .serve import run
from .settings import ServeSettings


def greeting(settings: ServeSettings, keys: LinkKeys) -> bytes:
    """First message of a parent: settings and keys."""
    data = pickle.dumps((settings, keys))
    return struct.pack(">Q", len(data)) + data


def roster_line(replicas: list[Replica]) -> bytes:
    """Message of a parent about the current replicas, as a line of JSON."""
    return json.dumps([vars(replica) for replica in replicas]).encode() + b"\n"


async def follow(engine: ReplicasDoor) -> None:
    """Pass the lines of standard input on to the engine; at its end, end this process in order."""
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        engine.update([Replica(**replica) for replica in json.loads(line)])
        print(flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()


def main() -> int:
    """Read the settings, and serve. Returns the exit status."""
    source = sys.stdin.fileno()
    (size,) = struct.unpack(">Q", _read(source, 8))
    settings, keys = pickle.loads(_read(source, size))
    try:
        return run(settings, lambda settings, on_exit: ReplicasDoor(settings, keys, follow))
    except (ValueError, OSError) as error:
        print(f"the front failed: {error}", file=sys.stderr, flush=True)
        return 2


def _read(source: int, size: int) -> bytes:
    """Exactly this many bytes: the lines after them are read elsewhere."""
    found = b""
    while len(found) < size:
        part = os.read(source, size - len(found))
        if not part:
            raise EOFError("standard input ended before the settings")
        found += part
    return found


if __name__ == "__main__":
    sys.exit(main())
