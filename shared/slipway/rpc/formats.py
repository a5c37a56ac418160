"""The installed formats as messages: levels, targets, stages, a schema of the settings, and whether workers or this machine can make them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf import struct_pb2

from slipway.errors import Failure, ModelExportError
from slipway.formats.contract import Format
from slipway.formats.registry import formats, refused_formats, translate_format_errors
from slipway.formats.steps import stages_of, steps_of
from slipway.requirements import Placement
from slipway.rpc.values import status_of, struct_of
from slipway.settings.sections import field_meanings
from slipway_protos.v1 import coordinator_pb2 as pb

MOST_SCHEMA_BYTES = 64 << 10
"""Largest schema of a format's settings, as JSON."""

Judge = Callable[[Placement], Failure | None]
"""Returns why a task cannot be carried out now; None if it can."""


@dataclass(frozen=True, slots=True)
class _Output:
    """An output at one level (empty: without quantization): the tasks that make it, or why they cannot be planned."""

    level: str
    steps: tuple[Placement, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class FormatDescription:
    """A format, as far as it does not depend on what is there to make it.

    Attributes:
        message: The format without stages and availability, which nothing may change.
        outputs: Its output without quantization, then that at each level.
    """

    message: pb.Format
    outputs: tuple[_Output, ...]

    @property
    def name(self) -> str:
        """Name of the format."""
        return self.message.name

    def judged(self, judge: Judge) -> pb.Format:
        """Return the format with what ``judge`` says about the tasks of each output."""
        message = pb.Format()
        message.CopyFrom(self.message)
        for output in self.outputs:
            part = message.levels.add(name=output.level) if output.level else message
            part.stages.extend(stages_of(output.steps))
            failure = output.failure or next(filter(None, map(judge, output.steps)), None)
            part.available = failure is None
            if failure is not None:
                part.obstacle.CopyFrom(status_of(failure))
        return message


@cache
def describe_formats() -> tuple[FormatDescription, ...]:
    """Return all installed formats in the order of their rank, and at the end those that cannot be used. Imports nothing heavy.

    Raises:
        ConfigurationError: ``FORMAT_INVALID``: there is none.
    """
    usable = [_describe(each) for each in formats().values()]
    refused = [
        FormatDescription(pb.Format(name=each.name), (_Output("", failure=each.error().failure()),))
        for each in refused_formats()
        if each.name not in formats()
    ]
    return (*usable, *refused)


def _describe(each: Format[Any]) -> FormatDescription:
    message = pb.Format(name=each.name, title=each.title, targets=_targets(each))
    schema = settings_schema(each)
    if schema is not None:
        message.settings_schema.CopyFrom(schema)
    return FormatDescription(message, tuple(_output(each, level) for level in ("", *each.levels)))


def _output(each: Format[Any], level: str) -> _Output:
    try:
        with translate_format_errors(each):
            return _Output(level, steps_of(each, level))
    except ModelExportError as error:
        return _Output(level, failure=error.failure())


def _targets(each: Format[Any]) -> Iterable[pb.FormatTarget]:
    return [
        pb.FormatTarget(name=fit.target, why=fit.why, levels=fit.levels)
        for fit in sorted(each.fits, key=lambda fit: fit.rank)
    ]


def settings_schema(each: Format[Any]) -> struct_pb2.Struct | None:
    """Return the JSON Schema of a format's settings, with what its docstring says about each; None if there is none, or it is too large."""
    try:
        schema = each.settings.model_json_schema()
        for name, meaning in field_meanings(each.settings).items():
            schema["properties"][name].setdefault("description", meaning)
        if each.levels and "quantization" in schema["properties"]:
            schema["properties"]["quantization"]["anyOf"] = _level_forms(each)
        if len(json.dumps(schema)) > MOST_SCHEMA_BYTES:
            return None
        return struct_of(schema)
    except Exception:  # noqa: BLE001 - third-party code may raise anything; the format can be used without
        return None


def _level_forms(each: Format[Any]) -> list[dict[str, Any]]:
    """Return the ways to write a format's levels: several, one, or none of its own. The configuration knows the names, the field does not."""
    level = {"type": "string", "enum": ["none", *filter(None, (each.quantization.unquantized, *each.levels))]}
    return [{"type": "array", "items": level}, level, {"type": "null"}]
