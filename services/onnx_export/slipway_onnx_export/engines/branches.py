"""Refuse a trace of the TorchScript tracer that depends on its sample."""

from __future__ import annotations

from collections.abc import Sequence

from slipway.errors import TracerWarningError
from slipway.model.graphs.branches import Branch


def tracer_warning_error(branches: Sequence[Branch], *, attention: str) -> TracerWarningError:
    """Return the error that refuses a trace for the first of these places."""
    first = branches[0]
    return TracerWarningError(
        f"the trace depends on its sample at {first.file}:{first.line}: {first.message}",
        remedy="use engine dynamo with opset 18 or later, or tracer_warnings prove",
        about={
            "engine": "legacy",
            "attention": attention,
            "kind": first.kind,
            "file": first.file,
            "line": first.line,
            "code": first.code,
            "places": "\n".join(map(str, branches)),
        },
    )
