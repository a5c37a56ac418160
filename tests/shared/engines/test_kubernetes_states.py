"""What Jobs and pods say of a submission: every end, and why it waits."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from slipway.contracts.engine import SubmissionEnd as End
from slipway.engines.kubernetes.states import State, state_of

Object = dict[str, Any]


def job(*conditions: Object, **spec: Any) -> Object:
    return {"metadata": {"name": "j"}, "spec": spec, "status": {"conditions": list(conditions)}}


def true(kind: str, reason: str = "", message: str = "") -> Object:
    return {"type": kind, "status": "True", "reason": reason, "message": message}


def pod(phase: str, *conditions: Object, state: Object | None = None, node: str = "n", **status: Any) -> Object:
    containers = [] if state is None else [{"name": "worker", "state": state}]
    spec = {"nodeName": node, "containers": [{"name": "worker", "resources": {"limits": {"memory": "8Gi"}}}]}
    said = {"phase": phase, "conditions": list(conditions), "containerStatuses": containers, **status}
    return {"metadata": {"name": "p", "creationTimestamp": "1"}, "spec": spec, "status": said}


def terminated(code: int, reason: str = "Error", message: str = "") -> Object:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


FAILED = job(true("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"))
BY_POLICY = job(true("Failed", "PodFailurePolicy", "Pod x has condition DisruptionTarget"))


@pytest.mark.parametrize(
    ("thing", "pods", "end", "says"),
    [
        (job(true("Complete")), [pod("Succeeded")], End.EXITED, ""),
        (job(true("SuccessCriteriaMet")), [], End.EXITED, ""),
        (FAILED, [pod("Failed", state=terminated(137, "OOMKilled"))], End.OUT_OF_MEMORY, "8Gi"),
        (FAILED, [pod("Failed", state=terminated(3, message="it reads no file\n"))], End.FAILED, "exit code 3: it reads no file"),
        (FAILED, [pod("Failed", state=terminated(143))], End.PREEMPTED, ""),
        (FAILED, [pod("Failed", reason="NodeShutdown", message="Pod was terminated")], End.PREEMPTED, "Pod was terminated"),
        (FAILED, [pod("Failed", reason="NodeLost")], End.NODE_LOST, ""),
        (FAILED, [pod("Failed", reason="UnexpectedAdmissionError", message="no GPU")], End.FAILED, "no GPU"),
        (FAILED, [], End.FAILED, "backoff limit"),
        (BY_POLICY, [], End.PREEMPTED, "DisruptionTarget"),
        (job(true("FailureTarget", "PodFailurePolicy")), [pod("Running")], End.PREEMPTED, ""),
        (BY_POLICY, [pod("Failed", true("DisruptionTarget", "PreemptionByScheduler", "for another"))], End.PREEMPTED, "for another"),
        (BY_POLICY, [pod("Failed", true("DisruptionTarget", "EvictionByEvictionAPI"))], End.PREEMPTED, ""),
        (BY_POLICY, [pod("Failed", true("DisruptionTarget", "DeletionByPodGC", "node is gone"))], End.NODE_LOST, "node is gone"),
        (BY_POLICY, [pod("Failed", true("DisruptionTarget", "TerminationByKubelet"), reason="Evicted",
                         message="Pod ephemeral local storage usage exceeds the total limit")], End.FAILED, "storage"),
        (BY_POLICY, [pod("Failed", true("DisruptionTarget", "TerminationByKubelet"), reason="Evicted",
                         message="The node was low on resource: memory")], End.PREEMPTED, ""),
        (job(), [pod("Running", true("DisruptionTarget", "DeletionByTaintManager", "unreachable"))], End.NODE_LOST, "unreachable"),
    ],
)  # fmt: skip
def test_how_a_submission_ended(thing: Object, pods: list[Object], end: End, says: str) -> None:
    state = state_of(thing, pods)
    assert (state.end, says in state.message) == (end, True), state


@pytest.mark.parametrize(
    ("thing", "pods", "state"),
    [
        (job(), [pod("Running")], State("n")),
        (job(), [pod("Running", true("DisruptionTarget", "PreemptionByScheduler"))], State("n")),
        (job(), [pod("Pending", node="")], State()),
        (job(), [pod("Failed", state=terminated(1))], State("n", None, "its pod has ended", patience=60, then=End.FAILED)),
        (job(), [pod("Succeeded")], State("n", None, "its pod has ended", patience=60, then=End.EXITED)),
    ],
)  # fmt: skip
def test_a_submission_that_runs_or_begins(thing: Object, pods: list[Object], state: State) -> None:
    assert state_of(thing, pods) == state


def test_a_pod_without_a_node_waits_with_the_schedulers_message_and_not_for_ever() -> None:
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: 3 node(s) didn't match Pod's node affinity/selector."}  # fmt: skip
    state = state_of(job(), [pod("Pending", said, node="")])
    assert (state.end, state.patience, state.then) == (None, 600, End.UNSCHEDULABLE)
    assert "didn't match" in state.message
    gated = {**said, "reason": "SchedulingGated"}
    assert state_of(job(), [pod("Pending", gated, node="")]).patience == inf


@pytest.mark.parametrize("full", ["1 Insufficient cpu, 2 node(s) had untolerated taint {x: }.", "3 Too many pods."])
def test_a_pod_waits_as_long_as_nodes_are_full(full: str) -> None:
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": f"0/3 nodes: {full}"}
    state = state_of(job(), [pod("Pending", said, node="")])
    assert (state.patience, full in state.message) == (inf, True)


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "CreateContainerConfigError"])
def test_a_container_that_cannot_start_waits_and_not_for_ever(reason: str) -> None:
    waiting = {"waiting": {"reason": reason, "message": "no such thing"}}
    state = state_of(job(), [pod("Pending", state=waiting)])
    assert state == State(message=f"{reason}: no such thing", patience=180, then=End.FAILED)
    assert state_of(job(), [pod("Pending", state={"waiting": {"reason": "ContainerCreating"}})]).patience == inf


def test_a_job_without_a_pod_and_a_pod_that_does_not_start_say_after_a_while_how_to_see_why() -> None:
    state = state_of(job(), [])
    assert (state.message, "kubectl describe job j" in state.hint, state.hint_after) == ("", True, 30)
    state = state_of(job(), [pod("Pending", state={"waiting": {"reason": "ContainerCreating"}})])
    assert (state.message, "kubectl describe pod p" in state.hint, state.hint_after) == ("", True, 60)


def test_a_job_that_kueue_holds_waits_and_the_pod_that_was_made_last_counts() -> None:
    held = job(suspend=True)
    held["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
    state = state_of(held, [])
    assert (state.suspended, state.end, "queue team-a" in state.message) == (True, None, True)
    old, new = pod("Failed", state=terminated(143)), pod("Running", node="m")
    new["metadata"] = {"name": "q", "creationTimestamp": "2"}
    assert state_of(job(), [new, old]).node == "m"
