"""Names of attempts across exports, as leases, logs and messages have them."""

from __future__ import annotations

import re
from typing import Self

from slipway.errors import ServiceError
from slipway.texts import number_of, quoted

_KEY = re.compile(r"(projects/[a-z0-9._-]{1,63}/exports/[a-z0-9._-]{1,63}):([A-Za-z0-9._-]{1,100}):([0-9]{1,9})")


class AttemptKey(str):
    """``{export}:{task}:{attempt}``, which is what it prints as; made by :meth:`of` and :meth:`parse` alone."""

    __slots__ = ()

    @classmethod
    def of(cls, export: str, task: str, attempt: int) -> Self:
        """Return the key of an attempt of a known export's task."""
        return cls(f"{export}:{task}:{attempt}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a key that somebody else has written.

        Raises:
            ServiceError: reason ``REQUEST_INVALID``.
        """
        found = _KEY.fullmatch(text)
        attempt = None if found is None else number_of(found[3], most=10**9)
        if found is None or attempt is None:
            raise ServiceError(
                f"task is {quoted(text)}",
                reason="REQUEST_INVALID",
                remedy="it is like EXPORT:TASK:ATTEMPT",
                about={"field": "task"},
            )
        return cls.of(found[1], found[2], attempt)

    @property
    def export(self) -> str:
        """Name of the export."""
        return self.partition(":")[0]

    @property
    def project(self) -> str:
        """Project of the export."""
        return self.split("/", 2)[1]

    @property
    def task(self) -> str:
        """Id of the task."""
        return self.split(":", 2)[1]

    @property
    def attempt(self) -> int:
        """Number of the attempt."""
        return int(self.rpartition(":")[2])
