"""The pages of the documentation site: the repository's own, with links that lead somewhere on the site too."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "docs" / "site" / "mkdocs.yml"


@pytest.fixture
def site(tmp_path: Path) -> dict[str, Any]:
    """The script that puts the pages together, which writes into a folder of its own here."""
    script = runpy.run_path(str(ROOT / "docs" / "site" / "build.py"))
    script["main"].__globals__.update(SITE=tmp_path, PAGES=tmp_path / "pages")
    return script


def test_links_to_other_files_lead_to_pages_that_show_them(site: dict[str, Any], tmp_path: Path) -> None:
    text = "[rules](../shared/slipway/security/access/rules.py#L1), [protos](../protos/slipway/v1), [merge](../services/merge)"
    page = site["converted"](Path("docs/security.md"), text)
    assert page == (
        "[rules](../shared/slipway/security/access/rules.py.md#L1), "
        "[protos](../protos/slipway/v1/README.md), [merge](../services/merge/README.md)"
    )
    shown = (tmp_path / "pages" / "shared/slipway/security/access/rules.py.md").read_text()
    assert (ROOT / "shared/slipway/security/access/rules.py").read_text().rstrip() in shown
    assert "- [export.proto](export.proto.md)" in (tmp_path / "pages" / "protos/slipway/v1/README.md").read_text()
    assert (tmp_path / "pages" / "protos/slipway/v1/export.proto.md").is_file()


def test_links_that_are_right_already_stay(site: dict[str, Any]) -> None:
    kept = (
        "[a](reasons.md) [b](https://example.org/x.py) [c](#here) [d](nonesuch.py)\n```python\n[e](../Makefile)\n```\n"
    )
    assert site["converted"](Path("docs/clients.md"), kept) == kept


def test_every_page_of_the_menu_is_written(site: dict[str, Any], tmp_path: Path) -> None:
    site["main"]()
    named = re.findall(r"[\w./-]+\.md", yaml.safe_dump(yaml.safe_load(CONFIGURATION.read_text())["nav"]))
    assert len(named) > 20
    assert [name for name in named if not (tmp_path / "pages" / name).is_file()] == []
    settings = (tmp_path / "pages" / "shared/slipway/all-settings.md").read_text()
    assert "`EXPORT_CHECKPOINT_PATH`" in settings
    assert "`SLIPWAY_HOME`" in settings
    assert "`ADAPTER_BASE_MISMATCH`" in (tmp_path / "pages" / "docs/reasons.md").read_text()
    assert "::: slipway.Client\n" in (tmp_path / "pages" / "reference/clients.md").read_text()


def test_every_page_is_in_the_menu() -> None:
    named = yaml.safe_dump(yaml.safe_load(CONFIGURATION.read_text())["nav"])
    pages = [
        path.relative_to(ROOT).as_posix() for part in ("docs", "docs/tutorials") for path in (ROOT / part).glob("*.md")
    ]
    assert len(pages) > 25
    assert [page for page in pages if page not in named] == []


def test_nothing_of_the_site_comes_from_another_host() -> None:
    theme = yaml.safe_load(CONFIGURATION.read_text())["theme"]
    assert theme["font"] is False
    assert "extra_css" not in theme
    assert "extra_javascript" not in theme


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: make docs")
def test_the_site_is_built_without_a_warning(site: dict[str, Any], tmp_path: Path) -> None:
    site["main"]()
    settings = CONFIGURATION.read_text().replace("../../", f"{ROOT}/").replace(f"{ROOT}/.site", str(tmp_path))
    (tmp_path / "mkdocs.yml").write_text(settings.replace("[hooks.py]", f"['{CONFIGURATION.with_name('hooks.py')}']"))
    build = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--config-file", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "html").rglob("*.html"))
    loaded = {
        address
        for page in pages
        for address in re.findall(r'<(?:script|link|img)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]+)"', page.read_text())
    }
    assert loaded == set()
    assert (tmp_path / "html" / "search" / "search_index.js").read_text().startswith("var __index = {")
    assert 'src="../third_party/iframe-worker/shim.js"' in (tmp_path / "html" / "docs" / "recipes.html").read_text()
    assert 'id="slipway.Stage.providers"' in (tmp_path / "html" / "reference" / "stages.html").read_text()
