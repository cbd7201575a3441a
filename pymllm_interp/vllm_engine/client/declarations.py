"""`VllmDeclarations`: the checks of interventions and captures. Those without kernels in vLLM are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import cache

from torch import Tensor

from ...core.model_spec import LOGITS, OF_VISION, ModelSpec
from ...core.request import Request
from ...hooks.bound_hooks import BoundHooks
from ...hooks.captures.reductions.lens import Lens
from ...hooks.captures.spec import Capture
from ...hooks.declarations import Declarations
from ...hooks.interventions.knockout import Intervention, Knockout
from ...hooks.interventions.patch_kv import PatchKV
from ...hooks.monitors.monitor import Monitor
from ...hooks.site import Site
from ...utils.arguments import shown
from ..settings import OURS, VllmLimits
from .sampling import why_kept

MAX_BATCHED = "max_num_batched_tokens"


class NoReadout:
    """A `Readout` for checks: the model is on the ranks, which compute reductions."""

    def norm(self, site: Site, rows: Tensor, gain: bool = True) -> Tensor:
        """Raise NotImplementedError: norms are on the ranks."""
        raise NotImplementedError("norms are on the ranks")

    def logits(self, rows: Tensor) -> Tensor:
        """Raise NotImplementedError: the head is on the ranks."""
        raise NotImplementedError("the head is on the ranks")


class VllmDeclarations(Declarations):
    """Checks and binds the hooks of requests for vLLM (`hooks.declarations.Declarations`).

    Args:
        limits, model: see `Declarations`.
        ranks: number of tensor-parallel ranks.
        stages: sites of each pipeline stage, by number; empty with one stage.
        step_tokens: most token rows of a step.
        ring_bytes: bytes of rank 0's ring; None if captures do not use one.
        drafts: "" without drafts; "chosen" if the scheduler leaves requests without, and "all" if it is vLLM's own.
        why_uncut: reason that edges of attention are not cut, nor patterns captured; "" for none.
        prepare: makes the ranks ready for passes with cut edges, before the first one.
    """

    def __init__(
        self,
        limits: VllmLimits,
        model: ModelSpec,
        ranks: int,
        stages: Sequence[Container[int]],
        step_tokens: int,
        ring_bytes: int | None,
        drafts: str = "",
        why_uncut: str = "",
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(limits, model, NoReadout(), only_captures=False)
        self._ranks, self._step_tokens, self._ring_bytes = ranks, step_tokens, ring_bytes
        self._stages, self._drafts, self._why_uncut, self._prepare = stages, drafts, why_uncut, cache(prepare)

    def declare(self, specs: Sequence[Intervention], captures: Sequence[Capture], request: Request) -> None:
        """Check and bind a request's hooks, see `Declarations.declare`.
        Raises ValueError: likewise. Also specs that need attention's kernels, a head that is split over ranks, or a larger ring."""
        then = [op for spec in specs if isinstance(spec, Monitor) for op in spec.ops]
        for spec in (*specs, *then, *captures):
            if str(getattr(spec, "site", "")).startswith(OF_VISION):
                raise ValueError(
                    f"{spec.name}: with engine='vllm' the vision tower has no sites: its states are computed once for all "
                    f"requests with an image. {OURS}"
                )
        for spec in (*specs, *then):
            if isinstance(spec, Monitor) and callable(spec.then):
                raise ValueError(
                    f"{spec.name}: with engine='vllm' a monitor records, stops, or begins interventions: a function "
                    f"of this process (then={shown(spec.then)}) is not called. {OURS}"
                )
            if isinstance(spec, Knockout) and self._why_uncut:
                raise ValueError(
                    f"{spec.name}: with engine='vllm' no edge of attention is cut {self._why_uncut}. {OURS}"
                )
            if isinstance(spec, PatchKV):
                raise ValueError(f"{spec.name}: with engine='vllm' cached K and V are not replaced. {OURS}")
            if request.params.prompt_logprobs is not None and str(getattr(spec, "site", "")) == LOGITS:
                raise ValueError(
                    f"{spec.name}: with engine='vllm' the log probabilities of prompt tokens are those before ops at the logits: "
                    f"leave out prompt_logprobs. {OURS}"
                )
        for spec in captures:
            if str(spec.site).startswith("kv"):
                raise ValueError(f"{spec.name}: with engine='vllm' cached K and V are not captured. {OURS}")
            if str(spec.site).startswith("pattern") and self._why_uncut:
                raise ValueError(
                    f"{spec.name}: with engine='vllm' no attention pattern is captured {self._why_uncut}. {OURS}"
                )
            if self._ranks > 1 and isinstance(spec.reduce, Lens):
                raise ValueError(
                    f"{spec.name}: Lens needs the head, which tensor_parallel_size={self._ranks} splits: capture the states. {OURS}"
                )
            if self._stages and isinstance(spec.reduce, Lens):
                raise ValueError(
                    f"{spec.name}: Lens needs the head, and with pipeline_parallel_size={len(self._stages)} other ranks have it: "
                    f"capture the states. {OURS}"
                )
            if self._stages and spec.reduction.joined:
                raise ValueError(
                    f"{spec.name}: a crosscoder reads all its sites at once, and with pipeline_parallel_size="
                    f"{len(self._stages)} they may be on several ranks: capture the states. {OURS}"
                )
        super().declare(specs, captures, request)
        if request.declared is not None and request.hooks is not None and request.hooks.bound.hooks.cuts_edges:
            if request.trace is not None:
                raise ValueError(
                    f"with engine='vllm' no edge of attention is cut, and no pattern captured, beside a block. {OURS}"
                )
            self._prepare()
        self._check_ring(request)
        if self._stages and request.hooks is not None and request.hooks.bound is not None:
            self._check_stages(request.hooks.bound.hooks)
        if (self._drafts == "all" or (self._drafts and request.params.speculate)) and (why := why_kept(request)):
            raise ValueError(f"with speculative_config, rows of drafts cannot be taken back from {why}. {OURS}")

    def _check_stages(self, hooks: BoundHooks) -> None:
        """Refuse ops at a site of one pipeline stage that read a site of another."""
        flags: dict[int, int] = {}
        for site, found in hooks.ops.items():
            stage = self._stage_of(site)
            for op in found:
                read = op.flag is not None and not op.flag.monitor and flags.setdefault(op.flag.slot, stage) != stage
                if read or (op.read is not None and self._stage_of(op.read.site) != stage):
                    raise ValueError(
                        f"{op.spec.name} at {op.site}: it reads a site of another pipeline rank "
                        f"(pipeline_parallel_size={len(self._stages)}): let it read one of its own rank's layers. {OURS}"
                    )

    def _stage_of(self, site: int) -> int:
        return next(i for i, sites in enumerate(self._stages) if site in sites)

    def _check_ring(self, request: Request) -> None:
        found = None if request.declared is None else request.declared.captures
        if found is None or self._ring_bytes is None:
            return
        rows = min(request.max_total_tokens, self._step_tokens)
        needed = found.layout.max_reserved_size * rows * self._model.dtype.itemsize
        if needed > self._ring_bytes:
            raise ValueError(
                f"the captures of this request may take {needed} bytes in a step of {rows} positions, and the ring that they leave "
                f"the device through has {self._ring_bytes} (capture_ring_bytes): raise it, lower {MAX_BATCHED}, or capture fewer "
                "sites"
            )
