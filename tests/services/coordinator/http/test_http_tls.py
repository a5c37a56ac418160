"""The port for HTTP with certificates: who is known by one, and certificates that are renewed."""

from __future__ import annotations

import datetime as dt
import http.client
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slipway.errors import ConfigurationError
from slipway.security.server import coordinator_security
from slipway.settings.security import Security
from support.coordinators.harness import wait_for
from support.coordinators.http_places import Answer, HttpPlace, call
from support.servers.certificates import Authority

EXPORTS = "/v1/projects/red/exports"


class TlsPlace(HttpPlace):
    """A coordinator with certificates."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.authority = Authority(home / "tls")
        self.tls = self.authority.files("server", "localhost", "127.0.0.1")
        with (home / "access.yaml").open("a") as access:
            access.write("\n  - {name: robot, role: viewer, projects: [red], certificate: robot.slipway}\n")
        assert self.security is not None
        self.security = replace(self.security, tls=self.tls)

    def https(self, who: str = "", *, certificate: str = "", authority: Authority | None = None) -> Answer:
        context = ssl.create_default_context(cafile=str(self.authority.ca))
        if certificate:
            files = (authority or self.authority).files(certificate)
            assert files.certificate is not None
            context.load_cert_chain(files.certificate, files.key)
        return call(self.http_address, "GET", EXPORTS, token=self.tokens.get(who, ""), tls=context)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsPlace]:
    with TlsPlace(tmp_path_factory.mktemp("http-tls")) as place:
        yield place


def test_a_token_or_a_certificate_says_who_calls(place: TlsPlace) -> None:
    assert place.https("viewer").status == 200
    assert place.https(certificate="robot.slipway").status == 200
    stranger = place.https(certificate="stranger.slipway")
    assert (stranger.status, stranger.reason) == (401, "UNAUTHENTICATED")
    assert place.https().status == 401


def test_a_certificate_of_another_authority_is_refused_by_tls(place: TlsPlace, tmp_path: Path) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        place.https(certificate="robot.slipway", authority=Authority(tmp_path / "other"))


def test_plain_http_is_not_answered(place: TlsPlace) -> None:
    with pytest.raises((http.client.BadStatusLine, ConnectionResetError)):  # an alert of TLS, or the end
        place.call("viewer", "GET", EXPORTS)
    assert place.https("viewer").status == 200


def test_a_renewed_certificate_is_that_of_the_next_connection(place: TlsPlace) -> None:
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(days=3)
    place.authority.files("server", "localhost", "127.0.0.1", expires=soon)

    def expires_soon() -> bool:
        host, _, port = place.http_address.partition(":")
        pem = ssl.get_server_certificate((host, int(port)))
        path = place.home / "seen.pem"
        path.write_text(pem)
        decoded = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]  # the library has no public reader
        return ssl.cert_time_to_seconds(decoded["notAfter"]) < soon.timestamp() + 60

    wait_for(expires_soon)
    assert place.https("viewer").status == 200


def test_a_port_that_others_reach_needs_an_access_file() -> None:
    with pytest.raises(ConfigurationError) as caught:
        coordinator_security(Security(), address="127.0.0.1:7070", http_address="0.0.0.0:8080")
    assert caught.value.reason == "ACCESS_OPEN"
    assert caught.value.about["address"] == "0.0.0.0:8080"
    assert coordinator_security(Security(), address="127.0.0.1:7070", http_address="localhost:8080").http_address
