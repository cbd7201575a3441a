"""Documents in files: JSONL and Parquet. A plan numbers them; whoever computes a unit reads its documents."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

COLUMNS = ("text", "input_ids")
"""Default columns of documents: the first one that exists."""
SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class SourceFile:
    """A file of documents, as it was when the plan was made."""

    path: str
    kind: str
    """jsonl or parquet."""
    bytes: int
    digest: str
    """SHA-256 of the file's size and its last MiB, where Parquet has its table of contents."""


@dataclass(frozen=True)
class Portion:
    """Consecutive documents of one file."""

    file: int
    """Its index in the plan."""
    start: int
    """Position of its first document: the byte in a JSONL file, the row in a Parquet file."""
    documents: int


def source_of(path: Path) -> SourceFile:
    """Describe a file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: its name says neither JSONL nor Parquet.
    """
    kind = SUFFIXES.get(path.suffix)
    if kind is None:
        raise ValueError(f"{path}: expected a file of the type {', '.join(SUFFIXES)}")
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - (1 << 20)))
        digest = hashlib.sha256(str(size).encode() + file.read()).hexdigest()
    return SourceFile(str(path), kind, size, digest)


def check_unchanged(source: SourceFile) -> None:
    """Raise ValueError if the file has changed."""
    if not os.path.exists(source.path) or source_of(Path(source.path)) != source:
        raise ValueError(f"{source.path} is not the file that the plan was made of: it is missing, or was changed")


def portions_of(number: int, source: SourceFile, documents: int) -> Iterator[Portion]:
    """A file's documents in portions of at most `documents`."""
    if source.kind == "parquet":
        rows = _parquet(source.path).metadata.num_rows
        yield from (Portion(number, at, min(documents, rows - at)) for at in range(0, rows, documents))
        return
    start = position = count = 0
    with open(source.path, "rb") as file:
        for line in file:
            position += len(line)
            count += bool(line.strip())
            if count == documents:
                yield Portion(number, start, count)
                start, count = position, 0
    if count:
        yield Portion(number, start, count)


def read_portion(source: SourceFile, portion: Portion, column: str | None) -> list[Any]:
    """The documents of a portion: texts, or lists of token ids.
    Raises ValueError: the file has no such column, fewer documents, or a line that is not JSON."""
    read = _read_parquet if source.kind == "parquet" else _read_jsonl
    found = list(read(source.path, portion, column))
    if len(found) != portion.documents:
        raise ValueError(
            f"{source.path} has {len(found)} documents from {portion.start} on, not {portion.documents}: it was changed"
        )
    return found


def _read_jsonl(path: str, portion: Portion, column: str | None) -> Iterator[Any]:
    with open(path, "rb") as file:
        file.seek(portion.start)
        start, left = portion.start, portion.documents
        while left and (line := file.readline()):
            if line.strip():
                left -= 1
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError) as error:  # other bytes than text, and deep nesting, too
                    raise ValueError(f"{path}: the line at byte {start} is not JSON ({error})") from error
                yield _document(found, path, column)
            start += len(line)


def _document(found: Any, path: str, column: str | None) -> Any:
    """A line's document: itself, or one of its fields."""
    if not isinstance(found, dict):
        return found
    name = _column(found, path, column)
    return found[name]


def _column(names: Iterable[str], path: str, column: str | None) -> str:
    known = list(names)
    for name in (column,) if column is not None else COLUMNS:
        if name in known:
            return name
    raise ValueError(
        f"{path} has no column {column or ' or '.join(COLUMNS)}; there is {', '.join(map(str, known[:20]))} (column=)"
    )


def _read_parquet(path: str, portion: Portion, column: str | None) -> Iterator[Any]:
    file = _parquet(path)
    name, at = _column(file.schema_arrow.names, path, column), 0
    end = portion.start + portion.documents
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        first, last = max(portion.start - at, 0), min(end - at, rows)
        if first < last:
            yield from file.read_row_group(group, columns=[name])[name].slice(first, last - first).to_pylist()
        at += rows


def _parquet(path: str) -> Any:
    return pyarrow("Parquet files")[1].ParquetFile(path)


def pyarrow(what: str) -> tuple[Any, Any]:
    """The packages `pyarrow` and `pyarrow.parquet`. Raises ImportError, of `what`, if they are missing."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ImportError(f"{what} need pyarrow: pip install pyarrow ({error})") from error
    return arrow, parquet


def write_jsonl(documents: Iterable[Any], path: Path) -> None:
    """Write documents of an iterable, each a text or token ids, as a JSONL file. Raises TypeError: a document that is neither."""
    with open(path, "w") as file:
        for number, document in enumerate(documents):
            file.write(json.dumps(_plain(document, number)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _plain(document: Any, number: int) -> Any:
    if isinstance(document, dict) and "input_ids" in document:
        if document.get("pixel_values") is not None:
            raise TypeError(
                f"document {number} has images: units of a corpus hold text and token ids; call lm.harvest, or lm.imap"
            )
        document = document["input_ids"]
    if isinstance(document, str):
        return document
    if isinstance(document, torch.Tensor | np.ndarray):
        document = document.tolist()
    if not isinstance(document, Sequence) or not all(isinstance(token, int) for token in document):
        raise TypeError(f"document {number} is a {type(document).__name__}: expected a text or token ids")
    return list(document)
