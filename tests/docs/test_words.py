"""Habits of prose in docstrings, comments and docs may only become fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_words import HABITS, count_python, count_rooms, habits, long_sentences

import pymllm_interp

PACKAGE = Path(pymllm_interp.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
COLUMNS = (*HABITS, "long")
AT_MOST = {
    "attention": (0, 0, 0, 0, 0, 0, 1),
    "bench": (0, 0, 0, 0, 0, 0, 0),
    "client": (0, 1, 4, 1, 3, 1, 11),
    "cluster": (0, 0, 0, 0, 0, 0, 0),
    "core": (0, 0, 0, 0, 0, 0, 0),
    "docs": (8, 0, 2, 0, 0, 0, 0),
    "engine": (0, 2, 2, 1, 0, 0, 1),
    "evals": (0, 0, 0, 0, 0, 0, 0),
    "harvest": (0, 0, 0, 0, 0, 0, 0),
    "hooks": (4, 10, 4, 7, 0, 0, 16),
    "kernels": (0, 0, 0, 0, 0, 0, 0),
    "layers": (0, 0, 0, 0, 0, 0, 1),
    "lens": (0, 0, 0, 0, 0, 0, 0),
    "mem_cache": (0, 0, 0, 0, 0, 0, 0),
    "models": (0, 0, 0, 0, 0, 0, 1),
    "plots": (0, 0, 0, 0, 0, 0, 0),
    "runner": (0, 1, 0, 0, 0, 0, 4),
    "sampling": (0, 0, 0, 0, 0, 0, 0),
    "speculative": (0, 0, 0, 0, 0, 0, 0),
    "server": (0, 2, 0, 0, 0, 0, 2),
    "toolkit": (0, 0, 0, 0, 0, 0, 1),
    "top": (0, 0, 0, 0, 0, 0, 3),
    "utils": (0, 0, 0, 0, 0, 0, 0),
    "vllm_engine": (0, 0, 0, 0, 0, 0, 0),
    "wire": (0, 0, 0, 0, 0, 0, 0),
}
"""Room -> counts, in the order of `COLUMNS`. A count that falls is lowered here; none is raised."""


def test_habits_become_fewer() -> None:
    counts = count_rooms(PACKAGE, DOCS)
    assert counts.keys() <= AT_MOST.keys()
    more = {
        (room, habit): (counts[room][habit], most)
        for room, row in AT_MOST.items()
        for habit, most in zip(COLUMNS, row, strict=True)
        if counts[room][habit] > most
    }
    assert not more, f"(room, habit): (found, at most): {more}; name the noun, at most twenty words a sentence"


def test_docstrings_and_comments_are_counted_and_code_is_not() -> None:
    source = '''
def f(x):
    """A request whose trace is read. `whose` is a name."""
    y = x is None  # those of the others,
    # but for one
    return "whose text goes on alone"
'''
    counted = count_python(source)
    assert {habit: counted[habit] for habit in COLUMNS if counted[habit]} == {"whose": 1, "those of": 1, "but for": 1}


@pytest.mark.parametrize(
    ("text", "habit"),
    [
        ("reads heads\nalone", "alone"), ("It goes on.", "goes on"), ("they go on", "goes on"), ("There is none.", "is none"),
        ("But for one", "but for"), ("THOSE OF all", "those of"),
    ],
)  # fmt: skip
def test_a_habit_is_found(text: str, habit: str) -> None:
    assert habits(text)[habit] == 1 and sum(habits(text).values()) == 1
    assert not sum(habits("It is None, and `but for` is code.").values())


def test_sentences_of_more_than_twenty_words_are_found() -> None:
    words = "word " * 19
    assert not long_sentences(f"A {words.strip()}. Another one: `some code of many words` counts as one.")
    assert len(long_sentences(f"A {words}word.")) == 1
    assert not long_sentences(f"Text::\n\n    {words}{words}")
    assert not long_sentences(f"Text.\n\nArgs:\n    a: {words}\n    b: {words}")
    assert len(long_sentences(f"Args:\n    a: {words}\n        {words}")) == 1
