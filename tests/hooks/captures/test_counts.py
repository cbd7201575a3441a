"""What requests with equal captures share is counted once, and gives what counting anew gives."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS
from helpers_declared import captured_rows

from pymllm_interp import Capture
from pymllm_interp.core.model_spec import ModelSpec
from pymllm_interp.core.request import Request, RequestStatus
from pymllm_interp.core.sampling_params import SamplingParams
from pymllm_interp.engine.scheduler import Scheduler
from pymllm_interp.hooks.captures.egress.admission import RingAdmission
from pymllm_interp.hooks.captures.egress.ring_allocator import RingAllocator
from pymllm_interp.hooks.captures.layout import CaptureProgress
from pymllm_interp.hooks.captures.rows import CapturedRows

INFO = ModelSpec.of(CONFIGS["llama"](), torch.float32)
POSITIONS: tuple[Any, ...] = ("all", "prompt", "generated", -1, 0, [0, 2, -1], slice(1, 6, 2), slice(3, None))


def captures_of(specs: list[Capture], prompt_len: int, longest: int) -> CapturedRows:
    return captured_rows(specs, INFO, prompt_len, longest)


@pytest.mark.parametrize("reduce", [None, "mean", "last"])
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_counts_of_positions_are_those_of_the_tables(positions: Any, reduce: Any) -> None:
    longest, prompt_len = 11, 7
    (group,) = captures_of(
        [Capture("resid_post.*", positions=positions, reduce=reduce)], prompt_len, longest
    ).layout.groups
    for stop in range(longest + 3):
        assert group.rows_before(stop) == int((group.ordinals[:stop] >= 0).sum())
        assert group.captured_before(stop) == int(group.captured[:stop].sum())
        for start in range(min(stop, longest)):
            rows = np.flatnonzero(group.ordinals[start:stop] >= 0)
            assert len(rows) == group.rows_before(stop) - group.rows_before(start)
    assert len(group.positions) == int((group.ordinals >= 0).sum())


@pytest.mark.parametrize("specs", [1, 2])
def test_rows_of_one_layout_keep_nothing_of_each_other(specs: int) -> None:
    given = [Capture("resid_post.1"), Capture("mlp_out.0", positions=[-1])][:specs]
    first = captures_of(given, 3, 5)
    copies = [CapturedRows(first.layout) for _ in range(3)]
    for i, captures in enumerate(copies):
        for site in captures.layout.by_site:
            captures.put(0, site, torch.full((5, INFO.hidden_size), float(i)))
    for i, captures in enumerate(copies):
        found = captures.result([5, 6, 7, 8, 9])
        assert captures.error is None and len(found) == specs
        for site in found:
            assert torch.equal(found[site], torch.full_like(found[site], float(i)))
            assert found.positions[site].tolist() == ([2] if site == "mlp_out.0" else [0, 1, 2, 3, 4])
            found[site].fill_(-1.0)
            found.positions[site].fill_(-1)  # its own, too
    assert first.result([5, 6, 7, 8, 9])["resid_post.1"].shape[0] == 0


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_have_room_together_are_those_that_have_it_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    specs = [Capture("resid_post.*"), Capture("resid_post.1", positions=[-1]), Capture("embed", positions="generated")]
    for _ in range(60):
        requests: list[Request] = []
        for number in range(rng.randrange(1, 8)):
            prompt_len = rng.randrange(1, 6)
            request = Request(str(number), [1] * prompt_len, SamplingParams(max_tokens=9), 9, seed=0)
            captures = captures_of([rng.choice(specs)], prompt_len, prompt_len + 8)
            request.declared = (
                SimpleNamespace(captures=CaptureProgress(captures.layout)) if rng.random() < 0.7 else None
            )
            request.output_token_ids, request.kv_len = [1], prompt_len
            request.status, request.differentiable = RequestStatus.RUNNING, rng.random() < 0.1
            if request.declared is not None and rng.random() < 0.2:
                request.declared.captures.was_sent(prompt_len + rng.randrange(2))
            requests.append(request)
        gang = [request for request in requests if rng.random() < 0.2]
        for request in gang:
            request.gang = gang
        size, when_full = rng.randrange(1, 6) * 3 * INFO.hidden_size, rng.choice(["block", "fail"])
        found = []
        for at_once in (True, False):
            admission = RingAdmission(RingAllocator(size), size * 4, 4, when_full)
            if not at_once:
                admission.take_rows = lambda requests: False
            scheduler = object.__new__(Scheduler)
            scheduler.ring_admission = admission
            admission.begin()
            sat_out = scheduler._without_ring(requests)
            lost = sorted(admission.lost)
            for request in requests:
                if request.declared is not None:
                    request.declared.captures.error = None
            found.append((sorted(r.request_id for r in sat_out), lost, admission._free, admission.refused))
        assert found[0] == found[1]
