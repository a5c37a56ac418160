"""The templates' environments: HTML escapes by itself; Markdown escapes where a template says so."""

from __future__ import annotations

import re

from jinja2 import Environment, PackageLoader, StrictUndefined

from slipway.report import figures

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#|!~])")
_SPACE = re.compile(r"\s+")
_FIGURES = (
    *("size", "small", "share", "percent", "milliseconds", "rate", "number", "duration"),
    *("prompt_speed", "generation_speed", "times"),
)


def html_environment() -> Environment:
    """For pages: every value is escaped unless it is :class:`markupsafe.Markup`."""
    return _with_filters(
        Environment(loader=_loader(), undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    )


def markdown_environment() -> Environment:
    """For Markdown: values from outside go through the ``text`` or ``code`` filter."""
    environment = Environment(  # noqa: S701 - Markdown, not HTML; names are escaped by the filters below
        loader=_loader(), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["text"] = markdown_text
    return _with_filters(environment)


def markdown_text(value: object) -> str:
    """Any text as one line of Markdown that shows it and nothing else: no markup, no HTML, no table cell of its own."""
    return _MARKDOWN.sub(r"\\\1", _SPACE.sub(" ", str(value)).strip()).replace("&", "&amp;").replace("\\<", "&lt;")


def _loader() -> PackageLoader:
    return PackageLoader("slipway.report", package_path="")


def _with_filters(environment: Environment) -> Environment:
    environment.filters.update({name: getattr(figures, name) for name in _FIGURES})
    return environment
