"""Draw tables that fit the terminal by dropping whole columns, the least important first; cells are never cut.

Text wraps between words and after the slashes of a path; names stay on one line. If not even the needed columns fit side by side,
each row becomes a short list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from slipway.texts import printable, redact

NEEDED = 0
"""Rank of a column that is never dropped."""

HINT = "more columns on a wider terminal, or with --json"

_GAP = 2
_WRAPPED_WIDTH = 24
"""Columns of text stay at least this wide while another column can be dropped instead."""

_PIECE = re.compile(r"/*[^\s/]+/*|/+|\s+")
"""Pieces between which text can be broken: words, and the parts of a path."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: Its heading; may be empty.
        rank: 0 for a column that is never dropped; among the others, the highest is dropped first.
        wrap: Whether its cells may have several lines.
        right: Whether its cells are aligned to the right.
        width: Width of cells that have none of their own, such as bars.
        style: Style of its cells.
    """

    name: str
    rank: int = NEEDED
    wrap: bool = False
    right: bool = False
    width: int = 0
    style: str = ""


class FittedTable:
    """A table without lines that is at most as wide as the terminal.

    Args:
        columns: Columns from left to right; the first names the row.
        header: Style of the headings; empty shows none.
        hint: Text below the table if columns were dropped; empty for none.
    """

    def __init__(self, *columns: Column, header: str = "bold", hint: str = HINT) -> None:
        self._columns = columns
        self._header = header
        self._hint = hint
        self._rows: list[tuple[RenderableType, ...]] = []

    def add_row(self, *cells: RenderableType) -> None:
        """Append a row; texts are shown literally, without markup and terminal commands."""
        self._rows.append(tuple(_clean_cell(cell) for cell in cells))

    @property
    def row_count(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Accept any width."""
        return Measurement(1, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show the columns that fit."""
        shown = self._fitting_columns(options.max_width)
        if shown is None:
            yield from self._lists(options.max_width)
        else:
            yield self._table(shown, options.max_width)
        if self._hint and self.drops(options.max_width):
            yield wrap(Text(self._hint, style="dim"), options.max_width)

    def drops(self, width: int) -> bool:
        """Return whether columns are dropped at this width."""
        shown = self._fitting_columns(width)
        return (
            any(column.rank != NEEDED for column in self._columns) if shown is None else len(shown) < len(self._columns)
        )

    def _fitting_columns(self, width: int) -> list[int] | None:
        """Return the numbers of the columns that fit; None if not even the needed ones do."""
        shown = list(range(len(self._columns)))
        while sum(self._least(number) for number in shown) + _GAP * (len(shown) - 1) > width:
            droppable = [number for number in shown if self._columns[number].rank != NEEDED]
            if not droppable:
                return None
            shown.remove(
                max(droppable, key=lambda number: (self._is_empty(number), self._columns[number].rank, number))
            )
        return shown

    def _is_empty(self, number: int) -> bool:
        cells = [row[number] for row in self._rows if number < len(row)]
        return all(isinstance(cell, Text) and not cell.plain for cell in cells)

    def _least(self, number: int) -> int:
        """Return the smallest width of a column."""
        column, natural = self._columns[number], self._natural(number)
        if not column.wrap:
            return natural
        pieces = [cell_len(piece) for cell in self._texts(number) for piece in _pieces(cell.plain)]
        return max([cell_len(column.name), min(natural, _WRAPPED_WIDTH), *pieces])

    def _natural(self, number: int) -> int:
        """Return the width at which no cell of a column wraps."""
        column = self._columns[number]
        heading = cell_len(column.name) if self._header else 0
        lines = [cell_len(line) for cell in self._texts(number) for line in cell.plain.split("\n")]
        return max([heading, column.width, *lines])

    def _texts(self, number: int) -> list[Text]:
        cells = (row[number] for row in self._rows if number < len(row))
        return [cell for cell in cells if isinstance(cell, Text)]

    def _table(self, shown: Sequence[int], width: int) -> Table:
        widths = {number: self._least(number) for number in shown}
        spare = width - sum(widths.values()) - _GAP * (len(shown) - 1)
        wanting = sorted((self._natural(number) - widths[number], number) for number in shown)
        for place, (want, number) in enumerate(
            wanting
        ):  # the smallest wish is granted first, the others share the rest
            given = min(want, spare // (len(wanting) - place))
            widths[number] += given
            spare -= given
        table = Table(
            box=None,
            pad_edge=False,
            padding=(0, _GAP, 0, 0),
            show_header=bool(self._header),
            header_style=self._header,
        )
        for number in shown:
            column = self._columns[number]
            table.add_column(
                Text(column.name),
                width=widths[number],
                justify="right" if column.right else "left",
                no_wrap=True,
                style=column.style or None,
            )
        for row in self._rows:
            table.add_row(*(_cell(row, number, widths[number]) for number in shown))
        return table

    def _lists(self, width: int) -> Iterable[Text]:
        """Yield each row as a list below its name: ``heading: cell`` for the needed columns."""
        needed = [number for number, column in enumerate(self._columns) if column.rank == NEEDED]
        if self._header and self._columns[needed[0]].name:
            yield Text(self._columns[needed[0]].name, style=self._header)
        for row in self._rows:
            for number in needed:
                cell = row[number] if number < len(row) else ""
                if not isinstance(cell, Text) or not cell.plain:
                    continue
                name = self._columns[number].name
                first = number == needed[0]
                text = cell if first else Text.assemble((f"{name}: ", "dim") if name and self._header else "", cell)
                indent = "" if first else "  "
                for line in _lines(text, width - len(indent)):
                    yield Text.assemble(indent, line)


class SharedHint:
    """A hint below several tables without own hints, shown once if columns were dropped."""

    def __init__(self, *tables: FittedTable) -> None:
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show the hint if a table drops columns."""
        if any(table.drops(options.max_width) for table in self._tables):
            yield wrap(Text(HINT, style="dim"), options.max_width)


class Prose:
    """A text in lines of the terminal's width, with a coloured word before it."""

    def __init__(self, label: str, style: str, text: str | Text) -> None:
        self._text = Text.assemble(
            (printable(label), style), _clean_text(text) if isinstance(text, Text) else printable(redact(text))
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show the text."""
        yield wrap(self._text, options.max_width)


def wrap(text: Text, width: int) -> Text:
    """Wrap a text to this width, between words and after slashes; break within a word only if it is too long for a line."""
    return Text("\n").join(_lines(text, width))


def _clean_cell(cell: RenderableType) -> RenderableType:
    """Return a cell with unsafe characters already replaced, so that its width is measured correctly."""
    if isinstance(cell, str):
        return Text(printable(redact(cell)))
    return _clean_text(cell) if isinstance(cell, Text) else cell


def _clean_text(text: Text) -> Text:
    """Return a styled text without secrets and terminal commands; it keeps the styles of its parts if it has no secret."""
    shown = redact(text.plain)
    if shown != text.plain:
        return Text(printable(shown), style=text.style)
    cleaned = text.copy()
    cleaned.plain = printable(shown)  # one for one, so that styles keep their places
    return cleaned


def _cell(row: Sequence[RenderableType], number: int, width: int) -> RenderableType:
    cell = row[number] if number < len(row) else ""
    return wrap(cell, width) if isinstance(cell, Text) else cell


def _pieces(text: str) -> list[str]:
    return [piece for piece in _PIECE.findall(text) if not piece.isspace()]


def _lines(text: Text, width: int) -> list[Text]:
    return [line for paragraph in text.split("\n", allow_blank=True) for line in _paragraph(paragraph, max(width, 1))]


def _paragraph(text: Text, width: int) -> list[Text]:
    """Break one line; whitespace at a break is left out."""
    breaks, start, end = [], 0, 0  # start and end of the current line
    for match in _PIECE.finditer(text.plain):
        piece = match.group()
        if piece.isspace():
            continue
        if end > start and cell_len(text.plain[start : match.end()]) > width:
            breaks.append(match.start())
            start = match.start()
        while cell_len(text.plain[start : match.end()]) > width:  # a piece that is wider than a line
            start += _count_fitting_letters(text.plain[start : match.end()], width)
            breaks.append(start)
        end = match.end()
    lines = list(text.divide(breaks))
    for line in lines:
        line.rstrip()
    return lines


def _count_fitting_letters(text: str, width: int) -> int:
    """Return how many letters fit; at least one."""
    count, taken = 0, 0
    for letter in text:
        taken += cell_len(letter)
        if taken > width:
            break
        count += 1
    return max(count, 1)
