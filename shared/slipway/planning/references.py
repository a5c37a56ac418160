"""Texts that name parts of an export: references to the inputs of tasks, and keys of attempts.

A reference names a source of the export, or an output of another task. Keys of attempts are unique across exports; leases, logs and
messages use them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

from slipway.errors import ServiceError
from slipway.texts import number_of, quoted

T = TypeVar("T")

VALIDATION = "validation"
"""Name of the output of the validation; it is rendered into the report, not delivered."""

_REFERENCE = re.compile(
    r"source:(?P<source>[A-Za-z0-9._-]{1,100})|task:(?P<task>[A-Za-z0-9._-]{1,100})/(?P<output>[A-Za-z0-9._-]{1,100})"
)

_ATTEMPT_KEY = re.compile(
    r"(projects/[a-z0-9._-]{1,63}/exports/[a-z0-9._-]{1,63}):([A-Za-z0-9._-]{1,100}):([0-9]{1,9})"
)


@dataclass(frozen=True, slots=True)
class Source:
    """An artifact from which the export starts: ``source:NAME``."""

    name: str

    def __str__(self) -> str:
        return f"source:{self.name}"


@dataclass(frozen=True, slots=True)
class Output:
    """An output of another task: ``task:ID/OUTPUT``."""

    task: str
    name: str

    def __str__(self) -> str:
        return f"task:{self.task}/{self.name}"


def parse_reference(text: str) -> Source | Output:
    """Parse a reference.

    Raises:
        ServiceError: ``REQUEST_INVALID``.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ServiceError(
            f"an input refers to {quoted(text)}",
            reason="REQUEST_INVALID",
            remedy="write source:NAME or task:ID/OUTPUT",
            about={"field": "inputs"},
        )
    return Source(match["source"]) if match["source"] else Output(match["task"], match["output"])


def producers(inputs: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the tasks that make a task's inputs, each once, in the order of the inputs.

    Raises:
        ServiceError: ``REQUEST_INVALID``, as for :func:`parse_reference`.
    """
    references = (parse_reference(text) for text in inputs.values())
    return tuple(dict.fromkeys(each.task for each in references if isinstance(each, Output)))


def by_source_name(adapters: Iterable[T]) -> dict[str, T]:
    """Return the adapters that are combined with the checkpoint's, by the names of their sources: ``adapter-02`` and so on."""
    return {f"adapter-{number:02}": adapter for number, adapter in enumerate(adapters, 2)}


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
        match = _ATTEMPT_KEY.fullmatch(text)
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
