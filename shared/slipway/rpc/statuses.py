"""Convert failures to ``google.rpc.Status`` and back."""

from __future__ import annotations

import re

from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from slipway.errors import MOST_TEXT, Failure, ServiceError
from slipway.reasons import REASONS
from slipway.rpc.structs import sendable
from slipway.texts import shortened

DOMAIN = "slipway"
RETRY_AFTER = "retry_after_seconds"
"""Entry of a failure's ``about`` that is also sent as ``RetryInfo``, which every gRPC client understands."""

_LONGEST_RETRY_SECONDS = 86_400.0

# Names of the failure's own fields within ErrorInfo.metadata; all other entries are ``about``.
_PARTS = ("error_type", "remedy", "retryable")

_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_MOST_ABOUT = 64
"""Most entries of a received failure's ``about``."""
_MOST_DETAILS = 64


def status_of(failure: Failure) -> status_pb2.Status:
    """Convert a failure to a status: the code follows from the category; the reason and the rest are in an ``ErrorInfo``."""
    category = REASONS[failure.reason].category if failure.reason in REASONS else REASONS["INTERNAL"].category
    info = error_details_pb2.ErrorInfo(reason=failure.reason, domain=DOMAIN)
    info.metadata.update({sendable(key): sendable(value) for key, value in failure.about.items()})
    info.metadata["error_type"] = failure.error_type
    info.metadata["retryable"] = str(failure.retryable).lower()
    if failure.remedy:
        info.metadata["remedy"] = sendable(failure.remedy)
    status = status_pb2.Status(code=code_pb2.Code.Value(category.status_code), message=sendable(failure.message))
    status.details.add().Pack(info)
    seconds = retry_seconds(failure)
    if seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(1000 * seconds))
        status.details.add().Pack(retry)
    return status


def retry_seconds(failure: Failure) -> float | None:
    """Return the seconds until a retry; None if the failure has none, or an impossible one from a peer."""
    try:
        seconds = float(failure.about[RETRY_AFTER])
    except (KeyError, ValueError):
        return None
    return seconds if 0 <= seconds <= _LONGEST_RETRY_SECONDS else None


def failure_of_status(status: status_pb2.Status) -> Failure:
    """Return the failure that :func:`status_of` wrote, with texts cut to the usual lengths.

    A status from another program, or one with unreadable details, becomes ``INTERNAL``.
    """
    for detail in status.details[:_MOST_DETAILS]:
        info = error_details_pb2.ErrorInfo()
        if _unpack(detail, info) and info.domain == DOMAIN:
            about = [(key, value) for key, value in sorted(info.metadata.items()) if key not in _PARTS]
            return Failure(
                reason=info.reason if _REASON.fullmatch(info.reason) else "INTERNAL",
                message=shortened(status.message, MOST_TEXT),
                remedy=shortened(info.metadata.get("remedy", ""), MOST_TEXT),
                error_type=shortened(info.metadata.get("error_type", "ModelExportError")),
                about={shortened(key): shortened(value, MOST_TEXT) for key, value in about[:_MOST_ABOUT]},
                retryable=info.metadata.get("retryable") == "true",
            )
    return ServiceError(status.message or code_pb2.Code.Name(status.code), reason="INTERNAL").failure()


def failure_of_bytes(data: bytes) -> Failure:
    """Return the failure of a serialized status; ``INTERNAL`` if the data is not a status."""
    try:
        return failure_of_status(status_pb2.Status.FromString(data))
    except DecodeError:
        return ServiceError("the peer sent an unreadable status", reason="INTERNAL").failure()


def _unpack(detail: any_pb2.Any, into: Message) -> bool:
    try:
        return detail.Unpack(into)
    except DecodeError:
        return False
