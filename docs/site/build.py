"""Put the pages of the documentation site together in ``.site/pages``; ``make docs`` makes ``.site/html`` of them.

The repository's Markdown files are its pages, at the same places, so their links mean the same here as on GitHub. A linked file
of another kind becomes a page that shows it, a linked folder one that lists it. The pages of the API reference are made from
``slipway.__all__``.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".site"
PAGES = SITE / "pages"
SEARCH = Path("third_party", "iframe-worker", "shim.js")
"""With it the search runs from a folder, where browsers start no worker; the menu's configuration names it."""
SETTINGS = Path("shared", "slipway", "README.md")
"""The page whose tables of settings get a page of their own, beside it: its links stay the same."""

REFERENCE: Mapping[str, tuple[str, ...]] = {
    "Exports": (
        *("export", "plan", "recommend", "verify"),
        *("export_async", "plan_async", "recommend_async", "verify_async"),
        *("BatchResult", "BatchEntry", "BatchPlan"),
        *("ExportPlan", "ExportProgress", "TaskProgress", "Recommendation", "Candidate", "Verification"),
    ),
    "Stages": (
        *("Stage", "StageParams", "Context", "Progress", "Provider"),
        *("Forecast", "Hardware", "Deferral", "Division", "Part", "Installation", "Effort", "Keeps"),
    ),
    "Formats": ("Format",),
    "Configuration": ("ExportConfiguration", "LoadedConfiguration", "load_configuration", "parse_configuration"),
    "Clients": ("Client", "AsyncClient", "Security"),
    "Results": ("ExportResult", "FormatResult", "FailedFormat", "AttemptResult", "PublishedResult"),
    "Errors": (
        *(
            "ModelExportError",
            "ConfigurationError",
            "CheckpointValidationError",
            "ModelMergeError",
            "QuantizationError",
        ),
        *("FormatExportError", "ONNXExportError", "TracerWarningError", "UnorderedMapError", "TensorRTBuildError"),
        *(
            "TensorRTLLMExportError",
            "OpenVinoExportError",
            "ExecutorchExportError",
            "LiteRtExportError",
            "CoreMLExportError",
            "AdapterExportError",
            "GGUFExportError",
            "TorchGraphError",
        ),
        *("ValidationError", "ArtifactError", "StageError", "ServiceError"),
    ),
}
"""Public names by the page of the API reference that has them."""

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^ *(```|~~~)", re.MULTILINE)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".proto": "protobuf", ".json": "json"}


def main() -> None:
    """Write all pages."""
    shutil.rmtree(SITE, ignore_errors=True)
    for page in pages():
        write(page, converted(page, (ROOT / page).read_text(encoding="utf-8")))
    for title, names in REFERENCE.items():
        write(Path("reference", f"{title.lower()}.md"), reference(title, names))
    write(SETTINGS.with_name("all-settings.md"), settings((ROOT / SETTINGS).read_text(encoding="utf-8")))
    write(SEARCH, (ROOT / SEARCH).read_text(encoding="utf-8"))


def pages() -> list[Path]:
    """Return the Markdown files of the repository, relative to its root."""
    folders = ("docs", "shared", "services", "k8s", "deploy", "protos", "examples", "tests")
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]
    return sorted(path.relative_to(ROOT) for path in found)


def converted(page: Path, text: str) -> str:
    """Return a page whose links to what is no page lead to one that shows it; writes those pages."""
    parts = _FENCE.split(text)  # text, fence, code, fence, text …
    inside = False
    for number, part in enumerate(parts):
        if number % 2:
            inside = not inside
        elif not inside:
            parts[number] = _LINK.sub(lambda found: _target(page, found[1]) + (found[2] or ""), part)
    return _rejoined(text, parts)


def reference(title: str, names: Iterable[str]) -> str:
    """Return a page of the API reference."""
    return "\n\n".join([f"# {title}", *(f"::: slipway.{name}" for name in names)]) + "\n"


def settings(text: str) -> str:
    """Return a page with the generated tables of settings, which the shared package's README has between markers."""
    tables = dict(re.findall(r"<!-- (settings|machine): made by [^>]*-->\n(.*?)<!-- end of", text, re.DOTALL))
    more = "How they are read is described [in the package's README](README.md#settings-of-an-export)."
    return f"# Settings\n\n{more}\n\n## Of an export\n{tables['settings']}\n## Of a machine\n{tables['machine']}"


def public_names() -> list[str]:
    """Return ``slipway.__all__`` without importing it."""
    tree = ast.parse((ROOT / "shared" / "slipway" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError("slipway has no __all__")


def write(page: Path, text: str) -> None:
    """Write a page, by its place in the repository."""
    target = PAGES / page
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def _rejoined(text: str, parts: list[str]) -> str:
    """Put the parts of a page together with the indentation that its fences had."""
    fences = iter(found.group() for found in _FENCE.finditer(text))
    return "".join(next(fences) if number % 2 else part for number, part in enumerate(parts))


def _target(page: Path, link: str) -> str:
    """Return where a link of a page leads on the site."""
    if "://" in link or link.startswith("mailto:"):
        return link
    target = (ROOT / page.parent / link).resolve()
    if not target.is_relative_to(ROOT) or not target.exists() or target.suffix == ".md":
        return link  # mkdocs says so if it is wrong
    if target.is_dir():
        if (target / "README.md").is_file():
            return f"{link.rstrip('/')}/README.md"
        _list(target)
        return f"{link.rstrip('/')}/README.md"
    _show(target)
    return f"{link}.md"


def _show(file: Path) -> None:
    """Make the page of a file that is not Markdown."""
    text, place = file.read_text(encoding="utf-8"), file.relative_to(ROOT)
    language = _LANGUAGES.get(file.suffix, "text")
    write(place.with_name(f"{place.name}.md"), f"# {place}\n\n````{language}\n{text.rstrip()}\n````\n")


def _list(folder: Path) -> None:
    """Make the page of a folder that has no README."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "__init__.py")
    for file in files:
        _show(file)
    lines = "\n".join(f"- [{file.name}]({file.name}.md)" for file in files)
    place = folder.relative_to(ROOT)
    write(place / "README.md", f"# {place}\n\n{lines}\n")


if __name__ == "__main__":
    main()
