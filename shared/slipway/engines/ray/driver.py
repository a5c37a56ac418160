"""The driver: the process that talks to a Ray cluster, ``python -P -m slipway.engines.ray.driver ADDRESS NAMESPACE``.

Commands come from standard input and events go to standard output, one JSON object a line. It ends when standard input closes, or with
:data:`CLUSTER_LOST` when the cluster does not respond any more; task hosts outlive both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfMemoryError,
    RayError,
)
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slipway.contracts.engine import SubmissionEnd
from slipway.engines.ray import task_host
from slipway.engines.ray.nodes import Asked, Cluster

CLUSTER_LOST = 75

_CLIENT = "ray://"
_CONNECT_SECONDS = 10.0
_PING_SECONDS = 2.0
_LOST_AFTER = 5
"""Attempts in a row to connect to the head that may fail."""
_CHECK_SECONDS = 60.0
_ADOPT_SECONDS = 20.0
"""How long the host of an earlier process may take to answer."""
_CANCEL_SECONDS = 4.5
_LOOK_SECONDS = 2.0
_UNSCHEDULABLE_SECONDS = 600.0
"""How long no node may fit a submission: autoscalers need minutes for a new one."""

_End = SubmissionEnd


class Driver:
    """Runs the submissions of one coordinator as task hosts.

    Args:
        out: Takes the events.
    """

    def __init__(self, out: int) -> None:
        self._out = out
        self._start: dict[str, Any] = {}
        self._dashboard = ""
        self._hosts: dict[str, Any] = {}
        self._attempts: dict[str, str] = {}
        self._placed: dict[str, str] = {}  # nodes of submissions that run
        self._cancelled: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancels: set[asyncio.Task[None]] = set()
        self._cluster = Cluster()
        # Nodes get copies of these, so that one without Slipway can say so.
        cloudpickle.register_pickle_by_value(task_host)
        self._host = ray.remote(task_host.TaskHost)
        self._check = ray.remote(task_host.node_fault)

    async def connect(self, start: dict[str, Any], context: Any) -> None:
        """Check the nodes, find the hosts of an earlier process, and say so."""
        self._start = start
        self._dashboard = context.dashboard_url or ""
        faults = await self._node_faults()
        if faults and (start["strict"] or len(faults) == len(self._cluster.nodes)):
            self._send("refused", faults=faults)
            return
        names = await asyncio.to_thread(list_named_actors)
        adopted = [one for one in await asyncio.gather(*map(self._adopt, names)) if one is not None]
        self._send("ready", adopted=adopted)
        for one in adopted:
            self._spawn(self._follow(one["id"], self._hosts[one["id"]].ended.remote()))

    async def _adopt(self, name: str) -> dict[str, str] | None:
        """Take a host of an earlier process over; end one that has no node yet, as its worker would never be started."""
        try:
            host = await asyncio.to_thread(ray.get_actor, name)
        except (ValueError, RayError):  # it has just ended
            return None
        try:
            async with asyncio.timeout(_ADOPT_SECONDS):
                attempt, node = await host.about.remote()
        except (ValueError, TypeError, RayError, TimeoutError):
            with contextlib.suppress(RayError, ValueError):
                ray.kill(host)
            return None
        self._hosts[name], self._attempts[name], self._placed[name] = host, attempt, node
        return {"id": name, "attempt": attempt, "node": self._cluster.name(node)}

    async def _node_faults(self) -> dict[str, str]:
        """Return why nodes cannot run workers, by their names."""
        self._cluster.look()
        facts = {name: self._start[name] for name in ("version", "coordinator", "store", "mark")}  # and no secrets
        checks = {
            self._cluster.name(node.id): self._check.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
            ).remote(facts)
            for node in self._cluster.nodes
        }
        faults = {}
        for name, check in checks.items():
            try:
                async with asyncio.timeout(_CHECK_SECONDS):
                    fault = await check
            except TimeoutError:
                fault = f"it did not answer for {_CHECK_SECONDS:g} s"
            except RayError as error:
                fault = _one_line(error)
            if fault:
                faults[name] = fault
        return faults

    def submit(self, command: dict[str, Any]) -> None:
        """Start the host of a submission, or follow the one that exists."""
        self._attempts[command["id"]] = command["attempt"]
        self._spawn(self._run(command))

    async def _run(self, command: dict[str, Any]) -> None:
        name = command["id"]
        try:
            self._cluster.look()
            asked = Asked(**command["asked"])
            options = self._cluster.options(asked, self._placed, command["options"])
            host = self._host.options(name=name, lifetime="detached", get_if_exists=True, **options).remote(
                command["attempt"]
            )
            self._hosts[name] = host
            arguments = [*command["arguments"], *self._cluster.shares(options)]
            result = host.run.remote(self._start, arguments)
            await self._wait_for_place(name, host, options)
            await self._follow(name, result, arguments)
        except Exception as error:  # noqa: BLE001 - options that Ray refuses, too; without a report nobody would start it again
            if name in self._hosts:
                self._end(name, _End.FAILED, _one_line(error))
            else:
                self._report(name, end=_End.FAILED, message=_one_line(error))

    async def _wait_for_place(self, name: str, host: Any, options: dict[str, Any]) -> None:
        """Report on which node a host runs; while it waits, why."""
        place = asyncio.ensure_future(asyncio.wrap_future(host.about.remote().future()))
        unfit_seconds, message = 0.0, ""
        while not place.done():
            await asyncio.wait({place}, timeout=_LOOK_SECONDS)
            if place.done():
                break
            self._cluster.look()
            why = self._cluster.lack(options)
            unfit_seconds = unfit_seconds + _LOOK_SECONDS if why else 0.0
            if unfit_seconds >= _UNSCHEDULABLE_SECONDS:
                self._end(name, _End.UNSCHEDULABLE, why)
                return
            if why and why != message:
                self._report(name, message=why)
                message = why
        with contextlib.suppress(RayError):  # its end is reported by whoever follows it
            _, node = place.result()
            self._placed[name] = node
            self._report(name, node=self._cluster.name(node), link=self._link(host))

    async def _follow(self, name: str, result: Any, arguments: Sequence[str] | None = None) -> None:
        """Wait for the end of a host, and report it. ``arguments`` are its worker's, if this process starts it."""
        while name in self._hosts:
            try:
                code, lines = await result
            except ActorUnavailableError:  # perhaps only the connection; it is known soon
                await asyncio.sleep(_LOOK_SECONDS / 2)
                if (host := self._hosts.get(name)) is not None:
                    result = host.ended.remote() if arguments is None else host.run.remote(self._start, arguments)
            except RayError as error:
                self._end(name, self._end_of(name, error), _one_line(error))
            else:
                cancelled = name in self._cancelled
                end = _End.CANCELLED if cancelled else _End.FAILED if code else _End.EXITED
                self._end(name, end, lines if code and not cancelled else "")

    def _end_of(self, name: str, error: RayError) -> SubmissionEnd:
        if name in self._cancelled:
            return _End.CANCELLED
        if getattr(error, "preempted", False):
            return _End.PREEMPTED
        if isinstance(error, OutOfMemoryError) or "OutOfMemory" in str(error) or "low on memory" in str(error):
            return _End.OUT_OF_MEMORY
        if isinstance(error, ActorUnschedulableError):
            return _End.UNSCHEDULABLE
        return _End.NODE_LOST if isinstance(error, ActorDiedError) and name in self._placed else _End.FAILED

    def begin_cancel(self, name: str) -> None:
        """End a submission; its worker returns its task before, if it is quick."""
        self._cancels.add(self._spawn(self._cancel(name)))

    async def finish_cancels(self) -> None:
        """Wait for the submissions that are being cancelled."""
        await asyncio.gather(*self._cancels, return_exceptions=True)

    async def _cancel(self, name: str) -> None:
        host = self._hosts.get(name)
        if host is None:
            return
        self._cancelled.add(name)
        if name in self._placed:
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(_CANCEL_SECONDS):
                    await host.cancel.remote()
        self._end(name, _End.CANCELLED, "")

    def _end(self, name: str, end: SubmissionEnd, message: str) -> None:
        """Report the end of a submission, and give its place back."""
        host = self._hosts.pop(name, None)
        if host is None:
            return
        node = self._placed.pop(name, "")
        self._report(name, end=end, message=message, node=self._cluster.name(node) if node else "")
        with contextlib.suppress(RayError, ValueError):
            ray.kill(host)
        self._cancelled.discard(name)
        self._attempts.pop(name, None)

    def _link(self, host: Any) -> str:
        """Return the address of Ray's page about a host."""
        if not self._dashboard:
            return ""
        scheme = "" if "://" in self._dashboard else "http://"
        return f"{scheme}{self._dashboard}/#/actors/{host._actor_id.hex()}"

    def _report(self, name: str, **about: Any) -> None:
        self._send("report", id=name, attempt=self._attempts.get(name, ""), **about)

    def _send(self, event: str, **fields: Any) -> None:
        os.write(self._out, json.dumps({"event": event, **fields}).encode() + b"\n")

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        for tasks in (self._tasks, self._cancels):
            task.add_done_callback(tasks.discard)
        self._tasks.add(task)
        return task


def _watch_head(address: str) -> None:
    """End the process when the head of the cluster does not accept connections any more: Ray would wait for a minute, and then abort."""
    host, _, port = address.rpartition(":")
    failures = 0
    while failures < _LOST_AFTER:
        time.sleep(_PING_SECONDS)
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PING_SECONDS).close()
            failures = 0
        except OSError:
            failures += 1
    os._exit(CLUSTER_LOST)


def _read_commands(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(queue.put_nowait, json.loads(line))
    loop.call_soon_threadsafe(queue.put_nowait, None)


async def _serve(driver: Driver, context: Any) -> None:
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    reader = threading.Thread(target=_read_commands, args=(asyncio.get_running_loop(), queue), daemon=True)
    reader.start()
    gcs = (getattr(context, "address_info", None) or {}).get("gcs_address", "")
    if gcs:
        threading.Thread(target=_watch_head, args=(gcs,), daemon=True).start()
    while (command := await queue.get()) is not None:
        match command.pop("do"):
            case "start":
                await driver.connect(command, context)
            case "submit":
                driver.submit(command)
            case "cancel":
                driver.begin_cancel(command["id"])
    await driver.finish_cancels()


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:1000]}"


def _check_head(address: str) -> None:
    """Raise OSError unless something listens at an address with a port: Ray would try for minutes."""
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def main(address: str, namespace: str) -> None:
    """Connect and serve until standard input closes."""
    out = os.dup(1)
    os.dup2(2, 1)  # Ray prints what it likes
    try:
        _check_head(address)
        context = ray.init(address, namespace=namespace, log_to_driver=False, logging_level="WARNING")
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds, for example for another version of Python
        os.write(out, json.dumps({"event": "unavailable", "message": _one_line(error)}).encode() + b"\n")
        sys.exit(1)
    asyncio.run(_serve(Driver(out), context))
    os._exit(0)  # the hosts go on; Ray's own end takes seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
