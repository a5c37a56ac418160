"""The paths of calls over HTTP, from the ``google.api.http`` options of the protos."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from google.api import annotations_pb2

VERBS = ("get", "put", "post", "delete", "patch")

_PART = re.compile(r"\{(?P<variable>[a-z_]+)(?:=(?P<of>[^{}]+))?\}|(?P<literal>[^{}]+)")


@dataclass(frozen=True)
class HttpRule:
    """How one call is made over HTTP.

    Attributes:
        verb: HTTP method, in capitals.
        template: Path, such as ``/v1/{name=projects/*/exports/*}:cancel``: a variable is a field of the request, and ``*`` one segment.
        body: Field that the body holds; ``*`` for all fields that are not in the path; empty for no body.
        response_body: Field that the response's body holds; empty for the whole response.
    """

    verb: str
    template: str
    body: str = ""
    response_body: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the path as it is sent, with a group for each variable."""
        return re.compile("".join(_group(part) for part in _PART.finditer(self.template)))

    @cached_property
    def variables(self) -> dict[str, str]:
        """The template of each variable."""
        parts = (part for part in _PART.finditer(self.template) if part["variable"])
        return {part["variable"]: part["of"] or "*" for part in parts}

    @property
    def custom_verb(self) -> str:
        """What follows the last colon, such as ``cancel``; empty without one."""
        return self.template.rpartition("}:")[2] if "}:" in self.template else ""


def http_rule(options: Any) -> HttpRule | None:
    """Return the rule in the options of a method's descriptor; None if the call is not for HTTP.

    Raises:
        ValueError: The template is not understood.
    """
    rule = options.Extensions[annotations_pb2.http]
    verb = str(rule.WhichOneof("pattern") or "")
    if not verb:
        return None
    template = str(getattr(rule, verb)) if verb in VERBS else ""
    if "".join(part[0] for part in _PART.finditer(template)) != template or not template.startswith("/"):
        raise ValueError(f"{verb} {template!r} is not a path that this program understands")
    return HttpRule(verb.upper(), template, rule.body, rule.response_body)


def _group(part: re.Match[str]) -> str:
    if part["literal"]:
        return re.escape(part["literal"])
    segments = (part["of"] or "*").split("/")
    inner = "/".join("[^/]+" if each == "*" else re.escape(each) for each in segments)
    return f"(?P<{part['variable']}>{inner})"
