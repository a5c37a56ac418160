"""Artifacts through the coordinator: throughput of ``push`` and ``pull`` by a client without the store, and what the coordinator takes.

Usage: ``python tests/benchmarks/bench_artifacts.py [--gib 1] [--folder DIR]``. Over a folder and over a bucket, one file of that size, all
on this machine. Prints the figures and writes them to ``results/artifacts.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))


from slipway.client import Client
from slipway.errors import ModelExportError
from support.commands.cli import SLIPWAY
from support.coordinators.harness import process, wait_for
from support.servers.free_ports import free_port
from support.servers.s3_server import BUCKET, s3_server

RESULTS = Path(__file__).parent / "results"


@contextmanager
def peak_of(pid: int) -> Iterator[list[int]]:
    """The peak of a process's resident memory, sampled; the one item of the list when the block ends."""
    watched, peak, ended = psutil.Process(pid), [0], threading.Event()

    def sample() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], watched.memory_info().rss)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def answers(client: Client) -> bool:
    """Whether the coordinator is there."""
    try:
        return list(client.list_artifacts()) == []
    except ModelExportError:
        return False


def run(kind: str, source: Path, folder: Path) -> dict[str, float]:
    """Push and pull over one kind of store."""
    folder.mkdir()
    size = sum(path.stat().st_size for path in source.iterdir())
    with ExitStack() as stack:
        environment = {"SLIPWAY_HOME": str(folder / "home")}
        if kind == "bucket":
            server = stack.enter_context(s3_server(folder / "s3"))
            environment |= server.environment() | {"SLIPWAY_STORE": f"s3://{BUCKET}/bench"}
        address = f"127.0.0.1:{free_port()}"
        command = [
            SLIPWAY,
            "coordinator",
            "--listen",
            address,
            "--state",
            str(folder / "state.db"),
        ]
        coordinator = stack.enter_context(process(command, folder / "coordinator.log", **environment))
        client = stack.enter_context(Client(address))
        wait_for(lambda: answers(client))
        before = psutil.Process(coordinator.pid).memory_info().rss
        with peak_of(coordinator.pid) as peak:
            times = [time.perf_counter()]
            digest = client.push_artifact(source)
            times.append(time.perf_counter())
            client.push_artifact(source)
            times.append(time.perf_counter())
            client.pull_artifact(digest, folder / "pulled")
            times.append(time.perf_counter())
    push, again, pull = (later - earlier for earlier, later in itertools.pairwise(times))
    return {
        "push_mb_per_second": round(size / 1e6 / push),
        "pull_mb_per_second": round(size / 1e6 / pull),
        "push_again_seconds": round(again, 2),
        "coordinator_grows_mb": round((peak[0] - before) / 1e6),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        source = Path(name) / "source"
        source.mkdir()
        block = os.urandom(1 << 20)
        with (source / "model.safetensors").open("wb") as file:
            for number in range(round(arguments.gib * 1024)):
                file.write(number.to_bytes(8, "little") + block[8:])
        found = {kind: run(kind, source, Path(name) / kind) for kind in ("folder", "bucket")}
    print(json.dumps(found, indent=2))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "artifacts.json").write_text(json.dumps({"gib": arguments.gib, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
