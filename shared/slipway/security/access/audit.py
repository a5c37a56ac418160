"""The audit log: one line for each attempt to change something, allowed or not.

Lines go to the logger ``slipway.audit``. As JSON, the facts are in the field ``audit``; as text, the message has all of them. Text
from callers appears only quoted and printable, so no line can imitate another. A service may send the same records to an
OpenTelemetry collector (:mod:`slipway.observability.audit_records`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from google.protobuf.message import DecodeError

from slipway.errors import Failure, ModelExportError
from slipway.observability.audit_facts import CHECKED, CONTENT_MISSING, DONE, STARTED, AuditFacts
from slipway.observability.logs import AUDIT_LOGGER
from slipway.observability.telemetry import current_traceparent, traceparent_of, within
from slipway.rpc.call_ends import STATUS_KEY
from slipway.rpc.serving import Context, call_traceparent
from slipway.rpc.values import failure_of_bytes, failure_of_status
from slipway.security.access.callers import ANONYMOUS
from slipway.security.access.principals import Principal
from slipway.texts import one_line

log = logging.getLogger(AUDIT_LOGGER)

_MOST = 400


@dataclass(frozen=True, slots=True)
class _Audited:
    """What a line says of the calls of one method.

    Attributes:
        resource: The resource of a call, from its request and, if it was allowed, its response.
        trace_id: The trace of the export that a response names; empty for methods whose responses name none.
    """

    resource: Callable[[Any, Any], str]
    trace_id: Callable[[Any], str] = lambda _: ""


_METHODS: Mapping[str, _Audited] = {
    "/slipway.v1.ExportService/CreateExport": _Audited(
        lambda request, response: (
            response.name if response is not None else f"{request.parent}/exports/{request.export_id}"
        ),
        trace_id=lambda export: export.trace_id,
    ),
    "/slipway.v1.ExportService/CancelExport": _Audited(
        lambda request, _: request.name, trace_id=lambda export: export.trace_id
    ),
    "/slipway.v1.ExportService/RetryExport": _Audited(
        lambda request, _: request.name, trace_id=lambda export: export.trace_id
    ),
    "/slipway.v1.ExportService/DeleteExport": _Audited(lambda request, _: request.name),
    "/slipway.v1.ArtifactService/CreateArtifact": _Audited(
        lambda request, response: f"{request.parent}/artifacts/{'' if response is None else response.digest}"
    ),
    "/slipway.v1.ArtifactService/DeleteArtifact": _Audited(lambda request, _: request.name),
    "/slipway.v1.StageService/Run": _Audited(lambda request, _: f"stages/{request.stage}"),
}

AUDITED = frozenset(_METHODS)
"""Methods that change something."""


@dataclass
class Attempt:
    """One call of a method that changes something, as far as it is known.

    Attributes:
        method: Method of the call.
        context: Context of the call.
        caller: Returns the caller; anonymous while unknown.
        read: Parses a request; raises :class:`ModelExportError` for one that is too large, and ``DecodeError``.
        is_written: Whether its outcome is still to be written to the audit log.
        data: Bytes of the request; None before they have arrived.
        request: The parsed request.
        response: The last response.
    """

    method: str
    context: Context
    caller: Callable[[], Principal]
    read: Callable[[bytes], Any]
    is_written: bool
    data: bytes | None = None
    request: Any = None
    response: Any = None

    def note_response(self, response: Any) -> None:
        """Record a response of a stream; the first one shows that the call was allowed."""
        if self.response is None and self.is_written:
            self._write(STARTED)
        self.response = response

    def write_failure(self, failure: Failure) -> None:
        """Write a failure as the outcome, before the caller hears of it: what it does next has a later line."""
        if self.is_written:
            self._write(failure.reason)
            self.is_written = False

    def write_end(self, error: BaseException | None) -> None:
        """Write the outcome, unless it is written."""
        if self.is_written:
            self._write(reason_of(error, self.context) or self._outcome())

    def traceparent(self) -> str:
        """Return the span that the call belongs to; empty without one, and for an unknown caller, who could name anybody's."""
        return "" if self.caller() is ANONYMOUS else call_traceparent(self.context)

    def _write(self, outcome: str) -> None:
        caller = self.caller()
        known = caller is not ANONYMOUS
        export_trace = "" if self.response is None else _METHODS[self.method].trace_id(self.response)
        write(
            self.method.rpartition("/")[2],
            outcome=outcome,
            principal=caller.name if known else "",
            resource=self._resource() if known else "",  # requests of unknown callers are never parsed
            peer=unquote(str(self.context.peer())),
            issuer=caller.issuer,
            subject=caller.subject,
            traceparent=self.traceparent() or traceparent_of(export_trace),
        )

    def _resource(self) -> str:
        if self.request is None:
            if self.data is None:
                return ""
            try:
                self.request = self.read(self.data)
            except (ModelExportError, DecodeError):
                return ""
        return _METHODS[self.method].resource(self.request, self.response)

    def _outcome(self) -> str:
        request, response = self.request, self.response
        match self.method.rpartition("/")[2]:
            case "CreateExport" if request.validate_only:
                return CHECKED
            case "CreateArtifact" if response.missing:
                return CONTENT_MISSING
            case "Run" if response is not None and response.HasField("error"):
                return failure_of_status(response.error).reason
        return DONE


@contextmanager
def audit_attempt(attempt: Attempt) -> Iterator[Attempt]:
    """Write the outcome of an attempt at the end of the block."""
    try:
        yield attempt
    except BaseException as error:
        attempt.write_end(error)
        raise
    attempt.write_end(None)


def write(
    action: str,
    *,
    outcome: str,
    principal: str,
    resource: str,
    peer: str = "",
    issuer: str = "",
    subject: str = "",
    traceparent: str = "",
) -> None:
    """Write one line.

    Args:
        action: Name of the method.
        outcome: One of :mod:`slipway.observability.audit_facts`, or the reason of a refusal.
        principal: Name of the caller; empty if unknown.
        resource: Name of the affected resource; empty if unknown.
        peer: Address of the caller; empty for an action of the server itself.
        issuer: Issuer of the caller's token; without one, the line has neither ``issuer`` nor ``subject``.
        subject: The caller's subject there.
        traceparent: Trace of the line; by default the current one.
    """
    parts = resource.split("/")
    facts = AuditFacts(
        action=action,
        outcome=outcome,
        principal=_shorten(principal),
        project=_shorten(parts[1]) if parts[0] == "projects" and len(parts) > 1 else "",
        resource=_shorten(resource),
        peer=_shorten(peer),
        issuer=_shorten(issuer),
        subject=_shorten(subject),
    ).by_name()
    message = " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in facts.items())
    with within(traceparent or current_traceparent()):
        log.info(message, extra={"audit": facts})


def reason_of(error: BaseException | None, context: Context) -> str:
    """Return the reason of a call's failure; empty without one."""
    if error is None:
        return ""
    if isinstance(error, asyncio.CancelledError):
        return "CANCELLED"
    for key, value in context.trailing_metadata() or ():
        if key == STATUS_KEY and isinstance(value, bytes):
            return failure_of_bytes(value).reason
    return "INTERNAL"


def _shorten(text: str) -> str:
    return one_line(text[:_MOST])
