"""What requests with equal captures share is counted once, and gives what counting anew gives."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS

from pymllm_interp import Capture
from pymllm_interp.core.model_spec import ModelSpec, site_index
from pymllm_interp.core.request import Request, RequestStatus
from pymllm_interp.core.sampling_params import SamplingParams
from pymllm_interp.engine.scheduler import Scheduler
from pymllm_interp.hooks.binding import bind
from pymllm_interp.hooks.captures.captures import Captures
from pymllm_interp.hooks.captures.egress.admission import RingAdmission
from pymllm_interp.hooks.captures.egress.ring_allocator import RingAllocator
from pymllm_interp.hooks.captures.group import Group

INFO = ModelSpec.of(CONFIGS["llama"](), torch.float32)
POSITIONS: tuple[Any, ...] = ("all", "prompt", "generated", -1, 0, [0, 2, -1], slice(1, 6, 2), slice(3, None))


def captures_of(specs: list[Capture], prompt_len: int, longest: int) -> Captures:
    bounds = [bound for spec in specs for bound in bind(spec, INFO, prompt_len)]
    numbered = [(site_index(b.site, INFO.num_hidden_layers), b, INFO.shape(b.site.kind)) for b in bounds]
    return Captures(numbered, torch.float32, prompt_len, longest, INFO.num_hidden_layers)


@pytest.mark.parametrize("reduce", [None, "mean", "last"])
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_counts_of_positions_are_those_of_the_tables(positions: Any, reduce: Any) -> None:
    longest, prompt_len = 11, 7
    (group,) = captures_of([Capture("resid_post.*", positions=positions, reduce=reduce)], prompt_len, longest).groups
    for stop in range(longest + 3):
        assert group.rows_before(stop) == int((group.ordinals[:stop] >= 0).sum())
        assert group.captured_before(stop) == int(group.captured[:stop].sum())
        for start in range(min(stop, longest)):
            rows = np.flatnonzero(group.ordinals[start:stop] >= 0)
            wanted = (start + int(rows[0]), int(group.ordinals[start + rows[0]])) if len(rows) == 1 else None
            found = group.only_row(range(start, min(stop, longest)))
            assert found == (wanted if group.keeps_rows else None)
    assert group.num_positions == int((group.ordinals >= 0).sum())


@pytest.mark.parametrize("specs", [1, 2])
def test_a_fresh_copy_keeps_nothing_of_another(specs: int) -> None:
    given = [Capture("resid_post.1"), Capture("mlp_out.0", positions=[-1])][:specs]
    first = captures_of(given, 3, 5)
    copies = [first.fresh(), first.fresh(), first.fresh().fresh()]
    for i, captures in enumerate(copies):
        for group, column in captures.by_site.values():
            assert any(group is own for own in captures.groups)
            _keep(group, column, float(i))
    for i, captures in enumerate(copies):
        found = captures.activations([5, 6, 7, 8, 9])
        assert captures.error is None and len(found) == specs
        for site in found:
            assert torch.equal(found[site], torch.full_like(found[site], float(i)))
            assert found.positions[site].tolist() == ([2] if site == "mlp_out.0" else [0, 1, 2, 3, 4])
            found[site].fill_(-1.0)
            found.positions[site].fill_(-1)  # its own, too
    assert first.activations([5, 6, 7, 8, 9])["resid_post.1"].shape[0] == 0


def _keep(group: Group, column: int, value: float) -> None:
    for ordinal in range(group.num_positions):
        group.keep_row(column, ordinal, np.full(INFO.hidden_size, value, np.float32).view(np.int32))


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
            request.declared = SimpleNamespace(captures=captures.sizes()) if rng.random() < 0.7 else None
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
