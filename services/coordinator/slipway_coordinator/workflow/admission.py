"""Admit exports and uploads that begin: within the limits of the coordinator and of their projects, also for calls at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from slipway.registry import IMPORT
from slipway.security.access.projects import CurrentProjects
from slipway_coordinator.lifecycle.quotas import Unended, check_content, check_gpu_seconds, check_stored_bytes
from slipway_coordinator.lifecycle.records import ExportRecord, TaskState
from slipway_coordinator.storage.database import Database
from slipway_coordinator.workflow.feed import Call


class Admission:
    """Decides which exports and uploads may begin. Used on one event loop.

    Args:
        database: Knows what projects use.
        unended: The exports that have not ended.
        projects: Returns the limits of projects.
        most: Limit of unended exports of all projects together.
        call: Runs a blocking function in a thread.
    """

    def __init__(
        self, database: Database, unended: Unended, projects: CurrentProjects, *, most: int, call: Call
    ) -> None:
        self._database = database
        self._unended = unended
        self._projects = projects
        self._most = most
        self._call = call
        self._receiving: Counter[str] = Counter()  # bytes, by project

    @asynccontextmanager
    async def place(self, record: ExportRecord) -> AsyncIterator[None]:
        """Hold a place for an export that begins, until the block ends.

        Raises:
            ServiceError: reason ``QUEUE_FULL`` or ``QUOTA_EXCEEDED`` if there is none.
        """
        await self.check_usage(record)
        with self._unended.coming(record.project, self._projects().limits(record.project), most=self._most):
            yield

    def count_unended(self, project: str) -> int:
        """Return how many exports of a project wait or run."""
        return self._unended.count(project)

    async def check_usage(self, record: ExportRecord) -> None:
        """Refuse an export whose project has used up what it may.

        Raises:
            ServiceError: reason ``QUOTA_EXCEEDED``.
        """
        await self._check_stored_bytes(record.project)
        limits = self._projects().limits(record.project)
        if limits.gpu_seconds is not None and _will_use_gpu(record):
            days = await self._call(lambda: self._database.gpu_seconds.by_day(record.project))
            check_gpu_seconds(record.project, limits, days)

    @asynccontextmanager
    async def receive(self, project: str, digest: str, size_bytes: int, *, begins: bool) -> AsyncIterator[None]:
        """Hold room for content while it is received, until the block ends; what an interrupted upload goes on with is not refused.

        Raises:
            ServiceError: reason ``QUOTA_EXCEEDED``.
        """
        if begins:
            await self.check_content(project, {digest: size_bytes})
        self._receiving[project] += size_bytes
        try:
            yield
        finally:
            self._receiving[project] -= size_bytes
            self._receiving += Counter()

    async def check_content(self, project: str, contents: Mapping[str, int]) -> None:
        """Refuse content, given as sizes by digest, with which a project would have more bytes in the store than it may.

        What counts already is not refused, so an artifact can be made of what was uploaded.

        Raises:
            ServiceError: reason ``QUOTA_EXCEEDED``.
        """
        limits, stored = self._projects().limits(project), self._database.stored_bytes
        if limits.stored_bytes is None:
            return
        counted = await self._call(lambda: stored.find_counted(project, contents))
        more = sum(size for digest, size in contents.items() if digest not in counted)
        if more:
            has = await self._call(lambda: stored.of(project))
            check_content(project, limits, has + self._receiving[project], more=more)

    async def _check_stored_bytes(self, project: str) -> None:
        """Refuse an export of a project that has as many bytes in the store as it may.

        Raises:
            ServiceError: reason ``QUOTA_EXCEEDED``.
        """
        limits = self._projects().limits(project)
        if limits.stored_bytes is not None:
            stored = await self._call(lambda: self._database.stored_bytes.of(project))
            check_stored_bytes(project, limits, stored)


def _will_use_gpu(record: ExportRecord) -> bool:
    """Return whether what is left of an export needs or prefers a GPU; before its import, whether its plan does."""
    if all(task.stage == IMPORT for task in record.tasks):
        return record.needs_gpu
    return any(task.requirements.uses_gpu for task in record.tasks if task.state is not TaskState.SUCCEEDED)
