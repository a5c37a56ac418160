"""Logging: lines for people, or one JSON object per line. Secrets are never written."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from slipway.observability.telemetry import current_trace_id
from slipway.texts import escaped_json, printable, redact

if TYPE_CHECKING:
    from rich.console import Console

_RESERVED = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


AUDIT_LOGGER = "slipway.audit"
"""Logger of the audit log; see :mod:`slipway.security.access.audit`."""

_STEPS = ("slipway.coordinator", "slipway.worker")
"""Loggers whose info lines a progress display shows already."""


@contextlib.contextmanager
def command_logs(level: str, handler: logging.Handler) -> Iterator[None]:
    """Send the ``slipway`` logger's lines to a handler while the block runs.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``. Only ``debug`` includes lines that repeat the progress display.
        handler: Receives and formats the lines.
    """
    loggers = [logging.getLogger(name) for name in ("slipway", *_STEPS)]
    before = [(each.level, each.propagate, list(each.handlers)) for each in loggers]
    main, *steps = loggers
    main.handlers, main.propagate = [handler], False
    main.setLevel(level.upper())
    for each in steps:
        each.setLevel(logging.WARNING if level == "info" else logging.NOTSET)
    try:
        yield
    finally:
        for each, (number, propagate, handlers) in zip(loggers, before, strict=True):
            each.setLevel(number)
            each.propagate, each.handlers = propagate, handlers


def terminal_handler(console: Console) -> logging.Handler:
    """Return a handler that writes lines above a live view."""
    from rich.logging import RichHandler

    handler = RichHandler(console=console, show_path=False, show_time=False, rich_tracebacks=False, markup=False)
    handler.setFormatter(_Redacting("%(message)s"))
    return handler


def plain_handler(stream: TextIO) -> logging.Handler:
    """Return a handler that writes lines for people: ``03:14:07 warning: …``."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter())
    return handler


def json_handler(stream: TextIO) -> logging.Handler:
    """Return a handler that writes one JSON object per record (:class:`JsonFormatter`) with the ``event`` ``log``."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(event="log"))
    return handler


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
    logging.getLogger(AUDIT_LOGGER).setLevel(logging.INFO)  # written at every log level


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """Add a service's log options: ``--log-level`` and ``--log-format``."""
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
    """Formats a record as one JSON object: time, level, logger, message, the fields of ``extra``, and its trace.

    Args:
        event: Kind of record, for streams with several kinds; a record's own ``event`` takes precedence.
    """

    def __init__(self, *, event: str = "") -> None:
        super().__init__()
        self._event = {"event": event} if event else {}

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        document: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        document |= self._event
        document |= {key: value for key, value in record.__dict__.items() if key not in _RESERVED}
        trace_id = current_trace_id()
        if trace_id:
            document["trace_id"] = trace_id
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return escaped_json(redact(json.dumps(document, default=str, ensure_ascii=False)))


class PlainFormatter(logging.Formatter):
    """Formats a record as time of day, level (except info) and message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line, with a traceback below it."""
        level = f"{record.levelname.lower()}: " if record.levelno != logging.INFO else ""
        # local time
        lines = [f"{datetime.fromtimestamp(record.created):%H:%M:%S} {level}{record.getMessage()}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return _one_record("\n".join(lines))


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _one_record(super().format(record))


def _one_record(text: str) -> str:
    """Return a record without secrets, with further lines indented, so that no message can imitate another record."""
    return printable(redact(text).replace("\n", "\n  "))
