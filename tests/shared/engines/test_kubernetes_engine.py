"""The engine talks to an API server: what it makes, hears and adopts. Tests say what becomes of the Jobs, which nobody runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("lightkube", reason="pip install 'slipway-ml[kubernetes]'")

from slipway.contracts.engine import Submission, SubmissionEnd, WorkerStart
from slipway.engines.kubernetes import engine as engine_module
from slipway.engines.kubernetes import states as states_module
from slipway.engines.kubernetes.service import SERVICE
from slipway.errors import ModelExportError
from slipway.service_flags import worker_parser
from slipway.settings import Settings
from slipway.settings.security import Security
from slipway_coordinator.engines import engine_setup
from slipway_coordinator.storage.database_access import SqliteState
from support.servers.job_reports import BARE, ONE, Reports, finish, place, running, submitted, until
from support.servers.jobs_api import JobsApi, Refusal, worker_deployment, write_kubeconfig

End = SubmissionEnd


async def test_a_submission_is_a_job_whose_place_and_end_are_reported(api: JobsApi) -> None:
    async with running() as reports:
        await submitted(api, reports)
        waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
        place(api, phase="Pending", node="", conditions=[waiting])
        await reports.next(says="0/2 nodes")
        place(api)
        await reports.next(node="n")
        finish(api)
        report = await reports.next(End.EXITED, node="n")
        assert (report.id, report.attempt) == (ONE.id, ONE.attempt)
        assert ONE.id in api.names("jobs")  # its time to live removes it


async def test_a_pod_whose_events_are_late_is_looked_up(api: JobsApi) -> None:
    async with running() as reports:
        await submitted(api, reports)
        api.refusals += [Refusal("WATCH", "pods", 500) for _ in range(1000)]
        api.break_watches()
        ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
        place(api, phase="Failed", containerStatuses=[{"name": "worker", "state": ended}])
        finish(api, "Failed", "BackoffLimitExceeded")
        await reports.next(End.OUT_OF_MEMORY, node="n")


async def test_a_lost_node_is_known_from_its_pod_and_the_job_is_removed(api: JobsApi) -> None:
    async with running() as reports:
        await submitted(api, reports)
        place(api)
        await reports.next(node="n")
        gone = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        place(api, conditions=[gone])
        await reports.next(End.NODE_LOST, node="n")
        await until(lambda: not api.names("jobs"))


async def test_cancelling_waits_for_the_pods(api: JobsApi) -> None:
    async with running() as reports:
        await submitted(api, reports)
        place(api)
        await reports.next(node="n")
        await reports.engine.cancel(ONE.id)
        await reports.engine.cancel("slipway-unknown-1")
        await until(lambda: "deletionTimestamp" in api.one("jobs", ONE.id)["metadata"])
        api.remove("jobs", ONE.id)
        await reports.next(End.CANCELLED, node="n")
        await reports.engine.cancel(ONE.id)  # harmless
    assert api.names("jobs") == []


async def test_a_job_that_is_gone_is_cancelled_at_once_and_one_not_yet_made_is_not_made(api: JobsApi) -> None:
    async with running() as reports:
        api.refusals += [Refusal("POST", "jobs", 429) for _ in range(1000)]
        await reports.engine.submit(ONE)
        await reports.next(says="not now")
        await reports.engine.cancel(ONE.id)
        await reports.next(End.CANCELLED)
        api.refusals.clear()
        await asyncio.sleep(0.3)
        assert api.names("jobs") == []


async def test_a_job_that_somebody_deletes_counts_as_preempted(api: JobsApi) -> None:
    async with running() as reports:
        await submitted(api, reports)
        api.remove("jobs", ONE.id)
        await reports.next(End.PREEMPTED, says="its Job was deleted")


async def test_what_kueue_stops_is_preempted_and_what_it_has_not_begun_waits(api: JobsApi) -> None:
    async with running() as reports:
        await submitted(api, reports)
        api.change("jobs", ONE.id, lambda job: job["spec"].update(suspend=True))
        await reports.next(says="suspended until Kueue")
        api.change("jobs", ONE.id, lambda job: job["spec"].update(suspend=False))
        place(api)
        await reports.next(node="n")
        api.change("jobs", ONE.id, lambda job: job["spec"].update(suspend=True))
        await reports.next(End.PREEMPTED, node="n", says="Kueue")
        await until(lambda: not api.names("jobs"))


async def test_what_waits_for_too_long_ends(api: JobsApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(states_module, "_START_SECONDS", 0.2)
    async with running() as reports:
        await submitted(api, reports)
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}}
        place(api, phase="Pending", containerStatuses=[{"name": "worker", "state": waiting}])
        await reports.next(says="no image")
        await reports.next(End.FAILED, says="no image")
        await until(lambda: not api.names("jobs"))


async def test_a_job_that_gets_no_pod_says_so_once(api: JobsApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(states_module, "_POD_SECONDS", 0.2)
    async with running() as reports:
        await submitted(api, reports)
        await reports.next(says=f"kubectl describe job {ONE.id}")
        api.change("jobs", ONE.id, lambda job: job["metadata"].update(annotations=job["metadata"]["annotations"] | {"x": "y"}))  # fmt: skip
        await asyncio.sleep(0.3)
        place(api)
        await reports.next(node="n")


async def test_the_next_process_adopts_what_the_last_one_left(api: JobsApi) -> None:
    other = Submission("slipway-q-0-1", "projects/p/exports/x:q:1", "merge", "p", "projects/p/exports/x")
    foreign = WorkerStart("you", "elsewhere:7070", "s3://bucket")
    async with running() as first, running(foreign) as second:
        await submitted(api, first)
        await first.engine.submit(other)
        await second.engine.submit(Submission("slipway-f-0-1", "projects/p/exports/f:m:1", "merge", "p", "f"))
        await until(lambda: len(api.names("jobs")) == 3)
        place(api)
        await first.next(node="n")
    done = {"type": "Complete", "status": "True"}
    api.change("jobs", other.id, lambda job: job.update(status={"conditions": [done]}))
    engine = SERVICE.open("tests", BARE)
    await engine.start()
    adopted = await engine.adopt()
    assert [(one.id, one.attempt, one.node) for one in adopted] == [
        (ONE.id, ONE.attempt, "n"),
        (other.id, other.attempt, ""),
    ]
    reports = Reports(engine)
    assert (await reports.next(End.EXITED)).id == other.id  # it ended while nobody looked
    finish(api)
    assert (await reports.next(End.EXITED, node="n")).id == ONE.id
    api.forget()  # what has ended is not adopted again
    await until(lambda: api.count("GET", "jobs") >= 4)
    await engine.submit(Submission("slipway-r-0-1", "projects/p/exports/x:r:1", "other", "p", "x"))
    await reports.next(End.UNSCHEDULABLE, says="no template of namespace slipway runs other")
    await engine.stop()


async def test_variables_of_workers_are_in_a_secret_as_long_as_there_are_jobs(api: JobsApi) -> None:
    from pydantic import SecretStr

    def worker(token: str) -> WorkerStart:
        return WorkerStart("me", "127.0.0.1:1", "/store", environment={"SLIPWAY_TOKEN": SecretStr(token)})

    async with running(worker("first")) as reports:
        await submitted(api, reports)
    (name,) = api.names("secrets")
    old = api.one("secrets", name)
    async with running(worker("second")) as reports:
        assert api.one("secrets", name)["data"] != old["data"]
        await reports.engine.cancel(ONE.id)
        await until(lambda: "deletionTimestamp" in api.one("jobs", ONE.id)["metadata"])
    assert api.names("secrets") == []


async def test_installations_of_one_namespace_do_not_know_each_other(
    api: JobsApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = worker_deployment("ours")
    for each in (deployment, deployment["spec"]["template"]):
        each["metadata"]["labels"] = {**each["metadata"]["labels"], "app.kubernetes.io/instance": "one"}
    api.put("deployments", deployment)
    api.remove("deployments", "slipway-all")
    monkeypatch.setenv("SLIPWAY_KUBERNETES_INSTANCE", "one")
    async with running() as reports:
        await submitted(api, reports)
    monkeypatch.setenv("SLIPWAY_KUBERNETES_INSTANCE", "two")
    with pytest.raises(ModelExportError, match="no Deployment of workers"):
        async with running():
            pass
    api.put("deployments", {**worker_deployment(), "metadata": {"name": "theirs", "labels": {**deployment["metadata"]["labels"], "app.kubernetes.io/instance": "two"}}})  # fmt: skip
    engine = SERVICE.open("tests", BARE)
    await engine.start()
    assert await engine.adopt() == []
    await engine.submit(ONE)
    await Reports(engine).next(End.FAILED, says="not ours")
    await engine.stop()


def test_coordinators_of_two_installations_have_two_names_although_their_states_have_one(
    api: JobsApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, owners = Settings(home=tmp_path, scratch=tmp_path, store="s3://bucket"), []
    for instance in ("one", "two", "two"):
        monkeypatch.setenv("SLIPWAY_KUBERNETES_INSTANCE", instance)
        state = SqliteState(tmp_path / "state.db")
        with engine_setup("kubernetes:tests", settings, Security(), state, listen="[::]:1", advertise="") as setup:
            assert setup is not None
            owners.append(setup(1).owner)
    assert owners[0] != owners[1] == owners[2]


async def test_a_coordinator_of_its_own_process_leaves_address_and_credentials_to_the_templates(
    api: JobsApi, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path, scratch=tmp_path, store="s3://bucket")
    security = Security(access_file=tmp_path / "access.yaml")  # nobody has a token: templates have certificates
    state = SqliteState(tmp_path / "state.db")
    with engine_setup("kubernetes:tests", settings, security, state, listen="0.0.0.0:7070", advertise="") as setup:
        assert setup is not None
        engine = setup(7070).engine
    await engine.start()
    await engine.adopt()
    await engine.submit(ONE)
    await until(lambda: ONE.id in api.names("jobs"))
    (container,) = api.one("jobs", ONE.id)["spec"]["template"]["spec"]["containers"]
    assert worker_parser("slipway worker").parse_args(container["args"]).coordinator == "elsewhere:7070"
    assert container["env"][0] == {"name": "SLIPWAY_STORE", "value": "/elsewhere"}
    assert api.names("secrets") == []
    await engine.stop()


# Before anything runs


async def test_a_namespace_that_cannot_run_jobs_is_refused(api: JobsApi) -> None:
    async def refused(reason: str, says: str) -> None:
        with pytest.raises(ModelExportError, match=says) as caught:
            async with running():
                pass
        assert caught.value.reason == reason

    api.refusals.append(Refusal("POST", "jobs", 403, 'User "me" cannot create resource "jobs"'))
    await refused("ENGINE_UNFIT", "cannot create")
    api.refusals.append(Refusal("GET", "deployments", 503))
    await refused("ENGINE_UNAVAILABLE", "does not respond")
    api.tokens = {"another"}
    await refused("ENGINE_UNFIT", "Unauthorized")
    api.tokens = set()
    api.remove("deployments", "slipway-all")
    await refused("ENGINE_UNFIT", "no Deployment of workers")
    api.put("deployments", worker_deployment("a-broken-one", args=["--slots=1"]))
    await refused("ENGINE_UNFIT", "a-broken-one of workers is no template, KeyError: '--stage'")
    assert api.names("jobs") == []


async def test_without_a_server_it_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "config", "http://127.0.0.1:9")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ModelExportError) as caught:
        async with running():
            pass
    assert caught.value.reason == "ENGINE_UNAVAILABLE"


@pytest.mark.parametrize("text", [None, "", "[]", "contexts: []", "clusters: [{}]\ncontexts: []", "{"])
def test_a_context_that_is_not_there_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for context in ("", "tests"):
        with pytest.raises(ModelExportError) as caught:
            SERVICE.check(context)
        assert caught.value.reason == "ENGINE_UNAVAILABLE"


@pytest.mark.parametrize("fault", ["auth-provider", "ca-file"])
def test_a_context_that_cannot_be_used_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path = tmp_path / "config"
    write_kubeconfig(path, "https://127.0.0.1:9")
    text = path.read_text()
    if fault == "auth-provider":
        text = text.replace("user: {}", "user: {auth-provider: {name: gcp}}")
    else:
        text = text.replace("server:", "certificate-authority: /is/not/there.crt\n    server:")
    assert text != path.read_text()
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ModelExportError, match=r"auth-provider|No such file") as caught:
        SERVICE.check("tests")
    assert caught.value.reason == "ENGINE_UNAVAILABLE"


async def test_in_the_cluster_it_is_the_pods_account_whose_token_is_renewed(
    api: JobsApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightkube.config import kubeconfig
    from lightkube.config.models import Cluster

    for name, text in {"token": "first", "namespace": "slipway", "ca.crt": ""}.items():
        (tmp_path / name).write_text(text)
    host, _, port = api.address.rpartition("/")[2].partition(":")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    # The account's folder is fixed, and this server has no certificate.
    monkeypatch.setattr(kubeconfig.KubeConfig.from_service_account.__func__, "__defaults__", (str(tmp_path),))
    monkeypatch.setattr(kubeconfig, "Cluster", lambda server, **_: Cluster(server=api.address))
    api.tokens = {"first"}
    engine = SERVICE.open("", BARE)
    await engine.start()
    await engine.adopt()
    api.tokens = {"second"}
    (tmp_path / "token").write_text("second")
    await engine.submit(ONE)
    await until(lambda: ONE.id in api.names("jobs"))
    await engine.stop()
