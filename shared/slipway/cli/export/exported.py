"""``slipway export``: run the export with a display of its progress, and print its result."""

from __future__ import annotations

from slipway.cli.export.summary import summary
from slipway.configuration import LoadedConfiguration
from slipway.exporting.job import run_export
from slipway.observability.telemetry import tracing
from slipway.progress.display import open_display
from slipway.progress.observer import ProgressForm
from slipway.reasons import REASONS
from slipway.settings import Settings
from slipway.terminal.console import print_json, show


def show_export(
    loaded: LoadedConfiguration,
    settings: Settings,
    *,
    as_json: bool,
    progress: ProgressForm,
    bring_sources: bool,
    request_id: str,
) -> int:
    """Run the export, print its result, and return the exit code."""
    level = loaded.configuration.log.level
    with tracing(settings), open_display(progress, level=level, resuming=True) as display:
        result = run_export(loaded, settings, display, bring_sources=bring_sources, request_id=request_id)
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        show(summary(result))
    if result.success:
        return 0
    return REASONS[result.reason].category.exit_code if result.reason in REASONS else 1
