"""Make the sample for ``slipway sample``, and show progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipway.cli.progress.display import showing
from slipway.cli.progress.forms import ProgressForm
from slipway.cli.progress.reporter import StageReporter
from slipway.files.local_folders import check_local


def run_sample(
    directory: Path, *, seed: int, progress: ProgressForm = ProgressForm.AUTO, level: str = "info"
) -> dict[str, Any]:
    """Train the sample into a folder; return its summary as plain data.

    Raises:
        ModelExportError: As :func:`slipway.sample.make_sample`.
    """
    check_local(directory, named_by="DIRECTORY")
    from slipway.sample import make_sample

    with showing(progress, level=level) as display, StageReporter("sample", display) as reporter:
        summary = make_sample(directory, seed=seed, on_progress=lambda step: reporter.progress(step, 0))
    return summary.model_dump(mode="json")
