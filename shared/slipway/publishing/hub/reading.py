"""Check what is published in a repository of the hub: only small files are read, because the hub names the digests of large ones."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from slipway.artifacts.manifest import check_path
from slipway.errors import ArtifactError
from slipway.publishing.destination import Access
from slipway.publishing.hub.address import COMMIT, SCHEME, parse_address
from slipway.publishing.hub.repository import HubRepository
from slipway.publishing.publication import LARGEST_DOCUMENT, PROOF, SIGNATURE, SOURCES, Publication, check_delivered
from slipway.publishing.signatures.checking import missing_error
from slipway.publishing.signatures.trust import Signer, Trusted
from slipway.publishing.verification import Checked, check_checksums, check_documents, check_signed

_OF_GIT = frozenset({".gitattributes", ".gitignore"})
_LARGEST_SMALL = 64 << 20


def check_hub(url: str, access: Access, *, trusted: Trusted | None = None) -> tuple[str, Checked]:
    """Check what is published at an address.

    Args:
        url: ``hf://OWNER/NAME[@REVISION]``; the revision is a branch or a commit.
        access: The environment with ``HF_TOKEN``, and settings with the hub's address.
        trusted: What must have signed it; None checks no signature.

    Returns:
        The address with the commit that was checked, and what was found right.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID``.
        ArtifactError: ``ARTIFACT_NOT_FOUND``, ``ARTIFACT_CORRUPT``, ``ARTIFACT_INVALID``, ``SIGNATURE_MISSING``, ``STORE_UNAVAILABLE``,
            ``STORE_DENIED``, ``STORE_INVALID``.
        ValidationError: As :func:`~slipway.publishing.verification.check_folder`.
    """
    name, revision, _ = parse_address(url, pinned=True)
    repository = HubRepository(url, name, access)
    found = repository.find()
    commit = "" if found is None else revision if COMMIT.fullmatch(revision) else repository.head(revision)
    if not commit:
        what = "there is no such repository" if found is None else f"there is no branch {revision}"
        raise repository.error("looking for", what, "ARTIFACT_NOT_FOUND")
    where = f"{SCHEME}{name}@{commit}"
    small: dict[str, bytes] = {}
    digests = {
        path: _digest(repository, entry, commit, small)
        for path, entry in sorted(repository.files(commit).items())
        if path not in _OF_GIT
    }
    documents = {
        path: small[path] if path in small else repository.read(path, commit)
        for path in (*SOURCES, *PROOF)
        if path in digests
    }
    check_delivered(documents, where=where)
    publication = Publication.of(documents, where=where)
    check_checksums(where, publication.checksums, digests, documents)
    check_documents(documents, publication, where=where)
    signer = _check_signature(documents, digests, publication, trusted, where) if trusted else None
    return where, Checked(len(publication.checksums), publication.outcome.value, signer)


def _digest(repository: HubRepository, entry: Any, commit: str, small: dict[str, bytes]) -> str:
    """Return the SHA-256 of a file; the content of a small one is kept if it is a document of the delivery."""
    path = str(entry.path)
    check_path(path)
    if entry.lfs is not None:
        return str(entry.lfs.sha256)
    if not 0 <= entry.size <= _LARGEST_SMALL:
        raise repository.error(f"reading {path} of", f"it has {entry.size} bytes outside of LFS", "STORE_INVALID")
    data = repository.read(path, commit, most=max(_LARGEST_SMALL, LARGEST_DOCUMENT))
    if path in (*SOURCES, *PROOF):
        small[path] = data
    return hashlib.sha256(data).hexdigest()


def _check_signature(
    documents: dict[str, bytes], digests: dict[str, str], publication: Publication, trusted: Trusted, where: str
) -> Signer:
    if SIGNATURE not in documents:
        error: ArtifactError = missing_error(where)
        raise error
    with tempfile.TemporaryDirectory(prefix="slipway-signature-") as folder:
        file = Path(folder) / SIGNATURE
        file.write_bytes(documents[SIGNATURE])
        return check_signed(file, digests, publication, trusted=trusted, where=where)
