"""`DraftGraphs`: all passes that propose drafts for a step, as one CUDA graph for each number of requests.

A replayed pass of a small draft takes less time than the host needs for the next one. Here the host uploads the inputs of the
first pass, replays one graph, and reads the drafts::

    tokens without KV (up to k + 1 rows a request) -> pass -> draft 1 -> pass -> draft 2 -> ... -> draft k
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...sampling import SamplingBatch
from ...utils.upload import upload
from ..graphs import graph_capture
from ..model_runner import ModelRunner
from .row_passes import FED

MAX_REQUESTS = 32
"""Upper bound of the requests of a graph. With more, the passes take longer than the host's part."""


class DraftInputs(NamedTuple):
    """Static inputs of a graph for `n` requests: views of one array of int64. Padding is the dummy row, greedy."""

    known: torch.Tensor
    """[3, rows]: token id, position and row of the request table (`InputBuffers.lay_out`)."""
    following: torch.Tensor
    """[3, n]: the same of the second pass."""
    ends: torch.Tensor
    """[n], each request's last row in the first pass."""
    keys: torch.Tensor
    """[3, n]: seed, sample index and generated index of the first draft."""
    temperatures: torch.Tensor
    """[n] float64."""

    @classmethod
    def over(cls, memory: torch.Tensor, rows: int, n: int) -> DraftInputs:
        """Views of `memory` [size(rows, n)]."""
        known, following, ends, keys, temperatures = memory.split((3 * rows, 3 * n, n, 3 * n, n))
        return cls(known.view(3, rows), following.view(3, n), ends, keys.view(3, n), temperatures.view(torch.float64))

    @staticmethod
    def size(rows: int, n: int) -> int:
        """Number of int64 elements."""
        return 3 * rows + 8 * n


class DraftGraph(NamedTuple):
    """The graphs for up to `n` requests."""

    # fmt: off
    rows:   int           # of the first pass
    inputs: torch.Tensor  # memory of `DraftInputs`
    graphs: dict[bool, tuple[torch.cuda.CUDAGraph, torch.Tensor]]  # sampled or greedy: with its drafts, [k, n] int64
    # fmt: on


class DraftGraphs:
    """Captures and replays the passes of k drafts.

    Args:
        runner: open, with captured decode passes.
        carry: called between the first two passes with the last rows [n] int64 of the first one, for inputs of a pass beside
            tokens. None: nothing.
    """

    def __init__(self, runner: ModelRunner, k: int, carry: Callable[[torch.Tensor], None] | None = None) -> None:
        passes = runner.graph_runner
        assert passes is not None and runner.req_to_token_pool is not None, "the runner is open, with graphs"
        self._runner, self._passes, self._k, self._carry = runner, passes, k, carry
        self._table = runner.req_to_token_pool.req_to_token
        self._graphs: dict[int, DraftGraph] = {}
        sizes = [n for n in passes.capture_bs if n <= MAX_REQUESTS and n * (k + 1) <= passes.max_bs]
        runner.input_buffers.clear()
        with graph_capture.freeze_gc(), graph_capture.model_capture_mode(runner), torch.no_grad():
            for n in reversed(sizes):  # smaller ones reuse memory
                self._graphs[n] = self._captured(n)
        runner.input_buffers.clear()

    def _captured(self, n: int) -> DraftGraph:
        rows = self._passes.padded_size(n * (self._k + 1))
        memory = torch.zeros(DraftInputs.size(rows, n), dtype=torch.int64, device=self._runner.device)
        inputs, graphs = DraftInputs.over(memory, rows, n), {}
        for sampled in (False, True):
            graph, (drafts,) = graph_capture.record(
                lambda: None, lambda sampled=sampled: (self._run(inputs, sampled),), self._passes.pool
            )
            graphs[sampled] = graph, drafts
        return DraftGraph(rows, memory, graphs)

    def _run(self, inputs: DraftInputs, sampled: bool) -> torch.Tensor:
        """Run the captured passes. Returns the drafts, [k, n] int64."""
        runner, table = self._runner, self._table
        states, buffers, n = runner.req_states, runner.input_buffers, len(inputs.ends)
        buffers.place(inputs.known, states, table)
        logits = self._passes.run_inside(inputs.known.shape[1]).next_token_logits[inputs.ends]
        found = []
        fed = inputs.following
        for i in range(self._k):
            if i == 1 and self._carry is not None:
                self._carry(inputs.ends)
            if i:
                buffers.place(fed, states, table)
                logits = self._passes.run_inside(n).next_token_logits
                fed = torch.stack((fed[0], fed[1] + 1, fed[2]))
            batch = SamplingBatch(rows=n)
            if sampled:
                seeds, samples, generated = inputs.keys
                batch = SamplingBatch(n, inputs.temperatures, seeds, samples, generated + i)
            found.append(runner.sampler(logits, batch).token_ids.to(torch.int64))
            states.feed(inputs.following[2], found[-1])
        return torch.stack(found)

    def fits(self, sizes: Sequence[int], longest: int) -> bool:
        """Whether a graph serves requests that lack this many tokens, if the longest has `longest` tokens behind its drafts."""
        if len(sizes) > max(self._graphs, default=0) or max(sizes) > self._k + 1:
            return False
        n = self._passes.padded_size(len(sizes))
        return self._passes.serves(n, longest) and self._passes.serves(self._graphs[n].rows, longest)

    def drafts(self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute tokens that the host knows, and the drafts behind them. `fits` holds.

        Args:
            rows: rows of the request table.
            starts: position of each request's first token.
            tokens: tokens of each request, 1 to k + 1.

        Returns:
            [k, requests] int64. The next call overwrites it.
        """
        n, runner = len(rows), self._runner
        found = self._graphs[self._passes.padded_size(n)]
        sizes = [len(own) for own in tokens]
        ends, index = np.cumsum(sizes), np.array(rows)
        positions = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
        behind = positions[ends - 1] + 1
        runner.req_states.set_computed(index, behind)
        memory = torch.zeros_like(found.inputs, device="cpu")
        inputs = DraftInputs.over(memory, found.rows, self._passes.padded_size(n))
        inputs.known.numpy()[:, : len(positions)] = np.concatenate(tokens), positions, np.repeat(index, sizes)
        inputs.following.numpy()[:, :n] = np.full(n, FED), behind, index
        inputs.ends.numpy()[:n] = ends - 1
        requests = [runner.req_states.requests[row] for row in rows]
        sampling = SamplingBatch.from_requests(requests, runner.vocab_size, "cpu")  # pyright: ignore
        for own, values in zip(
            (*inputs.keys, inputs.temperatures),
            (sampling.seeds, sampling.sample_indices, sampling.gen_indices, sampling.temperatures),
            strict=True,
        ):
            if values is not None:
                own[:n] = values
        found.inputs.copy_(upload(runner.device, memory)[0])
        graph, drafts = found.graphs[sampling.temperatures is not None]
        graph.replay()
        runner.req_states.set_computed(index, behind + self._k - 1)
        return drafts[:, :n]
