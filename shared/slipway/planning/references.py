"""References to the inputs of planned tasks: sources of the export, and outputs of other tasks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from slipway.errors import ServiceError
from slipway.texts import quoted

T = TypeVar("T")

VALIDATION = "validation"
"""Name of the output of the validation; it is rendered into the report, not delivered."""

_REFERENCE = re.compile(
    r"source:(?P<source>[A-Za-z0-9._-]{1,100})|task:(?P<task>[A-Za-z0-9._-]{1,100})/(?P<output>[A-Za-z0-9._-]{1,100})"
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
