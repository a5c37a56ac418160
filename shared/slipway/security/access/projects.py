"""The section ``projects:`` of the access file: how much a project may have, and its share of the workers.

::

    projects:
      "*": {unended_exports: 500, highest_priority: 50, stored_bytes: 2TB}    # of every project that is not named
      research: {weight: 2, stored_bytes: 20TB, gpu_seconds: 360000}          # what is left out is as for "*"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from slipway.security.access.grants import PROJECT
from slipway.security.access.principals import ALL_PROJECTS
from slipway.sizes import parse_size
from slipway.texts import MalformedText

MOST_LABELS = 100
"""Projects that metrics name; the others are counted together."""
OTHER = "other"

WINDOW_DAYS = 30
"""Days, by UTC and with today, whose GPU seconds count together."""
_LARGEST = 2**63 - 1


def _bytes(value: object) -> object:
    """Return the bytes of a size that is written as a text."""
    if not isinstance(value, str):
        return value
    try:
        size = parse_size(value)
    except MalformedText as error:
        raise ValueError(f"this is not a size: {error.remedy}") from None  # what the file has may be a secret
    if not size and re.search("[1-9]", value):
        raise ValueError("this is less than one byte: write 0 for none")
    return size


class ProjectLimits(BaseModel):
    """What one project may have.

    Attributes:
        weight: Its share of the workers, compared with the weights of the other projects that wait for them.
        unended_exports: Most exports that wait or run at a time; None for any number.
        highest_priority: Highest priority of an export.
        stored_bytes: Bytes of its artifacts in the store with which no new export begins; None for any number.
        gpu_seconds: GPU seconds of the last :data:`WINDOW_DAYS` days with which no new export that needs or prefers a GPU begins; None
            for any number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    unended_exports: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    highest_priority: Annotated[int, Field(ge=-100, le=100)] = 100
    stored_bytes: Annotated[int, BeforeValidator(_bytes), Field(ge=0, le=_LARGEST, strict=True)] | None = None
    gpu_seconds: Annotated[int, Field(ge=0, le=_LARGEST, strict=True)] | None = None


class Projects:
    """The limits of all projects at one moment.

    Args:
        named: Limits of the projects that the file names, with ``*`` for all others.
    """

    def __init__(self, named: Mapping[str, ProjectLimits] | None = None) -> None:
        named = named or {}
        self._others = named.get(ALL_PROJECTS, ProjectLimits())
        self._named = {
            name: limits.model_copy(update=_given(self._others, besides=limits.model_fields_set))
            for name, limits in named.items()
            if name != ALL_PROJECTS
        }
        self._labels = frozenset(list(self._named)[:MOST_LABELS])

    @property
    def names(self) -> Collection[str]:
        """The projects that the file names."""
        return self._named.keys()

    def limits(self, project: str) -> ProjectLimits:
        """Return the limits of a project."""
        return self._named.get(project, self._others)

    def weight(self, project: str) -> int:
        """Return the weight of a project."""
        return self.limits(project).weight

    def label(self, project: str) -> str:
        """Return the name of a project in metrics: its own if the file names it, otherwise ``other``."""
        return project if project in self._labels else OTHER


ALIKE = Projects()
"""All projects have the same share, and no limits of their own."""

CurrentProjects = Callable[[], Projects]


def check_names(named: Mapping[str, ProjectLimits]) -> None:
    """Refuse names that no project can have.

    Raises:
        ValueError: There is one.
    """
    for name in named:
        if name != ALL_PROJECTS and not PROJECT.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a project")


def _given(limits: ProjectLimits, *, besides: set[str]) -> dict[str, object]:
    return {name: getattr(limits, name) for name in limits.model_fields_set - besides}
