"""Test inputs of speech models: hostile sounds are refused by name, features are those of the file, and error rates are counted by hand."""

from __future__ import annotations

import json
import os
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoTokenizer, WhisperFeatureExtractor

from slipway.errors import ConfigurationError, ModelExportError, ValidationError
from slipway.model.families import RAW_SPEECH, SHORTEST_SOUND, SPEECH, Family
from slipway.model.folder import ModelFolder
from slipway.proof.runtime import UnusableInput
from slipway.proof.transformers_runtime import load
from slipway.stage import Context
from slipway.validation.answers import Score
from slipway.validation.findings import ValidationReport
from slipway.validation.inputs import LARGEST_SOUND, find_sounds
from slipway_validate.answers import scores
from slipway_validate.answers.records import read_records, write_records
from slipway_validate.params import SampleParams, ValidateParams
from slipway_validate.protocol.inputs import SOUNDS_FILE, EncodedInputs
from slipway_validate.protocol.messages import TokenizeSpec
from slipway_validate.reference.stage import STAGE as REFERENCE
from slipway_validate.runner.generation.generating import answer_inputs
from slipway_validate.runner.sampling.encoding import UnusableSoundError, encode_inputs, read_sound
from slipway_validate.stage import STAGE
from support.models.family_models import CASES, make_family_adapter, make_family_model
from support.models.judged_families import save_raw_extractor
from support.models.tiny_models import save_tokenizer

RATE = 16_000


def make_wav(path: Path, frames: bytes, *, rate: int = RATE, channels: int = 1, width: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(frames)
    return path


def tone(pitch: float, seconds: float = 0.5) -> bytes:
    wave_ = np.sin(2 * np.pi * pitch * np.arange(int(RATE * seconds)) / RATE)
    return (wave_ * 20_000).astype("<i2").tobytes()


@pytest.mark.parametrize(
    ("width", "frames"),
    [
        (1, bytes([0, 128, 192])),
        (2, struct.pack("<3h", -(1 << 15), 0, 1 << 14)),
        (3, b"\0\0\x80" + b"\0\0\0" + b"\0\0\x40"),
        (4, struct.pack("<3i", -(1 << 31), 0, 1 << 30)),
    ],
    ids=["8", "16", "24", "32"],
)
def test_whole_numbers_of_every_width(tmp_path: Path, width: int, frames: bytes) -> None:
    path = make_wav(tmp_path / "a.wav", frames, width=width)
    assert read_sound(path, rate=RATE, longest=3).tolist() == [-1.0, 0.0, 0.5]


def test_channels_become_their_mean(tmp_path: Path) -> None:
    path = make_wav(tmp_path / "a.wav", struct.pack("<4h", 1 << 14, 0, 0, -(1 << 14)), channels=2)
    assert read_sound(path, rate=RATE, longest=2).tolist() == [0.25, -0.25]


def header(path: Path, **changed: int) -> None:
    """Write a header of 44 bytes, and no sound behind it but four frames."""
    field = {"form": 1, "channels": 1, "rate": RATE, "bits": 16, "bytes": 8} | changed
    block = field["channels"] * field["bits"] // 8
    path.write_bytes(
        struct.pack(
            "<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + field["bytes"] & 0xFFFFFFFF, b"WAVE", b"fmt ", 16, field["form"], field["channels"],
            field["rate"], field["rate"] * block & 0xFFFFFFFF, block & 0xFFFF, field["bits"], b"data", field["bytes"],
        ) + b"\1\0" * 4
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rate": 44_100}, "44100 Hz, the model takes 16000 Hz; convert it: ffmpeg"),
        ({"rate": 0}, "0 Hz"),
        ({"channels": 0}, "cannot be read as WAV"),
        ({"channels": 9}, "9 channels"),
        ({"bits": 64}, "64 bits"),
        ({"form": 3, "bits": 32}, "unknown format: 3"),
        ({"bytes": 0}, "0.0 s"),
        ({"bytes": 80}, "the file ends before"),
        ({"bytes": 0xFFFF_FFF0}, "ends early"),
    ],
    ids=["rate", "no rate", "no channel", "channels", "width", "floats", "empty", "cut", "huge"],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, changed: dict[str, int], said: str) -> None:
    header(tmp_path / "a.wav", **changed)
    with pytest.raises(UnusableSoundError, match=said):
        read_sound(tmp_path / "a.wav", rate=RATE, longest=1000)


def test_no_wave_is_read_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    os.mkfifo(tmp_path / "b.wav")
    (tmp_path / "c.wav").touch()
    os.truncate(tmp_path / "c.wav", LARGEST_SOUND + 1)
    for name, said in (("a", "ends early"), ("b", "pipe"), ("c", "larger than")):
        with pytest.raises(UnusableSoundError, match=said):
            read_sound(tmp_path / f"{name}.wav", rate=RATE, longest=1000)


@pytest.mark.parametrize("name", ["/etc/a.wav", "../a.wav", "b/../../a.wav", "a.mp3", "a\0.wav", "b\\a.wav", ""])
def test_a_name_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text(json.dumps([{"audio": name, "text": "a"}]))
    with pytest.raises(ValidationError, match="record 1: audio"):
        read_records(tmp_path, [], SPEECH)
    with pytest.raises(ConfigurationError, match="test_input_samples"):
        find_sounds(tmp_path / "inputs.json", here=True)


def test_sounds_travel_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "inputs.jsonl"
    file.write_text('{"audio": "clips/a.wav"}\n{"audio": "b.wav"}\nnot json\n{"audio": "b.wav"}\n{"prompt": "c"}\n')
    with pytest.raises(ConfigurationError, match="does not exist"):
        find_sounds(file, here=True)
    found = (make_wav(tmp_path / "b.wav", tone(440)), make_wav(tmp_path / "clips" / "a.wav", tone(300)))
    make_wav(tmp_path / "not named.wav", tone(200))
    assert find_sounds(file, here=True) == found
    assert len(find_sounds(file, here=False)) == 3  # the content of an import is not here
    (tmp_path / "b.wav").unlink()
    (tmp_path / "b.wav").symlink_to("/proc/cpuinfo")
    with pytest.raises(ModelExportError, match="is a link"):
        find_sounds(file, here=True)


def test_a_list_of_the_configuration_names_no_sounds() -> None:
    with pytest.raises(ValidationError, match="a list in the configuration names sounds") as caught:
        read_records(None, [{"audio": "a.wav"}], SPEECH)
    assert "beside the sounds" in (caught.value.remedy or "")


def test_error_rates_by_hand() -> None:
    """Of five words one is replaced, one left out and one added; of nine letters two are replaced."""
    found = scores.transcription(["The cat sits the big mat"], ["the cat sat on the mat"])
    assert found["wer"] == pytest.approx(3 / 6)  # sat/sits, on left out, big added
    assert scores.transcription(["abd", "Xyz."], ["abc", "x, y z!"])["cer"] == pytest.approx((1 + 2) / 8)
    assert scores.transcription(["«ÇA» va -"], ["ça va?"]) == {"wer": 0.0, "cer": 0.0}
    assert scores.transcription(["a b c"], ["a"])["wer"] == 2.0  # more is inserted than there is
    assert scores.transcription(["a"], ["?!"]) == {}


def test_more_errors_are_a_loss() -> None:
    assert Score(name="wer", value=0.5, reference=0.25).loss == 0.25
    assert Score(name="bleu", value=0.5, reference=0.25).loss == -0.25


def make_whisper(folder: Path) -> Path:
    base = make_family_model("whisper", folder)
    WhisperFeatureExtractor(feature_size=8, hop_length=1000, chunk_length=2).save_pretrained(base)
    return base


def encoded(base: Path, given: Path, records: list[dict[str, Any]], *, family: Family = SPEECH) -> EncodedInputs:
    given.mkdir(exist_ok=True)
    (given / "inputs.jsonl").write_text("\n".join(map(json.dumps, records)))
    samples = given.parent / "samples"
    samples.mkdir(exist_ok=True)
    path = write_records(read_records(given, [], family) or (), given.parent / "records.json")
    spec = TokenizeSpec(
        tokenizer=base, model=base, family=family.name, text=given, windows=1, length=16, seed=0, samples=samples, records=path,
        sounds=given,
    )  # fmt: skip
    return encode_inputs(AutoTokenizer.from_pretrained(base), spec, ModelFolder.open(base))


def test_what_the_model_hears_and_how_its_decoder_begins(tmp_path: Path) -> None:
    base, given = make_whisper(tmp_path / "base"), tmp_path / "given"
    make_wav(given / "a.wav", tone(440))
    make_wav(given / "b.wav", tone(660, 2))
    records = [{"audio": "a.wav", "text": "a", "max_new_tokens": 900}, {"audio": "b.wav"}]
    found = encoded(base, given, records)
    assert [each.ids for each in found.inputs] == [(1,), (1,)]
    assert found.inputs[0].most < 64
    sounds = np.load(tmp_path / "samples" / SOUNDS_FILE)
    extractor = WhisperFeatureExtractor.from_pretrained(base)
    heard = read_sound(given / "b.wav", rate=RATE, longest=2 * RATE)
    assert np.array_equal(sounds[1], extractor(heard, sampling_rate=RATE, return_tensors="np")["input_features"][0])
    assert not np.array_equal(sounds[0], sounds[1])

    settings = {"lang_to_id": {"<|de|>": 7, "<|fr|>": 8}, "task_to_id": {"transcribe": 9}, "no_timestamps_token_id": 10}
    (base / "generation_config.json").write_text(
        json.dumps(settings | {"suppress_tokens": [5], "begin_suppress_tokens": [6]})
    )
    with pytest.raises(UnusableInput, match=r"test input 1 .*several languages.*language"):
        encoded(base, given, records)
    with pytest.raises(UnusableInput, match=r"test input 1 .*no language 'xx'; it has de, fr"):
        encoded(base, given, [{"audio": "a.wav", "language": "xx"}])
    found = encoded(base, given, [{"audio": "a.wav", "language": "fr"}])
    assert (found.inputs[0].ids, found.banned, found.banned_first) == ((1, 8, 9, 10), (5,), (6,))
    make_wav(given / "b.wav", tone(660, 2.1))
    with pytest.raises(
        UnusableInput, match=r"test input 2: the sound 'b.wav': it has 2.1 s, the model takes at most 2 s"
    ):
        encoded(base, given, records)


def test_a_model_of_samples_hears_each_sound_at_its_own_length(tmp_path: Path) -> None:
    base, given = make_family_model("moonshine", tmp_path / "base"), tmp_path / "given"
    save_raw_extractor(base)
    lengths = {"a": 0.5, "b": 1.5, "c": 1.0}
    records = [{"audio": f"{name}.wav", "text": "a", "max_new_tokens": 5} for name in lengths]
    for number, (name, seconds) in enumerate(lengths.items(), 2):
        make_wav(given / f"{name}.wav", tone(220 * number, seconds))
    found = encoded(base, given, records, family=RAW_SPEECH)
    sounds = np.load(tmp_path / "samples" / SOUNDS_FILE)
    assert sounds.shape == (3, 1.5 * RATE)
    assert [int((~np.isnan(each)).sum()) for each in sounds] == [0.5 * RATE, 1.5 * RATE, RATE]
    answers = answer_inputs(load(base, threads=1), RAW_SPEECH, found, report=lambda *_: None, sounds=sounds)
    model = type(CASES["moonshine"].model()).from_pretrained(base).eval()
    for answer, (name, seconds) in zip(answers.answers, lengths.items(), strict=True):
        heard = torch.from_numpy(read_sound(given / f"{name}.wav", rate=RATE, longest=2 * RATE))[None]
        assert heard.shape == (1, seconds * RATE)
        said = model.generate(heard, max_new_tokens=5, do_sample=False)[0, 1:].tolist()
        assert list(answer) == said[: len(answer)]
    assert len(set(answers.answers)) > 1
    make_wav(given / "c.wav", tone(220, 30.1))
    with pytest.raises(
        UnusableInput, match=r"test input 3: the sound 'c.wav': it has 30.1 s, the model takes at most 30 s"
    ):
        encoded(base, given, records, family=RAW_SPEECH)


def test_a_sound_too_short_for_a_model_of_samples_is_refused_by_name(tmp_path: Path) -> None:
    base, given = make_family_model("moonshine", tmp_path / "base"), tmp_path / "given"
    save_raw_extractor(base)
    records = [{"audio": f"{name}.wav", "text": "a", "max_new_tokens": 2} for name in ("long", "short")]
    for name, samples in {"long": RATE, "short": SHORTEST_SOUND}.items():
        make_wav(given / f"{name}.wav", bytes(2 * samples))
    found = encoded(base, given, records, family=RAW_SPEECH)
    sounds = np.load(tmp_path / "samples" / SOUNDS_FILE)
    answers = answer_inputs(load(base, threads=1), RAW_SPEECH, found, report=lambda *_: None, sounds=sounds)
    assert len(answers.answers) == 2
    make_wav(given / "short.wav", bytes(2 * (SHORTEST_SOUND - 1)))
    said = r"test input 2: the sound 'short.wav': it has 999 samples \(0.062 s\), the model takes at least 1000; give a longer"
    with pytest.raises(UnusableInput, match=said):
        encoded(base, given, records, family=RAW_SPEECH)


@pytest.mark.slow
def test_a_whisper_transcribes_beside_its_reference(tmp_path: Path) -> None:
    base, adapter, merged = make_whisper(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged"
    make_family_adapter("whisper", base, adapter)
    model = type(CASES["whisper"].model()).from_pretrained(base)
    model = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    model.save_pretrained(merged)
    save_tokenizer(merged)
    with torch.no_grad():
        model.model.decoder.layer_norm.weight.neg_()
    model.save_pretrained(tmp_path / "other")
    save_tokenizer(tmp_path / "other")
    given = tmp_path / "given"
    # The random model says "have" again and again, so that this is the right transcription.
    texts = ["Have, have have have!", "have have have have", "have have have"]
    lines = [{"audio": f"clips/{n}.wav", "text": text, "max_new_tokens": 4} for n, text in enumerate(texts)]
    for number in range(len(texts)):
        make_wav(given / "clips" / f"{number}.wav", tone(200 * (number + 1), 1 + number / 2))
    (given / "inputs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    params = ValidateParams(sequence_length=16, test_samples=2, greedy_prompts=0, benchmark_performance=False)
    sources = {"base": base, "adapter": adapter, "test_inputs": given}
    for name in ("reference", "work", "again"):
        (tmp_path / name).mkdir()
    samples = SampleParams(sequence_length=16, test_samples=2, greedy_prompts=0)
    made = REFERENCE.run(sources, samples, Context(workdir=tmp_path / "reference"))["reference"]
    inputs = {**sources, "reference": made, "pytorch": merged, "pytorch-int4": tmp_path / "other"}
    report = ValidationReport.read(STAGE.run(inputs, params, Context(workdir=tmp_path / "work"))["validation"])
    right, wrong = (report.output(name).answers for name in ("pytorch", "pytorch-int4"))
    assert right is not None
    assert wrong is not None
    assert (right.inputs, right.with_expected, right.agreement, right.skipped) == (3, 3, 1.0, "")
    assert [score.name for score in right.scores] == ["wer", "cer"]
    assert right.scores[0].value == pytest.approx(1 / 11)  # one word too many in the last
    assert all(score.loss == 0 for score in right.scores)
    assert wrong.agreement == 0
    assert wrong.scores[0].value == 12 / 11
    assert "answers.wer_loss" in [check.name for check in report.output("pytorch").checks if check.passed]
    assert "answers.wer_loss" in [check.name for check in report.output("pytorch-int4").failed_checks]
    sounds = made / "samples" / SOUNDS_FILE
    np.save(sounds, np.load(sounds)[:2])
    with pytest.raises(ValidationError, match=r"its files are damaged: sounds.npy has the shape .* for 3 test inputs"):
        STAGE.run(inputs, params, Context(workdir=tmp_path / "again"))
