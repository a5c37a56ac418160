"""One attempt at a receiver: what counts as delivered, and that no receiver can hold a thread, fill memory or lead elsewhere."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from slipway_coordinator.storage.deliveries import Delivery
from slipway_coordinator.webhooks.posting import Attempt, Outcome, post
from slipway_coordinator.webhooks.receivers import Receiver, load_webhooks
from support.harness.unhurried import unhurried
from support.servers.certificates import Authority
from support.servers.free_ports import free_port
from support.servers.webhook_receiver import (
    SECRET,
    Received,
    WebhookReceiver,
    webhook_receiver,
    webhooks_file,
)

DELIVERY = Delivery(
    receiver="portal",
    id="0b5e8c9e4f2d4a17",
    type="export.created",
    export="projects/default/exports/x",
    export_create_time=1.0,
    revision=1,
    body='{"specversion":"1.0","id":"0b5e8c9e4f2d4a17","data":{"label":"Ü\u2028"}}',
)


@pytest.fixture
def server() -> Iterator[WebhookReceiver]:
    with webhook_receiver() as running:
        yield running


def receiver(folder: Path, server: WebhookReceiver, *, secret: str = SECRET, **settings: Any) -> Receiver:
    return load_webhooks(webhooks_file(folder, server.entry(**settings), secret=secret)).receivers[0]


async def attempt(folder: Path, server: WebhookReceiver, **settings: Any) -> Attempt:
    return await post(receiver(folder, server, **settings), DELIVERY)


async def test_a_request_is_what_standard_webhooks_says(tmp_path: Path, server: WebhookReceiver) -> None:
    assert await attempt(tmp_path, server) == Attempt(Outcome.DELIVERED)
    (request,) = server.requests
    assert request.body == DELIVERY.body.encode()
    assert request.verified() == request.event
    assert request.headers["Content-Type"] == "application/cloudevents+json; charset=utf-8"
    assert request.headers["Webhook-Id"] == DELIVERY.id
    assert abs(int(request.headers["Webhook-Timestamp"]) - time.time()) < 60
    assert request.path == "/hook"


TAMPERED: dict[str, Callable[[Received], tuple[bytes, dict[str, str]]]] = {
    "body": lambda one: (one.body.replace(b"1.0", b"1.1"), {}),
    "id": lambda one: (one.body, {"Webhook-Id": "another"}),
    "time": lambda one: (one.body, {"Webhook-Timestamp": str(int(one.headers["Webhook-Timestamp"]) + 1)}),
    "old": lambda one: (one.body, {"Webhook-Timestamp": str(int(one.headers["Webhook-Timestamp"]) - 1000)}),
    "signature": lambda one: (one.body, {"Webhook-Signature": "v1," + "A" * 43 + "="}),
}


@pytest.mark.parametrize("what", TAMPERED)
async def test_a_receiver_notices_what_was_changed(tmp_path: Path, server: WebhookReceiver, what: str) -> None:
    await attempt(tmp_path, server)
    (request,) = server.requests
    body, headers = TAMPERED[what](request)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body, {**request.headers, **headers})
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_" + "B" * 32).verify(request.body, dict(request.headers))


async def test_several_secrets_each_sign(tmp_path: Path, server: WebhookReceiver) -> None:
    other = "whsec_" + "B" * 32
    await attempt(tmp_path, server, secret=f"{other}\n{SECRET}")
    (request,) = server.requests
    assert request.verified(other) == request.verified(SECRET)
    assert request.headers["Webhook-Signature"].count("v1,") == 2


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_every_status_of_success_is_delivered(tmp_path: Path, server: WebhookReceiver, status: int) -> None:
    server.statuses = [status]
    assert (await attempt(tmp_path, server)).outcome is Outcome.DELIVERED


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(tmp_path: Path, server: WebhookReceiver, status: int) -> None:
    server.statuses = [status]
    failed = await attempt(tmp_path, server)
    assert failed.outcome is Outcome.FAILED
    assert failed.problem == f"it responded with status {status}, and redirects are not followed"
    assert [request.path for request in server.requests] == ["/hook"]


@pytest.mark.parametrize(("status", "outcome"), [(400, "failed"), (404, "failed"), (410, "gone"), (503, "failed")])
async def test_other_statuses(tmp_path: Path, server: WebhookReceiver, status: int, outcome: str) -> None:
    server.statuses = [status]
    ended = Attempt(Outcome(outcome), f"it responded with status {status}", refuses_event=status == 400)
    assert await attempt(tmp_path, server) == ended


PAUSES = {
    "7": 7.0,
    " 3600 ": 3600.0,
    "0": 0.0,
    "3601": 3600.0,
    "9" * 5000: 3600.0,
    "": 0.0,
    "²": 0.0,
    "-1": 0.0,
    "soon": 0.0,
    "1.5": 0.0,
}


@pytest.mark.parametrize("text", PAUSES, ids=lambda text: text[:10])
async def test_a_receiver_may_ask_for_a_pause(tmp_path: Path, server: WebhookReceiver, text: str) -> None:
    def busy(_: Received, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(429)
        handler.send_header("Retry-After", text)
        handler.end_headers()

    server.respond = busy
    assert (await attempt(tmp_path, server)).pause_seconds == PAUSES[text]


def raw(text: bytes, *, again: bytes = b"", every: float = 0.0) -> Callable[[Received, BaseHTTPRequestHandler], None]:
    """Respond with these bytes, and others again and again for as long as somebody reads them."""

    def respond(_: Received, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        with contextlib.suppress(OSError):
            handler.wfile.write(text)
            while again:
                handler.wfile.write(again)
                if every:
                    time.sleep(every)

    return respond


HOSTILE: dict[str, tuple[Any, Outcome, str]] = {
    "an endless body": (raw(b"HTTP/1.1 200 OK\r\n\r\n", again=b"x" * 65536), Outcome.DELIVERED, ""),
    "a huge body": (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"), Outcome.DELIVERED, ""),
    "an endless body of an error": (raw(b"HTTP/1.1 500 no\r\n\r\n", again=b"x" * 65536), Outcome.FAILED, "status 500"),
    "endless headers": (raw(b"HTTP/1.1 200 OK\r\n", again=b"A: b\r\n"), Outcome.FAILED, "100 headers"),
    "an endless header": (raw(b"HTTP/1.1 200 OK\r\nA: ", again=b"b" * 65536), Outcome.FAILED, "more than 65536"),
    "an endless status": (raw(b"HTTP/1.1 200 ", again=b"b" * 65536), Outcome.FAILED, "more than 65536"),
    "another protocol": (raw(b"SSH-2.0-OpenSSH\x1b[31m\r\n"), Outcome.FAILED, "it did not respond with HTTP"),
    "an echo of the request": (raw(b"POST /hook HTTP/1.1\r\n"), Outcome.FAILED, "it did not respond with HTTP"),
    "an echo as a status": (raw(b"HTTP/1.1 /hook\r\n"), Outcome.FAILED, "it did not respond with HTTP"),
    "an echo as a version": (raw(b"HTTP/2/hook 200 OK\r\n"), Outcome.FAILED, "it did not respond with HTTP"),
    "an echo as a reason": (raw(b"HTTP/1.1 500 /hook\r\n\r\n"), Outcome.FAILED, "it responded with status 500"),
    "nothing": (raw(b""), Outcome.FAILED, "without response"),
    "byte by byte": (raw(b"HTTP/1.1 200 ", again=b"O", every=0.05), Outcome.FAILED, "it took longer than 1 s"),
    "endless Continue": (
        raw(b"", again=b"HTTP/1.1 100 Continue\r\n\r\n", every=0.01),
        Outcome.FAILED,
        "it took longer",
    ),
    "a status that is none": (raw(b"HTTP/1.1 99999 ok\r\n\r\n"), Outcome.FAILED, "it did not respond with HTTP"),
    "a redirect to a file": (raw(b"HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\n\r\n"), Outcome.FAILED, "302"),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_receiver_holds_nothing(tmp_path: Path, server: WebhookReceiver, what: str) -> None:
    server.respond, outcome, problem = HOSTILE[what]
    began = time.monotonic()
    ended = await attempt(tmp_path, server, timeout_seconds=1)
    assert ended.outcome is outcome, ended
    assert problem in ended.problem
    assert len(ended.problem) <= 200
    assert "\x1b" not in ended.problem
    assert "/hook" not in ended.problem, "an address may hold a secret"
    assert time.monotonic() - began < unhurried(10)
    deadline = time.monotonic() + unhurried(10)
    while any(thread.name == "slipway-webhook" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "its thread goes on"
        time.sleep(0.02)


async def test_nobody_listens(tmp_path: Path) -> None:
    ended = await attempt(tmp_path, WebhookReceiver(port=free_port()))
    assert ended.outcome is Outcome.FAILED
    assert "refused" in ended.problem


async def test_a_host_that_does_not_exist(tmp_path: Path) -> None:
    ended = await attempt(tmp_path, WebhookReceiver(), url="https://portal.invalid/secret-path", timeout_seconds=30)
    assert ended.outcome is Outcome.FAILED
    assert ended.problem
    assert "secret-path" not in ended.problem


async def test_a_listener_that_takes_no_connection_costs_its_time_alone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ended = await attempt(tmp_path, WebhookReceiver(port=silent.getsockname()[1]), timeout_seconds=1)
    assert ended == Attempt(Outcome.FAILED, "it took longer than 1 s")


async def test_certificates_are_checked(tmp_path: Path) -> None:
    right, wrong = Authority(tmp_path / "right"), Authority(tmp_path / "wrong")
    files = right.files("server", "localhost")
    assert files.certificate is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    with webhook_receiver(tls=context) as server:
        assert (await attempt(tmp_path / "a", server, ca_file=str(right.ca))).outcome is Outcome.DELIVERED
        for settings in ({"ca_file": str(wrong.ca)}, {}):
            ended = await attempt(tmp_path / "b", server, **settings)
            assert ended.outcome is Outcome.FAILED
            assert "certificate verify failed" in ended.problem
        other = {"ca_file": str(right.ca), "url": f"https://127.0.0.1:{server.port}/hook"}
        ended = await attempt(tmp_path / "c", server, **other)
        assert "certificate is not valid for '127.0.0.1'" in ended.problem
    assert len(server.requests) == 1
    assert server.requests[0].verified()


async def test_no_proxy_is_between_a_receiver_on_this_machine_and_us(
    tmp_path: Path, server: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    assert (await attempt(tmp_path, server)).outcome is Outcome.DELIVERED
