"""Keys on elliptic curves, in PEM, and their passphrases."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from slipway.errors import ArtifactError
from slipway.files.regular_file import read_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

EXTRA = "publish"
PASSPHRASE = "SLIPWAY_SIGNING_PASSPHRASE"  # noqa: S105 - name of the variable
_LARGEST_KEY = 64 << 10
_CURVES = ("secp256r1", "secp384r1", "secp521r1")


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


def load_private(path: Path, passphrase: SecretStr | None) -> EllipticCurvePrivateKey:
    """Read a private key.

    Raises:
        ArtifactError: ``SIGNING_KEY_INVALID``.
    """
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
    if not isinstance(key, EllipticCurvePrivateKey) or not is_usable(key.public_key()):
        raise _curve_error(path)
    return key


def load_public(path: Path) -> EllipticCurvePublicKey:
    """Read a public key.

    Raises:
        ArtifactError: ``SIGNING_KEY_INVALID``.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_read_key(path))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _key_error(path, "it is no public key in PEM") from error
    if not isinstance(key, EllipticCurvePublicKey) or not is_usable(key):
        raise _curve_error(path)
    return key


def is_usable(key: Any) -> bool:
    """Return whether a public key is on a curve on which signatures are made and checked."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    return isinstance(key, EllipticCurvePublicKey) and key.curve.name in _CURVES


def key_identifier(key: EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of a public key in PEM, as signatures name it."""
    return hashlib.sha256(key_in_pem(key)).hexdigest()


def key_in_pem(key: EllipticCurvePublicKey) -> bytes:
    """Return a public key in PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _read_key(path: Path) -> bytes:
    try:
        return read_regular(path, largest=_LARGEST_KEY)
    except OSError as error:
        raise _key_error(path, error.strerror or str(error)) from error


def _curve_error(path: Path) -> ArtifactError:
    return _key_error(path, "it is no key on the curve P-256, P-384 or P-521")


def _key_error(path: Path, what: str, *, remedy: str = "") -> ArtifactError:
    make = "openssl ecparam -genkey -name prime256v1 -noout -out key.pem; openssl ec -in key.pem -pubout -out key.pub"
    return ArtifactError(
        f"{path} cannot be used as key: {what}",
        reason="SIGNING_KEY_INVALID",
        remedy=remedy or f"--key takes the private key to sign and the public key to check; make both: {make}",
        about={"file": path},
    )
