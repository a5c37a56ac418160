"""The pages of this machine: what they show, what they do, and whom they refuse."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway.artifacts import LocalStore
from slipway.console.application import console
from slipway.console.on_machine import MachinePlace
from slipway.console.serving import KeyGuard
from slipway.console.wish import Wish
from slipway.settings import Settings
from support.commands.cli import slipway, start
from support.coordinators.harness import wait_for
from support.models import tiny_models
from support.servers.console_pages import Page, PlainBrowser, serving

QUICK = ("settings", "validation.enabled=false")
EXPORT = re.compile(r"/ui/projects/default/exports/e-[0-9a-f]+")


class LocalConsole:
    """A console of this machine."""

    def __init__(self, root: Path) -> None:
        self.root, self.run, self.base = root, root / "run", root / "base"
        tiny_models.make_base(self.base)
        tiny_models.make_checkpoint(self.base, self.run)
        self.home = root / "home"
        self.settings = Settings.from_environment({"SLIPWAY_HOME": str(self.home)})
        self.machine = MachinePlace(self.settings, {})
        self.browser: PlainBrowser

    def fields(self, *more: tuple[str, str], out: str = "out") -> list[tuple[str, str]]:
        """The fields of a quick export."""
        given = [("run", str(self.run)), ("base", str(self.base)), ("out", str(self.root / out)), QUICK]
        return [*given, *(more or [("formats", "pytorch:none")])]

    def page(self, path: str) -> Page:
        """Return the page of an export, which has another path once the export has a name of its own."""
        page = self.browser.get(path)
        return self.browser.get(page.location) if page.status == 303 else page

    def ended(self, path: str) -> Page:
        """Wait for the end of an export; return its page."""
        wait_for(lambda: re.search("The export (has|was)", self.page(path).text))
        return self.page(path)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalConsole]:
    local = LocalConsole(tmp_path_factory.mktemp("console"))
    with serving(console(lambda _, __: local.machine)) as address:
        local.browser = PlainBrowser(address)
        yield local
        local.machine.close()


@pytest.fixture(scope="module")
def made(local: LocalConsole) -> str:
    """The path of an export that has succeeded."""
    answer = local.browser.post("/ui/exports", *local.fields())
    assert answer.status == 303, answer.text
    page = local.ended(answer.location)
    assert "The export has succeeded." in page.text, page.text
    return str(EXPORT.findall(local.browser.get("/ui/").text)[0])


def test_the_plan_says_sizes_and_the_same_command(local: LocalConsole) -> None:
    answer = local.browser.post("/ui/new/check", *local.fields(("formats", "gguf:q8_0")), hx_trigger_name="run")
    assert answer.status == 200
    assert "gguf-q8_0 (≤" in re.sub("<.*?>", "", answer.text)
    assert f"slipway export {local.run} -f gguf:q8_0 --base-model {local.base}" in answer.text
    offers = re.search(r'value="onnx:int8">.*?≤ ([\d.]+ .?B)', answer.text)
    assert offers, "the outputs have no sizes"
    seen = re.findall('name="seen" value="(.*?)"', answer.text)
    unchanged = local.browser.post("/ui/new/check", *local.fields(), ("seen", seen[0]))
    assert 'id="offers"' not in unchanged.text, "checkboxes are replaced under the reader's hands"


def test_without_scripts_the_form_shows_the_plan_too(local: LocalConsole) -> None:
    page = local.browser.post("/ui/new", *local.fields(("formats", "gguf:q8_0")))
    assert page.status == 200
    assert "gguf-q8_0 (≤" in re.sub("<.*?>", "", page.text)
    assert f'value="{local.run}"' in page.text


@pytest.mark.parametrize("source", ["hf://owner/name", "s3://bucket/run", "sha256:" + "1" * 64])
def test_a_form_fetches_nothing(local: LocalConsole, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a source is fetched to draw a form")

    monkeypatch.setattr("slipway.sources.folders.SourceFolders.find", refuse)
    answer = local.browser.post("/ui/new/check", ("run", source), ("base", source), ("formats", "gguf:q8_0"))
    assert "Makes gguf" in re.sub("<.*?>", "", answer.text)
    assert "its sources are read when the export begins" in answer.text


def test_what_this_machine_lacks_cannot_be_chosen_and_says_why(local: LocalConsole) -> None:
    page = local.browser.get("/ui/new").text
    lacking = local.machine.offered(Wish())
    unfit = [offer for offer in lacking if offer.unfit]
    if not unfit:
        pytest.skip("this machine lacks nothing")
    for offer in unfit:
        assert re.search(f'value="{offer.request}" disabled>', page), offer
        assert offer.unfit in page


def test_a_problem_is_told_on_the_form_which_keeps_what_was_typed(local: LocalConsole) -> None:
    nothing = local.root / "<b>nothing"
    fields = [("run", str(nothing)), ("formats", "onnx:int8"), ("settings", "validation.test_samples=many")]
    for path in ("/ui/new/check", "/ui/exports"):
        answer = local.browser.post(path, *fields)
        assert "test_samples" in answer.text
        assert b"<b>nothing" not in answer.body
    assert answer.status == 422
    assert f'value="{nothing}"' in answer.text
    assert re.search(r'value="onnx:int8" checked', answer.text)
    empty = local.browser.post("/ui/exports", ("formats", "onnx:int8"))
    assert (empty.status, "no training run and no base model is named" in empty.text) == (422, True)


def test_an_export_is_made_shown_and_downloaded(local: LocalConsole, made: str) -> None:
    page = local.browser.get(made)
    assert "Delivered to" in page.text
    assert ">reused<" not in page.text, "its tasks ran for it"
    assert "pytorch.tar" in page.text
    folder = Path(re.findall("Delivered to <code>(.*?)</code>", page.text)[0])
    data = local.browser.get(f"{made}/outputs/pytorch.tar")
    assert data.headers["content-length"] == str(len(data.body))
    assert data.headers["content-disposition"] == 'attachment; filename="pytorch.tar"'
    with tarfile.open(fileobj=io.BytesIO(data.body)) as archive:
        names = {each.name for each in archive}
        weights = archive.extractfile("pytorch/model.safetensors")
        assert weights is not None
        assert weights.read() == (folder / "pytorch/model.safetensors").read_bytes()
    assert names == {
        f"pytorch/{path.relative_to(folder / 'pytorch')}" for path in (folder / "pytorch").rglob("*") if path.is_file()
    }
    report = local.browser.get(f"{made}/report")
    assert "sandbox" in report.headers["content-security-policy"]
    assert "<h1>" in report.text
    assert local.browser.get(f"{made}/outputs/onnx.tar").status == 404
    assert local.browser.get(f"{made}/outputs/..%2f..%2fetc.tar").status == 404


@pytest.mark.slow
def test_an_export_of_a_command_is_shown_too_and_two_are_compared(local: LocalConsole, made: str) -> None:
    words = ("--base-model", str(local.base), "--out", str(local.root / "out"), "--set", "validation.enabled=false")
    before = set(EXPORT.findall(local.browser.get("/ui/").text))
    done = slipway("export", str(local.run), "-f", "pytorch:none+fp16", *words, home=local.home)
    assert done.code == 0, done.err
    after = set(EXPORT.findall(local.browser.get("/ui/").text))
    assert made in after
    assert len(after - before) == 1
    assert ">reused<" in local.browser.get((after - before).pop()).text
    query = "&".join(f"export=default/{path.rpartition('/')[2]}" for path in (made, *(after - before)))
    page = local.browser.get(f"/ui/compare?{query}")
    assert page.status == 200
    assert "pytorch-fp16" in page.text
    assert "formats.pytorch" in page.text
    for wrong in ("", f"?{query}&export=default/x", "?export=default", "?export=a/b&export=c/d"):
        assert local.browser.get(f"/ui/compare{wrong}").status in {400, 404}


def test_the_list_is_filtered(local: LocalConsole, made: str) -> None:
    assert made in local.browser.get("/ui/?filter=state+%3D+succeeded").text
    none = local.browser.get("/ui/?filter=state+%3D+queued").text
    assert made not in none
    assert "No export matches the filter." in none
    wrong = local.browser.get("/ui/?filter=nonsense+%3C")
    assert (wrong.status, "REQUEST_INVALID" in wrong.text, 'value="nonsense <"' in wrong.text) == (200, True, True)


def test_the_moving_part_tells_the_page_to_load_again_when_the_state_changes(local: LocalConsole, made: str) -> None:
    assert local.browser.get(f"{made}/live?state=running").headers["hx-refresh"] == "true"
    assert "hx-refresh" not in local.browser.get(f"{made}/live?state=succeeded").headers


def test_a_failed_export_says_why_and_is_continued(local: LocalConsole) -> None:
    fields = [("run", str(local.root / "later")), ("base", str(local.base)), ("formats", "pytorch:none"), QUICK]
    path = local.browser.post("/ui/exports", *fields, ("out", str(local.root / "out"))).location
    page = local.ended(path)
    assert "The export has failed." in page.text
    assert "CHECKPOINT_NOT_FOUND" in page.text
    assert str(local.root / "later") in page.text
    tiny_models.make_checkpoint(local.base, local.root / "later", seed=2)
    again = local.browser.post(f"{path}/retry")
    assert again.status == 303
    assert "The export has succeeded." in local.ended(again.location).text


def test_exports_take_turns_and_are_cancelled(local: LocalConsole) -> None:
    slow = ("settings", "validation.enabled=true\nvalidation.test_samples=2")
    first = local.browser.post("/ui/exports", *local.fields(("formats", "pytorch:bf16"), slow)).location
    second = local.browser.post("/ui/exports", *local.fields(("formats", "pytorch:fp16"))).location
    assert local.browser.post(f"{second}/cancel").status == 303
    assert "The export was cancelled." in local.ended(second).text
    wait_for(lambda: "The export is running" in local.page(first).text)
    assert local.browser.post(f"{first}/cancel").status == 303
    page = local.ended(first)
    assert "The export was cancelled." in page.text, re.findall(
        "The export .*|<code>[A-Z_]*<.code>|<strong>.*?<.strong>", page.text
    )
    assert "hx-trigger" not in page.text, "the page asks for ever"
    refused = local.browser.post(f"{first}/cancel")
    assert (refused.status, "EXPORT_STATE" in refused.text) == (400, True)


def test_a_second_click_begins_nothing_new(local: LocalConsole) -> None:
    form = re.findall('name="form" value="(.*?)"', local.browser.get("/ui/new").text)
    fields = local.fields(("formats", "pytorch:int8"), ("form", form[0]))
    paths = {local.browser.post("/ui/exports", *fields).location for _ in range(3)}
    assert len(paths) == 1
    changed = local.browser.post("/ui/exports", *local.fields(("formats", "pytorch:bf16"), ("form", form[0]))).location
    assert changed not in paths
    for path in (*paths, changed):
        local.browser.post(f"{path}/cancel")
        local.ended(path)


def test_two_retries_begin_one_export(local: LocalConsole) -> None:
    path = local.browser.post("/ui/exports", *local.fields(("formats", "pytorch:w8a8"))).location
    local.browser.post(f"{path}/cancel")
    local.ended(path)
    answers = [local.browser.post(f"{path}/retry") for _ in range(2)]
    assert sorted(answer.status for answer in answers) == [303, 400]
    local.browser.post(f"{path}/cancel")
    local.ended(path)


def test_an_export_whose_artifacts_were_collected_is_still_shown(local: LocalConsole, made: str) -> None:
    store = LocalStore(local.settings.store_path)
    export = made.rpartition("/")[2]
    message = local.machine.shown("default", export).message
    assert message is not None
    path = store.manifest_path(message.outputs["pytorch"])
    hidden = path.rename(path.with_name("hidden"))
    try:
        page = local.browser.get(made)
        assert (page.status, "ARTIFACT_NOT_FOUND" in page.text, "Stages" in page.text) == (200, True, True)
        assert local.browser.get(f"/ui/compare?export=default/{export}&export=default/{export}").status == 200
    finally:
        hidden.rename(path)


def test_an_interrupted_export_has_no_report(local: LocalConsole) -> None:
    words = ("--base-model", str(local.base), "--out", str(local.root / "o2"), "-f", "onnx:none", "--progress", "plain")
    process = start(["export", local.run, *words], local.home)
    wait_for(lambda: "running" in local.browser.get("/ui/").text)
    process.kill()
    process.communicate()
    wait_for(lambda: "interrupted" in local.browser.get("/ui/").text)
    path = next(
        path for path in EXPORT.findall(local.browser.get("/ui/").text) if "interrupted" in local.browser.get(path).text
    )
    page = local.browser.get(path)
    assert f"{path}/report" not in page.text
    assert local.browser.get(f"{path}/report").status == 400
    assert local.browser.post(f"{path}/delete").location == "/ui/"
    assert local.browser.get(path).status == 404
    assert "interrupted" not in local.browser.get("/ui/").text


def test_paths_that_are_none_are_told(local: LocalConsole, made: str) -> None:
    for path, status in (
        ("/ui/nothing", 404),
        ("/ui/projects/default/exports/none", 404),
        (f"{made}/report/more", 404),
        ("/ui/static/..%2fapplication.py", 404),
        ("/ui/static/console.css", 200),
        ("/ui", 303),
    ):
        assert local.browser.get(path).status == status, path
    assert local.browser.get("/ui/exports").status == 405
    assert local.browser.post(f"{made}/explode").status == 400
    part = local.browser.get("/ui/projects/default/exports/none/live", hx_request="true")
    assert (part.status, "EXPORT_NOT_FOUND" in part.text, "<nav" in part.text) == (286, True, False)


def test_forms_have_limits(local: LocalConsole) -> None:
    large = local.browser.post("/ui/exports", ("run", "a" * 70_000))
    assert "LIMIT_EXCEEDED" in large.text
    assert local.browser.ask("POST", "/ui/exports", b"{}", content_type="application/json").status == 400
    assert (
        local.browser.ask("POST", "/ui/exports", b"run=%ff", content_type="application/x-www-form-urlencoded").status
        == 400
    )
    many = [("formats", "onnx:int8")] * 300
    assert local.browser.post("/ui/exports", *many).status == 400


def test_pages_let_nothing_else_in(local: LocalConsole) -> None:
    headers = local.browser.get("/ui/").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert not re.search(r"<script(?! src)|<style|style=|onclick|javascript:", local.browser.get("/ui/new").text)


def test_only_who_has_the_key_is_let_in(local: LocalConsole) -> None:
    application = console(lambda _, __: local.machine)
    with serving(KeyGuard(application, key="right-key", port=1)) as address:
        browser = PlainBrowser(address)
        assert browser.get("/ui/").status == 403
        assert browser.get("/ui/?key=wrong").status == 403
        assert browser.get("/ui/?key=").status == 403
        assert browser.get("/ui/?key=%ff").status == 403
        let_in = browser.get("/ui/?key=right-key")
        assert (let_in.status, 'content="0; url=/ui/"' in let_in.text) == (200, True)
        assert all(word in let_in.headers["set-cookie"] for word in ("HttpOnly", "SameSite=strict", "Path=/ui"))
        assert browser.get("/ui/").status == 200
        for headers in (
            {"host": "evil.example"},
            {"origin": "http://evil.example"},
            {"sec_fetch_site": "cross-site"},
            {"host": "127.0.0.1.evil.example"},
        ):
            assert browser.get("/ui/", **headers).status == 403, headers
        assert browser.post("/ui/exports", ("run", "x"), origin="http://evil.example").status == 403


def test_the_end_of_the_console_ends_what_runs(tmp_path: Path) -> None:
    local = LocalConsole(tmp_path)
    with serving(console(lambda _, __: local.machine)) as address:
        local.browser = PlainBrowser(address)
        path = local.browser.post("/ui/exports", *local.fields(("formats", "onnx:none"))).location
        wait_for(lambda: "running" in local.page(path).text)
        local.machine.close()
    assert not [thread for thread in local.machine._jobs._threads if thread.is_alive()]
    scratch = local.home / "scratch"
    assert not scratch.exists() or not list(scratch.iterdir())
