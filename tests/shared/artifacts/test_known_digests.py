"""Digests that a stage computed while it wrote: taken without reading, found out when they are wrong."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore, action_key
from slipway.artifacts.digests import digest_bytes
from slipway.errors import ArtifactError
from slipway.execution.runner import TaskRunner
from slipway.registry import load_stage
from slipway.stage import Context, Stage, StageParams
from slipway.stage_call import StageCall

CONTENT = b"weights" * 1000


class ClaimParams(StageParams):
    claim: str


def run(_: object, params: ClaimParams, ctx: Context) -> dict[str, Path]:
    folder = ctx.workdir / "out"
    folder.mkdir()
    (folder / "file.bin").write_bytes(CONTENT)
    (folder / "other.txt").write_text("read by the store")
    ctx.digest(folder / "file.bin", params.claim)
    return {"out": folder}


STAGE = Stage(name="claim", version=1, inputs=(), outputs=("out",), params=ClaimParams, run=run)


def put(store: LocalStore, folder: Path, known: dict[Path, str]) -> str:
    folder.mkdir()
    (folder / "file.bin").write_bytes(CONTENT)
    return store.put(folder, known={folder / name: digest for name, digest in known.items()})


def test_known_files_are_not_read(tmp_path):
    store, counted = LocalStore(tmp_path / "store"), []
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "file.bin").write_bytes(CONTENT)
    before = (folder / "file.bin").stat().st_size
    digest = store.put(folder, known={folder / "file.bin": digest_bytes(CONTENT)}, on_bytes=counted.append)
    assert counted == [before]
    assert digest == put(LocalStore(tmp_path / "undisturbed"), tmp_path / "again", {})
    assert (store.fetch(digest, tmp_path / "out") / "file.bin").read_bytes() == CONTENT


def test_a_wrong_digest_is_found_by_the_same_process(tmp_path):
    store = LocalStore(tmp_path / "store")
    digest = put(store, tmp_path / "in", {"file.bin": digest_bytes(b"something else")})
    with pytest.raises(ArtifactError) as caught:
        store.fetch(digest, tmp_path / "out")
    assert caught.value.reason == "ARTIFACT_CORRUPT"
    assert not store.exists(digest)


def test_what_is_no_digest_is_refused(tmp_path):
    store = LocalStore(tmp_path / "store")
    with pytest.raises(ArtifactError) as caught:
        put(store, tmp_path / "in", {"file.bin": "sha256:../../escape"})
    assert caught.value.reason == "ARTIFACT_INVALID"


@pytest.mark.parametrize("content", [CONTENT, b"a lie"], ids=["right", "wrong"])
def test_from_the_stage_to_the_store(tmp_path, content, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    store = LocalStore(tmp_path / "store")
    claim = hashlib.sha256(content).hexdigest()
    spec = StageCall("test_known_digests:STAGE", {"claim": claim}, {})
    result = asyncio.run(TaskRunner(store, tmp_path / "scratch").run(spec))
    assert result.failure is None
    files = {file.path: file.digest for file in store.manifest(result.outputs["out"]).files}
    assert files["file.bin"] == f"sha256:{claim}"
    assert files["other.txt"] == digest_bytes(b"read by the store")
    if content == CONTENT:
        store.fetch(result.outputs["out"], tmp_path / "out")
        return
    with pytest.raises(ArtifactError, match=r"file\.bin"):
        store.fetch(result.outputs["out"], tmp_path / "out")
    key = action_key(load_stage(spec.stage), {}, ClaimParams(claim=claim))
    assert store.action(key) is None, "so that it is made again"
