"""Signatures by an identity of Sigstore, checked without a network."""

from __future__ import annotations

import base64
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from slipway.errors import ModelExportError
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


@pytest.mark.parametrize(
    "change",
    [
        {"mediaType": "text/plain"},
        {"tlogs": []},
        {"certificateAuthorities": []},
        {"ctlogs": []},
        {"tlogs": 5},
        {"certificateAuthorities": [{}]},
    ],
)
def test_a_trusted_root_that_was_changed_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "root.json"
    root.write_text(json.dumps({**json.loads(trusted_root().read_text()), **change}))
    reason = refused(BUNDLE, TrustedIdentity(IDENTITY, PROVIDER, root))
    assert reason in ("TRUST_ROOT_INVALID", "SIGNATURE_INVALID")
