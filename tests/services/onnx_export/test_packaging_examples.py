"""The examples in JavaScript and in Python, which lie beside a graph, do the same."""

from __future__ import annotations

import json
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.commands.transformers_js import run_example
from support.models.family_models import make_family_model
from support.models.onnx_models import Exported
from support.models.sentence_models import write_modules

WORDS = "the of and to in"
EXAMPLES = {
    "marian": ("marian", (WORDS,), (WORDS, "--max-new-tokens", "39")),  # transformers.js counts the first token
    "whisper": ("whisper", ("sound.wav", "40"), ("sound.wav", "--max-new-tokens", "40")),
    "features": ("bert-features", (WORDS, "to in"), (WORDS, "--compare", "to in")),
    "sentences": ("bert-features", (WORDS, "to in"), (WORDS, "--compare", "to in")),
}
"""Model, and arguments of the examples in JavaScript and in Python."""


@pytest.mark.slow
@pytest.mark.parametrize("task", EXAMPLES)
def test_the_examples_of_both_languages_agree(
    tmp_path: Path, export: Callable[..., Exported], modules: Path, task: str
) -> None:
    """A translation, a transcription, and how similar two texts are."""
    name, theirs, ours = EXAMPLES[task]
    source = make_family_model(name, tmp_path / "model")
    if task == "sentences":
        write_modules(source, settings={"pooling_mode": "cls"}, normalized=True)
    if name == "whisper":
        write_processor(source)
    folder = export(source, packaging=("transformers_js",), engine="legacy", opset=17).folder
    write_sound(tmp_path / "sound.wav")
    done = subprocess.run(
        [sys.executable, "-P", str(folder / "example.py"), *ours],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = run_example(folder, modules, *(str(tmp_path / each) if each == "sound.wav" else each for each in theirs))
    if task in ("features", "sentences"):
        assert found["similarity"] == pytest.approx(float(done.stdout), abs=1e-3)
        assert abs(found["similarity"]) < 0.999
    else:
        text = found[0]["generated_text"] if name == "marian" else found["text"]
        assert len(text.split()) > 3
        assert text.split() == done.stdout.split()


def write_processor(folder: Path) -> None:
    """Say how sound is prepared, in the file of a processor."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=500)
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": extractor.to_dict()}))


def write_sound(path: Path) -> None:
    """Write half a second of two tones, on two channels."""
    times = np.arange(8000) / 16000
    samples = np.stack([np.sin(2 * np.pi * tone * times) for tone in (440, 880)], axis=1)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((samples * 8000).astype("<i2").tobytes())
