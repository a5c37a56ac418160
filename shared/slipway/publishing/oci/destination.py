"""Publish to a registry: layers first, then manifests by digest, then what refers to them, and the tags last."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from slipway.distribution import require
from slipway.publishing import bom, statement
from slipway.publishing.destination import OCI, Access, OnWait, Published
from slipway.publishing.oci.address import Address, find_credentials, parse_target
from slipway.publishing.oci.base import NOTHING, Base, copy_base, read_base
from slipway.publishing.oci.modelcar import Car, make_images, plan_cars
from slipway.publishing.oci.modelpack import (
    Pack,
    Written,
    make_index,
    make_packs,
    make_referrer,
    make_referrers_index,
)
from slipway.publishing.oci.registry import INDEX_TYPE, Repository, fallback_tag
from slipway.publishing.oci.tars import ReadAt, TarLayer
from slipway.publishing.publication import BOM, SIGNATURE, STATEMENT
from slipway.publishing.release import OnBytes, Release, ReleasedFile
from slipway.publishing.signatures.keys import EXTRA
from slipway.publishing.signatures.signing import MEDIA_TYPE

if TYPE_CHECKING:
    from slipway.publishing.oci.transport import Transport

REFERRERS = {STATEMENT: statement.MEDIA_TYPE, BOM: bom.MEDIA_TYPE, SIGNATURE: MEDIA_TYPE}
"""Documents that are attached to the index, with their media types."""
_LONGEST_TAG = 128
_NATIVE = "oci+native://"


class OciDestination:
    """:class:`~slipway.publishing.destination.Destination` in a repository of a registry.

    Args:
        url: ``oci://REGISTRY/NAME[:TAG][?modelcar[=BASE]]``.
        access: Credentials, and whether plain HTTP is allowed.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID``.
        ArtifactError: ``STORE_DENIED`` for credentials that cannot be used.
    """

    by_content = True

    def __init__(self, url: str, access: Access) -> None:
        self._target = parse_target(url)
        self._address = self._target.address
        self._transport = open_transport(self._address, access)
        self._repository = Repository(self._transport)
        self._bases: tuple[Base, ...] = NOTHING
        self._cars: list[Car] = []
        self._layers: dict[str, list[TarLayer]] = {}
        self._sent_layers: list[TarLayer] = []

    def reach(self) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.reach`.

        Raises:
            ArtifactError: ``STORE_UNAVAILABLE``, ``STORE_DENIED``, ``STORE_INVALID``; ``ARTIFACT_NOT_FOUND``, ``ARTIFACT_INVALID`` for the
                base of modelcars.
        """
        self._transport.allow_push()
        base = self._target.base
        if base is not None:
            self._transport.allow_pull(base.name)
        self._repository.reach()
        if base is not None:
            self._bases = read_base(Repository(self._transport, base.name), base.reference)

    def begin(self, release: Release) -> None:
        """Plan the images; layers are named by their digests, so nothing is replaced before the tags are."""
        if self._target.modelcar:
            self._cars, self._layers = plan_cars(release)

    def has(self, file: ReleasedFile, *, on_wait: OnWait) -> bool:
        """As :meth:`~slipway.publishing.destination.Destination.has`; layers of images count to the file that they begin with."""
        with self._transport.during(on_wait):
            layers = self._layers.get(file.sha256, [])
            for layer in layers:
                layer.measure(on_wait)
            there = self._repository.has_blob(file.digest, file.size_bytes)
            return there and all(self._repository.has_blob(layer.digest, layer.size_bytes) for layer in layers)

    def send(self, file: ReleasedFile, *, on_bytes: OnBytes) -> int:
        """As :meth:`~slipway.publishing.destination.Destination.send`."""
        repository, layers = self._repository, self._layers.get(file.sha256, [])
        with self._transport.during(lambda: on_bytes(0)):
            there = bool(layers) and repository.has_blob(file.digest, file.size_bytes)
            if there:
                on_bytes(file.size_bytes)
            else:
                with file.opened() as opened:
                    read_at: ReadAt = lambda size, offset: os.pread(opened.fileno(), size, offset)  # noqa: E731
                    repository.put_blob(read_at, file.digest, file.size_bytes, on_bytes=on_bytes)
            for layer in layers:
                if not repository.has_blob(layer.digest, layer.size_bytes):
                    with layer.opened() as read_at:
                        repository.put_blob(read_at, layer.digest, layer.size_bytes, on_bytes=lambda _: on_bytes(0))
                    self._sent_layers.append(layer)
        return 0 if there else file.size_bytes

    def commit(self, release: Release) -> Published:
        """As :meth:`~slipway.publishing.destination.Destination.commit`; each output has a tag of its own, too.

        Everything is there by its digest before the first tag moves.
        """
        if self._target.base is not None:
            for base in self._bases:
                copy_base(Repository(self._transport, self._target.base.name), self._repository, base)
        packs = make_packs(release)
        for pack in packs:
            self._put(pack)
        index = make_index(release, packs)
        self._repository.put_manifest(index.data, index.media_type)
        self._attach(release, index)
        cars = {car.output.name: self._put_car(release, car, index) for car in self._cars}
        variants = {
            pack.name: {"digest": pack.manifest.digest, "tag": self._put_tag(pack.name, pack.manifest)}
            for pack in packs[1:]
        }
        images = {
            name: {"digest": car.digest, "tag": self._put_tag(f"{name}-modelcar", car), "uri": self._storage_uri(car)}
            for name, car in cars.items()
        }
        self._repository.put_manifest(index.data, index.media_type, self._address.tag)
        return Published(
            str(self._pinned(index)),
            sent_bytes=sum(layer.size_bytes for layer in self._sent_layers),
            kept_bytes=self._image_bytes() - sum(layer.size_bytes for layer in self._sent_layers),
            details={"tag": str(self._address), "variants": variants, **({"modelcars": images} if images else {})},
        )

    def close(self) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.close`."""
        self._transport.close()

    def _put(self, pack: Pack) -> str:
        """Send a manifest with its configuration; return the digest that the registry says it refers to, if any."""
        self._repository.put_bytes(pack.config.data)
        answer = self._repository.put_manifest(pack.manifest.data, pack.manifest.media_type)
        return answer.headers.get("oci-subject", "")

    def _put_car(self, release: Release, car: Car, variants: Written) -> Written:
        """Send the images of an output; return their index, which has no tag yet."""
        *images, index = make_images(release, car, self._bases, variants=variants)
        for image in images:
            if image.config is not None:
                self._repository.put_bytes(image.config.data)
            self._repository.put_manifest(image.manifest.data, image.manifest.media_type)
        self._repository.put_manifest(index.manifest.data, index.manifest.media_type)
        return index.manifest

    def _put_tag(self, name: str, manifest: Written) -> str:
        """Let a tag behind the address's own name a manifest; return it, empty if no registry takes one of this length."""
        tag = f"{self._address.tag}-{name}"
        if len(tag) > _LONGEST_TAG:
            return ""
        self._repository.put_manifest(manifest.data, manifest.media_type, tag)
        return tag

    def _pinned(self, manifest: Written) -> Address:
        return Address(self._address.host, self._address.name, digest=manifest.digest)

    def _storage_uri(self, car: Written) -> str:
        """Return what KServe's ``storageUri`` takes; for ``oci://`` it starts a shell, which an image without a base has not."""
        scheme = OCI if self._target.base is not None else _NATIVE
        return str(self._pinned(car)).replace(OCI, scheme, 1)

    def _image_bytes(self) -> int:
        """Return the bytes of all layers of images."""
        return sum({layer.digest: layer.size_bytes for car in self._cars for layer in car.layers}.values())

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
