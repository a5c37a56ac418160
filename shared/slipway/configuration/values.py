"""Check values of an export's settings as they are read, and make the names of models and output directories."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from slipway.formats.registry import levels
from slipway.levels import STORED_TYPES
from slipway.registry import stage_names
from slipway.settings.problems import did_you_mean
from slipway.settings.sections import LARGEST_BYTES, Level, wrong_value
from slipway.sizes import parse_size_or_share
from slipway.texts import MalformedText, quoted, redact_address
from slipway.validation.verdicts import LimitOverrides

GROUP_SIZES = (16, 32, 64, 128, 256)
MOST_TEST_INPUTS, LARGEST_TEST_INPUTS = 1000, 128 << 10
"""Most test inputs in a configuration itself, and their bytes; they travel in every message about the export."""

_HUB = "hf://"
_PASSWORD = re.compile(r"://[^/@\s]*@")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
PLACEHOLDERS = ("model_name", "timestamp", "checkpoint", "export_id")
LICENCE = re.compile(r"[A-Za-z0-9.+() :-]{1,200}")
"""An SPDX licence expression, by its characters."""
MOST_DESTINATIONS = 16
_LONGEST_PART = 64
"""Longest part of an address that is made of a name, in characters."""


def _check_levels(value: Any) -> Any:
    """Make one level or a list of levels a tuple without repetitions; ``none`` adds nothing."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple):
        return value
    unknown = [level for level in value if level not in (*levels(), "none")]
    if unknown:
        raise wrong_value(unknown[0], "is not a quantization level", f"use none, {', '.join(levels())}")
    return tuple(dict.fromkeys(level for level in value if level != "none"))


def check_stage_names(value: Any) -> Any:
    """Return a table unchanged; refuse a row that does not name a stage."""
    for name in value if isinstance(value, Mapping) else ():
        _refuse_unknown(name, stage_names(), kind="stage")
    return value


def check_test_inputs(value: Any) -> Any:
    """Return a path, or a list of objects as a tuple; refuse anything else. A stage checks the objects for the model's family."""
    if isinstance(value, str):
        return value
    form = 'name a file, or write a list like [{prompt: "…", expected: "…"}]'
    if not isinstance(value, list | tuple) or not all(isinstance(each, Mapping) for each in value):
        raise wrong_value(value, "is neither a path nor a list of objects", form)
    try:
        document = json.dumps(value, allow_nan=False, sort_keys=True)  # messages keep no order of keys
    except (TypeError, ValueError, RecursionError):
        raise wrong_value(value, "holds values that JSON cannot express", form) from None
    if len(value) > MOST_TEST_INPUTS or len(document) > LARGEST_TEST_INPUTS:
        fault = f"has {len(value)} objects of {len(document)} bytes"
        remedy = f"use at most {MOST_TEST_INPUTS} and {LARGEST_TEST_INPUTS}, or name a file"
        raise wrong_value(value, fault, remedy)
    return tuple(json.loads(document))


def check_size_budget(value: Any) -> Any:
    """Return a size or share as text; refuse what is neither."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # YAML reads 0.3 and 419430400 as numbers
    if isinstance(value, str) and value:
        try:
            size = parse_size_or_share(value)
        except MalformedText as error:
            raise wrong_value(value, "is neither a size nor a share", error.remedy) from None
        if size > LARGEST_BYTES:
            raise wrong_value(value, "is larger than any file", "write a size like 400MiB, or a share like 0.3 or 30%")
    return value


def check_limit_names(value: Any) -> Any:
    """Return a table of limits unchanged; refuse an unknown level or limit."""
    rows = value if isinstance(value, Mapping) else {}
    for level, row in rows.items():
        _refuse_unknown(level, STORED_TYPES, kind="level")
        for name in row if isinstance(row, Mapping) else ():
            _refuse_unknown(name, tuple(LimitOverrides.model_fields), kind="limit")
    return value


def _refuse_unknown(name: Any, known: tuple[str, ...], *, kind: str) -> None:
    if name not in known:
        raise wrong_value(name, f"is not a {kind}", did_you_mean(str(name), known))


Levels = Annotated[tuple[Level, ...], BeforeValidator(_check_levels)]


def is_none(path: str) -> bool:
    """Return whether the path of a checkpoint says that there is none."""
    return path.strip().lower() == "none"


def check_pattern(pattern: str) -> None:
    """Check a naming pattern.

    Raises:
        PydanticCustomError: It is not a pattern, or names no folder.
    """
    for literal in _literals(pattern, pattern):
        if "/" in literal or "\\" in literal or "\0" in literal:
            raise wrong_value(pattern, "contains a path separator", "name folders in output.directory")
    if pattern.strip() in {"", ".", ".."}:
        raise wrong_value(pattern, "does not name a folder", "write for example {model_name}_{timestamp}")


def check_destinations(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Check the form of addresses to publish to; whether one is of a known kind is checked before an export begins.

    Raises:
        PydanticCustomError: There are too many or the same twice, or one has a user or an unknown placeholder.
    """
    if len(addresses) > MOST_DESTINATIONS:
        raise wrong_value(f"{len(addresses)} addresses", "are too many", f"name at most {MOST_DESTINATIONS}")
    for number, address in enumerate(addresses):
        shown = redact_address(address)
        if not address.strip():
            raise wrong_value(
                address, "is not an address", "write for example oci://registry.example.com/models/name:v1"
            )
        if _PASSWORD.search(address):
            raise wrong_value(
                shown, "has a user in it", "leave it out: credentials come from variables of this machine"
            )
        if address in addresses[:number]:
            raise wrong_value(shown, "is named twice", "name it once")
        _literals(address, shown)
    return addresses


def _literals(pattern: str, shown: str) -> list[str]:
    """Return the parts of a pattern between its placeholders.

    Raises:
        PydanticCustomError: It is not a pattern, or has an unknown placeholder.
    """
    known = f"placeholders are {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}"
    try:
        parts = list(string.Formatter().parse(pattern))
    except ValueError as error:
        raise wrong_value(shown, f"is not a pattern: {error}", known) from error
    for _, name, spec, conversion in parts:
        if name is not None and (name not in PLACEHOLDERS or spec or conversion):
            raise wrong_value(shown, f"has an unknown placeholder {quoted('{' + name + '}')}", known)
    return [literal for literal, *_ in parts]


def model_name(checkpoint: str, base: str) -> str:
    """Return the name of a model from the settings alone: its training run's folder, or its base's if it has none; empty for neither.

    Args:
        checkpoint: ``checkpoint.path``.
        base: ``base_model.name``.
    """
    parts = re.split(r"[/\\]+", (checkpoint or base).partition("@")[0].rstrip("/\\"))
    return parts[-2] if len(parts) > 1 and parts[-1].startswith("checkpoint-") else parts[-1]


def repository_name(base: str) -> str:
    """Return the repository of ``hf://owner/name@revision``; empty for anything else, as ``owner/name`` may be a folder too."""
    name = base.removeprefix(_HUB).partition("@")[0]
    return name if base.startswith(_HUB) and _REPOSITORY.fullmatch(name) else ""


def render_name(pattern: str, values: Mapping[str, str]) -> str:
    """Return the directory name for a valid pattern; replace characters that are unsafe in a file name by ``-``.

    Args:
        pattern: As checked by :func:`check_pattern`.
        values: One value per placeholder of :data:`PLACEHOLDERS`.
    """
    safe = {name: re.sub(r"[^A-Za-z0-9._+-]+", "-", values[name]).strip("-.") or "model" for name in PLACEHOLDERS}
    return pattern.format(**safe)


def files_address(address: str) -> str:
    """Return where files go: the address within ``kubeflow:NAME@ADDRESS``, and without options such as ``?modelcar``."""
    place = address.partition("@")[2] if address.startswith("kubeflow:") else address
    return place.partition("?")[0]


def render_address(address: str, values: Mapping[str, str]) -> str:
    """Return an address to publish to, with values that every kind of destination takes in its names.

    Args:
        address: As checked by :func:`check_destinations`.
        values: One value per placeholder of :data:`PLACEHOLDERS`.
    """
    safe = {name: _safe_part(values[name]) for name in PLACEHOLDERS}
    if files_address(address).startswith("oci:"):  # registries refuse capital letters
        safe = {name: value.lower() for name, value in safe.items()}
    return address.format(**safe)


def _safe_part(value: str) -> str:
    letters = re.sub(r"[^A-Za-z0-9._-]+", "-", value)
    return re.sub(r"[._-]{2,}", "-", letters).strip("-._")[:_LONGEST_PART].strip("-._") or "model"
