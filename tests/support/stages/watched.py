"""Small stages for tests: they copy text, count their runs, sleep, fail or crash as their parameters say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from slipway.errors import StageError
from slipway.stage import Context, Stage, StageParams


class TinyParams(StageParams):
    text: str = ""
    runs: str = ""
    sleep_seconds: float = 0.0
    fail: str = ""
    fail_times: int = 0
    kill: bool = False
    engine: str = ""
    unless: str = ""
    logged_bytes: int = 0
    printed_lines: int = 0
    half_a_character: bool = False
    facts: dict[str, Any] = Field(default_factory=dict)


def run(inputs: Mapping[str, Path], params: TinyParams, ctx: Context) -> dict[str, Path]:
    count = 1
    if params.runs:
        with Path(params.runs).open("a+") as file:
            file.write(f"{params.text}\n")
            file.seek(0)
            count = sum(line.strip() == params.text for line in file)
    ctx.log.info(f"run {count} of {params.text}")
    if params.logged_bytes:
        ctx.log.info(f"long{'g' * params.logged_bytes}")
    for number in range(params.printed_lines):
        print(number, "p" * 60_000, flush=True)
    if params.half_a_character:  # as names of files and escapes in JSON may have it
        ctx.progress("half \ud83d", done=0, unit="\ud83d")
        ctx.log.warning("half \ud83d")
        raise StageError("half \ud83d", reason="UNSUPPORTED", about={"value": "\ud83d"})
    deadline = time.monotonic() + params.sleep_seconds
    while time.monotonic() < deadline and not (params.unless and Path(params.unless).exists()):
        ctx.progress("sleeping", done=0, total=1, unit="naps")
        time.sleep(0.05)
    if params.fail and (not params.fail_times or count <= params.fail_times):
        raise StageError(f"{params.text} fails", reason=params.fail, about={"engine": params.engine})
    if params.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    target = ctx.workdir / "out"
    target.mkdir()
    joined = "+".join(
        (folder / "text").read_text() for _, folder in sorted(inputs.items()) if (folder / "text").exists()
    )
    (target / "text").write_text(f"{params.text}({joined})")
    ctx.record(count=count, **params.facts)
    return {"out": target}


def _stage(name: str, **more: Any) -> Stage[TinyParams]:
    return Stage(
        name=name, version=1, inputs=(), outputs=("out",), params=TinyParams, run=run, more_inputs=True, **more
    )


STAGE = _stage("tiny")
