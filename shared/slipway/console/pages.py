"""The pages of the console, one function each."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http import HTTPStatus
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from slipway.advice.offers import Offer
from slipway.console.downloads import tar_bytes, tar_of
from slipway.console.place import DELETE, Listing, Place, Shown
from slipway.console.rendering import HEADERS, REPORT_HEADERS, ROOT, page, rendered
from slipway.console.reports import (
    changed_settings,
    differences,
    findings_of,
    further_warnings,
    report_of,
    side_by_side,
)
from slipway.console.wish import Wish
from slipway.errors import ConfigurationError, ModelExportError, ServiceError
from slipway.exporting.batches.subjects import find_subjects
from slipway.formats.registry import split_output
from slipway.formats.targets import TARGETS
from slipway.results.outcome import delivered_formats, requested_formats
from slipway.results.report.page import page as report_page
from slipway.sources.addresses import is_url
from slipway.texts import one_line

log = logging.getLogger("slipway.console")

_MOST_RUNS, _COMPARED = 100, 2
_SAID = {
    "queued": "waits",
    "cancelling": "is being cancelled",
    "succeeded": "has succeeded",
    "failed": "has failed",
    "cancelled": "was cancelled",
    "interrupted": "was interrupted",
}
_MOVING = frozenset({"queued", "running", "cancelling", "starting", "delivering"})


def list_page(request: Request, place: Place) -> Response:
    """Show the list."""
    return page(request, place, "list", **_listed(request, place))


def list_rows(request: Request, place: Place) -> Response:
    """Return the rows of the list alone, which the page asks for while something runs."""
    return HTMLResponse(rendered("rows", **_listed(request, place)), headers=HEADERS)


def _listed(request: Request, place: Place) -> dict[str, Any]:
    after, wanted = (request.query_params.get(name, "") for name in ("after", "filter"))
    listing, failure = Listing(()), None
    try:
        listing = place.listed(after, filter=wanted)
    except ModelExportError as error:
        if not wanted or error.reason != "REQUEST_INVALID":
            raise
        failure = error.failure()
    moving = any(entry.state in _MOVING for entry in listing.entries)
    chosen = request.query_params.getlist("export")
    query = urlencode({"after": after, "filter": wanted})
    about = {"filter": wanted, "query": query, "failure": failure}
    return {"listing": listing, "moving": moving, "chosen": chosen, **about}


def new_page(request: Request, place: Place) -> Response:
    """Show the form of a new export."""
    return page(request, place, "new", **_form(Wish.of(request.query_params.multi_items()), place), failure=None)


def planned_page(request: Request, place: Place, wish: Wish) -> Response:
    """Show the form with what would be made, for browsers without scripts."""
    form = _form(wish, place)
    return page(request, place, "new", **{**form, **_plan(place, wish), "wish": form["wish"]})


def refused_form(request: Request, place: Place, wish: Wish, error: ModelExportError) -> Response:
    """Show the form again, with what was wrong."""
    values = {"planned": None, "command": "", "offers_again": False, "failure": error.failure()}
    return page(request, place, "new", status=HTTPStatus.UNPROCESSABLE_ENTITY, **{**_form(wish, place), **values})


def _form(wish: Wish, place: Place) -> dict[str, Any]:
    runs, bases = list[str](), list[str]()
    if place.is_here:
        with contextlib.suppress(ModelExportError, OSError):
            for subject in find_subjects(Path.cwd())[0][:_MOST_RUNS]:
                (bases if subject.plain else runs).append(subject.path)
    elif not wish.project:
        wish = replace(wish, project=place.project or _only_project(place))
    wish = replace(wish, form=uuid.uuid4().hex)
    about = {"runs": runs, "bases": bases, "targets": TARGETS, "plan": None, "planned": None, "command": ""}
    return {"wish": wish, "offered": _offered(wish, place), **about}


def _only_project(place: Place) -> str:
    """Return the project of all exports that the caller sees first; empty if there are several."""
    projects = {entry.project for entry in place.listed().entries}
    return projects.pop() if len(projects) == 1 else ""


def _offered(wish: Wish, place: Place) -> list[tuple[str, str, Sequence[Offer]]]:
    """Return the outputs to choose from, by the titles of their formats, each title with why none of its outputs can be made."""
    found = place.offered(wish)
    groups = [(title, tuple(group)) for title, group in groupby(found, key=lambda each: each.title)]
    return [
        (title, group[0].unfit if len({each.unfit for each in group}) == 1 else "", group) for title, group in groups
    ]


def check(request: Request, place: Place, wish: Wish) -> Response:  # noqa: ARG001 - as all pages
    """Return what an export would do, for the form; the outputs with their sizes too, if the model has changed."""
    values = _plan(place, wish)
    values["offers_again"] = wish.seen != wish.model
    if values["offers_again"]:
        values["offered"] = _offered(wish, place)
    return HTMLResponse(rendered("check", **values), headers=HEADERS)


def _plan(place: Place, wish: Wish) -> dict[str, Any]:
    values: dict[str, Any] = {"planned": None, "failure": None, "command": "", "wish": wish, "offers_again": False}
    if not wish.is_empty:
        values["command"] = wish.command(*place.options)
        try:
            values["planned"] = place.planned(wish)
        except ModelExportError as error:
            values["failure"] = error.failure()
    return values


def create(request: Request, place: Place, wish: Wish) -> Response:
    """Begin an export, and go to its page; show the form again if it cannot begin."""
    try:
        if wish.is_empty:
            raise ConfigurationError(
                "no training run and no base model is named", reason="CONFIGURATION_INVALID", remedy="name one of them"
            )
        project, export = place.start(wish)
    except ModelExportError as error:
        return refused_form(request, place, wish, error)
    return _see(f"/projects/{project}/exports/{export}")


def export_page(request: Request, place: Place) -> Response:
    """Show one export; under its own name once it has one."""
    shown = place.shown(**request.path_params)
    if shown.entry.id != request.path_params["export"]:
        return _see(f"/projects/{shown.entry.project}/exports/{shown.entry.id}")
    return page(request, place, "export", **_live(place, shown), again=_again(place, shown))


def live(request: Request, place: Place) -> Response:
    """Return the moving part of an export's page; tell the browser to load the page again when the state is another."""
    shown = place.shown(**request.path_params)
    headers = dict(HEADERS)
    if request.query_params.get("state") != shown.entry.state:
        headers["hx-refresh"] = "true"
    values = _live(place, shown)
    values["said_again"] = request.query_params.get("said") != values["said"]
    return HTMLResponse(rendered("live", **values), headers=headers)


def _live(place: Place, shown: Shown) -> dict[str, Any]:
    found = findings_of(place, shown)
    said = _said(shown)
    query = urlencode({"state": shown.entry.state, "said": said})
    about = {
        "outputs": found.outputs,
        "warnings": further_warnings(found.warnings, shown.failure),
        "missing": found.failure,
    }
    return {"shown": shown, "said": said, "said_again": False, "query": query, **about}


def _said(shown: Shown) -> str:
    at_work = () if shown.is_ended else shown.progress.tasks
    running = ", ".join(task.task for task in at_work if task.state == "running")
    said = _SAID.get(shown.entry.state, f"is {shown.entry.state}")
    return f"The export {said}{f': {running}' if running else ''}."


def _again(place: Place, shown: Shown) -> str:
    """Return the query of a form like the one that made an export; empty if its sources are not named."""
    message = shown.message
    if message is None:
        return ""
    named = {"run": message.configuration.checkpoint.path, "base": message.configuration.base_model.name}
    stored = {"run": message.sources.get("adapter", ""), "base": message.sources.get("base", "")}
    if not place.is_here:  # a path would be one of the machine from which it was sent
        named = {name: value if is_url(value) else stored[name] for name, value in named.items()}
    if not any(named.values()):
        return ""
    outputs = map(split_output, requested_formats(message))
    fields = [*named.items(), *(("formats", f"{name}:{level or 'none'}") for name, level in outputs)]
    fields += [("settings", "\n".join(changed_settings(message)))]
    fields += [("project", shown.entry.project)] if not place.is_here else []
    return urlencode([(name, value) for name, value in fields if value])


def act(request: Request, place: Place) -> Response:
    """Cancel, retry or delete an export, and go to its page, or to the list."""
    project, export, action = (request.path_params[name] for name in ("project", "export", "action"))
    place.act(project, export, action)
    return _see("/" if action == DELETE else f"/projects/{project}/exports/{export}")


def report(request: Request, place: Place) -> Response:
    """Show the report of an export, as it is delivered with the outputs."""
    found = report_of(place, place.shown(**request.path_params))
    if found is None:
        raise ServiceError("the export has not ended", reason="EXPORT_STATE", remedy="wait for its end")
    return HTMLResponse(report_page(found), headers=REPORT_HEADERS)


def download(request: Request, place: Place) -> Response:
    """Send an output as a tar."""
    output = request.path_params["output"]
    project = request.path_params["project"]
    message = place.shown(project, request.path_params["export"]).message
    digest = delivered_formats(message).get(output, "") if message is not None else ""
    if not digest:
        raise ServiceError(
            f"the export has no output {output!r}", reason="ARTIFACT_NOT_FOUND", remedy="look at its outputs"
        )
    with place.artifacts(project) as store:
        manifest = store.manifest(digest)
    name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in output)
    headers = {
        **HEADERS,
        "content-length": str(tar_bytes(manifest, name)),
        "content-disposition": f'attachment; filename="{name}.tar"',
    }
    if request.method == "HEAD":
        return Response(headers=headers, media_type="application/x-tar")
    chunks = _told(tar_of(manifest, name, lambda file: place.content(project, digest, file)), output)
    return StreamingResponse(chunks, media_type="application/x-tar", headers=headers)


def _told(chunks: Iterator[bytes], output: str) -> Iterator[bytes]:
    """Yield chunks; log why they end early, as the response has begun and cannot say it."""
    try:
        yield from chunks
    except ModelExportError as error:
        log.error(f"the download of {one_line(output)} was ended: {error}")
        raise


def compare(request: Request, place: Place) -> Response:
    """Show two exports side by side."""
    names = request.query_params.getlist("export")
    if len(names) != _COMPARED or any("/" not in name for name in names):
        raise ServiceError(
            f"{len(names)} exports are chosen",
            reason="REQUEST_INVALID",
            remedy="choose two of the list, and compare them",
        )
    a, b = (place.shown(*name.split("/", 1)) for name in names)
    outputs = side_by_side(findings_of(place, a).outputs, findings_of(place, b).outputs)
    return page(request, place, "compare", a=a, b=b, outputs=outputs, differences=differences(a.message, b.message))


def machines(request: Request, place: Place) -> Response:
    """Show the machines that do the work."""
    return page(request, place, "machines", machines=place.machines())


def _see(path: str) -> Response:
    return RedirectResponse(f"{ROOT}{path}", HTTPStatus.SEE_OTHER, headers=HEADERS)
