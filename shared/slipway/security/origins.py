"""Keep web pages of other sites from calling a server through the browser of somebody who can reach it.

A page of any site can make a browser send requests to this machine, and a site can give its own name this machine's address. Where
the address alone lets callers in, such requests would have all rights.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from slipway.errors import ServiceError
from slipway.texts import quoted

_SAME = frozenset({"", "same-origin", "none"})


def check_origin(header: Callable[[str], str], *, names: Collection[str] | None) -> None:
    """Refuse a request that a page of another site made.

    Args:
        header: Returns a header of the request by its name in small letters; empty if there is none.
        names: Names by which the server may be called, besides addresses: a page cannot have the address of another server as its
            name. None if it may have any, because callers show who they are.

    Raises:
        ServiceError: reason ``PERMISSION_DENIED``.
    """
    host = header("host")
    origin = header("origin")
    if header("sec-fetch-site").lower() not in _SAME or (origin and _host_of(origin) != host.lower()):
        raise _refusal("pages of other sites may not call this server", "call it from a program or a server")
    name = _name_of(host)
    if names is not None and name not in names and not _is_address(name):
        raise _refusal(
            f"without an access file, this server is not called {quoted(name)}",
            "call it by its address or by localhost, or name it to the server with --http-name",
        )


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


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
