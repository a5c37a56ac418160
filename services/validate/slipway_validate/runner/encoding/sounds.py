"""Read and encode the sounds of a speech model's test inputs: features of each, and the first tokens of the decoder.

Sound files are WAV of whole numbers, at the rate and of at most the length that the model takes.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from slipway.errors import ArtifactError
from slipway.files.links import real_file
from slipway.files.regular_file import read_regular
from slipway.proof.runtime import UnusableInput
from slipway.texts import quoted
from slipway.validation.inputs import LARGEST_SOUND
from slipway_validate.protocol.messages import SOUNDS_FILE, EncodedInput, TokenizeSpec
from slipway_validate.runner.sampling.audio import SoundFeatures
from slipway_validate.runner.sampling.making import opening_token

_LISTS = "lang_to_id", "task_to_id"

MOST_CHANNELS = 8
_CONVERT = "convert it: ffmpeg -i FILE -ac 1 -ar {rate} -c:a pcm_s16le NEW.wav"


def write_sounds(records: Sequence[Mapping[str, Any]], spec: TokenizeSpec) -> None:
    """Write the features of each record's sound, one after the other.

    Raises:
        UnusableInput: A sound cannot be used.
    """
    assert spec.sounds is not None
    extractor, output = SoundFeatures(spec.model), None
    for number, record in enumerate(records):
        try:
            path = real_file(spec.sounds, record["audio"])
            sound = read_sound(path, rate=extractor.rate, longest=extractor.length)
        except (UnusableSoundError, ArtifactError, OSError) as error:
            raise UnusableInput(f"test input {number + 1}: the sound {quoted(record['audio'])}: {error}") from error
        features = extractor.features([sound])[0]
        if output is None:
            shape = (len(records), *features.shape)
            output = open_memmap(spec.samples / SOUNDS_FILE, mode="w+", dtype=np.float32, shape=shape)
        if features.shape != output.shape[1:]:
            raise UnusableInput(
                f"test input {number + 1} has features of the shape {features.shape}, the first {output.shape[1:]}: "
                "give sounds of one length"
            )
        output[number] = features
    if output is not None:
        output.flush()


def encode_opening(
    tokenizer: Any, record: Mapping[str, Any], longest: int, *, model: Path, settings: Mapping[str, Any]
) -> EncodedInput:
    """Return the decoder's first tokens as the model was trained with them, and the length of the answer.

    They come from the record's language; otherwise from the tokenizer, which a training saves with its language, or from the settings of
    generation.

    Raises:
        ValueError: The model lacks the language, or knows several and no file says which.
    """
    first, language = opening_token(model), record["language"]
    languages, tasks = (settings[name] if isinstance(settings.get(name), dict) else {} for name in _LISTS)
    if language is not None:
        chosen = (languages.get(f"<|{language}|>"), tasks.get("transcribe"), settings.get("no_timestamps_token_id"))
        if chosen[0] is None:
            known = ", ".join(str(each).strip("<|>") for each in list(languages)[:20])
            raise ValueError(f"the model has no language {quoted(language)}; it has {known or 'one'}")
    else:
        own = getattr(tokenizer, "prefix_tokens", None) or ()
        forced = settings.get("forced_decoder_ids") or ()
        chosen = tuple(own[1:]) if tuple(own[:1]) == (first,) else tuple(token for _, token in sorted(forced))
        if languages and not set(chosen) & set(languages.values()):
            raise ValueError('the model knows several languages: add "language" to the record, such as "de"')
    ids = (first, *(token for token in chosen if isinstance(token, int)))
    return EncodedInput(ids=ids, most=min(record["max_new_tokens"], longest - len(ids)))


class UnusableSoundError(Exception):
    """A sound file cannot be given to the model; the message says why and what helps."""


def read_sound(path: Path, *, rate: int, longest: int) -> npt.NDArray[np.float32]:
    """Return the samples of a file as one channel within -1 and 1: the mean of its channels.

    Args:
        path: The file.
        rate: Samples per second that the model takes; a file of another rate is refused.
        longest: Most samples.

    Raises:
        UnusableSoundError: It is no such file, or its header does not agree with what it holds.
    """
    convert = _CONVERT.format(rate=rate)
    try:
        with wave.open(io.BytesIO(read_regular(path, largest=LARGEST_SOUND)), "rb") as file:
            channels, width, own_rate, count, *_ = file.getparams()
            if not 0 < channels <= MOST_CHANNELS or not 0 < width <= 4 or own_rate != rate:
                said = f"{channels} channels of {8 * width} bits at {own_rate} Hz"
                raise UnusableSoundError(f"it has {said}, the model takes {rate} Hz; {convert}")
            if not 0 < count <= longest:
                said = f"{count / rate:.1f} s, the model takes at most {longest / rate:.0f} s"
                raise UnusableSoundError(f"it has {said}; cut it into parts of whole sentences")
            data = file.readframes(count)
    except (OSError, EOFError, ValueError, wave.Error) as error:
        raise UnusableSoundError(f"it cannot be read as WAV: {str(error) or 'it ends early'}; {convert}") from error
    if len(data) != count * channels * width:
        raise UnusableSoundError(f"its header has {count} frames and the file ends before; {convert}")
    return _numbers(data, width).reshape(count, channels).mean(axis=1, dtype=np.float64).astype(np.float32)


def _numbers(data: bytes, width: int) -> npt.NDArray[np.float64]:
    """Return integers of ``width`` bytes as fractions of the largest; those of one byte are unsigned."""
    if width == 1:
        return (np.frombuffer(data, dtype=np.uint8).astype(np.float64) - 128) / 128
    wide = np.zeros((len(data) // width, 4), dtype=np.uint8)
    wide[:, 4 - width :] = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
    return wide.view("<i4")[:, 0].astype(np.float64) / (1 << 31)
