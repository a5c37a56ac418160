"""Failures as HTTP responses: ``google.rpc.Status`` as JSON, under the HTTP status that belongs to its code."""

from __future__ import annotations

import math
from collections.abc import Mapping

from google.rpc import code_pb2, status_pb2

from slipway.errors import ModelExportError
from slipway.rpc.values import failure_of_status, retry_seconds


class HttpError(Exception):
    """A refusal with an HTTP status that its code alone does not say.

    Args:
        error: The refusal.
        status: The HTTP status.
        headers: Headers of the response.
    """

    def __init__(self, error: ModelExportError, status: int, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.status = status
        self.headers = dict(headers or {})


def error_headers(status: status_pb2.Status) -> dict[str, str]:
    """Return the headers that a failure asks for: how to authenticate, and when to try again."""
    if status.code == code_pb2.UNAUTHENTICATED:
        return {"www-authenticate": "Bearer"}
    seconds = retry_seconds(failure_of_status(status))
    return {} if seconds is None else {"retry-after": str(math.ceil(seconds))}
