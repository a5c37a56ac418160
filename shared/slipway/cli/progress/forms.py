"""The forms of ``--progress``, apart from what shows them: ``--help`` imports this."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipway.errors import Failure


class ProgressForm(StrEnum):
    """How progress is shown."""

    AUTO = "auto"
    PLAIN = "plain"
    JSON = "json"
    NONE = "none"


def progress_is_json(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a command line, parsed or not, asks for JSON lines on standard error."""
    given = [word.partition("=")[2] for word in words if word.startswith("--progress=")]
    given += [value for flag, value in itertools.pairwise(words) if flag == "--progress"]
    return (given or [environment.get("SLIPWAY_PROGRESS", "")])[-1].lower() == ProgressForm.JSON


def error_line(failure: Failure) -> str:
    """What ended a command, as the last JSON line."""
    from slipway.observability.logs import JsonFormatter

    record = logging.LogRecord("slipway", logging.ERROR, "", 0, failure.message, None, None)
    facts = {"reason": failure.reason, "remedy": failure.remedy, "exit_code": failure.exit_code}
    record.__dict__.update(facts)
    return JsonFormatter(event="error").format(record)
