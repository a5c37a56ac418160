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
from slipway.publishing.signing import check_signature

pytest.importorskip("model_signing", reason="the extra publish is not installed")
CHECKOUTS = Path(os.environ.get("SLIPWAY_TEST_SIGNATURES", "/nonexistent"))
RELEASES = CHECKOUTS / "model-transparency" / "scripts" / "tests"
VECTORS = CHECKOUTS / "model-signing-spec" / "test-vectors" / "v1.0"
KEY = RELEASES / "keys" / "certificate" / "signing-key-pub.pem"
pytestmark = pytest.mark.skipif(not VECTORS.exists(), reason="SLIPWAY_TEST_SIGNATURES names no checkouts")
SINGLE_FILE = ("v0.3.1", "v1.0.0")
"""Releases whose example is the signature of one file."""


def digests_of(release: str) -> dict[str, str]:
    folder = RELEASES / f"{release}-elliptic-key"
    files = {path.name: path for path in folder.iterdir() if path.name.startswith("signme")}
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())}
    return {".": digests["signme-1"]} if release in SINGLE_FILE else digests


@pytest.mark.parametrize("release", ["v0.3.1", "v1.0.0", "v1.0.1", "v1.1.0"])
def test_signatures_of_earlier_releases_are_right(release: str) -> None:
    signature = RELEASES / f"{release}-elliptic-key" / SIGNATURE
    digests = digests_of(release)
    assert check_signature(signature, digests, key=KEY, where=release).ignored == ()
    first = next(iter(digests))
    lost = {name: digest for name, digest in digests.items() if name != first}
    for changed in (digests | {first: "0" * 64}, digests | {"added": "0" * 64}, lost):
        with pytest.raises(ModelExportError) as caught:
            check_signature(signature, changed, key=KEY, where=release)
        assert caught.value.reason == "SIGNED_CONTENT_CHANGED"


def test_the_vectors_of_the_specification() -> None:
    digests = digests_of("v1.1.0")
    assert check_signature(VECTORS / "valid" / "key.bundle.json", digests, key=KEY, where="vector").key
    others = [VECTORS / "valid" / f"{name}.bundle.json" for name in ("certificate", "sigstore")]  # by no bare key
    refused = [*others, *sorted(VECTORS.glob("invalid*/*.json"))]
    assert len(refused) >= 7
    for vector in refused:
        with pytest.raises(ModelExportError) as caught:
            check_signature(vector, digests, key=KEY, where=vector.name)
        assert caught.value.reason == "SIGNATURE_INVALID"
