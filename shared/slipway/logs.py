"""Logging: lines for people on a terminal, one JSON object per line elsewhere. Secrets are never written."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_KEY|ACCESS_KEY", re.IGNORECASE)
"""Environment variables whose values are neither written nor handed to stages."""

_RESERVED = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def redact(text: str) -> str:
    """A text without the values of secret-looking environment variables."""
    for value in _secrets():
        text = text.replace(value, "***")
    return text


def configure_logs(level: str, *, console: Console | None = None, stream: TextIO | None = None) -> None:
    """Set up the ``slipway`` logger.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        console: Terminal to write on, so that lines appear above a live view instead of through it.
        stream: Where JSON lines go when there is no terminal; standard error by default.
    """
    handler: logging.Handler
    quiet = console is not None and console.is_terminal and level == "info"
    if console is not None and console.is_terminal:
        handler = _terminal_handler(console)
    else:
        handler = logging.StreamHandler(stream or sys.stderr)
        handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("slipway")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    for name in ("slipway.coordinator", "slipway.worker"):  # the live view shows what these say step by step
        logging.getLogger(name).setLevel(logging.WARNING if quiet else logging.NOTSET)


def configure_service_logs(level: str, *, form: str = "") -> None:
    """Set up all logs of a service on standard error.

    Args:
        level: ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``.
        form: ``json`` or ``text``; by default JSON unless standard error is a terminal.
    """
    handler = logging.StreamHandler(sys.stderr)
    if form == "json" or (not form and not sys.stderr.isatty()):
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """The options of a service about its logs: ``--log-level`` and ``--log-format``."""
    parser.add_argument(
        "--log-level", type=str.upper, default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"], help="in any case"
    )
    parser.add_argument(
        "--log-format",
        default="",
        choices=["json", "text"],
        help="by default json, unless standard error is a terminal",
    )


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, whatever ``extra`` gave, and the trace it belongs to."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        from slipway.telemetry import current_trace_id

        document: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        document |= {key: value for key, value in record.__dict__.items() if key not in _RESERVED}
        trace_id = current_trace_id()
        if trace_id:
            document["trace_id"] = trace_id
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return redact(json.dumps(document, default=str, ensure_ascii=False))


def _terminal_handler(console: Console) -> logging.Handler:
    from rich.logging import RichHandler

    handler = RichHandler(console=console, show_path=False, show_time=False, rich_tracebacks=False, markup=False)
    handler.setFormatter(_Redacting("%(message)s"))
    return handler


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


@cache
def _secrets() -> tuple[str, ...]:
    return secrets_of(os.environ)


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Values of variables whose name says that they are secret; short ones would blot out ordinary text."""
    found = {value for name, value in environment.items() if SECRET_NAMES.search(name) and len(value) >= 8}
    return tuple(sorted(found, key=len, reverse=True))
