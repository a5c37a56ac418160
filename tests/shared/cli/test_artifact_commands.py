"""``slipway push``, ``pull``, ``verify`` and ``cache``: artifacts of this machine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from slipway.artifacts.digests import BLOBS
from support.commands.cli import Done, in_process


def test_artifacts_go_in_and_out_and_are_collected(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "text.txt").write_text("held-out text")
    digest = in_process(capfd, "push", folder, home=home).out.strip()
    assert digest.startswith("sha256:")
    assert in_process(capfd, "pull", digest, tmp_path / "copy", home=home).code == 0
    assert (tmp_path / "copy" / "text.txt").read_text() == "held-out text"
    again = in_process(capfd, "pull", digest, tmp_path / "copy", "--json", home=home)
    assert (again.code, again.json["reason"]) == (3, "OUTPUT_EXISTS")
    assert in_process(capfd, "verify", digest, home=home).code == 0
    listing = in_process(capfd, "cache", "ls", "--json", home=home).json
    assert [entry["digest"] for entry in listing["artifacts"]] == [digest]
    assert listing["blob_bytes"] == 13
    shown = in_process(capfd, "cache", "ls", home=home).out
    assert digest not in shown
    short = next(word for word in shown.split() if word.startswith("sha256:"))
    assert digest.startswith(short)
    assert in_process(capfd, "verify", short, home=home).code == 0
    assert in_process(capfd, "pull", short, tmp_path / "by-short", home=home).code == 0
    unknown = in_process(capfd, "verify", "sha256:" + "0" * 12, "--json", home=home)
    assert (unknown.code, unknown.json["reason"]) == (3, "ARTIFACT_NOT_FOUND")
    kept = in_process(capfd, "cache", "gc", "--older-than", "1h", "--json", home=home).json
    assert kept["artifacts"] == []
    would = in_process(capfd, "cache", "gc", "--max-size", "1", "--dry-run", "--json", home=home).json
    assert (would["artifacts"], would["freed_bytes"]) == ([digest], 13)
    assert in_process(capfd, "cache", "gc", "--older-than", "0s", home=home).code == 0
    gone = in_process(capfd, "pull", digest, tmp_path / "other", "--json", home=home)
    assert (gone.code, gone.json["reason"]) == (3, "ARTIFACT_NOT_FOUND")
    assert not (tmp_path / "other").exists()


def test_a_transfer_shows_its_progress(capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    sizes = {f"{number}.bin": 300_000 + number for number in range(5)}
    for name, size in sizes.items():
        (folder / name).write_bytes(name[:1].encode() * size)
    pushed = in_process(capfd, "push", folder, "--progress", "json", home=home)
    for blob in filter(Path.is_file, (home / "store" / BLOBS).rglob("*")):
        os.utime(blob, (0, 0))  # so that this process reads them again, as another one would
    pulled = in_process(capfd, "pull", pushed.out.strip(), tmp_path / "copy", "--progress", "json", home=home)
    for done, name, phase in ((pushed, "push", "storing"), (pulled, "pull", "fetching")):
        events = [json.loads(line) for line in done.err.splitlines()]
        states = [each["state"] for each in events if each["event"] == "task"]
        first = next(each for each in events if each["event"] == "progress")
        assert states == ["running", "succeeded"]
        assert (first["task"], first["phase"], first["unit"]) == (name, phase, "bytes")
        assert 0 < first["done"] <= first["total"] == sum(sizes.values())
    quiet = in_process(capfd, "push", folder, "--progress", "none", home=home)
    assert (quiet.code, quiet.err) == (0, "")


def test_what_is_not_there_is_told_with_who_named_it(
    capfd: pytest.CaptureFixture[str], home: Path, run: Path, tmp_path: Path
) -> None:
    def call(*words: str | Path, **more: str) -> Done:
        return in_process(capfd, *words, "--json", home=home, **more)

    nowhere = call("checkpoints", tmp_path / "nope")
    assert (nowhere.code, nowhere.json["remedy"]) == (3, "name the folder of a training run, or of one checkpoint")
    typed = call("export", "--checkpoint", tmp_path / "nope")
    assert typed.json["error_message"].count("it is named by checkpoint.path (--checkpoint)") == 1
    absent = {"EXPORT_BASE_MODEL": "no such/base at/all"}
    told = call("export", "--checkpoint", run, **absent).json
    assert "named by base_model.name (EXPORT_BASE_MODEL)" in told["error_message"]
    config = run / "checkpoint-5" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "no such/base at/all"}))
    told = call("export", "--checkpoint", run).json
    assert told["reason"] == "BASE_MODEL_NOT_FOUND"
    assert f"named by base_model_name_or_path in {config}" in told["error_message"]
    assert "--base-model" in told["remedy"]
    assert "check base_model.name" not in told["remedy"]


def test_checksums_that_show_damage_travel(capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text.txt").write_text("held-out text")
    digest = in_process(capfd, "push", tmp_path / "folder", home=home).out.strip()
    in_process(capfd, "pull", digest, tmp_path / "copy", home=home)
    (tmp_path / "copy" / "text.txt").write_text("rotten text")
    damaged = in_process(capfd, "push", tmp_path / "copy", home=home).out.strip()
    in_process(capfd, "pull", damaged, tmp_path / "again", home=home)
    assert in_process(capfd, "verify", tmp_path / "again", home=home).code == 7


def test_a_pulled_artifact_can_be_verified_and_pushed_again(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    (folder / "deep").mkdir(parents=True)
    (folder / "text.txt").write_text("held-out text")
    (folder / "deep" / "more.txt").write_text("more of it")

    def call(*words: str | Path) -> Done:
        return in_process(capfd, *words, "--json", home=home)

    digest = call("push", folder).json["digest"]
    assert call("pull", digest, copy).json["files"] == 2
    told = call("verify", copy).json
    assert told == {"path": str(copy), "files": 2, "success": True, "verdict": "", "signed_by": "", "signer": ""}
    assert subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "MANIFEST.sha256"], cwd=copy).returncode == 0
    assert call("push", copy).json["digest"] == digest

    (copy / "deep" / "more.txt").write_text("less of it")
    (copy / "text.txt").unlink()
    (copy / "odd").touch()
    found = call("verify", copy)
    assert (found.code, found.json["reason"]) == (7, "ARTIFACT_CORRUPT")
    assert json.loads(found.json["about"]["faults"]) == [
        "deep/more.txt: does not have its checksum",
        "text.txt: missing",
        "odd: not in MANIFEST.sha256",
    ]
    assert found.json["remedy"] == "pull the artifact again into another folder"


def test_a_damaged_artifact_in_the_store_is_found_by_its_digest(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text.txt").write_text("held-out text")
    digest = in_process(capfd, "push", tmp_path / "folder", home=home).out.strip()
    assert in_process(capfd, "verify", digest, "--json", home=home).json["files"] == 1
    (blob,) = (
        path
        for path in (home / "store" / "blobs").rglob("*")
        if path.is_file() and path.read_bytes() == b"held-out text"
    )
    blob.chmod(0o644)
    blob.write_text("tampered text")
    found = in_process(capfd, "verify", digest, "--json", home=home)
    assert (found.code, found.json["reason"]) == (7, "ARTIFACT_CORRUPT")


def test_a_folder_without_checksums_is_told_where_they_are(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    (tmp_path / "out" / "pytorch").mkdir(parents=True)
    alone = in_process(capfd, "verify", tmp_path / "out" / "pytorch", "--json", home=home)
    assert (alone.code, alone.json["reason"]) == (3, "ARTIFACT_INVALID")
    assert "slipway pull" in alone.json["remedy"]
    (tmp_path / "out" / "MANIFEST.sha256").touch()
    below = in_process(capfd, "verify", tmp_path / "out" / "pytorch", "--json", home=home)
    assert f"name {tmp_path / 'out'}" in below.json["remedy"]


@pytest.mark.parametrize("words", [["--older-than", "soon"], ["--max-size", "big"]])
def test_limits_that_are_none_are_refused(capfd: pytest.CaptureFixture[str], home: Path, words: list[str]) -> None:
    assert in_process(capfd, "cache", "gc", *words, home=home).code == 3


def test_collection_spares_what_unfinished_exports_use(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    from slipway_coordinator.lifecycle.records import ExportRecord
    from slipway_coordinator.storage.database import Database

    digests = []
    for name in ("used", "unused"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        digests.append(in_process(capfd, "push", tmp_path / name, home=home).out.strip())
    state = home / "exports" / "e-1" / "state.db"
    state.parent.mkdir(parents=True)
    database = Database(f"sqlite:///{state}")
    database.prepare()
    record = ExportRecord(
        name="projects/default/exports/e-1",
        configuration={},
        request_hash="x",
        sources={"base": digests[0]},
        tasks=(),
        create_time=0.0,
    )
    assert database.insert(record)
    database.close()
    done = in_process(capfd, "cache", "gc", "--older-than", "0s", "--json", home=home).json
    assert done["artifacts"] == [digests[1]]


def test_collection_takes_what_interrupted_stages_left(
    capfd: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    folder = home / "scratch" / f".merge.slipway-kept-{'0' * 64}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(5000))
    assert in_process(capfd, "cache", "gc", "--json", home=home).json["kept"] == []
    would = in_process(capfd, "cache", "gc", "--older-than", "0s", "--dry-run", home=home)
    assert folder.name in "".join(would.out.split())
    done = in_process(capfd, "cache", "gc", "--older-than", "0s", "--json", home=home).json
    assert (done["kept"], done["freed_bytes"]) == ([folder.name], 5000)
    assert not folder.exists()
