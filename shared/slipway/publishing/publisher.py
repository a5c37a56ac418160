"""Publish a delivered folder: make its proof, then send its files to each destination, and commit last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from slipway.artifacts.files import in_threads
from slipway.configuration import files_address
from slipway.errors import ModelExportError
from slipway.machine.known_faults import translate_fault
from slipway.publishing.destination import Access, Destination, Published, destination_error
from slipway.publishing.hub.destination import HubDestination
from slipway.publishing.kubeflow.destination import KubeflowDestination
from slipway.publishing.mlflow import MlflowDestination
from slipway.publishing.oci.destination import OciDestination
from slipway.publishing.release import OnBytes, Release, ReleasedFile, prepare_release
from slipway.publishing.s3 import S3Destination
from slipway.publishing.signatures.signing import SigningCertificate
from slipway.texts import counted

OPENERS: Mapping[str, Callable[[str, Access], Destination]] = {
    "hf": HubDestination,
    "kubeflow": lambda url, access: KubeflowDestination(url, access, open_destination),
    "mlflow": MlflowDestination,
    "oci": OciDestination,
    "s3": S3Destination,
}
"""Kinds of destinations by the scheme of their addresses. A new kind is one module and one row."""
_VERSIONED = frozenset({"mlflow"})
"""Kinds that keep everything that was published at an address; at others, the last replaces what was there."""

Show = Callable[[int], OnBytes]
"""Takes the bytes of some work and returns a function that takes the size of each piece of it."""


@dataclass(frozen=True, slots=True)
class Publishing:
    """What was published.

    Attributes:
        folder: The folder; empty if it was delivered for this alone.
        export: Id of the export.
        verdict: ``passed``, or ``incomplete`` if an output was not judged.
        signed: Whether the folder is signed.
        files: Number of files, with the proof.
        destinations: What each destination holds, in the order they were named.
    """

    folder: str
    export: str
    verdict: str
    signed: bool
    files: int
    destinations: tuple[Published, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what ``slipway publish --json`` prints."""
        return {
            "folder": self.folder,
            "export": self.export,
            "success": True,
            "verdict": self.verdict,
            "signed": self.signed,
            "files": self.files,
            "destinations": [each.to_json() for each in self.destinations],
        }

    def __str__(self) -> str:
        signed = "signed" if self.signed else "not signed"
        own = f"{counted(self.files, 'file')} of {self.folder or self.export}: verdict {self.verdict}, {signed}"
        return "\n".join([own, *(f"published at {each.address}" for each in self.destinations)])


def publish(
    folder: Path,
    urls: Sequence[str],
    *,
    access: Access,
    key: Path | None = None,
    passphrase: SecretStr | None = None,
    certificate: SigningCertificate | None = None,
    licence: str = "",
    show: Show = lambda _: lambda _: None,
) -> Publishing:
    """Write the proof into a folder, and send the folder to destinations, one after the other.

    Args:
        folder: The delivered folder.
        urls: Addresses of the destinations; without any, only the proof is written.
        access: How destinations are reached.
        key: Private key that signs.
        passphrase: Passphrase of the key.
        certificate: Certificate of the key, which goes into the signature.
        licence: SPDX expression of the model's licence.
        show: Shows the progress.

    Raises:
        ArtifactError: As :func:`~slipway.publishing.release.prepare_release`, and as the destinations.
        ConfigurationError: ``DESTINATION_INVALID``.
    """
    with contextlib.ExitStack() as stack:
        destinations = [stack.enter_context(contextlib.closing(open_destination(url, access))) for url in urls]
        for destination in destinations:
            destination.reach()
        on_bytes = show(_size(folder) * (1 + len(urls)))
        release = prepare_release(
            folder, key=key, passphrase=passphrase, certificate=certificate, licence=licence, on_bytes=on_bytes
        )
        done = tuple(_send(release, destination, on_bytes) for destination in destinations)
    publication = release.publication
    return Publishing(
        folder=str(folder.resolve()),
        export=publication.export_id,
        verdict=publication.outcome.value,
        signed=release.signed,
        files=len(release.files),
        destinations=done,
    )


def publish_each(
    release: Release,
    urls: Sequence[str],
    *,
    access: Access,
    show: Callable[[str, int], OnBytes] = lambda *_: lambda _: None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Published | ModelExportError]:
    """Send a release to destinations, one after the other; one that fails does not end the others.

    Args:
        release: The release.
        urls: Addresses of the destinations.
        access: How destinations are reached.
        show: Takes an address and the bytes that are sent there, and returns a function that takes the size of each piece.
        check: Raises if the work shall end; called after a failure.

    Returns:
        What each destination holds now, or why it could not be published there.
    """
    outcomes: dict[str, Published | ModelExportError] = {}
    size = sum(file.size_bytes for file in release.files)
    for url in urls:
        try:
            with contextlib.closing(open_destination(url, access)) as destination:
                destination.reach()
                outcomes[url] = _send(release, destination, show(url, size))
        except (ModelExportError, OSError) as error:
            check()
            fault = translate_fault(error)
            assert fault is not None
            outcomes[url] = fault
    return outcomes


def reach_destination(url: str, access: Access) -> None:
    """Check that a destination is there and takes the credentials; send nothing.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID``.
        ArtifactError: ``STORE_UNAVAILABLE``, ``STORE_DENIED``, ``STORE_INVALID``.
        ServiceError: ``UNSUPPORTED`` if the extra that it needs is not installed.
    """
    with contextlib.closing(open_destination(url, access)) as destination:
        destination.reach()


def keeps_versions(url: str) -> bool:
    """Return whether what is published at an address is added to what is there."""
    return files_address(url).partition(":")[0] in _VERSIONED


def open_destination(url: str, access: Access) -> Destination:
    """Open the destination at an address.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID`` if no kind of destination has this address.
        ArtifactError: The destination cannot be reached.
    """
    scheme, separator, _ = url.partition(":")
    opener = OPENERS.get(scheme) if separator else None
    if opener is None:
        raise destination_error(url, "no kind of destination has this address")
    return opener(url, access)


def _send(release: Release, destination: Destination, on_bytes: OnBytes) -> Published:
    """Send what a destination lacks, several files at a time, then commit."""
    destination.begin(release)
    unit = {file.sha256 if destination.by_content else file.path: file for file in release.files}

    def send(file: ReleasedFile, count: OnBytes) -> int:
        if destination.has(file, on_wait=lambda: count(0)):
            count(file.size_bytes)
            return 0
        return destination.send(file, on_bytes=count)

    sent = sum(in_threads(send, unit.values(), on_bytes))
    on_bytes(sum(file.size_bytes for file in release.files) - sum(file.size_bytes for file in unit.values()))
    total = sum(file.size_bytes for file in unit.values())
    done = destination.commit(release)
    return replace(done, sent_bytes=done.sent_bytes + sent, kept_bytes=done.kept_bytes + total - sent)


def _size(folder: Path) -> int:
    """Return the bytes of all files of a folder, for the progress alone."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:  # preparing the release says what is wrong
        return 0
