"""The steps of vLLM's V2 runner (vllm.v1.worker.gpu.model_runner)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from inspect import signature
from typing import Any

import torch

from .blocks.traces import RankTraces
from .hooks_of import HooksOf
from .stale_kv import clear_new_blocks


@cache
def _names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(signature(function).parameters)


class _NoGraphs:
    """A runner's CUDA graphs in a step that runs without any.

    Args:
        graphs: vLLM's `CudaGraphManager`.
    """

    def __init__(self, graphs: Any) -> None:
        self._graphs = graphs

    def dispatch(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """vLLM's description of the step's pass, without a graph and its padding."""
        found = self._graphs.dispatch(num_reqs, num_tokens, *args, **kwargs)
        return replace(found, cg_mode=type(found.cg_mode).NONE, num_reqs=num_reqs, num_tokens=num_tokens)


class RowsOfV2:
    """A mixin in front of the runner's class. A replay of a full graph never calls the model, so `prepare_inputs` begins a step.

    Attributes:
        interp: the rank's hooks; None before the model is loaded.
    """

    OWN = ("_num_tokens", "_sorted", "_take_graphs_back")
    """Methods that the runner does not have."""

    interp: HooksOf | None = None
    cudagraph_manager: Any
    _graphs: Any = None
    _ids: list[str] | None = None  # of a step with blocks

    def finish_requests(self, scheduler_output: Any) -> Any:
        if self.interp is not None:
            clear_new_blocks(self, scheduler_output)
            self.interp.take(scheduler_output, self._num_tokens)
        return super().finish_requests(scheduler_output)  # pyright: ignore[reportAttributeAccessIssue]

    def _num_tokens(self, vllm_id: str) -> int:
        """Number of a request's tokens, which the device counts, without drafts that were not accepted."""
        states: Any = self.req_states  # pyright: ignore[reportAttributeAccessIssue]
        return int(states.total_len.gpu[states.req_id_to_index[vllm_id]])

    def update_requests(self, scheduler_output: Any) -> None:
        super().update_requests(scheduler_output)  # pyright: ignore[reportAttributeAccessIssue]
        own, counts = self.interp, scheduler_output.num_scheduled_tokens
        self._ids = None
        if own is not None and own.has_modules and counts:
            cached = scheduler_output.scheduled_cached_reqs
            first = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            first |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
            ids = self._ids = self._sorted(scheduler_output)
            own.begin_blocks(ids, [counts[one] for one in ids], [first[one] for one in ids])
            if own.traces.own_pass:
                self._graphs, self.cudagraph_manager = self.cudagraph_manager, _NoGraphs(self.cudagraph_manager)

    def _sorted(self, scheduler_output: Any) -> list[str]:
        """The step's requests in the order of the batch. Versions of vLLM differ in its arguments."""
        from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids  # pyright: ignore[reportMissingImports]

        known = {
            "num_tokens_per_req": scheduler_output.num_scheduled_tokens,
            "draft_tokens": scheduler_output.scheduled_spec_decode_tokens,
            "decode_query_len": self.decode_query_len,  # pyright: ignore[reportAttributeAccessIssue]
        }
        return list(sort_batch_req_ids(**{name: known[name] for name in _names_of(sort_batch_req_ids)}))

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        self._take_graphs_back()
        batch: Any = super().prepare_inputs(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        own = self.interp
        if own is not None:
            given = (*args, *kwargs.values())
            mode = next((name for one in given if (name := getattr(getattr(one, "cg_mode", None), "name", ""))), "NONE")
            count = len(batch.req_ids)
            if (own.has_modules or self._ids) and self._ids != list(batch.req_ids):
                raise RuntimeError(
                    f"blocks were begun for {self._ids}, and the batch has {batch.req_ids}. This is a bug"
                )
            mode = f"vllm V2 {'modules' if own.traces.own_pass else mode.lower()}"
            own.begin(batch.req_ids, batch.query_start_loc_np[: count + 1], batch.num_computed_tokens_np, mode)
        return batch

    def _take_graphs_back(self) -> None:
        if self._graphs is not None:
            self.cudagraph_manager, self._graphs = self._graphs, None

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.interp
        run = super().execute_model  # pyright: ignore[reportAttributeAccessIssue]
        if own is None:
            return run(scheduler_output, *args, **kwargs)
        if kwargs.get("dummy_run") or (len(args) > 1 and args[1]):
            own.idle()
        try:
            found = run(scheduler_output, *args, **kwargs)
            if found is not None and own.stage.step is not None:  # states for the next pipeline rank, which samples
                own.end()
            return found
        except BaseException:
            self._take_graphs_back()
            own.idle()
            raise

    def pool(self) -> Any:
        try:
            return super().pool()  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            if self.interp is not None:
                self.interp.end()

    def sample(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.interp
        run = super().sample  # pyright: ignore[reportAttributeAccessIssue]
        if own is None:
            return run(hidden_states, *args, **kwargs)
        own.hidden = hidden_states
        try:
            found = run(hidden_states, *args, **kwargs)
            if own.traces.decides:
                _agree(own.traces, *found)
            return found
        finally:
            own.end()
            own.traces.end()


def _agree(traces: RankTraces, output: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
    """Take the tokens and counts that rank 0 decides on: in a pass by modules other ranks have no logits.

    Args:
        output: vLLM's `SamplerOutput`.
        num_sampled, num_rejected: [requests] counts of tokens and of drafts.
    """
    tokens = output.sampled_token_ids
    if tokens.shape[1] == 1:  # without drafts all ranks have the same counts
        if (found := traces.sampled(tokens)) is not tokens:
            tokens[:] = found
        return
    counts = torch.stack([num_sampled, num_rejected], 1).to(tokens.dtype)
    chosen = traces.sampled(torch.cat([tokens, counts], 1))
    tokens[:], num_sampled[:], num_rejected[:] = chosen[:, :-2], chosen[:, -2], chosen[:, -1]
