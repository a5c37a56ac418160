"""Choose the shapes in which the same inputs are computed again, as long as the model's configuration allows.

These shapes find an attention mask or position ids that the graph ignores, a graph specialised to the batch, sequence or past
of its trace, and a KV cache that is written or read wrongly.

Every row of a decoder's case is a prefix of a window, so its logits must equal those of one plain pass over that window. A
model that reads in both directions gives a prefix other results than the window: so each row is also computed alone, for the
comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipway.model.configuration import ModelConfig
from slipway.model.families import FAMILIES, Comparison, Family
from slipway_validate.protocol.messages import Case, CaseRow

MIN_LENGTH = 8
"""Fewest tokens of a window."""
LENGTH = 32
"""Longest row of a case: long enough to show an off-by-one error, short enough to take almost no time."""
DECODE = "decode"
"""Name of the case that goes through the cache token by token."""
DECODE_STEPS = 6
DEFAULT_VOCABULARY = 1 << 18

LENGTHS = ("max_position_embeddings", "max_target_positions", "n_positions")
"""Settings with the largest number of tokens that a model accepts."""


def find_family(name: str) -> Family:
    """Return the family of this name."""
    return next(family for family in FAMILIES if family.name == name)


def shape_cases(
    family: Family, windows: int, length: int, *, embedding: bool = False, every: bool = True
) -> tuple[Case, ...]:
    """Return the cases for ``windows`` windows of ``length`` tokens (at least MIN_LENGTH).

    With ``embedding``, the vectors that a sentence encoder makes of the padded rows are compared too. Without ``every``, only the cases
    that find most are returned: a padded batch, through the cache if there is one.
    """
    cases = _all_cases(family, windows, length, embedding=embedding)
    if every:
        return cases
    hardest = [case for case in cases if len(case.rows) > 1 and len(case.segments) > 1]
    return tuple(hardest) or tuple(case for case in cases if case.name != "left_padded")


def _all_cases(family: Family, windows: int, length: int, *, embedding: bool) -> tuple[Case, ...]:
    full = min(LENGTH, length)
    steps = min(DECODE_STEPS, full // 4)
    padded = tuple(
        CaseRow(window=index % windows, length=row) for index, row in enumerate((full, steps + 2, full // 2 + 1))
    )
    match family.comparison:
        case Comparison.NEXT_TOKEN:
            return _decoder_cases(padded, full=full, steps=steps)
        case Comparison.TEACHER_FORCED:
            return _encoder_decoder_cases(family, padded, full=full, steps=steps)
    whole = Case(name="right_padded", rows=padded, segments=(full,), padding="right", plain="rows")
    vector = whole.model_copy(update={"name": "sentence_embedding", "plain": "vectors", "embedding": True})
    return (
        whole,
        Case(name="left_padded", rows=padded, segments=(full,), plain="rows"),
        *((vector,) if embedding else ()),
    )


def native_case(family: Family, windows: int, length: int) -> Case:
    """Return the case of one padded batch in the model's own data type instead of float32."""
    padded = shape_cases(family, windows, length)[0]
    return padded.model_copy(update={"name": "native_dtype"})


def _decoder_cases(padded: tuple[CaseRow, ...], *, full: int, steps: int) -> tuple[Case, ...]:
    chunk = max(2, full // 8)
    one = (CaseRow(window=0, length=full),)
    return (
        Case(name="left_padded", rows=padded, segments=(full,)),
        Case(name="single_token", rows=(CaseRow(window=0, length=1),), segments=(1,)),
        Case(name=DECODE, rows=one, segments=(full - steps, *(1,) * steps)),
        Case(name="decode_left_padded", rows=padded, segments=(full - steps, *(1,) * steps)),
        Case(name="chunked", rows=one, segments=(full - 2 * chunk, chunk, chunk)),
    )


def _encoder_decoder_cases(family: Family, padded: tuple[CaseRow, ...], *, full: int, steps: int) -> tuple[Case, ...]:
    """Return an encoder–decoder's cases.

    A row's length is that of its source; all rows have the same number of decoder tokens. Sounds have the same length: a speech model
    gives a padded one other results.
    """
    batch = "right_padded" if "input_ids" in family.inputs else "batch"
    decoded = (full - steps, *(1,) * steps)
    return (
        Case(name=batch, rows=padded, segments=(full,), padding="right", plain="rows"),
        Case(name=DECODE, rows=padded[:1], segments=decoded, padding="right", plain="row"),
        Case(name="single_token", rows=padded[:1], segments=(1,), padding="right", plain="row"),
        Case(name=f"decode_{batch}", rows=padded, segments=decoded, padding="right", plain="rows"),
    )


def longest_text(model: ModelConfig, family: Family) -> int:
    """Return the largest number of tokens that a model takes."""
    config = model.text
    longest = min((size for name in LENGTHS if (size := size_of(config, name))), default=1 << 30)
    counted_from = size_of(config, "pad_token_id") + 1  # RoBERTa and its kin count positions from there
    if family.comparison is not Comparison.NEXT_TOKEN and longest - counted_from >= MIN_LENGTH:
        longest -= counted_from
    return longest


def values_per_token(config: Mapping[str, Any], family: Family) -> int:
    """Return the largest number of values that a model gives for each token."""
    match family.comparison:
        case Comparison.CLASSES:
            labels = config.get("id2label")
            return max(2, len(labels) if isinstance(labels, dict) else 0)
        case Comparison.SPANS:
            return 2
        case Comparison.EMBEDDINGS:
            return size_of(config, "hidden_size") or size_of(config, "d_model") or DEFAULT_VOCABULARY
    return size_of(config, "vocab_size") or DEFAULT_VOCABULARY


def size_of(config: Mapping[str, Any], name: str) -> int:
    """Return a count from a configuration; 0 if the setting is missing or no count."""
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else 0
