"""Requests from paths, query parameters and JSON bodies, and responses as JSON, as the JSON mapping of protobuf says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from slipway.errors import ServiceError
from slipway.files.json_documents import parse_json
from slipway.security.limits import limit_error
from slipway.texts import one_line, shortened
from slipway_coordinator.api.requests import field_error
from slipway_coordinator.http.routes import Route, field_of

_MOST_PARAMETERS = 64
_MOST_VALUES = 200_000
_FREE = "google.protobuf."
"""Messages whose JSON has no fields of their own: Struct, Value, Timestamp."""
_FAILED = re.compile(r"Failed to parse (\w+) field")
_STEP = re.compile(r"(\w+)(\[[^\]]*\])?(?:\.|$)")
"""How the parser says which field it could not read: by its path, or by the names of the fields around it."""
_LONGEST_PLACE = 512
_WHOLE = "is a whole number in the range of the field"
_KINDS = {
    FieldDescriptor.CPPTYPE_INT32: _WHOLE,
    FieldDescriptor.CPPTYPE_INT64: _WHOLE,
    FieldDescriptor.CPPTYPE_UINT32: _WHOLE,
    FieldDescriptor.CPPTYPE_UINT64: _WHOLE,
    FieldDescriptor.CPPTYPE_DOUBLE: "is a number",
    FieldDescriptor.CPPTYPE_FLOAT: "is a number",
    FieldDescriptor.CPPTYPE_BOOL: "is true or false",
    FieldDescriptor.CPPTYPE_STRING: "is a text",
    FieldDescriptor.CPPTYPE_MESSAGE: "is an object, or what the field's type takes",
}


def request_of(route: Route, path: Mapping[str, str], query: bytes, body: bytes) -> Message:
    """Return the request that an HTTP request makes.

    Args:
        route: The call.
        path: Values of the fields in the path.
        query: The query, as it was sent.
        body: The body: JSON, or nothing.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``, naming the field, or ``LIMIT_EXCEEDED``.
    """
    data: dict[str, Any] = {}
    if route.rule.body == "*":
        data = _read_object(body)
        _check_fields(data, route.request, "")
        for name in data:
            field = route.field(name)
            if field is not None and field.name in path:
                raise ServiceError(
                    f"{field.name} is in the body and in the path",
                    reason="REQUEST_INVALID",
                    remedy="leave it out of the body",
                    about={"field": field.name},
                )
        _refuse_all(query)
    else:
        if body:
            raise ServiceError("the call takes no body", reason="REQUEST_INVALID", remedy="send none")
        data = _read_query(route, path, query)
    return _parse({**data, **path}, route)


def bare_request_of(route: Route, path: Mapping[str, str]) -> Message:
    """Return the request that an HTTP request would make by its path alone.

    Raises:
        ServiceError: As :func:`request_of`.
    """
    return _parse(path, route)


def content_request_of(route: Route, path: Mapping[str, str], query: bytes) -> Message:
    """Return the first request of a stream of content, which an HTTP request makes without its body.

    Raises:
        ServiceError: As :func:`request_of`.
    """
    taken = {**path, route.rule.body: ""}
    return _parse({**_read_query(route, taken, query), **path}, route)


def json_of(message: Message) -> str:
    """Return a message as JSON on one line; fields with their default value are left out."""
    return json_format.MessageToJson(message, indent=None, ensure_ascii=False)


def _read_object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        return {}
    try:
        data = parse_json(body, most_values=_MOST_VALUES)
    except ValueError as error:
        raise ServiceError(
            f"the body is not JSON that this call takes: {shortened(_where(error), 200)}",
            reason="REQUEST_INVALID",
            remedy="send one JSON object, in UTF-8, with each name once and finite numbers",
        ) from error
    if not isinstance(data, dict):
        raise ServiceError(
            "the body is not a JSON object",
            reason="REQUEST_INVALID",
            remedy="send the fields of the request as an object",
        )
    return data


def _where(error: ValueError) -> str:
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def _read_query(route: Route, taken: Mapping[str, str], query: bytes) -> dict[str, Any]:
    """Return the values of query parameters, of fields that are not in the path or body."""
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_PARAMETERS
        )
    except UnicodeError:
        raise ServiceError(
            "the query is not UTF-8, percent-encoded", reason="REQUEST_INVALID", remedy="encode its parameters"
        ) from None
    except ValueError:
        raise limit_error(f"the query has more than {_MOST_PARAMETERS} parameters", field="") from None
    data: dict[str, Any] = {}
    for name, value in pairs:
        field = route.field(name)
        if field is None or field.name in taken or field.message_type is not None:
            raise _unknown_error(name, "has no query parameter of this name")
        if field.is_repeated:
            data.setdefault(field.name, []).append(value)
        elif field.name in data:
            raise field_error(name, value, "is given once")
        else:
            data[field.name] = _query_value(field, value)
    return data


def _query_value(field: FieldDescriptor, value: str) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL and value in {"true", "false"}:
        return value == "true"
    return value


def _refuse_all(query: bytes) -> None:
    first = query.decode("latin-1").strip("&").partition("&")[0]
    if first:
        raise _unknown_error(first.partition("=")[0], "takes no query parameters: its fields are in the body")


def _check_fields(data: Mapping[str, Any], message: Descriptor, path: str) -> None:
    """Refuse fields that a message does not have, at any depth; what is of another type is left to the parser."""
    for name, value in data.items():
        field = field_of(message, name)
        if field is None:
            raise _unknown_error(f"{path}{name}", "has no field of this name")
        below = field.message_type
        if below is None:
            continue
        items: Sequence[tuple[str, Any]] = [("", value)]
        if below.GetOptions().map_entry:
            below = below.fields_by_name["value"].message_type
            items = [(f"[{_shown(key)}]", item) for key, item in value.items()] if isinstance(value, dict) else ()
        elif field.is_repeated:
            items = [(f"[{number}]", item) for number, item in enumerate(value)] if isinstance(value, list) else ()
        if below is None or below.full_name.startswith(_FREE):
            continue
        for which, item in items:
            if isinstance(item, dict):
                _check_fields(item, below, f"{path}{field.name}{which}.")


def _parse(data: Mapping[str, Any], route: Route) -> Message:
    try:
        return json_format.ParseDict(dict(data), route.new_request())
    except json_format.ParseError as error:
        path, field = _failed_field(str(error), route.request)
    except (ValueError, TypeError, RecursionError):  # the parser lets some through, such as a number as a key
        path, field = "", None
    about = {"field": path} if path else None
    if field is None:
        raise ServiceError(
            "the request is not what this call takes",
            reason="REQUEST_INVALID",
            remedy="see /openapi.json for its fields and their types",
            about=about,
        )
    rule = "is " + _names_of(field) if field.enum_type is not None else _KINDS[field.cpp_type]
    raise ServiceError(
        f"{path} has a value that it does not take", reason="REQUEST_INVALID", remedy=f"it {rule}", about=about
    )


def _failed_field(text: str, message: Descriptor | None) -> tuple[str, FieldDescriptor | None]:
    """Return the path of the field that the parser names, and the field if it is known."""
    names, field = list[str](), None
    path = _failed_path(text)
    steps = _STEP.findall(path) if path else [(name, "") for name in _FAILED.findall(text)]
    for name, key in steps:
        found = field_of(message, name) if message is not None else None
        if found is None:
            break
        field, message = found, found.message_type
        names.append(field.name + _shown(key))
        if message is not None and message.GetOptions().map_entry:
            field = message.fields_by_name["value"]
            message = field.message_type
    return ".".join(names), field


def _failed_path(text: str) -> str:
    """Return the path after ``at MESSAGE.`` at the end of the parser's text; empty without one.

    The text before it may be as long as the body, and its words are the caller's: only a short end is looked at.
    """
    before, _, place = text[-_LONGEST_PLACE:].rpartition(" ")
    name, _, path = place.rstrip(".").partition(".")
    return path if before.endswith(" at") and name.isidentifier() else ""


def _shown(text: str) -> str:
    """Return a name from a request as it may be shown."""
    return shortened(one_line(text))


def _names_of(field: FieldDescriptor) -> str:
    assert field.enum_type is not None
    return f"one of {', '.join(value.name for value in field.enum_type.values)}"


def _unknown_error(name: str, rule: str) -> ServiceError:
    shown = _shown(name)
    return ServiceError(
        f"there is no field {shown} here",
        reason="REQUEST_INVALID",
        remedy=f"leave it out: this call {rule}",
        about={"field": shown},
    )
