"""Garbage collection that fails closed: beside work under way in other processes, over damage, and over what is not the store's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipway.artifacts.collection import Collected, collect
from slipway.artifacts.digests import blob_name, digest_bytes
from slipway.artifacts.local import LocalStore
from slipway.artifacts.manifest import Manifest
from slipway.errors import ArtifactError
from support.commands.cli import Done, run_here, slipway

COLLECT = ("cache", "gc", "--older-than", "0s", "--json")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> LocalStore:
    return LocalStore(home / "store")


def stored(store: LocalStore, text: str) -> str:
    source = store.root.parent / "source"
    source.write_text(text)
    return store.put_files({"text": source})


def age(store: LocalStore, digest: str, seconds: float = 3600) -> None:
    os.utime(store.manifest_path(digest), (time.time() - seconds,) * 2)


class Command:
    """The command in this process, over a home."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capfd, self._monkeypatch = capfd, monkeypatch

    def __call__(self, *words: str | Path, home: Path) -> Done:
        self._monkeypatch.setenv("SLIPWAY_HOME", str(home))
        code = run_here(*words)
        return Done(code, *self._capfd.readouterr())


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capfd, monkeypatch)


EXPORT = """
import sys
from pathlib import Path
from slipway.exporting.opening import artifacts_at
from slipway.settings import Settings
import os

with artifacts_at("", Settings.from_environment(os.environ)) as store:
    print("begun", flush=True)
    sys.stdin.readline()
    print(store.put_files({"text": Path(sys.argv[1])}), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def export(home: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that opens the store as every command does, and stores a source when it is told to; then it waits."""
    source = tmp_path / "mine"
    source.write_text("a source that no state names yet")
    process = subprocess.Popen(
        [sys.executable, "-c", EXPORT, source],
        env={**os.environ, "SLIPWAY_HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process
        process.kill()


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_what_an_export_stored_before_it_has_a_state_is_kept(
    home: Path, store: LocalStore, export: subprocess.Popen[str], command: Command
) -> None:
    others = stored(store, "nobody's")
    age(store, others)
    digest = told(export)
    assert slipway(*COLLECT, home=home).json["artifacts"] == [others]
    assert store.exists(digest)
    export.kill()
    export.wait()
    assert command(*COLLECT, home=home).json["artifacts"] == [digest]
    assert list((store.root / "uses").iterdir()) == []


def test_what_a_long_export_used_at_its_beginning_is_kept(store: LocalStore) -> None:
    before, reused = stored(store, "before"), stored(store, "reused")
    for digest in (before, reused):
        age(store, digest, 30 * 86_400)
    with store.using():
        (mark,) = (store.root / "uses").iterdir()
        os.utime(mark, (time.time() - 5 * 86_400,) * 2)
        store.fetch(reused, store.root.parent / "fetched")
        age(store, reused, 4 * 86_400)
        assert collect(store, max_age_seconds=3600, keep=store.under_way).artifacts == (before,)
    assert collect(store, max_age_seconds=3600, keep=store.under_way).artifacts == (reused,)


def test_what_is_no_mark_of_work_protects_nothing_and_stays(
    home: Path, store: LocalStore, command: Command, tmp_path: Path
) -> None:
    """As a backup, a synchronised folder or a person leaves it: before, a collection kept everything for as long as it lay there."""
    unused = stored(store, "unused")
    age(store, unused)
    place = store.root / "uses"
    for name in ("note.txt", ".DS_Store", "0" * 32, "F" * 32, "1" * 33):
        (place / name).write_text("somebody's")
    (place / "folder").mkdir()
    (place / "empty").mkdir()
    (place / "folder" / "deep").write_text("somebody's")
    (place / ("2" * 32)).symlink_to(tmp_path)
    os.mkfifo(place / ("3" * 32))
    for path in place.iterdir():
        os.utime(path, (time.time() - 86_400,) * 2, follow_symlinks=False)
    before = sorted(place.iterdir())
    assert command(*COLLECT, home=home).json["artifacts"] == [unused]
    assert sorted(place.iterdir()) == before
    used = stored(store, "used")
    with store.using():
        stored(store, "used")
        assert command(*COLLECT, home=home).json["artifacts"] == [], "what is one counts beside them"
    assert command(*COLLECT, home=home).json["artifacts"] == [used]


COLLECTION = """
import sys
from pathlib import Path
from slipway.artifacts.collection import Collected, collect
from slipway.artifacts.local import LocalStore

store = LocalStore(Path(sys.argv[1]))

def in_use():
    print("asked", flush=True)
    sys.stdin.readline()
    return store.under_way()

print(*collect(store, max_age_seconds=0, keep=in_use).artifacts, flush=True)
"""


def test_what_is_in_use_is_asked_while_nobody_can_store_or_reuse(home: Path, store: LocalStore, tmp_path: Path) -> None:
    """A collection that has asked what to keep, and a process that reuses an old result before the rest is removed."""
    from slipway.artifacts.store import ActionResult

    old, key = stored(store, "old"), "0" * 64
    store.record_action(key, ActionResult({"out": old}))
    age(store, old)
    script = "import sys; from pathlib import Path; from slipway.artifacts.local import LocalStore as S; "
    script += "found = S(Path(sys.argv[1])).action(sys.argv[2]); print(found and found.outputs['out'], flush=True)"
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", COLLECTION, store.root], **piped) as collecting:
        assert collecting.stdout is not None
        assert collecting.stdout.readline() == "asked\n"
        with subprocess.Popen([sys.executable, "-c", script, store.root, key], **piped) as reusing:
            with pytest.raises(subprocess.TimeoutExpired):
                reusing.wait(1.5)  # it does not get an answer that is about to be wrong
            assert told(collecting) == old
            assert reusing.communicate()[0] == "None\n"


def damaged(state: Path) -> None:
    data = bytearray(state.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    state.write_bytes(data)


def emptied(state: Path) -> None:
    state.write_bytes(b"")


def overwritten(state: Path) -> None:
    state.write_bytes(os.urandom(8192))


def replaced_by_a_folder(state: Path) -> None:
    state.unlink()
    state.mkdir()


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with an export that was interrupted after it had made something."""
    from slipway_coordinator.lifecycle.records import ExportRecord
    from slipway_coordinator.storage.database import Database
    from slipway_coordinator.storage.database_access import SqliteState

    home = tmp_path_factory.mktemp("unfinished") / "home"
    digest = stored(LocalStore(home / "store"), "finished")
    state = home / "exports" / "e-1" / "state.db"
    state.parent.mkdir(parents=True)
    database = Database(SqliteState(state).url)
    database.prepare()
    record = ExportRecord(
        name="projects/default/exports/e-1",
        configuration={},
        request_hash="x",
        sources={"base": digest},
        tasks=(),
        create_time=0.0,
    )
    assert database.insert(record)
    database.close()
    return home


@pytest.mark.parametrize("harm", [damaged, emptied, overwritten, replaced_by_a_folder])
def test_a_state_that_cannot_be_read_stops_it_with_a_reason(
    unfinished: Path, tmp_path: Path, command: Command, harm: Callable[[Path], None]
) -> None:
    home = Path(shutil.copytree(unfinished, tmp_path / "home"))
    store = LocalStore(home / "store")
    (digest,) = store.digests()
    assert command(*COLLECT, home=home).json["artifacts"] == []
    harm(home / "exports" / "e-1" / "state.db")
    for words in (COLLECT, (*COLLECT, "--dry-run"), ("cache", "gc", "--json")):
        done = command(*words, home=home)
        assert (done.code, done.json["reason"]) == (3, "STATE_SCHEMA"), done.err
        assert str(home / "exports" / "e-1") in done.json["remedy"] + done.json["error_message"]
        assert store.exists(digest)
    shutil.rmtree(home / "exports" / "e-1")  # as the remedy says
    assert command(*COLLECT, home=home).json["artifacts"] == [digest]


def test_states_in_a_folder_that_cannot_be_read_stop_it(unfinished: Path, tmp_path: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("acting as somebody else needs setpriv")
    home = tmp_path / "home"
    shutil.copytree(unfinished, home)
    for path in (tmp_path, *home.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    for above in tmp_path.parents:
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o055)
    (home / "exports").chmod(0)
    words = [sys.executable, "-c", "from slipway.cli import main; main()", *COLLECT]
    prefix = ["setpriv", "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*prefix, *words], env={**os.environ, "SLIPWAY_HOME": str(home)}, capture_output=True, text=True, check=False
    )
    (home / "exports").chmod(0o777)
    assert (done.returncode, "FILE_ERROR" in done.stdout) == (3, True), done.stdout + done.stderr
    assert len(LocalStore(home / "store").digests()) == 1


def test_what_is_not_the_stores_is_left_alone_and_stops_nothing(
    home: Path, store: LocalStore, command: Command
) -> None:
    used, unused = stored(store, "used"), stored(store, "unused")
    age(store, unused)
    strays = []
    for folder in ("manifests/sha256", "blobs/sha256", "actions"):
        for name in ("ab/folder/deep", "ab/.nfs0001", "note.txt", f"zz/{'0' * 64}", f"00/{'1' * 64}", "ab/x.json"):
            path = store.root / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("somebody's")
            strays.append(path)
    (store.root / "manifests/sha256/11" / ("1" * 64)).mkdir(parents=True)
    (store.root / "uploads" / "folder").mkdir()
    (store.root / "uses" / "folder" / "deep").mkdir(parents=True)
    os.mkfifo(store.root / "manifests/sha256/ab/pipe")
    assert command("cache", "gc", "--older-than", "1800s", "--json", home=home).json["artifacts"] == [unused]
    assert command("cache", "ls", "--json", home=home).json["artifacts"][0]["digest"] == used
    assert all(path.read_text() == "somebody's" for path in strays)


def test_blobs_of_a_manifest_that_another_version_wrote_are_kept(store: LocalStore) -> None:
    digest = stored(store, "content")
    (file,) = store.manifest(digest).files
    newer = Manifest((file,)).to_bytes().replace(b'"version":1', b'"version":2')
    path = store.manifest_path(digest_bytes(newer))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(newer)
    age(store, digest)
    assert collect(store, max_age_seconds=60) == Collected((digest,), 0, 0)
    assert store.blob_path(file.digest).read_text() == "content"


@pytest.mark.timeout(60)
def test_what_lies_in_a_blobs_place_is_no_blob(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("content")
    empty = stored(store, "")
    digest = stored(store, "content")
    for name, harm in {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(tmp_path / "elsewhere")}.items():
        for broken, text in ((digest, "content"), (empty, "")):
            (file,) = store.manifest(broken).files
            blob = store.blob_path(file.digest)
            blob.unlink(missing_ok=True)
            harm(blob)
            fresh = LocalStore(store.root)
            assert not fresh.exists(broken)
            with pytest.raises(ArtifactError) as raised:
                fresh.fetch(broken, tmp_path / f"{name}-{text}")
            assert raised.value.reason in {"ARTIFACT_CORRUPT", "ARTIFACT_NOT_FOUND"}
            if not os.path.lexists(blob):
                harm(blob)
            assert stored(fresh, text) == broken, "storing it again repairs the store"
            assert fresh.exists(broken)


@pytest.mark.timeout(60)
def test_a_pipe_in_a_blobs_place_does_not_hang_pull(home: Path, store: LocalStore, tmp_path: Path) -> None:
    digest = stored(store, "content")
    (file,) = store.manifest(digest).files
    blob = store.root / blob_name(file.digest)
    blob.unlink()
    os.mkfifo(blob)
    done = slipway("pull", digest, tmp_path / "pulled", "--json", home=home, timeout=30)
    assert (done.code, done.json["reason"]) == (7, "ARTIFACT_CORRUPT"), done.err
    assert not (tmp_path / "pulled").exists()
