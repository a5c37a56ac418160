"""Make the samples of a validation: windows of held-out text, and the other inputs that a family needs.

The model's own tokenizer cuts text into windows of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipway.documents.heldout import read_written, render
from slipway.model.configuration import NO_FIRST_TOKEN, first_token
from slipway.model.families import DECODER, SEQUENCE_CLASSIFIER, Comparison
from slipway.model.folder import ModelFolder
from slipway.model.model_files import has_chat_template
from slipway.proof.numerics import Ints
from slipway.proof.runtime import Samples, Unusable
from slipway.texts import counted
from slipway_validate.cases import MIN_LENGTH, find_family
from slipway_validate.protocol.messages import TokenizeSpec

MASKED_SHARE = 0.15
"""Share of masked tokens, as in the training of these models (BERT, arXiv 1810.04805)."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "spiece.model")
DECODER_VOCABULARIES = ("decoder_vocab_size", "tgt_vocab_size")


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder.

    Raises:
        Unusable: It has none that transformers can load.
    """
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise Unusable(f"transformers cannot load the tokenizer in {folder.name!r}: {error}") from error


def trained_tokenizer(folder: Path, base: Path) -> Any:
    """Load the tokenizer of a training. If it has no chat template, it gets the base's, as in the merged model.

    Raises:
        Unusable: As :func:`load_tokenizer`.
    """
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template and base != folder and has_chat_template(base):
        tokenizer.chat_template = load_tokenizer(base).chat_template
    return tokenizer


def cut_windows(tokenizer: Any, text: str, *, spec: TokenizeSpec) -> Ints:
    """Cut windows (N, T) that do not overlap, spread over the whole text by the seed, in text order.

    If a decoder's tokenizer starts a text with a begin-of-text token, every window starts with it; for other families every
    window has the tokens that the tokenizer puts around a text.

    Raises:
        Unusable: The text is too short for one window of MIN_LENGTH tokens.
    """
    ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
    before, behind = _start_tokens(tokenizer) if spec.family == DECODER.name else tokens_around(tokenizer)
    around = len(before) + len(behind)
    body = min(spec.length - around, len(ids))
    if body + around < MIN_LENGTH or body < 1:
        raise Unusable(f"the held-out text has {counted(len(ids), 'token')}, and at least {MIN_LENGTH} are needed")
    slots = len(ids) // body
    chosen = np.sort(np.random.default_rng(spec.seed).permutation(slots)[: spec.windows])
    return np.stack([np.concatenate([before, ids[slot * body : (slot + 1) * body], behind]) for slot in chosen])


def tokens_around(tokenizer: Any) -> tuple[Ints, Ints]:
    """Return the tokens that a tokenizer puts before and after a text."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    starts = range(len(whole) - len(plain) + 1)
    start = next((at for at in starts if plain and whole[at : at + len(plain)] == plain), None)
    if start is None:
        return _tokens([]), _tokens([])
    return _tokens(whole[:start]), _tokens(whole[start + len(plain) :])


def _start_tokens(tokenizer: Any) -> tuple[Ints, Ints]:
    bos = tokenizer.bos_token_id
    with_special = tokenizer("a")["input_ids"]
    starts = bos is not None and with_special and with_special[0] == bos
    return _tokens([bos] if starts else []), _tokens([])


def _tokens(ids: list[int]) -> Ints:
    return np.array(ids, dtype=np.int64)


def make_samples(spec: TokenizeSpec, model: ModelFolder) -> tuple[Samples, str]:
    """Make the samples of a family; return them with a description of inputs that replace text.

    Raises:
        Unusable: There is no tokenizer or feature extractor, or too little text.
    """
    family = find_family(spec.family)
    if family.takes_sound:
        return _speech(spec, model)
    tokenizer = trained_tokenizer(spec.tokenizer, spec.model)
    windows = cut_windows(tokenizer, render(read_written(spec.text), tokenizer), spec=spec)
    if family == SEQUENCE_CLASSIFIER:
        windows = _end_windows(windows, model.config)
    if family.comparison is Comparison.TEACHER_FORCED:
        return _teacher_forced(windows, model), ""
    make = _MAKERS.get(family.comparison, _plain)
    return make(tokenizer, windows, spec), ""


def _end_windows(windows: Ints, settings: Mapping[str, Any]) -> Ints:
    """End the windows with the end-of-text token if the model is an encoder–decoder, which reads its classes there."""
    end = settings.get("eos_token_id")
    if settings.get("is_encoder_decoder") and isinstance(end, int):
        windows = windows.copy()
        windows[:, -1] = end
    return windows


def _plain(tokenizer: Any, windows: Ints, spec: TokenizeSpec) -> Samples:  # noqa: ARG001 - as the other makers
    return Samples(windows)


def _next_tokens(tokenizer: Any, windows: Ints, spec: TokenizeSpec) -> Samples:  # noqa: ARG001 - as the other makers
    """Make samples in which each token predicts the next; the last one has no label."""
    return Samples(windows, labels=windows[:, 1:])


def mask_tokens(tokenizer: Any, windows: Ints, spec: TokenizeSpec) -> Samples:
    """Mask random tokens of each window by the seed, but not those that the tokenizer puts around a text."""
    before, behind = tokens_around(tokenizer)
    columns = np.arange(len(before), windows.shape[1] - len(behind))
    count, draw = max(1, round(MASKED_SHARE * len(columns))), np.random.default_rng(spec.seed)
    positions = np.stack([np.sort(draw.permutation(columns)[:count]) for _ in windows])
    labels = np.take_along_axis(windows, positions, axis=1)
    masked = windows.copy()
    if tokenizer.mask_token_id is not None:
        np.put_along_axis(masked, positions, tokenizer.mask_token_id, axis=1)
    return Samples(masked, positions=positions, labels=labels)


def _teacher_forced(windows: Ints, model: ModelFolder) -> Samples:
    """Make samples in which the encoder reads a window and the decoder gets the same window as labels.

    If the decoder has its own smaller vocabulary, token ids are reduced to it.
    """
    sizes = (model.config.get(name) for name in DECODER_VOCABULARIES)
    size = next((size for size in sizes if isinstance(size, int) and size > 0), None)
    labels = windows if size is None else windows % size
    return Samples(decoder_inputs(labels, model), source=windows, labels=labels)


_MAKERS: Mapping[Comparison, Callable[[Any, Ints, TokenizeSpec], Samples]] = {
    Comparison.NEXT_TOKEN: _next_tokens,
    Comparison.MASKED_TOKENS: mask_tokens,
}


def _speech(spec: TokenizeSpec, model: ModelFolder) -> tuple[Samples, str]:
    """Make random sound by the seed, and labels from the text; without a tokenizer, random tokens by the seed."""
    from slipway_validate.runner.sampling.audio import make_features

    said = "the sound is random and contains no speech"
    if any((spec.tokenizer / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = trained_tokenizer(spec.tokenizer, spec.model)
        labels = cut_windows(tokenizer, render(read_written(spec.text), tokenizer), spec=spec)
    else:
        labels, said = _random_labels(spec, model), f"{said}; there is no tokenizer, so labels are random tokens"
    source = make_features(spec.model, count=len(labels), seed=spec.seed)
    return Samples(decoder_inputs(labels, model), source=source, labels=labels), said


def _random_labels(spec: TokenizeSpec, model: ModelFolder) -> Ints:
    vocabulary = model.config.get("vocab_size")
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise Unusable(f"config.json has vocab_size {vocabulary!r}, so random label tokens cannot be made")
    return np.random.default_rng(spec.seed).integers(0, vocabulary, size=(spec.windows, spec.length))


def decoder_inputs(labels: Ints, model: ModelFolder) -> Ints:
    """Return the decoder's teacher-forced input: the start token, then every label but the last."""
    inputs = np.roll(labels, 1, axis=1)
    inputs[:, 0] = opening_token(model)
    return inputs


def opening_token(model: ModelFolder) -> int:
    """Return the decoder's first token.

    Raises:
        Unusable: The configuration names none.
    """
    start = first_token(model.generation_settings())
    if start is None:
        raise Unusable(NO_FIRST_TOKEN)
    return start
