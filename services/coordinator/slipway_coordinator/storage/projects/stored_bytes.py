"""The tables of stored bytes: which content the artifacts of each project have, and how large that is together.

Content counts once in a project, however many of its artifacts have it, and in every project that has it. Sizes come from manifests,
which are read once for each artifact and outside of transactions (:mod:`slipway_coordinator.workflow.metering`). Files under
:data:`SMALL_BYTES` count together with their artifact: a row for each of them would make the tables several times as large.

Content that was uploaded counts before an artifact has it, too, for the day in which one can be made of it.

Sums are kept in the transactions that give an artifact to a project or take it away. There is one writer at a time: all these
transactions are the journal's.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from slipway.artifacts import Manifest
from slipway_coordinator.storage.journal import Transactions
from slipway_coordinator.storage.schema import stored as _stored
from slipway_coordinator.storage.schema import usage as _usage

UPLOAD_SECONDS = 86_400.0
"""Longest time between the upload of content and the creation of its artifact."""
SMALL_BYTES = 1 << 20
MOST_BYTES = 1 << 50
"""Largest artifact that is believed: sums must fit their columns."""

_REQUEST = sa.text("""
    INSERT INTO slipway_measurements (artifact, state) VALUES (:artifact, 'unknown')
    ON CONFLICT (artifact) DO UPDATE SET state = 'unknown' WHERE slipway_measurements.state = 'missing'
""")
_REMOVE = sa.text("""
    UPDATE slipway_stored SET artifacts = artifacts - 1
    WHERE project = :project AND digest IN (SELECT digest FROM slipway_contents WHERE artifact = :artifact)
""")
_DROP = sa.text("""
    DELETE FROM slipway_stored
    WHERE project = :project AND artifacts <= 0 AND digest IN (SELECT digest FROM slipway_contents WHERE artifact = :artifact)
    RETURNING size_bytes
""")
_ADD_CONTENTS = sa.text(
    "INSERT INTO slipway_contents (artifact, digest, size_bytes) VALUES (:artifact, :digest, :size_bytes)"
)
_COUNT = sa.text("""
    INSERT INTO slipway_usage (project, stored_bytes) VALUES (:project, :bytes)
    ON CONFLICT (project) DO UPDATE SET stored_bytes = slipway_usage.stored_bytes + excluded.stored_bytes
""")
_NEXT = sa.text("""
    SELECT artifact FROM slipway_measurements WHERE state = 'unknown' AND artifact > :after ORDER BY artifact LIMIT :limit
""")
_UNMEASURED = sa.text("""
    SELECT a.project, COUNT(DISTINCT a.digest) AS artifacts FROM slipway_measurements m CROSS JOIN slipway_artifacts a
    WHERE m.state = 'unknown' AND a.digest = m.artifact GROUP BY a.project
""")
"""A cross join, because SQLite keeps its order: it would read all artifacts first."""
_ARTIFACTS: sa.BindParameter[list[str]] = sa.bindparam("artifacts", expanding=True)
_SET_STATE = sa.text("""
    UPDATE slipway_measurements SET state = :state WHERE artifact IN :artifacts AND state <> 'known' RETURNING artifact
""").bindparams(_ARTIFACTS)
_OWNERS = sa.text("SELECT DISTINCT project, digest FROM slipway_artifacts WHERE digest IN :artifacts").bindparams(
    _ARTIFACTS
)
_NEW_BYTES = sa.text("""
    SELECT COALESCE(SUM(size_bytes), 0) FROM (
        SELECT MAX(c.size_bytes) AS size_bytes FROM slipway_contents c WHERE c.artifact IN :artifacts AND NOT EXISTS (
            SELECT 1 FROM slipway_stored s WHERE s.project = :project AND s.digest = c.digest)
        GROUP BY c.digest) AS new
""").bindparams(_ARTIFACTS)
_ADD = sa.text("""
    INSERT INTO slipway_stored (project, digest, size_bytes, artifacts)
    SELECT :project, digest, MAX(size_bytes), COUNT(*) FROM slipway_contents WHERE artifact IN :artifacts
    GROUP BY digest ORDER BY digest
    ON CONFLICT (project, digest) DO UPDATE SET artifacts = slipway_stored.artifacts + excluded.artifacts
""").bindparams(_ARTIFACTS)
_FORGET_CONTENTS = sa.text("""
    DELETE FROM slipway_contents WHERE artifact IN :artifacts
    AND NOT EXISTS (SELECT 1 FROM slipway_artifacts a WHERE a.digest = slipway_contents.artifact)
""").bindparams(_ARTIFACTS)
_FORGET_MEASUREMENTS = sa.text("""
    DELETE FROM slipway_measurements WHERE artifact IN :artifacts
    AND NOT EXISTS (SELECT 1 FROM slipway_artifacts a WHERE a.digest = slipway_measurements.artifact)
""").bindparams(_ARTIFACTS)
_OWNED = """
    SELECT a.project, c.digest, MAX(c.size_bytes) AS size_bytes, COUNT(*) AS artifacts
    FROM (SELECT DISTINCT project, digest FROM slipway_artifacts) AS a JOIN slipway_contents AS c ON c.artifact = a.digest
    GROUP BY a.project, c.digest
"""
_COMPARED = """
    SELECT project, SUM(kept) AS kept, SUM(found) AS found FROM (
        SELECT project, stored_bytes AS kept, 0 AS found FROM slipway_usage
        UNION ALL SELECT project, 0, size_bytes FROM ({owned}) AS owned) AS sums
    GROUP BY project HAVING SUM(kept) <> SUM(found)
"""
_DIFFERENCES = sa.text(_COMPARED.format(owned=_OWNED))
"""One statement, so that no change comes in between."""
_REBUILD = (
    sa.delete(_stored),
    sa.text(f"INSERT INTO slipway_stored (project, digest, size_bytes, artifacts) {_OWNED}"),
    sa.delete(_usage),
    sa.text("""
        INSERT INTO slipway_usage (project, stored_bytes) SELECT project, SUM(size_bytes) FROM slipway_stored GROUP BY project
    """),
)
_UPLOADED = "SELECT {columns} FROM slipway_blobs WHERE size_bytes > 0 AND create_time >= :since"
_UPLOADED_BYTES = sa.text(_UPLOADED.format(columns="COALESCE(SUM(size_bytes), 0)") + " AND project = :project")
_UPLOADED_BYTES_OF_ALL = sa.text(_UPLOADED.format(columns="project, SUM(size_bytes) AS bytes") + " GROUP BY project")
_PROJECTS: sa.BindParameter[list[str]] = sa.bindparam("projects", expanding=True)
_UPLOADED_BYTES_OF_SOME = sa.text(
    _UPLOADED.format(columns="project, SUM(size_bytes) AS bytes") + " AND project IN :projects GROUP BY project"
).bindparams(_PROJECTS)
_COUNTED = sa.text("""
    SELECT digest FROM slipway_stored WHERE project = :project AND digest IN :artifacts
    UNION SELECT digest FROM slipway_blobs WHERE project = :project AND create_time >= :since AND digest IN :artifacts
""").bindparams(_ARTIFACTS)
_MOST_VARIABLES = 500  # variables of one query


class Measurement(StrEnum):
    """Whether the content of an artifact is known. MISSING: the store did not have the artifact, or what it had is none."""

    UNKNOWN = "unknown"
    KNOWN = "known"
    MISSING = "missing"


class StoredBytes:
    """The tables. All calls block for some milliseconds, and join an open transaction.

    Args:
        transactions: The transactions of the coordinator.
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._requested = False

    def take_requested(self) -> bool:
        """Return whether artifacts wait to be measured since the last call, whose transaction may have failed."""
        requested, self._requested = self._requested, False
        return requested

    # In the transactions that change what a project has

    def request_measurement(self, artifacts: Collection[str]) -> None:
        """Ask for the measurement of artifacts that were made or named just now: one that was missing may be there again."""
        with self._transactions.begin() as connection:
            changed = connection.execute(_REQUEST, [{"artifact": artifact} for artifact in artifacts]).rowcount
        self._requested |= changed != 0  # what is measured already needs no look

    def add_to_project(self, project: str, artifacts: Collection[str]) -> None:
        """Count artifacts that are measured and that the project did not have."""
        with self._transactions.begin() as connection:
            for some in _parts(artifacts):
                values = {"project": project, "artifacts": some}
                new = int(connection.execute(_NEW_BYTES, values).scalar_one())
                connection.execute(_ADD, values)
                if new:
                    connection.execute(_COUNT, {"project": project, "bytes": new})

    def remove_from_project(self, project: str, artifacts: Collection[str]) -> None:
        """Stop counting artifacts that the project has no more; forget those that no project has any more."""
        with self._transactions.begin() as connection:
            for artifact in artifacts:
                values = {"project": project, "artifact": artifact}
                connection.execute(_REMOVE, values)
                freed = sum(connection.execute(_DROP, values).scalars())
                if freed:
                    connection.execute(_COUNT, {"project": project, "bytes": -freed})
            for some in _parts(artifacts):
                for forget in (_FORGET_CONTENTS, _FORGET_MEASUREMENTS):
                    connection.execute(forget, {"artifacts": some})

    # Measuring

    def unmeasured(self, *, limit: int, after: str = "") -> list[str]:
        """Return artifacts that are not measured yet and sort after ``after``."""
        with self._transactions.begin() as connection:
            return list(connection.execute(_NEXT, {"after": after, "limit": limit}).scalars())

    def record(self, measured: Mapping[str, Mapping[str, int] | None]) -> None:
        """Store the contents of artifacts and count them in their projects; harmless to repeat.

        Args:
            measured: Sizes by digest for each artifact, see :func:`contents_of`; None if the store lacks the artifact.
        """
        missing = sorted(artifact for artifact, contents in measured.items() if contents is None)
        known = {artifact: contents for artifact, contents in sorted(measured.items()) if contents is not None}
        with self._transactions.begin() as connection:
            for some in _parts(missing):
                _set_state(connection, Measurement.MISSING, some)
            for some in _parts(known):
                # What is not new is measured already, or no project has it any more.
                new = _set_state(connection, Measurement.KNOWN, some)
                rows = [
                    {"artifact": artifact, "digest": digest, "size_bytes": size}
                    for artifact in new
                    for digest, size in known[artifact].items()
                ]
                if rows:
                    connection.execute(_ADD_CONTENTS, rows)
                    self._add_to_owners(connection, new)

    def _add_to_owners(self, connection: sa.Connection, artifacts: list[str]) -> None:
        owned: dict[str, list[str]] = {}
        for row in connection.execute(_OWNERS, {"artifacts": artifacts}):
            owned.setdefault(row.project, []).append(row.digest)
        for project, digests in sorted(owned.items()):
            self.add_to_project(project, sorted(digests))

    # Checking

    def find_differences(self) -> dict[str, tuple[int, int]]:
        """Return the projects whose sum is not that of their artifacts, with both: an error of this program, or a change by hand."""
        with self._transactions.begin() as connection:
            return {row.project: (int(row.kept), int(row.found)) for row in connection.execute(_DIFFERENCES)}

    def rebuild(self) -> None:
        """Compute the sums of all projects from their artifacts."""
        with self._transactions.begin() as connection:
            for statement in _REBUILD:
                connection.execute(statement)

    # Look-ups

    def of(self, project: str) -> int:
        """Return the stored bytes of a project."""
        query = sa.select(_usage.c.stored_bytes).where(_usage.c.project == project)
        with self._transactions.begin() as connection:
            kept = connection.execute(query).scalar() or 0
            return kept + int(connection.execute(_UPLOADED_BYTES, {"project": project, "since": _since()}).scalar_one())

    def find_counted(self, project: str, digests: Collection[str]) -> set[str]:
        """Return which of these contents count already: large ones of the project's artifacts, and what was uploaded to it."""
        counted = set[str]()
        with self._transactions.begin() as connection:
            for some in _parts(sorted(digests)):
                values = {"project": project, "artifacts": some, "since": _since()}
                counted |= set(connection.execute(_COUNTED, values).scalars())
        return counted

    def by_project(self) -> dict[str, int]:
        """Return the stored bytes of every project that has any."""
        return self._sums(sa.select(_usage).where(_usage.c.stored_bytes != 0), _UPLOADED_BYTES_OF_ALL, {})

    def of_each(self, projects: Collection[str]) -> dict[str, int]:
        """Return the stored bytes of those of these projects that have any."""
        sums: dict[str, int] = {}
        for some in _parts(projects):
            kept = sa.select(_usage).where(_usage.c.project.in_(some))
            sums |= self._sums(kept, _UPLOADED_BYTES_OF_SOME, {"projects": some})
        return sums

    def _sums(self, kept: sa.Select[Any], uploaded: sa.TextClause, values: Mapping[str, object]) -> dict[str, int]:
        with self._transactions.begin() as connection:
            sums = {row.project: row.stored_bytes for row in connection.execute(kept)}
            for row in connection.execute(uploaded, {"since": _since(), **values}):
                sums[row.project] = sums.get(row.project, 0) + int(row.bytes)
        return sums

    def unmeasured_by_project(self) -> dict[str, int]:
        """Return the number of artifacts of each project that are not measured yet."""
        with self._transactions.begin() as connection:
            return {row.project: row.artifacts for row in connection.execute(_UNMEASURED)}


def _set_state(connection: sa.Connection, state: Measurement, artifacts: list[str]) -> list[str]:
    """Note artifacts as measured, or missing; return those that were not measured before."""
    return sorted(connection.execute(_SET_STATE, {"state": state.value, "artifacts": artifacts}).scalars())


def _since() -> float:
    return time.time() - UPLOAD_SECONDS


def _parts(artifacts: Collection[str]) -> Iterator[list[str]]:
    """Yield artifacts, as many at a time as a query takes."""
    ordered = list(artifacts)
    for start in range(0, len(ordered), _MOST_VARIABLES):
        yield ordered[start : start + _MOST_VARIABLES]


def contents_of(artifact: str, manifest: Manifest) -> dict[str, int] | None:
    """Return the sizes of the contents of an artifact by digest; None for a size that cannot be.

    The manifest and the small files are one of them, under the digest of the artifact.
    """
    files = {file.digest: file.size_bytes for file in manifest.files}
    contents = {digest: size for digest, size in files.items() if size >= SMALL_BYTES and digest != artifact}
    contents[artifact] = len(manifest.to_bytes()) + sum(size for size in files.values() if size < SMALL_BYTES)
    return contents if sum(contents.values()) <= MOST_BYTES else None
