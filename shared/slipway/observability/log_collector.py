"""Send log records to an OpenTelemetry collector, one request at a time, and say what became of them.

OpenTelemetry's exporters say only whether a request failed. Whoever repeats requests has to know more: the protocol forbids to repeat
one that the collector refuses, and a response may name records that it did not take.
"""

from __future__ import annotations

import gzip
import http.client
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import grpc

from slipway.observability.collector import Connection
from slipway.observability.otlp import SEND_SECONDS
from slipway.texts import one_line, redact, shortened

if TYPE_CHECKING:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
        ExportLogsServiceRequest,
        ExportLogsServiceResponse,
    )

_MOST_ANSWERED = 64 << 10
_COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
_RECONNECT_MS = 10_000  # instead of gRPC's two minutes
_RETRY_INFO = b"google.rpc.RetryInfo"


class Verdict(Enum):
    """What a collector says to a request, by the rules of OTLP.

    TAKEN: it has the records. LATER: it may take them later. DIVIDE: it refuses these, and may take them in smaller requests.
    REFUSED: it refuses all.
    """

    TAKEN = auto()
    LATER = auto()
    DIVIDE = auto()
    REFUSED = auto()


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
        verdict: The collector's verdict.
        rejected: Records of a taken request that it did not take.
        problem: What went wrong, if anything.
    """

    verdict: Verdict
    rejected: int = 0
    problem: str = ""


class LogCollector(Protocol):
    """A collector of log records."""

    def send(self, request: ExportLogsServiceRequest) -> Answer:
        """Send one request; return within seconds."""

    def close(self) -> None:
        """End a request that is under way, if that can be."""


_BY_CODE: Mapping[grpc.StatusCode, Verdict] = {
    grpc.StatusCode.CANCELLED: Verdict.LATER,
    grpc.StatusCode.DEADLINE_EXCEEDED: Verdict.LATER,
    grpc.StatusCode.ABORTED: Verdict.LATER,
    grpc.StatusCode.OUT_OF_RANGE: Verdict.LATER,
    grpc.StatusCode.UNAVAILABLE: Verdict.LATER,
    grpc.StatusCode.DATA_LOSS: Verdict.LATER,
    grpc.StatusCode.INVALID_ARGUMENT: Verdict.DIVIDE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Verdict.DIVIDE,  # the request is too large, unless the response says otherwise
}
_BY_STATUS: Mapping[int, Verdict] = {
    http.HTTPStatus.TOO_MANY_REQUESTS: Verdict.LATER,
    http.HTTPStatus.BAD_GATEWAY: Verdict.LATER,
    http.HTTPStatus.SERVICE_UNAVAILABLE: Verdict.LATER,
    http.HTTPStatus.GATEWAY_TIMEOUT: Verdict.LATER,
    http.HTTPStatus.BAD_REQUEST: Verdict.DIVIDE,
    http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE: Verdict.DIVIDE,
    http.HTTPStatus.UNPROCESSABLE_ENTITY: Verdict.DIVIDE,
}
"""Verdicts other than REFUSED; OTLP says which requests may be repeated."""


def open_log_collector(connection: Connection) -> LogCollector:
    """Return the collector of a connection; nothing is sent yet."""
    return _Grpc(connection) if connection.protocol == "grpc" else _Http(connection)


class _Grpc:
    def __init__(self, connection: Connection) -> None:
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2_grpc import LogsServiceStub

        url = urlsplit(connection.endpoint)
        target = url.netloc if url.scheme in ("http", "https") else connection.endpoint
        options = [("grpc.max_reconnect_backoff_ms", _RECONNECT_MS)]
        compression = grpc.Compression.Gzip if connection.compression == "gzip" else grpc.Compression.NoCompression
        if connection.tls is None:
            self._channel = grpc.insecure_channel(target, options, compression)
        else:
            self._channel = grpc.secure_channel(target, _credentials(connection), options, compression)
        self._export: Any = LogsServiceStub(self._channel).Export  # type: ignore[no-untyped-call]  # generated
        self._headers = connection.headers

    def send(self, request: ExportLogsServiceRequest) -> Answer:
        """Send one request."""
        try:
            response = self._export(request, timeout=SEND_SECONDS, metadata=self._headers)
        except grpc.RpcError as error:
            return _refusal(error)
        return _taken(response)

    def close(self) -> None:
        """End a request that is under way."""
        self._channel.close()


def _refusal(error: Any) -> Answer:
    code = error.code()
    verdict = _BY_CODE.get(code, Verdict.REFUSED)
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _RETRY_INFO in details:
        verdict = Verdict.LATER
    return Answer(verdict, problem=_shown(f"{code.name}: {error.details()}"))


def _credentials(connection: Connection) -> grpc.ChannelCredentials:
    authorities, certificate = connection.authorities, connection.certificate
    key = connection.key or certificate  # a file may have both
    return grpc.ssl_channel_credentials(
        *(None if path is None else path.read_bytes() for path in (authorities, key, certificate))
    )


class _Http:
    def __init__(self, connection: Connection) -> None:
        self._endpoint = connection.endpoint
        self._compress = _COMPRESS.get(connection.compression)
        self._headers = {"Content-Type": "application/x-protobuf", "User-Agent": "slipway", **dict(connection.headers)}
        if self._compress is not None:
            self._headers["Content-Encoding"] = connection.compression
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=connection.tls))

    def send(self, request: ExportLogsServiceRequest) -> Answer:
        """Send one request."""
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

        body = request.SerializeToString()
        body = body if self._compress is None else self._compress(body)
        post = urllib.request.Request(self._endpoint, body, self._headers, method="POST")  # noqa: S310 - the connection's check lets only HTTP pass
        try:
            with self._opener.open(post, timeout=SEND_SECONDS) as response:
                return _taken(ExportLogsServiceResponse.FromString(response.read(_MOST_ANSWERED)))
        except DecodeError:  # it has the records, and says so in its own way
            return Answer(Verdict.TAKEN)
        except urllib.error.HTTPError as error:
            with error:
                return Answer(_BY_STATUS.get(error.code, Verdict.REFUSED), problem=f"status {error.code}")
        except (OSError, http.client.HTTPException) as error:
            return Answer(Verdict.LATER, problem=_shown(str(error) or type(error).__name__))

    def close(self) -> None:
        """Do nothing: a request ends by its own time limit."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for the error that it is here: it would lead to an address that nobody configured."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _taken(response: ExportLogsServiceResponse) -> Answer:
    partial = response.partial_success
    return Answer(Verdict.TAKEN, max(partial.rejected_log_records, 0), _shown(partial.error_message))


def _shown(problem: str) -> str:
    return shortened(one_line(redact(problem)))
