"""Protos that break a client of the last release are refused."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[2]


def test_a_field_that_is_gone_breaks_clients(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate_protos", ROOT / "protos" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    image = tmp_path / "image.binpb"
    generate.protoc(f"--descriptor_set_out={image}", "--include_imports")
    generate.breaking(image)
    changed = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes())
    (export,) = [file for file in changed.file if file.name == "slipway/v1/export.proto"]
    del next(message for message in export.message_type if message.name == "Export").field[0]
    image.write_bytes(changed.SerializeToString())
    with pytest.raises(subprocess.CalledProcessError):
        generate.breaking(image)
