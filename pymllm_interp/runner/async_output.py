"""A step's sampled tokens, on their way to the host."""

from __future__ import annotations

from functools import cache

import torch

from ..core.step import ModelRunnerOutput
from .input_batch import InputBatch


@cache
def output_copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that results leave a device on, beside the steps that run."""
    return torch.cuda.Stream(device)


class AsyncOutput:
    """What a step samples. The next step may be launched before `get_output` waits for the tokens.

    On CUDA the copy to the host runs on a stream of its own, behind an event of the step's.

    Args:
        output: all but the tokens.
        token_ids: [sampling requests] int32 on the device.
    """

    def __init__(self, output: ModelRunnerOutput, batch: InputBatch, token_ids: torch.Tensor) -> None:
        self.output = output
        self._batch: InputBatch | None = batch
        self._copied: torch.cuda.Event | None = None
        self._token_ids = token_ids
        if token_ids.is_cuda:
            self._token_ids = torch.empty_like(token_ids, device="cpu", pin_memory=True)
            stream = output_copy_stream(token_ids.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._token_ids.copy_(token_ids, non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record()
            token_ids.record_stream(stream)

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens. A second call returns the same output."""
        if self._batch is not None:
            if self._copied is not None:
                self._copied.synchronize()
            self.output.sampled_token_ids = self._batch.spread(self._token_ids.tolist())
            self._batch = None
        return self.output
