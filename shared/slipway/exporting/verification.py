"""Compare the files of an output directory, a pulled artifact, or an artifact in a store with their checksums."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.artifacts import Artifacts
from slipway.errors import ArtifactError
from slipway.exporting.opening import artifacts_at
from slipway.publishing.destination import OCI, Access
from slipway.publishing.hub.address import SCHEME as HUB
from slipway.publishing.signatures.checking import missing_error
from slipway.publishing.signatures.trust import Trusted
from slipway.publishing.verification import Checked, check_folder
from slipway.representation import preformatted, three_lines
from slipway.settings import Settings
from slipway.texts import counted, shortened


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """Files that are all as they were written; any other outcome is an error.

    Attributes:
        path: The folder, absolute; the artifact's whole digest; or the address of the published model with its digest.
        files: Number of files that were compared.
        verdict: ``passed``, or ``incomplete`` if an output was not judged; empty if there is no statement of what was made.
        signed_by: SHA-256 of the public key whose signature is right; empty if none was asked for.
        signer: Name in the certificate of that key, or the identity; empty for a bare key.
    """

    path: str
    files: int
    verdict: str = ""
    signed_by: str = ""
    signer: str = ""

    @classmethod
    def of(cls, path: str, checked: Checked) -> Verification:
        """Return what was found right at a path."""
        name = checked.signer.name if checked.signer else ""
        return cls(path, checked.files, checked.verdict, checked.signed_by, name)

    def to_json(self) -> dict[str, Any]:
        """Return what ``slipway verify --json`` prints."""
        proof = {"verdict": self.verdict, "signed_by": self.signed_by, "signer": self.signer}
        return {"path": self.path, "files": self.files, "success": True, **proof}

    def __str__(self) -> str:
        named = f"{shortened(self.signer)}, with " if self.signer else ""
        signed = f"; signed by {named}the key {self.signed_by[:12]}…" if self.signed_by else ""
        verdict = f"; verdict: {self.verdict}" if self.verdict else ""
        return f"{counted(self.files, 'file')} compared: every checksum is right{verdict}{signed}"

    def __repr__(self) -> str:
        return three_lines(
            "Verification: every checksum is right", f"{counted(self.files, 'file')} compared", self.path
        )

    def _repr_html_(self) -> str:
        return preformatted(repr(self))


def verify_path(
    path: str, make_settings: Callable[[], Settings], *, trusted: Trusted | None = None, insecure: bool = False
) -> Verification:
    """Compare the files of a folder, of the artifact with a digest, or of a published model with their checksums.

    Args:
        path: The folder, the digest, ``oci://REGISTRY/NAME[:TAG]``, or ``hf://OWNER/NAME[@REVISION]``.
        make_settings: Function that returns the settings of this machine; not called for a folder.
        trusted: What must have signed the folder or the published model; None checks no signature.
        insecure: Whether plain HTTP to a registry is allowed.

    Raises:
        ArtifactError: ``ARTIFACT_CORRUPT`` with every file of a folder that differs, ``ARTIFACT_NOT_FOUND``; ``ARTIFACT_INVALID`` if
            a folder has no checksums; ``SIGNATURE_MISSING``, ``SIGNING_KEY_INVALID``, ``TRUST_ROOT_INVALID``.
        ValidationError: ``STATEMENT_MISMATCH``, ``SIGNATURE_INVALID``, ``SIGNED_CONTENT_CHANGED``, ``VALIDATION_FAILED``,
            ``CERTIFICATE_UNTRUSTED``, ``CERTIFICATE_EXPIRED``, ``CERTIFICATE_UNFIT``.
    """
    if path.startswith(OCI):
        from slipway.publishing.oci.reading import check_registry

        address, checked = check_registry(path, Access(make_settings(), os.environ, insecure=insecure), trusted=trusted)
        return Verification.of(address, checked)
    if path.startswith(HUB):
        from slipway.publishing.hub.reading import check_hub

        address, checked = check_hub(path, Access(make_settings(), os.environ, insecure=insecure), trusted=trusted)
        return Verification.of(address, checked)
    if not path.startswith("sha256:"):
        return _verify_folder(path, trusted)
    if trusted is not None:
        raise missing_error(path)
    settings = make_settings()
    with artifacts_at(settings.coordinator, settings) as store:
        return _verify_artifact(path, store, scratch=settings.scratch)


def _verify_artifact(digest: str, store: Artifacts, *, scratch: Path) -> Verification:
    """Fetch an artifact, which compares its files; best on the file system of the store, where that makes no second copy."""
    digest = whole_digest(digest, store.digests)
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=scratch) as folder:
        store.fetch(digest, Path(folder) / "artifact")
    return Verification(digest, len(store.manifest(digest).files))


def _verify_folder(path: str, trusted: Trusted | None) -> Verification:
    return Verification.of(str(Path(path).resolve()), check_folder(Path(path), trusted=trusted))


def whole_digest(text: str, digests: Callable[[], list[str]]) -> str:
    """Complete a shortened digest such as ``sha256:0123456789ab``; return any other text unchanged.

    Args:
        text: A digest with at least 12 of its 64 digits.
        digests: Function that returns all digests; only called for a shortened one.

    Raises:
        ArtifactError: ``ARTIFACT_NOT_FOUND`` if no digest, or more than one, begins with the text.
    """
    if re.fullmatch(r"sha256:[0-9a-f]{12,63}", text) is None:
        return text
    matches = [digest for digest in digests() if digest.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    raise ArtifactError(
        f"{len(matches)} artifacts begin with {text}" if matches else f"no artifact begins with {text}",
        reason="ARTIFACT_NOT_FOUND",
        remedy="give more of its digits: slipway get EXPORT --json shows all 64 for an export, slipway cache ls --json for the store",
        about={"digest": text},
    )
