"""The declared stage of a runner: interventions and captures of the requests in its steps.

On CUDA declared ops are rows of device tables, which captured graphs read, and captured states leave through a ring. On a CPU, and
in passes with gradients, ops are functions on their requests' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from ...attention.cut_edges import PassCuts, pass_cuts
from ...config import ServerConfig
from ...core.forward_batch import ForwardBatch, SiteOps
from ...core.model_spec import INNER_SITES, LOGITS, ModelSpec, inner_site
from ...core.step import (
    DeclaredResult,
    LogitsProcessorOutput,
    ModelRunnerOutput,
    NewRequest,
    RequestEnd,
    RequestHooks,
    ScheduledRequest,
    SchedulerOutput,
    StepRows,
)
from ...hooks.bind import DeclaredLimits
from ...hooks.bound_hooks import BoundHooks
from ...hooks.captures.egress.device_memory import DeviceMemory
from ...hooks.captures.egress.result_memory import Memory, ResultMemory
from ...hooks.captures.egress.ring import CaptureRing, StatesOf
from ...hooks.captures.reductions.reduction import Readout
from ...hooks.captures.rows import CapturedRows
from ...hooks.captures.streamed import StreamedRows
from ...hooks.declared import Declared, PartDeclared
from ...hooks.interventions.device_tables import DeviceTables
from ...hooks.interventions.host_ops import RequestRows, host_ops, logit_ops
from ...hooks.part_hooks import PartInput, bound_to
from ...hooks.saes.encoders import Encoders
from ...kernels.edit_codes import TokenRows
from ...layers.edits.table import TableOps
from ...utils.out_of_memory import within_memory
from ...utils.upload import upload
from ..input_batch import InputBuffers
from ..request_state import RequestState
from .stage import PassDemands, Stage, StepScores


class DeclaredStage(Stage):
    """Interventions and captures of a runner's requests, from their first step to their results.

    Args:
        config: limits and the ring's size are read.
        model: model that specs are checked against.
        device: device of the passes.
        readout: readout of the model, for reductions.
        encoders: the SAEs that passes with tables encode; None for none.

    Attributes:
        device_tables: ops and captures that kernels read; None on a CPU.
        capture_ring: ring that captured states leave the device through, beside the tables.
        table_ops: the ops and captures of all rows of the input buffers, beside the tables.
        device_memory: memory of captured states that stay on the device.
        limits: limits of the specs.
        monitored: ids of the live requests with monitors.
    """

    def __init__(
        self,
        config: ServerConfig,
        model: ModelSpec,
        device: str,
        readout: Readout | None = None,
        encoders: Encoders | None = None,
    ) -> None:
        self.model, self.device = model, device
        self.limits = DeclaredLimits(
            config.max_interventions_per_site, config.max_intervention_vectors, config.max_capture_bytes,
            frozenset(config.inner_sites if self.has_tables else INNER_SITES), device_tables=self.has_tables,
            encoders=encoders if encoders and self.has_tables else None,
        )  # fmt: skip
        self.device_tables: DeviceTables | None = None
        self.capture_ring: CaptureRing | None = None
        self.table_ops: TableOps | None = None
        self.device_memory = DeviceMemory(config.device_capture_bytes, device)
        self._config, self.readout = config, readout
        self._logits_site = inner_site(model.num_hidden_layers, 0, LOGITS)
        self._live: dict[str, Declared] = {}
        self._with_gradients: set[str] = set()
        self._in_tables: dict[str, tuple[int, Declared]] = {}
        self._cutting: dict[str, Declared] = {}  # live requests with knockouts, or captures of patterns
        self._monitored = set[str]()
        self.monitored: Collection[str] = self._monitored
        self._scored: tuple[list[tuple[str, int, int]], np.ndarray] = [], np.zeros((0, 0), np.float32)
        self._host_scores: torch.Tensor | None = None  # of the pass, where ops are functions
        self._ends: list[tuple[Declared, int, int]] = []  # of the pass: last position, and row

    @property
    def has_tables(self) -> bool:
        """Whether passes read declared ops from device tables."""
        return self.device.startswith("cuda")

    @property
    def wants_plain_graphs(self) -> bool:
        """Whether captured passes encode with SAEs."""
        return self.limits.encoders is not None

    def init_tables(self, states: RequestState, buffers: InputBuffers) -> None:
        """Make the tables and the ring, where passes read them. Raises torch.OutOfMemoryError: the ring does not fit."""
        rows = TokenRows(buffers.op_rows, buffers.positions, buffers.blocks, buffers.flags, buffers.scores)
        self.make_tables(states.edited, rows)

    def make_tables(self, edited: torch.Tensor, token_rows: TokenRows) -> None:
        """`init_tables` for a request table and input buffers of any class.

        Args:
            edited: [rows] int32 on the device, marks rows of the request table that declared something.
            token_rows: memory of all token rows.
        """
        if not self.has_tables:
            return
        config = self._config
        size = config.capture_ring_bytes
        self.capture_ring = within_memory(
            lambda: CaptureRing(size, self.model.dtype, self.device, config.capture_when_full, self.result_memory()),
            f"the ring of captured states does not fit; what helps: a lower capture_ring_bytes (now {size})",
        )
        self.device_tables = DeviceTables(edited, self.model, self.limits, self.capture_ring.memory)
        if (encoders := self.limits.encoders) is not None:
            memory = torch.zeros(token_rows.owners.shape[-1], encoders.columns, device=self.device)
            token_rows = token_rows._replace(features=memory.T)
        self.table_ops = TableOps(self.device_tables.tables, *token_rows)

    def result_memory(self) -> Memory:
        """Memory that results are allocated from."""
        return ResultMemory(self._config.capture_kept_bytes)

    def close(self) -> None:
        """Empty the ring, and release the tables."""
        if self.capture_ring is not None:
            self.capture_ring.close()
        self.device_tables = self.capture_ring = self.readout = self.table_ops = None
        self.limits = replace(self.limits, encoders=None)
        self._live.clear()
        self._monitored.clear()
        self._with_gradients.clear()
        self._cutting.clear()
        self._in_tables.clear()

    # -- requests in and out -----------------------------------------------------------------

    def begin(self, step: SchedulerOutput, demands: PassDemands) -> None:
        """Preempted requests leave the tables; bind the specs of those that enter."""
        for request_id in step.preempted_req_ids:
            self.leave_tables(request_id)
        self.enter(step.scheduled_new_reqs)
        self.lose(step.lost_captures)
        for request_id, fired in step.fired.items():
            self.note_fired(request_id, fired)
        for request_id, num_positions in step.settled.items():
            if (declared := self._live.get(request_id)) is not None:
                declared.settle(num_positions)
        if step.drafts and self._live:
            self._begin_drafts(step)
            demands.grouped |= any(entry.request_id in self._cutting for entry in step.scheduled)

    def note_fired(self, request_id: str, fired: Mapping[int, int]) -> None:
        """Let the ops behind a request's monitors act from these positions on."""
        declared = self._live.get(request_id)
        if declared is None:
            return
        for slot, position in fired.items():
            declared.first_fired[slot] = torch.tensor(position, dtype=torch.int32)
            if self.device_tables is not None and request_id in self._in_tables:
                self.device_tables.set_fired(self._in_tables[request_id][0], slot, position)
        if self.device_tables is not None:
            self.device_tables.apply_staged_writes()

    def _begin_drafts(self, step: SchedulerOutput) -> None:
        for entry in step.scheduled:
            declared = self._live.get(entry.request_id)
            if declared is None or entry.request_id not in step.drafts:
                continue
            if why := declared.hooks.why_undrafted(self.device_tables is not None):
                raise NotImplementedError(
                    f"request {entry.request_id}: drafts that are not accepted cannot be taken back ({why}); schedule it without "
                    "drafts"
                )
            declared.begin_draft(entry.start + entry.num_tokens)

    def enter(self, new: Sequence[NewRequest]) -> None:
        """Bind the specs of requests that enter the request table, and write their rows of the tables, and new vectors."""
        for request in new:
            declared = None
            if request.hooks is not None and request.hooks.declares:
                declared = self._live.get(request.request_id) or self._begin(request, request.hooks)
                if request.request_id in self._in_tables:  # of a pass that failed
                    self.leave_tables(request.request_id)
                if request.num_counted:
                    declared.fires.count_from(request.num_counted)
                self._in_tables[request.request_id] = request.row, declared
            if self.device_tables is not None:
                rows = () if request.hooks is None else request.hooks.vector_rows
                self.device_tables.set_row(request.row, declared, rows)
        if self.device_tables is not None:
            self.device_tables.apply_staged_writes()

    def _begin(self, request: NewRequest, hooks: RequestHooks) -> Declared:
        declared = self._live[request.request_id] = self.bind(hooks, request.prompt_len)
        for part, own in hooks.parts.items():
            given = None if request.encoder is None else request.encoder.input
            ids, images = PartInput.of(part, self.model, given, request.images)
            bound = bound_to(part, own, len(ids), self.model, self.limits)
            declared.parts[part] = PartDeclared(part, Declared(bound), ids, images)
        if declared.hooks.knockouts or declared.patterns is not None:
            self._cutting[request.request_id] = declared
        if declared.hooks.monitors:
            self._monitored.add(request.request_id)
        if hooks.differentiable:
            self._with_gradients.add(request.request_id)
        if self.capture_ring is not None and declared.captures is not None:
            self.capture_ring.open()
        return declared

    def part_ops(self, request_id: str, part: str, images: range | None = None) -> SiteOps | None:
        """The ops and captures of a part's pass for a request; None without any.

        Args:
            part: key in `ModelSpec.parts`.
            images: see `PartDeclared.next_pass`.
        """
        declared = self._live.get(request_id)
        if declared is None or part not in declared.parts:
            return None
        own, positions = declared.parts[part].next_pass(images)
        return host_ops([RequestRows(own, 0, positions, 0, 0)], self.model.parts[part].num_hidden_layers)

    def bind(self, hooks: RequestHooks, prompt_len: int) -> Declared:
        """Bind the specs of a request, or take over a binding made in this process.

        Raises:
            ValueError: see `BoundHooks.of_request`.
        """
        declared, hooks.bound = hooks.bound, None
        if declared is not None:
            return declared
        return Declared(BoundHooks.of_request(hooks, prompt_len, self.model, self.limits, self.readout))

    def lose(self, lost: Mapping[str, str]) -> None:
        """Stop capturing for these requests.

        Args:
            lost: request id -> why.
        """
        for request_id, why in lost.items():
            declared = self._live.get(request_id)
            if declared is not None and declared.captures is not None:
                declared.captures.lose(why)

    def rows_since(self, request_id: str, start: int, token_ids: Sequence[int]) -> StreamedRows:
        """Captured rows of a live request (`Declared.rows_since`). Rows of launched passes have come by `when_arrived`."""
        return self._live[request_id].rows_since(start, token_ids)

    def when_arrived(self, function: Callable[[], None]) -> None:
        """Call `function` when the captured states of launched passes are on the host: at once, or on the ring's thread."""
        if self.capture_ring is None:
            function()
        else:
            self.capture_ring.after(function)

    def finish(self, end: RequestEnd) -> Future[DeclaredResult]:
        """Release the resources of an ended request.
        Returns its results, when all captured states have arrived on the host: at once, or on the ring's thread."""
        declared = self._live.get(end.request_id) or self.bind(end.hooks, end.prompt_len)
        self.forget(end.request_id)
        self.leave_tables(end.request_id)
        if declared.captures is not None and end.captures_lost is not None:
            declared.captures.lose(end.captures_lost)
        answer = declared.answer(end)
        arrived: Future[DeclaredResult] = Future()
        if self.capture_ring is None or declared.captures is None:
            answer(arrived)
        else:
            self.capture_ring.after(partial(answer, arrived))
        return arrived

    def forget(self, request_id: str) -> None:
        """Let go of a request without its results."""
        self._live.pop(request_id, None)
        self._monitored.discard(request_id)
        self._with_gradients.discard(request_id)
        self._cutting.pop(request_id, None)

    def leave_tables(self, request_id: str) -> None:
        """Read the gate counts of a request, before another request takes its row."""
        row, declared = self._in_tables.pop(request_id, (0, None))
        if self.device_tables is not None and declared is not None:
            self.device_tables.read_gates(row, declared)

    # -- a step ----------------------------------------------------------------------------------

    def declares(self, entries: Sequence[ScheduledRequest]) -> bool:
        """Whether one of a step's requests declared ops or captures."""
        live = self._live
        return bool(live) and any(entry.request_id in live for entry in entries)

    def prepare(self, batch: ForwardBatch, rows: StepRows) -> None:
        """Add the declared ops, captures and cut edges to the pass."""
        self.abandon()
        if self.declares(rows.entries):
            self._ends = list(self._state_ends(batch, rows))
            batch.site_ops = self.site_ops(rows, batch.num_tokens, batch.fresh_kv_only)
            if (cuts := self.attention_cuts(rows)) is not None:
                assert isinstance(batch.attention_cuts, PassCuts | None)
                batch.attention_cuts = cuts.joined(batch.attention_cuts)

    def abandon(self) -> None:
        """Forget the pending values of a failed pass."""
        self._ends = []
        if self.capture_ring is not None:
            self.capture_ring.forget()

    def ran(self, batch: ForwardBatch, output: LogitsProcessorOutput) -> None:
        """Replace and read the recurrent states, and the K and V, that the pass ended with."""
        ends, self._ends = self._ends, []
        for declared, position, slot in ends:
            if declared.hooks.acts_on_states and batch.state_pool is not None:
                declared.after_states(position, slot, batch.state_pool)
            if declared.hooks.acts_on_kv and (table := batch.req_to_token_pool) is not None:
                assert batch.token_to_kv_pool is not None, "prepare_forward_batch_* sets the pools"
                declared.after_kv(position, table.req_to_token[slot], batch.token_to_kv_pool)

    def _state_ends(self, batch: ForwardBatch, rows: StepRows) -> Iterator[tuple[Declared, int, int]]:
        if batch.fresh_kv_only:
            return
        for entry in rows.entries:
            slot, declared = self._in_tables.get(entry.request_id, (0, None))
            if declared is not None and (declared.hooks.acts_on_states or declared.hooks.acts_on_kv):
                yield declared, entry.start + entry.num_tokens - 1, slot

    def sample_from(self, rows: StepRows, all_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Capture the logits, and let the step's captured states leave the device."""
        self.capture_logits(rows, all_logits, logits)
        if self.capture_ring is not None:
            self.capture_ring.send()
        return logits

    def sampled(self, rows: StepRows, token_ids: torch.Tensor) -> torch.Tensor:
        """The tokens, as they are."""
        return token_ids

    def end(self, output: ModelRunnerOutput) -> None:
        """Do nothing at the end of a step."""

    def site_ops(self, rows: StepRows, num_rows: int, differentiable: bool) -> SiteOps | None:
        """The ops and captures of a step in which some request `declares` any.

        Args:
            num_rows: token rows of the pass.
            differentiable: the pass is one with gradients.
        """
        if self.device_tables is None or differentiable:
            requests, slots = self._request_rows(rows), self._num_slots(rows)
            self._host_scores = torch.zeros(slots, num_rows, device=self.device) if slots else None
            return host_ops(requests, self.model.num_hidden_layers, self._host_scores)
        declared = [self._live.get(entry.request_id) for entry in rows.entries]
        if self.capture_ring is not None and any(d is not None and d.captures is not None for d in declared):
            (records,) = upload(self.device, self.capture_ring.lay_out(self._captured_parts(rows)))
            self._tables.token_rows.records[:, : records.shape[1]].copy_(records)
        logits = None
        if any(d is not None and d.hooks.edits_logits for d in declared):
            logits = logit_ops(self._request_rows(rows), self.model.num_hidden_layers, self.device_tables)
        return self._tables.first_rows(num_rows, logits)

    def _num_slots(self, rows: StepRows) -> int:
        """Dot products of the monitors of a step's requests; 0 without monitors."""
        declared = [self._live[entry.request_id] for entry in rows.entries if entry.request_id in self._monitored]
        return max([own.hooks.num_scores for own in declared], default=0)

    def scores(self, rows: StepRows) -> StepScores | None:
        """The dot products of the step's monitors, in memory that later steps do not write to."""
        parts = [
            (entry.request_id, start, start + entry.num_tokens)
            for entry, start in zip(rows.entries, rows.query_start_loc.tolist(), strict=False)
            if entry.request_id in self._monitored
        ]
        if not parts:
            return None
        if parts != self._scored[0]:
            self._scored = parts, self._limits(parts)
        limits, values, self._host_scores = self._scored[1], self._host_scores, None
        slots, columns = limits.shape
        values = (
            self._tables.token_rows.scores[:slots, :columns].clone() if values is None else values[:slots, :columns]
        )
        return StepScores(values, parts, limits)

    def _limits(self, parts: Sequence[tuple[str, int, int]]) -> np.ndarray:
        """`StepScores.limits` of the parts of a step's requests; decode steps have the same ones again and again."""
        found = [self._live[request_id].hooks.score_limits for request_id, _, _ in parts]
        limits = np.full((max(map(len, found)), parts[-1][2]), np.inf, np.float32)
        for own, (_, start, stop) in zip(found, parts, strict=True):
            limits[: len(own), start:stop] = own[:, None]
        return limits

    @property
    def _tables(self) -> TableOps:
        assert self.table_ops is not None, "init_tables() comes first"
        return self.table_ops

    def attention_cuts(self, rows: StepRows) -> PassCuts | None:
        """The edges of attention that the requests of a step cut, and the patterns that they capture; None for none."""
        if not self._cutting:
            return None
        found = [
            self._cutting[entry.request_id].attention_cuts(i, start, entry.start, entry.num_tokens)
            for i, (entry, start) in enumerate(zip(rows.entries, rows.query_start_loc.tolist(), strict=False))
            if entry.request_id in self._cutting
        ]
        return pass_cuts(cuts for cuts in found if cuts is not None)

    def captured_site_ops(self, rows: int) -> TableOps | None:
        """The ops and captures that a captured pass with this many rows reads from the tables."""
        return None if self.table_ops is None else self.table_ops.first_rows(rows)

    def capture_logits(self, rows: StepRows, logits: torch.Tensor, sampled_from: torch.Tensor) -> None:
        """Capture logits for the requests that want them.

        Args:
            logits: [logit rows, vocab], the head's output.
            sampled_from: [sampling requests, vocab] after a trace's edits.
        """
        if not self._live:
            return
        site = self._logits_site
        wanted: list[tuple[ScheduledRequest, Declared, int, int]] = []
        for entry, token, row in zip(
            rows.entries, rows.query_start_loc.tolist(), rows.cu_num_logits.tolist(), strict=False
        ):
            # A request that ended since the pass began has released the vectors of its reductions.
            declared = self._live.get(entry.request_id)
            if declared is not None and declared.captures is not None and site in declared.captures.layout.by_site:
                wanted.append((entry, declared, token, row))
        if not wanted:
            return
        if len(rows.sample_rows) == len(logits):
            logits = sampled_from
        else:
            (sampled,) = upload(self.device, np.array(rows.sample_rows, dtype=np.int64))
            logits = logits.index_copy(0, sampled, sampled_from)
        parts: list[StatesOf] = []
        for entry, declared, token, row in wanted:
            assert declared.captures is not None
            group, _ = declared.captures.layout.by_site[site]
            count, before = entry.logit_rows, entry.num_tokens - entry.logit_rows
            if self.device_tables is None or entry.request_id in self._with_gradients:
                declared.captures.put(entry.start + before, site, logits[row : row + count])
            else:
                probes = None if group.probes is None else self.device_tables.pool_view(declared, group.probes)
                parts.append(StatesOf(declared.captures, row, token + before, count, probes))
        if parts:
            assert self.capture_ring is not None
            self.capture_ring.put(site, logits, parts)

    def _captured_parts(self, rows: StepRows) -> list[tuple[CapturedRows | None, int, int]]:
        parts = []
        for entry in rows.entries:
            declared = self._live.get(entry.request_id)
            captures = None if declared is None or entry.request_id in self._with_gradients else declared.captures
            parts.append((captures, entry.start, entry.num_tokens))
        return parts

    def _request_rows(self, rows: StepRows) -> list[RequestRows]:
        """The rows of each request of the step that declared something."""
        return [
            RequestRows(
                self._live[entry.request_id], start, range(entry.start, entry.start + entry.num_tokens),
                logit_start, entry.logit_rows, entry.request_id,
            )
            for entry, start, logit_start in zip(
                rows.entries, rows.query_start_loc.tolist(), rows.cu_num_logits.tolist(), strict=False
            )
            if entry.request_id in self._live
        ]  # fmt: skip
