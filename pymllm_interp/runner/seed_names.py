"""Short names of SGLang's and vLLM's model runners, as aliases."""

from __future__ import annotations

import gc
from functools import wraps
from typing import Any

import torch

from ..core.forward_batch import ForwardBatch
from ..sampling import RejectionSampler as DraftTokensHandler
from . import dummy_run
from .graphs.captured_passes import CapturedPasses
from .graphs.cuda_graph_runner import CudaGraphRunner
from .input_batch import ExecuteModelState, InputBatch
from .parts import BatchBuilder, RunnerParts
from .request_state import RequestState
from .step_inputs import StepInputs, dummy_attn


class SeedNames(RunnerParts):
    """Names of other runners, for code that is written against them. `ModelRunner` has these attributes."""

    graphs: CapturedPasses
    execute_model_state: ExecuteModelState | None
    req_states: RequestState
    step_inputs: StepInputs

    @property
    def max_model_len(self) -> int:
        """The longest sequence that is served, in tokens."""
        return self.context_len

    @property
    def draft_tokens_handler(self) -> DraftTokensHandler | None:
        """Verifier of the current step's drafts; None without drafts."""
        state = self.execute_model_state
        return None if state is None else state.input_batch.verifier

    def take_draft_token_ids(self) -> dict[str, list[int]] | None:
        """Request -> its drafts in the step under way, between `execute_model` and `sample_tokens`; None without drafts."""
        state = self.execute_model_state
        return None if state is None or not state.scheduler_output.drafts else dict(state.scheduler_output.drafts)

    @property
    def sliding_window_size(self) -> int | None:
        """The widest sliding window of the layers, or None if some layer attends to the whole context."""
        windows = [window for window in self.model_spec.sliding_windows if window]
        return max(windows) if len(windows) == self.model_spec.num_hidden_layers else None

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Tasks that the model supports."""
        return ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Set the longest sequence that is served, here and in the request table. Raises ValueError above the tables' size."""
        assert self.req_to_token_pool is not None, "call initialize() first"
        limit = self.req_to_token_pool.max_context_len
        if not 1 <= max_model_len <= limit:
            raise ValueError(f"max_model_len={max_model_len}: the tables hold 1 to {limit} tokens")
        self.context_len = self.req_states.max_model_len = max_model_len

    def prepare_attn(self, input_batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows of the requests in `req_to_token`, [reqs]; KV slot of each token row, [tokens]), both int64."""
        return self.step_inputs.prepare_attn(input_batch)

    def prepare_dummy_attn(self, num_reqs: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for padding rows: the dummy row, and the dummy slot."""
        return dummy_attn(num_reqs, num_tokens, self.device)

    @wraps(BatchBuilder.extend)
    def prepare_forward_batch_extend(self, *args: Any, **kwargs: Any) -> ForwardBatch:
        return self.batches.extend(*args, **kwargs)

    @wraps(BatchBuilder.decode)
    def prepare_forward_batch_decode(self, *args: Any, **kwargs: Any) -> ForwardBatch:
        return self.batches.decode(*args, **kwargs)

    @property
    def graph_runner(self) -> CudaGraphRunner | None:
        """The captured decode passes; None if passes are not captured (a CPU, `disable_cuda_graph`)."""
        return self.graphs.decode

    def profile_cudagraph_memory(self) -> int:
        """Device memory to leave for the graphs when the KV pool is sized, in bytes."""
        return self.graphs.expected_bytes()

    def profile_run(self) -> None:
        """Run the largest step, so that its peak of memory is known."""
        _, sampled_from = self._dummy_run(self.max_num_tokens, skip_attn=True, is_profile=True)
        self._dummy_sampler_run(sampled_from)
        gc.collect()

    def _dummy_run(self, num_tokens: int, **options: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a dummy step (`dummy_run.dummy_run`)."""
        return dummy_run.dummy_run(self, num_tokens, **options)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the sampler on dummy inputs (`dummy_run.dummy_sampler_run`)."""
        return dummy_run.dummy_sampler_run(self, hidden_states)
