"""Authorities of a test, and certificates for signing that they issue."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from slipway.publishing.release import prepare_release
from slipway.publishing.signatures.signing import SigningCertificate
from slipway.publishing.signatures.trust import TrustedRoots
from support.commands.delivered_folders import write_keys

CODE_SIGNING = x509.oid.ExtendedKeyUsageOID.CODE_SIGNING
SERVER = x509.oid.ExtendedKeyUsageOID.SERVER_AUTH
NOW = dt.datetime.now(dt.UTC).replace(microsecond=0)
PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | dsa.DSAPrivateKey


@dataclass(frozen=True)
class Shape:
    """What a certificate says, apart from its name.

    Attributes:
        begins: Days from now until it is valid.
        ends: Days from now until it is no longer.
        authority: Whether it may issue others.
        signs: Whether its key usage has digital signatures; None leaves key usage out.
        purposes: Its extended key usage; empty leaves it out.
        units: Number of units in its name.
    """

    begins: float = -2
    ends: float = 100
    authority: bool = False
    signs: bool | None = True
    purposes: tuple[x509.ObjectIdentifier, ...] = (CODE_SIGNING,)
    units: int = 0


AUTHORITY = Shape(begins=-10, ends=1000, authority=True, signs=False, purposes=())


@dataclass(frozen=True)
class Issued:
    """A certificate with its key."""

    certificate: x509.Certificate
    key: PrivateKey

    def write(self, path: Path, *more: Issued) -> Path:
        """Write the certificate, and others behind it."""
        path.write_bytes(b"".join(each.certificate.public_bytes(Encoding.PEM) for each in (self, *more)))
        return path

    def write_key(self, folder: Path, name: str, passphrase: str = "") -> Path:
        """Write the private key."""
        return write_keys(folder, name, self.key, passphrase)[0]


def issue(
    name: str, by: Issued | None = None, shape: Shape = AUTHORITY, key: PrivateKey | None = None, **more: Any
) -> Issued:
    """Issue a certificate; without an issuer, it is signed by itself."""
    shape = replace(shape, **more)
    own = key or ec.generate_private_key(ec.SECP256R1())
    own_name = x509.NameAttribute(x509.NameOID.COMMON_NAME, name)
    unit = x509.NameOID.ORGANIZATIONAL_UNIT_NAME
    subject = x509.Name([own_name, *(x509.NameAttribute(unit, f"unit {count}") for count in range(shape.units))])
    issuer = by.certificate.subject if by else subject
    builder = (
        x509.CertificateBuilder(issuer, subject, own.public_key(), x509.random_serial_number())
        .not_valid_before(NOW + dt.timedelta(days=shape.begins))
        .not_valid_after(NOW + dt.timedelta(days=shape.ends))
        .add_extension(x509.BasicConstraints(shape.authority, None), critical=True)
    )
    if shape.signs is not None:
        named = {
            "digital_signature": shape.signs,
            "key_cert_sign": shape.authority,
            "key_encipherment": not (shape.signs or shape.authority),
        }
        others = ("content_commitment", "data_encipherment", "key_agreement", "crl_sign")
        rest = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
        builder = builder.add_extension(x509.KeyUsage(**named, **rest), critical=True)
    if shape.purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(shape.purposes), critical=False)
    return Issued(builder.sign(by.key if by else own, hashes.SHA256()), own)


class Publishers:
    """A root, an authority that it made, and a signer, with their files."""

    def __init__(self, folder: Path, *, key: ec.EllipticCurvePrivateKey | None = None, **signer: Any) -> None:
        self.folder = folder
        self.root = issue("root")
        self.middle = issue("publisher's authority", self.root)
        self.signer = issue("release of acme", self.middle, Shape(), key, **signer)
        self.roots = self.root.write(folder / "roots.pem")
        self.chain = self.middle.write(folder / "chain.pem")
        self.file = self.signer.write(folder / "signer.pem")
        self.key = self.signer.write_key(folder, "signer-key")
        self.certificate = SigningCertificate(self.file, self.chain)
        self.trusted = TrustedRoots(self.roots)

    def sign(self, folder: Path) -> None:
        """Sign a delivered folder."""
        prepare_release(folder, key=self.key, certificate=self.certificate)
