"""An operator for ModelExport resources: ``kopf run export_operator.py`` makes an export of each at a Slipway coordinator.

``kubectl apply -f crd.yaml -f model-export.yaml`` asks for one, ``kubectl get modelexports`` shows its state, and deleting the resource
cancels it. The coordinator is that of SLIPWAY_URL, SLIPWAY_PROJECT, SLIPWAY_TOKEN_FILE and SLIPWAY_TLS_CA_FILE. Needs ``pip install kopf``,
and slipway_http.py beside it; the operator's ServiceAccount may list, watch and patch modelexports and their status.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import kopf
from slipway_http import ENDED, Slipway, SlipwayError, failure_of, request_id

RESOURCE = ("slipway.dev", "v1alpha1", "modelexports")
PAUSE_SECONDS = 10.0


def coordinator(logger: Any = logging) -> Slipway:
    """Return the coordinator; a call to one that is away fails at once, because kopf repeats handlers by itself."""
    return Slipway.from_environment(tell=logger.info, patience_seconds=0)


@contextmanager
def calls(status: MutableMapping[str, Any]) -> Iterator[None]:
    """Let kopf repeat what a coordinator may take later, and put into the status what it refused."""
    try:
        yield
    except SlipwayError as error:
        if error.retryable:
            raise kopf.TemporaryError(str(error), delay=PAUSE_SECONDS) from error
        status.update(state="FAILED", reason=error.reason, message=str(error))
        raise kopf.PermanentError(str(error)) from error


def goes_on(status: Mapping[str, Any]) -> bool:
    """Return whether a resource has an export that has not ended, as far as is known."""
    return "export" in status and f"EXPORT_STATE_{status.get('state')}" not in ENDED


@kopf.on.create(*RESOURCE)
def create(spec: Mapping[str, Any], uid: str, patch: Any, **_: Any) -> None:
    """Make the export of a new resource; a repeated call finds the same one."""
    with calls(patch.status):
        known = request_id("kopf", uid)
        name = coordinator().submit(dict(spec["configuration"]), request_id=known, continues=False)
    patch.status.update(export=name, state="QUEUED")


@kopf.timer(*RESOURCE, interval=PAUSE_SECONDS, when=lambda status, **_: goes_on(status))
def follow(status: Mapping[str, Any], patch: Any, logger: Any, **_: Any) -> None:
    """Bring the state of the export into the resource, until it has ended."""
    slipway = coordinator(logger)
    with calls(patch.status):
        export = slipway.get(status["export"])
        failure = failure_of(export)
        ended = export.get("state") in ENDED
        outputs = slipway.outputs(export) if ended and not failure else {}
    patch.status["state"] = export.get("state", "").removeprefix("EXPORT_STATE_")
    if failure:
        patch.status.update(reason=failure.reason, message=str(failure))
    if failure and export.get("state") == ENDED[0]:
        patch.status["state"] = "FAILED"  # it ran to its end, and an output differs
    if outputs:
        patch.status["outputs"] = {kind: asdict(output) for kind, output in outputs.items()}


@kopf.on.delete(*RESOURCE)
def cancel(status: Mapping[str, Any], **_: Any) -> None:
    """Cancel the export of a deleted resource."""
    if goes_on(status):
        with calls({}):
            coordinator().cancel(status["export"])
