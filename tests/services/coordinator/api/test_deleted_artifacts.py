"""Uploaded artifacts are given up by ``DeleteArtifact``: they count no longer, and no export loses one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipway.client import AsyncClient
from slipway.errors import ModelExportError
from support.commands.cli import in_process
from support.coordinators.artifact_places import Place
from support.coordinators.harness import CONFIGURATION

MISSING = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Place(tmp_path_factory.mktemp("place")) as place:
        yield place


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ModelExportError) as caught:
        call()
    return caught.value.reason


def pushed(place: Place, tmp_path: Path, text: str, *, project: str = "red") -> str:
    (tmp_path / "file").write_text(text)
    with place.client_of("admin", project=project) as client:
        return client.push_artifact({"file": tmp_path / "file"})


def stored_bytes(place: Place, project: str = "red") -> int:
    return place.server.coordinator.database.stored_bytes.of(project)


def test_what_was_uploaded_is_given_up(place: Place, tmp_path: Path) -> None:
    before = stored_bytes(place)
    digest = pushed(place, tmp_path, "given up")
    shared = pushed(place, tmp_path, "shared")
    assert pushed(place, tmp_path, "shared", project="blue") == shared
    assert stored_bytes(place) > before
    others = stored_bytes(place, "blue")
    with place.client_of("admin", project="red") as admin:
        assert admin.delete_artifact(digest) == admin.delete_artifact(shared) == []
    with place.client_of("submitter") as client, place.client_of("neighbour") as neighbour:
        assert refused(lambda: client.get_artifact(digest)) == "ARTIFACT_NOT_FOUND"
        assert not {digest, shared} & set(client.list_artifacts())
        assert neighbour.get_artifact(shared).digest == shared
    assert stored_bytes(place) == before
    assert stored_bytes(place, "blue") == others
    assert place.server.coordinator.database.stored_bytes.find_differences() == {}
    assert pushed(place, tmp_path, "given up") == digest, "it may come again"


def test_what_a_project_does_not_have_is_named(place: Place, tmp_path: Path) -> None:
    foreign = pushed(place, tmp_path, "of blue", project="blue")
    with place.client_of("admin", project="red") as client:
        for digest in (MISSING, foreign):
            assert refused(partial(client.delete_artifact, digest)) == "ARTIFACT_NOT_FOUND"
            assert client.delete_artifact(digest, allow_missing=True) == []
        assert refused(lambda: client.delete_artifact("no digest")) == "REQUEST_INVALID"
    for who in ("viewer", "submitter"):  # who may push could fill the store, which keeps deleted files for some time
        with place.client_of(who, project="red") as other:
            assert refused(partial(other.delete_artifact, MISSING)) == "PERMISSION_DENIED"
    with place.client_of("neighbour") as neighbour:
        assert neighbour.get_artifact(foreign).digest == foreign


def test_exports_keep_what_they_have(place: Place, tmp_path: Path) -> None:
    digest = pushed(place, tmp_path, "of exports")
    with place.client_of("admin", project="red") as client, place.client_of("submitter") as submitter:
        sources = {"base": digest, "adapter": digest}
        names = [client.create_export(CONFIGURATION, sources=sources, export_id=name).name for name in ("x1", "x2")]
        before = stored_bytes(place)
        assert client.delete_artifact(digest) == names
        assert client.delete_artifact(digest) == names, "safe to repeat"
        assert (stored_bytes(place), submitter.get_artifact(digest).digest) == (before, digest)
        for name in names:
            client.cancel_export(name)
            list(client.watch_export(name))
            client.delete_export(name)
        assert refused(lambda: submitter.get_artifact(digest)) == "ARTIFACT_NOT_FOUND"
    assert stored_bytes(place) < before


def test_the_asyncio_client_and_the_command_delete(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = pushed(place, tmp_path, "first"), pushed(place, tmp_path, "second")

    async def delete() -> list[str]:
        async with AsyncClient(place.address, security=place.security_of("admin"), project="red") as client:
            return await client.delete_artifact(first)

    assert asyncio.run(delete()) == []
    token = place.security_of("admin").token_file
    words = ("delete", second, "--coordinator", place.address, "--project", "red")
    done = in_process(capfd, *words, "--json", home=tmp_path / "home", SLIPWAY_TOKEN_FILE=str(token))
    assert done.code == 0, done.err
    assert done.json == {"deleted": f"projects/red/artifacts/{second}", "exports": []}
    again = in_process(capfd, *words, home=tmp_path / "home", SLIPWAY_TOKEN_FILE=str(token))
    assert again.code == 3
    assert "ARTIFACT_NOT_FOUND" in again.err
    with place.client_of("submitter") as client:
        assert not {first, second} & set(client.list_artifacts())
