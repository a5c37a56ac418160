"""The signature by an identity of Sigstore that the specification of OpenSSF Model Signing has as its example.

``sigstore.bundle.json`` is ``test-vectors/v1.0/valid/sigstore.bundle.json`` of github.com/ossf/model-signing-spec (Apache-2.0).
"""

from __future__ import annotations

from pathlib import Path

from slipway.publishing.signatures.trust import TrustedIdentity

BUNDLE = Path(__file__).with_name("sigstore.bundle.json")
DIGESTS = {
    "signme-1": "f6310066c7320497ea554260c32c43660bff648cb2a61194832cc086077085e1",
    "signme-2": "32dcb1f8e1ae52d5963e56a6ba06ab58b424c15ed2a6b70d2feca1d089370028",
}
"""What it signs."""
IDENTITY, PROVIDER = "stefanb@us.ibm.com", "https://sigstore.verify.ibm.com/oauth2"


def trusted_root(*, staging: bool = False) -> Path:
    """Return the trusted root of a public instance, with which Sigstore's library comes."""
    import sigstore

    host = "sigstage" if staging else "sigstore"
    return next(Path(sigstore.__file__).parent.glob(f"_store/*tuf-repo-cdn.{host}.dev/trusted_root.json"))


def example_identity() -> TrustedIdentity:
    """Return who signed the example."""
    return TrustedIdentity(IDENTITY, PROVIDER, trusted_root())
