"""A coordinator with users of several projects, and files for them to upload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc

from slipway.artifacts import ManifestFile
from slipway.client import Client
from slipway.client.calls import BlockingCalls
from slipway.files.checksums import MANIFEST
from slipway.security.access.access_file import AccessFile
from slipway.security.access.principals import new_token, token_hash
from slipway.security.server import ServerSecurity
from slipway.settings.security import Security
from slipway_protos.v1 import artifact_pb2 as pb
from support.coordinators.harness import Harness

PEOPLE = {
    "viewer": "role: viewer, projects: [red]",
    "guest": "role: viewer, projects: [red]",
    "submitter": "role: submitter, projects: [red]",
    "neighbour": "role: submitter, projects: [blue]",
    "admin": 'role: operator, projects: ["*"]',
    "keyholder": "role: submitter, projects: [blue], holds_store: true",
}


class Place(Harness):
    """A coordinator with an access file over a store."""

    def __init__(self, home: Path, *, people: Mapping[str, str] = PEOPLE, **options: Any) -> None:
        self.tokens = {name: new_token() for name in people}
        access = home / "access.yaml"
        entries = [
            f"  - {{name: {n}, {what}, token_sha256: {token_hash(self.tokens[n])}}}" for n, what in people.items()
        ]
        access.write_text("\n".join(["principals:", *entries]))
        security = ServerSecurity(authenticator=AccessFile(access), audits=True)
        super().__init__(home, with_worker=False, security=security, options=options)

    def client_of(self, name: str, *, project: str = "") -> Client:
        usual = "blue" if name != "submitter" else "red"
        return Client(self.address, security=self.security_of(name), project=project or usual)

    def forgotten_uploads(self) -> int:
        """Return how many files of uploads are left that no interrupted upload may go on with."""
        return len(list((self.home / "store" / "uploads").iterdir())) - len(
            self.server._artifacts.transfers.interrupted
        )

    def security_of(self, name: str) -> Security:
        path = self.home / f"{name}.token"
        path.write_text(self.tokens[name])
        return Security(token_file=path)


def some_files(tmp_path: Path) -> Path:
    """Make some files: a large one, an empty one, two equal ones, and one that is unique to this test."""
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "large").write_bytes(b"0123456789abcdef" * 200_000)
    (folder / "empty").touch()
    (folder / "deep" / "one").write_text("alike")
    (folder / "deep" / "two").write_text("alike")
    (folder / "own").write_text(str(tmp_path))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file by its path, without the checksums that a pull writes beside them."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def create(client: Client, files: Iterable[ManifestFile]) -> pb.CreateArtifactResponse:
    """Request the creation of an artifact from any files."""
    entries = [pb.ArtifactFile(**asdict(file)) for file in files]
    request = pb.CreateArtifactRequest(parent=f"projects/{client.project}", files=entries)
    return client._calls.call(client._calls.artifacts.CreateArtifact, request)


def listed(client: Client, digest: str) -> list[ManifestFile]:
    """Return the files of an artifact."""
    return [ManifestFile(f.path, f.size_bytes, f.digest, f.media_type) for f in client.get_artifact(digest).files]


def write(calls: BlockingCalls, project: str, file: ManifestFile, data: bytes) -> grpc.StatusCode:
    """Upload bytes under a digest; return the status."""
    first = pb.WriteBlobRequest(parent=f"projects/{project}", digest=file.digest, size_bytes=file.size_bytes)
    pieces = [pb.WriteBlobRequest(data=data[at : at + 1_000_000]) for at in range(0, len(data), 1_000_000)]
    try:
        calls.artifacts.WriteBlob(iter([first, *pieces]), metadata=calls.metadata())
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK
