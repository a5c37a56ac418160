r"""The filter language of lists, and page tokens that stay valid while exports come and go.

::

    filter     = condition { "AND" condition }
    condition  = "state" ("=" | "!=") STATE                   queued, running, cancelling, succeeded, failed, cancelled
               | "creator" ("=" | "!=") VALUE
               | "label." NAME ("=" | "!=") VALUE
               | ("create_time" | "end_time") ("<" | "<=" | ">" | ">=") TIME       RFC 3339, for example 2026-11-21T08:00:00Z
    VALUE      = word | "\"" text "\""                        a quote within the text is written \"

An empty filter matches every export. A label that is not set is unequal to every value.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway.files.json_documents import parse_json
from slipway.texts import quoted
from slipway_coordinator.model.records import ExportState
from slipway_coordinator.storage.schema import exports, labels

_PAGED = re.compile(r"[a-z0-9._:/-]{1,300}")
"""Last item of a page: the name of an export or a digest."""
_CONDITION = re.compile(
    r'\s*(?P<field>[a-z_]+(?:\.[A-Za-z0-9_./-]+)?)\s*(?P<operator>!=|<=|>=|=|<|>)\s*(?:"(?P<text>(?:[^"\\]|\\.)*)"|(?P<word>[^\s"]+))'
)
_AND = re.compile(r"\s+AND\s+")
_MAX_CONDITIONS = 16
_TIMES = {"create_time": exports.c.create_time, "end_time": exports.c.end_time}
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

Condition = sa.ColumnElement[bool]


def in_project(project: str) -> list[Condition]:
    """Return the condition for exports of one project; none for ``-``, which means all projects."""
    return [] if project == "-" else [exports.c.project == project]


def parse_filter(text: str) -> list[Condition]:
    """Parse a filter into its conditions.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``, naming the part that is not understood.
    """
    conditions: list[Condition] = []
    position = 0
    while text[position:].strip():
        if conditions:
            joined = _AND.match(text, position)
            if joined is None:
                raise _invalid(text[position:], "joins conditions by AND")
            position = joined.end()
        part = _CONDITION.match(text, position)
        if part is None:
            raise _invalid(text[position:], 'is made of conditions like state=running or label.team="speech"')
        if len(conditions) == _MAX_CONDITIONS:
            raise _invalid(text[position:], f"has {_MAX_CONDITIONS} conditions at most")
        value = part["word"] if part["text"] is None else re.sub(r"\\(.)", r"\1", part["text"])
        conditions.append(_condition(part["field"], part["operator"], value))
        position = part.end()
    return conditions


def _condition(field: str, sign: str, value: str) -> Condition:
    kind, _, label = field.partition(".")
    if field == "state" and sign in {"=", "!="}:
        if value not in set(ExportState):
            raise _invalid(value, f"knows the states {', '.join(ExportState)}")
        return exports.c.state == value if sign == "=" else exports.c.state != value
    if field == "creator" and sign in {"=", "!="}:
        return exports.c.creator == value if sign == "=" else exports.c.creator != value
    if kind == "label" and label and sign in {"=", "!="}:
        has = sa.exists().where(labels.c.export == exports.c.name, labels.c.name == label, labels.c.value == value)
        return has if sign == "=" else ~has
    if field in _TIMES and sign in _COMPARISONS:
        compared: Condition = _COMPARISONS[sign](_TIMES[field], _time(value))
        return compared
    raise _invalid(
        f"{field} {sign}", "compares state, creator and label.NAME by = and !=, create_time and end_time by < <= > >="
    )


def _time(value: str) -> float:
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise _invalid(value, "takes times like 2026-11-21T08:00:00Z") from error


_LONGEST_TOKEN = 4096
"""Characters of a page token, far more than one that was made here has."""


def page_token(last: tuple[float, str], *, query: tuple[str, str]) -> str:
    """Return the token of the next page, which begins after the item with this creation time and name."""
    return base64.urlsafe_b64encode(json.dumps([*last, _fingerprint(query)]).encode()).decode()


def page_start(token: str, *, query: tuple[str, str]) -> tuple[float, str] | None:
    """Return the creation time and name in a :func:`page_token`; None for the first page.

    Raises:
        ServiceError: reason ``REQUEST_INVALID`` for a token of another query, or an invented one.
    """
    if not token:
        return None
    if len(token) > _LONGEST_TOKEN:
        raise _invalid_token(token)
    try:
        content = parse_json(base64.b64decode(token.encode(), altchars=b"-_", validate=True))
    except ValueError as error:
        raise _invalid_token(token) from error
    match content:
        case [float(time), str(name), str(fingerprint)]:
            if math.isfinite(time) and _PAGED.fullmatch(name) and fingerprint == _fingerprint(query):
                return time, name
    raise _invalid_token(token)


def _fingerprint(query: tuple[str, str]) -> str:
    return hashlib.sha256(json.dumps(query).encode()).hexdigest()[:16]


def _invalid(part: str, rule: str) -> ServiceError:
    return ServiceError(
        f"the filter is not understood at {quoted(part)}",
        reason="REQUEST_INVALID",
        remedy=f"it {rule}",
        about={"field": "filter"},
    )


def _invalid_token(token: str) -> ServiceError:
    return ServiceError(
        f"page_token is {quoted(token)}",
        reason="REQUEST_INVALID",
        remedy="it is the next_page_token of the page before, with the same parent and filter",
        about={"field": "page_token"},
    )
