"""The layout of the report in a browser: on a phone and a desktop, in light and dark, by keyboard, on paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipway.results.report import write_report
from slipway.results.result import AttemptResult, FailedFormat
from support.commands.browser import Browser, find_browser, running_browser
from support.commands.report_parts import LINEAGE, not_run, output, result, validation

SIX = ("pytorch", "pytorch-int4", "onnx", "onnx-int8", "onnx-int4", "tensorrt")
WIDTHS = (320, 400, 1280)
LONG = "a-name-of-sixty-characters-for-a-model-that-somebody-trained"
PATH = "/very/long/path" * 12 + "/model.safetensors"
LEAST_LETTER = 11.0
"""CSS pixels."""

MEASURE = """
(() => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  const found = {texts: [], charts: [], cells: []};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  const box = (rect) => ({left: rect.left, right: rect.right, top: rect.top, bottom: rect.bottom});
  const shown = (element) => !element.closest("thead") || getComputedStyle(element.closest("thead")).position !== "absolute";
  const texts = new Map();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !shown(element)) continue;
    range.selectNodeContents(walker.currentNode);
    const scale = element.getScreenCTM ? element.getScreenCTM().a : 1;
    const boxes = [...range.getClientRects()].filter((rect) => rect.width > 0.5).map(box);
    const text = {text: walker.currentNode.data.trim(), size: parseFloat(getComputedStyle(element).fontSize) * scale, boxes};
    found.texts.push(text);
    texts.set(walker.currentNode, text);
  }
  for (const chart of document.querySelectorAll("[aria-label].chart"))
    found.charts.push([...texts].filter(([node]) => chart.contains(node)).map(([, text]) => text));
  for (const cell of document.querySelectorAll("th, td"))
    if (shown(cell) && cell.textContent.trim())
      found.cells.push({text: cell.textContent.trim(), width: cell.getBoundingClientRect().width});
  found.scrollers = [...document.querySelectorAll(".scroll")].map((element) => ({
    ...box(element.getBoundingClientRect()), hidden: element.scrollWidth - element.clientWidth,
    focusable: element.tabIndex === 0, name: element.getAttribute("aria-label")}));
  found.width = document.scrollingElement.scrollWidth;
  found.fetched = performance.getEntriesByType("resource").length;
  return found;
})()
"""

CONTRAST = """
(() => {
  const parse = (colour) => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return {rgb: [r, g, b], a}; };
  const luminance = ({rgb}) => {
    const [r, g, b] = rgb.map((part) => part / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.a === 1) return colour;
    }
    throw new Error("no background");
  };
  const ratio = (front, back) => {
    const [light, dark] = [luminance(front), luminance(back)].sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
  };
  const texts = [...document.querySelectorAll("body *")].filter((element) =>
    [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  const colour = (element) => element.closest("svg") ? getComputedStyle(element).fill : getComputedStyle(element).color;
  const marks = [...document.querySelectorAll(".chart .bar, .chart .limit, .chart rect.whisker")];
  return {
    text: texts.map((element) => [ratio(parse(colour(element)), behind(element)), element.textContent.trim().slice(0, 40)]),
    marks: [
      ...marks.map((element) => [ratio(parse(getComputedStyle(element).fill), behind(element)), element.getAttribute("class")]),
      ...[...document.querySelectorAll(".chart .curve")].map((element) =>
        [ratio(parse(getComputedStyle(element).stroke), behind(element)), element.getAttribute("class")]),
    ],
  };
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with running_browser(executable, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def six_formats(folder: Path) -> None:
    outputs = [output(name, 10.0 ** -(2 + number)) for number, name in enumerate(SIX[:-1])]
    found = validation(*outputs, not_run("tensorrt"))
    write_report(folder, result=result(found, SIX), validation=found, lineage=LINEAGE)


def failed(folder: Path) -> None:
    """Return a report with one failed output, one that cannot run and two that were not made; errors and paths are long."""
    wrong = output("onnx-int8", 0.4).model_copy(
        update={"explanation": f"mean_kl is 0.4: {PATH}", "remedy": f"look at {PATH}"}
    )
    found = validation(output("pytorch", 0.0), wrong, not_run("tensorrt").model_copy(update={"status_reason": PATH}))
    attempts = tuple(
        AttemptResult(
            task=f"quantize-onnx-{level}", stage="quantize", number=number, outcome="failed",
            rule="smaller-groups" if number > 1 else "", reason="QUANTIZATION_UNSUPPORTED", duration_seconds=1e3,
            error_message=f"weight {PATH} is not finite; " * 3, params={"format": "onnx", "level": level, "path": PATH},
        )
        for level in ("int4", "fp16") for number in (1, 2)
    )  # fmt: skip
    missing = {
        f"onnx-{level}": FailedFormat(
            task=f"quantize-onnx-{level}",
            state="failed",
            reason="QUANTIZATION_UNSUPPORTED",
            error_message=f"weight {PATH} is not finite",
        )
        for level in ("int4", "fp16")
    }
    failure = {"success": False, "reason": "VALIDATION_FAILED", "error_message": f"cannot read {PATH} " * 3}
    made = result(
        found, ("pytorch", "onnx-int8", "tensorrt"), attempts=attempts, failed=missing, warnings=(PATH,), **failure
    )
    write_report(folder, result=made, validation=found, lineage=LINEAGE)


def long_names(folder: Path) -> None:
    names = (
        "נרטיב־מודל־בעברית-int4",
        "一个很长的模型名称用于测试报告页面的布局是否正确显示",
        LONG.replace("-", "_"),
        LONG,
    )
    found = validation(*(output(name).model_copy(update={"notes": (PATH,)}) for name in names))
    labels = {"base_model": LONG.replace("-", "_"), "checkpoint": "نقطة-التحقق-100", "model_name": names[0]}
    sources = {"base": "sha256:" + "1" * 64, "sha256:" + "3" * 64: "sha256:" + "2" * 64}
    tools = {"merge": {"version": 1, "a_library_with_a_long_name": "2.13.0+" + "local" * 12}}
    lineage = {"labels": labels, "sources": sources, "tools": tools}
    write_report(folder, result=result(found, names), validation=found, lineage=lineage)


@pytest.fixture(params=[six_formats, failed, long_names], ids=lambda make: make.__name__)
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(tmp_path)
    return tmp_path / "report.html"


def overlapping(texts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    boxes = [(text["text"], box) for text in texts for box in text["boxes"]]
    return [
        (first, second)
        for index, (first, a) in enumerate(boxes)
        for second, b in boxes[index + 1 :]
        if min(a["right"], b["right"]) - max(a["left"], b["left"]) > 1
        and min(a["bottom"], b["bottom"]) - max(a["top"], b["top"]) > 3  # boxes are higher than their letters
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_is_readable_without_scrolling_sideways(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    found = browser.evaluate(MEASURE)
    assert found["width"] <= width
    assert found["fetched"] == 0
    assert len(found["texts"]) > 50
    assert [text for text in found["texts"] if text["size"] < LEAST_LETTER] == []
    assert [text for text in found["texts"] for box in text["boxes"] if box["left"] < 0 or box["right"] > width] == []
    assert len(found["charts"]) >= 6
    assert [pair for chart in found["charts"] for pair in overlapping(chart)] == []
    assert min(cell["width"] for cell in found["cells"]) >= 40, found["cells"]
    assert {scroller["hidden"] for scroller in found["scrollers"]} == {0}


def test_a_table_that_is_too_wide_is_scrolled_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    six_formats(tmp_path)
    width = 700
    browser.open(tmp_path / "report.html", width=width)
    found = browser.evaluate(MEASURE)
    assert found["width"] <= width
    assert all(scroller["focusable"] and scroller["name"] for scroller in found["scrollers"])
    assert all(0 <= scroller["left"] < scroller["right"] <= width for scroller in found["scrollers"])
    assert found["scrollers"][0]["hidden"] > 0
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.getAttribute('aria-label')") == "Formats"
    browser.press("ArrowRight")
    moved = "new Promise((done) => { const look = () => document.activeElement.scrollLeft > 0 ? done(true) : setTimeout(look, 20); look(); })"
    assert browser.evaluate(moved)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_bars_stand_out(browser: Browser, tmp_path: Path, dark: bool) -> None:
    failed(tmp_path)
    browser.open(tmp_path / "report.html", width=1280, dark=dark)
    found = browser.evaluate(CONTRAST)
    assert len(found["text"]) > 50
    assert [pair for pair in found["text"] if pair[0] < 4.5] == []  # WCAG 2.2, 1.4.3
    assert len(found["marks"]) > 10
    assert [pair for pair in found["marks"] if pair[0] < 3] == []  # 1.4.11


def test_paper_holds_everything(browser: Browser, tmp_path: Path) -> None:
    six_formats(tmp_path)
    width = 718  # A4 at 96 dots per inch, less the margins
    browser.open(tmp_path / "report.html", width=width, media="print", dark=True)
    hidden = "[...document.querySelectorAll('details table')].filter((table) => table.getBoundingClientRect().height < 1).length"
    assert browser.evaluate(hidden) == 0
    found = browser.evaluate(MEASURE)
    assert found["width"] <= width
    assert [text for text in found["texts"] for box in text["boxes"] if box["right"] > width] == []
    assert [pair for pair in browser.evaluate(CONTRAST)["text"] if pair[0] < 4.5] == []


def test_a_chart_is_a_list_to_who_does_not_see_it(browser: Browser, tmp_path: Path) -> None:
    six_formats(tmp_path)
    browser.open(tmp_path / "report.html", width=400)
    browser.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    roles = browser.tree()
    assert ("list", "Mean KL divergence") in roles
    assert ("columnheader", "Against PyTorch") in roles
    assert ("rowheader", "onnx-int8") in roles
    assert ("table", "") in roles


def test_the_first_page_is_one_sheet_with_what_matters(browser: Browser, tmp_path: Path) -> None:
    six_formats(tmp_path)
    browser.open(tmp_path / "report.html", width=718, media="print")
    height = "document.querySelector('.first').getBoundingClientRect().height"
    assert 200 < browser.evaluate(height) < 1046  # A4 at 96 dots per inch, less the margins
    after = "getComputedStyle(document.querySelector('.first')).breakAfter"
    assert browser.evaluate(after) == "page"
    assert browser.evaluate("document.querySelectorAll('.first .chart').length") == 1


def test_details_are_folded_on_the_screen(browser: Browser, tmp_path: Path) -> None:
    six_formats(tmp_path)
    browser.open(tmp_path / "report.html", width=1280)
    shown = "[...document.querySelectorAll('section table')].filter((table) => table.checkVisibility({contentVisibilityAuto: true})).length"
    assert browser.evaluate(shown) == 1
