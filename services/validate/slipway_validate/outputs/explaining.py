"""Have a format say why an output of it differs from the model, in a process of its own."""

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
    model: Path,
    exact: bool,
    ctx: Context,
    folder: Path,
    timeout_seconds: float,
) -> OutputValidation:
    """Return a verdict with what the format says of the output's weights; the verdict itself if it is not failed for its results.

    Args:
        found: The verdict.
        runtime: The format's runtime.
        output: Folder of the output.
        model: Folder of the merged model, or of the base.
        exact: Whether the output's weights are those of ``model``.
        ctx: The stage's context.
        folder: Folder for the process.
        timeout_seconds: How long the format may take.

    Raises:
        StageError: ``CANCELLED``.
    """
    of_results = any(check.name not in texts.CHECKS for check in found.failed_checks)
    if found.status is not OutputStatus.FAILED or not of_results or runtime is None or not runtime.explain:
        return found
    asked = ExplainSpec(function=runtime.explain, output=output.absolute(), model=model.absolute(), exact=exact)
    spec = Spec(explain=asked)
    result = process.run(spec, folder, ctx, label=f"{found.name}, weights", timeout_seconds=timeout_seconds)
    if result.status != "done" or not result.message:
        return found
    return found.model_copy(update={"explanation": f"{result.message}; {found.explanation}"})
