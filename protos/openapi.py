"""Describe the calls over HTTP as an OpenAPI 3.1 document, from the descriptors of the protos and their comments.

Usage: ``python protos/openapi.py IMAGE DOCUMENT``, where IMAGE is a FileDescriptorSet with imports and source information. It is run by
``protos/generate.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.api import field_behavior_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

from slipway.rpc.http_rules import HttpRule, http_rule

PACKAGE = "slipway.v1"
STATUS = "google.rpc.Status"

# Numbers of fields in descriptor.proto, which paths of source information are made of.
_MESSAGES, _ENUMS, _SERVICES, _FIELDS, _METHODS, _VALUES, _NESTED = 4, 5, 6, 2, 2, 2, 3

_DESCRIPTION = """Exports and artifacts of a coordinator: the gRPC API `slipway.v1` as JSON. Fields with their default value are left out of
responses. Requests with unknown fields are refused. A failure is a `google.rpc.Status` whose details have an `ErrorInfo` with a
stable reason."""

_ID = "[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
_DIGEST = "^sha256:[0-9a-f]{64}$"
_NAMES: Mapping[str, str] = {
    "project": f"^(?:{_ID}|-)$",  # lists take "-" for all projects
    "export": f"^{_ID}$",
    "artifact": _DIGEST,
    "digest": _DIGEST,
}
"""Patterns of the names in paths."""

_TYPES: Mapping[int, dict[str, Any]] = {
    FieldDescriptorProto.TYPE_DOUBLE: {"type": "number", "format": "double"},
    FieldDescriptorProto.TYPE_FLOAT: {"type": "number", "format": "float"},
    FieldDescriptorProto.TYPE_INT64: {"type": "string", "format": "int64", "pattern": "^-?[0-9]{1,18}$"},
    FieldDescriptorProto.TYPE_INT32: {"type": "integer", "format": "int32", "minimum": -(2**31), "maximum": 2**31 - 1},
    FieldDescriptorProto.TYPE_BOOL: {"type": "boolean"},
    FieldDescriptorProto.TYPE_STRING: {"type": "string"},
    FieldDescriptorProto.TYPE_BYTES: {"type": "string", "contentEncoding": "base64"},
}
_WELL_KNOWN: Mapping[str, dict[str, Any]] = {
    "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
    "google.protobuf.Struct": {"type": "object"},
    "google.protobuf.Value": {},
    "google.protobuf.Any": {
        "type": "object",
        "properties": {"@type": {"type": "string"}},
        "required": ["@type"],
        "description": "A message of the type that @type names: google.rpc.ErrorInfo, BadRequest or RetryInfo.",
    },
}


class Sources:
    """The messages, enums and comments of some descriptors, by full name."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self.messages: dict[str, DescriptorProto] = {}
        self.enums: dict[str, EnumDescriptorProto] = {}
        self.methods: list[tuple[str, MethodDescriptorProto]] = []
        self._comments: dict[str, str] = {}
        for file in files.file:
            comments = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}
            for number, message in enumerate(file.message_type):
                self._add_message(message, file.package, (_MESSAGES, number), comments)
            for number, enum in enumerate(file.enum_type):
                self._add_enum(enum, file.package, (_ENUMS, number), comments)
            for number, service in enumerate(file.service):
                self._comments[f"{file.package}.{service.name}"] = comments.get((_SERVICES, number), "")
                for place, method in enumerate(service.method):
                    self.methods.append((f"{file.package}.{service.name}", method))
                    path = (_SERVICES, number, _METHODS, place)
                    self._comments[f"{file.package}.{service.name}.{method.name}"] = comments.get(path, "")

    def comment(self, name: str) -> dict[str, str]:
        """Return the comment before a definition as a description; nothing without one."""
        text = " ".join(line.strip() for line in self._comments.get(name, "").splitlines()).strip()
        return {"description": text} if text else {}

    def _add_message(
        self, message: DescriptorProto, scope: str, path: tuple[int, ...], comments: Mapping[Any, str]
    ) -> None:
        name = f"{scope}.{message.name}"
        self.messages[name] = message
        self._comments[name] = comments.get(path, "")
        for number, field in enumerate(message.field):
            self._comments[f"{name}.{field.name}"] = comments.get((*path, _FIELDS, number), "")
        for number, nested in enumerate(message.nested_type):
            self._add_message(nested, name, (*path, _NESTED, number), comments)

    def _add_enum(
        self, enum: EnumDescriptorProto, scope: str, path: tuple[int, ...], comments: Mapping[Any, str]
    ) -> None:
        name = f"{scope}.{enum.name}"
        self.enums[name] = enum
        values = (
            f"{value.name}: {' '.join(comments[place].split())}"
            for number, value in enumerate(enum.value)
            if comments.get(place := (*path, _VALUES, number))
        )
        self._comments[name] = " ".join(filter(None, [comments.get(path, "").strip(), *values]))


class Document:
    """The document of some sources."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._schemas: dict[str, Any] = {}

    def build(self) -> dict[str, Any]:
        """Return the document."""
        paths: dict[str, Any] = {}
        tags = []
        for service, method in self._sources.methods:
            rule = http_rule(method.options)
            if rule is None or not service.startswith(f"{PACKAGE}."):
                continue
            path, operation = self._operation(service, method, rule)
            paths.setdefault(path, {})[rule.verb.lower()] = operation
            tag = {"name": service.rpartition(".")[2], **self._sources.comment(service)}
            if tag not in tags:
                tags.append(tag)
        self._refer(STATUS)
        return {
            "openapi": "3.1.0",
            "info": {"title": "Slipway", "version": "v1", "description": " ".join(_DESCRIPTION.split())},
            "tags": tags,
            "security": [{"token": []}, {"certificate": []}, {}],
            "paths": dict(sorted(paths.items())),
            "components": {
                "schemas": dict(sorted(self._schemas.items())),
                "securitySchemes": {
                    "token": {"type": "http", "scheme": "bearer"},
                    "certificate": {"type": "mutualTLS"},
                },
            },
        }

    def _operation(self, service: str, method: MethodDescriptorProto, rule: HttpRule) -> tuple[str, dict[str, Any]]:
        request = method.input_type[1:]
        path, parameters = _path_parameters(rule)
        operation: dict[str, Any] = {
            "operationId": method.name,
            "tags": [service.rpartition(".")[2]],
            **self._sources.comment(f"{service}.{method.name}"),
            "parameters": parameters,
        }
        if rule.body == "*":
            schema = self._object(request, without=rule.variables)
            required = bool(schema.get("required"))
            operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
        else:
            parameters += self._query_parameters(request, taken={*rule.variables, rule.body})
        if rule.body not in {"", "*"}:
            content = {"application/octet-stream": {"schema": {}}}
            operation["requestBody"] = {"required": True, "content": content}
        parameters += _header_parameters(method, rule)
        operation["responses"] = self._responses(method, rule)
        return path, operation

    def _query_parameters(self, request: str, *, taken: set[str]) -> Iterator[dict[str, Any]]:
        for field in self._sources.messages[request].field:
            if field.name not in taken and field.type != FieldDescriptorProto.TYPE_MESSAGE:
                yield {
                    "name": field.json_name,
                    "in": "query",
                    **self._sources.comment(f"{request}.{field.name}"),
                    "schema": self._field_type(field),
                }

    def _responses(self, method: MethodDescriptorProto, rule: HttpRule) -> dict[str, Any]:
        failure = {
            "description": "What failed, and why.",
            "content": {"application/json": {"schema": self._refer(STATUS)}},
        }
        if not method.server_streaming:
            schema = self._refer(method.output_type[1:])
            return {
                "200": {"description": "Done.", "content": {"application/json": {"schema": schema}}},
                "default": failure,
            }
        if not rule.response_body:
            event = self._refer(method.output_type[1:])["$ref"].rpartition("/")[2]
            endless = any(field.name == "cursor" for field in self._sources.messages[method.output_type[1:]].field)
            place = "cursor" if endless else "sequence"
            said = f"Server-sent events: the data of each is a {event}, its id the {place}. A failure is the event `failure`."
            ended = {"description": "The export has ended, and Last-Event-ID is its last event."}
            return {
                "200": {"description": said, "content": {"text/event-stream": {"schema": {"type": "string"}}}},
                **({} if endless else {"204": ended}),
                "default": failure,
            }
        content = {"application/octet-stream": {"schema": {}}}
        return {
            "200": {"description": "All of the content.", "content": content},
            "206": {"description": "The content from the first byte that Range names.", "content": content},
            "416": {**failure, "description": "The range begins beyond the end."},
            "default": failure,
        }

    def _refer(self, name: str) -> dict[str, Any]:
        """Return a reference to the schema of a message or an enum, which is added."""
        if name in _WELL_KNOWN:
            return dict(_WELL_KNOWN[name])
        short = name.removeprefix(f"{PACKAGE}.").rpartition(".")[2]
        if short not in self._schemas:
            self._schemas[short] = {}  # a message may hold itself
            self._schemas[short] = self._enum(name) if name in self._sources.enums else self._object(name)
        return {"$ref": f"#/components/schemas/{short}"}

    def _enum(self, name: str) -> dict[str, Any]:
        values = [value.name for value in self._sources.enums[name].value]
        return {"type": "string", "enum": values, **self._sources.comment(name)}

    def _object(self, name: str, *, without: Mapping[str, Any] | None = None) -> dict[str, Any]:
        fields = [field for field in self._sources.messages[name].field if field.name not in (without or ())]
        required = [field.json_name for field in fields if field_behavior_pb2.REQUIRED in _behaviour(field)]
        schema: dict[str, Any] = {"type": "object", **self._sources.comment(name)}
        schema["properties"] = {field.json_name: self._property(name, field) for field in fields}
        if name.startswith(f"{PACKAGE}."):
            schema["additionalProperties"] = False
        return {**schema, "required": required} if required else schema

    def _property(self, message: str, field: FieldDescriptorProto) -> dict[str, Any]:
        schema = {**self._field_type(field), **self._sources.comment(f"{message}.{field.name}")}
        if {field_behavior_pb2.OUTPUT_ONLY, field_behavior_pb2.IDENTIFIER} & set(_behaviour(field)):
            schema["readOnly"] = True
        return schema

    def _field_type(self, field: FieldDescriptorProto) -> dict[str, Any]:
        entry = self._sources.messages.get(field.type_name[1:])
        if entry is not None and entry.options.map_entry:
            return {"type": "object", "additionalProperties": self._one(entry.field[1])}
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return {"type": "array", "items": self._one(field)}
        return self._one(field)

    def _one(self, field: FieldDescriptorProto) -> dict[str, Any]:
        return dict(_TYPES[field.type]) if field.type in _TYPES else self._refer(field.type_name[1:])


def _behaviour(field: FieldDescriptorProto) -> list[int]:
    return list(field.options.Extensions[field_behavior_pb2.field_behavior])


def _path_parameters(rule: HttpRule) -> tuple[str, list[dict[str, Any]]]:
    """Return a path with one parameter for each segment, and the parameters: ``{name=projects/*}`` is ``projects/{project}``."""
    path, names = rule.template, []
    for variable, template in rule.variables.items():
        segments = template.split("/")
        for place, segment in enumerate(segments):
            if segment == "*":
                name = segments[place - 1].removesuffix("s") if place else variable
                names.append(name)
                segments[place] = f"{{{name}}}"
        written = f"{{{variable}}}" if template == "*" else f"{{{variable}={template}}}"
        path = path.replace(written, "/".join(segments), 1)
    return path, [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": _NAMES[name]}}
        for name in names
    ]


def _header_parameters(method: MethodDescriptorProto, rule: HttpRule) -> Iterator[dict[str, Any]]:
    if not method.server_streaming:
        return
    name, what = (
        ("Range", "bytes=N- to resume, or bytes=N-M for a part.")
        if rule.response_body
        else ("Last-Event-ID", "The last event seen, to resume.")
    )
    yield {"name": name, "in": "header", "description": what, "schema": {"type": "string"}}


def main(image: Path, document: Path) -> None:
    """Write the document of an image."""
    sources = Sources(FileDescriptorSet.FromString(image.read_bytes()))
    document.write_text(json.dumps(Document(sources).build(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
