"""Artifacts that no export of this machine knows are named by their files."""

from __future__ import annotations

import pytest

from slipway.cli.artifacts.cache_work import content_name


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "adapter"),
        (["gguf_adapter.json", "tiny-F32-LoRA.gguf"], "adapter"),
        (["tiny-F16.gguf", "config.json"], "GGUF model"),
        (["config.json", "model.safetensors"], "model"),
        (["model.onnx", "model.onnx.data", "model.onnx_adapter"], "ONNX model"),
        (["validation.json"], "validation"),
        (["a.txt", "b.txt"], "a.txt and 1 more"),
    ],
)
def test_a_name_follows_from_the_files(files: list[str], name: str) -> None:
    assert content_name(files, ()) == name
