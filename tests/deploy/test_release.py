"""The release: one version everywhere, nothing without a tag, files that are the same each time."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / "deploy" / "release"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

VERSIONS = runpy.run_path(str(RELEASE / "set_version.py"))
ReleaseError, changes, current_version, find_others, set_version = (
    VERSIONS[name] for name in ("ReleaseError", "changes", "current_version", "find_others", "set_version")
)
with_absolute_links = VERSIONS["with_absolute_links"]

CHANGELOG = "# Changelog\n\n## Unreleased\n\n- New.\n"
DAY = dt.date(2027, 1, 31)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What names the version, with a changelog of its own."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "deploy", tree / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "k8s", tree / "k8s")
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / "CHANGELOG.md").write_text(CHANGELOG)
    return tree


def texts(tree: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in tree.rglob("*") if path.suffix in {".yaml", ".toml", ".md"}}


def git(tree: Path, *words: str) -> None:
    own = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *own, *words], cwd=tree, check=True, capture_output=True)


@pytest.fixture
def committed(tree: Path) -> Path:
    (tree / "CHANGELOG.md").write_text(CHANGELOG + f"\n## {PROJECT['version']} (2027-01-01)\n\n- Old.\n")
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "all")
    return tree


def build(tree: Path, *words: str, out: str = "dist") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-P", tree / "deploy" / "release" / "make_release.py", "--out", tree.parent / out]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([*program, *words], cwd=tree, env=environment, capture_output=True, text=True)


def test_this_repository_has_one_version() -> None:
    assert find_others(ROOT) == []


def test_a_new_version_is_written_everywhere(tree: Path) -> None:
    before = current_version(tree)
    changed = set_version(tree, "7.8.9", DAY)
    assert {path.name for path in changed} >= {"pyproject.toml", "CHANGELOG.md", "compose.yaml", "worker.yaml"}
    assert find_others(tree) == []
    assert (tree / "CHANGELOG.md").read_text() == "# Changelog\n\n## Unreleased\n\n## 7.8.9 (2027-01-31)\n\n- New.\n"
    compose = yaml.safe_load((tree / "deploy" / "compose.yaml").read_text())
    assert compose["services"]["worker-merge"]["image"] == "slipway-merge:${SLIPWAY_VERSION:-7.8.9}"
    gpu = yaml.safe_load((tree / "k8s" / "overlays" / "gpu" / "kustomization.yaml").read_text())
    assert {image["newTag"] for image in gpu["images"]} == {"7.8.9-cuda"}
    chart = yaml.safe_load((tree / "k8s" / "helm" / "slipway" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == ("7.8.9", "7.8.9")
    named = [path for path, text in texts(tree).items() if re.search(rf"slipway-[a-z-]+:{re.escape(before)}", text)]
    assert not named


def test_the_first_release_may_have_the_version_that_is_there(tree: Path) -> None:
    set_version(tree, current_version(tree), DAY)
    assert changes((tree / "CHANGELOG.md").read_text(), current_version(tree)) == "- New."
    with pytest.raises(ReleaseError, match="is not later than"):
        set_version(tree, current_version(tree), DAY)


def test_links_of_the_notes_lead_to_the_tag() -> None:
    text = "[a](docs/a.md#b) [c](#d) [e](https://example.org/e) [f](mailto:f@example.org) `[g]`(h)"
    root = "https://example.org/o/r/blob/v7.8.9"
    made = f"[a]({root}/docs/a.md#b) [c]({root}/CHANGELOG.md#d) [e](https://example.org/e) [f](mailto:f@example.org) `[g]`(h)"
    assert with_absolute_links(text, root) == with_absolute_links(text, f"{root}/") == made
    program, version = RELEASE / "set_version.py", current_version(ROOT)
    words = [sys.executable, "-P", program, "--changes", version, "--links", root]
    notes = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    links = re.findall(r"\]\(([^)\s]+)\)", notes)
    assert all(re.match(r"[a-z]+:", link) for link in links)
    there = [link.removeprefix(f"{root}/").partition("#")[0] for link in links if link.startswith(root)]
    assert there
    assert [path for path in there if not (ROOT / path).exists()] == []
    workflow = (ROOT / ".github" / "workflows" / "release.yaml").read_text()
    assert '--links "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY/blob/$TAG"' in workflow


@pytest.mark.parametrize(
    ("version", "changelog", "said"),
    [
        ("0.0.1", CHANGELOG, "0.0.1 is not later than"),
        ("next", CHANGELOG, "'next' is not a version"),
        ("7.0.0\n", CHANGELOG, "is not a version"),
        ("7.0.0rc1", CHANGELOG, "'7.0.0rc1' is not a version"),
        ("7.0", CHANGELOG, "'7.0' is not a version"),
        ("7.0.0", "# Changelog\n\n## Unreleased\n", "has nothing below"),
    ],
)
def test_an_impossible_release_changes_nothing(tree: Path, version: str, changelog: str, said: str) -> None:
    (tree / "CHANGELOG.md").write_text(changelog)
    before = texts(tree)
    with pytest.raises(ReleaseError, match=said):
        set_version(tree, version, DAY)
    assert texts(tree) == before


def test_a_file_with_another_version_is_named(tree: Path) -> None:
    path = tree / "k8s" / "base" / "coordinator.yaml"
    path.write_text(path.read_text().replace(f":{PROJECT['version']}", ":0.0.7"))
    assert find_others(tree) == [f"k8s/base/coordinator.yaml names 0.0.7, not {PROJECT['version']}"]


@pytest.mark.parametrize("key", ["version", "appVersion"])
def test_a_chart_with_another_version_is_named(tree: Path, key: str) -> None:
    path = tree / "k8s" / "helm" / "slipway" / "Chart.yaml"
    path.write_text(re.sub(rf"(?m)^{key}: .*", f"{key}: 0.0.7", path.read_text()))
    assert find_others(tree) == [f"k8s/helm/slipway/Chart.yaml names 0.0.7, not {PROJECT['version']}"]


def test_what_is_packed_twice_is_the_same_and_has_its_sum(committed: Path) -> None:
    git(committed, "tag", f"v{PROJECT['version']}")
    for out in ("one", "two"):
        done = build(committed, "--only", "manifests", out=out)
        assert done.returncode == 0, done.stderr
    one, two = ({path.name: path.read_bytes() for path in (committed.parent / out).iterdir()} for out in ("one", "two"))
    name = f"slipway-kubernetes-{PROJECT['version']}.tar.gz"
    assert one == two
    assert one["SHA256SUMS"].decode() == f"{hashlib.sha256(one[name]).hexdigest()}  {name}\n"
    with tarfile.open(committed.parent / "one" / name) as archive:
        names = archive.getnames()
    assert f"{name.removesuffix('.tar.gz')}/base/kustomization.yaml" in names
    assert not [each for each in names if "/helm" in each]


def test_no_release_is_made_of_a_commit_without_its_tag(committed: Path) -> None:
    git(committed, "tag", "v0.0.1")
    done = build(committed, "--only", "manifests")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: the commit has no tag v{PROJECT['version']}: git tag v{PROJECT['version']}")
    assert not (committed.parent / "dist").exists()
    assert build(committed, "--only", "manifests", "--trial").returncode == 0


def test_no_release_is_made_of_changes_that_are_not_committed(committed: Path) -> None:
    git(committed, "tag", f"v{PROJECT['version']}")
    (committed / "more.txt").write_text("")
    done = build(committed, "--only", "manifests")
    assert (done.returncode, done.stderr) == (1, "error: the working copy has changes: commit them\n")


def test_no_release_is_made_without_a_section_of_the_changelog(tree: Path) -> None:
    git(tree, "init", "--quiet")
    done = build(tree, "--only", "manifests")
    assert done.returncode == 1
    assert f"CHANGELOG.md has no section of {PROJECT['version']}" in done.stderr


def test_a_folder_that_is_there_stays(committed: Path) -> None:
    (committed.parent / "dist").mkdir()
    done = build(committed, "--only", "manifests", "--trial")
    assert done.returncode == 1
    assert done.stderr.startswith("error: dist is there already: remove it")


def test_a_key_that_does_not_sign_leaves_nothing(committed: Path) -> None:
    key = committed.parent / "key.pem"
    key.write_text("no key")
    done = build(committed, "--only", "manifests", "--trial", "--key", str(key))
    assert done.returncode == 1
    assert done.stderr.splitlines()[1].startswith("error: key.pem does not sign: ")
    assert {path.name for path in committed.parent.iterdir()} == {"key.pem", "tree"}


def test_the_bounds_are_what_the_generated_code_asks_for() -> None:
    bounds = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}
    asked = []
    for path in sorted((ROOT / "protos" / "slipway_protos").rglob("*_pb2*.py")):
        text = path.read_text()
        asked += [("grpcio", found) for found in re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", text)]
        asked += [("protobuf", found) for found in re.findall(r"^# Protobuf Python Version: ([\d.]+)$", text, re.M)]
    assert {name for name, _ in asked} == {"grpcio", "protobuf"}
    for name, version in asked:
        assert bounds[name] == SpecifierSet(f">={version}")


def test_the_extra_has_what_the_program_runs() -> None:
    named = {Requirement(each).name for each in PROJECT["optional-dependencies"]["release"]}
    text = (RELEASE / "make_release.py").read_text()
    modules = set(re.findall(r'release\.python\(\s*"(\w+)"', text)) | set(re.findall(r'"-m", "(\w+)"', text))
    assert modules == {"build", "auditwheel", "uv", "cyclonedx_py", "model_signing"}
    assert named >= {"build", "auditwheel", "uv", "cyclonedx-bom", "model-signing", "ziglang"}
