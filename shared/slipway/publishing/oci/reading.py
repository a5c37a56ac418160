"""Check a published model in a registry before any of its layers is downloaded.

Manifests say the digest of every layer, and each layer is a file as it is. So the digests of the manifests are compared with the
checksums, the statement and the signature, and only these documents are read whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from slipway.artifacts.digests import digest_bytes
from slipway.artifacts.manifest import check_path
from slipway.errors import ArtifactError, ValidationError
from slipway.publishing.destination import Access
from slipway.publishing.oci.address import Address, parse_address
from slipway.publishing.oci.destination import REFERRERS, open_transport
from slipway.publishing.oci.modelpack import DOCUMENTS, FILE_PATH, OUTPUT
from slipway.publishing.oci.registry import INDEX_TYPE, MANIFEST_TYPE, Descriptor, Repository
from slipway.publishing.publication import (
    LARGEST_DOCUMENT,
    PROOF,
    SIGNATURE,
    SOURCES,
    Publication,
    check_delivered,
)
from slipway.publishing.signatures.checking import kind_of, missing_error
from slipway.publishing.signatures.trust import Signer, Trusted
from slipway.publishing.verification import Checked, check_checksums, check_documents, check_signed

_MOST_OUTPUTS = 500
_MOST_SIGNATURES = 16
_NO_SIGNATURE = frozenset(
    {"ARTIFACT_INVALID", "ARTIFACT_CORRUPT", "ARTIFACT_NOT_FOUND", "LIMIT_EXCEEDED", "STORE_INVALID"}
)
"""Reasons for which something attached is no signature: an answer is also invalid if it is longer than what was attached says."""


def check_registry(url: str, access: Access, *, trusted: Trusted | None = None) -> tuple[str, Checked]:
    """Check what is published at an address.

    Args:
        url: ``oci://REGISTRY/NAME[:TAG][@DIGEST]`` of a published folder.
        access: Credentials, and whether plain HTTP is allowed.
        trusted: What must have signed it; None checks no signature.

    Returns:
        The address with the digest that was checked, and what was found right.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID``.
        ArtifactError: ``ARTIFACT_NOT_FOUND``, ``ARTIFACT_CORRUPT``, ``ARTIFACT_INVALID``, ``LIMIT_EXCEEDED``, ``SIGNATURE_MISSING``,
            ``STORE_UNAVAILABLE``, ``STORE_DENIED``, ``STORE_INVALID``.
        ValidationError: As :func:`~slipway.publishing.verification.check_folder`.
    """
    address = parse_address(url)
    with closing(open_transport(address, access)) as transport:
        repository = Repository(transport)
        data, kind = repository.get_manifest(address.reference, media_types=INDEX_TYPE)
        index = digest_bytes(data)
        pinned = str(Address(address.host, address.name, digest=index))
        if kind != INDEX_TYPE:
            raise repository.invalid(
                str(address), "it is a single artifact, and only the index of all outputs has the proof"
            )
        return pinned, _Listing(repository, data, pinned).check(index, trusted)


class _Listing:
    """What an index lists."""

    def __init__(self, repository: Repository, data: bytes, where: str) -> None:
        self._repository, self._where = repository, where
        entries = repository.parse(data, "manifests", f"reading {where}")
        if len(entries) > _MOST_OUTPUTS:
            raise repository.invalid(where, f"it lists more than {_MOST_OUTPUTS} artifacts")
        self._layers = dict(self._read_layers(entries))

    def check(self, index: str, trusted: Trusted | None) -> Checked:
        documents = {
            name: self._repository.get_blob(self._layers[name], most=LARGEST_DOCUMENT)
            for name in (*SOURCES, *PROOF)
            if name in self._layers
        }
        check_delivered(documents, where=self._where)
        publication = Publication.of(documents, where=self._where)
        digests = {name: layer.digest.removeprefix("sha256:") for name, layer in self._layers.items()}
        check_checksums(self._where, publication.checksums, digests, {})
        check_documents(documents, publication, where=self._where)
        self._check_layers()
        signer = self._check_signatures(index, digests, publication, trusted) if trusted is not None else None
        return Checked(len(publication.checksums), publication.outcome.value, signer)

    def _read_layers(self, entries: list[Descriptor]) -> Iterator[tuple[str, Descriptor]]:
        """Yield the layers of every artifact by the path of the file in the delivered folder."""
        seen = set()
        for entry in entries:
            folder = entry.annotations.get(OUTPUT, "")
            if entry.media_type != MANIFEST_TYPE or (not folder and DOCUMENTS not in entry.annotations):
                continue  # what others have added is no part of the delivery
            data, _ = self._repository.get_manifest(entry.digest, media_types=MANIFEST_TYPE)
            for layer in self._repository.parse(data, "layers", f"reading {self._where}"):
                name = layer.annotations.get(FILE_PATH, "")
                path = f"{folder}/{name}" if folder else name
                check_path(path)
                if path in seen or path == SIGNATURE:
                    raise self._repository.invalid(
                        self._where, "it lists a file twice, or a signature as one of the files"
                    )
                seen.add(path)
                yield path, layer

    def _check_layers(self) -> None:
        """Refuse a model of which the registry lacks a layer."""
        lacking = [
            path
            for path, layer in sorted(self._layers.items())
            if not self._repository.has_blob(layer.digest, layer.size_bytes)
        ]
        if lacking:
            raise ArtifactError(
                f"{self._where}: the registry lacks {lacking[0]}"
                + (f" and {len(lacking) - 1} more" if lacking[1:] else ""),
                reason="ARTIFACT_NOT_FOUND",
                remedy="publish the folder again: only what is missing is sent",
                about={"files": ", ".join(lacking)},
            )

    def _check_signatures(
        self, index: str, digests: dict[str, str], publication: Publication, trusted: Trusted
    ) -> Signer:
        """Return who made the first of the signatures attached to the index that is right.

        Anybody who may write to the repository may attach one. So what is no signature is passed over, and the error is that of a
        signature of the kind that is asked for, if there is one.
        """
        entries, _ = self._repository.referrers(index)
        refusals: list[tuple[bool, ValidationError]] = []
        lost: ArtifactError = missing_error(self._where)
        for entry in [entry for entry in entries if entry.artifact_type == REFERRERS[SIGNATURE]][:_MOST_SIGNATURES]:
            try:
                content = self._read_signature(entry)
            except ArtifactError as error:
                if error.reason not in _NO_SIGNATURE:
                    raise
                lost = error
                continue
            try:
                return self._check_signature(content, digests, publication, trusted)
            except ValidationError as error:
                refusals.append((kind_of(content) != trusted.kind, error))
        raise min(refusals, key=lambda refusal: refusal[0])[1] if refusals else lost

    def _read_signature(self, entry: Descriptor) -> bytes:
        data, _ = self._repository.get_manifest(entry.digest, media_types=MANIFEST_TYPE)
        layers = self._repository.parse(data, "layers", f"reading the signature of {self._where}")
        if len(layers) != 1:
            raise self._repository.invalid(self._where, "its signature has not one layer")
        return self._repository.get_blob(layers[0], most=LARGEST_DOCUMENT)

    def _check_signature(
        self, content: bytes, digests: dict[str, str], publication: Publication, trusted: Trusted
    ) -> Signer:
        with tempfile.TemporaryDirectory(prefix="slipway-signature-") as folder:
            file = Path(folder) / SIGNATURE
            file.write_bytes(content)
            return check_signed(file, digests, publication, trusted=trusted, where=self._where)
