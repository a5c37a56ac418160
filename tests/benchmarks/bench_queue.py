"""A long queue on a coordinator with PostgreSQL: exports of one task that does nothing, workers, and watchers.

Prints how long creating takes, what the coordinator adds to every stage, how much memory it needs, and whether anything was
lost or run twice. ``python tests/benchmarks/bench_queue.py --exports 2000 --workers 20 --watchers 200``.

With tasks that take no time (the default), workers ask for the next one as fast as they are answered, so what is added to a stage
is the number of workers by the exports a second the machine can carry out at most. ``--task-seconds 1`` shows what is added at the
pace of real tasks. ``--stages 2`` shows how long it takes from the result of one stage until a worker has the next stage of the
same export; with more exports than workers that is the time in the queue, behind the older exports.

Exports have one base, and adapters and results of their own, which are in a store: the coordinator measures them. Configurations are
sent as the client sends them, without what is left at its default.

Other work on the machine changes all times; what changes least is the processor time of the coordinator and of PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from google.protobuf.duration_pb2 import Duration

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipway.artifacts import LocalStore
from slipway.configuration import parse
from slipway.rpc.messages import asked_configuration_message
from slipway_protos.v1 import export_pb2, export_pb2_grpc, worker_pb2, worker_pb2_grpc
from support.commands.cli import SLIPWAY
from support.servers.free_ports import free_port
from support.servers.postgres_server import postgres_server

CONFIGURATIONS = {
    stages: asked_configuration_message(
        parse({"formats": {"onnx": {"enabled": stages == 2}}, "validation": {"enabled": False}})
    )
    for stages in (1, 2)
}
OUTPUTS = {"merge": "pytorch", "onnx_export": "onnx"}
CREATING = 8


@dataclass
class Load:
    """What is to happen, with the digests of artifacts (of results by stage) for each export, and what happened."""

    exports: int
    stages: int
    task_seconds: float
    base: str
    adapters: Sequence[str]
    results: Mapping[str, Sequence[str]]
    creation: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    merged: dict[str, float] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0


async def create(load: Load, address: str, numbers: list[int]) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = export_pb2_grpc.ExportServiceStub(channel)
        for number in numbers:
            request = export_pb2.CreateExportRequest(
                parent=f"projects/p{number % 4}", export_id=f"e{number}", configuration=CONFIGURATIONS[load.stages],
                sources={"base": load.base, "adapter": load.adapters[number]}, request_id=f"r{number}",
            )  # fmt: skip
            began = time.monotonic()
            await stub.CreateExport(request)
            load.creation.append(time.monotonic() - began)


async def work(load: Load, address: str, name: str) -> None:
    """Lease, hand in at once, lease again; what passes between these is what the coordinator adds to a stage."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        done: float | None = None
        while sum(load.ended.values()) < load.exports:
            request = worker_pb2.SynchronizeRequest(
                worker_id=name, stages=sorted(OUTPUTS), free_slots=1, max_wait=Duration(seconds=1)
            )
            response = await stub.Synchronize(request)
            if not response.leases:
                done = None
                continue
            if done is not None:
                load.added.append(time.monotonic() - done)
            (lease,) = response.leases
            load.runs[lease.task] += 1
            export = lease.task.partition(":")[0]
            if export in load.merged:
                load.between.append(time.monotonic() - load.merged.pop(export))
            await asyncio.sleep(load.task_seconds)
            result = load.results[lease.stage][int(export.rpartition("/e")[2])]
            done = time.monotonic()
            if lease.stage == "merge" and load.stages > 1:
                load.merged[export] = done
            await stub.CompleteTask(
                worker_pb2.CompleteTaskRequest(
                    worker_id=name, task=lease.task, lease_epoch=lease.lease_epoch,
                    output=worker_pb2.TaskOutput(outputs={OUTPUTS[lease.stage]: result}),
                )
            )  # fmt: skip


async def watch(seen: Counter[str], address: str, name: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = export_pb2_grpc.ExportServiceStub(channel)
        async for event in stub.WatchExport(export_pb2.WatchExportRequest(name=name)):
            if event.export.state == export_pb2.EXPORT_STATE_SUCCEEDED:
                seen[name] += 1


async def observe(load: Load, address: str, process: psutil.Process) -> None:
    """Memory, and which exports have ended, until all have."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = export_pb2_grpc.ExportServiceStub(channel)
        while sum(load.ended.values()) < load.exports:
            load.peak_bytes = max(load.peak_bytes, process.memory_info().rss)
            await asyncio.sleep(0.5)
            if sum(load.runs.values()) < load.exports * load.stages:
                continue
            ended: Counter[str] = Counter()
            token = ""
            while True:
                request = export_pb2.ListExportsRequest(
                    parent="projects/-", page_size=1000, page_token=token, filter="state=succeeded"
                )
                page = await stub.ListExports(request)
                ended.update(export.name for export in page.exports)
                token = page.next_page_token
                if not token:
                    break
            load.ended = ended


class ProcessorTime:
    """What processes and those they started have used since the last look, in ms an export.

    Args:
        processes: By what they are called.
        exports: How many share it.
    """

    def __init__(self, processes: Mapping[str, psutil.Process], exports: int) -> None:
        self._processes, self._exports = processes, exports
        self._before = self._seconds()

    def _seconds(self) -> dict[str, float]:
        return {
            name: sum(sum(one.cpu_times()[:4]) for one in (process, *process.children()))
            for name, process in self._processes.items()
        }

    def milliseconds(self) -> dict[str, float]:
        """Return what each process has used since the last look."""
        before, self._before = self._before, self._seconds()
        return {name: 1e3 * (now - before[name]) / self._exports for name, now in self._before.items()}

    def print(self, what: str) -> None:
        used = [f"{name} {spent:.2f} ms" for name, spent in self.milliseconds().items()]
        print(f"{what}, processor time an export: {', '.join(used)}")


async def measure(
    load: Load, address: str, processes: Mapping[str, psutil.Process], *, workers: int, watchers: int
) -> None:
    spent = ProcessorTime(processes, load.exports)
    share = [list(range(load.exports))[start::CREATING] for start in range(CREATING)]
    began = time.monotonic()
    await asyncio.gather(*(create(load, address, numbers) for numbers in share))
    print(f"created {load.exports} exports in {time.monotonic() - began:.1f} s from {CREATING} clients")
    print(
        f"creation: median {1e3 * statistics.median(load.creation):.0f} ms, p99 {1e3 * quantile(load.creation):.0f} ms"
    )
    spent.print("creating")
    seen: Counter[str] = Counter()
    names = [f"projects/p{number % 4}/exports/e{number}" for number in range(watchers)]
    watching = [asyncio.create_task(watch(seen, address, name)) for name in names]
    began = time.monotonic()
    await asyncio.gather(
        observe(load, address, processes["coordinator"]),
        *(work(load, address, f"worker-{number}") for number in range(workers)),
    )
    took = time.monotonic() - began
    async with asyncio.timeout(30):
        await asyncio.gather(*watching)
    print(f"carried out in {took:.1f} s, {load.exports / took:.0f} exports/s with {workers} workers")
    print(
        f"added per stage: median {1e3 * statistics.median(load.added):.0f} ms, p99 {1e3 * quantile(load.added):.0f} ms"
    )
    if load.between:
        print(
            f"from a result to the next stage's lease, its turn in the queue included: median {1e3 * statistics.median(load.between):.0f} ms,"
            f" p99 {1e3 * quantile(load.between):.0f} ms"
        )
    print(f"coordinator: {load.peak_bytes / 1e6:.0f} MB resident at most")
    spent.print("carrying out")
    print(f"lost: {load.exports - len(load.ended)}, run twice: {sum(count > 1 for count in load.runs.values())}")
    print(f"watchers that saw the end: {sum(count == 1 for count in seen.values())} of {watchers}")


def quantile(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def fill(store: LocalStore, folder: Path, *, exports: int, stages: int) -> tuple[str, list[str], dict[str, list[str]]]:
    """Store artifacts; return the digests of the base, of each export's adapter and, by stage, of its results."""
    file = folder / "file"

    def put(text: str) -> str:
        file.write_text(text)
        digest = store.put_files({"file": file})
        file.unlink()
        return digest

    results = {name: [put(f"{name} {number}") for number in range(exports)] for name in list(OUTPUTS)[:stages]}
    return put("base"), [put(f"adapter {number}") for number in range(exports)], results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exports", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--watchers", type=int, default=200)
    parser.add_argument("--stages", type=int, choices=(1, 2), default=1)
    parser.add_argument("--task-seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    with postgres_server(durable=True) as server, tempfile.TemporaryDirectory() as folder:
        database = server.create("load")
        store = LocalStore(Path(folder, "store"))
        artifacts = fill(store, Path(folder), exports=arguments.exports, stages=arguments.stages)
        command = [SLIPWAY, "coordinator"]
        subprocess.run([*command, "migrate", "--state", database], check=True, capture_output=True)
        address = f"127.0.0.1:{free_port()}"
        with Path(folder, "log").open("w") as log:
            options = ["--listen", address, "--state", database, "--log-level", "WARNING"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLIPWAY_STORE": str(store.root)}
            process = subprocess.Popen([*command, *options], stderr=log, env=environment)
        try:
            asyncio.run(ready(address))
            load = Load(arguments.exports, arguments.stages, arguments.task_seconds, *artifacts)
            processes = {"coordinator": psutil.Process(process.pid), "PostgreSQL": psutil.Process(server.pid)}
            asyncio.run(measure(load, address, processes, workers=arguments.workers, watchers=arguments.watchers))
        finally:
            process.terminate()
            process.wait(20)
            sys.stderr.write(Path(folder, "log").read_text()[-3000:])


async def ready(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = export_pb2_grpc.ExportServiceStub(channel)
        for _ in range(200):
            try:
                await stub.ListExports(export_pb2.ListExportsRequest(parent="projects/-"), timeout=2)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
            else:
                return
    raise SystemExit("the coordinator does not answer")


if __name__ == "__main__":
    main()
