"""A delivered folder that is ready to be sent: checked, described, signed, with every file and its digest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import SecretStr

from slipway.errors import ArtifactError, ConfigurationError, ValidationError
from slipway.files.checksums import hash_files
from slipway.files.paths import all_files, check_local, open_real
from slipway.publishing.bom import check_bom, make_bom
from slipway.publishing.publication import BOM, SIGNATURE, STATEMENT, Publication, read_documents
from slipway.publishing.signatures.checking import changed_error, signed_files
from slipway.publishing.signatures.signing import SigningCertificate, sign_files
from slipway.publishing.statement import make_statement
from slipway.publishing.verification import check_checksums, check_outcome

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ReleasedFile:
    """One file.

    Attributes:
        path: Its path in the folder.
        sha256: Hexadecimal SHA-256.
        size_bytes: Its size.
        real: Its real path.
        changed: When it last changed, in nanoseconds.
    """

    path: str
    sha256: str
    size_bytes: int
    real: Path
    changed: int

    @property
    def digest(self) -> str:
        """Return the digest as ``sha256:…``."""
        return f"sha256:{self.sha256}"

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open the file, unbuffered; refuse it if it changed since it was hashed, also while it was open.

        Raises:
            ArtifactError: ``FILE_ERROR``, ``LINK_OUTSIDE``.
        """
        try:
            with open_real(self.real) as file:
                self._check_same(file)
                yield file
                self._check_same(file)
        except OSError as error:
            raise ArtifactError(
                f"{self.real} cannot be read: {error.strerror or error}",
                reason="FILE_ERROR",
                about={"file": self.real},
            ) from error

    def read(self) -> bytes:
        """Return the content of a small file.

        Raises:
            ArtifactError: As :meth:`opened`.
        """
        with self.opened() as file:
            data = bytearray()
            while piece := file.read(self.size_bytes + 1 - len(data)):
                data += piece
        return bytes(data)

    def _check_same(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.changed):
            raise ArtifactError(
                f"{self.real} was changed while it was published",
                reason="FILE_ERROR",
                remedy="publish again when no program changes the folder",
                about={"file": self.real},
            )


@dataclass(frozen=True, slots=True)
class Release:
    """What is sent.

    Attributes:
        folder: The folder.
        publication: What it says of itself.
        files: Every file, sorted by path, with the proof.
        licence: SPDX expression of the model's licence; empty if it is not said.
    """

    folder: Path
    publication: Publication
    files: tuple[ReleasedFile, ...]
    licence: str

    @property
    def signed(self) -> bool:
        """Return whether the folder has a signature."""
        return any(file.path == SIGNATURE for file in self.files)

    def file(self, path: str) -> ReleasedFile:
        """Return a file by its path."""
        return next(file for file in self.files if file.path == path)


def prepare_release(
    folder: Path,
    *,
    key: Path | None = None,
    passphrase: SecretStr | None = None,
    certificate: SigningCertificate | None = None,
    licence: str = "",
    on_bytes: OnBytes = lambda _: None,
) -> Release:
    """Check a delivered folder, and write the statement, the bill of materials and, with a key, the signature into it.

    Args:
        folder: The folder.
        key: Private key that signs; None keeps a signature that is there.
        passphrase: Passphrase of the key.
        certificate: Certificate of the key, which goes into the signature.
        licence: SPDX expression of the model's licence; empty keeps the one that the folder's bill of materials names.
        on_bytes: Called with the size of each piece that was read.

    Raises:
        ArtifactError: ``ARTIFACT_CORRUPT`` with every file that differs from its checksum, ``ARTIFACT_INVALID``,
            ``SIGNING_KEY_INVALID``, ``SIGNING_CERTIFICATE_INVALID``, ``FILE_ERROR``, ``LINK_OUTSIDE``.
        ValidationError: ``VALIDATION_FAILED`` if an output failed; ``SIGNED_CONTENT_CHANGED`` for an old signature.
        ConfigurationError: The folder is an address, or is none.
    """
    check_local(folder, named_by="FOLDER")
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is not a folder", remedy="name the folder that slipway export delivered", about={"key": "FOLDER"}
        )
    documents = read_documents(folder)
    publication = Publication.of(documents, where=str(folder))
    check_outcome(publication, where=str(folder))
    digests = hash_files(folder, on_bytes=on_bytes)
    check_checksums(str(folder), publication.checksums, digests, documents)
    licence = licence or _stated_licence(documents, publication)
    digests[STATEMENT] = _write(folder / STATEMENT, make_statement(publication))
    digests[BOM] = _write(folder / BOM, make_bom(publication, licence=licence))
    _sign(folder, digests, documents, publication, key=key, passphrase=passphrase, certificate=certificate)
    return Release(folder, publication, tuple(_files(folder, digests)), licence)


def _sign(
    folder: Path,
    digests: dict[str, str],
    documents: Mapping[str, bytes],
    publication: Publication,
    *,
    key: Path | None,
    passphrase: SecretStr | None,
    certificate: SigningCertificate | None,
) -> None:
    files = {name: digest for name, digest in digests.items() if name != SIGNATURE}
    target = folder / SIGNATURE
    if key is not None:
        sign_files(
            files,
            name=publication.name,
            key=key,
            passphrase=passphrase,
            certificate=certificate,
            target=target,
        )
        digests[SIGNATURE] = hashlib.sha256(target.read_bytes()).hexdigest()
    elif SIGNATURE in documents:
        signed = signed_files(documents[SIGNATURE])
        faults = sorted(name for name in files.keys() | signed.keys() if files.get(name) != signed.get(name))
        if faults:
            error = changed_error(str(folder), [f"{name}: is not as it was signed" for name in faults])
            error.remedy = f"sign it again with --key, or remove {target}"
            raise error


def _stated_licence(documents: Mapping[str, bytes], publication: Publication) -> str:
    """Return the licence that an earlier bill of materials names; empty if there is none, or it is of something else."""
    try:
        return check_bom(documents[BOM], publication, where="") if BOM in documents else ""
    except ValidationError:
        return ""


def _write(path: Path, data: bytes) -> str:
    """Write a file at once, unless it has this content; return its digest."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
            partial.write_bytes(data)
            partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ArtifactError(
            f"{path} cannot be written: {error.strerror or error}",
            reason="FILE_ERROR",
            remedy="make the folder writable: the proof is written beside the files",
            about={"file": path},
        ) from error
    return hashlib.sha256(data).hexdigest()


def _files(folder: Path, digests: Mapping[str, str]) -> Iterator[ReleasedFile]:
    for name, path in all_files(folder):
        if name not in digests:
            raise ArtifactError(
                f"{path} appeared while {folder} was published", reason="FILE_ERROR", about={"file": path}
            )
        status = path.stat()
        yield ReleasedFile(name, digests[name], status.st_size, path, status.st_mtime_ns)
