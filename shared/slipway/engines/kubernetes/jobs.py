"""The Job of a submission, and the Secret that its pods read. Pure."""

from __future__ import annotations

import base64
import copy
import hashlib
import re
from typing import Any

from slipway.contracts.engine import Submission, WorkerStart
from slipway.engines.kubernetes.options import JobOptions
from slipway.engines.kubernetes.states import Object
from slipway.engines.kubernetes.templates import Template, worker_container

OWNER, ATTEMPT = "slipway.dev/owner", "slipway.dev/attempt"

_GRACE_SECONDS = 4
"""A worker returns its task within three seconds; a cancelled one has to be gone within five."""
_KEPT_SECONDS = 300
"""How long an ended Job is kept, for its log. Its volume is kept as long, and so is the place that this takes."""
_LOST_SECONDS = 30
"""How long a pod stays bound to a node that does not respond; Kubernetes waits for five minutes."""
_LEAST_MEMORY = 1 << 30
"""A worker with its libraries needs about this much beside what the plan knows of."""
_FILES = "/slipway-files"
_SCALES = {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SCALES |= {f"{letter}i": float(1024**power) for power, letter in enumerate("KMGTP", start=1)}


def owner_label(owner: str) -> dict[str, str]:
    """Return the label by which a coordinator finds what is its own."""
    return {OWNER: label_value(owner)}


def label_value(text: str) -> str:
    """Return a text as the value of a label: itself, or what of it is allowed and its hash."""
    if len(text) <= 63 and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", text):
        return text
    begin = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:46].rstrip("._-")
    return f"{begin or 'x'}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def secret_of(worker: WorkerStart) -> Object | None:
    """Return the Secret with variables and files of all workers of a coordinator; None if the templates have all of it."""
    values = {name: value.get_secret_value() for name, value in worker.environment.items()}
    if not values and not worker.files:
        return None
    data = {_variable_key(name): value for name, value in values.items()} | {
        _file_key(name): content for name, content in worker.files.items()
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret_name(worker.owner), "labels": owner_label(worker.owner)},
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()},
    }


def secret_name(owner: str) -> str:
    """Return the name of the Secret of a coordinator."""
    return f"slipway-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"


def job_of(submission: Submission, template: Template, worker: WorkerStart, options: JobOptions) -> Object:
    """Return the Job of a submission. Its name is the submission's id; its pod is the template's, with the arguments of one task."""
    named = {OWNER: worker.owner, "slipway.dev/project": submission.project, "slipway.dev/export": submission.export}
    named["slipway.dev/task-stage"] = submission.stage
    labels = {name: label_value(value) for name, value in named.items()}
    metadata = template.pod.get("metadata") or {}
    pod_labels = {**(metadata.get("labels") or {}), **labels, **options.labels}
    annotations = {**named, ATTEMPT: submission.attempt}
    kueue = _kueue_labels(submission, options)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": submission.id, "labels": {**pod_labels, **kueue}, "annotations": annotations},
        "spec": {
            # Whether a lost worker is started again is the coordinator's to say.
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            # FailJob, so that the Job itself tells preemption from failure when its pod is gone.
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {
                "metadata": {
                    "labels": {**pod_labels, **kueue},
                    "annotations": {**(metadata.get("annotations") or {}), **annotations},
                },
                "spec": _pod_spec(submission, template, worker),
            },
        },
    }


def _kueue_labels(submission: Submission, options: JobOptions) -> dict[str, str]:
    labels = {
        "kueue.x-k8s.io/queue-name": options.queue.replace("{project}", submission.project),
        "kueue.x-k8s.io/priority-class": options.priority_class,
    }
    return {name: value for name, value in labels.items() if value}


def _pod_spec(submission: Submission, template: Template, worker: WorkerStart) -> dict[str, Any]:
    spec: dict[str, Any] = copy.deepcopy(dict(template.pod["spec"]))
    spec |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": _GRACE_SECONDS}
    _add_tolerations(spec)
    container = worker_container(spec)
    container["command"] = container.get("command") or ["slipway", "worker"]
    # Of several arguments of one name, the last one counts.
    container["args"] = [*(container.get("args") or ()), *worker.arguments(submission)[1:]]
    # Nothing calls it, and its last lines say why it failed.
    for name in ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "ports"):
        container.pop(name, None)
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    _add_secret(spec, container, worker)
    _ask(submission, container)
    _grow_volume(submission, spec)
    return spec


def _add_tolerations(spec: dict[str, Any]) -> None:
    tolerations = spec["tolerations"] = list(spec.get("tolerations") or ())
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(one.get("key") == key for one in tolerations):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_SECONDS}
            )


def _add_secret(spec: dict[str, Any], container: dict[str, Any], worker: WorkerStart) -> None:
    """Let a container read the coordinator's Secret; its variables count, not those of the template."""
    name = secret_name(worker.owner)
    variables: dict[str, dict[str, Any]] = {
        key: {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": _variable_key(key)}}}
        for key in sorted(worker.environment)
    } | {key: {"name": key, "value": f"{_FILES}/{key}"} for key in sorted(worker.files)}
    if variables:
        kept = [one for one in container.get("env") or () if one["name"] not in variables]
        container["env"] = [*kept, *variables.values()]
    if worker.files:
        items = [{"key": _file_key(key), "path": key} for key in sorted(worker.files)]
        volume = {"name": "slipway-files", "secret": {"secretName": name, "items": items, "defaultMode": 0o440}}
        spec["volumes"] = [*(spec.get("volumes") or ()), volume]
        mount = {"name": "slipway-files", "mountPath": _FILES, "readOnly": True}
        container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]


def _ask(submission: Submission, container: dict[str, Any]) -> None:
    """Ask for what the plan knows that a task needs; where it knows nothing, for what the template asks."""
    resources = container["resources"] = {**(container.get("resources") or {})}
    requests = resources["requests"] = {**(resources.get("requests") or {})}
    limits = resources["limits"] = {**(resources.get("limits") or {})}
    needs = {"memory": submission.memory_bytes and submission.memory_bytes + _LEAST_MEMORY, "cpu": submission.threads}
    for name, amount in needs.items():
        if amount:
            requests[name] = str(amount)
            if name in limits and quantity(limits[name]) < amount:
                limits[name] = str(amount)


def _grow_volume(submission: Submission, spec: dict[str, Any]) -> None:
    """Make the pod's own volume larger than the template says if the task's folder needs it; half of it is for the cache."""
    needed = 2 * submission.disk_bytes
    for volume in spec.get("volumes") or ():
        match volume:
            case {"ephemeral": {"volumeClaimTemplate": {"spec": {"resources": {"requests": held}}}}}:
                if quantity(held["storage"]) < needed:
                    held["storage"] = f"{-(-needed // (1 << 30))}Gi"


def quantity(text: Any) -> float:
    """Return a quantity of Kubernetes as a number.

    Raises:
        ValueError: It is none.
    """
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", str(text))
    if found is None or found[2] not in _SCALES:
        raise ValueError(f"{text!r} is no quantity")
    return float(found[1]) * _SCALES[found[2]]


def _variable_key(name: str) -> str:
    return f"variable.{name}"


def _file_key(name: str) -> str:
    return f"file.{name}"
