"""Publish to a registry: layers first, then manifests by digest, then what refers to them, and the tags last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipway.distribution import require
from slipway.publishing import bom, statement
from slipway.publishing.destination import Access, OnWait, Published
from slipway.publishing.oci.address import Address, find_credentials, parse_address
from slipway.publishing.oci.modelpack import (
    Pack,
    Written,
    make_index,
    make_packs,
    make_referrer,
    make_referrers_index,
)
from slipway.publishing.oci.registry import INDEX_TYPE, Repository, fallback_tag
from slipway.publishing.publication import BOM, SIGNATURE, STATEMENT
from slipway.publishing.release import OnBytes, Release, ReleasedFile

if TYPE_CHECKING:
    from slipway.publishing.oci.transport import Transport

from slipway.publishing.signatures.keys import EXTRA
from slipway.publishing.signatures.signing import MEDIA_TYPE
REFERRERS = {STATEMENT: statement.MEDIA_TYPE, BOM: bom.MEDIA_TYPE, SIGNATURE: MEDIA_TYPE}
"""Documents that are attached to the index, with their media types."""
_LONGEST_TAG = 128


class OciDestination:
    """:class:`~slipway.publishing.destination.Destination` in a repository of a registry.

    Args:
        url: ``oci://REGISTRY/NAME[:TAG]``.
        access: Credentials, and whether plain HTTP is allowed.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID``.
        ArtifactError: ``STORE_DENIED`` for credentials that cannot be used.
    """

    by_content = True

    def __init__(self, url: str, access: Access) -> None:
        self._address = parse_address(url)
        self._transport = open_transport(self._address, access)
        self._repository = Repository(self._transport)

    def reach(self) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.reach`.

        Raises:
            ArtifactError: ``STORE_UNAVAILABLE``, ``STORE_DENIED``, ``STORE_INVALID``.
        """
        self._transport.allow_push()
        self._repository.reach()

    def begin(self, release: Release) -> None:
        """Do nothing: layers are named by their digests, so nothing is replaced before the tags are."""

    def has(self, file: ReleasedFile, *, on_wait: OnWait) -> bool:
        """As :meth:`~slipway.publishing.destination.Destination.has`."""
        with self._transport.during(on_wait):
            return self._repository.has_blob(file.digest, file.size_bytes)

    def send(self, file: ReleasedFile, *, on_bytes: OnBytes) -> int:
        """As :meth:`~slipway.publishing.destination.Destination.send`."""
        with file.opened() as opened, self._transport.during(lambda: on_bytes(0)):
            self._repository.put_file(opened, file.digest, file.size_bytes, on_bytes=on_bytes)
        return file.size_bytes

    def commit(self, release: Release) -> Published:
        """As :meth:`~slipway.publishing.destination.Destination.commit`; each output has a tag of its own, too."""
        packs = make_packs(release)
        for pack in packs:
            self._put(pack)
        index = make_index(release, packs)
        self._repository.put_manifest(index.data, index.media_type)
        self._attach(release, index)
        tags = {pack.name: f"{self._address.tag}-{pack.name}" for pack in packs[1:]}
        for pack in packs[1:]:
            if len(tags[pack.name]) > _LONGEST_TAG:
                del tags[pack.name]  # the index has it still
                continue
            self._repository.put_manifest(pack.manifest.data, pack.manifest.media_type, tags[pack.name])
        self._repository.put_manifest(index.data, index.media_type, self._address.tag)
        pinned = Address(self._address.host, self._address.name, digest=index.digest)
        details: dict[str, Any] = {
            "tag": str(self._address),
            "variants": {
                pack.name: {"digest": pack.manifest.digest, "tag": tags.get(pack.name, "")} for pack in packs[1:]
            },
        }
        return Published(str(pinned), details=details)

    def close(self) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.close`."""
        self._transport.close()

    def _put(self, pack: Pack) -> str:
        """Send a manifest with its configuration; return the digest that the registry says it refers to, if any."""
        self._repository.put_bytes(pack.config.data)
        answer = self._repository.put_manifest(pack.manifest.data, pack.manifest.media_type)
        return answer.headers.get("oci-subject", "")

    def _attach(self, release: Release, index: Written) -> None:
        """Attach the proof to the index; where the registry keeps no account of that, list it under the tag made of the digest."""
        files = {file.path: file for file in release.files if file.path in REFERRERS}
        packs = [make_referrer(file, REFERRERS[name], index) for name, file in sorted(files.items())]
        accounted = [self._put(pack) == index.digest for pack in packs]
        if all(accounted):
            return
        kept, _ = self._repository.referrers(index.digest)
        ours = {pack.entry.artifact_type for pack in packs}
        others = [entry for entry in kept if entry.artifact_type not in ours]
        listed = make_referrers_index([*others, *(pack.entry for pack in packs)])
        self._repository.put_manifest(listed.data, INDEX_TYPE, fallback_tag(index.digest))


def open_transport(address: Address, access: Access) -> Transport:
    """Open connections to the registry of an address.

    Raises:
        ArtifactError: ``STORE_DENIED`` for credentials that cannot be used.
        ServiceError: ``UNSUPPORTED`` if the extra is not installed.
    """
    require(EXTRA, what="a registry")
    from slipway.publishing.oci.transport import Transport

    credentials = find_credentials(address, access.environment)
    return Transport(address, credentials, insecure=access.insecure, patience_seconds=access.patience_seconds)
