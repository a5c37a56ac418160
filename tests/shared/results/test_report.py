import json
import re
from pathlib import Path

import pytest
import yaml

from slipway.cli.export.summary import figure_cells as measured_cells
from slipway.results.report import figures, write_report
from slipway.results.report.charts import Bar, bar_chart
from slipway.results.result import ExportResult, FailedFormat
from slipway.validation.comparisons import LogitComparison
from slipway.validation.findings import Reference, ValidationReport
from slipway.validation.speed import Engine, Machine
from support.commands.markdown import MARKDOWN, kinds, shown
from support.commands.report_page import Page
from support.commands.report_parts import LINEAGE, not_run, output, result, validation
from support.commands.usage_examples import usage_examples

HOSTILE = '<script>alert("1")</script>|`x` & </title>\n# [a](javascript:b)'


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
    policies = [attributes for _, attributes in page.seen if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert [each["content"].partition(";")[0] for each in policies] == ["default-src 'none'"]
    assert text.index("http-equiv") < text.index("<title>")
    assert "@import" not in text
    assert "url(" not in text


def test_a_time_of_loading_is_an_upper_bound(written: Path) -> None:
    """The libraries of the next output are imported meanwhile, and the output before is judged."""
    text = Page((written / "report.html").read_text()).text
    assert "loads in at most 0.173 s (others are prepared meanwhile)" in text
    assert "Load, at most" in text
    assert "| Load, at most |" in (written / "README.md").read_text()


def test_the_page_shows_what_was_found(written: Path) -> None:
    page = Page((written / "report.html").read_text())
    for expected in (
        "onnx-int4",
        "1.9e-02|0.019",
        "3,306 tok/s",
        "5.03 ms",
        "165 → 76",
        "100.2 MB",
        "0.173 s",
        "no NVIDIA GPU",
    ):
        assert any(part in page.text for part in expected.split("|")), expected
    assert "Not run here: tensorrt" in page.text
    assert "raise-opset" in page.text
    assert "opset=20" in page.text
    assert "OPSET_UNSUPPORTED" in page.text


def test_the_card_compares_load_and_memory_too(written: Path) -> None:
    (row,) = (line for line in (written / "README.md").read_text().splitlines() if line.startswith("| onnx | 2.4 MB"))
    assert [cell.strip() for cell in row.split("|")][7:12] == [
        "0.173 s",
        "5.03 ms, one round",
        "3,306 tok/s, one round",
        "–",
        "100.2 MB",
    ]


@pytest.mark.parametrize(("beside", "said"), [("onnx", "Each folder is"), ("adapter", "Each folder but `adapter` is")])
def test_the_card_names_the_folders_that_need_the_base(tmp_path: Path, beside: str, said: str) -> None:
    """The graph of the format ``adapter`` holds the base too."""
    write_report(tmp_path, result=result(None, ("pytorch", beside, "adapter-onnx")))
    card = (tmp_path / "README.md").read_text()
    assert f"{said} complete on its own" in card
    assert ("An adapter alone needs the base model." in card) is (beside == "adapter")


def chart_of(text: str, title: str) -> str:
    found = re.search(rf'<ul class="chart"[^>]*aria-label="{title}">.*?</ul>', text, re.DOTALL)
    assert found, title
    return found.group()


def shapes(chart: str, kind: str) -> list[dict[str, str | None]]:
    return [attributes for _, attributes in Page(chart).seen if kind in (attributes.get("class") or "").split()]


def percent(value: str | None) -> float:
    assert value is not None
    assert value.endswith("%")
    return float(value.removesuffix("%"))


def test_a_bar_is_long_in_proportion_and_its_limit_is_marked(written: Path) -> None:
    chart = chart_of((written / "report.html").read_text(), "Mean KL divergence")
    bars, limits = shapes(chart, "bar"), shapes(chart, "limit")
    assert len(bars) == 3  # the engine was not run: no bar, but a row that says so
    assert len(limits) == 3
    small, large = (percent(bar["width"]) for bar in bars[:2])
    assert small < large < percent(limits[1]["x"])  # 0.004 < 0.019 < its limit of 0.02
    assert "not run here" in chart
    assert Page(chart).text.count("limit 0.02") == 3


def test_a_spread_is_drawn_and_written() -> None:
    bars = [Bar("a", 50.0, range=(40.0, 100.0), remark=", unstable"), Bar("b", 25.0)]
    chart = str(bar_chart("Speed", bars, show=figures.rate))
    whiskers = [shape for shape in shapes(chart, "whisker") if "x2" in shape]
    assert [(percent(line["x1"]), percent(line["x2"])) for line in whiskers] == [(40.0, 100.0)]
    assert [percent(bar["width"]) for bar in shapes(chart, "bar")] == [
        50.0,
        25.0,
    ]  # the axis ends where the whisker does
    assert "50 tok/s, unstable 40 tok/s – 100 tok/s" in Page(chart).text


def test_every_chart_has_the_formats_in_the_same_order(tmp_path: Path) -> None:
    names = ("pytorch", "pytorch-int4", "onnx")
    found = validation(*(output(name) for name in sorted(names)))
    write_report(tmp_path, result=result(found, names), validation=found)
    text = (tmp_path / "report.html").read_text()
    charts = [
        re.findall(r"<bdi>([^<]+)<", chart) for chart in re.findall(r'<ul class="chart".*?</ul>', text, re.DOTALL)
    ]
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


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (
            {"prefill_ms": 12.5, "decode_ms": 3.0},
            {"prefill_ms": 8.25, "decode_ms": 2.0},
            "Prompt: 12.5 → 8.25 ms, Token: 3 → 2 ms",
        ),
        ({"prefill_ms": 12.5}, {"prefill_ms": 8.25}, "Prompt: 12.5 → 8.25 ms"),
        ({}, {}, "not measured"),
    ],
)
def test_the_gain_of_an_optimization_is_shown(
    tmp_path: Path, before: dict[str, float], after: dict[str, float], shown: str
) -> None:
    sides = {"before": {"nodes": 90, **before}, "after": {"nodes": 60, **after}}
    counts = {name: {"size_bytes": 4096, "operators": {"MatMul": 7}, **side} for name, side in sides.items()}
    task = {"id": "onnx_export", "statistics": counts}
    found = validation(output("onnx", 0.0))
    write_report(tmp_path, result=result(found, ("onnx",)), validation=found, lineage={**LINEAGE, "tasks": [task]})
    page = Page((tmp_path / "report.html").read_text()).text
    assert "Optimization of graphs" in page
    assert shown in page


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
    tokens = MARKDOWN.parse(body)
    assert sum(token.type == "heading_open" and token.tag == "h1" for token in tokens) == 1
    assert "link_open" not in kinds(tokens)
    assert [token.content for token in tokens if token.type == "html_block"] == ["<!-- example: onnx -->\n"]
    assert shown(tokens).count(" ".join(HOSTILE.split())) >= 4
    assert list(usage_examples(card)) == ["onnx"]


def test_the_card_says_what_it_is(written: Path) -> None:
    card = (written / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "qwen3-base"
    assert front["library_name"] == "transformers"
    assert {"lora", "onnx", "pytorch", "tensorrt", "int4"} <= set(front["tags"])
    formats = card.partition("### Evaluation")[0]
    rows = [line for line in formats.splitlines() if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {12}
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


def test_every_folder_has_an_example_that_compiles_and_every_kind_shows_one(written: Path) -> None:
    card = (written / "README.md").read_text()
    examples = usage_examples(card)
    assert list(examples) == ["onnx", "onnx-int4", "pytorch", "tensorrt"]
    for name, code in examples.items():
        compile(code, name, "exec")
        assert f'folder = "{name}"\n' in code
    assert card.count("```python") == 3
    assert 'folder = "onnx"  # or onnx-int4\n' in card
    assert {examples["onnx"].replace('"onnx"', '"onnx-int4"')} == {examples["onnx-int4"]}


def test_a_format_that_was_not_made_keeps_its_row(tmp_path: Path) -> None:
    found = validation(output("pytorch"))
    failed = FailedFormat(
        task="quantize-onnx-int4", state="failed", reason="QUANTIZATION_FAILED", error_message="it is_so"
    )
    waited = FailedFormat(task="tensorrt_build", state="skipped", error_message="onnx, which it needs, failed")
    missing = {"onnx-int4": failed, "tensorrt": waited}
    order = ("tensorrt", "pytorch", "onnx-int4")
    parts = result(found, ("pytorch",), success=False, requested=order, failed=missing)
    write_report(tmp_path, result=parts, validation=found)
    page = (tmp_path / "report.html").read_text()
    rows = re.findall(r'<th role="rowheader".*?<bdi>([^<]+)</bdi>', page.split("</table>")[0])
    assert tuple(rows) == order
    card = shown(MARKDOWN.parse((tmp_path / "README.md").read_text().split("\n---\n", 1)[1]))
    for text in (Page(page).text, card):
        assert text.count("not made") >= 2
        for part in ("it is_so", "QUANTIZATION_FAILED", "onnx, which it needs, failed"):
            assert part in text
    assert list(usage_examples((tmp_path / "README.md").read_text())) == ["pytorch"]


def test_one_is_not_written_as_many(tmp_path: Path) -> None:
    found = validation(output("onnx"))
    one = {"samples": 1, "sequence_length": 1, "tokens": 1, "prompts": 1, "new_tokens": 1, "text_source": "text"}
    found = found.model_copy(update={"inputs": found.inputs.model_copy(update=one)})
    write_report(tmp_path, result=result(found, ("onnx",)), validation=found)
    for text in (Page((tmp_path / "report.html").read_text()).text, (tmp_path / "README.md").read_text()):
        assert "1 token" in text
        assert not re.search(r"\b1 (windows|tokens|prompts|checks|files)\b", text)
        assert "(s)" not in text


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


def test_outputs_that_were_not_run_are_compared_with_nothing(tmp_path: Path) -> None:
    why = "the family of ViTModel is unknown to the validation, so it was not run"
    found = validation(not_run("pytorch").model_copy(update={"status_reason": why}))
    inputs = found.inputs.model_copy(update={"samples": 0, "tokens": 0, "family": "", "comparison": ""})
    reference = Reference(description=why, engine=Engine(runtime=""))
    found = found.model_copy(update={"inputs": inputs, "reference": reference})
    write_report(tmp_path, result=result(found, ("pytorch",)), validation=found)
    page, card = (tmp_path / "report.html").read_text(), (tmp_path / "README.md").read_text()
    assert f"Nothing was compared: {why}." in card
    assert f"Reference: {why}." in page
    assert f"Nothing was validated: {why}." in page
    assert "next-token" not in card + page


def test_figures_of_another_family_have_their_own_names(tmp_path: Path) -> None:
    found = validation(output("pytorch"))
    distance = LogitComparison(
        tokens=480, max_abs_diff=0.1, mean_abs_diff=0.01, relative_error=0.0123, cosine_distance=0.00045
    )
    measured = found.outputs[0].model_copy(
        update={"to_reference": distance, "to_base": distance, "perplexity": None, "checks": ()}
    )
    inputs = found.inputs.model_copy(update={"family": "feature extraction", "comparison": "embeddings", "prompts": 0})
    reference = found.reference.model_copy(
        update={"perplexity": None, "base_perplexity": None, "adapter_effect_kl": None, "adapter_effect_error": 0.4}
    )
    found = found.model_copy(update={"outputs": (measured,), "inputs": inputs, "reference": reference})
    answer = result(found, ("pytorch",))
    entry = answer.formats["pytorch"].model_copy(update={"relative_error": 0.0123, "cosine_distance": 0.00045})
    answer = answer.model_copy(update={"formats": {"pytorch": entry}})
    write_report(tmp_path, result=answer, validation=found, lineage=LINEAGE)
    page, card = (tmp_path / "report.html").read_text(), (tmp_path / "README.md").read_text()
    for text in (page, card):
        assert "Relative error" in text
        assert "Cosine distance" in text
        assert "0.012" in text
        assert "4.5e-04" in text
        assert "Mean KL" not in text
        assert "next-token" not in text
    assert "Model family: feature extraction; embeddings are compared." in page
    assert "relative error of 0.4" in page
    assert measured_cells(entry)[:2] == ("1.2e-02 relative error", "4.5e-04 cosine distance")


def test_a_plain_model_is_said_to_be_one(tmp_path: Path) -> None:
    found = validation(output("pytorch"))
    reference = found.reference.model_copy(update={"base_perplexity": None, "adapter_effect_kl": None})
    found = found.model_copy(update={"reference": reference})
    write_report(tmp_path, result=result(found, ("pytorch",), plain=True), validation=found, lineage=LINEAGE)
    page, card = (tmp_path / "report.html").read_text(), (tmp_path / "README.md").read_text()
    for text in (page, card):
        assert "There is no adapter, so checks of one do not apply." in text
        assert "against base + adapter" not in text
    assert "The adapter moves" not in page


def test_the_machine_stands_beside_every_speed(tmp_path: Path) -> None:
    machine = Machine(processor="CPU <one>", cores=2, memory_bytes=8 << 30, platform="Linux x86_64")
    found = validation(output("onnx"), output("pytorch")).model_copy(update={"machine": machine})
    write_report(tmp_path, result=result(found, ("onnx", "pytorch")), validation=found, lineage=LINEAGE)
    said = "CPU <one>, 2 cores, 8.6 GB of memory, Linux x86_64"
    text = Page((tmp_path / "report.html").read_text()).text
    assert text.count(said) == 4  # on the first page, below the table, and in the details of each output
    assert text.index(said) < text.index("Validation")
    assert "2 cores, 8.6 GB of memory, Linux x86" in (tmp_path / "README.md").read_text()
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["validation"]["machine"]["cores"] == 2


def test_warnings_come_after_the_results(tmp_path: Path) -> None:
    made = result(None, ("onnx",), warnings=("mind this",))
    write_report(tmp_path, result=made)
    text = Page((tmp_path / "report.html").read_text()).text
    assert text.index("Formats") < text.index("mind this")
