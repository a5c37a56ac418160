"""Outputs as images of a container: the form in which KServe serves models from registries (*modelcars*).

The files of an output lie below ``/models``, in layers that are uncompressed tars. An image is listed for each platform, because container
runtimes take only images for their own; without a base, all of them have the same layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipway.publishing.oci.base import LAYER_TYPE, Base
from slipway.publishing.oci.modelpack import Written, annotations_of, canonical
from slipway.publishing.oci.registry import INDEX_TYPE, MANIFEST_TYPE, TITLE, Descriptor
from slipway.publishing.oci.tars import TarLayer
from slipway.publishing.publication import PublishedOutput
from slipway.publishing.release import Release

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
INDEX = "slipway.index"
"""Annotation with the digest of the index of variants, which is what is signed."""
_FOLDER = "models"
_LARGE_BYTES = 32 << 20
_MOST_LAYERS = 64
"""Container runtimes take about 120 layers, and a base has some."""


@dataclass(frozen=True, slots=True)
class Car:
    """An output as an image.

    Attributes:
        output: The output.
        layers: Its files.
    """

    output: PublishedOutput
    layers: tuple[TarLayer, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """An image on one platform, or the index of all.

    Attributes:
        manifest: The manifest or the index.
        config: Configuration of the image; None for the index.
    """

    manifest: Written
    config: Written | None = None


def plan_cars(release: Release) -> tuple[list[Car], dict[str, list[TarLayer]]]:
    """Return the images of a release, and their layers by the SHA-256 of the file that each begins with.

    A large file is a layer of its own, so that it is stored once however often the others change; all small ones are one.
    """
    cars, by_content = [], dict[str, list[TarLayer]]()
    for output in release.publication.outputs:
        prefix, layers = f"{output.name}/", []
        files = [
            (file.path.replace(prefix, f"{_FOLDER}/", 1), file) for file in release.files if file.path in output.files
        ]
        small = [each for each in files if each[1].size_bytes < _LARGE_BYTES]
        large = [each for each in files if each[1].size_bytes >= _LARGE_BYTES]
        step = max(1, -(-len(large) // _MOST_LAYERS))
        for group in filter(None, [small, *(large[start : start + step] for start in range(0, len(large), step))]):
            layers.append(TarLayer(group))
            by_content.setdefault(group[0][1].sha256, []).append(layers[-1])
        cars.append(Car(output, tuple(layers)))
    return cars, by_content


def make_images(release: Release, car: Car, bases: Sequence[Base], *, variants: Written) -> list[Image]:
    """Return the images of an output, one for each platform, and their index last.

    Args:
        release: The release.
        car: The output, with layers that were measured.
        bases: What the images begin with.
        variants: The index of variants that the release has.
    """
    labels = {
        TITLE: f"{release.publication.name} ({car.output.name})",
        INDEX: variants.digest,
        **annotations_of(release, car.output),
    }
    images, entries = [], []
    for base in bases:
        config = Written(canonical(_config(release, car, base, labels)), CONFIG_TYPE)
        own = [Descriptor(LAYER_TYPE, layer.digest, layer.size_bytes, {}) for layer in car.layers]
        document = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": config.descriptor().to_json(),
            "layers": [layer.to_json() for layer in (*base.layers, *own)],
            "annotations": labels,
        }
        images.append(Image(Written(canonical(document), MANIFEST_TYPE), config))
        platform = {"architecture": base.architecture, "os": "linux"}
        entries.append({**images[-1].manifest.descriptor().to_json(), "platform": platform})
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries, "annotations": labels}
    return [*images, Image(Written(canonical(index), INDEX_TYPE))]


def _config(release: Release, car: Car, base: Base, labels: dict[str, str]) -> dict[str, Any]:
    created = release.publication.created
    made = [{"created": created, "created_by": "the base"} for _ in base.layers]
    made += [{"created": created, "created_by": "slipway publish"} for _ in car.layers]
    kept = base.settings.get("Labels")
    return {
        "created": created,
        "architecture": base.architecture,
        "os": "linux",
        "config": {**base.settings, "Labels": {**(kept if isinstance(kept, dict) else {}), **labels}},
        "rootfs": {"type": "layers", "diff_ids": [*base.diff_ids, *(layer.digest for layer in car.layers)]},
        "history": made,
    }
