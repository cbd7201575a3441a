"""The documents of a harvest: texts, token ids, or a stream of tokens."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch

from ..client.chat import RenderedPrompt
from ..utils.arguments import PromptError

TOO_LONG = ("error", "truncate", "split")


@dataclass(frozen=True)
class Settings:
    """Options for dividing documents into passes and shards.

    Args:
        max_length: upper bound of a pass, in tokens.
        too_long: action for a longer document: "error", "truncate", or "split" it into several passes.
        shard_bytes: upper bound of a shard; a shard of one document may be larger.

    Raises:
        ValueError: an invalid value.
    """

    max_length: int
    too_long: str
    shard_bytes: int

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            raise ValueError(f"too_long={self.too_long!r}: expected one of {TOO_LONG}")
        for name in ("max_length", "shard_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")

    def passes(self, prompt: RenderedPrompt, what: str) -> Iterator[tuple[int, RenderedPrompt]]:
        """(position of its first token, its part of the document) of each pass. Raises PromptError: the document is too long."""
        count, most = len(prompt.token_ids), self.max_length
        if count <= most:
            yield 0, prompt
        elif self.too_long in ("truncate", "split"):
            starts = range(0, count, most) if self.too_long == "split" else (0,)
            try:
                yield from [(start, prompt.part(start, start + most)) for start in starts]
            except ValueError as error:
                raise PromptError(f"{what} has {count} tokens, and a pass {most} (max_length): {error}") from None
        else:
            raise PromptError(
                f"{what} has {count} tokens, and a pass takes {self.max_length} (max_length, at most max_model_len): "
                "too_long='split' gives it several passes, 'truncate' reads its beginning"
            )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of the vocabulary and of a tokenised sample text; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    words = sorted(tokenizer.get_vocab().items())
    sample = tokenizer("The quick  brown f\u00f6x,\n\tjumps over 1234567890 \u72ac! <s></s>")["input_ids"]
    return hashlib.sha256(repr((words, sample)).encode(errors="surrogatepass")).hexdigest()


def document_key(item: Any, read: Callable[[], RenderedPrompt]) -> bytes:
    """Hash of a document. A text is hashed as text, so that a resumed run need not read it."""
    if isinstance(item, str):
        return hashlib.sha256(b"text " + item.encode(errors="surrogatepass")).digest()
    prompt = read()
    found = hashlib.sha256(b"tokens " + np.asarray(prompt.token_ids, dtype=np.int64).tobytes())
    if prompt.embeds is not None:
        found.update(b"embeddings " + prompt.embeds.on_host().digest(0, len(prompt.token_ids)))
    for image in prompt.images:
        found.update(b"image " + image.content + image.positions.numpy().tobytes())
    return found.digest()


def documents_of(inputs: Iterable[Any], max_length: int) -> Iterator[Any]:
    """The documents of the input, lazily. A stream of tokens is cut into documents of `max_length` tokens.
    Raises PromptError: a single text or dict, or no iterable."""
    if isinstance(inputs, str | Mapping) or not isinstance(inputs, Iterable):
        raise PromptError(
            f"inputs is a {type(inputs).__name__}: expected an iterable of texts, of token ids, or of tokens"
        )
    if is_token_stream(inputs):
        stream: Any = inputs
        return (stream[start : start + max_length] for start in range(0, len(stream), max_length))
    items = iter(inputs)
    head = list(itertools.islice(items, 1))
    items = itertools.chain(head, items)
    return _cut(items, max_length) if head and isinstance(head[0], Integral) else items


def is_token_stream(inputs: Any) -> bool:
    """Whether the input is one tensor, array or list of tokens."""
    if isinstance(inputs, torch.Tensor | np.ndarray):
        return inputs.ndim == 1
    return isinstance(inputs, list | tuple) and bool(inputs) and isinstance(inputs[0], Integral)


def length_of(item: Any) -> int:
    """Tokens of a document of token ids; 0 if it has no length."""
    ids = item
    if isinstance(item, Mapping):
        ids = next((item[name] for name in ("input_ids", "prompt_token_ids", "prompt_embeds") if name in item), None)
    return len(ids) if isinstance(ids, Sized) else 0


def _cut(tokens: Iterator[Any], length: int) -> Iterator[list[int]]:
    while piece := list(itertools.islice(tokens, length)):
        yield piece
