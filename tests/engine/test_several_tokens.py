"""Steps that give a request several tokens, or take rows of it back, as drafts of speculative decoding do."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from helpers_runner import Steps, make_runner, random_ids

from pymllm_interp import Ablate, Capture, Gate, Steer
from pymllm_interp.core.request import Request
from pymllm_interp.core.sampling_params import SamplingParams
from pymllm_interp.core.step import (
    AcceptedToken,
    DeclaredResult,
    ModelRunnerOutput,
    RequestEnd,
    RequestHooks,
    SampledLogprobs,
    ScheduledRequest,
    SchedulerOutput,
)
from pymllm_interp.engine.kv_manager import KVManager
from pymllm_interp.engine.step_results import append_logprobs, take
from pymllm_interp.runner import InterpModelRunner


def request_of(max_tokens: int = 8, **kwargs: Any) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(max_tokens=max_tokens), max_tokens, seed=0, **kwargs)


@pytest.mark.parametrize(
    ("token_ids", "kept", "reason"),
    [
        ([], [], None),
        ([5, 6, 7], [5, 6, 7], None),
        ([5, 9, 7], [5, 9], "stop"),
        ([5, 6, 7, 8, 5], [5, 6, 7, 8], "length"),
    ],
)
def test_tokens_of_a_step_are_taken_up_to_the_end_of_their_request(token_ids, kept, reason):
    """Each token ends the request as it would alone; those behind it, and their log probabilities, are dropped."""
    request = request_of(4, eos_token_ids=frozenset({9}), logprobs=[])
    logprobs = [SampledLogprobs([token], [-1.0], [1]) for token in token_ids]
    step = SchedulerOutput([ScheduledRequest("r", 1, max(len(token_ids), 1), 2, True, True, 1)])
    output = ModelRunnerOutput(["r"], [token_ids], [logprobs])
    append_logprobs({"r": request}, step, output)
    accepted: list[AcceptedToken] = []
    assert take(request, token_ids, output, accepted) == reason
    assert request.output_token_ids == kept and request.accepted_len == len(kept)
    assert accepted == [("r", 3 + i, token) for i, token in enumerate(kept)]
    assert [list(entry) for entry in request.logprobs or ()] == [[token] for token in kept]


PROMPT, NEW = random_ids(6), 9
WIDTH = 72


def hooks(**kwargs: Any) -> RequestHooks:
    def vector(seed: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))

    near = Gate(vector(3), 0.1)
    earlier = Gate(vector(4), 0.0, site="resid_post.0")
    interventions = [
        Steer("resid_post.1", vector(1), scale=3.0, when=near),
        Steer("resid_mid.2", vector(2), scale=2.0, when=earlier, positions="generated"),
        Ablate("mlp_out.0", vector(5)),
        Steer("logits", torch.eye(97)[7], scale=0.5),
    ]
    captures = [
        Capture("resid_post.*"),
        Capture("mlp_out.1", positions="generated"),
        Capture("attn_out.1", reduce="mean"),
        Capture("resid_mid.1", reduce="last"),
        Capture("logits", positions="generated"),
    ]
    return RequestHooks(**{"interventions": interventions, "captures": captures, "max_tokens": NEW, **kwargs})


def undrafted(runner: Any) -> tuple[list[int], DeclaredResult]:
    """A request's tokens and results, one token a step."""
    steps = Steps(runner)
    request = steps.request(PROMPT, NEW, ignore_eos=True)
    request.hooks = hooks(logits_from=len(PROMPT) - 1)
    steps.scheduler.add([request])
    steps.run()
    return request.output_token_ids, runner.finish_declared(request.ending()).result()


def drafted(
    runner: Any, tokens: list[int], num_right: list[int], num_drafts: int
) -> tuple[list[int], DeclaredResult, int]:
    """The same with drafts, of which so many are right; verified as the greedy sampler would.

    Returns:
        tokens, results, and the number of drafts that were accepted.
    """
    steps = Steps(runner)
    request = steps.request(PROMPT, NEW, "drafted", ignore_eos=True)
    request.hooks = hooks(logits_from=len(PROMPT) - 1)
    steps.scheduler.add([request])
    steps.step()
    found, rights, settled = list(request.output_token_ids), cycle(num_right), {}
    accepted = [(request.request_id, len(PROMPT), found[0])]
    num_accepted = 0
    while len(found) < NEW:
        start, right = len(PROMPT) + len(found) - 1, next(rights)
        drafts = tokens[len(found) : len(found) + right]
        drafts += [(token + 1) % 97 for token in tokens[len(found) + right :]]
        drafts = drafts[: min(num_drafts, NEW - len(found) - 1)]
        rows = 1 + len(drafts)
        assert request.req_pool_idx is not None
        entry = ScheduledRequest(request.request_id, request.req_pool_idx, rows, start, True, False, rows)
        step = SchedulerOutput(
            [entry], accepted=accepted, drafts={request.request_id: drafts} if drafts else {}, settled=settled
        )
        assert runner.execute_model(step) is None
        chosen = runner.execute_model_state.logits_output.next_token_logits.argmax(-1).tolist()
        runner.sample_tokens()
        same = [a == b for a, b in zip(drafts, chosen, strict=False)]
        count = same.index(False) if False in same else len(drafts)
        new, num_accepted = chosen[: count + 1], num_accepted + count
        accepted = [(request.request_id, start + 1 + i, token) for i, token in enumerate(new)]
        found += new
        settled = {request.request_id: start + len(new)} if drafts else {}
    runner.execute_model(SchedulerOutput(settled=settled, finished_req_ids={request.request_id}))
    computed = len(PROMPT) + NEW - 1
    end = RequestEnd(request.request_id, PROMPT, found, computed, computed, 0, request.hooks)
    return found, runner.finish_declared(end).result(), num_accepted


@pytest.mark.parametrize("num_right", [[0], [3], [0, 1, 2, 3], [2, 0]], ids=str)
def test_drafts_that_are_taken_back_leave_no_trace(num_right, model_folder):
    """Captures, their reductions, gates and tokens are those of the run without drafts."""
    runner = make_runner(model_folder("llama"), InterpModelRunner)
    tokens, wanted = undrafted(runner)
    found_tokens, found, num_accepted = drafted(runner, tokens, num_right, 3)
    assert found_tokens == tokens and (num_accepted > 0) == (max(num_right) > 0)
    assert found.applied == wanted.applied
    fires = [applied.gate_fires for applied in wanted.applied if applied.gate_fires is not None]
    assert any(0 < count < len(PROMPT) + NEW for count in fires), "a gate that always or never fires shows nothing"
    assert found.captured == wanted.captured and wanted.activations.error is None
    assert list(found.activations) == list(wanted.activations)
    for site in wanted.activations:
        torch.testing.assert_close(found.activations[site], wanted.activations[site], rtol=1e-4, atol=1e-5)
        assert torch.equal(found.activations.positions[site], wanted.activations.positions[site])


def test_a_draft_in_device_tables_is_refused(model_folder, monkeypatch):
    """Kernels count fires there, which cannot be taken back."""
    runner: Any = make_runner(model_folder("llama"), InterpModelRunner)
    steps = Steps(runner)
    request = steps.request(PROMPT, NEW)
    request.hooks = hooks()
    steps.scheduler.add([request])
    steps.step()
    assert request.req_pool_idx is not None
    entry = ScheduledRequest(request.request_id, request.req_pool_idx, 2, len(PROMPT), True, False, 2)
    monkeypatch.setattr(runner.declared_stage, "device_tables", object())
    with pytest.raises(NotImplementedError, match="schedule it without drafts"):
        runner.declared_stage._begin_drafts(SchedulerOutput([entry], drafts={request.request_id: [1]}))


def test_pages_are_shared_as_far_as_tokens_are_accepted(model_folder):
    """A later request may not read the KV of a draft."""
    steps = Steps(make_runner(model_folder("llama"), InterpModelRunner, page_size=4))
    runner: Any = steps.runner
    kv = steps.scheduler.kv = KVManager.of(runner)
    request = steps.add(random_ids(6), NEW)
    steps.step()
    assert request.num_shared_pages == 1 and kv.grow(request, 12)
    kv.share(request, 12)
    assert request.num_shared_pages == 1, "7 tokens fill one page of 4"
    request.output_token_ids.append(5)
    kv.share(request, 12)
    assert request.num_shared_pages == 2
