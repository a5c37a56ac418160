"""Send the audit log to an OpenTelemetry collector, besides where the log goes anyway.

A call hands its record to a bounded queue and goes on; a thread sends what waits. The log on standard error stays the complete one:
a record that the collector never took is there, and counted.

OpenTelemetry's own batch processor drops the oldest records when its queue is full, counts none of them in our metrics, and its
exporters give up after a few attempts within one request's time, so the restart of a collector would lose records.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipway.distribution import require
from slipway.observability import metrics
from slipway.observability.audit_facts import AuditFacts
from slipway.observability.collector import read_connection
from slipway.observability.log_collector import Answer, Verdict, open_log_collector
from slipway.observability.logs import AUDIT_LOGGER
from slipway.observability.otlp import SEND_SECONDS, resource_attributes
from slipway.observability.telemetry import current_traceparent, is_traceparent
from slipway.texts import counted, redact

if TYPE_CHECKING:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

    from slipway.settings import Settings

log = logging.getLogger("slipway.observability")

EVENT = "slipway.audit"
"""Event name of every record."""

SENT, QUEUE_FULL, REFUSED = "sent", "queue_full", "refused"
"""Outcomes of records: the collector has it; it was dropped because too many waited, or because the collector refuses it."""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One line of the audit log.

    Attributes:
        time: When it was written, in seconds since the epoch.
        message: The line.
        facts: Its facts.
        traceparent: Its trace; empty without one.
        uid: Its id, by which a reader knows a record that was sent twice.
    """

    time: float
    message: str
    facts: AuditFacts
    traceparent: str
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))


@dataclass(frozen=True, slots=True)
class Patience:
    """How much a sender keeps, and how often it sends.

    Attributes:
        most: Records that wait or are being sent; a further one is dropped.
        most_unnamed: How many of them may be about callers that could not be identified, who can make as many as they like.
        batch: Records of one request.
        gather_seconds: Time in which records are gathered for a request.
        pauses: Seconds between the attempts to send a batch; the last value repeats.
        end_seconds: Time for the rest at the end.
    """

    most: int = 4096
    most_unnamed: int = 1024
    batch: int = 256
    gather_seconds: float = 0.5
    pauses: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 30.0)
    end_seconds: float = SEND_SECONDS


@contextlib.contextmanager
def sending_audit(settings: Settings, *, service: str, patience: Patience | None = None) -> Iterator[None]:
    """Send the audit log's records while the block runs, if the settings say so; at its end send the rest within 3 s.

    Args:
        settings: ``audit`` is ``otlp`` or empty (off).
        service: Name of the service that the records are from.
        patience: By default that of a service.

    Raises:
        ConfigurationError: A variable of OpenTelemetry cannot be used.
    """
    if not settings.audit:
        yield
        return
    require("telemetry", what=f"SLIPWAY_AUDIT={settings.audit}", otherwise="unset it")
    collector, resource = (
        open_log_collector(read_connection(settings, "logs", os.environ)),
        resource_attributes(service),
    )
    sender = Sender(lambda batch: collector.send(_request(batch, resource)), patience or Patience())
    handler = _Handler(sender)
    logger = logging.getLogger(AUDIT_LOGGER)
    logger.addHandler(handler)
    try:
        with metrics.reading(sender.gauges):
            yield
    finally:
        logger.removeHandler(handler)
        sender.end(abort=collector.close)


class _Handler(logging.Handler):
    """Hands records to a sender, as they are: only the sender's thread uses OpenTelemetry."""

    def __init__(self, sender: Sender) -> None:
        super().__init__()
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        """Hand over one record; whatever goes wrong, the call and the other handlers go on."""
        try:
            facts = AuditFacts(**record.audit)  # type: ignore[attr-defined]  # an extra
            self._sender.put(AuditRecord(record.created, record.getMessage(), facts, current_traceparent()))
        except Exception:  # noqa: BLE001 - as in logging's own handlers
            self.handleError(record)


class Sender:
    """Sends records in a thread of its own. What is sent and what is dropped is counted; nothing is raised, and nobody waits.

    Args:
        send: Sends a batch once. What it raises lies in the batch.
        patience: How much is kept, and how often it is sent.
    """

    def __init__(self, send: Callable[[Sequence[AuditRecord]], Answer], patience: Patience) -> None:
        self._send_once = send
        self._patience = patience
        self._waiting: deque[AuditRecord] = deque()
        self._kept = self._kept_unnamed = 0  # those that wait or are being sent
        self._oldest = 0.0  # time of the first that is being sent
        self._changed = threading.Condition()
        self._ends = False
        self._stopped = False
        self._problem = ""  # that the log has named
        for outcome in (SENT, QUEUE_FULL, REFUSED):  # an increase from zero can be seen only with a zero
            metrics.AUDIT_RECORDS.add(0, outcome=outcome)
        self._thread = threading.Thread(target=self._run, name="slipway-audit", daemon=True)
        self._thread.start()

    def put(self, record: AuditRecord) -> None:
        """Queue a record. If there is no room it is dropped, and not an older one: a flood of calls hides no earlier record."""
        is_unnamed = not record.facts.principal
        with self._changed:
            is_full = self._kept >= self._patience.most
            is_full |= is_unnamed and self._kept_unnamed >= self._patience.most_unnamed
            if not is_full:
                self._kept += 1
                self._kept_unnamed += is_unnamed
                self._waiting.append(record)
                self._changed.notify()
        if is_full:
            metrics.AUDIT_RECORDS.add(outcome=QUEUE_FULL)

    def gauges(self) -> Iterator[metrics.Sample]:
        """Return how long the oldest record has waited."""
        with self._changed:
            oldest = self._oldest or (self._waiting[0].time if self._waiting else 0.0)
        yield metrics.AUDIT_AGE, {}, max(time.time() - oldest, 0.0) if oldest else 0.0

    def end(self, *, abort: Callable[[], None]) -> None:
        """Send the rest, each batch once; after ``end_seconds`` give up what is left.

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
        if self._kept:  # too late to be counted: the page of metrics closes, too
            _warn(self._kept, self._problem or "the service ends")

    def _run(self) -> None:
        while batch := self._next_batch():
            self._send(batch)

    def _next_batch(self) -> list[AuditRecord]:
        """Wait for records, and a little longer for more; return none at the end."""
        patience = self._patience
        with self._changed:
            self._oldest = 0.0
            self._changed.wait_for(lambda: self._waiting or self._ends)
            self._changed.wait_for(lambda: len(self._waiting) >= patience.batch or self._ends, patience.gather_seconds)
            if self._stopped or not self._waiting:
                return []
            self._oldest = self._waiting[0].time
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), patience.batch))]

    def _send(self, batch: Sequence[AuditRecord]) -> None:
        """Send a batch; if the collector refuses it because of its content, send its halves, down to the record that is at fault."""
        answer = self._answer_to(batch)
        if answer.verdict is Verdict.LATER or (self._stopped and answer.verdict is not Verdict.TAKEN):
            return  # at the end
        if answer.verdict is Verdict.DIVIDE and len(batch) > 1:
            half = len(batch) // 2
            self._send(batch[:half])
            self._send(batch[half:])
            return
        refused = min(answer.rejected, len(batch)) if answer.verdict is Verdict.TAKEN else len(batch)
        with self._changed:
            self._kept -= len(batch)
            self._kept_unnamed -= sum(not record.facts.principal for record in batch)
        metrics.AUDIT_RECORDS.add(len(batch) - refused, outcome=SENT)
        if refused:
            metrics.AUDIT_RECORDS.add(refused, outcome=REFUSED)
            _warn(refused, answer.problem)

    def _answer_to(self, batch: Sequence[AuditRecord]) -> Answer:
        """Send a batch until the collector takes or refuses it; at the end, once."""
        for pause in self._pauses():
            is_last = self._ends
            answer = self._try(batch)
            if answer.verdict is Verdict.LATER and self._problem != answer.problem:
                log.warning(f"the audit log does not reach the collector, and is sent again: {answer.problem}")
            if answer.verdict is Verdict.TAKEN and self._problem:
                log.info("the audit log reaches the collector again")
            self._problem = answer.problem if answer.verdict is Verdict.LATER else ""
            if answer.verdict is not Verdict.LATER or is_last:
                return answer
            with self._changed:
                self._changed.wait_for(lambda: self._ends, pause)
        raise AssertionError("pauses never end")

    def _pauses(self) -> Iterator[float]:
        yield from self._patience.pauses
        while True:
            yield self._patience.pauses[-1]

    def _try(self, batch: Sequence[AuditRecord]) -> Answer:
        try:
            return self._send_once(batch)
        except Exception as error:  # noqa: BLE001 - without its thread nothing is sent
            return Answer(Verdict.DIVIDE, problem=f"{type(error).__name__}: {error}")


def _warn(lost: int, problem: str) -> None:
    log.warning(f"{counted(lost, 'record')} of the audit log did not reach the collector: {problem}")


def _request(batch: Sequence[AuditRecord], resource: Mapping[str, str]) -> ExportLogsServiceRequest:
    """Return a request with records in OpenTelemetry's form."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
    from opentelemetry.proto.logs.v1.logs_pb2 import ResourceLogs, ScopeLogs
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    scope = ScopeLogs(scope=InstrumentationScope(name=AUDIT_LOGGER), log_records=map(_log_record, batch))
    sent_by = Resource(attributes=_attributes(resource))
    return ExportLogsServiceRequest(resource_logs=[ResourceLogs(resource=sent_by, scope_logs=[scope])])


def _log_record(record: AuditRecord) -> LogRecord:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue
    from opentelemetry.proto.logs.v1.logs_pb2 import SEVERITY_NUMBER_INFO, LogRecord

    nanoseconds = round(record.time * 1e9)
    written = LogRecord(
        time_unix_nano=nanoseconds,
        observed_time_unix_nano=nanoseconds,
        severity_text="INFO",
        severity_number=SEVERITY_NUMBER_INFO,
        body=AnyValue(string_value=redact(record.message)),
        attributes=_attributes({**record.facts.attributes(), "log.record.uid": record.uid}),
        event_name=EVENT,
    )
    if is_traceparent(record.traceparent):
        _, trace_id, span_id, flags = record.traceparent.split("-")
        written.trace_id, written.flags = bytes.fromhex(trace_id), int(flags, 16)
        written.span_id = bytes.fromhex(span_id.strip("0") and span_id)  # zeros stand for a trace alone
    return written


def _attributes(facts: Mapping[str, str | int]) -> list[KeyValue]:
    """Return attributes without secrets."""
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

    return [
        KeyValue(
            key=name,
            value=AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=redact(value)),
        )
        for name, value in facts.items()
    ]
