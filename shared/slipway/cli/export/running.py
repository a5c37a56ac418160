"""Run an export for the command line, with logs, traces and progress, and print its result."""

from __future__ import annotations

from slipway.cli.export.job import ExportJob
from slipway.cli.export.summary import summary
from slipway.cli.progress.display import showing
from slipway.cli.progress.forms import ProgressForm
from slipway.cli.terminal.console import print_json, show
from slipway.configuration import LoadedConfiguration
from slipway.distribution.extras import require
from slipway.observability.telemetry import tracing
from slipway.reasons import REASONS
from slipway.settings import Settings


def run_export(
    loaded: LoadedConfiguration,
    settings: Settings,
    *,
    as_json: bool,
    progress: ProgressForm,
    bring_sources: bool,
    request_id: str,
) -> int:
    """Run the export, print its result, and return the exit code."""
    if not settings.coordinator:
        require(
            *("coordinator", "worker", "report"),
            what="slipway export without a coordinator",
            install="all",
            otherwise="name a coordinator: --coordinator HOST:PORT",
        )
    level = loaded.configuration.log.level
    with tracing(settings), showing(progress, level=level, resuming=True) as display:
        result = ExportJob(loaded, settings, display, bring_sources=bring_sources, request_id=request_id).run()
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        show(summary(result))
    if result.success:
        return 0
    return REASONS[result.reason].category.exit_code if result.reason in REASONS else 1
