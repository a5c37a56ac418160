"""Convert failures to the end of a gRPC call and back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

import grpc
from google.rpc import code_pb2

from slipway.errors import Failure, ServiceError
from slipway.rpc.values import failure_of_bytes, status_of

STATUS_KEY = "grpc-status-details-bin"

_NO_TLS = re.compile(r"CERTIFICATE_VERIFY_FAILED: [^:]+|WRONG_VERSION_NUMBER|Hostname Verification Check failed")
_HUNG_UP = re.compile(r"Socket closed|Failed parsing HTTP/2")
# The TLS handshake succeeded, and the server closed the connection before its first frame: gRPC servers do so if they refuse the
# client's certificate.
_REFUSED_CERTIFICATE = re.compile(r"failed to connect to all addresses; last error: [A-Z]+: \S+ Socket closed")

#: Reasons of statuses that gRPC itself gives; it refuses a message that is larger than any may be.
_OF_GRPC = {grpc.StatusCode.CANCELLED: "CANCELLED", grpc.StatusCode.RESOURCE_EXHAUSTED: "LIMIT_EXCEEDED"}

# gRPC sends a status in HTTP/2 headers, by default at most 8 KiB in all; longer texts would end the call with an unrelated error.
MAX_TEXT = 2000
MAX_METADATA = 4000


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
    if code is grpc.StatusCode.UNIMPLEMENTED:  # with a reason, it would be a refusal of Slipway's own
        return ServiceError(
            f"the service at {address} does not know this call: it is older than this client, or another program",
            reason="CALL_NOT_FOUND",
            remedy="update the coordinator before its clients, or check the address",
            about={"address": address},
        ).failure()
    reason = _OF_GRPC.get(code, "INTERNAL")
    return ServiceError(f"the call to {address} failed: {code.name}: {details}", reason=reason).failure()
