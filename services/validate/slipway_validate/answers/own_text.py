"""Read text like the training's, to judge the adapter itself on: a dataset file beside the run, and the user's test inputs.

Such files have many forms. A row that is not understood is left out, because only this judgement needs it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from slipway.documents.reader import COLUMNS, Purpose, read_rows
from slipway.errors import ModelExportError
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, ENCODER_DECODER, SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER, Comparison, Family
from slipway.validation.inputs import OWN_TEXT
from slipway_validate.answers.records import LabelledText, LabelledTokens, Prompted, Record, Translated

MOST_TEXTS = 12
MOST_LABELLED = 60
"""More than of other texts: labelled examples are short, and a share needs more of them than a mean."""
_MOST_ROWS = 20_000
_PIECE = 2000
"""Characters of a piece of a long text."""
_PAIRS = (
    ("source", "target"),
    ("input", "output"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("question", "answer"),
)
_READ = (Comparison.NEXT_TOKEN, Comparison.MASKED_TOKENS, Comparison.TEACHER_FORCED, Comparison.CLASSES)
_LABELS = ("label", "labels", "target")
_TAGS = ("labels", "ner_tags", "tags", "pos_tags")
_COLUMNS = (
    *COLUMNS, *_LABELS, *_TAGS, *(name for pair in _PAIRS for name in pair),
    "conversations", "translation", "sentence", "tokens",
)  # fmt: skip
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Row = dict[str, Any]
"""A text, messages, a source with its target, or tokens with numbers of labels, as :mod:`slipway_validate.runner.own_text` takes them."""


def write_own_text(
    inputs: Mapping[str, Path],
    records: Sequence[Record],
    model: ModelConfig,
    family: Family,
    file: Path,
    *,
    seed: int,
    warn: Callable[[str], None],
) -> None:
    """Write the texts to judge the adapter on, by their origin; write no file if there are none.

    Args:
        inputs: Inputs of the stage.
        records: The user's test inputs.
        model: The model's configuration.
        family: Its family.
        file: The file to write.
        seed: Chooses among many texts.
        warn: Called with a warning about a file that cannot be read.
    """
    if "adapter" not in inputs:
        return
    labels = _label_numbers(model)
    texts: dict[str, list[Row]] = {}
    for path in sorted(inputs[OWN_TEXT].iterdir()) if OWN_TEXT in inputs else ():
        try:
            rows = (_row(each, family, labels) for each in _documents(path))
            texts[f"text beside the run ({path.name})"] = _draw(rows, family, seed=seed)
        except (OSError, ValueError, ModelExportError) as error:
            warn(f"{path.name} beside the run was not used to judge the adapter: {error}")
    texts["your test inputs"] = _draw((_record_row(each, labels) for each in records), family, seed=seed)
    if any(texts.values()):
        file.write_text(json.dumps({name: rows for name, rows in texts.items() if rows}), encoding="utf-8")


def _draw(rows: Iterable[Row | None], family: Family, *, seed: int) -> list[Row]:
    """Choose some of the rows by the seed; equal ones count once."""
    known = {json.dumps(row): row for row in rows if row}
    kept = list(known.values())
    most = MOST_LABELLED if family.comparison is Comparison.CLASSES else MOST_TEXTS
    return [kept[place] for place in np.random.default_rng(seed).permutation(len(kept))[:most]]


def _documents(path: Path) -> Iterator[Any]:
    """Yield the documents of a file: rows of a dataset, or pieces of a plain text."""
    with closing(read_rows(path, path.name, Purpose.OWN_TEXT, columns=_COLUMNS)) as rows:
        for row, _ in itertools.islice(rows, _MOST_ROWS):
            labelled = isinstance(row, dict) and any(name in row for name in _LABELS)
            text = row.get("text") if isinstance(row, dict) else row
            if isinstance(text, str) and len(text) > _PIECE and not labelled:
                end = min(len(text), _MOST_ROWS * _PIECE)
                yield from (text[start : start + _PIECE] for start in range(0, end, _PIECE))
            else:
                yield row


def _row(row: Any, family: Family, labels: Mapping[str, int]) -> Row | None:
    """Return a row as the family is trained on it; None for one that is not understood."""
    if isinstance(row, str):
        return (
            {"text": row}
            if family.comparison in (Comparison.NEXT_TOKEN, Comparison.MASKED_TOKENS) and row.strip()
            else None
        )
    if not isinstance(row, dict) or family.comparison not in _READ:
        return None
    if family == SEQUENCE_CLASSIFIER:
        return _labelled_text(row, labels)
    if family == TOKEN_CLASSIFIER:
        return _labelled_tokens(row, labels)
    if family == ENCODER_DECODER:
        return _translation_row(row)
    return _text(row, chats=family == DECODER)


def _translation_row(row: Mapping[str, Any]) -> Row | None:
    translation = row.get("translation")
    values = list(translation.values()) if isinstance(translation, dict) else []
    pair = values[:2] if len(values) == 2 and all(isinstance(each, str) for each in values) else _pair(row)
    return {"source": pair[0], "target": pair[1]} if pair else None


def _text(row: Mapping[str, Any], *, chats: bool) -> Row | None:
    text, messages = row.get("text"), _messages(row.get("messages") or row.get("conversations"))
    if isinstance(text, str) and text.strip():
        return {"text": text}
    if messages and chats:
        return {"messages": messages}
    pair = _pair(row)
    if pair is None:
        return None
    said = (
        {"messages": [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]} if chats else {}
    )
    return {"text": "\n".join(pair), **said}


def _messages(value: object) -> list[dict[str, str]]:
    """Return messages in the form of a chat template; empty if one of them has an unknown form."""
    messages = []
    for each in value if isinstance(value, list) else ():
        role, content = (
            (each.get("role") or each.get("from"), each.get("content") or each.get("value"))
            if isinstance(each, dict)
            else (None, None)
        )
        if role not in _ROLES or not isinstance(content, str):
            return []
        messages.append({"role": _ROLES[role], "content": content})
    return messages


def _pair(row: Mapping[str, Any]) -> list[str] | None:
    for names in _PAIRS:
        pair = [row.get(name) for name in names]
        if all(isinstance(each, str) and each.strip() for each in pair):
            return [str(each) for each in pair]
    return None


def _labelled_text(row: Mapping[str, Any], labels: Mapping[str, int]) -> Row | None:
    text = next((row[name] for name in ("text", "sentence") if isinstance(row.get(name), str)), None)
    label = next((row[name] for name in _LABELS if name in row), None)
    number = labels.get(str(label))
    return None if text is None or number is None else {"text": text, "labels": [number]}


def _labelled_tokens(row: Mapping[str, Any], labels: Mapping[str, int]) -> Row | None:
    tokens, tags = row.get("tokens"), next((row[name] for name in _TAGS if isinstance(row.get(name), list)), None)
    if not isinstance(tokens, list) or not tokens or tags is None or len(tags) != len(tokens):
        return None
    numbers = [labels.get(str(tag)) for tag in tags]
    if None in numbers or not all(isinstance(token, str) for token in tokens):
        return None
    return {"tokens": tokens, "labels": numbers}


def _record_row(record: Record, labels: Mapping[str, int]) -> Row | None:
    """Return a test input that has an expected answer."""
    match record:
        case Prompted(prompt=prompt, expected=str(expected)):
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            said = {"messages": [*asked, {"role": "assistant", "content": expected}]} if record.chat else {}
            return {"text": f"{record.format_input()}\n{expected}", **said}
        case Translated(target=str(target)):
            return {"source": record.source, "target": target}
        case LabelledText():
            return _labelled_text({"text": record.text, "label": record.label}, labels)
        case LabelledTokens():
            return _labelled_tokens({"tokens": list(record.tokens), "labels": list(record.labels)}, labels)
    return None


def _label_numbers(config: ModelConfig) -> dict[str, int]:
    """Return the number of each label by its name and by its number; none for a score or for several labels of one text."""
    names = config.get("id2label")
    if not isinstance(names, dict) or len(names) < 2 or config.has_several_labels:
        return {}
    numbers = {str(number): int(number) for number in names if str(number).isdigit()}
    return numbers | {str(name): int(number) for number, name in names.items() if str(number).isdigit()}
