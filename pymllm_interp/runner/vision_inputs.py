"""`VisionInputs`: the images of a step's requests, from the vision tower to the rows of the pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.cut_edges import PassCuts, RequestCuts, pass_cuts
from ..core.forward_batch import PartQuery
from ..core.image_input import ImageError, ImageInput
from ..core.model_spec import DEEPSTACK, OF_VISION, VISION_OUT
from ..core.pass_parts import DeepStates, EmbeddedRows
from ..core.step import NewRequest, ScheduledRequest
from ..mem_cache.encoder_cache import EncoderCache
from ..models.vision.tower import TowerOps, VisionTower
from ..models.weights.model_state import ModelState
from ..utils.upload import upload
from .parts import RunnerParts
from .request_state import RequestState
from .step_encoders import SiteOpsOf, no_part_ops

TOWER = (OF_VISION, VISION_OUT, DEEPSTACK)
"""Keys of the tower in `ModelSpec.parts`."""
NOT_REACHED = (
    "not reached: the vision tower runs once, in the first pass of a prompt with images, and its modules in their order"
)
LEAST_BUDGET = 8192
"""Least tokens of the encoder cache, unless it is configured."""


def image_tokens(runner: RunnerParts) -> tuple[int, int]:
    """Tokens of images that the tower computes at once, and tokens of the encoder cache, at most."""
    config, step = runner.server_config, runner.max_num_tokens
    return config.max_num_encoder_tokens or step, config.encoder_cache_tokens or max(step, LEAST_BUDGET)


class ImageRows(NamedTuple):
    """A part of an image among the token rows of a step."""

    request_id: str
    image: ImageInput
    first: int
    """Its first placeholder in the step, counted in the image."""
    rows: Tensor
    """[placeholders] int64, their token rows."""


class VisionInputs:
    """Runs the tower once an image, and gives its states to the passes.

    Args:
        tower: the model's tower.
        states: request table.
        model_state: an edit of the weights drops the cache.
        most: tokens of images that the tower computes at once.
        budget: tokens of the encoder cache.
        device: device of the passes.

    Attributes:
        cache: states of images.
        bounds_blocks: whether `most` bounds the images that a block in the tower sees, too. Else memory does.
        site_ops_of: see `StepEncoders`.
    """

    def __init__(
        self, tower: VisionTower, states: RequestState, model_state: ModelState, most: int, budget: int, device: str
    ) -> None:
        self.tower, self.states, self.model_state, self._most, self.device = tower, states, model_state, most, device
        self.cache, self.bounds_blocks = EncoderCache(budget), False
        self._version = model_state.version
        self.site_ops_of: SiteOpsOf = no_part_ops
        self._errors: dict[str, BaseException] = {}
        self._hooked: dict[str, NewRequest] = {}
        self._own: dict[str, dict[int, Tensor]] = {}  # states of requests that ran the tower themselves

    @classmethod
    def of(cls, runner: RunnerParts, states: RequestState, model_state: ModelState) -> VisionInputs | None:
        """The inputs of a runner's model; None if it has no tower."""
        tower = runner.get_model().tower
        if tower is None:
            return None
        found = cls(tower, states, model_state, *image_tokens(runner), runner.device)
        found.bounds_blocks = runner.server_config.max_num_encoder_tokens is not None
        return found

    def enter(self, request: NewRequest) -> None:
        """Note an entering request with images and hooks."""
        if request.images and request.hooks is not None:
            self._hooked[request.request_id] = request

    def drop(self, request_id: str) -> None:
        """Forget a request that left the table."""
        self._hooked.pop(request_id, None)
        self._own.pop(request_id, None)

    def _acts_inside(self, request_id: str) -> bool:
        """Whether a request has ops or captures in the tower."""
        request = self._hooked.get(request_id)
        return request is not None and request.hooks is not None and not request.hooks.parts.keys().isdisjoint(TOWER)

    def run_hooked(self, entries: Sequence[ScheduledRequest], query: PartQuery | None) -> None:
        """Run the tower anew for each request of a step with ops, captures or blocks in it. The cache has none of these states.

        A call has images of at most `most` tokens, or one image. A block sees all images of its prompt in one call.

        Args:
            query: serves the step's blocks; None without any.
        """
        if query is None and not self._hooked:
            return
        paths, first_row = self.tower.paths, 0
        spans = [] if query is None else query.rows_inside(*paths)
        for entry in entries:
            span, request = (first_row, entry.num_tokens), self._hooked.get(entry.request_id)
            first_row += entry.num_tokens
            if request is None:
                continue
            if entry.start >= request.prompt_len:
                self._own.pop(entry.request_id, None)
            elif span in spans:
                assert query is not None
                with query.serve_part(*paths, span=span, num_rows=1):
                    self._run(request, query)
            elif entry.request_id not in self._own and self._acts_inside(entry.request_id):
                with nullcontext() if query is None else query.serve_part(*paths, span=None):
                    self._run(request, None)
        if query is not None:
            query.refuse_inside(*paths, why=NOT_REACHED)

    def _run(self, request: NewRequest, query: PartQuery | None) -> None:
        assert request.hooks is not None
        states, whole = list[Tensor](), query is not None and not self.bounds_blocks
        calls = [range(len(request.images))] if whole else self._calls_of(request.images)
        try:
            if query is not None and len(calls) > 1:
                raise ImageError(
                    f"a block in the vision tower sees the {len(request.images)} images of its prompt together. They have "
                    f"{sum(image.num_tokens for image in request.images)} tokens, and a call of the tower at most {self._most} "
                    "(max_num_encoder_tokens): raise it, or trace fewer images"
                )
            for images in calls:
                ops = TowerOps(*(self.site_ops_of(request.request_id, part, images) for part in TOWER))
                with torch.set_grad_enabled(request.hooks.differentiable):
                    states += self.tower.encode_hooked(request.images[images.start : images.stop], ops, query)
        except ImageError as error:  # no error of the step: blocks of others have begun
            self._errors[request.request_id] = error
            states = [self.tower.zeros(image.num_tokens) for image in request.images]
        self._own[request.request_id] = {id(image): own for image, own in zip(request.images, states, strict=True)}

    def _calls_of(self, images: Sequence[ImageInput]) -> list[range]:
        """Images of each call of the tower, in order."""
        found, size = [range(0)], 0
        for i, image in enumerate(images):
            if size and size + image.num_tokens > self._most:
                found, size = [*found, range(i, i)], 0
            found[-1], size = range(found[-1].start, i + 1), size + image.num_tokens
        return found

    def take_errors(self) -> dict[str, BaseException]:
        """Request id -> error of its run of the tower, of requests that must end."""
        found, self._errors = self._errors, {}
        return found

    def parts(self, rows: Sequence[tuple[ScheduledRequest, int]]) -> list[ImageRows]:
        """The images, or their parts, in a step.

        Args:
            rows: requests of the step, each with its first token row.
        """
        found: list[ImageRows] = []
        for entry, first_row in rows:
            request = self.states.requests[entry.row]
            assert request is not None, "the step entered its requests"
            for image in request.images if entry.start < request.prompt_len else ():
                first, end = image.within(entry.start, entry.start + entry.num_tokens)
                if first < end:
                    found.append(
                        ImageRows(entry.request_id, image, first, image.positions[first:end] - entry.start + first_row)
                    )
        return found

    def spans(self, rows: Sequence[tuple[ScheduledRequest, int]]) -> PassCuts | None:
        """The images of a step that attend in both directions. Arguments: see `parts`."""
        found: list[RequestCuts] = []
        for index, (entry, first_row) in enumerate(rows):
            request = self.states.requests[entry.row]
            assert request is not None, "the step entered its requests"
            ends = [(int(image.positions[0]), int(image.positions[-1]) + 1) for image in request.images]
            stop = entry.start + entry.num_tokens
            if own := [span for span in ends if span[0] < stop and entry.start < span[1]]:
                found.append(RequestCuts(index, first_row, entry.start, entry.num_tokens, [], {}, own))
        return pass_cuts(found)

    def execute_mm_encoder(self, parts: Sequence[ImageRows]) -> None:
        """Run the tower for images without states in the cache. Requests with ops or captures in it wait for `run_hooked`.
        Raises ImageError: an image that it cannot read, with the requests that have it."""
        parts = [part for part in parts if not self._acts_inside(part.request_id)]
        if not parts:
            return
        if (version := self.model_state.version) != self._version:
            self.cache.reset()
            self._version = version
        known = {part.image.content: part.image for part in parts}
        missing = [image for content, image in known.items() if content not in self.cache]
        self.cache.num_hits += len(known) - len(missing)
        try:
            found = self.tower.encode(missing, self._most)
        except ImageError:
            found = [self._alone(image, parts) for image in missing]
        for image, states in zip(missing, found, strict=True):
            self.cache.put(image.content, states, known)

    def _alone(self, image: ImageInput, parts: Sequence[ImageRows]) -> Tensor:
        """States of one image. An error has the requests that have it."""
        try:
            return self.tower.encode([image], self._most)[0]
        except ImageError as error:
            error.request_ids = tuple(part.request_id for part in parts if part.image.content == image.content)
            raise

    def gather_mm_embeddings(self, parts: Sequence[ImageRows]) -> tuple[EmbeddedRows, DeepStates | None]:
        """The rows of a step's images with their embeddings, and with states for deeper layers, if the tower has any."""
        found = [self._states_of(part)[part.first : part.first + len(part.rows)] for part in parts]
        states, (rows,) = torch.cat(found), upload(self.device, torch.cat([part.rows for part in parts]))
        width = self.tower.width
        deep = DeepStates(rows, states[:, width:]) if self.tower.num_deepstack else None
        return EmbeddedRows(rows, states[:, :width].contiguous()), deep

    def _states_of(self, part: ImageRows) -> Tensor:
        own = self._own.get(part.request_id)
        return self.cache[part.image.content] if own is None else own[id(part.image)]
