"""What the distribution is called: everywhere the same, and never by the name of the index's other ``slipway``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from slipway.distribution import DISTRIBUTION, install_command, installed_entry_points, installed_version, own_version
from support.commands.light_install import PROJECT, ROOT

WRONG = re.compile(
    r"""(?<![\w./-])slipway\[(?=[a-z{_])|pip install [^\n]*?(?<=[ '"=])slipway(?![\w/-])(?=['"\[`\s=<>]|$)"""
)
"""The extras of ``slipway``, and ``pip install`` of it."""


def texts() -> Iterator[tuple[str, str]]:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a working copy of git")
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file() and name != f"tests/shared/{Path(__file__).name}":
            try:
                yield name, (ROOT / name).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_versions_are_those_that_the_standard_library_reads() -> None:
    found = {each.name for each in metadata.distributions()}
    assert {name: installed_version(name, alike=False) for name in found} == {
        name: metadata.version(name) for name in found
    }


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install 'slipway[all]'", True),
        ("pip install slipway", True),
        ("pip install -c constraints.txt slipway==0.1", True),
        ("pip install --force-reinstall slipway`", True),
        ("pip install 'slipway-ml[all]'", False),
        ("pip install slipway-ml", False),
        ("pip install -c /opt/slipway/constraints.txt .", False),
    ],
)
def test_the_pattern_tells_the_names_apart(text: str, wrong: bool) -> None:
    assert bool(WRONG.search(text)) is wrong


def test_no_text_installs_the_other_distribution() -> None:
    found = [f"{name}: {match[0]}" for name, text in texts() for match in WRONG.finditer(text)]
    assert not found


def test_the_project_has_the_name_that_remedies_say() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert install_command() == f"pip install {DISTRIBUTION}"
    assert install_command("gguf", "s3") == f"pip install '{DISTRIBUTION}[gguf,s3]'"
    assert install_command(options="--force-reinstall") == f"pip install --force-reinstall {DISTRIBUTION}"


def test_the_version_is_that_of_the_installed_distribution(tmp_path: Path) -> None:
    assert own_version() == PROJECT["version"]
    metadata = tmp_path / "slipway_ml-9.8.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 9.8\n")
    program = "from slipway.distribution import own_version; print(own_version())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "9.8\n"


def test_a_copy_installed_under_an_earlier_name_has_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    # The entry points are those of the real installation.
    monkeypatch.setattr("slipway.distribution.installed_version", lambda _: "")
    assert own_version() == PROJECT["version"]


def test_what_is_installed_meanwhile_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_version("mason") == ""
    for version in ("1.0", "2.0"):
        metadata = tmp_path / f"mason-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mason\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(f"[slipway.tests]\nmason = mason{version[0]}:NAME\n")
        os.utime(tmp_path, ns=(0, int(version[0])))  # two changes within one tick of the file system's clock
        assert installed_version("mason") == version
        assert [entry.value for entry in installed_entry_points("slipway.tests")] == [f"mason{version[0]}:NAME"]
        shutil.rmtree(metadata)
