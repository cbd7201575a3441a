"""`RequestTrace`: the state of a request's trace, and `Block`: one of its blocks.

A `RequestTrace` is the value of `Request.trace`. It is made on the caller's thread, with the ``with`` block, and used on the
engine's thread. It is state only: `lifecycle` starts and ends its blocks, the `EngineInterleaver` serves them in each pass.
Nothing is serialised: a local block runs on the caller's own objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from ....core.receipt import Receipt
from ....utils.arguments import plain_text
from ....utils.caller_frames import block_traceback
from ...captures.activations import NOTHING, Activations
from ..nnsight_compat import EarlyStopException, Mediator, OutOfOrderError, Pending
from ..saves.block_saves import BlockSaves
from ..saves.save_transfer import SaveTransfer
from ..serving.rows import Padding, Rows
from ..serving.visits import VisitCounts
from ..syntax.pass_options import NONE, PassOptions
from .block_analysis import names_of, only_binds, want_gradients
from .errors import BOUND_ELSEWHERE, GangError, LoopEnd, notes_of, too_late
from .loops import LOOP_NAMES, with_loop_ends
from .names import BlockNames
from .torch_modes import BlockModes

_trace_ids = itertools.count()


def _nothing() -> None:
    pass


class ServedValue(Protocol):
    """The part of `SharedValue` that a block uses."""

    def take_back(self, trace: RequestTrace, edited: Any) -> bool: ...


class Block(Mediator):
    """One block of a request: a mediator that counts its own request's passes, and not the engine's.

    What each visit reads has a slot.

    Attributes:
        target_visit: the visit of the current pass that the block waits for, if it waits for a location.
        served: the block has been resumed at least once.
        last_location: location at which the block was last served; "" before the first time.
        pinned_pass: the pass of the step that ``tracer.iter`` pins it to, once it was served there.
        late: the text of the error of a read out of order, which nnsight's ``with tracer.iter[...]:`` catches.
        reads_tokens: whether it was served a value of the streamer.
        take_steps: takes steps of a loop at once: (first step, stop) -> the step from which the loop runs.
        shared: value of the batch that it was served a tensor of, until it waits again; else None.
        asked: its request for that tensor.
        modes: torch's modes that the block has set, while it waits; None: it has set none.
        depth: nnsight's ``with`` blocks around the line where it waits: more than 1 inside ``with tracer.iter[...]:``.
    """

    __slots__ = (
        "asked", "depth", "interleaver", "iteration", "last_location", "late", "modes", "pending", "pinned_pass", "reads_tokens",
        "served", "shared", "take_steps", "target_visit", "trace", "transform", "worker",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.target_visit, self.pinned_pass, self.depth = 0, 0, 1
        self.served = self.reads_tokens = False
        self.last_location = self.late = ""
        self.take_steps: Callable[[int, int | None], int] | None = None
        self.modes: BlockModes | None = None
        self.asked: Pending | None = None
        self.shared: ServedValue | None = None

    @classmethod
    def of(cls, source: Mediator, scope: Any, trace: RequestTrace) -> Block:
        """A trace's block of a mediator's code, over the names of `scope`."""
        code = with_loop_ends(source.node, source.code) if source.node is not None else source.code
        block = cls(code, source.glbls, {}, node=source.node)
        scope.__class__ = BlockNames
        block.lcls, block.trace = scope, trace
        for name, value in LOOP_NAMES.items():
            dict.__setitem__(scope, name, value)  # past the scope's record of bound names
        return block

    def take_back(self, asked: Pending | None, value: Any) -> bool:
        """Assign `value`, if its request `asked` got it in this visit: ``output *= 2``. Returns whether it is.
        The tensor was edited in place, and no request is made: half the time of an edit."""
        if self.shared is None or asked is None or asked is not self.asked or self.iteration not in (None, asked[2]):
            return False
        return self.shared.take_back(self.trace, value)

    def occurrence(self, location: str) -> int:
        """Number of times that the request's passes have reached `location`."""
        return self.interleaver.points.occurrence(self.trace, location)

    def wanted(self, location: str) -> int:
        """The occurrence of `location` that a read waits for now. Raises OutOfOrderError as `check_order` does."""
        if self.iteration is not None:
            return self.iteration
        self.check_order(location)
        return self.occurrence(location)

    def check_order(self, location: str) -> None:
        """Check that the step that ``tracer.iter`` pins the block to still comes to `location`.
        Raises OutOfOrderError: the step has run past the location. nnsight waits for the next step's value."""
        if self.interleaver.points.has_passed(self, location):
            self.late = too_late(self.trace.request_id, location, self.last_location, self.pinned_pass)
            raise OutOfOrderError(self.late)


class RequestTrace:
    """The blocks that watch one request, and their state.

    Args:
        block: the request's own block; None if it has persistent edits only.
        edits: persistent edits, which run before the block.
        grad: run the pass with gradients and no other request, whether or not a block names autograd.
        options: options of the request's passes.
        transfer: transfer of the ``with`` block's saves; None leaves them on their device.
        on_step: called after each pass with its number and copies of the saved values by name, beside the engine's thread.

    Attributes:
        key: name of the trace in requests (`RequestHooks.trace_key`).
        trace_id: shared by the requests of one ``with`` block.
        num_prompts: requests of that ``with`` block.
        order: number of the trace among the traces of the ``with`` block.
        request_ids: the requests with rows that the blocks see, in the order of their prompts. More than one: an invoke has a list
            of prompts, or no prompt and the whole batch. Empty until they are made.
        prompt_lens: tokens of each prompt. Empty until the blocks start.
        padding: padding of several prompts in their pass; None: on the left.
        padded: whether its prompts are padded to the longest one of the ``with`` block.
        pad_token_id: fills the result of several requests.
        whole_batch: traces of the ``with`` block with blocks that see all of its requests.
        sees_all: whether its block, an invoke without a prompt, sees all requests of the ``with`` block.
        blocks: persistent edits first, then the request's own block.
        saves: names and saves of the request's own block.
        visits: visits that the request's passes have made.
        rows: the request's rows in the current pass; None while it is in none.
        max_passes: passes that the request can take part in.
        single: the request is one forward pass, and generates nothing.
        started: whether its blocks have run to their first wait.
        over: whether no further pass comes.
        ended: whether its blocks are no longer served.
        stopped: a block called ``tracer.stop()``.
        error: error that ended the request, other than ``tracer.stop()``. Only `fail` sets it.
        result: output of a single forward pass, for ``tracer.result``.
        activations: captured states of each request, in the order of the prompts; set when all have ended.
        scores: monitor -> its scores, of each request; set likewise.
        gang: the traces that share each step with this one, itself included; empty for a trace on its own.
        cancel: ends the requests; set once they are submitted.
        postprocess: makes ``tracer.result`` once all requests of the ``with`` block have finished; None for token ids.
        keeps_result: the result is wanted though no block reads it.
        last_edit: pass in which a block last edited a value (`NaNCheck.pass_number`); None before that.
    """

    __slots__ = (
        "__weakref__", "activations", "blocks", "cancel", "ended", "error", "gang", "grad", "keeps_result", "key", "last_edit",
        "main_block", "max_passes", "num_prompts", "on_step", "options", "order", "over", "pad_token_id", "padded", "padding",
        "postprocess", "prompt_lens", "receipt", "request_ids", "result", "rows", "saves", "scores", "sees_all", "single",
        "started", "stopped", "trace_id", "visits", "warnings", "whole_batch",
    )  # fmt: skip

    def __init__(
        self,
        block: Mediator | None,
        edits: list[Mediator],
        *,
        grad: bool = False,
        options: PassOptions = NONE,
        transfer: SaveTransfer | None = None,
        on_step: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> None:
        self.key = self.trace_id = next(_trace_ids)
        self.num_prompts, self.order = 1, 0
        self.request_ids: tuple[str, ...] = ()
        self.prompt_lens: tuple[int, ...] = ()
        self.padding: Padding | None = None
        self.padded = False
        self.pad_token_id = 0
        self.whole_batch: Sequence[RequestTrace] = ()
        self.sees_all = False
        self.blocks = [Block.of(edit, edit.lcls.copy(), self) for edit in edits]
        if block is not None:
            self.blocks.append(Block.of(block, block.lcls, self))
        self.main_block = self.blocks[-1] if block is not None else None
        self.saves = BlockSaves(self.main_block, transfer or SaveTransfer(None))
        self.visits = VisitCounts()
        self.rows: Rows | None = None
        self.max_passes = 1
        self.single = self.started = self.over = self.ended = self.stopped = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.activations: list[Activations] = []
        self.scores: list[Mapping[str, Any]] = []
        self.receipt = Receipt()
        self.warnings: list[str] = []
        self.gang: Sequence[RequestTrace] = ()
        self.grad = grad or want_gradients(self.blocks)
        self.options = options
        self.on_step = on_step
        self.last_edit: int | None = None
        self.cancel: Callable[[], Any] = _nothing
        self.postprocess: Callable[[], Any] | None = None
        self.keeps_result = False

    @property
    def request_id(self) -> str:
        """Ids of the request, or requests, for messages."""
        return ", ".join(self.request_ids)

    @property
    def watches_several(self) -> bool:
        """Its blocks see a batch of requests. Blocks that see all of the ``with`` block, or are padded, see a batch of one, too."""
        return len(self.request_ids) > 1 or self.sees_all or self.padded

    @property
    def in_pass(self) -> bool:
        """The request takes part in the current pass."""
        return self.visits.in_pass

    def is_served_at(self, location: str) -> bool:
        """Whether the request's blocks are served at `location` in the current pass."""
        visits = self.visits
        return not (self.ended or (visits.skipping and visits.skips(location)))

    def fail(self, raised: BaseException) -> None:
        """End the request because a block raised: its blocks are not served again. Its gang fails with it.

        A `LoopEnd` that leaves the block is only a warning.
        """
        with suppress(BaseException):  # a frozen dataclass takes no attributes
            if not hasattr(raised, "__intervention_tb__"):  # the traceback as far as the block's own lines
                raised.__intervention_tb__ = raised.__traceback__  # pyright: ignore[reportAttributeAccessIssue]
        kind = type(raised)  # `isinstance` would ask the instance, and its methods may raise
        if issubclass(kind, LoopEnd):
            self.warn(f"{raised}, and the block ended inside the function that holds the loop; saved values are kept")
            return
        self.ended = True
        if issubclass(kind, EarlyStopException):
            self.stopped = True
        elif self.error is None:
            self.error, text = raised, plain_text(raised)
            with suppress(BaseException):
                if isinstance(raised, NameError) and self._binds_elsewhere(raised.name):
                    raised.add_note(BOUND_ELSEWHERE.format(raised.name))
                for note in notes_of(raised, text, self.grad):
                    raised.add_note(note)
            why = f"runs together with this one, failed: {plain_text(raised, repr)}"
            for other in self.gang:
                if not other.ended:
                    other.fail(GangError(f"request {self.request_id}, which {why}"))

    def _binds_elsewhere(self, name: str | None) -> bool:
        """Whether another block of the gang binds `name`."""
        blocks = (trace.main_block for trace in self.gang if trace is not self)
        return any(block is not None and name in names_of(block.code).binds for block in blocks)

    def warn(self, text: str) -> None:
        """Add a warning for the user, who gets it with the result."""
        if text not in self.warnings:
            self.warnings.append(text)

    def unsaved_names(self) -> list[str]:
        """Names bound to values that the block read, if it did nothing else. Then the trace has no effect."""
        block = self.main_block
        if block is None or block.node is None or self.saves.ids or self.receipt.edits:
            return []
        declared = any(self.scores) or any(found is not NOTHING for found in self.activations)
        if declared or self.on_step is not None or len(self.blocks) > 1:
            return []
        names = sorted(name for name, value in self.saves.names().items() if isinstance(value, torch.Tensor))
        return names if names and self.receipt.reads and only_binds(block.node) else []

    def take_error(self) -> BaseException | None:
        """Error that ended the request, for its caller: the traceback has the lines of the block only. The trace and
        the pass drop their references to it.

        The frames of the pass hold its tensors, and this trace.
        """
        error, self.error = self.error, None
        if error is not None:
            # An assignment would ask the class, such as a frozen dataclass.
            error.with_traceback(block_traceback(error))
            vars(error).pop("__intervention_tb__", None)
        return error

    def release_blocks(self) -> None:
        """Drop the blocks: they and the trace form a cycle. Call it once the saves are delivered."""
        self.blocks, self.main_block, self.cancel = [], None, _nothing
        self.saves.release()
