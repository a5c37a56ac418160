"""A narrow Whisper that takes 30 seconds of sound, and what transformers and onnxruntime-genai transcribe with it."""

from __future__ import annotations

import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from support.models.genai_runs import genai_library

PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
SPECIAL = ("<|endoftext|>", *PROMPT)
FIRST_SPECIAL = 256
NEW = 20
SEED, SPREAD = 2, 0.4  # its texts vary


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


def frames(sound: Path) -> Any:
    """Prepare a WAV file by transformers: axes (1, bins, frames)."""
    with wave.open(str(sound)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
    return tf.WhisperFeatureExtractor()(samples, sampling_rate=16000, return_tensors="np")["input_features"]


def frames_of_genai(folder: Path, sound: Path) -> Any:
    """Prepare a WAV file by onnxruntime-genai, as a delivered folder says."""
    library = genai_library()
    return _read(library, library.Model(str(folder)), sound)["audio_features"].as_numpy()


def transcribed(
    folder: Path, sound: Path | None = None, *, values: Any = None, prompt: Sequence[str] = PROMPT, beams: int = 1
) -> list[list[int]]:
    """Return the tokens that onnxruntime-genai continues a prompt with, of a file or of the frames of each row.

    Without the end of the text and what follows it.
    """
    library = genai_library()
    model = library.Model(str(folder))
    if sound is None:
        tensors, rows = library.NamedTensors(), len(values)
        tensors["input_features"], tensors["input_ids"] = values, np.array([ids_of(prompt)] * rows, np.int32)
    else:
        tensors, rows = _read(library, model, sound), 1
    params = library.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + NEW, batch_size=rows, num_beams=beams)
    generator = library.Generator(model, params)
    generator.set_inputs(tensors)
    while not generator.is_done():
        generator.generate_next_token()
    return [_before_the_end([int(each) for each in generator.get_sequence(row)][len(prompt) :]) for row in range(rows)]


def transcribed_by_transformers(source: Path, values: Any, *, beams: int = 1) -> list[list[int]]:
    """Return what transformers continues the prompt with, for the frames of each row."""
    model = tf.WhisperForConditionalGeneration.from_pretrained(source, dtype=torch.float32).eval()
    start, asked = ids_of(PROMPT), {"max_new_tokens": NEW, "num_beams": beams, "do_sample": False}
    rows = torch.tensor([start] * len(values))
    found = model.generate(input_features=torch.tensor(values), decoder_input_ids=rows, **asked).tolist()
    return [_before_the_end(row[len(start) :] if row[: len(start)] == start else row) for row in found]


def ids_of(names: Sequence[str]) -> list[int]:
    """Return the tokens of special names."""
    return [FIRST_SPECIAL + SPECIAL.index(name) for name in names]


def _read(library: Any, model: Any, sound: Path) -> Any:
    return model.create_multimodal_processor()("".join(PROMPT), audios=library.Audios.open(str(sound)))


def _before_the_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(FIRST_SPECIAL)] if FIRST_SPECIAL in tokens else tokens
