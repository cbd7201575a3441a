"""A runner in a process of its own, which knows of requests what its messages say (test_runner_process.py).

A message is the name of a method of `InterpModelRunner` and its arguments, pickled. The answer is pickled, too.
"""

from __future__ import annotations

import itertools
import os
import pickle
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import torch
from helpers_forks import forking

import pymllm_interp
from pymllm_interp.config import ModelConfig, ServerConfig
from pymllm_interp.core.step import ModelRunnerOutput, SchedulerOutput
from pymllm_interp.runner.interp_model_runner import InterpModelRunner
from pymllm_interp.sampling import TokenMasks


def send(stream: BinaryIO, message: Any) -> None:
    """Write a message, with its length before it."""
    content = pickle.dumps(message)
    stream.write(struct.pack("<q", len(content)) + content)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Read a message; None at the end."""
    length = stream.read(8)
    return pickle.loads(stream.read(*struct.unpack("<q", length))) if length else None


class Worker:
    """A runner, and the messages that it takes."""

    def __init__(self, server_config: ServerConfig, model_config: ModelConfig, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # the last bits of a product may depend on it
        self.runner = InterpModelRunner(server_config, model_config, wrap=None)
        self.runner.initialize()

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step's pass."""
        return self.runner.execute_model(step)

    def sample_tokens(self, masks: TokenMasks | None) -> ModelRunnerOutput | None:
        """Sample its tokens, constrained requests by their masks."""
        if masks is not None:
            self.runner.constrain(masks)
        return self.runner.sample_tokens()

    def finish_declared(self, end: Any) -> Any:
        """The results of a request that has ended."""
        return self.runner.finish_declared(end).result()

    def run(self, command: Any) -> Any:
        """The answer to a command."""
        return self.runner.run(command)


class WorkerProcess:
    """Another process, with any number of `Worker`s: a start takes seconds of imports."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__))]
        package = str(Path(pymllm_interp.__file__).parents[1])  # the code that this process runs
        environment = os.environ | {"PYTHONPATH": package}
        with forking():
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._lock, self._numbers = threading.Lock(), itertools.count()

    def start(self, server_config: ServerConfig, model_config: ModelConfig) -> int:
        """The number of a new worker."""
        number = next(self._numbers)
        self.ask(number, "start", server_config, model_config, torch.get_num_threads())
        return number

    def ask(self, number: int, name: str, *args: Any) -> Any:
        """Send a worker a message; the answer. What it raised there, this raises."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with self._lock:
            send(process.stdin, (number, name, args))
            answer, error = receive(process.stdout)
        if error is not None:
            raise error
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


def main() -> None:
    """Answer messages until there are no more."""
    workers: dict[int, Worker] = {}
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    while (message := receive(inbox)) is not None:
        number, name, args = message
        answer, error = None, None
        try:
            if name == "start":
                workers[number] = Worker(*args)
            elif name == "end":
                workers.pop(number).runner.shutdown()
            else:
                answer = getattr(workers[number], name)(*args)
        except Exception as raised:
            error = raised
        send(outbox, (answer, error))


if __name__ == "__main__":
    main()
