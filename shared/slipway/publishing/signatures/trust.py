"""What a reader trusts to have signed: a key, the roots of certificates, or an identity that a Sigstore instance has checked.

Each makes a verifier of the library, which reads the signature; what the library leaves open is checked beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipway.errors import ArtifactError, ConfigurationError
from slipway.files.regular_file import read_regular
from slipway.publishing.publication import LARGEST_DOCUMENT
from slipway.publishing.signatures.certificates import (
    check_path,
    read_certificates,
    signer_error,
    subject_of,
)
from slipway.publishing.signatures.keys import key_identifier, load_public
from slipway.texts import one_line, shortened

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import Certificate

CERTIFICATES, KEYLESS = "x509CertificateChain", "certificate"
"""What signatures by certificates and by identities bring to be checked with; those by a key name only the key."""
_UNUSABLE = "TRUST_ROOT_INVALID"


@dataclass(frozen=True, slots=True)
class Signer:
    """Who signed.

    Attributes:
        key: SHA-256 of the public key.
        name: Name in the certificate, or the identity; empty for a bare key.
    """

    key: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key that must have signed.

    Attributes:
        file: The key, in PEM.
    """

    file: Path

    def open(self, where: str) -> Verifier:  # noqa: ARG002 - as the others
        """Read the key.

        Raises:
            ArtifactError: ``SIGNING_KEY_INVALID``.
        """
        return KeyVerifier(load_public(self.file))


@dataclass(frozen=True, slots=True)
class TrustedRoots:
    """Roots to which the certificates of a signature must lead.

    Attributes:
        file: The roots, in PEM; other certificates in it help to find the way.
    """

    file: Path

    def open(self, where: str) -> Verifier:
        """Read the roots.

        Raises:
            ArtifactError: ``TRUST_ROOT_INVALID``.
        """
        roots = read_certificates(self.file, reason=_UNUSABLE, what="roots")
        return _RootsVerifier(roots, where)


@dataclass(frozen=True, slots=True)
class TrustedIdentity:
    """An identity that a Sigstore instance has checked when the files were signed, without a key that is kept.

    Attributes:
        identity: Address of mail, or URL of a workflow, in the certificate.
        provider: URL of the OpenID Connect provider that told it.
        root: The instance's trusted root, in the JSON of Sigstore. It is read from the file alone, never from the network.
    """

    identity: str
    provider: str
    root: Path

    def open(self, where: str) -> Verifier:  # noqa: ARG002 - as the others
        """Read the trusted root.

        Raises:
            ArtifactError: ``TRUST_ROOT_INVALID``.
        """
        return _IdentityVerifier(self)


Trusted = TrustedKey | TrustedRoots | TrustedIdentity


def trusted_signer(
    *, key: Path | None, roots: Path | None, identity: str, provider: str, trusted_root: Path | None
) -> Trusted | None:
    """Return what must have signed, as a command is told; None if nothing must.

    Raises:
        ConfigurationError: More than one is named, or an identity in part.
    """
    keyless = bool(identity), bool(provider), trusted_root is not None
    if sum((key is not None, roots is not None, any(keyless))) > 1:
        raise ConfigurationError(
            "a key, roots of certificates and an identity cannot be asked for at once",
            remedy="name one of --key, --certificate-chain and --identity",
            about={"key": "--key"},
        )
    if any(keyless):
        if not all(keyless) or trusted_root is None:
            raise ConfigurationError(
                "an identity is checked with its provider and the trusted root of a Sigstore instance",
                remedy="name all of --identity, --identity-provider and --trusted-root",
                about={"key": "--identity"},
            )
        return TrustedIdentity(identity, provider, trusted_root)
    if roots is not None:
        return TrustedRoots(roots)
    return TrustedKey(key) if key is not None else None


class Verifier:
    """A verifier of the library, and who signed.

    Attributes:
        wanted: By what a signature must be, for messages.
        material: What such a signature brings to be checked with.
        library: The library's verifier.
        signer: Who signed; set once the signature is right.
    """

    wanted: str
    material: str
    library: Any
    signer: Signer | None = None


class KeyVerifier(Verifier):
    """Takes signatures by a key."""

    wanted, material = "this key", "publicKey"

    def __init__(self, key: EllipticCurvePublicKey) -> None:
        from model_signing._signing import sign_ec_key

        self.signer = Signer(key_identifier(key))
        self.library = sign_ec_key.Verifier.__new__(sign_ec_key.Verifier)  # which reads the key from a file itself
        self.library._public_key = key


class _RootsVerifier(Verifier):
    wanted, material = "a certificate of these roots", CERTIFICATES

    def __init__(self, roots: Sequence[Certificate], where: str) -> None:
        from model_signing._signing import sign_certificate
        from OpenSSL import crypto

        outer = self

        class CheckedCertificates(sign_certificate.Verifier):
            """The library's verifier, behind a check of its own of what the library read."""

            def __init__(self) -> None:  # the library's reads the files once more, without a limit
                self._log_fingerprints = False
                self._store = crypto.X509Store()
                for root in roots:
                    self._store.add_cert(crypto.X509.from_cryptography(root))

            def _verify_certificates(self, verification_material: Any, log_fingerprints: bool = False) -> Any:
                chain = verification_material.x509_certificate_chain
                encoded = [each.raw_bytes for each in chain.certificates]
                signing, key = check_path(encoded, roots, where=where)
                outer.signer = Signer(key_identifier(key), subject_of(signing))
                try:
                    return super()._verify_certificates(verification_material, log_fingerprints)
                except crypto.X509StoreContextError as error:  # it asks for the time when the certificate began
                    fault = f"one on its way to the root was not valid when it began: {error}"
                    raise signer_error(where, signing, fault, reason="CERTIFICATE_EXPIRED") from error

        self.library = CheckedCertificates()


class SameCertificatesVerifier(Verifier):
    """Takes signatures by exactly these certificates, to keep one that is there already."""

    wanted, material = "these certificates", CERTIFICATES

    def __init__(self, certificates: Sequence[Certificate]) -> None:
        from cryptography.hazmat.primitives.serialization import Encoding
        from model_signing._signing import sign_certificate

        own = [each.public_bytes(Encoding.DER) for each in certificates]
        key: Any = certificates[0].public_key()

        class SameCertificates(sign_certificate.Verifier):
            def __init__(self) -> None:
                """Trust nothing."""

            def _verify_certificates(self, verification_material: Any, log_fingerprints: bool = False) -> Any:  # noqa: ARG002
                chain = verification_material.x509_certificate_chain
                if [each.raw_bytes for each in chain.certificates] != own:
                    raise ValueError("it is by other certificates")
                return key

        self.signer = Signer(key_identifier(key))
        self.library = SameCertificates()


class _IdentityVerifier(Verifier):
    wanted, material = "this identity", KEYLESS

    def __init__(self, trusted: TrustedIdentity) -> None:
        from model_signing._signing import sign_sigstore
        from sigstore.verify import policy

        outer, verifier = self, _read_trusted_root(trusted.root)

        class OfflineIdentity(sign_sigstore.Verifier):
            """The library's verifier, which reads the trusted root from a file alone."""

            def __init__(self) -> None:
                self._verifier = verifier
                self._policy = policy.Identity(identity=trusted.identity, issuer=trusted.provider)

            def _verify_signed_content(self, signature: Any) -> tuple[str, bytes]:
                content = super()._verify_signed_content(signature)
                key = signature.bundle.signing_certificate.public_key()
                outer.signer = Signer(key_identifier(key), shortened(one_line(trusted.identity)))
                return content

        self.library = OfflineIdentity()


def _read_trusted_root(path: Path) -> Any:
    """Return a verifier of Sigstore's library that trusts what a file names."""
    from sigstore.errors import Error
    from sigstore.models import TrustedRoot
    from sigstore.verify import Verifier as SigstoreVerifier
    from sigstore_models.trustroot.v1 import TrustedRoot as Document

    remedy = "name the trusted_root.json of the Sigstore instance, such as cosign trusted-root create writes"
    try:
        document = Document.from_json(read_regular(path, largest=LARGEST_DOCUMENT))
        return SigstoreVerifier(trusted_root=TrustedRoot(document))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, Error) as error:
        why = error.strerror if isinstance(error, OSError) else "it is none"
        raise ArtifactError(
            f"{path} cannot be used as trusted root: {why}", reason=_UNUSABLE, remedy=remedy, about={"file": path}
        ) from error
