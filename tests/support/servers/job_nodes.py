"""Run the Jobs of :mod:`support.servers.jobs_api` as processes of this machine, and say what Kubernetes would say of their pods.

It plays the controller of Jobs, the scheduler, the kubelet and the garbage collector of one node.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.commands.cli import SLIPWAY
from support.servers.jobs_api import JobsApi, Object

NODE = "node-1"


@dataclass
class JobNodes:
    """One node.

    Attributes:
        api: The API server.
        folder: Logs of the pods.
        variables: What the image would bring: variables of every process. ``{pod}`` in a value is the name of the Job.
        held: Schedule no pod.
    """

    api: JobsApi
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    held: bool = False
    started: list[str] = field(default_factory=list)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _disrupted: dict[str, str] = field(default_factory=dict)
    _ended: bool = False

    def preempt(self, job: str) -> None:
        """End a Job's pod for one of a higher priority: it gets its time, and a condition that says why."""
        self._disrupted[job] = "PreemptionByScheduler"
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempting to accommodate a higher priority pod"}  # fmt: skip
        self.api.change("pods", f"{job}-pod", lambda pod: pod["status"].setdefault("conditions", []).append(condition))
        self._terminate(job)

    def kill(self, job: str, reason: str = "") -> None:
        """End a Job's process as the kernel does, for example with ``OOMKilled``."""
        self._disrupted[job] = reason
        os.killpg(self._processes[job].pid, signal.SIGKILL)

    def run(self) -> None:
        """Run until the end what the API server has."""
        while not self._ended:
            for name in self.api.names("jobs"):
                with contextlib.suppress(KeyError):
                    self._look(name, self.api.one("jobs", name))
            for name in set(self._processes) - set(self.api.names("jobs")):
                self._terminate(name)
            time.sleep(0.05)

    def end(self) -> None:
        self._ended = True
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _look(self, name: str, job: Object) -> None:
        process = self._processes.get(name)
        if "deletionTimestamp" in job["metadata"]:
            if process is not None and process.poll() is None:
                self._terminate(name)
                return
            self._processes.pop(name, None)
            self.api.remove("pods", f"{name}-pod")
            self.api.remove("jobs", name)
        elif process is None and not self.held and not job.get("status", {}).get("conditions"):
            self._start(name, job)
        elif process is not None and process.poll() is not None:
            del self._processes[name]
            self._settle(name, process.returncode)

    def _start(self, name: str, job: Object) -> None:
        template = job["spec"]["template"]
        (container,) = template["spec"]["containers"]
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": name}
        pod = {"metadata": {"name": f"{name}-pod", "labels": labels}, "spec": {**template["spec"], "nodeName": NODE}}
        assert container["command"] == ["slipway", "worker"]
        variables = {key: value.replace("{pod}", name) for key, value in self.variables.items()}
        environment = {**os.environ, **variables, **self._environment(container)}
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [SLIPWAY, "worker", *container["args"]],
                env=environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(name)
        self.api.put("pods", {**pod, "status": {"phase": "Running"}})

    def _environment(self, container: Object) -> dict[str, str]:
        found = {}
        for one in container.get("env", ()):
            reference: dict[str, Any] | None = one.get("valueFrom", {}).get("secretKeyRef")
            if reference is None:
                found[one["name"]] = one["value"]
            else:
                secret = self.api.one("secrets", reference["name"])
                found[one["name"]] = base64.b64decode(secret["data"][reference["key"]]).decode()
        return found

    def _terminate(self, name: str) -> None:
        """Send SIGTERM, and SIGKILL after the pod's time."""
        process = self._processes.get(name)
        if process is None or process.poll() is not None or getattr(process, "terminated", False):
            return
        process.terminated = True  # type: ignore[attr-defined]
        grace = 4.0
        with contextlib.suppress(KeyError):
            grace = self.api.one("pods", f"{name}-pod")["spec"]["terminationGracePeriodSeconds"]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        timer = threading.Timer(grace, _kill, [process])
        timer.daemon = True
        timer.start()

    def _settle(self, name: str, code: int) -> None:
        """Say of the pod and its Job how the process ended."""
        why = self._disrupted.pop(name, "")
        good = code == 0 and not why
        exit_code = code if code >= 0 else 128 - code
        reason = "Completed" if good else why if why == "OOMKilled" else "Error"
        last = (self.folder / f"{name}.log").read_text(errors="replace")[-2048:]
        ended = {"exitCode": exit_code, "reason": reason, "message": "" if good else last}

        def end_pod(pod: Object) -> None:
            pod["status"] |= {"phase": "Succeeded" if good else "Failed"}
            pod["status"]["containerStatuses"] = [{"name": "worker", "state": {"terminated": ended}}]

        preempted = why.startswith("Preemption")
        condition = {
            "type": "Complete" if good else "Failed",
            "status": "True",
            "reason": "" if good else "PodFailurePolicy" if preempted else "BackoffLimitExceeded",
        }
        self.api.change("pods", f"{name}-pod", end_pod)
        self.api.change("jobs", name, _add_condition(condition))


def _add_condition(condition: Object) -> Callable[[Object], None]:
    def change(thing: Object) -> None:
        thing.setdefault("status", {}).setdefault("conditions", []).append(condition)

    return change


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def job_nodes(api: JobsApi, folder: Path, **variables: str) -> Iterator[JobNodes]:
    """Run the Jobs of an API server until the block ends."""
    folder.mkdir(exist_ok=True)
    nodes = JobNodes(api, folder, variables)
    thread = threading.Thread(target=nodes.run, daemon=True)
    thread.start()
    try:
        yield nodes
    finally:
        nodes.end()
        thread.join(10)
        nodes.end()  # what it started meanwhile
