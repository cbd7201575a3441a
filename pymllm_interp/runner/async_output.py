"""A step's sampled tokens and log probabilities, on their way to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain

import numpy as np
import torch

from ..core.step import ModelRunnerOutput, SampledLogprobs
from ..sampling import LogprobTensors, SamplerOutput, VerifiedTokens
from .input_batch import InputBatch
from .stages.stage import StepScores


@cache
def output_copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that results leave a device on, beside the steps that run."""
    return torch.cuda.Stream(device)


class AsyncOutput:
    """The sampled tokens of a step. The next step may be launched before `get_output` waits for them.

    On CUDA tokens, log probabilities and scores go to pinned memory in one copy, on a separate stream. The copy
    waits for everything launched before this object was made, and for nothing launched later.

    Args:
        output: all but tokens and log probabilities.
        sampled: sampled tokens of the sampled rows, on the device.
        prompt_logprobs: request -> log probabilities of its prompt positions in this step, on the device.
        verified: the tokens of a step with drafts; None without.
        scores: dot products of monitors; None without.
    """

    def __init__(
        self,
        output: ModelRunnerOutput,
        batch: InputBatch,
        sampled: SamplerOutput,
        prompt_logprobs: Mapping[str, LogprobTensors],
        verified: VerifiedTokens | None = None,
        scores: StepScores | None = None,
    ) -> None:
        self.output = output
        self._batch: InputBatch | None = batch
        self._logprobs, self._prompt_logprobs = sampled.logprobs, prompt_logprobs
        tensors = [sampled.token_ids] if verified is None else [verified.sampled, verified.num_sampled]
        flags = {"masked": sampled.masked, "flat": sampled.flat}
        self._flags = [name for name, found in flags.items() if found is not None]
        tensors += (found for found in flags.values() if found is not None)
        for logprobs in (sampled.logprobs, *prompt_logprobs.values()):
            tensors += () if logprobs is None else logprobs.tensors
        self._scores = scores
        tensors += () if scores is None else [scores.values]
        self._host, self._copied = copy_to_host(tensors)

    @property
    def done(self) -> bool:
        """Whether the tokens have arrived on the host."""
        return self._copied is None or self._copied.query()

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens. A second call returns the same output."""
        if self._batch is not None:
            if self._copied is not None:
                self._copied.synchronize()
            self._read(self._batch)
            self._batch = None
        return self.output

    def _read(self, batch: InputBatch) -> None:
        """Complete the output from the host's tensors."""
        tensors, verifier = iter(self._host), batch.verifier
        token_ids = next(tensors).tolist()
        counts = None if verifier is None else next(tensors).tolist()
        flags = {name: next(tensors).tolist() for name in self._flags}

        def lists(logprobs: LogprobTensors) -> list[SampledLogprobs | None]:
            return logprobs._replace(token_ids=next(tensors), values=next(tensors), ranks=next(tensors)).tolists()

        output = self.output
        if counts is None:
            output.sampled_token_ids = batch.spread([[token] for token in token_ids])
        else:
            output.sampled_token_ids = [own[:count] for own, count in zip(token_ids, counts, strict=True)]
        for name, found in flags.items():
            if verifier is None or counts is None:
                rows = batch.spread([[one] for one in found])
            else:
                rows = [found[start : start + n] for start, n in zip(verifier.starts.tolist(), counts, strict=False)]
            setattr(output, name, {rid: own for rid, own in zip(output.req_ids, rows, strict=True) if any(own)})
        output.logprobs = [[] for _ in output.req_ids]
        if self._logprobs is not None:
            found = [[] if entry is None else [entry] for entry in lists(self._logprobs)]
            if verifier is None or counts is None:
                output.logprobs = batch.spread(found)
            else:
                rows = zip(verifier.starts.tolist(), counts, strict=False)
                output.logprobs = [list(chain.from_iterable(found[start : start + n])) for start, n in rows]
        for request_id, logprobs in self._prompt_logprobs.items():
            output.prompt_logprobs[request_id] = [entry for entry in lists(logprobs) if entry is not None]
        if self._scores is not None:
            found = next(tensors).numpy().copy()  # some wait, and pinned memory is for the next steps
            parts = self._scores.parts
            output.scores = {request_id: found[:, start:stop] for request_id, start, stop in parts}
            above: np.ndarray = np.any(~(found <= self._scores.limits), axis=0)  # NaN, too
            if above.any():
                output.decided = {request_id for request_id, start, stop in parts if above[start:stop].any()}
        self._host = []


def copy_to_host(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], torch.cuda.Event | None]:
    """The tensors in pinned memory, by one copy whatever their number, and the event after which they are there.

    On a CPU: the tensors themselves, and None.
    """
    device = tensors[0].device
    if device.type != "cuda":
        return tensors, None
    stream, copied = output_copy_stream(device), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        memory = packed(tensors)
        host = torch.empty_like(memory, device="cpu", pin_memory=True)
        host.copy_(memory, non_blocking=True)
        copied.record()
    for tensor in tensors:
        tensor.record_stream(stream)
    return unpacked(host, tensors), copied


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[bytes] uint8 of all tensors, in `_order`; a single one's own memory."""
    flat = [tensors[i].reshape(-1).view(torch.uint8) for i in _order(tensors)]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unpacked(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `packed` memory, with the shapes and dtypes of the tensors."""
    found, start = list(tensors), 0
    for i in _order(tensors):
        stop = start + tensors[i].nbytes
        found[i] = memory[start:stop].view(tensors[i].dtype).view(tensors[i].shape)
        start = stop
    return found


def _order(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The widest numbers first, so that each tensor begins at a multiple of its own."""
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].itemsize)
