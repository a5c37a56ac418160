"""The engine as the coordinator uses it: a Job for each submission, and what the API server says of these Jobs and their pods."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from slipway.contracts.engine import Submission, SubmissionEnd, SubmissionReport, WorkerStart
from slipway.engines.kubernetes.cluster import DEPLOYMENTS, JOBS, MISSING, PODS, SECRETS, CallError, Cluster
from slipway.engines.kubernetes.following import Backoff, Following, keep_on
from slipway.engines.kubernetes.jobs import ATTEMPT, job_of, owner_label, secret_name, secret_of
from slipway.engines.kubernetes.options import JobOptions
from slipway.engines.kubernetes.states import Object, State, has_ended, is_finished, state_of
from slipway.engines.kubernetes.templates import (
    LABELS,
    TEMPLATE_FAULTS,
    Template,
    choose,
    read_templates,
    template_of,
)
from slipway.errors import ConfigurationError, ServiceError

log = logging.getLogger("slipway.engine.kubernetes")

_TICK_SECONDS = 2.0
_CANCEL_SECONDS = 60.0
"""How long a cancelled Job may wait for its pod; on a lost node it waits for many minutes."""
_MOST_LOOKUPS = 8
"""So many lists of a Job's pods at a time: after a restart, many Jobs may have ended."""
_POD_OF = "batch.kubernetes.io/job-name"
_END = SubmissionEnd


@dataclass
class _Known:
    """A submission that has not ended. ``since`` is when its state began, and it was cancelled at a time, by :func:`time.monotonic`."""

    attempt: str
    job: Object | None = None
    pods: dict[str, Object] = field(default_factory=dict)
    created: bool = False
    cancelled_at: float = inf
    ending: bool = False
    state: State = field(default_factory=State)
    since: float = inf

    @property
    def cancelled(self) -> bool:
        return self.cancelled_at < inf


class KubernetesEngine:
    """Runs submissions as Jobs of one namespace.

    Args:
        cluster: The namespace.
        worker: How workers start.
        options: What every Job has.
    """

    def __init__(self, cluster: Cluster, worker: WorkerStart, *, options: JobOptions) -> None:
        self._cluster, self._worker, self._options = cluster, worker, options
        self._known: dict[str, _Known] = {}
        self._reports: asyncio.Queue[SubmissionReport] = asyncio.Queue()
        self._adopted = False
        self._faults: set[str] = set()
        self._lookups = asyncio.Semaphore(_MOST_LOOKUPS)
        self._running: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._labels = labels = owner_label(worker.owner) | options.labels
        self._jobs = Following(
            cluster, JOBS, labels, on_list=self._note_jobs, on_event=self._note_job, before=self._created
        )
        self._pods = Following(cluster, PODS, labels, on_list=self._note_pods, on_event=self._note_pod)

    async def start(self) -> None:
        """Check that there are templates and that we may make Jobs; find those of an earlier process.

        Raises:
            ModelExportError: ``ENGINE_UNAVAILABLE``, ``ENGINE_UNFIT`` or ``CONFIGURATION_INVALID``.
        """
        try:
            templates = await self._templates()
            if not templates:
                nothing = "it has no Deployment of workers, whose pods would be the templates of Jobs"
                raise self._unfit("; ".join(sorted(self._faults)) or nothing)
            await self._put_secret()
            probe = Submission("slipway-probe", "probe", sorted(templates[0].stages)[0], "probe", "probe")
            job = job_of(probe, templates[0], self._worker, self._options)
            await self._cluster.create(JOBS, job, dry_run=True)
            await self._jobs.read()
            await self._pods.read()
        except TEMPLATE_FAULTS as error:
            raise self._unfit(f"a Deployment of workers is no template, {type(error).__name__}: {error}") from error
        except CallError as error:
            if error.code in {400, 401, 403, 404, 422} and not error.passes:
                raise self._unfit(str(error)) from error
            raise ServiceError(
                f"the API server {self._cluster.server} does not respond: {error}",
                reason="ENGINE_UNAVAILABLE",
                remedy="see with kubectl that the cluster responds",
                about={"server": self._cluster.server},
            ) from error
        for work in (self._jobs.keep, self._pods.keep, self._tick):
            self._spawn(keep_on(work), self._running)

    async def adopt(self) -> Sequence[SubmissionReport]:
        """Return the Jobs of an earlier process, also those that have ended since: their ends are reports."""
        adopted = []
        for name, one in self._known.items():
            assert one.job is not None
            state = state_of(one.job, one.pods.values())
            if state.end is None:
                one.state, one.since = state, time.monotonic()
            adopted.append(SubmissionReport(name, one.attempt, state.node))
        self._adopted = True
        for name in list(self._known):
            self._look(name)
        return adopted

    async def submit(self, submission: Submission) -> None:
        """Make the Job of a submission, as soon as the API server takes it."""
        one = self._known.setdefault(submission.id, _Known(submission.attempt))
        self._spawn(self._create(submission, one), self._calls)

    async def cancel(self, submission_id: str) -> None:
        """Delete a Job; its pod has four seconds."""
        one = self._known.get(submission_id)
        if one is not None and not one.cancelled:
            one.cancelled_at = time.monotonic()
            self._spawn(self._delete(submission_id, waits_for_pods=True), self._calls)

    async def watch(self) -> AsyncIterator[SubmissionReport]:
        """Yield reports."""
        while True:
            yield await self._reports.get()

    async def stop(self) -> None:
        """Finish the calls that are under way, and disconnect. The Secret is removed with the last Job."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_SECONDS):
                await asyncio.gather(*self._calls, return_exceptions=True)
        if self._adopted and secret_of(self._worker) is not None and all(one.cancelled for one in self._known.values()):
            with contextlib.suppress(CallError):
                await self._cluster.delete(SECRETS, secret_name(self._worker.owner))
        await self._cluster.close()

    # Calls

    async def _templates(self) -> list[Template]:
        if self._options.templates is not None:
            return await asyncio.to_thread(read_templates, self._options.templates)
        deployments, _ = await self._cluster.list(DEPLOYMENTS, LABELS | self._options.labels)
        return [one for one in map(self._template, deployments) if one is not None]

    def _template(self, deployment: Object) -> Template | None:
        """Return a template; None for what is none, with a warning: stages of the others run."""
        try:
            return template_of(deployment)
        except TEMPLATE_FAULTS as error:
            what = f"Deployment {deployment['metadata']['name']} of workers is no template"
            fault = f"{what}, {type(error).__name__}: {error}"
            if fault not in self._faults:
                self._faults.add(fault)
                log.warning(fault)
            return None

    async def _put_secret(self) -> None:
        secret = secret_of(self._worker)
        if secret is None:
            return
        try:
            await self._cluster.create(SECRETS, secret)
        except CallError as error:
            if not error.exists:
                raise
            await self._cluster.replace(SECRETS, secret)

    async def _create(self, submission: Submission, one: _Known) -> None:
        """Make a Job, and wait while the API server cannot."""
        backoff, unclear, failed = Backoff(), False, None
        while self._known.get(submission.id) is one and not one.cancelled:
            try:
                template = choose(await self._templates(), submission)
                if template is None:
                    gpus = " or ".join(str(each) for each in submission.requirements.any_of)
                    message = f"no template of namespace {self._cluster.namespace} runs {submission.stage}"
                    failed = State(end=_END.UNSCHEDULABLE, message=f"{message} {gpus and f'on {gpus}'}")
                    break
                await self._cluster.create(JOBS, job_of(submission, template, self._worker, self._options))
            except CallError as error:
                unclear = unclear or error.unclear
                if error.exists and await self._take_existing(submission, one):
                    unclear = False
                    break
                if error.refused:
                    failed = State(end=_END.FAILED, message=f"the API server refuses its Job: {error}")
                    break
                self._report(submission.id, State(message=f"the API server does not take its Job yet: {error}"))
                await backoff.wait(error)
            except (ConfigurationError, *TEMPLATE_FAULTS) as error:  # one that was changed
                failed = State(end=_END.FAILED, message=f"its template cannot be used: {error}")
                break
            else:
                one.created = True
                break
        if failed is not None:
            self._end(submission.id, failed)
        # It was cancelled when there was nothing to delete, or an earlier call that failed made a Job.
        if (one.cancelled or failed is not None) and (one.created or unclear):
            await self._delete(submission.id, waits_for_pods=one.cancelled)

    async def _take_existing(self, submission: Submission, one: _Known) -> bool:
        """Follow the Job of this name if it is the same submission. Return False if it cannot be read, or is gone."""
        try:
            job = await self._cluster.get(JOBS, submission.id)
        except CallError:
            return False
        labels, annotations = (job["metadata"].get(each) or {} for each in ("labels", "annotations"))
        ours = self._labels.items() <= labels.items()
        if not ours or annotations.get(ATTEMPT) != submission.attempt:
            message = f"there is a Job {submission.id} that is not ours"
            self._end(submission.id, State(end=_END.FAILED, message=message))
        else:
            one.created = True
            self._note_job("MODIFIED", job)
        return True

    async def _delete(self, name: str, *, waits_for_pods: bool) -> None:
        """Delete a Job, and wait while the API server cannot."""
        backoff, told = Backoff(), ""
        while True:
            try:
                await self._cluster.delete(JOBS, name, waits_for_pods=waits_for_pods)
            except CallError as error:
                if error.code == MISSING:
                    self._end(name, State(end=_END.CANCELLED))
                    return
                if str(error) != told and not error.passes:
                    log.warning(f"Job {name} cannot be deleted: {error}")
                    told = str(error)
                if not error.refused:
                    await backoff.wait(error)
                    continue
            return

    # What the API server says

    def _created(self) -> frozenset[str]:
        return frozenset(name for name, one in self._known.items() if one.created)

    def _note_jobs(self, jobs: Sequence[Object], created: frozenset[str]) -> None:
        for job in jobs:
            self._note_job("ADDED", job)
        for name in created - {job["metadata"]["name"] for job in jobs}:
            self._note_deleted(name)

    def _note_job(self, event: str, job: Object) -> None:
        name = job["metadata"]["name"]
        attempt = (job["metadata"].get("annotations") or {}).get(ATTEMPT)
        if event == "DELETED":
            self._note_deleted(name, job)
            return
        if name not in self._known:
            # One that has been reported as ended stays ended; before that, it is one of an earlier process.
            if attempt is None or self._adopted:
                return
            self._known[name] = _Known(attempt)
        one = self._known[name]
        one.job, one.created = job, True
        self._look(name)

    def _note_deleted(self, name: str, job: Object | None = None) -> None:
        one = self._known.get(name)
        if one is None or one.ending:
            return
        one.job = job or one.job
        if one.cancelled:
            self._end(name, State(one.state.node, _END.CANCELLED))
        elif one.job is not None and is_finished(one.job):
            self._end(name, state_of(one.job, one.pods.values()))
        else:
            self._end(name, State(one.state.node, _END.PREEMPTED, "its Job was deleted"))

    def _note_pods(self, pods: Sequence[Object], _: frozenset[str]) -> None:
        for one in self._known.values():
            one.pods.clear()
        for pod in pods:
            self._note_pod("ADDED", pod)

    def _note_pod(self, _: str, pod: Object) -> None:
        metadata = pod["metadata"]
        name = (metadata.get("labels") or {}).get(_POD_OF, "")
        one = self._known.get(name)
        if one is None:
            return
        # What a deleted pod said last tells why it ended.
        one.pods[metadata["name"]] = pod
        self._look(name)

    def _look(self, name: str) -> None:
        """Compare what is known of a submission with what was reported."""
        one = self._known.get(name)
        if one is None or one.job is None or one.ending or not self._adopted:
            return
        state = state_of(one.job, one.pods.values())
        if one.cancelled:
            if state.end is not None:
                self._end(name, State(state.node, _END.CANCELLED))
            return
        if state.end is not None and is_finished(one.job):
            one.ending = True
            self._spawn(self._finish(name, one, one.job), self._calls)
        elif state.end is not None:
            self._end_and_delete(name, state)
        elif state.suspended and one.state.node:
            message = "Kueue gave its place to others"
            self._end_and_delete(name, State(one.state.node, _END.PREEMPTED, message))
        else:
            self._report(name, state)

    async def _finish(self, name: str, one: _Known, job: Object) -> None:
        """Report the end of a Job that has ended; events of its pod may be late."""
        if not has_ended(one.pods.values()):
            with contextlib.suppress(CallError):
                async with self._lookups:
                    pods, _ = await self._cluster.list(PODS, {_POD_OF: name})
                one.pods |= {pod["metadata"]["name"]: pod for pod in pods}
        self._end(name, state_of(job, one.pods.values()))

    async def _tick(self) -> None:
        """End what has waited for too long, and say of the rest why it may wait."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            for name, one in list(self._known.items()):
                if time.monotonic() - one.cancelled_at > _CANCEL_SECONDS:
                    self._end(name, State(one.state.node, _END.CANCELLED))
                elif time.monotonic() - one.since > one.state.patience:
                    self._end_and_delete(name, State(one.state.node, one.state.then, one.state.message))
                elif one.state.hint:
                    self._look(name)

    # Reports

    def _report(self, name: str, state: State) -> None:
        """Report a change of what is visible: place and message."""
        one = self._known.get(name)
        if one is None:
            return
        old, now = one.state, time.monotonic()
        if (old.patience, old.then, old.hint) != (state.patience, state.then, state.hint) or one.since == inf:
            one.since = now  # a message may change from look to look, while it waits for the same
        if now - one.since >= state.hint_after:
            state = replace(state, message=state.hint)
        one.state = state
        if (old.node, old.message) != (state.node, state.message):
            self._reports.put_nowait(SubmissionReport(name, one.attempt, state.node, message=state.message))

    def _end(self, name: str, state: State) -> None:
        one = self._known.pop(name, None)
        if one is not None:
            end = _END.CANCELLED if one.cancelled else state.end
            self._reports.put_nowait(SubmissionReport(name, one.attempt, state.node, end, state.message))

    def _end_and_delete(self, name: str, state: State) -> None:
        """Report the end of a submission whose Job would go on, or wait."""
        self._end(name, state)
        self._spawn(self._delete(name, waits_for_pods=False), self._calls)

    def _spawn(self, work: Coroutine[Any, Any, None], group: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        group.add(task)
        task.add_done_callback(group.discard)

    def _unfit(self, why: str) -> ServiceError:
        return ServiceError(
            f"namespace {self._cluster.namespace} of {self._cluster.server} cannot run tasks: {why}",
            reason="ENGINE_UNFIT",
            remedy="docs/engines.md says which objects and rights the engine needs",
            about={"server": self._cluster.server, "namespace": self._cluster.namespace},
        )
