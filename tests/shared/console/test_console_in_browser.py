"""The console in Chromium: an export is made in a few clicks, watched, compared and downloaded; everybody can read and operate it."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands.axe import findings
from support.commands.browser import Browser, find_browser, running_browser
from support.commands.cli import SLIPWAY, environment
from support.coordinators.event_readers import submit
from support.coordinators.http_places import HttpPlace
from support.models import tiny_models

pytestmark = pytest.mark.slow

LOOKS = ((400, False), (1280, False), (1280, True), (1920, False))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with running_browser(executable, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    tiny_models.make_base(folder / "base")
    tiny_models.make_checkpoint(folder / "base", folder / "run")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The address that ``slipway ui`` prints."""
    words, variables = [SLIPWAY, "ui", "--no-browser"], environment(folder / "home")
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def enter(browser: Browser, address: str) -> None:
    """Open the address with the key, from which a page leads on to the list."""
    browser.open(address, width=1280)
    browser.wait_for("document.title.startsWith('Exports')")


def look_at(browser: Browser, page: str) -> None:
    """Check a page at the widths of a phone, a desktop and a large screen, in light and dark: nothing is wider, and axe finds nothing."""
    for width, dark in LOOKS:
        browser.open(page, width=width, dark=dark)
        assert browser.evaluate("document.scrollingElement.scrollWidth <= innerWidth"), (page, width)
        assert not findings(browser), (page, width, dark)


def test_an_export_is_made_watched_compared_and_downloaded(browser: Browser, address: str, folder: Path) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/ui/\?key=[\w-]{32}", address)
    root = address.partition("?")[0].rstrip("/")
    enter(browser, address)
    assert "There is no export yet" in browser.text()
    look_at(browser, f"{root}/")
    look_at(browser, f"{root}/machines")
    for number, output in enumerate(("pytorch:none", "pytorch:fp16"), start=1):
        browser.click('a[href="/ui/new"]')
        browser.wait_for("!!document.querySelector('#run')")
        browser.write("#run", str(folder / "run"))
        browser.write("#base", str(folder / "base"))
        browser.click("main summary")
        browser.write("#settings", "validation.enabled=false")
        browser.wait_for("/≤/.test(document.querySelector('#offers').innerText)")
        browser.evaluate("document.querySelector('#offers').firstElementChild.mark = 1")
        browser.click(f'input[value="{output}"]')
        browser.wait_for("/Makes pytorch/.test(document.querySelector('#plan').innerText)")
        kept = browser.evaluate("document.querySelector('#offers').firstElementChild.mark")
        assert kept == 1, "checkboxes are replaced under the reader's hands"
        assert "≤" in browser.evaluate("document.querySelector('#offers').innerText")
        if number == 1:
            axe = findings(browser)
            assert not axe, axe
        browser.click("main button.button")
        browser.wait_for("location.pathname.includes('/exports/')")
        browser.wait_for("/The export has succeeded/.test(document.body.innerText)")
        look_at(browser, browser.evaluate("location.href"))
        browser.open(f"{root}/", width=1280)
    size = browser.evaluate(
        "(async () => { const page = await (await fetch(document.querySelector('main th a').href)).text();"
        ' const link = page.match(/href="([^"]*[.]tar)"/)[1]; return (await (await fetch(link)).arrayBuffer()).byteLength; })()'
    )
    assert size > (folder / "run" / "checkpoint-10" / "adapter_model.safetensors").stat().st_size
    for number in (1, 2):
        browser.click(f"tbody tr:nth-child({number}) input")
    browser.click('form[action$="/compare"] button')
    browser.wait_for("location.pathname.endsWith('/compare')")
    browser.wait_for("document.body && document.body.innerText.includes('pytorch-fp16')")
    look_at(browser, browser.evaluate("location.href"))


def test_it_is_operated_by_keyboard(browser: Browser, address: str) -> None:
    root = address.partition("?")[0].rstrip("/")
    enter(browser, address)
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left >= 0")
    browser.open(f"{root}/new", width=1280)
    assert browser.evaluate("document.activeElement.id") == "run"
    names = [name for role, name in browser.tree() if role in {"textbox", "checkbox", "combobox", "button", "link"}]
    assert all(names), names
    assert ("button", "Export") in browser.tree()


def test_users_of_a_coordinator_sign_in_and_see_what_is_theirs(browser: Browser, tmp_path: Path) -> None:
    with HttpPlace(tmp_path) as place:
        submit(place, "of-red")
        root = f"http://{place.http_address}/ui"
        browser.open(f"{root}/", width=1280)
        look_at(browser, browser.evaluate("location.href"))
        for who, sees in (("viewer", True), ("neighbour", False), ("admin", True)):
            browser.open(f"{root}/", width=1280)
            browser.write("#token", place.tokens[who])
            browser.click("main button")
            browser.wait_for("document.title.startsWith('Exports')")
            assert ("of-red" in browser.text()) is sees, who
            if who == "viewer":
                for path in ("/", "/new", "/machines", "/projects/red/exports/of-red"):
                    look_at(browser, f"{root}{path}")
            browser.click(".bar form button")
            browser.wait_for("location.pathname.endsWith('/sign-in')")
