"""Counts habits of prose in docstrings and comments: texts that do not begin with a noun or a verb, and long sentences."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONGEST = 20
"""Words of a sentence of a docstring, at most."""
HABITS = {
    "alone": r"\balone\b",
    "any more": r"\b(?:any|no) more\b(?! than)",
    "but for": r"\bbut for\b",
    "goes on": r"\b(?:go(?:es)?|going|went) on\b",
    "is none": r"\b(?:is|are) (?-i:none)\b",
    "ours": r"\b(?:ours|theirs)\b",
    "somebody": r"\b(?:some|no|any|every)body\b",
    "so many": r"\bso (?:many|much)\b",
    "those of": r"\bthose of\b",
    "what": r"\bwhat (?:is|are|was|were|it|they|the|a|an|its|their|no|one)\b",
    "whose": r"\bwhose\b",
}
"""Habit -> its pattern in text on one line. "alone" is mostly written for "only", and "what it keeps" for a noun."""
RELATIVES = "how that what when where which who whom whose why".split()
PREPOSITIONS = """after against among as at before behind beside between beyond by for from if in into of on over per than
through to under unlike upon via with within without""".split()
NO_NOUN = frozenset((*RELATIVES, *PREPOSITIONS, *"are has he is it nothing none not see they was".split()))
"""First words of texts without a noun or a verb in front."""
THIRD_PERSON = frozenset(
    """adds allocates asks compiles computes copies does drops ends finds forgets gets gives has keeps lets
    loads looks makes merges puts raises registers removes returns runs sends serves sets splits stops takes tells
    turns waits writes""".split()
)
"""First words of functions that are written in the imperative, as in "Return"."""
ENTRY = re.compile(r"\*{0,2}\w+(?:, \*{0,2}\w+)*(?: \([^)]*\))?: (.*)")


class Docstring(NamedTuple):
    """A docstring, with the statement that it describes: a definition, a module, or an assignment to a field or constant."""

    node: ast.AST
    line: int
    text: str

    @property
    def is_function(self) -> bool:
        """Whether it describes a function, which is written in the imperative, or as the noun that it returns."""
        return isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef)

    @property
    def name(self) -> str:
        """Name of a function or class, else ""."""
        return getattr(self.node, "name", "")


def docstrings_of(tree: ast.AST) -> Iterator[Docstring]:
    """Docstrings, those under fields and constants included."""
    nodes = [tree]
    for node in nodes:  # statements only: expressions have none
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, name, ())
        above: ast.AST = node
        for statement in getattr(node, "body", ()):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield Docstring(above, statement.lineno, inspect.cleandoc(value.value))
            above = statement


def first_word(text: str) -> str:
    """The first word in lower case, without the shape in brackets, and a comma, before it."""
    return re.split(r"[\s,.:;)]", re.sub(r"^\[[^\]]*\], ", "", text), maxsplit=1)[0].lower()


def entries(docstring: str) -> Iterator[str]:
    """Texts of the entries in its sections of arguments, attributes and results."""
    for block in re.split(r"\n\s*\n", docstring):
        heading, _, body = block.partition(":\n")
        if heading in ("Args", "Attributes"):
            yield from (found[1] for line in inspect.cleandoc("\n" + body).splitlines() if (found := ENTRY.match(line)))
        elif heading in ("Returns", "Yields"):
            yield body.strip()


def repeats_its_name(docstring: Docstring) -> bool:
    """Whether it has at most four words, all of them from the name, as in "Close the link." for `close_link`."""
    words = set(re.findall(r"[a-z]+", docstring.text.lower())) - {"a", "an", "the", "it", "of", "its", "this"}
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", docstring.name).lower().replace("_", " ")
    return len(words) <= 4 and words <= {
        form for word in spaced.split() for form in (word, word + "s", word + "d", word + "ed")
    }


def wrong_beginnings(docstring: Docstring) -> Counter[str]:
    """Counts of "entry" and "first": entries and docstrings with a wrong first word; of "echo": see `repeats_its_name`."""
    word = first_word(docstring.text)
    return Counter(
        entry=sum(first_word(text) in {*RELATIVES, *PREPOSITIONS} for text in entries(docstring.text)),
        first=word in NO_NOUN or (docstring.is_function and word in THIRD_PERSON),
        echo=bool(docstring.name) and repeats_its_name(docstring),
    )


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
    """The sentences of a docstring, without its tables and indented code. Each entry of a list is a text of its own."""
    for block in re.split(r"\n\s*\n", docstring):
        heading, _, body = block.partition(":\n")
        if re.fullmatch(r"[A-Z][a-z]+", heading):  # Args, Raises, Returns
            block = inspect.cleandoc("\n" + body)
        elif block.startswith("|") or all(line.startswith("    ") for line in block.splitlines()):
            continue
        for text in re.split(r"\n(?=- |\*{0,2}[\w.]+(?:, [\w.]+)*(?: \([^)]*\))?: )", block):
            yield from re.split(r"(?<=[.!?])\s+(?=[A-Z0-9(\"'])", one_line(text))


def long_sentences(docstring: str) -> list[str]:
    """The sentences of more than `LONGEST` words. A name in backticks is one word; a number or a bracket is not split."""
    return [text for text in sentences(docstring) if len(re.findall(r"\S*\w\S*", text)) > LONGEST]


def count_python(source: str) -> Counter[str]:
    """Counts of a file: habits of docstrings and comments, wrong beginnings and long sentences of docstrings."""
    docstrings = list(docstrings_of(ast.parse(source)))
    counted = habits("\n.\n".join([*comments(source), *(docstring.text for docstring in docstrings)]))
    for docstring in docstrings:
        counted.update(wrong_beginnings(docstring))
        counted["long"] += len(long_sentences(docstring.text))
    return counted


def count_package(package: Path) -> dict[str, Counter[str]]:
    """File -> its counts."""
    return {
        path.relative_to(package).as_posix(): count_python(path.read_text()) for path in sorted(package.rglob("*.py"))
    }


def count_docs(docs: Path) -> dict[str, Counter[str]]:
    """Committed Markdown page -> its habits."""
    pages = [page for page in sorted(docs.rglob("*.md")) if page.name != "api.md"]  # made from the docstrings
    return {page.relative_to(docs).as_posix(): habits(page_text(page.read_text())) for page in pages}
