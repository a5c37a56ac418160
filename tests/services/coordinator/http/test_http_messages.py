"""Requests of HTTP as messages, without a server: what is refused, and in what time."""

from __future__ import annotations

import json
import time

import pytest

from slipway.errors import ServiceError
from slipway_coordinator.http.application import SERVICES
from slipway_coordinator.http.messages import request_of
from slipway_coordinator.http.routes import Routes
from slipway_protos.v1 import artifact_pb2, export_pb2  # noqa: F401 - describe the calls

ROUTES = Routes(*SERVICES)
DOTS = "." * 60_000


def refusal(verb: str, *, query: bytes = b"", body: bytes = b"") -> ServiceError:
    """Return the error for a request of a list (GET) or of a new export (POST)."""
    route, path = ROUTES.find(verb, "/v1/projects/red/exports")
    with pytest.raises(ServiceError) as caught:
        request_of(route, path, query, body)
    return caught.value


@pytest.mark.parametrize("value", [f" at a.{DOTS} x", f" at a.{DOTS}", f" at {'a' * 60_000}.x!", f"at.x {DOTS} at a.b"])
def test_the_text_of_a_caller_costs_no_time(value: str) -> None:
    began = time.process_time()
    body = refusal("POST", body=json.dumps({"priority": value}).encode())
    query = refusal("GET", query=f"pageSize={value.replace(' ', '+')}".encode())
    assert (body.about["field"], query.about["field"]) == ("priority", "page_size")
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "query", [b"validateOnly=true", b"&validateOnly=true", b"&&validateOnly", b"x=1&validateOnly=1"]
)
def test_a_call_with_a_body_takes_no_query(query: bytes) -> None:
    refused = refusal("POST", query=query, body=b'{"sources": {}}')
    assert (refused.reason, refused.about["field"]) == ("REQUEST_INVALID", "x" if b"x" in query else "validateOnly")


@pytest.mark.parametrize("query", [b"=true", b"&=true"])
def test_a_parameter_without_a_name_is_refused(query: bytes) -> None:
    assert refusal("POST", query=query).reason == "REQUEST_INVALID"
