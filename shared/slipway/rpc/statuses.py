"""Convert failures to ``google.rpc.Status`` and to the end of a gRPC call, and back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

import grpc
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

STATUS_KEY = "grpc-status-details-bin"

_NO_TLS = re.compile(r"CERTIFICATE_VERIFY_FAILED: [^:]+|WRONG_VERSION_NUMBER|Hostname Verification Check failed")
_HUNG_UP = re.compile(r"Socket closed|Failed parsing HTTP/2")
# The TLS handshake succeeded, and the server closed the connection before its first frame: gRPC servers do so if they refuse the
# client's certificate.
_REFUSED_CERTIFICATE = re.compile(r"failed to connect to all addresses; last error: [A-Z]+: \S+ Socket closed")

#: Reasons of statuses that gRPC itself gives; it refuses a message that is larger than any may be.
_OF_GRPC = {grpc.StatusCode.CANCELLED: "CANCELLED", grpc.StatusCode.RESOURCE_EXHAUSTED: "LIMIT_EXCEEDED"}

# Names of the failure's own fields within ErrorInfo.metadata; all other entries are ``about``.
_PARTS = ("error_type", "remedy", "retryable")

# gRPC sends a status in HTTP/2 headers, by default at most 8 KiB in all; longer texts would end the call with an unrelated error.
MAX_TEXT = 2000
MAX_METADATA = 4000

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


def call_status(failure: Failure) -> tuple[grpc.StatusCode, str, bytes]:
    """Return the code, text and serialized status that end a call; cut long parts to what gRPC can send."""
    room = MAX_METADATA
    about: dict[str, str] = {}
    for key, value in sorted(failure.about.items(), key=lambda item: len(item[1])):
        if len(key) + len(value) <= room:
            about[key] = value
            room -= len(key) + len(value)
    short = replace(failure, message=failure.message[:MAX_TEXT], remedy=failure.remedy[:MAX_TEXT], about=about)
    status = status_of(short)
    code = grpc.StatusCode[code_pb2.Code.Name(status.code)]
    return code, short.message, status.SerializeToString()


def failure_of_call(error: grpc.RpcError, *, address: str, encrypted: bool = False) -> Failure:
    """Return the failure that ended a gRPC call; ``encrypted`` says whether the channel uses TLS."""
    call = cast("grpc.Call", error)
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_KEY:
            return failure_of_bytes(cast("bytes", value))
    code = call.code()
    details = call.details() or ""
    no_tls = _NO_TLS.search(details)
    if code is grpc.StatusCode.UNAVAILABLE and no_tls:
        return ServiceError(
            f"the TLS connection to {address} failed: {no_tls[0]}",
            reason="TLS_INVALID",
            remedy="check that the server uses TLS, and check its certificate: the authority (--tls-ca-file), the dates, the names "
            "(SLIPWAY_TLS_SERVER_NAME)",
            about={"address": address},
        ).failure()
    if code is grpc.StatusCode.UNAVAILABLE and encrypted and _REFUSED_CERTIFICATE.search(details):
        return ServiceError(
            f"{address} requires a certificate of its authority, and did not accept this client's",
            reason="TLS_INVALID",
            remedy="give one (--tls-cert-file, --tls-key-file) that has not expired, or call the port for clients with "
            "a token (the coordinator's --token-listen)",
            about={"address": address},
        ).failure()
    if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
        # A server that requires TLS or a certificate closes the connection of a client without it.
        wants = ", and whether it requires TLS (--tls-ca-file) and a certificate (--tls-cert-file)"
        return ServiceError(
            f"the coordinator at {address} does not answer: {details or code.name}",
            reason="COORDINATOR_UNAVAILABLE",
            remedy=f"check the address, and whether the coordinator runs{wants if _HUNG_UP.search(details) else ''}",
            about={"address": address},
        ).failure()
    reason = _OF_GRPC.get(code, "INTERNAL")
    return ServiceError(f"the call to {address} failed: {code.name}: {details}", reason=reason).failure()
