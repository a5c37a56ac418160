"""Sources in a bucket, as artifacts and on the hub are found, checked by their headers, and exported by the command."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from minio.commonconfig import ENABLED, Filter
from minio.lifecycleconfig import Expiration, LifecycleConfig, Rule

from slipway.artifacts.opening import open_store
from slipway.artifacts.s3.client import S3Bucket, StoredObject
from slipway.base_match import BaseMatchStatus
from slipway.configuration import ExportConfiguration
from slipway.errors import ModelExportError
from slipway.export_sources.discovery import files_by_name, find_sources
from slipway.export_sources.text_files import CALIBRATION_KEY, check_texts, text_files
from slipway.model.model_files import travelling_files
from slipway.model.runs.checkpoints import find_checkpoint, list_checkpoints
from slipway.settings import Settings
from slipway.sources import SourceFolders
from slipway.sources import mirror as origins
from slipway.sources.mirror import BucketOrigin, Mirror
from support.commands.cli import in_process
from support.coordinators.harness import wait_for
from support.servers.s3_server import BUCKET, S3Server


def safetensors(path: Path, size: int, *, cut: int = 0) -> None:
    """Return a file with one tensor; ``cut`` bytes are missing at its end."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    data = len(header).to_bytes(8, "little") + header + os.urandom(size)
    path.write_bytes(data[: len(data) - cut])


def checkpoint(folder: Path, step: int, *, cut: int = 0) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "base_model_name_or_path": "b"}')
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    safetensors(folder / "adapter_model.safetensors", 3 << 20, cut=cut)
    (folder / "optimizer.pt").write_bytes(os.urandom(1 << 20))


@pytest.fixture
def bucket(s3: S3Server) -> S3Bucket:
    return S3Bucket(s3.options(), BUCKET, prefix=f"runs/{uuid.uuid4().hex}")


@pytest.fixture
def settings(s3: S3Server, tmp_path: Path) -> Settings:
    return Settings.from_environment({**s3.environment(), "SLIPWAY_HOME": str(tmp_path / "home")})


def give(bucket: S3Bucket, folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            bucket.put(path.relative_to(folder).as_posix(), path.read_bytes())


@pytest.fixture
def run(bucket: S3Bucket, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    checkpoint(folder / "checkpoint-10", 10)
    checkpoint(folder / "checkpoint-20", 20)
    checkpoint(folder / "checkpoint-30", 30, cut=100)
    give(bucket, folder)
    return folder


@pytest.mark.usefixtures("run")
def test_checkpoints_of_a_bucket_are_judged_by_headers_alone(
    bucket: S3Bucket, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    plain = S3Bucket.get_range

    def counting(self: S3Bucket, name: str, offset: int, length: int) -> bytes:
        nonlocal read
        data = plain(self, name, offset, length)
        read += len(data)
        return data

    monkeypatch.setattr(S3Bucket, "get_range", counting)  # the bytes that cross the network are what is asserted
    with SourceFolders(settings) as folders:
        folder = folders.find(bucket.url)
        assert [entry.step for entry in list_checkpoints(folder)] == [30, 20, 10]
        found = find_checkpoint(folder)
        assert found.path.name == "checkpoint-20"
        assert found.path.parent.name == bucket.prefix.rpartition("/")[2]
        assert folders.show(found.warnings[0]).startswith(f"skipped {bucket.url}/checkpoint-30")
    assert read < 3 * (1 << 17)
    assert not any(settings.scratch.iterdir())


def test_what_is_stored_of_a_bucket_is_the_content_and_is_read_once(
    bucket: S3Bucket, run: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(settings)
    own = travelling_files(run / "checkpoint-20")
    expected = store.put_files({path.name: path for path in own})
    fetched: list[str] = []
    plain = origins.download

    def counting(bucket: S3Bucket, name: str, *arguments: Any, **options: Any) -> str:
        fetched.append(name)
        return plain(bucket, name, *arguments, **options)

    monkeypatch.setattr(origins, "download", counting)  # counts, and passes on
    for _ in range(2):
        with SourceFolders(settings) as folders:
            found = find_checkpoint(folders.find(bucket.url))
            files = {path.name: path for path in travelling_files(found.path)}
            assert folders.put(files, store, on_bytes=lambda _: None) == expected
    assert sorted(fetched) == [f"checkpoint-20/{path.name}" for path in own]


@pytest.mark.usefixtures("run")
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(bucket: S3Bucket, settings: Settings) -> None:
    with SourceFolders(settings) as folders:
        found = find_checkpoint(folders.find(bucket.url))
        files = {path.name: path for path in travelling_files(found.path)}
        size = files["adapter_model.safetensors"].stat().st_size
        bucket.put("checkpoint-20/adapter_model.safetensors", bytes(size))  # as long as before
        with pytest.raises(ModelExportError, match=r"checkpoint-20/adapter_model\.safetensors was replaced") as raised:
            folders.put(files, open_store(settings), on_bytes=lambda _: None)
    assert raised.value.reason == "FILE_ERROR"


@pytest.mark.usefixtures("run")
def test_a_base_in_a_bucket_is_not_called_another_model_for_its_holes(
    bucket: S3Bucket, settings: Settings, tmp_path: Path
) -> None:
    """Only the headers of its weights are local; the rest of the mirrored files is empty."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text('{"model_type": "qwen3"}')
    safetensors(tmp_path / "b" / "model.safetensors", 1 << 20)
    for name in ("config.json", "model.safetensors"):
        bucket.put(f"base/{name}", (tmp_path / "b" / name).read_bytes())
    paths = {"checkpoint": {"path": str(tmp_path / "run")}, "base_model": {"name": f"{bucket.url}/base"}}
    with SourceFolders(settings) as folders:
        found = find_sources(ExportConfiguration.model_validate(paths), folders)
        assert found.base_match.status is BaseMatchStatus.UNPROVEN
        assert "shapes agree" in found.base_match.reason


def test_text_for_calibration_in_a_bucket_is_stored_with_its_content(
    bucket: S3Bucket, settings: Settings, tmp_path: Path
) -> None:
    for name in ("more/b.jsonl", "a.txt", "c.bin"):
        bucket.put(f"texts/{name}", f"content of {name}".encode())
    store = open_store(settings)
    with SourceFolders(settings) as folders:
        found = check_texts(folders.find(f"s3://{BUCKET}/{bucket.prefix}/texts"), CALIBRATION_KEY)
        digest = folders.put(files_by_name(found, text_files(found)), store, on_bytes=lambda _: None)
    stored = store.fetch(digest, tmp_path / "stored")
    assert {path.relative_to(stored).as_posix(): path.read_text() for path in stored.rglob("*") if path.is_file()} == {
        name: f"content of {name}" for name in ("more/b.jsonl", "a.txt")
    }


def test_an_artifact_is_a_source(run: Path, settings: Settings) -> None:
    store = open_store(settings)
    digest = store.put_files({path.name: path for path in travelling_files(run / "checkpoint-10")})
    with SourceFolders(settings) as folders:
        found = find_checkpoint(folders.find(digest))
        assert found.healthy
        assert found.rank == 8
        assert folders.show(str(found.path)) == digest


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (f"s3://{BUCKET}/nothing-here", "SOURCE_NOT_FOUND"),
        ("s3://no-such-bucket/x", "STORE_INVALID"),
        ("sha256:" + "0" * 64, "ARTIFACT_NOT_FOUND"),
        ("sha256:short", "ARTIFACT_INVALID"),
        ("hf://nobody/nothing@main", "BASE_MODEL_NOT_FOUND"),
        ("hf://not a name", "BASE_MODEL_NOT_FOUND"),
    ],
)
def test_what_is_not_there_is_said(
    settings: Settings, source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with SourceFolders(settings) as folders, pytest.raises(ModelExportError) as raised:
        folders.find(source)
    assert raised.value.reason == reason
    assert raised.value.remedy or reason == "ARTIFACT_NOT_FOUND"


@pytest.mark.parametrize("key", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil"])
def test_keys_that_would_leave_the_folder_are_refused(bucket: S3Bucket, tmp_path: Path, key: str) -> None:
    class Listing(S3Bucket):
        """This server stores no such key, but others do."""

        def listing(self, below: str = "", *, most: int | None = None) -> list[StoredObject]:
            return [StoredObject(key, 1, "", 0.0)]

    bucket.__class__ = Listing
    with pytest.raises(ModelExportError) as raised:
        Mirror(BucketOrigin(bucket), tmp_path / "mirror")
    assert raised.value.reason == "ARTIFACT_INVALID"
    assert not (tmp_path / "mirror").exists()


def test_a_hub_snapshot_of_the_cache_is_found_by_revision(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "v1").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))  # read from the environment at import
    with SourceFolders(settings) as folders:
        assert folders.find("hf://org/tiny@v1").samefile(snapshot)


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_the_commands_work_on_a_bucket(
    s3: S3Server, bucket: S3Bucket, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store, home = f"s3://{BUCKET}/{uuid.uuid4().hex}", tmp_path / "home"

    def run_json(*arguments: str | Path) -> Any:
        done = in_process(capfd, *arguments, "--json", home=home, SLIPWAY_STORE=store, **s3.environment())
        assert done.code == 0, done.err
        return done.json

    listed = run_json("checkpoints", bucket.url)
    assert listed["latest"] == f"{bucket.url}/checkpoint-20"
    assert bucket.url in listed["checkpoints"][0]["problems"][0]["message"]
    pushed = run_json("push", tmp_path / "run")
    shutil.rmtree(home)  # another machine
    run_json("pull", pushed["digest"], tmp_path / "pulled")
    for path in (tmp_path / "run").rglob("*.safetensors"):
        assert (tmp_path / "pulled" / path.relative_to(tmp_path / "run")).read_bytes() == path.read_bytes()
    cached = run_json("cache", "ls")
    assert [entry["digest"] for entry in cached["artifacts"]] == [pushed["digest"]]
    assert store in cached["store"]
    other = Rule(
        ENABLED, rule_filter=Filter(prefix="other/"), rule_id="of-somebody-else", expiration=Expiration(days=9)
    )
    s3.client().set_bucket_lifecycle(BUCKET, LifecycleConfig([other]))
    assert run_json("cache", "gc", "--older-than", "1s")["artifacts"] == []  # within the grace period
    blobs = f"{store.removeprefix(f's3://{BUCKET}/')}/blobs/"
    rules = wait_for(lambda: rules_with(s3, blobs))  # this server tells of a change a moment later
    assert rules["other/"].expiration.days == 9
    assert rules[blobs].abort_incomplete_multipart_upload.days_after_initiation > 0


def rules_with(s3: S3Server, prefix: str) -> dict[str, Rule]:
    """Return the bucket's lifecycle by prefix; empty if there is no rule for this one."""
    rules = {rule.rule_filter.prefix: rule for rule in s3.client().get_bucket_lifecycle(BUCKET).rules}
    return rules if prefix in rules else {}
