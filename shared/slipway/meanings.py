"""What the fields of a model mean: said once, where they are declared, for help, tables and documentation alike."""

from __future__ import annotations

import inspect
import re

from pydantic import BaseModel


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each field: its description, otherwise what the ``Attributes:`` of the docstrings, its bases' too, say of it."""
    docstrings = [base.__dict__.get("__doc__") for base in reversed(model.__mro__) if issubclass(base, BaseModel)]
    said = {
        name: text for docstring in docstrings for name, text in _attributes(inspect.cleandoc(docstring or "")).items()
    }
    said = {name: text for name, text in said.items() if name in model.model_fields}
    described = {name: info.description for name, info in model.model_fields.items() if info.description}
    return {**said, **described}


def _attributes(docstring: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in docstring.partition("Attributes:\n")[2].splitlines():
        field = re.match(r"    (\w+): (.*)", line)
        if field is not None:
            name, found[field[1]] = field[1], field[2]
        elif line.strip() and name:
            found[name] += f" {line.strip()}"
    return found
