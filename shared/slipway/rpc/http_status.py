"""The HTTP status that belongs to the code of a failure."""

from __future__ import annotations

from google.rpc import code_pb2, status_pb2

_HTTP_STATUS = {
    "OK": 200,
    "CANCELLED": 499,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "UNAUTHENTICATED": 401,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}
"""As ``google/rpc/code.proto`` maps them; every other code is a 500."""


def http_status(status: status_pb2.Status) -> int:
    """Return the HTTP status of a code."""
    known = code_pb2.Code.DESCRIPTOR.values_by_number.get(status.code)
    return _HTTP_STATUS.get(known.name, 500) if known is not None else 500
