"""Tell which class an adapter was trained on, and its labels, if the base lacks the trained head or has one that was not used.

A causal model that is loaded as a sequence classifier gets a new head, and peft saves that head with the adapter. The base's folder
stays as it is, so the class follows from the adapter's ``task_type`` and the base's
``model_type``, and the number of labels from the saved head's shape. A sentence encoder is trained on the base without its language head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.errors import ModelMergeError
from slipway.files.json_documents import read_object_or_empty
from slipway.model.configuration import ModelConfig
from slipway.model.families import (
    DECODER,
    FEATURE_EXTRACTION,
    MASKED_LANGUAGE_MODEL,
    SEQUENCE_CLASSIFIER,
    TRAINED_FAMILIES,
    Family,
    class_name,
)
from slipway.model.folder import ModelFolder
from slipway.model.limits import MOST_PARTS
from slipway.model.model_facts import CannotBuildError, model_facts_of
from slipway.model.model_files import ADAPTER_WEIGHTS, CONFIG, TOKENIZER_SETTINGS
from slipway.model.runs.checkpoints import read_adapter_config
from slipway.model.safetensors_file import TensorInfo, read_safetensors
from slipway.model.sentences import MODULES, is_sentence_encoder

_ENDS_OF_AN_ANSWER = 2
_HEADS = ("classifier.weight", "score.weight", "classifier.out_proj.weight")
_WRAPPERS = re.compile(r"^(?:.+?\.)?base_model\.model\.(?:(?:_orig_mod|module)\.)*")
_SAVED = re.compile(r"\.modules_to_save(?:\.default)?(?=\.)")
_SOURCE = ("auto_map", "num_labels")
"""Settings of the base that say nothing about the trained class."""

PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A class with a head that the base lacks, or without the head that the base has.

    Attributes:
        config: Its ``config.json``.
        name: Name of its class in transformers.
        family: Its family.
        base: Description of the base.
        labels: Number of labels.
        named: Whether the labels' names are known; otherwise they are ``LABEL_0`` and so on.
    """

    config: ModelConfig
    name: str
    family: Family
    base: str
    labels: int
    named: bool

    def __str__(self) -> str:
        if self.family is FEATURE_EXTRACTION:
            return f"{self.name}, as the checkpoint's {MODULES} says; the base is a {self.base}"
        counted = f" with {self.labels} label{'s' if self.labels != 1 else ''}" if self.family.counts_labels else ""
        return f"{self.name}{counted}, whose head is in the adapter; the base is a {self.base}"


def trained_model(base: ModelFolder, adapter: Path) -> TrainedModel | None:
    """Return the model that the adapter was trained on; None if it is of the base's own family, or the adapter names no task.

    Imports transformers only for an adapter with a head of its own. Reads configurations and the header of the adapter's weights.

    Raises:
        CheckpointValidationError: Base or adapter cannot be read.
        ModelMergeError: ``FAMILY_UNSUPPORTED`` if transformers has no such class for this model; ``ADAPTER_BASE_MISMATCH`` if neither
            base nor adapter has the head; ``ADAPTER_CONFIG_INVALID`` for a head of an impossible size.
    """
    config, settings = base.config, read_adapter_config(adapter)
    family = _trained_family(config, settings, adapter)
    if family is None or config.family is family:
        return None
    name = class_name(family, config)
    if name is None:
        raise _no_class_error(family, config, "transformers has no such class for this model")
    own = {key: value for key, value in config.items() if key not in _SOURCE}
    plain = ModelConfig({**own, "architectures": [name]})
    if plain.family is not family:
        raise _no_class_error(family, config, f"a {name} takes more than text")
    if family is FEATURE_EXTRACTION:
        return TrainedModel(plain, name, family, config.description, labels=0, named=True)
    count = _ENDS_OF_AN_ANSWER
    if family.counts_labels:
        count = _count_labels(plain, _saved_tensors(adapter), family, name=name, base=config.description)
    trained, named = with_labels(plain, count, family, base=base.path, adapter=adapter)
    return TrainedModel(ModelConfig(trained), name, family, config.description, count, named)


def _trained_family(config: ModelConfig, settings: Mapping[str, Any], adapter: Path) -> Family | None:
    """Return the family that was trained, if the adapter names a head of its own or is a sentence encoder's; otherwise None."""
    task = settings.get("task_type")
    if isinstance(task, str) and task in TRAINED_FAMILIES and settings.get("modules_to_save"):
        return TRAINED_FAMILIES[task]
    if task is None and settings.get("modules_to_save") and (named := _family_of_class(config, settings, adapter)):
        return named
    headed = config.family in (MASKED_LANGUAGE_MODEL, DECODER) and task in (None, "FEATURE_EXTRACTION")
    return FEATURE_EXTRACTION if headed and is_sentence_encoder(adapter) else None


def _family_of_class(config: Mapping[str, Any], settings: Mapping[str, Any], adapter: Path) -> Family | None:
    """Return the family of a head whose adapter names no task, such as that of sentence-transformers' cross-encoders; None if it is unknown.

    The name of the trained class tells it, in the adapter's settings or in a ``config.json`` beside it. A head with one row tells it too: it
    cannot tell tokens apart.
    """
    mapping = settings.get("auto_mapping")
    class_of = {"architectures": [mapping.get("base_model_class")]} if isinstance(mapping, Mapping) else {}
    beside = ModelConfig.read(adapter) if (adapter / CONFIG).is_file() else {}
    for named in (class_of, {"architectures": beside.get("architectures")}):
        family = ModelConfig({**config, **named}).family if named.get("architectures") else None
        if family in TRAINED_FAMILIES.values():
            return family
    heads = [info for name, info in _saved_tensors(adapter).items() if name.endswith(_HEADS)]
    return SEQUENCE_CLASSIFIER if any(len(info.shape) == 2 and info.shape[0] == 1 for info in heads) else None


def missing_head_error(tensor: str, *, name: str, base: str) -> ModelMergeError:
    """Return the refusal of an adapter without a part of the head that was trained.

    Args:
        tensor: The parameter that neither base nor adapter has.
        name: The trained class.
        base: Description of the base.
    """
    module = tensor.rpartition(".")[0]
    return ModelMergeError(
        f"the adapter was trained on a {name}, and neither the adapter nor the base, a {base}, has its {tensor!r}: it was new "
        "when the training began, and was not saved",
        reason="ADAPTER_BASE_MISMATCH",
        remedy=f"train with {module!r} in modules_to_save; or, where the process that trained it still runs, save the model that it "
        "started from, with this head, and name that folder as the base",
        about={"tensor": tensor, "class": name},
    )


def _saved_tensors(adapter: Path) -> dict[str, TensorInfo]:
    """Return the adapter's tensors by their names in the model."""
    tensors = read_safetensors(adapter / ADAPTER_WEIGHTS).tensors
    return {_SAVED.sub("", _WRAPPERS.sub("", name)): info for name, info in tensors.items()}


def _count_labels(config: ModelConfig, saved: Mapping[str, TensorInfo], family: Family, *, name: str, base: str) -> int:
    """Return the number of labels: the rows of the saved parameters whose shape depends on it in this class."""
    unnamed = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
    try:
        two, three = (model_facts_of(unnamed | {"num_labels": labels}).shapes for labels in (2, 3))
    except CannotBuildError as error:
        raise _no_class_error(family, config, f"transformers cannot build a {name} of it ({error})") from error
    counting = sorted((parameter for parameter in two if two[parameter] != three[parameter]), reverse=True)
    head = next((saved[parameter] for parameter in counting if parameter in saved), None)
    if head is None:
        if not counting:
            raise _no_class_error(family, config, f"no weight of a {name} shows the number of labels")
        raise missing_head_error(counting[0], name=name, base=base)
    count = head.shape[0] if head.shape else 0
    if not 1 <= count <= MOST_PARTS:
        raise ModelMergeError(
            f"adapter tensor {head.name!r} has shape {head.shape}, which is no head of 1 to {MOST_PARTS} labels",
            reason="ADAPTER_CONFIG_INVALID",
            remedy="copy the checkpoint again, or use another one",
            about={"tensor": head.name},
        )
    return count


def _no_class_error(family: Family, config: ModelConfig, why: str) -> ModelMergeError:
    return ModelMergeError(
        f"the adapter was trained on a {family.name}, and the base is a {config.description}: {why}",
        reason="FAMILY_UNSUPPORTED",
        remedy="name the base that the adapter was trained on, saved with its head",
        about={"model_type": config.get("model_type"), "family": family.name},
    )


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
    beside = read_object_or_empty(adapter / CONFIG)
    settings = {key: value for key, value in config.items() if key not in ("id2label", "label2id", "problem_type")}
    named = next(filter(None, (_names(one, count) for one in (beside, config))), None)
    if family.counts_labels:
        labels = named or [f"LABEL_{number}" for number in range(count)]
        settings["id2label"] = {str(number): label for number, label in enumerate(labels)}
        settings["label2id"] = {label: number for number, label in enumerate(labels)}
    if family is SEQUENCE_CLASSIFIER:
        problem = beside.get("problem_type")
        settings["problem_type"] = problem if problem in PROBLEMS else PROBLEMS[count > 1]
    padding = _padding(beside, config, base=base, adapter=adapter)
    if padding is not None:
        settings["pad_token_id"] = padding
    return settings, named is not None or not family.counts_labels


def _names(config: Mapping[str, Any], count: int) -> list[str] | None:
    """Return the names of exactly this many labels in a configuration; None if it has no such names."""
    names = config.get("id2label")
    if not isinstance(names, dict) or len(names) != count:
        return None
    labels = [name for number in range(count) if isinstance(name := names.get(str(number)), str)]
    return labels if len(set(labels)) == count else None


def _padding(beside: Mapping[str, Any], config: Mapping[str, Any], *, base: Path, adapter: Path) -> int | None:
    """Return the padding token, by which a decoder with a head finds the last token of a padded text."""
    for one in (beside, config):
        if _is_token(one.get("pad_token_id")):
            return int(one["pad_token_id"])
    return next((token for folder in (adapter, base) if (token := _padding_of_tokenizer(folder)) is not None), None)


def _padding_of_tokenizer(folder: Path) -> int | None:
    token = read_object_or_empty(folder / TOKENIZER_SETTINGS).get("pad_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    tokenizer = read_object_or_empty(folder / "tokenizer.json")
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
