"""Keys of issuers: found, kept, renewed, never asked for too often, and never waited for too long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from joserfc.jwk import ECKey, OctKey, RSAKey

from slipway.errors import ServiceError
from slipway.security.access.issuers import fetching
from slipway.security.access.issuers.keys import MOST_KEYS, MOST_WAITING, IssuerKeys, KeySource, public_keys
from support.harness.unhurried import unhurried
from support.servers.certificates import Authority
from support.servers.oidc_issuer import OidcIssuer, oidc_issuer

DISCOVERY = "/.well-known/openid-configuration"


@pytest.fixture
def issuer() -> Iterator[OidcIssuer]:
    with oidc_issuer() as running:
        yield running


class Clocked:
    """Keys of an issuer, with a clock of our own."""

    def __init__(self, issuer: OidcIssuer, **source: Any) -> None:
        self.now = 1000.0
        given = {"name": "id", "issuer": issuer.url, "url": None, "file": None, "ca_file": None, "token_file": None}
        self.source = KeySource(**(given | {"refresh_seconds": 30.0} | source))
        self.keys = IssuerKeys(self.source, clock=lambda: self.now)

    async def has(self, kid: str) -> bool:
        return await self.keys.find(kid) is not None

    async def reason(self, kid: str = "first") -> str:
        try:
            return "found" if await self.has(kid) else "unknown"
        except ServiceError as error:
            return error.reason


async def test_a_new_key_is_found_and_a_withdrawn_one_forgotten(issuer: OidcIssuer) -> None:
    clocked = Clocked(issuer)
    assert await clocked.has("first")
    issuer.rotate("second")
    clocked.now += 31
    assert await clocked.has("second")
    assert not await clocked.has("first")
    assert issuer.asked["/keys"] == 2


async def test_a_flood_of_unknown_keys_asks_once(issuer: OidcIssuer) -> None:
    clocked = Clocked(issuer)
    reasons = await asyncio.gather(*(clocked.reason(f"k{number}") for number in range(500)))
    assert reasons == ["unknown"] + ["ISSUER_UNAVAILABLE"] * 499  # only the first one's fetch began after its call
    for number in range(500):
        assert await clocked.reason(f"m{number}") == "ISSUER_UNAVAILABLE"
    assert issuer.asked == {DISCOVERY: 1, "/keys": 1}
    assert await clocked.has("first")
    clocked.now += 30
    await asyncio.gather(*(clocked.reason(f"k{number}") for number in range(500)))
    assert issuer.asked["/keys"] == 2


async def test_a_new_key_is_not_refused_for_good_before_it_can_be_fetched(issuer: OidcIssuer) -> None:
    clocked = Clocked(issuer)
    assert await clocked.reason("of a stranger") == "unknown"
    issuer.rotate("second")
    clocked.now += 18
    with pytest.raises(ServiceError) as caught:
        await clocked.has("second")
    assert (caught.value.reason, caught.value.about["retry_after_seconds"]) == ("ISSUER_UNAVAILABLE", "12")
    clocked.now += 12
    assert await clocked.reason("second") == "found"
    assert await clocked.reason("first") == "unknown"  # withdrawn


async def test_calls_that_wait_for_keys_have_a_limit(issuer: OidcIssuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FETCH_SECONDS", 1.0)
    issuer.changes[DISCOVERY] = 3.0
    clocked = Clocked(issuer)
    calls = [asyncio.create_task(clocked.reason()) for _ in range(MOST_WAITING + 50)]
    refused, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert len(refused) == 50
    assert len(waiting) == MOST_WAITING
    assert {await call for call in calls} == {"ISSUER_UNAVAILABLE"}
    assert clocked.keys._waiting == 0


async def test_calls_with_a_known_key_need_no_place_among_those_that_wait(issuer: OidcIssuer, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [GOOD_KEY]}))
    clocked = Clocked(issuer, file=path)
    assert await clocked.reason() == "found"
    path.write_text(json.dumps({"keys": [GOOD_KEY]}) + "\n")
    clocked.now += 30
    assert set(await asyncio.gather(*(clocked.reason() for _ in range(2 * MOST_WAITING)))) == {"found"}


async def test_an_issuer_that_was_down_is_asked_again_soon(issuer: OidcIssuer) -> None:
    clocked = Clocked(issuer, refresh_seconds=300.0)
    issuer.changes[DISCOVERY] = 503
    assert await clocked.reason() == "ISSUER_UNAVAILABLE"
    issuer.changes.clear()
    clocked.now += 10
    assert await clocked.reason() == "found"


async def test_old_keys_are_renewed_in_the_background(issuer: OidcIssuer) -> None:
    clocked = Clocked(issuer)
    assert await clocked.has("first")
    issuer.rotate("second", keep=True)
    clocked.now += 301
    assert await clocked.has("first")
    while issuer.asked["/keys"] < 2 or clocked.keys._fetching is not None:
        await asyncio.sleep(0.01)
    assert await clocked.has("second")
    assert issuer.asked["/keys"] == 2


async def test_an_issuer_that_is_down_at_the_start_is_asked_again_later(
    issuer: OidcIssuer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="slipway.security")
    clocked = Clocked(issuer)
    issuer.changes[DISCOVERY] = 503
    assert [await clocked.reason() for _ in range(3)] == ["ISSUER_UNAVAILABLE"] * 3
    assert issuer.asked[DISCOVERY] == 1
    issuer.changes.clear()
    clocked.now += 30
    assert await clocked.reason() == "found"
    assert "responded with status 503" in caplog.text
    assert "the issuer id has 1 keys" in caplog.text


async def test_keys_are_kept_for_a_while_without_their_issuer(issuer: OidcIssuer) -> None:
    clocked = Clocked(issuer)
    assert await clocked.has("first")
    issuer.changes[DISCOVERY] = 503
    for _ in range(11):
        clocked.now += 301
        assert await clocked.reason() == "found"
        while clocked.keys._fetching is not None:
            await asyncio.sleep(0.01)
    assert await clocked.reason("rotated") == "ISSUER_UNAVAILABLE"
    clocked.now += 301
    assert await clocked.reason() == "ISSUER_UNAVAILABLE"


async def test_nobody_listens() -> None:
    with oidc_issuer() as issuer:
        clocked = Clocked(issuer)
    began = time.monotonic()
    assert await clocked.reason() == "ISSUER_UNAVAILABLE"
    assert time.monotonic() - began < 30


GOOD_KEY = ECKey.generate_key("P-256", {"kid": "first", "use": "sig"}).as_dict(private=False)
BAD_DOCUMENTS: dict[str, tuple[str, Any]] = {
    "a redirect": (DISCOVERY, 302),
    "a redirect of the keys": ("/keys", 307),
    "no content": (DISCOVERY, 204),
    "another issuer": (DISCOVERY, {"issuer": "https://id.example", "jwks_uri": "https://id.example/keys"}),
    "no address": (DISCOVERY, {"issuer": "URL"}),
    "a plain address elsewhere": (DISCOVERY, {"issuer": "URL", "jwks_uri": "http://id.example/keys"}),
    "a file": (DISCOVERY, {"issuer": "URL", "jwks_uri": "file:///etc/passwd"}),
    "an address of a wrong type": (DISCOVERY, {"issuer": "URL", "jwks_uri": ["https://id.example"]}),
    "no JSON": ("/keys", b"<html>"),
    "a list": ("/keys", []),
    "no keys": ("/keys", {}),
    "an empty list": ("/keys", {"keys": []}),
    "keys of a wrong type": ("/keys", {"keys": {"first": GOOD_KEY}}),
    "too many keys": ("/keys", {"keys": [{**GOOD_KEY, "kid": str(n)} for n in range(MOST_KEYS + 1)]}),
    "a long document": ("/keys", {"keys": [GOOD_KEY], "more": "x" * fetching.MOST_BYTES}),
    "a deep document": ("/keys", b"[" * 100_000),
    "the same id twice": ("/keys", {"keys": [GOOD_KEY, GOOD_KEY]}),
    "no UTF-8": ("/keys", b"\xff\xfe"),
}


@pytest.mark.parametrize("what", BAD_DOCUMENTS)
async def test_a_bad_issuer_has_no_keys(issuer: OidcIssuer, what: str) -> None:
    path, document = BAD_DOCUMENTS[what]
    if isinstance(document, dict) and document.get("issuer") == "URL":
        document = {**document, "issuer": issuer.url}
    issuer.changes[path] = document
    assert await Clocked(issuer).reason() == "ISSUER_UNAVAILABLE"
    assert not issuer.asked["/elsewhere"]


def test_only_public_keys_for_signatures_are_taken() -> None:
    others = [
        OctKey.generate_key(256, {"kid": "secret"}).as_dict(private=True),
        {**GOOD_KEY, "kid": "encrypts", "use": "enc"},
        {**GOOD_KEY, "kid": "signs", "use": "sig", "key_ops": ["sign"]},
        {"kid": "short", "kty": "RSA", "n": "AQAB", "e": "AQAB"},
        {"kid": "none", "kty": "RSA"},
        {"kid": "wrong", "kty": "EC", "crv": "P-256", "x": "AAAA", "y": "AAAA"},
        {"kid": "curve", "kty": "EC", "crv": "P-0", "x": "AAAA", "y": "AAAA"},
        {**GOOD_KEY, "kid": ["list"]},
        {**GOOD_KEY, "kty": ["EC"]},
        {"kid": "numbers", "kty": "EC", "crv": 1, "x": 2, "y": 3},
        None, 1, "EC", [],
    ]  # fmt: skip
    assert list(public_keys({"keys": [*others, GOOD_KEY]})) == ["first"]


async def test_a_slow_issuer_holds_up_nothing(issuer: OidcIssuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FETCH_SECONDS", 0.5)  # so that the test need not wait for the real one
    issuer.changes[DISCOVERY] = 3.0
    waiting = asyncio.create_task(Clocked(issuer).reason())
    longest = 0.0
    while not waiting.done():
        began = time.monotonic()
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - began)
    assert await waiting == "ISSUER_UNAVAILABLE"
    assert longest < unhurried(0.4)


async def test_an_issuer_that_sends_byte_by_byte_holds_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FETCH_SECONDS", 0.5)  # each byte comes sooner
    ended = threading.Event()

    class Dribbling(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not ended.wait(0.05):
                    self.request.sendall(b"x")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dribbling) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        clocked = Clocked(OidcIssuer(), url=f"http://127.0.0.1:{server.server_address[1]}")
        try:
            async with asyncio.timeout(unhurried(5)):
                assert await clocked.reason() == "ISSUER_UNAVAILABLE"
                while any(thread.name == "slipway-issuer" for thread in threading.enumerate()):
                    await asyncio.sleep(0.02)
        finally:
            ended.set()
            server.shutdown()
    assert clocked.keys._problem == "it took longer than 0.5 s"


async def test_no_proxy_is_between_an_issuer_on_this_machine_and_us(
    issuer: OidcIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with oidc_issuer() as proxy:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", proxy.url)
        assert await Clocked(issuer).reason() == "found"
        assert not proxy.asked


async def test_keys_in_a_file_follow_the_file(issuer: OidcIssuer, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def write() -> None:
        path.write_text(json.dumps({"keys": [key.as_dict(private=False) for key in issuer.keys.values()]}))

    write()
    clocked = Clocked(issuer, file=path)
    assert await clocked.reason() == "found"
    issuer.rotate("second")
    write()
    clocked.now += 30
    assert [await clocked.reason(), await clocked.reason("second")] == ["unknown", "found"]
    assert not issuer.asked


async def test_the_token_for_the_keys_is_shown_where_they_are(issuer: OidcIssuer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("of-this-server-alone\n")
    clocked = Clocked(issuer, url=f"{issuer.url}/keys", token_file=token)
    assert await clocked.reason() == "found"
    assert issuer.headers["Authorization"] == "Bearer of-this-server-alone"
    assert issuer.asked == {"/keys": 1}
    token.write_bytes(b"two\nlines")
    refused = Clocked(issuer, url=f"{issuer.url}/keys", token_file=token)
    assert await refused.reason() == "ISSUER_UNAVAILABLE"
    assert "lines" not in refused.keys._problem


async def test_the_token_for_the_keys_is_shown_nowhere_else(issuer: OidcIssuer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("of-this-server-alone\n")
    with oidc_issuer() as bucket:
        issuer.changes[DISCOVERY] = {"issuer": issuer.url, "jwks_uri": f"{bucket.url}/keys"}
        assert await Clocked(issuer, token_file=token).reason() == "found"
        assert issuer.headers["Authorization"] == "Bearer of-this-server-alone"
        assert bucket.asked["/keys"] == 1
        assert "Authorization" not in bucket.headers
        bucket.changes["/keys"] = 401
        refused = Clocked(issuer, token_file=token)
        assert await refused.reason() == "ISSUER_UNAVAILABLE"
        assert "status 401; token_file is not shown there: name the address in jwks_url" in refused.keys._problem


async def test_only_a_host_with_a_certificate_of_the_authority_gives_keys(tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"keys": [GOOD_KEY]}).encode())

        def log_message(self, *_: Any) -> None:
            """Write nothing."""

    files = Authority(tmp_path / "good").files("localhost")
    assert files.certificate is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        url = f"https://localhost:{server.server_port}/keys"
        assert await Clocked(OidcIssuer(), url=url, ca_file=files.ca).reason() == "found"
        other = Authority(tmp_path / "other").ca
        for refused in ({"ca_file": other}, {}, {"ca_file": files.ca, "url": url.replace("localhost", "127.0.0.1")}):
            clocked = Clocked(OidcIssuer(), **{"url": url, **refused})
            assert await clocked.reason() == "ISSUER_UNAVAILABLE"
            assert "CERTIFICATE_VERIFY_FAILED" in clocked.keys._problem
        server.shutdown()
        thread.join()


async def test_rsa_keys_of_usual_sizes_are_taken(issuer: OidcIssuer) -> None:
    issuer.keys = {"rsa": RSAKey.generate_key(2048, {"kid": "rsa"})}
    assert await Clocked(issuer).reason("rsa") == "found"
