"""What the API server refuses, forgets or breaks, and names that are taken: the engine bears it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("lightkube", reason="pip install 'slipway-ml[kubernetes]'")

from slipway.contracts.engine import Submission, SubmissionEnd
from slipway.engines.kubernetes import cluster as cluster_module
from slipway.engines.kubernetes import engine as engine_module
from slipway.engines.kubernetes.jobs import owner_label
from support.servers.job_reports import ONE, Reports, finish, place, running, submitted, until
from support.servers.jobs_api import JobsApi, Refusal, worker_deployment

End = SubmissionEnd


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_a_job_is_made_when_the_server_takes_it(api: JobsApi, code: int) -> None:
    api.refusals += [Refusal("POST", "jobs", code, "too many") for _ in range(3)]
    async with running_past_the_check(api) as reports:
        await reports.engine.submit(ONE)
        await reports.next(says="too many")
        await until(lambda: ONE.id in api.names("jobs"))
        assert api.count("POST", "jobs") == 5  # the check, three that were refused, and this one


@asynccontextmanager
async def running_past_the_check(api: JobsApi) -> AsyncIterator[Reports]:
    """Run an engine whose own first call meets no refusal."""
    refusals, api.refusals = api.refusals, []
    async with running() as reports:
        api.refusals = refusals
        yield reports


async def test_the_pause_that_the_server_asks_for_is_kept(api: JobsApi) -> None:
    async with running() as reports:
        api.refusals.append(Refusal("POST", "jobs", 429, headers={"Retry-After": "1"}))
        began = time.monotonic()
        await submitted(api, reports)
        assert time.monotonic() - began > 0.9


async def test_a_full_quota_and_missing_rights_wait_and_a_refused_job_fails(api: JobsApi) -> None:
    async with running() as reports:
        quota = 'jobs.batch "x" is forbidden: exceeded quota: compute'
        api.refusals.append(Refusal("POST", "jobs", 403, quota))
        await reports.engine.submit(ONE)
        await reports.next(says="exceeded quota")
        await until(lambda: ONE.id in api.names("jobs"))
        api.refusals += [Refusal("POST", "jobs", 401, "Unauthorized"), Refusal("POST", "jobs", 403, "cannot create")]
        other = Submission("slipway-m-0-2", "projects/p/exports/x:m:2", "merge", "p", "projects/p/exports/x")
        await reports.engine.submit(other)
        await reports.next(says="Unauthorized")
        await reports.next(says="cannot create")
        await until(lambda: other.id in api.names("jobs"))
        api.refusals.append(Refusal("POST", "jobs", 422, "is invalid"))
        third = Submission("slipway-m-0-3", "projects/p/exports/x:m:3", "merge", "p", "projects/p/exports/x")
        await reports.engine.submit(third)
        await reports.next(End.FAILED, says="is invalid")


async def test_a_job_that_was_made_without_a_clear_answer_is_deleted_if_it_was_cancelled_meanwhile(
    api: JobsApi,
) -> None:
    async with running() as reports:
        api.refusals.append(Refusal("POST", "jobs", 500, done_after=0.5))
        await reports.engine.submit(ONE)
        await until(lambda: not api.refusals)
        await reports.engine.cancel(ONE.id)
        await reports.next(End.CANCELLED)
        assert api.names("jobs") == []
        await until(lambda: ONE.id in api.names("jobs") and "deletionTimestamp" in api.one("jobs", ONE.id)["metadata"])


async def test_a_job_that_was_made_without_a_clear_answer_is_deleted_if_it_is_refused_then(api: JobsApi) -> None:
    async with running() as reports:
        api.refusals += [Refusal("POST", "jobs", 500, done_after=0), Refusal("POST", "jobs", 422, "is invalid")]
        await reports.engine.submit(ONE)
        await reports.next(says="not now")
        await reports.next(End.FAILED, says="is invalid")
        await until(lambda: not api.names("jobs"))


async def test_a_deployment_that_is_no_template_stops_no_other(api: JobsApi, caplog: pytest.LogCaptureFixture) -> None:
    async with running() as reports:
        api.put("deployments", worker_deployment("a-broken-one", args=["--slots=1"]))
        await submitted(api, reports)
        api.remove("jobs", ONE.id)
        await reports.next(End.PREEMPTED, says="deleted")
        await submitted(api, reports)
    assert [each.getMessage() for each in caplog.records if "a-broken-one" in each.getMessage()] == [
        "Deployment a-broken-one of workers is no template, KeyError: '--stage'"
    ]


async def test_the_same_submission_twice_is_one_job(api: JobsApi) -> None:
    async with running() as first:
        await submitted(api, first)
        finish(api)
        await first.next(End.EXITED)
        await first.engine.submit(ONE)  # as after a restart that saw nothing of it
        await first.next(End.EXITED)
        assert api.names("jobs") == [ONE.id]


async def test_a_conflict_of_requests_is_no_job_that_exists(api: JobsApi) -> None:
    async with running() as reports:
        conflict = "the quota was modified; apply your changes to the latest version and try again"
        api.refusals.append(Refusal("POST", "jobs", 409, conflict, reason="Conflict"))
        await reports.engine.submit(ONE)
        await reports.next(says=conflict)
        await until(lambda: ONE.id in api.names("jobs"))


async def test_a_job_that_exists_and_cannot_be_read_yet_is_found(api: JobsApi) -> None:
    async with running() as reports:
        await submitted(api, reports)
        finish(api)
        await reports.next(End.EXITED)
        api.refusals += [Refusal("GET", "jobs", 500), Refusal("GET", "jobs", 404)]
        await reports.engine.submit(ONE)
        await reports.next(says="already exists")
        await reports.next(End.EXITED)


async def test_a_job_of_this_name_that_is_not_ours_is_left_alone(api: JobsApi) -> None:
    api.put("jobs", {"metadata": {"name": ONE.id, "labels": owner_label("you")}, "spec": {}})
    async with running() as reports:
        await reports.engine.submit(ONE)
        await reports.next(End.FAILED, says="not ours")
        await reports.engine.cancel(ONE.id)
    assert api.names("jobs") == [ONE.id]


@pytest.mark.parametrize("fault", ["forgotten", "broken"])
async def test_ends_are_known_although_a_watch_was_lost(api: JobsApi, fault: str) -> None:
    async with running() as reports:
        await submitted(api, reports)
        place(api)
        await reports.next(node="n")
        watches = api.count("WATCH", "jobs")
        api.refusals += [Refusal("WATCH", "jobs", 500), Refusal("WATCH", "jobs", 429), Refusal("WATCH", "pods", 500)]
        api.forget() if fault == "forgotten" else api.break_watches()
        finish(api)
        await reports.next(End.EXITED, node="n")
        lists = 2 if fault == "forgotten" else 1
        assert api.count("GET", "jobs") == lists
        assert api.count("WATCH", "jobs") > watches


async def test_a_job_that_went_while_nothing_was_watched_is_missed(api: JobsApi) -> None:
    async with running() as reports:
        await submitted(api, reports)
        place(api)
        await reports.next(node="n")
        with api.lock:
            api.objects["jobs"].clear()
        api.forget()
        await reports.next(End.PREEMPTED, node="n", says="deleted")


async def test_an_error_that_nobody_foresaw_is_logged_and_the_engine_goes_on(
    api: JobsApi, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as reports:
        await submitted(api, reports)
        api.change("jobs", ONE.id, lambda job: job.update(status={"conditions": ["not a condition"]}))
        await until(lambda: "which goes on" in caplog.text)
        finish(api)
        await reports.next(End.EXITED)


async def test_a_silent_watch_is_begun_again_without_a_warning(
    api: JobsApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_module, "_SILENT_SECONDS", 0.2)
    async with running() as reports:
        await until(lambda: api.count("WATCH", "jobs") > 2)
        monkeypatch.undo()
        await submitted(api, reports)
        finish(api)
        await reports.next(End.EXITED)
    assert "cannot be watched" not in caplog.text


async def test_a_job_that_ends_and_goes_at_once_has_ended(api: JobsApi) -> None:
    async with running() as reports:
        await submitted(api, reports)
        with api.lock:
            finish(api)
            api.remove("jobs", ONE.id)
        await reports.next(End.EXITED)


async def test_a_cancelled_job_whose_pod_never_goes_is_cancelled_all_the_same(
    api: JobsApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(engine_module, "_CANCEL_SECONDS", 0.3)
    async with running() as reports:
        await submitted(api, reports)
        place(api)
        await reports.next(node="n")
        await reports.engine.cancel(ONE.id)
        await reports.next(End.CANCELLED, node="n")


async def test_pods_are_looked_up_only_for_jobs_whose_pods_end_is_not_known(api: JobsApi) -> None:
    for number in range(20):
        labels, name = owner_label("me"), f"slipway-m-{number}-1"
        named = {
            "name": name,
            "labels": labels,
            "annotations": {"slipway.dev/attempt": f"projects/p/exports/x:m{number}:1"},
        }
        done = {"conditions": [{"type": "Complete", "status": "True"}]}
        api.put("jobs", {"metadata": named, "spec": {}, "status": done})
        pod = {"name": f"p{number}", "labels": {**labels, "batch.kubernetes.io/job-name": name}}
        phase = "Succeeded" if number else "Running"
        api.put("pods", {"metadata": pod, "spec": {"nodeName": "n"}, "status": {"phase": phase}})
    async with running() as reports:
        for _ in range(20):
            await reports.next(End.EXITED, node="n")
    assert api.count("GET", "pods") == 2  # the first list, and the Job whose pod had not ended then


async def test_a_watch_that_the_server_ends_goes_on(api: JobsApi) -> None:
    api.watch_seconds = 0.1
    async with running() as reports:
        await submitted(api, reports)
        await until(lambda: api.count("WATCH", "jobs") > 3)
        finish(api)
        await reports.next(End.EXITED)
        assert api.count("GET", "jobs") == 1
