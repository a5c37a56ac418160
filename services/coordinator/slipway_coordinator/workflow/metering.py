"""Measure the artifacts of projects, one after another, and keep what projects use at hand for metrics.

The transaction that gives a project an artifact asks for its measurement; a process that ends in between leaves the rest to the next.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from slipway.artifacts import Manifest
from slipway.errors import ModelExportError, ServiceError
from slipway_coordinator.lifecycle.quotas import ProjectUsage
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.journal import Journal
from slipway_coordinator.storage.projects.stored_bytes import contents_of
from slipway_coordinator.workflow.feed import Call

log = logging.getLogger("slipway.coordinator.metering")

_AT_ONCE = 100
_GATHER_SECONDS = 0.5
"""Pause before new artifacts are measured: measuring many together costs little more than measuring one."""
_READ_SECONDS = 0.1
"""How long one call of a thread goes on to the next manifest. A process that ends waits for it."""
_REFRESH_SECONDS = 15.0
_PAUSE_SECONDS = 30.0
"""Time without a measurement after the store did not respond."""
_FORGET_SECONDS = 3600.0
_LACKING = frozenset({"ARTIFACT_NOT_FOUND", "ARTIFACT_INVALID", "ARTIFACT_CORRUPT"})
_MOST_FAILURES = 3
"""How many artifacts in a row may not be readable before the store is taken for unavailable."""

ReadManifest = Callable[[str], Manifest]
"""Reads the manifest of an artifact from the store; blocks, for a minute if the store does not respond."""


class Meter:
    """Measures for one coordinator. Used on one event loop.

    Args:
        database: The tables.
        journal: Commits their changes.
        read: Reads manifests; None measures nothing.
        call: Runs a blocking function on the state in a thread.

    Attributes:
        usage: What each project used at the last look.
    """

    def __init__(self, database: Database, journal: Journal, read: ReadManifest | None, *, call: Call) -> None:
        self._database = database
        self._journal = journal
        self._read = read
        self._call = call
        self._wanted = asyncio.Event()
        self._start = ""  # artifacts behind this one come first
        self.usage: Mapping[str, ProjectUsage] = {}

    def note_stored(self) -> None:
        """Look for artifacts to measure that a transaction has stored, which has just ended."""
        if self._database.stored_bytes.take_requested():
            self._wanted.set()

    async def run(self) -> None:
        """Measure what is there and what comes, for as long as the coordinator runs."""
        if self._read is not None:
            await asyncio.gather(self._check_and_measure(self._read), self._keep_looking())

    async def _check_and_measure(self, read: ReadManifest) -> None:
        try:
            await self._check_sums()
        except Exception:  # sums that may be wrong are better than none of what comes
            log.exception("what projects store cannot be checked")
        await self._keep_measuring(read)

    async def _check_sums(self) -> None:
        """Compute the sums of projects again if they are not those of their artifacts."""
        stored = self._database.stored_bytes
        differences = await self._call(stored.find_differences)
        for project, (kept, actual) in sorted(differences.items()):
            log.error(f"the project {project} was said to store {kept} bytes, its artifacts have {actual}")
        if differences:
            await self._journal.commit(stored.rebuild)

    async def _keep_measuring(self, read: ReadManifest) -> None:
        while True:
            self._wanted.clear()
            try:
                if await self._measure_all(read):
                    await self._wanted.wait()
                    await asyncio.sleep(_GATHER_SECONDS)
                    continue
            except ModelExportError as error:
                log.warning(f"artifacts of projects cannot be measured now: {error}")
            except Exception:  # if this loop ended, nothing would ever be measured again
                log.exception("artifacts of projects cannot be measured")
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _measure_all(self, read: ReadManifest) -> bool:
        """Measure the artifacts that wait; return False if some of them are left, because they could not be read or recorded.

        Raises:
            Exception: So many failed in a row that the store, or the database, seems not to respond. The next call goes on behind what
                failed, which may be a fault of these artifacts alone.
        """
        stored, after, in_row = self._database.stored_bytes, self._start, 0
        whole, self._start = not after, ""
        while artifacts := await self._call(lambda: stored.unmeasured(after=after, limit=_AT_ONCE)):  # noqa: B023 - waited for here
            measured: dict[str, dict[str, int] | None] = {}
            stop: Exception | None = None
            at = 0
            while at < len(artifacts) and stop is None:
                some, error = await asyncio.to_thread(_read_some, artifacts[at:], read)
                measured |= some
                at, in_row = at + len(some), 0 if some else in_row
                if error is None:
                    continue
                whole, in_row = False, in_row + 1
                if in_row == _MOST_FAILURES:
                    stop = error
                else:
                    _log_fault(artifacts[at], error)
                    at += 1
            whole = await self._record(measured) and whole
            if stop is not None:
                self._start = artifacts[at]
                raise stop
            after = artifacts[-1]
            if len(artifacts) < _AT_ONCE:
                break
        return whole

    async def _record(self, measured: Mapping[str, dict[str, int] | None]) -> bool:
        """Record artifacts in one transaction; if that fails, one by one. Return False if some could not be.

        Raises:
            ServiceError: reason ``COORDINATOR_UNAVAILABLE``.
        """
        record = self._database.stored_bytes.record
        try:
            await self._journal.commit(functools.partial(record, measured), later=True)
        except ServiceError:
            raise
        except Exception:  # a fault of one of them, which the next loop names
            log.debug("artifacts are recorded one by one", exc_info=True)
        else:
            return True
        whole = True
        for artifact, contents in measured.items():
            try:
                await self._journal.commit(functools.partial(record, {artifact: contents}), later=True)
            except ServiceError:
                raise
            except Exception as error:  # noqa: BLE001 - the others are recorded
                whole = False
                _log_fault(artifact, error)
        return whole

    async def _keep_looking(self) -> None:
        forgotten = -_FORGET_SECONDS
        while True:
            try:
                self.usage = await self._call(self._database.usage)
                await self._journal.commit(self._database.gpu_seconds.note_alive)
                if time.monotonic() >= forgotten + _FORGET_SECONDS:
                    await self._journal.commit(self._database.gpu_seconds.forget_old)
                    forgotten = time.monotonic()
            except ModelExportError as error:
                log.warning(f"what projects use cannot be read now: {error}")
            except Exception:  # if this loop ended, the metrics would stay as they are
                log.exception("what projects use cannot be read")
            await asyncio.sleep(_REFRESH_SECONDS)


def _log_fault(artifact: str, fault: Exception) -> None:
    expected = isinstance(fault, ModelExportError)
    log.warning(f"{artifact} cannot be measured now: {fault}", exc_info=None if expected else fault)


def _read_some(
    artifacts: Sequence[str], read: ReadManifest
) -> tuple[dict[str, dict[str, int] | None], Exception | None]:
    """Return what the first of these artifacts have, as many as are read in a moment, and why the next one cannot be read."""
    some, end = dict[str, dict[str, int] | None](), time.monotonic() + _READ_SECONDS
    for artifact in artifacts:
        try:
            some[artifact] = _contents(artifact, read)
        except Exception as error:  # noqa: BLE001 - whatever it is, it may be a fault of this artifact alone
            return some, error
        if time.monotonic() >= end:
            break
    return some, None


def _contents(artifact: str, read: ReadManifest) -> dict[str, int] | None:
    """Return the sizes of an artifact's contents; None if the store lacks it, or what it has cannot be one."""
    try:
        contents = contents_of(artifact, read(artifact))
    except ModelExportError as error:
        if error.reason not in _LACKING:
            raise
        log.info(f"{artifact} counts for no project: {error.message}")
        return None
    if contents is None:
        log.warning(f"{artifact} counts for no project: its manifest has a size that cannot be")
    return contents
