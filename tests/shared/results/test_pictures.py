"""What an output computes behind pictures: in the data, on the page and in the card, with its number of pictures and its figures."""

from __future__ import annotations

import json
from pathlib import Path

from slipway.artifacts import LocalStore
from slipway.results.outcome import export_result
from slipway.results.report import write_report
from slipway.validation.comparisons import Check, LogitComparison
from slipway.validation.findings import OutputValidation, ValidationReport
from slipway.validation.pictures import PictureComparison, PictureEffect
from slipway.validation.verdicts import Answer, Verdict
from slipway_protos.v1 import export_pb2 as pb
from support.commands.report_parts import LINEAGE, output, validation

EFFECT = PictureEffect(pictures=4, tokens=96, effect_kl=0.31)
COMPARED = PictureComparison(
    pictures=4,
    tokens=96,
    to_reference=LogitComparison(tokens=96, max_abs_diff=0.5, mean_abs_diff=0.1, mean_kl=0.0123, top1_agreement=0.97),
    kept=0.96,
    faithful=Verdict(answer=Answer.PASSED, said="it is 1e-06 nats/token away from PyTorch on its own weights"),
    fit=Verdict(answer=Answer.PASSED, said="it keeps 96 % of what the fine-tune changed behind pictures"),
)
SAID = "ictures: behind 4 pictures, it is 1e-06 nats/token away from PyTorch on its own weights; it keeps 96 % of what the fine-tune changed behind pictures."


def written(
    export: pb.Export, store: LocalStore, found: ValidationReport, folder: Path
) -> tuple[str, str, dict[str, object]]:
    """Return the page, the card and the data."""
    folder.mkdir()
    write_report(folder, result=export_result(export, store=store, validation=found), validation=found, lineage=LINEAGE)
    page, card = ((folder / name).read_text() for name in ("report.html", "README.md"))
    return page, card, json.loads((folder / "report.json").read_text())


def with_pictures(found: PictureComparison | None, effect: PictureEffect | None) -> ValidationReport:
    check = Check(name="pictures.mean_kl", value=0.0123, limit=0.5, comparison="<=", passed=True, unit="nats/token")
    made: OutputValidation = output("pytorch")
    made = made.model_copy(update={"pictures": found, "checks": (*made.checks, *([check] if found else []))})
    report = validation(made)
    return report.model_copy(update={"reference": report.reference.model_copy(update={"pictures": effect})})


def test_page_card_and_data_have_the_figures(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    page, card, data = written(export, store, with_pictures(COMPARED, EFFECT), tmp_path / "with")
    assert SAID in page
    assert SAID in card
    assert "base + adapter, behind pictures" in page
    assert "Pictures: 4 prompts with a picture, behind which the adapter moves the base by a mean KL of 0.31." in page
    assert "Mean KL divergence behind pictures |" in card
    of_output = data["validation"]["outputs"][0]["pictures"]  # type: ignore[index]
    assert (of_output["pictures"], of_output["to_reference"]["mean_kl"], of_output["kept"]) == (4, 0.0123, 0.96)
    assert data["validation"]["reference"]["pictures"]["effect_kl"] == 0.31  # type: ignore[index]


def test_what_was_not_run_is_said_with_its_reason(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    why = "onnxruntime is given no pictures here"
    found = with_pictures(PictureComparison(not_run=why), PictureEffect(not_run="no picture is made for it"))
    page, card, _ = written(export, store, found, tmp_path / "not")
    assert f"Pictures: not run ({why})." in page
    assert f"pictures: not run ({why})." in card
    assert "Pictures: not run (no picture is made for it)." in page


def test_nothing_is_said_of_a_model_of_text(export: pb.Export, store: LocalStore, tmp_path: Path) -> None:
    page, card, _ = written(export, store, with_pictures(None, None), tmp_path / "text")
    assert "ictures" not in card
    assert "ictures:" not in page


def test_failures_are_said() -> None:
    assert PictureComparison(failed="it cannot").said == "pictures: it cannot"
    assert PictureComparison(pictures=1).said == "pictures: behind 1 picture, nothing was judged"
