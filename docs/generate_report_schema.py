"""Write the JSON Schema of ``report.json`` into the package: ``python docs/generate_report_schema.py``.

It is made of the models that write the report. Readers of an older schema accept the fields of a newer version.
"""

import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slipway.results.report.document import Report
from slipway.settings.sections import field_meanings

FILE = Path(__file__).parents[1] / "shared" / "slipway" / "results" / "report" / "report.schema.json"


def schema() -> dict[str, Any]:
    """Return the schema."""
    made = Report.model_json_schema(mode="serialization")
    definitions = made.pop("$defs")
    for model in {model.__name__: model for model in models(Report)}.values():
        described = made if model is Report else definitions[model.__name__]
        _describe(described, model)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:slipway:report:1",
        "title": "report.json of a Slipway export",
    }
    return {**made, **head, "$defs": dict(sorted(definitions.items()))}


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a model and all that its fields hold."""
    yield model
    for info in model.model_fields.values():
        for inner in _types(info.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from models(inner)


def document() -> str:
    """Return the file's contents."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _types(inner)


def _describe(described: dict[str, Any], model: type[BaseModel]) -> None:
    """Replace the model's docstring by its first paragraph, and give each field its meaning."""
    described["description"] = _plain(described["description"].partition("\n\n")[0])
    described.pop("additionalProperties", None)
    described["required"] = list(described["properties"])  # also what has a default is always written
    said = field_meanings(model)
    for name, field in described["properties"].items():
        field.pop("title", None)
        if name in said:
            field["description"] = _plain(said[name])
        elif isinstance(field.get("description"), str):
            field["description"] = _plain(field["description"].partition("\n\n")[0])


def _plain(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")
    return re.sub(r"\bNone\b", "null", text)


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
