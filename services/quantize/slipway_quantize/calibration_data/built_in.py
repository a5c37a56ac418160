"""The built-in text for calibration: English and code that come with Python, none of which is in the built-in held-out text."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from slipway.documents.heldout import BUILT_IN_TOPICS, documentation
from slipway.documents.reading import Document

MODULES = (
    "ast",
    "calendar",
    "collections",
    "dataclasses",
    "datetime",
    "difflib",
    "email.message",
    "enum",
    "fractions",
    "functools",
    "http.client",
    "inspect",
    "ipaddress",
    "logging",
    "mailbox",
    "optparse",
    "pathlib",
    "random",
    "shutil",
    "smtplib",
    "statistics",
    "subprocess",
    "tarfile",
    "threading",
    "typing",
    "urllib.parse",
)
"""Modules of the standard library that are not in the built-in held-out text."""


def built_in_documents() -> Iterator[Document]:
    """Yield Python's documentation by topic, and sources of its standard library: the same for a given Python."""
    for topic, text in sorted(documentation().items()):
        if topic not in BUILT_IN_TOPICS:
            yield Document(f"pydoc_data.topics[{topic!r}]", text=text)
    for module in MODULES:
        spec = find_spec(module)
        if spec is not None and spec.origin and Path(spec.origin).is_file():
            yield Document(module, text=Path(spec.origin).read_text(encoding="utf-8"))
