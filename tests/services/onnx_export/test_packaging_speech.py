"""onnxruntime-genai transcribes with Whisper's delivered folder: from frames of sound, and from a file that it reads itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from slipway.models.families import SPEECH
from slipway.stage import Context
from slipway_onnx_export.packaging.genai_speech import audio_processor
from slipway_onnx_export.packaging.kinds import NotPackagedError, Packaged
from support.models.family_models import make_family_model
from support.models.genai_runs import genai_library
from support.models.onnx_models import Exported
from support.models.packaged_models import steps_of_two_files
from support.models.transformers_results import write_sound

PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
SPECIAL = ("<|endoftext|>", *PROMPT)
FIRST_SPECIAL = 256
NEW = 20
SEED, SPREAD = 2, 0.4  # its texts vary
SLOW = pytest.mark.slow


def make_whisper(folder: Path) -> Path:
    """Save a Whisper of two narrow layers that takes 30 seconds, with its tokenizer (single bytes) and feature extractor."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(SEED)
    ids = {name: FIRST_SPECIAL + place for place, name in enumerate(SPECIAL)}
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    config = tf.WhisperConfig(
        vocab_size=272, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=80, max_source_positions=1500,
        max_target_positions=64, decoder_start_token_id=start, pad_token_id=end, eos_token_id=end, bos_token_id=end,
    )  # fmt: skip
    model = tf.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * SPREAD)
    model.save_pretrained(folder)
    alphabet = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    fast.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "WhisperTokenizer"}))
    tf.WhisperFeatureExtractor().save_pretrained(folder)
    return folder


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


def frames(sound: Path) -> Any:
    import wave

    with wave.open(str(sound)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    return tf.WhisperFeatureExtractor()(samples, sampling_rate=16000, return_tensors="np")["input_features"]


def transcribed(folder: Path, feed: Any, *, beams: int = 1) -> list[list[int]]:
    """Return the tokens after the prompt of each row, without those after the end."""
    library = genai_library()
    model = library.Model(str(folder))
    params = library.GeneratorParams(model)
    inputs = feed(library, model)
    rows = 1 if not isinstance(feed, Frames) else len(feed.values)
    length = len(PROMPT) + NEW
    params.set_search_options(max_length=length, batch_size=rows, num_beams=beams, num_return_sequences=1)
    generator = library.Generator(model, params)
    generator.set_inputs(inputs)
    while not generator.is_done():
        generator.generate_next_token()
    found = ([int(token) for token in generator.get_sequence(row)][len(PROMPT) :] for row in range(rows))
    return [row[: row.index(FIRST_SPECIAL)] if FIRST_SPECIAL in row else row for row in found]


class Frames:
    """Frames that were made outside of the runtime; axes (rows, bins, frames)."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __call__(self, library: Any, model: Any) -> Any:
        tensors = library.NamedTensors()
        tensors["input_features"] = self.values
        tensors["input_ids"] = np.array([prompt()] * len(self.values), np.int32)
        return tensors


def prompt() -> list[int]:
    return [FIRST_SPECIAL + SPECIAL.index(name) for name in PROMPT]


def wanted(source: Path, values: Any, *, beams: int = 1) -> list[list[int]]:
    """Return what transformers continues the prompt with."""
    model = tf.WhisperForConditionalGeneration.from_pretrained(source).eval()
    ids = torch.tensor([prompt()] * len(values))
    asked = {"max_new_tokens": NEW, "num_beams": beams, "do_sample": False}
    found = model.generate(input_features=torch.tensor(values), decoder_input_ids=ids, **asked).tolist()
    rows = [row[len(PROMPT) :] if row[: len(PROMPT)] == prompt() else row for row in found]
    return [row[: row.index(FIRST_SPECIAL)] if FIRST_SPECIAL in row else row for row in rows]


@SLOW
@pytest.mark.parametrize("beams", [1, 3])
def test_genai_continues_as_transformers_does(source: Path, folder: Path, sound: Path, beams: int) -> None:
    """Two sounds at once, greedily and by a beam search."""
    values = np.concatenate([frames(sound), frames(sound)[..., ::-1]])
    found = transcribed(folder, Frames(np.ascontiguousarray(values)), beams=beams)
    assert found == wanted(source, np.ascontiguousarray(values), beams=beams)
    assert len({token for row in found for token in row}) > 2


@SLOW
@pytest.mark.parametrize("level", ["fp16", "int8"])
def test_levels_continue_as_their_graphs_do(folder: Path, sound: Path, tmp_path: Path, level: str) -> None:
    from slipway_quantize.stage import STAGE

    params = STAGE.params(format="onnx", level=level)
    made = STAGE.run({"model": folder}, params, Context(workdir=tmp_path))["model"]
    kind = np.float16 if level == "fp16" else np.float32
    values = frames(sound).astype(kind)
    library = genai_library()
    model = library.Model(str(made))
    params = library.GeneratorParams(model)
    params.set_search_options(max_length=12, batch_size=1)
    generator = library.Generator(model, params)
    tensors = library.NamedTensors()
    tensors["input_features"], tensors["input_ids"] = values, np.array([[prompt()[0]]], np.int32)
    generator.set_inputs(tensors)
    while not generator.is_done():
        generator.generate_next_token()
    found = [int(token) for token in generator.get_sequence(0)][1:]
    logits = steps_of_two_files(made, {"input_features": values}, start=prompt()[0], steps=len(found))
    assert found == [int(each[0, -1].argmax()) for each in logits]


@SLOW
def test_genai_reads_a_file_as_transformers_does(source: Path, folder: Path, sound: Path) -> None:
    """The runtime prepares the sound and reads the prompt by the delivered files."""

    def read(library: Any, model: Any) -> Any:
        processor = model.create_multimodal_processor()
        return processor("".join(PROMPT), audios=library.Audios.open(str(sound)))

    assert transcribed(folder, read) == wanted(source, frames(sound))


@SLOW
def test_a_whisper_of_another_window_is_not_packaged(tmp_path: Path, export: Callable[..., Exported]) -> None:
    source = make_family_model("whisper", tmp_path / "model")
    exported = export(source, packaging=("genai",), engine="legacy", opset=17)
    assert "gives Whisper 3000 frames" in exported.facts["packages"]["genai"]
    assert not (exported.folder / "genai_config.json").exists()


def test_sound_is_prepared_as_the_runtimes_own_builder_says(tmp_path: Path) -> None:
    model = Packaged(tmp_path, SPEECH, "", {"model_type": "whisper", "num_mel_bins": 128}, {})
    steps = [each["operation"] for each in audio_processor(model)["feature_extraction"]["sequence"]]
    assert [each["type"] for each in steps] == ["AudioDecoder", "STFTNorm", "LogMelSpectrum"]
    assert steps[2]["attrs"] == {"chunk_size": 30, "hop_length": 160, "n_fft": 400, "n_mel": 128}
    part = tf.WhisperFeatureExtractor(hop_length=500).to_dict()
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": part}))
    with pytest.raises(NotPackagedError, match="hop_length 500"):
        audio_processor(model)
