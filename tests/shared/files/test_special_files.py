"""Whatever stands in place of a file of SLIPWAY_HOME, a command ends with its reason and waits for nobody."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore
from slipway.embedded.coordinator import Embedded
from slipway.files.regular_file import open_lock
from slipway.reasons import REASONS
from slipway.settings import Settings
from slipway_coordinator.leadership.file_lock import FileLock
from support.commands.cli import run_here
from support.hostile.json_grammar import answer


@pytest.fixture
def home() -> Iterator[Path]:
    """A home with a short path, because that of a socket is limited."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        home = Path(folder)
        with Embedded(Settings(home=home, scratch=home / "scratch"), "mine"):
            pass
        (home / "content" / "a").parent.mkdir()
        (home / "content" / "a").write_text("1")
        LocalStore(home / "store").put_files({"a": home / "content" / "a"})
        yield home


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": socket_at,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("elsewhere"),
}
PLACES = ("state.db", "state.db.lock", "state.db-wal", "state.db-shm", "state.db-journal", "store/lock", "logs")
FURTHER = (
    ("state.db-wal", "device"),
    ("state.db-shm", "folder"),
    ("state.db-journal", "device"),
    ("state.db-journal", "link"),
    ("logs", "device"),
)
"""What is read without end, or made, if nobody looks first; each kind of file is put in place of the state itself."""
COMMANDS = (("cache", "gc", "--json"), ("cache", "ls", "--json"), ("list", "--json"), ("get", "mine", "--json"))


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *((place, "pipe") for place in PLACES),
        *((place, kind) for place in ("state.db", "store/lock") for kind in sorted(KINDS.keys() - {"pipe"})),
        *(pytest.param(place, kind, marks=pytest.mark.slow) for place, kind in FURTHER),
    ],
)
def test_no_command_waits_for_a_file_that_is_none(
    home: Path, place: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / place if not place.startswith("state") else home / "exports" / "mine" / place
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    monkeypatch.setenv("SLIPWAY_HOME", str(home))
    for words in COMMANDS:
        code = run_here(*words)
        said, err = capsys.readouterr()
        assert "Traceback" not in err
        document = json.loads(said)
        assert code == 0 or REASONS[document["reason"]].category.exit_code == code
        assert code in {0, 3}, err
        if words[1] == "gc" and place in {"state.db", "state.db.lock"} and kind not in {"link", "folder"}:
            assert code == 3
            assert kind in err or "device" in err
    assert not (path.parent / "elsewhere").exists()


@pytest.mark.parametrize("place", ["state.db", "state.db.lock", "state.db-wal"])
def test_an_export_does_not_begin_on_a_state_that_is_no_file(home: Path, place: str) -> None:
    path = home / "exports" / "mine" / place
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with (
        pytest.raises(OSError, match="not a regular file but a pipe"),
        Embedded(Settings(home=home, scratch=home / "scratch"), "mine"),
    ):
        pytest.fail("it began")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_lock_file_is_a_regular_file(home: Path, kind: str) -> None:
    KINDS[kind](home / "x.lock")
    with pytest.raises(OSError, match=r"not a regular file|directory|symbolic links|No such device"):
        answer(lambda: open_lock(home / "x.lock"))
    with pytest.raises(OSError, match=r"not a regular file|directory|symbolic links|No such device"):
        answer(lambda: FileLock(home / "x").acquire())
    assert not (home / "elsewhere").exists()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_blob_or_manifest_that_is_no_file_is_missing_or_corrupt(
    home: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(home))
    (digest,) = LocalStore(home / "store").digests()
    for folder in ("blobs", "manifests", "blobs"):
        for path in [path for path in (home / "store" / folder).rglob("*") if not path.is_dir()]:
            path.unlink()
            KINDS[kind](path)
        for words in (("verify", digest), ("pull", digest, str(home / "pulled")), ("cache", "ls"), ("cache", "gc")):
            code = run_here(*words, "--json")
            said, err = capsys.readouterr()
            document = json.loads(said)
            assert "Traceback" not in err
            assert code == 0 or REASONS[document["reason"]].category.exit_code == code
            assert document.get("reason", "") in {"", "ARTIFACT_NOT_FOUND", "ARTIFACT_CORRUPT", "ARTIFACT_INVALID"}, err
            assert (words[0] == "cache") == (code == 0), (words, err)
        assert not (home / "pulled").exists()
