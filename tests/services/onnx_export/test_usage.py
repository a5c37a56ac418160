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

from slipway.model.tokens.sound import SOUND_CODECS
from slipway.results.report import write_report
from support.commands.report_parts import result
from support.commands.usage_examples import usage_examples
from support.models.family_models import make_family_model
from support.models.judged_families import make
from support.models.onnx_models import Exported
from support.models.sentence_models import write_modules, write_prompts
from support.models.sound_models import make_speaker
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


PROMPTS: dict[str, tuple[dict[str, str], str | None]] = {
    "both": ({"query": "is it: ", "document": "a house: "}, None),
    "question alone": ({"query": "is it: ", "document": ""}, None),
    "passage": ({"query": "", "passage": "a house: "}, None),
    "default": ({"house": "a house by the sea: "}, "house"),
    "by name alone": ({"house": "a house by the sea: "}, None),
}


def _alike(folder: Path, one: str, other: str) -> float:
    """Return how alike the vectors of the first tokens of two texts are, by transformers alone."""
    import torch
    import transformers

    model, tokenizer = (
        transformers.AutoModel.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    with torch.no_grad():
        hidden = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0] for text in (one, other)]
    return float(torch.nn.functional.cosine_similarity(*hidden, dim=0))


@pytest.mark.parametrize("kind", ["both", *(pytest.param(each, marks=pytest.mark.slow) for each in list(PROMPTS)[1:])])
def test_prompts_come_before_the_texts_in_both(kind: str, tmp_path: Path, export: Callable[..., Exported]) -> None:
    make_family_model("bert-features", tmp_path / "pytorch")
    width = json.loads((tmp_path / "pytorch" / "config.json").read_text())["hidden_size"]
    write_modules(tmp_path / "pytorch", settings={"pooling_mode": "cls", "word_embedding_dimension": width})
    texts, default = PROMPTS[kind]
    write_prompts(tmp_path / "pytorch", texts, default)
    shutil.copytree(export(tmp_path / "pytorch", **LEGACY).folder, tmp_path / "onnx")
    write_report(tmp_path, result=result(None, ("pytorch", "onnx")))
    card = (tmp_path / "README.md").read_text()
    assert "## Prompts" in card
    usual = texts.get(default or "", "")
    one = usual + texts.get("query", "") + "How old are you?"
    other = usual + texts.get("document", texts.get("passage", "")) + "What is your age?"
    expected = pytest.approx(_alike(tmp_path / "pytorch", one, other), abs=2e-5)
    examples = usage_examples(card)
    names = ("pytorch", "onnx") if importlib.util.find_spec("sentence_transformers") else ("onnx",)
    for name in names:
        command = [sys.executable, "-P", "-c", examples[name]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) == expected, name
    compile(examples["pytorch"], "example.py", "exec")
    named = [*(["--prompt", "query"] if "query" in texts else []), *(["--compare-prompt", next(iter(set(texts) - {"query"}))] if "query" in texts else [])]  # fmt: skip
    command = [sys.executable, "-P", "onnx/example.py", "How old are you?", "--compare", "What is your age?", *named]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(_alike(tmp_path / "pytorch", one, other), abs=1e-4)


def test_a_pooling_that_leaves_prompts_out_is_in_no_graph(tmp_path: Path, export: Callable[..., Exported]) -> None:
    make_family_model("bert-features", tmp_path / "pytorch")
    write_modules(tmp_path / "pytorch", settings={"pooling_mode": "mean", "include_prompt": False})
    write_prompts(tmp_path / "pytorch", {"query": "is it: "})
    exported = export(tmp_path / "pytorch", **LEGACY)
    (warning,) = [said for said in exported.facts["warnings"] if "sentence_embedding" in said]
    assert "leaves the tokens of a prompt out" in warning
    assert (exported.folder / "config_sentence_transformers.json").is_file()
    shutil.copytree(exported.folder, tmp_path / "onnx")
    write_report(tmp_path, result=result(None, ("pytorch", "onnx")))
    assert "the graph lacks the model's own pooling" in usage_examples((tmp_path / "README.md").read_text())["onnx"]


@pytest.mark.slow
def test_tokens_of_sound_are_the_same_numbers_in_both(tmp_path: Path, shown: Shown) -> None:
    pytest.importorskip("gguf", reason="the trained tokenizer comes with the tests of GGUF")
    make_speaker(SOUND_CODECS[0], tmp_path / "pytorch")
    found = {name: ast.literal_eval(said) for name, said in shown().items()}
    assert found["pytorch"] == found["onnx"]
    command = [sys.executable, "-P", "onnx/example.py", "Once upon a time"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == found["onnx"][-40:]


@pytest.mark.slow
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
