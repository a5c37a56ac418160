"""Bytes between a bucket and the machines of a cluster, for one export of the sample with four outputs.

Each worker has a cache of its own, as on a machine of its own, and reaches the tests' S3 server through a proxy that counts. Usage:
``python tests/benchmarks/bench_locality.py --sample demo [--workers 3] [--formats …] [--folder DIR]``. Prints what each process read
and sent in multiples of the base's bytes, what each worker ran, and how long the export took; writes ``results/locality.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from slipway.artifacts.opening import open_store
from slipway.client import Client
from slipway.errors import ModelExportError
from slipway.settings import Settings
from slipway_protos.v1 import export_pb2
from support.commands.cli import SLIPWAY, environment
from support.servers.free_ports import free_port
from support.servers.s3_server import BUCKET, S3Server, s3_server
from support.servers.tcp_proxy import TcpProxy

RESULTS = Path(__file__).parent / "results"
FORMATS = "pytorch:int8,onnx:int8,gguf:q8_0,openvino:int8"


@dataclass
class Site:
    """A coordinator and workers that run until the context ends, each with a proxy of its own to the bucket.

    Attributes:
        folder: Homes and logs.
        server: The S3 server.
        workers: Number of workers.
        proxies: By the name of the process.
        processes: By name.
        address: Of the coordinator.
    """

    folder: Path
    server: S3Server
    workers: int
    proxies: dict[str, TcpProxy] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    address: str = ""
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Site:
        self.address = f"127.0.0.1:{free_port()}"
        with self._stack:
            self._start("coordinator", "coordinator", "--listen", self.address, "--state", self.folder / "state.db")
            for number in range(self.workers):
                self._start(f"worker-{number}", "worker", "--coordinator", self.address, "--slots", "1")
            self._await_workers()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def worker_of(self, worker_id: str) -> str:
        """Return the name of the worker of this id."""
        names = {str(process.pid): name for name, process in self.processes.items()}
        return names[worker_id.split("-")[-2]]

    def environment(self, name: str, endpoint: str) -> dict[str, str]:
        """Return the environment of a process of this name, which reaches the bucket at this address."""
        more = {**self.server.environment(), "AWS_ENDPOINT_URL": endpoint}
        return environment(self.folder / name, **more, SLIPWAY_STORE=f"s3://{BUCKET}/{self.folder.name}")

    def _start(self, name: str, *command: str | Path) -> None:
        host, port = self.server.endpoint.removeprefix("http://").split(":")
        proxy = self.proxies[name] = self._stack.enter_context(TcpProxy(lambda: (host, int(port))))
        more = self.environment(name, f"http://{proxy.address}")
        log = self._stack.enter_context((self.folder / f"{name}.log").open("wb"))
        started = [SLIPWAY, *map(str, command)]
        process = subprocess.Popen(started, env=more, stdout=log, stderr=log)
        self.processes[name] = process
        self._stack.callback(_end, process)

    def _await_workers(self) -> None:
        """Wait until all workers have reported, or the first one would get what others could do."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            with contextlib.suppress(ModelExportError), Client(self.address) as client:  # it does not listen yet
                if len(client.list_workers().workers) == self.workers:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"the workers do not start: see {self.folder}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def export(site: Site, sample: Path, formats: str) -> tuple[export_pb2.Export, float]:
    """Export the sample as a user does who has the coordinator's address; return the export and its seconds."""
    command = [SLIPWAY, "export", "-c", sample / "export.yaml", "-f", formats, "--coordinator", site.address]
    command += ["--out", site.folder / "out", "--json"]
    began = time.monotonic()
    with (site.folder / "command.log").open("wb") as log:
        subprocess.run(
            list(map(str, command)), env=environment(site.folder / "command"), check=True, stdout=log, stderr=log
        )
    seconds = time.monotonic() - began
    with Client(site.address) as client:
        (made,) = client.list_exports()
    return made, seconds


def work(site: Site, made: export_pb2.Export, base_bytes: int) -> list[str]:
    """Return a line for each task: who ran it, what it reads and what it writes, in multiples of the base's bytes."""
    store = open_store(Settings.from_environment(site.environment("reader", site.server.endpoint)))
    sizes = functools.cache(lambda digest: store.manifest(digest).size_bytes / base_bytes)
    made_by = {f"task:{task.id}/{name}": digest for task in made.tasks for name, digest in task.outputs.items()}
    made_by |= {f"source:{name}": digest for name, digest in made.sources.items()}
    lines = []
    for task in sorted(
        made.tasks, key=lambda task: task.attempts[-1].start_time.ToNanoseconds() if task.attempts else 0
    ):
        read = [
            f"{name} {sizes(made_by[source]):.2f}" for name, source in sorted(task.inputs.items()) if source in made_by
        ]
        wrote = [f"{name} {sizes(digest):.2f}" for name, digest in sorted(task.outputs.items())]
        who = site.worker_of(task.attempts[-1].worker) if task.attempts else "nobody"
        lines.append(f"{who:10} {task.id}: {', '.join(read)} -> {', '.join(wrote)}")
    return lines


def figures(site: Site, base_bytes: int) -> dict[str, dict[str, float]]:
    """Return what each process read and sent, in multiples of the base's bytes."""
    rows = {
        name: {"read": proxy.received_bytes / base_bytes, "sent": proxy.sent_bytes / base_bytes}
        for name, proxy in site.proxies.items()
    }
    rows["all"] = {key: sum(row[key] for row in rows.values()) for key in ("read", "sent")}
    rows["workers"] = {
        key: sum(row[key] for name, row in rows.items() if name.startswith("worker-")) for key in ("read", "sent")
    }
    return rows


def main() -> None:
    """Start a server and a site, export, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=Path, default=Path("demo"), help="folder of slipway sample")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--formats", default=FORMATS, help="as of slipway export -f")
    parser.add_argument("--folder", type=Path, help="where all files lie")
    arguments = parser.parse_args()
    base = arguments.sample / "qwen3-base"
    base_bytes = sum(path.stat().st_size for path in base.rglob("*") if path.is_file())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, s3_server(Path(folder) / "s3") as server:
        home = Path(folder) / "site"
        home.mkdir()
        with Site(home, server, arguments.workers) as site:
            made, seconds = export(site, arguments.sample, arguments.formats)
            found = figures(site, base_bytes)
            lines = work(site, made, base_bytes)
    print("\n".join(lines))
    for name, row in found.items():
        print(f"{name:12} read {row['read']:6.2f}  sent {row['sent']:6.2f}  both {row['read'] + row['sent']:6.2f}")
    print(f"base {base_bytes / 1e6:.1f} MB, {seconds:.0f} s")
    RESULTS.mkdir(exist_ok=True)
    written = {"base_bytes": base_bytes, "workers": arguments.workers, "seconds": seconds, "bytes_per_base": found}
    (RESULTS / "locality.json").write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
