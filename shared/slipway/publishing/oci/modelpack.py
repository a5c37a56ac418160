"""Manifests of a release: one ModelPack artifact for each output, one for the documents, and the index of them all.

Every file is a layer as it is, neither packed nor compressed: the digest of the layer is that of the file, which the checksums and the
signature name, and files that outputs share are there once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from slipway.artifacts.digests import digest_bytes
from slipway.publishing.oci.registry import INDEX_TYPE, MANIFEST_TYPE, TITLE, Descriptor
from slipway.publishing.publication import SIGNATURE, PublishedOutput
from slipway.publishing.release import Release, ReleasedFile

ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
DOCUMENTS_TYPE = "application/vnd.slipway.documents.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
FILE_PATH = "org.cncf.model.filepath"
OUTPUT = "slipway.output"
DOCUMENTS = "slipway.documents"
"""Annotation of the manifest of the documents in the index."""

_LAYER = "application/vnd.cncf.model.{}.v1.raw"
_KINDS: Mapping[str, str] = {
    **dict.fromkeys((".md", ".html"), "doc"),
    **dict.fromkeys((".py", ".ipynb"), "code"),
    **dict.fromkeys((".json", ".jinja", ".txt", ".yaml", ".yml", ".model"), "weight.config"),
}
_NAMES: Mapping[str, str] = {"Modelfile": "weight.config", "LICENSE": "doc", "NOTICE": "doc"}


@dataclass(frozen=True, slots=True)
class Written:
    """A manifest or a configuration to send."""

    data: bytes
    media_type: str

    @property
    def digest(self) -> str:
        """Return its digest."""
        return digest_bytes(self.data)

    def descriptor(self) -> Descriptor:
        """Return what names it in another document."""
        return Descriptor(self.media_type, self.digest, len(self.data), {})


@dataclass(frozen=True, slots=True)
class Pack:
    """One output, or the documents: a manifest with its configuration."""

    name: str
    manifest: Written
    config: Written
    entry: Descriptor


def layer_type(path: str) -> str:
    """Return the media type of a file's layer: weights, their configuration, documentation or code."""
    name = PurePosixPath(path)
    return _LAYER.format(_NAMES.get(name.name) or _KINDS.get(name.suffix.lower(), "weight"))


def make_packs(release: Release) -> list[Pack]:
    """Return the artifacts of a release: the documents first, then each output."""
    return [_documents(release), *(_output(release, output) for output in release.publication.outputs)]


def make_index(release: Release, packs: Iterable[Pack]) -> Written:
    """Return the index of a release."""
    publication = release.publication
    annotations = {
        "org.opencontainers.image.created": publication.created,
        TITLE: publication.name,
        "slipway.export": publication.export_id,
        "slipway.verdict": publication.outcome.value,
        **({"org.opencontainers.image.licenses": release.licence} if release.licence else {}),
    }
    document = {
        "schemaVersion": 2,
        "mediaType": INDEX_TYPE,
        "manifests": [pack.entry.to_json() for pack in packs],
        "annotations": annotations,
    }
    return Written(canonical(document), INDEX_TYPE)


def make_referrer(file: ReleasedFile, media_type: str, subject: Written) -> Pack:
    """Return the artifact that attaches a document of the proof to the index."""
    config = Written(EMPTY, EMPTY_TYPE)
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": media_type,
        "config": config.descriptor().to_json(),
        "layers": [Descriptor(media_type, file.digest, file.size_bytes, {TITLE: file.path}).to_json()],
        "subject": subject.descriptor().to_json(),
    }
    manifest = Written(canonical(document), MANIFEST_TYPE)
    entry = Descriptor(MANIFEST_TYPE, manifest.digest, len(manifest.data), {TITLE: file.path}, media_type)
    return Pack(file.path, manifest, config, entry)


def make_referrers_index(entries: Iterable[Descriptor]) -> Written:
    """Return the index for registries that keep no account of what refers to a manifest."""
    document = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry.to_json() for entry in entries]}
    return Written(canonical(document), INDEX_TYPE)


def _documents(release: Release) -> Pack:
    files = [file for file in release.files if "/" not in file.path and file.path != SIGNATURE]
    return _pack("documents", DOCUMENTS_TYPE, Written(EMPTY, EMPTY_TYPE), _layers(files, ""), {DOCUMENTS: "true"})


def _output(release: Release, output: PublishedOutput) -> Pack:
    files = [file for file in release.files if file.path in output.files]
    layers = _layers(files, f"{output.name}/")
    config = Written(canonical(_config(release, output, layers)), CONFIG_TYPE)
    return _pack(output.name, ARTIFACT_TYPE, config, layers, annotations_of(release, output))


def _config(release: Release, output: PublishedOutput, layers: list[Descriptor]) -> dict[str, Any]:
    publication, found = release.publication, output.validation
    reference = publication.validation.reference if publication.validation else None
    level = found.level if found and found.level != "none" else ""
    return {
        "descriptor": {
            "createdAt": publication.created,
            "name": publication.name,
            "version": publication.export_id,
            "title": f"{publication.name} ({output.name})",
            **({"licenses": [release.licence]} if release.licence else {}),
        },
        "config": {
            **({"architecture": reference.architecture} if reference and reference.architecture else {}),
            "format": found.format if found else output.name.partition("-")[0],
            **({"quantization": level} if level else {}),
        },
        "modelfs": {"type": "layers", "diffIds": [layer.digest for layer in layers]},
    }


def annotations_of(release: Release, output: PublishedOutput) -> dict[str, str]:
    """Return the labels by which a variant is chosen."""
    files = [file for file in release.files if file.path in output.files]
    found = output.validation
    kl = found.to_reference.mean_kl if found and found.to_reference else None
    kept = found.kept if found else None
    return {
        OUTPUT: output.name,
        "slipway.format": found.format if found else output.name.partition("-")[0],
        "slipway.level": found.level if found else "",
        "slipway.status": output.status,
        "slipway.bytes": str(sum({file.digest: file.size_bytes for file in files}.values())),
        **({"slipway.kl": repr(kl)} if kl is not None else {}),
        **({"slipway.kept": repr(kept)} if kept is not None else {}),
    }


def _layers(files: Iterable[ReleasedFile], prefix: str) -> list[Descriptor]:
    layers = []
    for file in files:
        path = file.path.removeprefix(prefix)
        layers.append(Descriptor(layer_type(path), file.digest, file.size_bytes, {FILE_PATH: path, TITLE: path}))
    return layers


def _pack(
    name: str, artifact_type: str, config: Written, layers: list[Descriptor], annotations: dict[str, str]
) -> Pack:
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": artifact_type,
        "config": config.descriptor().to_json(),
        "layers": [layer.to_json() for layer in layers],
        "annotations": {TITLE: name, **annotations},
    }
    manifest = Written(canonical(document), MANIFEST_TYPE)
    entry = Descriptor(MANIFEST_TYPE, manifest.digest, len(manifest.data), {TITLE: name, **annotations}, artifact_type)
    return Pack(name, manifest, config, entry)


def canonical(document: Any) -> bytes:
    """Return a document in the one form that gives the same digest every time."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
