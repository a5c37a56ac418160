r"""The filter language of lists, and page tokens that stay valid while exports come and go.

::

    filter     = choice { "AND" choice }                      as in AIP-160, OR binds closer than AND
    choice     = term { "OR" term }
    term       = [ "NOT" | "-" ] ( condition | "(" filter ")" )
    condition  = "state" ("=" | "!=") STATE                   queued, running, cancelling, succeeded, failed, cancelled
               | "creator" ("=" | "!=") VALUE
               | ("label." | "labels.") NAME ("=" | "!=") VALUE
               | ("label." | "labels.") NAME ":*"             the label is set
               | ("create_time" | "end_time") ("<" | "<=" | ">" | ">=") TIME       RFC 3339, for example 2026-11-21T08:00:00Z
    VALUE      = word | "\"" text "\""                        a quote within the text is written \"

An empty filter matches every export. A label that is not set is unequal to every value, and a time that is not set meets no condition.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from slipway.errors import ServiceError
from slipway.files.json_documents import parse_json
from slipway.texts import quoted
from slipway_coordinator.lifecycle.records import ExportRecord, ExportState
from slipway_coordinator.storage.schema import exports, labels

_PAGED = re.compile(r"[a-z0-9._:/-]{1,300}")
"""Last item of a page: the name of an export or a digest."""
_CONDITION = re.compile(
    r'\s*(?P<field>[a-z_]+(?:\.[A-Za-z0-9_./-]+)?)\s*(?P<operator>!=|<=|>=|=|<|>|:)\s*(?:"(?P<text>(?:[^"\\]|\\.)*)"|(?P<word>[^\s"]+))'
)
_AND, _OR = re.compile(r"\s+AND(?=[\s(])"), re.compile(r"\s+OR(?=[\s(])")
_NOT = re.compile(r"\s*(?:NOT(?=[\s(])|-(?=[a-z(]))")
_OPEN, _CLOSE = re.compile(r"\s*\("), re.compile(r"\s*\)")
_MAX_CONDITIONS = 16
_MAX_NESTED = 16
_LABELS = frozenset({"label", "labels"})
_TIMES: Mapping[str, tuple[sa.Column[Any], Callable[[ExportRecord], float | None]]] = {
    "create_time": (exports.c.create_time, lambda record: record.create_time),
    "end_time": (exports.c.end_time, lambda record: record.end_time),
}
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

Condition = sa.ColumnElement[bool]
Predicate = Callable[[ExportRecord], bool]


@dataclass(frozen=True, slots=True)
class _Clause:
    """A part of a filter, as a condition on the table of exports and as a test of a record."""

    condition: Condition
    matches: Predicate

    def negated(self) -> _Clause:
        return _Clause(sa.not_(self.condition), lambda record: not self.matches(record))


def _all_of(clauses: Sequence[_Clause]) -> _Clause:
    joined = sa.and_(*(each.condition for each in clauses))
    return _Clause(joined, lambda record: all(each.matches(record) for each in clauses))


def _any_of(clauses: Sequence[_Clause]) -> _Clause:
    joined = sa.or_(*(each.condition for each in clauses))
    return _Clause(joined, lambda record: any(each.matches(record) for each in clauses))


def in_projects(projects: Collection[str] | None) -> list[Condition]:
    """Return the condition for exports of some projects; none for None, which means all of them."""
    return [] if projects is None else [exports.c.project.in_(sorted(projects))]


def parse_filter(text: str) -> list[Condition]:
    """Parse a filter into its conditions, which are joined by AND.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``, naming the part that is not understood.
    """
    return [clause.condition for clause in _Parser(text).parse()] if text.strip() else []


def parse_predicate(text: str) -> Predicate:
    """Parse a filter into a test of single exports, which agrees with :func:`parse_filter`.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``, naming the part that is not understood.
    """
    return _all_of(_Parser(text).parse()).matches if text.strip() else lambda _: True


class _Parser:
    """Reads one filter from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._conditions = 0
        self._nested = 0

    def parse(self) -> list[_Clause]:
        conditions = self._parse_all()
        if self._text[self._position :].strip():
            raise _invalid(self._text[self._position :], "join conditions by AND or OR")
        return conditions

    def _parse_all(self) -> list[_Clause]:
        conditions = [self._parse_choice()]
        while self._take(_AND):
            conditions.append(self._parse_choice())
        return conditions

    def _parse_choice(self) -> _Clause:
        terms = [self._parse_term()]
        while self._take(_OR):
            terms.append(self._parse_term())
        return _any_of(terms)

    def _parse_term(self) -> _Clause:
        negated = False
        while self._take(_NOT):
            negated = not negated
        term = self._parse_group() if self._take(_OPEN) else self._parse_condition()
        return term.negated() if negated else term

    def _parse_group(self) -> _Clause:
        self._nested += 1
        if self._nested > _MAX_NESTED:
            raise _invalid(self._text[self._position :], f"nest at most {_MAX_NESTED} parentheses")
        conditions = self._parse_all()
        if not self._take(_CLOSE):
            raise _invalid(self._text[self._position :], "close each parenthesis")
        self._nested -= 1
        return _all_of(conditions)

    def _parse_condition(self) -> _Clause:
        part = _CONDITION.match(self._text, self._position)
        if part is None:
            raise _invalid(
                self._text[self._position :], 'write conditions like state = running or label.team = "speech"'
            )
        if self._conditions == _MAX_CONDITIONS:
            raise _invalid(self._text[self._position :], f"write at most {_MAX_CONDITIONS} conditions")
        self._conditions += 1
        value, self._position = self._value(part)
        return _condition(part["field"], part["operator"], value)

    def _value(self, part: re.Match[str]) -> tuple[str, int]:
        """Return the value of a condition, and where it ends. In parentheses, a word ends before the closing one."""
        if part["word"] is None:
            return re.sub(r"\\(.)", r"\1", part["text"]), part.end()
        word = part["word"].partition(")")[0] if self._nested else part["word"]
        return word, part.start("word") + len(word)

    def _take(self, token: re.Pattern[str]) -> bool:
        match = token.match(self._text, self._position)
        if match is not None:
            self._position = match.end()
        return match is not None


def _condition(field: str, sign: str, value: str) -> _Clause:
    kind, _, label = field.partition(".")
    if field == "state" and sign in {"=", "!="}:
        if value not in set(ExportState):
            raise _invalid(value, f"name one of the states {', '.join(ExportState)}")
        return _equality(_Clause(exports.c.state == value, lambda record: record.state.value == value), sign)
    if field == "creator" and sign in {"=", "!="}:
        return _equality(_Clause(exports.c.creator == value, lambda record: record.creator == value), sign)
    if kind in _LABELS and label and (sign, value) == (":", "*"):
        is_set = sa.exists().where(labels.c.export == exports.c.name, labels.c.name == label)
        return _Clause(is_set, lambda record: label in record.labels)
    if kind in _LABELS and label and sign in {"=", "!="}:
        has = sa.exists().where(labels.c.export == exports.c.name, labels.c.name == label, labels.c.value == value)
        return _equality(_Clause(has, lambda record: record.labels.get(label) == value), sign)
    if field in _TIMES and sign in _COMPARISONS:
        return _comparison(field, sign, _time(value))
    raise _invalid(
        f"{field} {sign}", "compare state, creator and label.NAME by = and !=, create_time and end_time by < <= > >="
    )


def _equality(clause: _Clause, sign: str) -> _Clause:
    return clause if sign == "=" else clause.negated()


def _comparison(field: str, sign: str, moment: float) -> _Clause:
    (column, time_of), compare = _TIMES[field], _COMPARISONS[sign]

    def matches(record: ExportRecord) -> bool:
        time = time_of(record)
        return time is not None and bool(compare(time, moment))

    # Compared with NULL, SQL says neither true nor false, and NOT would not include it.
    return _Clause(sa.and_(column.is_not(None), compare(column, moment)), matches)


def _time(value: str) -> float:
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise _invalid(value, "write times like 2026-11-21T08:00:00Z") from error


_LONGEST_TOKEN = 4096
"""Characters of a page token, far more than one that was made here has."""


def page_token(last: tuple[float, str], *, query: tuple[str, ...]) -> str:
    """Return the token of the next page, which begins after the item with this creation time and name."""
    return base64.urlsafe_b64encode(json.dumps([*last, _fingerprint(query)]).encode()).decode()


def page_start(token: str, *, query: tuple[str, ...]) -> tuple[float, str] | None:
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


def _fingerprint(query: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps(query).encode()).hexdigest()[:16]


def _invalid(part: str, remedy: str) -> ServiceError:
    return ServiceError(
        f"the filter is not understood at {quoted(part)}",
        reason="REQUEST_INVALID",
        remedy=remedy,
        about={"field": "filter"},
    )


def _invalid_token(token: str) -> ServiceError:
    return ServiceError(
        f"page_token is {quoted(token)}",
        reason="REQUEST_INVALID",
        remedy="send the next_page_token of the page before, with the same parent and filter",
        about={"field": "page_token"},
    )
