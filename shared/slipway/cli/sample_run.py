"""Making the sample for ``slipway sample``, with progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipway.cli.display import StageReporter
from slipway.errors import ConfigurationError


def run_sample(directory: Path, *, seed: int) -> dict[str, Any]:
    """Train the sample into a folder; answers its summary as plain data.

    Raises:
        ConfigurationError: ``UNSUPPORTED``: the extra ``sample`` is not installed.
        ModelExportError: As :func:`slipway.sample.make_sample`.
    """
    from slipway.stage import installed_version

    missing = [name for name in ("torch", "transformers", "peft", "accelerate") if not installed_version(name)]
    if missing:
        raise ConfigurationError(
            f"the sample needs {', '.join(missing)}",
            reason="UNSUPPORTED",
            remedy="pip install 'slipway[sample]'",
        )
    from slipway.sample import make_sample

    with StageReporter("sample") as reporter:
        summary = make_sample(directory, seed=seed, on_progress=lambda progress: reporter.progress(progress, 0))
    return summary.model_dump(mode="json")
