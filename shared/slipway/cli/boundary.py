"""The one place where errors become messages and exit codes."""

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

from slipway.cli.asked import Asked

EXIT_USAGE, EXIT_RESOURCE, EXIT_INTERRUPTED = 2, 5, 130
IMPATIENT_SECONDS = 1.0


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code; the only caller of :func:`sys.exit`."""
    from slipway.cli.completion import join_words
    from slipway.cli.terminal.encoding import write_any_encoding
    from slipway.cli.terminal.unread import flush

    join_words(os.environ)
    write_any_encoding()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)

    def call(asked: Asked) -> None:
        from slipway.cli.app import app

        app(args=arguments, prog_name="slipway", obj=asked)

    sys.exit(flush(outcome(call)))


def outcome(call: Callable[[Asked], Any]) -> int:
    """The exit code of a call, which fills in how it is to be answered.

    What went wrong is said on standard error, and in JSON on standard output if asked for.
    """
    from slipway.errors import ModelExportError

    asked = Asked()
    try:
        call(asked)
    except SystemExit as error:
        return _left(error, asked)
    except KeyboardInterrupt:
        return _say_failure(_interrupted(asked), asked)
    except ModelExportError as error:
        return _say_failure(error, asked)
    except Exception as error:  # noqa: BLE001 - the boundary: nothing may end in a bare traceback
        if asked.debug:
            sys.stderr.write(_traceback(error))
        return _say_unexpected(error, asked)
    return 0


def _say_unexpected(error: Exception, asked: Asked) -> int:
    try:
        return _say_failure(_unexpected(error), asked)
    except (MemoryError, ImportError, OSError) as fault:  # there is not even enough to say so nicely
        if isinstance(fault, OSError) and fault.errno != errno.ENOMEM:
            raise
        os.write(2, b"error [OUT_OF_MEMORY] out of memory\n")
        return EXIT_RESOURCE


def _left(error: SystemExit, asked: Asked) -> int:
    """The exit code of a command that typer, or the command itself, has ended."""
    from slipway.cli.terminal.unread import EXIT_UNREAD, left_unread

    if left_unread(error):
        return EXIT_UNREAD
    if isinstance(error.__context__, BrokenPipeError):  # of some connection; typer takes it for the output's
        return _say_failure(_unexpected(error.__context__), asked)
    code = error.code if isinstance(error.code, int) else int(bool(error.code))
    # typer's answer to KeyboardInterrupt; a command that ends with the code of a cancelled export has said so itself
    if code == EXIT_INTERRUPTED and isinstance(getattr(error.__context__, "__cause__", None), KeyboardInterrupt):
        return _say_failure(_interrupted(asked), asked)
    if code == EXIT_USAGE and asked.as_json:
        message = f"{_misused(error)}; see slipway --help"
        _print_json({"success": False, "reason": "USAGE", "error_message": message, "exit_code": EXIT_USAGE})
    return code


def _misused(error: SystemExit) -> str:
    """What typer said of a command before it exited."""
    said = getattr(error.__context__, "format_message", None)  # of click's exceptions; typer brings a click of its own
    return str(said()) if said else "this is not a valid command"


def _interrupt(number: int, frame: object) -> None:  # noqa: ARG001 - a signal handler's signature
    """The first signal unwinds, which stops what runs; a later one ends at once, should the unwinding hang."""
    first = time.monotonic()

    def again(number: int, frame: object) -> None:  # noqa: ARG001 - as above
        if time.monotonic() - first > IMPATIENT_SECONDS:
            os._exit(EXIT_INTERRUPTED)  # running stages see their lifeline end; the next command cleans up

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, again)
    raise KeyboardInterrupt


def _interrupted(asked: Asked) -> Any:
    from slipway.errors import StageError

    remedy = "the same command again goes on from here" if asked.command == "export" else ""
    return StageError("interrupted", reason="CANCELLED", remedy=remedy)


def _unexpected(error: Exception) -> Any:
    """A fault of Slipway's own, or one of the surroundings that has a reason."""
    from slipway.errors import ArtifactError, ModelExportError, StageError
    from slipway.folders.disk_full import is_disk_full
    from slipway.machine.out_of_memory import REMEDY, is_out_of_memory

    if is_out_of_memory(error):
        what = f"out of memory ({type(error).__name__}: {error})"
        return StageError(what, reason="OUT_OF_MEMORY", remedy=f"{REMEDY}; see also ulimit -v")
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        what = f"{name}{error.strerror or error}"
        if is_disk_full(error):
            return ArtifactError(
                what, reason="DISK_FULL", remedy="free space there; slipway cache gc frees the store's"
            )
        return ArtifactError(
            what, reason="FILE_ERROR", remedy="check that it exists and that you may read and write it"
        )
    left = _surroundings()
    where = _write_log(error, left)
    remedy = f"the traceback is in {where}" if where else "run it with --debug to see the traceback"
    return ModelExportError(f"{type(error).__name__}: {error}", reason="INTERNAL", remedy=remedy, about=left)


def _surroundings() -> dict[str, int]:
    """What this machine has left, as failures of stages note it."""
    from slipway.errors import ConfigurationError
    from slipway.execution.surroundings import PREFIX, surroundings
    from slipway.settings import Settings

    try:
        folders = {"home": Settings.from_environment(os.environ).home}
    except ConfigurationError:
        folders = {}
    return {f"{PREFIX}{name}": value for name, value in surroundings(**folders).items()}


def _write_log(error: Exception, left: Mapping[str, int]) -> Path | None:
    from slipway.errors import ConfigurationError
    from slipway.redaction import redact
    from slipway.settings import Settings

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
    from slipway.redaction import redact
    from slipway.texts import printable

    return printable(redact("".join(traceback.format_exception(error))))


def _say_failure(error: Any, asked: Asked) -> int:
    from slipway.cli.progress.forms import ProgressForm, error_line

    failure = error.failure()
    with contextlib.suppress(BrokenPipeError, SystemExit):  # that nobody hears of it makes it no other failure
        if asked.progress == ProgressForm.JSON:
            sys.stderr.write(error_line(failure) + "\n")
        else:
            _show_failure(failure)
    if asked.as_json:
        with contextlib.suppress(BrokenPipeError):
            _print_json(_document(failure))
    return int(failure.exit_code)


def _show_failure(failure: Any) -> None:
    from rich.text import Text

    from slipway.cli.terminal.console import errors
    from slipway.redaction import redact

    lines = Text("error", style="bold red")
    lines.append(f" [{failure.reason}] ", style="red").append(redact(failure.message))
    if failure.remedy:
        lines.append(f"\n  {redact(failure.remedy)}", style="cyan")
    errors.print(lines, soft_wrap=True, highlight=False)


def _document(failure: Any) -> dict[str, Any]:
    """A failure as JSON, with the names that an ``ExportResult`` uses too."""
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
    with contextlib.suppress(ValueError):  # a coordinator's error may say anything
        document["problems"] = parse_json(about.get("problems", "").encode())
        del about["problems"]
    return {**document, "about": about}


def _print_json(document: dict[str, Any]) -> None:
    from slipway.cli.terminal.console import print_json

    print_json(document)
