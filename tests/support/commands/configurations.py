"""A documented configuration file, and what loading settings gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipway.configuration import LoadedConfiguration, load
from slipway.errors import ConfigurationError

CANONICAL = """\
export:
  checkpoint: {path: "qwen3-finetuned", auto_detect_latest: true}
  base_model: {name: "Qwen/Qwen3-4B-Thinking-2507", load_in_4bit: false}
  optimization: {quantization: "int8", remove_artifacts: true, compress_weights: true}
  formats:
    pytorch: {enabled: true, save_tokenizer: true}
    onnx: {enabled: true, opset_version: 14, dynamic_axes: true, optimize_graph: true}
    tensorrt: {enabled: false}
  validation: {enabled: true, test_samples: 10, compare_outputs: true, benchmark_performance: true}
  output: {directory: "exported_models", naming_pattern: "{model_name}_{timestamp}"}
"""


def loaded(path: Path | None, *assignments: str, **environment: str) -> LoadedConfiguration:
    return load(path, environment=environment, assignments=assignments)


def problems(path: Path | None, *assignments: str, **environment: str) -> list[dict[str, str]]:
    with pytest.raises(ConfigurationError) as caught:
        loaded(path, *assignments, **environment)
    assert caught.value.reason == "CONFIGURATION_INVALID"
    found = json.loads(caught.value.about["problems"])
    assert all(problem["key"] in caught.value.message for problem in found)
    return found


def write(folder: Path, text: str) -> Path:
    path = folder / "export.yaml"
    path.write_text(text)
    return path
