"""Signatures by an identity of Sigstore, checked without a network."""

from __future__ import annotations

import base64
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from slipway.errors import ConfigurationError, ModelExportError
from slipway.publishing.publication import SIGNATURE
from slipway.publishing.signatures.checking import check_signature
from slipway.publishing.signatures.trust import TrustedIdentity, TrustedRoots
from support.commands.signing_certificates import Publishers
from support.signatures.identities import BUNDLE, DIGESTS, IDENTITY, PROVIDER, example_identity, trusted_root

pytest.importorskip("model_signing", reason="the extra publish is not installed")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where anything asks for an address: what is missing here is the network, which no server of a test can be."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing is fetched")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def refused(bundle: Path, trusted: Any, digests: dict[str, str] = DIGESTS) -> str:
    with pytest.raises(ModelExportError) as caught:
        check_signature(bundle, digests, trusted=trusted, where="example")
    return caught.value.reason


def test_the_identity_signed_these_files() -> None:
    signed = check_signature(BUNDLE, DIGESTS, trusted=example_identity(), where="example")
    assert (signed.signer.name, len(signed.signer.key), signed.ignored) == (IDENTITY, 64, ())
    first = next(iter(DIGESTS))
    lost = {name: digest for name, digest in DIGESTS.items() if name != first}
    for changed in (DIGESTS | {first: "0" * 64}, DIGESTS | {"added": "0" * 64}, lost):
        assert refused(BUNDLE, example_identity(), changed) == "SIGNED_CONTENT_CHANGED"


@pytest.mark.parametrize(
    "trusted",
    [
        lambda: TrustedIdentity("mallory@example.com", PROVIDER, trusted_root()),
        lambda: TrustedIdentity(IDENTITY, "https://accounts.example.com", trusted_root()),
        lambda: TrustedIdentity(IDENTITY, PROVIDER, trusted_root(staging=True)),
    ],
    ids=["identity", "provider", "instance"],
)
def test_another_did_not_sign(trusted: Any) -> None:
    assert refused(BUNDLE, trusted()) == "SIGNATURE_INVALID"


def test_a_root_of_certificates_says_how_it_is_checked(publishers: Publishers) -> None:
    with pytest.raises(ModelExportError, match="--identity") as caught:
        check_signature(BUNDLE, DIGESTS, trusted=TrustedRoots(publishers.roots), where="example")
    assert caught.value.reason == "SIGNATURE_INVALID"


def _entry(**changes: Any) -> Any:
    def change(document: dict[str, Any]) -> None:
        entry = document["verificationMaterial"]["tlogEntries"][0]
        document["verificationMaterial"]["tlogEntries"] = [{**entry, **changes}]

    return change


def _material(**changes: Any) -> Any:
    return lambda document: document["verificationMaterial"].update(changes)


def _payload(document: dict[str, Any]) -> None:
    envelope = document["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"]).replace(b"signme-1", b"signme-3")
    envelope["payload"] = base64.b64encode(payload).decode()


@pytest.mark.parametrize(
    "change",
    [
        _entry(integratedTime="99999999999999999999"),
        _entry(integratedTime="67768036191676800"),
        _entry(integratedTime="1"),
        _entry(inclusionProof={}),
        _entry(canonicalizedBody="e30="),
        _entry(logId={"keyId": ""}),
        _material(tlogEntries=[]),
        _material(tlogEntries=[None]),
        _material(tlogEntries=5),
        _material(certificate={"rawBytes": base64.b64encode(b"0" * 90).decode()}),
        _material(certificate=None),
        _material(timestampVerificationData={"rfc3161Timestamps": [{"signedTimestamp": "AAAA"}]}),
        _material(timestampVerificationData={"rfc3161Timestamps": [{"signedTimestamp": "AAAA"}] * 100}),
        _payload,
    ],
)
def test_a_bundle_that_was_changed_is_refused(change: Any, tmp_path: Path) -> None:
    document = json.loads(BUNDLE.read_text())
    change(document)
    (tmp_path / SIGNATURE).write_text(json.dumps(document))
    assert refused(tmp_path / SIGNATURE, example_identity()) == "SIGNATURE_INVALID"


def _root(**changes: Any) -> Any:
    return lambda document: document.update(changes)


def _key(log: str, **changes: Any) -> Any:
    """Change the first of several keys: the others still work."""
    return lambda document: document[log][0]["publicKey"].update(changes)


def _certificate(authority: str, change: Any) -> Any:
    def at(document: dict[str, Any]) -> None:
        first = document[authority][0]["certChain"]["certificates"][0]
        first["rawBytes"] = base64.b64encode(change(base64.b64decode(first["rawBytes"]))).decode()

    return at


def _other_version(data: bytes) -> bytes:
    return data.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x05", 1)


@pytest.mark.parametrize(
    "change",
    [
        _root(mediaType="text/plain"),
        _root(tlogs=[]),
        _root(certificateAuthorities=[]),
        _root(ctlogs=[]),
        _root(tlogs=5),
        _root(certificateAuthorities=[{}]),
        _root(timestampAuthorities=[{}]),
        _key("tlogs", rawBytes="AAAA"),
        _key("tlogs", rawBytes=""),
        _key("ctlogs", rawBytes="AAAA"),
        _key("ctlogs", keyDetails="PKIX_ED25519_PH"),
        _certificate("certificateAuthorities", _other_version),
        _certificate("timestampAuthorities", _other_version),
        _certificate("certificateAuthorities", lambda data: data[:-9]),
    ],
)
def test_a_trusted_root_that_was_changed_is_refused(
    change: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, document = tmp_path / "root.json", json.loads(trusted_root().read_text())
    change(document)
    root.write_text(json.dumps(document))
    assert refused(BUNDLE, TrustedIdentity(IDENTITY, PROVIDER, root)) == "TRUST_ROOT_INVALID"
    assert caplog.records == [], "the library prints what it leaves out"


@pytest.mark.parametrize(("identity", "provider"), [("", PROVIDER), (IDENTITY, "")])
def test_an_empty_part_of_an_identity_is_refused(identity: str, provider: str) -> None:
    """The library compares no empty provider."""
    with pytest.raises(ConfigurationError):
        TrustedIdentity(identity, provider, trusted_root())
