"""Run axe-core, the checker of what keeps people from reading or operating a page, in a browser."""

from __future__ import annotations

from functools import cache
from importlib.metadata import distribution
from pathlib import Path

from support.commands.browser import Browser


@cache
def _script() -> str:
    files = distribution("axe-playwright-python").files or []
    path = next(file for file in files if file.name == "axe.min.js")
    return Path(str(path.locate())).read_text(encoding="utf-8")


def findings(browser: Browser) -> list[tuple[str, list[str]]]:
    """Return what axe finds in the page: the name of each rule, with the places."""
    browser.evaluate(f"{_script()};0")
    run = "axe.run().then(found => found.violations.map(each => [each.id, each.nodes.map(node => node.html)]))"
    return [(name, places) for name, places in browser.evaluate(run)]
