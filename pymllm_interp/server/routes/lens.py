"""The logit lens of a prompt: a request of one pass that captures each layer's most likely tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import load

from ...client.chat import tokenized
from ...client.detokenizer import token_text
from ...core.sampling_params import SamplingParams
from ...wire.failures import EngineError
from ...wire.messages import CapturedStates
from ..http.errors import ApiError, api_error
from ..http.state import ServerState
from ..http.trust import Client
from ..protocol import LensRequest
from .generation import Generation, Prompt
from .prompt_text import check_length

SITE = "resid_post"
MAX_CELLS = 1 << 18
"""Most tokens of an answer: layers x positions x tokens of each."""
READ_ONLY = SamplingParams(temperature=0.0, max_tokens=0)


async def logit_lens(state: ServerState, body: LensRequest, client: Client) -> bytes:
    """The answer of `/v1/interp/lens`, as JSON.

    Raises:
        ApiError: the prompt cannot be served or is too long for an answer, or the final norm is not known.
    """
    info = state.info
    if not {SITE, "final_norm"} <= info["sites"].keys():
        raise ApiError(
            400, f"{info['architecture']} models have no table of modules, which a lens needs", code="refused"
        )
    with state.admitted(client, 1):
        try:
            prompt = await state.threads.run(client.name, _prompt, state, body)
            found = await _captured(state, prompt, client, body.top)
            return await state.threads.run(
                client.name, _answer, state.tokenizer, prompt.token_ids, found, info["num_layers"]
            )
        except Exception as error:
            raise api_error(error, refused=True) from error


def _prompt(state: ServerState, body: LensRequest) -> Prompt:
    text, ids = None, body.prompt
    if isinstance(ids, str):
        check_length(state.tokenizer, len(ids), state.max_prompt_len, "the prompt")
        text, ids, *_ = tokenized(state.tokenizer, ids, "the prompt")
    layers = state.info["num_layers"]
    if layers * len(ids) * body.top > MAX_CELLS:
        raise ApiError(
            400,
            f"a lens of {layers} layers x {len(ids)} positions x top={body.top} tokens; at most {MAX_CELLS} in all: shorten "
            "the prompt, or capture with reduce={'type': 'lens'} at some layers or positions",
            param="prompt", code="refused",
        )  # fmt: skip
    return Prompt(text, ids, READ_ONLY)


async def _captured(state: ServerState, prompt: Prompt, client: Client, top: int) -> dict[str, np.ndarray]:
    """The captured log probabilities and token ids, by their names in the file of captured states."""
    spec = {"site": f"{SITE}.*", "positions": "prompt", "reduce": {"type": "lens", "top_k": top}}
    generation = await Generation.start(state.engine, None, [prompt], client.name, False, captures=[[spec]])
    try:
        (end,) = [piece.end async for piece in generation.pieces()]
    finally:
        generation.close()
    assert end is not None
    try:
        if end.failure is not None:
            raise EngineError(end.failure)
        assert end.captured is not None
        return load(await asyncio.to_thread(content_of, end.captured, state.engine.store))
    finally:
        state.store.forget(end.captured)


def content_of(captured: CapturedStates, store: Path) -> bytes:
    """The safetensors of captured states, from the message or from their file in the store."""
    return (store / str(captured.file)).read_bytes() if captured.data is None else captured.data


def _answer(tokenizer: Any, token_ids: list[int], found: dict[str, np.ndarray], num_layers: int) -> bytes:
    indexes = np.stack([found[f"indexes.{SITE}.{layer}"] for layer in range(num_layers)])
    probs = np.exp(np.stack([found[f"{SITE}.{layer}"] for layer in range(num_layers)]).astype(np.float64))
    words = {
        token: str(token) if tokenizer is None else token_text(tokenizer, token)
        for token in {*np.unique(indexes).tolist(), *token_ids}
    }
    layers = [
        [[{"token": words[t], "prob": p} for t, p in zip(*top, strict=True)] for top in zip(*row, strict=True)]
        for row in zip(indexes.tolist(), probs.tolist(), strict=True)
    ]
    return msgspec.json.encode({"tokens": [words[token] for token in token_ids], "layers": layers})
