"""Turn every error of a command into a message and an exit code; no other module does this."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from slipway.cli.options import OutputOptions

EXIT_USAGE, EXIT_RESOURCE, EXIT_INTERRUPTED = 2, 5, 130
IMPATIENT_SECONDS = 1.0


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code; only this function calls :func:`sys.exit`."""
    from slipway.cli.completion import join_words
    from slipway.terminal.streams import drop_invalid_sizes, flush, open_closed_streams, write_any_encoding

    open_closed_streams()
    join_words(os.environ)
    drop_invalid_sizes(os.environ)
    write_any_encoding()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)

    def call(options: OutputOptions) -> None:
        from slipway.cli.app import app

        app(args=arguments, prog_name="slipway", obj=options)

    sys.exit(flush(outcome(call)))


def outcome(call: Callable[[OutputOptions], Any]) -> int:
    """Run a call and return its exit code; report an error on standard error, and as JSON on standard output if requested.

    The call fills in the form of the output in the :class:`OutputOptions` that it is given.
    """
    from slipway.errors import ModelExportError

    options = OutputOptions()
    try:
        call(options)
    except SystemExit as error:
        return _exit_code_of_exit(error, options)
    except KeyboardInterrupt:
        return _report_failure(_interruption_error(options), options)
    except ModelExportError as error:
        return _report_failure(error, options)
    except Exception as error:  # noqa: BLE001 - the boundary: nothing may end in a bare traceback
        if options.debug:
            sys.stderr.write(_traceback(error))
        return _report_unexpected(error, options)
    return 0


def _report_unexpected(error: Exception, options: OutputOptions) -> int:
    try:
        return _report_failure(_translate_unexpected(error), options)
    except (MemoryError, ImportError, OSError) as unsaid:  # too little memory even for the usual message
        if isinstance(unsaid, OSError) and unsaid.errno != errno.ENOMEM:
            raise
        os.write(2, b"error [OUT_OF_MEMORY] out of memory\n")
        return EXIT_RESOURCE


def _exit_code_of_exit(error: SystemExit, options: OutputOptions) -> int:
    """Return the exit code of a command that typer, or the command itself, has ended."""
    from slipway.terminal.streams import EXIT_UNREAD, reader_is_gone

    if reader_is_gone(error):
        return EXIT_UNREAD
    if isinstance(error.__context__, BrokenPipeError):  # another connection broke; typer mistakes it for the output
        return _report_failure(_translate_unexpected(error.__context__), options)
    code = error.code if isinstance(error.code, int) else int(bool(error.code))
    # typer's handling of KeyboardInterrupt; a command with the exit code of a cancelled export has reported it itself
    if code == EXIT_INTERRUPTED and isinstance(getattr(error.__context__, "__cause__", None), KeyboardInterrupt):
        return _report_failure(_interruption_error(options), options)
    if code == EXIT_USAGE and options.as_json:
        message = f"{_usage_message(error).rstrip('.')}; see slipway --help"
        _print_json({"success": False, "reason": "USAGE", "error_message": message, "exit_code": EXIT_USAGE})
    return code


def _usage_message(error: SystemExit) -> str:
    """Return typer's message about a misused command."""
    said = getattr(
        error.__context__, "format_message", None
    )  # click's exceptions have it; typer includes its own click
    return str(said()) if said else "this is not a valid command"


def _interrupt(number: int, frame: object) -> None:  # noqa: ARG001 - a signal handler's signature
    """Unwind at the first signal, which stops the running work; exit at once at a later one, in case the unwinding hangs."""
    first = time.monotonic()

    def exit_if_impatient(number: int, frame: object) -> None:  # noqa: ARG001 - as above
        if time.monotonic() - first > IMPATIENT_SECONDS:
            os._exit(EXIT_INTERRUPTED)  # running stages end with their standard input; the next command cleans up

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, exit_if_impatient)
    raise KeyboardInterrupt


def _interruption_error(options: OutputOptions) -> Any:
    from slipway.errors import StageError

    remedy = "run the same command again to continue" if options.command == "export" else ""
    return StageError("interrupted", reason="CANCELLED", remedy=remedy)


def _translate_unexpected(error: Exception) -> Any:
    """Translate an unexpected exception: a known fault of the machine gets its reason, any other is ``INTERNAL``."""
    from slipway.errors import ModelExportError
    from slipway.machine.known_faults import translate_fault

    known = translate_fault(error)
    if known is not None:
        return known
    left = _surroundings()
    where = _write_log(error, left)
    remedy = f"the traceback is in {where}" if where else "run it with --debug to see the traceback"
    return ModelExportError(f"{type(error).__name__}: {error}", reason="INTERNAL", remedy=remedy, about=left)


def _surroundings() -> dict[str, int]:
    """Return this machine's free resources, as failures of stages record them."""
    from slipway.errors import ConfigurationError
    from slipway.execution.failures import PREFIX, surroundings
    from slipway.settings import Settings

    try:
        folders = {"home": Settings.from_environment(os.environ).home}
    except ConfigurationError:
        folders = {}
    return {f"{PREFIX}{name}": value for name, value in surroundings(**folders).items()}


def _write_log(error: Exception, left: Mapping[str, int]) -> Path | None:
    from slipway.errors import ConfigurationError
    from slipway.settings import Settings
    from slipway.texts import redact

    try:
        folder = Settings.from_environment(os.environ).home / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}.log"
        lines = "".join(f"{name}: {value}\n" for name, value in left.items())
        path.write_text(f"{_traceback(error)}\n{redact(lines)}", encoding="utf-8", errors="backslashreplace")
    except (OSError, ConfigurationError):
        return None
    return path


def _traceback(error: Exception) -> str:
    from slipway.texts import printable, redact

    return printable(redact("".join(traceback.format_exception(error))))


def _report_failure(error: Any, options: OutputOptions) -> int:
    from slipway.cli.options import error_line
    from slipway.progress.observer import ProgressForm

    failure = error.failure()
    with contextlib.suppress(OSError, SystemExit):  # a missing reader or a full disk does not change the failure
        if options.progress == ProgressForm.JSON:
            sys.stderr.write(error_line(failure) + "\n")
        else:
            _show_failure(failure)
    if options.as_json:
        with contextlib.suppress(OSError):
            _print_json(_failure_document(failure))
    return int(failure.exit_code)


def _show_failure(failure: Any) -> None:
    from rich.text import Text

    from slipway.terminal.console import errors
    from slipway.texts import redact

    lines = Text("error", style="bold red")
    lines.append(f" [{failure.reason}] ", style="red").append(redact(failure.message))
    if failure.remedy:
        lines.append(f"\n  {redact(failure.remedy)}", style="cyan")
    errors.print(lines, soft_wrap=True, highlight=False)


def _failure_document(failure: Any) -> dict[str, Any]:
    """Return a failure as JSON-ready data, with the names of an ``ExportResult``."""
    from slipway.files.json_documents import parse_json

    about = dict(failure.about)
    document = {
        "success": False,
        "reason": failure.reason,
        "error_message": str(failure),
        "remedy": failure.remedy,
        "retryable": failure.retryable,
        "exit_code": failure.exit_code,
    }
    with contextlib.suppress(ValueError):  # a coordinator's error may hold any text
        document["problems"] = parse_json(about.get("problems", "").encode())
        del about["problems"]
    return {**document, "about": about}


def _print_json(document: dict[str, Any]) -> None:
    from slipway.terminal.console import print_json

    print_json(document)
