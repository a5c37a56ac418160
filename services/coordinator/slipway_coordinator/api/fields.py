"""Fields of requests: names of projects, sizes of pages, and the refusal of a wrong value."""

from __future__ import annotations

import re

from slipway.errors import ServiceError
from slipway.texts import quoted, shortened

ID = r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?"
"""Pattern of the id of a project or an export."""
_PARENT = re.compile(rf"projects/({ID})")


def project_of(parent: str) -> str:
    """Return the project that ``parent`` names.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``.
    """
    match = _PARENT.fullmatch(parent)
    if match is None:
        raise invalid("parent", parent, "is like projects/default")
    return match[1]


def page_size(requested: int, *, default: int, most: int) -> int:
    """Return the size of a page; 0 requests the default.

    Raises:
        ServiceError: reason ``REQUEST_INVALID``.
    """
    if requested < 0:
        raise invalid("page_size", requested, "is 0 (for the default) or more")
    return min(requested or default, most)


def invalid(field: str, value: object, rule: str) -> ServiceError:
    """Return the refusal of a field's value; ``rule`` follows the word "it" in the remedy."""
    return ServiceError(
        f"{shortened(field)} is {quoted(value)}", reason="REQUEST_INVALID", remedy=f"it {rule}", about={"field": field}
    )
