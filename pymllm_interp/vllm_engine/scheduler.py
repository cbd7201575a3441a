"""Scheduler of vLLM that runs a prompt with a block in one step, and schedules no drafts of some requests."""

from __future__ import annotations

from typing import Any

from .settings import UNDRAFTED, WHOLE


class _Config:
    """A scheduler's config, in which the request that is looked at decides about chunks of prompts."""

    def __init__(self, config: Any, scheduler: Any) -> None:
        self._config, self._scheduler = config, scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    @property
    def enable_chunked_prefill(self) -> bool:
        """False for a request with blocks: it waits for a step that has room for its prompt."""
        queue = getattr(self._scheduler, "kv_holding_waiting", None) or self._scheduler.waiting
        request = queue.peek_request() if queue else None
        return self._config.enable_chunked_prefill and not _says(request, WHOLE)


def _says(request: Any, name: str) -> bool:
    """Whether a request's `extra_args` have a name."""
    return name in (getattr(getattr(request, "sampling_params", None), "extra_args", None) or {})


class OwnRequests:
    """A mixin in front of a scheduler's class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scheduler_config: Any = _Config(self.scheduler_config, self)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Take drafts of `UNDRAFTED` requests out of the step: rows that are not accepted could not be taken back.

        vLLM also pads a request that enters with one token, as if it had drafts.
        """
        known: Any = self.requests  # pyright: ignore[reportAttributeAccessIssue]
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for vllm_id in [one for one in drafts if _says(known[one], UNDRAFTED)]:
            count = len(drafts.pop(vllm_id))
            scheduler_output.num_scheduled_tokens[vllm_id] -= count
            scheduler_output.total_num_scheduled_tokens -= count
        super()._update_after_schedule(scheduler_output)  # pyright: ignore[reportAttributeAccessIssue]


def scheduler_name(config: Any) -> str:
    """The name of the scheduler's class for a config of vLLM."""
    return f"{__name__}.{'Async' if config.scheduler_config.async_scheduling else ''}Scheduler"


def __getattr__(name: str) -> Any:
    """`Scheduler` and `AsyncScheduler`, made when they are asked for: their bases import vLLM's engine."""
    if name == "Scheduler":
        from vllm.v1.core.sched.scheduler import Scheduler as Base  # pyright: ignore[reportMissingImports]
    elif name == "AsyncScheduler":
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Base  # pyright: ignore[reportMissingImports]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = type(name, (OwnRequests, Base), {"__module__": __name__})
    return found
