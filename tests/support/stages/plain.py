"""Stages that do what a test asks: copy, wait, crash, fill memory or disk."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slipway.errors import ModelMergeError, StageError
from slipway.stage import Context, Hardware, Keeps, Stage, StageParams


class EchoParams(StageParams):
    text: str = "hello"
    seconds: float = 0.0


def echo(inputs: Mapping[str, Path], params: EchoParams, ctx: Context) -> dict[str, Path]:
    out = ctx.workdir / "out"
    out.mkdir()
    deadline = time.monotonic() + params.seconds
    while (left := deadline - time.monotonic()) > 0:
        ctx.progress("waiting", done=int(1000 * (params.seconds - left)), total=int(1000 * params.seconds), unit="ms")
        time.sleep(min(0.02, left))
    (out / "text.txt").write_text(params.text)
    for name, folder in sorted(inputs.items()):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                (out / f"{name}-{path.name}").write_bytes(path.read_bytes())
    ctx.log.info("echoed")
    ctx.record(length=len(params.text))
    return {"out": out}


def speak(inputs: Mapping[str, Path], params: EchoParams, ctx: Context) -> dict[str, Path]:
    """Print, read and write as libraries do, without naming an encoding."""
    out = ctx.workdir / "out"
    out.mkdir()
    text = (inputs["in"] / "text.txt").read_text()
    print(text, "\udcff", flush=True)
    (out / "text.txt").write_text(text)
    return {"out": out}


def needy(inputs: Mapping[str, Path], params: EchoParams, ctx: Context) -> dict[str, Path]:
    """Import a library that nobody has."""
    import slipway_no_such_library  # type: ignore[import-not-found]

    return {"out": slipway_no_such_library.made(ctx.workdir)}


def wrapping(inputs: Mapping[str, Path], params: EchoParams, ctx: Context) -> dict[str, Path]:
    """Do the same, and blame something else."""
    try:
        return needy(inputs, params, ctx)
    except ImportError as error:
        raise StageError("the model cannot be lowered", reason="STAGE_ERROR") from error


def with_library(inputs: Mapping[str, Path], params: EchoParams, ctx: Context) -> dict[str, Path]:
    try:
        from slipway_test_library import VERSION
    except ImportError:
        VERSION = ""  # noqa: N806 - as it is called there
    out = ctx.workdir / "out"
    out.mkdir()
    (out / "version").write_text(VERSION)
    ctx.record(version=VERSION)
    return {"out": out}


def environment(inputs: Mapping[str, Path], params: EchoParams, ctx: Context) -> dict[str, Path]:
    out = ctx.workdir / "out"
    out.mkdir()
    (out / "environment.json").write_text(json.dumps(dict(os.environ)))
    return {"out": out}


class TroubleParams(StageParams):
    kind: str
    until: str = ""


def trouble(inputs: Mapping[str, Path], params: TroubleParams, ctx: Context) -> dict[str, Path]:  # noqa: C901
    match params.kind:
        case "segfault":
            print("about to crash", flush=True)
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            blocks = []
            while True:
                blocks.append(bytearray(os.urandom(1 << 20)) * 16)
        case "much-memory":  # slowly up to what it should stay below, and no further
            blocks, block = [], 8 << 20
            while len(blocks) * block < ctx.max_memory_bytes:
                blocks.append(bytearray(os.urandom(1 << 16)) * (block >> 16))
                time.sleep(0.05)
            wait_until(params.until, ctx)
        case "child-memory":
            code = "block = bytearray(b'1') * (200 << 20); input()"
            with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
                wait_until(params.until, ctx)
                child.communicate(b"\n")
        case "short-memory":  # gone again before anybody looks
            time.sleep(0.2)
            bytearray(b"1") * (150 << 20)
        case "torch-memory":
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory")
        case "disk":
            with (ctx.workdir / "fill").open("wb") as file:
                while True:
                    file.write(b"\1" * (1 << 20))
        case "slow-disk":
            with (ctx.workdir / "fill").open("wb", buffering=0) as file:
                while shutil.disk_usage(ctx.workdir).free > 300 << 10:
                    file.write(b"\1" * (8 << 10))
                wait_until(params.until, ctx)
                while file.write(b"\1" * (8 << 10)):
                    pass
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            ctx.progress("hanging", done=1, total=2, unit="steps")
            while True:
                time.sleep(0.1)
        case "orphan":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            os.abort()
        case "typed":
            raise ModelMergeError("tensor 'w' is odd", reason="ADAPTER_TENSOR_UNUSED", about={"tensor": "w"})
        case "untyped":
            raise KeyError("nobody foresaw this")
        case "outside":
            outside = ctx.workdir.parent / "outside"
            outside.mkdir()
            return {"out": outside}
        case "undeclared":
            return {"other": ctx.workdir}
        case "missing-file":
            (ctx.workdir / "nothing.txt").read_text()
    return {"out": ctx.workdir}


def wait_until(path: str, ctx: Context) -> None:
    """Wait for a file, and report progress meanwhile."""
    deadline = time.monotonic() + 120
    while not Path(path).exists() and time.monotonic() < deadline:
        ctx.progress("waiting", done=0)
        time.sleep(0.02)


class KeepingParams(StageParams):
    told: str


def keeping(inputs: Mapping[str, Path], params: KeepingParams, ctx: Context) -> dict[str, Path]:
    """Count the attempts in the kept folder, then do what the file says."""
    assert ctx.kept is not None
    count = ctx.kept / "attempts"
    attempts = int(count.read_text()) + 1 if count.exists() else 1
    count.write_text(str(attempts))
    outputs = trouble(inputs, TroubleParams(kind=Path(params.told).read_text()), ctx)
    ctx.record(attempts=attempts)
    return outputs


def remembering(inputs: Mapping[str, Path], params: EchoParams, ctx: Context) -> dict[str, Path]:
    """Count the runs on this machine in the kept folder."""
    assert ctx.kept is not None
    count = ctx.kept / "runs"
    runs = int(count.read_text()) + 1 if count.exists() else 1
    count.write_text(str(runs))
    ctx.record(runs=runs)
    return echo(inputs, params, ctx)


ECHO = Stage(name="echo", version=1, inputs=("in",), outputs=("out",), params=EchoParams, run=echo)
SPEAK = Stage(name="speak", version=1, inputs=("in",), outputs=("out",), params=EchoParams, run=speak)
SOURCE = Stage(name="source", version=1, inputs=(), outputs=("out",), params=EchoParams, run=echo)
ENVIRONMENT = Stage(name="environment", version=1, inputs=(), outputs=("out",), params=EchoParams, run=environment)
TROUBLE = Stage(name="trouble", version=1, inputs=(), outputs=("out",), params=TroubleParams, run=trouble)
LIBRARY = Stage(
    name="library",
    version=1,
    inputs=(),
    outputs=("out",),
    params=EchoParams,
    run=with_library,
    libraries=("slipway-test-library",),
)
NEEDY, WRAPPING, MISTAKEN = (
    Stage(
        name=run.__name__,
        version=1,
        inputs=(),
        outputs=("out",),
        params=EchoParams,
        run=run,
        libraries=libraries,
    )
    for run, libraries in (
        (needy, ("slipway-no-such-library",)),
        (wrapping, ("slipway-no-such-library",)),
        (needy, ("pydantic",)),
    )
)
KEEPING = Stage(
    name="keeping", version=1, inputs=(), outputs=("out",), params=KeepingParams, run=keeping, keeps=Keeps.PIECES
)
REMEMBERING = Stage(
    name="remembering", version=1, inputs=(), outputs=("out",), params=EchoParams, run=remembering, keeps=Keeps.MEMORY
)
DEVICE = Stage(
    name="device",
    version=1,
    inputs=(),
    outputs=("out",),
    params=EchoParams,
    run=echo,
    hardware=Hardware(device_bound=True),
)
