"""A prompt on the console: answers side by side, what is refused, one question at a time, and nothing that outlives it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import slipway
from slipway.artifacts.local import LocalStore
from slipway.artifacts.opening import open_store
from slipway.client.calls import BlockingCalls
from slipway.console.application import console
from slipway.console.asking.choices import choices_of, model_digests
from slipway.console.at_coordinator import CoordinatorPlace
from slipway.console.on_machine import MachinePlace
from slipway.console.place import Place, shown_message
from slipway.console.questions import Asked, Question
from slipway.settings import Settings
from slipway.validation.questions import AnswerReport
from slipway_protos.v1 import export_pb2 as pb
from support.commands.axe import findings
from support.commands.browser import find_browser, running_browser
from support.coordinators.harness import DIGEST, wait_for
from support.models.family_models import make_family_model
from support.models.validation_models import Models
from support.servers.console_pages import Page, PlainBrowser, serving

pytestmark = pytest.mark.timeout(900)

PROMPT = "the a of g is not in m or ag"
MARKUP = "<script>alert(1)</script> & the"
ALL = (("models", "base"), ("models", "fine-tuned"), ("models", "pytorch"))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A machine with one export: the merged model, and an output that nothing runs here."""
    root = tmp_path_factory.mktemp("machine")
    tiny = Models(root)
    given = {"validation.effort": "quick", "validation.benchmark_performance": False}
    where = {"base": tiny.base, "out": root / "out", "home": root / "home"}
    result = slipway.export(tiny.adapter, formats="pytorch,tensorrt_llm", settings=given, **where)
    assert set(result.paths) == {"pytorch", "tensorrt_llm"}
    return Settings(home=root / "home", scratch=root / "home" / "scratch")


class Pages:
    """The pages of one export."""

    def __init__(self, place: Place, address: str, export: str) -> None:
        self.place, self.address, self.path = place, address, f"/ui/projects/default/exports/{export}"
        self._browser = PlainBrowser(address)

    def get(self, path: str) -> Page:
        return self._browser.get(f"{self.path}{path}")

    def post(self, path: str, *fields: tuple[str, str]) -> Page:
        return self._browser.post(f"{self.path}{path}", *fields)


@contextlib.contextmanager
def pages_of(place: Place, export: str) -> Iterator[Pages]:
    with serving(console(lambda *_: place)) as address:
        yield Pages(place, address, export)


@pytest.fixture
def place(settings: Settings) -> Iterator[MachinePlace]:
    with contextlib.closing(MachinePlace(settings, {})) as place:
        yield place


@pytest.fixture
def pages(place: MachinePlace) -> Iterator[Pages]:
    (entry,) = place.listed("").entries
    with pages_of(place, entry.id) as pages:
        yield pages


def ask(pages: Pages, *models: tuple[str, str], prompt: str = PROMPT, tokens: str = "12") -> None:
    reply = pages.post("/ask", ("prompt", prompt), ("tokens", tokens), *models)
    assert reply.status == 303, reply.text
    assert reply.location == f"{pages.path}/ask"


def ended(pages: Pages) -> Page:
    """Wait for the end of the question, as the page does, and return the page."""

    def refreshed() -> bool:
        reply = pages.get("/ask/answers?state=running")
        assert reply.status == 200
        return reply.headers.get("hx-refresh") == "true"

    wait_for(refreshed, seconds=240)
    return pages.get("/ask")


def cards(page: str) -> dict[str, str]:
    """The answers on a page, by the model's name."""
    return dict(re.findall(r'<section class="offer" aria-label="([^"]+)">(.*?)</section>', page, re.DOTALL))


def runners() -> list[psutil.Process]:
    """Processes of models that this process has started, directly or not."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "slipway_validate.runner.main" in each.cmdline():
                found.append(each)
    return found


@pytest.mark.slow
def test_answers_come_side_by_side(pages: Pages) -> None:
    assert f'href="{pages.path}/ask">Ask</a>' in pages.get("").text
    form = pages.get("/ask").text
    assert re.findall(r'name="models" value="([^"]+)" checked', form) == ["base", "fine-tuned", "pytorch"]
    (why,) = re.findall(r'value="tensorrt_llm" disabled> .*?<span class="small why">(.*?)</span>', form)
    assert "TensorRT-LLM" in why
    ask(pages, *ALL, prompt=f"{PROMPT}\r\n{MARKUP}")
    assert "The models are being asked" in pages.get("/ask").text
    page = ended(pages)
    assert b"<script>alert" not in page.body
    assert b"or ag\n&lt;script&gt;alert(1)&lt;/script&gt; &amp; the</textarea>" in page.body
    found = cards(page.text)
    assert list(found) == ["base", "fine-tuned", "pytorch"]
    assert "Differs from the fine-tuned model's from token " in found["base"]
    assert "The same as the fine-tuned model's." in found["pytorch"]
    assert "fine-tuned model's" not in found["fine-tuned"]
    for text in found.values():
        assert re.search(
            r"[\d.]+ tok/s · \d+ tokens?(, ended by the model)? · first after .* ms · transformers, cpu, float32", text
        )
    assert runners() == []


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ([("prompt", " \n"), *ALL], 422, "there is no prompt"),
        ([("prompt", "a" * 20_001), *ALL], 422, "the prompt has 20001 characters"),
        ([("prompt", "한" * 20_001), *ALL], 422, "the prompt has 20001 characters"),
        ([("prompt", "a" * 300_000), *ALL], 429, "the form has more than 262144 bytes"),
        ([("prompt", "one\u202etwo"), *ALL], 422, "the hidden character U+202E"),
        ([("prompt", "one\x00two"), *ALL], 422, "the hidden character U+0000"),
        ([("prompt", "one"), ("tokens", "0"), *ALL], 422, "the number of tokens"),
        ([("prompt", "one"), ("tokens", "1025"), *ALL], 422, "the number of tokens"),
        ([("prompt", "one"), ("tokens", "²"), *ALL], 422, "the number of tokens"),
        ([("prompt", "one"), ("tokens", "9" * 5000), *ALL], 422, "the number of tokens"),
        ([("prompt", "one"), ("tokens", "8")], 422, "0 models are chosen"),
        ([("prompt", "one"), ("tokens", "8"), ("models", "onnx")], 422, "onnx cannot be asked: the export has no such"),
        ([("prompt", "one"), ("tokens", "8"), ("models", "<b>x")], 422, "<b>x cannot be asked"),
        ([("prompt", "one"), ("tokens", "8"), ("models", "tensorrt_llm")], 422, "tensorrt_llm cannot be asked: "),
        ([("prompt", "one"), ("tokens", "8"), *(("models", str(n)) for n in range(65))], 422, "65 models are chosen"),
    ],
    ids=[str(number) for number in range(15)],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_on_the_page(
    pages: Pages, fields: list[tuple[str, str]], status: int, said: str
) -> None:
    reply = pages.post("/ask", *fields)
    assert (reply.status, said in reply.text) == (status, True), reply.text
    assert b"<b>x" not in reply.body
    assert "Answers</h2>" not in reply.text
    assert runners() == []


def test_one_question_at_a_time_and_cancel_ends_its_processes(pages: Pages) -> None:
    ask(pages, ("models", "base"))
    wait_for(runners, seconds=240)
    second = pages.post("/ask", ("prompt", "two"), ("tokens", "8"), *ALL)
    assert second.status == 422
    assert "another question is being answered" in second.text
    processes = runners()
    assert pages.post("/ask/cancel").status == 303
    assert "The question was cancelled." in ended(pages).text
    assert not any(each.is_running() for each in processes)
    assert pages.post("/ask/cancel").status == 303  # nothing is left to cancel


def test_a_question_ends_with_the_console(place: MachinePlace, pages: Pages) -> None:
    ask(pages, ("models", "base"))
    wait_for(runners, seconds=240)
    place.close()  # the fixture closes it again
    assert runners() == []
    assert "The question was cancelled." in pages.get("/ask").text


@pytest.mark.slow
def test_a_model_that_dies_is_named_and_the_console_goes_on(pages: Pages) -> None:
    ask(pages, *ALL)

    def second() -> list[psutil.Process]:
        return [each for each in runners() if each.cmdline()[-1].endswith("/runs/1")]

    wait_for(second, seconds=240)[0].send_signal(signal.SIGKILL)
    told = cards(ended(pages).text)
    assert "STAGE_KILLED" in told["pytorch"]
    assert "pytorch" in told["pytorch"]
    assert "tok/s" in told["base"]
    assert pages.get("").status == 200


def test_a_page_shows_one_moment_of_a_question_that_ends_meanwhile() -> None:
    asked = Asked("e-1", Question(PROMPT))
    shown = asked.standing()
    asked.report = AnswerReport(prompt_tokens=1, read=PROMPT, answers=())
    assert (shown.state, shown.report) == ("running", None)
    assert (asked.standing().state, asked.standing().report) == ("answered", asked.report)


def test_a_question_whose_whole_process_dies_is_told(pages: Pages) -> None:
    ask(pages, ("models", "base"))
    wait_for(runners, seconds=240)
    processes = runners()
    stages = [each for each in psutil.Process().children() if "slipway.execution.child_main" in each.cmdline()]
    assert len(stages) == 1
    stages[0].send_signal(signal.SIGKILL)
    page = ended(pages)
    assert "STAGE_KILLED" in page.text
    assert 'class="box bad"' in page.text
    wait_for(lambda: not any(each.is_running() for each in processes))
    assert pages.post("/ask/cancel").status == 303
    assert "STAGE_KILLED" in pages.get("/ask").text, "a question that has failed is not cancelled"


def test_what_is_gone_from_the_store_is_named(place: MachinePlace, pages: Pages, settings: Settings) -> None:
    message = place.shown("default", place.listed("").entries[0].id).message
    assert message is not None
    path = LocalStore(settings.store_path).manifest_path(message.sources["base"])
    hidden = path.with_name("hidden")
    path.rename(hidden)
    try:
        reply = pages.get("/ask")
    finally:
        hidden.rename(path)
    assert (reply.status, "ARTIFACT_NOT_FOUND" in reply.text) == (404, True)


def test_pages_of_questions_that_there_are_none_of(pages: Pages) -> None:
    assert pages.get("/ask/answers?state=running").headers["hx-refresh"] == "true"
    assert pages.post("/ask/cancel").status == 303
    assert Pages(pages.place, pages.address, "e-none").get("/ask").status == 404


def test_models_of_a_coordinator_are_asked_elsewhere() -> None:
    with BlockingCalls("127.0.0.1:1") as connection:
        with pages_of(CoordinatorPlace(connection, project="default"), "e-1") as pages:
            replies = (pages.get("/ask"), pages.get("/ask/answers"), pages.post("/ask"), pages.post("/ask/cancel"))
        for reply in replies:
            assert "models are asked on the machine that has them" in reply.text


def ended_export(**sources: str) -> pb.Export:
    return pb.Export(name="projects/default/exports/e-1", state=pb.EXPORT_STATE_SUCCEEDED, sources=sources)


def test_prepared_bases_and_combined_adapters_take_the_place_of_sources() -> None:
    message = ended_export(base="sha256:a", adapter="sha256:b", heldout="sha256:c")
    assert model_digests(message) == {"base": "sha256:a", "adapter": "sha256:b"}
    message.tasks.add(id="prepare", stage="prepare", outputs={"base": "sha256:d", "pytorch": "sha256:d"})
    message.tasks.add(id="combine", stage="combine", outputs={"adapter": "sha256:e"})
    message.tasks.add(id="merge", stage="merge", outputs={"pytorch": "sha256:f"})
    assert model_digests(message) == {"base": "sha256:d", "adapter": "sha256:e"}


def test_an_export_without_a_model_that_writes_text_says_why(
    place: MachinePlace, settings: Settings, tmp_path: Path
) -> None:
    store = open_store(settings)

    def obstacle(folder: Path) -> str:
        return choices_of(place, shown_message(ended_export(base=store.put(folder)))).obstacle

    classifier = make_family_model("bert-classes", tmp_path / "classifier")
    assert obstacle(classifier) == "a sequence classifier cannot be asked: it reads no text, or writes none"
    for name, text in (("none", ""), ("list", "[]"), ("deep", "[" * 5000), ("other", json.dumps({"model_type": "x"}))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(text)
        assert obstacle(folder) == "a model of unknown family cannot be asked: it reads no text, or writes none"
    assert choices_of(place, shown_message(ended_export(adapter=DIGEST))).obstacle == "the export has no base model"


@pytest.mark.slow
def test_a_reader_asks_and_sees_the_answers_come(pages: Pages, tmp_path: Path) -> None:
    """In Chromium: beside each other on a desktop, below each other on a phone, nothing wider than the window, and axe finds nothing."""
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    tops = (
        "[...document.querySelectorAll('#answers section')].map(each => Math.round(each.getBoundingClientRect().top))"
    )
    with running_browser(executable, tmp_path) as browser:
        browser.open(f"http://{pages.address}{pages.path}", width=1280)
        browser.click('a[href$="/ask"]')
        browser.wait_for("document.activeElement.id == 'prompt'")
        browser.write("#prompt", PROMPT)
        browser.write("#tokens", "6")
        browser.click("main button.button")
        browser.wait_for("/The models are being asked: base and fine-tuned/.test(document.body.innerText)")
        assert not findings(browser)
        browser.wait_for("document.querySelectorAll('#answers section').length == 3")
        assert browser.evaluate("document.querySelector('#prompt').value") == PROMPT
        for width, dark, rows in ((1280, False, 1), (1280, True, 1), (400, False, 3)):
            browser.open(f"http://{pages.address}{pages.path}/ask", width=width, dark=dark)
            assert browser.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
            assert len(set(browser.evaluate(tops))) == rows
            assert not findings(browser)
        browser.click("main button.button")
        browser.wait_for("!!document.querySelector('#answers button')")
        browser.click("#answers button")
        browser.wait_for("/The question was cancelled/.test(document.body.innerText)")
    assert runners() == []
