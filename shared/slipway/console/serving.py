"""``slipway ui``: serve the console on this machine, to whoever has the key in its address."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import webbrowser
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from slipway.console.application import console
from slipway.console.on_machine import MachinePlace
from slipway.console.place import Place
from slipway.console.rendering import ROOT, page
from slipway.errors import ModelExportError, ServiceError
from slipway.exporting.interruption import quiet_log
from slipway.rpc.serving import check_port, listen_error
from slipway.security.origins import check_origin
from slipway.settings import Settings

_KEY = "key"
_NAMES = frozenset({"localhost"})


class KeyGuard:
    """Lets in who has the key: it is in the address that was printed, and then in a cookie. Other people have this machine's ports too.

    Args:
        application: What it guards.
        key: The key.
        port: Port of the server; cookies of one machine do not tell ports apart.
    """

    def __init__(self, application: ASGIApp, *, key: str, port: int) -> None:
        self._application, self._key = application, key
        self._cookie = f"slipway-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        await (self._refusal(request) or self._application)(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        """Return what is sent instead of the page; None to let the request through."""
        try:
            if self._is(request.query_params.get(_KEY, "")):
                check_origin(lambda name: request.headers.get(name, "") if name == "host" else "", names=_NAMES)
                return self._let_in(request)
            check_origin(lambda name: request.headers.get(name, ""), names=_NAMES)
            if not self._is(request.cookies.get(self._cookie, "")):
                raise ServiceError(
                    "this console is another person's, or its address has changed",
                    reason="PERMISSION_DENIED",
                    remedy="open the address that slipway ui has printed",
                )
        except ModelExportError as error:
            return page(request, None, "failed", status=HTTPStatus.FORBIDDEN, failure=error.failure())
        return None

    def _is(self, key: str) -> bool:
        return secrets.compare_digest(key.encode(), self._key.encode())

    def _let_in(self, request: Request) -> Response:
        """Keep the key in a cookie, and lead on from a page of this address: a browser sends the cookie to no page that another has led to."""
        answer = page(request, None, "let_in")
        answer.set_cookie(self._cookie, self._key, httponly=True, samesite="strict", path=ROOT)
        return answer


@contextlib.contextmanager
def place_of_settings(settings: Settings) -> Iterator[Place]:
    """Yield the place that the settings name: a coordinator, or this machine."""
    if settings.coordinator:
        from slipway.client.calls import BlockingCalls
        from slipway.console.at_coordinator import CoordinatorPlace

        with BlockingCalls(settings.coordinator, security=settings.security) as calls:
            yield CoordinatorPlace(calls, project=settings.project, address=settings.coordinator)
        return
    place = MachinePlace(settings, dict(os.environ))
    try:
        yield place
    finally:
        place.close()


def serve(settings: Settings, *, port: int, announce: Callable[[str], None]) -> None:
    """Serve the console on loopback until it is interrupted; exports that it runs end then, and can be continued.

    Args:
        settings: Settings of this machine.
        port: Port; 0 takes a free one.
        announce: Gets the address, with the key.

    Raises:
        ServiceError: ``REQUEST_INVALID``: the port is taken.
    """
    check_port(f"127.0.0.1:{port}")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise listen_error(f"127.0.0.1:{port}", str(error)) from error
    port, key = listener.getsockname()[1], secrets.token_urlsafe(24)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what it has to say is told by the console itself
    logging.getLogger("slipway.console").addHandler(logging.StreamHandler())
    with quiet_log(), place_of_settings(settings) as place:
        guarded = KeyGuard(console(lambda _, __: place), key=key, port=port)
        config = uvicorn.Config(
            guarded,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = _Server(config, lambda: announce(f"http://127.0.0.1:{port}{ROOT}/?{_KEY}={key}"))
        server.run(sockets=[listener])


def open_in_browser(address: str, folder: Path) -> None:
    """Open an address with a key in it: by a file that leads to it, because everybody can read the words with which a browser is started.

    Args:
        address: The address.
        folder: A folder that nobody else can read, which is removed when the console has ended.
    """
    path = folder / "open.html"
    path.write_text(f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={address}">', encoding="ascii")
    webbrowser.open(path.as_uri())


class _Server(uvicorn.Server):
    """Announces itself once it serves, and ends at the first Ctrl-C without raising it again.

    Args:
        config: Of the server.
        announce: Called once it serves.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        self._announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End at SIGINT and SIGTERM."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
