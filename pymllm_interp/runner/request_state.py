"""The runner's table of requests, updated by steps.

The engine owns tokens and counts. The table shows them under vLLM's names. Only steps write it. The last sampled
tokens, which the engine does not know, are here, on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from ..core.image_input import mrope_positions
from ..core.sampling_params import SamplingParams
from ..core.step import AcceptedToken, NewRequest, ScheduledRequest, SchedulerOutput
from ..utils.upload import upload


class RunningRequest:
    """A request in the table, as sampling reads it (`sampling.SamplingBatch`).

    Attributes:
        request_id, row, prompt_len, params, seed, sample_index, eos_token_ids, bad_words, embeds, images: see `NewRequest`.
        rope_positions: [3, prompt] int64, positions of a prompt with images in models with mrope; else None.
    """

    __slots__ = (
        "_table", "bad_words", "embeds", "eos_token_ids", "images", "params", "prompt_len", "request_id", "rope_positions", "row",
        "sample_index", "seed",
    )  # fmt: skip

    def __init__(self, new: NewRequest, table: RequestState) -> None:
        self.request_id, self.row, self.prompt_len = new.request_id, new.row, new.prompt_len
        self.params: SamplingParams = new.params
        self.seed, self.sample_index, self.eos_token_ids = new.seed, new.sample_index, new.eos_token_ids
        self.bad_words, self.embeds, self.images = new.bad_words, new.embeds, new.images
        self.rope_positions: torch.Tensor | None = None
        self._table = table

    @property
    def prompt_token_ids(self) -> list[int]:
        """Tokens before the generation, without placeholders of embeddings. Penalties count them."""
        ids = self._table.all_token_ids[self.row, : self.prompt_len]
        return (ids if self.embeds is None else self.embeds.without(ids)).tolist()

    @property
    def num_generated(self) -> int:
        """Generated tokens among the computed positions."""
        return int(self._table.num_computed_tokens_np[self.row]) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        """Generated tokens that the engine has accepted."""
        table = self._table
        return table.all_token_ids[self.row, self.prompt_len : table.total_len[self.row]].tolist()


class DraftedRow:
    """A request as the token behind some of its drafts is sampled: its history has these drafts (`sampling.SamplingRequest`).

    Args:
        request: request with drafts in the table.
        num_behind: number of its rows in the step behind this one.
    """

    __slots__ = (
        "_request", "_table", "bad_words", "eos_token_ids", "num_generated", "params", "request_id", "sample_index", "seed",
    )  # fmt: skip

    def __init__(self, request: RunningRequest, table: RequestState, num_behind: int) -> None:
        self._request, self._table = request, table
        self.request_id, self.params, self.seed = request.request_id, request.params, request.seed
        self.sample_index, self.eos_token_ids = request.sample_index, request.eos_token_ids
        self.bad_words, self.num_generated = request.bad_words, request.num_generated - num_behind

    @property
    def prompt_token_ids(self) -> list[int]:
        """Tokens before the generation."""
        return self._request.prompt_token_ids

    @property
    def output_token_ids(self) -> list[int]:
        """Generated tokens, then the drafts up to this row."""
        start = self._request.prompt_len
        return self._table.all_token_ids[self._request.row, start : start + self.num_generated].tolist()


class RequestState:
    """One row a request, the row that it has in the `ReqToTokenPool`.

    Args:
        max_num_reqs: upper bound of requests; rows 1 to max_num_reqs (row 0 is the dummy's).
        max_model_len: upper bound of one request's tokens.
        device: device of `last_sampled_tokens` and `edited`.
        mrope_merge: see `ModelSpec.mrope_merge`.

    Attributes:
        requests: the request in each row, or None.
        all_token_ids: [rows, max_model_len] int32, prompt and accepted tokens.
        prompt_len, total_len: [rows] int32, tokens of the prompt; prompt and accepted tokens.
        prefill_len: [rows] int32, tokens that the request entered with: prompt and, after a preemption, generated ones.
        num_computed_tokens_np: [rows] int32, positions that have KV after the last step.
        adapter_slots: [rows] int32, slot of the request's adapter; -1 without one.
        editing: ids of requests with hooks that may change hidden states.
        edited: [rows] int32 on the device, 1 if the request has ops or captures in the tables.
        last_sampled_tokens: [rows] int64 on the device, the next inputs of decoding requests.
        mrope_deltas: [rows] int64 on the device, `ForwardBatch.mrope_position_deltas` of each request; None without mrope.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, device: str, mrope_merge: int | None = None) -> None:
        rows = max_num_reqs + 1
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.req_id_to_index: dict[str, int] = {}
        self.editing: set[str] = set()
        self.requests: list[RunningRequest | None] = [None] * rows
        self.all_token_ids = np.zeros((rows, max_model_len), dtype=np.int32)
        self.prompt_len = np.zeros(rows, dtype=np.int32)
        self.prefill_len = np.zeros(rows, dtype=np.int32)
        self.total_len = np.zeros(rows, dtype=np.int32)
        self.num_computed_tokens_np = np.zeros(rows, dtype=np.int32)
        self.adapter_slots = np.full(rows, -1, dtype=np.int32)
        self.last_sampled_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.edited = torch.zeros(rows, dtype=torch.int32, device=device)
        self._staged: list[tuple[int, list[int]]] = []
        self._mrope_merge, self._deltas = mrope_merge, dict[int, int]()
        self.mrope_deltas: torch.Tensor | None = None
        if mrope_merge is not None:
            self.mrope_deltas = torch.zeros(rows, dtype=torch.int64, device=device)

    # -- updates by steps ------------------------------------------------------------------

    def add_request(self, new: NewRequest) -> None:
        """Enter a request. An id that is there already is replaced (a preempted request that resumes).

        Its tokens are staged: visible after `apply_staged_writes`.

        Raises:
            ValueError: more tokens than a row holds.
        """
        self.remove_request(new.request_id)
        if len(new.token_ids) > self.max_model_len:
            raise ValueError(f"request {new.request_id}: {len(new.token_ids)} tokens, rows hold {self.max_model_len}")
        row = new.row
        self.req_id_to_index[new.request_id] = row
        self.requests[row] = found = RunningRequest(new, self)
        if self._mrope_merge is not None:
            self._deltas[row] = 0
            if new.images:
                positions = mrope_positions(new.prompt_len, new.images, self._mrope_merge)
                found.rope_positions, self._deltas[row] = positions
        if new.hooks is not None and new.hooks.edits:
            self.editing.add(new.request_id)
        self.prompt_len[row] = new.prompt_len
        self.prefill_len[row] = self.total_len[row] = len(new.token_ids)
        self.num_computed_tokens_np[row] = new.num_computed_tokens
        self._staged.append((row, new.token_ids))

    def apply_staged_writes(self) -> None:
        """Write the tokens of requests that were added since the last call."""
        if self.mrope_deltas is not None and self._deltas:
            rows, deltas = upload(self.mrope_deltas.device, *np.array(list(self._deltas.items()), dtype=np.int64).T)
            self.mrope_deltas.index_copy_(0, rows, deltas)
            self._deltas.clear()
        resumed = []
        staged, self._staged = self._staged, []
        for row, token_ids in staged:
            self.all_token_ids[row, : len(token_ids)] = token_ids
            if len(token_ids) > self.prompt_len[row]:
                resumed.append((row, token_ids[-1]))
        if resumed:
            rows, tokens = upload(self.last_sampled_tokens.device, *np.array(resumed, dtype=np.int64).T)
            self.feed(rows, tokens)

    def accept(self, tokens: Sequence[AcceptedToken]) -> None:
        """Note tokens that the engine appended. Tokens of requests that left the table are dropped."""
        found = [
            (row, position, token)
            for request_id, position, token in tokens
            if (row := self.req_id_to_index.get(request_id)) is not None and position < self.max_model_len
        ]
        if found:
            rows, positions, values = np.array(found).T
            self.all_token_ids[rows, positions] = values
            self.total_len[rows] = np.maximum(self.total_len[rows], positions + 1)

    def write_drafts(self, step: SchedulerOutput) -> None:
        """Write the draft tokens of a step's parts. They are not accepted: `total_len` does not count them."""
        for entry in step.scheduled:
            drafts = step.drafts.get(entry.request_id, [])
            self.all_token_ids[entry.row, entry.start + 1 : entry.start + 1 + len(drafts)] = drafts

    def sampled_rows(self, sampling: Sequence[ScheduledRequest]) -> list[RunningRequest | DraftedRow]:
        """Requests whose parameters apply to each sampled row.

        Args:
            sampling: the request of each row; with drafts it is there once for each of its rows.
        """
        left = Counter(entry.row for entry in sampling)
        found: list[RunningRequest | DraftedRow] = []
        for entry in sampling:
            request = self.requests[entry.row]
            assert request is not None, "the step entered its requests"
            left[entry.row] -= 1
            found.append(DraftedRow(request, self, left[entry.row]) if entry.num_tokens > 1 else request)
        return found

    def set_computed(self, rows: np.ndarray, num_computed_tokens: np.ndarray) -> None:
        """State how many positions of these rows have KV after the step."""
        self.num_computed_tokens_np[rows] = num_computed_tokens

    def feed(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Take these tokens, on the device, as the next inputs of these rows [n] int64."""
        self.last_sampled_tokens.index_copy_(0, rows, token_ids.to(torch.int64))

    def remove_request(self, req_id: str) -> bool:
        """Forget the request. False: it was not there."""
        row = self.req_id_to_index.pop(req_id, None)
        self.editing.discard(req_id)
        if row is not None and (found := self.requests[row]) is not None and found.request_id == req_id:
            self.requests[row] = None
        return row is not None

    # -- views ---------------------------------------------------------------------------

    def num_computed_tokens(self, req_id: str) -> int:
        """Positions of the request that have KV after the last step."""
        return int(self.num_computed_tokens_np[self.req_id_to_index[req_id]])

    @property
    def num_computed_prefill_tokens(self) -> np.ndarray:
        """[rows] int32: computed positions among those that the request entered with."""
        return np.minimum(self.num_computed_tokens_np, self.prefill_len)

    def next_prefill_tokens(self, req_id: str, count: int) -> list[int]:
        """The next tokens of the request without KV: `count` of them, or as many as there are."""
        row = self.req_id_to_index[req_id]
        start = self.num_computed_tokens_np[row]
        return self.all_token_ids[row, start : min(start + count, self.total_len[row])].tolist()

    def any_prefills(self, rows: np.ndarray) -> bool:
        """Whether one of the rows has tokens left to compute that it entered with."""
        return bool((self.num_computed_tokens_np[rows] < self.prefill_len[rows]).any())
