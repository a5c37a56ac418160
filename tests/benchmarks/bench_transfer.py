"""The S3 store against ``rclone copy``: throughput of put and get at the same server, and peak of anonymous memory, in one run.

Usage: ``python tests/benchmarks/bench_transfer.py [--gib 1] [--runs 1] [--folder DIR]``. Without rclone its columns are left out.
Targets: at least 0.9 of rclone's throughput, peak under 700 MB. Prints the figures and writes them to ``results/transfer.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from measure import Measured, measure

from support.servers.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, s3_server

RESULTS = Path(__file__).parent / "results"
CHUNK = 64 << 20

OURS = """
import os, sys
from pathlib import Path
from slipway.artifacts.s3.store import S3Store
from slipway.artifacts.s3.client import S3Bucket
from slipway.settings.s3 import S3Options
verb, prefix, source, out = sys.argv[1:]
store = S3Store(S3Bucket(S3Options.from_environment(os.environ), "slipway", prefix=prefix))
if verb == "put":
    Path(out).write_text(store.put_files({"weights": Path(source)}))
else:
    store.fetch(Path(source).read_text(), Path(out))
"""


def ours(verb: str, *arguments: str | Path) -> list[str | Path]:
    """A process that puts or fetches with the store: hashing and verification included."""
    return [sys.executable, "-c", OURS, verb, *arguments]


def rclone(source: str | Path, target: str | Path) -> list[str | Path]:
    """A process that copies with rclone's defaults."""
    return ["rclone", "--config", os.devnull, "copy", source, target]


def rclone_environment(server: S3Server) -> dict[str, str]:
    """The remote ``bench:`` without a configuration file. rclone refuses to start when AWS_CA_BUNDLE is set."""
    os.environ.pop("AWS_CA_BUNDLE", None)
    remote = {"TYPE": "s3", "PROVIDER": "SeaweedFS", "ENDPOINT": server.endpoint, "ACCESS_KEY_ID": ACCESS_KEY,
              "SECRET_ACCESS_KEY": SECRET_KEY}  # fmt: skip
    return {f"RCLONE_CONFIG_BENCH_{name}": value for name, value in remote.items()}


def round_of(server: S3Server, root: Path, order: list[str]) -> dict[str, Measured]:
    """One put and get of each, in this order, with fresh names; what was written is removed before the next round."""
    prefix = uuid.uuid4().hex
    found: dict[str, Measured] = {}
    source, mine = root / "source" / "weights", server.environment()
    theirs = rclone_environment(server)
    remote = f"bench:{BUCKET}/{prefix}-rclone"
    runs = {
        "slipway put": (ours("put", prefix, source, root / "digest"), mine),
        "slipway get": (ours("get", prefix, root / "digest", root / "out"), mine),
        "rclone put": (rclone(source, remote), theirs),
        "rclone get": (rclone(remote, root / "out"), theirs),
    }
    for name in order:
        os.sync()  # what was written before is not part of this measurement
        command, environment = runs[name]
        found[name] = measure(command, environment=environment)
        if name.endswith("get"):
            shutil.rmtree(root / "out")
    client = server.client()
    for entry in client.list_objects(BUCKET, prefix=prefix, recursive=True):
        client.remove_object(BUCKET, str(entry.object_name))
    return found


def figures(rounds: list[dict[str, Measured]], size: int) -> dict[str, float]:
    """Throughputs, their ratios, peaks."""
    result = {"gib": size / (1 << 30)}
    for name in rounds[0]:
        key = name.replace(" ", "_")
        result[f"{key}_mb_per_second"] = statistics.median(size / 1e6 / found[name].seconds for found in rounds)
        result[f"{key}_peak_mb"] = max(found[name].peak_anonymous_bytes for found in rounds) / 1e6
    if "rclone put" in rounds[0]:
        for verb in ("put", "get"):
            pairs = [found[f"rclone {verb}"].seconds / found[f"slipway {verb}"].seconds for found in rounds]
            result[f"{verb}_throughput_ratio"] = statistics.median(pairs)
    return result


def main() -> None:
    """Make a file, start a server, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the file")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where file, server and output lie; five times the file's size")
    arguments = parser.parse_args()
    compare = shutil.which("rclone") is not None
    if not compare:
        print("rclone is not installed (apt-get install rclone): no comparison")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root, size = Path(folder), int(arguments.gib * (1 << 30))
        (root / "source").mkdir()
        with (root / "source" / "weights").open("wb") as file:
            for start in range(0, size, CHUNK):
                file.write(os.urandom(min(CHUNK, size - start)))
        with s3_server(root / "server") as server:
            rounds = []
            for number in range(arguments.runs):
                who = ["slipway", "rclone"][: 2 if compare else 1]
                who = who if number % 2 else who[::-1]  # a drift of the machine, or of the server, meets both
                order = [f"{name} {verb}" for verb in ("put", "get") for name in who]
                rounds.append(round_of(server, root, order))
            found = figures(rounds, size)
    for name, value in found.items():
        print(f"{name:28} {value:10.3f}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "transfer.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
