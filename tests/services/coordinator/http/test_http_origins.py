"""By which names a coordinator may be called over HTTP, where the address alone lets callers in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipway.errors import ServiceError
from slipway.security.origins import check_origin
from slipway.security.server import coordinator_security
from slipway.settings.security import Security


def headers_of(host: str, **headers: str) -> Callable[[str], str]:
    """Return the headers of a request, found by name."""
    return lambda name: {"host": host, **headers}.get(name, "")


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
            check_origin(headers_of(host, origin=f"http://{host}"), names=names)
        assert caught.value.reason == "PERMISSION_DENIED", host
        assert "\x1b" not in str(caught.value)
    for host in ("localhost:8080", "LOCALHOST", "127.0.0.1:8080", "[::1]:8080", "10.0.0.7:8080", "gateway.example"):
        check_origin(headers_of(host, origin=f"http://{host.lower()}"), names=names)


def test_the_name_that_it_listens_at_is_one_of_its_names() -> None:
    check_origin(headers_of("builds.internal:8080"), names=names_at("builds.internal:8080"))


def test_callers_who_show_who_they_are_use_any_name() -> None:
    check_origin(headers_of("slipway.example", origin="https://slipway.example"), names=None)
    with pytest.raises(ServiceError):
        check_origin(headers_of("slipway.example", origin="https://evil.example"), names=None)
