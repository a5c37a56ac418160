"""The tables of artifacts and uploaded content: which project owns which.

A project owns the sources and results of its exports, for as long as these are remembered, and the artifacts it made of content
it uploaded. Uploaded content is remembered for a day, so that an artifact can be made of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from slipway.artifacts import Manifest
from slipway_coordinator.storage.journal import Transactions
from slipway_coordinator.storage.projects.stored_bytes import UPLOAD_SECONDS, Measurement, StoredBytes, contents_of
from slipway_coordinator.storage.schema import artifacts as _artifacts
from slipway_coordinator.storage.schema import blobs as _blobs

_MOST_VARIABLES = 500  # variables of one query

# Says of each new row whether the project had the artifact before, and whether it is measured. A common base has a row for each of
# thousands of exports: never read all rows of an artifact.
_ADD_ARTIFACTS = """
    INSERT INTO slipway_artifacts (project, digest, export, create_time) VALUES {rows} ON CONFLICT DO NOTHING
    RETURNING digest,
        (SELECT m.state FROM slipway_measurements m WHERE m.artifact = slipway_artifacts.digest) AS measurement,
        EXISTS (
            SELECT 1 FROM slipway_artifacts a WHERE a.project = slipway_artifacts.project
            AND a.digest = slipway_artifacts.digest AND a.export <> slipway_artifacts.export) AS owned
"""
_ROW = "(:project, :digest{number}, :export, :create_time)"
_ADD_BLOB = sa.text("""
    INSERT INTO slipway_blobs (project, digest, create_time, size_bytes) VALUES (:project, :digest, :create_time, :size_bytes)
    ON CONFLICT (project, digest) DO UPDATE SET create_time = excluded.create_time, size_bytes = excluded.size_bytes
""")
_REMOVE = sa.text("DELETE FROM slipway_artifacts WHERE project = :project AND digest = :digest AND export = :export")
_DIGESTS: sa.BindParameter[list[str]] = sa.bindparam("digests", expanding=True)
_OWNED_ARTIFACTS = sa.text("""
    SELECT artifact FROM slipway_measurements WHERE artifact IN :digests AND EXISTS (
        SELECT 1 FROM slipway_artifacts a WHERE a.project = :project AND a.digest = slipway_measurements.artifact)
""").bindparams(_DIGESTS)
"""Every artifact of a project has a row there."""
_UPLOADED_BLOBS = sa.text(
    "SELECT digest FROM slipway_blobs WHERE project = :project AND digest IN :digests"
).bindparams(_DIGESTS)
_COUNTED_BY_ARTIFACT = sa.text("""
    UPDATE slipway_blobs SET size_bytes = 0 WHERE project = :project AND digest IN :digests AND size_bytes > 0
""").bindparams(_DIGESTS)


_WANTING = frozenset({None, Measurement.MISSING.value})
"""States of measurement in which an artifact that is named again is looked for again."""


class Ownership:
    """The tables. All calls block for some milliseconds, and join an open transaction.

    The journal makes all changes of artifacts: who has an artifact first, or as the last one, is known only if no other transaction
    changes that meanwhile.

    Args:
        transactions: The transactions of the coordinator.
        stored: Counts the bytes of artifacts.
    """

    def __init__(self, transactions: Transactions, stored: StoredBytes) -> None:
        self._transactions = transactions
        self._stored = stored

    def find_owned(self, project: str, digests: Iterable[str]) -> set[str]:
        """Return which of these artifacts belong to a project."""
        return self._find(_OWNED_ARTIFACTS, project, digests)

    def page(self, projects: Collection[str] | None, *, limit: int, after: str = "") -> list[str]:
        """Return digests of the artifacts of some projects (None: of all) that sort after ``after``."""
        query = sa.select(_artifacts.c.digest).distinct().where(_artifacts.c.digest > after)
        if projects is not None:
            query = query.where(_artifacts.c.project.in_(sorted(projects)))
        with self._transactions.begin() as connection:
            return list(connection.execute(query.order_by(_artifacts.c.digest).limit(limit)).scalars())

    def find_uploaded(self, project: str, digests: Iterable[str]) -> set[str]:
        """Return which of these contents a project has uploaded."""
        return self._find(_UPLOADED_BLOBS, project, digests)

    def record_upload(self, project: str, digest: str, *, size_bytes: int = 0) -> None:
        """Record that a project has uploaded the content of a digest; ``size_bytes`` of it count until an artifact has it."""
        row = {"project": project, "digest": digest, "create_time": time.time(), "size_bytes": size_bytes}
        with self._transactions.begin() as connection:
            old = _blobs.c.create_time < time.time() - UPLOAD_SECONDS
            connection.execute(sa.delete(_blobs).where(old))
            connection.execute(_ADD_BLOB, row)

    def record_artifact(self, project: str, digest: str, manifest: Manifest | None = None) -> None:
        """Record that a project has made an artifact of uploaded content; making it again renews its time.

        Args:
            project: The project.
            digest: The artifact.
            manifest: Its manifest, with which it counts at once; without it, it counts once it is measured.
        """
        with self._transactions.begin() as connection:
            self.note("", [digest], project=project)
            made = (_artifacts.c.project == project, _artifacts.c.digest == digest, _artifacts.c.export == "")
            connection.execute(sa.update(_artifacts).where(*made).values(create_time=time.time()))
            contents = None if manifest is None else contents_of(digest, manifest)
            if manifest is None or contents is None:
                return
            self._stored.record({digest: contents})
            files = sorted({file.digest for file in manifest.files})
            for start in range(0, len(files), _MOST_VARIABLES):
                values = {"project": project, "digests": files[start : start + _MOST_VARIABLES]}
                connection.execute(_COUNTED_BY_ARTIFACT, values)

    def note(self, export: str, digests: Iterable[str], *, project: str) -> None:
        """Give a project artifacts of one of its exports; an empty name stands for no export."""
        ordered = sorted(set(digests))
        if not ordered:
            return
        more = {"project": project, "export": export, "create_time": time.time()}
        with self._transactions.begin() as connection:
            for start in range(0, len(ordered), _MOST_VARIABLES):
                some = ordered[start : start + _MOST_VARIABLES]
                values = {f"digest{number}": digest for number, digest in enumerate(some)} | more
                rows = {row.digest: row for row in connection.execute(_add_artifacts(len(some)), values)}
                self._count(project, some, rows)

    def _count(self, project: str, digests: Sequence[str], new: Mapping[str, sa.Row[Any]]) -> None:
        """Have artifacts measured that a project was just given, or was given again, and count those that it did not have."""
        unmeasured = [each for each in digests if each not in new or new[each].measurement in _WANTING]
        if unmeasured:
            self._stored.request_measurement(unmeasured)
        known = {digest for digest, row in new.items() if row.measurement == Measurement.KNOWN and not row.owned}
        if known:
            self._stored.add_to_project(project, sorted(known))

    def release(self, project: str, digest: str, *, most: int) -> list[str]:
        """Take what a project has without an export; return exports, ``most`` at most, through which it still has the artifact."""
        own = (_artifacts.c.project == project, _artifacts.c.digest == digest)
        left = sa.select(_artifacts.c.export).where(*own).order_by(_artifacts.c.export).limit(most)
        with self._transactions.begin() as connection:
            self._remove(*own, _artifacts.c.export == "")
            return list(connection.execute(left).scalars())

    def forget(self, export: str) -> None:
        """Remove a project's ownership through an export that is deleted."""
        self._remove(_artifacts.c.export == export)

    def forget_artifacts(self, *, before: float, limit: int = 500) -> int:
        """Forget artifacts made before a time that belong to no export, ``limit`` of them at most; return how many."""
        return self._remove(_artifacts.c.export == "", _artifacts.c.create_time < before, limit=limit)

    def _remove(self, *conditions: sa.ColumnElement[bool], limit: int | None = None) -> int:
        query = sa.select(_artifacts.c.project, _artifacts.c.digest, _artifacts.c.export).where(*conditions)
        with self._transactions.begin() as connection:
            removed: dict[str, set[str]] = {}
            rows = connection.execute(query.limit(limit)).all()
            if rows:
                connection.execute(_REMOVE, [dict(row._mapping) for row in rows])
            for row in rows:
                removed.setdefault(row.project, set()).add(row.digest)
            for project, digests in removed.items():
                self._stored.remove_from_project(project, sorted(digests - self.find_owned(project, digests)))
        return len(rows)

    def _find(self, query: sa.TextClause, project: str, digests: Iterable[str]) -> set[str]:
        asked, matches = sorted(set(digests)), set[str]()
        with self._transactions.begin() as connection:
            for start in range(0, len(asked), _MOST_VARIABLES):
                values = {"project": project, "digests": asked[start : start + _MOST_VARIABLES]}
                matches |= set(connection.execute(query, values).scalars())
        return matches


@functools.cache
def _add_artifacts(number: int) -> sa.TextClause:
    return sa.text(_ADD_ARTIFACTS.format(rows=", ".join(_ROW.format(number=each) for each in range(number))))
