"""Check a signature: that it is right, by whom it shall be, and of exactly the files that are there."""

from __future__ import annotations

import base64
import contextlib
import errno
import io
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from slipway.distribution import require
from slipway.errors import ArtifactError, ValidationError
from slipway.files.json_documents import parse_json
from slipway.files.regular_file import read_regular
from slipway.publishing.publication import LARGEST_DOCUMENT, SIGNATURE
from slipway.publishing.signatures.certificates import parse_errors
from slipway.publishing.signatures.keys import EXTRA
from slipway.publishing.signatures.trust import BARE_KEY, CERTIFICATES, KEYLESS, Signer, Trusted, Verifier
from slipway.texts import counted, one_line, shortened

_SHOWN = 10
_METHODS = {
    BARE_KEY: "a bare key: check it with --key",
    CERTIFICATES: "a certificate: check it with --certificate-chain",
    KEYLESS: "an identity of Sigstore: check it with --identity",
}


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature that is right.

    Attributes:
        signer: Who signed.
        ignored: Files of the folder that the signer left out.
    """

    signer: Signer
    ignored: tuple[str, ...]


def check_signature(signature: Path, digests: Mapping[str, str], *, trusted: Trusted, where: str) -> Signed:
    """Check that a signature is by whom it shall be, and of exactly these files.

    Args:
        signature: The signature.
        digests: Hexadecimal SHA-256 by path, without the signature's own.
        trusted: What must have signed.
        where: Place of the files, for messages.

    Raises:
        ArtifactError: ``SIGNATURE_MISSING``, ``SIGNING_KEY_INVALID``, ``TRUST_ROOT_INVALID``, ``FILE_ERROR``.
        ValidationError: ``SIGNATURE_INVALID`` if it is by somebody else, ``SIGNED_CONTENT_CHANGED`` with the files that differ;
            ``CERTIFICATE_UNTRUSTED``, ``CERTIFICATE_EXPIRED``, ``CERTIFICATE_UNFIT``.
        ServiceError: ``UNSUPPORTED`` if the extra is not installed.
    """
    require(EXTRA, what="checking a signature")
    content = read_signature(signature, where)
    return check_with(trusted.open(where), content, digests, where=where)


def check_with(verifier: Verifier, content: bytes, digests: Mapping[str, str], *, where: str) -> Signed:
    """Check a signature with a verifier of the library.

    Args:
        verifier: The verifier.
        content: The signature.
        digests: As of :func:`check_signature`.
        where: As of :func:`check_signature`.

    Raises:
        ValidationError: As :func:`check_signature`.
    """
    from model_signing import verifying

    files = known_files(digests, "", ignoring=())
    config = verifying.Config().set_hashing_config(files)  # type: ignore[no-untyped-call]  # the library's
    config._verifier, config._uses_sigstore = verifier.library, verifier.material == KEYLESS
    with tempfile.TemporaryDirectory(prefix="slipway-signature-") as folder:
        own = Path(folder) / SIGNATURE  # the library gets what was read within the limit
        own.write_bytes(content)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the library prints a warning for old signatures
                config.verify(own.parent, own)
        except Exception as error:
            if not _is_refusal(error):
                raise
            if files.asked:  # the files are only asked for once the signature itself is right
                raise _changed_error(
                    where, content, {n: d for n, d in digests.items() if not files.ignores(n)}
                ) from error
            raise _invalid_error(where, content, verifier, error) from error
    assert verifier.signer is not None
    return Signed(verifier.signer, tuple(name for name in sorted(digests) if files.ignores(name)))


def signed_files(signature: bytes) -> dict[str, str]:
    """Return the files that a signature lists, with their digests; nothing of it was checked."""
    return dict(_signed_files(signature))


def _is_refusal(error: Exception) -> bool:
    """Return whether the library refused a signature; it reads it without a schema, so this may be nearly any error."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509 import ExtensionNotFound
    from google.protobuf.json_format import Error as ProtobufError
    from OpenSSL import crypto
    from sigstore.errors import Error as SigstoreError

    if isinstance(error, OSError):  # a time that no calendar has; files are read before
        return error.errno == errno.EOVERFLOW
    of_python = (LookupError, AttributeError, RecursionError, AssertionError)
    of_libraries = (
        InvalidSignature,
        ExtensionNotFound,
        ProtobufError,
        crypto.Error,
        crypto.X509StoreContextError,
        SigstoreError,
    )
    return isinstance(error, (*parse_errors(), *of_python, *of_libraries))


def known_files(digests: Mapping[str, str], name: str, *, ignoring: tuple[str, ...]) -> Any:
    """Return the configuration that gives the library digests in place of reading files."""
    from model_signing import hashing, manifest
    from model_signing._hashing.hashing import Digest

    class KnownFiles(hashing.Config):
        """Files whose digests are known."""

        asked = False

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # as above
            self._ignored: set[PurePosixPath] = set()

        def add_ignored_paths(self, *, model_path: Any, paths: Any) -> None:  # noqa: ARG002 - the library's signature
            self._ignored |= {PurePosixPath(path) for path in paths}

        def ignores(self, path: str) -> bool:
            own = PurePosixPath(path)
            return not self._ignored.isdisjoint((own, *own.parents))

        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> manifest.Manifest:  # noqa: ARG002
            self.asked = True
            form = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": ignoring}
            serialization = manifest.SerializationType.from_args(form)
            items = [
                serialization.new_item(path, Digest("sha256", bytes.fromhex(digest)))
                for path, digest in sorted(digests.items())
                if not self.ignores(path)
            ]
            return manifest.Manifest(name, items, serialization)

    return KnownFiles()


def read_signature(path: Path, where: str) -> bytes:
    """Read a signature.

    Raises:
        ArtifactError: ``SIGNATURE_MISSING``, ``FILE_ERROR``.
    """
    try:
        return read_regular(path, largest=LARGEST_DOCUMENT)
    except FileNotFoundError as error:
        raise missing_error(where) from error
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read: {error.strerror or error}", reason="FILE_ERROR", about={"file": path}
        ) from error


def missing_error(where: str) -> ArtifactError:
    """Return the error for a place that was not signed."""
    return ArtifactError(
        f"{where} has no {SIGNATURE}, so nobody has signed it",
        reason="SIGNATURE_MISSING",
        remedy="ask who published it for a signed one, or sign it: slipway publish FOLDER --key KEY",
        about={"folder": where, "file": SIGNATURE},
    )


def _invalid_error(where: str, content: bytes, verifier: Verifier, error: Exception) -> ValidationError:
    from cryptography.exceptions import InvalidSignature
    from sigstore.errors import Error as SigstoreError

    material = kind_of(content)
    if material and material != verifier.material:
        why = f"it is by {_METHODS[material]}"
    elif isinstance(error, InvalidSignature):
        why = "the key did not make it"
    else:
        why = shortened(one_line(str(error))) if isinstance(error, ValueError | SigstoreError) else "it cannot be read"
    return ValidationError(
        f"the signature of {where} is not by {verifier.wanted}, or is damaged: {why}",
        reason="SIGNATURE_INVALID",
        remedy="check that what you trust is the publisher's; if it is, do not use the files",
        about={"folder": where, "file": SIGNATURE},
    )


def kind_of(content: bytes) -> str:
    """Return what a signature brings to be checked with, which is its kind; empty if it cannot be told."""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        material = parse_json(content, most_values=LARGEST_DOCUMENT // 16, lenient=True)["verificationMaterial"]
        return next((name for name in _METHODS if name in material), "")
    return ""


def changed_error(where: str, faults: list[str]) -> ValidationError:
    """Return the error for files that are not those which were signed."""
    shown = "\n".join(f"  {fault}" for fault in faults[:_SHOWN])
    more = f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return ValidationError(
        f"{where} is not what was signed, {counted(len(faults), 'file')}:\n{shown}{more}",
        reason="SIGNED_CONTENT_CHANGED",
        remedy="do not use the files; get them again from who published them",
        about={"folder": where, "faults": "\n".join(faults)},
    )


def _changed_error(where: str, content: bytes, digests: Mapping[str, str]) -> ValidationError:
    """Name the files that differ from a signature which is itself right."""
    signed = dict(_signed_files(content))
    faults = [f"{name}: missing" for name in sorted(signed.keys() - digests.keys())]
    faults += [
        f"{name}: was changed" for name in sorted(signed.keys() & digests.keys()) if signed[name] != digests[name]
    ]
    faults += [f"{name}: was not signed" for name in sorted(digests.keys() - signed.keys())]
    return changed_error(where, faults or ["it was signed by digests of another kind"])


def _signed_files(content: bytes) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        envelope = parse_json(content, most_values=LARGEST_DOCUMENT // 16, lenient=True)["dsseEnvelope"]
        statement = parse_json(base64.b64decode(envelope["payload"]), most_values=LARGEST_DOCUMENT // 16, lenient=True)
        for each in statement["predicate"]["resources"]:
            if each["algorithm"] == "sha256":
                yield one_line(str(each["name"])), str(each["digest"])
