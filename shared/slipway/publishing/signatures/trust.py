"""What a reader trusts to have signed: a key, the roots of certificates, or an identity that a Sigstore instance has checked.

Each makes a verifier of the library, which reads the signature; what the library leaves open is checked beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slipway.errors import ArtifactError, ConfigurationError
from slipway.files.regular_file import read_regular
from slipway.publishing.publication import LARGEST_DOCUMENT
from slipway.publishing.signatures.certificates import (
    certificate_error,
    check_path,
    make_store,
    parse_errors,
    read_certificates,
    subject_of,
)
from slipway.publishing.signatures.keys import key_identifier, load_public
from slipway.texts import one_line, shortened

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import Certificate

BARE_KEY, CERTIFICATES, KEYLESS = "publicKey", "x509CertificateChain", "certificate"
"""Kinds of signatures, by what they bring to be checked with; those by a key name only the key."""
_UNUSABLE, _ROOTS = "TRUST_ROOT_INVALID", "roots"


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

    kind: ClassVar[str] = BARE_KEY
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

    kind: ClassVar[str] = CERTIFICATES
    file: Path

    def open(self, where: str) -> Verifier:
        """Read the roots.

        Raises:
            ArtifactError: ``TRUST_ROOT_INVALID``.
        """
        from OpenSSL import crypto

        roots = read_certificates(self.file, reason=_UNUSABLE, what=_ROOTS)
        try:
            return _RootsVerifier(make_store(roots), where)
        except crypto.Error as error:
            fault = "OpenSSL cannot read one of its certificates"
            raise certificate_error(self.file, fault, reason=_UNUSABLE, what=_ROOTS) from error


@dataclass(frozen=True, slots=True)
class TrustedIdentity:
    """An identity that a Sigstore instance has checked when the files were signed, without a key that is kept.

    Attributes:
        identity: Address of mail, or URL of a workflow, in the certificate.
        provider: URL of the OpenID Connect provider that told it.
        root: The instance's trusted root, in the JSON of Sigstore. It is read from the file alone, never from the network.
    """

    kind: ClassVar[str] = KEYLESS
    identity: str
    provider: str
    root: Path

    def __post_init__(self) -> None:
        """Refuse an empty identity or provider: the library compares no empty provider.

        Raises:
            ConfigurationError: One is empty.
        """
        if not self.identity or not self.provider:
            raise _partial_identity_error()

    def open(self, where: str) -> Verifier:  # noqa: ARG002 - as the others
        """Read the trusted root.

        Raises:
            ArtifactError: ``TRUST_ROOT_INVALID``.
        """
        return _IdentityVerifier(self)


Trusted = TrustedKey | TrustedRoots | TrustedIdentity


def trusted_signer(
    *, key: Path | None, roots: Path | None, identity: str | None, provider: str | None, trusted_root: Path | None
) -> Trusted | None:
    """Return what must have signed, as a command is told; None if nothing must.

    Raises:
        ConfigurationError: More than one is named, or an identity in part; an empty one, such as a variable that is not set, is no identity.
    """
    keyless = any(each is not None for each in (identity, provider, trusted_root))
    if sum((key is not None, roots is not None, keyless)) > 1:
        raise ConfigurationError(
            "a key, roots of certificates and an identity cannot be asked for at once",
            remedy="name one of --key, --certificate-chain and --identity",
            about={"key": "--key"},
        )
    if keyless:
        if identity is None or provider is None or trusted_root is None:
            raise _partial_identity_error()
        return TrustedIdentity(identity, provider, trusted_root)
    if roots is not None:
        return TrustedRoots(roots)
    return TrustedKey(key) if key is not None else None


def _partial_identity_error() -> ConfigurationError:
    return ConfigurationError(
        "an identity is checked with its provider and the trusted root of a Sigstore instance",
        remedy="name all of --identity, --identity-provider and --trusted-root, and leave none empty",
        about={"key": "--identity"},
    )


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

    wanted, material = "this key", BARE_KEY

    def __init__(self, key: EllipticCurvePublicKey) -> None:
        from model_signing._signing import sign_ec_key

        self.signer = Signer(key_identifier(key))
        self.library = sign_ec_key.Verifier.__new__(sign_ec_key.Verifier)  # which reads the key from a file itself
        self.library._public_key = key


class _RootsVerifier(Verifier):
    wanted, material = "a certificate of these roots", CERTIFICATES

    def __init__(self, store: Any, where: str) -> None:
        from model_signing._signing import sign_certificate

        outer = self

        class CheckedCertificates(sign_certificate.Verifier):
            """The library's verifier, with our check of certificates in place of its own, which follows them at another time."""

            def __init__(self) -> None:
                """Read nothing: the library's reads the files once more, without a limit."""

            def _verify_certificates(self, verification_material: Any, log_fingerprints: bool = False) -> Any:  # noqa: ARG002
                chain = verification_material.x509_certificate_chain
                encoded = [each.raw_bytes for each in chain.certificates]
                signing, key = check_path(encoded, store, where=where)
                outer.signer = Signer(key_identifier(key), subject_of(signing))
                return key

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
                outer.signer = Signer(key_identifier(key), one_line(trusted.identity))
                return content

        self.library = OfflineIdentity()


def _read_trusted_root(path: Path) -> Any:
    """Return a verifier of Sigstore's library that trusts what a file names.

    The library reads keys and authorities of times only when a signature needs them, and leaves keys out that it cannot use. So all of
    them are read here: later, a broken root would look like a wrong signature.
    """
    from sigstore._internal.trust import Key, KeyringPurpose
    from sigstore.errors import Error
    from sigstore.models import TrustedRoot
    from sigstore.verify import Verifier as SigstoreVerifier
    from sigstore_models.trustroot.v1 import TrustedRoot as Document

    wrong: tuple[type[Exception], ...] = (*parse_errors(), LookupError, AttributeError, RecursionError)
    try:
        document = Document.from_json(read_regular(path, largest=LARGEST_DOCUMENT))
        root = TrustedRoot(document)
        for log in (*document.tlogs, *document.ctlogs):
            Key(log.public_key)
        root.rekor_keyring(KeyringPurpose.VERIFY)
        root.ct_keyring(KeyringPurpose.VERIFY)
        root.get_timestamp_authorities()
        return SigstoreVerifier(trusted_root=root)
    except OSError as error:
        raise _trusted_root_error(path, error.strerror or str(error)) from error
    except Error as error:
        fault = f"it is not a Sigstore trusted root: {shortened(one_line(str(error)))}"
        raise _trusted_root_error(path, fault) from error
    except wrong as error:
        raise _trusted_root_error(path, "it is not a Sigstore trusted root") from error


def _trusted_root_error(path: Path, fault: str) -> ArtifactError:
    return ArtifactError(
        f"{path} cannot be used as trusted root: {fault}",
        reason=_UNUSABLE,
        remedy="name the trusted_root.json of the Sigstore instance, such as cosign trusted-root create writes",
        about={"file": path},
    )
