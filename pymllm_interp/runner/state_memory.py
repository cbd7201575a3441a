"""Memory of recurrent states: how many requests have a slot, and their pool."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from ..config import ServerConfig
from ..core.unsupported import UnsupportedModelError
from ..mem_cache.state_pool import StatePool, slot_bytes
from ..models.base import CausalLM
from ..utils.device import resolve_dtype
from ..utils.out_of_memory import within_memory
from . import device_memory
from .device_memory import PoolOwner, memory_left

logger = logging.getLogger(__name__)

MAX_SHARE = 0.5
"""Of the memory for KV and states, at most this much is for states."""


class StateOwner(PoolOwner, Protocol):
    """What sizing reads of a `ModelRunner`."""

    def get_model(self) -> CausalLM: ...


def state_dtype(config: ServerConfig) -> torch.dtype:
    """The dtype of recurrent states in the pool."""
    return resolve_dtype(config.state_dtype, "cpu")


def num_running_requests(runner: StateOwner) -> int:
    """Requests in one step at most: what KV and the configuration allow, and whose states have room."""
    asked = device_memory.num_running_requests(runner)
    state_bytes = slot_bytes(runner.get_model().state_layouts, state_dtype(runner.server_config))
    if not state_bytes:
        return asked
    fit = max(1, int(device_memory.pool_room(runner) * MAX_SHARE // state_bytes) - 1)  # slot 0 comes on top
    if fit < asked:
        logger.warning(
            "max_running_requests is %d in place of %d: the recurrent states of a request take %.1f MiB",
            fit, asked, state_bytes / 2**20,
        )  # fmt: skip
    return min(asked, fit)


def make_state_pool(runner: StateOwner) -> StatePool | None:
    """The states of `max_running_requests` requests; None where no layer has any.

    Raises:
        UnsupportedModelError: speculative decoding is asked for.
        torch.OutOfMemoryError: they do not fit.
    """
    layouts, config, size = runner.get_model().state_layouts, runner.server_config, runner.max_running_requests
    if not layouts:
        return None
    if config.speculative is not None:
        raise UnsupportedModelError(
            f"speculative={config.speculative!r}: {runner.get_model().spec.family.name} models have recurrent states, which cannot "
            "take drafts back: use speculative=None"
        )
    return within_memory(
        lambda: StatePool(layouts, size, state_dtype(config), runner.device),
        f"the recurrent states of {size} requests do not fit on {runner.device}{memory_left(runner.device, runner.gpu_id)}; what "
        "helps: a lower max_running_requests, or state_dtype='bfloat16'",
    )
