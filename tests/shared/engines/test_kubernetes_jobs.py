"""Templates of pods, and the Jobs that are made of them: they are what Kubernetes takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from slipway.contracts.engine import Submission, WorkerStart
from slipway.engines.kubernetes.jobs import job_of, label_value, owner_label, quantity, secret_of
from slipway.engines.kubernetes.options import JobOptions
from slipway.engines.kubernetes.templates import Template, choose, read_templates, template_of
from slipway.errors import ConfigurationError
from slipway.requirements import NO_GPU, Needs, Requirements
from slipway.service_flags import worker_parser
from support.servers.jobs_api import JobsApi, worker_deployment

WORKER = WorkerStart(
    "me",
    "slipway-coordinator:7070",
    "s3://bucket/folder",
    environment={"SLIPWAY_STORE": SecretStr("s3://bucket/folder"), "SLIPWAY_TOKEN": SecretStr("confidential")},
    files={"SLIPWAY_TLS_CA_FILE": "-----BEGIN"},
)
GIB = 1 << 30


def submission(**more: Any) -> Submission:
    attempt = "projects/p/exports/An_export:merge:1"
    named = {"id": "slipway-merge-0-1", "attempt": attempt, "stage": "merge", "project": "p", "export": "projects/p/exports/An_export"}  # fmt: skip
    return Submission(**{**named, **more})


def made(template: Template | None = None, worker: WorkerStart = WORKER, **more: Any) -> Any:
    """Return a Job that the API server took."""
    options = more.pop("options", JobOptions())
    job = job_of(submission(**more), template or template_of(worker_deployment()), worker, options)
    code, response = JobsApi().create("jobs", json.loads(json.dumps(job)), dry_run=False)
    assert code == 201, response
    return response


def container(job: Any) -> Any:
    return job["spec"]["template"]["spec"]["containers"][0]


def test_the_job_runs_one_task_in_the_pod_of_its_template() -> None:
    job = made()
    assert job["metadata"]["name"] == "slipway-merge-0-1"
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"]) == (0, 300)
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onPodConditions"][0]["type"]) == ("FailJob", "DisruptionTarget")
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 4)
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("slipway-worker", False)
    one = container(job)
    assert (one["image"], one["terminationMessagePolicy"]) == ("slipway-merge:1", "FallbackToLogsOnError")
    assert not one.keys() & {"ports", "startupProbe", "livenessProbe", "readinessProbe"}
    parsed = worker_parser("slipway worker").parse_args(one["args"])
    assert (parsed.stage, parsed.once, parsed.drain_seconds) == ("merge", submission().attempt, 0.0)
    assert parsed.coordinator == "slipway-coordinator:7070"


def test_labels_are_short_and_annotations_say_all() -> None:
    job = made(project="a project that is longer than what the value of a label may be, by far")
    labels, annotations = job["metadata"]["labels"], job["metadata"]["annotations"]
    assert owner_label("me").items() <= labels.items()
    assert labels["slipway.dev/task-stage"] == "merge"
    assert labels["app.kubernetes.io/component"] == "worker"  # which network policies go by
    assert labels.items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert annotations["slipway.dev/attempt"] == submission().attempt
    assert annotations["slipway.dev/project"].endswith("by far")
    assert annotations["slipway.dev/export"] == submission().export


def test_values_of_labels_differ_where_texts_do() -> None:
    assert label_value("plain-1.2_x") == "plain-1.2_x"
    texts = ["a/b", "a_b", "a:b", "a" * 64, "a" * 65, "", "-", "é"]
    assert len({label_value(text) for text in texts}) == len(texts)
    assert all(len(label_value(text)) < 64 for text in texts)


def test_variables_of_the_coordinator_come_from_a_secret_and_no_job_shows_them() -> None:
    job = made()
    assert "confidential" not in json.dumps(job)
    variables = {one["name"]: one for one in container(job)["env"]}
    assert variables["KEPT"]["value"] == "yes"
    secret = secret_of(WORKER)
    assert secret is not None
    assert JobsApi().create("secrets", dict(secret), dry_run=False)[0] == 201
    for name in WORKER.environment:  # also where the template has one of the name
        reference = variables[name]["valueFrom"]["secretKeyRef"]
        assert (reference["name"], reference["key"] in secret["data"]) == (secret["metadata"]["name"], True)
    assert variables["SLIPWAY_TLS_CA_FILE"]["value"] == "/slipway-files/SLIPWAY_TLS_CA_FILE"
    assert job["spec"]["template"]["spec"]["volumes"][-1]["secret"]["items"][0]["path"] == "SLIPWAY_TLS_CA_FILE"


def test_a_coordinator_whose_templates_have_everything_needs_no_secret() -> None:
    bare = WorkerStart("me", "slipway-coordinator:7070", "s3://bucket")
    assert secret_of(bare) is None
    assert "secret" not in json.dumps(made(worker=bare))


def test_requests_follow_what_the_plan_knows() -> None:
    resources = container(made())["resources"]
    assert resources == {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"cpu": "8", "memory": "8Gi"}}
    resources = container(made(memory_bytes=2 * GIB, threads=4))["resources"]
    assert (resources["requests"], resources["limits"]["memory"]) == ({"cpu": "4", "memory": str(3 * GIB)}, "8Gi")
    resources = container(made(memory_bytes=20 * GIB, threads=12))["resources"]
    assert resources["limits"] == resources["requests"] == {"cpu": "12", "memory": str(21 * GIB)}


def test_the_volume_grows_with_the_inputs_and_never_shrinks() -> None:
    def storage(**more: Any) -> str:
        (volume,) = made(worker=WorkerStart("me", "c:1", "s3://b"), **more)["spec"]["template"]["spec"]["volumes"]
        return str(volume["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"])

    assert [storage(), storage(disk_bytes=GIB), storage(disk_bytes=100 * GIB - 1)] == ["64Gi", "64Gi", "200Gi"]


def test_a_pod_leaves_a_node_that_does_not_respond_within_half_a_minute() -> None:
    tolerations = made()["spec"]["template"]["spec"]["tolerations"]
    assert {one["key"].rpartition("/")[2]: one["tolerationSeconds"] for one in tolerations} == {
        "not-ready": 30,
        "unreachable": 30,
    }


def test_kueue_gets_a_queue_and_a_priority_if_they_are_set() -> None:
    assert "kueue" not in json.dumps(made())
    options = JobOptions.from_environment(
        {"SLIPWAY_KUBERNETES_QUEUE": "team-{project}", "SLIPWAY_KUBERNETES_PRIORITY_CLASS": "low"}
    )
    labels = made(options=options)["metadata"]["labels"]
    assert (labels["kueue.x-k8s.io/queue-name"], labels["kueue.x-k8s.io/priority-class"]) == ("team-p", "low")


def gpu(name: str, *, selector: dict[str, str] | None = None, **container: Any) -> Template:
    resources = container or {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    deployment = worker_deployment(name, stages="validate,answer", **resources)
    deployment["spec"]["template"]["spec"]["nodeSelector"] = selector or {}
    return template_of(deployment)


def test_templates_are_chosen_by_stage_and_gpu() -> None:
    select = {"nvidia.com/gpu.compute.major": "8", "nvidia.com/gpu.compute.minor": "9"}
    cpu = template_of(worker_deployment("cpu", stages="merge,validate"))
    sm89, some = gpu("sm89", selector=select), gpu("any")
    claim = gpu("claim", resources={"claims": [{"name": "gpu"}]})
    slice_ = gpu("slice", resources={"requests": {"nvidia.com/mig-3g.40gb": "1"}})
    assert [one.gpu for one in (cpu, sm89, some, claim, slice_)] == [NO_GPU, "sm89", "", "", ""]
    validating = submission(stage="validate")

    def chosen(*templates: Template, **needs: Any) -> str:
        one = submission(stage="validate", requirements=Requirements(**needs))
        return getattr(choose(templates, one), "name", "")

    assert choose([sm89], submission()) is None
    assert choose([sm89, cpu], validating) == cpu
    assert chosen(cpu, sm89, any_of=(Needs(gpu=True),)) == "sm89"
    assert chosen(cpu, sm89, prefers=(Needs(gpu=True),)) == "sm89"
    assert chosen(cpu, sm89, any_of=(Needs(gpu_architectures=("sm90",)),)) == ""
    assert chosen(cpu, sm89, some, any_of=(Needs(gpu_architectures=("sm90",)),)) == "any"
    assert choose([sm89], validating) == sm89
    annotated = worker_deployment("x", stages="validate", resources={"limits": {"amd.com/gpu": "1"}})
    annotated["metadata"]["annotations"] = {"slipway.dev/gpu-architecture": "gfx942"}
    assert template_of(annotated).gpu == "gfx942"


def test_a_file_has_one_template_or_a_list(tmp_path: Path) -> None:
    path = tmp_path / "templates.yaml"
    pod = worker_deployment("p", stages="gguf")["spec"]["template"]
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "p"}, "template": pod}
    path.write_text(json.dumps(template))
    assert [one.stages for one in read_templates(path)] == [{"gguf"}]
    path.write_text(json.dumps({"kind": "List", "items": [worker_deployment(stages="combine,merge"), template]}))
    assert [sorted(one.stages) for one in read_templates(path)] == [["combine", "merge"], ["gguf"]]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "items: 3", "items: [x]", "kind: Deployment", "a: [", "kind: PodTemplate\ntemplate: {spec: {containers: []}}"]
)  # fmt: skip
def test_a_file_that_has_no_templates_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "templates.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="templates"):
        read_templates(path)
    with pytest.raises(ConfigurationError):
        read_templates(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("text", "number"), [("8Gi", 8 * GIB), ("500m", 0.5), ("2", 2), (4, 4), ("1.5G", 1.5e9), ("1e3", 1000), ("3Ki", 3072)]
)  # fmt: skip
def test_quantities(text: Any, number: float) -> None:
    assert quantity(text) == number
    with pytest.raises(ValueError, match="no quantity"):
        quantity(f"{text}!")
