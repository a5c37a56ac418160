"""As much of a cluster's API as the engine of Kubernetes uses: Jobs, Pods, Deployments and Secrets of one namespace.

It has what the engine has to bear: versions of lists and watches, names that are taken (409), versions that are forgotten (410), calls that
are refused for a while (429, 500), watches that break, tokens that are renewed. Jobs are checked by Kubernetes' own schemas and the rules
beside them that the engine must keep. Nobody runs the Jobs: tests say what becomes of them, or :mod:`support.servers.job_nodes` does.

It shows that the engine speaks the protocol, not that a cluster runs its Jobs.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from support.servers.local_http import local_http

Object = dict[str, Any]

NAMESPACE = "slipway"
SCHEMAS = "1.33"
_KINDS = {"jobs": "batch/v1", "pods": "v1", "deployments": "apps/v1", "secrets": "v1"}
_PATH = re.compile(rf"/(?:api|apis)/(v1|batch/v1|apps/v1)/namespaces/{NAMESPACE}/([a-z]+)(?:/([a-z0-9.-]+))?")
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


@dataclass
class Refusal:
    """What the next call that matches gets instead of a response; a creation may have been done, ``done_after`` some seconds."""

    method: str
    plural: str
    code: int
    message: str = "not now"
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    done_after: float | None = None


@dataclass
class JobsApi:
    """The objects of the namespace.

    Attributes:
        objects: By plural and name.
        calls: Method, plural and name of each call, with ``watch`` as a method of its own.
        refusals: Of calls to come.
        tokens: Those that it takes; all if empty.
        address: Where it serves.
        watch_seconds: After this time the server itself ends a watch.
    """

    objects: dict[str, dict[str, Object]] = field(default_factory=lambda: {plural: {} for plural in _KINDS})
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    address: str = ""
    watch_seconds: float = 3600.0
    lock: threading.Condition = field(default_factory=threading.Condition)
    _events: list[tuple[str, str, Object]] = field(default_factory=list)
    _forgotten: int = 0
    _watches: int = 0
    _ended: bool = False

    def put(self, plural: str, thing: Object) -> Object:
        """Create an object, or replace it."""
        with self.lock:
            name = thing["metadata"]["name"]
            event = "MODIFIED" if name in self.objects[plural] else "ADDED"
            made = copy.deepcopy(thing)
            made["metadata"].setdefault("uid", str(uuid.uuid4()))
            made["metadata"].setdefault("creationTimestamp", datetime.now(UTC).isoformat())
            self.objects[plural][name] = self._record(plural, event, made)
            return made

    def change(self, plural: str, name: str, change: Callable[[Object], None]) -> None:
        """Change an object; nothing if it is gone."""
        with self.lock:
            if name in self.objects[plural]:
                made = copy.deepcopy(self.objects[plural][name])
                change(made)
                self.put(plural, made)

    def remove(self, plural: str, name: str) -> None:
        """Remove an object, and its pods if it is a Job."""
        with self.lock:
            thing = self.objects[plural].pop(name, None)
            if thing is not None:
                self._record(plural, "DELETED", copy.deepcopy(thing))

    def names(self, plural: str) -> list[str]:
        with self.lock:
            return sorted(self.objects[plural])

    def one(self, plural: str, name: str) -> Object:
        """Return a copy of an object."""
        with self.lock:
            return copy.deepcopy(self.objects[plural][name])

    def forget(self) -> None:
        """Forget all events: who watches after an older version gets 410, also whoever watches now."""
        with self.lock:
            self._events.append(("leases", "MODIFIED", {}))  # the server's versions count what others do, too
            self._forgotten = len(self._events)
            self.break_watches()

    def break_watches(self) -> None:
        """End all watches, as a load balancer does."""
        with self.lock:
            self._watches += 1
            self.lock.notify_all()

    def count(self, method: str, plural: str) -> int:
        with self.lock:
            return sum(call[:2] == (method, plural) for call in self.calls)

    def list(self, plural: str, labels: dict[str, str]) -> Object:
        with self.lock:
            items = [copy.deepcopy(one) for _, one in sorted(self.objects[plural].items()) if _has(one, labels)]
            return {"kind": "List", "metadata": {"resourceVersion": str(len(self._events))}, "items": items}

    def watch(self, plural: str, labels: dict[str, str], after: int) -> Iterator[Object]:
        """Yield the events after a version as they happen."""
        end, watches = time.monotonic() + self.watch_seconds, self._watches
        while (left := end - time.monotonic()) > 0:
            with self.lock:
                if after < self._forgotten:
                    yield {"type": "ERROR", "object": _status(410, "too old resource version")}
                    return
                self.lock.wait_for(
                    lambda known=after: len(self._events) > known or watches != self._watches, timeout=left
                )
                if watches != self._watches or self._ended:
                    return
                events, after = self._events[after:], len(self._events)
            for kind, event, thing in events:
                if kind == plural and _has(thing, labels):
                    yield {"type": event, "object": thing}

    def create(self, plural: str, thing: Object, *, dry_run: bool) -> tuple[int, Object]:
        """Return the code of the response, and the object or what is wrong with it."""
        thing["metadata"].setdefault("namespace", NAMESPACE)
        fault = _fault(thing)
        if fault:
            return 422, _status(422, fault)
        with self.lock:
            if thing["metadata"]["name"] in self.objects[plural]:
                return 409, _status(409, "already exists", "AlreadyExists")
            return 201, thing if dry_run else self.put(plural, thing)

    def delete(self, plural: str, name: str, policy: str) -> tuple[int, Object]:
        """Delete an object; one that waits for what it owns is removed by whoever runs it."""
        with self.lock:
            if name not in self.objects[plural]:
                return 404, _status(404, "not found")
            if policy == "Foreground":
                now = datetime.now(UTC).isoformat()
                self.change(plural, name, lambda thing: thing["metadata"].update(deletionTimestamp=now))
            else:
                self.remove(plural, name)
            return 200, _status(200, "deleted")

    def end(self) -> None:
        with self.lock:
            self._ended = True
            self.break_watches()

    def _record(self, plural: str, event: str, made: Object) -> Object:
        made["metadata"]["resourceVersion"] = str(len(self._events) + 1)
        self._events.append((plural, event, copy.deepcopy(made)))
        self.lock.notify_all()
        return made


def _has(thing: Object, labels: dict[str, str]) -> bool:
    return labels.items() <= thing["metadata"].get("labels", {}).items()


def _status(code: int, message: str, reason: str = "") -> Object:
    status = "Success" if code < 400 else "Failure"
    said = {"status": status, "code": code, "message": message, "reason": reason}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **said}


def _fault(thing: Object) -> str:
    """Return what Kubernetes refuses in an object; empty if nothing."""
    import kubernetes_validate

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kubernetes_validate.validate(thing, SCHEMAS, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    if len(thing["metadata"]["name"]) > 63:
        return "a name has at most 63 characters"
    return _fault_of_job(thing) if thing["kind"] == "Job" else ""


def _fault_of_job(job: Object) -> str:
    """Return what the schemas do not say, and Kubernetes refuses."""
    template = job["spec"]["template"]
    if template["spec"].get("restartPolicy") != "Never":
        return "podFailurePolicy needs restartPolicy Never"
    for each in (job["metadata"], template["metadata"]):
        wrong = [value for value in each.get("labels", {}).values() if not _LABEL.fullmatch(value)]
        if wrong:
            return f"values of labels: {wrong}"
    volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
    for container in template["spec"]["containers"]:
        if not {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes:
            return "a mount has no volume"
        names = [one["name"] for one in container.get("env", ())]
        if len(names) != len(set(names)):
            return f"a variable is there twice: {names}"
        requests, limits = (container.get("resources", {}).get(each, {}) for each in ("requests", "limits"))
        if any(_number(amount) > _number(limits.get(name, amount)) for name, amount in requests.items()):
            return "a request is over its limit"
    return ""


def _number(text: str) -> float:
    scale = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", text)
    assert match is not None, text
    return float(match[1]) * scale.get(match[2], 1)


class _Handler(BaseHTTPRequestHandler):
    api: JobsApi
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def do_GET(self) -> None:
        self.answer()

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - their names are those of the methods

    def answer(self) -> None:
        split = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        match = _PATH.fullmatch(split.path)
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api.tokens and token not in self.api.tokens:
            self.send(401, _status(401, "Unauthorized"))
        elif match is None or _KINDS.get(match[2]) != match[1]:
            self.send(404, _status(404, "the server could not find the requested resource"))
        else:
            method = "WATCH" if "watch" in query else self.command
            self.api.calls.append((method, match[2], match[3] or ""))
            self.serve(method, match[2], match[3] or "", query, body)

    def serve(self, method: str, plural: str, name: str, query: dict[str, str], body: Object) -> None:
        for refusal in self.api.refusals:
            if (refusal.method, refusal.plural) == (method, plural):
                self.api.refusals.remove(refusal)
                if refusal.done_after is not None:
                    time.sleep(refusal.done_after)
                    self.api.create(plural, body, dry_run=False)
                self.send(refusal.code, _status(refusal.code, refusal.message, refusal.reason), refusal.headers)
                return
        labels = dict(each.split("=", 1) for each in query.get("labelSelector", "").split(",") if each)
        match method:
            case "WATCH":
                self.stream(self.api.watch(plural, labels, int(query.get("resourceVersion", 0))))
            case "POST":
                self.send(*self.api.create(plural, body, dry_run="dryRun" in query))
            case "PUT":
                self.send(200, self.api.put(plural, body))
            case "DELETE":
                self.send(
                    *self.api.delete(plural, name, body.get("propagationPolicy", query.get("propagationPolicy", "")))
                )
            case _ if not name:
                self.send(200, self.api.list(plural, labels))
            case _ if name in self.api.objects[plural]:
                self.send(200, self.api.one(plural, name))
            case _:
                self.send(404, _status(404, "not found"))

    def send(self, code: int, document: Object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, events: Iterator[Object]) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has left
            for event in events:
                self.wfile.write(json.dumps(event).encode() + b"\n")
                self.wfile.flush()


@contextmanager
def jobs_api() -> Iterator[JobsApi]:
    """Serve an empty namespace until the block ends."""
    _fault({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "first"}})  # reading the schemas takes seconds
    api = JobsApi()
    handler = type("Handler", (_Handler,), {"api": api})
    with local_http(handler, waits=False) as api.address:
        yield api
        api.end()


def write_kubeconfig(path: Path, address: str, *, token: str = "") -> None:
    """Write a file with the context ``tests`` and no current one."""
    user = {"token": token} if token else {}
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "here", "cluster": {"server": address}}],
                "users": [{"name": "me", "user": user}],
                "contexts": [{"name": "tests", "context": {"cluster": "here", "user": "me", "namespace": NAMESPACE}}],
            }
        )
    )


def worker_deployment(name: str = "slipway-all", *, stages: str = "merge", **container: Any) -> Object:
    """Return a Deployment of workers as the manifests have it, without replicas."""
    labels = {"app.kubernetes.io/part-of": "slipway", "app.kubernetes.io/component": "worker"}
    spec = {
        "serviceAccountName": "slipway-worker",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 3720,
        "containers": [
            {
                "name": "worker",
                "image": "slipway-merge:1",
                "command": ["slipway", "worker"],
                "args": [f"--stage={stages}", "--coordinator=elsewhere:7070", "--slots=1", "--drain-seconds=3600"],
                "env": [{"name": "SLIPWAY_STORE", "value": "/elsewhere"}, {"name": "KEPT", "value": "yes"}],
                "ports": [{"name": "grpc", "containerPort": 7070}],
                "startupProbe": {"grpc": {"port": 7070}},
                "livenessProbe": {"tcpSocket": {"port": "grpc"}},
                "readinessProbe": {"grpc": {"port": 7070}},
                "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"cpu": "8", "memory": "8Gi"}},
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                **container,
            }
        ],
        "volumes": [
            {
                "name": "scratch",
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Gi"}}}
                    }
                },
            }
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
