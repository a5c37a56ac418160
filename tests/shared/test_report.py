import json
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from slipway.report import usage_examples, write_report
from slipway.result import AttemptResult, ExportResult, FormatResult
from slipway.validation import (
    Check,
    Engine,
    GreedyComparison,
    Limits,
    LogitComparison,
    Memory,
    OutputStatus,
    OutputValidation,
    Reference,
    Speed,
    ValidationInputs,
    ValidationReport,
)

HOSTILE = '<script>alert("1")</script>|`x` & </title>\n# [a](javascript:b)'
VOID = {"meta", "br", "link", "img", "input", "hr"}
ENGINE = Engine(runtime="onnxruntime", version="onnxruntime 1.31", stored_dtype="int4", compute_dtype="float32")


def comparison(kl: float | None, *, difference: float = 0.3, top1: float = 0.93) -> LogitComparison:
    return LogitComparison(
        tokens=1280, max_abs_diff=difference, mean_abs_diff=0.01, mean_kl=kl, max_kl=0.5, top1_agreement=top1
    )


def output(name: str, kl: float | None = 0.004, *, limit: float = 0.02) -> OutputValidation:
    passed = kl is not None and kl <= limit
    check = Check(name="mean_kl", value=kl, limit=limit, comparison="<=", passed=passed, unit="nats/token")
    return OutputValidation(
        name=name,
        format=name.partition("-")[0],
        level=name.partition("-")[2] or "none",
        status=OutputStatus.PASSED if passed else OutputStatus.FAILED,
        size_bytes=2_400_000,
        engine=ENGINE,
        to_reference=comparison(kl),
        to_base=comparison(1.1),
        greedy=GreedyComparison(
            prompts=4,
            new_tokens=16,
            exact_match_share=0.5,
            mean_common_prefix=9.0,
            example_prompt="def f(",
            example_reference="self):",
            example_output="a < b",
        ),
        perplexity=76.4,
        speed=Speed(
            threads=1,
            device="cpu",
            dtype="float32",
            prefill_tokens=128,
            prefill_ms=5.03,
            decode_tokens_per_second=3306.5,
        ),
        memory=Memory(peak_rss_bytes=100_159_488, baseline_rss_bytes=64_000_000),
        limits=Limits(
            level="int4",
            max_abs_diff=None,
            mean_kl=limit,
            top1_agreement=0.9,
            perplexity_ratio=1.1,
            case_mean_kl=0.06,
            adapter_strength_error=0.1,
        ),
        checks=(check,),
        explanation="" if passed else "mean_kl is 0.4: the scale is wrong",
        remedy="" if passed else "use a smaller group_size",
    )


def not_run(name: str) -> OutputValidation:
    return OutputValidation(
        name=name, format=name, status=OutputStatus.NOT_RUN, status_reason="this machine has no NVIDIA GPU"
    )


def validation(*outputs: OutputValidation) -> ValidationReport:
    return ValidationReport(
        reference=Reference(
            description="base + adapter", engine=ENGINE, perplexity=76.0, base_perplexity=165.0, adapter_effect_kl=0.8
        ),
        inputs=ValidationInputs(
            samples=10,
            sequence_length=128,
            tokens=1280,
            requested_samples=10,
            vocabulary=1024,
            seed=0,
            prompts=4,
            new_tokens=16,
            text_source="held-out text, 1 file(s)",
            held_out=True,
        ),
        outputs=outputs,
        seconds=17.1,
    )


def result(report: ValidationReport | None, names: tuple[str, ...], **more: object) -> ExportResult:
    formats = {name: FormatResult(digest="sha256:" + "0" * 64, size_bytes=2_400_000) for name in names}
    if report:
        for found in report.outputs:
            formats[found.name] = formats[found.name].model_copy(update={"status": found.status.value})
    values: dict[str, object] = {
        "export_id": "abc123",
        "timestamp": datetime(2026, 11, 21, 2, 0, tzinfo=UTC),
        "success": True,
        "output_directory": "/models/qwen3-finetuned_20261121",
        "formats": formats,
        "original_size_bytes": 12_900_000,
        "attempts": (
            AttemptResult(
                task="onnx", stage="onnx_export", number=1, outcome="failed", reason="OPSET_UNSUPPORTED",
                error_message="opset 7", params={"opset": 7.0}, duration_seconds=2.5,
            ),
            AttemptResult(
                task="onnx", stage="onnx_export", number=2, outcome="succeeded", rule="raise-opset",
                params={"opset": 20.0}, duration_seconds=71.0, peak_memory_bytes=368_000_000,
            ),
            AttemptResult(task="merge", stage="merge", number=1, outcome="succeeded", reused=True),
        ),
    }  # fmt: skip
    return ExportResult.model_validate({**values, **more})


LINEAGE = {
    "labels": {"base_model": "qwen3-base", "checkpoint": "checkpoint-100", "model_name": "qwen3-finetuned"},
    "sources": {"base": "sha256:" + "1" * 64, "adapter": "sha256:" + "2" * 64},
    "tools": {"slipway": "0.1.0", "merge": {"version": 1, "torch": "2.13.0"}},
}


class Page(HTMLParser):
    """Checks nesting as it reads; collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.seen if tag == name]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    found = validation(output("onnx"), output("onnx-int4", 0.019), output("pytorch"), not_run("tensorrt"))
    names = ("onnx", "onnx-int4", "pytorch", "tensorrt")
    write_report(tmp_path, result=result(found, names), validation=found, lineage=LINEAGE)
    return tmp_path


def test_the_page_is_well_formed_and_needs_nothing_else(written: Path) -> None:
    text = (written / "report.html").read_text()
    page = Page(text)
    names = {tag for tag, _ in page.seen}
    assert not names & {"script", "link", "img", "iframe", "object", "embed"}
    for _, attributes in page.seen:
        assert not {"src", "href", "srcset", "xlink:href"} & attributes.keys()
        assert not any(key.startswith("on") for key in attributes)
    assert "@import" not in text
    assert "url(" not in text


def test_the_page_shows_what_was_found(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    for expected in ("onnx-int4", "1.9e-02|0.019", "3,306 tok/s", "5.03 ms", "165 → 76", "100 MB", "no NVIDIA GPU"):
        assert any(part in page.text for part in expected.split("|")), expected
    assert "Not run here: tensorrt" in page.text
    assert "raise-opset" in page.text
    assert "opset=20" in page.text
    assert "OPSET_UNSUPPORTED" in page.text


def test_a_bar_is_long_in_proportion_and_its_limit_is_marked(written: Path) -> None:
    text = (written / "report.html").read_text()
    chart = re.search(r'<svg[^>]*aria-label="Mean KL divergence">.*?</svg>', text, re.DOTALL)
    assert chart
    bars = [attributes for tag, attributes in Page(chart.group()).seen if tag == "rect"]
    limits = [a for tag, a in Page(chart.group()).seen if tag == "line" and a["class"] == "limit"]
    assert len(bars) == 3  # the engine was not run: no bar, but a row that says so
    assert len(limits) == 3
    small, large = float(bars[0]["width"] or 0), float(bars[1]["width"] or 0)
    end = float(bars[1]["x"] or 0) + large
    assert small < large < end < float(limits[1]["x1"] or 0)  # 0.004 < 0.019 < its limit of 0.02
    assert "not run here" in chart.group()


def test_every_chart_has_the_formats_in_the_same_order(tmp_path: Path) -> None:
    names = ("pytorch", "pytorch-int4", "onnx")
    found = validation(*(output(name) for name in sorted(names)))
    write_report(tmp_path, result=result(found, names), validation=found)
    text = (tmp_path / "report.html").read_text()
    charts = [re.findall(r'class="label"[^>]*>([^<]+)<', svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    shown = [tuple(labels) for labels in charts if "pytorch" in labels]
    assert len(shown) >= 3
    assert set(shown) == {names}


def test_a_failed_output_is_explained_everywhere(tmp_path: Path) -> None:
    found = validation(output("onnx-int4", 0.4))
    failed = {"success": False, "reason": "VALIDATION_FAILED", "error_message": "onnx-int4 failed validation"}
    write_report(tmp_path, result=result(found, ("onnx-int4",), **failed), validation=found)
    page = Page((tmp_path / "report.html").read_text())
    for text in (page.text, (tmp_path / "README.md").read_text().replace("\\", "")):
        assert "the scale is wrong" in text
        assert "use a smaller group_size" in text
    assert "The export failed." in page.text
    assert "VALIDATION_FAILED" in page.text
    assert {"open": None} in page.tags("details")


def test_figures_that_are_not_finite_are_shown_as_such(tmp_path: Path) -> None:
    found = validation(output("onnx", None), output("pytorch", 0.0))
    write_report(tmp_path, result=result(found, ("onnx", "pytorch")), validation=found)
    assert "not finite" in Page((tmp_path / "report.html").read_text()).text
    json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)


def test_names_cannot_break_out(tmp_path: Path) -> None:
    found = validation(output("onnx").model_copy(update={"notes": (HOSTILE,)}))
    lineage = {
        "labels": {"base_model": HOSTILE, "checkpoint": HOSTILE, "model_name": HOSTILE},
        "sources": {HOSTILE: "x"},
    }
    hostile = result(found, ("onnx", HOSTILE), warnings=(HOSTILE,), export_id=HOSTILE)
    write_report(tmp_path, result=hostile, validation=found, lineage=lineage)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert "<script" not in text
    assert page.tags("script") == []
    assert page.text.count(HOSTILE) >= 5
    card = (tmp_path / "README.md").read_text()
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["base_model"] == HOSTILE
    assert "<script" not in body
    assert "](javascript" not in body
    assert [line for line in body.splitlines() if line.startswith("# ")][1:] == []
    assert list(usage_examples(card)) == ["onnx"]


def test_the_card_says_what_it_is(written: Path) -> None:
    card = (written / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "qwen3-base"
    assert front["library_name"] == "transformers"
    assert {"lora", "onnx", "pytorch", "tensorrt", "int4"} <= set(front["tags"])
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {9}
    assert len(rows) == 5


def test_an_unproven_base_is_amber_in_page_and_card(tmp_path: Path) -> None:
    found = validation(output("pytorch"))
    unproven = {"status": "unproven", "reason": f"nothing speaks for {HOSTILE}"}
    write_report(tmp_path, result=result(found, ("pytorch",), base_match=unproven), validation=found, lineage=LINEAGE)
    text = (tmp_path / "report.html").read_text()
    assert 'class="verdict amber"' in text
    assert "Every output passed validation. Base model unproven." in Page(text).text
    assert unproven["reason"] in Page(text).text
    card = (tmp_path / "README.md").read_text()
    assert "fine-tuned with" not in card
    assert "merged into qwen3-base" in card.replace("\\", "")
    assert "**Base model unproven:** nothing speaks for" in card
    assert "<script" not in card
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "qwen3-base"
    assert "base_model_relation" not in card


def test_a_proven_base_is_green_in_page_and_card(tmp_path: Path) -> None:
    found = validation(output("pytorch"))
    proven = {"status": "measured", "reason": "the adapter lowers perplexity from 165 to 71"}
    write_report(tmp_path, result=result(found, ("pytorch",), base_match=proven), validation=found, lineage=LINEAGE)
    page, card = (tmp_path / "report.html").read_text(), (tmp_path / "README.md").read_text()
    assert 'class="verdict good"' in page
    assert "the adapter lowers perplexity from 165 to 71" in page
    assert "the adapter lowers perplexity from 165 to 71" in card
    assert "fine-tuned with a LoRA adapter" in card
    assert "base_model_relation: finetune" in card


def test_every_format_has_an_example_that_compiles(written: Path) -> None:
    examples = usage_examples((written / "README.md").read_text())
    assert list(examples) == ["onnx", "onnx-int4", "pytorch", "tensorrt"]
    for name, code in examples.items():
        compile(code, name, "exec")
        assert f'folder = "{name}"' in code


def test_the_data_is_complete_and_the_same_parts_give_the_same_bytes(written: Path, tmp_path: Path) -> None:
    data = json.loads((written / "report.json").read_text())
    again = ValidationReport.model_validate(data["validation"])
    names = ("onnx", "onnx-int4", "pytorch", "tensorrt")
    other = tmp_path / "other"
    other.mkdir()
    write_report(other, result=ExportResult.model_validate(data["result"]), validation=again, lineage=data["lineage"])
    assert tuple(data["result"]["formats"]) == names
    for name in ("report.json", "report.html", "README.md"):
        assert (other / name).read_bytes() == (written / name).read_bytes()


def test_without_validation(tmp_path: Path) -> None:
    write_report(tmp_path, result=result(None, ("pytorch",)))
    assert "Nothing was validated" in Page((tmp_path / "report.html").read_text()).text
    assert "not validated" in (tmp_path / "README.md").read_text()
