"""Drive the engine of Kubernetes against the API server of the tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from slipway.contracts.engine import Engine, Submission, SubmissionEnd, SubmissionReport, WorkerStart
from slipway.engines.kubernetes.jobs import owner_label
from slipway.engines.kubernetes.service import SERVICE
from support.servers.jobs_api import JobsApi

ONE = Submission("slipway-m-0-1", "projects/p/exports/x:m:1", "merge", "p", "projects/p/exports/x")
BARE = WorkerStart("me", "slipway-coordinator:7070", "s3://bucket")


class Reports:
    """Reads an engine's reports."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._reports = engine, engine.watch()

    async def next(self, end: SubmissionEnd | None = None, *, node: str = "", says: str = "") -> SubmissionReport:
        """Wait for the next report that says something, and check it."""
        async with asyncio.timeout(30):
            report = await anext(self._reports)
            while not (report.end or report.node or report.message):
                report = await anext(self._reports)
        assert (report.end, report.node, says in report.message) == (end, node, True), report
        return report


@asynccontextmanager
async def running(worker: WorkerStart = BARE) -> AsyncIterator[Reports]:
    SERVICE.check("tests")
    engine = SERVICE.open("tests", worker)
    try:
        await engine.start()
        await engine.adopt()
        yield Reports(engine)
    finally:
        await engine.stop()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def submitted(api: JobsApi, reports: Reports) -> None:
    await reports.engine.submit(ONE)
    await until(lambda: ONE.id in api.names("jobs"))


def place(api: JobsApi, *, phase: str = "Running", node: str = "n", **status: Any) -> None:
    """Say of the Job's pod where it is."""
    labels = {**owner_label("me"), "batch.kubernetes.io/job-name": ONE.id}
    spec = {"containers": [{"name": "worker"}], **({"nodeName": node} if node else {})}
    api.put("pods", {"metadata": {"name": "p", "labels": labels}, "spec": spec, "status": {"phase": phase, **status}})


def finish(api: JobsApi, kind: str = "Complete", reason: str = "") -> None:
    condition = {"type": kind, "status": "True", "reason": reason}
    api.change("jobs", ONE.id, lambda job: job.update(status={"conditions": [condition]}))
