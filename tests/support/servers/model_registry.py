"""A stand-in for a Kubeflow Model Registry on loopback, which checks every request and its own answers against the real API's description.

``model_registry_openapi.json`` is the part of ``api/openapi/model-registry.yaml`` of github.com/kubeflow/model-registry (Apache-2.0) that is
used, without its descriptions.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from jsonschema import Draft4Validator

from support.servers.local_http import local_http

API = json.loads(Path(__file__).with_name("model_registry_openapi.json").read_text())
ROOT = "/api/model_registry/v1alpha3"
_SINGULAR = {
    "registered_model": "registered_models",
    "model_version": "model_versions",
    "model_artifact": "model_artifacts",
}
_PARENT = {"model_versions": "registered_models", "model_artifacts": "model_versions"}


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what a schema refers to."""
    while "$ref" in schema:
        _, *names = schema["$ref"].split("/")
        schema = API
        for name in names:
            schema = schema[name]
    return schema


def faults(value: Any, schema: dict[str, Any]) -> list[str]:
    """Say what a value has against a schema; a name that no part of the schema has is a fault, too."""
    schema = resolve(schema)
    if chosen := schema.get("discriminator"):
        kind = value.get(chosen["propertyName"]) if isinstance(value, dict) else None
        target = chosen["mapping"].get(kind)
        return faults(value, {"$ref": target}) if target else [f"{chosen['propertyName']} is {kind!r}"]
    found = [f"{name} is missing" for name in schema.get("required", []) if name not in value]
    own = {key: each for key, each in schema.items() if key not in ("allOf", "properties", "required", "discriminator")}
    additional = own.get("additionalProperties")
    if isinstance(additional, dict):
        del own["additionalProperties"]
        found += [f"{name}: {fault}" for name, each in value.items() for fault in faults(each, additional)]
    if additional is False:
        del own["additionalProperties"]
    if "items" in own:
        items = own.pop("items")
        found += [fault for each in value for fault in faults(each, items)]
    found += [error.message for error in Draft4Validator(own).iter_errors(value)]
    if isinstance(value, dict):
        for name, each in schema.get("properties", {}).items():
            found += [f"{name}: {fault}" for fault in (faults(value[name], each) if name in value else [])]
        for part in schema.get("allOf", []):
            found += faults(value, {**resolve(part), "partial": True})
        if not schema.get("partial") and not isinstance(additional, dict):
            found += [f"unknown {name}" for name in value.keys() - names_of(schema)]
    return found


def names_of(schema: dict[str, Any]) -> set[str]:
    """Return all names that an object of a schema may have."""
    schema = resolve(schema)
    return set(schema.get("properties", {})).union(*map(names_of, schema.get("allOf", [])))


Change = Callable[[str, str], "tuple[int, bytes] | None"]
"""Takes method and path of a request; returns status and content of an answer in place of the server's, or None."""


@dataclass
class ModelRegistry:
    """What the server holds, and what it was asked.

    Attributes:
        address: Its address.
        token: Token that it asks for; empty for none.
        versions: Versions of the protocol that it has. The project's client of 2026 speaks ``v1``, with the same paths and shapes.
        entities: What it holds, by kind.
        requests: Method and path of each request.
        refused: Faults of requests and of its own answers.
        change: Answers some requests in its place.
        loses: Whether a request is done and its answer lost, with 503 of a proxy before it.
    """

    address: str = ""
    token: str = ""
    versions: tuple[str, ...] = ("v1alpha3",)
    entities: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {"registered_models": [], "model_versions": [], "model_artifacts": []}
    )
    requests: list[tuple[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    change: Change = lambda *_: None
    loses: Callable[[str, str], bool] = lambda *_: False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, method: str, target: str, body: bytes, authorization: str) -> tuple[int, Any]:
        """Answer a request as the real server does."""
        if self.token and authorization != f"Bearer {self.token}":
            return self._error(401, "no valid token")
        parts = urlsplit(target)
        path, query = self._described(unquote(parts.path)), dict(parse_qsl(parts.query, keep_blank_values=True))
        operation, values = self._operation(method, path)
        if operation is None:
            self.refused += [f"no operation {method} {target}"] if path else []
            return self._error(404, "no such path")
        found = self._parameter_faults(operation, values, query)
        document = json.loads(body) if body else None
        if "requestBody" in operation:
            found += faults(document, operation["requestBody"]["content"]["application/json"]["schema"])
        if found:
            self.refused += found
            return self._error(400, "; ".join(found))
        status, answer = self._do(method, path.removeprefix(ROOT + "/").split("/"), query, document)
        listed = operation["responses"].get(str(status))
        assert listed is not None, f"{method} {path} never answers {status}"
        self.refused += faults(answer, resolve(listed)["content"]["application/json"]["schema"])
        return status, answer

    def _described(self, path: str) -> str:
        """Return a path as the description has it; empty if the server does not have its version."""
        _, api, name, version, *rest = [*path.split("/"), "", "", ""]
        known = f"/{api}/{name}" == ROOT.rpartition("/")[0] and version in self.versions
        return "/".join([ROOT, *filter(None, rest)]) if known else ""

    def _operation(self, method: str, path: str) -> tuple[dict[str, Any] | None, dict[str, str]]:
        for template, item in API["paths"].items():
            pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(template))
            if (parts := re.fullmatch(pattern, path)) and method.lower() in item:
                operation = item[method.lower()]
                return {
                    **operation,
                    "parameters": [*item.get("parameters", []), *operation.get("parameters", [])],
                }, parts.groupdict()
        return None, {}

    def _parameter_faults(self, operation: dict[str, Any], values: dict[str, str], query: dict[str, str]) -> list[str]:
        parameters = {each["name"]: each for each in map(resolve, operation["parameters"])}
        found = [f"unknown parameter {name}" for name in query if parameters.get(name, {}).get("in") != "query"]
        for name, value in {**values, **query}.items():
            if name in parameters:
                found += [f"{name}: {fault}" for fault in faults(value, parameters[name]["schema"])]
        return found

    def _do(self, method: str, path: list[str], query: dict[str, str], document: Any) -> tuple[int, Any]:
        match method, path:
            case "GET", [one] if one in _SINGULAR:
                asked = {"name": query.get("name"), "_parent": query.get("parentResourceId")}
                found = [
                    each
                    for each in self.entities[_SINGULAR[one]]
                    if all(each.get(k) == v for k, v in asked.items() if v)
                ]
                return (200, self._shown(found[0])) if found else self._error(404, f"no {one} of this name")
            case "GET", [kind]:
                return self._list(self.entities[kind])
            case "GET", [_, parent, part]:
                kind = {"versions": "model_versions", "artifacts": "model_artifacts"}[part]
                return self._list([each for each in self.entities[kind] if each["_parent"] == parent])
            case "GET", [kind, key]:
                return 200, self._shown(self._by_id(kind, key))
            case "POST", [kind]:
                return self._create(kind, document, "")
            case "POST", [_, parent, part]:
                kind = {"versions": "model_versions", "artifacts": "model_artifacts"}[part]
                self._by_id(_PARENT[kind], parent)
                return self._create(kind, document, parent)
            case "PATCH", [kind, key]:
                entity = self._by_id(kind, key)
                entity.update({name: value for name, value in document.items() if name not in ("name", "id")})
                return 200, self._shown(entity)
        raise AssertionError(f"{method} {path}")

    def _by_id(self, kind: str, key: str) -> dict[str, Any]:
        return next(each for each in self.entities[kind] if each["id"] == key)

    def _create(self, kind: str, document: dict[str, Any], parent: str) -> tuple[int, Any]:
        if any((each["name"], each["_parent"]) == (document["name"], parent) for each in self.entities[kind]):
            return self._error(409, f"{document['name']} already exists")
        times = dict.fromkeys(("createTimeSinceEpoch", "lastUpdateTimeSinceEpoch"), "1700000000000")
        own = str(1 + sum(map(len, self.entities.values())))
        self.entities[kind].append({**document, **times, "id": own, "_parent": parent})
        return 201, self._shown(self.entities[kind][-1])

    def _list(self, items: list[dict[str, Any]]) -> tuple[int, Any]:
        return 200, {
            "items": [self._shown(each) for each in items],
            "nextPageToken": "",
            "pageSize": 100,
            "size": len(items),
        }

    def _shown(self, entity: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entity.items() if name != "_parent"}

    def _error(self, status: int, message: str) -> tuple[int, Any]:
        return status, {"code": str(status), "message": message}


@contextlib.contextmanager
def model_registry(*, token: str = "") -> Iterator[ModelRegistry]:
    """Run a server that ends with the context."""
    registry = ModelRegistry(token=token)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with registry.lock:
                registry.requests.append((self.command, self.path))
                own = registry.change(self.command, self.path)
                if own is None:
                    status, document = registry.answer(
                        self.command, self.path, body, self.headers.get("Authorization", "")
                    )
                    lost = registry.loses(self.command, self.path)
                    own = (503, b"") if lost else (status, json.dumps(document).encode())
            self.send_response(own[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(own[1])))
            self.end_headers()
            self.wfile.write(own[1])

        do_GET = do_POST = do_PATCH = answer  # noqa: N815 - names of the base class

        def log_message(self, *_: object) -> None:
            pass

    with local_http(Handler, waits=False) as address:
        registry.address = address
        yield registry
