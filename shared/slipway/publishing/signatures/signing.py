"""Sign the files of a folder with a key, alone or with a certificate of it.

The library writes the signature. It is given the digests of files that were read already, so that nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from slipway.distribution import require
from slipway.errors import ArtifactError, ConfigurationError, ValidationError
from slipway.publishing.publication import SIGNATURE
from slipway.publishing.signatures.certificates import (
    MOST_CERTIFICATES,
    certificate_error,
    find_path_fault,
    make_store,
    parse_errors,
    read_certificates,
    subject_of,
    usage_fault,
)
from slipway.publishing.signatures.checking import check_with, known_files, read_signature
from slipway.publishing.signatures.keys import EXTRA, load_private
from slipway.publishing.signatures.trust import KeyVerifier, SameCertificatesVerifier
from slipway.texts import one_line, shortened

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_UNUSABLE, _WHAT = "SIGNING_CERTIFICATE_INVALID", "certificate to sign with"


@dataclass(frozen=True, slots=True)
class SigningCertificate:
    """A certificate that goes into the signature.

    Attributes:
        file: The certificate of the key, in PEM.
        chain: Certificates between it and a root, in PEM; None without any.
    """

    file: Path
    chain: Path | None = None


def signing_certificate(file: Path | None, chain: Path | None, *, key: Path | None) -> SigningCertificate | None:
    """Return the certificate that goes into signatures by a key; None if none is named.

    Raises:
        ConfigurationError: It is named without its key, or only the certificates behind it are.
    """
    if file is not None and key is not None:
        return SigningCertificate(file, chain)
    if file is None and chain is None:
        return None
    lacking = "its certificate" if file is None else "its private key"
    raise ConfigurationError(
        f"{chain if file is None else file} is named to sign with, and {lacking} is not",
        remedy="name --key and --certificate beside --certificate-chain, or SLIPWAY_SIGNING_KEY and SLIPWAY_SIGNING_CERTIFICATE",
        about={"key": "--certificate"},
    )


def check_key(key: Path, passphrase: SecretStr | None, certificate: SigningCertificate | None = None) -> None:
    """Refuse a private key that cannot sign, or a certificate that is not of it or cannot sign now.

    Raises:
        ArtifactError: ``SIGNING_KEY_INVALID``, ``SIGNING_CERTIFICATE_INVALID``.
        ServiceError: ``UNSUPPORTED`` if the extra is not installed.
    """
    require(EXTRA, what="signing")
    private = load_private(key, passphrase)
    if certificate is not None:
        _load_certificates(certificate, private)


def sign_files(
    digests: Mapping[str, str],
    *,
    name: str,
    key: Path,
    passphrase: SecretStr | None,
    target: Path,
    certificate: SigningCertificate | None = None,
) -> None:
    """Sign files by their digests, and write the signature; keep one by the same key and certificates of the same files.

    Args:
        digests: Hexadecimal SHA-256 by path, without the signature's own.
        name: Name of the model, which is only informative.
        key: Private key on an elliptic curve, in PEM.
        passphrase: Passphrase of the key; None if it is not encrypted.
        target: File of the signature.
        certificate: Certificate of the key; None signs with the bare key.

    Raises:
        ArtifactError: ``SIGNING_KEY_INVALID``, ``SIGNING_CERTIFICATE_INVALID``, ``FILE_ERROR``.
        ServiceError: ``UNSUPPORTED`` if the extra is not installed.
    """
    require(EXTRA, what="signing")
    from model_signing import signing

    private = load_private(key, passphrase)
    certificates = _load_certificates(certificate, private) if certificate else []
    if _is_signed(target, digests, private, certificates):
        return
    config = signing.Config()  # type: ignore[no-untyped-call]  # the library's
    config._signer = _signer(
        private, certificates
    )  # its own methods read the key again, and no encrypted one beside a certificate
    partial = target.with_name(f".{target.name}.partial")
    try:
        config.set_hashing_config(known_files(digests, name, ignoring=(SIGNATURE,))).sign(target.parent, partial)
        partial.replace(target)
    except OSError as error:
        raise _unwritable_error(target, error) from error
    finally:
        partial.unlink(missing_ok=True)


def _signer(private: EllipticCurvePrivateKey, certificates: list[Certificate]) -> Any:
    """Return a signer of the library."""
    from model_signing._signing import sign_certificate, sign_ec_key

    kind = sign_certificate.Signer if certificates else sign_ec_key.Signer
    signer: Any = kind.__new__(kind)
    signer._private_key = private
    if certificates:
        signer._signing_certificate, *signer._trust_chain = certificates
    return signer


def _is_signed(
    signature: Path, digests: Mapping[str, str], private: EllipticCurvePrivateKey, certificates: list[Certificate]
) -> bool:
    """Return whether there is a signature by a key, with these certificates, of exactly these files."""
    try:
        content = read_signature(signature, str(signature.parent))
        verifier = SameCertificatesVerifier(certificates) if certificates else KeyVerifier(private.public_key())
        return not check_with(verifier, content, digests, where=str(signature.parent)).ignored
    except (ArtifactError, ValidationError):
        return False


def _load_certificates(certificate: SigningCertificate, private: EllipticCurvePrivateKey) -> list[Certificate]:
    """Return the certificate of a key, and those that lead from it to a root, in their order.

    Raises:
        ArtifactError: ``SIGNING_CERTIFICATE_INVALID``.
    """
    files = [certificate.file] if certificate.chain is None else [certificate.file, certificate.chain]
    named = [(file, each) for file in files for each in read_certificates(file, reason=_UNUSABLE, what=_WHAT)]
    if len(named) > MOST_CERTIFICATES:
        fault = f"there are {len(named)} certificates in all, and {MOST_CERTIFICATES} are the most"
        raise certificate_error(certificate.file, fault, reason=_UNUSABLE, what=_WHAT)
    first = named[0][1]
    fault = usage_fault(first)
    if not fault and first.public_key() != private.public_key():
        fault = "it is of another key"
    if fault:
        raise certificate_error(certificate.file, fault, reason=_UNUSABLE, what=_WHAT)
    ordered = _put_in_order(named)
    _check_path(ordered, named)
    return ordered


def _put_in_order(named: list[tuple[Path, Certificate]]) -> list[Certificate]:
    """Return certificates so that each is issued by the next; refuse one that issued none of them."""
    ordered, others = [named[0][1]], named[1:]
    while others:
        issuer = next((entry for entry in others if _is_issued_by(ordered[-1], entry[1])), None)
        if issuer is None:
            file, stray = others[0]
            fault = f"{_shown(stray)} does not lead from {_shown(ordered[0])} to a root"
            raise certificate_error(file, fault, reason=_UNUSABLE, what=_WHAT)
        others.remove(issuer)
        ordered.append(issuer[1])
    return ordered


def _check_path(ordered: list[Certificate], named: list[tuple[Path, Certificate]]) -> None:
    """Refuse what every reader refuses. The root may be missing here, so the path may end before it."""
    from OpenSSL import crypto

    try:
        fault = find_path_fault(ordered, make_store(ordered[-1:], partial=True))
    except crypto.Error as error:
        raise certificate_error(named[0][0], "OpenSSL cannot read it", reason=_UNUSABLE, what=_WHAT) from error
    if fault is not None:
        file = next(file for file, each in named if each == fault.certificate)
        what = f"{_shown(fault.certificate)}: {one_line(fault.what)}"
        raise certificate_error(file, what, reason=_UNUSABLE, what=_WHAT)


def _shown(certificate: Certificate) -> str:
    return shortened(subject_of(certificate))


def _is_issued_by(certificate: Certificate, issuer: Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(issuer)
    except InvalidSignature:
        return False
    except parse_errors():
        return False
    return True


def _unwritable_error(target: Path, error: OSError) -> ArtifactError:
    return ArtifactError(
        f"{target} cannot be written: {error.strerror or error}",
        reason="FILE_ERROR",
        remedy="make the folder writable",
        about={"file": target},
    )
