"""Check a published folder: checksums, statement, bill of materials, verdict, and the signature if one is asked for.

A folder and a registry are checked by the same rules. A registry gives the digests of its layers; no layer is needed for that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipway.errors import ArtifactError, ValidationError
from slipway.files.checksums import checksum_faults, hash_files, read_checksums
from slipway.publishing.bom import check_bom
from slipway.publishing.publication import (
    BOM,
    PROOF,
    SIGNATURE,
    STATEMENT,
    Outcome,
    Publication,
    check_delivered,
    read_documents,
)
from slipway.publishing.signatures.checking import changed_error, check_signature, missing_error
from slipway.publishing.signatures.trust import Signer, Trusted
from slipway.publishing.statement import check_statement
from slipway.results.delivery import LINEAGE, REPORT
from slipway.texts import counted


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found right.

    Attributes:
        files: Number of files that were compared.
        verdict: The verdict on all outputs; empty for a folder without a report.
        signer: Who signed it; None if that was not asked.
    """

    files: int
    verdict: str = ""
    signer: Signer | None = None

    @property
    def signed_by(self) -> str:
        """Return the SHA-256 of the public key whose signature is right; empty if none was asked for."""
        return self.signer.key if self.signer else ""


def check_folder(folder: Path, *, trusted: Trusted | None = None) -> Checked:
    """Check a delivered folder or a pulled artifact.

    Args:
        folder: The folder.
        trusted: What must have signed it; None checks no signature.

    Raises:
        ArtifactError: ``ARTIFACT_CORRUPT`` with every file that differs, ``ARTIFACT_INVALID`` if it has no checksums,
            ``SIGNATURE_MISSING``, ``SIGNING_KEY_INVALID``, ``TRUST_ROOT_INVALID``, ``FILE_ERROR``.
        ValidationError: ``STATEMENT_MISMATCH``, ``SIGNATURE_INVALID``, ``SIGNED_CONTENT_CHANGED``, ``CERTIFICATE_UNTRUSTED``,
            ``CERTIFICATE_EXPIRED``, ``CERTIFICATE_UNFIT``; if it must be signed, also ``VALIDATION_FAILED``.
    """
    where = str(folder)
    expected = read_checksums(folder)
    digests = hash_files(folder)
    delivered = REPORT in digests and LINEAGE in digests
    published = trusted is not None or (delivered and any(name in digests for name in PROOF))
    documents = read_documents(folder) if published and delivered else {}
    check_checksums(where, expected, digests, documents)
    if not published:
        return Checked(len(expected))
    if trusted is not None and SIGNATURE not in digests:
        raise missing_error(where)
    check_delivered(documents, where=where)
    publication = Publication.of(documents, where=where)
    check_documents(documents, publication, where=where)
    signer = check_signed(folder / SIGNATURE, digests, publication, trusted=trusted, where=where) if trusted else None
    return Checked(len(expected), publication.outcome.value, signer)


def check_checksums(
    where: str, expected: Mapping[str, str], digests: Mapping[str, str], documents: Mapping[str, bytes]
) -> None:
    """Compare files with their checksums, and documents with the digests of their files.

    Raises:
        ArtifactError: ``ARTIFACT_CORRUPT`` with every file that differs.
    """
    faults = checksum_faults(expected, digests, unlisted=PROOF)
    same = {name for name, digest in digests.items() if expected.get(name, digest) == digest}
    faults += [
        f"{name}: changed while it was read"
        for name, data in sorted(documents.items())
        if name in same and hashlib.sha256(data).hexdigest() != digests[name]
    ]
    if not faults:
        return
    delivered = LINEAGE in expected
    remedy = (
        "deliver them again with the same slipway export command into another folder"
        if delivered
        else "pull the artifact again into another folder"
    )
    shown = "\n".join(f"  {fault}" for fault in faults)
    raise ArtifactError(
        f"{where}: {len(faults)} of {counted(len(expected), 'file')} not as written:\n{shown}",
        reason="ARTIFACT_CORRUPT",
        remedy=remedy,
        about={"folder": where, "faults": json.dumps(faults)},
    )


def check_documents(documents: Mapping[str, bytes], publication: Publication, *, where: str) -> None:
    """Compare the statement and the bill of materials, where they are, with report, lineage and checksums.

    Raises:
        ValidationError: ``STATEMENT_MISMATCH``.
    """
    if STATEMENT in documents:
        check_statement(documents[STATEMENT], publication, where=where)
    if BOM in documents:
        check_bom(documents[BOM], publication, where=where)


def check_signed(
    signature: Path, digests: Mapping[str, str], publication: Publication, *, trusted: Trusted, where: str
) -> Signer:
    """Check that every file is signed, statement included, and that no output failed; return who signed.

    Raises:
        ArtifactError: ``SIGNATURE_MISSING``, ``SIGNING_KEY_INVALID``, ``TRUST_ROOT_INVALID``.
        ValidationError: As :func:`check_folder`.
    """
    files = {name: digest for name, digest in digests.items() if name != SIGNATURE}
    signed = check_signature(signature, files, trusted=trusted, where=where)
    if signed.ignored:
        raise changed_error(where, [f"{name}: was left out by the signer" for name in signed.ignored])
    if STATEMENT not in files:
        raise changed_error(where, [f"{STATEMENT}: missing"])
    check_outcome(publication, where=where)
    return signed.signer


def check_outcome(publication: Publication, *, where: str) -> None:
    """Refuse a folder with an output that failed validation.

    Raises:
        ValidationError: ``VALIDATION_FAILED``.
    """
    if publication.outcome is not Outcome.FAILED:
        return
    failed = ", ".join(output.name for output in publication.outputs if output.status == "failed")
    raise ValidationError(
        f"{where} holds {failed}, which failed validation",
        reason="VALIDATION_FAILED",
        remedy="do not serve it: report.html says why; export again without it, or with a level that passes",
        about={"folder": where, "outputs": failed},
    )
