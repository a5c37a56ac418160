"""Register what was published in a Kubeflow Model Registry: a version of a model, and an artifact for each output.

The registry holds no files. So a destination here is another one with a name before it: the files go there, and once they are
published, the registry is told where each output is, what its verdict is, and its figures.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from slipway.distribution import require
from slipway.publishing.destination import Access, Destination, OnWait, Published, destination_error
from slipway.publishing.publication import SIGNATURE, PublishedOutput
from slipway.publishing.release import OnBytes, Release, ReleasedFile
from slipway.publishing.signatures.keys import EXTRA

_ADDRESS = re.compile(r"kubeflow:(?P<name>[A-Za-z0-9][A-Za-z0-9_ .-]{0,199})@(?P<files>[a-z0-9]+:.+)", re.DOTALL)
_REGISTERED = "slipway.registered"
"""Property of a version once all its artifacts are there; whether it is archived is then up to its owners."""


class KubeflowDestination:
    """:class:`~slipway.publishing.destination.Destination` in a Model Registry, with the files at another destination.

    Args:
        url: ``kubeflow:NAME@ADDRESS``: the registered model, and where the files go.
        access: The environment, with the server's address in ``KUBEFLOW_MODEL_REGISTRY``.
        open_files: Opens the destination of the files.

    Raises:
        ConfigurationError: ``DESTINATION_INVALID``.
        ArtifactError: As the destination of the files.
        ServiceError: ``UNSUPPORTED`` if an extra is not installed.
    """

    def __init__(self, url: str, access: Access, open_files: Callable[[str, Access], Destination]) -> None:
        parts = _ADDRESS.fullmatch(url)
        if parts is None or parts["files"].startswith("kubeflow:"):
            raise destination_error(
                url, "write kubeflow:NAME@ADDRESS, where ADDRESS is the place of the files, such as oci://…"
            )
        require(EXTRA, what="a Model Registry")
        from slipway.publishing.kubeflow.client import RegistryClient

        self._name = parts["name"]
        self._client = RegistryClient(url, access)
        self._files = open_files(parts["files"], access)
        self.by_content = self._files.by_content

    def reach(self) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.reach`.

        Raises:
            ArtifactError: ``STORE_UNAVAILABLE``, ``STORE_DENIED``, ``STORE_INVALID``.
        """
        self._files.reach()
        self._client.reach()

    def begin(self, release: Release) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.begin`."""
        self._files.begin(release)

    def has(self, file: ReleasedFile, *, on_wait: OnWait) -> bool:
        """As :meth:`~slipway.publishing.destination.Destination.has`."""
        return self._files.has(file, on_wait=on_wait)

    def send(self, file: ReleasedFile, *, on_bytes: OnBytes) -> int:
        """As :meth:`~slipway.publishing.destination.Destination.send`."""
        return self._files.send(file, on_bytes=on_bytes)

    def commit(self, release: Release) -> Published:
        """Publish the files, then register them; of what is registered already, only properties and addresses that changed are changed."""
        published = self._files.commit(release)
        model = self._find_or_make("registered_model", "registered_models", {"name": self._name})
        name = f"{release.publication.export_id}-{_identity(release)[:12]}"
        wanted = {"name": name, "registeredModelId": model["id"], "state": "ARCHIVED", **_version(release, published)}
        version = self._find_or_make(
            "model_version", f"registered_models/{model['id']}/versions", wanted, parent=model["id"]
        )
        for output in release.publication.outputs:
            self._register(output, release, published, version["id"])
        known = version["customProperties"]
        properties = {**known, **wanted["customProperties"], _REGISTERED: _value(True)}
        if properties != known:
            shown = {} if _REGISTERED in known else {"state": "LIVE"}
            self._client.update(f"model_versions/{version['id']}", {**shown, "customProperties": properties})
        registered = {"model": self._name, "version": name, "version_id": version["id"]}
        return replace(published, details={**published.details, "registered": registered})

    def close(self) -> None:
        """As :meth:`~slipway.publishing.destination.Destination.close`."""
        self._client.close()
        self._files.close()

    def _register(self, output: PublishedOutput, release: Release, published: Published, version: str) -> None:
        alone = len(release.publication.outputs) == 1
        wanted = {
            "artifactType": "model-artifact",
            "name": self._name if alone else output.name,  # the project's clients look for one with the model's name
            "state": "LIVE",
            **_artifact(output, release, published),
        }
        path = f"model_versions/{version}/artifacts"
        artifact = self._find_or_make("model_artifact", path, wanted, parent=version)
        if artifact.get("uri") != wanted["uri"]:
            properties = {**artifact["customProperties"], **wanted["customProperties"]}
            changed = {"artifactType": wanted["artifactType"], "uri": wanted["uri"], "customProperties": properties}
            self._client.update(f"model_artifacts/{artifact['id']}", changed)

    def _find_or_make(self, kind: str, path: str, wanted: Mapping[str, Any], *, parent: str = "") -> dict[str, Any]:
        """Return what has a name; somebody else may make it meanwhile."""
        query = {"name": wanted["name"], **({"parentResourceId": parent} if parent else {})}
        entity = (
            self._client.find(kind, **query) or self._client.create(path, wanted) or self._client.find(kind, **query)
        )
        if entity is None:
            raise self._client.taken_error(f"a {kind} named {wanted['name']}")
        return entity


def _identity(release: Release) -> str:
    """Return a digest of all files but the signature, which is another one each time an export is published by its name."""
    lines = "".join(f"{file.sha256}  {file.path}\n" for file in release.files if file.path != SIGNATURE)
    return hashlib.sha256(lines.encode()).hexdigest()


def _version(release: Release, published: Published) -> dict[str, Any]:
    publication = release.publication
    properties: dict[str, str | float | bool | None] = {
        "slipway.export": publication.export_id,
        "slipway.verdict": publication.outcome.value,
        "slipway.signed": release.signed,
        "slipway.license": release.licence or None,
        "slipway.files": f"sha256:{_identity(release)}",
        "slipway.address": published.address,
        **{f"slipway.source.{name}": digest for name, digest in sorted(publication.sources.items())},
    }
    described = f"{len(publication.outputs)} outputs of the export {publication.export_id}: {publication.outcome.value}"
    return {"description": described, "customProperties": _values(properties)}


def _artifact(output: PublishedOutput, release: Release, published: Published) -> dict[str, Any]:
    judged = output.validation
    form = judged.format if judged else output.name.partition("-")[0]
    properties: dict[str, str | float | bool | None] = {
        "slipway.output": output.name,
        "slipway.level": judged.level if judged else None,
        "slipway.status": output.status,
        "slipway.size_bytes": float(output.size_bytes),
        "slipway.kl": judged.to_reference.mean_kl if judged and judged.to_reference else None,
        "slipway.kept": judged.kept if judged else None,
        "slipway.digest": output.digest,
    }
    return {
        "uri": _uri(output.name, published),
        "modelFormatName": form,
        "modelSourceKind": "slipway",
        "modelSourceId": release.publication.export_id,
        "customProperties": _values(properties),
    }


def _uri(output: str, published: Published) -> str:
    """Return where an output is: its image for KServe if there is one, else its artifact or folder, else all files."""
    cars, variants = published.details.get("modelcars", {}), published.details.get("variants", {})
    if output in cars:
        return str(cars[output]["uri"])
    if output in variants:
        return f"{published.address.partition('@')[0]}@{variants[output]['digest']}"
    if published.address.startswith("s3://"):
        return f"{published.address.rstrip('/')}/{output}"
    return published.address


def _values(properties: Mapping[str, str | float | bool | None]) -> dict[str, dict[str, Any]]:
    """Return properties in the form of the protocol; what is not known is left out."""
    known = {name: value for name, value in properties.items() if value is not None}
    return {
        name: _value(value) for name, value in known.items() if not isinstance(value, float) or math.isfinite(value)
    }


def _value(value: str | float | bool) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"metadataType": "MetadataBoolValue", "bool_value": value}
    if isinstance(value, float):
        return {"metadataType": "MetadataDoubleValue", "double_value": value}
    return {"metadataType": "MetadataStringValue", "string_value": value}
