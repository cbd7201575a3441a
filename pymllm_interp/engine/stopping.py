"""Stop conditions: a sampled token is appended to its request, and may end it."""

from __future__ import annotations

import time

from ..core.request import Request
from ..core.step import AcceptedToken, ModelRunnerOutput


def take(
    request: Request, token_ids: list[int], output: ModelRunnerOutput, accepted: list[AcceptedToken]
) -> str | None:
    """Append a step's tokens to their request and to `accepted`; the reason to end, or None. Tokens after the end are dropped."""
    error = output.errors.get(request.request_id)
    if error is not None:
        request.error = error
        return "error"
    if not request.generates:
        return "length" if token_ids else None
    before = len(request.output_token_ids)
    if not before and token_ids:
        request.first_token_at = time.monotonic()
    try:
        for token in token_ids:
            reason = _append(request, token, output, accepted)
            if reason is not None:
                return reason
        return None
    finally:  # a constraint's or a tokenizer's error, too
        kept = len(request.output_token_ids) - before
        if request.constraint is not None:
            request.constraint.num_masked += sum(output.masked.get(request.request_id, ())[:kept])
        if found := output.flat.get(request.request_id):
            request.receipt.flat_logits += sum(found[:kept])
            request.num_flat += sum(found[:kept])
        if request.logprobs:
            del request.logprobs[len(request.output_token_ids) :]


def _append(request: Request, token: int, output: ModelRunnerOutput, accepted: list[AcceptedToken]) -> str | None:
    if request.constraint is not None:
        request.constraint.accept(token)
    count = len(request.output_token_ids)
    accepted.append((request.request_id, request.prompt_len + count, token))
    request.output_token_ids.append(token)
    count += 1
    may_stop = count >= request.params.min_tokens
    if request.request_id not in output.stopped and token in request.eos_token_ids and may_stop:
        _stop_by(request, token)
        return "stop"
    if request.stop_checker is not None:
        request.stop_reason = request.stop_checker.push(request.output_token_ids, may_stop)
    if request.request_id in output.stopped or request.stop_reason is not None:
        return "stop"
    return "length" if count >= request.max_tokens else None


def _stop_by(request: Request, token: int) -> None:
    """A token ends the request. Its text is checked only if it is kept, as in vLLM."""
    request.stop_reason = None if token == request.eos_token_id else token
    if not request.params.include_stop_str_in_output:
        request.num_hidden_tokens = 1
    elif request.stop_checker is not None:
        found = request.stop_checker.push(request.output_token_ids, True)
        request.stop_reason = request.stop_reason if found is None else found
