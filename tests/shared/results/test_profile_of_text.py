"""The text of a calibration, as the report describes it."""

from pathlib import Path

import pytest

from slipway.results.report import write_report
from support.commands.report_parts import LINEAGE, result

PROFILE = {
    "source": "the given text",
    "passages": 12,
    "tokens": 3456,
    "passage_tokens": {"shortest": 3, "median": 7.5, "longest": 99},
    "scripts": {"LATIN": 0.75, "CJK": 0.25},
    "vocabulary": {"size": 1000, "seen": 420, "coverage": 0.42},
    "heldout": {"source": "texts", "overlap": 0.004, "passages_left_out": 2},
}


def test_the_text_for_calibration_is_described(tmp_path: Path) -> None:
    lineage = {**LINEAGE, "tasks": [{"id": "calibration_data", "profile": PROFILE}]}
    write_report(tmp_path, result=result(None, ("pytorch",)), validation=None, lineage=lineage)
    page = (tmp_path / "report.html").read_text()
    for said in (
        "Text for calibration",
        "the given text",
        "3456",
        "Latin 75%, Cjk 25%",
        "42.00 %",
        "3 to 99, half of them up to 7.5<",
    ):
        assert said in page, said


@pytest.mark.parametrize(
    "profile", [3, {}, {**PROFILE, "tokens": "many"}, {**PROFILE, "scripts": {"LATIN": float("nan")}}]
)
def test_a_profile_in_an_unknown_form_is_left_out(tmp_path: Path, profile: object) -> None:
    lineage = {**LINEAGE, "tasks": [{"id": "calibration_data", "profile": profile}]}
    write_report(tmp_path, result=result(None, ("pytorch",)), validation=None, lineage=lineage)
    assert "Text for calibration" not in (tmp_path / "report.html").read_text()
