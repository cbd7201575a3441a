"""The runner's table of requests: their tokens, and how far they have come.

A request has the row that it has in the `ReqToTokenPool`. Tokens are staged and written together once a step.
"""

from __future__ import annotations

import numpy as np
import torch

from ..core.upload import upload


class RequestState:
    """One row a request.

    Args:
        max_num_reqs: requests at most; rows 1 to max_num_reqs (row 0 is the dummy's).
        max_model_len: tokens of one request at most.
        device: of `last_sampled_tokens`.

    Attributes:
        all_token_ids: [rows, max_model_len] int32, prompt and generated tokens.
        num_pages: by row, KV pages of the request that the `ReqToTokenPool` knows.
        edited: [rows] int32 on the device, 1 where the request has ops or captures in the tables.
        last_sampled_tokens: [rows] int64 on the device, what decoding requests feed next.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, device: str) -> None:
        rows = max_num_reqs + 1
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.req_id_to_index: dict[str, int] = {}
        self.all_token_ids = np.zeros((rows, max_model_len), dtype=np.int32)
        self.prompt_len = np.zeros(rows, dtype=np.int32)
        self.prefill_len = np.zeros(rows, dtype=np.int32)
        self.total_len = np.zeros(rows, dtype=np.int32)
        self.num_computed_tokens_np = np.zeros(rows, dtype=np.int32)
        self.num_computed_prefill_tokens = np.zeros(rows, dtype=np.int32)
        self.num_pages = [0] * rows
        self.last_sampled_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.edited = torch.zeros(rows, dtype=torch.int32, device=device)
        self._staged: list[tuple[int, list[int]]] = []

    def add_request(
        self, req_id: str, index: int, prompt_len: int, all_token_ids: list[int], num_computed_tokens: int
    ) -> None:
        """Give the request row `index`. An id that is there already is replaced (a resumed request, a new prompt).

        Args:
            all_token_ids: what has to be computed before the next token is sampled: the prompt and, after a preemption,
                what was generated.
        """
        self.remove_request(req_id)
        if len(all_token_ids) > self.max_model_len:
            raise ValueError(f"request {req_id}: {len(all_token_ids)} tokens, rows hold {self.max_model_len}")
        self.req_id_to_index[req_id] = index
        self.prompt_len[index] = prompt_len
        self.prefill_len[index] = self.total_len[index] = len(all_token_ids)
        self.num_computed_tokens_np[index] = num_computed_tokens
        self.num_computed_prefill_tokens[index] = min(num_computed_tokens, len(all_token_ids))
        self._staged.append((index, all_token_ids))

    def apply_staged_writes(self) -> None:
        """Write the tokens of requests that were added since the last call."""
        resumed = []
        for index, token_ids in self._staged:
            self.all_token_ids[index, : len(token_ids)] = token_ids
            if len(token_ids) > self.prompt_len[index]:
                resumed.append((index, token_ids[-1]))
        if resumed:
            rows, tokens = upload(self.last_sampled_tokens.device, *np.array(resumed, dtype=np.int64).T)
            self.feed(rows, tokens)
        self._staged.clear()

    def remove_request(self, req_id: str) -> bool:
        """Forget the request. False: it was not there."""
        return self.req_id_to_index.pop(req_id, None) is not None

    def num_computed_tokens(self, req_id: str) -> int:
        """Positions of the request that have KV."""
        return int(self.num_computed_tokens_np[self.req_id_to_index[req_id]])

    def next_prefill_tokens(self, req_id: str, count: int) -> list[int]:
        """The next tokens of the request that have no KV yet: `count` of them, or as many as there are."""
        index = self.req_id_to_index[req_id]
        start = self.num_computed_tokens_np[index]
        return self.all_token_ids[index, start : min(start + count, self.total_len[index])].tolist()

    def any_prefills(self, indices: np.ndarray) -> bool:
        """Whether one of the rows has tokens of its prompt left to compute."""
        return bool((self.num_computed_prefill_tokens[indices] < self.prefill_len[indices]).any())

    def advance(self, indices: np.ndarray, num_scheduled: np.ndarray) -> None:
        """Count a step's tokens as computed."""
        self.num_computed_tokens_np[indices] += num_scheduled
        prefill = self.num_computed_prefill_tokens[indices] + num_scheduled
        self.num_computed_prefill_tokens[indices] = np.minimum(prefill, self.prefill_len[indices])

    def feed(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Take these tokens, on the device, as the next inputs of these rows [n] int64."""
        self.last_sampled_tokens.index_copy_(0, rows, token_ids.to(torch.int64))

    def append_sampled(self, indices: np.ndarray, token_ids: np.ndarray) -> None:
        """Append the sampled tokens of these rows. A full row keeps its length: it is about to end."""
        rows = self.total_len[indices] < self.max_model_len
        indices, token_ids = indices[rows], token_ids[rows]
        self.all_token_ids[indices, self.total_len[indices]] = token_ids
        self.total_len[indices] += 1
