"""Signatures that others publish for programs like this one: those of earlier releases of the library, and the specification's own.

``SLIPWAY_TEST_SIGNATURES`` names a folder with checkouts of github.com/sigstore/model-transparency and github.com/ossf/model-signing-spec.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from slipway.errors import ModelExportError
from slipway.publishing.publication import SIGNATURE
from slipway.publishing.signatures.checking import check_signature
from slipway.publishing.signatures.trust import Trusted, TrustedKey, TrustedRoots
from support.signatures.identities import example_identity

pytest.importorskip("model_signing", reason="the extra publish is not installed")
CHECKOUTS = Path(os.environ.get("SLIPWAY_TEST_SIGNATURES", "/nonexistent"))
RELEASES = CHECKOUTS / "model-transparency" / "scripts" / "tests"
VECTORS = CHECKOUTS / "model-signing-spec" / "test-vectors" / "v1.0"
FILES = RELEASES / "keys" / "certificate"
KEY, ROOTS = TrustedKey(FILES / "signing-key-pub.pem"), TrustedRoots(FILES / "ca-cert.pem")
pytestmark = pytest.mark.skipif(not VECTORS.exists(), reason="SLIPWAY_TEST_SIGNATURES names no checkouts")
SINGLE_FILE = ("v0.3.1-elliptic-key", "v1.0.0-elliptic-key")
"""Releases whose example is the signature of one file."""


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
def test_signatures_by_an_identity_of_earlier_releases_are_right(release: str) -> None:
    check_example(f"{release}-sigstore", example_identity())


def test_the_vectors_of_the_specification() -> None:
    valid: dict[str, tuple[str, Trusted]] = {
        "key": ("v1.1.0-elliptic-key", KEY),
        "certificate": ("v1.1.0-elliptic-key", ROOTS),
        "sigstore": ("v1.1.0-sigstore", example_identity()),
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
