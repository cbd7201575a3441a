"""The steps of vLLM's V1 runner (vllm.v1.worker.gpu_model_runner), and of its CPU runner."""

from __future__ import annotations

from typing import Any

from .hooks_of import HooksOf


class RowsOfV1:
    """A mixin in front of the runner's class.

    Attributes:
        interp: the rank's hooks; None before the model is loaded.
    """

    interp: HooksOf | None = None

    def _update_states(self, scheduler_output: Any) -> Any:
        if self.interp is not None:
            self.interp.take(scheduler_output)
        return super()._update_states(scheduler_output)  # pyright: ignore[reportAttributeAccessIssue]

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        own, runner = self.interp, self
        forward = super()._model_forward  # pyright: ignore[reportAttributeAccessIssue]
        if own is None or not own.expects_pass:
            return forward(*args, **kwargs)
        batch: Any = runner.input_batch  # pyright: ignore[reportAttributeAccessIssue]
        count = batch.num_reqs
        starts = runner.query_start_loc.np[: count + 1]  # pyright: ignore[reportAttributeAccessIssue]
        own.begin(batch.req_ids[:count], starts, batch.num_computed_tokens_cpu[:count], f"vllm V1 {own.graph_mode()}")
        hidden = forward(*args, **kwargs)
        own.hidden = hidden
        return hidden

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
