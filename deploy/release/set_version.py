#!/usr/bin/env python3
"""Set the version everywhere, and cut the changelog: ``deploy/release/set_version.py VERSION [--date YYYY-MM-DD]``.

The version stands in ``pyproject.toml``, in the names of images (compose, Kubernetes, the chart), and as a section of ``CHANGELOG.md``.
``--check`` writes nothing, and ends with 1 if one of them is another; ``--changes VERSION`` prints that section, with ``--links URL``
for a page elsewhere: its relative links then lead below that address.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[2]
PROJECT, CHANGELOG = "pyproject.toml", "CHANGELOG.md"
_PROJECT = re.compile(r'(?m)^version = "([^"]*)"$')
_UNRELEASED = "## Unreleased\n"
_RELATIVE = re.compile(r"\]\((?![a-z][a-z+.-]*:|/)(?P<target>[^)\s]+)")
_IMAGES = re.compile(
    r"(?P<before>\bslipway-[a-z-]+:(?:\$\{SLIPWAY_VERSION:-)?|(?m:^)[ \t]*newTag: |(?m:^)version: |(?m:^)appVersion: \"?)"
    r"(?P<version>\d+\.\d+\.\d+[a-z0-9.]*)"
)
"""Where files that run Slipway name it: an image, a tag of kustomize, a chart."""


class ReleaseError(Exception):
    """What stands in the way of a release; the text says what, and what to do."""


def current_version(folder: Path) -> str:
    """Return the version of ``pyproject.toml``.

    Raises:
        ReleaseError: It names none.
    """
    found = _PROJECT.search((folder / PROJECT).read_text(encoding="utf-8"))
    if not found:
        raise ReleaseError(f"{PROJECT} has no line version = …")
    return found[1]


def changes(text: str, version: str) -> str:
    """Return what a changelog says of a version, without its heading; empty if it says nothing.

    Args:
        text: The changelog.
        version: The version, or ``Unreleased``.
    """
    found = re.search(rf"(?ms)^## {re.escape(version)}(?: \([^)\n]*\))?\n(.*?)(?=^## |\Z)", text)
    return found[1].strip() if found else ""


def with_absolute_links(text: str, root: str) -> str:
    """Return a part of the changelog for a page elsewhere: its relative links lead below ``root``."""

    def absolute(link: re.Match[str]) -> str:
        target = link["target"]
        return f"]({root.rstrip('/')}/{CHANGELOG if target.startswith('#') else ''}{target}"

    return _RELATIVE.sub(absolute, text)


def set_version(folder: Path, version: str, day: dt.date) -> list[Path]:
    """Write a new version into all files that have it; return them. All are read before one is written.

    Raises:
        ReleaseError: The version is none, or not later than the last; or nothing has changed since.
    """
    before = current_version(folder)
    text = (folder / CHANGELOG).read_text(encoding="utf-8")
    released = bool(changes(text, before))
    named = _parse(version)
    if not (named > Version(before) or (not released and named == Version(before))):
        raise ReleaseError(f"{version} is not later than {before}, which is the last one: name a later one")
    if not changes(text, "Unreleased"):
        raise ReleaseError(f"{CHANGELOG} has nothing below {_UNRELEASED.strip()!r}: say there what changed")
    made = {
        folder / PROJECT: _PROJECT.sub(f'version = "{version}"', (folder / PROJECT).read_text(encoding="utf-8")),
        folder / CHANGELOG: text.replace(_UNRELEASED, f"{_UNRELEASED}\n## {version} ({day.isoformat()})\n", 1),
    }
    for path in _naming_images(folder):
        made[path] = _IMAGES.sub(lambda each: each["before"] + version, path.read_text(encoding="utf-8"))
    return _write(made)


def _parse(version: str) -> Version:
    wrong = ReleaseError(f"{version!r} is not a version: write three numbers, as in 0.2.0")
    try:
        parsed = Version(version)
    except InvalidVersion:
        raise wrong from None
    if str(parsed) != version or len(parsed.release) != 3 or parsed.is_prerelease or parsed.is_postrelease:
        raise wrong  # charts and wheels write others in different ways
    return parsed


def find_others(folder: Path) -> list[str]:
    """Return where files name another version than ``pyproject.toml``, a sentence each."""
    version = current_version(folder)
    return [
        f"{path.relative_to(folder)} names {found['version']}, not {version}"
        for path in _naming_images(folder)
        for found in _IMAGES.finditer(path.read_text(encoding="utf-8"))
        if found["version"].removesuffix("-cuda") != version
    ]


def _naming_images(folder: Path) -> Iterator[Path]:
    yield folder / "deploy" / "compose.yaml"
    yield from sorted((folder / "k8s").rglob("*.yaml"))


def _write(made: Mapping[Path, str]) -> list[Path]:
    changed = [path for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    for path in changed:
        path.write_text(made[path], encoding="utf-8")
    return changed


def main(words: list[str]) -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", nargs="?", help="the new version, for example 0.2.0")
    parser.add_argument("--date", type=dt.date.fromisoformat, help="day of the release; today if not given")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with 1 if files name different versions"
    )
    parser.add_argument("--changes", metavar="VERSION", help="print what the changelog says of a version")
    parser.add_argument("--links", metavar="URL", help="with --changes: where relative links lead")
    arguments = parser.parse_args(words)
    if sum(map(bool, (arguments.version, arguments.check, arguments.changes))) != 1:
        parser.error("name a version, --check, or --changes VERSION")
    if arguments.links and not arguments.changes:
        parser.error("--links is for --changes")
    try:
        if arguments.changes:
            text = changes((ROOT / CHANGELOG).read_text(encoding="utf-8"), arguments.changes)
            print(with_absolute_links(text, arguments.links) if arguments.links else text)
            return 0
        if arguments.check:
            others = find_others(ROOT)
            print("\n".join(others), file=sys.stderr)
            return bool(others)
        day = arguments.date or dt.datetime.now(dt.UTC).date()
        for path in set_version(ROOT, arguments.version, day):
            print(path.relative_to(ROOT))
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
