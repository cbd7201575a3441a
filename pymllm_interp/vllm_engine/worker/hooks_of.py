"""`HooksOf`: connects the two runners of vLLM with a rank's stage."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...core.model_spec import ModelSpec, site_index
from ...core.step import RequestHooks
from ...hooks.bound_hooks import KEPT
from ...hooks.captures.spec import Capture
from ...hooks.site import NORMED, Site, expand, stream_of
from ...utils.upload import upload
from ...wire.failures import failure_of
from ..blocks import TraceOnWire
from ..payloads import HookedOnWire, Sealer, TensorKey, loaded, unpacked_tensor
from ..settings import KEY
from .blocks.kept_kv import KeptKV
from .blocks.traces import RankTraces
from .stage import RankStage

logger = logging.getLogger(__name__)


class HooksOf:
    """The requests with hooks of a rank's runner.

    Args:
        stage: stage of the rank.
        head: the model's (`head_of`).
        traces: blocks of the rank.
        model: vLLM's model. Wrappers replace its `compute_logits` or `pooler`, to serve the logits' site, and its
            `forward`.
        num_drafts: most draft tokens of a request in a step.
        sites: numbers of the sites of this pipeline rank, which captures those; None: it has all.

    Attributes:
        hidden: [tokens, hidden] of the pass under way, after the final norm.
        expects_pass: a call of the model is a pass of scheduled requests.
        tensors: tensors of the requests' hooks, by key.
        drafts: draft tokens of the step, by vLLM's id.
    """

    def __init__(
        self, stage: RankStage, model: Any, head: Callable[..., Any], traces: RankTraces, num_drafts: int = 0,
        sites: Container[int] | None = None,
    ) -> None:  # fmt: skip
        self.stage, self.traces, self._num_drafts, self._sites = stage, traces, num_drafts, sites
        self.hidden: Any = None
        self._whole: Any = None  # the same, until the next step
        self.expects_pass = False
        self.drafts: Mapping[str, Sequence[int]] = {}
        self.tensors: dict[TensorKey, Any] = {}
        self._sealer: Sealer | None = None
        self._specs: dict[bytes, tuple[Any, Any]] = {}  # by pickle
        self._compute = head
        if hasattr(model, "pooler"):
            self._pool = model.pooler.forward
            model.pooler.forward = self._pooled
        else:
            model.compute_logits = self._logits
        self._run = model.forward
        model.forward = self._forward
        self._kept, self._cut_ids, self._cutting = KeptKV(stage.model, stage.device), set[str](), False
        self._logit_counts: list[int] = []
        # Rows of the logits that each request samples from: its last, and one for each draft.
        self._sampled: list[int] = []
        self._starts = np.zeros(1, dtype=np.int32)
        stage.whole = traces.whole

    def open(self, key: bytes) -> None:
        """Take requests that were sealed with this key."""
        self._sealer = Sealer(key)

    def open_traces(self, sealed: bytes) -> bytes | None:
        """Make the traces of a client's ``with`` known. Returns the pickled `Failure` of traces that this rank cannot serve."""
        assert self._sealer is not None, "`open` comes before"
        try:
            self.traces.open(self._sealer.opened(sealed))
        except Exception as error:
            return pickle.dumps(failure_of(error))
        return None

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

    def take(self, scheduled: Any, num_tokens: Callable[[str], int]) -> None:
        """Requests that have finished, and new ones.

        Args:
            num_tokens: a request's number of tokens, without drafts that were not accepted.
        """
        self.drafts = scheduled.scheduled_spec_decode_tokens
        for vllm_id in scheduled.finished_req_ids:
            self.stage.remove(vllm_id)
            self.traces.remove(vllm_id)
            self._kept.forget(vllm_id)
            self._cut_ids.discard(vllm_id)
        for vllm_id in scheduled.preempted_req_ids or ():
            self.stage.preempted(vllm_id, num_tokens(vllm_id) if self._num_drafts else None)
        for new in scheduled.scheduled_new_reqs:
            pooled = getattr(new.pooling_params, "extra_kwargs", None) or {}
            extra = getattr(new.sampling_params, "extra_args", None) or pooled
            sealed = extra.get(KEY)
            if sealed is None:
                continue
            if self._sealer is None:
                raise PermissionError("this rank has no client that may send hooks: start vLLM by LM(engine='vllm')")
            told = HookedOnWire(*pickle.loads(self._sealer.opened(bytes(sealed))))
            if told.trace is not None:
                wire = TraceOnWire(*told.trace)
                self.traces.add(new.req_id, told.request_id, new.prompt_token_ids, wire)
            specs = self._specs_of(told.specs)
            if self._sites is None and not any(
                specs
            ):  # all pipeline ranks answer, also those without a capture of the request
                continue
            longest = told.max_tokens + self._num_drafts  # vLLM drafts beyond a request's last token
            hooks = RequestHooks(*specs, longest, told.logits_from, vector_rows=told.vector_rows)
            self.stage.add(new.req_id, told.request_id, hooks, told.prompt_len)
            if self.stage.cuts(new.req_id):
                self._cut_ids.add(new.req_id)

    def _specs_of(self, pickled: bytes) -> tuple[Any, Any]:
        """Interventions and captures. Recent requests get the same objects again."""
        found = self._specs.get(pickled)
        if found is None:
            if len(self._specs) >= KEPT:
                self._specs.clear()
            ops, captures = loaded(pickled, self.tensors)
            if self._sites is not None:
                captures = part_of_captures(captures, self.stage.model, self._sites)
            found = self._specs[pickled] = ops, captures
        return found

    @property
    def has_modules(self) -> bool:
        """Whether a step may run by modules, or the last one has."""
        return self.traces.knows_any or bool(self._cut_ids) or self._cutting

    def begin_blocks(self, ids: list[str], counts: list[int], first: list[int]) -> None:
        """Run new blocks of a step's requests until they wait, before its inputs are laid out.

        Args:
            counts, first: token rows, and first position, of each.
        """
        whole = self.traces.whole
        self._sampled = [1 + len(self.drafts.get(vllm_id, ())) for vllm_id in ids]
        self._logit_counts = [
            count if vllm_id in whole or self.stage.reads_all_logits(vllm_id) else sampled
            for vllm_id, count, sampled in zip(ids, counts, self._sampled, strict=True)
        ]
        self._cutting = any(map(self.stage.cuts, ids))
        self.traces.begin(ids, counts, first, self._logit_counts, self._cutting)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's model: by modules where blocks wait for one, and else its own forward."""
        hidden = self._by_modules(kwargs["input_ids"], kwargs["positions"]) if self.traces.own_pass else None
        if hidden is None:
            return self._run(*args, **kwargs)
        read = self.traces.read_states
        return (hidden, read) if read else hidden

    def _by_modules(self, input_ids: Any, positions: Any) -> Any:
        """Hidden states [tokens, hidden] of the step's pass with its blocks; None if it has failed."""
        tokens = np.concatenate([
            np.arange(stop - rows, stop, dtype=np.int64)
            for rows, stop in zip(self._logit_counts, self._starts[1:].tolist(), strict=True)
        ])  # fmt: skip
        count, stage = int(self._starts[-1]), self.stage
        ops = stage.ops_of_pass(count)
        kept, cuts, rows = None, None, []
        if self._cutting and stage.step is not None and not stage.rank:
            rows = [row for row in stage.step.rows_of if stage.cuts(row[0])]
            kept, cuts = self._kept, stage.stage.attention_cuts(stage.step)
            lost = kept.begin(cuts, rows, stage.longest)
            stage.fail_cuts(
                lost, "no memory beside vLLM's for its K and V, by which edges are cut: lower gpu_memory_utilization"
            )
        step = input_ids[:count], positions[:count], self._starts, ops, tokens, cuts, kept
        set_back = stage.taps.counts()
        with stage.taps.silent():  # the modules of the tree have the inner sites
            hidden = self.traces.run_pass(*step)
            if hidden is None and self._cutting:  # the blocks have ended, and others' edges are cut all the same
                set_back()
                hidden = self.traces.run_pass(*step)
        if hidden is None:
            set_back()
            stage.fail_cuts(
                [row[0] for row in rows], "a pass with cut edges of attention has failed: see the log of rank 0"
            )
        elif stage.links_sites and stage.taps.split.ranks > 1:
            stage.stage.decide(self.traces.agreed(stage.decisions))
        stage.by_modules = hidden is not None
        return hidden

    def begin(self, req_ids: list[str], starts: np.ndarray, computed: np.ndarray, mode: str) -> None:
        """Begin a step, see `RankStage.begin`."""
        self._starts, self.traces.mode = starts, mode
        self.stage.begin(req_ids, starts, computed, mode, self.drafts)

    def end(self) -> None:
        """End the launch of a step."""
        self.hidden = None
        self.stage.end()

    def idle(self) -> None:
        """The next pass is a dummy one."""
        self.hidden = self._whole = None
        self.stage.idle()

    def graph_mode(self) -> str:
        """CUDA graph mode of the current pass: "none", "piecewise" or "full"."""
        from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]

        return get_forward_context().cudagraph_runtime_mode.name.lower()

    def _logits_of_modules(self, sampled: Any) -> Any:
        """The logits [requests, vocab] of a pass by modules. Ranks that follow do not choose tokens, and have zeros."""
        logits = self.traces.logits
        if logits is None:
            return sampled.new_zeros(len(sampled), self.stage.model.num_logits)
        rows = logits
        if self._sampled != self._logit_counts:
            stops = np.cumsum(self._logit_counts).tolist()
            of_samples = [row for stop, n in zip(stops, self._sampled, strict=True) for row in range(stop - n, stop)]
            (index,) = upload(logits.device, np.array(of_samples, dtype=np.int64))
            rows = logits[index]
        if (step := self.stage.step) is not None and step.batch.touches_logits:
            self.stage.stage.capture_logits(step, logits, rows)
        return rows

    def _pooled(self, hidden_states: Any, pooling_metadata: Any) -> Any:
        """vLLM's pooler, after the ops and captures at the labels. Only these are read of its outcome."""
        if self.stage.step is not None:
            last = torch.from_numpy(self._starts[1:] - 1).to(hidden_states.device)
            self.stage.logits(lambda rows, _: self._compute(rows), hidden_states, hidden_states[last])
        return self._pool(hidden_states=hidden_states, pooling_metadata=pooling_metadata)

    def _tokens_of(self, rows: Any) -> slice | None:
        """The token rows of a slice of the step's states, which vLLM takes for log probabilities of prompts."""
        whole = self._whole
        if whole is None or whole.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr():
            return None
        first = (rows.storage_offset() - whole.storage_offset()) // whole.stride(0)
        return slice(first, first + len(rows))

    def _logits(self, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        def compute(rows: Any, tokens: Any) -> Any:
            return self.traces.adapters.head(lambda rows: self._compute(rows, *args, **kwargs), rows, tokens)

        hidden, self.hidden = self.hidden, None
        if hidden is None:
            return compute(sampled, self._tokens_of(sampled))
        self._whole = hidden if self.traces.adapters.on else None
        if self.traces.ran:
            logits = self._logits_of_modules(sampled)
        else:
            logits = self.stage.logits(compute, hidden, sampled)
        return logits if logits is None else self.traces.sample_from(logits, self._sampled)


def number_of(site: Site, model: ModelSpec) -> int:
    """Number of the site with the state that a capture reads. Attention and MLP read the stream."""
    return site_index(stream_of(site, model) if site.kind in NORMED else site, model.num_hidden_layers)


def part_of_captures(captures: Sequence[Capture], model: ModelSpec, sites: Container[int]) -> list[Capture]:
    """The captures at these sites, one for each.

    Args:
        sites: numbers of the sites.
    """
    return [
        replace(spec, site=site)
        for spec in captures
        for site in expand(spec.site, model.num_hidden_layers, model.family)
        if number_of(site, model) in sites
    ]
