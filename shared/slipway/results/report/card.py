"""The model card: ``README.md`` of the output directory, with a usage example per kind of format that runs from there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slipway.models.model_files import has_chat_template
from slipway.results.report.document import Report
from slipway.results.report.environment import markdown_environment
from slipway.results.report.page import NOT_MADE, VERDICTS

_EXAMPLE = re.compile(r"^<!-- example: ([\w. -]+) -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FOLDER_LINE = re.compile(r'^folder = ".*$', re.MULTILINE)
_FOLDER = re.compile(r"[a-z0-9][\w.-]*")
_LIBRARIES = {"pytorch": "transformers", "onnx": "onnx", "tensorrt": "tensorrt"}
_NEEDS = {
    "pytorch": "torch transformers accelerate",
    "onnx": "onnxruntime tokenizers numpy",
    "tensorrt": "tokenizers numpy torch",
}
# Transformers applies a chat template, with jinja2, which torch brings along and transformers does not.
_CHAT_NEEDS = _NEEDS | {"onnx": "onnxruntime transformers jinja2 numpy", "tensorrt": "transformers numpy torch"}
# What the weights of a level need beside what the format needs.
_LEVEL_NEEDS = {("pytorch", "int8"): "compressed-tensors", ("pytorch", "int4"): "compressed-tensors"}


@dataclass(frozen=True, slots=True)
class _Example:
    """Code for the folders of one kind of format.

    Attributes:
        kind: ``pytorch``, ``onnx`` or ``tensorrt``.
        folders: Those it runs for; the code names the first one.
        needs: Packages for all of them.
        more: Folders that need a package beside these.
        code: The Python code.
    """

    kind: str
    folders: list[str]
    needs: str
    more: dict[str, str]
    code: str


def model_card(report: Report, folder: Path) -> str:
    """The card as Markdown with YAML front matter, as model hubs read it.

    Args:
        report: What it says.
        folder: The output directory; a format there that has a chat template is used with it.
    """
    template = markdown_environment().get_template("card.md.j2")
    return template.render(
        front_matter=yaml.safe_dump(_front_matter(report), sort_keys=False, allow_unicode=True),
        report=report,
        result=report.result,
        validation=report.validation,
        verdicts=VERDICTS,
        not_made=NOT_MADE,
        examples=_examples(report, folder),
    )


def usage_examples(markdown: str) -> dict[str, str]:
    """Python code of a model card's usage examples by folder; each runs from the output directory."""
    return {
        folder: _FOLDER_LINE.sub(f'folder = "{folder}"', code, count=1)
        for folders, code in _EXAMPLE.findall(markdown)
        for folder in folders.split()
    }


def _front_matter(report: Report) -> dict[str, Any]:
    kinds = [_split(name)[0] for name in report.result.formats]
    tags = ["slipway", "lora", "text-generation", *sorted(set(kinds)), *_levels(report)]
    base = report.label("base_model")
    proven = report.result.base_match is not None and report.result.base_match.verdict == "green"
    return {
        **({"base_model": base} if base else {}),
        **({"base_model_relation": "finetune"} if base and proven else {}),
        "library_name": next((library for kind, library in _LIBRARIES.items() if kind in kinds), "transformers"),
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys(tags)),
    }


def _levels(report: Report) -> list[str]:
    return sorted({level for _, level in map(_split, report.result.formats) if level})


def _split(name: str) -> tuple[str, str]:
    """Format and level of an output's name: ``onnx-int8`` is ``("onnx", "int8")``."""
    kind, _, level = name.partition("-")
    return kind, level


def _examples(report: Report, directory: Path) -> list[_Example]:
    """One example per kind of format that has any. A folder's name is code here, so it must be a plain one."""
    environment = markdown_environment()
    kinds: dict[str, list[str]] = {}
    for name in report.result.formats:
        kind, _ = _split(name)
        if kind in _NEEDS and _FOLDER.fullmatch(name):
            kinds.setdefault(kind, []).append(name)
    found = []
    for kind, folders in kinds.items():
        chat = all(has_chat_template(directory / name) for name in folders)
        template = environment.get_template(f"{kind}.example.j2")
        found.append(
            _Example(
                kind=kind,
                folders=folders,
                needs=(_CHAT_NEEDS if chat else _NEEDS)[kind],
                more={name: more for name in folders if (more := _LEVEL_NEEDS.get(_split(name)))},
                code=template.render(folder=folders[0], others=folders[1:], chat=chat),
            )
        )
    return found
