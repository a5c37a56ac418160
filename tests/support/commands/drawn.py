"""Compute the content of a terminal after a program has overwritten parts of it."""

from __future__ import annotations

import re

_PIECE = re.compile(
    r"\x1b\[(?P<count>\d*)(?:;\d+)*(?P<what>[A-Za-z])|\x1b\[\?\d+[a-z]|(?P<move>[\r\n])|(?P<text>[^\x1b\r\n]+)"
)


def left_on_screen(raw: str) -> list[str]:
    """Return the remaining lines of a terminal of unlimited height.

    Args:
        raw: All that was written to it, with control sequences; of those, moves up, erased lines and returns count.
    """
    lines, row, column = [""], 0, 0
    for piece in _PIECE.finditer(raw):
        if piece["what"] == "A":
            row = max(0, row - int(piece["count"] or 1))
        elif piece["what"] == "K":
            lines[row] = ""
        elif piece["move"] == "\r":
            column = 0
        elif piece["move"] == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif piece["text"]:
            kept = lines[row].ljust(column)
            lines[row] = kept[:column] + piece["text"] + kept[column + len(piece["text"]) :]
            column += len(piece["text"])
    return [line.rstrip() for line in lines]
