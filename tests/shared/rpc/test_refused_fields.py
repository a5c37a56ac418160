"""A refused field of a request, as clients of any language read it."""

from __future__ import annotations

from google.rpc import error_details_pb2

from slipway.errors import ServiceError
from slipway.rpc.call_ends import call_status
from slipway.rpc.values import failure_of_status, status_of


def refused(reason: str = "REQUEST_INVALID", **about: str) -> ServiceError:
    return ServiceError("parent is 'x'", reason=reason, remedy="it is like projects/default", about=about)


def violations(error: ServiceError) -> list[tuple[str, str, str]]:
    found = error_details_pb2.BadRequest()
    return [
        (violation.field, violation.description, violation.reason)
        for detail in status_of(error.failure()).details
        if detail.Unpack(found)
        for violation in found.field_violations
    ]


def test_a_refused_field_is_in_a_bad_request() -> None:
    assert violations(refused(field="parent")) == [("parent", "it is like projects/default", "REQUEST_INVALID")]
    assert violations(refused()) == []
    assert violations(refused("LIMIT_EXCEEDED", field="labels")) == []  # it is no INVALID_ARGUMENT


def test_the_failure_is_read_as_before() -> None:
    failure = refused(field="parent").failure()
    assert failure_of_status(status_of(failure)) == failure


def test_a_status_fits_into_the_headers_that_grpc_sends() -> None:
    long = ServiceError("m" * 5000, reason="REQUEST_INVALID", remedy="r" * 5000, about={"field": "f" * 5000})
    _, text, status = call_status(long.failure())
    assert len(text) * 4 / 3 + len(status) * 4 / 3 < 16 << 10
