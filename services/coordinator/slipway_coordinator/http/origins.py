"""Keep web pages from calling a coordinator through the browser of somebody who can reach it.

A page of any site can make a browser send requests to this machine, and a site can give its own name this machine's address. Where
the address alone lets callers in, such requests would have all rights.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from slipway.errors import ServiceError
from slipway_coordinator.http.requests import HttpRequest

_HERE = frozenset({"localhost", "127.0.0.1", "::1"})
_SAME = frozenset({"", "same-origin", "none"})


def check_origin(request: HttpRequest, *, private: bool) -> None:
    """Refuse a request that a page of another site made.

    Args:
        request: The request.
        private: Whether the server listens on this machine alone; then it has no other name.

    Raises:
        ServiceError: reason ``PERMISSION_DENIED``.
    """
    host = request.header("host")
    origin = request.header("origin")
    if request.header("sec-fetch-site").lower() not in _SAME or (origin and _host_of(origin) != host.lower()):
        raise _refusal("pages of other sites may not call this coordinator", "call it from a program or a server")
    if private and _name_of(host) not in _HERE:
        raise _refusal("this coordinator is called localhost, and by no other name", "call it by http://localhost:PORT")


def _refusal(what: str, remedy: str) -> ServiceError:
    return ServiceError(what, reason="PERMISSION_DENIED", remedy=remedy)


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
