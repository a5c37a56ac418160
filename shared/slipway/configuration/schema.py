"""List the configuration's keys, and parse the text of a variable or flag as the value of a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slipway.configuration.export import ExportConfiguration
from slipway.formats.registry import formats, levels, refused_format
from slipway.settings.problems import Problem
from slipway.settings.sections import Level, Listed, is_section, plain_type
from slipway.sizes import parse_size
from slipway.texts import MalformedText, quoted, shortened

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@cache
def keys() -> Mapping[str, FieldInfo]:
    """Return the field of every setting by its dotted path; sections are not settings."""
    return dict(_walk(ExportConfiguration))


@cache
def sections() -> Mapping[str, tuple[str, ...]]:
    """Return the names in each section by the section's dotted path; the whole configuration is ``""``."""
    by_path: dict[str, dict[str, None]] = {}
    for key in keys():
        path = ""
        for name in key.split("."):
            by_path.setdefault(path, {})[name] = None
            path = f"{path}.{name}" if path else name
    return {path: tuple(names) for path, names in by_path.items()}


def unknown_setting(key: str, remedy: str, source: str) -> Problem:
    """Return the problem of a key that is no setting; if it belongs to a format that cannot be used, say why instead."""
    section, _, rest = key.partition(".")
    refused = refused_format(rest.partition(".")[0]) if section == "formats" else None
    if refused is None:
        return Problem(key, "is not a setting", remedy, source)
    error = refused.error()
    return Problem(key, error.message, error.remedy, source)


def default(key: str) -> Any:
    """Return a setting's default."""
    value: Any = ExportConfiguration()
    for part in key.split("."):
        value = getattr(value, part)
    return value


def values(key: str) -> tuple[str, ...]:
    """Return the values of a setting with a fixed set of them, as text; empty for any other setting.

    ``none`` as a level means that only the unquantized format is delivered.
    """
    kind = _type_of(key)
    if get_origin(kind) is tuple and get_args(kind)[0] is Level:
        of_format = formats().get(key.removeprefix("formats.").partition(".")[0])
        named = filter(None, (of_format.quantization.unquantized, *of_format.levels)) if of_format else levels()
        return ("none", *named)
    if kind is bool:
        return ("true", "false")
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def usual_values(key: str) -> tuple[str, ...]:
    """Return the values of a setting with a fixed set of them; for any other setting, examples."""
    return values(key) or tuple(map(str, keys()[key].examples or ()))


def is_list(key: str) -> bool:
    """Return whether a key is a setting that holds a list of values."""
    return key in keys() and get_origin(_type_of(key)) is tuple


def is_table(key: str) -> bool:
    """Return whether a key is a setting that holds values by name, or rows of named values."""
    return key in keys() and get_origin(_type_of(key)) is Mapping


def parse_text(key: str, text: str) -> Any:
    """Parse the text of a variable or flag as a value of a setting.

    Raises:
        MalformedText: The text does not fit the setting's type.
    """
    kind = _type_of(key)
    if kind is int and key.endswith("_bytes"):
        return parse_size(text)
    if get_origin(kind) is Mapping:
        return _parse_table(get_args(kind)[1], _split_list(text))
    if isinstance(kind, type) and issubclass(kind, Listed):
        elements = [plain_type(field.annotation) for field in kind.model_fields.values()]
        parts = _split_list(text)
        if parts and all("=" in part for part in parts):  # by name, which the kind of value knows
            pairs = [part.partition("=") for part in parts]
            return {name.strip(): _parse_scalar(elements[0], value.strip()) for name, _, value in pairs}
        return [_parse_scalar(element, part) for element, part in zip(elements, parts, strict=False)] + parts[
            len(elements) :
        ]
    if get_origin(kind) is tuple:
        return [_parse_scalar(plain_type(get_args(kind)[0]), part) for part in _split_list(text)]
    return _parse_scalar(kind, text)


_NUMBERS = {int: ("is not a whole number", "use digits only"), float: ("is not a number", "use digits and a point")}


def _parse_scalar(kind: Any, text: str) -> Any:
    if kind is bool:
        return _parse_boolean(text)
    if kind not in _NUMBERS:
        return text
    try:
        return kind(text)
    except ValueError:
        fault, remedy = _NUMBERS[kind]
        raise MalformedText(f"{quoted(text)} {fault}", remedy=remedy) from None


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        kind = plain_type(info.annotation)
        if is_section(kind):
            yield from _walk(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def _type_of(key: str) -> Any:
    return plain_type(keys()[key].annotation)


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in text.strip().strip("[]").split(",") if part.strip()]


def _parse_table(kind: Any, entries: list[str]) -> dict[str, Any]:
    """Parse values by name (``merge=60``), lists by name (``a=1,2,b=3``) or rows of named values (``int4.mean_kl=0.03``)."""
    if get_origin(kind) is tuple:
        return _parse_lists(plain_type(get_args(kind)[0]), entries)
    columns = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    rows: dict[str, Any] = {}
    for entry in entries:
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals:
            example = "name=60,other=90" if columns is None else "row.name=0.1,row.other=0.2"
            raise MalformedText(f"{quoted(entry)} has no value", remedy=f"write it like {example}")
        if columns is None:
            rows[name] = _parse_scalar(plain_type(kind), value)
            continue
        row, point, column = name.partition(".")
        if not point:
            example = f"{shortened(name)}.{next(iter(columns))}=0.1"
            raise MalformedText(f"{quoted(name)} is a row, not a value", remedy=f"write it like {example}")
        # The check of the whole setting refuses unknown names.
        known = plain_type(columns[column].annotation) if column in columns else str
        rows.setdefault(row, {})[column] = _parse_scalar(known, value)
    return rows


def _parse_lists(kind: Any, entries: list[str]) -> dict[str, list[Any]]:
    """Parse lists by name: an entry without a name continues the list before it."""
    lists: dict[str, list[Any]] = {}
    name = ""
    for entry in entries:
        before, equals, value = (part.strip() for part in entry.partition("="))
        name, value = (before, value) if equals else (name, before)
        if not name:
            raise MalformedText(f"{quoted(entry)} has no name", remedy="write it like name=1,2,other=3")
        lists.setdefault(name, []).extend([_parse_scalar(kind, value)] if value else [])
    return lists


def _parse_boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in TRUE:
        return True
    if lowered in FALSE:
        return False
    raise MalformedText(f"{quoted(text)} is neither true nor false", remedy="use true or false")
