"""Signatures by a certificate: what is signed and verified, and which certificates are refused, each by its reason."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificate
from cryptography.x509.oid import ExtendedKeyUsageOID
from pydantic import SecretStr

from slipway.errors import ModelExportError
from slipway.exporting.verification import Verification
from slipway.publishing.destination import Access
from slipway.publishing.oci.reading import check_registry
from slipway.publishing.publication import SIGNATURE
from slipway.publishing.publisher import publish
from slipway.publishing.release import prepare_release
from slipway.publishing.signatures.signing import SigningCertificate
from slipway.publishing.signatures.trust import TrustedKey, TrustedRoots
from slipway.publishing.verification import check_folder
from support.commands.signing_certificates import AUTHORITY, CODE_SIGNING, SERVER, Issued, Publishers, Shape, issue
from support.servers.registry_server import RegistryServer, needs_registry

pytest.importorskip("model_signing", reason="the extra publish is not installed")


def refused(folder: Path, trusted: Any) -> ModelExportError:
    with pytest.raises(ModelExportError) as caught:
        check_folder(folder, trusted=trusted)
    assert "\n" not in caught.value.message
    return caught.value


def swap(folder: Path, *certificates: Issued) -> None:
    """Put other certificates into a signature; what is signed does not name them."""
    document = json.loads((folder / SIGNATURE).read_text())
    encoded = [each.certificate.public_bytes(Encoding.DER) for each in certificates]
    chain = [{"rawBytes": base64.b64encode(each).decode()} for each in encoded]
    document["verificationMaterial"]["x509CertificateChain"]["certificates"] = chain
    (folder / SIGNATURE).write_text(json.dumps(document))


def test_a_folder_is_signed_once_and_leads_to_the_root(folder: Path, publishers: Publishers) -> None:
    publishers.sign(folder)
    first = (folder / SIGNATURE).read_bytes()
    publishers.sign(folder)
    assert (folder / SIGNATURE).read_bytes() == first
    checked = check_folder(folder, trusted=publishers.trusted)
    assert (checked.verdict, checked.signer.name if checked.signer else "") == ("passed", "CN=release of acme")
    assert len(checked.signed_by) == 64
    prepare_release(folder)
    assert (folder / SIGNATURE).read_bytes() == first, "without a key, it stays"
    prepare_release(folder, key=publishers.key)
    assert (folder / SIGNATURE).read_bytes() != first, "the bare key is another signer"
    publishers.sign(folder)
    renewed = issue("release of acme", publishers.middle, Shape(), publishers.signer.key).write(
        folder.parent / "new.pem"
    )
    before = (folder / SIGNATURE).read_bytes()
    prepare_release(folder, key=publishers.key, certificate=SigningCertificate(renewed, publishers.chain))
    assert (folder / SIGNATURE).read_bytes() != before, "and so is a renewed certificate"
    check_folder(folder, trusted=publishers.trusted)


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_an_encrypted_key_and_one_file_of_all_certificates(
    folder: Path, tmp_path: Path, curve: ec.EllipticCurve
) -> None:
    made = Publishers(tmp_path, key=ec.generate_private_key(curve))
    key = made.signer.write_key(tmp_path, "locked", "a long phrase")
    whole = made.signer.write(tmp_path / "whole.pem", made.root, made.middle)
    prepare_release(folder, key=key, passphrase=SecretStr("a long phrase"), certificate=SigningCertificate(whole))
    assert check_folder(folder, trusted=made.trusted).signed_by
    document = json.loads((folder / SIGNATURE).read_text())
    assert len(document["verificationMaterial"]["x509CertificateChain"]["certificates"]) == 3


@pytest.mark.slow
def test_the_library_s_own_command_takes_it_and_makes_one(folder: Path, publishers: Publishers) -> None:
    publishers.sign(folder)
    words = [sys.executable, "-m", "model_signing"]
    at = ["--signature", str(folder / SIGNATURE)]
    verify = [*words, "verify", "certificate", *at, "--certificate_chain", str(publishers.roots), str(folder)]
    done = subprocess.run(verify, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / SIGNATURE).unlink()
    sign = [
        "sign",
        "certificate",
        *at,
        "--private_key",
        str(publishers.key),
        "--signing_certificate",
        str(publishers.file),
    ]
    chain = ["--certificate_chain", str(publishers.chain), str(folder)]
    subprocess.run([*words, *sign, *chain], check=True, capture_output=True)
    assert check_folder(folder, trusted=publishers.trusted).signed_by


def test_the_certificate_alone_earns_no_trust(folder: Path, publishers: Publishers, tmp_path: Path) -> None:
    publishers.sign(folder)
    other = issue("root").write(tmp_path / "other.pem")  # of the same name
    assert refused(folder, TrustedRoots(other)).reason == "CERTIFICATE_UNTRUSTED"
    assert refused(folder, TrustedRoots(publishers.chain)).reason == "CERTIFICATE_UNTRUSTED", (
        "no root, but on the way to one"
    )
    swap(folder, publishers.signer)
    assert refused(folder, publishers.trusted).reason == "CERTIFICATE_UNTRUSTED", "what leads to the root is missing"
    both = publishers.root.write(tmp_path / "both.pem", publishers.middle)
    assert check_folder(folder, trusted=TrustedRoots(both)).signed_by, "and may come with the root"


def test_one_that_signed_itself_is_taken_only_as_a_root(folder: Path, tmp_path: Path) -> None:
    own = issue("myself", None, Shape())
    file = own.write(tmp_path / "own.pem")
    prepare_release(folder, key=own.write_key(tmp_path, "own-key"), certificate=SigningCertificate(file))
    stranger = issue("root").write(tmp_path / "stranger.pem")
    error = refused(folder, TrustedRoots(stranger))
    assert (error.reason, "CN=myself" in error.message) == ("CERTIFICATE_UNTRUSTED", True)
    assert check_folder(folder, trusted=TrustedRoots(file)).signed_by


def _expired(at: Publishers) -> list[Issued]:
    return [issue("late", at.middle, Shape(), at.signer.key, ends=-1), at.middle]


def _early(at: Publishers) -> list[Issued]:
    return [issue("early", at.middle, Shape(), at.signer.key, begins=1), at.middle]


def _expired_authority(at: Publishers) -> list[Issued]:
    middle = issue("old authority", at.root, ends=-1)
    return [issue("signer", middle, Shape(), at.signer.key), middle]


def _server(at: Publishers) -> list[Issued]:
    return [issue("a web server", at.middle, Shape(), at.signer.key, purposes=(SERVER,)), at.middle]


def _encipherment(at: Publishers) -> list[Issued]:
    return [issue("signs nothing", at.middle, Shape(), at.signer.key, signs=False), at.middle]


def _purposeless(at: Publishers) -> list[Issued]:
    return [issue("anything", at.middle, Shape(), at.signer.key, signs=None, purposes=()), at.middle]


def _no_authority(at: Publishers) -> list[Issued]:
    end = issue("an end", at.middle, Shape())
    return [issue("signer", end, Shape(), at.signer.key), end, at.middle]


def _of_no_issuer(at: Publishers) -> list[Issued]:
    forged = issue("publisher's authority", None, AUTHORITY)  # the name of the authority, another key
    return [issue("signer", forged, Shape(), at.signer.key), at.middle]


def _weak_digest(at: Publishers) -> list[Issued]:
    """By openssl: no library of Python signs with SHA-1 any more."""
    end, use = at.folder / "sha1.pem", at.folder / "use"
    use.write_text("keyUsage=digitalSignature\n")
    request = ["openssl", "req", "-new", "-key", at.key, "-subj", "/CN=signer", "-out", at.folder / "request"]
    by = ["-CA", at.chain, "-CAkey", at.middle.write_key(at.folder, "authority"), "-CAcreateserial"]
    sign = [
        "openssl",
        "x509",
        "-req",
        "-in",
        at.folder / "request",
        *by,
        "-sha1",
        "-extfile",
        use,
        "-days",
        "9",
        "-out",
        end,
    ]
    for words in (request, sign):
        subprocess.run(list(map(str, words)), check=True, capture_output=True)
    return [Issued(load_pem_x509_certificate(end.read_bytes()), at.signer.key), at.middle]


def _weak_key(at: Publishers) -> list[Issued]:
    middle = issue("short key", at.root, AUTHORITY, rsa.generate_private_key(65537, 1024))
    return [issue("signer", middle, Shape(), at.signer.key), middle]


def _behind(at: Publishers, middle: Issued) -> list[Issued]:
    return [issue("signer", middle, Shape(), at.signer.key), middle]


def _authority_for_servers(at: Publishers) -> list[Issued]:
    return _behind(at, issue("authority for servers", at.root, purposes=(SERVER,)))


def _old_kind_of_key(at: Publishers) -> list[Issued]:
    return _behind(at, issue("dsa", at.root, AUTHORITY, dsa.generate_private_key(1024)))


def _small_curve(at: Publishers) -> list[Issued]:
    return _behind(at, issue("224 bits", at.root, AUTHORITY, ec.generate_private_key(ec.SECP224R1())))


def _other_curve(at: Publishers) -> list[Issued]:
    return _behind(at, issue("another curve", at.root, AUTHORITY, ec.generate_private_key(ec.SECP256K1())))


def _rsa_signer(at: Publishers) -> list[Issued]:
    return [issue("signer", at.middle, Shape(), rsa.generate_private_key(65537, 2048)), at.middle]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_expired, "CERTIFICATE_EXPIRED"),
        (_early, "CERTIFICATE_EXPIRED"),
        (_expired_authority, "CERTIFICATE_EXPIRED"),
        (_server, "CERTIFICATE_UNFIT"),
        (_encipherment, "CERTIFICATE_UNFIT"),
        (_purposeless, "CERTIFICATE_UNFIT"),
        (_no_authority, "CERTIFICATE_UNFIT"),
        (_weak_digest, "CERTIFICATE_UNFIT"),
        (_weak_key, "CERTIFICATE_UNFIT"),
        (_authority_for_servers, "CERTIFICATE_UNFIT"),
        (_old_kind_of_key, "CERTIFICATE_UNFIT"),
        (_small_curve, "CERTIFICATE_UNFIT"),
        (_other_curve, "CERTIFICATE_UNFIT"),
        (_rsa_signer, "CERTIFICATE_UNFIT"),
        (_of_no_issuer, "CERTIFICATE_UNTRUSTED"),
    ],
)
def test_a_certificate_that_must_not_be_taken_is_refused(
    folder: Path, publishers: Publishers, make: Callable[[Publishers], list[Issued]], reason: str
) -> None:
    publishers.sign(folder)
    swap(folder, *make(publishers))
    error = refused(folder, publishers.trusted)
    assert (error.reason, bool(error.remedy)) == (reason, True), error.message


@pytest.mark.parametrize(
    "shape",
    [
        {"purposes": (CODE_SIGNING,)},
        {"purposes": (SERVER, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE)},
        {"key": rsa.generate_private_key(65537, 2048)},
        {"begins": -1},
    ],
    ids=["code-signing", "any", "rsa", "renewed"],
)
def test_an_authority_may_be_so(folder: Path, publishers: Publishers, shape: dict[str, Any]) -> None:
    """A renewed one begins after the certificates that it issued before."""
    publishers.sign(folder)
    swap(folder, *_behind(publishers, issue("authority", publishers.root, **shape)))
    assert check_folder(folder, trusted=publishers.trusted).signed_by


def test_a_long_name_is_cut_only_where_it_is_shown(folder: Path, publishers: Publishers) -> None:
    publishers.sign(folder)
    swap(folder, issue("release", publishers.middle, Shape(), publishers.signer.key, units=30), publishers.middle)
    done = Verification.of("run", check_folder(folder, trusted=publishers.trusted))
    assert (done.to_json()["signer"].count("OU=unit "), " characters … " in str(done)) == (30, True)


@pytest.mark.parametrize(
    "certificates",
    [
        [],
        [{"rawBytes": ""}],
        [{"rawBytes": base64.b64encode(b"0" * 100).decode()}],
        [{"rawBytes": "!"}],
        [{}],
        5,
        None,
        [{"rawBytes": base64.b64encode(b"\x30" * 100_000).decode()}],
    ],
)
def test_damaged_certificates_are_refused(folder: Path, publishers: Publishers, certificates: Any) -> None:
    publishers.sign(folder)
    document = json.loads((folder / SIGNATURE).read_text())
    document["verificationMaterial"]["x509CertificateChain"]["certificates"] = certificates
    (folder / SIGNATURE).write_text(json.dumps(document))
    assert refused(folder, publishers.trusted).reason == "SIGNATURE_INVALID"


def test_cut_and_changed_certificates_are_refused(folder: Path, publishers: Publishers) -> None:
    """Any byte may differ: the error is always one of ours."""
    publishers.sign(folder)
    document = json.loads((folder / SIGNATURE).read_text())
    chain = document["verificationMaterial"]["x509CertificateChain"]["certificates"]
    right = base64.b64decode(chain[0]["rawBytes"])
    changed = [right[:size] for size in range(1, len(right), 197)]
    changed += [right[:at] + bytes([right[at] ^ 0x55]) + right[at + 1 :] for at in range(0, len(right), 29)]
    for each in changed:
        chain[0]["rawBytes"] = base64.b64encode(each).decode()
        (folder / SIGNATURE).write_text(json.dumps(document))
        assert refused(folder, publishers.trusted).reason.startswith(("SIGNATURE_", "CERTIFICATE_"))


def test_many_certificates_are_refused(folder: Path, publishers: Publishers) -> None:
    publishers.sign(folder)
    swap(folder, publishers.signer, *[publishers.middle] * 10)
    assert refused(folder, publishers.trusted).reason == "SIGNATURE_INVALID"


def test_what_was_changed_behind_the_signature_is_found(folder: Path, publishers: Publishers, tmp_path: Path) -> None:
    publishers.sign(folder)
    kept = (folder / SIGNATURE).read_bytes()
    swap(
        folder, issue("signer", publishers.middle, Shape()), publishers.middle
    )  # a certificate of the root for another key
    error = refused(folder, publishers.trusted)
    assert (error.reason, "did not make it" in error.message) == ("SIGNATURE_INVALID", True)
    document = json.loads(kept)
    payload = base64.b64decode(document["dsseEnvelope"]["payload"]).replace(b"onnx-int4", b"onnx-int5")
    document["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    (folder / SIGNATURE).write_text(json.dumps(document))
    assert refused(folder, publishers.trusted).reason == "SIGNATURE_INVALID"
    (folder / SIGNATURE).write_bytes(kept)
    (folder / "bom.cdx.json").unlink()
    with pytest.raises(ModelExportError, match=r"bom\.cdx\.json: missing") as caught:
        check_folder(folder, trusted=publishers.trusted)
    assert caught.value.reason == "SIGNED_CONTENT_CHANGED"


def test_each_kind_of_signature_names_how_it_is_checked(
    folder: Path, publishers: Publishers, keys: tuple[Path, Path]
) -> None:
    publishers.sign(folder)
    error = refused(folder, TrustedKey(keys[1]))
    assert (error.reason, "--certificate-chain" in error.message) == ("SIGNATURE_INVALID", True)
    prepare_release(folder, key=keys[0])
    error = refused(folder, publishers.trusted)
    assert (error.reason, "check it with --key" in error.message) == ("SIGNATURE_INVALID", True)


@needs_registry
def test_a_registry_is_checked_by_the_root(
    folder: Path, publishers: Publishers, registry: RegistryServer, access: Access
) -> None:
    url = f"oci://{registry.host}/certified/run:v1"
    publish(folder, [url], access=access, key=publishers.key, certificate=publishers.certificate)
    _, checked = check_registry(url, access, trusted=publishers.trusted)
    assert checked.signer is not None
    assert checked.signer.name == "CN=release of acme"
    other = issue("root").write(folder.parent / "other.pem")
    with pytest.raises(ModelExportError) as caught:
        check_registry(url, access, trusted=TrustedRoots(other))
    assert caught.value.reason == "CERTIFICATE_UNTRUSTED"
