"""Speed in the result, the command's table, the report and the model card."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from slipway.artifacts import LocalStore
from slipway.cli.export.summary import summary
from slipway.cli.stages import verdicts as stage_view
from slipway.results.outcome import export_result
from slipway.results.report import figures, write_report
from slipway.results.result import ExportResult, FormatResult
from slipway.validation.findings import OutputStatus, OutputValidation, Reference, ValidationInputs, ValidationReport
from slipway.validation.speed import Engine, Memory, Ratio, Speed
from slipway_protos.v1 import export_pb2 as pb


def speed(prefill_ms: float, decode: float, *, scatter: float, rounds: int = 7) -> Speed:
    """Return a speed whose rounds differ from the median by at most this share."""

    def around(value: float) -> tuple[float, float] | None:
        return (value * (1 - scatter), value * (1 + scatter)) if rounds > 1 else None

    ratio = Ratio(median=1.8, range=around(1.8), rounds=rounds)
    return Speed(
        threads=2, device="cpu", dtype="float32", prefill_tokens=128, rounds=rounds, interleaved=True,
        prefill_ms=prefill_ms, prefill_ms_range=around(prefill_ms), prefill_speedup=ratio,
        decode_tokens_per_second=decode, decode_range=around(decode), decode_speedup=ratio,
        other_cores=0.9, note="3 of 7 rounds fitted into 12 s" if rounds == 1 else "",
    )  # fmt: skip


SLOW = speed(21.6, 55.6, scatter=0.02)
"""Of the reference: PyTorch without any export."""
STEADY = speed(12, 100, scatter=0.04)
JUMPY = speed(2, 165, scatter=0.6)
ONCE = speed(1, 500, scatter=0, rounds=1)


class Exported:
    """An export whose formats have these speeds, with its report and card."""

    def __init__(self, folder: Path, speeds: dict[str, Speed], *, comparison: str = "next token") -> None:
        self.folder = folder
        store = LocalStore(folder / "store")
        export = pb.Export(name="exports/x", state=pb.EXPORT_STATE_SUCCEEDED)
        export.create_time.FromDatetime(datetime(2026, 1, 2, tzinfo=UTC))
        for name in speeds:
            made = folder / "made" / name
            made.mkdir(parents=True)
            (made / "model.safetensors").write_text(name)
            export.outputs[name] = store.put(made)
        outputs = tuple(
            OutputValidation(
                name=name, format=name.partition("-")[0], status=OutputStatus.PASSED, speed=found,
                memory=Memory(peak_rss_bytes=100_000_000 + 1_000_000 * number, baseline_rss_bytes=1),
            )
            for number, (name, found) in enumerate(speeds.items())
        )  # fmt: skip
        inputs = ValidationInputs(
            samples=1, sequence_length=8, tokens=8, requested_samples=1, vocabulary=9, seed=0, prompts=1, new_tokens=1,
            text_source="text", held_out=True, comparison=comparison,
        )  # fmt: skip
        reference = Reference(description="base + adapter", engine=Engine(runtime="transformers"), speed=SLOW)
        validation = ValidationReport(reference=reference, inputs=inputs, outputs=outputs)
        self.validation = validation
        self.result: ExportResult = export_result(export, store=store, validation=validation)
        write_report(folder, result=self.result, validation=validation, lineage={})

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text(encoding="utf-8")

    @property
    def card(self) -> str:
        return (self.folder / "README.md").read_text(encoding="utf-8")

    @property
    def table(self) -> str:
        return _printed(summary(self.result))

    @property
    def stage(self) -> str:
        return _printed(stage_view.figures(self.validation))


def _printed(shown: RenderableType) -> str:
    console = Console(file=StringIO(), width=300)
    console.print(shown)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_result_of_a_stage_and_of_an_export_show_the_same_figures(tmp_path: Path) -> None:
    exported = Exported(tmp_path, {"pytorch": STEADY, "onnx": JUMPY})
    figure = re.compile(r"\S+ (?:ms|tok/s) ±\S+ %(?:, unstable)?|\S+ MB")
    rows = {
        place: {line.split()[0]: figure.findall(line) for line in getattr(exported, place).splitlines() if "±" in line}
        for place in ("table", "stage")
    }
    assert rows["stage"] == {
        "pytorch": ["12 ms ±4 %", "100 tok/s ±4 %", "100.0 MB"],
        "onnx": ["2 ms ±60 %, unstable", "165 tok/s ±60 %, unstable", "101.0 MB"],
    }
    assert rows["table"] == rows["stage"]


def test_the_headline_is_the_fastest_of_those_that_are_stable(tmp_path: Path) -> None:
    exported = Exported(tmp_path, {"pytorch": STEADY, "onnx": JUMPY, "onnx-int4": ONCE})
    result = exported.result
    assert result.inference_speed_ms == 12, "2 ms that jump about and 1 ms measured once are no headline"
    assert result.memory_usage_mb == 100
    steady, jumpy, once = (result.formats[name] for name in ("pytorch", "onnx", "onnx-int4"))
    assert (steady.inference_speed_stable, steady.decode_stable) == (True, True)
    assert (steady.inference_speed_spread_percent, steady.decode_speedup) == (8.0, 1.8)
    assert (jumpy.inference_speed_ms, jumpy.inference_speed_stable, jumpy.decode_stable) == (2, False, False)
    assert (jumpy.decode_spread_percent, jumpy.decode_speedup) == (120.0, None)
    assert (once.decode_tokens_per_second, once.decode_spread_percent, once.decode_stable) == (500, None, False)
    assert "<b>12 ms</b>" in exported.page


def test_without_a_stable_figure_there_is_no_headline(tmp_path: Path) -> None:
    exported = Exported(tmp_path, {"onnx": JUMPY, "onnx-int4": ONCE})
    assert exported.result.inference_speed_ms is None
    assert exported.result.memory_usage_mb == 100, "memory does not scatter"
    assert "<b>unstable</b>" in exported.page
    assert "2 ms" not in exported.page.partition("</header>")[0]


@pytest.mark.parametrize("place", ["page", "card", "table", "stage"])
def test_every_figure_says_how_far_it_scatters(tmp_path: Path, place: str) -> None:
    shown = getattr(Exported(tmp_path, {"pytorch": STEADY, "onnx": JUMPY, "onnx-int4": ONCE}), place)
    for figure in ("12 ms ±4 %", "100 tok/s ±4 %", "165 tok/s ±60 %, unstable", "500 tok/s, one round"):
        assert figure in shown, figure


ROWS = {
    "next token": {
        "": ["Prompt", "Generation", "Against PyTorch"],
        "PyTorch, base + adapter, unmerged": ["21.6 ms ±2 %", "55.6 tok/s ±2 %", "1"],
        "onnx": ["2 ms ±60 %, unstable", "165 tok/s ±60 %, unstable", "1.8 times (0.72 to 2.88), unstable"],
        "pytorch": ["12 ms ±4 %", "100 tok/s ±4 %", "1.8 times (1.73 to 1.87)"],
    },
    "classes": {
        "": ["Per text", "Against PyTorch"],
        "PyTorch, base + adapter, unmerged": ["21.6 ms ±2 %", "1"],
        "onnx": ["2 ms ±60 %, unstable", "1.8 times (0.72 to 2.88), unstable"],
        "pytorch": ["12 ms ±4 %", "1.8 times (1.73 to 1.87)"],
    },
}


@pytest.mark.parametrize("comparison", ROWS)
def test_one_table_compares_all_formats_with_pytorch(tmp_path: Path, comparison: str) -> None:
    """By the speed of generation where there is one, and otherwise by the time of a text."""
    exported = Exported(tmp_path, {"pytorch": STEADY, "onnx": JUMPY}, comparison=comparison)
    body = exported.page.partition("<h2>Formats</h2>")[2].partition("</table>")[0]
    plain = [
        [re.sub("<[^>]*>", "", cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr.*?</tr>", body, re.DOTALL)
    ]
    card = [line.strip("| ").split(" | ") for line in exported.card.splitlines() if line.startswith("| ")]
    wanted = ROWS[comparison]
    for shown in (plain, card):
        first, rows = len(shown[0]) - 1 - len(wanted[""]), dict(zip(wanted, shown, strict=False))
        assert {name: row[first:-1] for name, row in rows.items()} == wanted
        assert [row[0] for row in rows.values()][1:] == [*wanted][1:]
        assert {len(row) for row in rows.values()} == {len(shown[0])}


def test_charts_draw_the_scatter_and_name_what_is_unstable(tmp_path: Path) -> None:
    page = Exported(tmp_path, {"pytorch": STEADY, "onnx": JUMPY, "onnx-int4": ONCE}).page
    assert page.count('<line class="whisker"') == 2 * 2, "one round has no scatter"
    assert ">165 tok/s, unstable <" in page
    assert ">100 tok/s <" in page
    assert "1.8 times (1.73 to 1.87)" in page
    assert "1.8 times (0.72 to 2.88), unstable" in page
    assert "other processes kept 0.9 cores busy meanwhile" in page
    assert "3 of 7 rounds fitted into 12 s." in page


def test_what_was_not_measured_is_a_dash() -> None:
    nothing = FormatResult(digest="sha256:0", size_bytes=1)
    assert figures.prompt_speed(nothing) == figures.generation_speed(nothing) == figures.times(None) == figures.MISSING
    assert figures.pass_time(None) == figures.decode_rate(None) == figures.MISSING


@pytest.mark.parametrize(
    ("spread", "shown"), [(0.0, "±0 %"), (0.9, "±0.5 %"), (8.0, "±4 %"), (19.6, "±10 %"), (120.0, "±60 %")]
)
def test_no_scatter_is_shown_with_an_exponent(spread: float, shown: str) -> None:
    assert figures.add_scatter("137 tok/s", spread, stable=True) == f"137 tok/s {shown}"
