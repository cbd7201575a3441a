"""`EagleDrafter`: an EAGLE-3 head proposes the tokens. It reads hidden states of the model's own passes.

The model's decoder copies the inputs of three layers to static memory in each pass, replayed ones included. `EagleStage` projects
the rows of requests with drafts, and keeps them until the drafter reads them. Behind a prefix of the prefix cache there are no such
rows: the head starts at the first position that it has a row of.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ...config import ModelConfig
from ...core.forward_batch import ForwardBatch
from ...core.model_spec import ModelSpec
from ...core.request import Request
from ...core.step import LogitsProcessorOutput, SchedulerOutput
from ...core.unsupported import UnsupportedModelError
from ...models.native.decoder import AuxStates, Decoder, DecoderForCausalLM
from ...models.native.eagle import Eagle3Head
from ...models.weights.loading import init_dummy_weights, load_weights
from ...models.weights.source import ModelSource
from ...speculative.drafter import SpeculativeConfig
from ...utils.upload import upload
from ..device_memory import MAX_DERIVED_REQUESTS
from ..input_batch import InputBatch
from ..model_runner import ModelRunner
from ..stages.stage import PassDemands, Stage
from .draft_model import DraftTask, ModelDrafter, draft_server_config
from .eagle_checkpoint import read_config, read_weights

MAX_KEPT = 2048
"""Latest states of a request that are kept for the head."""
MAX_SHARED = 512
"""Rows of a pass that stay as long as one of them is kept. Of a larger pass, the last row is copied."""


class KeptStates:
    """States of consecutive positions of one request, on the device: parts [n, hidden], views of passes' memory.

    Nothing is launched for a part: a step has one for each request.
    """

    def __init__(self) -> None:
        self.start = self.stop = 0
        self._parts: list[torch.Tensor] = []

    def add(self, start: int, rows: torch.Tensor) -> None:
        """Add rows [n, hidden] of the positions from `start` on. Rows of later positions were rejected, or are computed again."""
        if not self.start < start <= self.stop:
            self.start, self._parts = start, []
        while (more := self.stop - start) > 0 and self._parts:
            last = self._parts.pop()
            self.stop -= min(more, len(last))
            if len(last) > more:
                self._parts.append(last[: len(last) - more])
        self._parts.append(rows)
        self.stop = start + len(rows)
        while self.stop - self.start - len(self._parts[0]) >= MAX_KEPT:
            self.start += len(self._parts.pop(0))

    def take(self, first: int) -> list[torch.Tensor]:
        """The parts from `first` on. Only the last row is kept."""
        found, at = [], self.start
        for part in self._parts:
            if at + len(part) > first:
                found.append(part[max(0, first - at) :])
            at += len(part)
        last = self._parts[-1][-1:]
        small = last.untyped_storage().nbytes() <= MAX_SHARED * last.nbytes
        self.start, self._parts = self.stop - 1, [last if small else last.clone()]
        return found


class EagleStage(Stage):
    """Keeps the states of requests with drafts.

    Args:
        head: projects them.
        aux: memory in which the model's passes leave the states.

    Attributes:
        aux: see above.
        kept: kept states by request.
    """

    def __init__(self, head: Eagle3Head, aux: AuxStates) -> None:
        self._head, self.aux = head, aux
        self._rows: InputBatch | None = None
        self.kept: dict[str, KeptStates] = {}

    def begin(self, step: SchedulerOutput, demands: PassDemands) -> None:
        for request_id in step.finished_req_ids:
            self.kept.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            if new.drafted:
                self.kept.setdefault(new.request_id, KeptStates())

    def prepare(self, batch: ForwardBatch, rows: InputBatch) -> None:
        self._rows = rows

    def ran(self, batch: ForwardBatch, output: LogitsProcessorOutput) -> None:
        rows = self._rows
        if rows is None or rows.num_tokens > len(self.aux.states):
            return
        if not any(entry.request_id in self.kept for entry in rows.entries):
            return
        states = self._head.project(self.aux.states[: rows.num_tokens])
        for entry, first in zip(rows.entries, rows.query_start_loc.tolist(), strict=False):
            if (kept := self.kept.get(entry.request_id)) is not None:
                kept.add(entry.start, states[first : first + entry.num_tokens])


class EagleRunner(ModelRunner):
    """The runner of a head: its model has one layer, and reads `Eagle3Head.states` beside the tokens."""

    def __init__(self, config: SpeculativeConfig, target: ModelRunner) -> None:
        dummy = target.model_config.load_format == "dummy"
        model = ModelConfig(model=config.model, dtype=target.dtype, load_format="dummy" if dummy else "auto")
        super().__init__(draft_server_config(target), model, target.gpu_id)
        self._embedding = embedding_of(target)
        folder = Path(config.model).expanduser()
        hf_config, self._options = read_config(folder, target.model_spec)
        self.source = ModelSource(folder.name, hf_config, folder, None)

    def load(self) -> None:
        """The weights of the head."""
        assert self.source is not None
        self._init_metadata(ModelSpec.of(self.source.hf_config, self.dtype))
        self.load_model()

    def _model(self, dummy: bool) -> Eagle3Head:
        source = self.source
        assert source is not None and source.folder is not None
        weights = {} if dummy else read_weights(source.folder)
        shared = None if "embed_tokens.weight" in weights else self._embedding
        head = Eagle3Head(source.hf_config, self._options, self.model_spec, self.device, self.context_len, shared)
        if dummy:
            init_dummy_weights(head, self.model_config.seed)
        else:
            load_weights(head, weights.items())
        return head

    def head(self) -> Eagle3Head:
        """The model of this runner."""
        assert isinstance(self.model, Eagle3Head)
        return self.model


def embedding_of(target: ModelRunner) -> torch.Tensor:
    """The model's embedding [vocab, hidden]. Raises UnsupportedModelError: the model runs by its class in transformers."""
    return getattr(decoder_of(target), _causal(target).embedding_name).weight


def decoder_of(target: ModelRunner) -> Decoder:
    """The model's decoder. Raises like `embedding_of`."""
    return getattr(_causal(target), _causal(target).decoder_name)


def _causal(target: ModelRunner) -> DecoderForCausalLM:
    if not isinstance(target.model, DecoderForCausalLM):
        raise UnsupportedModelError(
            f"EAGLE-3 reads hidden states of native models; {type(target.model).__name__} runs by its class in transformers"
        )
    return target.model


class EagleDrafter(ModelDrafter):
    """Drafts of an EAGLE-3 head (`speculative.drafter.Drafter`).

    Attributes:
        stage: keeps the states of the model's passes.
    """

    def _loaded(self, config: SpeculativeConfig, target: ModelRunner) -> ModelRunner:
        try:
            runner = EagleRunner(config, target)
            runner.load()
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"speculative={{'model': {config.model!r}}}: {error}") from error
        # Here, before the KV pool is sized.
        rows = max(target.max_num_tokens, target.server_config.max_running_requests or MAX_DERIVED_REQUESTS)
        head, aux = runner.head(), AuxStates.of(runner.head().options.layers, rows, target.model_spec, target.device)
        head.open_states(rows)
        decoder_of(target).aux = aux
        target.partition.can_split = False  # the rows of both halves would be the first ones
        self._head, self.stage = head, EagleStage(head, aux)
        return runner

    def _tasks(self, requests: Sequence[Request], k: int) -> list[DraftTask]:
        tasks: list[DraftTask] = []
        for request in requests:
            kept, length = self.stage.kept.get(request.request_id), request.num_tokens
            if kept is None or kept.stop != length - 1:
                continue
            known = self.sequences.get(request.request_id)
            if known is not None and kept.start > known.first - 1 + known.num_known:
                self.sequences.drop(request.request_id)
                known = None
            first = kept.start + 1 if known is None else known.first
            tokens = request.all_token_ids[first:]
            count = min(k, request.max_tokens - request.accepted_len - 1, self.runner.context_len - len(tokens) + 1)
            busy = {task.request.request_id for task in tasks}
            if count < 1 or (sequence := self.sequences.take(request, len(tokens) + count - 1, busy)) is None:
                continue
            sequence.first = first
            start = min(sequence.num_known, len(tokens) - 1)
            tasks.append(DraftTask(request, sequence, tokens, count, start, kept.take(first - 1 + start)))
        return tasks

    def _computed(self, task: DraftTask, drafts: list[int]) -> None:
        """The KV of drafts is not kept: it is of the head's states, not of the model's."""
        super()._computed(task, [])

    def _catch_up(self, tasks: Sequence[DraftTask]) -> None:
        for task in tasks:
            task.states = [torch.cat(task.states)]
        super()._catch_up(tasks)

    def _feed(self, parts: Sequence[tuple[DraftTask, int]]) -> None:
        """Feed all rows of tasks with several parts."""
        rows = [own[:size] for task, size in parts for own in task.states]
        torch.cat(rows, out=self._head.states[: sum(size for _, size in parts)])

    def _take(self, parts: Sequence[tuple[DraftTask, int]]) -> None:
        """The head leaves its output in its input's memory. A next draft reads the last one of its task."""
        sizes = [size for _, size in parts]
        if max(sizes) > 1:
            (ends,) = upload(self.runner.device, np.cumsum(sizes) - 1)
            last = self._head.states[ends]
        else:
            last = self._head.states[: len(sizes)].clone()
        for i, (task, size) in enumerate(parts):
            left = task.states[0][size:]
            task.states = [left if len(left) else last[i : i + 1]]

    def _carry(self, ends: torch.Tensor) -> None:
        self._head.states[: len(ends)] = self._head.states[ends]
