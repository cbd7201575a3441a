"""Documents of a harvest: texts, token ids, or one stream of tokens."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch

from ..engine.prompts import PromptError

TOO_LONG = ("error", "truncate", "split")


@dataclass(frozen=True)
class Settings:
    """How documents become passes and shards.

    Args:
        max_length: tokens of one pass at most.
        too_long: what becomes of a document with more: "error", "truncate", or "split" into passes of their own.
        shard_bytes: of states and index in a shard at most, unless one document alone has more.

    Raises:
        ValueError: a value that is none of these.
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

    def passes(self, ids: list[int], what: str) -> Iterator[tuple[int, list[int]]]:
        """(position of its first token, tokens) of each pass over a document.

        Raises:
            PromptError: it is too long.
        """
        if len(ids) <= self.max_length:
            yield 0, ids
        elif self.too_long == "truncate":
            yield 0, ids[: self.max_length]
        elif self.too_long == "split":
            yield from ((start, ids[start : start + self.max_length]) for start in range(0, len(ids), self.max_length))
        else:
            raise PromptError(
                f"{what} has {len(ids)} tokens, and a pass takes {self.max_length} (max_length, at most max_model_len): "
                "too_long='split' gives it several passes, 'truncate' reads its beginning"
            )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of its words and of how it splits a text; empty for none."""
    if tokenizer is None:
        return ""
    words = sorted(tokenizer.get_vocab().items())
    sample = tokenizer("The quick  brown f\u00f6x,\n\tjumps over 1234567890 \u72ac! <s></s>")["input_ids"]
    return hashlib.sha256(repr((words, sample)).encode(errors="surrogatepass")).hexdigest()


def documents_of(inputs: Iterable[Any], max_length: int) -> Iterator[Any]:
    """The input's documents, as they come. A stream of tokens is cut into documents of `max_length`.

    Raises:
        PromptError: a single text or dict, or nothing that can be iterated over.
    """
    if isinstance(inputs, str | Mapping) or not isinstance(inputs, Iterable):
        raise PromptError(
            f"inputs is a {type(inputs).__name__}: expected an iterable of texts, of token ids, or of tokens"
        )
    if _is_stream(inputs):
        stream: Any = inputs
        return (stream[start : start + max_length] for start in range(0, len(stream), max_length))
    items = iter(inputs)
    head = list(itertools.islice(items, 1))
    items = itertools.chain(head, items)
    return _cut(items, max_length) if head and isinstance(head[0], Integral) else items


def _key(item: Any, ids: list[int]) -> bytes:
    """Tells documents apart. A text's is the text: what was harvested need not be tokenised again."""
    given = item.encode(errors="surrogatepass") if isinstance(item, str) else np.asarray(ids, dtype=np.int64).tobytes()
    return hashlib.sha256((b"text " if isinstance(item, str) else b"tokens ") + given).digest()


def _is_stream(inputs: Any) -> bool:
    """Whether it is one tensor, array or list of tokens."""
    if isinstance(inputs, torch.Tensor | np.ndarray):
        return inputs.ndim == 1
    return isinstance(inputs, list | tuple) and bool(inputs) and isinstance(inputs[0], Integral)


def _length(item: Any) -> int:
    ids = item.get("input_ids") if isinstance(item, Mapping) else item
    return len(ids) if isinstance(ids, Sized) else 0


def _cut(tokens: Iterator[Any], length: int) -> Iterator[list[int]]:
    while piece := list(itertools.islice(tokens, length)):
        yield piece
