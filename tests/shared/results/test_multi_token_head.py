"""The share of a multi-token head's accepted drafts: in the data, on the page, in the card and in the command's text."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from slipway.artifacts import LocalStore
from slipway.cli.export.summary import summary
from slipway.results.outcome import export_result
from slipway.results.report import write_report
from slipway.validation.findings import ValidationReport
from slipway.validation.parts import MultiTokenHead
from slipway_protos.v1 import export_pb2 as pb
from support.commands.report_parts import LINEAGE, output, validation

SAID = "ulti-token head: its drafts are accepted 71 % of the time, 74 % before the fine-tune"


def with_head(head: MultiTokenHead | None) -> ValidationReport:
    found = validation(output("pytorch"))
    return found.model_copy(update={"reference": found.reference.model_copy(update={"multi_token_head": head})})


def texts(export: pb.Export, store: LocalStore, found: ValidationReport, folder: Path) -> list[str]:
    """Return the page, the card and the command's text."""
    folder.mkdir()
    result = export_result(export, store=store, validation=found)
    write_report(folder, result=result, validation=found, lineage=LINEAGE)
    console = Console(file=StringIO(), width=200)
    console.print(summary(result))
    assert isinstance(console.file, StringIO)
    return [*((folder / name).read_text() for name in ("report.html", "README.md")), console.file.getvalue()]


def test_every_text_says_how_often_drafts_are_accepted(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    head = MultiTokenHead(accepted_before=0.742, accepted_after=0.709, tokens=1270)
    shown = texts(export, store, with_head(head), tmp_path / "with")
    assert all(text.count(SAID) == 1 for text in shown)
    written = json.loads((tmp_path / "with" / "report.json").read_text())
    assert written["validation"]["reference"]["multi_token_head"]["accepted_after"] == 0.709
    assert written["result"]["multi_token_head"] == written["validation"]["reference"]["multi_token_head"]


def test_nothing_is_said_of_a_head_that_is_not_there(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    assert all("ulti-token head" not in text for text in texts(export, store, with_head(None), tmp_path / "without"))
