"""Certificates that sign: read them, and follow those of a signature to a root that the reader trusts.

The library checks a path of certificates at the moment when the signing one began to be valid, takes any use that a certificate names,
and any digest. So the path is checked here in its place: now, as the specification asks, and for signing code alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.errors import ArtifactError, ValidationError
from slipway.files.regular_file import read_regular
from slipway.publishing.publication import SIGNATURE
from slipway.publishing.signatures.keys import is_usable
from slipway.texts import one_line, shortened

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import Certificate

_LARGEST_FILE = 4 << 20
_MOST_IN_FILE = 1000
MOST_CERTIFICATES = 10
"""Most certificates of one signature."""
_LARGEST_CERTIFICATE = 64 << 10
_LEAST_RSA_BITS = 2048
_DIGESTS = ("sha256", "sha384", "sha512", "sha3-256", "sha3-384", "sha3-512")
# Results of OpenSSL's check of a path (x509_vfy.h).
_OUT_OF_TIME = frozenset({9, 10})
_UNFIT = frozenset({24, 25, 26, 32, 34, 37, *range(47, 54), *range(66, 69), *range(79, 95)})
"""What an authority may not do, names it may not give, keys and digests that are too weak, extensions that contradict each other."""


def read_certificates(path: Path, *, reason: str, what: str) -> list[Certificate]:
    """Read certificates in PEM.

    Args:
        path: The file.
        reason: Reason of the error.
        what: What the file is for, for messages.

    Raises:
        ArtifactError: The reason that was given.
    """
    from cryptography.x509 import load_pem_x509_certificates

    try:
        certificates = load_pem_x509_certificates(read_regular(path, largest=_LARGEST_FILE))
    except OSError as error:
        raise certificate_error(path, error.strerror or str(error), reason=reason, what=what) from error
    except parse_errors() as error:
        raise certificate_error(path, "it holds no certificate in PEM", reason=reason, what=what) from error
    if len(certificates) > _MOST_IN_FILE:
        fault = f"it holds {len(certificates)} certificates, and {_MOST_IN_FILE} are the most"
        raise certificate_error(path, fault, reason=reason, what=what)
    return certificates


def certificate_error(path: Path, fault: str, *, reason: str, what: str) -> ArtifactError:
    """Return the error for a file of certificates that cannot be used."""
    return ArtifactError(
        f"{path} cannot be used as {what}: {fault}",
        reason=reason,
        remedy="name a file with certificates in PEM, as openssl writes them",
        about={"file": path},
    )


def subject_of(certificate: Certificate) -> str:
    """Return the whole name of a certificate's owner, on one line."""
    try:
        return one_line(certificate.subject.rfc4514_string()) or "without a name"
    except parse_errors():
        return "with a name that cannot be read"


def time_fault(certificate: Certificate) -> str:
    """Say why a certificate is not valid now; empty if it is."""
    now = datetime.now(UTC)
    if now < certificate.not_valid_before_utc:
        return f"it is valid from {certificate.not_valid_before_utc:%Y-%m-%d}"
    if now > certificate.not_valid_after_utc:
        return f"it expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
    return ""


def usage_fault(certificate: Certificate) -> str:
    """Say why a certificate may not sign code; empty if it may."""
    from cryptography import x509

    try:
        extensions = {type(each.value): each.value for each in certificate.extensions}
        key = certificate.public_key()
    except parse_errors() as error:
        return f"it cannot be read: {one_line(str(error))}"
    usage, purposes = extensions.get(x509.KeyUsage), extensions.get(x509.ExtendedKeyUsage)
    if usage is None and purposes is None:
        return "it names no key usage"
    if isinstance(usage, x509.KeyUsage) and not usage.digital_signature:
        return "its key usage has no digital signature"
    if isinstance(purposes, x509.ExtendedKeyUsage) and x509.oid.ExtendedKeyUsageOID.CODE_SIGNING not in purposes:
        return "its extended key usage has no code signing"
    return "" if is_usable(key) else "its key is not on the curve P-256, P-384 or P-521"


def parse_errors() -> tuple[type[Exception], ...]:
    """Return what the library of certificates raises for one that is damaged."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    known = (x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, UnsupportedAlgorithm)
    return (ValueError, TypeError, OverflowError, *known)


def make_store(anchors: Sequence[Certificate], *, partial: bool = False) -> Any:
    """Return the certificates with which paths may end.

    Args:
        anchors: The certificates.
        partial: Whether a path may end with one that another authority issued.

    Raises:
        OpenSSL.crypto.Error: One cannot be read by OpenSSL, which is stricter than the library that read it first.
    """
    from OpenSSL import crypto

    store = crypto.X509Store()
    if partial:
        store.set_flags(crypto.X509StoreFlags.PARTIAL_CHAIN)
    for each in anchors:
        store.add_cert(crypto.X509.from_cryptography(each))
    return store


@dataclass(frozen=True, slots=True)
class PathFault:
    """Why a path of certificates is refused.

    Attributes:
        certificate: The certificate at fault.
        what: What is wrong.
        reason: Reason of the error where a signature is checked.
    """

    certificate: Certificate
    what: str
    reason: str


def find_path_fault(certificates: Sequence[Certificate], store: Any) -> PathFault | None:
    """Follow certificates to one that is trusted; return why they are refused, None if they are not.

    Args:
        certificates: The signing certificate, and those that lead to a trusted one.
        store: The trusted ones, of :func:`make_store`.

    Raises:
        OpenSSL.crypto.Error: One cannot be read by OpenSSL.
    """
    from OpenSSL import crypto

    first, *others = [crypto.X509.from_cryptography(each) for each in certificates]
    try:
        path = [each.to_cryptography() for each in crypto.X509StoreContext(store, first, others).get_verified_chain()]
    except crypto.X509StoreContextError as error:
        return _openssl_fault(error)
    faults = [(certificates[0], usage_fault(certificates[0]))]
    for each in path:
        root = each is path[-1] and _is_self_issued(each)
        faults += [
            (each, "" if root or each is path[0] else _authority_fault(each)),
            (each, _weakness(each, root=root)),
        ]
    return next((PathFault(each, fault, "CERTIFICATE_UNFIT") for each, fault in faults if fault), None)


def check_path(encoded: Sequence[bytes], store: Any, *, where: str) -> tuple[Certificate, EllipticCurvePublicKey]:
    """Check that the certificates of a signature lead to a root, are valid now, and that the first may sign code.

    Args:
        encoded: The signing certificate, and those that lead to a root, in DER.
        store: The roots, of :func:`make_store`.
        where: Place of the signature, for messages.

    Returns:
        The signing certificate and its key.

    Raises:
        ValidationError: ``CERTIFICATE_UNTRUSTED``, ``CERTIFICATE_EXPIRED``, ``CERTIFICATE_UNFIT``, ``SIGNATURE_INVALID``.
    """
    certificates = _decode(encoded, where)
    if fault := find_path_fault(certificates, store):
        raise _signer_error(where, fault)
    signing = certificates[0]
    return signing, signing.public_key()  # type: ignore[return-value]  # usage_fault refuses any other key


def _decode(encoded: Sequence[bytes], where: str) -> list[Certificate]:
    from cryptography.x509 import load_der_x509_certificate

    if not 0 < len(encoded) <= MOST_CERTIFICATES or any(len(each) > _LARGEST_CERTIFICATE for each in encoded):
        raise _damaged_error(where, f"it holds no certificate, more than {MOST_CERTIFICATES}, or too large ones")
    try:
        return [load_der_x509_certificate(each) for each in encoded]
    except parse_errors() as error:
        raise _damaged_error(where, "its certificate cannot be read") from error


def _is_self_issued(certificate: Certificate) -> bool:
    try:
        return certificate.issuer == certificate.subject
    except parse_errors():
        return False


def _authority_fault(certificate: Certificate) -> str:
    """Say why an authority between a certificate and its root may not issue certificates for signing code."""
    from cryptography import x509

    try:
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ""
    except parse_errors() as error:
        return f"it cannot be read: {one_line(str(error))}"
    own = x509.oid.ExtendedKeyUsageOID
    if own.CODE_SIGNING in purposes or own.ANY_EXTENDED_KEY_USAGE in purposes:
        return ""
    return "it is an authority for other purposes: its extended key usage has no code signing"


def _weakness(certificate: Certificate, *, root: bool) -> str:
    """Say why a certificate of a path proves nothing; the digest of a root does not matter, because it is trusted itself."""
    from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    try:
        key, digest = certificate.public_key(), certificate.signature_hash_algorithm
    except parse_errors():
        return "its key or signature is of an unknown kind"
    if isinstance(key, RSAPublicKey) and key.key_size < _LEAST_RSA_BITS:
        return f"its key has {key.key_size} bits, and {_LEAST_RSA_BITS} are the least"
    if not isinstance(key, RSAPublicKey | Ed25519PublicKey | Ed448PublicKey) and not is_usable(key):
        return "its key is not one of RSA, Ed25519, Ed448, or on the curve P-256, P-384 or P-521"
    if not root and digest is not None and digest.name not in _DIGESTS:
        return f"it is signed with {digest.name.upper()}, which can be forged"
    return ""


def _openssl_fault(error: Exception) -> PathFault:
    """Return what OpenSSL said of a path."""
    code, _, message = error.errors  # type: ignore[attr-defined]  # of X509StoreContextError
    certificate: Certificate = error.certificate.to_cryptography()  # type: ignore[attr-defined]  # as above
    if code in _OUT_OF_TIME:
        return PathFault(certificate, time_fault(certificate) or message, "CERTIFICATE_EXPIRED")
    reason = "CERTIFICATE_UNFIT" if code in _UNFIT else "CERTIFICATE_UNTRUSTED"
    return PathFault(certificate, str(message), reason)


_REMEDIES = {
    "CERTIFICATE_EXPIRED": "ask the publisher to sign the files again with a certificate that is valid",
    "CERTIFICATE_UNTRUSTED": "check that --certificate-chain has the publisher's root, and that this root was to be trusted; if it is, "
    "do not use the files",
    "CERTIFICATE_UNFIT": "ask the publisher to sign with a certificate for code signing (digitalSignature, codeSigning)",
}


def _signer_error(where: str, fault: PathFault) -> ValidationError:
    """Return the error for a certificate of a signature."""
    subject = subject_of(fault.certificate)
    return ValidationError(
        f"the signature of {where} is by a certificate that is not taken, {shortened(subject)}: {one_line(fault.what)}",
        reason=fault.reason,
        remedy=_REMEDIES[fault.reason],
        about={"folder": where, "file": SIGNATURE, "certificate": subject},
    )


def _damaged_error(where: str, fault: str) -> ValidationError:
    return ValidationError(
        f"the signature of {where} is damaged: {fault}",
        reason="SIGNATURE_INVALID",
        remedy="do not use the files; get them again from who published them",
        about={"folder": where, "file": SIGNATURE},
    )
