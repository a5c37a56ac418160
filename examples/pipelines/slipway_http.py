"""Exports at a Slipway coordinator over HTTP, with Python's standard library alone: copy this file beside your DAG, asset or operator.

    slipway = Slipway("https://slipway-coordinator:7080", project="research", token_file="/var/run/slipway/token")
    outputs = slipway.run({"checkpoint": {"path": "s3://training/run-17"}}, request_id=request_id("nightly", "2026-11-30"))
    print(outputs["onnx-int8"].digest, outputs["onnx-int8"].verdict)

The coordinator runs with ``--http``; its ``/openapi.json`` describes the configuration and every other call.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENDED = ("EXPORT_STATE_SUCCEEDED", "EXPORT_STATE_FAILED", "EXPORT_STATE_CANCELLED")
_VALIDATION = "validation"
_PASSING = (502, 503, 504)
"""HTTP statuses after which the same request may succeed, whatever the response says."""
_LARGEST_RESPONSE = 32 << 20
_CALL_SECONDS, _LONGEST_PAUSE = 60, 15.0


class SlipwayError(Exception):
    """A refused call, or an export that did not succeed.

    Attributes:
        reason: One of the reasons in docs/reasons.md, such as ``VALIDATION_FAILED``.
        remedy: What to do about it; may be empty.
        retryable: Whether the same step may succeed when it is repeated.
    """

    def __init__(self, message: str, *, reason: str, remedy: str = "", retryable: bool = False) -> None:
        super().__init__(f"{reason}: {message}" + (f"; {remedy}" if remedy else ""))
        self.reason, self.remedy, self.retryable = reason, remedy, retryable


@dataclass(frozen=True)
class Output:
    """One delivered format.

    Attributes:
        digest: Of the artifact: ``slipway pull DIGEST FOLDER`` fetches it.
        size_bytes: Size of its files, each content once.
        verdict: ``passed``, ``failed``, ``not_run`` or ``not_validated``.
        mean_kl: Distance from the fine-tuned model, nats per token; None if it was not measured.
        top1_agreement: Share of positions with the same most likely token; None if it was not measured.
    """

    digest: str
    size_bytes: int
    verdict: str = "not_validated"
    mean_kl: float | None = None
    top1_agreement: float | None = None


def request_id(*parts: object) -> str:
    """Return an id for what these parts name: the same request again returns the export that it made before."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


@dataclass
class Slipway:
    """A coordinator.

    Attributes:
        url: Such as ``https://slipway-coordinator:7080``.
        project: Project of the exports.
        token: Token of a submitter.
        token_file: File with the token, read for every call; it takes the place of ``token``.
        ca_file: Authority of the coordinator's certificate; the machine's own without one.
        patience_seconds: How long a call is repeated while the coordinator is away.
        tell: Called with a line when a task of an export has another state.
    """

    url: str
    project: str = "default"
    token: str = field(default="", repr=False)
    token_file: str = ""
    ca_file: str = ""
    patience_seconds: float = 300
    tell: Callable[[str], object] = print

    @classmethod
    def from_environment(cls, **more: Any) -> Slipway:
        """Read ``SLIPWAY_URL``, ``SLIPWAY_PROJECT``, ``SLIPWAY_TOKEN``, ``SLIPWAY_TOKEN_FILE`` and ``SLIPWAY_TLS_CA_FILE``."""
        return cls(
            url=os.environ["SLIPWAY_URL"],
            project=os.environ.get("SLIPWAY_PROJECT") or "default",
            token=os.environ.get("SLIPWAY_TOKEN", ""),
            token_file=os.environ.get("SLIPWAY_TOKEN_FILE", ""),
            ca_file=os.environ.get("SLIPWAY_TLS_CA_FILE", ""),
            **more,
        )

    def run(self, configuration: Mapping[str, Any], *, request_id: str, **more: Any) -> dict[str, Output]:
        """Make an export and wait for it; whatever ends the process before cancels the export."""
        name = self.submit(configuration, request_id=request_id, **more)
        try:
            return self.wait(name)
        except BaseException as ending:
            if not isinstance(ending, Exception):  # an interrupt, or what a platform ends a step with
                try:
                    self.cancel(name)
                except SlipwayError as error:
                    self.tell(f"{name} goes on, because it could not be cancelled: {error}")
            raise

    def submit(
        self,
        configuration: Mapping[str, Any],
        *,
        request_id: str,
        sources: Mapping[str, str] | None = None,
        continues: bool = True,
    ) -> str:
        """Create an export and return its name, ``projects/PROJECT/exports/ID``.

        Args:
            configuration: Settings, as ``ExportConfiguration`` of ``/openapi.json``.
            request_id: The same one again is the same export: a step may be repeated.
            sources: Digests of artifacts by name (``base``, ``adapter``), for what the configuration does not name by address.
            continues: Run the export of an earlier request again if it failed or was cancelled; finished tasks are kept.
        """
        body = {"configuration": configuration, "requestId": request_id, "sources": dict(sources or {})}
        export = self._call("POST", f"{self._parent}/exports", body)
        name = str(export["name"])
        while continues and export.get("state") == "EXPORT_STATE_CANCELLING":
            time.sleep(1)
            export = self.get(name)
        if continues and export.get("state") in ENDED[1:]:
            self._change(f"{name}:retry")
        return name

    def get(self, name: str) -> dict[str, Any]:
        """Return an export."""
        return self._call("GET", f"/v1/{name}")

    def wait(self, name: str) -> dict[str, Output]:
        """Wait until an export has ended, and return its outputs by format.

        Raises:
            SlipwayError: It failed, it was cancelled, or an output does not behave like the fine-tuned model.
        """
        pause, told = 0.5, dict[str, str]()
        while True:
            export = self.get(name)
            for task in export.get("tasks", ()):
                state = task.get("state", "").removeprefix("TASK_STATE_").lower()
                if told.get(task["id"]) != state:
                    told[task["id"]] = state
                    self.tell(f"{task['id']} {state}")
            if export.get("state") in ENDED:
                return self.outputs(export)
            time.sleep(pause)
            pause = min(1.3 * pause, _LONGEST_PAUSE)

    def cancel(self, name: str) -> None:
        """Cancel an export; one that has ended stays as it is."""
        self._change(f"{name}:cancel", patience_seconds=5)

    def outputs(self, export: Mapping[str, Any]) -> dict[str, Output]:
        """Return the outputs of an ended export by format.

        Raises:
            SlipwayError: See :meth:`wait`.
        """
        failure = failure_of(export)
        if failure is not None:
            raise failure
        found, outputs = _findings(export), {}
        for name, digest in sorted(export.get("outputs", {}).items()):
            if name != _VALIDATION:
                said = found.get(name, {})
                outputs[name] = Output(
                    digest=digest,
                    size_bytes=self._size(digest),
                    verdict=said.get("status", "not_validated"),
                    mean_kl=said.get("mean_kl"),
                    top1_agreement=said.get("top1_agreement"),
                )
        return outputs

    @property
    def _parent(self) -> str:
        return f"/v1/projects/{urllib.parse.quote(self.project, safe='')}"

    def _change(self, name: str, **more: Any) -> None:
        """Change the state of an export, unless it has changed already."""
        try:
            self._call("POST", f"/v1/{name}", {}, **more)
        except SlipwayError as error:
            if error.reason != "EXPORT_STATE":
                raise

    def _size(self, digest: str) -> int:
        artifact = self._call("GET", f"{self._parent}/artifacts/{digest}")
        return sum({file["digest"]: int(file.get("sizeBytes", 0)) for file in artifact.get("files", ())}.values())

    def _call(self, verb: str, path: str, body: Any = None, *, patience_seconds: float | None = None) -> dict[str, Any]:
        """Make a call; repeat it while the coordinator is away or asks for patience."""
        patience = self.patience_seconds if patience_seconds is None else patience_seconds
        end, pause = time.monotonic() + patience, 1.0
        while True:
            try:
                return self._call_once(verb, path, body, seconds=min(_CALL_SECONDS, max(patience, 1)))
            except _PassingError as passing:
                wait = max(pause, passing.after_seconds)
                if time.monotonic() + wait > end:
                    raise passing.error from passing
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _call_once(self, verb: str, path: str, body: Any, *, seconds: float) -> dict[str, Any]:
        try:
            request = self._request(verb, path, body)
            tls = ssl.create_default_context(cafile=self.ca_file or None) if self.url.startswith("https:") else None
        except (OSError, ValueError) as fault:
            what = f"{self.url} cannot be called: {fault}"
            raise SlipwayError(
                what, reason="CONFIGURATION_INVALID", remedy="check url, token_file and ca_file"
            ) from fault
        try:
            with urllib.request.urlopen(request, timeout=seconds, context=tls) as response:  # noqa: S310 - as above
                return _read_object(response)
        except urllib.error.HTTPError as refusal:
            error = _error_of(_read_status(refusal), f"{verb} {path}: HTTP {refusal.code}")
            if error.retryable or refusal.code in _PASSING:
                raise _PassingError(error, refusal.headers.get("Retry-After", "")) from refusal
            raise error from refusal
        except (OSError, http.client.HTTPException, ValueError) as fault:
            away = f"{self.url} does not answer as a coordinator does: {fault}"
            error = SlipwayError(away, reason="COORDINATOR_UNAVAILABLE", retryable=True)
            cause = fault.reason if isinstance(fault, urllib.error.URLError) else fault
            if isinstance(cause, ssl.SSLError | ValueError):
                raise error from fault  # another server, or a wrong certificate: waiting does not help
            raise _PassingError(error) from fault

    def _request(self, verb: str, path: str, body: Any) -> urllib.request.Request:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError("it is no address such as https://coordinator:7080")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, method=verb)  # noqa: S310 - the operator's own address
        if data is not None:
            request.add_header("Content-Type", "application/json")
        token = Path(self.token_file).read_text(encoding="utf-8").strip() if self.token_file else self.token
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")  # for no other host
        return request


def failure_of(export: Mapping[str, Any]) -> SlipwayError | None:
    """Return what makes an ended export no success, or None."""
    if export.get("state") not in ENDED:
        return None
    if "error" in export:
        return _error_of(export["error"], "the export failed")
    if export.get("state") == ENDED[2]:
        return SlipwayError("the export was cancelled", reason="CANCELLED", remedy=f"slipway retry {export['name']}")
    # validation.on_failure: keep delivers a level that exceeds its limits, with a warning; the merged model is no level.
    keeps = export.get("configuration", {}).get("validation", {}).get("onFailure") == "keep"
    for name in [name for facts in _validations(export) for name in facts.get("failed_outputs", ())]:
        said = _findings(export).get(name, {})
        if not (keeps and said.get("failed_checks") and "-" in name):
            what = f"{name} failed validation: {said.get('explanation') or 'it differs from the fine-tuned model'}"
            return SlipwayError(what, reason="VALIDATION_FAILED", remedy=said.get("remedy", ""))
    return None


class _PassingError(Exception):
    """A failure after which the same call may succeed."""

    def __init__(self, error: SlipwayError, after: str = "") -> None:
        super().__init__(str(error))
        self.error, self.after_seconds = error, min(int(after), 60) if after.isdecimal() else 0


def _validations(export: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what the validation of an export recorded."""
    return [task.get("facts", {}) for task in export.get("tasks", ()) if task.get("format") == _VALIDATION]


def _findings(export: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what validation found of each output."""
    return {name: said for facts in _validations(export) for name, said in facts.get("outputs", {}).items()}


def _read_object(response: Any) -> dict[str, Any]:
    found = json.loads(response.read(_LARGEST_RESPONSE) or b"{}")
    if not isinstance(found, dict):
        raise ValueError("the response is no JSON object")  # noqa: TRY004 - of the same kind as what is no JSON
    return found


def _read_status(refusal: urllib.error.HTTPError) -> dict[str, Any]:
    try:
        return _read_object(refusal)
    except (OSError, http.client.HTTPException, ValueError):  # a proxy's page
        return {}


def _error_of(status: Mapping[str, Any], otherwise: str) -> SlipwayError:
    """Return the error that a ``google.rpc.Status`` describes."""
    info: Mapping[str, Any] = next((each for each in status.get("details", ()) if each.get("domain") == "slipway"), {})
    said = info.get("metadata", {})
    return SlipwayError(
        status.get("message") or otherwise,
        reason=info.get("reason") or "INTERNAL",
        remedy=said.get("remedy", ""),
        retryable=said.get("retryable") == "true",
    )
