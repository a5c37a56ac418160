"""The examples of the model card for PyTorch and for ONNX give the same of the same model."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slipway.results.report import write_report
from support.commands.report_parts import result
from support.commands.usage_examples import usage_examples
from support.models.family_models import make_family_model
from support.models.judged_families import make
from support.models.onnx_models import Exported
from support.models.sentence_models import write_modules
from support.models.transformers_results import write_sound

LEGACY = {"engine": "legacy", "opset": 14}
Shown = Callable[[], dict[str, str]]


@pytest.fixture
def shown(
    tmp_path: Path,
    export: Callable[..., Exported],
) -> Shown:
    """Return a function that exports the model in ``pytorch``, and runs the examples of its card."""

    def run() -> dict[str, str]:
        shutil.copytree(export(tmp_path / "pytorch", **LEGACY).folder, tmp_path / "onnx")
        write_report(tmp_path, result=result(None, ("pytorch", "onnx")))
        examples = usage_examples((tmp_path / "README.md").read_text())
        found = {}
        for name in (
            "pytorch",
            "onnx",
        ):  # processes of their own, because libraries change the environment when imported
            done = subprocess.run(
                [sys.executable, "-P", "-c", examples[name]], cwd=tmp_path, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            found[name] = done.stdout.strip()
        return found

    return run


@pytest.mark.slow
def test_sentences_are_as_alike_in_both(tmp_path: Path, shown: Shown) -> None:
    """Also where the model does not normalize its vectors."""
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed: pip install sentence-transformers")
    make_family_model("bert-features", tmp_path / "pytorch")
    width = json.loads((tmp_path / "pytorch" / "config.json").read_text())["hidden_size"]
    settings = {"pooling_mode": "cls", "word_embedding_dimension": width}
    write_modules(tmp_path / "pytorch", settings=settings, normalized=False)
    found = shown()
    assert "pip install sentence-transformers" in (tmp_path / "README.md").read_text()
    assert float(found["pytorch"]) == pytest.approx(float(found["onnx"]), abs=1e-5)
    assert abs(float(found["onnx"])) <= 1 + 1e-6


def test_probabilities_are_the_same_in_both(tmp_path: Path, shown: Shown) -> None:
    make_family_model("bert-classes", tmp_path / "pytorch")
    found = {name: ast.literal_eval(said) for name, said in shown().items()}
    assert found["pytorch"] == pytest.approx(found["onnx"], abs=2e-4)
    assert sum(found["onnx"].values()) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_tokens_have_the_same_labels_in_both(tmp_path: Path, shown: Shown) -> None:
    make_family_model("bert-tokens", tmp_path / "pytorch")
    found = shown()
    assert [line.split()[:2] for line in found["pytorch"].splitlines()] == [
        line.split()[:2] for line in found["onnx"].splitlines()
    ]


@pytest.mark.slow
def test_a_sound_file_is_transcribed_alike_in_both(tmp_path: Path, shown: Shown) -> None:
    shutil.copytree(make("whisper", tmp_path / "whisper").base, tmp_path / "pytorch")
    write_sound(tmp_path / "speech.wav", seconds=1.0)
    found = shown()
    assert "speech.wav" in (tmp_path / "README.md").read_text()
    assert set(found) == {"pytorch", "onnx"}


@pytest.mark.slow
def test_a_translator_translates_in_both(tmp_path: Path, shown: Shown) -> None:
    make_family_model("marian", tmp_path / "pytorch")
    assert all(shown().values())
