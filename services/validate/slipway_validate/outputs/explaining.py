"""Have a format say why an output of it differs from the merged model, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from slipway.formats import Runtime
from slipway.stage import Context
from slipway.validation.findings import OutputStatus, OutputValidation
from slipway_validate.judging import texts
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import ExplainSpec, Spec


def explained(
    found: OutputValidation,
    runtime: Runtime | None,
    *,
    output: Path,
    merged: Path | None,
    ctx: Context,
    folder: Path,
    timeout_seconds: float,
) -> OutputValidation:
    """Return a verdict with what the format says of the output's weights; the verdict itself if it is not failed for its results.

    Raises:
        StageError: ``CANCELLED``.
    """
    of_results = any(check.name not in texts.CHECKS for check in found.failed_checks)
    if (
        found.status is not OutputStatus.FAILED
        or not of_results
        or merged is None
        or runtime is None
        or not runtime.explain
    ):
        return found
    spec = Spec(explain=ExplainSpec(function=runtime.explain, output=output.absolute(), merged=merged.absolute()))
    result = process.run(spec, folder, ctx, label=f"{found.name}, weights", timeout_seconds=timeout_seconds)
    if result.status != "done" or not result.message:
        return found
    return found.model_copy(update={"explanation": f"{result.message}; {found.explanation}"})
