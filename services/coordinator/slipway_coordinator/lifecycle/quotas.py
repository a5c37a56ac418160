"""How many exports may be under way, together and of each project, and what each project may ask for and use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from slipway.errors import ServiceError
from slipway.rpc.values import RETRY_AFTER
from slipway.security.access.projects import WINDOW_DAYS, ProjectLimits
from slipway.sizes import format_size

_RETRY_SECONDS = 5
_ROOM = "delete exports and uploaded artifacts that are not needed any more (slipway delete)"

FULL = frozenset({"QUEUE_FULL", "QUOTA_EXCEEDED"})
"""Reasons why there is no room for another export."""


@dataclass(frozen=True, slots=True)
class ProjectUsage:
    """What a project uses: bytes in the store, artifacts that are not measured yet, and GPU seconds of the window."""

    stored_bytes: int = 0
    unmeasured_artifacts: int = 0
    gpu_seconds: float = 0.0


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

    def count(self, project: str) -> int:
        """Return how many exports of a project have not ended."""
        return self._of_project[project]

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


def check_stored_bytes(project: str, limits: ProjectLimits, stored: int) -> None:
    """Refuse more work, or content, of a project that has as many bytes in the store as it may.

    Raises:
        ServiceError: reason ``QUOTA_EXCEEDED``.
    """
    most = limits.stored_bytes
    if most is not None and stored >= most:
        raise quota_error(
            project,
            "stored_bytes",
            value=stored,
            limit=most,
            remedy=_ROOM,
            description=f"has {format_size(stored)} in the store, {format_size(most)} is its limit",
        )


def check_content(project: str, limits: ProjectLimits, stored: int, *, more: int) -> None:
    """Refuse content with which a project would have more bytes in the store than it may.

    Args:
        project: The project.
        limits: Its limits.
        stored: What it has, or is receiving now.
        more: Bytes of the content.

    Raises:
        ServiceError: reason ``QUOTA_EXCEEDED``.
    """
    most = limits.stored_bytes
    if most is not None and stored + more > most:
        raise quota_error(
            project,
            "stored_bytes",
            value=stored + more,
            limit=most,
            remedy=_ROOM,
            description=f"has {format_size(stored)} in the store and would have {format_size(more)} more, {format_size(most)} is its limit",
        )


def check_gpu_seconds(project: str, limits: ProjectLimits, days: Mapping[int, float]) -> None:
    """Refuse an export that needs or prefers a GPU of a project that has used GPUs for as long as it may.

    Args:
        project: The project.
        limits: Its limits.
        days: Its GPU seconds by day since the epoch, within the window.

    Raises:
        ServiceError: reason ``QUOTA_EXCEEDED``.
    """
    most, used = limits.gpu_seconds, sum(days.values())
    if most is not None and used >= most:
        begin = datetime.fromtimestamp(0, UTC) + timedelta(days=_first_free_day(days, most)) if most else None
        when = (
            "" if begin is None else f"try again on {begin:%Y-%m-%d} (UTC) if nothing more of it runs until then, or "
        )
        raise quota_error(
            project,
            "gpu_seconds",
            value=int(used),
            limit=most,
            remedy=f"{when}leave out what needs or prefers a GPU: other exports are not refused",
            description=f"has used GPUs for {used:.0f} seconds in {WINDOW_DAYS} days, {most} is its limit",
        )


def _first_free_day(days: Mapping[int, float], most: int) -> int:
    """Return the first day since the epoch on which less than ``most``, which is above 0, of these seconds is in the window."""
    left, last = sum(days.values()), 0
    for day in sorted(days):
        if left < most:
            break
        left, last = left - days[day], day
    return last + WINDOW_DAYS


def quota_error(
    project: str, quota: str, *, value: int, limit: int, remedy: str, retry: bool = False, description: str = ""
) -> ServiceError:
    """Return the refusal of what exceeds a quota of a project.

    Args:
        project: The project.
        quota: Name of the limit in the access file.
        value: The project's present or resulting usage.
        limit: What is allowed.
        remedy: What the caller can do; the operator can raise the limit.
        retry: Whether the same call may succeed soon.
        description: What is said to people after the project's name.
    """
    about = {"project": project, "quota": quota, "value": value, "limit": limit}
    return ServiceError(
        f"the project {project} {description or f'would have {quota} {value}, {limit} is its limit'}",
        reason="QUOTA_EXCEEDED",
        remedy=f"{remedy}; the operator sets {quota} in the access file",
        about=about | ({RETRY_AFTER: _RETRY_SECONDS} if retry else {}),
        retryable=retry,
    )


def project_of_export(name: str) -> str:
    """Return the project in the name of an export."""
    return name.split("/")[1]
