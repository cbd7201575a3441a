"""`RowPasses`: decode passes of a draft's runner in a row. The host prepares the first one, and reads nothing in between.

A step of an engine takes the host a millisecond or two, which it has while the device computes. A draft model's pass is shorter.
So a pass here is a replayed graph, a sampled token, and one more position of each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...core.forward_batch import ForwardBatch
from ...sampling import SamplingBatch
from ...utils.upload import upload
from ..model_runner import ModelRunner

FED = -1
"""Placeholder for the last sampled token of the request."""


class RowPasses:
    """Runs passes of single rows, and samples.

    Args:
        runner: open, without stages. Its tables know the requests.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def fits(self, num_rows: int) -> bool:
        """Whether a captured pass serves this many rows. Without captured passes: whether a pass holds them."""
        graphs = self._runner.graph_runner
        return num_rows <= (self._runner.max_num_tokens if graphs is None else graphs.max_bs)

    def known(self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Compute tokens that the host knows, and sample the one behind the last of each request.

        Args:
            rows: rows of the request table.
            starts: position of each request's first token.
            tokens: tokens of each request, at least one.
        """
        sizes = [len(own) for own in tokens]
        ends = np.cumsum(sizes)
        positions = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
        batch, _ = self._laid_out(np.concatenate(tokens), positions, np.repeat(rows, sizes))
        self._runner.req_states.set_computed(np.array(rows), positions[ends - 1] + 1)
        logits = self._runner.forward(batch).next_token_logits
        at, own_rows = upload(self._runner.device, ends - 1, np.array(rows))
        self._sample(logits if len(logits) == len(rows) else logits[at], own_rows, self._sampling(rows))

    def following(self, rows: Sequence[int], positions: Sequence[int], count: int) -> list[torch.Tensor]:
        """Feed each request its last token, `count` times.

        Args:
            rows: rows of the request table.
            positions: positions of the tokens that are fed first.

        Returns:
            `count` tensors [requests] int64: the sampled tokens.
        """
        runner, found = self._runner, []
        at = np.array(positions)
        batch, laid_out = self._laid_out(np.full(len(rows), FED), at, np.array(rows))
        runner.req_states.set_computed(np.array(rows), at + 1)
        sampling = self._sampling(rows)
        for i in range(count):
            if i:
                runner.input_buffers.advance(laid_out, len(rows), runner.req_states, self._table)
                if sampling.gen_indices is not None:
                    sampling.gen_indices, sampling.uniforms = sampling.gen_indices + 1, None
                assert batch.seq_lens_cpu is not None
                batch.seq_lens_cpu = batch.seq_lens_cpu + 1
            logits = runner.forward(batch).next_token_logits
            found.append(self._sample(logits, batch.req_pool_indices, sampling))
        runner.req_states.set_computed(np.array(rows), at + count)
        return found

    def last(self, rows: Sequence[int]) -> torch.Tensor:
        """[requests] int64: the tokens that were sampled last."""
        return self._runner.req_states.last_sampled_tokens[upload(self._runner.device, np.array(rows))[0]]

    @property
    def _table(self) -> torch.Tensor:
        assert self._runner.req_to_token_pool is not None, "the runner is open"
        return self._runner.req_to_token_pool.req_to_token

    def _laid_out(
        self, token_ids: np.ndarray, positions: np.ndarray, rows: np.ndarray
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """The decode pass of these rows, and the `laid_out` of `InputBuffers.advance`."""
        runner, buffers, count = self._runner, self._runner.input_buffers, len(rows)
        graphs = runner.graph_runner
        padded = count if graphs is None or count > graphs.max_bs else graphs.padded_size(count)
        laid_out = buffers.lay_out(np.stack((token_ids, positions, rows)), runner.req_states, self._table, padded)
        batch = runner.batches.decode(
            buffers.input_ids[:count], buffers.rows[:count], buffers.seq_lens[:count], buffers.out_cache_loc[:count],
            positions=buffers.positions[:count], seq_lens_cpu=torch.from_numpy(positions.astype(np.int32) + 1),
        )  # fmt: skip
        batch.padded_size, batch.mrope_positions = padded, buffers.rope_positions(count)
        return batch, laid_out

    def _sampling(self, rows: Sequence[int]) -> SamplingBatch:
        requests = [self._runner.req_states.requests[row] for row in rows]
        return SamplingBatch.from_requests(requests, self._runner.vocab_size, self._runner.device)  # pyright: ignore

    def _sample(self, logits: torch.Tensor, rows: torch.Tensor, sampling: SamplingBatch) -> torch.Tensor:
        token_ids = self._runner.sampler(logits, sampling).token_ids.to(torch.int64)
        self._runner.req_states.feed(rows, token_ids)
        return token_ids
