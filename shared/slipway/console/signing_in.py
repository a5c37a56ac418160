"""Sign in with a token: the browser keeps it in a cookie, which pages of other sites cannot send and scripts cannot read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from slipway.console.place import Place
from slipway.console.rendering import HEADERS, ROOT, page
from slipway.errors import ConfigurationError, Failure, ModelExportError
from slipway.security.access.principals import is_token

_COOKIE = "slipway-token"
_MOST_CHARACTERS = 3800
"""Browsers keep cookies of 4,096 bytes with their names and attributes."""
_ANOTHER = "ask the operator for a token, or get a new one from your identity provider"

PlaceOf: TypeAlias = Callable[[Request, str], Place]
"""Returns the place as a caller may see it, by the request and the caller's token, which is empty for one who has not signed in."""


def token_of(request: Request) -> str:
    """Return the token with which the caller has signed in; empty if there is none."""
    token = request.cookies.get(_COOKIE, "")
    return token if is_token(token) else ""


def sign_in_page(request: Request, *, failure: Failure | None = None) -> Response:
    """Show the page for signing in."""
    status = HTTPStatus.OK if failure is None else HTTPStatus.UNAUTHORIZED
    return page(
        request, None, "sign_in", status=status, next=_next(request.query_params.get("next", "")), failure=failure
    )


def given_token(fields: Mapping[str, str]) -> str:
    """Return the token on the page for signing in; empty if it is none."""
    token = fields.get("token", "").strip()
    return token if is_token(token) else ""


def sign_in(request: Request, fields: Mapping[str, str], place: Place) -> Response:
    """Try a token: keep it if the coordinator knows its bearer, and go where the caller wanted to go.

    Args:
        request: The request.
        fields: The fields of the page.
        place: What the bearer of the token may see.
    """
    token = given_token(fields)
    if (failure := _refusal(token, place)) is not None:
        return sign_in_page(request, failure=failure)
    answer = RedirectResponse(_next(fields.get("next", "")), HTTPStatus.SEE_OTHER, headers=HEADERS)
    # Behind a proxy with a certificate, only the page's own address says that it came by HTTPS.
    secure = request.scope["scheme"] == "https" or request.headers.get("origin", "").startswith("https://")
    answer.set_cookie(_COOKIE, token, httponly=True, samesite="strict", secure=secure, path=ROOT)
    return answer


def _refusal(token: str, place: Place) -> Failure | None:
    """Return why a token is not kept; None if it is."""
    if not token:
        remedy = "paste all of it, and nothing else"
        return ConfigurationError("this is no token", reason="UNAUTHENTICATED", remedy=remedy).failure()
    if len(token) > _MOST_CHARACTERS:
        what = f"the token has {len(token)} characters, and a browser keeps {_MOST_CHARACTERS}"
        remedy = "take one with fewer groups, or let a proxy send it as a header"
        return ConfigurationError(what, reason="UNAUTHENTICATED", remedy=remedy).failure()
    try:
        place.listed()
    except ModelExportError as error:
        failure = error.failure()
        # The coordinator's remedy is for a command line.
        return replace(failure, remedy=_ANOTHER) if failure.reason == "UNAUTHENTICATED" else failure
    return None


def sign_out() -> Response:
    """Forget the token."""
    answer = RedirectResponse(f"{ROOT}/sign-in", HTTPStatus.SEE_OTHER, headers=HEADERS)
    answer.delete_cookie(_COOKIE, path=ROOT)
    return answer


def _next(path: str) -> str:
    """Return a path of the console; that of the list for any other."""
    inside = path.startswith(f"{ROOT}/") and not path.startswith(f"{ROOT}/sign-")
    return (
        path
        if inside and path.isascii() and path.isprintable() and "\\" not in path and "//" not in path
        else f"{ROOT}/"
    )
