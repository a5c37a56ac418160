"""Read the meanings of a model's fields from its docstrings, for help, tables and documentation."""

from __future__ import annotations

import inspect
import re

from pydantic import BaseModel


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each field: its description, otherwise its entry under ``Attributes:`` in the docstring of the model or a base."""
    docstrings = [base.__dict__.get("__doc__") for base in reversed(model.__mro__) if issubclass(base, BaseModel)]
    said = {
        name: text for docstring in docstrings for name, text in _attributes(inspect.cleandoc(docstring or "")).items()
    }
    said = {name: text for name, text in said.items() if name in model.model_fields}
    described = {name: info.description for name, info in model.model_fields.items() if info.description}
    return {**said, **described}


def _attributes(docstring: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    name = ""
    for line in docstring.partition("Attributes:\n")[2].splitlines():
        field = re.match(r"    (\w+): (.*)", line)
        if field is not None:
            name, entries[field[1]] = field[1], field[2]
        elif line.strip() and name:
            entries[name] += f" {line.strip()}"
    return entries
