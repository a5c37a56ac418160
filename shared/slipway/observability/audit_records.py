"""Send the audit log to an OpenTelemetry collector, besides where the log goes anyway.

A call hands its record to a bounded queue and goes on; a thread sends what waits. The log on standard error stays the complete one:
a record that the collector never took is there, and counted.

OpenTelemetry's own batch processor drops the oldest records when its queue is full, counts none of them in our metrics, and gives up a
batch after one request, so the restart of a collector would lose records.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipway.distribution import require
from slipway.observability import metrics
from slipway.observability.logs import AUDIT_LOGGER
from slipway.observability.otlp import SEND_SECONDS, log_exporter, own_resource
from slipway.observability.telemetry import context_within, current_traceparent
from slipway.texts import counted, redact

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.resources import Resource

    from slipway.settings import Settings

log = logging.getLogger("slipway.observability")

EVENT = "slipway.audit"
"""Name of the event, of which each record is one."""

_ATTRIBUTES = {
    "action": "slipway.audit.action",
    "outcome": "slipway.audit.outcome",
    "principal": "user.name",
    "subject": "user.id",
    "issuer": "slipway.audit.issuer",
    "project": "slipway.project",
    "resource": "slipway.resource",
}
"""Attributes of a record, by OpenTelemetry's conventions where they have a name for it."""

_PEER = re.compile(r"ipv[46]:\[?(?P<address>[^\[\]]+)\]?:(?P<port>[0-9]{1,5})")
_REASON = re.compile(r"[A-Z][A-Z0-9_]*")
"""Outcome of a refused or failed call; the other outcomes are in lower case."""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One line of the audit log.

    Attributes:
        time: When it was written, in seconds since the epoch.
        message: The line.
        facts: Its facts, by their names in the log.
        traceparent: Its trace; empty without one.
    """

    time: float
    message: str
    facts: Mapping[str, str]
    traceparent: str


@dataclass(frozen=True, slots=True)
class Patience:
    """How much a sender keeps, and for how long.

    Attributes:
        most: Records that wait; a further one is dropped.
        batch: Records of one request.
        gather_seconds: Time in which records are gathered for a request.
        pauses: Seconds between the attempts to send a batch, the last of them again and again.
        keep_seconds: Time after which a batch that is not taken is dropped, so that one bad record does not hold up all others.
        end_seconds: Time for the rest at the end.
    """

    most: int = 4096
    batch: int = 256
    gather_seconds: float = 0.5
    pauses: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 30.0)
    keep_seconds: float = 600.0
    end_seconds: float = SEND_SECONDS


@contextlib.contextmanager
def sending_audit(settings: Settings, *, service: str, patience: Patience | None = None) -> Iterator[None]:
    """Send the audit log's records while the block runs, if the settings say so; at its end send the rest within 3 s.

    Args:
        settings: ``audit`` is ``otlp`` or empty (off).
        service: Name of the service that the records are from.
        patience: By default that of a service.
    """
    if not settings.audit:
        yield
        return
    require("telemetry", what=f"SLIPWAY_AUDIT={settings.audit}", otherwise="unset it")
    exporter, resource = log_exporter(settings), own_resource(service)

    def export(batch: Sequence[AuditRecord]) -> bool:
        return exporter.export([_log_record(record, resource) for record in batch]).name == "SUCCESS"

    sender = Sender(export, patience or Patience())
    handler = _Handler(sender)
    logger = logging.getLogger(AUDIT_LOGGER)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        sender.end(abort=exporter.shutdown)


class _Handler(logging.Handler):
    """Hands records to a sender, as they are: only the sender's thread uses OpenTelemetry."""

    def __init__(self, sender: Sender) -> None:
        super().__init__()
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        """Hand over one record."""
        facts = getattr(record, "audit", {})
        self._sender.put(AuditRecord(record.created, record.getMessage(), facts, current_traceparent()))


class Sender:
    """Sends records in a thread of its own. What is sent and what is dropped is counted; nothing is raised, and nobody waits.

    Args:
        export: Sends a batch; returns whether it was taken.
        patience: How much is kept, and for how long.
    """

    def __init__(self, export: Callable[[Sequence[AuditRecord]], bool], patience: Patience) -> None:
        self._export = export
        self._patience = patience
        self._waiting: deque[AuditRecord] = deque()
        self._changed = threading.Condition()
        self._ends = False
        self._stopped = False
        for outcome in (
            "sent",
            "queue_full",
            "not_taken",
            "ended",
        ):  # an increase from zero can be seen only with a zero
            metrics.AUDIT_RECORDS.add(0, outcome=outcome)
        self._thread = threading.Thread(target=self._run, name="slipway-audit", daemon=True)
        self._thread.start()

    def put(self, record: AuditRecord) -> None:
        """Queue a record. If the queue is full it is dropped, and not an older one: a flood of calls hides no earlier record."""
        with self._changed:
            is_full = len(self._waiting) >= self._patience.most
            if not is_full:
                self._waiting.append(record)
                self._changed.notify()
        if is_full:
            metrics.AUDIT_RECORDS.add(outcome="queue_full")

    def end(self, *, abort: Callable[[], None]) -> None:
        """Send the rest, each batch once; after ``end_seconds`` drop what is left.

        Args:
            abort: Ends a request that is under way, and every later one.
        """
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join(self._patience.end_seconds)
        self._stopped = True
        abort()
        self._thread.join(1.0)
        with self._changed:
            left = len(self._waiting)
            self._waiting.clear()
        if left:
            metrics.AUDIT_RECORDS.add(left, outcome="ended")
            _warn(left)

    def _run(self) -> None:
        while batch := self._next_batch():
            self._send(batch)

    def _next_batch(self) -> list[AuditRecord]:
        """Wait for records, and a little longer for more; return none at the end."""
        patience = self._patience
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ends)
            self._changed.wait_for(lambda: len(self._waiting) >= patience.batch or self._ends, patience.gather_seconds)
            if self._stopped:
                return []
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), patience.batch))]

    def _send(self, batch: list[AuditRecord]) -> None:
        """Send a batch, again and again if need be."""
        until, attempt = time.monotonic() + self._patience.keep_seconds, 0
        while not self._try(batch):
            pause = self._patience.pauses[min(attempt, len(self._patience.pauses) - 1)]
            if self._ends or time.monotonic() + pause > until:
                metrics.AUDIT_RECORDS.add(len(batch), outcome="ended" if self._ends else "not_taken")
                _warn(len(batch))
                return
            with self._changed:
                self._changed.wait_for(lambda: self._ends, pause)
            attempt += 1
        metrics.AUDIT_RECORDS.add(len(batch), outcome="sent")

    def _try(self, batch: list[AuditRecord]) -> bool:
        try:
            return self._export(batch)
        except Exception as error:  # noqa: BLE001 - an exporter may raise anything, and without its thread nothing is sent
            log.warning(f"records of the audit log could not be sent: {type(error).__name__}: {error}")
            return False


def _warn(dropped: int) -> None:
    log.warning(f"{counted(dropped, 'record')} of the audit log did not reach the collector")


def _log_record(record: AuditRecord, resource: Resource) -> ReadableLogRecord:
    """Return a record in OpenTelemetry's form."""
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    written = LogRecord(
        timestamp=round(record.time * 1e9),
        observed_timestamp=round(record.time * 1e9),
        context=context_within(record.traceparent),
        severity_text="INFO",
        severity_number=SeverityNumber.INFO,
        body=redact(record.message),
        attributes=_attributes(record.facts),
        event_name=EVENT,
    )
    return ReadableLogRecord(written, resource, InstrumentationScope(AUDIT_LOGGER))


def _attributes(facts: Mapping[str, str]) -> dict[str, Any]:
    """Return the attributes of a record without secrets; what is unknown has none."""
    attributes: dict[str, Any] = {name: redact(facts[fact]) for fact, name in _ATTRIBUTES.items() if facts.get(fact)}
    outcome, peer = facts.get("outcome", ""), facts.get("peer", "")
    if _REASON.fullmatch(outcome):
        attributes["error.type"] = outcome
    address = _PEER.fullmatch(peer)
    if address is not None:
        attributes |= {"network.peer.address": address["address"], "network.peer.port": int(address["port"])}
    elif peer:
        attributes["network.peer.address"] = peer
    return attributes
