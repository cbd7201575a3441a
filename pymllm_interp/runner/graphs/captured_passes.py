"""`CapturedPasses`: all CUDA graphs of a runner, from their capture to their release."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from typing import NamedTuple

import torch

from ...core.forward_batch import ForwardBatch
from ...models.adapters.slots import AdapterSlots
from .. import invariant
from ..device_memory import GRAPH_OVERHEAD_BYTES
from ..parts import RunnerParts
from .cuda_graph_runner import CudaGraphRunner
from .graph_capture import capture_batch_sizes, capture_token_counts
from .prefill_graphs import PrefillGraphs
from .prompt_segments import PromptSegments
from .segments import DecodeSegments

logger = logging.getLogger(__name__)


class DecodeVariant(NamedTuple):
    """Decode passes with separate graphs."""

    declares: bool
    """Their graphs include the kernels of declared ops."""
    adapted: bool
    """Their graphs include the products of LoRA adapters."""


DECLARED = DecodeVariant(declares=True, adapted=False)
PLAIN = DecodeVariant(declares=False, adapted=False)


class CapturedPasses:
    """CUDA graphs of the passes of one runner.

    Some may be captured later, by `capture_next`. Passes of their sizes run kernel by kernel until then, with the same bits.

    Args:
        runner: the runner. Its model is loaded, and its pools are there when passes are captured.

    Attributes:
        decoders: decode passes by variant; empty where passes are not captured (a CPU, `disable_cuda_graph`). Variants without
            declared ops are there where `wants_plain`, variants with adapters from the first LoRA adapter to the last.
        prefill: small passes with prompts; None if they are not captured.
        segments: the parts of decode passes between blocks of traces; None if passes are not captured.
        prompt_segments: the same of passes with prompts.
        num_missing: graphs that are to be captured.
        failures: errors of later captures by passes and size. These run kernel by kernel until all graphs are released.
    """

    def __init__(self, runner: RunnerParts) -> None:
        self._runner: RunnerParts = weakref.proxy(runner)  # which holds this object
        self.clear()

    def why_none(self) -> str | None:
        """Reason that passes are not captured, or None."""
        runner = self._runner
        if not runner.device.startswith("cuda"):
            return f"device={runner.device!r}"
        if runner.server_config.disable_cuda_graph:
            return "disable_cuda_graph=True"
        if not runner.is_generation:
            return "the model does not generate"
        if runner.model is not None and runner.model.why_no_graphs is not None:
            return runner.model.why_no_graphs
        return "its RoPE depends on the lengths in the batch" if runner.model_spec.rope_depends_on_length else None

    @property
    def wants_plain(self) -> bool:
        """Whether kernels of declared ops take so long, even without an op, that other passes have separate graphs."""
        runner = self._runner
        return not runner.get_model().fuses_ops or any(stage.wants_plain_graphs for stage in runner.stages)

    def expected_bytes(self) -> int:
        """Device memory to leave for the graphs when the KV pool is sized: each keeps its outputs."""
        if self.why_none() is not None:
            return 0
        runner = self._runner
        rows = sum(capture_batch_sizes(runner.max_decode_rows)) * (2 if self.wants_plain else 1)
        outputs = rows * (runner.vocab_size + runner.hidden_size) + sum(self._prefill_sizes()) * runner.hidden_size
        return outputs * runner.dtype.itemsize + GRAPH_OVERHEAD_BYTES

    def _prefill_sizes(self) -> list[int]:
        model, runner = self._runner.get_model(), self._runner
        if not model.fuses_ops or model.state_layouts:
            return []
        limit = min(runner.server_config.prefill_graph_tokens, runner.max_num_tokens)
        return capture_token_counts(limit) if limit else []

    def capture(self, lazily: bool = False) -> int:
        """Capture decode passes and small prefills. Returns the graphs' bytes; 0, with a warning, if none are captured.

        Args:
            lazily: the largest of each kind only. Others reuse its memory, and it shows that passes can be captured.
        """
        runner, model = self._runner, self._runner.get_model()
        if (why_none := self.why_none()) is not None:
            logger.warning("no CUDA graphs are captured: %s", why_none)
            return 0
        try:
            self.decoders[DECLARED] = CudaGraphRunner(runner, lazily=lazily)
            if self.wants_plain:
                self.decoders[PLAIN] = CudaGraphRunner(runner, declares=False, lazily=lazily)
        except RuntimeError as error:
            if model.fuses_ops or isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            self.release()
            model.why_no_graphs = f"its modules cannot be captured ({error.__cause__ or error})"
            logger.warning("passes run eagerly: %s", model.why_no_graphs)
            return 0
        if sizes := self._prefill_sizes():
            self.prefill = PrefillGraphs(runner, sizes, lazily)
        kept = runner.server_config.max_segments
        self.segments = DecodeSegments(self.decoders[DECLARED], kept)
        self.prompt_segments = None if self.prefill is None else PromptSegments(self.prefill, kept)
        self._count()
        return sum(graphs.memory_usage for graphs in self._kinds())

    def _kinds(self) -> list[CudaGraphRunner | PrefillGraphs]:
        return [*self.decoders.values(), *(() if self.prefill is None else (self.prefill,))]

    # -- later captures -------------------------------------------------------------------

    def _count(self) -> None:
        missing = {(graphs, size) for graphs in self._kinds() for size in graphs.missing}
        self.failures = {one: error for one, error in self.failures.items() if one in missing}
        self._asked = Counter({one: count for one, count in self._asked.items() if one in missing})
        self.num_missing = len(missing) - len(self.failures)

    def ran_without(self, batch: ForwardBatch) -> None:
        """A pass ran kernel by kernel. If it was for want of a graph, count that."""
        graphs = self.prefill if batch.forward_mode.is_extend() else self.for_decode(batch)
        if (
            graphs is not None
            and graphs.fits(batch)
            and (size := graphs.padded_size(batch.num_tokens)) in graphs.missing
            and (graphs, size) not in self.failures
        ):
            self._asked[graphs, size] += 1

    @property
    def most_asked(self) -> int:
        """Passes that ran without one and the same graph."""
        return max(self._asked.values(), default=0)

    def capture_next(self) -> None:
        """Capture the missing graph that most passes ran without, between two steps.

        An error is kept in `failures`, and raised. This graph is not tried again, others are.
        """
        missing = [(graphs, size) for graphs in self._kinds() for size in reversed(graphs.missing)]
        graphs, size = max((one for one in missing if one not in self.failures), key=lambda one: self._asked[one])
        try:
            with invariant.mode(self._runner):
                graphs.capture_size(size)
        except BaseException as error:
            self.failures[graphs, size] = f"a pass of {size} rows: {error}"
            self._asked.pop((graphs, size), None)
            raise
        finally:
            self._count()

    @property
    def failure(self) -> str:
        """The first of the failures, or ""."""
        return next(iter(self.failures.values()), "")

    def stats(self) -> dict[str, int | str] | None:
        """Number of graphs captured and missing, with `failure`; None where passes are not captured."""
        if not self.decoders:
            return None
        missing = sum(len(graphs.missing) for graphs in self._kinds())
        captured = sum(len(graphs.sizes) for graphs in self._kinds()) - missing
        return {"captured": captured, "missing": missing, "failure": self.failure}

    def release(self) -> None:
        """Release all graphs and their memory."""
        self.release_adapted()
        for graphs in (self.segments, self.prompt_segments, self.prefill, *self.decoders.values()):
            if graphs is not None:
                graphs.shutdown()
        self.clear()

    def clear(self) -> None:
        """Forget all graphs."""
        self.decoders: dict[DecodeVariant, CudaGraphRunner] = {}
        self._adapters_version: int | None = None
        self.prefill: PrefillGraphs | None = None
        self.num_missing, self.failures = 0, dict[tuple[CudaGraphRunner | PrefillGraphs, int], str]()
        self._asked: Counter[tuple[CudaGraphRunner | PrefillGraphs, int]] = Counter()
        self.segments: DecodeSegments | None = None
        self.prompt_segments: PromptSegments | None = None

    @property
    def decode(self) -> CudaGraphRunner | None:
        """The decode passes with declared ops and without adapters. All others share their buffers."""
        return self.decoders.get(DECLARED)

    # -- LoRA adapters ------------------------------------------------------------------

    def capture_adapted(self, adapters: AdapterSlots, lazily: bool = False) -> None:
        """Capture decode passes over the adapters' memory, unless they are captured already."""
        if not self.decoders or self._adapters_version == adapters.version:
            return
        self.release_adapted()
        try:
            for variant, graphs in list(self.decoders.items()):
                adapted = CudaGraphRunner(self._runner, declares=variant.declares, adapted=graphs, lazily=lazily)
                self.decoders[variant._replace(adapted=True)] = adapted
        except BaseException:
            self.release_adapted()
            raise
        self._adapters_version = adapters.version
        self._count()

    def release_adapted(self) -> None:
        """Release the graphs of passes with adapters."""
        self._adapters_version = None
        for variant in [variant for variant in self.decoders if variant.adapted]:
            self.decoders.pop(variant).shutdown()
        self._count()

    # -- which serve a pass ---------------------------------------------------------------

    def for_decode(self, batch: ForwardBatch) -> CudaGraphRunner | None:
        """The captured decode passes for a batch; None without such passes."""
        rows = batch.adapters
        if rows is not None and (self._adapters_version != rows.version or not self.is_laid_out(batch)):
            return None
        wanted = DecodeVariant(declares=batch.site_ops is not None, adapted=rows is not None)
        return self.decoders.get(wanted) or self.decoders.get(wanted._replace(declares=True))

    def is_laid_out(self, batch: ForwardBatch) -> bool:
        """Whether input buffers have all that a captured decode pass reads of the batch's adapters."""
        rows, graphs = batch.adapters, self.decode
        if rows is None or graphs is None or batch.batch_size > graphs.max_bs:
            return True
        return rows.tiles is not None and len(rows.tiles.order) == graphs.padded_size(batch.batch_size)
