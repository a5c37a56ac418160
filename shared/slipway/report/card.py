"""The model card: ``README.md`` of the output directory, with a usage example per format that runs from there."""

from __future__ import annotations

import re
from typing import Any

import yaml

from slipway.report.document import Report
from slipway.report.environment import markdown_environment
from slipway.report.page import VERDICTS

_EXAMPLE = re.compile(r"^<!-- example: ([\w.-]+) -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FOLDER = re.compile(r"[a-z0-9][\w.-]*")
_LIBRARIES = {"pytorch": "transformers", "onnx": "onnx", "tensorrt": "tensorrt"}
_NEEDS = {
    "pytorch": "torch transformers accelerate",
    "onnx": "onnxruntime tokenizers numpy",
    "tensorrt": "tokenizers numpy torch",
}
# What the weights of a level need beside what the format needs.
_LEVEL_NEEDS = {("pytorch", "int8"): "compressed-tensors", ("pytorch", "int4"): "compressed-tensors"}


def model_card(report: Report) -> str:
    """The card as Markdown with YAML front matter, as model hubs read it."""
    template = markdown_environment().get_template("card.md.j2")
    return template.render(
        front_matter=yaml.safe_dump(_front_matter(report), sort_keys=False, allow_unicode=True),
        report=report,
        result=report.result,
        validation=report.validation,
        verdicts=VERDICTS,
        examples=_examples(report),
    )


def usage_examples(markdown: str) -> dict[str, str]:
    """Python code of a model card's usage examples by format; each runs from the output directory."""
    return dict(_EXAMPLE.findall(markdown))


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


def _examples(report: Report) -> list[dict[str, str]]:
    """Name, packages and code per format that has an example. A folder's name is code here, so it must be a plain one."""
    environment = markdown_environment()
    found = []
    for name in report.result.formats:
        kind, level = _split(name)
        if kind not in _NEEDS or not _FOLDER.fullmatch(name):
            continue
        needs = " ".join(filter(None, [_NEEDS[kind], _LEVEL_NEEDS.get((kind, level), "")]))
        code = environment.get_template(f"{kind}.example.j2").render(folder=name)
        found.append({"name": name, "needs": needs, "code": code})
    return found
