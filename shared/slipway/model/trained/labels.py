"""Labels, kind of problem and padding token of a trained head, as far as checkpoint and base tell them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipway.files.json_documents import LARGEST_LIST, read_json_object
from slipway.model.families import SEQUENCE_CLASSIFIER, Family
from slipway.model.model_files import CONFIG

PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def with_labels(
    config: Mapping[str, Any], count: int, family: Family, *, base: Path, adapter: Path
) -> tuple[dict[str, Any], bool]:
    """Return the configuration with labels, kind of problem and padding token, and whether the labels' names are known.

    A ``config.json`` beside the adapter's weights comes first. Without names, labels are called as transformers calls them.

    Args:
        config: Configuration of the trained class.
        count: Number of labels, known from the head.
        family: Its family.
        base: Folder of the base model.
        adapter: Folder of the checkpoint.
    """
    beside = _read(adapter / CONFIG)
    found = {key: value for key, value in config.items() if key not in ("id2label", "label2id", "problem_type")}
    named = next(filter(None, (_names(one, count) for one in (beside, config))), None)
    if family.counts_labels:
        labels = named or [f"LABEL_{number}" for number in range(count)]
        found["id2label"] = {str(number): label for number, label in enumerate(labels)}
        found["label2id"] = {label: number for number, label in enumerate(labels)}
    if family is SEQUENCE_CLASSIFIER:
        problem = beside.get("problem_type")
        found["problem_type"] = problem if problem in PROBLEMS else PROBLEMS[count > 1]
    padding = _padding(beside, config, base=base, adapter=adapter)
    if padding is not None:
        found["pad_token_id"] = padding
    return found, named is not None or not family.counts_labels


def _names(config: Mapping[str, Any], count: int) -> list[str] | None:
    """Return the names of exactly this many labels in a configuration; None if it has no such names."""
    names = config.get("id2label")
    if not isinstance(names, dict) or len(names) != count:
        return None
    found = [name for number in range(count) if isinstance(name := names.get(str(number)), str)]
    return found if len(set(found)) == count else None


def _padding(beside: Mapping[str, Any], config: Mapping[str, Any], *, base: Path, adapter: Path) -> int | None:
    """Return the padding token, by which a decoder with a head finds the last token of a padded text."""
    for one in (beside, config):
        if _is_token(one.get("pad_token_id")):
            return int(one["pad_token_id"])
    return next((token for folder in (adapter, base) if (token := _padding_of_tokenizer(folder)) is not None), None)


def _padding_of_tokenizer(folder: Path) -> int | None:
    token = _read(folder / "tokenizer_config.json").get("pad_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    tokenizer = _read(folder / "tokenizer.json")
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == text and _is_token(entry.get("id")):
            return int(entry["id"])
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    number = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return number if _is_token(number) else None


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, largest=LARGEST_LIST, lenient=True)
    except (OSError, ValueError):  # nothing depends on it
        return {}
