"""The weights of a whole model beside an adapter: left out, and said, unless they are those of the base."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slipway.configuration import parse
from slipway.export_sources.discovery import find_sources
from slipway.exporting.preparing import find_uploads
from slipway.settings import Settings
from slipway.sources import SourceFolders
from support.models import tiny_models


@pytest.fixture
def folders(tmp_path: Path) -> SourceFolders:
    return SourceFolders(Settings.from_environment({"SLIPWAY_HOME": str(tmp_path / "home")}))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors", "model-00001-of-00002.safetensors", "consolidated.00.pth"]
)
def test_they_are_left_out_and_said(tmp_path: Path, folders: SourceFolders, name: str) -> None:
    base = tiny_models.make_base(tmp_path / "base")
    checkpoint = tiny_models.make_checkpoint(base, tmp_path / "run")
    (checkpoint / name).write_bytes(b"weights")
    asked = parse({"checkpoint": {"path": str(tmp_path / "run")}, "base_model": {"name": str(base)}})
    with folders:
        found = find_sources(asked, folders)
        assert name not in found.files()["adapter"]
        brought = find_uploads(asked, folders, {"base": "s3://models/base"})
    for warnings in (found.warnings, brought.warnings):
        (said,) = (warning for warning in warnings if name in warning)
        assert str(checkpoint) in said
        assert "--checkpoint none" in said


def test_a_base_may_hold_its_adapter(tmp_path: Path, folders: SourceFolders) -> None:
    base = tiny_models.make_base(tmp_path / "base")
    checkpoint = tiny_models.make_checkpoint(base, tmp_path / "run")
    for file in checkpoint.glob("adapter*"):
        shutil.copy(file, base)
    with folders:
        found = find_sources(parse({"checkpoint": {"path": str(base)}, "base_model": {"name": str(base)}}), folders)
    assert not [warning for warning in found.warnings if "whole model" in warning]
