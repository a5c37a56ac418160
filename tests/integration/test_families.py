"""Models of every family through the command a user types: merged or as they are, quantized, and judged by what they compute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands.cli import slipway
from support.commands.usage_examples import usage_examples
from support.models.judged_families import make
from support.models.merge_cases import save_case
from support.models.merge_models import make_family

LEVELS = ("fp16", "int8", "int4")
SETTINGS = {
    "optimization.quantization": ",".join(LEVELS),
    "validation.test_samples": "4",
    "validation.benchmark_performance": "false",
    # Random weights suffer more from 4 bits than trained ones: a group has no small weights.
    "validation.limits": "int4.mean_kl=0.1,int4.case_mean_kl=0.2,int4.perplexity_ratio=1.3,int4.top1_agreement=0.6",
}
SLOW = pytest.mark.slow
GENERATING = ("marian", "t5", "bart", "whisper")
FAMILIES = (
    ("marian", ("int8",)),
    *(
        pytest.param(name, LEVELS, marks=SLOW)
        for name in (
            "marian",
            *("t5", "bart", "whisper", "bert-classes", "bert-tokens", "bert-answers", "bert-masked", "bert-embeddings"),
            *("roberta-classes", "qwen3-classes"),
        )
    ),
)


def export(root: Path, name: str, *more: str | Path, **changes: str) -> dict[str, object]:
    model = make(name, root / name)
    settings = [word for key, value in (SETTINGS | changes).items() for word in ("--set", f"{key}={value}")]
    checkpoint = more or ("--checkpoint", model.adapter)
    words = ("export", "--json", "--base-model", model.base, *checkpoint, "--out", root / "out", *settings)
    done = slipway(*words, home=root / "home")
    assert done.code == 0, done.err
    return done.json


def outputs_at(levels: tuple[str, ...]) -> set[str]:
    return {name + level for name in ("pytorch", "onnx") for level in ("", *(f"-{level}" for level in levels))}


@pytest.mark.parametrize(("name", "levels"), FAMILIES)
def test_each_family_is_exported_and_passes(tmp_path: Path, name: str, levels: tuple[str, ...]) -> None:
    result = export(tmp_path, name, **{"optimization.quantization": ",".join(levels)})
    made = {output: each["status"] for output, each in result["formats"].items()}
    assert made == dict.fromkeys(outputs_at(levels), "passed")
    assert result["validation_passed"] is True
    assert {attempt["stage"] for attempt in result["attempts"]} == {"merge", "quantize", "onnx_export", "validate"}
    assert {attempt["outcome"] for attempt in result["attempts"]} == {"succeeded"}
    folder = Path(str(result["output_directory"]))
    said = run_python(folder, usage_examples((folder / "README.md").read_text())["onnx"])
    assert said.strip() or name == "whisper"  # silence may have no text
    more = ["--max-new-tokens", "8"] if name in GENERATING else []
    run_python(folder, f"import runpy, sys; sys.argv += {more}; runpy.run_path('onnx/example.py', run_name='__main__')")


def run_python(folder: Path, code: str) -> str:
    """Run code in the output directory, as a reader of the card does; return what it prints."""
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "named"), [("vit", "ViTForImageClassification"), ("t5 without a head", "T5Model")])
def test_a_model_of_no_known_family_is_merged_and_everything_else_names_it(
    tmp_path: Path, kind: str, named: str
) -> None:
    """No part says that such a model is right or wrong: not the validation, not the report, not the verdict on the base."""
    case = save_case(tmp_path, make_family(kind), target_modules=["q_proj" if kind == "vit" else "q"])
    config = json.loads((case.adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": ""}
    (case.adapter / "adapter_config.json").write_text(json.dumps(config))
    words = ("--base-model", case.base, "--checkpoint", case.adapter, "--out", tmp_path / "out")
    levels = ("--set", "optimization.quantization=fp16,int8")
    done = slipway("export", "--json", *words, *levels, home=tmp_path / "home")
    assert done.code == 6, done.err
    result = done.json
    assert {name: each["status"] for name, each in result["formats"].items()} == {
        "pytorch": "not_run",
        "pytorch-fp16": "not_run",
    }
    assert result["failed"]["pytorch-int8"]["reason"] == "FAMILY_UNSUPPORTED"
    assert result["failed"]["onnx"]["reason"] == "FAMILY_UNSUPPORTED"
    assert all(named in result["failed"][name]["error_message"] for name in ("pytorch-int8", "onnx"))
    assert (result["validation_passed"], result["base_match"]["verdict"]) == (False, "amber")
    tried = [attempt for attempt in result["attempts"] if attempt["stage"] == "onnx_export"]
    assert [(attempt["outcome"], attempt["rule"]) for attempt in tried] == [("failed", "")]
    assert not any("tracer" in warning for warning in result["warnings"])
    assert f"the family of {named} is unknown to the validation" in result["base_match"]["reason"]
    card = (Path(result["output_directory"]) / "README.md").read_text()
    assert "| onnx | – | – | not run |" in card
    assert "text-generation" not in card
    assert "next-token" not in card


@pytest.mark.slow
def test_a_plain_model_is_judged_against_itself(tmp_path: Path) -> None:
    result = export(tmp_path, "gpt2", "--checkpoint", "none")
    assert set(result["formats"]) == outputs_at(LEVELS)
    assert result["validation_passed"] is True
    assert result["plain"] is True
