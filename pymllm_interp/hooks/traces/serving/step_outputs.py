"""Step values outside of modules: the output of a single forward pass, and the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ....core.pass_parts import TransformersOutputs
from ....core.step import ScheduledRequest
from ....utils.upload import upload
from ..blocks.trace import RequestTrace
from .interleaver import EngineInterleaver


def serve_outputs(
    traces: Iterable[RequestTrace], logits: torch.Tensor, transformers_pass: TransformersOutputs | None = None
) -> None:
    """Store the model's output as the result of traces with a single forward pass.

    A trace with a block that has read the model's output has it already.

    Args:
        logits: [logit rows, vocab].
        transformers_pass: has attention weights and hidden states, of a pass of one request.
    """
    for trace in traces:
        if trace.single and trace.result is None and trace.rows is not None:
            rows, own = trace.rows, trace.rows.narrow(logits, of_logits=True)
            collected: Any = {} if transformers_pass is None else transformers_pass.collected()
            collected = {name: tuple(rows.narrow(x, of_logits=False) for x in of) for name, of in collected.items()}
            trace.result = CausalLMOutputWithPast(
                logits=own if trace.watches_several else own.unsqueeze(0), **collected
            )


def offer_tokens(
    interleaver: EngineInterleaver, token_ids: torch.Tensor, sampling: Sequence[ScheduledRequest], vocab_size: int
) -> torch.Tensor:
    """Let blocks see and change the sampled tokens. Waits for the device.

    Args:
        token_ids: [sampling requests] int32.

    Returns:
        the tokens that generation continues with, of the same shape.
    """
    device, sampled = token_ids.device, token_ids.tolist()
    offered = torch.tensor(sampled, dtype=torch.int64, device=device).unsqueeze(1)
    chosen: list[int] = interleaver.handle(interleaver.samples, offered).squeeze(1).tolist()
    for i, (entry, token) in enumerate(zip(sampling, chosen, strict=True)):
        if not 0 <= token < vocab_size:
            message = f"`samples` was set to {token}, but token ids go from 0 to {vocab_size - 1}"
            for trace in interleaver.traces:
                if entry.request_id in trace.request_ids:
                    trace.fail(ValueError(f"request {entry.request_id}: {message}"))
            chosen[i] = sampled[i]
    if chosen != sampled:
        (token_ids,) = upload(device, torch.tensor(chosen, dtype=torch.int32))
    own = {entry.request_id: token for entry, token in zip(sampling, chosen, strict=True)}
    for trace in interleaver.traces:
        if trace.in_pass and not trace.single and any(rid in own for rid in trace.request_ids):
            tokens = [own.get(rid, trace.pad_token_id) for rid in trace.request_ids]
            interleaver.offer(trace, interleaver.streamer, torch.tensor(tokens))
    return token_ids
