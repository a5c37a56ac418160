"""Tell from a tokenizer whether a model of text answers with tokens of sound, and of which codec.

Such a model is a decoder like any other: it is converted and compared as one. What it writes are numbers in a codec's tables, and another model,
the codec, makes sound of them. The codec is not part of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.files.json_documents import LARGEST_LIST, parse_json
from slipway.files.regular_file import read_regular
from slipway.model.tokens.tekken import TOKENIZER

_LEAST = 1000
"""Tokens of a codec have so many numbers at least: its smallest table that is in use has 1,024."""


@dataclass(frozen=True, slots=True)
class SoundCodec:
    """A codec whose tokens models write.

    Attributes:
        name: Its name.
        rate: Samples per second of the sound that it makes.
        repository: Where its weights are.
        models: Models that write its tokens.
        begin: What the text of a token begins with, before its number.
        end: What follows the number.
        mark: Another token of such a tokenizer, where the tokens alone do not tell; empty where they do.
    """

    name: str
    rate: int
    repository: str
    models: str
    begin: str
    end: str
    mark: str = ""

    @property
    def pattern(self) -> str:
        """Regular expression of a token, with its number as the group."""
        return rf"{re.escape(self.begin)}(\d+){re.escape(self.end)}"

    @property
    def said(self) -> str:
        """What a reader must know, as a sentence."""
        return (
            f"answers are tokens of the codec {self.name} ({self.rate // 1000} kHz, {self.repository}), which makes sound of them "
            "and is not part of the model"
        )

    @property
    def facts(self) -> Mapping[str, Any]:
        """The same as data."""
        return {"codec": self.name, "sample_rate": self.rate, "repository": self.repository}


SOUND_CODECS: tuple[SoundCodec, ...] = (
    # canopyai/Orpheus-TTS: pretrain/train.py adds the tokens, orpheus_tts_pypi/orpheus_tts/decoder.py reads them.
    SoundCodec("SNAC", 24_000, "hubertsiuzdak/snac_24khz", "Orpheus and others trained like it", "<custom_token_", ">"),
    # SparkAudio/Spark-TTS: cli/SparkTTS.py; the tokens bicodec_global say who speaks.
    SoundCodec("BiCodec", 16_000, "SparkAudio/Spark-TTS-0.5B", "Spark-TTS", "<|bicodec_semantic_", "|>"),
    # The model card of HKUSTAudio/Llasa-3B. CosyVoice 2 has tokens of the same form for a codec of its own, and not the mark.
    SoundCodec("XCodec2", 16_000, "HKUSTAudio/xcodec2", "Llasa", "<|s_", "|>", "<|SPEECH_GENERATION_START|>"),
    # neuphonic/neutts-air: neuttsair/neutts.py; the codec reads 16 kHz and writes 24 kHz.
    SoundCodec("NeuCodec", 24_000, "neuphonic/neucodec", "NeuTTS", "<|speech_", "|>", "<|SPEECH_GENERATION_START|>"),
    # edwko/OuteTTS: outetts/version/v3; two tables, c1 and c2.
    SoundCodec("DAC", 24_000, "ibm-research/DAC.speech.v1.0", "OuteTTS 1.0", "<|c1_", "|>", "<|c2_0|>"),
)
"""Codecs by the tokens that models write for them, with the sources of each."""


def sound_codec(folder: Path) -> SoundCodec | None:
    """Return the codec whose tokens a folder's tokenizer has; None for a tokenizer of text, or one that cannot be read."""
    try:
        data = read_regular(folder / TOKENIZER, largest=LARGEST_LIST)
        likely = [codec for codec in SOUND_CODECS if data.count(codec.begin.encode()) >= _LEAST]
        texts = _added_texts(parse_json(data, most_values=LARGEST_LIST // 16, lenient=True)) if likely else set()
    except (OSError, ValueError):
        return None
    return next((codec for codec in likely if _has(texts, codec)), None)


def _has(texts: set[str], codec: SoundCodec) -> bool:
    count = sum(re.fullmatch(codec.pattern, text) is not None for text in texts)
    return count >= _LEAST and (not codec.mark or codec.mark in texts)


def _added_texts(document: Any) -> set[str]:
    """Return the texts of a tokenizer's added tokens, and those of its vocabulary, into which some tokenizers put them."""
    added = document.get("added_tokens") if isinstance(document, dict) else None
    model = document.get("model") if isinstance(document, dict) else None
    known = model.get("vocab") if isinstance(model, dict) else None
    texts = {each.get("content") for each in (added if isinstance(added, list) else []) if isinstance(each, dict)}
    return {text for text in (*texts, *(known if isinstance(known, dict) else ())) if isinstance(text, str)}
