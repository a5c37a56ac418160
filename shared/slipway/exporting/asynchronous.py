"""The same functions for asyncio: the work runs in a thread, and progress comes to the event loop.

Cancelling an export ends its work first. The other functions only read; cancelled, they are left to end by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack, overload

from slipway.advice.recommendation import Recommendation
from slipway.exporting import calls
from slipway.exporting.batches.planned import BatchPlan
from slipway.exporting.batches.result import BatchResult
from slipway.exporting.calls import ExportOptions, Place, Places, PlanOptions, SomePlace
from slipway.exporting.interruption import Interruption
from slipway.exporting.observing import observing, observing_several
from slipway.exporting.planned import ExportPlan
from slipway.exporting.verification import Verification
from slipway.progress.observer import Observer
from slipway.results.result import ExportResult
from slipway.settings.security import Security
from slipway_protos.v1 import export_pb2 as pb

T = TypeVar("T")


@overload
async def export_async(run: Place | None = None, **options: Unpack[ExportOptions]) -> ExportResult: ...


@overload
async def export_async(run: Places[SomePlace], **options: Unpack[ExportOptions]) -> BatchResult: ...


async def export_async(
    run: Place | Sequence[Place] | None = None, **options: Unpack[ExportOptions]
) -> ExportResult | BatchResult:
    """Export as :func:`export` does, with the same arguments, while the event loop goes on.

    Cancelling it, and Ctrl-C under ``asyncio.run``, end the export within seconds before the cancellation is raised; the next call
    continues. ``progress`` is called in the event loop's thread.

    Args:
        run: As for :func:`export`.
        options: As for :func:`export`.

    Raises:
        ConfigurationError: All problems of the settings at once.
        ModelExportError: There is no result.
    """
    inspect.signature(calls.export).bind(run, **options)  # refuses other names as a call of it would
    interruption, loop = Interruption(), asyncio.get_running_loop()
    progress = options.pop("progress", False)
    bring_sources, request_id = options.pop("bring_sources", False), options.pop("request_id", "")

    def relay(observer: Observer) -> Observer:
        return _Relay(observer, loop, interruption)

    with contextlib.ExitStack() as stack:
        work: Callable[[], ExportResult | BatchResult]
        if run is None or isinstance(run, str | os.PathLike):
            observer = relay(stack.enter_context(observing(progress, interruption)))
            alone = partial(calls.export_observed, observer, interruption, run, options)
            work = partial(alone, bring_sources=bring_sources, request_id=request_id)
        else:
            opened = stack.enter_context(observing_several(progress, interruption, relay))
            all_of_them = partial(calls.export_several, opened, interruption, run, options)
            work = partial(all_of_them, bring_sources=bring_sources, request_id=request_id)
        result: ExportResult | BatchResult = await _in_thread(work, interruption)
        interruption.check()  # the last call of a program's function may have failed
        return result


@overload
async def plan_async(run: Place | None = None, **options: Unpack[PlanOptions]) -> ExportPlan: ...


@overload
async def plan_async(run: Places[SomePlace], **options: Unpack[PlanOptions]) -> BatchPlan: ...


async def plan_async(
    run: Place | Sequence[Place] | None = None, **options: Unpack[PlanOptions]
) -> ExportPlan | BatchPlan:
    """Return what :func:`export` would do, as :func:`plan` does with the same arguments, while the event loop goes on.

    Args:
        run: As for :func:`plan`.
        options: As for :func:`plan`.

    Raises:
        ConfigurationError: All problems of the settings at once.
    """
    work: Callable[[], ExportPlan | BatchPlan] = partial(calls.plan, run, **options)
    return await _in_thread(work)


async def recommend_async(
    target: str, *, model: Place | None = None, memory: int | str | None = None, report: Place | None = None
) -> Recommendation:
    """Recommend as :func:`recommend` does, with the same arguments, while the event loop goes on.

    Args:
        target: As for :func:`recommend`, and so are the others.
        model: The model, for sizes.
        memory: Memory that the target has for it.
        report: An earlier export, for measured figures.

    Raises:
        ModelExportError: As for :func:`recommend`.
    """
    return await _in_thread(partial(calls.recommend, target, model=model, memory=memory, report=report))


async def verify_async(
    path: Place,
    *,
    key: Place | None = None,
    certificate_chain: Place | None = None,
    identity: str | None = None,
    identity_provider: str | None = None,
    trusted_root: Place | None = None,
    coordinator: str | None = None,
    project: str | None = None,
    security: Security | None = None,
    home: Place | None = None,
) -> Verification:
    """Verify as :func:`verify` does, with the same arguments, while the event loop goes on.

    Args:
        path: As for :func:`verify`, and so are the others.
        key: The public key.
        certificate_chain: The roots.
        identity: The identity.
        identity_provider: The identity's provider.
        trusted_root: The trusted root of the identity's instance.
        coordinator: ``HOST:PORT``.
        project: Project at the coordinator.
        security: Certificates and token for the coordinator.
        home: Folder of the artifact store.

    Raises:
        ArtifactError: As for :func:`verify`.
    """
    work = partial(
        calls.verify,
        path,
        key=key,
        certificate_chain=certificate_chain,
        identity=identity,
        identity_provider=identity_provider,
        trusted_root=trusted_root,
        coordinator=coordinator,
        project=project,
        security=security,
        home=home,
    )
    return await _in_thread(work)


class _Relay:
    """Passes everything on to an observer in the event loop's thread, in order. An error of the observer ends the export."""

    def __init__(self, observer: Observer, loop: asyncio.AbstractEventLoop, interruption: Interruption) -> None:
        self._observer, self._loop, self._interruption = observer, loop, interruption

    def title(self, text: str) -> None:
        self._pass(self._observer.title, text)

    def note(self, message: str) -> None:
        self._pass(self._observer.note, message)

    def expect(self, task_seconds: Mapping[str, float]) -> None:
        self._pass(self._observer.expect, task_seconds)

    def event(self, event: pb.ExportEvent) -> None:
        self._pass(self._observer.event, event)

    def log(self, level: int, message: str) -> None:
        self._observer.log(level, message)  # logging is for all threads

    def _pass(self, tell: Callable[[Any], None], value: object) -> None:
        self._loop.call_soon_threadsafe(self._tell, tell, value)

    def _tell(self, tell: Callable[[Any], None], value: object) -> None:
        if self._interruption.requested:
            return
        try:
            tell(value)
        except Exception as error:  # noqa: BLE001 - of the program's own function; raised once the export has ended
            self._interruption.request(error)


async def _in_thread(work: Callable[[], T], interruption: Interruption | None = None) -> T:
    """Run work in a thread of its own; on cancellation, end it and wait for its end. A second cancellation does not wait.

    Args:
        work: The work.
        interruption: Ends the work; without one, a cancellation does not wait.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # somebody has looked at it

    def run() -> None:
        try:
            finish: Callable[[], None] = partial(done.set_result, work())
        except StopIteration as error:  # no future takes it
            stopped = RuntimeError("the work raised StopIteration")
            stopped.__cause__ = error
            finish = partial(done.set_exception, stopped)
        except BaseException as error:  # noqa: BLE001 - it is raised where the work is awaited
            finish = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop was closed without waiting
            loop.call_soon_threadsafe(finish)

    # A daemon: a program that ends without waiting is not held up, and running stages end with it.
    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="slipway-call", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        if interruption is None:
            raise
        interruption.request()
        with contextlib.suppress(Exception):
            await asyncio.shield(done)
        raise
