"""Sign the files of a folder with a key, and check such a signature, in the format of OpenSSF Model Signing.

The library reads and writes the signature. It is given the digests of files that were read already, so that nothing is read twice.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from slipway.distribution import require
from slipway.errors import ArtifactError, ValidationError
from slipway.files.json_documents import parse_json
from slipway.files.regular_file import read_regular
from slipway.publishing.publication import LARGEST_DOCUMENT, SIGNATURE
from slipway.texts import counted, one_line, shortened

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

EXTRA = "publish"
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PASSPHRASE = "SLIPWAY_SIGNING_PASSPHRASE"  # noqa: S105 - name of the variable
_LARGEST_KEY = 64 << 10
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature that is right.

    Attributes:
        key: SHA-256 of the public key, by which signatures name it.
        ignored: Files of the folder that the signer left out.
    """

    key: str
    ignored: tuple[str, ...]


def read_passphrase(file: Path | None, environment: Mapping[str, str]) -> SecretStr | None:
    """Return the passphrase of a key, from a file or else from :data:`PASSPHRASE`; None without either.

    Raises:
        ArtifactError: ``SIGNING_KEY_INVALID`` if the file cannot be read.
    """
    if file is None:
        return SecretStr(environment[PASSPHRASE]) if environment.get(PASSPHRASE) else None
    try:
        return SecretStr(read_regular(file, largest=_LARGEST_KEY).decode().rstrip("\r\n"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ArtifactError(
            f"the passphrase file {file} cannot be read: {why or error}",
            reason="SIGNING_KEY_INVALID",
            remedy=f"name a readable text file, or set {PASSPHRASE}",
            about={"file": file},
        ) from error


def check_key(key: Path, passphrase: SecretStr | None) -> None:
    """Refuse a private key that cannot sign.

    Raises:
        ArtifactError: ``SIGNING_KEY_INVALID``.
        ServiceError: ``UNSUPPORTED`` if the extra is not installed.
    """
    require(EXTRA, what="signing")
    _load_private(key, passphrase)


def sign_files(digests: Mapping[str, str], *, name: str, key: Path, passphrase: SecretStr | None, target: Path) -> None:
    """Sign files by their digests, and write the signature; keep one by the same key of the same files.

    Args:
        digests: Hexadecimal SHA-256 by path, without the signature's own.
        name: Name of the model, which is only informative.
        key: Private key on an elliptic curve, in PEM.
        passphrase: Passphrase of the key; None if it is not encrypted.
        target: File of the signature.

    Raises:
        ArtifactError: ``SIGNING_KEY_INVALID``, ``FILE_ERROR``.
        ServiceError: ``UNSUPPORTED`` if the extra is not installed.
    """
    require(EXTRA, what="signing")
    from model_signing import signing

    public = _load_private(key, passphrase)
    if _is_signed(target, digests, public):
        return
    password: Any = passphrase.get_secret_value().encode() if passphrase else None
    config = signing.Config().use_elliptic_key_signer(private_key=key, password=password)  # type: ignore[no-untyped-call]  # the library's
    partial = target.with_name(f".{target.name}.partial")
    try:
        config.set_hashing_config(_known_files(digests, name, ignoring=(SIGNATURE,))).sign(target.parent, partial)
        partial.replace(target)
    except OSError as error:
        raise _unwritable_error(target, error) from error
    finally:
        partial.unlink(missing_ok=True)


def check_signature(signature: Path, digests: Mapping[str, str], *, key: Path, where: str) -> Signed:
    """Check that a signature is by a key and of exactly these files.

    Args:
        signature: The signature.
        digests: Hexadecimal SHA-256 by path, without the signature's own.
        key: Public key on an elliptic curve, in PEM.
        where: Place of the files, for messages.

    Raises:
        ArtifactError: ``SIGNATURE_MISSING``, ``SIGNING_KEY_INVALID``, ``FILE_ERROR``.
        ValidationError: ``SIGNATURE_INVALID`` if it is not by this key, ``SIGNED_CONTENT_CHANGED`` with the files that differ.
        ServiceError: ``UNSUPPORTED`` if the extra is not installed.
    """
    require(EXTRA, what="checking a signature")
    from model_signing import verifying

    content = _read_signature(signature, where)
    identifier = key_identifier(_load_public(key))
    files = _known_files(digests, "", ignoring=())
    config = verifying.Config().use_elliptic_key_verifier(public_key=key).set_hashing_config(files)  # type: ignore[no-untyped-call]  # the library's
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the library prints a warning for old signatures
            config.verify(signature.parent, signature)
    except OSError as error:
        raise ArtifactError(
            f"{signature} cannot be read: {error.strerror or error}", reason="FILE_ERROR", about={"file": signature}
        ) from error
    except Exception as error:
        if not _is_refusal(error):
            raise
        if files.asked:  # the files are only asked for once the signature itself is right
            raise _changed_error(where, content, {n: d for n, d in digests.items() if not files.ignores(n)}) from error
        raise _invalid_error(where, error) from error
    return Signed(identifier, tuple(name for name in sorted(digests) if files.ignores(name)))


def _is_signed(signature: Path, digests: Mapping[str, str], public: EllipticCurvePublicKey) -> bool:
    """Return whether there is a signature by a key of exactly these files."""
    with tempfile.TemporaryDirectory(prefix="slipway-key-") as folder:
        file = Path(folder) / "key.pub"
        file.write_bytes(_in_pem(public))
        try:
            return not check_signature(signature, digests, key=file, where=str(signature.parent)).ignored
        except (ArtifactError, ValidationError):
            return False


def signed_files(signature: bytes) -> dict[str, str]:
    """Return the files that a signature lists, with their digests; nothing of it was checked."""
    return dict(_signed_files(signature))


def key_identifier(key: EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of a public key in PEM, as signatures name it."""
    return hashlib.sha256(_in_pem(key)).hexdigest()


def _in_pem(key: EllipticCurvePublicKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _is_refusal(error: Exception) -> bool:
    """Return whether the library refused a signature; it reads it without a schema, so this may be nearly any error."""
    from cryptography.exceptions import InvalidSignature

    return isinstance(error, ValueError | LookupError | TypeError | AttributeError | RecursionError | InvalidSignature)


def _known_files(digests: Mapping[str, str], name: str, *, ignoring: tuple[str, ...]) -> Any:
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


def _read_signature(path: Path, where: str) -> bytes:
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
        f"{where} has no {SIGNATURE}, so no key has signed it",
        reason="SIGNATURE_MISSING",
        remedy="ask who published it for a signed one, or sign it: slipway publish FOLDER --key KEY",
        about={"folder": where, "file": SIGNATURE},
    )


def _invalid_error(where: str, error: Exception) -> ValidationError:
    from cryptography.exceptions import InvalidSignature

    if isinstance(error, ValueError):
        why = shortened(one_line(str(error)))
    else:
        why = "the key did not make it" if isinstance(error, InvalidSignature) else "it is no signature by a bare key"
    return ValidationError(
        f"the signature of {where} is not by this key, or is damaged: {why}",
        reason="SIGNATURE_INVALID",
        remedy="check that the key is the publisher's; if it is, do not use the files",
        about={"folder": where, "file": SIGNATURE},
    )


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


def _load_private(path: Path, passphrase: SecretStr | None) -> EllipticCurvePublicKey:
    """Read a private key; return its public half."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read_key(path)
    password = passphrase.get_secret_value().encode() if passphrase else None
    try:
        key = load_pem_private_key(data, password)
    except TypeError as error:
        what = "it is not encrypted, but a passphrase was given" if password else "it is encrypted"
        remedy = f"set {PASSPHRASE} or --passphrase-file for an encrypted key, and only for one"
        raise _key_error(path, what, remedy=remedy) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _key_error(path, "it is no private key in PEM, or the passphrase is wrong") from error
    return _check_curve(path, key.public_key() if isinstance(key, EllipticCurvePrivateKey) else None)


def _load_public(path: Path) -> EllipticCurvePublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_read_key(path))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _key_error(path, "it is no public key in PEM") from error
    return _check_curve(path, key)


def _check_curve(path: Path, key: Any) -> EllipticCurvePublicKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise _key_error(path, "it is no key on the curve P-256, P-384 or P-521")
    return key


def _read_key(path: Path) -> bytes:
    try:
        return read_regular(path, largest=_LARGEST_KEY)
    except OSError as error:
        raise _key_error(path, error.strerror or str(error)) from error


def _key_error(path: Path, what: str, *, remedy: str = "") -> ArtifactError:
    make = "openssl ecparam -genkey -name prime256v1 -noout -out key.pem; openssl ec -in key.pem -pubout -out key.pub"
    return ArtifactError(
        f"{path} cannot be used as key: {what}",
        reason="SIGNING_KEY_INVALID",
        remedy=remedy or f"--key takes the private key to sign and the public key to check; make both: {make}",
        about={"file": path},
    )


def _unwritable_error(target: Path, error: OSError) -> ArtifactError:
    return ArtifactError(
        f"{target} cannot be written: {error.strerror or error}",
        reason="FILE_ERROR",
        remedy="make the folder writable",
        about={"file": target},
    )
