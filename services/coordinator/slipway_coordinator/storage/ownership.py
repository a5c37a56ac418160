"""Record which artifacts belong to which project, and which content each project has uploaded.

A project owns the sources and results of its exports, for as long as these are remembered, and the artifacts it made of content
it uploaded. Uploaded content is remembered for a day, so that an artifact can be made of it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

import sqlalchemy as sa

from slipway_coordinator.storage.schema import artifacts as _artifacts
from slipway_coordinator.storage.schema import blobs as _blobs

_UPLOAD_SECONDS = 86_400.0
"""Longest time between the upload of content and the creation of its artifact."""
_AT_ONCE = 500  # variables of one query

_ADD_ARTIFACT = sa.text("""
    INSERT INTO slipway_artifacts (project, digest, export, create_time)
    VALUES (:project, :digest, :export, :create_time) ON CONFLICT DO NOTHING
""")
_ADD_BLOB = sa.text("""
    INSERT INTO slipway_blobs (project, digest, create_time) VALUES (:project, :digest, :create_time)
    ON CONFLICT DO NOTHING
""")


class Ownership:
    """The tables of artifacts and content. All calls block for some milliseconds.

    Args:
        engine: The database; see :class:`~slipway_coordinator.storage.database.Database`.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def find_owned(self, project: str, digests: Iterable[str]) -> set[str]:
        """Return which of these artifacts belong to a project."""
        return self._find(_artifacts, project, digests)

    def page(self, project: str, *, limit: int, after: str = "") -> list[str]:
        """Return digests of a project's artifacts (``-``: of all projects) that sort after ``after``."""
        query = sa.select(_artifacts.c.digest).distinct().where(_artifacts.c.digest > after)
        if project != "-":
            query = query.where(_artifacts.c.project == project)
        with self._engine.connect() as connection:
            return list(connection.execute(query.order_by(_artifacts.c.digest).limit(limit)).scalars())

    def find_uploaded(self, project: str, digests: Iterable[str]) -> set[str]:
        """Return which of these contents a project has uploaded."""
        return self._find(_blobs, project, digests)

    def record_upload(self, project: str, digest: str) -> None:
        """Record that a project has uploaded the content of a digest."""
        with self._engine.begin() as connection:
            old = _blobs.c.create_time < time.time() - _UPLOAD_SECONDS
            connection.execute(sa.delete(_blobs).where(old))
            connection.execute(_ADD_BLOB, {"project": project, "digest": digest, "create_time": time.time()})

    def record_artifact(self, project: str, digest: str) -> None:
        """Record that a project has made an artifact of uploaded content; making it again renews its time."""
        row = {"project": project, "digest": digest, "export": ""}
        with self._engine.begin() as connection:
            connection.execute(_ADD_ARTIFACT, row | {"create_time": time.time()})
            made = [_artifacts.c[name] == value for name, value in row.items()]
            connection.execute(sa.update(_artifacts).where(*made).values(create_time=time.time()))

    def forget_artifacts(self, *, before: float) -> None:
        """Forget artifacts made before a time that belong to no export."""
        query = sa.delete(_artifacts).where(_artifacts.c.export == "", _artifacts.c.create_time < before)
        with self._engine.begin() as connection:
            connection.execute(query)

    def _find(self, table: sa.Table, project: str, digests: Iterable[str]) -> set[str]:
        asked, matches = sorted(set(digests)), set[str]()
        with self._engine.connect() as connection:
            for start in range(0, len(asked), _AT_ONCE):
                some = table.c.digest.in_(asked[start : start + _AT_ONCE])
                matches |= set(
                    connection.execute(sa.select(table.c.digest).where(table.c.project == project, some)).scalars()
                )
        return matches


def note(connection: sa.Connection, export: str, digests: Collection[str], *, project: str) -> None:
    """Give a project the artifacts of one of its exports, within the transaction that stores the export."""
    now = time.time()
    rows = [
        {"project": project, "digest": digest, "export": export, "create_time": now} for digest in sorted(set(digests))
    ]
    if rows:
        connection.execute(_ADD_ARTIFACT, rows)


def forget(connection: sa.Connection, export: str) -> None:
    """Remove a project's ownership through an export that is deleted."""
    connection.execute(sa.delete(_artifacts).where(_artifacts.c.export == export))
