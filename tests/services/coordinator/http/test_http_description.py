"""The OpenAPI document: valid, of the calls that are served, and true of what they return."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from slipway.rpc.http_rules import http_rule
from slipway_coordinator.api.requests import ID
from slipway_coordinator.http.application import SERVICES
from slipway_coordinator.http.routes import Routes
from slipway_protos.v1 import export_pb2
from support.coordinators.http_places import HttpPlace

DOCUMENT: dict[str, Any] = json.loads(resources.files("slipway_protos").joinpath("v1/openapi.json").read_bytes())


def test_the_document_is_valid_openapi() -> None:
    validate(DOCUMENT)


def test_it_describes_the_calls_that_are_served(place: HttpPlace) -> None:
    assert place.call("", "GET", "/openapi.json").json == DOCUMENT
    described = {(verb.upper(), path) for path, calls in DOCUMENT["paths"].items() for verb in calls}
    routes = Routes(*SERVICES)
    assert len(described) == len(routes.calls)
    for verb, path in described:
        filled = re.sub(r"\{[a-z]+\}", "x1", path)
        route, _ = routes.find(verb, filled)
        assert DOCUMENT["paths"][path][verb.lower()]["operationId"] == route.method.rpartition("/")[2]


def test_every_call_and_most_fields_are_described() -> None:
    calls = [call for calls in DOCUMENT["paths"].values() for call in calls.values()]
    assert all(call["description"] for call in calls)
    export = DOCUMENT["components"]["schemas"]["Export"]["properties"]
    assert export["error"]["description"] == "Why the export failed."
    assert export["createTime"] == {"type": "string", "format": "date-time", "readOnly": True}
    assert export["priority"]["format"] == "int32"


def test_names_in_paths_have_the_patterns_that_the_server_checks() -> None:
    parameters = [
        each for calls in DOCUMENT["paths"].values() for call in calls.values() for each in call["parameters"]
    ]
    patterns = {each["name"]: each["schema"]["pattern"] for each in parameters if each["in"] == "path"}
    digest = "^sha256:[0-9a-f]{64}$"
    names = {"project": f"^(?:{ID}|-)$", "export": f"^{ID}$", "artifact": digest, "digest": digest}
    assert patterns == names


def test_responses_are_what_it_says(place: HttpPlace) -> None:
    digest = place.base()
    place.give(digest, project="red")
    body = {"exportId": "described", "sources": {"base": digest, "adapter": digest}}
    created = place.call("submitter", "POST", "/v1/projects/red/exports", body)
    check("Export", created.json)
    check("ListExportsResponse", place.call("viewer", "GET", "/v1/projects/red/exports").json)
    check("Artifact", place.call("viewer", "GET", f"/v1/projects/red/artifacts/{digest}").json)
    check("Status", place.call("viewer", "GET", "/v1/projects/red/exports/none").json)


def check(schema: str, value: Any) -> None:
    """Compare a value with a schema of the document."""
    whole = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    Draft202012Validator(whole).validate(value)


def test_a_path_that_this_program_cannot_match_is_an_error() -> None:
    options = export_pb2.DESCRIPTOR.services_by_name["ExportService"].methods_by_name["GetExport"].GetOptions()
    rule = http_rule(options)
    assert rule is not None
    assert (rule.verb, rule.variables) == ("GET", {"name": "projects/*/exports/*"})
    from google.api import annotations_pb2
    from google.protobuf import descriptor_pb2

    for path in ("/v1/{name=projects/{x}}", "v1", "/v1/{Name}", ""):
        broken = descriptor_pb2.MethodOptions()
        broken.Extensions[annotations_pb2.http].get = path
        with pytest.raises(ValueError, match="not a path"):
            http_rule(broken)
    assert http_rule(descriptor_pb2.MethodOptions()) is None
