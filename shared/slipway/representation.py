"""How a value shows itself to a person: three lines at a prompt, and HTML in a notebook, in which every text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from slipway.texts import one_line, printable, redact, shortened

_LONGEST_LINE = 300


def three_lines(first: str, second: str, third: str) -> str:
    """Return three lines, each without secrets and line ends, and of limited length."""
    return "\n".join(shortened(one_line(redact(text)), _LONGEST_LINE).strip() for text in (first, second, third))


def named_few(names: Sequence[str], *, most: int = 6) -> str:
    """Join the first names, and count the others."""
    others = len(names) - most
    return ", ".join(names) if others <= 0 else f"{', '.join(names[:most])} and {others} more"


def preformatted(text: str) -> str:
    """Return HTML that shows a text with its lines and indentation."""
    return f"<pre>{html.escape(printable(redact(text)))}</pre>"


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return HTML of a table."""
    head = "".join(f"<th>{escaped(text)}</th>" for text in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escaped(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def framed(document: str, *, title: str, height_rem: float) -> str:
    """Return HTML that shows a whole document in a frame of its own, whose styles do not reach the page and which runs no script.

    Args:
        document: The document.
        title: What is in the frame.
        height_rem: Height of the frame; a longer document is scrolled.
    """
    style = f"width: 100%; height: {height_rem:g}rem; border: 0"
    return f'<iframe sandbox="" title="{escaped(title)}" style="{style}" srcdoc="{html.escape(document)}"></iframe>'


def escaped(text: str) -> str:
    """Return a text as HTML on one line, without secrets."""
    return html.escape(one_line(redact(text)))
