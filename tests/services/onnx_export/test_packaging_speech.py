"""onnxruntime-genai transcribes with Whisper's delivered folder: from frames of sound, and from a file that it reads itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transformers as tf

from slipway.model.configuration import ModelConfig
from slipway.model.families import SPEECH
from slipway.stage import Context
from slipway_onnx_export.packaging.genai import audio_processor
from slipway_onnx_export.packaging.kinds import NotPackagedError, Packaged
from support.models.family_models import make_family_model
from support.models.onnx_models import Exported
from support.models.packaged_models import steps_of_two_files
from support.models.transformers_results import write_sound
from support.models.whisper_models import (
    PROMPT,
    frames,
    frames_of_genai,
    ids_of,
    make_whisper,
    transcribed,
    transcribed_by_transformers,
)

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from slipway_onnx_export.params import OnnxExportParams
    from slipway_onnx_export.stage import STAGE

    context = Context(workdir=tmp_path_factory.mktemp("packaged"))
    params = OnnxExportParams(engine="legacy", opset=17, packaging=("genai",))
    made = STAGE.run({"pytorch": source}, params, context)["onnx"]
    assert context.facts["packages"] == {"genai": "genai_config.json"}
    return made


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sound(tmp_path_factory.mktemp("sound") / "sound.wav", seconds=3)


@SLOW
def test_genai_continues_as_transformers_does(source: Path, folder: Path, sound: Path) -> None:
    """Two sounds at once, greedily and by a beam search."""
    forwards = frames(sound)
    values = np.concatenate([forwards, np.flip(forwards, 2)])
    for beams in (1, 3):
        found = transcribed(folder, values=values, beams=beams)
        assert found == transcribed_by_transformers(source, values, beams=beams)
        assert len({token for row in found for token in row}) > 2


@SLOW
def test_levels_continue_as_their_graphs_do(folder: Path, sound: Path, tmp_path: Path) -> None:
    from slipway_quantize.stage import STAGE

    for level, kind in (("fp16", "float16"), ("int8", "float32")):
        (tmp_path / level).mkdir()
        params = STAGE.params(format="onnx", level=level)
        made = STAGE.run({"model": folder}, params, Context(workdir=tmp_path / level))["model"]
        values = frames(sound).astype(kind)
        (found,) = transcribed(made, values=values, prompt=PROMPT[:1])
        (start,) = ids_of(PROMPT[:1])
        logits = steps_of_two_files(made, {"input_features": values}, start=start, steps=len(found))
        assert found == [int(each[0, -1].argmax()) for each in logits]
        assert len(found) > 2


@SLOW
def test_genai_reads_a_file_by_the_delivered_files(source: Path, folder: Path, sound: Path) -> None:
    """It prepares the sound as transformers does, except for two frames at both ends, where it sees what is beyond otherwise."""
    seen = frames_of_genai(folder, sound)
    differing = np.flatnonzero(np.abs(seen - frames(sound)).max((0, 1)) > 1e-4)
    assert set(differing) <= {0, 1, 300, 301}  # three seconds are 300 frames
    assert transcribed(folder, sound) == transcribed_by_transformers(source, seen)


@SLOW
def test_a_whisper_of_another_window_is_not_packaged(tmp_path: Path, export: Callable[..., Exported]) -> None:
    source = make_family_model("whisper", tmp_path / "model")
    exported = export(source, packaging=("genai",), engine="legacy", opset=17)
    assert "gives Whisper 3000 frames" in exported.facts["packages"]["genai"]
    assert not (exported.folder / "genai_config.json").exists()


def test_sound_is_prepared_as_the_runtimes_own_builder_says(tmp_path: Path) -> None:
    model = Packaged(tmp_path, SPEECH, "", ModelConfig({"model_type": "whisper", "num_mel_bins": 128}), {})
    steps = [each["operation"] for each in audio_processor(model)["feature_extraction"]["sequence"]]
    assert [each["type"] for each in steps] == ["AudioDecoder", "STFTNorm", "LogMelSpectrum"]
    assert steps[2]["attrs"] == {"chunk_size": 30, "hop_length": 160, "n_fft": 400, "n_mel": 128}
    part = tf.WhisperFeatureExtractor(hop_length=500).to_dict()
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": part}))
    with pytest.raises(NotPackagedError, match="hop_length 500"):
        audio_processor(model)
