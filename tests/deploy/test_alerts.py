"""Which alerts fire, and what the dashboard shows, where one Prometheus watches several installations: it evaluates them itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.manifests.prometheus_rules import (
    dashboard_queries,
    fired,
    named,
    needs_promtool,
    prometheus_expects,
    series,
)

pytestmark = needs_promtool

RED = {"namespace": "red"}
BLUE = {"namespace": "blue"}
ACTIVE = "slipway_coordinator_active"
COORDINATORS = ("SlipwayNoActiveCoordinator", "SlipwayTwoActiveCoordinators")


def coordinators(installation: dict[str, str], *values: str, job: str = "kubernetes-pods") -> list[dict[str, str]]:
    """A series for each coordinator of an installation."""
    hosts = (f"10.0.{len(installation.get('namespace', ''))}.{number}:9464" for number in range(1, 9))
    labels = ({**installation, "job": job, "instance": host} for host in hosts)
    return [series(ACTIVE, one, value) for one, value in zip(labels, values, strict=False)]


def test_two_installations_with_an_active_coordinator_each_are_fine(tmp_path: Path) -> None:
    given = coordinators(RED, "1x30", "0x30") + coordinators(BLUE, "0x30", "1x30")
    prometheus_expects(tmp_path, given, at="20m", firing={name: [] for name in COORDINATORS})


@pytest.mark.parametrize("gone", ["0x30", "1x5 stale"], ids=["a-standby-is-left", "nothing-is-left"])
def test_an_installation_without_an_active_coordinator_is_named_whatever_the_others_have(
    tmp_path: Path, gone: str
) -> None:
    given = coordinators(RED, "1x30", "0x30") + coordinators(BLUE, gone)
    firing = {COORDINATORS[0]: [fired(COORDINATORS[0], BLUE)], COORDINATORS[1]: []}
    prometheus_expects(tmp_path, given, at="20m", firing=firing)


def test_two_active_coordinators_are_named_by_their_installation(tmp_path: Path) -> None:
    given = coordinators(RED, "1x30", "1x30") + coordinators(BLUE, "1x30", "0x30")
    firing = {COORDINATORS[0]: [], COORDINATORS[1]: [fired(COORDINATORS[1], RED)]}
    prometheus_expects(tmp_path, given, at="20m", firing=firing)


def test_clusters_may_have_namespaces_of_one_name(tmp_path: Path) -> None:
    given = coordinators({"cluster": "east", **RED}, "1x30") + coordinators({"cluster": "west", **RED}, "1x30")
    prometheus_expects(tmp_path, given, at="20m", firing={name: [] for name in COORDINATORS})


@pytest.mark.parametrize("value", ["0x30", "", "1x5 stale"], ids=["a-standby", "never", "no-more"])
def test_one_installation_needs_no_labels_of_its_own(tmp_path: Path, value: str) -> None:
    given = coordinators({}, value, job="slipway-coordinator") if value else []
    given.append(series("up", {"job": "prometheus"}, "1x30"))
    prometheus_expects(tmp_path, given, at="20m", firing={COORDINATORS[0]: [fired(COORDINATORS[0], {})]})


def test_a_worker_of_one_installation_serves_no_other(tmp_path: Path) -> None:
    stage = {"job": "kubernetes-pods", "instance": "10.0.0.1:9464", "stage": "merge"}
    given = [
        series("slipway_queue_tasks", {**RED, **stage}, "2x30"),
        series("slipway_workers", {**RED, **stage}, "0x30"),
        series("slipway_queue_tasks", {**BLUE, **stage}, "2x30"),
        series("slipway_workers", {**BLUE, **stage}, "1x30"),
    ]
    name = "SlipwayStageWithoutWorker"
    prometheus_expects(tmp_path, given, at="20m", firing={name: [fired(name, {**RED, "stage": "merge"})]})


def test_failures_of_one_installation_are_not_lost_among_the_successes_of_another(tmp_path: Path) -> None:
    common = {"job": "kubernetes-pods", "instance": "10.0.0.1:9464", "stage": "merge"}
    failed, good = {**common, "state": "failed", "reason": "STAGE_CRASHED"}, {**common, "state": "succeeded"}
    given = [
        series("slipway_attempts_total", {**RED, **failed}, "0+1x90"),
        series("slipway_attempts_total", {**BLUE, **good}, "0+9x90"),
    ]
    name = "SlipwayAttemptsFail"
    prometheus_expects(tmp_path, given, at="80m", firing={name: [fired(name, {**RED, "stage": "merge"})]})


def test_a_store_that_falters_is_that_of_its_installation(tmp_path: Path) -> None:
    common = {"job": "kubernetes-pods", "instance": "10.0.0.1:9464", "operation": "reading"}
    given = [
        series("slipway_store_requests_total", {**RED, **common, "outcome": "retried"}, "0+5x90"),
        series("slipway_store_requests_total", {**BLUE, **common, "outcome": "ok"}, "0+500x90"),
    ]
    name = "SlipwayStoreFalters"
    prometheus_expects(tmp_path, given, at="60m", firing={name: [fired(name, RED)]})


def test_a_receiver_whose_events_wait_is_named(tmp_path: Path) -> None:
    age, common = "slipway_webhook_oldest_seconds", {"job": "kubernetes-pods", "instance": "10.0.0.1:9464"}
    given = [
        series(age, {**RED, **common, "receiver": "portal"}, "0+60x90"),
        series(age, {**RED, **common, "receiver": "chat"}, "0x90"),
        series(age, {**BLUE, **common, "receiver": "portal"}, "30x90"),
    ]
    name = "SlipwayWebhooksWait"
    prometheus_expects(tmp_path, given, at="50m", firing={name: []})
    prometheus_expects(tmp_path, given, at="70m", firing={name: [fired(name, {**RED, "receiver": "portal"})]})


def test_dropped_records_of_the_audit_log_are_an_alert(tmp_path: Path) -> None:
    records, common = "slipway_audit_records_total", {"job": "kubernetes-pods", "instance": "10.0.0.1:9464"}
    given = [
        series(records, {**RED, **common, "outcome": "refused"}, "0x20 3x20"),
        series(records, {**RED, **common, "outcome": "queue_full"}, "0x40"),
        series(records, {**BLUE, **common, "outcome": "sent"}, "0+5x40"),
    ]
    name = "SlipwayAuditRecordsDropped"
    prometheus_expects(tmp_path, given, at="10m", firing={name: []})
    prometheus_expects(tmp_path, given, at="25m", firing={name: [fired(name, RED)]})


def test_records_of_the_audit_log_that_wait_are_an_alert(tmp_path: Path) -> None:
    age, common = "slipway_audit_oldest_seconds", {"job": "kubernetes-pods", "instance": "10.0.0.1:9464"}
    given = [series(age, {**RED, **common}, "0+60x40"), series(age, {**BLUE, **common}, "0 1 0 1 0x40")]
    name = "SlipwayAuditRecordsWait"
    prometheus_expects(tmp_path, given, at="9m", firing={name: []})
    prometheus_expects(tmp_path, given, at="12m", firing={name: [fired(name, RED)]})


def test_artifacts_that_stay_unmeasured_are_an_alert(tmp_path: Path) -> None:
    left = "slipway_project_unmeasured_artifacts"
    common = {"job": "kubernetes-pods", "instance": "10.0.0.1:9464"}
    given = [
        series(left, {**RED, **common, "project": "stuck"}, "1x120"),
        series(left, {**RED, **common, "project": "busy"}, "9x50 0 9x69"),
    ]
    name = "SlipwayProjectsNotMeasured"
    prometheus_expects(tmp_path, given, at="55m", firing={name: []})
    prometheus_expects(tmp_path, given, at="65m", firing={name: [fired(name, {**RED, "project": "stuck"})]})


def test_the_dashboard_shows_the_installation_that_is_chosen(tmp_path: Path) -> None:
    given = coordinators(RED, "1x30", "0x30") + coordinators(BLUE, "1x30", "1x30")
    (number,) = (i for i, query in enumerate(dashboard_queries()) if ACTIVE in query and query.startswith("sum("))
    queries = [
        {"expr": dashboard_queries(namespace=name)[number], "exp_samples": [{"labels": "{}", "value": value}]}
        for name, value in (("red", 1), ("blue", 2))
    ]
    prometheus_expects(tmp_path, given, at="20m", queries=queries)


@pytest.mark.parametrize(
    ("job", "ever_up", "ours", "alerted"),
    [
        ("slipway-coordinator", False, ACTIVE, True),
        ("kubernetes-pods", True, ACTIVE, True),
        ("kubernetes-pods", True, "slipway_worker_slots", True),
        ("kubernetes-pods", True, "somebody_else_s_metric", False),
    ],
)
@pytest.mark.parametrize("namespace", ["", "red"])
def test_a_part_that_is_down_is_one_of_ours_whatever_its_job(
    tmp_path: Path, job: str, ever_up: bool, ours: str, alerted: bool, namespace: str
) -> None:
    """Up for ten minutes, if ever, then down; Prometheus evaluates the alert and the panel itself."""
    labels = {"job": job, "instance": "10.0.0.7:9464"} | ({"namespace": namespace} if namespace else {})
    names = ("process_resident_memory_bytes", ours)
    given = [series("up", labels, f"{int(ever_up)}x10 0x20")]
    given += [series(name, labels, "5x10 stale") for name in names if ever_up]
    down = [fired("SlipwayPartDown", labels)] if alerted else []
    prometheus_expects(tmp_path, given, at="25m", firing={"SlipwayPartDown": down})
    panel = next(query for query in dashboard_queries(namespace=namespace) if names[0] in query)
    memory = [{"labels": named(names[0], labels), "value": 5}] if alerted and ever_up else []
    prometheus_expects(tmp_path, given, at="5m", queries=[{"expr": panel, "exp_samples": memory}])
