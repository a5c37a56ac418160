"""All Prometheus metrics, and the page that serves them.

Declaring and counting cost nothing until :func:`serving` opens the page and imports the client library. Names follow Prometheus'
conventions: base units in the name, counters end in ``_total``. ``docs/operations.md`` has the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipway.distribution import own_version
from slipway.errors import ServiceError
from slipway.observability.telemetry import recorded_trace_id
from slipway.texts import number_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0)
_BYTES = tuple(float(1 << power) for power in range(27, 39))  # 128 MiB to 256 GiB


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of time series.

    Attributes:
        name: Name in Prometheus.
        help: Description.
        labels: Names of its labels; every combination of values is a time series, so no label is an id.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A value that only grows."""

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Add to the counter."""
        if _served is not None:
            _with_labels(_served.families[self.name], labels).inc(amount)


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """The distribution of values over ranges."""

    buckets: tuple[float, ...] = _SECONDS

    def observe(self, value: float, *, traceparent: str = "", **labels: str) -> None:
        """Record one value.

        Args:
            value: The value.
            traceparent: Span that took this long or this much. If it is recorded, its trace is the exemplar of the value's range, which
                a page in the OpenMetrics format shows.
            labels: Values of the labels.
        """
        if _served is not None:
            trace_id = recorded_trace_id(traceparent)
            exemplar = {"trace_id": trace_id} if trace_id else None
            _with_labels(_served.families[self.name], labels).observe(value, exemplar)


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A value that is read when the page is requested."""


Sample = tuple[Gauge, Mapping[str, str], float]
Read = Callable[[], Iterable[Sample]]

# The coordinator's
QUEUE_TASKS = Gauge("slipway_queue_tasks", "Attempts that wait for a worker.", ("stage",))
QUEUE_AGE = Gauge("slipway_queue_oldest_seconds", "Time that the oldest waiting attempt has waited.", ("stage",))
LEASED_TASKS = Gauge("slipway_leased_tasks", "Attempts that workers run.", ("stage",))
ACTIVE = Gauge("slipway_coordinator_active", "1 for the active coordinator, 0 for a standby.")
WORKERS = Gauge("slipway_workers", "Workers that reported recently, by stage.", ("stage",))
EXPORTS_CREATED = Counter("slipway_exports_created_total", "Runs of exports that began, retries included.")
EXPORTS_ENDED = Counter("slipway_exports_ended_total", "Runs of exports that ended, by final state.", ("state",))
EXPORT_SECONDS = Histogram("slipway_export_duration_seconds", "Duration of a run of an export.", ("state",))
ATTEMPTS = Counter(
    "slipway_attempts_total",
    "Attempts that ended; `reason` is empty unless the attempt failed.",
    ("stage", "state", "reason"),
)
ATTEMPT_SECONDS = Histogram(
    "slipway_attempt_duration_seconds",
    "Duration of an attempt, from the grant of its lease to its end.",
    ("stage", "state"),
)
RETRIES = Counter(
    "slipway_retries_total", "Attempts after a failure, by the recovery rule that led to them.", ("stage", "rule")
)
QUEUE_SECONDS = Histogram("slipway_queue_wait_seconds", "Time that an attempt waited for a worker.", ("stage",))
LEASES_GRANTED = Counter("slipway_leases_granted_total", "Leases given to workers.", ("stage", "project"))
LEASES_EXPIRED = Counter("slipway_lease_expiries_total", "Leases taken back from silent workers.", ("stage",))
LEASES_REFUSED = Counter("slipway_late_results_total", "Results refused because the lease was lost.")
PROJECT_TASKS = Gauge(
    "slipway_project_tasks", "Attempts of a project that wait for a worker or run, by state.", ("project", "state")
)
PROJECT_EXPORTS = Gauge("slipway_project_exports", "Exports of a project with tasks that wait or run.", ("project",))
PROJECT_STORED_BYTES = Gauge(
    "slipway_project_stored_bytes", "Size of a project's artifacts in the store.", ("project",)
)
PROJECT_UNMEASURED_ARTIFACTS = Gauge(
    "slipway_project_unmeasured_artifacts", "Artifacts of a project whose size is not known yet.", ("project",)
)
PROJECT_GPU_SECONDS = Gauge(
    "slipway_project_gpu_seconds",
    "Seconds of a project's tasks that need or prefer a GPU on GPUs, today and on the 29 days before.",
    ("project",),
)
CLIENT_BYTES = Counter(
    "slipway_client_bytes_total",
    "Bytes of artifacts that the coordinator received from clients or sent to them.",
    ("direction",),
)
CLIENT_REFUSALS = Counter(
    "slipway_client_transfers_refused_total",
    "Refused uploads (received) and downloads (sent) of files, by reason.",
    ("direction", "reason"),
)
WEBHOOK_ATTEMPTS = Counter(
    "slipway_webhook_attempts_total",
    "Attempts to send an event to a receiver of webhooks, by outcome: delivered, failed or gone.",
    ("receiver", "outcome"),
)
WEBHOOK_LOST = Counter(
    "slipway_webhook_events_lost_total",
    "Events that a receiver did not take in time or does not want (410), that were too many, or that could not be made.",
    ("receiver",),
)
WEBHOOK_WAITING = Gauge(
    "slipway_webhook_events_waiting", "Events that a receiver of webhooks has yet to take.", ("receiver",)
)
WEBHOOK_AGE = Gauge(
    "slipway_webhook_oldest_seconds", "Time that the oldest event has waited for its receiver.", ("receiver",)
)

# A worker's
SLOTS = Gauge("slipway_worker_slots", "Number of tasks that this worker can run at the same time.")
RUNNING = Gauge("slipway_worker_running_tasks", "Tasks that this worker runs now.", ("stage",))
WITHOUT_ROOM = Gauge(
    "slipway_worker_without_room", "1 while this worker takes no tasks because its disk is nearly full, otherwise 0."
)
SCRATCH_FREE = Gauge("slipway_worker_scratch_free_bytes", "Free disk space for this worker's work folders.")
STAGE_MEMORY = Gauge("slipway_stage_memory_bytes", "Resident memory of the running stages' processes.", ("stage",))
STAGE_SECONDS = Histogram(
    "slipway_stage_duration_seconds",
    "Duration of a task on a worker, transfers included; reused results do not count.",
    ("stage", "outcome"),
)
STAGE_PEAK = Histogram(
    "slipway_stage_peak_memory_bytes", "Peak resident memory of a stage's processes.", ("stage",), buckets=_BYTES
)
PRESSURE = Counter(
    "slipway_stage_pressure_total",
    "Attempts that came close to a limit: memory (their own), container_memory, machine_memory or disk.",
    ("stage", "kind"),
)
CACHE = Counter(
    "slipway_result_lookups_total",
    "Lookups of a task's stored result: hit or miss.",
    ("stage", "result"),
)
TRANSFERRED = Counter(
    "slipway_artifact_bytes_total", "Bytes of artifacts that workers fetched or stored.", ("stage", "direction")
)
TRANSFER_SECONDS = Histogram(
    "slipway_artifact_transfer_duration_seconds", "Time to fetch or store one artifact.", ("direction",)
)

# Metrics of every process that serves them
BUILD_INFO = Gauge("slipway_build_info", "1, with the version of this program.", ("version",))

# Metrics of every server
CALLS = Counter("slipway_calls_total", "Calls that ended, by method and gRPC status code.", ("method", "code"))
CALL_SECONDS = Histogram(
    "slipway_call_duration_seconds",
    "Duration of a call with a single response; that of Synchronize includes its waiting for work.",
    ("method",),
)
CALLS_REFUSED = Counter(
    "slipway_calls_refused_total",
    "Calls refused before they reached a service, or ended because they took too long, by reason.",
    ("reason",),
)

AUDIT_RECORDS = Counter(
    "slipway_audit_records_total",
    "Records of the audit log for the collector, by outcome: sent, or dropped (queue_full or refused).",
    ("outcome",),
)
AUDIT_AGE = Gauge(
    "slipway_audit_oldest_seconds", "Time that the oldest record of the audit log has waited for the collector."
)

# Metrics of every process that uses a bucket
STORE_REQUESTS = Counter(
    "slipway_store_requests_total",
    "Requests to the S3 service, by operation and outcome: ok, missing, retried or failed.",
    ("operation", "outcome"),
)
STORE_BYTES = Counter(
    "slipway_store_bytes_total", "Bytes of objects sent to the S3 service or received from it.", ("direction",)
)
NODE_CACHE_FILES = Counter(
    "slipway_node_cache_files_total", "Files requested from the node's cache: hit or miss.", ("result",)
)
NODE_CACHE_FILE_BYTES = Counter(
    "slipway_node_cache_file_bytes_total", "Bytes of files requested from the node's cache: hit or miss.", ("result",)
)
NODE_CACHE_EVICTIONS = Counter("slipway_node_cache_evictions_total", "Artifacts evicted from the node's cache.")
NODE_CACHE_EVICTED_BYTES = Counter("slipway_node_cache_evicted_bytes_total", "Bytes evicted from the node's cache.")
NODE_CACHE_BYTES = Gauge("slipway_node_cache_bytes", "Size of the node's cache, which all processes of the node share.")

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


@dataclass
class _Served:
    registry: CollectorRegistry
    families: dict[str, Any] = field(default_factory=dict)


_served: _Served | None = None


_reads: list[Read] = []


@contextlib.contextmanager
def reading(read: Read) -> Iterator[None]:
    """Read gauges from a function while the block runs; it is called in another thread when the page is requested."""
    _reads.append(read)
    try:
        yield
    finally:
        _reads.remove(read)


@contextlib.contextmanager
def serving(address: str) -> Iterator[int]:
    """Serve the metrics at ``http://ADDRESS/metrics`` while the block runs; do nothing for an empty address.

    Args:
        address: ``HOST:PORT``; port 0 takes a free one.

    Yields:
        The port; 0 for an empty address.

    Raises:
        ServiceError: the address cannot be bound.
    """
    global _served  # noqa: PLW0603 - a process has one page, and counting must be free without one
    if not address:
        yield 0
        return
    from prometheus_client import start_http_server

    host, port = _split_address(address)
    served = _Served(_registry())
    for metric in METRICS:
        family = _family(metric, served.registry)
        if family is not None:
            served.families[metric.name] = family
    try:
        server, thread = start_http_server(port, host, registry=served.registry)
    except OSError as error:
        raise _address_error(address, str(error)) from error
    _served = served
    try:
        yield int(server.server_port)
    finally:
        _served = None
        server.shutdown()
        server.server_close()
        thread.join()


def _registry() -> CollectorRegistry:
    """Return a registry with the figures of this process and the gauges."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import Collector

    build: Sample = (BUILD_INFO, {"version": own_version() or "unknown"}, 1.0)

    class Gauges(Collector):
        def collect(self) -> Iterator[Family]:
            families: dict[str, GaugeMetricFamily] = {}
            for gauge, labels, value in (build, *(sample for read in list(_reads) for sample in read())):
                if gauge.name not in families:
                    families[gauge.name] = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
                families[gauge.name].add_metric([labels[name] for name in gauge.labels], value)
            yield from families.values()

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(Gauges())
    return registry


def _family(metric: Metric, registry: CollectorRegistry) -> Any:
    """Return the client library's object; None for gauges, which are read on request."""
    import prometheus_client as client

    match metric:
        case Counter():
            return client.Counter(metric.name, metric.help, metric.labels, registry=registry)
        case Histogram():
            return client.Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)
        case _:
            return None


def _with_labels(family: Any, labels: Mapping[str, str]) -> Any:
    return family.labels(**labels) if labels else family


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    number = number_of(port, most=65535)
    if not host or number is None:
        raise _address_error(address, "it is not HOST:PORT")
    return host.strip("[]"), number


def _address_error(address: str, problem: str) -> ServiceError:
    return ServiceError(
        f"metrics cannot be served at {address}: {problem}",
        reason="REQUEST_INVALID",
        remedy="give a free HOST:PORT, such as 127.0.0.1:9090",
        about={"address": address},
    )
