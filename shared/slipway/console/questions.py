"""Put a prompt to models of this machine, one question at a time: the stage runs them in processes of their own, as a worker runs its tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from slipway.artifacts.opening import open_store
from slipway.errors import ConfigurationError, Failure, ModelExportError, ServiceError
from slipway.execution.runner import TaskRunner
from slipway.exporting.interruption import Interruption
from slipway.machine.cgroup import ControlGroup, available_memory, usable_cores
from slipway.registry import stage_of
from slipway.settings import Settings
from slipway.stage import Progress, Role
from slipway.stage_call import Limits, StageCall
from slipway.texts import hidden_character, number_of
from slipway.validation.questions import BASE, FINE_TUNED, MOST_CHARACTERS, MOST_TOKENS, AnswerReport

log = logging.getLogger("slipway.console")

DEFAULT_TOKENS = 64
_MOST_MODELS = 64
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        prompt: The prompt.
        most: Most tokens of each answer; 0 for what is no such number.
        chat: Whether the model's chat template is applied, if it has one.
        models: Names of the models.
    """

    prompt: str = ""
    most: int = DEFAULT_TOKENS
    chat: bool = True
    models: tuple[str, ...] = ()

    @classmethod
    def of(cls, fields: Sequence[tuple[str, str]]) -> Question:
        """Read the fields as a browser sends them, unchecked."""
        texts = dict(fields)
        prompt = texts.get("prompt", "").replace("\r\n", "\n")
        most = number_of(texts.get("tokens", "").strip(), most=MOST_TOKENS) or 0
        models = tuple(dict.fromkeys(value for name, value in fields if name == "models"))
        return cls(prompt, most, "plain" not in texts, models)

    def check(self) -> None:
        """Refuse what cannot be asked.

        Raises:
            ConfigurationError: ``CONFIGURATION_INVALID``.
        """
        hidden = hidden_character(self.prompt.replace("\n", "").replace("\t", ""))
        if not self.prompt.strip():
            raise _refused("there is no prompt", "write one")
        if len(self.prompt) > MOST_CHARACTERS:
            raise _refused(f"the prompt has {len(self.prompt)} characters", f"use at most {MOST_CHARACTERS}")
        if hidden:
            raise _refused(f"the prompt has the hidden character {hidden}", "type it without")
        if not self.most:
            raise _refused("the number of tokens cannot be used", f"give a number from 1 to {MOST_TOKENS}")
        if not 0 < len(self.models) <= _MOST_MODELS:
            raise _refused(f"{len(self.models)} models are chosen", f"choose 1 to {_MOST_MODELS}")


def _refused(what: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(what, reason="CONFIGURATION_INVALID", remedy=remedy)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a question stands at one moment: a page is made of one, because the question may end meanwhile.

    Attributes:
        question: The question.
        state: ``running``, ``answered``, ``cancelled`` or ``failed``.
        report: The answers; None unless it is answered.
        failure: Why there are none; None unless it was cancelled or has failed.
        progress: How far it is; None before anything is known.
    """

    question: Question
    state: str
    report: AnswerReport | None
    failure: Failure | None
    progress: Progress | None


class Asked:
    """A question, and what has become of it.

    Attributes:
        export: Export whose models are asked.
        question: The question.
        report: The answers; None before there are any.
        failure: Why there are none; None otherwise.
        progress: How far it is; None before anything is known.
    """

    def __init__(self, export: str, question: Question) -> None:
        self.export, self.question = export, question
        self.interruption = Interruption()
        self.report: AnswerReport | None = None
        self.failure: Failure | None = None
        self.progress: Progress | None = None

    def standing(self) -> Standing:
        """Return how it stands now."""
        report, failure = self.report, self.failure
        if report is not None:
            state = "answered"
        elif failure is None:
            state = "running"
        else:
            state = "cancelled" if failure.reason == "CANCELLED" else "failed"
        return Standing(self.question, state, report, failure, self.progress)


class Questions:
    """The questions of one console. The last one is kept; it ends with :meth:`close`.

    Args:
        settings: Settings of this machine.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._asked: Asked | None = None
        self._thread: threading.Thread | None = None

    def last(self, export: str) -> Asked | None:
        """Return the last question, if it was put to models of this export."""
        asked = self._asked
        return asked if asked is not None and asked.export == export else None

    def ask(self, export: str, question: Question, inputs: Mapping[str, str]) -> None:
        """Begin to ask.

        Args:
            export: Export whose models are asked.
            question: The question.
            inputs: Artifacts of base, adapter and outputs, by the names of the stage's inputs.

        Raises:
            ServiceError: ``QUEUE_FULL`` while another question is asked.
        """
        with self._lock:
            if self._asked is not None and self._asked.standing().state == "running":
                raise ServiceError(
                    f"another question is being answered, on the page of {self._asked.export}",
                    reason="QUEUE_FULL",
                    remedy="wait for its end, or cancel it",
                )
            self._asked = asked = Asked(export, question)
            name, arguments = "slipway-question", (asked, dict(inputs))
            self._thread = thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        thread.start()

    def close(self) -> None:
        """End what runs, within seconds."""
        with self._lock:
            asked, thread = self._asked, self._thread
        if asked is not None and thread is not None:
            asked.interruption.request()
            thread.join(_PATIENCE_SECONDS)

    def _run(self, asked: Asked, inputs: Mapping[str, str]) -> None:
        try:
            with asyncio.Runner() as runner:  # not asyncio.run, which notebooks replace
                asked.report = runner.run(self._answers(asked, inputs))
        except asyncio.CancelledError:
            asked.failure = ServiceError("cancelled", reason="CANCELLED").failure()
        except ModelExportError as error:
            asked.failure = error.failure()
        except Exception:
            log.exception("the question failed")
            remedy = "see the log of slipway ui"
            asked.failure = ServiceError("the question failed", reason="INTERNAL", remedy=remedy).failure()

    async def _answers(self, asked: Asked, inputs: Mapping[str, str]) -> AnswerReport:
        """Run the stage, and return what the models answer.

        Raises:
            ModelExportError: The stage's failure.
        """
        store = open_store(self._settings)
        runner = TaskRunner(store, self._settings.scratch)

        def tell(progress: Progress, _: int) -> None:
            asked.progress = progress

        with runner.using_store():
            task = asyncio.ensure_future(runner.run(_call(asked.question, inputs), on_progress=tell))
            with asked.interruption.ending(_canceller(asyncio.get_running_loop(), task)):
                result = await task
            if result.failure is not None:
                raise result.failure.error()
            with tempfile.TemporaryDirectory(prefix="slipway-answers-") as scratch:
                folder = store.fetch(result.outputs["answers"], Path(scratch) / "answers")
                try:
                    return AnswerReport.read_from(folder)
                except (OSError, pydantic.ValidationError) as error:
                    remedy = "restart slipway ui"
                    raise ServiceError("the answers cannot be read", reason="INTERNAL", remedy=remedy) from error


def _canceller(loop: asyncio.AbstractEventLoop, task: asyncio.Future[Any]) -> Callable[[], None]:
    def cancel() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(task.cancel)

    return cancel


def _call(question: Question, inputs: Mapping[str, str]) -> StageCall:
    group = ControlGroup()
    limits = Limits(max_memory_bytes=available_memory(group.memory()), threads=usable_cores(group))
    params = {
        "prompt": question.prompt,
        "chat": question.chat,
        "max_new_tokens": question.most,
        "models": [name for name in (BASE, FINE_TUNED) if name in question.models],
        "question": uuid.uuid4().hex,
    }
    return StageCall(stage_of(Role.ANSWERING).name, params, inputs, limits)
