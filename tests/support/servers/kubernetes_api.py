"""As much of a cluster's API on loopback as an operator needs for resources of one kind: lists, watches, patches and deletions."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from support.servers.local_http import local_http

Object = dict[str, Any]
_PATH = re.compile(r"/apis/([^/]+)/([^/]+)(?:/namespaces/([^/]+))?/([^/?]+)(?:/([^/?]+))?(?:/(status))?")
_WATCH_SECONDS = 5.0
_NEVER = 1 << 62
"""A version after which there are no events."""


@dataclass
class KubernetesApi:
    """Resources of one definition, in one namespace.

    Attributes:
        definition: A CustomResourceDefinition.
        objects: Resources by name.
        address: Where it serves.
    """

    definition: Object
    objects: dict[str, Object] = field(default_factory=dict)
    address: str = ""
    _events: list[Object] = field(default_factory=list)
    _lock: threading.Condition = field(default_factory=threading.Condition)

    @property
    def spec(self) -> Object:
        return dict(self.definition["spec"])

    @property
    def version(self) -> str:
        return str(self.spec["versions"][0]["name"])

    def apply(self, manifest: Object) -> None:
        """Create a resource."""
        made = copy.deepcopy(manifest)
        made["metadata"] |= {"namespace": "default", "uid": str(uuid.uuid4()), "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1}  # fmt: skip
        self._store(made, "ADDED")

    def status(self, name: str) -> Object:
        """Return the status of a resource, empty for one that is not there."""
        with self._lock:
            return copy.deepcopy(self.objects.get(name, {}).get("status", {}))

    def delete(self, name: str) -> Object:
        """Delete a resource: at once, or when nobody holds it any more."""
        with self._lock:
            found = self.objects[name]
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:01Z"
            self._store(found, "MODIFIED")
            return found

    def patch(self, name: str, patch: Any, *, part: str) -> Object | None:
        """Merge a patch (RFC 7386), or apply a list of operations (RFC 6902), to a resource without its status, or to its status alone.

        Returns:
            The resource; None if an operation does not fit.
        """
        with self._lock:
            found = self.objects[name]
            changed = _merged(found, patch) if isinstance(patch, dict) else _operated(found, patch)
            if changed is None:
                return None
            status, other = (changed, found) if part else (found, changed)
            made = {**other, **({"status": status["status"]} if "status" in status else {})}
            if made != found:
                self._store(made, "MODIFIED")
            return made

    def watch(self, after: int) -> Iterator[Object]:
        """Yield the events after a version as they happen, for a time; the version of an event is its number."""
        end = time.monotonic() + _WATCH_SECONDS
        while (left := end - time.monotonic()) > 0:
            with self._lock:
                self._lock.wait_for(lambda known=after: len(self._events) > known, timeout=left)
                found = self._events[after:]
            yield from found
            after += len(found)

    def list(self) -> Object:
        with self._lock:
            kind = {"apiVersion": f"{self.spec['group']}/{self.version}", "kind": f"{self.spec['names']['kind']}List"}
            return {
                **kind,
                "metadata": {"resourceVersion": str(len(self._events))},
                "items": copy.deepcopy([*self.objects.values()]),
            }

    def discovery(self, path: str) -> Object | None:
        """Return what the API says of itself."""
        group, names = self.spec["group"], self.spec["names"]
        version = {"groupVersion": f"{group}/{self.version}", "version": self.version}
        resource = {
            "name": names["plural"],
            "singularName": names["singular"],
            "kind": names["kind"],
            "namespaced": True,
        }
        verbs = {"verbs": ["get", "list", "watch", "patch", "create", "delete"]}
        known: dict[str, Object] = {
            "/version": {"major": "1", "minor": "33"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [
                {"name": "events", "singularName": "", "kind": "Event", "namespaced": True, "verbs": ["create"]},
                {"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": False, "verbs": ["list", "watch"]},
            ]},
            "/apis": {"kind": "APIGroupList", "groups": [{"name": group, "versions": [version], "preferredVersion": version}]},
            "/api/v1/namespaces": {"kind": "NamespaceList", "metadata": {"resourceVersion": "1"}, "items": [
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "uid": "1", "resourceVersion": "1"}}]},
            f"/apis/{group}": {"kind": "APIGroup", "name": group, "versions": [version], "preferredVersion": version},
            f"/apis/{group}/{self.version}": {"kind": "APIResourceList", "groupVersion": version["groupVersion"], "resources": [
                {**resource, **verbs}, {**resource, "name": f"{names['plural']}/status", "verbs": ["get", "patch"]}]},
        }  # fmt: skip
        return known.get(path)

    def _store(self, made: Object, event: str) -> None:
        with self._lock:
            made["metadata"]["resourceVersion"] = str(len(self._events) + 1)
            name = made["metadata"]["name"]
            gone = "deletionTimestamp" in made["metadata"] and not made["metadata"].get("finalizers")
            if gone:
                self.objects.pop(name, None)
            else:
                self.objects[name] = made
            self._events.append({"type": "DELETED" if gone else event, "object": copy.deepcopy(made)})
            self._lock.notify_all()


def _merged(target: Object, patch: Object) -> Object:
    merged = copy.deepcopy(target)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            below = merged.get(key)
            merged[key] = _merged(below if isinstance(below, dict) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


class _Handler(BaseHTTPRequestHandler):
    api: KubernetesApi
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        found, names = self.api.discovery(split.path), _names(split.path, self.api)
        if "watch" in parse_qs(split.query):
            after = parse_qs(split.query).get("resourceVersion", ["0"])[0]
            self.stream(int(after) if names is not None else _NEVER)
        elif found is None and names is None:
            self.send({"kind": "Status", "code": 404, "reason": "NotFound"}, 404)
        else:
            self.send(self.api.list() if found is None else found)

    def do_POST(self) -> None:  # events, which operators write beside their work
        self.send({**self.body(), "kind": "Event"}, 201)

    def do_PATCH(self) -> None:
        found = _names(urlsplit(self.path).path, self.api)
        if found is None or found[0] not in self.api.objects:
            self.body()
            self.send({"kind": "Status", "code": 404, "reason": "NotFound"}, 404)
            return
        made = self.api.patch(found[0], self.body(), part=found[1])
        if made is None:
            self.send({"kind": "Status", "code": 422, "reason": "Invalid"}, 422)
        else:
            self.send(made)

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")

    def send(self, document: Object, status: int = 200) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, after: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the operator has left
            for event in self.api.watch(after):
                self.wfile.write(json.dumps(event).encode() + b"\n")
                self.wfile.flush()


def _operated(target: Object, operations: list[Object]) -> Object | None:
    """Return what operations make of a document; None if one does not fit."""
    made = copy.deepcopy(target)
    for each in operations:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in each["path"].split("/")[1:]]
        try:
            below: Any = made
            for step in path:
                below = below[int(step) if isinstance(below, list) else step]
            _operate(below, last, each)
        except (KeyError, IndexError):
            return None
    return made


def _operate(below: Any, last: str, each: Object) -> None:
    key: Any = last if isinstance(below, dict) else len(below) if last == "-" else int(last)
    match each["op"]:
        case "add" if isinstance(below, list):
            below.insert(key, each["value"])
        case "add":
            below[key] = each["value"]
        case "replace":
            _ = below[key]
            below[key] = each["value"]
        case "remove":
            del below[key]
        case "test":
            if below[key] != each["value"]:
                raise KeyError(last)


@contextmanager
def kubernetes_api(definition: Path) -> Iterator[KubernetesApi]:
    """Serve the resources of a definition until the block ends."""
    api = KubernetesApi(yaml.safe_load(definition.read_text()))
    handler = type("Handler", (_Handler,), {"api": api})
    with local_http(handler, waits=True) as api.address:
        yield api


def _names(path: str, api: KubernetesApi) -> tuple[str, str] | None:
    """Return the name and the part that a path of this kind of resource has."""
    match = _PATH.fullmatch(path)
    if match is None or (match[1], match[2], match[4]) != (api.spec["group"], api.version, api.spec["names"]["plural"]):
        return None
    return match[5] or "", match[6] or ""
