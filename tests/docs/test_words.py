"""Docstrings begin with a noun or a verb; habits of prose may only become fewer."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers_words import (
    count_docs,
    count_package,
    count_python,
    docstrings_of,
    habits,
    long_sentences,
    wrong_beginnings,
)

import pymllm_interp

PACKAGE = Path(pymllm_interp.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
AT_MOST: dict[str, int] = {"entry": 2, "is none": 1, "long": 1, "ours": 3, "somebody": 1, "what": 3, "whose": 6}
"""Count -> most of the package; 0 if not named. A count that falls is lowered here; none is raised."""
IN_DOCS: dict[str, int] = {"any more": 1, "ours": 11, "somebody": 1, "what": 47}
"""As `AT_MOST`, of the committed pages of docs/."""


@pytest.mark.parametrize(
    ("count", "root", "at_most"),
    [(count_package, PACKAGE, AT_MOST), (count_docs, DOCS, IN_DOCS)],
    ids=["package", "docs"],
)
def test_habits_become_fewer(
    count: Callable[[Path], dict[str, Counter[str]]], root: Path, at_most: dict[str, int]
) -> None:
    found = count(root)
    total = sum(found.values(), Counter())
    assert total, "nothing was read"
    more = {
        (habit, count, at_most.get(habit, 0)): [path for path, counts in found.items() if counts[habit]]
        for habit, count in total.items()
        if count > at_most.get(habit, 0)
    }
    assert not more, f"(habit, found, at most): files: {more}; name the noun, at most twenty words a sentence"


def test_docstrings_and_comments_are_counted_and_code_is_not() -> None:
    source = '''
def f(x):
    """A request whose trace is read. `whose` is a name."""
    y = x is None  # those of the others,
    # but for one
    return "whose text goes on alone"
'''
    assert +count_python(source) == {"whose": 1, "those of": 1, "but for": 1}


@pytest.mark.parametrize(
    ("text", "habit"),
    [
        ("reads heads\nalone", "alone"), ("It goes on.", "goes on"), ("they go on", "goes on"), ("There is none.", "is none"),
        ("But for one", "but for"), ("THOSE OF all", "those of"), ("what it keeps", "what"), ("a kernel of ours", "ours"),
        ("no more steps", "any more"), ("so many rows", "so many"), ("nobody waits", "somebody"),
    ],
)  # fmt: skip
def test_a_habit_is_found(text: str, habit: str) -> None:
    assert habits(text)[habit] == 1 and sum(habits(text).values()) == 1
    assert not sum(habits("It is None, not what happens in no more than one step, and `but for` is code.").values())


BEGINNINGS = '''
def path_of(node):
    """{}"""

class Span:
    """A range of rows.

    Attributes:
        start: first row; of the batch.
        stop: {}
    """
    size: int = 0
    """{}"""
'''


@pytest.mark.parametrize(
    ("first", "entry", "field", "found"),
    [
        ("Return the path.", "row after the last.", "Number of rows.", {}),
        ("Path [rows] of a node.", "[rows] int64, rows after it.", "Whether it is whole.", {}),
        ("Where a node is.", "of the batch.", "What it holds.", {"first": 2, "entry": 1}),
        ("Returns the path.", "where it ends.", "[rows], of the batch.", {"first": 2, "entry": 1}),
        ("All paths.", "[rows], in the batch.", "Whether it is whole.", {"entry": 1}),
        ("The path.", "stop.", "None: all.", {"first": 1, "echo": 1}),
    ],
)
def test_a_wrong_beginning_is_found(first: str, entry: str, field: str, found: dict[str, int]) -> None:
    docstrings = docstrings_of(ast.parse(BEGINNINGS.format(first, entry, field)))
    assert +sum(map(wrong_beginnings, docstrings), Counter()) == found


def test_sentences_of_more_than_twenty_words_are_found() -> None:
    words = "word " * 19
    assert not long_sentences(f"A {words.strip()}. Another one: `some code of many words` counts as one.")
    assert len(long_sentences(f"A {words}word.")) == 1
    assert not long_sentences(f"Text::\n\n    {words}{words}")
    assert not long_sentences(f"Text.\n\nArgs:\n    a: {words}\n    b: {words}")
    assert len(long_sentences(f"Args:\n    a: {words}\n        {words}")) == 1
