"""All tiny models of architectures that are written as GGUF, by name: those of each module of ``gguf_architectures``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from support.models import gguf_architectures
from support.models.gguf_family import Family


def _of_all_modules() -> Mapping[str, Family]:
    families: dict[str, Family] = {}
    for module in sorted(each.name for each in iter_modules(gguf_architectures.__path__)):
        own = import_module(f"{gguf_architectures.__name__}.{module}").FAMILIES
        assert not families.keys() & own.keys(), f"{module} names a model as another module does"
        families |= own
    return families


FAMILIES = _of_all_modules()


@cache
def settings_of(family: str) -> dict[str, Any]:
    """Return what ``config.json`` says of a family's model."""
    made = FAMILIES[family].make()
    return {**made.config.to_dict(), "architectures": [type(made).__name__]}
