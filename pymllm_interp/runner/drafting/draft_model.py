"""`ModelDrafter`: a second, smaller model proposes the tokens. It has its own runner and KV pages.

The draft keeps no step with the engine. It compares the computed tokens of a request with the request's tokens, and computes
the missing ones. So a rejected draft, a preemption and a prefix of the prefix cache are one case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from ...config import ModelConfig, ServerConfig
from ...core.request import Request
from ...core.sampling_params import SamplingParams
from ...core.step import NewRequest, ScheduledRequest, SchedulerOutput
from ...core.unsupported import UnsupportedModelError
from ...speculative.drafter import SpeculativeConfig
from ..model_runner import ModelRunner
from .draft_graphs import DraftGraphs
from .row_passes import RowPasses
from .sequences import DraftSequence, DraftSequences

MAX_GRAPH_TOKENS = 256
"""The largest pass with prompts, or accepted tokens, that a draft model has captured: start-up takes longer for each."""
MAX_ROWS = 8
"""Most tokens of a request in a decode pass of the draft model, each in a separate row."""


@dataclass(slots=True)
class DraftTask:
    """The drafts that one call proposes for a request."""

    request: Request
    sequence: DraftSequence
    tokens: list[int]
    """Its tokens, as the draft is fed them."""
    count: int
    """Drafts to propose."""
    start: int
    """Tokens of them with KV, so far."""
    states: list[torch.Tensor] = field(default_factory=list)
    """[rows, hidden] each: inputs of an EAGLE head's next rows beside the tokens."""

    @property
    def is_caught_up(self) -> bool:
        """Whether all tokens have KV."""
        return self.start == len(self.tokens)


class ModelDrafter:
    """Drafts of a draft model (`speculative.drafter.Drafter`).

    They are sampled at the request's temperature with the request's noise, as the model's tokens are. So draft and model
    agree if they have one distribution, greedy or not.

    Attributes:
        runner: runner of the draft model: loaded, and open after `open`.
        sequences: computed sequences of the requests.
        passes: row passes of the runner.
        graphs: graphs of all passes of a step's drafts; None if passes are not captured.

    Raises:
        ValueError: the draft model does not fit the model.
        UnsupportedModelError: a kind of model that is not served, or one with recurrent states.
        FileNotFoundError: the model does not exist.
    """

    sequences: DraftSequences
    passes: RowPasses
    graphs: DraftGraphs | None

    def __init__(self, config: SpeculativeConfig, target: ModelRunner) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self.runner = self._loaded(config, target)
        self.runner.rows_of_request = 1 + config.num_speculative_tokens

    def _loaded(self, config: SpeculativeConfig, target: ModelRunner) -> ModelRunner:
        dummy = target.model_config.load_format == "dummy"
        model_config = ModelConfig(
            model=config.model, dtype=target.dtype, load_format="dummy" if dummy else "auto", seed=target.model_config.seed
        )  # fmt: skip
        runner = ModelRunner(draft_server_config(target), model_config, target.gpu_id)
        try:
            runner.load()
            check_draft(config, runner, target)
        except UnsupportedModelError as error:
            runner.shutdown()
            raise UnsupportedModelError(f"speculative={{'model': {config.model!r}}}: {error}") from error
        except BaseException:
            runner.shutdown()
            raise
        return runner

    def open(self, target: ModelRunner) -> None:
        """Set up pools and graphs, for the requests that `target` serves."""
        runner = self.runner
        runner.server_config = replace(
            runner.server_config,
            kv_cache_tokens=target.max_total_num_tokens,
            max_running_requests=target.max_running_requests,
            max_model_len=min(runner.context_len, target.context_len),
        )
        runner.context_len = min(runner.context_len, target.context_len)
        runner.open()
        assert runner.req_to_token_pool is not None and runner.token_to_kv_pool_allocator is not None
        self._set_passes()
        self.sequences = DraftSequences(runner.req_to_token_pool, runner.token_to_kv_pool_allocator)

    def _set_passes(self) -> None:
        self.passes, self.graphs = RowPasses(self.runner), None
        if self.runner.graph_runner is not None:
            self.graphs = DraftGraphs(self.runner, self.num_speculative_tokens, self._carry)

    def release_graphs(self) -> None:
        """Release the captured passes."""
        self.runner.graphs.release()
        self._set_passes()

    def capture_graphs(self) -> None:
        """Capture the passes again."""
        self.runner.init_cuda_graphs()
        self._set_passes()

    def close(self) -> None:
        """Release the draft model and its memory. A second call does nothing."""
        self.runner.shutdown()

    # -- drafts ------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request], k: int) -> list[list[int]]:
        """Propose drafts, see `Drafter.propose`. Requests without room for their KV get no drafts."""
        self.sequences.drop_ended()
        try:
            tasks = self._tasks(requests, k)
            drafts = self._drafts(tasks) if tasks else {}
        except BaseException:
            self.runner.abandon()
            self.sequences.clear()
            raise
        for task in tasks:
            self._computed(task, drafts[task.request.request_id])
        return [drafts.get(request.request_id, []) for request in requests]

    @torch.no_grad()
    def _drafts(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        """The drafts of each task. The host waits once, for all of them."""
        if self._fit_a_graph(tasks):
            return self._drafts_of_a_graph(tasks)
        self._catch_up(tasks)
        drawn, of = [self.passes.last([task.sequence.row for task in tasks])], [list(tasks)]
        while parts := [task for task in tasks if task.count > len(of)]:
            count = min(task.count for task in parts) - len(of)
            drawn += self._continue(parts, len(of) - 1, count)
            of += [parts] * count
        drafts: dict[str, list[int]] = {task.request.request_id: [] for task in tasks}
        for task, token in zip(chain.from_iterable(of), torch.cat(drawn).tolist(), strict=True):
            drafts[task.request.request_id].append(token)
        return drafts

    def _fit_a_graph(self, tasks: Sequence[DraftTask]) -> bool:
        k = self.num_speculative_tokens
        if self.graphs is None or any(task.count != k for task in tasks):
            return False
        longest = max(len(task.tokens) for task in tasks) + k - 1
        return self.graphs.fits([len(task.tokens) - task.start for task in tasks], longest)

    def _drafts_of_a_graph(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        assert self.graphs is not None
        self._enter(self._first_step(tasks))
        self._feed([(task, len(task.tokens) - task.start) for task in tasks])
        drafts = self.graphs.drafts(
            [task.sequence.row for task in tasks],
            [task.start for task in tasks],
            [task.tokens[task.start :] for task in tasks],
        )
        return {task.request.request_id: own for task, own in zip(tasks, drafts.T.tolist(), strict=True)}

    def _enter(self, step: SchedulerOutput) -> None:
        self.runner.finish_requests(step)
        self.runner.add_requests(step)
        self.runner.update_requests(step)

    def _tasks(self, requests: Sequence[Request], k: int) -> list[DraftTask]:
        tasks: list[DraftTask] = []
        for request in requests:
            tokens, left = request.all_token_ids, request.max_tokens - request.accepted_len - 1
            count = min(k, left, self.runner.context_len - len(tokens) + 1)
            if (boundary := self.runner.model_spec.rope_boundary) is not None:
                known = self.sequences.get(request.request_id)
                if len(tokens) <= boundary:
                    count = min(count, boundary - len(tokens) + 1)
                elif known is not None and len(known.tokens) <= boundary:
                    self.sequences.drop(request.request_id)  # all keys of the draft change, too
            busy = {task.request.request_id for task in tasks}
            if count < 1 or (sequence := self.sequences.take(request, len(tokens) + count - 1, busy)) is None:
                continue
            tasks.append(DraftTask(request, sequence, tokens, count, common_length(sequence, tokens)))
        return tasks

    def _computed(self, task: DraftTask, drafts: list[int]) -> None:
        """The task is done: its last draft has no KV."""
        task.sequence.tokens = task.tokens + drafts[:-1]
        task.sequence.num_known = len(task.tokens)

    def _catch_up(self, tasks: Sequence[DraftTask]) -> None:
        """Compute the tokens that the draft has no KV of, and sample behind them."""
        step, sizes = self._first_step(tasks), [len(task.tokens) - task.start for task in tasks]
        if max(sizes) <= MAX_ROWS and self.passes.fits(sum(sizes)):
            self._enter(step)
            parts = list(zip(tasks, sizes, strict=True))
            self._feed(parts)
            self.passes.known(
                [task.sequence.row for task in tasks],
                [task.start for task in tasks],
                [task.tokens[task.start :] for task in tasks],
            )
            self._take(parts)
            return
        left = list(tasks)
        while left:
            budget, parts = self.runner.max_num_tokens, []
            for task in left:
                size = min(len(task.tokens) - task.start, budget)
                if size:
                    budget -= size
                    parts.append((task, size))
            for task, size in parts:
                samples = task.start + size == len(task.tokens)
                step.scheduled.append(
                    ScheduledRequest(
                        task.request.request_id, task.sequence.row, size, task.start, samples, False, int(samples)
                    )
                )
            self._feed(parts)
            self.runner.execute_model(step)
            self.runner.sample_tokens_async()
            self._take(parts)
            for task, size in parts:
                task.start += size
            left, step = [task for task in left if not task.is_caught_up], SchedulerOutput()

    def _first_step(self, tasks: Sequence[DraftTask]) -> SchedulerOutput:
        """First step of the runner, with the requests that its tables must know."""
        step = SchedulerOutput(finished_req_ids=self.sequences.dropped)
        self.sequences.dropped = set()
        for task in tasks:
            sequence, request_id = task.sequence, task.request.request_id
            if sequence.entered:
                new = range(sequence.num_known, len(task.tokens))
                step.accepted += [(request_id, position, task.tokens[position]) for position in new]
            else:
                step.scheduled_new_reqs.append(self._entering(task))
                sequence.entered = True
        step.page_writes = self.sequences.page_writes([task.sequence for task in tasks])
        return step

    def _entering(self, task: DraftTask) -> NewRequest:
        request = task.request
        return NewRequest(
            request_id=request.request_id,
            row=task.sequence.row,
            prompt_len=request.prompt_len - task.sequence.first,
            token_ids=task.tokens,
            num_computed_tokens=task.start,
            params=SamplingParams(temperature=request.params.temperature),
            seed=request.seed,
            sample_index=request.sample_index,
        )

    def _continue(self, tasks: Sequence[DraftTask], first: int, count: int) -> list[torch.Tensor]:
        """Feed the last drafts, of index `first`, and `count` - 1 behind them. Returns `count` tensors [tasks]: the next drafts."""
        parts = [(task, 1) for task in tasks]
        self._feed(parts)
        found = self.passes.following(
            [task.sequence.row for task in tasks], [len(task.tokens) + first for task in tasks], count
        )
        self._take(parts)
        return found

    def _feed(self, parts: Sequence[tuple[DraftTask, int]]) -> None:
        """A pass comes. `parts` are the tasks with their tokens in it, in the order of its rows."""

    def _take(self, parts: Sequence[tuple[DraftTask, int]]) -> None:
        """The pass of these parts was launched."""

    def _carry(self, ends: torch.Tensor) -> None:
        """Carry states between the first two passes of a graph. `ends` [requests] int64 are the last rows of the first one."""


def common_length(sequence: DraftSequence, tokens: Sequence[int]) -> int:
    """Leading tokens with KV in the sequence. The last token does not count: the draft after it is asked for."""
    length, most = sequence.num_known, min(len(sequence.tokens), len(tokens) - 1)
    while length < most and sequence.tokens[length] == tokens[length]:
        length += 1
    return min(length, most)


def draft_server_config(target: ModelRunner) -> ServerConfig:
    """`target`'s configuration for the runner of its draft: without hooks, adapters and drafts."""
    config = target.server_config
    return replace(
        config, device=target.device, speculative=None, max_model_len=None, max_loras=1, inner_sites=(), reconstruct=(),
        max_num_tokens=target.max_num_tokens, kv_cache_dtype="auto", enable_torch_compile=False, lazy_graphs=False,
        prefill_graph_tokens=min(config.prefill_graph_tokens, MAX_GRAPH_TOKENS),
    )  # fmt: skip


def check_draft(config: SpeculativeConfig, draft: ModelRunner, target: ModelRunner) -> None:
    """Refuse a draft model that does not fit the model.

    Raises:
        ValueError: it has another vocabulary, or the captured passes have too few rows for its drafts.
        UnsupportedModelError: it has recurrent states.
    """
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"speculative={{'model': {config.model!r}}}: the draft model has a vocabulary of {draft.vocab_size} tokens, and "
            f"{target.model_config.model!r} has {target.vocab_size}: expected one vocabulary"
        )
    if draft.get_model().state_layouts:
        raise UnsupportedModelError(
            f"{draft.model_spec.family.name} models have recurrent states, which cannot take drafts back"
        )
