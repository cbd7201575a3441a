"""Counts habits of prose: phrases that hide the noun, and sentences of more than twenty words."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LONGEST = 20
"""Words of a sentence of a docstring, at most."""
HABITS = {
    "alone": r"\balone\b",
    "whose": r"\bwhose\b",
    "those of": r"\bthose of\b",
    "goes on": r"\bgo(?:es)? on\b",
    "is none": r"\b(?:is|are) (?-i:none)\b",
    "but for": r"\bbut for\b",
}
"""Habit -> its pattern in text on one line. "alone" is mostly written for "only", and "goes on" for "continues"."""


def docstrings(source: str) -> Iterator[str]:
    """Docstrings, those under fields and constants included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield inspect.cleandoc(node.value.value)


def comments(source: str) -> Iterator[str]:
    """Blocks of comments, one text each: a sentence may go over several lines."""
    block: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1 and block:
                yield "\n".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            last = token.start[0]
    if block:
        yield "\n".join(block)


def page_text(page: str) -> str:
    """A Markdown page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def one_line(text: str) -> str:
    """The text on one line, with `CODE` for each piece of code in backticks."""
    return " ".join(re.sub(r"``.+?``|`[^`\n]+`", "CODE", text).split())


def habits(text: str) -> Counter[str]:
    """How often each habit is in the text."""
    line = one_line(text)
    return Counter({habit: len(re.findall(pattern, line, flags=re.IGNORECASE)) for habit, pattern in HABITS.items()})


def sentences(docstring: str) -> Iterator[str]:
    """The sentences of a docstring, without its indented code. Each entry of a list is a text of its own."""
    for block in re.split(r"\n\s*\n", docstring):
        heading, _, entries = block.partition(":\n")
        if re.fullmatch(r"[A-Z][a-z]+", heading):  # Args, Raises, Returns
            block = inspect.cleandoc("\n" + entries)
        elif all(line.startswith("    ") for line in block.splitlines()):
            continue
        for text in re.split(r"\n(?=- |\*{0,2}\w+(?:, \w+)*(?: \([^)]*\))?: )", block):
            yield from re.split(r"(?<=[.!?])\s+(?=[A-Z0-9(\"'])", one_line(text))


def long_sentences(docstring: str) -> list[str]:
    """The sentences of more than `LONGEST` words. A name in backticks is one word; a number or a bracket is not split."""
    return [text for text in sentences(docstring) if len(re.findall(r"\S*\w\S*", text)) > LONGEST]


def count_python(source: str) -> Counter[str]:
    """The habits of a file's docstrings and comments, and the long sentences of its docstrings."""
    texts = list(docstrings(source))
    counted = sum((habits(text) for text in (*texts, *comments(source))), Counter())
    counted["long"] = sum(len(long_sentences(text)) for text in texts)
    return counted


def count_rooms(package: Path, docs: Path) -> dict[str, Counter[str]]:
    """Top-level room of the package -> its counts. Files beside the rooms are "top".

    "docs" are the committed Markdown pages; their sentences are not counted.
    """
    rooms: dict[str, Counter[str]] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        rooms.setdefault(parts[0] if len(parts) > 1 else "top", Counter()).update(count_python(path.read_text()))
    pages = [page for page in sorted(docs.rglob("*.md")) if page.name != "api.md"]  # made from the docstrings
    rooms["docs"] = sum((habits(page_text(page.read_text())) for page in pages), Counter())
    return rooms
