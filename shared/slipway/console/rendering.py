"""Render the pages, and send them with the headers that keep a browser from running or fetching anything else."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from http import HTTPStatus
from typing import Any

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse

from slipway.console.place import Place
from slipway.results.report.environment import html_environment

ROOT = "/ui"
"""Path of the console; every other path below the same address belongs to others."""

_TONES = {
    "succeeded": "good",
    "passed": "good",
    "failed": "bad",
    "running": "plain",
    "starting": "plain",
    "delivering": "plain",
    "interrupted": "amber",
    "unreadable": "bad",
}

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
REPORT_HEADERS = {
    **HEADERS,
    "content-security-policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
}
"""Those of the report, which has its styles in itself, and no script."""


@cache
def _environment() -> Environment:
    environment = html_environment("slipway.console", "templates")
    environment.filters["moment"] = moment
    environment.globals.update(tone=lambda state: _TONES.get(state, "muted"), root=ROOT)
    return environment


def moment(value: datetime | None) -> str:
    """Format a time of day, in UTC; a dash if it is unknown."""
    return "–" if value is None else f"{value:%Y-%m-%d %H:%M} UTC"


def rendered(template: str, **values: Any) -> str:
    """Return a template, or a part of a page, with these values."""
    return _environment().get_template(f"{template}.html.j2").render(**values)


def page(
    request: Request, place: Place | None, template: str, *, status: int = HTTPStatus.OK, **values: Any
) -> HTMLResponse:
    """Return a whole page.

    Args:
        request: The request; its path says which page of the navigation it is.
        place: The place whose exports it shows; None for a page that shows none.
        template: Name of the template.
        status: HTTP status.
        values: Values of the template.
    """
    about = {
        "page": request.url.path.removeprefix(ROOT) or "/",
        "place": place.name if place else "",
        "is_here": place is not None and place.is_here,
        "signed_in": getattr(request.state, "signed_in", False),
    }
    return HTMLResponse(rendered(template, **about, **values), status_code=status, headers=HEADERS)
