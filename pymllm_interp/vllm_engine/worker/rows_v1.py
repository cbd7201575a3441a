"""The steps of vLLM's V1 runner (vllm.v1.worker.gpu_model_runner), and of its CPU runner."""

from __future__ import annotations

from typing import Any

import torch

from .hooks_of import HooksOf
from .stale_kv import clear_new_blocks


class CpuNoise(torch.Generator):
    """A generator of a seeded request on a CPU, in place of vLLM's.

    If a token was drawn in the middle of a prompt, vLLM's V1 runner moves the generator's offset back. Only generators on
    CUDA have one: on a CPU the runner fails.
    """

    before: torch.Tensor

    def get_offset(self) -> int:
        """Return 0: nothing depends on the offset."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Undo the draws of the step."""
        return self.set_state(self.before)


def keep_noise_back(generators: dict[int, Any]) -> None:
    """Replace generators of a step's requests that cannot go back, and store their states."""
    for index, generator in generators.items():
        if not isinstance(generator, CpuNoise):
            generators[index] = own = CpuNoise()
            own.set_state(generator.get_state())
            generator = own
        generator.before = generator.get_state()


class RowsOfV1:
    """A mixin in front of the runner's class.

    Attributes:
        interp: the rank's hooks; None before the model is loaded.
    """

    OWN = ()
    """Methods that the runner does not have."""

    interp: HooksOf | None = None

    def _update_states(self, scheduler_output: Any) -> Any:
        if self.interp is not None:
            clear_new_blocks(self, scheduler_output)
            known: Any = self.requests  # pyright: ignore[reportAttributeAccessIssue]
            self.interp.take(scheduler_output, lambda vllm_id: known[vllm_id].num_tokens)
        found = super()._update_states(scheduler_output)  # pyright: ignore[reportAttributeAccessIssue]
        if self.interp is not None and self.interp.has_modules and scheduler_output.total_num_scheduled_tokens:
            batch: Any = self.input_batch  # pyright: ignore[reportAttributeAccessIssue]
            ids, scheduled = batch.req_ids[: batch.num_reqs], scheduler_output.num_scheduled_tokens
            first = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
            self.interp.begin_blocks(ids, [scheduled[one] for one in ids], first)
        if self.interp is not None and self.interp.stage.device.type == "cpu":
            keep_noise_back(self.input_batch.generators)  # pyright: ignore[reportAttributeAccessIssue]
        return found

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        own, runner = self.interp, self
        forward = super()._model_forward  # pyright: ignore[reportAttributeAccessIssue]
        if own is None or not own.expects_pass:
            return forward(*args, **kwargs)
        batch: Any = runner.input_batch  # pyright: ignore[reportAttributeAccessIssue]
        count = batch.num_reqs
        starts = runner.query_start_loc.np[: count + 1]  # pyright: ignore[reportAttributeAccessIssue]
        mode = "modules" if own.traces.own_pass else own.graph_mode()
        own.begin(batch.req_ids[:count], starts, batch.num_computed_tokens_cpu[:count], f"vllm V1 {mode}")
        hidden = forward(*args, **kwargs)
        own.hidden = hidden[0] if isinstance(hidden, tuple) else hidden  # beside states for a drafter
        return hidden

    def sync_and_gather_intermediate_tensors(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        runner: Any = self
        if (
            runner.intermediate_tensors is None
        ):  # made in a dummy pass, which vLLM's CPU runner leaves out without a compiler
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return super().sync_and_gather_intermediate_tensors(num_tokens, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        own = self.interp
        if own is not None and own.traces.own_pass:
            kwargs["force_eager"] = True
        return super()._determine_batch_execution_and_padding(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._sample(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if self.interp is not None and self.interp.traces.decides:
            found.sampled_token_ids = self.interp.traces.sampled(found.sampled_token_ids)
        return found

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().sample_tokens(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            if self.interp is not None:
                self.interp.traces.end()

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        own = self.interp
        run = super().execute_model  # pyright: ignore[reportAttributeAccessIssue]
        if own is None:
            return run(*args, **kwargs)
        own.expects_pass = True
        try:
            return run(*args, **kwargs)
        finally:
            own.expects_pass = False
            own.end()

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        if self.interp is not None:
            self.interp.idle()
        return super()._dummy_run(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
