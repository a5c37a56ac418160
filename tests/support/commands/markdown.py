"""Parsed Markdown as a test reads it."""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.token import Token

MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})


def kinds(tokens: list[Token]) -> set[str]:
    """Return the kinds of all tokens in a parsed Markdown text, also inside lines."""
    return {token.type for token in tokens} | {one.type for token in tokens for one in token.children or ()}


def shown(tokens: list[Token]) -> str:
    """Return the visible text of parsed Markdown, one line per paragraph or cell."""
    lines = (token.children for token in tokens if token.children is not None)
    return "\n".join("".join(one.content for one in line) for line in lines)
