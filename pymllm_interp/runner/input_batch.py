"""A step's inputs, laid out in the rows of its flat batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..core.forward_batch import ForwardBatch
from ..core.output import LogitsProcessorOutput, ScheduledRequest, SchedulerOutput
from .partition import BatchExecutionDescriptor


@dataclass
class InputBatch:
    """What `ModelRunner.prepare_inputs` makes of a step's schedule.

    Attributes:
        sampling: the requests whose next token is sampled, in batch order.
        sample_rows: the logit row of each of them.
    """

    # fmt: off
    req_ids:              list[str]
    entries:              list[ScheduledRequest]
    idx_mapping_np:       np.ndarray    # [reqs] int64, rows of the request table
    num_scheduled_tokens: np.ndarray    # [reqs] int32
    query_start_loc:      np.ndarray    # [reqs + 1] int32, first token row of each request
    input_ids:            torch.Tensor  # [tokens] int64
    positions:            torch.Tensor  # [tokens] int64
    seq_lens_cpu:         torch.Tensor  # [reqs] int32
    logits_indices:       torch.Tensor  # [logit rows] int64
    cu_num_logits:        np.ndarray    # [reqs + 1] int32, first logit row of each request
    sampling:             list[ScheduledRequest]
    sample_rows:          list[int]
    # fmt: on

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


class InputBuffers:
    """Input memory that keeps its address over the steps, as captured graphs need it.

    A step's tensors are slices of it, valid until the next step is prepared.
    """

    def __init__(self, max_num_tokens: int, device: str) -> None:
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.out_cache_loc = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)

    def fill(self, name: str, values: np.ndarray) -> torch.Tensor:
        """Copy `values` into the buffer `name`; returns the filled slice."""
        target: torch.Tensor = getattr(self, name)[: len(values)]
        target.copy_(torch.from_numpy(values))
        return target


@dataclass
class ExecuteModelState:
    """Carried from `execute_model` to `sample_tokens`."""

    scheduler_output: SchedulerOutput
    input_batch: InputBatch
    forward_batch: ForwardBatch
    descriptor: BatchExecutionDescriptor
    logits_output: LogitsProcessorOutput
