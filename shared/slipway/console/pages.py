"""The pages of the console, one function each."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
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
from slipway.console.exports import Exports, Shown
from slipway.console.rendering import HEADERS, REPORT_HEADERS, ROOT, page, rendered
from slipway.console.reports import differences, findings_of, report_of, side_by_side
from slipway.console.wish import Wish
from slipway.errors import ConfigurationError, ModelExportError, ServiceError
from slipway.exporting.batches.subjects import find_subjects
from slipway.formats.registry import split_output
from slipway.formats.targets import TARGETS
from slipway.results.outcome import delivered_formats
from slipway.results.report.page import page as report_page

_TWO = 2
_MOST_RUNS = 100
_SAID = {
    "queued": "waits",
    "cancelling": "is being cancelled",
    "succeeded": "has succeeded",
    "failed": "has failed",
    "cancelled": "was cancelled",
    "interrupted": "was interrupted",
}
_MOVING = frozenset({"queued", "running", "cancelling", "starting", "delivering"})


def list_page(request: Request, exports: Exports) -> Response:
    """Show the list."""
    return page(request, exports, "list", **_listed(request, exports))


def list_rows(request: Request, exports: Exports) -> Response:
    """Return the rows of the list alone, which the page asks for while something runs."""
    return HTMLResponse(rendered("rows", **_listed(request, exports)), headers=HEADERS)


def _listed(request: Request, exports: Exports) -> dict[str, Any]:
    listing = exports.listed(request.query_params.get("after", ""))
    moving = any(entry.state in _MOVING for entry in listing.entries)
    return {"listing": listing, "moving": moving, "chosen": request.query_params.getlist("export")}


def new_page(request: Request, exports: Exports) -> Response:
    """Show the form of a new export."""
    return page(request, exports, "new", **_form(Wish.of(request.query_params.multi_items()), exports), failure=None)


def refused_form(request: Request, exports: Exports, wish: Wish, error: ModelExportError) -> Response:
    """Show the form again, with what was wrong."""
    values = {"planned": None, "command": "", "offers_again": False, "failure": error.failure()}
    return page(request, exports, "new", status=HTTPStatus.UNPROCESSABLE_ENTITY, **_form(wish, exports), **values)


def _form(wish: Wish, exports: Exports) -> dict[str, Any]:
    runs: list[str] = []
    if exports.is_here:
        with contextlib.suppress(ModelExportError, OSError):
            runs = [subject.path for subject in find_subjects(Path.cwd())[0][:_MOST_RUNS]]
    if not exports.is_here and not wish.project:
        entries = exports.listed("").entries  # what somebody has exported before, they may export again
        wish = replace(wish, project=entries[0].project if entries else "")
    return {"wish": wish, "offered": _offered(wish, exports), "targets": TARGETS, "runs": runs}


def _offered(wish: Wish, exports: Exports) -> list[tuple[str, str, Sequence[Offer]]]:
    """Return the outputs to choose from, by the titles of their formats, each title with why none of its outputs can be made."""
    found = exports.offered(wish)
    groups = [(title, tuple(group)) for title, group in groupby(found, key=lambda each: each.title)]
    return [
        (title, group[0].unfit if len({each.unfit for each in group}) == 1 else "", group) for title, group in groups
    ]


def check(request: Request, exports: Exports, wish: Wish) -> Response:
    """Return what an export would do, for the form; sizes of the outputs too, if the model has changed."""
    model_changed = request.headers.get("hx-trigger-name", "") in {"run", "base"} or not request.headers.get(
        "hx-trigger-name"
    )
    values: dict[str, Any] = {
        "planned": None,
        "failure": None,
        "command": "",
        "wish": wish,
        "offers_again": model_changed,
    }
    if model_changed:
        values["offered"] = _offered(wish, exports)
    if not wish.is_empty:
        values["command"] = wish.command(*exports.options)
        try:
            values["planned"] = exports.planned(wish)
        except ModelExportError as error:
            values["failure"] = error.failure()
    return HTMLResponse(rendered("check", **values), headers=HEADERS)


def create(request: Request, exports: Exports, wish: Wish) -> Response:
    """Begin an export, and go to its page; show the form again if it cannot begin."""
    try:
        if wish.is_empty:
            raise ConfigurationError(
                "no training run and no base model is named", reason="CONFIGURATION_INVALID", remedy="name one of them"
            )
        project, export = exports.start(wish)
    except ModelExportError as error:
        return refused_form(request, exports, wish, error)
    return _see(f"/projects/{project}/exports/{export}")


def export_page(request: Request, exports: Exports) -> Response:
    """Show one export."""
    shown = exports.shown(**request.path_params)
    values = {"shown": shown, "said": _status(shown), "again": _again(shown), **_live(exports, shown)}
    return page(request, exports, "export", **values)


def live(request: Request, exports: Exports) -> Response:
    """Return the moving part of an export's page; tell the browser to load the page again when the state is another."""
    shown = exports.shown(**request.path_params)
    headers = dict(HEADERS)
    if request.query_params.get("state") != shown.entry.state:
        headers["hx-refresh"] = "true"
    return HTMLResponse(rendered("live", shown=shown, **_live(exports, shown)), headers=headers)


def _live(exports: Exports, shown: Shown) -> dict[str, Any]:
    found = findings_of(exports, shown)
    return {"outputs": found.outputs, "warnings": found.warnings}


def _status(shown: Shown) -> str:
    running = ", ".join(task.task for task in shown.progress.tasks if task.state == "running")
    said = _SAID.get(shown.entry.state, f"is {shown.entry.state}")
    return f"The export {said}{f': {running}' if running else ''}."


def _again(shown: Shown) -> str:
    """Return the query of a form like the one that made an export; empty if its sources are not named."""
    if shown.message is None:
        return ""
    configuration = shown.message.configuration
    fields = [("run", configuration.checkpoint.path), ("base", configuration.base_model.name)]
    outputs = map(split_output, delivered_formats(shown.message))
    fields += [("formats", f"{name}:{level or 'none'}") for name, level in outputs]
    fields = [(name, value) for name, value in fields if value]
    return urlencode(fields) if any(name in {"run", "base"} for name, _ in fields) else ""


def act(request: Request, exports: Exports) -> Response:
    """Cancel, continue or forget an export, and go to its page, or to the list."""
    project, export, action = (request.path_params[name] for name in ("project", "export", "action"))
    exports.act(project, export, action)
    return _see("/" if action == "forget" else f"/projects/{project}/exports/{export}")


def report(request: Request, exports: Exports) -> Response:
    """Show the report of an export, as it is delivered with the outputs."""
    found = report_of(exports, exports.shown(**request.path_params))
    if found is None:
        raise ServiceError("the export has not ended", reason="EXPORT_RUNNING", remedy="wait for its end")
    return HTMLResponse(report_page(found), headers=REPORT_HEADERS)


def download(request: Request, exports: Exports) -> Response:
    """Send an output as a tar."""
    output = request.path_params["output"]
    project = request.path_params["project"]
    message = exports.shown(project, request.path_params["export"]).message
    digest = delivered_formats(message).get(output, "") if message is not None else ""
    if not digest:
        raise ServiceError(
            f"the export has no output {output!r}", reason="ARTIFACT_NOT_FOUND", remedy="look at its outputs"
        )
    with exports.artifacts(project) as store:
        manifest = store.manifest(digest)
    name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in output)
    headers = {
        **HEADERS,
        "content-length": str(tar_bytes(manifest, name)),
        "content-disposition": f'attachment; filename="{name}.tar"',
    }
    chunks = tar_of(manifest, name, lambda file: exports.content(project, digest, file))
    return StreamingResponse(chunks, media_type="application/x-tar", headers=headers)


def compare(request: Request, exports: Exports) -> Response:
    """Show two exports side by side."""
    names = request.query_params.getlist("export")
    if len(names) != _TWO or any("/" not in name for name in names):
        raise ServiceError(
            f"{len(names)} exports are chosen",
            reason="REQUEST_INVALID",
            remedy="choose two of the list, and compare them",
        )
    a, b = (exports.shown(*name.split("/", 1)) for name in names)
    outputs = side_by_side(findings_of(exports, a).outputs, findings_of(exports, b).outputs)
    return page(request, exports, "compare", a=a, b=b, outputs=outputs, differences=differences(a.message, b.message))


def machines(request: Request, exports: Exports) -> Response:
    """Show the machines that do the work."""
    return page(request, exports, "machines", machines=exports.machines())


def _see(path: str) -> Response:
    return RedirectResponse(f"{ROOT}{path}", HTTPStatus.SEE_OTHER, headers=HEADERS)
