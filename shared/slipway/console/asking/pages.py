"""The page on which models are asked, its moving part, and what its buttons do."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from slipway.console.asking.choices import Choices, choices_of
from slipway.console.place import Place, Shown
from slipway.console.questions import Question, Questions, Standing
from slipway.console.rendering import HEADERS, ROOT, page, rendered
from slipway.errors import Failure, ModelExportError, ServiceError
from slipway.validation.questions import BASE, MOST_CHARACTERS, MOST_TOKENS, AnswerReport, ModelAnswer


def ask_page(request: Request, place: Place) -> Response:
    """Show the form, and the last answers."""
    questions, shown = _questions(place), place.shown(**request.path_params)
    choices, asked = choices_of(place, shown), _standing(questions, shown)
    everybody = tuple(each.name for each in choices.models if not each.obstacle)
    question = asked.question if asked is not None else Question(models=everybody)
    return _page(request, place, shown, choices, asked=asked, question=question)


def ask(request: Request, place: Place, question: Question) -> Response:
    """Put the question, and go to its page; show the form again, with what is wrong, if it cannot be put."""
    questions, shown = _questions(place), place.shown(**request.path_params)
    choices = choices_of(place, shown)
    try:
        question.check()
        questions.ask(shown.entry.id, question, choices.inputs(question.models))
    except ModelExportError as error:
        asked, failure = _standing(questions, shown), error.failure()
        return _page(request, place, shown, choices, asked=asked, question=question, failure=failure)
    return _see(shown)


def answers(request: Request, place: Place) -> Response:
    """Return the moving part of the page; tell the browser to load the page again when the state is another."""
    questions, shown = _questions(place), place.shown(**request.path_params)
    asked = _standing(questions, shown)
    headers = dict(HEADERS)
    if asked is None or request.query_params.get("state") != asked.state:
        headers["hx-refresh"] = "true"
    return HTMLResponse(rendered("answers", shown=shown, **_answers(asked)), headers=headers)


def cancel(request: Request, place: Place) -> Response:
    """End the question, and go to its page."""
    questions, shown = _questions(place), place.shown(**request.path_params)
    asked = questions.last(shown.entry.id)
    if asked is not None:
        asked.interruption.request()
    return _see(shown)


def _questions(place: Place) -> Questions:
    """Return what puts prompts to the models of a place.

    Raises:
        ServiceError: ``UNSUPPORTED`` for a coordinator.
    """
    if place.questions is None:
        what, remedy = "models are asked on the machine that has them", "use slipway ui there"
        raise ServiceError(what, reason="UNSUPPORTED", remedy=remedy)
    return place.questions


def _standing(questions: Questions, shown: Shown) -> Standing | None:
    asked = questions.last(shown.entry.id)
    return asked.standing() if asked is not None else None


def _page(
    request: Request,
    place: Place,
    shown: Shown,
    choices: Choices,
    *,
    asked: Standing | None,
    question: Question,
    failure: Failure | None = None,
) -> Response:
    limits = {"most_tokens": MOST_TOKENS, "most_characters": MOST_CHARACTERS}
    form = {"shown": shown, "choices": choices, "question": question, "refused": failure, **limits}
    status = HTTPStatus.OK if failure is None else HTTPStatus.UNPROCESSABLE_ENTITY
    return page(request, place, "ask", status=status, **form, **_answers(asked))


def _answers(asked: Standing | None) -> dict[str, Any]:
    report = asked.report if asked is not None else None
    told = [(each, _remark(report, each)) for each in report.answers] if report is not None else []
    return {"asked": asked, "progress": _progress(asked), "report": report, "told": told}


def _progress(asked: Standing | None) -> str:
    """Return how far a question is, for people; empty before anything is known."""
    progress = asked.progress if asked is not None else None
    if progress is None or not progress.total:
        return progress.phase if progress is not None else ""
    return f"{progress.phase}: {progress.done} of at most {progress.total} tokens"


def _remark(report: AnswerReport, answer: ModelAnswer) -> str:
    """Return how an answer compares with the fine-tuned model's; empty without a comparison."""
    place = report.first_difference(answer)
    theirs = "the base's" if report.reference == BASE else "the fine-tuned model's"
    if place is None:
        return ""
    return f"Differs from {theirs} from token {place} on." if place else f"The same as {theirs}."


def _see(shown: Shown) -> Response:
    path = f"{ROOT}/projects/{shown.entry.project}/exports/{shown.entry.id}/ask"
    return RedirectResponse(path, HTTPStatus.SEE_OTHER, headers=HEADERS)
