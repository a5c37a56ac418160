"""Tables that fit the terminal: whole columns are dropped, the least important first, and never a letter.

Text wraps between words and after the slashes of a path; names stay on one line. Where not even the needed columns fit side by
side, each row becomes a short list.
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

from slipway.texts import printable

NEEDED = 0
"""Rank of a column that is never dropped."""

HINT = "more columns on a wider terminal, or with --json"

_GAP = 2
_WRAPPED_WIDTH = 24
"""A column of text is not made narrower than this while another can be dropped for it."""

_PIECE = re.compile(r"/*[^\s/]+/*|/+|\s+")
"""What text can be broken after: words, and the parts of a path."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: Its heading; may be empty.
        rank: 0 for a column that is never dropped; of the others, the highest goes first.
        wrap: Whether its cells may take several lines.
        right: Whether its cells are aligned to the right.
        width: For cells without a width of their own, such as bars.
        style: Of its cells.
    """

    name: str
    rank: int = NEEDED
    wrap: bool = False
    right: bool = False
    width: int = 0
    style: str = ""


class FittedTable:
    """A table without lines that is as wide as the terminal at most.

    Args:
        columns: From left to right; the first names the row.
        header: Whether headings are shown, and in which style; empty shows none.
        hint: What is said below when columns were dropped; empty says nothing.
    """

    def __init__(self, *columns: Column, header: str = "bold", hint: str = HINT) -> None:
        self._columns = columns
        self._header = header
        self._hint = hint
        self._rows: list[tuple[RenderableType, ...]] = []

    def add_row(self, *cells: RenderableType) -> None:
        """Append a row; a text is shown as it is, without markup, and nothing of it is obeyed."""
        self._rows.append(tuple(_shown(cell) for cell in cells))

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Any width will do."""
        return Measurement(1, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show what fits."""
        shown = self._fitting(options.max_width)
        if shown is None:
            yield from self._lists(options.max_width)
        else:
            yield self._table(shown, options.max_width)
        if self._hint and self.drops(options.max_width):
            yield wrapped(Text(self._hint, style="dim"), options.max_width)

    def drops(self, width: int) -> bool:
        """Whether columns are left out at this width."""
        shown = self._fitting(width)
        return (
            any(column.rank != NEEDED for column in self._columns) if shown is None else len(shown) < len(self._columns)
        )

    def _fitting(self, width: int) -> list[int] | None:
        """Numbers of the columns that fit; None when not even the needed ones do."""
        shown = list(range(len(self._columns)))
        while sum(self._least(number) for number in shown) + _GAP * (len(shown) - 1) > width:
            droppable = [number for number in shown if self._columns[number].rank != NEEDED]
            if not droppable:
                return None
            shown.remove(max(droppable, key=lambda number: (self._empty(number), self._columns[number].rank, number)))
        return shown

    def _empty(self, number: int) -> bool:
        cells = [row[number] for row in self._rows if number < len(row)]
        return all(isinstance(cell, Text) and not cell.plain for cell in cells)

    def _least(self, number: int) -> int:
        """The narrowest that a column may be."""
        column, natural = self._columns[number], self._natural(number)
        if not column.wrap:
            return natural
        pieces = [cell_len(piece) for cell in self._texts(number) for piece in _pieces(cell.plain)]
        return max([cell_len(column.name), min(natural, _WRAPPED_WIDTH), *pieces])

    def _natural(self, number: int) -> int:
        """The width at which nothing of a column wraps."""
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
        for place, (want, number) in enumerate(wanting):  # who wants least is served whole, the others share the rest
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
        """Each row below its name: ``heading: cell`` for the needed columns."""
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
    """Says once, below several tables without a hint of their own, that columns were dropped."""

    def __init__(self, *tables: FittedTable) -> None:
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show it where it is true."""
        if any(table.drops(options.max_width) for table in self._tables):
            yield wrapped(Text(HINT, style="dim"), options.max_width)


class Prose:
    """A text in lines of the terminal's width, with a coloured word before it."""

    def __init__(self, label: str, style: str, text: str | Text) -> None:
        self._text = Text.assemble(
            (printable(label), style), _clean(text) if isinstance(text, Text) else printable(text)
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show it."""
        yield wrapped(self._text, options.max_width)


def wrapped(text: Text, width: int) -> Text:
    """A text in lines of at most this width, broken between words and after slashes; letters only where nothing else fits."""
    return Text("\n").join(_lines(text, width))


def _shown(cell: RenderableType) -> RenderableType:
    """A cell as its width is measured: what the console replaces is replaced before."""
    if isinstance(cell, str):
        return Text(printable(cell))
    return _clean(cell) if isinstance(cell, Text) else cell


def _clean(text: Text) -> Text:
    """A styled text without what a terminal would obey; replaced one for one, so that styles stay where they are."""
    cleaned = text.copy()
    cleaned.plain = printable(text.plain)
    return cleaned


def _cell(row: Sequence[RenderableType], number: int, width: int) -> RenderableType:
    cell = row[number] if number < len(row) else ""
    return wrapped(cell, width) if isinstance(cell, Text) else cell


def _pieces(text: str) -> list[str]:
    return [piece for piece in _PIECE.findall(text) if not piece.isspace()]


def _lines(text: Text, width: int) -> list[Text]:
    return [line for paragraph in text.split("\n", allow_blank=True) for line in _paragraph(paragraph, max(width, 1))]


def _paragraph(text: Text, width: int) -> list[Text]:
    """Break one line; whitespace at a break is left out."""
    breaks, start, end = [], 0, 0  # of the line that is filled: its beginning, and the end of what it holds
    for match in _PIECE.finditer(text.plain):
        piece = match.group()
        if piece.isspace():
            continue
        if end > start and cell_len(text.plain[start : match.end()]) > width:
            breaks.append(match.start())
            start = match.start()
        while cell_len(text.plain[start : match.end()]) > width:  # a piece that is wider than a line
            start += _fitting_letters(text.plain[start : match.end()], width)
            breaks.append(start)
        end = match.end()
    lines = list(text.divide(breaks))
    for line in lines:
        line.rstrip()
    return lines


def _fitting_letters(text: str, width: int) -> int:
    """How many letters fit; at least one."""
    count, taken = 0, 0
    for letter in text:
        taken += cell_len(letter)
        if taken > width:
            break
        count += 1
    return max(count, 1)
