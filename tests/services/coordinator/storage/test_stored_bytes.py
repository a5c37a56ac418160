"""Bytes of projects: content counts once in each project that has it, for as long as one of its artifacts does; SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time

import pytest
import sqlalchemy as sa

from slipway.artifacts import Manifest, ManifestFile
from slipway_coordinator.lifecycle.quotas import ProjectUsage
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.storage import migrations, schema
from slipway_coordinator.storage.database import Database
from slipway_coordinator.storage.projects import gpu_seconds, stored_bytes
from slipway_coordinator.storage.projects.stored_bytes import MOST_BYTES, SMALL_BYTES, contents_of
from support.coordinators.harness import tiny_export, tiny_task

LARGE = 3 * SMALL_BYTES


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def state_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def artifact(**sizes: int) -> Manifest:
    """An artifact with a file for each name, whose content is that of the name and size."""
    return Manifest.of(ManifestFile(name, size, digest(f"{name}{size}"), "") for name, size in sizes.items())


def own_bytes(manifest: Manifest) -> int:
    """What an artifact takes besides its large files."""
    return len(manifest.to_bytes()) + sum(f.size_bytes for f in manifest.files if f.size_bytes < SMALL_BYTES)


def export(name: str, *sources: Manifest, project: str = "red") -> ExportRecord:
    record = tiny_export(name, tiny_task("m"))
    named = {str(number): each.digest for number, each in enumerate(sources)}
    return record.with_(name=f"projects/{project}/exports/{name}", sources=named)


def measure(database: Database, *manifests: Manifest) -> None:
    database.stored_bytes.record({each.digest: contents_of(each.digest, each) for each in manifests})


BASE, TUNED = artifact(weights=LARGE, tokenizer=10), artifact(weights=LARGE, adapter=2 * SMALL_BYTES)
BASE_BYTES = LARGE + own_bytes(BASE)
BOTH_BYTES = BASE_BYTES + 2 * SMALL_BYTES + own_bytes(TUNED)


def test_content_counts_once_in_a_project_and_fully_in_each(database: Database) -> None:
    stored = database.stored_bytes
    assert database.insert(export("a", BASE))
    assert database.insert(export("b", BASE, TUNED))
    assert database.insert(export("c", BASE, project="blue"))
    assert stored.of("red") == 0
    assert stored.unmeasured(limit=9) == sorted([BASE.digest, TUNED.digest])
    assert stored.unmeasured(limit=1, after=min(BASE.digest, TUNED.digest)) == [max(BASE.digest, TUNED.digest)]
    assert database.usage() == {"red": ProjectUsage(0, 2, 0.0), "blue": ProjectUsage(0, 1, 0.0)}
    assert database.find_projects() == {"red", "blue"}
    assert database.usage_of(["red", "none"]) == {"red": ProjectUsage(0, 2, 0.0), "none": ProjectUsage()}
    for _ in range(2):  # as after a restart
        measure(database, BASE, TUNED)
    assert (stored.of("red"), stored.of("blue"), stored.unmeasured(limit=9)) == (BOTH_BYTES, BASE_BYTES, [])
    database.delete("projects/red/exports/b")
    assert (stored.of("red"), stored.of("blue")) == (BASE_BYTES, BASE_BYTES), "another export has the base"
    for _ in range(2):
        database.delete("projects/red/exports/a")
    assert (stored.of("red"), stored.of("blue")) == (0, BASE_BYTES)
    assert database.insert(export("d", BASE))
    assert stored.of("red") == BASE_BYTES, "it is measured already"
    for name in ("red/exports/d", "blue/exports/c"):
        database.delete(f"projects/{name}")
    assert (stored.of("red"), stored.of("blue")) == (0, 0)
    with database.transactions.begin() as connection:
        for table in (schema.measurements, schema.contents, schema.stored):
            assert connection.execute(sa.select(table)).all() == [], f"{table.name} keeps what nobody has"


def test_results_and_uploads_count_as_sources_do(database: Database) -> None:
    first = export("a", BASE)
    assert database.insert(first)
    done = first.tasks[0].with_(outputs={"out": TUNED.digest})
    later = first.with_task(done).with_(revision=2)
    for _ in range(2):
        assert database.save(later, before=first)
    database.ownership.record_artifact("red", TUNED.digest)
    measure(database, BASE, TUNED)
    assert database.stored_bytes.of("red") == BOTH_BYTES
    database.delete(first.name)
    assert database.stored_bytes.of("red") == LARGE + 2 * SMALL_BYTES + own_bytes(TUNED)
    assert database.ownership.forget_artifacts(before=time.time() + 1) == 1
    assert database.stored_bytes.of("red") == 0


def test_uploaded_content_counts_until_an_artifact_with_it_does_or_for_a_day(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, ownership = database.stored_bytes, database.ownership
    files = {file.digest: file.size_bytes for file in BASE.files}
    for name, size in files.items():
        ownership.record_upload("red", name, size_bytes=size)
        assert stored.find_counted("red", [*files, TUNED.digest]) <= set(files)
    ownership.record_upload("blue", "sha256:b", size_bytes=7)
    assert stored.find_counted("red", files) == set(files)
    assert stored.by_project() == {"red": sum(files.values()), "blue": 7}
    assert stored.of_each(["blue", "none"]) == {"blue": 7}
    for _ in range(2):
        ownership.record_artifact("red", BASE.digest, BASE)
        assert (stored.of("red"), stored.unmeasured(limit=9)) == (BASE_BYTES, []), "it is measured at once"
    for name, size in files.items():
        ownership.record_upload("red", name, size_bytes=size)
    assert stored.of("red") == BASE_BYTES + sum(files.values()), (
        "what is uploaded again counts until an artifact has it"
    )
    later = time.time() + stored_bytes.UPLOAD_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: later)
    assert stored.by_project() == {"red": BASE_BYTES}
    assert stored.find_counted("red", files) == {digest(f"weights{LARGE}")}


def test_what_is_missing_counts_once_it_was_made_again(database: Database) -> None:
    stored = database.stored_bytes
    assert database.insert(export("a", BASE))
    stored.record({BASE.digest: None})
    assert (stored.of("red"), stored.unmeasured(limit=9)) == (0, [])
    assert database.insert(export("b", BASE, project="blue"))
    assert stored.unmeasured(limit=9) == [BASE.digest]
    stored.record({BASE.digest: None})
    database.ownership.note(export("b").name, [BASE.digest], project="blue")
    assert stored.unmeasured(limit=9) == [BASE.digest], "the same export made it again"
    measure(database, BASE)
    assert (stored.of("red"), stored.of("blue")) == (BASE_BYTES, BASE_BYTES)
    stored.record({BASE.digest: None})
    assert stored.of("red") == BASE_BYTES, "what is measured stays"
    measure(database, TUNED)
    assert stored.of("red") == BASE_BYTES, "of what no project has, nothing is kept"


def test_a_transaction_that_is_rolled_back_counts_nothing(database: Database) -> None:
    assert database.insert(export("a", BASE))
    measure(database, BASE)
    with contextlib.suppress(ZeroDivisionError), database.transactions.begin():
        database.delete("projects/red/exports/a")
        assert database.stored_bytes.of("red") == 0
        _ = 1 / 0
    assert database.stored_bytes.of("red") == BASE_BYTES


def test_any_order_of_changes_leads_to_what_is_there(database: Database) -> None:
    """The sums that are kept are those that a count of everything gives, after each of many changes."""
    choice = random.Random(7)
    contents = {f"f{number}": choice.choice([5, SMALL_BYTES, LARGE]) for number in range(6)}
    made = [artifact(**{name: contents[name] for name in choice.sample(sorted(contents), 3)}) for _ in range(8)]
    manifests = {each.digest: each for each in made}
    owned: dict[str, set[tuple[str, str]]] = {"red": set(), "blue": set()}  # artifacts with the exports that have them
    measured: set[str] = set()
    for number in range(80):
        project = choice.choice(sorted(owned))
        match choice.choice(["insert", "insert", "upload", "measure", "delete", "forget"]):
            case "insert":
                sources = choice.sample(made, 2)
                assert database.insert(export(f"e{number}", *sources, project=project))
                owned[project] |= {(each.digest, f"projects/{project}/exports/e{number}") for each in sources}
            case "upload":
                database.ownership.record_artifact(project, (one := choice.choice(made)).digest)
                owned[project].add((one.digest, ""))
            case "measure":
                for each in database.stored_bytes.unmeasured(limit=choice.choice([1, 9])):
                    measure(database, manifests[each])
                    measured.add(each)
            case "delete" if names := sorted({name for _, name in owned[project] if name}):
                database.delete(name := choice.choice(names))
                owned[project] = {one for one in owned[project] if one[1] != name}
            case "forget":
                database.ownership.forget_artifacts(before=time.time() + 1)
                owned = {name: {one for one in has if one[1]} for name, has in owned.items()}
        assert database.stored_bytes.find_differences() == {}, f"after change {number}"
        measured &= {each for has in owned.values() for each, _ in has}
        for name, has in owned.items():
            known = [contents_of(each, manifests[each]) or {} for each in {one for one, _ in has} & measured]
            expected = sum({key: size for each in known for key, size in each.items()}.values())
            assert database.stored_bytes.of(name) == expected, f"after change {number}"


def test_sums_that_are_wrong_are_found_and_computed_again(database: Database) -> None:
    stored = database.stored_bytes
    assert database.insert(export("a", BASE, TUNED))
    assert database.insert(export("b", BASE, project="blue"))
    measure(database, BASE, TUNED)
    with database.transactions.begin() as connection:
        connection.execute(sa.text("UPDATE slipway_usage SET stored_bytes = 1 WHERE project = 'red'"))
        connection.execute(sa.text("INSERT INTO slipway_usage (project, stored_bytes) VALUES ('gone', 7)"))
    assert stored.find_differences() == {"red": (1, BOTH_BYTES), "gone": (7, 0)}
    stored.rebuild()
    assert stored.by_project() == {"red": BOTH_BYTES, "blue": BASE_BYTES}
    assert stored.find_differences() == {}
    database.delete("projects/red/exports/a")
    assert stored.by_project() == {"blue": BASE_BYTES}, "the number of artifacts with each content is right, too"


def test_small_files_count_with_their_artifact_and_impossible_sizes_not_at_all() -> None:
    assert contents_of(BASE.digest, BASE) == {digest(f"weights{LARGE}"): LARGE, BASE.digest: own_bytes(BASE)}
    twice = Manifest.of([ManifestFile(name, LARGE, digest("same"), "") for name in "ab"])
    assert sum((contents_of(twice.digest, twice) or {}).values()) == LARGE + own_bytes(twice)
    empty = Manifest(())
    assert contents_of(empty.digest, empty) == {empty.digest: len(empty.to_bytes())}
    assert contents_of("x", artifact(weights=MOST_BYTES)) is None
    assert contents_of("x", artifact(weights=2**62)) is None


def test_artifacts_of_an_earlier_version_are_measured_after_the_migration(database: Database) -> None:
    ended = export("a", BASE, TUNED).with_(state=ExportState.SUCCEEDED)
    assert database.insert(ended)
    assert database.insert(export("b", BASE, project="blue"))
    with database.transactions.begin() as connection:  # back to what the version before had
        for table in ("measurements", "contents", "stored", "usage", "gpu_seconds"):
            connection.execute(sa.text(f"DROP TABLE slipway_{table}"))
        connection.execute(sa.text("DROP INDEX ix_slipway_leases_gpus"))
        connection.execute(sa.text("DROP INDEX ix_slipway_blobs_sizes"))
        connection.execute(sa.text("DROP INDEX ix_slipway_exports_newest"))
        connection.execute(sa.text("ALTER TABLE slipway_blobs DROP COLUMN size_bytes"))
        connection.execute(sa.text("ALTER TABLE slipway_epochs DROP COLUMN alive_time"))
        for column in ("gpus", "since"):
            connection.execute(sa.text(f"ALTER TABLE slipway_leases DROP COLUMN {column}"))
        for column in ("summary", "shape"):
            connection.execute(sa.text(f"ALTER TABLE slipway_exports DROP COLUMN {column}"))
        connection.execute(sa.text("DELETE FROM slipway_schema WHERE version >= 9"))
    assert database.migrate() == len(migrations.MIGRATIONS) - 8
    database.prepare()
    assert database.stored_bytes.unmeasured(limit=9) == sorted([BASE.digest, TUNED.digest])
    measure(database, BASE, TUNED)
    assert database.stored_bytes.by_project() == {"red": BOTH_BYTES, "blue": BASE_BYTES}


def test_looking_reads_few_rows(database: Database) -> None:
    """What is asked at the creation of an export, or each quarter of a minute, reads no table without one of its indexes."""
    for number in range(50):
        assert database.insert(export(f"e{number}", artifact(weights=number), project=f"p{number % 5}"))
        database.ownership.record_upload("p1", digest(str(number)), size_bytes=7)
    measure(database, *(artifact(weights=number) for number in range(45)))
    values = {"project": "p1", "since": 0.0, "after": "", "limit": 9, "first": 0, "last": 9}
    with database.transactions.begin() as connection:
        if connection.dialect.name != "sqlite":
            pytest.skip("PostgreSQL reads small tables without an index")
        connection.execute(sa.text("ANALYZE"))

        def plan(query: sa.TextClause) -> str:
            text = query.text.replace(":projects", "(:project)")
            used = {name: value for name, value in values.items() if f":{name}" in text}
            return str(connection.execute(sa.text(f"EXPLAIN QUERY PLAN {text}"), used).all())

        uploads, running = plan(stored_bytes._UPLOADED_BYTES), plan(gpu_seconds._OF_SOME)
        assert "SEARCH slipway_blobs" in plan(stored_bytes._UPLOADED_BYTES_OF_SOME)
        unmeasured = [plan(query) for query in (stored_bytes._NEXT, stored_bytes._UNMEASURED)]
    assert "SEARCH slipway_blobs" in uploads
    assert "ix_slipway_leases_gpus" in running
    assert "SEARCH slipway_gpu_seconds" in running
    assert all("ix_slipway_measurements_unknown" in one for one in unmeasured), unmeasured
    assert "SEARCH a USING" in unmeasured[1]
