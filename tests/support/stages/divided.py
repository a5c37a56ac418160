"""A small stage whose work can be divided: each part writes one file, waits for others, fails or dies as its parameters say."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from slipway.errors import StageError
from slipway.model.weights.divided_files import parts_differ_error
from slipway.parts import Part
from slipway.stage import Context, Division, Stage, StageParams

FILES = 4
"""Number of files of the whole output."""


class DividedParams(StageParams):
    """Parameters of the stage.

    Attributes:
        runs: File that gets a line with the number of the part for each run; 0 is the join.
        dies: Part that kills itself in its first run.
        fails: Part that fails as long as the file ``runs`` has the extension ``fails`` beside it.
        together: Parts wait until two of them run.
        holds: Parts wait until they are cancelled.
        differ: The join finds that the parts differ.
    """

    runs: str = ""
    dies: int = 0
    fails: int = 0
    together: bool = False
    holds: bool = False
    differ: bool = False


def _note(params: DividedParams, number: int) -> int:
    """Note a run; return how many of this part there are."""
    with Path(params.runs).open("a+") as file:
        file.write(f"{number}\n")
        file.flush()
        file.seek(0)
        return file.read().split().count(str(number))


def _wait(params: DividedParams, ctx: Context) -> None:
    while params.holds or (params.together and len(set(Path(params.runs).read_text().split())) < 2):
        ctx.progress("waiting", done=0)
        time.sleep(0.02)


def _write(folder: Path, first: int, end: int) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(first, end):
        (folder / f"{number}.weights").write_text(f"weights {number}")
    return folder


def run(_inputs: Mapping[str, Path], params: DividedParams, ctx: Context) -> dict[str, Path]:
    """Make the whole output; its number among the runs is -1."""
    if params.runs:
        _note(params, -1)
    folder = _write(ctx.workdir / "out", 0, FILES)
    (folder / "small").write_text("small")
    return {"out": folder}


def run_part(_inputs: Mapping[str, Path], params: DividedParams, part: Part, ctx: Context) -> Path:
    """Make the files of a part."""
    count = _note(params, part.number)
    _wait(params, ctx)
    if part.number == params.dies and count == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if part.number == params.fails and Path(f"{params.runs}.fails").exists():
        raise StageError("the test says so", reason="NON_FINITE_WEIGHTS")
    folder = _write(ctx.workdir / "part", *(FILES * number // part.of for number in (part.number - 1, part.number)))
    (folder / "small").write_text("small")
    return folder


def join(parts: Mapping[str, Path], params: DividedParams, ctx: Context) -> Path:
    """Join the files, whose digests the test knows, without seeing them."""
    from slipway.artifacts.digests import digest_bytes

    _note(params, 0)
    if params.differ:
        raise parts_differ_error("the test says so")
    folder = ctx.workdir / "out"
    folder.mkdir()
    assert not [path for part in parts.values() for path in part.glob("*.weights")], "they are not fetched"
    shutil.copyfile(next(iter(parts.values())) / "small", folder / "small")
    for number in range(FILES):
        name = next(name for at, name in enumerate(parts, 1) if number < FILES * at // len(parts))
        ctx.adopt(name, f"{number}.weights", digest_bytes(f"weights {number}".encode()))
    ctx.record(joined=len(parts))
    return folder


STAGE = Stage(
    name="divided",
    version=1,
    inputs=("base",),
    outputs=("out",),
    params=DividedParams,
    run=run,
    division=Division(most=lambda _params, _inputs, _size: FILES, run=run_part, join=join, adopts=("*.weights",)),
)
