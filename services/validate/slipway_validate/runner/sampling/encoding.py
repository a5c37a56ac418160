"""Encode the user's test inputs: texts by the model's own tokenizer, sounds by its feature extractor.

A speech model gets the features of each sound, and the first tokens of its decoder. Sound files are WAV of whole numbers, at the rate and
of at most the length that the model takes.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from slipway.errors import ArtifactError
from slipway.files.json_documents import LARGEST_LIST, read_json
from slipway.files.paths import real_file
from slipway.files.regular_file import read_regular
from slipway.model.chat_templates import ChatTemplates
from slipway.model.families import (
    DECODER,
    ENCODER_DECODER,
    FEATURE_EXTRACTION,
    QUESTION_ANSWERING,
    RAW_SPEECH,
    SEQUENCE_CLASSIFIER,
    SPEECH,
    TOKEN_CLASSIFIER,
    Family,
)
from slipway.model.folder import ModelFolder
from slipway.proof.runtime import UnusableInput
from slipway.texts import quoted
from slipway.validation.inputs import LARGEST_SOUND
from slipway_validate.cases import find_family, longest_text
from slipway_validate.protocol.inputs import SOUNDS_FILE, EncodedInput, EncodedInputs
from slipway_validate.protocol.messages import TokenizeSpec
from slipway_validate.runner.sampling.audio import SoundFeatures
from slipway_validate.runner.sampling.making import opening_token

Encode = Callable[[Any, Mapping[str, Any], int], EncodedInput]
"""Function from a tokenizer, a record and the most tokens that the model takes to the encoded input."""

_CODE_TABLES = "lang_to_id", "task_to_id"

MOST_CHANNELS = 8
_CONVERT = "convert it: ffmpeg -i FILE -ac 1 -ar {rate} -c:a pcm_s16le NEW.wav"


def encode_inputs(tokenizer: Any, spec: TokenizeSpec, model: ModelFolder) -> EncodedInputs:
    """Encode the records of a specification.

    Raises:
        UnusableInput: One of them is too long, or needs something of the tokenizer that it lacks.
    """
    assert spec.records is not None
    records = read_json(spec.records, largest=LARGEST_LIST)
    family = find_family(spec.family)
    if family.takes_sound:
        write_sounds(records, spec)
    return encode_records(tokenizer, records, family, model)


def encode_records(
    tokenizer: Any, records: Sequence[Mapping[str, Any]], family: Family, model: ModelFolder, *, called: str = ""
) -> EncodedInputs:
    """Encode records.

    Args:
        tokenizer: The model's tokenizer.
        records: The records, as :mod:`slipway_validate.answers.records` describes them.
        family: The model's family.
        model: The model.
        called: What a single record is called in messages; empty for test inputs.

    Raises:
        UnusableInput: As :func:`encode_inputs`.
    """
    settings, longest = model.generation_settings(), longest_text(model.config, family)
    inputs = []
    with ChatTemplates() as templates:
        encoders: Mapping[str, Encode] = {
            **_ENCODERS,
            DECODER.name: partial(_prompt, templates=templates),
            **dict.fromkeys((SPEECH.name, RAW_SPEECH.name), partial(encode_opening, model=model, settings=settings)),
        }
        encode = encoders[family.name]
        for number, record in enumerate(records, 1):
            name = called or f"test input {number}"
            inputs.append(_encode_record(encode, tokenizer, record, longest, name=name, family=family))
    stops = _ids(settings.get("eos_token_id"))
    if family.takes_sound:
        never, first = (_ids(settings.get(name)) for name in ("suppress_tokens", "begin_suppress_tokens"))
        return EncodedInputs(inputs=tuple(inputs), stops=stops, banned=never, banned_first=first)
    if family != ENCODER_DECODER:
        return EncodedInputs(inputs=tuple(inputs), stops=stops)
    forced = _ids(settings.get("forced_bos_token_id"))
    return EncodedInputs(
        inputs=tuple(inputs),
        stops=stops,
        start=(opening_token(model), *forced[:1]),
        banned=tuple(token for token in _ids(settings.get("pad_token_id")) if token not in stops),
    )


def _encode_record(
    encode: Encode, tokenizer: Any, record: Mapping[str, Any], longest: int, *, name: str, family: Family
) -> EncodedInput:
    try:
        encoded = encode(tokenizer, record, longest)
    except Exception as error:  # a tokenizer's code may raise anything
        raise UnusableInput(f"{name} cannot be encoded: {error}") from error
    if family != ENCODER_DECODER and len(encoded.ids) + encoded.most > longest:
        raise UnusableInput(
            f"{name} has {len(encoded.ids)} tokens and up to {encoded.most} of its answer, the model takes {longest}"
        )
    return encoded


def _prompt(
    tokenizer: Any,
    record: Mapping[str, Any],
    longest: int,  # noqa: ARG001 - as the others
    *,
    templates: ChatTemplates,
) -> EncodedInput:
    prompt = record["prompt"]
    if isinstance(prompt, str) and not (record["chat"] and getattr(tokenizer, "chat_template", None)):
        ids = tokenizer(prompt)["input_ids"]
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = templates.text(tokenizer, messages, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return EncodedInput(ids=tuple(ids), most=record["max_new_tokens"])


def _source(tokenizer: Any, record: Mapping[str, Any], longest: int) -> EncodedInput:
    ids = tokenizer(record["source"], truncation=True, max_length=longest)["input_ids"]
    # The decoder counts its own positions, so the answer may be as long as the source.
    return EncodedInput(ids=tuple(ids), most=min(record["max_new_tokens"], longest - 1))


def _text(tokenizer: Any, record: Mapping[str, Any], longest: int) -> EncodedInput:
    return EncodedInput(ids=_plain_ids(tokenizer(record["text"], **_cut(longest))))


def _words(tokenizer: Any, record: Mapping[str, Any], longest: int) -> EncodedInput:
    """Encode words; a word's label is that of its first token."""
    encoded = tokenizer(list(record["tokens"]), is_split_into_words=True, **_cut(longest))
    words = encoded.word_ids()
    first = [words.index(number) if number in words else -1 for number in range(len(record["tokens"]))]
    return EncodedInput(ids=_plain_ids(encoded), keep=tuple(first))


def _question(tokenizer: Any, record: Mapping[str, Any], longest: int) -> EncodedInput:
    """Encode question and context; an answer is between tokens of the context."""
    cut = _cut(longest) | {"truncation": "only_second"}
    encoded = tokenizer(record["question"], record["context"], return_offsets_mapping=True, **cut)
    keep = [place for place, part in enumerate(encoded.sequence_ids()) if part == 1]
    offsets = tuple(tuple(encoded["offset_mapping"][place]) for place in keep)
    return EncodedInput(ids=_plain_ids(encoded), keep=tuple(keep), offsets=offsets)


def _pair(tokenizer: Any, record: Mapping[str, Any], longest: int) -> EncodedInput:
    first, second = (_plain_ids(tokenizer(record[name], **_cut(longest))) for name in ("sentence1", "sentence2"))
    return EncodedInput(ids=first, second=second)


_ENCODERS: Mapping[str, Encode] = {
    ENCODER_DECODER.name: _source,
    SEQUENCE_CLASSIFIER.name: _text,
    TOKEN_CLASSIFIER.name: _words,
    QUESTION_ANSWERING.name: _question,
    FEATURE_EXTRACTION.name: _pair,
}


def _cut(longest: int) -> dict[str, Any]:
    return {"truncation": True, "max_length": longest} if longest < 1 << 30 else {}


def _plain_ids(encoded: Any) -> tuple[int, ...]:
    """Return the ids; refuse token types, which outputs do not take."""
    if any(encoded.get("token_type_ids", ())):
        raise ValueError("its tokenizer gives two texts different token types, which outputs do not take")
    return tuple(encoded["input_ids"])


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(token for token in values if isinstance(token, int) and not isinstance(token, bool))


def write_sounds(records: Sequence[Mapping[str, Any]], spec: TokenizeSpec) -> None:
    """Write the features of each record's sound, one after the other; of a model that takes samples, these, with NaN behind the end.

    Raises:
        UnusableInput: A sound cannot be used.
    """
    extractor, output = SoundFeatures(spec.model), None
    for number, record in enumerate(records):
        features = extractor.features([_sound_of(record, number, extractor, spec)])[0]
        if output is None:
            samples = features.ndim == 1
            longest = (
                max(len(_sound_of(each, place, extractor, spec)) for place, each in enumerate(records))
                if samples
                else 0
            )
            shape = (len(records), *((longest,) if samples else features.shape))
            output = open_memmap(spec.samples / SOUNDS_FILE, mode="w+", dtype=np.float32, shape=shape)
            output[:] = np.nan
        if features.shape != output.shape[1:] and not (features.ndim == 1 and len(features) <= output.shape[1]):
            raise UnusableInput(
                f"test input {number + 1} has features of the shape {features.shape}, the first {output.shape[1:]}: "
                "give sounds of one length"
            )
        output[number, : len(features)] = features
    if output is not None:
        output.flush()


def _sound_of(
    record: Mapping[str, Any], number: int, extractor: SoundFeatures, spec: TokenizeSpec
) -> npt.NDArray[np.float32]:
    """Return the sound of a record, whose number counts from 0."""
    assert spec.sounds is not None
    bounds = {"longest": extractor.longest, "shortest": extractor.shortest}
    try:
        return read_sound(real_file(spec.sounds, record["audio"]), rate=extractor.rate, **bounds)
    except (UnusableSoundError, ArtifactError, OSError) as error:
        raise UnusableInput(f"test input {number + 1}: the sound {quoted(record['audio'])}: {error}") from error


def encode_opening(
    tokenizer: Any, record: Mapping[str, Any], longest: int, *, model: ModelFolder, settings: Mapping[str, Any]
) -> EncodedInput:
    """Return the decoder's first tokens as the model was trained with them, and the length of the answer.

    They come from the record's language; otherwise from the tokenizer, which a training saves with its language, or from the settings of
    generation.

    Raises:
        ValueError: The model lacks the language, or knows several and no file says which.
    """
    first, language = opening_token(model), record["language"]
    languages, tasks = (settings[name] if isinstance(settings.get(name), dict) else {} for name in _CODE_TABLES)
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


def read_sound(path: Path, *, rate: int, longest: int, shortest: int = 1) -> npt.NDArray[np.float32]:
    """Return the samples of a file as one channel within -1 and 1: the mean of its channels.

    Args:
        path: The file.
        rate: Samples per second that the model takes; a file of another rate is refused.
        longest: Most samples.
        shortest: Fewest samples.

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
            if 0 < count < shortest:
                said = f"{count} samples ({count / rate:.3f} s), the model takes at least {shortest}"
                raise UnusableSoundError(f"it has {said}; give a longer sound, or one with silence behind it")
            if not 0 < count <= longest:
                said = f"{count / rate:.1f} s, the model takes at most {longest / rate:.0f} s"
                raise UnusableSoundError(f"it has {said}; cut it into parts of whole sentences")
            data = file.readframes(count)
    except (OSError, EOFError, ValueError, wave.Error) as error:
        raise UnusableSoundError(f"it cannot be read as WAV: {str(error) or 'it ends early'}; {convert}") from error
    if len(data) != count * channels * width:
        raise UnusableSoundError(f"its header has {count} frames and the file ends before; {convert}")
    return _fractions(data, width).reshape(count, channels).mean(axis=1, dtype=np.float64).astype(np.float32)


def _fractions(data: bytes, width: int) -> npt.NDArray[np.float64]:
    """Return integers of ``width`` bytes as fractions of the largest; those of one byte are unsigned."""
    if width == 1:
        return (np.frombuffer(data, dtype=np.uint8).astype(np.float64) - 128) / 128
    wide = np.zeros((len(data) // width, 4), dtype=np.uint8)
    wide[:, 4 - width :] = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
    return wide.view("<i4")[:, 0].astype(np.float64) / (1 << 31)
