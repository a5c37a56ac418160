"""The forms of ``--progress``, apart from what shows them: ``--help`` imports this."""

from __future__ import annotations

from enum import StrEnum


class ProgressForm(StrEnum):
    """How progress is shown."""

    AUTO = "auto"
    PLAIN = "plain"
    JSON = "json"
    NONE = "none"
