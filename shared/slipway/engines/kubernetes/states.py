"""What a Job and its pods say of a submission. Pure; objects are those of the API, as dicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from slipway.contracts.engine import SubmissionEnd

Object = Mapping[str, Any]

_END = SubmissionEnd
_UNSCHEDULABLE_SECONDS = 600.0
"""How long no node may fit a pod: autoscalers need minutes for a new one."""
_FULL = ("Insufficient ", "Too many pods")
"""What the scheduler says of nodes that would do and have no room left; it says the same of nodes that are too small."""
_START_SECONDS = 180.0
"""How long the kubelet may fail to start a container, for example because it cannot pull the image."""
_POD_SECONDS = 30.0
"""How long a Job may be without a pod until the display says so: quotas, for example, refuse pods, and only an event says that."""
_PREPARE_SECONDS = 60.0
"""How long a bound pod may not start until the display says so: it waits for volumes and Secrets, which only an event says."""
_SETTLE_SECONDS = 60.0
"""How long a Job may take to see that its pod has ended."""

_NO_START = (
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
)
_NODE_GONE = ("DeletionByPodGC", "DeletionByTaintManager")
_SHUTDOWNS = ("NodeShutdown", "Shutdown", "Terminated")
_SIGTERM = 143


@dataclass(frozen=True, slots=True)
class State:
    """The state of a submission.

    Attributes:
        node: The node that runs it, or ran it; empty while it waits.
        end: How it ended; None if it has not.
        message: Why it waits, or ended.
        suspended: Kueue has not admitted its Job, or takes its place back.
        patience: Seconds that it may stay like this; then it ends as ``then``.
        then: How it ends when they have passed.
        hint: What the message is if it stays like this for ``hint_after`` seconds.
    """

    node: str = ""
    end: SubmissionEnd | None = None
    message: str = ""
    suspended: bool = False
    patience: float = inf
    then: SubmissionEnd = _END.FAILED
    hint: str = ""
    hint_after: float = inf


def state_of(job: Object, pods: Iterable[Object]) -> State:
    """Return the state of a submission."""
    pod = _last(pods)
    node = "" if pod is None else str(pod.get("spec", {}).get("nodeName") or "")
    if any(_true(job, name) for name in ("Complete", "SuccessCriteriaMet")):
        return State(node, _END.EXITED)
    failed = _true(job, "Failed") or _true(job, "FailureTarget")
    if failed:
        return _failure(failed, pod, node)
    if job.get("spec", {}).get("suspend"):
        queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name", "")
        return State(message=f"its Job is suspended until Kueue's queue {queue} admits it", suspended=True)
    if pod is None:
        hint = f"its Job has no pod yet; kubectl describe job {job['metadata']['name']} says why"
        return State(hint=hint, hint_after=_POD_SECONDS)
    return _pod_state(pod, node)


def _pod_state(pod: Object, node: str) -> State:
    """Return the state of a submission whose Job has not ended, by its pod."""
    disruption = _true(pod, "DisruptionTarget")
    if disruption and disruption.get("reason") in _NODE_GONE:
        return State(node, _END.NODE_LOST, _text(disruption))
    match pod.get("status", {}).get("phase"):
        case "Running":
            return State(node)
        case "Succeeded" | "Failed" as phase:
            end = _END.EXITED if phase == "Succeeded" else _failure({}, pod, node).end
            return State(node, patience=_SETTLE_SECONDS, then=end or _END.FAILED, message="its pod has ended")
    return _waiting(pod)


def is_finished(job: Object) -> bool:
    """Return whether a Job has ended by itself, so that its time to live removes it."""
    return any(_true(job, name) for name in ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget"))


def has_ended(pods: Iterable[Object]) -> bool:
    """Return whether the last pod has ended, so that nothing more will be said of it."""
    pod = _last(pods)
    return pod is not None and pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}


def _waiting(pod: Object) -> State:
    """Return the state of a pod that has not started."""
    for status in _containers(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _NO_START:
            return State(message=_text(waiting), patience=_START_SECONDS, then=_END.FAILED)
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            said = _text(condition)
            gated = condition.get("reason") != "Unschedulable"  # SchedulingGated, until somebody removes the gate
            seconds = inf if gated or any(each in said for each in _FULL) else _UNSCHEDULABLE_SECONDS
            return State(message=said, patience=seconds, then=_END.UNSCHEDULABLE)
    if not pod.get("spec", {}).get("nodeName"):
        return State()
    hint = f"its pod has a node and does not start yet; kubectl describe pod {pod['metadata']['name']} says why"
    return State(hint=hint, hint_after=_PREPARE_SECONDS)


def _failure(failed: Object, pod: Object | None, node: str) -> State:
    """Return how a Job that failed ended. Its policy names disruptions even if the pod is gone."""
    disrupted = failed.get("reason") == "PodFailurePolicy"
    if pod is None:
        return State(node, _END.PREEMPTED if disrupted else _END.FAILED, _text(failed))
    status, said = pod.get("status", {}), _text(pod.get("status", {}))
    ended = [one.get("state", {}).get("terminated") or {} for one in _containers(pod)]
    if any(one.get("reason") == "OOMKilled" for one in ended):
        limits = [each.get("resources", {}).get("limits", {}).get("memory") for each in pod["spec"]["containers"]]
        limit = ", ".join(filter(None, limits)) or "its node's memory"
        return State(node, _END.OUT_OF_MEMORY, f"its container was ended at {limit}")
    disruption = _true(pod, "DisruptionTarget")
    if disruption.get("reason") in _NODE_GONE or status.get("reason") == "NodeLost":
        return State(node, _END.NODE_LOST, _text(disruption) or said)
    used_too_much = status.get("reason") == "Evicted" and "exceed" in said  # of its disk, for example
    shut_down = status.get("reason") in _SHUTDOWNS or any(one.get("exitCode") == _SIGTERM for one in ended)
    if not used_too_much and (disruption or disrupted or shut_down):
        why = _text(disruption) or said or _text(failed) or "its pod was ended from outside"
        return State(node, _END.PREEMPTED, why)
    exits = [
        f"exit code {one['exitCode']}: {(one.get('message') or '').strip()}" for one in ended if one.get("exitCode")
    ]
    return State(node, _END.FAILED, next(iter(exits), "").rstrip(": ") or said or _text(failed))


def _last(pods: Iterable[Object]) -> Object | None:
    """Return the pod that was made last; a Job that Kueue stopped and started again has had several."""
    return max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def _containers(pod: Object) -> Iterator[Object]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _true(thing: Object, condition: str) -> Object:
    """Return a condition that is true; an empty one otherwise."""
    conditions = thing.get("status", {}).get("conditions") or ()
    return next((one for one in conditions if one["type"] == condition and one["status"] == "True"), {})


def _text(said: Object) -> str:
    return ": ".join(filter(None, (said.get("reason"), said.get("message"))))
