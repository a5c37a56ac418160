"""Keys of attempts, unique across exports, as used in leases, logs and messages."""

from __future__ import annotations

import re
from typing import Self

from slipway.errors import ServiceError
from slipway.texts import number_of, quoted

_KEY = re.compile(r"(projects/[a-z0-9._-]{1,63}/exports/[a-z0-9._-]{1,63}):([A-Za-z0-9._-]{1,100}):([0-9]{1,9})")


class AttemptKey(str):
    """The text ``{export}:{task}:{attempt}``; make it only by :meth:`of` and :meth:`parse`."""

    __slots__ = ()

    @classmethod
    def of(cls, export: str, task: str, attempt: int) -> Self:
        """Return the key of an attempt; the parts must be valid."""
        return cls(f"{export}:{task}:{attempt}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a key from outside.

        Raises:
            ServiceError: ``REQUEST_INVALID``.
        """
        match = _KEY.fullmatch(text)
        attempt = None if match is None else number_of(match[3], most=10**9)
        if match is None or attempt is None:
            raise ServiceError(
                f"task is {quoted(text)}",
                reason="REQUEST_INVALID",
                remedy="write EXPORT:TASK:ATTEMPT",
                about={"field": "task"},
            )
        return cls.of(match[1], match[2], attempt)

    @property
    def export(self) -> str:
        """Return the name of the export."""
        return self.partition(":")[0]

    @property
    def project(self) -> str:
        """Return the project of the export."""
        return self.split("/", 2)[1]

    @property
    def task(self) -> str:
        """Return the id of the task."""
        return self.split(":", 2)[1]

    @property
    def attempt(self) -> int:
        """Return the number of the attempt."""
        return int(self.rpartition(":")[2])
