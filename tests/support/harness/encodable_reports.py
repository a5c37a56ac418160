"""Make every report sendable, so that none ends a worker of pytest-xdist and its remaining tests.

Workers send reports as simple values whose text must be encodable. Texts of failed tests need not be: a log or an assertion
may contain a lone surrogate from a hostile file.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any] | None, dict[str, Any] | None]:
    """Replace values that cannot be sent, anywhere in a report."""
    return sendable((yield))


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Replace a warning whose text cannot be sent."""
    text = str(warning_message.message)
    if text != encodable(text):
        warning_message.message = UserWarning(encodable(text))  # a category may need more arguments than a text


def sendable(value: Any) -> Any:
    """Convert the value to types that pytest-xdist can send; others become their description."""
    match value:
        case None | bool() | int() | float() if type(value) in (type(None), bool, int, float):
            return value
        case str():
            return encodable(value)
        case bytes():
            return bytes(value)
        case dict():
            return {sendable(key): sendable(each) for key, each in value.items()}
        case list():
            return [sendable(each) for each in value]
        case tuple():
            return tuple(sendable(each) for each in value)
        case set() | frozenset():
            return {sendable(each) for each in value}
    return encodable(repr(value))


def encodable(text: str) -> str:
    """Replace lone surrogates in the text by backslash escapes."""
    return str.__str__(text).encode(errors="backslashreplace").decode()
