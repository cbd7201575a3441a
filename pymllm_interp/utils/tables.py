"""Tables of results: HTML in notebooks, and rich's on a terminal."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable

MAX_ROWS = 60
"""Rows that are shown; the last line counts the others."""
MAX_CHARS = 400
"""Characters of a cell that are shown."""


@dataclass(frozen=True)
class Table:
    """A title, names of columns, and rows of cells. Cells are shown as text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]] = field(default_factory=list)

    def html(self) -> str:
        """A table without scripts and without links to anything outside."""
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        style = "text-align:left;vertical-align:top;white-space:pre-wrap"
        body = "".join(
            f"<tr>{''.join(f'<td style={style!r}>{escape(cell)}</td>' for cell in row)}</tr>" for row in self._shown()
        )
        caption = f"<caption style={'text-align:left'!r}>{escape(self.title)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def rich(self) -> RichTable:
        """A table that rich prints."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=Text(self.title), title_justify="left")
        for column in self.columns:
            table.add_column(Text(column))
        for row in self._shown():
            table.add_row(*map(Text, row))  # as Text: a prompt may hold rich's markup
        return table

    def _shown(self) -> list[list[str]]:
        rows = [[_cut(str(cell)) for cell in row] for row in self.rows[:MAX_ROWS]]
        more = len(self.rows) - MAX_ROWS
        return rows if more <= 0 else [*rows, [f"and {more} more", *[""] * (len(self.columns) - 1)]]


class Shown:
    """An object that notebooks and rich show as a table."""

    @abstractmethod
    def table(self) -> Table:
        """The contents as a table."""

    def _repr_html_(self) -> str:
        return self.table().html()

    def __rich__(self) -> RichTable:
        return self.table().rich()


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ... ({len(text)} characters)"
