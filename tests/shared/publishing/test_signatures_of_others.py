"""Signatures that others publish for programs like this one: those of earlier releases of the library, and the specification's own.

``SLIPWAY_TEST_SIGNATURES`` names a folder with checkouts of github.com/sigstore/model-transparency and github.com/ossf/model-signing-spec.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from slipway.errors import ModelExportError
from slipway.publishing.publication import SIGNATURE
from slipway.publishing.signatures.checking import check_signature
from slipway.publishing.signatures.trust import Trusted, TrustedIdentity, TrustedKey, TrustedRoots

pytest.importorskip("model_signing", reason="the extra publish is not installed")
CHECKOUTS = Path(os.environ.get("SLIPWAY_TEST_SIGNATURES", "/nonexistent"))
RELEASES = CHECKOUTS / "model-transparency" / "scripts" / "tests"
VECTORS = CHECKOUTS / "model-signing-spec" / "test-vectors" / "v1.0"
FILES = RELEASES / "keys" / "certificate"
KEY, ROOTS = TrustedKey(FILES / "signing-key-pub.pem"), TrustedRoots(FILES / "ca-cert.pem")
IDENTITY, PROVIDER = "stefanb@us.ibm.com", "https://sigstore.verify.ibm.com/oauth2"
pytestmark = pytest.mark.skipif(not VECTORS.exists(), reason="SLIPWAY_TEST_SIGNATURES names no checkouts")
SINGLE_FILE = ("v0.3.1-elliptic-key", "v1.0.0-elliptic-key")
"""Releases whose example is the signature of one file."""


@pytest.fixture(scope="module")
def keyless() -> TrustedIdentity:
    """The signer of the examples, by the trusted root of the public instance that Sigstore's library comes with."""
    import sigstore

    root = next(Path(sigstore.__file__).parent.glob("_store/*tuf-repo-cdn.sigstore.dev/trusted_root.json"))
    return TrustedIdentity(IDENTITY, PROVIDER, root)


def digests_of(example: str) -> dict[str, str]:
    """Return the digests of an example's files that are signed."""
    folder = RELEASES / example
    files = {path.name: path for path in folder.iterdir() if path.name.startswith("signme")}
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())}
    return {".": digests["signme-1"]} if example in SINGLE_FILE else digests


def check_example(example: str, trusted: Trusted) -> None:
    signature, digests = RELEASES / example / SIGNATURE, digests_of(example)
    assert check_signature(signature, digests, trusted=trusted, where=example).ignored == ()
    first = next(iter(digests))
    lost = {name: digest for name, digest in digests.items() if name != first}
    for changed in (digests | {first: "0" * 64}, digests | {"added": "0" * 64}, lost):
        with pytest.raises(ModelExportError) as caught:
            check_signature(signature, changed, trusted=trusted, where=example)
        assert caught.value.reason == "SIGNED_CONTENT_CHANGED"


@pytest.mark.parametrize("release", ["v0.3.1", "v1.0.0", "v1.0.1", "v1.1.0"])
def test_signatures_of_earlier_releases_are_right(release: str) -> None:
    check_example(f"{release}-elliptic-key", KEY)


@pytest.mark.parametrize("release", ["v0.2.0", "v0.3.1", "v1.0.0", "v1.0.1", "v1.1.0"])
def test_signatures_by_a_certificate_of_earlier_releases_are_right(release: str) -> None:
    check_example(f"{release}-certificate", ROOTS)


@pytest.mark.parametrize("release", ["v0.3.1", "v1.0.0", "v1.0.1", "v1.1.0"])
def test_signatures_by_an_identity_of_earlier_releases_are_right(release: str, keyless: TrustedIdentity) -> None:
    check_example(f"{release}-sigstore", keyless)


def test_another_identity_or_instance_did_not_sign(keyless: TrustedIdentity, tmp_path: Path) -> None:
    example = "v1.1.0-sigstore"
    signature, digests = RELEASES / example / SIGNATURE, digests_of(example)
    staging = next(keyless.root.parent.parent.glob("*sigstage.dev/trusted_root.json"))
    mallory = TrustedIdentity("mallory@example.com", PROVIDER, keyless.root)
    elsewhere = TrustedIdentity(IDENTITY, "https://accounts.example.com", keyless.root)
    for trusted in (mallory, elsewhere, TrustedIdentity(IDENTITY, PROVIDER, staging)):
        with pytest.raises(ModelExportError) as caught:
            check_signature(signature, digests, trusted=trusted, where=example)
        assert caught.value.reason == "SIGNATURE_INVALID"
    document = json.loads(signature.read_text())
    entry = document["verificationMaterial"]["tlogEntries"][0]
    changes = [
        {**entry, "integratedTime": "99999999999999999999"},
        {**entry, "integratedTime": "67768036191676800"},
        {**entry, "integratedTime": "1"},
        {**entry, "inclusionProof": {**entry["inclusionProof"], "hashes": []}},
        {**entry, "canonicalizedBody": "e30="},
        {},
        None,
    ]
    for changed in changes:
        document["verificationMaterial"]["tlogEntries"] = [changed]
        (tmp_path / SIGNATURE).write_text(json.dumps(document))
        with pytest.raises(ModelExportError) as caught:
            check_signature(tmp_path / SIGNATURE, digests, trusted=keyless, where=example)
        assert caught.value.reason == "SIGNATURE_INVALID"


def test_the_vectors_of_the_specification(keyless: TrustedIdentity) -> None:
    valid: dict[str, tuple[str, Trusted]] = {
        "key": ("v1.1.0-elliptic-key", KEY),
        "certificate": ("v1.1.0-elliptic-key", ROOTS),
        "sigstore": ("v1.1.0-sigstore", keyless),
    }
    for method, (example, trusted) in valid.items():
        vector = VECTORS / "valid" / f"{method}.bundle.json"
        assert check_signature(vector, digests_of(example), trusted=trusted, where=method).signer.key
        others = [each for _, each in valid.values() if each is not trusted]
        refused = [(vector, other) for other in others]
        refused += [(path, trusted) for path in sorted(VECTORS.glob("invalid*/*.json"))]
        assert len(refused) >= 7
        for path, asked in refused:
            with pytest.raises(ModelExportError) as caught:
                check_signature(path, digests_of(example), trusted=asked, where=path.name)
            assert caught.value.reason == "SIGNATURE_INVALID"
