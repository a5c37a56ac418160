"""Certificates to sign with: which are refused before anything is signed, and the commands and settings that name them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_der_x509_certificate

import slipway
from slipway.errors import ArtifactError, ConfigurationError
from slipway.publishing.publication import SIGNATURE
from slipway.publishing.release import prepare_release
from slipway.publishing.signatures.signing import SigningCertificate
from slipway.publishing.signatures.trust import TrustedIdentity, TrustedRoots, trusted_signer
from slipway.publishing.verification import check_folder
from support.commands.cli import in_process
from support.commands.delivered_folders import make_keys
from support.commands.signing_certificates import AUTHORITY, SERVER, Issued, Publishers, Shape, issue

pytest.importorskip("model_signing", reason="the extra publish is not installed")


def _foreign_key(at: Publishers) -> SigningCertificate:
    return SigningCertificate(issue("signer", at.middle, Shape()).write(at.folder / "foreign.pem"), at.chain)


def _late(at: Publishers) -> SigningCertificate:
    return SigningCertificate(
        issue("late", at.middle, Shape(), at.signer.key, ends=-1).write(at.folder / "late.pem"), at.chain
    )


def _for_servers(at: Publishers) -> SigningCertificate:
    return SigningCertificate(
        issue("a web server", at.middle, Shape(), at.signer.key, purposes=(SERVER,)).write(at.folder / "server.pem"),
        at.chain,
    )


def _stray(at: Publishers) -> SigningCertificate:
    return SigningCertificate(at.file, issue("stray").write(at.folder / "stray.pem"))


def _absent(at: Publishers) -> SigningCertificate:
    return SigningCertificate(at.folder / "absent.pem")


def _key_for_certificate(at: Publishers) -> SigningCertificate:
    return SigningCertificate(at.key)


def _endless(_: Publishers) -> SigningCertificate:
    return SigningCertificate(Path("/dev/zero"))


def _too_many(at: Publishers) -> SigningCertificate:
    return SigningCertificate(at.file, at.middle.write(at.folder / "many.pem", *[at.middle] * 10))


def _behind(at: Publishers, middle: Issued) -> SigningCertificate:
    signer = issue("signer", middle, Shape(), at.signer.key)
    return SigningCertificate(signer.write(at.folder / "behind.pem"), middle.write(at.folder / "middle.pem"))


def _short_key(at: Publishers) -> SigningCertificate:
    return _behind(at, issue("short key", at.root, AUTHORITY, rsa.generate_private_key(65537, 1024)))


def _no_authority(at: Publishers) -> SigningCertificate:
    return _behind(at, issue("an end", at.root, Shape()))


def _authority_for_servers(at: Publishers) -> SigningCertificate:
    return _behind(at, issue("authority for servers", at.root, purposes=(SERVER,)))


def _late_authority(at: Publishers) -> SigningCertificate:
    return _behind(at, issue("late", at.root, ends=-1))


def _unreadable(at: Publishers) -> SigningCertificate:
    damaged = at.signer.certificate.public_bytes(Encoding.DER).replace(b"release", b"\xffelease")
    file = at.folder / "unreadable.pem"
    file.write_bytes(load_der_x509_certificate(damaged).public_bytes(Encoding.PEM))
    return SigningCertificate(file, at.chain)


@pytest.mark.parametrize(
    "make",
    [
        _foreign_key,
        _late,
        _for_servers,
        _stray,
        _absent,
        _key_for_certificate,
        _endless,
        _too_many,
        _short_key,
        _no_authority,
        _authority_for_servers,
        _late_authority,
        _unreadable,
    ],
)
def test_what_cannot_sign_is_refused_before_anything_is_signed(
    folder: Path, publishers: Publishers, make: Callable[[Publishers], SigningCertificate]
) -> None:
    with pytest.raises(ArtifactError) as caught:
        prepare_release(folder, key=publishers.key, certificate=make(publishers))
    assert caught.value.reason == "SIGNING_CERTIFICATE_INVALID"
    assert not (folder / SIGNATURE).exists()


@pytest.mark.parametrize(
    "content", [b"", b"no certificate", b"\xff\xfe", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_what_holds_no_root_is_refused(folder: Path, publishers: Publishers, content: bytes) -> None:
    publishers.sign(folder)
    broken = publishers.folder / "broken.pem"
    broken.write_bytes(content)
    identity = TrustedIdentity("me@example.com", "https://example.com", broken)
    for trusted in (TrustedRoots(broken), TrustedRoots(broken / "absent"), identity):
        with pytest.raises(ArtifactError) as caught:
            check_folder(folder, trusted=trusted)
        assert caught.value.reason == "TRUST_ROOT_INVALID"


def test_a_root_that_only_openssl_refuses_is_named(folder: Path, publishers: Publishers) -> None:
    publishers.sign(folder)
    damaged = publishers.root.certificate.public_bytes(Encoding.DER).replace(b"root", b"\xffoot")
    file = publishers.folder / "damaged.pem"
    file.write_bytes(load_der_x509_certificate(damaged).public_bytes(Encoding.PEM))
    with pytest.raises(ArtifactError) as caught:
        check_folder(folder, trusted=TrustedRoots(file))
    assert caught.value.reason == "TRUST_ROOT_INVALID"


def test_the_commands_take_a_certificate_and_its_settings(
    folder: Path, publishers: Publishers, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    named = ("--certificate", publishers.file, "--certificate-chain", publishers.chain)
    done = in_process(capfd, "publish", folder, "--key", publishers.key, *named, "--json", home=home)
    assert (done.code, done.json["signed"]) == (0, True), done.err
    first = (folder / SIGNATURE).read_bytes()
    settings = {
        "SLIPWAY_SIGNING_KEY": str(publishers.key),
        "SLIPWAY_SIGNING_CERTIFICATE": str(publishers.file),
        "SLIPWAY_SIGNING_CERTIFICATE_CHAIN": str(publishers.chain),
    }
    assert in_process(capfd, "publish", folder, home=home, **settings).code == 0
    assert (folder / SIGNATURE).read_bytes() == first
    roots = ("verify", folder, "--certificate-chain", publishers.roots)
    done = in_process(capfd, *roots, "--json", home=home)
    assert (done.code, done.json["signer"]) == (0, "CN=release of acme")
    assert "signed by CN=release of acme, with the key" in in_process(capfd, *roots, home=home).out
    unset = in_process(capfd, "verify", folder, "--identity", "", "--json", home=home)
    assert (unset.code, unset.json["reason"]) == (3, "CONFIGURATION_INVALID"), "a variable that is not set"
    other = in_process(capfd, "publish", folder, *named, "--json", home=home)
    assert (other.code, other.json["reason"]) == (3, "CONFIGURATION_INVALID"), (
        "a certificate without its key signs nothing"
    )
    lacking = {name: value for name, value in settings.items() if name != "SLIPWAY_SIGNING_CERTIFICATE"}
    assert in_process(capfd, "publish", folder, home=home, **lacking).code == 3
    bare = make_keys(tmp_path, "bare")
    assert in_process(capfd, "publish", folder, "--key", bare[0], home=home, **settings).code == 0, "of another key"
    assert in_process(capfd, "verify", folder, "--key", bare[1], home=home).code == 0


def test_a_program_names_the_roots(folder: Path, publishers: Publishers, tmp_path: Path) -> None:
    publishers.sign(folder)
    for done in (
        slipway.verify(folder, certificate_chain=publishers.roots, home=tmp_path),
        asyncio.run(slipway.verify_async(folder, certificate_chain=publishers.roots, home=tmp_path)),
    ):
        assert done.signer == "CN=release of acme"
    with pytest.raises(ArtifactError):
        slipway.verify(folder, certificate_chain=tmp_path / "absent", home=tmp_path)
    ours, theirs = (signature(each).parameters for each in (slipway.verify, slipway.verify_async))
    assert list(ours) == list(theirs)


@pytest.mark.parametrize(
    "named",
    [
        {"key": Path("a"), "roots": Path("b")},
        {"key": Path("a"), "identity": "me@example.com"},
        {"identity": "me@example.com"},
        {"provider": "https://example.com", "trusted_root": Path("c")},
        {"identity": ""},
        {"provider": ""},
        {"identity": "me@example.com", "provider": "", "trusted_root": Path("c")},
    ],
)
def test_what_is_asked_for_in_part_or_twice_is_refused(named: dict[str, Any]) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("key", "roots", "identity", "provider", "trusted_root"))
    with pytest.raises(ConfigurationError):
        trusted_signer(**nothing | named)
    assert trusted_signer(**nothing) is None
