"""Environments of the templates: HTML escapes every value; Markdown escapes values with a filter."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from slipway.results.report import figures
from slipway.texts import counted, one_line, printable

# Characters that begin markup anywhere: code, emphasis, a table's cell, strikethrough, a link (also a bare address, which some
# readers turn into a link), mathematics, an escape.
_MARKUP = re.compile(r"[`*|~\[$]|\\(?=[!-/:-@\[-`{-~]|$)|(?<![^\W_])_+|_+(?![^\W_])|:(?=//)|(?<=www)\.", re.IGNORECASE)
# Characters that begin a heading, a list or a quotation at the start of a line.
_BLOCK = re.compile(r"^(?=[#+=>-])|^(\d{1,9})(?=[.)])")
_ENTITY = re.compile(r"&(?=#?\w+;)")
_FIGURES = ("size", "small", "share", "percent", "milliseconds", "rate", "number", "duration", "times")


def html_environment(package: str = "slipway.results.report", folder: str = "") -> Environment:
    """Return the environment for pages; it escapes every value except :class:`markupsafe.Markup`.

    Args:
        package: Package with the templates.
        folder: Their folder in it.
    """
    return _environment(PackageLoader(package, package_path=folder), autoescape=True)


def markdown_environment() -> Environment:
    """Return the environment for Markdown; templates must pass values from outside through the filter ``text`` or ``code``."""
    environment = _environment(PackageLoader("slipway.results.report", package_path=""), keep_trailing_newline=True)
    environment.filters.update(text=markdown_text, code=markdown_code)
    return environment


def markdown_text(value: object) -> str:
    """Escape any text as one line of Markdown that shows only this text: no markup, no HTML, no further table cell.

    Only characters that would be markup are escaped, because people read the source of the file too.
    """
    text = one_line(str(value))
    text = _MARKUP.sub(lambda match: "".join(f"\\{letter}" for letter in match.group()), text)
    text = _BLOCK.sub(r"\g<0>\\", text)
    return _ENTITY.sub("&amp;", text).replace("<", "&lt;")


def markdown_code(name: str) -> str:
    """Format a plain name as code."""
    return f"`{name}`"


def _clean_value(value: object) -> object:
    """Make a value safe to show: replace characters that would hide or reorder the text around them."""
    return type(value)(printable(value)) if isinstance(value, str) else value


def _environment(loader: PackageLoader, **options: Any) -> Environment:
    environment = Environment(  # noqa: S701 - in Markdown, which is not HTML, filters escape the values
        loader=loader,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean_value,
        **options,
    )
    environment.filters.update({name: getattr(figures, name) for name in _FIGURES}, counted=counted)
    return environment
