"""Artifacts over a real bucket, what exports give their projects, and what garbage collection leaves to them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc
import pytest

from slipway.artifacts import Manifest
from slipway.artifacts.opening import open_store
from slipway.settings import Settings
from support.coordinators.artifact_places import Place, content, create, listed, some_files, write
from support.coordinators.harness import Harness, tiny_export, tiny_task
from support.servers.s3_server import BUCKET, S3Server


def test_what_an_export_uses_and_makes_is_its_projects_until_it_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "h").mkdir()
    with Harness(tmp_path / "h") as harness:
        base = harness.base()
        name = harness.submit(tiny_export("made", tiny_task("a"), tiny_task("b", needs=("a",)), base=base))
        export = harness.finished(name)
        made = {digest for task in export.tasks for digest in task.outputs.values()}
        assert len(made) == 2
        assert set(harness.client.list_artifacts()) == {base, *made}
        assert harness.server.coordinator.database.ownership.find_owned("default", made) == made
        assert harness.server.coordinator.database.ownership.find_owned("other", made) == set()
        harness.client.delete_export(name)
        assert list(harness.client.list_artifacts()) == []


@pytest.mark.slow
def test_over_a_bucket(s3: S3Server, tmp_path: Path) -> None:
    """Large files go in by parts, which are completed only when the content has its digest."""
    folder = some_files(tmp_path)
    (folder / "larger").write_bytes(hashlib.sha256(b"seed").digest() * 700_000)  # 22 MB: several parts
    environment = s3.environment() | {"SLIPWAY_STORE": f"s3://{BUCKET}/{tmp_path.name}", "SLIPWAY_HOME": str(tmp_path)}
    store = open_store(Settings.from_environment(environment))
    (tmp_path / "h").mkdir()
    place = Place(tmp_path / "h")
    place.open_store = lambda: store
    with place, place.client_of("submitter") as client, place.client_of("neighbour") as other:
        digest = client.push_artifact(folder)
        client.pull_artifact(digest, tmp_path / "pulled")
        assert store.exists(digest)
        files = listed(client, digest)
        larger = next(file for file in files if file.path == "larger")
        wrong = b"x" * larger.size_bytes
        assert write(other._calls, "blue", larger, wrong) is grpc.StatusCode.INVALID_ARGUMENT
        assert store.fetch(digest, tmp_path / "whole")
        assert Manifest.of(files).digest == digest
        assert set(create(other, files).missing) == {file.digest for file in files}
    assert content(tmp_path / "pulled") == content(folder)
