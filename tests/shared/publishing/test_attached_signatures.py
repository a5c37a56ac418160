"""Signatures that anybody attached to a published model: which are passed over, and whose error is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.digests import digest_bytes
from slipway.errors import ModelExportError
from slipway.publishing.destination import Access
from slipway.publishing.oci.destination import REFERRERS
from slipway.publishing.oci.reading import check_registry
from slipway.publishing.oci.registry import fallback_tag
from slipway.publishing.publication import SIGNATURE
from slipway.publishing.publisher import publish
from slipway.publishing.release import prepare_release
from slipway.publishing.signatures.signing import SigningCertificate
from slipway.publishing.signatures.trust import Trusted, TrustedKey
from support.commands.delivered_folders import make_keys
from support.commands.signing_certificates import Publishers, Shape, issue
from support.servers.image_uploads import INDEX, MANIFEST, Uploader
from support.servers.registry_server import RegistryServer, needs_registry

pytest.importorskip("model_signing", reason="the extra publish is not installed")
pytestmark = needs_registry


class Attached:
    """A published model, and what is attached to it."""

    def __init__(self, registry: RegistryServer, name: str, folder: Path, access: Access) -> None:
        self.url, self._access = f"oci://{registry.host}/{name}:v1", access
        self._uploader, self._entries = Uploader(registry, name), list[dict[str, Any]]()
        address = publish(folder, [self.url], access=access).destinations[0].address
        self._tag = fallback_tag(address.rpartition("@")[2])

    def attach(self, *layers: bytes) -> None:
        kind = REFERRERS[SIGNATURE]
        blobs = [self._uploader.blob(layer, kind) for layer in layers]
        config = self._uploader.blob(b"{}", "application/vnd.oci.empty.v1+json")
        document = {"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": kind, "config": config, "layers": blobs}
        self._entries.append({**self._uploader.manifest(document), "artifactType": kind})
        self._uploader.manifest({"schemaVersion": 2, "mediaType": INDEX, "manifests": self._entries}, self._tag)

    def refusal(self, trusted: Trusted) -> ModelExportError:
        with pytest.raises(ModelExportError) as caught:
            check_registry(self.url, self._access, trusted=trusted)
        return caught.value

    def signed_by(self, trusted: Trusted) -> str:
        return check_registry(self.url, self._access, trusted=trusted)[1].signed_by


def by_key(folder: Path, key: Path) -> bytes:
    prepare_release(folder, key=key)
    return (folder / SIGNATURE).read_bytes()


def test_what_is_no_signature_hides_none(
    registry: RegistryServer, folder: Path, access: Access, keys: tuple[Path, Path]
) -> None:
    at, trusted = Attached(registry, "attached/odd", folder, access), TrustedKey(keys[1])
    assert at.refusal(trusted).reason == "SIGNATURE_MISSING"
    at.attach(b"one", b"two")
    assert at.refusal(trusted).reason == "ARTIFACT_INVALID"
    at.attach(b"lost")
    registry.blob(digest_bytes(b"lost")).unlink()
    assert at.refusal(trusted).reason != "SIGNATURE_MISSING"
    at.attach(b"{}")
    assert at.refusal(trusted).reason == "SIGNATURE_INVALID"
    at.attach(by_key(folder, keys[0]))
    assert at.signed_by(trusted)


def test_the_error_is_of_the_kind_that_is_asked_for(
    registry: RegistryServer, folder: Path, access: Access, publishers: Publishers, tmp_path: Path
) -> None:
    at = Attached(registry, "attached/kinds", folder, access)
    other = make_keys(tmp_path, "other")
    renewed = issue("renewed", publishers.middle, Shape(), publishers.signer.key).write(tmp_path / "renewed.pem")
    prepare_release(folder, key=publishers.key, certificate=SigningCertificate(renewed, publishers.chain))
    at.attach((folder / SIGNATURE).read_bytes())
    at.attach(by_key(folder, other[0]))
    at.attach(b"{}")
    own = make_keys(tmp_path, "own")
    assert "Key mismatch" in at.refusal(TrustedKey(own[1])).message
    stranger = Publishers(tmp_path)
    assert at.refusal(stranger.trusted).reason == "CERTIFICATE_UNTRUSTED"
    assert at.signed_by(TrustedKey(other[1]))
