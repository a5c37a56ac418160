"""Hostile names and messages neither control nor deceive a terminal, page or log."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path

import pytest
from rich.text import Text

from slipway.base_match import BaseMatch, BaseMatchStatus
from slipway.cli.export.summary import summary
from slipway.cli.remote.view import print_export, print_exports
from slipway.errors import ServiceError
from slipway.export_sources.naming import title
from slipway.observability.logs import JsonFormatter, PlainFormatter, configure_service_logs
from slipway.progress.display import LineDisplay, LiveDisplay
from slipway.progress.rendering import JsonLines, PlainLines
from slipway.results.report import write_report
from slipway.results.report.environment import markdown_text
from slipway.results.result import ExportResult, FailedFormat
from slipway.rpc.values import sendable, status_of
from slipway.terminal.columns import Column, FittedTable, Prose
from slipway.terminal.console import CleanConsole, errors, print_json, show, unbroken_line
from slipway.texts import hidden_character, printable
from slipway_protos.v1 import export_pb2 as pb
from support import SUPPORT
from support.commands.cli import run_here
from support.commands.report_parts import output, result, validation
from support.commands.terminal import script_on_terminal
from support.harness.logs_kept import logs_kept
from support.hostile.texts import DECEPTIVE

HOSTILE = " ".join(DECEPTIVE)
SENT = sendable(HOSTILE)


def hostile_export(text: str = SENT) -> pb.Export:
    """Return an export of a coordinator that checks nothing."""
    attempt = pb.Attempt(number=1, worker=text, rule=text, note=text, state=pb.TASK_STATE_FAILED)
    attempt.error.CopyFrom(status_of(ServiceError(text, reason="INTERNAL", remedy=text).failure()))
    return pb.Export(
        name=f"projects/default/exports/{text}",
        labels={"model_name": text, "checkpoint": f"c{text}", "base_model": text},
        outputs={text: "sha256:0"},
        warnings=[text],
        state=pb.EXPORT_STATE_FAILED,
        error=attempt.error,
        tasks=[pb.Task(id=f"merge{text}", stage=text, format=text, state=pb.TASK_STATE_FAILED, attempts=[attempt])],
    )


def hostile_events(text: str = SENT) -> list[pb.ExportEvent]:
    return [
        pb.ExportEvent(export=hostile_export(text)),
        pb.ExportEvent(progress=pb.TaskProgress(task=text, attempt=1, phase=text, done=1, total=2, unit=text)),
        pb.ExportEvent(log=pb.LogLine(task=text, level="warning", message=text)),
    ]


def clean(text: str) -> bool:
    return bool(text) and printable(text) == text


def test_exports_that_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_exports([hostile_export(), hostile_export("\n".join(DECEPTIVE[:1]))], as_json=False)
    print_export(hostile_export(), as_json=False, state=SENT, commands={SENT: SENT})
    out, err = capsys.readouterr()
    assert clean(out)
    assert clean(err)
    print_exports([hostile_export()], as_json=True)
    said = capsys.readouterr().out
    assert clean(said)
    assert json.loads(said)["exports"][0]["labels"]["model_name"] == SENT, "a program gets what is there"


def test_a_name_with_a_line_end_makes_no_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    labels = {"model_name": "a\nforged  succeeded", "base_model": "b\r\nc"}
    print_exports([pb.Export(name="projects/default/exports/x", labels=labels)], as_json=False)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["export", "x"]
    assert title(labels) == "a forged succeeded onto b c"


def test_a_watched_export() -> None:
    for lines in (PlainLines, JsonLines):
        stream = io.StringIO()
        display = LineDisplay(lines(stream))
        display.title(HOSTILE)
        for event in hostile_events():
            display.event(event)
        display.note(HOSTILE)
        assert clean(stream.getvalue())
    stream = io.StringIO()
    with LiveDisplay(CleanConsole(file=stream, width=200)) as live:
        live.title(HOSTILE)
        for event in hostile_events():
            live.event(event)
        live.note(HOSTILE)
    assert clean(stream.getvalue())


def test_everything_that_a_console_can_show(capsys: pytest.CaptureFixture[str]) -> None:
    table = FittedTable(Column("name"), Column("text", wrap=True))
    table.add_row(Text(HOSTILE, style="red"), HOSTILE)
    document = ExportResult(
        export_id=HOSTILE, timestamp="2026-01-02T03:04:05Z", success=False, formats={}, requested=[HOSTILE], reason="INTERNAL",
        failed={HOSTILE: FailedFormat(task=HOSTILE, state="failed", reason=HOSTILE, error_message=HOSTILE)},
        original_size_bytes=1, error_message=f"x {HOSTILE}", warnings=[HOSTILE], output_directory=HOSTILE,
    )  # fmt: skip
    show(
        table,
        Prose(HOSTILE, "red", HOSTILE),
        Prose("a", "", Text(HOSTILE)),
        Text(HOSTILE),
        unbroken_line("p", HOSTILE),
        summary(document),
    )
    errors.print(Text(HOSTILE))
    errors.print(HOSTILE, markup=False)
    print_json({HOSTILE: [HOSTILE]})
    out, err = capsys.readouterr()
    assert clean(out)
    assert clean(err)


@pytest.mark.parametrize("name", ["[/red]", "[bold]x[/bold]", ":key:", "[link=https://evil.example]x[/link]", "\\[x]"])
def test_nothing_in_a_name_is_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(name, unbroken_line("", name), Prose("", "", name))
    errors.print(f"in {name}")
    out, err = capsys.readouterr()
    assert out.split("\n") == [name, name, name, ""]
    assert err == f"in {name}\n"


def test_a_table_stays_as_wide_as_the_terminal() -> None:
    table = FittedTable(Column("name"), Column("state"))
    table.add_row(Text("\x1b" * 10, style="red"), "ok")
    table.add_row("plain", "ok")
    stream = io.StringIO()
    CleanConsole(file=stream, width=80).print(table)
    assert [
        line.rstrip().index(word)
        for line, word in zip(stream.getvalue().splitlines(), ("state", "ok", "ok"), strict=True)
    ] == [12] * 3


WATCHED = """
from test_shown_texts import HOSTILE, hostile_events, hostile_export
from slipway.progress.display import open_display
from slipway.progress.observer import ProgressForm
from slipway.cli.remote.view import print_export, print_exports
print_exports([hostile_export()], as_json=False)
with open_display(ProgressForm.AUTO, level="debug") as display:
    display.title(HOSTILE)
    for event in hostile_events():
        display.event(event)
print_export(hostile_export(), as_json=False)
"""
OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[[12]?[AK]|\r")


def test_a_real_terminal_gets_no_sequence_but_our_own(tmp_path: Path) -> None:
    import os

    here = str(Path(__file__).parent)
    more = os.pathsep.join([here, str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")])
    screen = script_on_terminal(WATCHED, home=tmp_path, width=100, PYTHONPATH=more)
    assert screen.code == 0, screen.text
    assert "\x1b[2J" not in screen.raw
    assert clean(OWN.sub("", screen.raw))
    assert "31m" in screen.raw, "what follows a replaced character is shown"


def test_the_report_and_the_card(tmp_path: Path) -> None:
    found = validation(output("onnx").model_copy(update={"notes": (SENT,), "explanation": SENT}))
    labels = {"base_model": SENT, "checkpoint": SENT, "model_name": SENT}
    match = {"status": "unproven", "reason": SENT}
    made = result(found, ("onnx", SENT), warnings=(SENT,), export_id=SENT, base_match=match)
    write_report(tmp_path, result=made, validation=found, lineage={"labels": labels, "sources": {SENT: SENT}})
    for name in ("README.md", "report.html", "report.json"):
        assert clean((tmp_path / name).read_text()), name
    assert json.loads((tmp_path / "report.json").read_text())["result"]["export_id"] == SENT


def test_a_bare_address_in_a_name_is_no_link() -> None:
    text = markdown_text("https://evil.example/x or WWW.evil.example, ftp://a")
    assert "https:/" not in text
    assert "ftp:/" not in text
    assert "WWW." not in text
    assert text.replace("\\", "") == "https://evil.example/x or WWW.evil.example, ftp://a"


def test_labels_that_a_command_sends_are_plain() -> None:
    assert BaseMatch(status=BaseMatchStatus.UNPROVEN, reason=HOSTILE).labels()
    assert not any(
        hidden_character(value)
        for value in BaseMatch(status=BaseMatchStatus.UNPROVEN, reason=HOSTILE).labels().values()
    )


def test_log_lines_of_commands_and_services(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("slipway", logging.WARNING, "", 0, "%s", (f"{HOSTILE}\n00:00:00 forged",), None)
    record.__dict__["task"] = HOSTILE
    assert clean(PlainFormatter().format(record))
    assert clean(JsonFormatter().format(record))
    assert json.loads(JsonFormatter().format(record))["task"] == HOSTILE
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        with logs_kept():
            configure_service_logs("INFO", form="text")
            root.handle(record)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    said = capsys.readouterr().err
    assert clean(said)
    assert not any(line.startswith("00:00:00") for line in said.splitlines()), (
        "set off, it looks like no line of its own"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("export", "--no{}such"),
        ("export", "run", "extra{}"),
        ("{}",),
        ("cache", "x{}"),
        ("export", "--progress", "{}"),
        ("--x{}",),
    ],
    ids=" ".join,
)
def test_misuse_is_quoted_without_commands_to_a_terminal(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    for more in ((), ("--json",)):
        assert run_here(*(word.replace("{}", "a\x1b[31m\u202eb\x9b2J\u2066") for word in words), *more) == 2
        out, err = capfd.readouterr()
        assert "a" in err
        assert printable(out + err) == out + err
