"""Write the model card: ``README.md`` of the output directory, with a usage example per format that runs from there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from slipway.errors import CheckpointValidationError, ModelExportError
from slipway.formats.contract import Format, Usage
from slipway.formats.registry import formats, is_adapter_alone, split_output, translate_format_errors
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, FEATURE_EXTRACTION, Family, loader_of, task_of
from slipway.model.model_files import has_chat_template
from slipway.model.sentences import UnknownPoolingError, is_sentence_encoder, read_pooling
from slipway.model.tokens.prompts import Prompts, read_prompts
from slipway.model.tokens.sound import SoundCodec, sound_codec
from slipway.results.report.document import Report
from slipway.results.report.environment import markdown_code, markdown_environment
from slipway.results.report.evaluation import model_index, rows, sign_off
from slipway.results.report.page import common
from slipway.texts import one_line

_LOG = logging.getLogger(__name__)
_FOLDER = re.compile(r"[a-z0-9][\w.-]*")
_MOST_PROMPTS = 20
"""Most prompts of a sentence encoder that the card lists."""


@dataclass(frozen=True, slots=True)
class _Example:
    """Code for the folders of one format.

    Attributes:
        kind: Name of the format, or of the variant.
        folders: Folders for which the code runs; the code names the first one.
        needs: Packages for all of them.
        more: Further packages by folder, for folders that need them.
        code: The Python code.
    """

    kind: str
    folders: list[str]
    needs: str
    more: dict[str, str]
    code: str


def model_card(report: Report, folder: Path) -> str:
    """Return the card as Markdown with YAML front matter, as model hubs read it.

    Args:
        report: The contents.
        folder: The output directory; examples apply the chat template of formats there that have one.
    """
    template = markdown_environment().get_template("card.md.j2")
    sound = _sound(report, folder)
    return template.render(
        front_matter=yaml.safe_dump(_front_matter(report, folder, sound), sort_keys=False, allow_unicode=True),
        **common(report),
        completeness=_completeness(report),
        examples=_examples(report, folder),
        evaluation=rows(report),
        sign_off=sign_off(report),
        prompts=_prompts(report, folder),
        sound=sound,
    )


def _prompts(report: Report, folder: Path) -> list[tuple[str, str, str]]:
    """Return name, text and use of the prompts of a sentence encoder; those that its methods take by themselves come first."""
    encoder = next((folder / name for name in report.result.formats if is_sentence_encoder(folder / name)), None)
    prompts = read_prompts(encoder) if encoder else Prompts({})
    uses = {prompts.default: "every text, unless another is named"} if prompts.default else {}
    if prompts.differ:
        uses |= {"query": "questions"} | ({prompts.passage_name: "passages"} if prompts.passage_name else {})
    names = [*(name for name in uses if name in prompts.texts), *(name for name in prompts.texts if name not in uses)]
    return [(name, _literal(prompts.texts[name]), uses.get(name, "")) for name in names[:_MOST_PROMPTS]]


def _sound(report: Report, folder: Path) -> SoundCodec | None:
    """Return the codec of a model that answers with tokens of sound."""
    decoders = (
        folder / name
        for name in report.result.formats
        if (family := _family(folder / name)) and family.name == DECODER.name
    )
    return next((codec for each in decoders if (codec := sound_codec(each))), None)


def _literal(text: str) -> str:
    """Return a Python literal of any text, which neither ends the code of an example nor hides a part of it."""
    return ascii(text).replace("`", "\\x60")


def _completeness(report: Report) -> str:
    """Say which folders can be used without anything else."""
    alone = [markdown_code(name) for name in report.result.formats if is_adapter_alone(name)]
    parts = "weights, configuration, tokenizer"
    if not alone:
        return f"Each folder is complete on its own: {parts}."
    return (
        f"Each folder but {' and '.join(alone)} is complete on its own: {parts}. An adapter alone needs the base model."
    )


def _front_matter(report: Report, folder: Path, sound: SoundCodec | None) -> dict[str, Any]:
    family = next((_family(folder / name) for name in report.result.formats), DECODER)
    task = "text-to-speech" if sound else family.task if family else ""
    pipeline = {"pipeline_tag": task} if task else {}
    kinds, levels = zip(*map(split_output, report.result.formats), strict=True) if report.result.formats else ((), ())
    libraries = [each.usage.library for each in formats().values() if each.usage is not None and each.name in kinds]
    tags = [
        "slipway",
        *(() if report.result.plain else ("lora",)),
        *pipeline.values(),
        *sorted(set(kinds)),
        *sorted(filter(None, set(levels))),
    ]
    base = report.label("base_model")
    index = model_index(report, task)
    proven = report.result.base_match is not None and report.result.base_match.verdict == "green"
    return {
        **({"base_model": base} if base else {}),
        **({"base_model_relation": "finetune"} if base and proven else {}),
        "library_name": next(iter(libraries), "transformers"),
        **pipeline,
        "tags": list(dict.fromkeys(tags)),
        **({"model-index": index} if index else {}),
    }


def _examples(report: Report, directory: Path) -> list[_Example]:
    """Return one example per format that runs this family. A folder's name becomes code, so folders with unusual names are left out."""
    folders = [name for name in report.result.formats if _FOLDER.fullmatch(name)]
    examples = []
    for kind, each, mine in _groups(folders):
        family = _family(directory / mine[0])
        if family is not None and each.usage is not None:
            chat = all(has_chat_template(directory / name) for name in mine)
            try:
                with translate_format_errors(each):
                    examples.append(
                        _example(kind, mine, each.usage, chat=chat, family=family, first=directory / mine[0])
                    )
            except ModelExportError as error:  # deliver the models without an example
                _LOG.warning("the model card has no usage example: %s", one_line(str(error)))
    return sorted(examples, key=lambda example: folders.index(example.folders[0]))


def _groups(folders: list[str]) -> Iterator[tuple[str, Format[Any], list[str]]]:
    """Yield each group of folders that one example can run, with its title: a format with its levels, or a single variant."""
    for kind, each in formats().items():
        mine = [name for name in folders if split_output(name)[0] == kind]
        alike = [name for name in mine if split_output(name)[1] in ("", *each.levels)]
        for title, group in ((kind, alike), *((name, [name]) for name in mine if name not in alike)):
            if group:
                yield title, each, group


def _family(folder: Path) -> Family | None:
    """Return the family of the model that the example loads: None if unknown, a decoder without a ``config.json`` of transformers."""
    try:
        config = ModelConfig.read(folder)
        family = config.family if config.get("architectures") or config.get("model_type") else DECODER
        return replace(family, auto_class=loader_of(family, config), task=task_of(family, config)) if family else None
    except CheckpointValidationError:
        return DECODER


def _example(kind: str, folders: list[str], usage: Usage, *, chat: bool, family: Family, first: Path) -> _Example:
    template = markdown_environment().from_string(usage.path.read_text(encoding="utf-8"))
    chat = chat and family.generates
    entries = sorted(path.name for path in first.glob("*"))
    sentences = family == FEATURE_EXTRACTION and is_sentence_encoder(first)
    prompts = read_prompts(first) if sentences else Prompts({})
    sound = sound_codec(first) if family.name == DECODER.name else None
    usual = (
        (usage.sentence_packages if sentences else "")
        or usage.family_packages.get(family.name)
        or (usage.chat_packages if chat else "")
        or usage.packages
    )
    return _Example(
        kind=kind,
        folders=folders,
        needs=usage.variant_packages.get(split_output(folders[0])[1]) or usual,
        more={name: more for name in folders if (more := usage.level_packages.get(split_output(name)[1]))},
        code=template.render(
            folder=folders[0],
            others=folders[1:],
            chat=chat,
            family=family,
            entries=entries,
            sentences=sentences,
            pooled=sentences and _is_pooled(first),
            prompts=prompts,
            sound=sound,
            answer=partial(_answer, sound),
            written=partial(_written, sound),
            words=_literal(f"{prompts.question}Once upon a time"),
            pair=(_literal(f"{prompts.question}How old are you?"), _literal(f"{prompts.passage}What is your age?")),
        ),
    )


def _answer(sound: SoundCodec | None, tokens: str, *, special: bool = True) -> str:
    """Return the line of an example that shows the tokens of an answer: as text, or as numbers if they are sound.

    Args:
        sound: The codec of the model's answers.
        tokens: Expression of the tokens.
        special: Whether special tokens are shown in a text.
    """
    if sound is None:
        return f"print(tokenizer.decode({tokens}{'' if special else ', skip_special_tokens=True'}))"
    return f"print([int(token) for token in {tokens}])  # those of sound go to the codec {sound.name}"


def _written(sound: SoundCodec | None, text: str) -> str:
    """Return the line of an example that shows an answer that a runtime wrote as text; of sound, it reads the numbers in it."""
    if sound is None:
        return f"print({text})"
    return f'print([int(each) for each in re.findall(r"{sound.pattern}", {text})])  # for the codec {sound.name}'


def _is_pooled(folder: Path) -> bool:
    """Return whether graphs of this sentence encoder make the vectors of texts themselves."""
    try:
        return read_pooling(folder) is not None
    except UnknownPoolingError:
        return False
