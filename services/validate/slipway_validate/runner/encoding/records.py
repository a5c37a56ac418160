"""Encode the user's test inputs with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from slipway.files.json_documents import LARGEST_LIST, read_json
from slipway.model.chat_templates import ChatTemplates
from slipway.model.configuration import ModelConfig
from slipway.model.families import (
    DECODER,
    ENCODER_DECODER,
    FEATURE_EXTRACTION,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFIER,
    SPEECH,
    TOKEN_CLASSIFIER,
    Family,
)
from slipway.model.generation import generation_settings
from slipway.proof.runtime import UnusableInput
from slipway_validate.cases import find_family, longest_text
from slipway_validate.protocol.messages import EncodedInput, EncodedInputs, TokenizeSpec
from slipway_validate.runner.encoding.sounds import encode_opening, write_sounds
from slipway_validate.runner.sampling.making import opening_token

Encode = Callable[[Any, Mapping[str, Any], int], EncodedInput]
"""Function from a tokenizer, a record and the most tokens that the model takes to the encoded input."""


def encode_inputs(tokenizer: Any, spec: TokenizeSpec) -> EncodedInputs:
    """Encode the records of a specification.

    Raises:
        UnusableInput: One of them is too long, or needs something of the tokenizer that it lacks.
    """
    assert spec.records is not None
    records = read_json(spec.records, largest=LARGEST_LIST)
    family, settings = find_family(spec.family), generation_settings(spec.model)
    longest = longest_text(ModelConfig.read(spec.model), family)
    if family == SPEECH:
        write_sounds(records, spec)
    inputs = []
    with ChatTemplates() as templates:
        encoders: Mapping[str, Encode] = {
            **_ENCODERS,
            DECODER.name: partial(_prompt, templates=templates),
            SPEECH.name: partial(encode_opening, model=spec.model, settings=settings),
        }
        encode = encoders[family.name]
        for number, record in enumerate(records, 1):
            inputs.append(_encode_record(encode, tokenizer, record, longest, number=number, family=family))
    stops = _ids(settings.get("eos_token_id"))
    if family == SPEECH:
        never, first = (_ids(settings.get(name)) for name in ("suppress_tokens", "begin_suppress_tokens"))
        return EncodedInputs(inputs=tuple(inputs), stops=stops, banned=never, banned_first=first)
    if family != ENCODER_DECODER:
        return EncodedInputs(inputs=tuple(inputs), stops=stops)
    forced = _ids(settings.get("forced_bos_token_id"))
    return EncodedInputs(
        inputs=tuple(inputs),
        stops=stops,
        start=(opening_token(spec.model), *forced[:1]),
        banned=tuple(token for token in _ids(settings.get("pad_token_id")) if token not in stops),
    )


def _encode_record(
    encode: Encode, tokenizer: Any, record: Mapping[str, Any], longest: int, *, number: int, family: Family
) -> EncodedInput:
    try:
        encoded = encode(tokenizer, record, longest)
    except Exception as error:  # a tokenizer's code may raise anything
        raise UnusableInput(f"test input {number} cannot be encoded: {error}") from error
    if family != ENCODER_DECODER and len(encoded.ids) + encoded.most > longest:
        raise UnusableInput(
            f"test input {number} has {len(encoded.ids)} tokens and up to {encoded.most} of its answer, the model takes {longest}"
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
