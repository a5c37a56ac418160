"""The console as a web application: its paths, its limits, and what it says of failures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from slipway.console import pages
from slipway.console.asking import pages as asking
from slipway.console.place import Place
from slipway.console.questions import Question
from slipway.console.rendering import HEADERS, ROOT, page, rendered
from slipway.console.signing_in import PlaceOf, given_token, sign_in, sign_in_page, sign_out, token_of
from slipway.console.wish import Wish
from slipway.errors import ConfigurationError, ModelExportError, ServiceError
from slipway.rpc.http_status import http_status
from slipway.rpc.values import status_of

log = logging.getLogger("slipway.console")

_MOST_BYTES = 64 << 10
_MOST_BYTES_OF_A_PROMPT = 256 << 10
"""A letter of most scripts takes nine bytes in a form."""
_MOST_FIELDS = 200
_FORM_SECONDS = 20.0
_STOP_ASKING = 286
"""htmx shows what comes with this status, and does not ask again."""
_STATIC = {"console.css": "text/css; charset=utf-8", "htmx.min.js": "text/javascript; charset=utf-8"}

_Page = Callable[[Request, Place], Response]
_Form = Callable[[Request, Place, Any], Response]
Fields = list[tuple[str, str]]


def console(place_of: PlaceOf, *, signing_in: bool = False) -> Starlette:
    """Return the console.

    Args:
        place_of: Returns the place as the caller of a request may see it.
        signing_in: Whether callers sign in; an error with the reason ``UNAUTHENTICATED`` then leads them there.
    """

    def place_for(request: Request) -> Place:
        token = token_of(request) if signing_in else ""
        request.state.signed_in = bool(token)
        return place_of(request, token)

    def shown(handler: _Page) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return await run_in_threadpool(handler, request, place_for(request))

        return endpoint

    def sent(
        handler: _Form, read: Callable[[Fields], Any] = Wish.of, *, most: int = _MOST_BYTES
    ) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            form = read(await fields_of(request, most=most))
            return await run_in_threadpool(handler, request, place_for(request), form)

        return endpoint

    async def signed_in(request: Request) -> Response:
        fields = dict(await fields_of(request))
        return await run_in_threadpool(sign_in, request, fields, place_of(request, given_token(fields)))

    async def asked_to_sign_in(request: Request) -> Response:
        return sign_in_page(request)

    async def signed_out(_: Request) -> Response:
        return sign_out()

    export = "/projects/{project}/exports/{export}"
    paths = [
        Route("/", shown(pages.list_page)),
        Route("/list", shown(pages.list_rows)),
        Route("/new", shown(pages.new_page)),
        Route("/new", sent(pages.planned_page), methods=["POST"]),
        Route("/new/check", sent(pages.check), methods=["POST"]),
        Route("/exports", sent(pages.create), methods=["POST"]),
        Route("/compare", shown(pages.compare)),
        Route("/machines", shown(pages.machines)),
        Route(export, shown(pages.export_page)),
        Route(f"{export}/live", shown(pages.live)),
        Route(f"{export}/report", shown(pages.report)),
        Route(export + "/outputs/{output}.tar", shown(pages.download)),
        Route(f"{export}/ask", shown(asking.ask_page)),
        Route(f"{export}/ask", sent(asking.ask, Question.of, most=_MOST_BYTES_OF_A_PROMPT), methods=["POST"]),
        Route(f"{export}/ask/answers", shown(asking.answers)),
        Route(f"{export}/ask/cancel", shown(asking.cancel), methods=["POST"]),
        Route(export + "/{action:str}", shown(pages.act), methods=["POST"]),
        Route("/static/{name}", _static),
    ]
    if signing_in:
        paths += [
            Route("/sign-in", asked_to_sign_in),
            Route("/sign-in", signed_in, methods=["POST"]),
            Route("/sign-out", signed_out, methods=["POST"]),
        ]
    routes = [Route(f"{ROOT}{each.path}", each.endpoint, methods=list(each.methods or ())) for each in paths]
    failed = partial(_failed, signing_in=signing_in)
    handlers: dict[Any, Any] = {ModelExportError: failed, HTTPException: _refused, Exception: _broken}
    return Starlette(routes=[*routes, Route(ROOT, _to_list)], exception_handlers=handlers)


async def fields_of(request: Request, *, most: int = _MOST_BYTES) -> Fields:
    """Return the fields of a form, as browsers send them by default.

    Args:
        request: The request.
        most: Most bytes of the form.

    Raises:
        ServiceError: ``LIMIT_EXCEEDED`` for more bytes or 200 fields.
        ConfigurationError: ``CONFIGURATION_INVALID`` for another kind of body.
    """
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise ServiceError(f"the form has more than {most} bytes", reason="LIMIT_EXCEEDED")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if data and kind != "application/x-www-form-urlencoded":
            raise ValueError(f"its type is {kind!r}")  # noqa: TRY301 - the same answer as for a malformed one
        return parse_qsl(data.decode("ascii"), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise ConfigurationError(
            f"the form cannot be read: {error}",
            reason="CONFIGURATION_INVALID",
            remedy="send it from the console's page",
        ) from error


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        raise HTTPException(HTTPStatus.NOT_FOUND)
    data = resources.files("slipway.console").joinpath("static", name).read_bytes()
    return Response(data, media_type=_STATIC[name], headers={**HEADERS, "cache-control": "max-age=3600"})


async def _to_list(_: Request) -> Response:
    return RedirectResponse(f"{ROOT}/", HTTPStatus.SEE_OTHER)


async def _failed(request: Request, error: ModelExportError, *, signing_in: bool) -> Response:
    failure, is_part = error.failure(), bool(request.headers.get("hx-request"))
    if signing_in and failure.reason == "UNAUTHENTICATED":
        where = f"{ROOT}/sign-in?next={quote(_page_of(request))}"
        if is_part:  # the whole page goes there
            return Response(status_code=HTTPStatus.OK, headers={**HEADERS, "hx-redirect": where})
        return RedirectResponse(where, HTTPStatus.SEE_OTHER, headers=HEADERS)
    if is_part:  # a page shows no other status, and asks again every second unless it is told to stop
        status = HTTPStatus.OK if failure.retryable else _STOP_ASKING
        return HTMLResponse(rendered("failure", failure=failure), status_code=status, headers=HEADERS)
    return page(request, None, "failed", status=http_status(status_of(failure)), failure=failure)


def _page_of(request: Request) -> str:
    """Return the path and query of the page that a caller looks at."""
    if request.headers.get("hx-request"):
        shown = urlsplit(request.headers.get("hx-current-url", ""))
        return f"{shown.path}?{shown.query}" if shown.query else shown.path
    if request.method != "GET":
        return f"{ROOT}/"
    return f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path


async def _refused(request: Request, error: HTTPException) -> Response:
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        said = ServiceError("this page takes no such request", reason="CALL_NOT_FOUND", remedy="go back to the list")
    else:
        said = ServiceError("there is no such page", reason="CALL_NOT_FOUND", remedy="go back to the list")
    return page(request, None, "failed", status=error.status_code, failure=said.failure())


async def _broken(request: Request, error: Exception) -> Response:
    log.error(f"{request.url.path} failed", exc_info=error)
    said = ServiceError("the console failed", reason="INTERNAL", remedy="see its log")
    return page(request, None, "failed", status=HTTPStatus.INTERNAL_SERVER_ERROR, failure=said.failure())
