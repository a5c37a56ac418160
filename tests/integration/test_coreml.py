"""Core ML packages through the command a user types: delivered, checked, and not run."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from support.commands.cli import slipway
from support.commands.usage_examples import usage_examples
from support.models.judged_families import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
pytest.importorskip("coremltools", reason="the extra coreml is not installed")

ONLY = {
    "formats.pytorch.enabled": "false", "formats.onnx.enabled": "false", "formats.tensorrt.enabled": "false",
    "formats.coreml.enabled": "true", "optimization.quantization": "none",
}  # fmt: skip


def exported(root: Path, *words: str | Path, **changes: str) -> tuple[Path, dict[str, Any]]:
    settings = [word for key, value in (ONLY | changes).items() for word in ("--set", f"{key}={value}")]
    done = slipway("export", "--json", *words, "--out", root / "out", *settings, home=root / "home", timeout=1500)
    assert done.code == 0, done.err[-3000:]
    return Path(done.json["output_directory"]), done.json["formats"]


def described(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "coreml.json").read_text())


def test_the_sample_is_delivered_at_every_level_and_not_run(sample: Path, tmp_path: Path) -> None:
    names = ("coreml", "coreml-int8", "coreml-int4")
    folder, formats = exported(tmp_path, "-c", sample / "export.yaml", **{"formats.coreml.quantization": "int8,int4"})
    assert {name: each["status"] for name, each in formats.items()} == dict.fromkeys(names, "not_run")
    reasons = json.loads((folder / "report.json").read_text())["validation"]["outputs"]
    assert all("which only macOS 15, iOS 18 and later have" in each["status_reason"] for each in reasons)
    found = [described(folder / name) for name in names]
    assert [each["rounded_weights"] for each in found] == [0, 29, 29]
    assert {each["weights_checked"] for each in found} == {47}
    sizes = [each["size_bytes"] for each in found]
    assert sizes[0] > 1.8 * sizes[1] > 1.5 * 1.8 * sizes[2]
    for name in names:
        assert (folder / name / "chat_template.jinja").is_file()
    examples = usage_examples((folder / "README.md").read_text())
    assert all("make_state()" in examples[name] and ast.parse(examples[name]) for name in names)


def test_a_classifier_with_an_adapter_is_delivered(tmp_path: Path) -> None:
    model = make("bert-classes", tmp_path / "bert")
    folder, formats = exported(
        tmp_path, "--base-model", model.base, "--checkpoint", model.adapter, **{"validation.test_samples": "4"}
    )
    assert formats["coreml"]["status"] == "not_run"
    found = described(folder / "coreml")
    assert (found["inputs"], found["outputs"]) == (["input_ids", "attention_mask", "token_type_ids"], ["logits"])
    assert found["states"] == []
    assert ast.parse(usage_examples((folder / "README.md").read_text())["coreml"])
