"""Running an export for the command line: logs, traces, progress, the job, the answer."""

from __future__ import annotations

from slipway.cli.console import answers, errors, print_json
from slipway.cli.display import make_display
from slipway.cli.job import ExportJob
from slipway.cli.summary import summary
from slipway.configuration import LoadedConfiguration
from slipway.errors import REASONS
from slipway.logs import configure_logs
from slipway.result import ExportResult
from slipway.settings import Settings
from slipway.telemetry import tracing


def run_export(loaded: LoadedConfiguration, settings: Settings, *, coordinator: str, as_json: bool) -> int:
    """Carry the export out and print its result; answers the exit code."""
    configure_logs(loaded.configuration.log.level, console=errors)
    with tracing(settings):
        job = ExportJob(loaded, settings, coordinator=coordinator, display=make_display(resuming=True))
        result = job.run()
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        answers.print(summary(result))
    return exit_code(result)


def exit_code(result: ExportResult) -> int:
    """0, or the code of the reason for which the export is no success."""
    if result.success:
        return 0
    return REASONS[result.reason].category.exit_code if result.reason in REASONS else 1
