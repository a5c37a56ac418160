"""By which names a coordinator may be called over HTTP, where the address alone lets callers in."""

from __future__ import annotations

from typing import Any

import pytest

from slipway.errors import ServiceError
from slipway.security.server import coordinator_security
from slipway.settings.security import Security
from slipway_coordinator.http.origins import check_origin
from slipway_coordinator.http.requests import HttpRequest


async def receive() -> dict[str, Any]:
    raise AssertionError("nothing of a body is read")


def request_to(host: str, **headers: str) -> HttpRequest:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in {"host": host, **headers}.items()]
    scope = {"method": "GET", "raw_path": b"/", "query_string": b"", "headers": pairs, "client": None}
    return HttpRequest({**scope, "scheme": "http", "state": {}}, receive)


def names_at(address: str, *names: str) -> frozenset[str] | None:
    """Return the names of a coordinator without an access file."""
    security = coordinator_security(
        Security(), address="127.0.0.1:7070", http_address=address, http_names=names, allow_anonymous=True
    )
    return security.names_over_http()


@pytest.mark.parametrize("address", ["0.0.0.0:8080", "[::]:8080", ":8080", "127.0.0.1:8080", "localhost:8080"])
def test_a_page_that_gives_its_name_this_address_is_refused(address: str) -> None:
    names = names_at(address, "Gateway.example")
    for host in (
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "",
        "localhost.evil.example",
        "[::1",
        "0x7f.1",
        "a\x1b",
    ):
        with pytest.raises(ServiceError) as caught:
            check_origin(request_to(host, origin=f"http://{host}"), names=names)
        assert caught.value.reason == "PERMISSION_DENIED", host
        assert "\x1b" not in str(caught.value)
    for host in ("localhost:8080", "LOCALHOST", "127.0.0.1:8080", "[::1]:8080", "10.0.0.7:8080", "gateway.example"):
        check_origin(request_to(host, origin=f"http://{host.lower()}"), names=names)


def test_the_name_that_it_listens_at_is_one_of_its_names() -> None:
    check_origin(request_to("builds.internal:8080"), names=names_at("builds.internal:8080"))


def test_callers_who_show_who_they_are_use_any_name() -> None:
    check_origin(request_to("slipway.example", origin="https://slipway.example"), names=None)
    with pytest.raises(ServiceError):
        check_origin(request_to("slipway.example", origin="https://evil.example"), names=None)
