"""Completions as OpenAI's JSON."""

from __future__ import annotations

import base64
import re
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from ...client.completion import Scored
from ...client.detokenizer import Detokenizer, decode, token_text
from ...core.events import Logprob
from ...wire import messages as m
from ..http.state import ServerState
from ..http.trust import Client
from ..tools.messages import MessageParser
from .generation import CompletionPiece, Prompt

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have; as in vLLM."""
OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")
"""Fields that a completion has in its choices, and a chat beside them, as in vLLM."""


class Format:
    """Makes the JSON of one request's completions.

    Args:
        kind: "cmpl" or "chatcmpl".
        return_token_ids: token ids in each choice.
        logprobs: whether log probabilities were asked for.
        top: number of further tokens listed at each position.
        echo: the prompt before each completion.
        parser: makes the parser of a message from the prompt's text; None: the text is its content.
    """

    def __init__(
        self, kind: str, name: str, request_id: str, state: ServerState, client: Client, *, return_token_ids: bool,
        logprobs: bool, top: int, echo: bool = False, parser: Callable[[str | None], MessageParser] | None = None,
    ) -> None:  # fmt: skip
        self.kind, self.name, self.id, self._state, self._client = kind, name, f"{kind}-{request_id}", state, client
        self.return_token_ids, self.logprobs, self._top, self.echo = return_token_ids, logprobs, top, echo
        self.chat = kind == "chatcmpl"
        self._parser = parser
        self._messages: dict[int, MessageParser] = {}
        self.created = int(time.time())
        self._texts: dict[int, TextSoFar] = {}
        self._kept: dict[int, dict[str, Any]] = {}

    def envelope(self, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        """A response, or a chunk of a stream."""
        object_ = "chat.completion" if self.chat else "text_completion"
        if chunk and self.chat:
            object_ += ".chunk"
        of_prompt = {
            name: found for name in OF_PROMPT if self.chat for one in choices if (found := one.pop(name, None))
        }
        return {
            "id": self.id, "object": object_, "created": self.created, "model": self.name, "choices": choices, **of_prompt
        }  # fmt: skip

    def choice(self, index: int, prompt: Prompt, piece: CompletionPiece, first: bool, chunk: bool) -> dict[str, Any]:
        """A choice, or a chunk's part of it."""
        text, ids, logprobs = piece.text, list(piece.token_ids), list(piece.logprobs)
        echoed = self.echo and first
        if echoed:
            text = self._text_of(prompt) + text
        found: dict[str, Any] = {"index": index}
        if self.chat:
            found["delta" if chunk else "message"] = self._message(index, prompt, piece, first, chunk)
        else:
            found["text"] = text
        found["logprobs"] = self._logprobs(index, prompt, piece, ids, logprobs, echoed) if self.logprobs else None
        found["finish_reason"] = None if piece.end is None else self._finish_reason(index, piece.end)
        found["stop_reason"] = None if piece.end is None else piece.end.stop_reason
        if self.return_token_ids:
            found["token_ids"] = ids
            if first:
                found["prompt_token_ids"] = prompt.token_ids
        if piece.end is not None:
            self.end(found, index, piece.end)
        if chunk and piece.scores:
            found.setdefault("pymllm", {})["scores"] = scores_json(piece.scores)
        if piece.captures is not None:
            found.setdefault("pymllm", {})["captures"] = self.captures_json(piece.captures)
        return found

    def _message(self, index: int, prompt: Prompt, piece: CompletionPiece, first: bool, chunk: bool) -> dict[str, Any]:
        """The message of a choice, or a chunk's delta of it."""
        if self._parser is None:
            return {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
        parser = self._messages.get(index)
        if parser is None:
            parser = self._messages[index] = self._parser(prompt.text)
        if not chunk:
            return parser.message(piece.text)
        delta = parser.delta(piece.text, ended=piece.end is not None)
        return {"role": "assistant", "content": ""} | delta if first else delta

    def _finish_reason(self, index: int, end: m.Finished) -> str:
        called = index in self._messages and self._messages[index].num_calls
        return "tool_calls" if called and end.finish_reason == "stop" else end.finish_reason

    def end(self, found: dict[str, Any], index: int, end: m.Finished) -> None:
        """Add the fields of a whole completion, or of a pooled input."""
        if end.prompt_logprobs is not None and not self.echo:
            found["prompt_logprobs"] = [
                None if entry is None else {
                    str(token): {"logprob": finite(value), "rank": rank, "decoded_token": self._word(token)}
                    for token, (value, rank) in entry.items()
                }
                for entry in end.prompt_logprobs
            ]  # fmt: skip
        if end.monitors is not None:
            found["pymllm"] = {"monitors": {name: _monitor_json(scores) for name, scores in end.monitors.items()}}
        if end.receipt is not None:
            found["receipt"] = end.receipt
        if index in self._kept:
            found["activations"] = self._kept.pop(index)
        if end.warnings:
            found["warnings"] = end.warnings

    def captures_json(self, rows: m.Rows) -> dict[str, Any]:
        """Captured rows as `activations` has them, and the texts of tokens that a lens named, by id."""
        found = _inline(rows.states)
        if rows.words and self._state.tokenizer is not None:
            found["tokens"] = {str(token): token_text(self._state.tokenizer, token) for token in rows.words}
        return found

    def keep_activations(self, index: int, captured: m.CapturedStates) -> None:
        """Keep the captured states of a choice, before it is made. Called on the event loop, as the store is."""
        self._kept[index] = self._activations(index, captured)

    def _activations(self, index: int, captured: m.CapturedStates) -> dict[str, Any]:
        self._state.metrics.totals["captured_bytes"] += captured.size
        found = _inline(captured)
        if captured.data is not None:
            return found
        name = f"{self.id}-{index}"
        stored = self._state.store.adopt(name, captured, self._client.name)
        return found | self._state.store.link(name, stored)

    def usage(self, prompts: Sequence[Prompt], ends: Mapping[Any, m.Finished]) -> dict[str, Any]:
        """Token counts of the request."""
        read = sum(prompt.num_tokens for prompt in prompts)
        made = sum(len(end.token_ids) for end in ends.values())
        cached = sum(end.num_cached_tokens for (_, sample), end in ends.items() if sample == 0)
        found = usage_of(read, made) | {"prompt_tokens_details": {"cached_tokens": cached}}
        if drafts := [end.drafts for end in ends.values() if end.drafts is not None]:
            drafted, accepted = (sum(counts[i] for counts in drafts) for i in (1, 2))
            found["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted
            }  # fmt: skip
        return found

    # -- log probabilities ------------------------------------------------------------------

    def _logprobs(
        self, index: int, prompt: Prompt, piece: CompletionPiece, ids: list[int], found: list[Any], echoed: bool
    ) -> dict[str, Any]:
        entries: list[dict[int, Logprob] | None] = [{t: Logprob(*v) for t, v in entry.items()} for entry in found]
        if echoed and piece.end is not None and piece.end.prompt_logprobs is not None:
            before = [None if e is None else {t: Logprob(*v) for t, v in e.items()} for e in piece.end.prompt_logprobs]
            ids, entries = [*prompt.token_ids, *ids], [*before, *entries]
        if self.chat:
            return {"content": [self._chat_entry(t, e) for t, e in zip(ids, entries, strict=True) if e]}
        words = [self._word(token) for token in ids]
        text = self._texts.get(index)
        if text is None:
            before = [] if echoed else prompt.token_ids
            text = self._texts[index] = TextSoFar(self._state.tokenizer, prompt.params.skip_special_tokens, before)
        return {
            "tokens": words,
            "token_logprobs": [None if e is None else finite(e[t].logprob) for t, e in zip(ids, entries, strict=True)],
            "top_logprobs": [None if e is None else self._top_words(t, e) for t, e in zip(ids, entries, strict=True)],
            "text_offset": [text.add(token) for token in ids],
        }

    def _top_words(self, token: int, entry: Mapping[int, Logprob]) -> dict[str, float]:
        """Text -> log probability. Of two tokens with one text, the token itself has it, else the likelier one.

        The other's key is `token_id:ID`, as vLLM writes a token without text.
        """
        found: dict[str, float] = {}
        for other in sorted(entry, key=lambda t: (t != token, entry[t].rank)):
            word = self._word(other)
            found[f"token_id:{other}" if word in found else word] = finite(entry[other].logprob)
        return found

    def _chat_entry(self, token: int, entry: Mapping[int, Logprob]) -> dict[str, Any]:
        top = sorted(entry.items(), key=lambda item: item[1].rank)[: self._top]
        return self._chat_token(token, entry[token]) | {"top_logprobs": [self._chat_token(*one) for one in top]}

    def _chat_token(self, token: int, value: Logprob) -> dict[str, Any]:
        own = token_bytes(self._state.tokenizer, token)
        return {"token": token_word(own), "logprob": finite(value.logprob), "bytes": list(own)}

    def _word(self, token: int) -> str:
        return token_word(token_bytes(self._state.tokenizer, token), "" if self.chat else "bytes:")

    def _text_of(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return "" if self._state.tokenizer is None else decode(self._state.tokenizer, prompt.token_ids)


class TextSoFar:
    """The text of a choice's tokens so far, which says where each token begins in it.

    Args:
        tokenizer, skip_special_tokens, prompt_token_ids: see `Detokenizer`.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens, prompt_token_ids)
        self._parts, self._held = getincrementaldecoder("utf-8")("replace"), 0

    def add(self, token: int) -> int:
        """Take the next token; the number of characters before it. A character that has begun is not among them."""
        if self._detokenizer is None:
            return 0
        start = len(self._detokenizer.text) + self._held
        own = token_bytes(self._tokenizer, token)
        if self._detokenizer.push([token]):
            self._parts.reset()
            self._held = 0
        elif not is_text(own):  # the detokenizer holds parts of characters back, and invalid ones
            self._held += len(self._parts.decode(own))
        return start


def _inline(captured: m.CapturedStates) -> dict[str, Any]:
    found: dict[str, Any] = {"format": "safetensors", "bytes": captured.size, "sites": captured.sites}
    return found if captured.data is None else found | {"data": base64.b64encode(captured.data).decode()}


def usage_of(read: int, made: int) -> dict[str, Any]:
    """Token counts of prompts and completions, as OpenAI's `usage`."""
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def scores_json(found: Mapping[str, Scored]) -> dict[str, list[list[Any]]]:
    """[position, score] pairs of monitors by name; null for a score that is not finite."""
    return {
        name: [[position, score if isfinite(score) else None] for position, score in pairs]
        for name, pairs in found.items()
    }


def _monitor_json(found: m.MonitorResult) -> dict[str, Any]:
    lists = {
        name: [value if isfinite(value) else None for value in getattr(found, name)] for name in ("scores", "values")
    }
    return {
        "positions": found.positions, **lists, "fired": found.fired, "threshold": found.threshold, "stopped": found.stopped
    }  # fmt: skip


def finite(value: float) -> float:
    """A number that JSON has."""
    return value if value > LOWEST else LOWEST


_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""Characters that stand for bytes in the vocabulary of a byte-level BPE tokenizer (GPT-2's)."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A single byte in the vocabulary of a SentencePiece tokenizer."""


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """A token's own bytes, which need not be whole characters.

    Args:
        tokenizer: a transformers tokenizer; None: the text is the token id.
    """
    if tokenizer is None:
        return str(token).encode()
    text = token_text(tokenizer, token)
    if "\ufffd" not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    if byte := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    found = [_BYTE_LEVEL.get(character) for character in piece]
    return bytes(byte for byte in found if byte is not None) if None not in found else text.encode()


def is_text(data: bytes) -> bool:
    """Whether the bytes are whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def token_word(data: bytes, prefix: str = "") -> str:
    """A token's text; for a part of a character its bytes, as OpenAI writes them: `\\xf0\\x9f`.

    Args:
        prefix: text before such bytes; completions have "bytes:".
    """
    if is_text(data):
        return data.decode()
    return prefix + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)
