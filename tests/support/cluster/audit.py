"""Check what holds after any fault: each result is taken once, digests are those of an undisturbed run, nothing is left behind."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg

from slipway.artifacts.cached import CachedStore
from slipway.artifacts.digests import ACTIONS, blob_name, manifest_name
from slipway.artifacts.s3.store import S3Store
from slipway_coordinator.lifecycle.records import AttemptRecord, ExportRecord, TaskState
from slipway_coordinator.lifecycle.transitions import Event
from support.cluster.cluster import Cluster
from support.cluster.reference import Undisturbed
from support.coordinators.harness import state, wait_for
from support.servers.s3_server import BUCKET

QUIET_SECONDS = 60.0

_COMPLETED = re.compile(r"#(\d+)#completed$")


def audit(
    cluster: Cluster,
    expected: Mapping[str, Undisturbed],
    *names: str,
    results: Mapping[str, int] | None = None,
) -> None:
    """Wait for exports, the last ones of this cluster, and look at everything they left.

    Args:
        cluster: Where they run; nothing else does.
        expected: By text, for every export this cluster ever had.
        names: The exports that the fault hit.
        results: How many results a task has, for those that have another number than one.
    """
    for name in names:
        export = cluster.finished(name)
        assert state(export) == "succeeded", f"{export.error}\n{cluster.logs()}"
        undisturbed = expected[name.rpartition("/")[2]]
        assert dict(export.outputs) == undisturbed.outputs
        assert {task.id: dict(task.outputs) for task in export.tasks} == undisturbed.tasks
        audit_results(cluster, name, results or {})
    audit_store(cluster, {text: expected[text] for text in cluster.texts}, names)
    audit_machines(cluster)


# Results


@dataclass(frozen=True)
class Told:
    """A message to an export's workflow; ``epoch`` is 0 where it does not matter."""

    kind: str
    epoch: int


def audit_results(cluster: Cluster, name: str, results: Mapping[str, int]) -> None:
    """Every task has one result, or as many as ``results`` says, each of one attempt, which one worker held last."""
    with psycopg.connect(cluster.database) as connection:
        record = _record(connection, name)
        leases = _leases(connection, name)
        told = _told(connection, record)
    attempts = {(task.id, attempt.number): attempt for task in record.tasks for attempt in task.attempts}
    assert leases.keys() == attempts.keys() == told.keys(), (
        "a lease and a history for every attempt, and for nothing else"
    )
    for task in record.tasks:
        assert [attempt.number for attempt in task.attempts] == list(range(1, len(task.attempts) + 1))
        assert task.state is task.attempt.state is TaskState.SUCCEEDED
        taken = [attempt for attempt in task.attempts if attempt.state is TaskState.SUCCEEDED]
        assert len(taken) == results.get(task.id, 1), f"{task.id}: {[a.state for a in task.attempts]}"
    for key, attempt in attempts.items():
        _audit_attempt(attempt, leases[key], told[key], about=f"{name} {key}: {told[key]}, {leases[key]}")


def _audit_attempt(attempt: AttemptRecord, lease: tuple[int, str, str], told: list[Told], *, about: str) -> None:
    """Check that leases were granted under growing epochs, resumed under the same, and ended once by the last holder."""
    epoch, worker, lease_state = lease
    granted = [message.epoch for message in told if message.kind == "leased"]
    assert granted == sorted(granted), about
    assert set(granted) <= set(range(1, epoch + 1)), about
    endings = [message for message in told if message.kind in {"succeeded", "failed"}]
    assert endings == [Told(attempt.state.value, epoch)], about
    assert (attempt.worker, attempt.epoch, lease_state) == (worker, epoch, "ended"), about


def _record(connection: psycopg.Connection, name: str) -> ExportRecord:
    row = connection.execute("SELECT record FROM slipway_exports WHERE name = %s", (name,)).fetchone()
    assert row is not None
    return ExportRecord.from_json(json.loads(row[0]))


def _leases(connection: psycopg.Connection, name: str) -> dict[tuple[str, int], tuple[int, str, str]]:
    """Epoch, worker and state of the lease of each attempt."""
    query = "SELECT task, epoch, worker, state FROM slipway_leases WHERE export = %s"
    found = {}
    for key, *lease in connection.execute(query, (name,)):
        task, _, attempt = key.removeprefix(f"{name}:").rpartition(":")
        found[task, int(attempt)] = (lease[0], lease[1], lease[2])
    return found


def _told(connection: psycopg.Connection, record: ExportRecord) -> dict[tuple[str, int], list[Told]]:
    """Return the events of each attempt that the workflow received, in order."""
    query = "SELECT event, key FROM slipway_events WHERE export = %s AND run = %s ORDER BY number"
    found: dict[tuple[str, int], list[Told]] = {}
    for text, key in connection.execute(query, (record.name, record.run)):
        event = Event.model_validate_json(text)
        completed = _COMPLETED.search(key)
        epoch = int(completed.group(1)) if completed else event.epoch
        found.setdefault((event.task, event.attempt), []).append(Told(event.kind.value, epoch))
    return found


# What is left


def audit_store(cluster: Cluster, expected: Mapping[str, Undisturbed], names: tuple[str, ...]) -> None:
    """Check that the bucket has only the artifacts of all exports, those of ``names`` whole, and one result per task."""
    store = _remote(cluster)
    artifacts = set().union(*(undisturbed.artifacts for undisturbed in expected.values()))
    assert set(store.digests()) == artifacts
    for digest in sorted(set().union(*(expected[name.rpartition("/")[2]].artifacts for name in names))):
        with tempfile.TemporaryDirectory() as folder:
            store.fetch(digest, Path(folder) / "fetched")  # verifies every file
    keys = [entry.key for entry in store.bucket.listing()]
    actions = [key for key in keys if key.startswith(ACTIONS)]
    assert len(actions) == sum(len(undisturbed.tasks) for undisturbed in expected.values())
    known = {manifest_name(digest) for digest in artifacts}
    known |= {blob_name(file.digest) for digest in artifacts for file in cluster.manifest(digest).files}
    assert set(keys) == known | set(actions)
    uploads = cluster.s3.client()._list_multipart_uploads(BUCKET, prefix=f"{cluster.folder.name}/").uploads
    assert [upload.object_name for upload in uploads] == [], "uploads that nobody will finish"


def audit_machines(cluster: Cluster) -> None:
    """Nobody runs a stage, and no worker has anything of an earlier one."""
    checks: list[Callable[[], list[str]]] = [
        lambda: [str(child.pid) for child in stage_processes(cluster.folder)],
        lambda: [str(path) for home in _homes(cluster) for path in home.glob("scratch/*")],
        lambda: [str(path) for home in _homes(cluster) for path in home.glob("cache/uploads/*")],
        lambda: [str(p) for home in _homes(cluster) for p in home.glob("cache/arriving/*") if p.suffix != ".lock"],
    ]
    for check in checks:
        try:
            wait_for(lambda check=check: not check(), seconds=QUIET_SECONDS)  # type: ignore[misc]
        except AssertionError:
            raise AssertionError(f"left behind: {check()}\n{cluster.logs()}") from None


def stage_processes(folder: Path) -> list[psutil.Process]:
    """Return all processes of stages of the cluster in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("SLIPWAY_TEST_STAGES") == str(folder)
            if (
                ours
                and "slipway.execution.child_main" in process.cmdline()
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _homes(cluster: Cluster) -> list[Path]:
    return [worker.home for worker in cluster.running if worker.wanted]


def _remote(cluster: Cluster) -> S3Store:
    store = cluster.store()
    assert isinstance(store, CachedStore)
    return store.remote
