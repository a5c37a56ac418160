"""A coordinator with thousands of queued exports: memory, lists, watching, a restart or failover, and what creating and carrying out cost.

``python tests/benchmarks/bench_scale.py --exports 10000`` uses SQLite; ``--postgres`` a server and a standby beside it. Prints one table.

The exports are those of ``bench_queue.py``: one task that does nothing, adapters of their own in a store. A restart is the end of a killed
coordinator by the start of the next process, Python's imports included; a failover ends where a standby answers. Both end with the answers
to a list and to a worker that asks for a task; that all exports are on the board again takes longer, and is a line of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from bench_queue import CONFIGURATIONS, CREATING, Load, ProcessorTime, create, fill, observe, quantile, work
from google.protobuf.duration_pb2 import Duration

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipway.artifacts import LocalStore
from slipway_protos.v1 import coordinator_pb2, coordinator_pb2_grpc, export_pb2, export_pb2_grpc, worker_pb2
from slipway_protos.v1.worker_pb2_grpc import WorkerServiceStub
from support.commands.cli import SLIPWAY
from support.servers.free_ports import free_port
from support.servers.postgres_server import postgres_server

ASKED = 30
"""How often each list and each change is measured."""


@dataclass
class Place:
    """Where the coordinators of this run are: their state, store and log, and the processes."""

    state: str
    store: LocalStore
    folder: Path
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, address: str = "") -> psutil.Process:
        """Start a coordinator; it stands by if another one is active."""
        options = ["--listen", address or self.address, "--state", self.state, "--log-level", "WARNING"]
        options += ["--max-exports", "1000000"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLIPWAY_STORE": str(self.store.root)}
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen([SLIPWAY, "coordinator", *options], stderr=log, env=environment)
        self.running.append(process)
        return psutil.Process(process.pid)

    def kill(self) -> None:
        """Kill the coordinator that was started first."""
        process = self.running.pop(0)
        process.kill()
        process.wait(20)

    def end(self) -> None:
        """End all coordinators."""
        for process in self.running:
            process.terminate()
            process.wait(60)
        lines = (self.folder / "log").read_text().splitlines()
        sys.stderr.write("\n".join([line for line in lines if "slipway.audit" not in line][-20:]))


@dataclass
class Table:
    """The rows that are printed at the end."""

    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, what: str, value: str) -> None:
        self.rows.append((what, value))
        print(f"{what}: {value}", flush=True)

    def print(self, heading: str) -> None:
        print(f"\n| {heading} | |\n| --- | --- |")
        for what, value in self.rows:
            print(f"| {what} | {value} |")


@contextmanager
def place(*, postgres: bool, folder: Path) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        state = str(folder / "state.db")
        if postgres:
            state = stack.enter_context(postgres_server(durable=True)).create("scale")
            subprocess.run([SLIPWAY, "coordinator", "migrate", "--state", state], check=True, capture_output=True)
        made = Place(state, LocalStore(folder / "store"), folder)
        stack.callback(made.end)
        yield made


async def seconds_until_served(address: str) -> float:
    """Return how long it takes from now until a list and a worker's call are answered."""
    began = time.monotonic()
    while True:
        async with grpc.aio.insecure_channel(address) as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await export_pb2_grpc.ExportServiceStub(channel).ListExports(first_page(50), timeout=20)
                await WorkerServiceStub(channel).Synchronize(idle_worker(), timeout=20)
                return time.monotonic() - began
        await asyncio.sleep(0.02)
        if time.monotonic() > began + 120:
            raise SystemExit("the coordinator does not answer")


def idle_worker() -> worker_pb2.SynchronizeRequest:
    """Return the call of a worker whose stage nothing waits for, so that the queue stays as it is."""
    return worker_pb2.SynchronizeRequest(worker_id="idle", stages=["gguf"], free_slots=1, max_wait=Duration())


def first_page(size: int, **more: str) -> export_pb2.ListExportsRequest:
    return export_pb2.ListExportsRequest(
        parent="projects/-", page_size=size, view=export_pb2.EXPORT_VIEW_SUMMARY, **more
    )


async def seconds_until_waiting(channel: grpc.aio.Channel, count: int) -> float:
    """Return how long it takes from now until so many tasks wait for workers."""
    began, stub = time.monotonic(), coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    while True:
        queue = (await stub.ListWorkers(coordinator_pb2.ListWorkersRequest())).queue
        if sum(group.count for group in queue) >= count:
            return time.monotonic() - began
        await asyncio.sleep(0.2)


def used(process: psutil.Process) -> str:
    """Say how much processor time a process has used since its start."""
    return f"{sum(process.cpu_times()[:2]):.1f} s of the processor since its start"


async def timed(call: Callable[[], Awaitable[object]], process: psutil.Process) -> str:
    """Return median and 99th percentile of the milliseconds that a call takes, and the coordinator's processor time for one."""
    spent, used = list[float](), ProcessorTime({"coordinator": process}, ASKED)
    for _ in range(ASKED):
        began = time.monotonic()
        await call()
        spent.append(time.monotonic() - began)
    return f"{latencies(spent)}, {used.milliseconds()['coordinator']:.1f} ms of the processor"


def latencies(spent: list[float]) -> str:
    return f"{1e3 * statistics.median(spent):.1f} ms, p99 {1e3 * quantile(spent):.1f} ms"


async def measure_lists(channel: grpc.aio.Channel, process: psutil.Process, table: Table) -> None:
    stub = export_pb2_grpc.ExportServiceStub(channel)
    whole = export_pb2.ListExportsRequest(parent="projects/-", page_size=100, view=export_pb2.EXPORT_VIEW_FULL)
    asked = {
        "list, first 50": first_page(50),
        "list, first 1,000": first_page(1000),
        "list, 50 of one state": first_page(50, filter="state=running"),
        "list, 50 of a state that none has": first_page(50, filter="state=failed"),
        "list, first 100 in full": whole,
    }
    for what, request in asked.items():
        table.add(what, await timed(lambda request=request: stub.ListExports(request), process))  # type: ignore[misc]
    began, request = time.monotonic(), first_page(1000)
    while True:
        page = await stub.ListExports(request)
        if not page.next_page_token:
            break
        request = first_page(1000, page_token=page.next_page_token)
    table.add("list, all pages of 1,000", f"{1e3 * (time.monotonic() - began):.0f} ms")
    table.add("list, the last of them", await timed(lambda: stub.ListExports(request), process))


async def measure_watching(channel: grpc.aio.Channel, process: psutil.Process, load: Load, table: Table) -> None:
    """Measure how long a watcher of all projects waits for the creation of an export, and one of an export for its state."""
    stub, spent = export_pb2_grpc.ExportServiceStub(channel), list[float]()
    events = stub.WatchExports(export_pb2.WatchExportsRequest(parent="projects/-"))
    await events.read()
    for number in range(ASKED):
        began, export = time.monotonic(), f"e{load.exports + number}"
        request = export_pb2.CreateExportRequest(
            parent="projects/p0", export_id=export, configuration=CONFIGURATIONS[load.stages],
            sources={"base": load.base, "adapter": load.adapters[load.exports + number]},
        )  # fmt: skip
        await stub.CreateExport(request)
        while not (await events.read()).change.export.name.endswith(f"/{export}"):
            pass
        spent.append(time.monotonic() - began)
    events.cancel()
    table.add("from a creation to its watcher", latencies(spent))
    name = f"projects/p{(load.exports - 1) % 4}/exports/e{load.exports - 1}"

    async def watch_one() -> None:
        stream = stub.WatchExport(export_pb2.WatchExportRequest(name=name))
        await stream.read()
        stream.cancel()

    table.add("first event of a watched export", await timed(watch_one, process))


async def measure_creating(load: Load, where: Place, process: psutil.Process, table: Table) -> None:
    spent, empty = ProcessorTime({"coordinator": process}, load.exports), process.memory_info().rss
    share = [list(range(load.exports))[start::CREATING] for start in range(CREATING)]
    began = time.monotonic()
    await asyncio.gather(*(create(load, where.address, numbers) for numbers in share))
    took = time.monotonic() - began
    table.add("created", f"{load.exports / took:.0f} exports/s from {CREATING} clients")
    async with grpc.aio.insecure_channel(where.address) as channel:
        waited = await seconds_until_waiting(channel, load.exports)
    table.add("until all were queued", f"{waited:.1f} s later")
    table.add("creating, processor time of the coordinator", f"{spent.milliseconds()['coordinator']:.2f} ms an export")
    more = process.memory_info().rss - empty
    table.add("memory", f"{empty / 1e6:.0f} MB, and {more / 1e3 / load.exports:.1f} kB a queued export")


async def measure_carrying_out(load: Load, where: Place, process: psutil.Process, workers: int, table: Table) -> None:
    spent, began = ProcessorTime({"coordinator": process}, load.exports), time.monotonic()
    await asyncio.gather(
        observe(load, where.address, process),
        *(work(load, where.address, f"worker-{number}") for number in range(workers)),
    )
    # Workers take tasks of other exports meanwhile: a task is run before its export's workflow has started and ended.
    done, run, seconds = sum(load.ended.values()), sum(load.runs.values()), time.monotonic() - began
    used = spent.milliseconds()["coordinator"] * load.exports / run
    table.add("carried out", f"{done / seconds:.0f} exports/s and {run / seconds:.0f} tasks/s with {workers} workers")
    table.add("added to a stage", latencies(load.added))
    table.add("carrying out, processor time of the coordinator", f"{used:.2f} ms a task")
    table.add("run twice", str(sum(count > 1 for count in load.runs.values())))


async def measure(where: Place, load: Load, *, carry_out: int, workers: int, standby: bool, table: Table) -> None:
    process = where.start()
    table.add(
        "start with no exports", f"{await seconds_until_served(where.address):.2f} s until it serves, {used(process)}"
    )
    await measure_creating(load, where, process, table)
    async with grpc.aio.insecure_channel(where.address) as channel:
        await measure_lists(channel, process, table)
        await measure_watching(channel, process, load, table)
    address = f"127.0.0.1:{free_port()}" if standby else where.address
    if standby:
        process = where.start(address)
        await seconds_until_served(address)
    where.kill()
    if not standby:
        process = where.start()
    served = await seconds_until_served(address)
    where.address = address
    table.add("failover to a standby" if standby else "restart", f"{served:.2f} s until it serves, {used(process)}")
    async with grpc.aio.insecure_channel(address) as channel:
        resumed = await seconds_until_waiting(channel, load.exports + ASKED)
    table.add("until all are on the board again", f"{served + resumed:.1f} s, {used(process)}")
    table.add("memory after that", f"{process.memory_info().rss / 1e6:.0f} MB")
    some = Load(carry_out, load.stages, 0.0, load.base, load.adapters, load.results)
    await measure_carrying_out(some, where, process, workers, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exports", type=int, default=10_000)
    parser.add_argument("--carry-out", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--postgres", action="store_true", help="PostgreSQL with a standby instead of SQLite")
    arguments = parser.parse_args()
    table = Table()
    with tempfile.TemporaryDirectory() as folder, place(postgres=arguments.postgres, folder=Path(folder)) as where:
        base, adapters, results = fill(where.store, Path(folder), exports=arguments.exports + ASKED, stages=1)
        load = Load(arguments.exports, 1, 0.0, base, adapters, results)
        options = {"carry_out": arguments.carry_out, "workers": arguments.workers, "standby": arguments.postgres}
        asyncio.run(measure(where, load, **options, table=table))
    table.print(f"{arguments.exports:,} exports in {'PostgreSQL' if arguments.postgres else 'SQLite'}")


if __name__ == "__main__":
    main()
