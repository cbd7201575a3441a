"""`HooksOf`: connects the two runners of vLLM with a rank's stage."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import numpy as np

from ...core.step import RequestHooks
from ...hooks.bound_hooks import KEPT
from ..payloads import HookedOnWire, Sealer, TensorKey, loaded, unpacked_tensor
from ..settings import KEY
from .stage import RankStage

logger = logging.getLogger(__name__)


class HooksOf:
    """The requests with hooks of a rank's runner.

    Args:
        stage: stage of the rank.
        model: vLLM's model. A wrapper replaces its `compute_logits`, to serve the logits' site.

    Attributes:
        hidden: [tokens, hidden] of the pass under way, after the final norm.
        expects_pass: a call of the model is a pass of scheduled requests.
        tensors: tensors of the requests' hooks, by key.
    """

    def __init__(self, stage: RankStage, model: Any) -> None:
        self.stage = stage
        self.hidden: Any = None
        self.expects_pass = False
        self.tensors: dict[TensorKey, Any] = {}
        self._sealer: Sealer | None = None
        self._specs: dict[bytes, tuple[Any, Any]] = {}  # by pickle
        self._compute = model.compute_logits
        model.compute_logits = self._logits

    def open(self, key: bytes) -> None:
        """Take requests that were sealed with this key."""
        self._sealer = Sealer(key)

    def put(self, packed: list[Any]) -> None:
        """Keep tensors."""
        for one in packed:
            self.tensors[one[0]] = unpacked_tensor(one)

    def drop(self, keys: list[TensorKey]) -> None:
        """Forget tensors."""
        for key in keys:
            self.tensors.pop(key, None)
        self._specs.clear()
        self.stage.bindings.clear()

    def take(self, scheduled: Any) -> None:
        """Requests that have finished, and new ones."""
        for vllm_id in scheduled.finished_req_ids:
            self.stage.remove(vllm_id)
        for vllm_id in scheduled.preempted_req_ids or ():
            self.stage.preempted(vllm_id)
        for new in scheduled.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            sealed = extra.get(KEY)
            if sealed is None:
                continue
            if self._sealer is None:
                raise PermissionError("this rank has no client that may send hooks: start vLLM by LM(engine='vllm')")
            told = HookedOnWire(*pickle.loads(self._sealer.opened(bytes(sealed))))
            specs = self._specs_of(told.specs)
            hooks = RequestHooks(*specs, told.max_tokens, told.logits_from, vector_rows=told.vector_rows)
            self.stage.add(new.req_id, told.request_id, hooks, told.prompt_len)

    def _specs_of(self, pickled: bytes) -> tuple[Any, Any]:
        """Interventions and captures. Recent requests get the same objects again."""
        found = self._specs.get(pickled)
        if found is None:
            if len(self._specs) >= KEPT:
                self._specs.clear()
            found = self._specs[pickled] = loaded(pickled, self.tensors)
        return found

    def begin(self, req_ids: list[str], starts: np.ndarray, computed: np.ndarray, mode: str) -> None:
        """Begin a step, see `RankStage.begin`."""
        self.stage.begin(req_ids, starts, computed, mode)

    def end(self) -> None:
        """End the launch of a step."""
        self.hidden = None
        self.stage.end()

    def idle(self) -> None:
        """The next pass is a dummy one."""
        self.hidden = None
        self.stage.idle()

    def graph_mode(self) -> str:
        """CUDA graph mode of the current pass: "none", "piecewise" or "full"."""
        from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]

        return get_forward_context().cudagraph_runtime_mode.name.lower()

    def _logits(self, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            return self._compute(sampled, *args, **kwargs)
        return self.stage.logits(lambda rows: self._compute(rows, *args, **kwargs), hidden, sampled)
