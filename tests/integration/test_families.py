"""Models of every family through the command a user types: merged or as they are, quantized, and judged by what they compute."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperForConditionalGeneration

from support.commands import optimum
from support.commands.cli import slipway
from support.commands.transformers_js import run_example, run_pipeline, transformers_js
from support.commands.usage_examples import usage_examples
from support.models.genai_runs import genai_continuations
from support.models.judged_families import FamilyModel, make
from support.models.merge_cases import save_case
from support.models.merge_models import make_family
from support.models.transformers_results import (
    CONTEXT,
    TEXT,
    VARIED,
    continued,
    loaded,
    result_for_sound,
    result_for_text,
    write_sound,
)
from support.models.whisper_models import frames, make_whisper, transcribed, transcribed_by_transformers

LEVELS = ("fp16", "int8")
FOUR_BITS = ("t5", "bert-classes", "gpt2")
"""Models that get int4 too; each level of each costs four processes that load torch."""
SETTINGS = {"validation.test_samples": "4", "validation.benchmark_performance": "false"}
SLOW = pytest.mark.slow
GENERATING = ("marian", "t5", "bart", "whisper")
FAMILIES = (
    *(*GENERATING, "bert-classes", "bert-tokens", "bert-answers", "bert-masked", "bert-embeddings"),
    *("roberta-classes", "qwen3-classes"),
)
OPTIMUM = {
    **dict.fromkeys(GENERATING, "ORTModelForSeq2SeqLM"),
    **dict.fromkeys(("bert-classes", "roberta-classes", "qwen3-classes"), "ORTModelForSequenceClassification"),
    "whisper": "ORTModelForSpeechSeq2Seq", "bert-tokens": "ORTModelForTokenClassification",
    "bert-answers": "ORTModelForQuestionAnswering", "bert-masked": "ORTModelForMaskedLM",
    "bert-embeddings": "ORTModelForFeatureExtraction",
}  # fmt: skip
"""optimum's class for a model."""
NOT_IN_JAVASCRIPT = "qwen3-classes"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with transformers_js(tmp_path_factory.mktemp("npm")) as folder:
        yield folder


def levels_of(name: str) -> tuple[str, ...]:
    return (*LEVELS, "int4") if name in FOUR_BITS else LEVELS


def exported(
    root: Path, model: FamilyModel, levels: tuple[str, ...], *more: str | Path, **changes: str
) -> dict[str, Any]:
    changes |= {"optimization.quantization": ",".join(levels)}
    settings = [word for key, value in (SETTINGS | changes).items() for word in ("--set", f"{key}={value}")]
    checkpoint = more or ("--checkpoint", model.adapter)
    words = ("export", "--json", "--base-model", model.base, *checkpoint, "--out", root / "out", *settings)
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
def test_a_translator_is_exported_and_passes(tmp_path: Path) -> None:
    result = exported(tmp_path, make("marian", tmp_path / "marian"), ("int8",))
    folder = check_result(result, ("int8",))
    assert run_python(folder, usage_examples((folder / "README.md").read_text())["onnx"]).strip()
    assert run_delivered(folder / "onnx", "--max-new-tokens", "8").strip()


@SLOW
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_runs_as_it_lies(tmp_path: Path, modules: Path, name: str) -> None:
    """Each output passes; transformers.js computes in Node.js what transformers does with the merged weights."""
    model = make(name, tmp_path / name)
    if name == "whisper":
        limit_length(model.base)
    levels = levels_of(name)
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
    if name not in GENERATING:
        words = (TEXT, CONTEXT) if name == "bert-answers" else (TEXT,)
        for level, limit in (("onnx", 1e-4), ("onnx-fp16", 2e-2)):
            assert comparable(run_example(folder / level, modules, *words)) == near(wanted, limit)
        return
    asked = {"task": "text2text-generation", "dtype": "fp32", "text": TEXT, "options": VARIED}
    assert run_pipeline(folder / "onnx", modules, **asked) == wanted
    for level in levels_of(name):
        said = run_delivered(folder / f"onnx-{level}", TEXT, "--max-new-tokens", "39").removesuffix("\n")
        (found,) = run_example(folder / f"onnx-{level}", modules, TEXT)  # of 40 tokens, and BART's last ends the text
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
    for level in ("", *(f"-{level}" for level in LEVELS)):
        onnx = folder / f"onnx{level}"
        # transformers.js decodes sound by the tokenizer of Whisper alone; this one has fewer tokens than the model.
        settings = onnx / "transformers_js" / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "WhisperTokenizer"}))
        said = run_example(onnx, modules, sound)["text"].replace("<unk>", "").split()
        assert said == run_delivered(onnx, sound, "--max-new-tokens", "23").split()
        assert level or said == wanted.split()


def comparable(found: Any) -> Any:
    """Return what transformers.js says of tokens in the form of :func:`result_for_text`."""
    if isinstance(found, list) and found and "entity" in found[0]:
        return [(each["entity"], each["index"], each["score"]) for each in found]
    if isinstance(found, list) and found and "token_str" in found[0]:
        return [(each["token"], each["score"]) for each in found]
    return found


def near(wanted: Any, limit: float) -> Any:
    """Return a value that equals others whose numbers are near."""
    if isinstance(wanted, dict):
        return {key: near(each, limit) for key, each in wanted.items()}
    if isinstance(wanted, list | tuple):
        return type(wanted)(near(each, limit) for each in wanted)
    return pytest.approx(wanted, abs=limit) if isinstance(wanted, float) else wanted


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


@SLOW
def test_a_plain_model_is_judged_against_itself(tmp_path: Path) -> None:
    model = make("gpt2", tmp_path / "gpt2")
    levels = levels_of("gpt2")
    result = exported(tmp_path, model, levels, "--checkpoint", "none", **{"formats.onnx.packaging": "genai"})
    assert set(result["formats"]) == outputs_at(levels)
    assert result["validation_passed"] is True
    assert result["plain"] is True
    folder, prompt = Path(str(result["output_directory"])), [5, 9, 17, 30]
    wanted = continued(model.base, prompt, 12)
    assert genai_continuations(folder / "onnx", [prompt], 12) == [wanted]
    for level in levels:
        assert len(genai_continuations(folder / f"onnx-{level}", [prompt], 12)[0]) > 0


@SLOW
def test_a_whisper_is_run_by_genai(tmp_path: Path) -> None:
    """From base and LoRA to text, from frames of sound and from a file."""
    base = make_whisper(tmp_path / "base")
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(WhisperForConditionalGeneration.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    model = FamilyModel("whisper", tmp_path)
    result = exported(tmp_path, model, ("fp16",), **{"formats.onnx.packaging": "genai"})
    folder = check_result(result, ("fp16",))
    sound = write_sound(tmp_path / "sound.wav", seconds=3)
    values = np.concatenate([frames(sound), np.flip(frames(sound), 2)])
    wanted = transcribed_by_transformers(folder / "pytorch", values)
    assert transcribed(folder / "onnx", values=values) == wanted
    assert wanted != transcribed_by_transformers(base, values)
    assert transcribed(folder / "onnx", sound)[0]
    assert transcribed(folder / "onnx-fp16", sound)[0]
