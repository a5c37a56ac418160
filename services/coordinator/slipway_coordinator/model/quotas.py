"""How many exports may be under way, together and of each project, and what each project may ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from slipway.errors import ServiceError
from slipway.rpc.values import RETRY_AFTER
from slipway.security.access.projects import ProjectLimits

_RETRY_SECONDS = 5

FULL = frozenset({"QUEUE_FULL", "QUOTA_EXCEEDED"})
"""Reasons why there is no room for another export."""


class Unended(Collection[str]):
    """Names of the exports that have not ended, counted by project. All methods run on one event loop."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._coming: Counter[str] = Counter()
        self._of_project: Counter[str] = Counter()

    def add(self, *names: str) -> None:
        """Add exports; those that are known already change nothing."""
        for name in names:
            if name not in self._names:
                self._names[name] = None
                self._of_project[project_of_export(name)] += 1

    def discard(self, name: str) -> None:
        """Remove an export that has ended."""
        if name in self._names:
            del self._names[name]
            self._of_project[project_of_export(name)] -= 1
            self._of_project += Counter()  # drops what is zero

    @contextmanager
    def coming(self, project: str, limits: ProjectLimits, *, most: int) -> Iterator[None]:
        """Hold a place for an export while it is stored, so that calls at the same time cannot exceed a limit together.

        Args:
            project: Its project.
            limits: Limits of the project.
            most: Limit of all projects together.

        Raises:
            ServiceError: reason ``QUEUE_FULL`` or ``QUOTA_EXCEEDED``.
        """
        if len(self) + self._coming.total() >= most:
            raise ServiceError(
                f"{most} exports are under way, which is as many as are allowed",
                reason="QUEUE_FULL",
                remedy="try again later, or raise --max-exports",
                about={RETRY_AFTER: _RETRY_SECONDS},
            )
        quota, count = limits.unended_exports, self._of_project[project] + self._coming[project]
        if quota is not None and count >= quota:
            raise quota_error(
                project,
                "unended_exports",
                value=count + 1,
                limit=quota,
                remedy="try again when some have ended, or cancel some",
                retry=True,
            )
        self._coming[project] += 1
        try:
            yield
        finally:
            self._coming[project] -= 1
            self._coming += Counter()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def check_priority(priority: int, project: str, limits: ProjectLimits) -> None:
    """Refuse a priority above that of the project.

    Raises:
        ServiceError: reason ``QUOTA_EXCEEDED``.
    """
    most = limits.highest_priority
    if priority > most:
        raise quota_error(project, "highest_priority", value=priority, limit=most, remedy=f"give {most} or less")


def quota_error(project: str, quota: str, *, value: int, limit: int, remedy: str, retry: bool = False) -> ServiceError:
    """Return the refusal of what exceeds a quota of a project.

    Args:
        project: The project.
        quota: Name of the limit in the access file.
        value: What was asked for.
        limit: What is allowed.
        remedy: What the caller can do; the operator can raise the limit.
        retry: Whether the same call may succeed later.
    """
    about = {"project": project, "quota": quota, "value": value, "limit": limit}
    return ServiceError(
        f"the project {project} would have {quota} {value}, {limit} is its limit",
        reason="QUOTA_EXCEEDED",
        remedy=f"{remedy}; the operator sets {quota} in the access file",
        about=about | ({RETRY_AFTER: _RETRY_SECONDS} if retry else {}),
        retryable=retry,
    )


def project_of_export(name: str) -> str:
    """Return the project in the name of an export."""
    return name.split("/")[1]
