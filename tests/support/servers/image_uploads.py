"""Puts blobs, manifests and images into a registry as other programs do."""

from __future__ import annotations

import gzip
import json
from http.client import HTTPConnection
from typing import Any

from slipway.artifacts.digests import digest_bytes
from support.servers.registry_server import RegistryServer

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


class Uploader:
    """Puts things into a repository."""

    def __init__(self, registry: RegistryServer, name: str) -> None:
        self._host, self._name = registry.host, name

    def _call(self, method: str, path: str, body: bytes = b"", **headers: str) -> Any:
        connection = HTTPConnection(self._host)
        connection.request(
            method, path, body=body, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status in (201, 202), answer.status
        return answer

    def blob(self, data: bytes, kind: str) -> dict[str, Any]:
        place = self._call("POST", f"/v2/{self._name}/blobs/uploads/").getheader("Location")
        path = "/" + place.split("/", 3)[3] if place.startswith("http") else place
        self._call("PUT", f"{path}&digest={digest_bytes(data)}", data, Content_Type="application/octet-stream")
        return {"mediaType": kind, "digest": digest_bytes(data), "size": len(data)}

    def index(self, reference: str) -> dict[str, Any]:
        """Return an index that is there."""
        connection = HTTPConnection(self._host)
        connection.request("GET", f"/v2/{self._name}/manifests/{reference}", headers={"Accept": INDEX})
        document: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return document

    def manifest(self, document: dict[str, Any], reference: str = "") -> dict[str, Any]:
        data = json.dumps(document).encode()
        reference = reference or digest_bytes(data)
        self._call("PUT", f"/v2/{self._name}/manifests/{reference}", data, Content_Type=document["mediaType"])
        return {"mediaType": document["mediaType"], "digest": digest_bytes(data), "size": len(data)}

    def image(self, layer: bytes, architecture: str = "amd64", reference: str = "", **config: Any) -> dict[str, Any]:
        rootfs = {"type": "layers", "diff_ids": [digest_bytes(gzip.decompress(layer))]}
        settings = {
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": ["PATH=/bin"]},
            "rootfs": rootfs,
            **config,
        }
        document = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.blob(json.dumps(settings).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": [self.blob(layer, LAYER)],
        }
        return self.manifest(document, reference)
