"""Turn a tokenizer's files into keys of a GGUF file, so that llama.cpp splits text into the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from gguf import GGUFValueType as Kind

from slipway.texts import quoted
from slipway.validation.texts import TextKind
from slipway_gguf.metadata import BETWEEN, DIFFERS, Field
from slipway_gguf.vocabulary.around import around_decoded, around_of
from slipway_gguf.vocabulary.documents import (
    BYTES_OR_SPACES,
    DEFAULT,
    UNIGRAMS,
    WORD_PIECES,
    TokenizerFiles,
    read_files,
    templates_of,
    unsupported_error,
)
from slipway_gguf.vocabulary.rendering import pair_template
from slipway_gguf.vocabulary.splitting import splitting_of
from slipway_gguf.vocabulary.tokens import (
    TokenList,
    list_tokens,
    merge_texts,
    pairs_of,
    scores_of,
    spaces_of,
    special_token_ids,
)
from slipway_gguf.vocabulary.unigrams import list_unigrams, unigram_fields
from slipway_gguf.vocabulary.word_pieces import list_pieces, word_fields

_PREFIX = "tokenizer.ggml"
_PAIR = "rerank"
"""Name of the template of a pair in llama.cpp's server."""
_OWN_ENDS = "use another format for this model, or give its tokenizer one token at either end, which bos_token and eos_token name"


def _ignore(_: str) -> None:
    pass


def read(
    model: Path, *, rows: int, reads: bool = False, scores: bool = False, warn: Callable[[str], None] = _ignore
) -> tuple[Field, ...]:
    """Return the keys of a model's tokenizer and chat templates.

    Args:
        model: Folder of the model.
        rows: Rows of its embedding.
        reads: Whether the model reads whole texts: then the tokens around a text are those of the tokenizer, whatever they mean to others.
        scores: Whether the model makes a score of two texts, whose prompt is a template too.
        warn: Called with a sentence about tokens around a text that llama.cpp does not put there, if the model has a chat template.
            transformers adds none of them to the template's prompts.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: llama.cpp has no code for such a tokenizer, its files cannot be used, or llama.cpp
            cannot put the tokens around a text that a model without a chat template has there.
    """
    files = read_files(model)
    templates = templates_of(files)
    pair = pair_template(templates.get(DEFAULT, "")) if scores else ""
    numbers = special_token_ids(files, rows=rows, template=templates.get(DEFAULT, ""))
    around, lost = (around_of(files), "") if reads else around_decoded(files, numbers)
    if lost and DEFAULT not in templates:
        raise unsupported_error(lost, _OWN_ENDS)
    if lost:
        warn(f"llama.cpp reads text without the chat template otherwise than the tokenizer: {lost}")
    numbers = around.numbers(numbers, pairs=reads)
    strips = [TextKind.SPECIAL_SPACES] if any(each.strips for each in files.added.values()) else []
    tokens, own, known = _KINDS[files.kind](files, rows)
    differs = BETWEEN.join(dict.fromkeys(each.value for each in (*strips, *known)))
    return (
        *own,
        _array("tokens", tokens.texts, Kind.STRING),
        _array("token_type", tuple(map(int, tokens.types)), Kind.INT32),
        *(Field(f"{_PREFIX}.{name}_token_id", number, Kind.UINT32) for name, number in numbers.items()),
        Field(f"{_PREFIX}.add_bos_token", around.begin is not None, Kind.BOOL),
        Field(f"{_PREFIX}.add_eos_token", around.end is not None, Kind.BOOL),
        *((Field(f"{_PREFIX}.add_sep_token", around.doubled, Kind.BOOL),) if reads else ()),
        *_templates({**templates, **({_PAIR: pair} if pair else {})}),
        *((Field(DIFFERS, differs, Kind.STRING),) if differs else ()),
    )


Listed = tuple[TokenList, tuple[Field, ...], tuple[TextKind, ...]]
"""Tokens, keys of their kind, and kinds of text that llama.cpp is known to split otherwise."""


def _pairs(files: TokenizerFiles, rows: int) -> Listed:
    """Return the tokens of a vocabulary of merges, of bytes or with spaces as characters."""
    spaces = spaces_of(files.tokenizer)
    tokens, pairs = list_tokens(files, rows=rows, spaces=spaces is not None), pairs_of(files)
    if spaces is not None:
        fields = (
            _text("model", "llama"),
            _text("pre", "default"),
            _array("scores", scores_of(pairs, tokens), Kind.FLOAT32),
            Field(f"{_PREFIX}.add_space_prefix", spaces.prefix, Kind.BOOL),
        )
        return tokens, fields, spaces.differs
    pre, approximate = splitting_of(files.tokenizer.get("pre_tokenizer"), whole=bool(files.model.get("ignore_merges")))
    known = (*approximate, *([TextKind.DECOMPOSED] if _composes(files) else []))
    merges = _array("merges", tuple(merge_texts(pairs)), Kind.STRING)
    return tokens, (_text("model", "gpt2"), _text("pre", pre), merges), known


def _pieces(files: TokenizerFiles, rows: int) -> Listed:
    fields, known = word_fields(files)
    return list_pieces(files, rows=rows), (_text("model", "bert"), _text("pre", "default"), *fields), known


def _unigrams(files: TokenizerFiles, rows: int) -> Listed:
    tokens = list_unigrams(files, rows=rows)
    fields, known = unigram_fields(files, tokens)
    return tokens, (_text("model", "t5"), _text("pre", "default"), *fields), known


_KINDS: Mapping[str, Callable[[TokenizerFiles, int], Listed]] = {
    BYTES_OR_SPACES: _pairs,
    WORD_PIECES: _pieces,
    UNIGRAMS: _unigrams,
}


def _text(name: str, value: str) -> Field:
    return Field(f"{_PREFIX}.{name}", value, Kind.STRING)


def _array(name: str, values: tuple[object, ...], item: Kind) -> Field:
    return Field(f"{_PREFIX}.{name}", values, Kind.ARRAY, item)


def _templates(templates: dict[str, str]) -> tuple[Field, ...]:
    others = sorted(set(templates) - {DEFAULT})
    plain = (Field("tokenizer.chat_template", templates[DEFAULT], Kind.STRING),) if DEFAULT in templates else ()
    named = tuple(Field(f"tokenizer.chat_template.{name}", templates[name], Kind.STRING) for name in others)
    return (
        *plain,
        *((Field("tokenizer.chat_templates", tuple(others), Kind.ARRAY, Kind.STRING),) if others else ()),
        *named,
    )


def _composes(files: TokenizerFiles) -> bool:
    """Return whether the tokenizer first composes text (NFC), which does not change composed text.

    Raises:
        GGUFExportError: ``GGUF_TOKENIZER_UNSUPPORTED``: the tokenizer changes text in another way.
    """
    normalizer = files.tokenizer.get("normalizer")
    kind = normalizer.get("type") if isinstance(normalizer, dict) else normalizer
    steps = normalizer.get("normalizers") if kind == "Sequence" and isinstance(normalizer, dict) else None
    kinds = [each.get("type") for each in steps if isinstance(each, dict)] if isinstance(steps, list) else [kind]
    other = [each for each in kinds if each not in (None, "NFC")]
    if other:
        raise unsupported_error(
            f"it changes text before it splits ({', '.join(map(quoted, other))}), which llama.cpp does not"
        )
    return "NFC" in kinds
