"""Models of each kind through the command a user types: merged, quantized, judged by what they compute, and run as they lie."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoFeatureExtractor, AutoTokenizer

from support.commands import optimum
from support.commands.cli import slipway
from support.commands.transformers_js import run_example, run_pipeline, transformers_js
from support.commands.usage_examples import usage_examples
from support.models.judged_families import FamilyModel, make
from support.models.merge_cases import save_case
from support.models.merge_models import make_family
from support.models.transformers_results import (
    CONTEXT,
    TEXT,
    VARIED,
    loaded,
    result_for_sound,
    result_for_text,
    write_sound,
)

LEVELS = {"t5": ("int8", "int4"), "whisper": ("fp16",), "bert-answers": ("fp16",), "qwen3-classes": ("int8",)}
"""Levels by model, one of each way to give a result; each level of each costs four processes that load torch."""
SETTINGS = {"validation.test_samples": "4", "validation.benchmark_performance": "false"}
SLOW = pytest.mark.slow
GENERATING = ("t5", "whisper")
OPTIMUM = {
    "t5": "ORTModelForSeq2SeqLM", "whisper": "ORTModelForSpeechSeq2Seq", "bert-answers": "ORTModelForQuestionAnswering",
    "qwen3-classes": "ORTModelForSequenceClassification",
}  # fmt: skip
"""optimum's class for a model; the stages' own tests have the other families."""
NOT_IN_JAVASCRIPT = "qwen3-classes"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with transformers_js(tmp_path_factory.mktemp("npm")) as folder:
        yield folder


def exported(root: Path, model: FamilyModel, levels: tuple[str, ...], **changes: str) -> dict[str, Any]:
    changes |= {"optimization.quantization": ",".join(levels)}
    settings = [word for key, value in (SETTINGS | changes).items() for word in ("--set", f"{key}={value}")]
    where = ("--base-model", model.base, "--checkpoint", model.adapter, "--out", root / "out")
    words = ("export", "--json", *where, *settings)
    done = slipway(*words, home=root / "home")
    assert done.code == 0, done.err
    result: dict[str, Any] = done.json
    return result


def outputs_at(levels: tuple[str, ...]) -> set[str]:
    return {name + level for name in ("pytorch", "onnx") for level in ("", *(f"-{level}" for level in levels))}


def check_result(result: dict[str, Any], levels: tuple[str, ...]) -> Path:
    """Check that all is made at the first attempt and passes; return the output directory."""
    made = {output: each["status"] for output, each in result["formats"].items()}
    assert made == dict.fromkeys(outputs_at(levels), "passed")
    assert result["validation_passed"] is True
    assert {attempt["stage"] for attempt in result["attempts"]} == {
        "merge",
        "quantize",
        "onnx_export",
        "reference",
        "validate",
    }
    assert {attempt["outcome"] for attempt in result["attempts"]} == {"succeeded"}
    return Path(str(result["output_directory"]))


@SLOW
@pytest.mark.parametrize("name", LEVELS)
def test_each_family_runs_as_it_lies(tmp_path: Path, modules: Path, name: str) -> None:
    """Each output passes; transformers.js computes in Node.js what transformers does with the merged weights."""
    model = make(name, tmp_path / name)
    if name == "whisper":
        limit_length(model.base)
    levels = LEVELS[name]
    packages = "transformers_js,optimum" if optimum.PYTHON else "transformers_js"
    result = exported(tmp_path, model, levels, **{"formats.onnx.packaging": packages})
    folder = check_result(result, levels)
    if name == "whisper":
        write_sound(folder / "speech.wav", seconds=1.0)
    shown = run_python(folder, usage_examples((folder / "README.md").read_text())["onnx"])
    assert shown.strip() or name == "whisper"  # silence may have no text
    run_delivered(folder / "onnx", *(("--max-new-tokens", "8") if name in GENERATING else ()))
    if name == NOT_IN_JAVASCRIPT:
        (said,) = (warning for warning in result["warnings"] if "transformers_js" in warning)
        assert "transformers.js has no class for a sequence classifier on a decoder" in said
    elif name == "whisper":
        check_speech(folder, modules, write_sound(tmp_path / "sound.wav", seconds=1.5))
    else:
        check_text(folder, modules, name)
    if optimum.PYTHON:
        check_optimum(folder, name)


def check_text(folder: Path, modules: Path, name: str) -> None:
    wanted = result_for_text(folder / "pytorch", TEXT)
    if name == "bert-answers":
        for level, limit in (("onnx", 1e-4), ("onnx-fp16", 2e-2)):
            found = run_example(folder / level, modules, TEXT, CONTEXT)
            assert found == {**wanted, "score": pytest.approx(wanted["score"], abs=limit)}
        return
    asked = {"task": "text2text-generation", "dtype": "fp32", "text": TEXT, "options": VARIED}
    assert run_pipeline(folder / "onnx", modules, **asked) == wanted
    for level in LEVELS[name]:
        said = run_delivered(folder / f"onnx-{level}", TEXT, "--max-new-tokens", "39").removesuffix("\n")
        (found,) = run_example(folder / f"onnx-{level}", modules, TEXT)  # of 40 tokens
        assert found["generated_text"].startswith(said)


def check_optimum(folder: Path, name: str) -> None:
    """Compare the results of optimum's class with those of transformers for the merged weights: tokens, otherwise numbers."""
    model, tokenizer = loaded(folder / "pytorch"), AutoTokenizer.from_pretrained(folder / "pytorch")
    given = dict(tokenizer(TEXT, return_tensors="pt", return_token_type_ids=name.startswith("bert")))
    if name == "whisper":
        extractor = AutoFeatureExtractor.from_pretrained(folder / "pytorch")
        sound = extractor([0.0, 0.5, -0.5] * 3000, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        given = {"input_features": sound["input_features"]}
    rows = {key: value.tolist() for key, value in given.items()}
    if name in GENERATING:
        wanted = model.generate(**given, **VARIED, num_beams=1).tolist()
        asked = {**VARIED, "num_beams": 1, "load": {"use_merged": False}}
        assert optimum.run_optimum(OPTIMUM[name], folder / "onnx" / "optimum", rows, **asked) == wanted
        assert len(set(wanted[0])) > 3
        return
    found = optimum.run_optimum(OPTIMUM[name], folder / "onnx" / "optimum", rows)
    with torch.no_grad():
        results = model(**given)
    assert found
    for key, values in found.items():
        torch.testing.assert_close(torch.tensor(values), results[key], rtol=0, atol=1e-4)


def limit_length(base: Path) -> None:
    """Let a speech model's own configuration end its texts, as those on hubs do."""
    path = base / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_length": 24}))


def check_speech(folder: Path, modules: Path, sound: Path) -> None:
    wanted = result_for_sound(folder / "pytorch", sound, 23)  # one token is the start's
    assert wanted
    for level in ("", *(f"-{level}" for level in LEVELS["whisper"])):
        onnx = folder / f"onnx{level}"
        # transformers.js decodes sound by the tokenizer of Whisper alone; this one has fewer tokens than the model.
        settings = onnx / "transformers_js" / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "WhisperTokenizer"}))
        said = run_example(onnx, modules, sound)["text"].replace("<unk>", "").split()
        assert said == run_delivered(onnx, sound, "--max-new-tokens", "23").split()
        assert level or said == wanted.split()


def run_delivered(folder: Path, *words: str | Path) -> str:
    """Run the example in a folder; return what it prints."""
    code = f"import runpy, sys; sys.argv += {list(map(str, words))}; runpy.run_path('example.py', run_name='__main__')"
    return run_python(folder, code)


def run_python(folder: Path, code: str) -> str:
    """Run code in the output directory, as a reader of the card does; return what it prints."""
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_model_of_no_known_family_is_merged_and_everything_else_names_it(tmp_path: Path) -> None:
    """No part says that such a model is right or wrong: not the validation, not the report, not the verdict on the base."""
    case, named = save_case(tmp_path, make_family("vit"), target_modules=["q_proj"]), "ViTForImageClassification"
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
