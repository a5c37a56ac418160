"""The calls that HTTP requests make, found by method and path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from slipway.errors import ServiceError
from slipway.rpc.http_rules import HttpRule, http_rule
from slipway_coordinator.api.requests import field_error
from slipway_coordinator.http.errors import HttpError


@dataclass(frozen=True)
class Route:
    """One call over HTTP.

    Attributes:
        method: Its name in gRPC, such as ``/slipway.v1.ExportService/GetExport``.
        rule: Its method, path and body.
        request: Descriptor of the request.
        streams_requests: Whether it takes a stream: the body is content.
        streams_responses: Whether it returns a stream: of events, or of content.
    """

    method: str
    rule: HttpRule
    request: Descriptor
    streams_requests: bool
    streams_responses: bool

    @property
    def returns_content(self) -> bool:
        """Whether the response's body is bytes and not JSON."""
        return self.streams_responses and bool(self.rule.response_body)

    @property
    def verbs(self) -> Sequence[str]:
        """Its HTTP methods: with GET comes HEAD, except for events, which have no end."""
        endless = self.streams_responses and not self.returns_content
        return ["GET", "HEAD"] if self.rule.verb == "GET" and not endless else [self.rule.verb]

    def new_request(self) -> Message:
        """Return an empty request."""
        return GetMessageClass(self.request)()

    def field(self, name: str) -> FieldDescriptor | None:
        """Return a field of the request by its name in JSON or in the protos."""
        return field_of(self.request, name)


class Routes:
    """The calls of some services."""

    def __init__(self, *services: str) -> None:
        found = [_route(method) for name in services for method in _methods(name)]
        # The path of a call with a verb of its own is a path of the resource's own calls, too.
        self._routes = sorted(filter(None, found), key=lambda route: not route.rule.custom_verb)

    def find(self, verb: str, path: str) -> tuple[Route, Mapping[str, str]]:
        """Return the call of a request, and the values of the fields in its path, which is as it was sent.

        Raises:
            HttpError: No call has this path (404), or none with this method (405).
            ServiceError: reason ``REQUEST_INVALID`` for a path that is not UTF-8, or with an encoded slash.
        """
        matches = [(route, match) for route in self._routes if (match := route.rule.pattern.fullmatch(path))]
        if not matches:
            failure = ServiceError(
                "no call has this path",
                reason="CALL_NOT_FOUND",
                remedy="see /openapi.json for the calls and their paths",
            )
            raise HttpError(failure, 404)
        custom = matches[0][0].rule.custom_verb
        for route, match in matches:
            if verb in route.verbs and route.rule.custom_verb == custom:
                return route, {name: _decode(name, value) for name, value in match.groupdict().items()}
        allowed = sorted({each for route, _ in matches if route.rule.custom_verb == custom for each in route.verbs})
        failure = ServiceError(
            "no call with this path has this HTTP method", reason="CALL_NOT_FOUND", remedy=f"use {' or '.join(allowed)}"
        )
        raise HttpError(failure, 405, headers={"allow": ", ".join(allowed)})

    @property
    def calls(self) -> Sequence[Route]:
        """All calls."""
        return self._routes


def field_of(message: Descriptor, name: str) -> FieldDescriptor | None:
    """Return a field by its name in JSON or in the protos."""
    by_json = message.fields_by_camelcase_name.get(name)
    return by_json or message.fields_by_name.get(name)


def _methods(service: str) -> Sequence[Any]:
    methods: Sequence[Any] = descriptor_pool.Default().FindServiceByName(service).methods
    return methods


def _route(method: Any) -> Route | None:
    rule = http_rule(method.GetOptions())
    if rule is None:
        return None
    return Route(
        method=f"/{method.containing_service.full_name}/{method.name}",
        rule=rule,
        request=method.input_type,
        streams_requests=method.client_streaming,
        streams_responses=method.server_streaming,
    )


def _decode(name: str, value: str) -> str:
    try:
        decoded = unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise field_error(name, value, "is UTF-8, percent-encoded") from None
    if decoded.count("/") != value.count("/"):
        raise field_error(name, value, "has no encoded slash")
    return decoded
