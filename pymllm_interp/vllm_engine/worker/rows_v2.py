"""The steps of vLLM's V2 runner (vllm.v1.worker.gpu.model_runner)."""

from __future__ import annotations

from typing import Any

from .hooks_of import HooksOf


class RowsOfV2:
    """A mixin in front of the runner's class. A replay of a full graph never calls the model, so `prepare_inputs` begins a step.

    Attributes:
        interp: the rank's hooks; None before the model is loaded.
    """

    interp: HooksOf | None = None

    def finish_requests(self, scheduler_output: Any) -> Any:
        if self.interp is not None:
            self.interp.take(scheduler_output)
        return super().finish_requests(scheduler_output)  # pyright: ignore[reportAttributeAccessIssue]

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch: Any = super().prepare_inputs(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        own = self.interp
        if own is not None:
            given = (*args, *kwargs.values())
            mode = next((name for one in given if (name := getattr(getattr(one, "cg_mode", None), "name", ""))), "NONE")
            count = len(batch.req_ids)
            own.begin(
                batch.req_ids,
                batch.query_start_loc_np[: count + 1],
                batch.num_computed_tokens_np,
                f"vllm V2 {mode.lower()}",
            )
        return batch

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.interp
        run = super().execute_model  # pyright: ignore[reportAttributeAccessIssue]
        if own is None:
            return run(scheduler_output, *args, **kwargs)
        if kwargs.get("dummy_run") or (len(args) > 1 and args[1]):
            own.idle()
        try:
            return run(scheduler_output, *args, **kwargs)
        except BaseException:
            own.idle()
            raise

    def sample(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.interp
        run = super().sample  # pyright: ignore[reportAttributeAccessIssue]
        if own is None:
            return run(hidden_states, *args, **kwargs)
        own.hidden = hidden_states
        try:
            return run(hidden_states, *args, **kwargs)
        finally:
            own.end()
