"""The base of a modelcar: an image in the same registry, with the shell that KServe starts in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slipway.artifacts.digests import is_digest
from slipway.files.json_documents import parse_json
from slipway.publishing.oci.registry import INDEX_TYPE, MANIFEST_TYPE, Descriptor, Repository

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
_DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_INDEXES, _MANIFESTS = (INDEX_TYPE, _DOCKER_INDEX), (MANIFEST_TYPE, _DOCKER_MANIFEST)
_LAYERS = {
    LAYER_TYPE: LAYER_TYPE,
    f"{LAYER_TYPE}+gzip": f"{LAYER_TYPE}+gzip",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": f"{LAYER_TYPE}+gzip",
}
"""Media types of layers, and those that they have in an image of OCI, which differ only in name."""
_ARCHITECTURES = ("amd64", "arm64")
_LARGEST_CONFIG, _LARGEST_LAYER = 1 << 20, 64 << 20
_MOST_LAYERS = 32


@dataclass(frozen=True, slots=True)
class Base:
    """What an image begins with, on one platform.

    Attributes:
        architecture: Architecture of the platform, as Go names it.
        layers: Its layers.
        diff_ids: Digests of the layers without compression.
        settings: How its programs are started: variables, user, command.
    """

    architecture: str
    layers: tuple[Descriptor, ...] = ()
    diff_ids: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


NOTHING = tuple(Base(architecture) for architecture in _ARCHITECTURES)
"""Without a base, an image holds the model alone, which is the same on every platform."""


def read_base(repository: Repository, reference: str) -> tuple[Base, ...]:
    """Read an image of a registry, for each platform on which models are served.

    Raises:
        ArtifactError: ``ARTIFACT_NOT_FOUND``, ``ARTIFACT_INVALID``, ``LIMIT_EXCEEDED``, as the repository's.
    """
    doing = f"reading the base {repository.name}:{reference}"
    data, kind = repository.get_manifest(reference, media_types=", ".join((*_INDEXES, *_MANIFESTS)))
    if kind not in _INDEXES:
        return (_read_image(repository, data, doing),)
    bases = {}
    entries = repository.parse(data, "manifests", doing)
    for entry, document in zip(entries, parse_json(data)["manifests"], strict=True):
        platform = document.get("platform")
        wanted = isinstance(platform, dict) and platform.get("os") == "linux" and entry.media_type in _MANIFESTS
        architecture = platform.get("architecture") if wanted else None
        if architecture in _ARCHITECTURES and architecture not in bases:
            manifest, _ = repository.get_manifest(entry.digest, media_types=", ".join(_MANIFESTS))
            image = _read_image(repository, manifest, doing)
            if image.architecture != architecture:
                raise repository.invalid(doing, f"it lists an image for {image.architecture} as one for {architecture}")
            bases[architecture] = image
    if not bases:
        raise repository.invalid(doing, f"it has no image for linux on {' or '.join(_ARCHITECTURES)}")
    return tuple(bases[architecture] for architecture in sorted(bases))


def copy_base(source: Repository, target: Repository, base: Base) -> None:
    """Put the layers of a base into a repository, unless they are there.

    Raises:
        ArtifactError: As the repositories'.
    """
    for layer in base.layers:
        if not target.has_blob(layer.digest, layer.size_bytes):
            target.put_bytes(source.get_blob(layer, most=_LARGEST_LAYER))


def _read_image(repository: Repository, data: bytes, doing: str) -> Base:
    layers = repository.parse(data, "layers", doing)
    if len(layers) > _MOST_LAYERS or any(layer.media_type not in _LAYERS for layer in layers):
        raise repository.invalid(doing, f"it has more than {_MOST_LAYERS} layers, or one that is no tar")
    if (largest := max((layer.size_bytes for layer in layers), default=0)) > _LARGEST_LAYER:
        raise repository.too_large(doing, f"a layer has {largest} bytes, and may have {_LARGEST_LAYER}")
    try:
        config = Descriptor.parse(parse_json(data).get("config"))
        document = parse_json(repository.get_blob(config, most=_LARGEST_CONFIG))
        architecture, settings = document["architecture"], document.get("config") or {}
        diff_ids = tuple(document["rootfs"]["diff_ids"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise repository.invalid(doing, "it is no image") from error
    right = all(isinstance(each, str) and is_digest(each) for each in diff_ids) and len(diff_ids) == len(layers)
    if (
        not right
        or architecture not in _ARCHITECTURES
        or document.get("os") != "linux"
        or not isinstance(settings, dict)
    ):
        raise repository.invalid(doing, f"it is no image for linux on {' or '.join(_ARCHITECTURES)}")
    kept = tuple(Descriptor(_LAYERS[each.media_type], each.digest, each.size_bytes, {}) for each in layers)
    return Base(architecture, kept, diff_ids, settings)
