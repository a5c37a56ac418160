"""The engine as the coordinator uses it: it starts the driver, and starts it again when the cluster was lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from slipway.contracts.engine import Submission, SubmissionEnd, SubmissionReport, WorkerStart
from slipway.distribution import own_version
from slipway.engines.ray.options import DEFAULT
from slipway.errors import ServiceError
from slipway.machine.processes import python_module
from slipway.settings.s3 import SCHEME

log = logging.getLogger("slipway.engine.ray")

_LONGEST_LINE = 1 << 22
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 15.0
_END_SECONDS = 8.0
_CONNECT_SECONDS = 300.0
"""How long Ray may take to connect, and nodes to say whether they fit: they start a process for it."""


class RayEngine:
    """Runs submissions on one Ray cluster.

    Args:
        address: Address for ``ray.init``.
        worker: How workers start.
        options: Options of Ray by stage.
    """

    def __init__(self, address: str, worker: WorkerStart, *, options: Mapping[str, Mapping[str, Any]]) -> None:
        self._address, self._worker, self._options = address, worker, options
        self._reports: asyncio.Queue[SubmissionReport] = asyncio.Queue()
        self._known: dict[str, str] = {}  # attempts by submissions that have not ended
        self._driver: asyncio.subprocess.Process | None = None
        self._adopted: list[SubmissionReport] = []
        self._waiting: list[dict[str, Any]] = []  # commands for the next driver
        self._ready = False
        self._running: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Connect to the cluster, and check its nodes.

        Raises:
            ServiceError: ``ENGINE_UNAVAILABLE`` or ``ENGINE_UNFIT``.
        """
        await self._connect(strict=True)
        self._spawn(self._keep_connected())

    async def adopt(self) -> Sequence[SubmissionReport]:
        """Return the submissions of an earlier process."""
        return self._adopted

    async def submit(self, submission: Submission) -> None:
        """Run a submission; while there is no cluster, as soon as there is one."""
        self._known[submission.id] = submission.attempt
        needs = submission.requirements
        everything = (*needs.any_of, *needs.prefers)
        shared_folder = not self._worker.store.startswith(SCHEME)
        asked = {
            "threads": submission.threads,
            "memory_bytes": submission.memory_bytes,
            "gpu": not needs.possible_on("none"),
            "prefers_gpu": needs.uses_gpu,
            "gpu_architectures": sorted({each for one in everything for each in one.gpu_architectures}),
            "near": [] if shared_folder else list(submission.near),  # a folder is as near to every node
        }
        options = {**self._options.get(DEFAULT, {}), **self._options.get(submission.stage, {})}
        await self._command(
            {
                "do": "submit",
                "id": submission.id,
                "attempt": submission.attempt,
                "asked": asked,
                "options": options,
                "arguments": self._worker.arguments(submission),
            }
        )

    async def cancel(self, submission_id: str) -> None:
        """End a submission."""
        if submission_id in self._known:
            await self._command({"do": "cancel", "id": submission_id})

    async def watch(self) -> AsyncIterator[SubmissionReport]:
        """Yield reports of the driver."""
        while True:
            yield await self._reports.get()

    async def stop(self) -> None:
        """Wait for the end of submissions that were cancelled, and end the driver."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._end_driver()

    async def _command(self, command: dict[str, Any]) -> None:
        driver = self._driver
        if not self._ready or driver is None or driver.stdin is None:
            self._waiting.append(command)
            return
        with contextlib.suppress(ConnectionError):  # its end is noticed where its events are read
            driver.stdin.write(json.dumps(command).encode() + b"\n")
            await driver.stdin.drain()

    async def _connect(self, *, strict: bool) -> None:
        """Start a driver, and wait until it is connected and has checked the nodes: all must fit, or else at least one."""
        await self._end_driver()
        self._driver = driver = await asyncio.create_subprocess_exec(
            *python_module("slipway.engines.ray.driver", self._address, f"slipway-{self._worker.owner}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl+C is for the command, which cancels first
        )
        assert driver.stdin is not None
        self._spawn(_log_lines(driver))
        start = {
            "do": "start",
            "strict": strict,
            "version": own_version(),
            "coordinator": self._worker.coordinator,
            "store": self._worker.store,
            "mark": self._worker.mark,
            "environment": {name: value.get_secret_value() for name, value in self._worker.environment.items()},
            "files": dict(self._worker.files),
        }
        with contextlib.suppress(ConnectionError):
            driver.stdin.write(json.dumps(start).encode() + b"\n")
            await driver.stdin.drain()
        event = await self._first_event()
        match event and event["event"]:
            case "ready":
                assert event is not None
                self._adopted = [SubmissionReport(**one) for one in event["adopted"]]
                self._known |= {one.id: one.attempt for one in self._adopted}
            case "refused":
                assert event is not None
                faults = "; ".join(f"node {node}: {fault}" for node, fault in sorted(event["faults"].items()))
                raise ServiceError(
                    f"nodes of the Ray cluster at {self._address} cannot run tasks: {faults}",
                    reason="ENGINE_UNFIT",
                    remedy="docs/engines.md says what nodes need",
                    about={"address": self._address},
                )
            case _:
                why = event["message"] if event else "Ray ended, or did not connect in time"
                raise ServiceError(
                    f"the Ray cluster at {self._address} cannot be used: {why}",
                    reason="ENGINE_UNAVAILABLE",
                    remedy="see with ray status that it runs, and that Python and Ray here have the versions there",
                    about={"address": self._address},
                )

    async def _keep_connected(self) -> None:
        while True:
            self._ready = True
            for command in self._take_waiting():
                await self._command(command)
            try:
                while (event := await self._event()) is not None:
                    self._note(event)
            except Exception:  # a driver that cannot be understood is as good as none
                log.exception("an event of Ray's driver cannot be used")
            self._ready = False
            log.warning(f"the Ray cluster at {self._address} was lost; connecting again")
            for name, attempt in self._take_known():
                self._reports.put_nowait(
                    SubmissionReport(name, attempt, end=SubmissionEnd.NODE_LOST, message="the cluster was lost")
                )
            await self._reconnect()

    async def _reconnect(self) -> None:
        pause, told = _FIRST_PAUSE, ""
        while True:
            try:
                await self._connect(strict=False)
            except (ServiceError, OSError, ValueError) as error:
                if str(error) != told:
                    log.warning(str(error))
                    told = str(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                break
        log.warning(f"connected to the Ray cluster at {self._address} again")
        for one in self._adopted:  # they were said to be lost
            self._waiting.append({"do": "cancel", "id": one.id})

    def _take_known(self) -> list[tuple[str, str]]:
        known, self._known = list(self._known.items()), {}
        self._waiting.clear()
        return known

    def _take_waiting(self) -> list[dict[str, Any]]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _note(self, event: dict[str, Any]) -> None:
        event.pop("event")
        if event.get("end"):
            event["end"] = SubmissionEnd(event["end"])
            self._known.pop(event["id"], None)
        self._reports.put_nowait(SubmissionReport(**event))

    async def _first_event(self) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await self._event()
        except TimeoutError:
            await self._end_driver()
            return None

    async def _event(self) -> dict[str, Any] | None:
        """Return the driver's next event; None if it has ended."""
        assert self._driver is not None
        assert self._driver.stdout is not None
        line = await self._driver.stdout.readline()
        event: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
        return event

    async def _end_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is None:
            return
        if driver.stdin is not None:
            driver.stdin.close()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await driver.wait()
        except TimeoutError:
            driver.kill()
            await driver.wait()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


async def _log_lines(driver: asyncio.subprocess.Process) -> None:
    assert driver.stderr is not None
    async for line in driver.stderr:
        log.debug(line.decode(errors="replace").rstrip())
