"""Programs for ExecuTorch through the command a user types, judged by ExecuTorch's runtime, and run by its own runner."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commands.cli import slipway
from support.commands.usage_examples import usage_examples
from support.models.judged_families import make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
pytest.importorskip("executorch", reason="the extra executorch is not installed")

ONLY = {
    "formats.pytorch.enabled": "false", "formats.onnx.enabled": "false", "formats.tensorrt.enabled": "false",
    "formats.executorch.enabled": "true", "validation.benchmark_performance": "false",
}  # fmt: skip
RUNNER = """
import sys
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

runner = TextLLMRunner(sys.argv[1] + "/model.pte", sys.argv[1] + "/tokenizer.json")
said = []
runner.generate(sys.argv[2], GenerationConfig(max_new_tokens=12, temperature=0.0, echo=False), said.append)
open(sys.argv[3], "w").write("".join(said))
"""


def exported(root: Path, *words: str | Path, **changes: str) -> tuple[Path, dict[str, Any]]:
    settings = [word for key, value in (ONLY | changes).items() for word in ("--set", f"{key}={value}")]
    done = slipway("export", "--json", *words, "--out", root / "out", *settings, home=root / "home", timeout=1500)
    assert done.code == 0, done.err[-3000:]
    return Path(done.json["output_directory"]), done.json["formats"]


def run_python(folder: Path, code: str, *words: str | Path) -> str:
    command = [sys.executable, "-P", "-c", code, *map(str, words)]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_sample_passes_at_every_level_and_runs_in_a_runner(sample: Path, tmp_path: Path) -> None:
    folder, formats = exported(
        tmp_path, "-c", sample / "export.yaml", **{"formats.executorch.quantization": "8da4w", "optimization.quantization": "none"}
    )  # fmt: skip
    assert {name: each["status"] for name, each in formats.items()} == dict.fromkeys(
        ("executorch", "executorch-8da4w"), "passed"
    )
    assert formats["executorch"]["mean_kl"] < 1e-6
    assert formats["executorch-8da4w"]["mean_kl"] < 2e-2
    assert formats["executorch-8da4w"]["size_bytes"] < formats["executorch"]["size_bytes"] / 3
    examples = usage_examples((folder / "README.md").read_text())
    assert run_python(folder, examples["executorch-8da4w"]).strip()
    text = "The statement is the class of the object. " * 30  # more tokens than one call takes
    run_python(folder, RUNNER, folder / "executorch", text, tmp_path / "said.txt")
    assert (tmp_path / "said.txt").read_text() == continued(folder / "executorch", text, 12)


def continued(folder: Path, text: str, count: int) -> str:
    """Continue a text by the format's own runtime for validation, which is compared with PyTorch."""
    from tokenizers import Tokenizer

    from slipway_executorch.runtime import load
    from slipway_validate.runner.generation.generating import generate

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = generate(load(folder, threads=1), tuple(tokenizer.encode(text).ids), count)
    return tokenizer.decode(list(found), skip_special_tokens=False)


def test_a_classifier_with_an_adapter_passes(tmp_path: Path) -> None:
    model = make("bert-classes", tmp_path / "bert")
    folder, formats = exported(
        tmp_path, "--base-model", model.base, "--checkpoint", model.adapter, **{"validation.test_samples": "4"}
    )
    assert formats["executorch"]["status"] == "passed"
    described = json.loads((folder / "executorch" / "executorch.json").read_text())
    assert described["inputs"] == ["input_ids", "attention_mask", "token_type_ids"]
    assert described["outputs"] == ["logits"]
    assert "LABEL" in run_python(folder, usage_examples((folder / "README.md").read_text())["executorch"])
