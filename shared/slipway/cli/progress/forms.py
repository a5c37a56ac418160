"""The forms of ``--progress``, in a light module because ``--help`` imports it."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipway.errors import Failure


class ProgressForm(StrEnum):
    """A form of progress."""

    AUTO = "auto"
    PLAIN = "plain"
    JSON = "json"
    NONE = "none"


def error_line(failure: Failure) -> str:
    """Format the failure that ended a command as the last JSON line."""
    from slipway.observability.logs import JsonFormatter

    record = logging.LogRecord("slipway", logging.ERROR, "", 0, failure.message, None, None)
    facts = {"reason": failure.reason, "remedy": failure.remedy, "exit_code": failure.exit_code}
    record.__dict__.update(facts)
    return JsonFormatter(event="error").format(record)
